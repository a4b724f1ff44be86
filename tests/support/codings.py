"""Random weights in codes of few bits, and in every format that is such codes, and what they mean."""

from __future__ import annotations

import torch

from headrace.kernels.linear.packing import E2M1, Codes, Coding, Packed, Scales, pack
from headrace.layers.packed import Piece
from headrace.quant import Format
from headrace.quant.floats import MXFP4, NVFP4, NormalFloat
from headrace.quant.gguf import BLOCKS, GGUFBlocks
from headrace.quant.integers import AWQ, GPTQ, PackedIntegers, TwoLevels
from headrace.quant.scaled import WHOLE, ScaledWeight

CODINGS = (
    Coding(4), Coding(4, zeros=True), Coding(4, sets=2, zeros=True), Coding(4, sets=4), Coding(4, sets=4, floats=True),
    Coding(8), Coding(8, zeros=True), Coding(8, floats=True), Coding(8, sets=4), Coding(3), Coding(7, sets=2), Coding(1, sets=8, shifts=True),
    Coding(4, sets=4, shifts=True), Coding(4, sets=4, floats=True, scales=Scales.POWER), Coding(4, sets=8, floats=True, scales=Scales.FP8),
    *(Coding(bits, 4, shifts=True, scales=Scales.BYTE) for bits in (4, 5)), *(Coding(bits, 8, scales=Scales.BYTE) for bits in (3, 6)),
    Coding(2, 8, shifts=True, scales=Scales.BYTE),
)  # fmt: skip


def meant(
    codes: torch.Tensor, scale: torch.Tensor, beside: torch.Tensor | None, group: int, coding: Coding
) -> torch.Tensor:
    """The weight, float32. ``beside``: zeros or shifts."""

    def spread(values: torch.Tensor) -> torch.Tensor:
        return values.float().repeat_interleave(group, 1)[:, : codes.shape[1]]

    if coding.floats and coding.bits == 8:
        values = codes.view(torch.float8_e4m3fn).float()
    elif coding.floats:
        values = torch.tensor(E2M1, device=codes.device)[codes.int()]
    else:
        values = codes.float() - (spread(beside) if coding.zeros and beside is not None else float(coding.middle))
    wide = values * spread(scale)
    return wide + spread(beside) if coding.shifts and beside is not None else wide


def random_packed(
    coding: Coding, outs: int, ins: int, device: torch.device, *, gated: bool = False
) -> tuple[Packed, torch.Tensor]:
    """A weight of entries of about ins ** -0.5, and what it means."""
    group = 128 // coding.sets
    groups = -(-ins // group)
    codes = torch.randint(0, 2**coding.bits, (outs, ins), dtype=torch.uint8, device=device)
    if coding.floats and coding.bits == 8:
        codes &= 0xBF  # exponents up to that of 1, never NaN
    middle, beside = 2 ** (coding.bits - 1), None
    if coding.zeros:
        beside = torch.randint(middle - 3, middle + 4, (outs, groups), device=device)
    usual = {4: 3.0, 8: 0.5}[coding.bits] if coding.floats else 0.58 * middle
    size = ins**-0.5 / usual
    if coding.scales is Scales.BYTE:
        return _two_levels(codes, size, coding, gated=gated)
    scale = (torch.rand(outs, groups, device=device) + 0.5) * size
    if coding.shifts:
        beside = (scale * -middle).half()
    if coding.scales is Scales.POWER:
        held = scale.log2().round() + 127
        return packed(codes, held.byte(), None, group, coding, gated=gated), meant(
            codes, (held - 127).exp2(), None, group, coding
        )
    if coding.scales is Scales.FP8:
        held = (scale / size).to(torch.float8_e4m3fn)
        factor = torch.full((outs,), size, device=device)
        laid = packed(codes, held, None, group, coding, gated=gated, factor=factor)
        return laid, meant(codes, held.float() * size, None, group, coding)
    scale = scale.half()
    return packed(codes, scale, beside, group, coding, gated=gated), meant(codes, scale, beside, group, coding)


def _two_levels(codes: torch.Tensor, size: float, coding: Coding, *, gated: bool) -> tuple[Packed, torch.Tensor]:
    """Scales in bytes, and a larger one of 256 inputs; of shifts likewise."""
    (outs, ins), device, group = codes.shape, codes.device, 128 // coding.sets
    least = 0 if coding.shifts else -128
    count, groups = -(-ins // 256), -(-ins // group)
    small = torch.randint(least, 64 if coding.shifts else 128, (1 + coding.shifts, outs, groups), device=device)
    large = (torch.rand(1 + coding.shifts, outs, count, device=device) + 0.5) * size / 40
    if coding.shifts:
        large[1] *= -(2.0 ** (coding.bits - 1))
    large = large.half().float()
    both = small * large.repeat_interleave(256 // group, 2)[..., :groups]
    beside = (small[1].to(torch.int8), both[1]) if coding.shifts else (None, None)

    def read(rows: slice) -> Codes:
        small_beside = None if beside[0] is None else beside[0][rows]
        return Codes(codes[rows], small[0, rows].to(torch.int8), group, small_beside, None, tuple(large[:, rows]), 256)

    return pack(read, outs, coding, gated=gated), meant(codes, both[0], beside[1], group, coding)


def packed(
    codes: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    group: int,
    coding: Coding,
    *,
    gated: bool = False,
    factor: torch.Tensor | None = None,
) -> Packed:
    def read(rows: slice) -> Codes:
        of_rows = None if factor is None else factor[rows]
        return Codes(codes[rows], scale[rows], group, None if zero is None else zero[rows], of_rows)

    return pack(read, len(codes), coding, gated=gated)


FORMATS: tuple[Format, ...] = (  # every one that is codes in groups
    *(GPTQ(bits, group) for bits, group in ((2, 64), (3, 32), (4, 128), (8, 0))), GPTQ(4, 64, act_order=True, zero_offset=0),
    GPTQ(3, 128, act_order=True), AWQ(4, 128), AWQ(4, 32),
    *(PackedIntegers(bits, 128, zero=False) for bits in range(2, 9)), PackedIntegers(4, 32), PackedIntegers(4, 0),
    PackedIntegers(4, 64, act_order=True),
    ScaledWeight("float8_e4m3fn", (WHOLE, WHOLE)), ScaledWeight("float8_e4m3fn", (1, WHOLE)), ScaledWeight("float8_e4m3fn", (128, 128)),
    ScaledWeight("int8", (1, WHOLE), factor=1 / 127), ScaledWeight("int8", (1, 32), zero=True),
    TwoLevels(32), TwoLevels(128), MXFP4(), NVFP4(inverse=True), NormalFloat("nf4", nested=True), *(GGUFBlocks(kind) for kind in BLOCKS),
)  # fmt: skip


def random_piece(
    form: Format, outs: int, ins: int, *, seed: int = 0, dtype: torch.dtype = torch.bfloat16, copies: int = 0
) -> Piece:
    """A matrix in this format whose codes, scales, zeros and orders are all random."""
    piece = Piece(
        str(seed), form, outs, ins, dtype=dtype, device=torch.device("cpu"), stacked=(copies,) if copies else ()
    )
    list(piece.make_up(seed))
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in ((name, each.data) for name, each in piece.named_parameters()):
        if "g_idx" in name and getattr(form, "act_order", False):
            tensor.copy_(tensor[torch.randperm(len(tensor), generator=generator)])
        elif tensor.is_floating_point() and tensor.element_size() > 1:
            tensor.mul_(torch.rand(tensor.shape, generator=generator) + 0.5)
        elif name == "scale" and tensor.dtype is torch.uint8:
            tensor.copy_(torch.randint(118, 123, tensor.shape, generator=generator))
    piece.finish_loading()
    return piece
