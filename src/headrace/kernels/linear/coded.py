"""Linear layers whose weights are codes in groups of inputs (packing.py), on a GPU: alone, and with what stands around
them.

What lives here: laying weights out at load, the callables, launches. What may not: kernels (triton_codes.py), which
form is best (coded_forms.py), what formats mean (quant/).

A few rows, and tiles of some more, are multiplied by codes that are widened in registers. For many rows a part of the
weight is widened, once for all of them, into memory that the second-level cache holds, and the vendor's product reads
that. Where inputs are rounded to int8 (W4A8, W6A8), codes become int8 in registers, whatever the number of rows, and
8-bit products are summed in whole numbers, of which the chip does twice as many (COMET, Liu et al. 2025, for one without
INT4 units; FlexQ, Zhang et al. 2025).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor

from headrace.kernels.build.launch import dependent
from headrace.kernels.candidate import CallSite, Empty, WeightFacts, plainly_empty
from headrace.kernels.linear.coded_forms import forms_for, measured
from headrace.kernels.linear.eight_bits import Composed, Composing
from headrace.kernels.linear.epilogue import PLAIN, Epilogue, Fused
from headrace.kernels.linear.forms import FLAT, Form, Forms
from headrace.kernels.linear.packed import PackedMatrix, packed_linear
from headrace.kernels.linear.packing import DEPTH, ROWS, Codes, Coding, Packed, Read, pack, stack
from headrace.kernels.linear.triton_codes import _codes_kernel, _widen_kernel
from headrace.kernels.linear.triton_ends import Scratch, ends_of, make_scratch
from headrace.kernels.norm.triton_rounded import Rounding, rotate

TALL = Form(FLAT, 128, 128, DEPTH, 1, 8, 3)  # of rounded inputs, any number of rows
WIDENED = 2**24  # elements of a weight, widened at once
_PIECES = 64  # partial sums of squares that are loaded early


def lay(pieces: Sequence[PackedMatrix], *, gated: bool) -> tuple[Packed, ...] | None:
    """The weight, laid out for good: as few matrices as there can be, one below another. None: some cannot be, and all
    stay as they are."""
    if not all(piece.laid for piece in pieces):
        if not all(piece.has_codes() for piece in pieces):
            return None
        for packed, own in _gate(pieces) if gated else _parts(pieces):
            first = 0
            for piece in own:
                piece.lay(packed, first)
                first += piece.outs
    return tuple(dict.fromkeys(piece.laid[0] for piece in pieces if piece.laid))


def _read(piece: PackedMatrix) -> Packed:
    assert piece.coding is not None, "asked only where there is one"
    return pack(partial(piece.in_codes, copy=0), piece.outs, piece.coding)


def _gate(pieces: Sequence[PackedMatrix]) -> list[tuple[Packed, Sequence[PackedMatrix]]]:
    """Both halves in turns, where they are of one coding."""
    coding, outs = pieces[0].coding, sum(piece.outs for piece in pieces)
    if (
        coding is None
        or outs % 16
        or len(pieces) > 2
        or any((piece.coding, piece.outs) != (coding, pieces[0].outs) for piece in pieces)
    ):
        return _parts(pieces)
    if len(pieces) == 2 and not _alike(*(piece.in_codes(slice(0, 32), 0) for piece in pieces)):
        return _parts(pieces)
    return [(pack(reader(pieces, 0), outs, coding, gated=True), pieces)]


def reader(pieces: Sequence[PackedMatrix], copy: int) -> Read:
    """Of one matrix, or of two of one size, one below the other."""
    if len(pieces) == 1:
        return partial(pieces[0].in_codes, copy=copy)
    half = pieces[0].outs

    def read(rows: slice) -> Codes:
        return (
            pieces[0].in_codes(rows, copy)
            if rows.start < half
            else pieces[1].in_codes(slice(rows.start - half, rows.stop - half), copy)
        )

    return read


def _parts(pieces: Sequence[PackedMatrix]) -> list[tuple[Packed, Sequence[PackedMatrix]]]:
    found: list[tuple[Packed, Sequence[PackedMatrix]]] = []
    for piece in pieces:
        laid = _read(piece)
        before = found[-1][0] if found else None
        if before is not None and before.coding == laid.coding and before.outs % ROWS == 0 and _alike(before, laid):
            found[-1] = stack([before, laid]), (*found[-1][1], piece)
        else:
            found.append((laid, (piece,)))
    return found


def _alike(one: Any, other: Any) -> bool:
    """Whether inputs are in one order, and codes entries of one table."""

    def same(a: Tensor | None, b: Tensor | None) -> bool:
        return a is b or (a is not None and b is not None and a.equal(b))

    return same(one.order, other.order) and same(one.table, other.table)


def constants(coding: Coding) -> dict[str, Any]:
    """What kernels are compiled for, as triton_codes.py numbers it."""
    raw = 1 if coding.floats or coding.table else 0 if coding.shifts else -1
    kinds = coding.bits, coding.sets, coding.zeros, coding.shifts, coding.floats, coding.table, coding.scales.value
    return {"CODING": (*kinds, raw, coding.block_bytes)}


def views(packed: Packed) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Its blocks as words, halves of words and bytes, and factors of rows."""
    return packed.blocks.view(torch.int32), packed.blocks.view(torch.int16), packed.blocks, packed.factor


@dataclass(frozen=True, slots=True)
class CodedProduct:
    """One weight and how it is multiplied. Calls of products that share scratch memory must follow each other on the
    device."""

    packed: Packed
    bias: Tensor | None
    forms: Forms
    scratch: Scratch
    pdl: bool
    empty: Empty = plainly_empty
    rounding: Rounding | None = None  # of inputs, to int8; then codes are multiplied as whole numbers

    def form(self, tokens: int) -> Form | None:
        return next((form for most, form in self.forms if tokens <= most), None)

    def __call__(self, x: Tensor) -> Tensor:  # [T, in], rows one behind the other → [T, out]
        form = self.form(len(x))
        return self.widened(x) if form is None else self.launch(form, x, PLAIN)[0]

    def launch(self, form: Form, x: Tensor, epilogue: Epilogue) -> Fused:
        if self.rounding is None:
            return self._launch(form, self.turned(x), None, epilogue, x.dtype)
        codes, own = self.rounding.rows(x, epilogue.squares, epilogue.eps, pdl=self.pdl)
        return self._launch(form, codes, own, replace(epilogue, squares=None), x.dtype)

    def turned(self, x: Tensor) -> Tensor:
        """A norm's division does not mind being done behind a rotation."""
        size = self.packed.coding.rotation
        return x if not size else rotate(x, size, self.empty, pdl=self.pdl)

    def multiplied(self, codes: Tensor, own: Tensor, dtype: torch.dtype) -> Tensor:
        """As ``EightBitLinear``'s."""
        form = self.form(len(codes))
        assert form is not None, "any number of rows has one where inputs are rounded"
        if not len(codes):
            return self.empty((0, self.packed.outs), dtype, codes.device)
        return self._launch(form, codes, own, PLAIN, dtype)[0]

    def _launch(self, form: Form, x: Tensor, own: Tensor | None, epilogue: Epilogue, dtype: torch.dtype) -> Fused:
        """``own``: scales of the rows of ``x``, which is int8 then, [T, 1]."""
        packed, tokens, gated = self.packed, len(x), epilogue.gate is not None
        outs, blocks = packed.outs // 2 if gated else packed.outs, form.columns // ROWS
        tiles, steps = triton.cdiv(packed.outs, form.columns), packed.blocks.shape[1]
        y, scratch = self.empty((tokens, outs), dtype, x.device), self.scratch
        found, pointers, pieces, made = ends_of(epilogue, self.bias, y, tiles, self.empty, _PIECES)
        given = (y if each is None else each for each in (packed.table, packed.order))
        _codes_kernel[(tiles * form.ways, triton.cdiv(tokens, form.rows))](
            x, x if own is None else own, *views(packed), *given, scratch.parts, scratch.tickets, *pointers,
            pieces, tokens, outs, packed.ins, steps, triton.cdiv(steps, form.ways), epilogue.eps,
            **constants(packed.coding), ORDERED=packed.order is not None, TURNED=packed.gated, AROUND=made,
            BLOCK_M=form.rows, BLOCKS=blocks, WAYS=form.ways, LATE=form.late, PDL=self.pdl,
            WHOLE=own is not None, num_warps=form.warps, num_stages=form.stages, **dependent(self.pdl),
        )  # fmt: skip
        return found

    def widened(self, x: Tensor) -> Tensor:
        """By the vendor's product, a part of the weight at a time."""
        packed, tokens, halves = self.packed, len(x), 2 if self.packed.gated else 1
        x = self.turned(x)
        x = x if packed.order is None else x.index_select(1, packed.order)
        y = self.empty((tokens, packed.outs), x.dtype, x.device)
        step = max(1, WIDENED // (ROWS * packed.ins)) * ROWS
        for first in range(0, packed.outs, step):
            wide = self.widen(first, min(first + step, packed.outs), x.dtype)
            for half, part in enumerate(wide.chunk(halves)):
                begin = half * (packed.outs // 2) + first // halves
                torch.mm(x, part.t(), out=y[:, begin : begin + len(part)])
        return y if self.bias is None else y.add_(self.bias)

    def widen(self, first: int, last: int, dtype: torch.dtype) -> Tensor:
        """Rows of it as they lie (from a multiple of 64 on), but both halves of a gate one below the other; columns as
        they lie."""
        packed, steps = self.packed, self.packed.blocks.shape[1]
        wide = torch.empty(last - first, packed.ins, dtype=dtype, device=packed.blocks.device)
        table = packed.factor if packed.table is None else packed.table
        _widen_kernel[(triton.cdiv(last - first, ROWS) * steps,)](
            *views(packed),
            table,
            wide,
            first // ROWS,
            last - first,
            packed.ins,
            steps,
            **constants(packed.coding),
            TURNED=packed.gated,
            num_warps=4,
        )
        return wide


@dataclass(frozen=True, slots=True)
class CodedLinear:
    """y = x · Wᵀ (+ bias). ``x`` [..., in], bfloat16 or float16; W the weights below one another; float32 sums, one
    rounding."""

    products: tuple[CodedProduct, ...]

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        if not len(rows):
            return x.new_empty(*x.shape[:-1], sum(each.packed.outs for each in self.products))
        parts = [product(rows) for product in self.products]
        return (parts[0] if len(parts) == 1 else torch.cat(parts, 1)).view(*x.shape[:-1], -1)


@dataclass(frozen=True, slots=True)
class CodedFused:
    """As the twin says; ``x`` [T, in] and all of ``epilogue`` in bfloat16 but squares (float32) and scale (any float
    type). Up to MOST_ROWS rows."""

    product: CodedProduct

    def __call__(self, x: Tensor, epilogue: Epilogue) -> Fused:
        form = self.product.form(len(x))
        assert form is not None, f"{len(x)} rows are more than a fused product takes"
        return self.product.launch(form, x.reshape(-1, x.shape[-1]).contiguous(), epilogue)


@dataclass(frozen=True, slots=True)
class Coded(Composing):
    """Makes the callables of layers with the same facts."""

    site: CallSite[WeightFacts]
    forms: dict[Coding, Forms]
    scratch: Scratch

    @classmethod
    def at(cls, site: CallSite[WeightFacts]) -> Coded:
        facts, device = site.facts, site.device
        processors, name = site.card.processors, site.card.name
        outs = facts.out_features
        codings = [each for each in facts.codings if each is not None]
        whole = any(facts.eights)
        forms = {
            each: forms_for(facts.shape, outs, each, processors, {} if whole else measured(each).table(name))
            + (((sys.maxsize, TALL),) if whole else ())
            for each in codings
        }
        scratches = [make_scratch(facts.laid, each, device) for each in forms.values()]
        return cls(site, forms, max(scratches, key=lambda each: each.parts.numel() + each.tickets.numel()))

    def product(self, packed: Packed, bias: Tensor | None) -> CodedProduct:
        site = self.site
        eight = next(iter(site.facts.eights), None)
        rounding = None if eight is None else Rounding(eight, empty=site.empty, dealt=True)
        return CodedProduct(packed, bias, self.forms[packed.coding], self.scratch, site.pdl, site.empty, rounding)

    def linear(self, pieces: Sequence[PackedMatrix], bias: Tensor | None) -> Callable[[Tensor], Tensor]:
        products = self.products(pieces, bias)
        return CodedLinear(products) if products else packed_linear(pieces, bias)

    def fused(self, pieces: Sequence[PackedMatrix], bias: Tensor | None) -> CodedFused | None:
        """None where there is more than one matrix to multiply by."""
        first, *others = self.products(pieces, bias) or (None,)
        return None if first is None or others or first.packed.gated != self.site.facts.gated else CodedFused(first)

    def composed(self, pieces: Sequence[PackedMatrix], bias: Tensor | None) -> Composed | None:
        first, *others = self.products(pieces, bias) or (None,)
        if first is None or others or first.rounding is None:
            return None
        return Composed(first.rounding, first.multiplied)

    def products(self, pieces: Sequence[PackedMatrix], bias: Tensor | None) -> tuple[CodedProduct, ...]:
        """By each matrix that they are laid out as; none: they stay as they are."""
        parts = lay(pieces, gated=self.site.facts.gated) or ()
        biases = [None] * len(parts) if bias is None else bias.split([part.outs for part in parts])
        return tuple(self.product(part, own) for part, own in zip(parts, biases, strict=True))
