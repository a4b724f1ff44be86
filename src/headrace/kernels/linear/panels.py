"""Products over weights in few bits on a CPU, laid out once in panels of 16 outputs.

What lives here: laying out, pointers, which products round their inputs. What may not: mathematics (panels.c), how
formats store codes (quant/).

Weights stay in the bits that they have. Where inputs may be rounded to 8 bits, products are of whole numbers; elsewhere
codes become float32 in the first cache. A row's bits are the same in any company either way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import POINTER, Array, Structure, byref, c_float, c_int, c_int32, c_int64, c_void_p, pointer
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import partial
from itertools import groupby
from operator import itemgetter
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.errors import ConfigError
from headrace.kernels.build.c_compiler import Native
from headrace.kernels.build.native import TYPES, function_of
from headrace.kernels.candidate import CallSite, Declined, Empty, ExpertFacts, WeightFacts, plainly_empty, rows_of
from headrace.kernels.linear.packed import PackedMatrix, Relaid, packed_moe, widened
from headrace.kernels.linear.packing import E2M1, Codes, Scales

MANY_ROWS = 64
COLUMNS, BLOCK, CHUNK, HALF = 16, 32, 256, 16  # as panels.h has them
_PART = 2**22  # codes laid out at once, a byte each
_SCALES = MappingProxyType(
    {**TYPES, torch.uint8: 3, torch.int8: 4, torch.float8_e4m3fn: 5}
)  # types, as panels.h numbers them; 6: exponents, 7: nested


class _Panels(Structure):
    """panels.h's Panels."""

    _fields_ = [
        *((name, c_int32) for name in ("bits", "kind", "most", "scale_type", "least_type", "by_scale")),
        *((name, c_int64) for name in ("outs", "ins", "group", "shared")),
        *((name, c_float) for name in ("zero", "factor")),
        *(
            (name, c_void_p)
            for name in ("codes", "table", "values", "scale", "least", "over", "least_over", "nested", "large")
        ),
        ("offset", c_float),
    ]


class _Output(Structure):
    _fields_ = [("w", POINTER(_Panels)), ("bias", c_void_p), ("first", c_int64)]


class _Inputs(Structure):
    _fields_ = [
        ("type", c_int),
        ("by_row", c_int),
        ("rotation", c_int),
        *((name, c_int64) for name in ("rows", "row", "ins", "there")),
        ("x", c_void_p),
    ]


@dataclass(frozen=True, slots=True, eq=False)
class PanelWeight:
    """A matrix [outs, ins] in panels. ``tensors`` hold what ``pointers`` point to; ``order``: where each input lies in
    x."""

    native: Native
    outs: int
    ins: int
    tensors: dict[str, Tensor]
    pointers: _Panels

    @property
    def whole(self) -> bool:
        """Whether codes are whole numbers."""
        return bool(self.pointers.kind != Kind.FLOATS)

    def dense(self, rows: slice | Tensor) -> Tensor:
        ids = torch.arange(self.outs)[rows] if isinstance(rows, slice) else rows.contiguous()
        out = torch.empty(len(ids), self.ins)
        function_of(self.native, "headrace_panel_rows", "PqPqPi")(
            pointer(self.pointers), len(ids), ids.data_ptr(), self.ins, out.data_ptr(), torch.get_num_threads()
        )
        order = self.tensors.get("order")
        return out if order is None else torch.empty_like(out).index_copy_(1, order.long(), out)


class Kind(IntEnum):
    """What codes are, as panels.h numbers it."""

    UNSIGNED = 0
    SIGNED = 1
    FLOATS = 2


@dataclass(frozen=True, slots=True)
class _Meaning:
    """w = (code - zero) · scale · factor - least. ``middle``: what signed codes are less than those given. ``table``:
    what codes of 4 bits stand for. ``by_scale``: least counts
    in scales; ``nested``: scales are codes, too."""

    bits: int
    group: int
    kind: Kind
    zero: float = 0.0
    factor: float = 1.0
    middle: int = 128
    scale_type: int | None = None
    by_scale: bool = False
    table: Tensor | None = None
    order: Tensor | None = None
    nested: dict[str, Tensor] = field(default_factory=dict)


def lay_out(native: Native, piece: PackedMatrix, copy: int = 0) -> PanelWeight | None:
    """None where its format has no codes, or groups that panels do not have."""
    if not piece.has_codes(copy):
        return None
    step, parts, meaning = max(BLOCK, _PART // piece.ins // BLOCK * BLOCK), list[dict[str, Tensor]](), None
    for first in range(0, piece.outs, step):
        rows = slice(first, min(first + step, piece.outs))
        codes = piece.in_codes(rows, copy)
        meaning = meaning or _meaning(piece, codes, copy)
        if meaning is None or not _fits(meaning, codes, piece.ins):
            return None
        scale = piece.tensors[copy]["absmax"][rows] if meaning.nested else codes.scale
        parts.append(_laid(native, meaning, codes, scale))
    if meaning is None:
        return None
    tensors = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    tensors |= {"scale": _narrow(tensors["scale"])} | meaning.nested
    shared = COLUMNS if "least" not in tensors and not meaning.nested and _alike(tensors["scale"]) else 0
    if shared:
        tensors["scale"] = tensors["scale"][..., 0].float().contiguous()
    tensors |= {} if meaning.order is None else {"order": meaning.order}
    pointers = _pointers(meaning, piece.outs, piece.ins, tensors, shared)
    return PanelWeight(native, piece.outs, piece.ins, tensors, pointers)


def _meaning(piece: PackedMatrix, codes: Codes, copy: int) -> _Meaning | None:
    coding, eight, tensors = piece.coding, piece.form.eight, piece.tensors[copy]
    if coding is None and eight is not None:
        return _Meaning(8, 0 if not eight.group else codes.group, Kind.FLOATS if eight.kind == "fp8" else Kind.SIGNED)
    if coding is None:
        return None
    bits, factor = coding.bits, 1.0 if codes.factor is None else float(codes.factor[0])
    exponents = 6 if coding.scales is Scales.POWER else None
    made = _Meaning(
        bits, codes.group, Kind.UNSIGNED, factor=factor, scale_type=exponents, by_scale=coding.zeros, order=codes.order
    )
    if coding.floats and bits == 4:  # twice its values are whole numbers
        return replace(made, table=torch.tensor(E2M1) * 2, factor=factor / 2)
    if coding.floats or (coding.table and not _whole(codes.table)):
        return replace(made, kind=Kind.FLOATS, table=codes.table, nested=_nested(tensors))
    if coding.table:
        return replace(made, kind=Kind.SIGNED, table=codes.table)
    zero = 0 if coding.zeros else coding.middle
    if bits < 7:
        return replace(made, zero=zero)
    middle = 2 ** (bits - 1)  # without a sign, products would not fit 16 bits
    return replace(made, bits=8, kind=Kind.SIGNED, zero=zero - middle, middle=middle)


def _whole(table: Tensor | None) -> bool:
    return table is not None and table.equal(table.round().clamp(-127, 127))


def _nested(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    names = {"nested": "nested_table", "large": "nested_absmax", "offset": "offset"}
    return {name: tensors[own] for name, own in names.items()} if "nested_absmax" in tensors else {}


def _fits(meaning: _Meaning, codes: Codes, ins: int) -> bool:
    group = meaning.group
    scaled = group == 0 or (group % HALF == 0 and ins % group == 0 and ins % BLOCK == 0)
    return scaled and (not codes.large or (codes.size == CHUNK and ins % CHUNK == 0))


def _laid(native: Native, meaning: _Meaning, given: Codes, scale: Tensor) -> dict[str, Tensor]:
    """The tensors of some rows, which panels split. Codes with a sign are bytes, those of 7 and 8 bits less the
    middle."""
    signed = meaning.kind is Kind.SIGNED and meaning.table is None
    codes = given.codes - meaning.middle if signed else given.codes
    codes = F.pad(codes, (0, -codes.shape[1] % BLOCK)).contiguous()
    rows, ins = codes.shape
    out = torch.empty(-(-rows // COLUMNS), ins // BLOCK, meaning.bits, 64, dtype=torch.uint8)
    lay = function_of(native, "headrace_lay_panels", "iqqPPi")
    lay(meaning.bits, rows, ins, codes.data_ptr(), out.data_ptr(), torch.get_num_threads())
    found: dict[str, Tensor | None] = {"scale": scale, "over": given.large[0].half() if given.large else None}
    if given.beside is not None and meaning.by_scale:
        found["least"] = given.beside.to(torch.uint8)
    elif given.beside is not None:  # shifts are added
        found["least"] = given.beside if given.large else (-given.beside).half()
        found["least_over"] = (-given.large[1]).half() if given.large else None
    return {"codes": out} | {name: _by_panel(each) for name, each in found.items() if each is not None}


def _by_panel(values: Tensor) -> Tensor:
    """[rows, groups] → [panels, groups, 16]; what fills the last panel is a copy of its last row."""
    held = values.dtype
    raw = (
        values.view(torch.uint8)
        if held.itemsize == 1
        else values.view(torch.int16 if held.itemsize == 2 else torch.int32)
    )
    filled = torch.cat((raw, raw[-1:].expand(-len(raw) % COLUMNS, -1)))
    return filled.view(-1, COLUMNS, raw.shape[1]).transpose(1, 2).contiguous().view(held)


def _narrow(scale: Tensor) -> Tensor:
    """float32 that came from float16 as that."""
    half = scale.half() if scale.dtype is torch.float32 else scale
    return half if half.dtype is scale.dtype or half.float().equal(scale) else scale


def _alike(scale: Tensor) -> bool:
    """Whether all outputs of each panel share scales, as those of a block or a tensor do."""
    return scale.dtype in TYPES and bool((scale == scale[..., :1]).all())


def _lowest(values: Tensor) -> int:
    """What is taken off a table's values, that they begin at 0; 0 where they need a sign."""
    return int(values.min()) if float(values.max() - values.min()) < 64 else 0


def _pointers(meaning: _Meaning, outs: int, ins: int, tensors: dict[str, Tensor], shared: int) -> _Panels:
    kind, zero, most, padded = meaning.kind, meaning.zero, 2**meaning.bits - 1, -(-ins // BLOCK) * BLOCK
    if meaning.table is not None and kind is Kind.FLOATS:
        tensors["values"] = meaning.table.float().contiguous()
    elif meaning.table is not None:
        lowest = _lowest(meaning.table)
        tensors["table"] = (meaning.table - lowest).to(torch.int8)
        kind, zero, most = Kind.UNSIGNED if lowest else Kind.SIGNED, zero - lowest, int(tensors["table"].max())
    scale_type = (
        7 if meaning.nested else _SCALES[tensors["scale"].dtype] if meaning.scale_type is None else meaning.scale_type
    )
    names = ("codes", "table", "values", "scale", "least", "over", "least_over", "nested", "large")
    return _Panels(
        bits=meaning.bits, kind=int(kind), most=most, scale_type=scale_type, by_scale=meaning.by_scale,
        least_type=_SCALES[tensors["least"].dtype] if "least" in tensors else 0, shared=shared,
        outs=outs, ins=padded, group=meaning.group or padded, zero=zero, factor=meaning.factor,
        offset=float(tensors["offset"]) if meaning.nested else 0.0, **{name: tensors[name].data_ptr() for name in names if name in tensors},
    )  # fmt: skip


def relaid(native: Native, piece: PackedMatrix) -> bool:
    """Lays every copy out, once. False: it stays as it is."""
    if piece.relaid:
        return True
    found = [lay_out(native, piece, copy) for copy in range(piece.num_copies)]
    made = tuple(each for each in found if each is not None)
    if len(made) < len(found):
        return False
    piece.relay(made)
    return True


@dataclass(frozen=True, slots=True)
class InputForm:
    """How a piece's inputs are given. ``whole``: rounded to 8 bits, by blocks of 32 or (``by_row``) by row;
    ``rotation``: so many are rotated together first; ``rounding``: what its format does to them before, or which piece
    this is where no other shares them; ``widened``: it has no panels."""

    whole: bool = False
    by_row: bool = False
    rotation: int = 0
    rounding: str = ""
    widened: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """Pieces one below another that take the same inputs in one way; their outputs begin with column ``first`` of y.
    What a product is told of them is made once: a step of one row has little time."""

    form: InputForm
    pieces: list[PackedMatrix]
    first: int
    outs: int
    bias: Tensor | None  # their part
    weights: list[Relaid]  # what outputs point to
    outputs: Array[_Output] | None  # None: widened

    @classmethod
    def create(cls, form: InputForm, pieces: list[PackedMatrix], first: int, bias: Tensor | None, copy: int) -> Run:
        outs = sum(piece.outs for piece in pieces)
        own = None if bias is None else bias[first : first + outs]
        weights = [] if form.widened else [piece.relaid[copy] for piece in pieces]
        return cls(form, pieces, first, outs, own, weights, _outputs(weights, first, own) if weights else None)


@dataclass(frozen=True, slots=True)
class PanelProduct:
    """x [rows, ins] times matrices that lie one below another. ``rounds``: inputs may be rounded to 8 bits;
    ``vendor``: many rows that are not go to the vendor's bfloat16, over widened parts."""

    native: Native
    function: Any
    rounds: bool
    vendor: bool
    invariant: bool
    empty: Empty = plainly_empty

    def __call__(self, x: Tensor, piece: PackedMatrix, copy: int) -> Tensor:
        return self.multiply(x, self.runs([piece], None, copy), copy)

    def runs(self, pieces: Sequence[PackedMatrix], bias: Tensor | None, copy: int = 0) -> list[Run]:
        for piece in pieces:
            relaid(self.native, piece)
        forms, made, first = ((self.form_of(piece, index), piece) for index, piece in enumerate(pieces)), list[Run](), 0
        for form, group in groupby(forms, itemgetter(0)):
            made.append(Run.create(form, [piece for _, piece in group], first, bias, copy))
            first += made[-1].outs
        return made

    def form_of(self, piece: PackedMatrix, index: int) -> InputForm:
        """Raises ConfigError where its sums would depend on the batch."""
        if not piece.relaid:
            if self.invariant:
                raise ConfigError(
                    f"{piece.form.label} with groups as they are here is multiplied by parts, whose sums depend on the batch; "
                    "leave --batch-invariant out, or use --quantization none."
                )
            return InputForm(widened=True)
        weight, eight = piece.relaid[0], piece.form.eight
        own = str(index) if "order" in weight.tensors else ""
        if eight is None:
            turned = 0 if piece.coding is None else piece.coding.rotation
            if turned > BLOCK or own:
                turned, own = 0, own or f"rotated by {turned}"
            return InputForm(self.rounds and weight.whole, rotation=turned, rounding=own)
        if eight.kind == "int8" and not eight.static:
            return InputForm(whole=True, by_row=True, rounding=own)
        return InputForm(rounding=str(index) if eight.static else piece.form.label)

    def multiply(self, x: Tensor, runs: Sequence[Run], copy: int = 0) -> Tensor:
        y = self.empty((len(x), runs[-1].first + runs[-1].outs), x.dtype, x.device)
        for run in runs:
            if run.outputs is None or (self.vendor and not run.form.whole and len(x) > MANY_ROWS):
                wide = torch.cat([widened(x, piece, copy) for piece in run.pieces], 1)
                y[:, run.first : run.first + run.outs].copy_(wide if run.bias is None else wide + run.bias)
            elif len(x):
                self._call(x, run, run.outputs, y, copy)
        return y

    def _call(self, x: Tensor, run: Run, outputs: Array[_Output], y: Tensor, copy: int) -> None:
        piece, weight, by_row, turned = run.pieces[0], run.weights[0], run.form.by_row, run.form.rotation
        inputs = rows_of(x if by_row or turned else piece.activated(x, copy))
        if (order := weight.tensors.get("order")) is not None:
            inputs = inputs[:, order]
        rows, there = inputs.shape
        places = inputs.stride(0), weight.pointers.ins, there, inputs.data_ptr()
        given = _Inputs(TYPES[x.dtype], by_row, turned, rows, *places)
        if self.function(
            len(outputs), outputs, byref(given), y.data_ptr(), y.stride(0), run.form.whole, torch.get_num_threads()
        ):
            raise MemoryError(f"no memory for {rows} rows of {there} inputs")


def _outputs(weights: Sequence[Relaid], first: int, bias: Tensor | None) -> Array[_Output]:
    """``first``: column of the first one; ``bias``: theirs."""
    made, begin = (_Output * len(weights))(), 0
    for each, weight in zip(made, weights, strict=True):
        each.w, each.first = pointer(weight.pointers), first + begin
        each.bias = None if bias is None else bias[begin:].data_ptr()
        begin += weight.outs
    return made


def _product(native: Native, site: CallSite[Any], served: Sequence[object], *, rounds: bool) -> PanelProduct | Declined:
    """``served``: of each piece, what its codes are; None: it has none."""
    if not served or None in served:
        others = (
            label
            for label, one in zip(site.facts.formats, served or (None,) * len(site.facts.formats), strict=True)
            if one is None
        )
        return Declined(f"computes with codes of few bits, not with {', '.join(dict.fromkeys(others))}")
    if not native.threads and torch.get_num_threads() > 1:
        return Declined("built without OpenMP (one thread only); torch's own product uses them all")
    fast = bool(native.library["headrace_has_compressed"]())  # AVX-512 BF16
    vendor = fast and site.facts.dtype is torch.bfloat16 and not site.invariant
    function = function_of(native, "headrace_panel_product", "qPPPqii", c_int)
    return PanelProduct(native, function, rounds, vendor, site.invariant, site.empty)


def create_linear(native: Native, site: CallSite[WeightFacts], *, rounds: bool) -> Any:
    facts = site.facts
    eights = facts.eights or (None,) * len(facts.codings)
    product = _product(
        native, site, [coding or eight for coding, eight in zip(facts.codings, eights, strict=True)], rounds=rounds
    )
    if isinstance(product, Declined):
        return product

    def pack(pieces: Sequence[PackedMatrix], bias: Tensor | None) -> Callable[[Tensor], Tensor]:
        runs = product.runs(pieces, bias)
        outs = sum(run.outs for run in runs)

        def linear(x: Tensor) -> Tensor:
            return (
                product.multiply(x, runs)
                if x.dim() == 2
                else product.multiply(x.reshape(-1, x.shape[-1]), runs).view(*x.shape[:-1], outs)
            )

        return linear

    return pack


def create_moe(native: Native, site: CallSite[ExpertFacts], *, rounds: bool) -> Any:
    product = _product(native, site, site.facts.codings, rounds=rounds)
    return product if isinstance(product, Declined) else partial(packed_moe, multiply=product)
