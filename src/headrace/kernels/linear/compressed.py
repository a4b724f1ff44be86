"""Linear layers over weights of 12 bits that are bfloat16 without loss.

What lives here: such a weight, and the linear over it. What may not: its form and mathematics (compressed.c), compiling
(c_compiler.py).

A decode step reads every weight once, so a quarter less to read is a quarter less time where memory is the limit.
Products of up to ``FEW_ROWS`` rows read the weight as it is held. For more it is unpacked part by part and torch's
blocked product reads the parts, except in batch-invariant engines: our own product adds up a row in the same order
however many there are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from ctypes import CDLL, Structure, byref, c_int, c_int64, c_void_p
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels.build.c_compiler import Native
from headrace.kernels.candidate import CallSite, Declined, Empty, WeightFacts
from headrace.kernels.linear.packed import PackedMatrix

LOSSLESS = "12 bits, lossless"  # the format's label
FEW_ROWS = 1024
PART_BYTES = 2**24  # of a weight, unpacked at once
_COLUMNS, _DEPTH, _GROUP_BYTES, _WIDE_BYTES = 16, 4, 96, 32  # as compressed.c lays out
_WIDTHS = (1, 2, 4, 8, 12, 16)  # rows of x that the product takes at once; beyond, multiples of the last


_TENSORS = ("panels", "bases", "first_wide", "wide_at", "wide")


class _Pointers(Structure):
    """compressed.c's Compressed."""

    _fields_ = [(name, c_void_p) for name in _TENSORS]


@dataclass(frozen=True, slots=True, eq=False)
class CompressedWeight:
    """A weight [out, in] of bfloat16; ``in`` is a multiple of 4. ``tensors`` are compressed.c's, by its names."""

    out_features: int
    in_features: int
    tensors: Mapping[str, Tensor]
    pointers: _Pointers

    @classmethod
    def of(cls, out_features: int, in_features: int, tensors: Mapping[str, Tensor]) -> CompressedWeight:
        return cls(out_features, in_features, tensors, _Pointers(*(tensors[name].data_ptr() for name in _TENSORS)))


def compress(library: CDLL, weight: Tensor) -> CompressedWeight:
    """``weight``: bfloat16 [out, in], its rows contiguous."""
    rows, depth = weight.shape
    panels, groups, threads = -(-rows // _COLUMNS), depth // _DEPTH, torch.get_num_threads()
    packed, bases = torch.empty(panels, groups, _GROUP_BYTES, dtype=torch.uint8), torch.empty(panels, dtype=torch.uint8)
    is_wide = torch.empty(panels, groups, dtype=torch.uint8)
    source = (c_int64(rows), c_int64(depth), c_void_p(weight.data_ptr()), c_int64(weight.stride(0)))
    library["headrace_compress"](
        *source, *(c_void_p(each.data_ptr()) for each in (packed, bases, is_wide)), c_int(threads)
    )
    found = is_wide.view(-1).nonzero().view(-1)
    wide = torch.empty(len(found), _WIDE_BYTES, dtype=torch.uint8)
    library["headrace_compress_wide"](
        c_int64(len(found)), *source, c_void_p(found.data_ptr()), c_void_p(wide.data_ptr())
    )
    first = torch.zeros(panels + 1, dtype=torch.int32)
    first[1:] = is_wide.sum(1, dtype=torch.int32).cumsum(0)
    tensors = (packed, bases, first, (found % groups).to(torch.int32), wide)
    return CompressedWeight.of(rows, depth, dict(zip(_TENSORS, tensors, strict=True)))


def decompress(library: CDLL, weight: CompressedWeight, begin: int, end: int) -> Tensor:
    """Rows ``begin`` (a multiple of 16) to ``end`` as they were, bfloat16 [end - begin, in]."""
    out = torch.empty(end - begin, weight.in_features, dtype=torch.bfloat16)
    library["headrace_decompress"](
        byref(weight.pointers), c_int64(weight.in_features), c_int64(begin), c_int64(end), c_void_p(out.data_ptr()),
        c_int(torch.get_num_threads()),
    )  # fmt: skip
    return out


@dataclass(frozen=True, slots=True)
class CompressedLinear:
    """y = x · weightᵀ (+ bias) over a compressed weight. Raises ValueError for an x of another width or type: C would
    not notice."""

    library: CDLL
    function: Any
    weight: CompressedWeight
    bias: Tensor | None
    invariant: bool  # the bits of a row must not depend on how many there are
    empty: Empty

    def __call__(self, x: Tensor) -> Tensor:
        if x.dtype is not torch.bfloat16 or x.shape[-1] != self.weight.in_features:
            raise ValueError(
                f"x is {x.dtype} [..., {x.shape[-1]}]; this layer takes torch.bfloat16 [..., {self.weight.in_features}]"
            )
        rows = x.reshape(-1, x.shape[-1])
        y = self.empty((*x.shape[:-1], self.weight.out_features), x.dtype, x.device)
        if len(rows) > FEW_ROWS and not self.invariant:
            self._by_parts(rows, y.view(len(rows), -1))
            return y
        pairs, width = _pairs(rows)
        self.function(
            byref(self.weight.pointers), len(rows), self.weight.out_features, self.weight.in_features, pairs.data_ptr(), width,
            None if self.bias is None else self.bias.data_ptr(), y.data_ptr(), self.weight.out_features, torch.get_num_threads(),
        )  # fmt: skip
        return y

    def _by_parts(self, x: Tensor, y: Tensor) -> None:
        step = max(_COLUMNS, PART_BYTES // (2 * self.weight.in_features) // _COLUMNS * _COLUMNS)
        for begin in range(0, self.weight.out_features, step):
            end = min(begin + step, self.weight.out_features)
            part = decompress(self.library, self.weight, begin, end)
            y[:, begin:end] = F.linear(x, part, None if self.bias is None else self.bias[begin:end])


def _pairs(x: Tensor) -> tuple[Tensor, int]:
    """x [rows, in] as the product wants it: pairs of elements as int32, [blocks, in / 2, rows of a block], with zeros
    for rows that fill one up; and how many rows that makes."""
    rows, depth = x.shape
    width = next((width for width in _WIDTHS if width >= rows), -(-rows // _WIDTHS[-1]) * _WIDTHS[-1])
    flat = x.contiguous().view(-1)
    pairs = (flat if flat.data_ptr() % 4 == 0 else flat.clone()).view(torch.int32).view(rows, depth // 2)
    if width > rows:
        pairs = torch.cat((pairs, pairs.new_zeros(width - rows, depth // 2)))
    block = min(width, _WIDTHS[-1])
    return pairs.view(-1, block, depth // 2).transpose(1, 2).contiguous(), width


def missing(native: Native | Declined) -> str | None:
    """Why nothing here computes with such weights."""
    if isinstance(native, Declined):
        return native.reason
    if not native.library["headrace_has_compressed"]():
        return "needs AVX-512 with BF16: elsewhere there is no product over such weights"
    if not native.threads and torch.get_num_threads() > 1:
        return "built without OpenMP (one thread only); torch's own product uses them all"
    return None


def create_linear(native: Native, site: CallSite[WeightFacts]) -> Any:
    if set(site.facts.formats) != {LOSSLESS}:
        return Declined(f"computes with {LOSSLESS} alone")
    if (reason := missing(native)) is not None:
        return Declined(reason)
    function = native.library["headrace_compressed_linear"]
    function.argtypes = [c_void_p, c_int64, c_int64, c_int64, c_void_p, c_int64, c_void_p, c_void_p, c_int64, c_int]
    function.restype = None

    def pack(pieces: Sequence[PackedMatrix], bias: Tensor | None) -> CompressedLinear:
        (piece,) = pieces
        weight = CompressedWeight.of(piece.outs, piece.ins, piece.tensors[0])
        return CompressedLinear(native.library, function, weight, bias, site.invariant, site.empty)

    return pack
