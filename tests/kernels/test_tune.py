"""``bench kernels --tune``: what is tried fits the card, what wins is kept, and only a card can be tuned."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headrace import cli
from headrace.bench import tune
from headrace.bench.kernel_cases import DEFAULT_SPEC
from headrace.bench.tune_coded import CodedRings, Copies
from headrace.kernels.candidate import KernelContext, Shape, WeightFacts
from headrace.kernels.linear.flat_forms import MEASURED, candidate_forms, forms_for, vector
from headrace.kernels.linear.forms import FLAT, Form
from headrace.kernels.linear.measured import SHIPPED
from headrace.kernels.linear.packing import Coding
from headrace.kernels.linear.ring_forms import RingForm
from headrace.kernels.linear.tuned import Choice
from headrace.layers.wide_copy import LEAST, least_rows
from headrace.quant.integers import PackedIntegers
from headrace.spec import Activation

SHARED_MEMORY = 232448 - 2048  # bytes of an H200's processor, less barriers


def bytes_of(form: Form, shape: Shape) -> int:
    return form.stages * form.depth * 2 * (form.columns * (2 if shape.gated else 1) + form.rows)


@pytest.mark.parametrize(
    "shape", [*tune.shapes_of(DEFAULT_SPEC), Shape(6144, 4096), Shape(5120, 13824), Shape(13824, 5120, True)], ids=str
)
def test_what_is_tried_fits_and_serves_all_rows_of_its_class(shape: Shape) -> None:
    for rows in tune.FLAT_ROWS:
        forms = candidate_forms(shape, rows)
        assert len(forms) > 3 and len(set(forms)) == len(forms)
        for form in forms:
            assert form.fits(shape) and form.rows >= rows
            assert form.kind != FLAT or bytes_of(form, shape) <= SHARED_MEMORY, form


def test_the_shapes_of_a_model_are_those_of_its_layers_and_head() -> None:
    assert set(tune.shapes_of(DEFAULT_SPEC)) == {
        Shape(3072, 2048), Shape(2048, 2048), Shape(8192, 2048, True), Shape(2048, 8192), Shape(128256, 2048)
    }  # fmt: skip
    shipped = MEASURED.read(SHIPPED, "NVIDIA H200")
    for shape in tune.shapes_of(DEFAULT_SPEC):
        assert forms_for(shape, 132, shipped) == shipped[shape], "the model of the documentation is shipped"


def trial(
    form_results: dict[Any, float | Exception], seconds: dict[Any, float], monkeypatch: pytest.MonkeyPatch, **more: Any
) -> tune.Tuned:
    """``form_results``: what each form computes, where 1 is right; the time that is measured is that of ``seconds``."""
    timed: list[Any] = []

    def make(form: Any) -> list[Any]:
        def call() -> torch.Tensor:
            if isinstance(found := form_results[form], Exception):
                raise found
            return torch.full((2,), found)

        call.form = form  # type: ignore[attr-defined]
        return [call]

    def cuda_time(calls: Any, lasting: float, rounds: int = 5) -> list[float]:
        timed.append(calls[0].form)
        return [seconds[calls[0].form]] * rounds

    monkeypatch.setattr(tune, "cuda_time", cuda_time)
    found = tune.fastest(
        tune.Trial(Shape(8, 128), 4, {form: lambda form=form: make(form) for form in form_results}, **more)
    )  # type: ignore[misc]
    assert set(timed) == {form for form, result in form_results.items() if result == 1.0}, (
        "what computes something else is not even timed"
    )
    return found


@pytest.mark.parametrize("held", [False, True])
def test_the_quickest_right_form_wins(held: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    judge = SimpleNamespace(build_failure=lambda failure: failure if isinstance(failure, RuntimeError) else None)
    monkeypatch.setitem(sys.modules, "headrace.kernels.build.toolchain", judge)
    results = {None: 1.0, "a": 1.0, "b": 1.0, "wrong": 2.0, "unbuilt": RuntimeError()}
    best = trial(results, {None: 3.0, "a": 2.0, "b": 1.0}, monkeypatch, held=held, least=3)
    assert (best.form, best.seconds, best.without, best.rows, best.least) == ("b", 1.0, 3.0, 4, 3)
    assert trial(results, {None: 1.0, "a": 2.0, "b": 4.0}, monkeypatch, held=held).form is None
    assert trial(results, {None: 1.0, "a": 2.0, "b": 4.0}, monkeypatch, held=held, gain=0.0).form == "a", (
        "a gate is never the vendor's"
    )
    with pytest.raises(ZeroDivisionError):
        trial({None: 1.0, "a": ZeroDivisionError()}, {None: 1.0}, monkeypatch, held=held)


@pytest.mark.parametrize(("seconds", "chosen"), [(0.5, True), (0.97, True), (0.995, False), (1.0, False)])
def test_a_form_is_kept_where_it_is_quicker_by_enough(
    seconds: float, chosen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert trial({None: 1.0, "a": 1.0}, {None: 1.0, "a": seconds}, monkeypatch, gain=1.02).form == (
        "a" if chosen else None
    )


def test_a_gate_s_forms_are_kept_by_shape_and_shown() -> None:
    gated, form = Shape(8, 128, True), vector(4, 64, 0, 4)
    kind, tuned = (
        tune.FlatProducts(Activation.SILU),
        [tune.Tuned(gated, 1, form, 1.0, 3.0), tune.Tuned(gated, 16, None, 1.0, 3.0)],
    )
    assert kind.table(tuned) == {gated: ((1, form), (16, None))}
    assert tuned[0].row(4e12)[:2] == ("8 x 128, gated", 1)
    assert "kind vector, rows 1, columns 4" in tuned[0].row(4e12)[2] and tuned[1].row(4e12)[2] == "none"


class _Offers:
    """Two algorithms: the second computes something else."""

    def __init__(self, outs: int, ins: int, dtype: torch.dtype, device: int) -> None: ...

    def offers(self, tokens: int) -> list[tuple[Any, Any]]:
        return [((1,), 1.0), ((2,), 2.0), ((3,), 3.0)]

    def takes(self, algorithm: float, operands: object) -> bool:
        return algorithm != 3.0

    def multiply(
        self, algorithm: float, operands: object, x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor, *, add: bool
    ) -> None:
        y.copy_(algorithm * (x @ weight.t()))


@pytest.mark.parametrize(("seconds", "chosen"), [(0.5, (1,)), (0.995, None), (2.0, None)])
def test_a_long_product_goes_to_the_right_algorithm_that_is_quicker_under_load(
    seconds: float, chosen: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[set[Any]] = []

    def measured(forms: dict[Any, Any]) -> dict[Any, float]:
        held.append(set(forms))
        return {name: 1.0 if name is None else seconds for name in forms}

    on_the_cpu(monkeypatch)
    monkeypatch.setattr(tune, "_held", measured)
    monkeypatch.setattr(tune, "_short", lambda make, lead: seconds if "_multiplied" in str(make()[0]) else 1.0)
    monkeypatch.setattr(tune, "_buckets", lambda: [72, 80])
    monkeypatch.setattr(tune, "LONG", ((4096, 4100), (4200, 4300)))
    kind = tune.VendorProducts(Activation.SILU)
    tuned = tune.tune(kind, [Shape(6, 8)], 1000)
    assert held == [{None, (1,)}] * 2, "what computes something else is not even timed"
    long, few = (
        (Choice(4096, 4100, (1,)), Choice(4200, 4300, (1,))),
        (Choice(65, 72, (1,)), Choice(73, 80, (1,)), Choice(81, 81, ())),
    )
    assert kind.table(tuned) == ({Shape(6, 8): few + long} if chosen else {})


def test_the_head_s_algorithms_are_looked_for_as_the_layers_but_for_long_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = tune.VendorProducts(Activation.SILU)
    wanted = kind.shapes(tune.shapes_of(DEFAULT_SPEC))
    assert {(shape.outs, shape.ins) for shape in wanted} == {
        (3072, 2048),
        (2048, 2048),
        (16384, 2048),
        (2048, 8192),
        (128256, 2048),
    }
    monkeypatch.setattr(tune, "_vendor_forms", lambda *given: {})
    monkeypatch.setattr(tune, "random_inputs", lambda *shape: None)
    monkeypatch.setattr(tune, "_buckets", lambda: [72, 512])
    layer, top = (list(kind.trials(shape, [])) for shape in (Shape(2048, 8192), Shape(128256, 2048)))
    assert [(each.least, each.rows, each.held) for each in top] == [
        (65, 72, False),
        (73, 512, False),
        (513, 513, False),
    ]
    assert [(each.least, each.held) for each in layer] == [(each.least, False) for each in top] + [
        (4096, True),
        (12288, True),
    ]
    tuned = [
        tune.Tuned(Shape(128256, 2048), each.rows, (each.rows,) if each.rows < 513 else None, 1.0, 2.0, each.least)
        for each in top
    ]
    assert kind.table(tuned) == {
        Shape(128256, 2048): (Choice(65, 72, (72,)), Choice(73, 512, (512,)), Choice(513, 513, ()))
    }


def test_what_goes_before_each_is_timed_with_it_and_taken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the form hides two thirds of what goes before."""
    seconds = {"alone": 5.0, "behind": 3.0, "lead": 3.0}

    def cuda_time(calls: Any, lasting: float, rounds: int = 5) -> list[float]:
        names = [call() for call in calls]
        behind = ["behind" if name == "alone" and "lead" in names else name for name in names]
        return [sum(seconds[name] for name in behind) / len(names)] * rounds

    monkeypatch.setattr(tune, "cuda_time", cuda_time)
    form = lambda: [lambda: "alone"] * 3  # noqa: E731
    assert tune._short(form, None) == 5.0
    assert tune._short(form, lambda: [lambda: "lead"]) == 3.0


def test_codes_keep_one_row_and_a_copy_begins_where_they_end() -> None:
    coding, shape = Coding(4), Shape(8, 128, True)
    ring = RingForm(8, 128, coding=coding)
    rings = CodedRings(Activation.SILU, coding)
    assert rings.table([tune.Tuned(shape, 8, ring, 1.0, 2.0)]) == {shape: ((8, ring),)}
    copies = Copies(Activation.SILU, coding)
    found = [tune.Tuned(shape, rows, form, 1.0, 2.0) for rows, form in ((96, "copy"), (128, None), (192, "copy"))]
    assert copies.table(found) == {Shape(16, 128): (129,)}
    assert copies.table(found[:1]) == {Shape(16, 128): (65,)}
    assert found[0].row(4e12)[2] == "copy"
    read = copies.measured
    assert read.row_of(list(read.values_of(129))) == 129 and least_rows(facts(coding, None), KernelContext()) == 1
    assert least_rows(facts(coding, coding), KernelContext()) == LEAST
    assert least_rows(facts(coding, Coding(6, 8)), KernelContext()) == 65  # which Triton's kernel multiplies


def facts(*codings: Coding | None) -> WeightFacts:
    return WeightFacts(torch.bfloat16, 128, 16, codings=codings)


def test_each_gemm_is_tuned_for_what_may_compute_it() -> None:
    form = PackedIntegers(4, 128)
    packed = tuple((name, (form,)) for name in ("attention.qkv", "feed_forward.down"))
    layers = tuple(replace(each, formats=packed) for each in DEFAULT_SPEC.layers)
    found = {type(kind).__name__: set(shapes) for kind, shapes in tune.planned(replace(DEFAULT_SPEC, layers=layers))}
    everything, coded = set(tune.shapes_of(DEFAULT_SPEC)), {Shape(3072, 2048), Shape(2048, 8192)}
    assert found["FlatProducts"] == found["RingProducts"] == everything - coded
    assert found["VendorProducts"] == found["GatedProducts"] == everything
    assert found["CodedProducts"] == found["CodedRings"] == found["Copies"] == coded


def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(tune, "random_inputs", torch.randn)
    monkeypatch.setattr(tune, "Products", _Offers)
    monkeypatch.setattr(tune, "Operands", lambda *shape: None)


def test_only_a_card_is_tuned(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "kernels", "--tune"]) == 2 and "add --device cuda" in capsys.readouterr().err
    if not torch.cuda.is_available():
        assert (
            cli.main(["bench", "kernels", "--tune", "--device", "cuda"]) == 2
            and "compute capability 9" in capsys.readouterr().err
        )
