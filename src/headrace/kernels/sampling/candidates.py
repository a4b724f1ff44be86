"""The candidates for picking and scoring tokens, best first.

What lives here: the ordered lists, small calls that build each kernel a model will launch, and the C pick of a token a
row (sampling.c) as a torch function. What may not: Triton, compiling (build/), mathematics.
"""

from __future__ import annotations

import sys
from ctypes import c_int, c_int64, c_void_p
from functools import partial
from typing import Any

import torch
from torch import Tensor

from headrace.kernels.build import gpu
from headrace.kernels.build.c_compiler import Native
from headrace.kernels.build.native import native
from headrace.kernels.candidate import Calls, CallSite, Candidate, Facts, Sizes
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


def picks(site: CallSite[Facts], run: Any, sizes: Sizes) -> Calls:
    """Every way to sample, for one row up to as many as there can be: one after another where they share what is
    compiled. Filters and what picks behind them are compiled side by side: together they would take longer than any
    other kernel."""
    from headrace.kernels.sampling.triton_pick import pick_above
    from headrace.kernels.sampling.triton_thresholds import keep_thresholds

    vocab = sizes.spec.vocab_size
    counts = dict.fromkeys(min(count, sizes.max_num_seqs) for count in (1, 2, 4, 8, 16, 32, 64, 128, 256))

    def pick(rows: int, kind: str) -> object:
        logits, peak = site.zeros(rows, vocab), site.zeros(rows)
        whole = site.zeros(rows, dtype=torch.int64)
        if kind == "greedy":
            return run(logits)
        if kind in ("chosen", "best"):
            return run(logits, whole, min(5, vocab) if kind == "best" else 0)
        if kind == "filters":
            return keep_thresholds(logits, whole + 50, peak + 0.9, peak, scale=(peak, peak + 1.0))
        if kind == "filtered":
            return pick_above(logits, (peak, peak + 1.0), peak, whole, whole, pdl=site.pdl)
        return run(logits, peak, peak + 1.0, None, whole, whole)

    def pick_all(kinds: tuple[str, ...]) -> None:
        for kind in kinds:
            for rows in counts:
                pick(rows, kind)

    together: dict[str, list[tuple[str, ...]]] = {
        "greedy_tokens": [("greedy",)],
        "pick_tokens": [("filters",), ("random",), ("filtered",)],
        "score_tokens": [("chosen", "best")],
    }
    yield from ((", ".join(kinds), partial(pick_all, kinds)) for kinds in together[site.op])


_PICK = "sampling.triton_pick"
GREEDY_TOKENS = (gpu.triton(f"{_PICK}:greedy_tokens", picks, chained=sys.maxsize),)
PICK_TOKENS = (native(create_pick_tokens), gpu.triton(f"{_PICK}:pick_tokens", picks, chained=sys.maxsize))
# Nothing is warmed up: pick_tokens does the same and more.
GUMBEL_ARGMAX: tuple[Candidate[Facts], ...] = (native(create_gumbel_argmax), gpu.triton(f"{_PICK}:gumbel_argmax", None))
SCORE_TOKENS = (gpu.triton(f"{_PICK}:score_tokens", picks),)
