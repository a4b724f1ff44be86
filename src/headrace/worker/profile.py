"""Measures this machine's limits: what a step is divided by.

What lives here: which device is measured, in full (``headrace doctor --profile``) or at a glance (when an engine starts on a device
that was never measured); timed reads, copies and matrix products on the CPU. What may not: measuring a CUDA card (card.py), storing
and finding profiles (cost/profile.py).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from headrace.config import Decision
from headrace.cost.profile import (
    DeviceIdentity,
    DeviceProfile,
    Limits,
    check_quiet,
    cpu_identity,
    find_profile,
    last_level_cache_bytes,
    said_bandwidth,
    said_rate,
)
from headrace.errors import ConfigError
from headrace.worker.card import GLANCE_BYTES, card_identity, card_limits, glance_at_card, measure_card

FULL_ROUNDS = 9
GLANCE_ROUNDS = 2
ROUND_SECONDS = 0.25  # a round repeats its operation for about this long
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
MIN_WORKING_SET = 256 * 2**20  # bytes
MAX_WORKING_SET = 2 * 2**30
NOTED_SHARE = 0.1
NOTED_BYTES = 2 * 2**30
GLANCE_WORKING_SET = 128 * 2**20


class OtherProcesses:
    """What other processes take of the CPUs from here on; a steady neighbour lowers every round alike, so rounds do not show it."""

    def __init__(self) -> None:
        self._begin = self._now()

    def share(self) -> float:
        """0 … 1; 0 where the system does not tell."""
        (total, busy, own), (total_now, busy_now, own_now) = self._begin, self._now()
        return max(0.0, ((busy_now - busy) - (own_now - own)) / (total_now - total)) if total_now > total else 0.0

    def _now(self) -> tuple[float, float, float]:
        """CPU seconds since the machine started (all, not idle), and of this process."""
        try:
            ticks = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        except OSError:
            return 0.0, 0.0, 0.0
        second, times = os.sysconf("SC_CLK_TCK"), os.times()
        return sum(ticks) / second, (sum(ticks) - ticks[3] - ticks[4]) / second, times.user + times.system


def measure_profile(say: Callable[[str], None] = lambda line: None, device: str = "cpu") -> DeviceProfile:
    """The profile of the CPU (with the threads torch now uses) or of the card, in under a minute. Raises ConfigError when it was not quiet.

    The sustained read bandwidth (median of rounds) is stored; it is refused when below 0.9 of the best plain read.
    """
    return _measure_cpu(say) if device == "cpu" else _measure_card(say)


def _measure_card(say: Callable[[str], None]) -> DeviceProfile:
    found = measure_card()
    limits, launch = found.limits, found.launch
    say(f"{limits} over {found.working_set / 2**30:.1f} GiB; best read {said_bandwidth(max(found.reads))}")
    check_quiet(limits.read_bandwidth, max(found.reads))
    say(f"bfloat16 products held for a second: {said_rate(found.sustained_gemm_rate)}")
    in_graph = f"{launch.in_graph * 1e6:.2f} µs in a graph, of it {launch.gap * 1e6:.2f} µs between two"
    say(f"a small kernel: {launch.plain * 1e6:.1f} µs to launch, {in_graph}")
    if found.taken_by_others > NOTED_BYTES:
        say(f"note: {found.taken_by_others / 2**30:.1f} GiB of the card are not this process's; if others compute there, measure again without them")
    return replace(
        _profile("measured", limits, identity=card_identity(), size=found.working_set),
        sustained_gemm_rates={"bfloat16": found.sustained_gemm_rate},
        launch_overhead=launch.plain,
        graph_kernel=launch.in_graph,
        graph_gap=launch.gap,
        spread=(max(found.reads) - min(found.reads)) / max(found.reads),
    )


def _measure_cpu(say: Callable[[str], None]) -> DeviceProfile:
    size = min(max(8 * last_level_cache_bytes(), MIN_WORKING_SET), MAX_WORKING_SET)
    data = torch.full((size // 4,), 1.5)
    target = torch.empty_like(data)
    others = OtherProcesses()
    reads, copies = [], []
    for _ in range(FULL_ROUNDS):  # in turn, so that a disturbance meets both
        reads.append(size / _seconds_per_call(lambda: data.sum(), ROUND_SECONDS))
        copies.append(2 * size / _seconds_per_call(lambda: target.copy_(data), ROUND_SECONDS))
    say(f"read {median(reads) / 1e9:.1f} GB/s (best {max(reads) / 1e9:.1f}), copy {median(copies) / 1e9:.1f} GB/s over {size / 2**20:.0f} MiB")
    check_quiet(median(reads), max(reads))
    rates = {name: median(_gemm_rates(dtype, 2048, FULL_ROUNDS, ROUND_SECONDS)) for name, dtype in DTYPES.items()}
    say(", ".join(f"{name} {rate / 1e9:,.0f} GFLOP/s" for name, rate in rates.items()))
    spread, share = (max(reads) - min(reads)) / max(reads), others.share()
    if share > NOTED_SHARE:
        say(f"note: other processes used {share:.0%} of the CPUs meanwhile; these limits may be too low, so measure again on a quiet machine")
    limits = Limits(median(reads), median(copies), rates)
    profile = _profile("measured", limits, identity=identity_here(), size=size)
    return replace(profile, launch_overhead=_launch_seconds(), spread=spread, others_share=share)


def limits_now(device: str = "cpu") -> Limits:
    """The limits of this moment, which a benchmark prints beside its figures: the CPU's in 0.2 s, the card's in about three."""
    return glance_limits() if device == "cpu" else card_limits()


def glance_limits() -> Limits:
    """The CPU's limits in about 0.2 s; a CPU that was never measured starts with them."""
    data = torch.full((GLANCE_WORKING_SET // 4,), 1.5)
    read = GLANCE_WORKING_SET / min(_calls(lambda: data.sum(), GLANCE_ROUNDS))
    half = data.numel() // 2
    copied = data[:half]
    copy = GLANCE_WORKING_SET / min(_calls(lambda: data[half : 2 * half].copy_(copied), GLANCE_ROUNDS))
    rates = {name: max(_gemm_rates(dtype, 768, GLANCE_ROUNDS, 0.0)) for name, dtype in DTYPES.items()}
    return Limits(read, copy, rates)


def estimate_profile(device: str = "cpu") -> DeviceProfile:
    """Roughly, without disturbing an engine that has already taken its memory. Raises ConfigError when there is no room even for that."""
    if device == "cpu":
        return replace(_profile("estimated", glance_limits(), identity=identity_here(), size=GLANCE_WORKING_SET), launch_overhead=_launch_seconds())
    return _profile("estimated", glance_at_card(), identity=card_identity(), size=GLANCE_BYTES)


def resolve_profile(device: str = "cpu") -> tuple[DeviceProfile | None, Decision]:
    """The stored profile of this device, or an estimate, or none; and which it is. Called with torch's threads already set."""
    identity = identity_here(device)
    try:
        stored = find_profile(identity)
    except ConfigError as error:
        stored, problem = None, error.message
    else:
        problem = "this device was never measured; headrace doctor --profile does it in under a minute"
    if stored is not None:
        threads = f" with {identity.threads} threads" if device == "cpu" else ""
        return stored, Decision("device profile", _said(stored), f"measured {stored.date}{threads}")
    try:
        profile = estimate_profile(device)
    except ConfigError as error:
        return None, Decision("device profile", "unknown", f"steps are timed without a limit: {error.message}")
    return profile, Decision("device profile", _said(profile), f"estimated at start, roughly: {problem}")


def _said(profile: DeviceProfile) -> str:
    return f"{said_bandwidth(profile.read_bandwidth)}, {said_rate(profile.gemm_rate('bfloat16'))} bfloat16"


def _profile(source: str, limits: Limits, *, identity: DeviceIdentity, size: int) -> DeviceProfile:
    return DeviceProfile(
        identity=identity,
        read_bandwidth=limits.read_bandwidth,
        copy_bandwidth=limits.copy_bandwidth,
        gemm_rates=limits.gemm_rates,
        working_set=size,
        source=source,
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        versions={"torch": torch.__version__},
    )


def identity_here(device: str = "cpu") -> DeviceIdentity:
    """Of the CPU with the threads torch now uses, or of the card."""
    return cpu_identity(torch.get_num_threads()) if device == "cpu" else card_identity()


def _gemm_rates(dtype: torch.dtype, size: int, rounds: int, seconds: float) -> list[float]:
    """FLOP/s of [size, size] x [size, size] products, one figure a round."""
    left, right = _random(size, dtype), _random(size, dtype)
    multiply = _packed_product(left, right) if dtype is torch.bfloat16 else (lambda: left @ right)
    multiply()  # the first call compiles or packs
    return [2.0 * size**3 / _seconds_per_call(multiply, seconds) for _ in range(rounds)]


def _packed_product(left: Tensor, weight: Tensor) -> Callable[[], Tensor]:
    """The product as linear layers do it, with the weight packed once where torch was built with that."""
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return lambda: left @ weight
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, left.shape[0])
    except RuntimeError:  # this CPU has no bf16 kernels: the plain product is what runs
        return lambda: left @ weight
    return lambda: torch.ops.mkldnn._linear_pointwise(left, packed, None, "none", [], "")


def _random(size: int, dtype: torch.dtype) -> Tensor:
    return torch.rand(size, size, generator=torch.Generator().manual_seed(0)).to(dtype)


def _launch_seconds() -> float:
    """What one small operator costs beside its work."""
    x = torch.ones(16)
    return _seconds_per_call(lambda: x.add_(0.0), 0.01)


def _seconds_per_call(call: Callable[[], object], seconds: float) -> float:
    """Mean over as many calls as fit into ``seconds``, at least one."""
    begin, calls = time.perf_counter(), 0
    while True:
        call()
        calls += 1
        elapsed = time.perf_counter() - begin
        if elapsed >= seconds:
            return elapsed / calls


def _calls(call: Callable[[], object], count: int) -> Iterator[float]:
    call()
    for _ in range(count):
        yield _seconds_per_call(call, 0.0)
