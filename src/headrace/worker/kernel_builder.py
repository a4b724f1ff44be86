"""Compiles a model's kernels into the compiler's cache and computes nothing. Run as a program by ``headrace.builders``.

``python -m headrace.worker.kernel_builder INDEX COUNT`` reads one line of JSON (a ``Job``), takes every COUNT-th rehearsal from the
INDEX-th on, and prints the name of each, as JSON, when it is done with it, built or not.

It has no context on the card: tensors are without memory, the card's properties are told, launches stop at the compiled kernel.

What lives here: that program. What may not: what is rehearsed (kernels/), threads of the start (kernels/ahead.py).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch

import headrace.kernels as registry
from headrace.builders import Job
from headrace.kernels import Kernels, Rehearsal
from headrace.kernels.ahead import turn_of
from headrace.kernels.candidate import Sizes
from headrace.models.decoder import Decoder
from headrace.models.families import spec_from_config

META = torch.device("meta")
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class _Compiler:
    """What the JIT asks of a driver before a launch."""

    def __init__(self, capability: tuple[int, int]) -> None:
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return META


def _stand_in_for_the_card(job: Job) -> None:
    """This process is for nothing else, so its torch and its registry may say so."""
    from triton.runtime import driver

    cuda: Any = torch.cuda
    cuda.is_available = lambda: True
    cuda.get_device_capability = lambda device=None: tuple(job.capability)
    cuda.get_device_properties = lambda device=None: SimpleNamespace(multi_processor_count=job.processors)
    cuda.get_device_name = lambda device=None: job.card
    cuda.device = lambda device: nullcontext()
    driver.set_active(_Compiler(job.capability))
    registry.CANDIDATES = {
        op: tuple(replace(each, devices=("meta",)) for each in group if "cuda" in each.devices) for op, group in registry.CANDIDATES.items()
    }


def _launch_nothing() -> None:
    """A launch compiles the kernel, and what hands arguments to it, and ends there."""
    from triton.backends.nvidia.driver import CudaLauncher
    from triton.runtime import JITFunction

    from headrace.kernels.triton import launch

    compile_only = JITFunction.run

    def run(self: Any, *arguments: Any, grid: Any, warmup: bool, **named: Any) -> Any:
        compiled = compile_only(self, *arguments, grid=grid, warmup=True, **named)
        with suppress(Exception):  # that is a C compiler's work, and the kernel is there without it
            CudaLauncher(compiled.src, compiled.metadata)
        return compiled

    JITFunction.run = run
    launch.create_launch = lambda *_: None


def rehearsals(job: Job) -> Iterator[Rehearsal]:
    """In the order in which a start takes them."""
    from headrace.kernels.triton.toolchain import prepare_kernels

    spec, dtype = spec_from_config(dict(job.config)), DTYPES[job.dtype]
    kernels = Kernels(META, disabled=frozenset(job.disabled), batch_invariant=job.batch_invariant, programmatic=job.programmatic)
    decoder = Decoder(spec, kernels=kernels, dtype=dtype, device=META, max_model_len=job.max_model_len)
    for op, element in job.sites:
        kernels.choose(op, dtype=getattr(torch, element))
    decoder.finish_loading()
    prepare_kernels(META)
    sizes = Sizes(spec, dtype, job.block_size, job.max_model_len, job.max_num_seqs, job.max_num_batched_tokens)
    yield from sorted({each.name: each for each in kernels.rehearsals(sizes)}.values(), key=turn_of)


def main(index: int, count: int) -> None:
    import_module("headrace.kernels.triton.toolchain")  # and Triton with it, before anybody waits
    line = sys.stdin.readline()
    if not line:  # whoever began this has ended
        return
    job = Job(**json.loads(line))
    _stand_in_for_the_card(job)
    _launch_nothing()
    with torch.inference_mode():
        for number, each in enumerate(rehearsals(job)):
            if number % count == index:
                with suppress(Exception):  # whoever needs the kernel meets the same, and says it
                    each.call()
                print(json.dumps(each.name), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
