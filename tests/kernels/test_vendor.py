"""The vendor's products by measured algorithms, without the vendor: tables, what is chosen, what happens where the
library is missing."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels import Kernels
from headrace.kernels.candidate import Declined, Shape, plainly_empty
from headrace.kernels.linear import cublaslt, reference, tuned
from headrace.kernels.linear.measured import SHIPPED
from headrace.kernels.linear.tuned import MEASURED, Choice
from tests.support.kernel_cases import called, on_card

GOOD, OTHER = (66, 201, 1, 0, 0, 2, 35, 0, 5), (66, 24, 1, 0, 0, 7, 35, 0, 5)


class Products:
    """Stands in for the library: offers two algorithms, refuses odd numbers of rows, and computes."""

    outs, ins, dtype = 6, 8, torch.float32

    def __init__(self) -> None:
        self.calls: list[tuple[Any, bool]] = []
        self.asked: list[int] = []

    def offers(self, tokens: int) -> list[tuple[Any, Any]]:
        self.asked.append(tokens)
        return [(OTHER, "other"), (GOOD, "good")]

    def takes(self, algorithm: Any, operands: Any) -> bool:
        return bool(operands.tokens % 2 == 0)

    def multiply(self, algorithm: Any, operands: Any, x: Tensor, weight: Tensor, y: Tensor, *, add: bool) -> None:
        self.calls.append((algorithm, add))
        y.copy_(x @ weight.t() + (y if add else 0.0))


@pytest.fixture(autouse=True)
def operands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuned, "Operands", lambda tokens, *shape: SimpleNamespace(tokens=tokens))


def layer(products: Products, *choices: Choice, bias: bool = False) -> tuned.TunedLinear:
    weight = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
    bias_of, chooser = torch.ones(6) if bias else None, tuned.Chooser(products, choices)  # type: ignore[arg-type]
    return tuned.TunedLinear(weight, bias_of, products, chooser, reference.linear(weight, bias_of))  # type: ignore[arg-type]


@pytest.mark.parametrize("bias", [False, True])
def test_torchs_product_lies_where_it_is_told(bias: bool) -> None:
    weight, made = torch.randn(6, 8), []

    def empty(*how: Any) -> Tensor:
        made.append(plainly_empty(*how))
        return made[-1]

    given = torch.randn(6) if bias else None
    linear, twin = reference.linear_into(weight, given, empty), reference.linear(weight, given)
    for rows in (1, 5):
        x = torch.randn(rows, 8)
        assert torch.equal(y := linear(x), twin(x)) and y is made[-1] and y.shape == (rows, 6)
    x = torch.randn(2, 3, 8)
    assert torch.equal(linear(x), twin(x)) and len(made) == 2


def test_each_number_of_rows_gets_the_algorithm_of_its_class_or_torchs_product() -> None:
    products = Products()
    linear = layer(products, Choice(4, 16, OTHER), Choice(10, 32, GOOD))
    for rows, wanted in (
        (2, None),
        (4, "other"),
        (8, "other"),
        (10, "good"),
        (12, "good"),
        (13, None),
    ):  # 13 is refused by the algorithm
        x = torch.randn(rows, 8)
        products.calls.clear()
        torch.testing.assert_close(linear(x), F.linear(x, linear.weight))
        assert products.calls == ([] if wanted is None else [(wanted, False)]), rows
    assert products.asked == [16, 32]  # once for each class, when the layer is made


def test_rows_for_which_nothing_was_better_are_torchs() -> None:
    products = Products()
    linear = layer(products, Choice(4, 16, GOOD), Choice(10, 32, ()))
    for rows in (8, 10, 12):
        linear(torch.randn(rows, 8))
    assert products.calls == [("good", False)] and products.asked == [16]


def test_what_the_library_does_not_offer_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    products = Products()
    linear = layer(products, Choice(4, 16, (66, 999, 1, 0, 0, 2, 35, 0, 5)))
    assert not linear.chooser.chooses
    x = torch.randn(8, 8)
    torch.testing.assert_close(linear(x), F.linear(x, linear.weight))
    assert not products.calls


@pytest.mark.parametrize("rows", [3, 8])  # by torch, by the algorithm
@pytest.mark.parametrize("bias", [False, True])
def test_the_sum_is_the_twins(rows: int, bias: bool) -> None:
    products = Products()
    linear = layer(products, Choice(4, 16, GOOD), bias=bias)
    x, residual = torch.randn(rows, 8), torch.randn(rows, 6)
    want = residual + F.linear(x, linear.weight, linear.bias)
    got = tuned.TunedSum(linear)(x, residual)
    torch.testing.assert_close(got, want)
    assert products.calls == ([("good", True)] if rows == 8 and not bias else [])


def test_views_and_other_dimensions_are_torchs() -> None:
    products = Products()
    linear = layer(products, Choice(1, 16, GOOD))
    for x in (torch.randn(4, 16)[:, :8], torch.randn(2, 4, 8)):
        torch.testing.assert_close(linear(x), F.linear(x, linear.weight))
    wide = torch.randn(4, 12)
    x = torch.randn(4, 8)
    want = wide[:, :6] + F.linear(x, linear.weight)
    torch.testing.assert_close(tuned.TunedSum(linear)(x, wide[:, :6]), want)
    assert not products.calls


def test_sizes_that_are_remembered_stay_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuned, "_MOST_SIZES", 3)
    chooser = layer(Products(), Choice(1, 16, GOOD)).chooser
    for tokens in range(2, 40):
        assert (chooser.find(tokens) is None) == (tokens % 2 == 1)
        assert len(chooser._sizes) <= 3


def test_without_the_library_the_candidate_declines_by_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any) -> None:
        raise cublaslt.LtError("cuBLASLt was not found; it comes with torch for CUDA")

    monkeypatch.setattr(tuned, "Products", missing)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    site = on_card("linear", facts={"dtype": torch.bfloat16})
    for made in (tuned.create_linear(site), tuned.create_sum(site)):
        assert isinstance(made, Declined) and "not found" in made.reason


def test_no_library_here_is_said_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(path: str) -> None:
        raise OSError(path)

    monkeypatch.setattr("ctypes.CDLL", nothing)
    with pytest.raises(cublaslt.LtError, match="comes with torch"):
        cublaslt._library.__wrapped__()


def test_on_a_cpu_nobody_offers_sums() -> None:
    assert (
        Kernels(torch.device("cpu")).offer(*called("added_linear", dtype=torch.float32, in_features=8, out_features=8))
        is None
    )


# --- tables

WORDS = '{"A card": {"tuned": {"6 x 8": [[4, 16, "66", 1, 1, 0, 0, 1, 1, 0, 1]]}}}'


def test_what_is_kept_is_read_again_and_the_rest_of_the_file_stays(tmp_path: Path) -> None:
    path = tmp_path / "deeper" / "products.json"
    first, second = {Shape(6, 8): (Choice(4, 16, GOOD), Choice(64, 128, OTHER))}, {Shape(7, 8): (Choice(4, 16, OTHER),)}
    MEASURED.keep("A card", first, path)
    MEASURED.keep("A card", second, path)
    MEASURED.keep("Another", second, path)
    assert MEASURED.read(path, "A card") == first | second
    assert MEASURED.read(path, "Another") == second and MEASURED.read(path, "None") == {}
    assert not list(path.parent.glob("*.json.*"))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        '{"A card": []}',
        '{"A card": {"tuned": {"6 by 8": []}}}',
        '{"A card": {"tuned": {"6 x 8": [[1, 2, 3]]}}}',
        WORDS,
    ],
)
def test_a_file_that_says_nothing_counts_as_empty_and_is_named(
    text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "products.json"
    path.write_text(text)
    with caplog.at_level(logging.WARNING):
        assert MEASURED.read(path, "A card") == {}
    assert "measure again" in caplog.text and str(path) in caplog.text
    MEASURED.keep("A card", {Shape(6, 8): (Choice(4, 16, GOOD),)}, path)
    assert MEASURED.read(path, "A card") == {Shape(6, 8): (Choice(4, 16, GOOD),)}


def test_the_shipped_table_is_sound() -> None:
    for device, weights in json.loads(SHIPPED.read_text()).items():
        found = MEASURED.read(SHIPPED, device)
        assert len(found) == len(weights.get("tuned", ()))
        for choices in found.values():
            assert [each.least for each in choices] == sorted({each.least for each in choices})
            assert all(0 < each.least <= each.measured for each in choices)
