"""Weights of 1 to 8 bits in groups of inputs, packed into 32-bit words: GPTQ, AWQ, compressed-tensors' packed ones, and
two levels a group.

What lives here: the four layouts on disk, which are held as they are. What may not: configs (config.py), how such
weights are found (quantize/).

GPTQ (Frantar et al. 2022): words along the inputs, zeros along the outputs; ``act_order``: inputs belong to groups in
any order. AWQ (Lin et al. 2023): words along the outputs, of which every eight are in an order of their own.
compressed-tensors: words along the inputs, row by row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace.quant import Format, FormatError, StoredTensor, Tensors, check_scale
from headrace.quant.codes import Activations, by_group, codes_of, coding_of, unpack

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from headrace.kernels.candidate import EightBits
    from headrace.kernels.linear.packing import Codes, Coding

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where each of eight outputs lies in its word


def _widened(codes: Tensor, scales: Tensor, zeros: Tensor | None, order: Tensor | None, group: int) -> Tensor:
    """``order``: the group of each input, where they are in any order."""
    if order is None:
        return by_group(codes, scales, zeros, size=group)
    index = order.long()
    return (codes if zeros is None else codes - zeros[:, index]) * scales[:, index]


def _in_order(order: Tensor, group: int) -> Tensor:
    """The group of each input, where they lie one behind another."""
    return order.copy_(order.new_ones(len(order)).cumsum(0) - 1).floor_divide_(group or len(order))


def _checked_order(order: Tensor | None, groups: int, name: str) -> None:
    if order is not None and bool(((order < 0) | (order >= groups)).any()):
        raise FormatError(f"{name} names groups from {int(order.min())} to {int(order.max())}, and there are {groups}")


def _in_codes(codes: Tensor, scales: Tensor, zeros: Tensor | None, order: Tensor | None, group: int) -> Codes:
    """``order``: as in ``_widened``. Columns are brought together by group."""
    codes, scales = codes.byte(), scales.contiguous()
    if order is None:
        return codes_of(codes, scales, group, zeros)
    if not _even(order, group):
        raise FormatError(f"groups are of other sizes than {group}")
    found = order.sort(stable=True).indices
    return codes_of(codes[:, found], scales, group, zeros, order=found.int())


def _order_of(tensors: Tensors) -> Tensor | None:
    return tensors.get("g_idx", tensors.get("weight_g_idx"))


def _even(order: Tensor, group: int) -> bool:
    return bool((order.bincount(minlength=len(order) // group) == group).all())


def _words(count: int, bits: int) -> int:
    return -(-count * bits // 32)


@dataclass(frozen=True, slots=True)
class _Grouped(Format):
    """``group``: inputs of one scale; 0: all of a row."""

    bits: int
    group: int
    zero: bool = True

    @property
    def act_order(self) -> bool:
        return False

    def shares(self, *, by_inputs: bool) -> bool:
        return not (by_inputs and self.act_order)

    def groups(self, ins: int) -> int:
        return -(-ins // self.group) if self.group else 1

    def problem(self, outs: int, ins: int) -> str | None:
        if ins % 32 or outs % 32:
            return (
                f"{outs} outputs of {ins} inputs are no whole words of {self.bits} bits: both must be multiples of 32"
            )
        return None if not self.group or ins % self.group == 0 else f"{ins} inputs are no whole groups of {self.group}"

    @property
    def coding(self) -> Coding | None:
        return self._coding

    @property
    def _coding(self) -> Coding | None:
        return coding_of(self.bits, self.group, zeros=self.zero, ordered=self.act_order)

    def has_codes(self, tensors: Tensors) -> bool:
        order = _order_of(tensors)
        return Format.has_codes(self, tensors) and (order is None or _even(order, self.group))

    def dense(self, tensors: Tensors, rows: Any, dtype: torch.dtype) -> Tensor:
        codes, scales, zeros = self._parts(tensors, rows)
        wide, least = (codes.float() - 2 ** (self.bits - 1), None) if zeros is None else (codes.float(), zeros.float())
        return _widened(wide, scales.float(), least, _order_of(tensors), self.group).to(dtype)

    def codes(self, tensors: Tensors, rows: slice) -> Codes:
        return _in_codes(*self._parts(tensors, rows), _order_of(tensors), self.group)

    def _parts(self, tensors: Tensors, rows: slice) -> tuple[Tensor, Tensor, Tensor | None]:
        """Codes [rows, ins], scales and zeros [rows, groups]; without zeros, half of a code's range is zero."""
        raise NotImplementedError

    @property
    def by_row(self) -> bool:
        return False

    @property
    def unit_scale(self) -> float:
        return float(0.07 / 2**self.bits)

    def _said(self, name: str, more: str = "") -> str:
        return f"{name}, {self.bits} bits, " + (f"groups of {self.group}" if self.group else "one scale a row") + more


@dataclass(frozen=True, slots=True)
class GPTQ(_Grouped):
    """w = scale · (code - zero). ``zero_offset``: what version 1 of the format subtracts from zeros before it stores
    them."""

    act_order: bool = False
    zero_offset: int = 1

    @property
    def label(self) -> str:
        return self._said("GPTQ", ", activation order" if self.act_order else "")

    def tensors(self, outs: int, ins: int) -> tuple[StoredTensor, ...]:
        groups = self.groups(ins)
        return (
            StoredTensor("qweight", (_words(ins, self.bits), outs), "int32"),
            StoredTensor("qzeros", (groups, _words(outs, self.bits)), "int32"),
            StoredTensor("scales", (groups, outs), "float16", any_float=True),
            StoredTensor("g_idx", (ins,), "int32", optional=not self.act_order),
        )

    def prepare(self, tensors: Tensors) -> Tensors:
        check_scale(tensors, "scales")
        _checked_order(order := _order_of(tensors), tensors["scales"].shape[0], "g_idx")
        if order is not None and order.equal(_in_order(order.clone(), self.group)):
            del tensors["g_idx"]
        return tensors

    def make_up(self, tensors: Tensors, seed: int) -> None:
        Format.make_up(self, tensors, seed)
        _in_order(tensors["g_idx"], self.group)

    def _parts(self, tensors: Tensors, rows: slice) -> tuple[Tensor, Tensor, Tensor]:
        first, last, _ = rows.indices(tensors["scales"].shape[1])
        words = slice(first * self.bits // 32, _words(last, self.bits))
        zeros = unpack(tensors["qzeros"][:, words], self.bits) + self.zero_offset & 2**self.bits - 1
        codes = unpack(tensors["qweight"][:, rows].t(), self.bits)
        return codes, tensors["scales"][:, rows].t(), zeros.t()[: last - first]


@dataclass(frozen=True, slots=True)
class AWQ(_Grouped):
    """w = scale · (code - zero), as its GEMM version stores it."""

    @property
    def label(self) -> str:
        return self._said("AWQ")

    def tensors(self, outs: int, ins: int) -> tuple[StoredTensor, ...]:
        groups, words = self.groups(ins), _words(outs, self.bits)
        return (
            StoredTensor("qweight", (ins, words), "int32"),
            StoredTensor("qzeros", (groups, words), "int32"),
            StoredTensor("scales", (groups, outs), "float16", any_float=True),
        )

    def prepare(self, tensors: Tensors) -> Tensors:
        check_scale(tensors, "scales")
        return tensors

    def _parts(self, tensors: Tensors, rows: slice) -> tuple[Tensor, Tensor, Tensor]:
        first, last, _ = rows.indices(tensors["scales"].shape[1])
        words = slice(first * self.bits // 32, _words(last, self.bits))
        codes, zeros = (self._in_order(tensors[name][:, words])[: last - first] for name in ("qweight", "qzeros"))
        return codes, tensors["scales"][:, rows].t(), zeros

    def _in_order(self, words: Tensor) -> Tensor:
        """[n, words] → codes [outputs, n]"""
        codes = unpack(words, self.bits).view(len(words), -1, 8)
        turned = codes.new_empty(codes.shape)
        # a list as an index would be copied from the host, which no captured step may
        for output, place in enumerate(_AWQ_ORDER):
            turned[..., output] = codes[..., place]
        return turned.view(len(words), -1).t()


@dataclass(frozen=True, slots=True)
class PackedIntegers(_Grouped):
    """compressed-tensors' ``pack-quantized``: codes with half their range added, zeros (if there are any) likewise,
    along the outputs."""

    act_order: bool = False
    activations: Activations | None = None

    @property
    def label(self) -> str:
        more = ", activation order" if self.act_order else ""
        return self._said("packed integers", more if self.activations is None else f"{more}, {self.activations.label}")

    def problem(self, outs: int, ins: int) -> str | None:
        least = 32 // self.bits if 32 % self.bits == 0 else 32
        return (
            f"{ins} inputs are no whole words of {self.bits} bits: they must be a multiple of {least}"
            if ins % least
            else None
        )

    def tensors(self, outs: int, ins: int) -> tuple[StoredTensor, ...]:
        groups = self.groups(ins)
        found = [
            StoredTensor("weight_packed", (outs, _words(ins, self.bits)), "int32"),
            StoredTensor("weight_scale", (outs, groups), "bfloat16", any_float=True),
            StoredTensor("weight_shape", (2,), "int64", optional=True),
        ]
        if self.zero:
            found.append(StoredTensor("weight_zero_point", (_words(outs, self.bits), groups), "int32"))
        if self.act_order:
            found.append(StoredTensor("weight_g_idx", (ins,), "int32"))
        if self.activations is not None and self.activations.static:
            found.append(StoredTensor("input_scale", (), "float32"))
        return tuple(found)

    def prepare(self, tensors: Tensors) -> Tensors:
        check_scale(tensors, "weight_scale", "input_scale")
        shape = tensors.pop("weight_shape", None)
        rows, words = tensors["weight_packed"].shape
        if shape is not None and (int(shape[0]) != rows or _words(int(shape[1]), self.bits) != words):
            raise FormatError(f"weight_shape says {shape.tolist()}, and weight_packed has {rows} rows of {words} words")
        _checked_order(_order_of(tensors), tensors["weight_scale"].shape[1], "weight_g_idx")
        return tensors

    def make_up(self, tensors: Tensors, seed: int) -> None:
        Format.make_up(self, tensors, seed)
        rows, words = tensors["weight_packed"].shape
        tensors["weight_shape"].copy_(tensors["weight_shape"].new_tensor([rows, words * 32 // self.bits]))
        if self.act_order:
            _in_order(tensors["weight_g_idx"], self.group)

    @property
    def coding(self) -> Coding | None:
        return self._coding if self.activations is None or self.eight is not None else None

    @property
    def eight(self) -> EightBits | None:
        from headrace.kernels.candidate import EightBits

        inputs = self.activations
        if inputs is None or inputs.kind != "int8" or inputs.group or self._coding is None:
            return None
        return EightBits("int8", static=inputs.static)

    def _parts(self, tensors: Tensors, rows: slice) -> tuple[Tensor, Tensor, Tensor | None]:
        packed = tensors["weight_packed"]
        first, last, _ = rows.indices(packed.shape[0])
        codes, scales = unpack(packed[rows], self.bits), tensors["weight_scale"][rows]
        if not self.zero:
            return codes, scales, None
        words = slice(first * self.bits // 32, _words(last, self.bits))
        return codes, scales, unpack(tensors["weight_zero_point"][words].t(), self.bits).t()[: last - first]


@dataclass(frozen=True, slots=True)
class TwoLevels(Format):
    """One bit a weight: w = low + code · scale. ``group``: inputs that share both levels. Words of 32 codes, the first
    lowest."""

    group: int

    @property
    def label(self) -> str:
        return f"two levels of {self.group}"

    def problem(self, outs: int, ins: int) -> str | None:
        return f"{ins} inputs are no whole groups of {self.group}" if ins % self.group else None

    def tensors(self, outs: int, ins: int) -> tuple[StoredTensor, ...]:
        groups = (outs, ins // self.group)
        return (
            StoredTensor("weight_packed", (outs, ins // 32), "int32"),
            StoredTensor("weight_scale", groups, "float16"),
            StoredTensor("weight_low", groups, "float16"),
        )

    def prepare(self, tensors: Tensors) -> Tensors:
        check_scale(tensors, "weight_scale", "weight_low", zeros=True)
        return tensors

    def dense(self, tensors: Tensors, rows: Any, dtype: torch.dtype) -> Tensor:
        codes, scale, low = self._parts(tensors, rows)
        ones = by_group(codes.float(), scale.float(), size=self.group)
        return (ones + low.float().repeat_interleave(self.group, -1)).to(dtype)

    @property
    def coding(self) -> Coding | None:
        return coding_of(1, self.group, shifts=True)

    def codes(self, tensors: Tensors, rows: slice) -> Codes:
        codes, scale, low = self._parts(tensors, rows)
        return codes_of(codes.byte(), scale, self.group, low)

    def _parts(self, tensors: Tensors, rows: Any) -> tuple[Tensor, Tensor, Tensor]:
        packed, scale, low = (tensors[f"weight_{name}"][rows] for name in ("packed", "scale", "low"))
        return unpack(packed, 1), scale, low

    @property
    def unit_scale(self) -> float:
        return 0.04
