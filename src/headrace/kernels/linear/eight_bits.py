"""Linear layers with 8-bit inputs and 8-bit weights (W8A8) on a GPU: FP8 or int8, weights as they are stored.

What lives here: the callables, their launches, which rows go which way. What may not: kernels (triton_eight.py,
norm/triton_rounded.py).

Inputs are rounded by a kernel of its own, or by the one that computes them: a norm (``normed``), a gate
(``activated``). Up to 64 rows, and any number where both have scales of blocks, are multiplied by our own kernel; more by the vendor's,
which takes a scale a row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from headrace.kernels.build.launch import dependent
from headrace.kernels.candidate import CallSite, EightBits, Empty, WeightFacts, plainly_empty
from headrace.kernels.linear.epilogue import MOST_ROWS, PLAIN, Epilogue, Fuse, Fused
from headrace.kernels.linear.forms import FLAT, Form
from headrace.kernels.linear.packed import Activated, Normed, PackedMatrix, packed_linear
from headrace.kernels.linear.triton_eight import _eight_kernel
from headrace.kernels.linear.triton_ends import Scratch, ends_of, make_scratch
from headrace.kernels.norm.triton_rounded import Rounding
from headrace.spec import Activation

TALL = Form(FLAT, 64, 128, 128, 1, 8, 3)  # of blocks, any number of rows


@dataclass(frozen=True, slots=True)
class EightBitLinear:
    """y = x · Wᵀ (+ bias), x rounded to 8 bits first. ``x`` [T, in], bfloat16 or float16."""

    weight: Tensor  # [out, in], float8_e4m3fn or int8
    scale: Tensor  # [out], or of blocks [out / 128, in / 128], float32
    static: Tensor | None  # the inputs' scale
    bias: Tensor | None
    eight: EightBits
    forms: tuple[tuple[int, Form], ...]
    scratch: Scratch
    pdl: bool
    empty: Empty = plainly_empty

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        return self.multiplied(*self.rounded(rows, PLAIN), x.dtype).view(*x.shape[:-1], len(self.weight))

    @property
    def rounding(self) -> Rounding:
        return Rounding(self.eight, self.static, self.empty)

    def rounded(self, x: Tensor, epilogue: Epilogue) -> tuple[Tensor, Tensor]:
        return self.rounding.rows(x, epilogue.squares, epilogue.eps, pdl=self.pdl)

    def multiplied(self, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        """The product alone, in ``dtype``."""
        if not len(codes):
            return self.empty((0, len(self.weight)), dtype, codes.device)
        if bool(self.eight.group) or len(codes) <= MOST_ROWS:
            return self.launch(self.form(len(codes)), codes, scale, PLAIN, dtype)[0]
        return self.vendors(codes, scale, dtype)

    def form(self, rows: int) -> Form:
        return next((form for most, form in self.forms if rows <= most), TALL)

    def vendors(self, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        if self.weight.dtype is torch.int8:
            y = self.empty((len(codes), len(self.weight)), dtype, codes.device)
            torch.mul(torch._int_mm(codes, self.weight.t()) * scale, self.scale, out=y)  # two passes over it
            return y if self.bias is None else y.add_(self.bias)
        # float16 and a bias are no results of it with a scale a row
        y = torch._scaled_mm(
            codes, self.weight.t(), scale, self.scale.view(1, -1), out_dtype=torch.bfloat16, use_fast_accum=True
        )
        return (y if self.bias is None else y.add_(self.bias)).to(dtype)

    def fused(self, x: Tensor, epilogue: Epilogue) -> Fused:
        """As ``fused_linear``'s twin says, for ``x`` [T, in] whose rows are one behind the other."""
        form = self.form(len(x))
        return self.launch(form, *self.rounded(x, epilogue), epilogue, x.dtype)

    def launch(self, form: Form, codes: Tensor, scale: Tensor, epilogue: Epilogue, dtype: torch.dtype) -> Fused:
        (tokens, ins), gated = codes.shape, epilogue.gate is not None
        outs = len(self.weight) // (2 if gated else 1)
        tiles = triton.cdiv(outs, form.columns)
        ways = 1 if gated else form.ways
        y = self.empty((tokens, outs), dtype, codes.device)
        found, (_, *pointers), _, made = ends_of(epilogue, self.bias, y, tiles, self.empty, 0)
        _eight_kernel[(tiles * ways, triton.cdiv(tokens, form.rows))](
            codes.view(torch.uint8), scale, self.weight.view(torch.uint8), self.scale, self.scratch.parts, self.scratch.tickets,
            *pointers, tokens, outs, ins, triton.cdiv(triton.cdiv(ins, form.depth), ways),
            FP8=self.weight.dtype is not torch.int8, BLOCKED=bool(self.eight.group), AROUND=made,
            BLOCK_M=form.rows, BLOCK_N=form.columns, BLOCK_K=form.depth, WAYS=ways, PDL=self.pdl,
            num_warps=form.warps, num_stages=form.stages, **dependent(self.pdl),
        )  # fmt: skip
        return found


@dataclass(frozen=True, slots=True)
class Composed:
    """A product, and what computes its inputs, which leaves them rounded. ``multiplied``: as ``EightBitLinear``'s."""

    rounding: Rounding
    multiplied: Callable[[Tensor, Tensor, torch.dtype], Tensor]

    def normed(self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        codes, scale, total = self.rounding.normed(x, weight, eps, residual)
        return self.multiplied(codes, scale, x.dtype), total

    def activated(self, x: Tensor, kind: Activation) -> Tensor:
        return self.multiplied(*self.rounding.activated(x, kind), x.dtype)


class Composing(ABC):
    """Makes layers that compute their inputs, too."""

    __slots__ = ()

    @abstractmethod
    def composed(self, pieces: Sequence[PackedMatrix], bias: Tensor | None) -> Composed | None: ...

    def normed(self, pieces: Sequence[PackedMatrix], bias: Tensor | None) -> Normed | None:
        made = self.composed(pieces, bias)
        return None if made is None else made.normed

    def activated(self, pieces: Sequence[PackedMatrix], bias: Tensor | None) -> Activated | None:
        made = self.composed(pieces, bias)
        return None if made is None else made.activated


def _joined(parts: list[Tensor]) -> Tensor:
    """One below the other, without a copy where they are so already."""
    first, at = parts[0], parts[0].data_ptr()
    for part in parts:
        if part.data_ptr() != at or part.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return torch.cat([each.view(torch.uint8) for each in parts]).view(first.dtype)
        at += part.nbytes
    return first if len(parts) == 1 else first.as_strided((sum(map(len, parts)), first.shape[1]), first.stride())


def forms_for(outs: int, ins: int, processors: int, *, blocked: bool) -> tuple[tuple[int, Form], ...]:
    """A rule; none was measured."""
    tiles, depth = -(-outs // 64), 128 if blocked else 256
    ways = next((ways for ways in (1, 2, 4) if tiles * ways >= 2 * processors or ins < 4 * depth * ways), 4)
    return tuple((rows, Form(FLAT, rows, 64, depth, ways, 4, 4)) for rows in (16, 32, MOST_ROWS))


@dataclass(frozen=True, slots=True)
class Maker(Composing):
    """Makes the callables of layers with the same facts."""

    site: CallSite[WeightFacts]
    eight: EightBits
    forms: tuple[tuple[int, Form], ...]
    scratch: Scratch

    @classmethod
    def at(cls, site: CallSite[WeightFacts]) -> Maker:
        facts, eight = site.facts, site.facts.eights[0]
        assert eight is not None, "asked only where there is one"
        forms = forms_for(facts.shape.outs, facts.in_features, site.card.processors, blocked=bool(eight.group))
        return cls(site, eight, forms, make_scratch(facts.laid, forms, site.device))

    @property
    def all_forms(self) -> tuple[tuple[int, Form], ...]:
        return (*self.forms, (0, TALL)) if self.eight.group else self.forms

    def product(self, weight: Tensor, scale: Tensor, static: Tensor | None, bias: Tensor | None) -> EightBitLinear:
        return EightBitLinear(
            weight, scale, static, bias, self.eight, self.forms, self.scratch, self.site.pdl, self.site.empty
        )

    def made(self, pieces: Sequence[PackedMatrix], bias: Tensor | None) -> EightBitLinear | None:
        """All pieces as one matrix; their own tensors become parts of it. None where they round inputs by scales of
        their own."""
        first = pieces[0].tensors[0].get("input_scale")
        if first is not None and any(not piece.tensors[0]["input_scale"].equal(first) for piece in pieces):
            return None
        sizes = [piece.outs for piece in pieces]
        if bool(self.eight.group) and any(size % 128 for size in sizes[:-1]):
            return None
        together = _joined([piece.tensors[0]["weight"] for piece in pieces])
        scales = [self._scale(piece) for piece in pieces]
        for piece, part in zip(pieces, together.split(sizes), strict=True):
            piece.tensors = ({**piece.tensors[0], "weight": part},)
        return self.product(together, torch.cat(scales).contiguous(), first, bias)

    def _scale(self, piece: PackedMatrix) -> Tensor:
        grid = piece.tensors[0]["scale"].float()
        return grid if bool(self.eight.group) else grid.reshape(-1).expand(piece.outs)

    def linear(self, pieces: Sequence[PackedMatrix], bias: Tensor | None) -> Callable[[Tensor], Tensor]:
        return self.made(pieces, bias) or packed_linear(pieces, bias)

    def fused(self, pieces: Sequence[PackedMatrix], bias: Tensor | None) -> Fuse | None:
        product = self.made(pieces, bias)
        return None if product is None else product.fused

    def composed(self, pieces: Sequence[PackedMatrix], bias: Tensor | None) -> Composed | None:
        product = self.made(pieces, bias)
        return None if product is None else Composed(product.rounding, product.multiplied)
