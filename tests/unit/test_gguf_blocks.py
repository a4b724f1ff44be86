"""GGUF's blocks as ``headrace quantize`` makes them: read back by the gguf library, and beside what that makes."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from gguf import GGMLQuantizationType  # noqa: E402
from gguf.quants import dequantize, quantize  # noqa: E402

from headrace.quant.gguf import BLOCKS, CODES, GGUFBlocks  # noqa: E402
from headrace.quant.gguf_blocks import PARTS  # noqa: E402
from headrace.quantize.gguf_blocks import PACKED, encoded  # noqa: E402


def read(kind: str, made: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(dequantize(made.numpy(), GGMLQuantizationType[kind]).astype(np.float32))


def weights(outs: int = 12, ins: int = 512) -> torch.Tensor:
    weight = torch.randn(outs, ins, generator=torch.Generator().manual_seed(1)) * 0.02
    weight[0], weight[1, :256], weight[2] = 0.0, 0.0, weight[2].abs() + 0.1
    weight[3, 7], weight[4] = 3.0, 0.25
    return weight


@pytest.mark.parametrize("kind", PACKED)
def test_another_reader_finds_what_was_meant(kind: str) -> None:
    """To about half a step of its grid; rows of zeros, of one sign and with an outlier, too."""
    weight = weights()
    made = encoded(kind, weight, None)
    assert made.dtype == torch.uint8 and made.shape == (12, 512 // BLOCKS[kind][0] * BLOCKS[kind][1])
    got = read(kind, made)
    assert torch.equal(
        got, GGUFBlocks(kind).dense(GGUFBlocks(kind).prepare({"weight": made}), slice(None), torch.float32)
    )
    bits, group, shifts = CODES[kind]
    spread = weight.unflatten(1, (-1, group))
    range_ = (spread.amax(2) - spread.amin(2).clamp(max=0)) if shifts else 2 * spread.abs().amax(2)
    most = range_.unflatten(0, (12, -1)).amax(-1, keepdim=True).repeat_interleave(512, -1).view(12, -1)[:, :512]
    assert bool(((got - weight).abs() <= 1.2 * most / (2**bits - 1) + 1e-6).all())
    assert not got[0].any() and not got[1, :256].any()


@pytest.mark.parametrize("kind", PACKED)
def test_errors_are_as_small_as_the_bits_allow(kind: str) -> None:
    """Of normal weights; and where the gguf library can quantise, smaller than its."""
    weight = torch.randn(64, 1024, generator=torch.Generator().manual_seed(2))
    error = float((read(kind, encoded(kind, weight, None)) - weight).square().mean())
    limits = {"Q2_K": 0.09, "Q3_K": 0.03, "Q4_K": 0.0062, "Q5_K": 0.0016, "Q6_K": 0.0006}
    if kind in limits:
        assert error < limits[kind]
        return
    theirs = torch.from_numpy(quantize(weight.numpy(), GGMLQuantizationType[kind]))
    assert error < float((read(kind, theirs) - weight).square().mean()) * (1.01 if kind == "Q8_0" else 0.95)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q2_K", "Q3_K", "Q4_K"])
def test_inputs_that_carry_more_are_rounded_more_finely(kind: str) -> None:
    random = torch.Generator().manual_seed(3)
    weight, importance = torch.randn(32, 512, generator=random), torch.rand(512, generator=random).pow(4) * 10
    errors = [
        float(((read(kind, encoded(kind, weight, known)) - weight).square() * importance).mean())
        for known in (None, importance)
    ]
    assert errors[1] < 0.95 * errors[0]


@pytest.mark.parametrize("kind", PACKED)
def test_bytes_are_packed_as_they_are_unpacked(kind: str) -> None:
    """Random blocks, of every code and scale that there is, survive both ways."""
    from headrace.quantize.gguf_blocks import Block

    blocks = torch.randint(0, 256, (40, BLOCKS[kind][1]), dtype=torch.uint8, generator=torch.Generator().manual_seed(4))
    for offset in BLOCKS[kind][2]:
        blocks[:, offset : offset + 2] = torch.tensor([0.5, 1.0]).half()[:1].view(torch.uint8)
    parts = PARTS[kind](blocks)
    half = torch.full((40, 1), 0.5).half()
    wide = [None if each is None else each.long().reshape(40, -1) for each in (parts.codes, parts.scales, parts.shifts)]
    made = PACKED[kind](Block(wide[0], half, half, wide[1], wide[2]))
    assert torch.equal(made, blocks)
