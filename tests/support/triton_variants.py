"""Which variants of the Triton kernels random batches of a model need, on a machine without a GPU. Run as a program, in
a process of its own.

What lives here: batches, and the launches they make, told apart as the compiler would. What may not: compiling
(triton_offline.py), judgement.

``python triton_variants.py`` prints a JSON object: for each kernel how many variants, and how many of those no
warm-up has made.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from triton.runtime import driver

from headrace.kernels.candidate import CallSite, Sizes
from headrace.kernels.moe import triton_few as moe_few
from headrace.kernels.moe import triton_moe as moe
from headrace.kernels.moe.candidates import experts as warm_up_experts
from headrace.kernels.sampling import triton_pick as sampling
from headrace.kernels.sampling import triton_thresholds as thresholds
from headrace.kernels.sampling.candidates import picks as warm_up_picks
from headrace.layers.moe import places_of
from headrace.spec import Activation, DecoderSpec, Held, LayerSpec, MoESpec
from tests.support.kernel_cases import called
from tests.support.triton_offline import CompileOnly, Keys

EXPERTS = MoESpec(num_experts=8, top_k=2, intermediate_size=64, renormalize=True)
SPEC = DecoderSpec("tests", 3000, 128, 4, 2, 64, 256, (LayerSpec(moe=EXPERTS),), 4096, None)
SIZES = Sizes(SPEC, torch.bfloat16, 16, 4096, 256, 4096)
BATCHES = 60


@contextmanager
def launches(kernels: dict[str, Any]) -> Iterator[dict[str, Keys]]:
    """What is launched meanwhile of the kernels by name, each in its module."""
    keys = {name: Keys(getattr(module, name)) for name, module in kernels.items()}
    for name, module in kernels.items():
        setattr(module, name, keys[name])
    try:
        yield keys
    finally:
        for name, module in kernels.items():
            setattr(module, name, keys[name].kernel)


def count(
    kernels: dict[str, Any], warm_up: Callable[[], None], batch: Callable[[random.Random], None]
) -> dict[str, dict[str, int]]:
    with launches(kernels) as keys:
        warm_up()
        warmed_up = {name: set(each.seen) for name, each in keys.items()}
        for seed in range(BATCHES):
            batch(random.Random(seed))
    return {name: {"variants": len(each.seen), "new": len(each.seen - warmed_up[name])} for name, each in keys.items()}


def warm_up(
    op: str, run: Callable[..., Any], calls: Callable[..., Any], dtype: torch.dtype, sizes: Sizes = SIZES, **facts: Any
) -> None:
    for _, call in calls(CallSite(op, torch.device("cpu"), called(op, dtype=dtype, **facts)[1]), run, sizes):
        call()


def experts(*, batch_invariant: bool, held: tuple[Held, ...] | None = None) -> dict[str, dict[str, int]]:
    """``held``: of a rank that has some of them whole, and copies."""
    run, spec = moe.Moe(batch_invariant, True), replace(EXPERTS, held=held)
    sizes, count_held = replace(SIZES, spec=replace(SPEC, layers=(LayerSpec(moe=spec),))), len(spec.experts)
    gate_up, down = (torch.empty(count_held, *shape, dtype=torch.bfloat16) for shape in ((128, 128), (128, 64)))
    places = places_of(spec, torch.device("cpu"))
    facts = {} if held is None else {"num_experts": 8, "top_k": 2, "held": count_held}

    def batch(draw: random.Random) -> None:
        tokens = draw.choice((1, 2, 3, draw.randint(1, 16), draw.randint(1, 300), draw.randint(1, 4096)))
        x, router = torch.empty(tokens, 128, dtype=torch.bfloat16), torch.empty(tokens, 8, dtype=torch.bfloat16)
        run(x, router, gate_up, down, EXPERTS.top_k, EXPERTS.renormalize, Activation.SILU, places)

    kernels = {name: moe for name in ("_route_kernel", "_expand_kernel", "_contract_kernel", "_combine_kernel")}
    few = {name: moe_few for name in ("_expand_few_kernel", "_contract_few_kernel")}
    warmed_up = partial(warm_up, "moe", run, warm_up_experts, torch.bfloat16, sizes, **facts)
    return count(kernels | few, warmed_up, batch)


def picks() -> dict[str, dict[str, int]]:
    """Rows of logits, in float32; the best of them also as the head gives them."""
    ops: dict[str, Callable[..., Any]] = {
        "greedy_tokens": sampling.greedy_tokens,
        "pick_tokens": sampling.pick_tokens,
        "score_tokens": sampling.score_tokens,
    }

    def warm_up_all() -> None:
        for op, run in ops.items():
            warm_up(op, run, warm_up_picks, torch.float32)

    def batch(draw: random.Random) -> None:
        rows = draw.choice((1, 2, draw.randint(1, 16), draw.randint(1, 256)))
        logits, row, whole = torch.zeros(rows, 3000), torch.zeros(rows), torch.zeros(rows, dtype=torch.int64)
        sampling.greedy_tokens(logits)
        sampling.pick_tokens(logits, row, row, draw.choice((None, (whole, row, row))), whole, whole)
        sampling.score_tokens(logits, whole, 0)

    own = ("_largest_kernel", "_pick_kernel", "_best_kernel", "_score_kernel")
    kernels = {**dict.fromkeys(own, sampling), "_threshold_kernel": thresholds}
    return count(kernels, warm_up_all, batch)


def main() -> None:
    driver.set_active(CompileOnly())
    found = {
        "experts": experts(batch_invariant=False),
        "experts to the bit": experts(batch_invariant=True),
        "experts of a rank": experts(batch_invariant=False, held=(Held(1), Held(2, 1, 2), Held(5), Held(7))),
        "picks": picks(),
    }
    json.dump({f"{case}: {kernel}": row for case, rows in found.items() for kernel, row in rows.items()}, sys.stdout)


if __name__ == "__main__":
    main()
