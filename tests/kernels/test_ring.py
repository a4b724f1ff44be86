"""Products of few rows whose weights are under way early, without a GPU: who is served, which form, what a start
builds, the sources."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headrace.bench import tune
from headrace.bench.kernel_cases import DEFAULT_SPEC
from headrace.kernels import Kernels
from headrace.kernels.candidate import EightBits, Shape
from headrace.kernels.linear import candidates, reference, ring_forms
from headrace.kernels.linear.epilogue import MOST_ROWS, Epilogue
from headrace.kernels.linear.flat_forms import flat, vector
from headrace.kernels.linear.measured import SHIPPED, Measured
from headrace.kernels.linear.packing import Coding
from headrace.kernels.linear.ring_forms import MEASURED, ROWS, RingForm, candidate_forms, form_of
from headrace.spec import Activation
from tests.support.kernel_cases import BLACKWELL, called, on_card, refusal

GOOD = {"dtype": torch.bfloat16, "out_features": 128, "in_features": 64, "gated": False}
RINGS = tune.RingProducts(Activation.SILU)
FORMS = ((1, None), (16, RingForm(16, 64, 2)), (32, None))
STATIC_SHARED = {64: 2048, 128: 3600}  # bytes the kernel keeps beside its ring, at most, by columns (compiled)


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Measured, "table", lambda self, name: {Shape(128, 64): FORMS, Shape(128, 32): ((64, None),)})


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"in_features": 72}, "nothing was measured"),
        ({"in_features": 32}, "nothing was measured"),  # it was, and nothing was better
        ({"gated": True}, "nothing was measured"),
    ],
)
def test_who_is_not_served_loses_nothing_but_speed(facts: dict[str, Any], words: str, on_hopper: None) -> None:
    assert words in refusal("fused_linear", "ring", on_card("fused_linear", facts=GOOD | facts))


def test_another_card_and_a_cpu_are_not_served(on_hopper: None) -> None:
    assert refusal("fused_linear", "ring", on_card("fused_linear", facts=GOOD)) == ""
    assert "10.0 is not 9.0" in refusal("fused_linear", "ring", on_card("fused_linear", BLACKWELL, facts=GOOD))
    assert Kernels(torch.device("cpu")).offer(*called("fused_linear", **GOOD)) is None


def test_a_product_with_nothing_around_it_is_served_unless_few_rows_go_another_way(on_hopper: None) -> None:
    assert refusal("linear", "ring", on_card("linear", facts=GOOD)) == ""
    assert "go through fused_linear" in refusal("linear", "ring", on_card("linear", facts=GOOD | {"fused": True}))


def test_a_number_of_rows_has_the_form_of_its_class_or_none() -> None:
    assert [form_of(FORMS, rows) for rows in (1, 2, 16, 17, 33)] == [None, FORMS[1][1], FORMS[1][1], None, None]


def test_a_start_builds_of_the_others_what_is_left_to_them() -> None:
    one, few, more = (1, vector(4, 64, 0, 4)), (16, flat(16, 64, 64, 4)), (32, flat(32, 64, 64, 4))
    assert candidates.unserved(FORMS, (one, few, more)) == (one, more)
    assert candidates.unserved((), (one, few)) == (one, few)
    assert candidates.unserved(((16, FORMS[1][1]),), (one, (8, few[1]), more)) == (more,)
    assert candidates.unserved(((1, None), (16, FORMS[1][1])), (few,)) == (few,), "one row of its class is left"


@pytest.mark.parametrize(
    "shape", [*RINGS.shapes(tune.shapes_of(DEFAULT_SPEC)), Shape(6144, 4096), Shape(13824, 5120, True)], ids=str
)
def test_what_is_tried_fits_the_card_and_serves_all_rows_of_its_class(shape: Shape) -> None:
    assert ROWS[-1] == MOST_ROWS
    for rows in ROWS:
        forms = candidate_forms(shape, rows, 132)
        assert forms and len(set(forms)) == len(forms)
        for form in forms:
            assert form.rows == rows and form.fits(shape, 132) and form.programs(shape, 132) <= 132
            assert form.stages >= 4 and form.shared_bytes + STATIC_SHARED[form.columns] <= ring_forms.SHARED_BYTES
            assert form.tiles(shape) * form.columns >= shape.outs * (2 if shape.gated else 1)


def test_whole_tiles_are_dealt_out_evenly_and_shared_ones_are_all_at_once() -> None:
    gate = Shape(14336, 4096, True)
    assert RingForm(32, 128).programs(gate, 132) == 112 and RingForm(32, 64).programs(gate, 132) == 112
    assert RingForm(32, 64, 2).programs(Shape(4096, 4096), 132) == 128 and not RingForm(32, 64, 3).fits(
        Shape(4096, 4096), 132
    )
    assert not RingForm(32, 64, 2).fits(gate, 132) and not RingForm(32, 64).fits(Shape(12, 64, True), 132)
    assert not RingForm(32, 64).fits(Shape(64, 36), 132) and not RingForm(32, 64, 2).fits(Shape(64, 64), 132)


SIZES = (
    (6144, 4096, False),
    (4096, 4096, False),
    (14336, 4096, True),
    (4096, 14336, False),
    (768, 768, False),
    (128, 272, False),
)


@pytest.mark.parametrize(
    "kind",
    [(Coding(4), ""), (Coding(4, 4), ""), (Coding(8, floats=True), ""), (None, "fp8"), (None, "blocks")],
    ids=str,
)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_quantised_weights_that_were_not_measured_have_a_form_for_any_few_rows(size: Any, kind: Any) -> None:
    shape, few = Shape(*size), ring_forms.FEWER_ROWS
    forms = ring_forms.forms_at(shape, 132, "A card", *kind)
    coding, eight = kind
    assert [most for most, _ in forms] == [
        *few,
        *([128] if not shape.gated and (coding is None or coding.sets == 1) else []),
        *([256] if not shape.gated and coding is not None and coding.sets == 1 else []),
    ]
    for most, form in forms:
        assert (
            form is not None
            and form.rows == most
            and form.fits(shape, 132)
            and (form.coding, form.eight) == (coding, eight)
        )
        beside = 256 if form.many else 8 * form.columns + 4 * form.rows * (1 + form.columns // 16) + 512
        assert form.stages >= 3 and form.shared_bytes + beside <= ring_forms.SHARED_BYTES


def test_many_rows_are_computed_as_measured_or_by_the_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    shape, coding, measured = Shape(6144, 4096), Coding(4), RingForm(256, 128, 2)

    def tried(outs: int, rows: int) -> set[tuple[int, int, int]]:
        forms = candidate_forms(Shape(outs, 4096), rows, 132, coding)
        return {(form.columns, form.ways, form.stages) for form in forms}

    assert tried(6144, 256) == {(128, 2, 6)} and tried(28672, 128) == {(128, 1, 11), (256, 1, 8)}
    assert tried(4096, 128) == {(64, 1, 12), (64, 2, 12), *((128, ways, 11) for ways in (2, 3, 4))}
    rule = form_of(ring_forms.forms_at(shape, 132, "A card", coding), 128)
    for found, wanted in ((RingForm(128, 128), RingForm(128, 128, coding=coding)), (RingForm(128, 256, 2), rule)):
        table = {shape: ((128, found), (256, measured))}
        monkeypatch.setattr(Measured, "table", lambda self, name, table=table: table)
        forms = ring_forms.forms_at(shape, 132, "A card", coding)
        assert form_of(forms, 128) == wanted and form_of(forms, 129) == replace(measured, coding=coding)
        assert form_of(forms, 257) is None


def test_measured_forms_of_quantised_weights_go_before_the_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {Shape(4096, 4096): ((8, RingForm(8, 128, 3)), (16, None))}
    monkeypatch.setattr(Measured, "table", lambda self, name: found if self.op == "ring, 4 bits, 1 sets" else {})
    first, second, third, *_ = ring_forms.forms_at(Shape(4096, 4096), 132, "A card", Coding(4, ordered=True))
    assert (
        first == (8, RingForm(8, 128, 3, coding=Coding(4)))
        and second == (16, None)
        and third[0] == 32
        and third[1] is not None
    )
    assert ring_forms.forms_at(Shape(4096, 4096), 132, "A card", None) == (), "in bfloat16 there is no rule"


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"codings": (Coding(4, table=True),)}, "of a table"), ({"codings": (Coding(4, rotation=32),)}, "of a table"),
        ({"codings": (Coding(4),), "in_features": 68}, "of a table"), ({"codings": (Coding(4),), "shared": True}, "an embedding"),
        ({"eights": (EightBits("fp8"), None)}, "one 8-bit type alone"),
    ],
    ids=str,
)  # fmt: skip
def test_other_quantised_weights_are_left_to_who_stands_behind(facts: Any, words: str, on_hopper: None) -> None:
    name = candidates.EIGHT_RING if "eights" in facts else candidates.CODED_RING
    assert words in refusal("packed_linear", name, on_card("packed_linear", facts={"formats": ("it",)} | GOOD | facts))


def test_tables_are_read_as_they_were_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, kept = (
        tmp_path / "rings.json",
        {Shape(64, 32): FORMS, Shape(64, 32, True): ((64, RingForm(64, 128, 1, False)),)},
    )
    MEASURED.keep("A card", kept, path)
    assert MEASURED.read(path, "A card") == kept
    for row in (
        "[16, 16, 100, 1, true]",
        "[17, 16, 64, 1, true]",
        "[16, 16, 64, 1, 1]",
        "[16, 20, 64, 1, true]",
        "[16, 16, 64, 0, true]",
        "[256, 64, 64, 1, true]",
    ):
        path.write_text(f'{{"A card": {{"ring": {{"64 x 32": [{row}]}}}}}}')
        assert MEASURED.read(path, "A card") == {} and "is no form" in caplog.text
        caplog.clear()


def test_the_shipped_table_is_sound() -> None:
    shipped = MEASURED.read(SHIPPED, "NVIDIA H200")
    assert set(RINGS.shapes(tune.shapes_of(DEFAULT_SPEC))) <= set(shipped), "the model of the documentation is shipped"
    for shape, forms in shipped.items():
        assert [most for most, _ in forms] == sorted({most for most, _ in forms})
        assert forms[0] == (1, None) or shape not in tune.shapes_of(DEFAULT_SPEC), (
            "one row is one launch's, or a rank's"
        )
        assert all(form is None or form.fits(shape, 132) for _, form in forms)


# --- who computes how many rows


class Ring:
    """Stands for a RingLinear: which rows it was given, with what, in a product that a CPU computes."""

    def __init__(self, weight: torch.Tensor, forms: Any) -> None:
        self.weight, self.forms, self.shape, self.given = weight, forms, Shape(*weight.shape), list[tuple[int, int]]()

    def compute(self, x: torch.Tensor, epilogue: Any, form: RingForm, into: torch.Tensor | None = None) -> Any:
        assert len(x) <= form.rows
        self.given.append((len(x), form.rows))
        found = self.others(x, epilogue)
        if into is not None:
            into.copy_(found[0])
        return found

    def others(self, x: torch.Tensor, epilogue: Any) -> Any:
        return reference.fused_linear(self.weight, None)(x, epilogue)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)


@pytest.mark.parametrize(("rows", "form"), [(64, 0), (65, 128), (128, 128), (129, 256), (256, 256), (257, 0)])
def test_codes_serve_more_rows_in_one_launch(rows: int, form: int) -> None:
    rings = pytest.importorskip("headrace.kernels.linear.rings", exc_type=ImportError)
    torch.manual_seed(rows)
    weight, x = torch.randn(48, 32).bfloat16(), torch.randn(rows, 32).bfloat16()
    ring = Ring(weight, tuple((most, RingForm(most, 128)) for most in (64, 128, 256)))
    y = rings.ManyRing(ring, lambda x: reference.linear(weight, None)(x))(x.view(1, rows, 32))
    assert ring.given == ([(rows, form)] if form else []) and y.shape == (1, rows, 48)
    torch.testing.assert_close(y[0], reference.linear(weight, None)(x), rtol=2e-2, atol=2e-2)
    assert rings.ManyRing(ring, ring).gated(x, Activation.SILU) is None, "rows do not take turns"
    rings.ManyRing(ring, lambda x: None, 1)(x[:3])
    assert ring.given[-1] == (3, 64), "few rows, too, where nobody else takes a norm in"


@pytest.mark.parametrize("rows", [3, 12])
def test_matrices_of_two_codings_take_one_norm_in_each_by_itself(rows: int) -> None:
    """As a query and a key in one type, and a value in another; a form is there for some rows, or for none."""
    rings = pytest.importorskip("headrace.kernels.linear.rings", exc_type=ImportError)
    torch.manual_seed(rows)
    weight, x, squares = torch.randn(48, 32).bfloat16(), torch.randn(rows, 32).bfloat16(), torch.rand(2, rows) * 16
    first, second = Ring(weight[:40], ((16, RingForm(16, 64)),)), Ring(weight[40:], ((8, RingForm(8, 64)),))
    y, scaled, sums = rings.RingsBelow((first, second))(x, Epilogue(squares, 1e-5))
    assert (scaled, sums) == (None, None) and len(first.given) == 1 and len(second.given) == (rows <= 8)
    torch.testing.assert_close(y, reference.fused_linear(weight, None)(x, Epilogue(squares, 1e-5))[0])


@pytest.mark.parametrize(("rows", "kind"), [(64, "product"), (65, "ring"), (129, "gemm")])
def test_a_prompt_in_8_bits_is_the_gemms(rows: int, kind: str) -> None:
    rings = pytest.importorskip("headrace.kernels.linear.rings", exc_type=ImportError)
    asked: list[str] = []

    def named(name: str) -> Any:
        return lambda *given: asked.append(name) or torch.ones(rows, 48)  # type: ignore[func-returns-value]

    product = SimpleNamespace(eight=EightBits("int8"), multiplied=named("product"), bias=torch.ones(48))
    ring = SimpleNamespace(forms=((128, RingForm(128, 64, eight="int8")),), compute=lambda *given: (named("ring")(),))
    cut = rings.EightBitCut(product, ring, named("gemm"))
    y = cut.multiplied(torch.zeros(rows, 32, dtype=torch.int8), torch.ones(rows, 1), torch.bfloat16)
    assert asked == [kind] and bool((y == (2 if kind == "gemm" else 1)).all()), "the bias is added behind it"


@pytest.mark.parametrize(("rows", "served"), [(1, True), (64, True), (65, False), (128, False)])
def test_inputs_of_8_bits_are_rounded_once_and_scaled_behind_the_sums(rows: int, served: bool) -> None:
    """With a norm before it up to 64 rows; alone from there on."""
    rings = pytest.importorskip("headrace.kernels.linear.rings", exc_type=ImportError)
    codes, scale = torch.zeros(rows, 32, dtype=torch.float8_e4m3fn), torch.rand(rows, 1)
    asked: list[Any] = []
    product = SimpleNamespace(
        eight=EightBits("fp8"), rounded=lambda x, epilogue: asked.append(epilogue) or (codes, scale), fused=None
    )
    forms = ((64, RingForm(64, 64, eight="fp8")), (128, RingForm(128, 64, eight="fp8")))
    ring = SimpleNamespace(forms=forms, shape=Shape(48, 32))
    ring.compute = lambda x, epilogue, form: (x, epilogue, form)
    x, epilogue = torch.randn(rows, 32).bfloat16(), Epilogue(torch.rand(3, rows), 1e-5)
    if served:
        pairs, given, form = rings.EightBitRing(product, ring)(x, epilogue)
        assert asked == [epilogue] and given.squares.shape == (1, rows) and given.eps == 1e-5
    else:
        ring.compute = lambda x, epilogue, form: (
            asked.append((epilogue.squares.shape, form.rows)),
            torch.zeros(rows, 48),
        )[1:]
        assert rings.EightBitCut(product, ring)(x).shape == (rows, 48)
        assert asked == [Epilogue(), ((1, rows), 128)]
        return
    assert (
        pairs.shape == (rows, 16)
        and pairs.dtype is torch.bfloat16
        and form.rows == 64
        and torch.equal(given.squares[0], scale[:, 0])
    )


# --- measuring


def test_what_was_found_is_kept_by_shape_and_one_row_is_left_to_the_others() -> None:
    form = RingForm(16, 64, 2)
    best = ((Shape(64, 32), 16, form), (Shape(64, 32), 32, None), (Shape(8, 32), 16, form))
    found = [tune.Tuned(*each, 1.0, 2.0) for each in best]
    assert RINGS.table(found) == {
        Shape(64, 32): ((1, None), (16, form), (32, None)),
        Shape(8, 32): ((1, None), (16, form)),
    }
    assert found[0].row(1.0)[2] == "rows 16, columns 64, ways 2, late True" and found[1].row(1.0)[2] == "none"
    assert RINGS.shapes([Shape(64, 64), Shape(128256, 64), Shape(60, 64, True), Shape(64, 60)]) == (Shape(64, 64),)


def test_the_sources_compile_for_every_kind_of_form() -> None:
    """Where NVRTC is; tests/gpu has it always."""
    pytest.importorskip("triton")
    from headrace.kernels.build import nvrtc as compiler
    from headrace.kernels.linear import cuda_ring as ring

    try:
        compiler._nvrtc()
    except compiler.CompileError:
        pytest.skip("no NVRTC here")
    for form, gate in ((RingForm(16, 64, 2), None), (RingForm(48, 128, 4), None), (RingForm(64, 128), Activation.SILU)):
        assert b"ring" in ring.machine_code(form, gate)
