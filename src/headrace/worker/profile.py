"""Measures this machine's limits: what a step is divided by.

What lives here: which device is measured, in full (``headrace doctor --profile``) or at a glance (when an engine starts
on a device that was never measured); timed reads, copies and GEMMs on the CPU; the recorder that holds each
step against these limits. What may not: measuring a CUDA card (card.py), storing and finding profiles
(cost/profile.py), the arithmetic (cost/), recording (observe/metrics.py).
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from headrace.config import Decision, DeviceConfig
from headrace.cost.calibrated import SHIPPED, best_calibrated, find_calibrated, price_of
from headrace.cost.cards import card_named
from headrace.cost.cost_model import CostModel, StepLoad
from headrace.cost.profile import (
    DeviceIdentity,
    DeviceProfile,
    Limits,
    check_quiet,
    cpu_identity,
    find_profile,
    last_level_cache_bytes,
    profile_folder,
    said_bandwidth,
    said_rate,
)
from headrace.engine.executor import ExecutorInfo
from headrace.errors import ConfigError
from headrace.kernels.linear.native import product_of_many_rows
from headrace.models import families
from headrace.observe.metrics import StepRecorder
from headrace.parallel.placement import held_experts
from headrace.parallel.shares import share, share_experts
from headrace.portability import system_text
from headrace.sites import count_bytes
from headrace.spec import ELEMENT_BYTES, DecoderSpec
from headrace.worker.card import GLANCE_BYTES, Measurement, card_identity, card_limits, glance_at_card, measure_card
from headrace.worker.energy import create_energy_meter

_log = logging.getLogger(__name__)

FULL_ROUNDS = 9
GLANCE_ROUNDS = 2
GLANCE_RATE = 3e9  # FLOP/s, below which a small GEMM says it all
ROUND_SECONDS = 0.25  # a round repeats its operation for about this long
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
MIN_WORKING_SET = 256 * 2**20  # bytes
MAX_WORKING_SET = 2 * 2**30
NOTED_SHARE = 0.1
GLANCE_WORKING_SET = 128 * 2**20


class OtherProcesses:
    """What other processes take of the CPUs from here on; a steady neighbour lowers every round alike, so rounds do not
    show it."""

    def __init__(self) -> None:
        self._begin = self._now()

    def share(self) -> float:
        """0 … 1; 0 where the system does not tell."""
        (total, busy, own), (total_now, busy_now, own_now) = self._begin, self._now()
        return max(0.0, ((busy_now - busy) - (own_now - own)) / (total_now - total)) if total_now > total else 0.0

    def _now(self) -> tuple[float, float, float]:
        """CPU seconds since the machine started (all, not idle), and of this process."""
        ticks = [int(word) for word in system_text("/proc/stat").split("\n", 1)[0].split()[1:9]]
        if not ticks:
            return 0.0, 0.0, 0.0
        second, times = os.sysconf("SC_CLK_TCK"), os.times()
        return sum(ticks) / second, (sum(ticks) - ticks[3] - ticks[4]) / second, times.user + times.system


def measure_profile(say: Callable[[str], None] = lambda line: None, device: str = "cpu") -> DeviceProfile:
    """The profile of the CPU (with the threads torch now uses) or of the card, in under a minute. Raises ConfigError
    when it was not quiet.

    The sustained read bandwidth (median of rounds) is stored; it is refused when below 0.9 of the best plain read.
    """
    found = _measure_cpu() if device == "cpu" else measure_card()
    best = max(found.reads)
    say(f"{found.limits} over {found.working_set / 2**30:.1f} GiB; best read {said_bandwidth(best)}")
    check_quiet(found.limits.read_bandwidth, best)
    for note in found.notes:
        say(note)
    return _profile(
        "measured", found.limits, device, found.working_set, spread=(best - min(found.reads)) / best, **found.more
    )


def _measure_cpu() -> Measurement:
    size = min(max(8 * last_level_cache_bytes(), MIN_WORKING_SET), MAX_WORKING_SET)
    data = torch.full((size // 4,), 1.5)
    target = torch.empty_like(data)
    others = OtherProcesses()
    reads, copies = [], []
    for _ in range(FULL_ROUNDS):  # in turn, so that a disturbance meets both
        reads.append(size / _seconds_per_call(lambda: data.sum(), ROUND_SECONDS))
        copies.append(2 * size / _seconds_per_call(lambda: target.copy_(data), ROUND_SECONDS))
    rates = {name: median(_gemm_rates(dtype, 2048, FULL_ROUNDS, ROUND_SECONDS)) for name, dtype in DTYPES.items()}
    share, notes = others.share(), list[str]()
    if share > NOTED_SHARE:
        used = f"other processes used {share:.0%} of the CPUs meanwhile"
        notes.append(f"note: {used}; these limits may be too low, so measure again on a quiet machine")
    more = {"launch_overhead": _launch_seconds(), "others_share": share}
    return Measurement(Limits(median(reads), median(copies), rates), reads, size, more, notes)


def limits_now(device: str = "cpu") -> Limits:
    """The limits of this moment, which a benchmark prints beside its figures: the CPU's in 0.2 s, the card's in about
    three."""
    return glance_limits() if device == "cpu" else card_limits()


def glance_limits() -> Limits:
    """The CPU's limits in about 0.2 s; a CPU that was never measured starts with them."""
    data = torch.full((GLANCE_WORKING_SET // 4,), 1.5)
    read = GLANCE_WORKING_SET / min(_calls(lambda: data.sum(), GLANCE_ROUNDS))
    half = data.numel() // 2
    copied = data[:half]
    copy = GLANCE_WORKING_SET / min(_calls(lambda: data[half : 2 * half].copy_(copied), GLANCE_ROUNDS))
    return Limits(read, copy, {name: _glance_at_gemm(dtype) for name, dtype in DTYPES.items()})


def _glance_at_gemm(dtype: torch.dtype) -> float:
    """FLOP/s. A slow CPU takes seconds for a large GEMM, and its rate is that of a small one."""
    rate = max(_gemm_rates(dtype, 192, GLANCE_ROUNDS, 0.0))
    return rate if rate < GLANCE_RATE else max(_gemm_rates(dtype, 768, GLANCE_ROUNDS, 0.0))


def estimate_profile(device: str = "cpu") -> DeviceProfile:
    """Roughly, without disturbing an engine that has already taken its memory. Raises ConfigError when there is no room
    even for that."""
    if device == "cpu":
        return _profile("estimated", glance_limits(), device, GLANCE_WORKING_SET, launch_overhead=_launch_seconds())
    return _profile("estimated", glance_at_card(), device, GLANCE_BYTES)


def resolve_profile(device: str = "cpu", *, shared: bool = False) -> tuple[DeviceProfile | None, Decision]:
    """The stored profile of this device, or an estimate, or none; and which it is. Called with torch's threads already
    set, best while a start has to wait for something else: a glance at a card that was never measured borrows a GiB of
    it, and gives it back. Of a card that is ``shared`` with other processes its kind's is taken, if that is known."""
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
    if shared and device != "cpu" and (card := card_named(identity.name)) is not None:
        known = replace(card.profile, identity=identity)
        return known, Decision("device profile", _said(known), "that of its kind: others compute on this card")
    try:
        profile = estimate_profile(device)
    except ConfigError as error:
        return None, Decision("device profile", "unknown", f"steps are timed without a limit: {error.message}")
    return profile, Decision("device profile", _said(profile), f"estimated at start, roughly: {problem}")


def _said(profile: DeviceProfile) -> str:
    return f"{said_bandwidth(profile.read_bandwidth)}, {said_rate(profile.gemm_rate('bfloat16'))} bfloat16"


def _profile(source: str, limits: Limits, device: str, size: int, **more: Any) -> DeviceProfile:
    return DeviceProfile(
        identity=identity_here(device),
        read_bandwidth=limits.read_bandwidth,
        copy_bandwidth=limits.copy_bandwidth,
        gemm_rates=limits.gemm_rates,
        working_set=size,
        source=source,
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        versions={"torch": torch.__version__},
        **more,
    )


def identity_here(device: str = "cpu") -> DeviceIdentity:
    """Of the CPU with the threads torch now uses, or of the card."""
    return cpu_identity(torch.get_num_threads()) if device == "cpu" else card_identity()


def _gemm_rates(dtype: torch.dtype, size: int, rounds: int, seconds: float) -> list[float]:
    """FLOP/s of [size, size] x [size, size] GEMMs, one figure a round."""
    left, right = _random(size, dtype), _random(size, dtype)
    multiply = partial(product_of_many_rows(right), left)
    multiply()  # the first call compiles or packs
    return [2.0 * size**3 / _seconds_per_call(multiply, seconds) for _ in range(rounds)]


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


# --- each step against these limits


def create_recorder(
    model_config: Mapping[str, Any],
    info: ExecutorInfo,
    limits: tuple[DeviceProfile | None, Decision],
    *,
    device: str,
    dtype: str,
    promise: float | None = None,
    switches: Mapping[str, Any] | None = None,
    ranks: DeviceConfig | None = None,
) -> tuple[StepRecorder, Decision]:
    """``limits``: of the ``device`` ("cpu" or "cuda"), as ``resolve_profile`` has them. ``dtype`` is the one weights
    are held in; ``promise``: seconds a step may take (--max-step-ms); ``switches``: as run_facts.py has them;
    ``ranks``: of which the device is the first."""
    profile, decision = limits
    ranks = ranks or DeviceConfig()
    size = ranks.tensor_parallel_size
    energy = create_energy_meter(device, size // ranks.ranks_per_device).read
    if profile is None:
        return StepRecorder(promise=promise, energy=energy), decision
    groups = [group.spec for group in info.kv_groups]
    whole = families.spec_from_config(model_config)
    experts = held_experts(whole, ranks, 0)
    spec = share_experts(whole, experts) if ranks.expert_failover and experts else share(whole, size, experts)
    cost_model = CostModel(spec, groups, profile, weight_bytes=_bytes_a_weight(spec, info, dtype), dtype=dtype)
    # what prices were fitted with
    plain = CostModel(spec, groups, profile, weight_bytes=ELEMENT_BYTES[dtype], dtype=dtype)
    return StepRecorder(
        cost_model, promise=promise, calibrated=find_price(plain, switches or {}), energy=energy
    ), decision


def _bytes_a_weight(spec: DecoderSpec, info: ExecutorInfo, dtype: str) -> float:
    """Less than its type has where the engine holds less than the spec says."""
    return ELEMENT_BYTES[dtype] * min(info.memory["weights"] / count_bytes(spec, ELEMENT_BYTES[dtype]), 1.0)


def find_price(
    cost_model: CostModel, switches: Mapping[str, Any], folders: Sequence[Path] = ()
) -> Callable[[StepLoad, bool], float] | None:
    """What was calibrated on this device for this very model, precision and these switches; files that cannot be read
    are passed over, with a word: an engine starts without them."""
    try:
        found = find_calibrated(cost_model.profile.identity, folders or (profile_folder(), SHIPPED))
    except ConfigError as error:
        _log.warning("%s", error)
        return None
    best, other = best_calibrated(found, cost_model.spec, cost_model.dtype, switches)
    return price_of(best, cost_model) if best is not None and not other else None
