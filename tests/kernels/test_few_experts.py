"""Experts of few tokens in one launch (experts.cu): which call sites it serves, and what it is given. What it computes
is tests/gpu/test_experts.py's."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from headrace.kernels.build import nvrtc
from headrace.kernels.candidate import EightBits
from headrace.kernels.linear.packing import Coding, Scales
from tests.support.kernel_cases import AMPERE, BLACKWELL, H200, on_card, refusal

FOUR: dict[str, Any] = {"formats": ("4 bits",) * 2, "eights": (None, None), "rounded": (Coding(4),) * 2}


@pytest.mark.parametrize(
    ("name", "facts", "words"),
    [
        ("experts", {}, ""),
        ("experts", FOUR, "as they are computed with"),
        ("experts", {"held": 4}, "by all experts"),
        ("coded_experts", FOUR, ""),
        ("coded_experts", {}, "in a format"),
        ("coded_experts", FOUR | {"rounded": (Coding(4), Coding(8))}, "of one kind, up and down"),
        ("coded_experts", FOUR | {"eights": (None, EightBits("fp8"))}, "of one kind, up and down"),
        ("coded_experts", FOUR | {"rounded": (Coding(4, scales=Scales.POWER),) * 2}, "codes of 4 and 8 bits"),
    ],
)
def test_who_is_served(name: str, facts: dict[str, Any], words: str) -> None:
    given = {"dtype": torch.bfloat16, **facts}
    found = refusal("fused_moe", name, on_card("fused_moe", H200, facts=given))
    assert words in found and bool(found) == bool(words)
    for card in (AMPERE, BLACKWELL):
        assert "9.0" in refusal("fused_moe", name, on_card("fused_moe", card, facts=given))


def test_what_it_is_given_lies_as_the_source_reads_it() -> None:
    cuda_experts = pytest.importorskip("headrace.kernels.moe.cuda_experts", exc_type=ImportError)
    text = nvrtc.source("moe/experts_shape.cuh")
    fields = re.findall(
        r"^  (?:const )?\w+(?: \w+)? ([^;{}]+);", text[text.index("struct Params") : text.index("struct Shared")], re.M
    )
    names = [name.strip(" *") for each in fields for name in each.split(",")]
    assert names == [name for name, *_ in cuda_experts._Parameters._fields_]
