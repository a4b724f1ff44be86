"""``bench kernels --tune``: what is tried fits the card, what wins is kept, and only a card can be tuned."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headrace import cli
from headrace.bench import tune, tune_vendor
from headrace.bench.kernel_cases import DEFAULT_SPEC
from headrace.kernels.triton.flat_forms import FLAT, Form, Shape, candidate_forms, flat, forms_for, vector
from headrace.kernels.triton.flat_measured import SHIPPED, read_forms
from headrace.kernels.vendor.measured import Choice

SHARED_MEMORY = 232448 - 2048  # bytes of an H200's processor, less barriers


def bytes_of(form: Form, shape: Shape) -> int:
    return form.stages * form.depth * 2 * (form.columns * (2 if shape.gated else 1) + form.rows)


@pytest.mark.parametrize("shape", [*tune.shapes_of(DEFAULT_SPEC), Shape(6144, 4096), Shape(5120, 13824), Shape(13824, 5120, True)], ids=str)
def test_what_is_tried_fits_and_serves_all_rows_of_its_class(shape: Shape) -> None:
    for rows in tune.ROWS:
        forms = candidate_forms(shape, rows)
        assert len(forms) > 3 and len(set(forms)) == len(forms)
        for form in forms:
            assert form.fits(shape) and form.rows >= rows
            assert form.kind != FLAT or bytes_of(form, shape) <= SHARED_MEMORY, form


def test_the_shapes_of_a_model_are_those_of_its_layers_and_head() -> None:
    assert set(tune.shapes_of(DEFAULT_SPEC)) == {
        Shape(3072, 2048), Shape(2048, 2048), Shape(8192, 2048, True), Shape(2048, 8192), Shape(128256, 2048)
    }  # fmt: skip
    shipped = read_forms(SHIPPED, "NVIDIA H200")
    for shape in tune.shapes_of(DEFAULT_SPEC):
        assert forms_for(shape, 132, shipped) == shipped[shape], "the model of the documentation is shipped"


def test_the_quickest_right_form_wins_and_a_gate_is_never_the_vendors(monkeypatch: pytest.MonkeyPatch) -> None:
    times: dict[Form, float | None] = {}
    monkeypatch.setattr(tune, "cuda_time", lambda calls, seconds: [3.0])
    monkeypatch.setattr(tune, "_timed", lambda shape, form, *more: times.get(form, 9.0))
    monkeypatch.setattr(tune, "torch", _CpuTorch())
    plain, gated = Shape(8, 128), Shape(8, 128, True)
    forms = (vector(4, 64, 0, 4), flat(16, 64, 64, 4))
    monkeypatch.setattr(tune, "candidate_forms", lambda shape, rows: forms)
    times.update(zip(forms, (2.0, 1.0), strict=True))
    assert tune._best(plain, 1, [torch.randn(8, 128)]).form == forms[1]
    times.update(zip(forms, (4.0, None), strict=True))  # the second is wrong, or does not build
    assert tune._best(plain, 1, [torch.randn(8, 128)]).form is None
    best = tune._best(gated, 1, [torch.randn(16, 128)])
    assert best.form == forms[0] and best.vendor == 3.0
    assert tune.forms_of([best]) == {gated: ((1, forms[0]),)}
    assert "8 x 128, gated" in tune.render([best], 4e12)


class _Offers:
    """Two algorithms: the second computes something else."""

    def __init__(self, outs: int, ins: int, dtype: torch.dtype, device: int) -> None: ...

    def offers(self, tokens: int) -> list[tuple[Any, Any]]:
        return [((1,), 1.0), ((2,), 2.0)]

    def takes(self, algorithm: float, operands: object) -> bool:
        return True

    def multiply(self, algorithm: float, operands: object, x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor, *, add: bool) -> None:
        y.copy_(algorithm * (x @ weight.t()))


@pytest.mark.parametrize(("seconds", "chosen"), [(0.5, (1,)), (0.995, None), (2.0, None)])
def test_a_long_product_goes_to_the_right_algorithm_that_is_quicker_under_load(
    seconds: float, chosen: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[set[Any]] = []

    def measured(calls: dict[Any, Any]) -> dict[Any, float]:
        held.append(set(calls))
        return {name: 1.0 if name is None else seconds for name in calls}

    monkeypatch.setattr(tune_vendor, "torch", _CpuTorch())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(tune_vendor, "Products", _Offers)
    monkeypatch.setattr(tune_vendor, "Operands", lambda *shape: None)
    monkeypatch.setattr(tune_vendor, "held", measured)
    monkeypatch.setattr(tune_vendor, "_timed", measured)
    monkeypatch.setattr(tune_vendor, "_buckets", lambda: [72, 80])
    monkeypatch.setattr(tune_vendor, "CLASSES", ((4096, 4100), (4200, 4300)))
    tuned = tune_vendor.tune_products([(6, 8)], 1000, lambda line: None)
    assert held == [{None, (1,)}] * 4, "what computes something else is not even timed"
    choices = tune_vendor.choices_of(tuned)
    long, few = (Choice(4096, 4100, (1,)), Choice(4200, 4300, (1,))), (Choice(65, 72, (1,)), Choice(73, 80, (1,)), Choice(81, 81, ()))
    assert choices == ({(6, 8): few + long} if chosen else {})
    assert "6 x 8" in tune_vendor.render(tuned)


def test_the_head_s_algorithms_are_looked_for_as_the_layers_but_for_long_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = tune_vendor.weights_of(tune.shapes_of(DEFAULT_SPEC))
    assert set(weights) == {(3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192), (128256, 2048)}
    asked: list[tuple[Any, bool]] = []

    def best(weight: Any, least: int, rows: int, matrices: Any, *, few: bool) -> tune_vendor.TunedProduct:
        asked.append((weight, few))
        return tune_vendor.TunedProduct(weight, least + 1 if few else least, rows, (rows,), 1.0, 2.0)

    monkeypatch.setattr(tune_vendor, "_best", best)
    monkeypatch.setattr(tune_vendor, "_matrices", lambda weight, size: [])
    monkeypatch.setattr(tune_vendor, "_buckets", lambda: [72, 512])
    choices = tune_vendor.choices_of(tune_vendor.tune_products([(2048, 8192), (128256, 2048)], 1000, lambda line: None))
    assert [asked.count(each) for each in (((2048, 8192), True), ((2048, 8192), False), ((128256, 2048), True))] == [2, 2, 2] and len(asked) == 6
    assert choices[128256, 2048] == (Choice(65, 72, (72,)), Choice(73, 512, (512,)), Choice(513, 513, ()))


class _CpuTorch:
    """torch, whose tensors are made on the CPU."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def randn(self, *shape: int, device: str, dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(*shape)

    def empty(self, *shape: int, device: str, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(*shape)


def test_only_a_card_is_tuned(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "kernels", "--tune"]) == 2 and "add --device cuda" in capsys.readouterr().err
    if not torch.cuda.is_available():
        assert cli.main(["bench", "kernels", "--tune", "--device", "cuda"]) == 2 and "compute capability 9" in capsys.readouterr().err
