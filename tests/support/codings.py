"""Random weights in codes of few bits, and in every format that is such codes, and what they mean."""

from __future__ import annotations

import torch

from headrace.kernels.linear.packing import E2M1, Codes, Coding, Packed, pack
from headrace.layers.packed import Piece
from headrace.quant import Format
from headrace.quant.floats import MXFP4, NVFP4, NormalFloat
from headrace.quant.gguf import BLOCKS, GGUFBlocks
from headrace.quant.integers import AWQ, GPTQ, PackedIntegers, TwoLevels
from headrace.quant.scaled import WHOLE, ScaledWeight

CODINGS = (
    Coding(4), Coding(4, zeros=True), Coding(4, sets=2, zeros=True), Coding(4, sets=4), Coding(4, sets=4, floats=True),
    Coding(8), Coding(8, zeros=True), Coding(8, floats=True),
)  # fmt: skip


def meant(
    codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None, group: int, coding: Coding
) -> torch.Tensor:
    """The weight, float32."""
    if coding.floats and coding.bits == 8:
        values = codes.view(torch.float8_e4m3fn).float()
    elif coding.floats:
        values = torch.tensor(E2M1, device=codes.device)[codes.int()]
    else:
        spread = (
            float(2 ** (coding.bits - 1))
            if zero is None
            else zero.float().repeat_interleave(group, 1)[:, : codes.shape[1]]
        )
        values = codes.float() - spread
    return values * scale.float().repeat_interleave(group, 1)[:, : codes.shape[1]]


def random_packed(
    coding: Coding, outs: int, ins: int, device: torch.device, *, gated: bool = False
) -> tuple[Packed, torch.Tensor]:
    """A weight of entries of about ins ** -0.5, and what it means."""
    group = 128 // coding.sets
    groups = -(-ins // group)
    codes = torch.randint(0, 2**coding.bits, (outs, ins), dtype=torch.uint8, device=device)
    if coding.floats and coding.bits == 8:
        codes &= 0xBF  # exponents up to that of 1, never NaN
    zero = (
        torch.randint(2 ** (coding.bits - 1) - 3, 2 ** (coding.bits - 1) + 4, (outs, groups), device=device)
        if coding.zeros
        else None
    )
    usual = {(4, False): 4.6, (8, False): 74.0, (4, True): 3.0, (8, True): 0.5}[coding.bits, coding.floats]
    scale = ((torch.rand(outs, groups, device=device) + 0.5) * ins**-0.5 / usual).half()
    return packed(codes, scale, zero, group, coding, gated=gated), meant(codes, scale, zero, group, coding)


def packed(
    codes: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    group: int,
    coding: Coding,
    *,
    gated: bool = False,
) -> Packed:
    def read(rows: slice) -> Codes:
        return Codes(codes[rows], scale[rows], group, None if zero is None else zero[rows])

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
