"""A second, widened copy of matrices in few bits, where memory is plentiful: many rows are multiplied by it, few by the
codes.

Few rows of a GEMM wait for its weights, so codes are worth what widening them takes. Many rows wait for arithmetic,
and widening comes on top of it, in every step again. What is widened once is multiplied as any other weight: by the
vendor's measured algorithms, with a gate or the residual sum inside.

What lives here: which weights may have a copy, whether it is worth its memory, from how many rows on it serves. What
may not: allocating and filling it (linear.py), measuring (bench/tune_coded.py), kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from headrace.kernels.candidate import KernelContext, WeightFacts
from headrace.kernels.linear import coded_forms
from headrace.kernels.linear.epilogue import MOST_ROWS
from headrace.kernels.linear.measured import Measured, whole_numbers
from headrace.kernels.linear.packed import PackedMatrix
from headrace.kernels.linear.packing import Coding
from headrace.sites import Role, Weight, weights
from headrace.spec import DecoderSpec

SHARE = 0.25  # of what is left beside the weights, and goes to keys and values without a copy: it takes no more
TOKENS = 1024  # of each sequence there may be, for which room is left
LEAST = 257  # rows: of fewer, codes that CUDA C++ multiplies are as quick
_Gated = Callable[[Tensor, Any], Tensor | None]
_BLOCK = 2**24  # elements that are widened at once


def has_copy(site: Weight) -> bool:
    """Whether a copy of it computes the same: inputs are multiplied as they come. One for each expert would be too
    large."""
    plain = bool(site.formats) and all(form.multiplies_inputs for form in site.formats)
    return plain and site.moe is None and not site.tied and site.role not in (Role.EMBEDDING, Role.ROUTER)


def copy_bytes(spec: DecoderSpec, element_bytes: int) -> int:
    return sum(site.outs * site.ins * element_bytes for site in weights(spec) if has_copy(site))


def worth(size: int, left: int, fixed: int | None, needed: int) -> str | None:
    """Why a copy of ``size`` bytes is not worth its memory; None: it is. ``left``: for keys and values without it;
    ``fixed``: so many were asked for; ``needed``: so many they should have."""
    if size > SHARE * left:
        return f"it may take no more than {SHARE:.0%} of what is left"
    if fixed is not None:
        return None if size + fixed <= left else "what was asked for keys and values leaves no room for it"
    if left - size < needed:
        return f"keys and values would not hold {TOKENS} tokens of every sequence"
    return None


def measured(coding: Coding) -> Measured[int]:
    """The least rows for which a copy is quicker, by shape (a gate as one matrix)."""
    return Measured(f"copy, {coded_forms.measured(coding).op}", lambda row: whole_numbers(row)[0], lambda rows: [rows])


def least_rows(facts: WeightFacts, context: KernelContext) -> int:
    """From so many rows on; where no kernel multiplies by the codes, always. Beyond rows that are fused, Triton's kernel
    loses to it by far (GGUF's types: three times a step of 128 rows of an 8B)."""
    codings = {each for each in facts.codings if each is not None}
    if None in facts.codings:
        return 1
    least = LEAST if all(each.many for each in codings) else MOST_ROWS + 1
    if len(codings) > 1 or context.card is None:
        return least
    (found,) = measured(codings.pop()).table(context.card.name).get(facts.laid, (least,))
    return found


def fill(wide: Tensor, pieces: Iterable[PackedMatrix]) -> None:
    """``wide`` [outs, ins] becomes all ``pieces``, one below another."""
    first = 0
    for piece in pieces:
        step = max(1, _BLOCK // piece.ins // 64) * 64
        for at in range(0, piece.outs, step):
            rows = slice(at, min(at + step, piece.outs))
            wide[first + at : first + rows.stop].copy_(piece.dense(rows, wide.dtype))
        first += piece.outs


@dataclass(frozen=True, slots=True)
class TakingTurns:
    """y = x · Wᵀ (+ bias), ``x`` [..., in]: of fewer than ``least`` rows by ``few``, else by ``many``."""

    few: Callable[[Tensor], Tensor]
    many: Callable[[Tensor], Tensor]
    least: int

    def __call__(self, x: Tensor) -> Tensor:
        return (self.few if x.numel() < self.least * x.shape[-1] else self.many)(x)

    def gated(self, many: _Gated, few: _Gated | None) -> _Gated:
        """Of GEMMs that take a gate in, or give None: ``many`` over the copy."""
        few = few or (lambda x, kind: None)
        return lambda x, kind: (few if len(x) < self.least else many)(x, kind)
