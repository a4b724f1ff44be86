"""Grouped products of experts (grouped.cu): which call sites and which tokens they serve, which tile, the source
compiled where there is a compiler. What they compute is tests/gpu/test_experts.py's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headrace.spec import Activation
from tests.support.assembler import said_of
from tests.support.kernel_cases import AMPERE, BLACKWELL, on_card, refusal

QWEN = (2048, 768, 128)  # hidden, inner, experts


def served(**facts: Any) -> str:
    return refusal("moe", "grouped", on_card("moe", facts={"dtype": torch.bfloat16, **facts}))


def test_who_is_served() -> None:
    assert served() == served(held=4) == "" and "float16" in served(dtype=torch.float16)
    for card in (AMPERE, BLACKWELL):
        site = on_card("moe", card, facts={"dtype": torch.bfloat16})
        assert "9.0" in refusal("moe", "grouped", site)
    for off in ({"batch_invariant": True}, {"gated_products": False}):
        assert refusal("moe", "grouped", on_card("moe", facts={"dtype": torch.bfloat16}, **off))


@pytest.fixture
def experts() -> Callable[..., Any]:
    """Makes who has no kernels, and says which tokens others got."""
    module = pytest.importorskip("headrace.kernels.moe.cuda_grouped", exc_type=ImportError)
    builds = SimpleNamespace(find=lambda *_: None)
    return lambda top_k=8: module.GroupedExperts(
        SimpleNamespace(top_k=top_k), builds, lambda x, *_: ("others", len(x)), None
    )


def test_few_tokens_and_odd_shapes_are_others(experts: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    run, down = experts(2), torch.empty(8, 64, 64)
    monkeypatch.setattr(type(run), "computed", lambda _, x, *__: asked.append(len(x)) or "ours")
    found = [run(torch.empty(n, 64), None, None, down, 2, True, Activation.SILU) for n in (192, 193, 5)]
    assert found == [("others", 192), "ours", ("others", 5)] and asked == [193]
    monkeypatch.undo()
    for hidden, inner in ((96, 64), (64, 96), (64, 64)):  # the last: it cannot be built
        given = torch.empty(400, hidden), None, torch.empty(8, 2 * inner, hidden), torch.empty(8, hidden, inner)
        assert experts(2).computed(*given, 2, True, Activation.SILU, None) is None


def test_the_tile_wastes_least_and_fits(experts: Callable[..., Any]) -> None:
    for hidden, inner, columns in (
        (2048, 768, [192, 192]),
        (4096, 14336, [192, 192]),
        (512, 256, [128, 128]),
        (256, 64, [128, 128]),
    ):
        variants = experts().variants(hidden, inner, 128, Activation.SILU)
        assert [each.columns for each in variants] == columns
        table = 3 * 4 * 1024
        assert all(each.shared_bytes + table <= 232448 for each in variants)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("which", [0, pytest.param(1, marks=pytest.mark.slow)], ids=["gate and up", "down"])
def test_nothing_spills_and_products_overlap(
    which: int, experts: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variant = experts().variants(*QWEN, Activation.SILU)[which]
    said = said_of(variant.build, tmp_path, monkeypatch)
    assert "0 bytes spill stores, 0 bytes spill loads" in said and "C75" not in said, said
