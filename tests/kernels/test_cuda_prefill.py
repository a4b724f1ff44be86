"""Prompts' attention in CUDA C++, without a GPU: who is served, and what the source becomes where there is a
compiler."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.kernels.attention import cuda_prefill as prefill
from headrace.kernels.attention.cuda_prefill import FORMS, instructions, machine_code, rows_of, shared_bytes, why_not
from headrace.kernels.build import nvrtc as compiler
from tests.support.assembler import said_of

SHARED = 232448  # bytes a program may have


@pytest.mark.parametrize(
    ("dtype", "dim", "capability", "words"),
    [
        (torch.float16, 128, (9, 0), "bfloat16"),
        (torch.bfloat16, 96, (9, 0), "64, 128"),
        (torch.bfloat16, 64, (10, 0), "9.0"),
        (torch.bfloat16, 64, (8, 9), "9.0"),
    ],
)
def test_who_is_not_served(dtype: torch.dtype, dim: int, capability: tuple[int, int], words: str) -> None:
    assert words in str(why_not(dtype, dim, capability))


@pytest.mark.parametrize("dim", FORMS)
def test_who_is_served_has_the_room(dim: int) -> None:
    assert why_not(torch.bfloat16, dim, (9, 0)) is None
    assert shared_bytes(dim) <= SHARED
    text = instructions(dim, FORMS[dim].groups)
    assert text.count("m64n128k16") == dim // 16 + (8 if dim == 128 else 0)
    assert text.count(f"m64n{dim}k16") >= 8


def caches(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One layer of two, [blocks, heads, size, dim] each."""
    blocks, heads, size, dim = shape
    both = torch.empty(blocks, 2, 2, heads, size, dim, dtype=torch.bfloat16, device="meta")
    return both[:, 1, 0], both[:, 1, 1]


def test_what_the_copy_engine_can_read() -> None:
    q = torch.empty(5, 12, 64, dtype=torch.bfloat16)[:, :8]
    keys, values = caches(3, 2, 128, 64)
    assert prefill._readable(q, keys, values, 128)
    assert rows_of(keys) == (2 * 8 + 1) * 128 + 128
    assert not prefill._readable(q, keys, values, 96), "blocks that are no power of 2"
    assert not prefill._readable(q, *caches(3, 2, 8, 64), 8), "blocks of less than 16"
    assert not prefill._readable(q.transpose(1, 2).contiguous().transpose(1, 2), keys, values, 128), (
        "elements that do not lie side by side"
    )
    assert not prefill._readable(q, keys[..., ::2], values, 128)
    assert not prefill._readable(q, *caches(2**18, 32, 128, 64), 128), "more rows than it counts"


def test_a_refusal_is_said_once_and_serves_nobody(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any) -> bytes:
        raise compiler.CompileError("there is no compiler")

    monkeypatch.setattr(prefill, "machine_code", refuse)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: type("Card", (), {"multi_processor_count": 132})
    )
    prompts = prefill.Prompts(64, 4, torch.device("cpu"))
    assert prompts._kernel() is None and prompts._kernel() is None
    assert caplog.text.count("there is no compiler") == 1


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("dim", "group", "most"), [(128, 4, 0), (128, 6, 0), (64, 4, 40)])
def test_next_to_nothing_spills_and_products_overlap(
    dim: int, group: int, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = said_of(lambda: machine_code(dim, group), tmp_path, monkeypatch)
    stores = int(re.search(r"(\d+) bytes spill stores", said)[1])  # type: ignore[index]
    assert stores <= most, said
    assert "serialized" not in said, said
