"""The layout of packed weights: what each thread of the ring kernel finds in its registers, from the bytes, is the
weight."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from headrace.kernels.build.nvrtc import CompileError
from headrace.kernels.linear.packing import DEPTH, ROWS, Coding, bits_a_weight, pack, stack
from headrace.kernels.linear.ring_forms import RingForm
from headrace.quant import Format
from headrace.quant.gguf import GGUFBlocks
from tests.kernels.test_cuda_compile import dump
from tests.support.codings import CODINGS, FORMATS, packed, random_piece


def seen_by_threads(blocks: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes [tiles · 64, steps · 128], read as packed.cuh reads them: word by word, register by register."""
    tiles, steps, _ = blocks.shape
    codes = torch.zeros(tiles * ROWS, steps * DEPTH, dtype=torch.int64)
    for tile in range(tiles):
        for step in range(steps):
            block = blocks[tile, step, : ROWS * DEPTH * bits // 8].view(-1, 128, 16)  # pieces of 16 bytes a thread
            words = block.contiguous().view(torch.int32).permute(1, 0, 2).reshape(128, -1).long() & 0xFFFFFFFF
            for thread in range(128):
                row, pair = tile * ROWS + thread // 32 * 16 + thread % 32 // 4, thread % 4 * 2
                for sixteen in range(8):
                    for i in range(4):  # a[h + 2 * side]
                        at, down = step * DEPTH + sixteen * 16 + pair + 8 * (i // 2), row + 8 * (i % 2)
                        if bits == 4:
                            word = int(words[thread, sixteen]) >> (4 * i)
                            low, high = word & 15, word >> 16 & 15
                        else:
                            word = int(words[thread, 2 * sixteen + i // 2]) >> (8 * (i % 2))
                            low, high = word & 255, word >> 16 & 255
                        codes[down, at], codes[down, at + 1] = low, high
    return codes


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("outs", "ins"), [(128, 256), (72, 200)])
def test_threads_find_the_codes_in_the_order_of_the_instruction(bits: int, outs: int, ins: int) -> None:
    torch.manual_seed(bits + outs)
    codes = torch.randint(0, 2**bits, (outs, ins), dtype=torch.uint8)
    laid = packed(codes, torch.ones(outs, 1), None, ins, Coding(bits))
    found = seen_by_threads(laid.blocks, bits)
    assert torch.equal(found[:outs, :ins], codes.long()) and not found[outs:].any() and not found[:, ins:].any()


def test_gates_and_what_they_gate_follow_each_other_in_eights() -> None:
    codes = torch.arange(128, dtype=torch.uint8)[:, None].expand(128, 128).contiguous()
    laid = packed(codes, torch.arange(128.0)[:, None] + 1, None, 128, Coding(8), gated=True)
    rows = seen_by_threads(laid.blocks, 8)[:, 0]
    assert rows[:24].tolist() == [*range(8), *range(64, 72), *range(8, 16)]
    scales = laid.blocks[:, 0, ROWS * DEPTH :].contiguous().view(torch.float16).flatten().float() * laid.factor
    assert torch.equal(scales[:128], rows[:128] + 1.0)


@pytest.mark.parametrize(("sets", "group"), [(1, 128), (1, 256), (1, 1000), (2, 64), (4, 32)])
def test_every_group_of_k_has_its_scale_and_its_zero(sets: int, group: int) -> None:
    torch.manual_seed(group)
    outs, ins = 100, 384
    groups = -(-ins // group)
    scale, zero = torch.rand(outs, groups).half() * 1e-3, torch.randint(0, 16, (outs, groups))
    coding = Coding(4, sets, zeros=True)
    laid = packed(torch.zeros(outs, ins, dtype=torch.uint8), scale, zero, group, coding)
    assert laid.blocks.shape == (*coding.blocks(outs, ins), coding.block_bytes)
    beside = laid.blocks[..., ROWS * DEPTH // 2 :].contiguous()
    scales = beside[..., : sets * 128].contiguous().view(torch.float16).view(
        -1, 3, sets, ROWS
    ).float() * laid.factor.view(-1, 1, 1, ROWS)
    zeros = beside[..., sets * 128 :].contiguous().view(torch.bfloat16).view(-1, 3, sets, ROWS).float() - 128
    for k in range(0, ins, 32):
        here = (slice(None), k // DEPTH, k % DEPTH // (DEPTH // sets))
        assert torch.equal(scales[here].flatten()[:outs], scale[:, k // group].float())
        assert torch.equal(zeros[here].flatten()[:outs], zero[:, k // group].float())


def test_scales_of_float16_stay_what_they_are() -> None:
    scale = torch.tensor([[6e-8, 1e-4], [1e-4, 1e-4], [6.1e4, 1.0], [1.0, 0.0]]).half()
    laid = packed(torch.full((4, 256), 9, dtype=torch.uint8), scale, None, 128, Coding(4))
    assert torch.equal(laid.dense(slice(0, 4), torch.float32)[:, ::128], scale.float())


@pytest.mark.parametrize("form", FORMATS, ids=lambda each: each.label)
def test_every_format_means_the_same_when_it_is_laid_out(form: Format) -> None:
    """But for scales that are held in float16, where the format has a wider type."""
    outs, ins = 128, 768
    piece = random_piece(form, outs, ins)
    coding, tensors = form.coding, piece.tensors[0]
    assert coding is not None
    laid, want = (
        pack(lambda rows: form.codes(tensors, rows), outs, coding),
        form.dense(tensors, slice(None), torch.float32),
    )
    for rows in (slice(0, outs), slice(64, 96), slice(7, 70)):
        least = 6e-4 * float(want.abs().max()) if coding.shifts else 1e-7
        torch.testing.assert_close(laid.dense(rows, torch.float32), want[rows], rtol=6e-4, atol=least)
    turned = pack(lambda rows: form.codes(tensors, rows), outs, coding, gated=True)
    assert torch.equal(turned.dense(slice(0, outs), torch.float32), laid.dense(slice(0, outs), torch.float32))
    assert laid.blocks.shape[2] == coding.block_bytes and laid.blocks.shape[2] % 64 == 0


def test_matrices_of_one_coding_are_one_below_another() -> None:
    parts = [random_piece(GGUFBlocks("Q5_K"), outs, 256, seed=outs) for outs in (64, 192, 32)]
    forms: Format = GGUFBlocks("Q5_K")
    coding = forms.coding
    assert coding is not None
    laid = stack(
        [pack(lambda rows, part=part: part.form.codes(part.tensors[0], rows), part.outs, coding) for part in parts]
    )  # type: ignore[misc]
    assert laid.outs == 288 and len(laid.blocks) == 8
    want = torch.cat([part.dense(slice(None), torch.float32) for part in parts])
    torch.testing.assert_close(laid.dense(slice(None), torch.float32), want, rtol=1e-3, atol=1e-4)


def test_memory_stays_the_formats() -> None:
    """Two-level scales of GGUF take a byte where the file has 4 or 6 bits."""
    stored = {
        "Q4_0": 4.5,
        "Q8_0": 8.5,
        "Q4_K": 4.5,
        "Q5_K": 5.5,
        "Q6_K": 6.5625,
        "Q3_K": 3.4375,
        "IQ4_XS": 4.25,
        "MXFP4": 4.25,
    }
    for kind, bits in stored.items():
        coding = GGUFBlocks(kind).coding
        assert coding is not None and bits <= bits_a_weight(coding) <= 1.06 * bits, kind


@pytest.mark.timeout(120)
@pytest.mark.parametrize("coding", CODINGS, ids=str)
def test_kernels_compile_without_spills_and_matrix_instructions_are_not_serialized(
    coding: Coding, tmp_path: Path
) -> None:
    """A matrix instruction that is waited for by itself shows as many waits as there are instructions."""
    cuda_ring = pytest.importorskip("headrace.kernels.linear.cuda_ring", exc_type=ImportError)
    target = tmp_path / "ring.cubin"
    try:
        target.write_bytes(cuda_ring.machine_code(RingForm(32, 128, coding=coding), None))
    except CompileError as error:
        pytest.skip(str(error))
    assert "STACK:0 " in dump(target, "-res-usage")
    text = dump(target, "-sass")
    counts = {name: len(re.findall(rf"\b{name}", text)) for name in ("HGMMA", "WARPGROUP.DEPBAR", "UBLKCP", "STL")}
    assert (
        counts["HGMMA"] == 8
        and counts["WARPGROUP.DEPBAR"] <= max(4, coding.sets + 1)
        and counts["UBLKCP"]
        and not counts["STL"]
    ), counts
