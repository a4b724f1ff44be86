"""What a model's dimensions cost on this device: each suspected one, timed next to a better one in the same run.

What lives here: timing, how long it would take, the findings as text. What may not: the rules (cost/shapes.py),
kernels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from statistics import median

import torch

from headrace.bench.kernel_cases import MANY_ROWS, CaseMaker, KernelCase
from headrace.bench.kernels import cache_bytes, time_calls
from headrace.cost.profile import Limits
from headrace.cost.shapes import Heads, Product, Suspect, Target, suspects
from headrace.kernels import DECLARED, Kernels
from headrace.kernels.operations import OPERATIONS
from headrace.spec import DecoderSpec

BUDGET = 20.0  # s; what takes longer is measured on request alone
SECONDS_EACH = {"cuda": 0.02, "cpu": 0.3}
CALLS_EACH = 7  # at least: a first one, and one in each round
FEW, MANY = {"cuda": 16, "cpu": 4}, {"cuda": 2048, "cpu": 256}  # tokens of a decode step and of a prompt's
CONTEXT = {"cuda": 2048, "cpu": 512}
MAKING = {"cuda": 2e11, "cpu": 3e8}  # bytes of random weights a second, about
WORTH = 0.03  # of the work's time; less is within what two runs differ by


@dataclass(frozen=True, slots=True)
class Finding:
    """What one dimension costs at this many tokens; seconds are per call. ``share``: how much of the time the better
    shape would save for the same work; ``step``: seconds of a whole step. None if nothing was measured."""

    dimension: str
    why: str
    remedy: str
    tokens: int | None = None
    seconds: float | None = None
    better: str | None = None
    better_seconds: float | None = None
    share: float | None = None
    step: float | None = None

    @property
    def cost(self) -> str:
        if self.share is None or self.step is None or self.seconds is None:
            return "not measured"
        if self.share < WORTH:
            return "nothing"
        return f"{self.share:.0%} of {self.seconds * 1e3:.3g} ms, {self.step * 1e3:.3g} ms of a step"


@dataclass(frozen=True, slots=True)
class ShapeBench:
    """One model on one device, in one precision."""

    spec: DecoderSpec
    dtype: torch.dtype
    device: torch.device
    tokens_a_step: int

    @property
    def target(self) -> Target:
        kind = self.device.type
        processors = (
            torch.cuda.get_device_properties(self.device).multi_processor_count
            if kind == "cuda"
            else torch.get_num_threads()
        )
        return Target(kind, processors, FEW[kind], max(MANY_ROWS + 1, min(MANY[kind], self.tokens_a_step)))


def expected_seconds(bench: ShapeBench, found: Sequence[Suspect], limits: Limits) -> float:
    """About how long measuring would take."""
    return sum(
        _one_measurement(bench, work, tokens, limits)
        for each in found
        for work, tokens in product((each.work, each.better), each.tokens)
        if work is not None
    )


def _one_measurement(bench: ShapeBench, work: Product | Heads, tokens: int, limits: Limits) -> float:
    kind, rate = bench.device.type, min(limits.gemm_rates.values())
    if isinstance(work, Product):
        made, flops = work.ins * work.outs * bench.dtype.itemsize, 2.0 * tokens * work.ins * work.outs
    else:
        keys = CONTEXT[kind] * (tokens if tokens <= MANY_ROWS else 1)
        made = 2 * keys * work.kv_heads * work.dim * bench.dtype.itemsize
        flops = 4.0 * tokens * CONTEXT[kind] * work.heads * work.dim
    call = max(made / limits.read_bandwidth, flops / rate)
    return made / MAKING[kind] + max(SECONDS_EACH[kind], CALLS_EACH * call)


def advise(bench: ShapeBench, limits: Limits, *, thorough: bool = False) -> tuple[list[Finding], float]:
    """The findings, and how long measuring would take if that is too long to do unasked (otherwise 0)."""
    found = list(suspects(bench.spec, bench.target))
    needed = expected_seconds(bench, found, limits)
    if needed > BUDGET and not thorough:
        return [Finding(each.dimension, each.why, each.remedy) for each in found], needed
    with torch.inference_mode(), bench.device:
        return [finding for each in found for finding in _measured(bench, each)], 0.0


def _measured(bench: ShapeBench, suspect: Suspect) -> Iterator[Finding]:
    plain = Finding(suspect.dimension, suspect.why, suspect.remedy)
    if suspect.work is None or suspect.better is None:
        yield plain
        return
    for tokens in suspect.tokens:
        seconds, other = (_time(bench, work, tokens) for work in (suspect.work, suspect.better))
        fair = other / suspect.ratio  # the better shape does more work, or less
        step = (seconds - fair) * suspect.work.layers
        yield replace(
            plain,
            tokens=tokens,
            seconds=seconds,
            better=suspect.better.size,
            better_seconds=other,
            share=1.0 - fair / seconds,
            step=step,
        )


def _time(bench: ShapeBench, work: Product | Heads, tokens: int) -> float:
    """Seconds per call of the kernel that the engine would choose."""
    case = _case(bench, work, tokens)
    kernel = Kernels(bench.device, techniques=DECLARED | {"cuda_prefill"}).choose(OPERATIONS[case.op], case.facts)
    return median(time_calls(case.calls(kernel), SECONDS_EACH[bench.device.type], bench.device))


def _case(bench: ShapeBench, work: Product | Heads, tokens: int) -> KernelCase:
    spec = bench.spec
    if isinstance(work, Heads):
        spec = replace(spec, num_heads=work.heads, num_kv_heads=work.kv_heads, head_dim=work.dim)
    maker = CaseMaker(spec, bench.dtype, CONTEXT[bench.device.type], 4 * cache_bytes(bench.device), bench.device)
    if isinstance(work, Heads):
        return next(maker.cases("paged_attention", tokens))
    return maker.linear(work.name, tokens, work.outs, work.ins)
