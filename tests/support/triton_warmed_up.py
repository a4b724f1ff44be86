"""Which specialisations of the Triton kernels a start warms up, and which the steps after it ask for. Run as a
program, in a process of its own.

What lives here: a worker on a CPU whose kernels are never launched, only identified. What may not: judgement (the
test).

``python triton_warmed_up.py CONFIG [invariant]`` (the JSON of a model's config; with --batch-invariant) prints
{"warmed up": [...], "used": [...], "chosen later": [...]}: kernel, constants, types and divisibility of each, and
operations that no call site was known of when kernels were built.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from triton.runtime import JITFunction, driver

import headrace.kernels as registry
from headrace.clock import RealClock
from headrace.kernels import Kernels
from headrace.kernels.build import gpu
from headrace.kernels.candidate import Facts, Sizes
from headrace.kernels.linear import candidates as linear
from headrace.models.decoder import Decoder
from headrace.models.families import spec_from_config
from headrace.models.loader import fill_dummy
from headrace.spec import KVGroup, kv_groups
from headrace.worker.allocation import allocate_kv
from headrace.worker.model_runner import ModelRunner
from headrace.worker.passes import ForwardPasses
from headrace.worker.rows import Rows
from headrace.worker.warm_up import Limits, decode_plan, largest_plan, warm_up
from headrace.worker.worker import STEP_SITES
from tests.support.kernel_cases import H200, called, using
from tests.support.triton_offline import CompileOnly

CPU = torch.device("cpu")
BLOCK_SIZE, LONGEST, ROWS, TOKENS = 64, 512, 40, 700


def only_identified(seen: set[str]) -> None:
    """Launches put what the compiler would be asked for into ``seen``."""

    def run(self: Any, *arguments: Any, grid: Any, warmup: bool, **named: Any) -> None:
        *_, binder = self.device_caches[0]
        _, specialization, options = binder(*arguments, debug=False, instrumentation_mode="", **named)
        seen.add(f"{self.fn.__name__} {specialization} {options}")

    JITFunction.run = run


def as_on_a_card() -> None:
    """The Triton candidates stand alone, and find an H200. Nobody computes: what a kernel would have written is 0."""
    stock = torch.empty
    torch.empty = lambda *shape, **named: stock(*shape, **named).zero_()  # type: ignore[assignment]
    torch.cuda.get_device_properties = lambda device=None: SimpleNamespace(multi_processor_count=132)
    gpu.missing = lambda device: None  # type: ignore[assignment]
    linear.SMALL_WEIGHT = 1
    ours = (gpu.TRITON, linear.FLAT, linear.FUSED, linear.CODED, linear.EIGHT)
    registry.OPERATIONS = {  # type: ignore[misc]
        op: replace(
            one, candidates=tuple(replace(each, devices=("cpu",)) for each in one.candidates if each.name in ours)
        )
        for op, one in registry.OPERATIONS.items()
    }


def create_runner(kernels: Kernels, spec: Any, decoder: Decoder) -> tuple[ModelRunner, list[KVGroup]]:
    groups = [KVGroup(each, ROWS) for each in kv_groups(spec, BLOCK_SIZE, 2)]
    rows = Rows(
        ROWS,
        LONGEST,
        spec.vocab_size,
        [BLOCK_SIZE for _ in groups],
        CPU,
        kernels.choose(*called("write_rows", dtype=torch.int32)),
    )
    caches = [allocate_kv(group, torch.bfloat16, CPU).zero_() for group in groups]
    passes = ForwardPasses(decoder, caches, rows, kernels)
    return ModelRunner(passes, max_logits_rows=64, clock=RealClock()), groups


def take_steps(runner: ModelRunner, groups: list[KVGroup]) -> None:
    """Steps of many shapes: prompts, batches of every size, both together, all ways to sample; that may share keys, and
    that do not."""
    warm_up(runner, groups, LONGEST, thorough=True)
    for rows in (1, 2, 3, 5, 8, 13, 16, 17, 32, 33, 40):
        for tokens in (rows, rows + 1, rows + 15, rows + 16, rows * 7, TOKENS):
            limits = Limits(rows, tokens, 64, LONGEST)
            for plan in (decode_plan(limits), largest_plan(limits)):
                for each in (plan, replace(plan, shared_tokens=None)):
                    runner.run(each)
                    runner.forget()


def main(config: dict[str, Any], *, invariant: bool) -> None:
    torch.set_num_threads(1)
    driver.set_active(CompileOnly())
    seen: set[str] = set()
    only_identified(seen)
    as_on_a_card()
    spec = spec_from_config(config)
    techniques = using(batch_invariant=invariant, programmatic_launch=True, fused_rope_attention=False)
    kernels = Kernels(CPU, strict=True, techniques=techniques, card=H200)
    sizes = Sizes(spec, torch.bfloat16, BLOCK_SIZE, LONGEST, ROWS, TOKENS)
    with torch.inference_mode():
        decoder = Decoder(spec, kernels=kernels, dtype=torch.bfloat16, device=CPU, max_model_len=LONGEST)
        for op, dtype in STEP_SITES:
            kernels.choose(op, Facts(dtype))
        fill_dummy(decoder, 0)
        decoder.finish_loading()
        for each in kernels.warm_ups(sizes):
            each.call()
        warmed_up, sites = set(seen), len(kernels.choices)
        seen.clear()
        take_steps(*create_runner(kernels, spec, decoder))
    later = [choice.op for choice in kernels.choices[sites:]]
    json.dump({"warmed up": sorted(warmed_up), "used": sorted(seen), "chosen later": later}, sys.stdout)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), invariant="invariant" in sys.argv[2:])
