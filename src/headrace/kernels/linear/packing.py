"""Weights of few bits, laid out as kernels multiply them (packed.cuh, triton_codes.py).

    block      64 rows by 128 of K, all blocks of 64 rows one behind the other: [tiles, steps, bytes]
    codes      in planes of 8, 4, 2 or 1 bits (6 bits: the low 4, then the high 2). Of a thread of 128 16 bytes or
    fewer, then those of the
               next thread; and again, until the block's are there. A thread's are in the order of the matrix
               instruction: of 16 of K its
               rows g and g + 8, and columns 2t, 2t + 1, 2t + 8, 2t + 9 (MARLIN, Frantar et al. 2024)
    scales     of each group of K 64 of them, as ``Coding.scales`` says (bytes: of each row those of all groups); then
    as many codes of zero, bfloat16, or shifts, where there are some

What lives here: the layout, into it and back, and what it takes of memory. What may not: kernels, what formats mean
(quant/).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS, DEPTH = 64, 128  # of a block
_TILES = 4  # blocks are read up to so many one below another
_CHUNK = 2**12  # rows that are laid out at once
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


class Scales(Enum):
    """What a scale is held in. All but ``POWER`` are multiplied by a factor of their row."""

    HALF = 0  # float16
    POWER = 1  # an exponent of 2, 127 added
    FP8 = 2  # e4m3
    BYTE = 3  # int8, times a float16 of the row's block; shifts likewise


@dataclass(frozen=True, slots=True)
class Coding:
    """What codes of ``bits`` 1 to 8 mean: integers around their middle, or around ``zeros`` of their own, or from 0
    with ``shifts`` that are added to what the scale makes of them; or ``floats``: e2m1, e4m3; or entries of a ``table``
    of 16.

    ``sets``: groups of K in a block, each with a scale (1, 2, 4 or 8): of 128 and more, of 64, of 32, of 16.
    ``ordered``: columns may be in another order than inputs. ``rotation``: of inputs so many are rotated together
    before (quant/rotated.py).
    """

    bits: int
    sets: int = 1
    zeros: bool = False
    floats: bool = False
    shifts: bool = False
    table: bool = False
    scales: Scales = Scales.HALF
    ordered: bool = False
    rotation: int = 0

    @property
    def planes(self) -> tuple[int, ...]:
        return tuple(each for each in (8, 4, 2, 1) if self.bits & each)

    @property
    def code_bytes(self) -> int:
        return ROWS * DEPTH * self.bits // 8

    @property
    def scale_bytes(self) -> int:
        """Of a block; zeros or shifts take as much again."""
        return {Scales.HALF: 2 * self.sets, Scales.BYTE: 2 + self.sets}.get(self.scales, self.sets) * ROWS

    @property
    def block_bytes(self) -> int:
        return self.code_bytes + self.scale_bytes * (1 + (self.zeros or self.shifts))

    @property
    def middle(self) -> int:
        """The code of zero, where codes are integers and nothing else says."""
        return 0 if self.floats or self.table or self.shifts else 2 ** (self.bits - 1)

    @property
    def ring(self) -> bool:
        """Whether ring.cu multiplies it."""
        return not (self.rotation or self.table)

    @property
    def plain(self) -> bool:
        """Whether experts.cu does."""
        return self.ring and self.bits in (4, 8) and self.sets <= 4 and self.scales is Scales.HALF and not self.shifts

    @property
    def many(self) -> bool:
        """Whether packed_gemm.cu does, for many rows."""
        return self.plain and self.sets == 1

    @property
    def whole(self) -> bool:
        """Whether triton_codes.py multiplies it by int8: numbers of up to 8 bits with a sign, and one scale a block."""
        numbers = not (self.floats or self.table or self.shifts or self.ordered or self.rotation) and (
            self.bits < 8 or not self.zeros
        )
        return numbers and self.sets == 1 and self.scales is Scales.HALF

    def blocks(self, outs: int, ins: int) -> tuple[int, int]:
        """One below another, one behind another."""
        return -(-outs // (_TILES * ROWS)) * _TILES, -(-ins // DEPTH)


def sets_of(group: int) -> int | None:
    """Of groups of so many inputs, 0: all. None: they are no multiple and no part of a block that kernels know."""
    return 1 if group % DEPTH == 0 else {64: 2, 32: 4, 16: 8}.get(group)


@dataclass(frozen=True, slots=True)
class Codes:
    """Some rows of a matrix in codes. ``group``: inputs of one scale, 0: all.

    ``beside``: codes of zero, or shifts. ``large``: with scales of bytes, what those of ``size`` inputs are multiplied
    by; behind it the same of shifts. ``order``: the input that each column belongs to, where they were brought together
    by group.
    """

    codes: Tensor  # [rows, ins], uint8
    scale: Tensor  # [rows, groups]: any float; POWER: uint8; FP8: float8_e4m3fn; BYTE: int8
    group: int = 0
    beside: Tensor | None = None  # [rows, groups]
    factor: Tensor | None = None  # [rows], float32
    large: tuple[Tensor, ...] = ()  # [rows, ins / size]
    size: int = 0
    table: Tensor | None = None  # [16], float32
    order: Tensor | None = None  # [ins], int32


@dataclass(frozen=True, slots=True)
class Packed:
    """A weight so laid out. ``gated``: rows of both halves take turns by eight."""

    blocks: Tensor  # [tiles, steps, bytes], uint8
    factor: Tensor  # [tiles · 64], float32: what a row is multiplied by
    coding: Coding
    outs: int
    ins: int
    gated: bool = False
    table: Tensor | None = None
    order: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        return self.blocks.nbytes + self.factor.nbytes

    def dense(self, rows: slice, dtype: torch.dtype) -> Tensor:
        """[rows, ins], in plain torch."""
        asked = torch.arange(self.outs, device=self.blocks.device)[rows]
        if not len(asked):
            return self.blocks.new_empty(0, self.ins, dtype=dtype)
        laid = (
            asked if not self.gated else asked % (self.outs // 2) // 8 * 16 + asked // (self.outs // 2) * 8 + asked % 8
        )
        first, last = int(laid.min()) // ROWS, int(laid.max()) // ROWS + 1
        wide = _unpacked(self, first, last)[laid - first * ROWS, : self.ins]
        return (
            wide.to(dtype)
            if self.order is None
            else torch.empty_like(wide).index_copy_(1, self.order.long(), wide).to(dtype)
        )


def empty(
    coding: Coding, outs: int, ins: int, device: torch.device, *, gated: bool, ordered: bool, copies: int = 1
) -> Packed:
    """A weight of zeros, for warm-ups; ``copies``: so many have room there."""
    tiles, steps = coding.blocks(outs, ins)
    table = torch.zeros(16, device=device) if coding.table else None
    order = torch.arange(ins, dtype=torch.int32, device=device) if ordered else None
    blocks = torch.zeros(copies, tiles, steps, coding.block_bytes, dtype=torch.uint8, device=device)[0]
    return Packed(blocks, torch.zeros(copies, tiles * ROWS, device=device)[0], coding, outs, ins, gated, table, order)


Read = Callable[[slice], Codes]  # some rows of a matrix


def pack(read: Read, outs: int, coding: Coding, *, gated: bool = False) -> Packed:
    """``outs`` rows as ``read`` has them, a few at a time. ``gated``: the first half of them gates the second, each a
    multiple of eight."""
    parts = list(_chunks(read, outs, gated=gated))
    ins = parts[0].codes.shape[1]
    tiles, _ = coding.blocks(outs, ins)
    laid = [_pack(each, coding, gated=gated) for each in parts]
    blocks, factor = (torch.cat([each[index] for each in laid]) for index in range(2))
    padding = (0, 0, 0, 0, 0, tiles - len(blocks))
    blocks, factor = F.pad(blocks, padding), F.pad(factor, (0, tiles * ROWS - len(factor)))
    return Packed(blocks.contiguous(), factor, coding, outs, ins, gated, parts[0].table, parts[0].order)


def stack(parts: list[Packed]) -> Packed:
    """One below another; all but the last have whole blocks of rows."""
    first, tiles = parts[0], [each.outs // ROWS for each in parts[:-1]]
    blocks = torch.cat([*(each.blocks[:count] for each, count in zip(parts, tiles, strict=False)), parts[-1].blocks])
    factor = torch.cat(
        [*(each.factor[: count * ROWS] for each, count in zip(parts, tiles, strict=False)), parts[-1].factor]
    )
    missing = -len(blocks) % _TILES
    blocks, factor = F.pad(blocks, (0, 0, 0, 0, 0, missing)), F.pad(factor, (0, missing * ROWS))
    return Packed(
        blocks, factor, first.coding, sum(each.outs for each in parts), first.ins, table=first.table, order=first.order
    )


def _chunks(read: Read, outs: int, *, gated: bool) -> Iterator[Codes]:
    if not gated:
        yield from (read(slice(at, min(at + _CHUNK, outs))) for at in range(0, outs, _CHUNK))
        return
    half = outs // 2
    for at in range(0, half, _CHUNK // 2):
        end = min(at + _CHUNK // 2, half)
        yield joined([read(slice(at, end)), read(slice(half + at, half + end))])


def joined(parts: list[Codes]) -> Codes:
    """One below another; of one kind."""
    first = parts[0]

    def all_of(each: list[Tensor | None]) -> Tensor | None:
        there = [tensor for tensor in each if tensor is not None]
        return torch.cat(there) if len(there) == len(parts) else None

    held = first.scale.dtype
    as_bytes = torch.uint8 if held.itemsize == 1 else held  # float8 is not joined as it is
    scale = torch.cat([each.scale.view(as_bytes) for each in parts]).view(held)
    return Codes(
        torch.cat([each.codes for each in parts]), scale, first.group,
        all_of([each.beside for each in parts]), all_of([each.factor for each in parts]),
        tuple(torch.cat(each) for each in zip(*(part.large for part in parts), strict=True)), first.size, first.table, first.order,
    )  # fmt: skip


def _pack(part: Codes, coding: Coding, *, gated: bool) -> tuple[Tensor, Tensor]:
    """(blocks [tiles, steps, bytes], factors [tiles · 64]) of some rows."""
    turned: Callable[[Tensor], Tensor] = _in_turns if gated else lambda rows: rows
    codes, scale = turned(part.codes), turned(part.scale)
    beside = None if part.beside is None else turned(part.beside)
    large = [turned(each) for each in part.large]
    (outs, ins), device = codes.shape, codes.device
    tiles, steps = -(-outs // ROWS), -(-ins // DEPTH)
    codes = F.pad(codes, (0, steps * DEPTH - ins, 0, tiles * ROWS - outs))
    factor = torch.ones(outs, device=device) if part.factor is None else turned(part.factor.view(-1, 1)).view(-1)
    unit = torch.ones(outs, 1, device=device)
    if coding.scales in (Scales.HALF, Scales.BYTE):  # none overflows, and what was of float16 stays exact
        held = [large[0] if large else scale, *([large[1] if large else beside] if coding.shifts else [])]
        most = torch.stack([each.float().abs().amax(1) for each in held if each is not None]).amax(0)
        unit = torch.ldexp(unit, (torch.frexp(most)[1] - 15).view(-1, 1).clamp(min=-126))

    def by_set(values: Tensor, group: int, sets: int) -> Tensor:
        return _by_set(values, group or ins, sets, tiles, steps)

    def half(values: Tensor, group: int, sets: int) -> Tensor:
        return by_set(values.float() / unit, group, sets).half().view(torch.uint8)

    low, sections = 0, []
    for plane in coding.planes:
        sections.append(_thread_order(codes >> low & (2**plane - 1), plane))
        low += plane
    for index, values in enumerate((scale, beside if coding.zeros or coding.shifts else None)):
        if values is None:
            continue
        if large:
            sections.append(half(large[index], part.size, 1))
        if index and coding.zeros:  # beside 128, at which codes of few bits are made floats
            values = values.float() + (128.0 if coding.bits < 8 else 0.0)
            sections.append(by_set(values, part.group, coding.sets).bfloat16().view(torch.uint8))
        elif coding.scales is Scales.HALF:
            sections.append(half(values, part.group, coding.sets))
        else:
            laid = by_set(values.view(torch.uint8), part.group, coding.sets)
            sections.append(laid.transpose(2, 3) if coding.scales is Scales.BYTE else laid)
    blocks = torch.cat([each.reshape(tiles, steps, -1) for each in sections], -1)
    return blocks, F.pad(factor.float() * unit.view(-1), (0, tiles * ROWS - outs))


def _in_turns(rows: Tensor) -> Tensor:
    return rows.view(2, rows.shape[0] // 16, 8, -1).transpose(0, 1).reshape(rows.shape)


def _thread_order(codes: Tensor, bits: int) -> Tensor:
    """[tiles · 64, steps · 128] → [tiles, steps, bytes]."""
    tiles, steps, pieces = codes.shape[0] // ROWS, codes.shape[1] // DEPTH, 4 if bits == 8 else 2
    # rows: warp, h (of g and g + 8), g; columns: piece of a thread, 16 of K in it, side (of 2t and 2t + 8), t, e
    view = codes.view(tiles, 4, 2, 8, steps, pieces, 8 // pieces, 2, 4, 2)
    tile, warp, h, g, step, piece, sixteen, side, t, e = range(10)
    if bits == 8:  # bytes: of two words, side; of each, e and h
        return view.permute(tile, step, piece, warp, g, t, sixteen, side, e, h).reshape(tiles, steps, -1)
    view = view.permute(tile, step, piece, warp, g, t, sixteen, e, side, h).reshape(tiles, steps, -1, 8 // bits)
    return sum(view[..., index] << index * bits for index in range(1, 8 // bits)) | view[..., 0]


def _row_order(packed: Tensor, bits: int) -> Tensor:
    """Back: [tiles, steps, bytes] → [tiles · 64, steps · 128]."""
    tiles, steps, _ = packed.shape
    if bits == 8:
        view = packed.reshape(tiles, steps, 4, 4, 8, 4, 2, 2, 2, 2).permute(0, 3, 9, 4, 1, 2, 6, 7, 5, 8)
    else:
        codes = torch.stack([packed >> index * bits & (2**bits - 1) for index in range(8 // bits)], -1)
        view = codes.reshape(tiles, steps, 2, 4, 8, 4, 4, 2, 2, 2).permute(0, 3, 9, 4, 1, 2, 6, 8, 5, 7)
    return view.reshape(tiles * ROWS, steps * DEPTH)


def _by_set(values: Tensor, group: int, sets: int, tiles: int, steps: int) -> Tensor:
    """[outs, groups] → [tiles, steps, sets, 64], zeros beyond the last row."""
    size = DEPTH // sets
    assert values.shape[1] == 1 or group % size == 0, f"groups of {group} in sets of {size}"
    index = torch.arange(steps * sets, device=values.device) * size // group
    there = F.pad(values[:, index.clamp(max=values.shape[1] - 1)], (0, 0, 0, tiles * ROWS - values.shape[0]))
    return there.view(tiles, ROWS, steps, sets).permute(0, 2, 3, 1).contiguous()


def _unpacked(packed: Packed, first: int, last: int) -> Tensor:
    """Blocks of rows as float32, [rows, steps · 128], columns as they lie."""
    coding, blocks = packed.coding, packed.blocks[first:last]
    tiles, steps, _ = blocks.shape
    at, low, codes = 0, 0, blocks.new_zeros(())
    for plane in coding.planes:
        codes = codes | _row_order(blocks[..., at : at + plane * 1024], plane) << low
        at, low = at + plane * 1024, low + plane
    scale = _section(blocks, at, coding, zeros=False)
    values = _meant(codes, coding, packed.table).view(tiles * ROWS, steps * coding.sets, -1)
    if coding.zeros:
        values = values - _section(blocks, at + coding.scale_bytes, coding, zeros=True)
    values = values * scale
    if coding.shifts:
        values = values + _section(blocks, at + coding.scale_bytes, coding, zeros=False)
    return values.view(tiles * ROWS, -1) * packed.factor[first * ROWS : last * ROWS].view(-1, 1)


def _section(blocks: Tensor, at: int, coding: Coding, *, zeros: bool) -> Tensor:
    """Scales, zeros or shifts, [rows, steps · sets, 1], float32."""
    tiles, steps, sets = blocks.shape[0], blocks.shape[1], coding.sets

    def rows(part: Tensor, count: int) -> Tensor:
        return part.reshape(tiles, steps, count, ROWS).permute(0, 3, 1, 2).float()

    def taken(begin: int, size: int, dtype: torch.dtype) -> Tensor:
        return blocks[..., begin : begin + size].contiguous().view(dtype)

    if zeros:
        found = rows(taken(at, 2 * sets * ROWS, torch.bfloat16), sets) - (128.0 if coding.bits < 8 else 0.0)
    elif coding.scales is Scales.HALF:
        found = rows(taken(at, 2 * sets * ROWS, torch.float16), sets)
    elif coding.scales is Scales.BYTE:
        small = taken(at + 2 * ROWS, sets * ROWS, torch.int8).reshape(tiles, steps, ROWS, sets).permute(0, 2, 1, 3)
        found = rows(taken(at, 2 * ROWS, torch.float16), 1) * small.float()
    elif coding.scales is Scales.FP8:
        found = rows(taken(at, sets * ROWS, torch.float8_e4m3fn), sets)
    else:
        found = (rows(taken(at, sets * ROWS, torch.uint8), sets) - 127).exp2()
    return found.reshape(tiles * ROWS, steps * sets, 1)


def _meant(codes: Tensor, coding: Coding, table: Tensor | None) -> Tensor:
    if coding.floats and coding.bits == 8:
        return codes.contiguous().view(torch.float8_e4m3fn).float()
    if coding.floats or coding.table:
        entries = torch.tensor(E2M1, device=codes.device) if table is None else table
        return entries[codes.int()]
    return codes.float() - (0 if coding.zeros else coding.middle)


def bits_a_weight(coding: Coding) -> float:
    """Scales and what else a block holds counted in."""
    return 8 * coding.block_bytes / (ROWS * DEPTH)
