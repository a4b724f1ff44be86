"""The C pick of a token a row as a torch function.

What lives here: pointers and checks of headrace_gumbel_argmax. What may not: compiling (c_compiler.py), mathematics
(sampling.c).
"""

from __future__ import annotations

from ctypes import c_int, c_int64, c_void_p
from functools import partial
from typing import Any

import torch
from torch import Tensor

from headrace.kernels.build.c_compiler import Native
from headrace.kernels.candidate import CallSite, Facts
from headrace.kernels.sampling.reference import pick_tokens


def create_gumbel_argmax(native: Native, site: CallSite[Facts]) -> Any:
    function = native.library["headrace_gumbel_argmax"]
    function.argtypes = [c_int64, c_int64, c_void_p, c_int64, c_void_p, c_void_p, c_void_p, c_void_p, c_int]

    def gumbel_argmax(scores: Tensor, thresholds: Tensor | None, seeds: Tensor, positions: Tensor) -> Tensor:
        scores = scores if scores.stride(1) == 1 else scores.contiguous()
        kept = torch.full((len(scores),), float("-inf")) if thresholds is None else thresholds.contiguous()
        seeds, positions = seeds.contiguous(), positions.contiguous()
        tokens = torch.empty_like(seeds)
        failed = function(
            *scores.shape, scores.data_ptr(), scores.stride(0), kept.data_ptr(), seeds.data_ptr(), positions.data_ptr(), tokens.data_ptr(),
            torch.get_num_threads(),
        )  # fmt: skip
        if failed:
            raise MemoryError(f"no memory for picking {len(scores)} tokens")
        return tokens

    return gumbel_argmax


def create_pick_tokens(native: Native, site: CallSite[Facts]) -> Any:
    """Torch's thresholds, then the C pick."""
    return partial(pick_tokens, argmax=create_gumbel_argmax(native, site))
