"""Measures this machine's limits: what a step is divided by.

What lives here: timed reads, copies and matrix products on the CPU, in full (``headrace doctor --profile``) and at a glance
(when an engine starts on a device that was never measured). What may not: storing and finding profiles (cost/profile.py).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from headrace.config import Decision
from headrace.cost.profile import DeviceIdentity, DeviceProfile, check_quiet, cpu_identity, find_profile, last_level_cache_bytes
from headrace.errors import ConfigError

FULL_ROUNDS = 9
GLANCE_ROUNDS = 2
ROUND_SECONDS = 0.25  # a round repeats its operation for about this long
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
MIN_WORKING_SET = 256 * 2**20  # bytes
MAX_WORKING_SET = 2 * 2**30
NOTED_SHARE = 0.1
GLANCE_WORKING_SET = 128 * 2**20


@dataclass(frozen=True, slots=True)
class Limits:
    """Bandwidths in bytes/s and GEMM rates in FLOP/s as one run saw them; printed with every table of a benchmark."""

    read_bandwidth: float
    copy_bandwidth: float
    gemm_rates: dict[str, float]

    def __str__(self) -> str:
        rates = ", ".join(f"{rate / 1e9:,.0f} GFLOP/s {dtype}" for dtype, rate in self.gemm_rates.items())
        return f"read {self.read_bandwidth / 1e9:.1f} GB/s, copy {self.copy_bandwidth / 1e9:.1f} GB/s, {rates}"


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


def measure_profile(say: Callable[[str], None] = lambda line: None) -> DeviceProfile:
    """The CPU's profile with the threads torch now uses, in under a minute. Raises ConfigError when the machine was not quiet.

    The sustained read bandwidth (median of rounds) is stored; it is refused when below 0.9 of the best plain read.
    """
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
    return replace(_profile("measured", limits, size=size), spread=spread, others_share=share)


def glance_limits() -> Limits:
    """The same limits in about 0.2 s: a benchmark prints them beside its figures, an unmeasured device starts with them."""
    data = torch.full((GLANCE_WORKING_SET // 4,), 1.5)
    read = GLANCE_WORKING_SET / min(_calls(lambda: data.sum(), GLANCE_ROUNDS))
    half = data.numel() // 2
    copied = data[:half]
    copy = GLANCE_WORKING_SET / min(_calls(lambda: data[half : 2 * half].copy_(copied), GLANCE_ROUNDS))
    rates = {name: max(_gemm_rates(dtype, 768, GLANCE_ROUNDS, 0.0)) for name, dtype in DTYPES.items()}
    return Limits(read, copy, rates)


def estimate_profile() -> DeviceProfile:
    return _profile("estimated", glance_limits(), size=GLANCE_WORKING_SET)


def resolve_profile(device: str = "cpu") -> tuple[DeviceProfile | None, Decision]:
    """The stored profile of this device, or an estimate; and which of the two it is. Called with torch's threads already set."""
    if device != "cpu":
        return None, Decision("device profile", "unknown", f"only CPUs are measured so far, not {device}; steps are timed without a limit")
    identity = cpu_identity(torch.get_num_threads())
    try:
        stored = find_profile(identity)
    except ConfigError as error:
        stored, problem = None, error.message
    else:
        problem = "this device was never measured; headrace doctor --profile does it in under a minute"
    if stored is not None:
        return stored, Decision("device profile", _said(stored), f"measured {stored.date} with {identity.threads} threads")
    profile = estimate_profile()
    return profile, Decision("device profile", _said(profile), f"estimated at start, roughly: {problem}")


def _said(profile: DeviceProfile) -> str:
    rate = profile.gemm_rate("bfloat16")
    return f"{profile.read_bandwidth / 1e9:.1f} GB/s, {rate / 1e9:,.0f} GFLOP/s bfloat16"


def _profile(source: str, limits: Limits, *, size: int) -> DeviceProfile:
    return DeviceProfile(
        identity=identity_here(),
        read_bandwidth=limits.read_bandwidth,
        copy_bandwidth=limits.copy_bandwidth,
        gemm_rates=limits.gemm_rates,
        launch_overhead=_launch_seconds(),
        working_set=size,
        source=source,
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        versions={"torch": torch.__version__},
    )


def identity_here() -> DeviceIdentity:
    return cpu_identity(torch.get_num_threads())


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
