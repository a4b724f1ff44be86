"""Gate, up and activation as one product, without a GPU: who is served, which tile, the source compiled where there is
a compiler."""

from __future__ import annotations

import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.bench import tune
from headrace.kernels import Kernels
from headrace.kernels.build import nvrtc as compiler
from headrace.kernels.build import variants
from headrace.kernels.candidate import Shape
from headrace.kernels.linear import candidates, gated_tiles, measured
from headrace.kernels.linear.gated_tiles import MEASURED, TALL, Form, Tile
from headrace.kernels.norm import reference
from headrace.layers.basic import FeedForward
from headrace.layers.context import LayerContext
from headrace.sites import Role, Weight
from headrace.spec import Activation
from tests.support.assembler import said_of
from tests.support.kernel_cases import BLACKWELL, called, on_card, refusal

GATES = tune.GatedProducts(Activation.SILU)
GOOD = {"dtype": torch.bfloat16, "out_features": 128, "in_features": 64}


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        candidates,
        "measured_tiles",
        lambda name: {Shape(64, 64): ((96, None), (128, Tile(224))), Shape(64, 32): ((512, None),)},
    )


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"out_features": 136}, "copy engine"),
        ({"in_features": 60}, "copy engine"),
        ({"in_features": 72}, "nothing was measured"),
        ({"in_features": 32}, "nothing was measured"),  # it was, and nothing was better
    ],
)
def test_who_is_not_served_loses_nothing_but_speed(facts: dict[str, Any], words: str, on_hopper: None) -> None:
    assert words in refusal("gated_linear", "gated", on_card("gated_linear", facts=GOOD | facts))


def test_another_card_and_a_cpu_are_not_served(on_hopper: None) -> None:
    assert refusal("gated_linear", "gated", on_card("gated_linear", facts=GOOD)) == ""
    assert "10.0 is not 9.0" in refusal("gated_linear", "gated", on_card("gated_linear", BLACKWELL, facts=GOOD))
    assert Kernels(torch.device("cpu")).offer(*called("gated_linear", **GOOD)) is None


def test_tables_are_read_as_they_were_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, rows = (
        tmp_path / "gates.json",
        ((96, None), (128, Tile(224)), (4096, Tile(192, Form.TURNS)), (8192, Tile(192, Form.TALL))),
    )
    tiles = {Shape(64, 32): rows}
    MEASURED.keep("A card", tiles, path)
    assert MEASURED.read(path, "A card") == tiles
    assert json.loads(path.read_text())["A card"]["gated"]["64 x 32"] == [
        [96, 0],
        [128, 224],
        [4096, 192, 1],
        [8192, 192, 2],
    ]
    for odd in (
        "[128, 100]",
        "[128, 176, 2]",
        "[128, 192, 3]",
        "[128, 192, 1, 1]",
        "[128, 128, 1]",
        "[128, 0, 1]",
        "[128, 192, true]",
        "[128]",
    ):
        caplog.clear()
        path.write_text(f'{{"A card": {{"gated": {{"64 x 32": [{odd}]}}}}}}')
        assert MEASURED.read(path, "A card") == {} and "cannot be read" in caplog.text, odd


def test_tall_tiles_serve_no_weight_that_is_too_flat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever wrote the table: two steps of K at either end of a tile, and one between."""
    monkeypatch.setattr(measured, "kept_file", lambda: tmp_path / "gates.json")
    rows = ((2048, Tile(176, Form.TURNS)), (8192, TALL[0]))
    MEASURED.keep("A card", {Shape(64, 256): rows, Shape(64, 264): rows})
    assert gated_tiles.measured_tiles("A card") == {Shape(64, 256): (rows[0], (8192, None)), Shape(64, 264): rows}


@pytest.mark.parametrize(
    ("outs", "thin"),
    [(192, 0), (384, 0), (14336, 128), (8192, 128), (64, 64), (1024, 64), (1000, 0), (200, 0), (208, 16)],
)
def test_what_pairs_of_tall_tiles_leave_gets_thin_ones(outs: int, thin: int) -> None:
    """Where their halves, gate and what it gates, are whole blocks of eight rows; else one more pair reads past the
    end."""
    assert TALL[0].thin(outs) == thin and Tile(192, Form.TURNS).thin(outs) == Tile(192).thin(outs) == 0


def test_the_shipped_table_is_sound() -> None:
    for tiles in MEASURED.read(measured.SHIPPED, "NVIDIA H200").values():
        assert [most for most, _ in tiles] == sorted({most for most, _ in tiles}) and any(tile for _, tile in tiles)


@pytest.mark.parametrize("declines", [False, True])
@pytest.mark.parametrize(("rows", "whole"), [(64, False), (65, True), (512, True), (5000, True)])
def test_a_layer_takes_the_product_with_its_gate_for_its_rows_alone(rows: int, whole: bool, declines: bool) -> None:
    cpu = torch.device("cpu")
    sites = {Role.UP: Weight("up", Role.UP, 0, (6, 6), 8), Role.DOWN: Weight("down", Role.DOWN, 0, (8,), 6)}
    layer = FeedForward(sites, Activation.SILU, LayerContext(torch.float32, cpu, Kernels(cpu)))
    for part in (layer.up, layer.down):
        torch.nn.init.normal_(part.weight)  # type: ignore[arg-type]
        part.finish_loading()
    x, calls = torch.randn(rows, 8), []
    want, plain = layer.up.activated(x), layer.up._apply_weight

    def through_gate(x: Tensor, kind: Activation) -> Tensor | None:
        calls.append(len(x))
        if declines:
            return None
        gate, up = plain(x).chunk(2, dim=1)
        return torch.nn.functional.silu(gate) * up

    layer.up._gated = through_gate
    torch.testing.assert_close(layer.up.activated(x), want)
    assert bool(calls) == whole


# --- measuring


def test_neighbours_with_one_tile_are_one_row_and_the_quickest_right_tile_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    wide, turns, tall = Tile(224), Tile(192, Form.TURNS), TALL[0]
    chosen = ((72, None), (80, None), (128, wide), (256, wide), (512, None), (1024, turns), (2048, turns))
    found = [tune.Tuned(Shape(64, 32, True), rows, tile, 1.0, 2.0) for rows, tile in chosen]
    other = [tune.Tuned(Shape(8, 32, True), 72, Tile(128), 1.0, 2.0)]
    assert GATES.table(found + other) == {
        Shape(64, 32): ((80, None), (256, wide), (512, None), (2048, turns)), Shape(8, 32): ((72, Tile(128)),)
    }  # fmt: skip
    found = [
        tune.Tuned(Shape(64, 32, True), rows, tile, 1.0, 2.0)
        for rows, tile in ((2048, turns), (8192, tall), (16384, tall))
    ]
    assert GATES.table(found) == {Shape(64, 32): ((2048, turns), (gated_tiles.BEYOND, tall))}, (
        "beyond what was measured, too"
    )
    assert [each.row(1.0)[::2][:2] for each in found] == [
        ("64 x 32, gated", "192 in turns"),
        *[("64 x 32, gated", "192 tall")] * 2,
    ]
    assert GATES.shapes([Shape(64, 32, True), Shape(64, 32), Shape(60, 32, True), Shape(64, 32, True)]) == (
        Shape(64, 32, True),
    )


def test_tall_tiles_are_tried_for_long_prompts_of_weights_that_they_take() -> None:
    tried = {rows: set(tune.tiles_for(rows, 4096)) for rows in tune.PROMPTS}
    assert {rows for rows, tiles in tried.items() if tiles & {*TALL}} == {rows for rows in tune.PROMPTS if rows > 1024}
    assert all(tiles >= {*gated_tiles.IN_TURNS} for tiles in tried.values())
    assert not {*TALL} & {*tune.tiles_for(16384, 256)}


def test_a_tile_must_be_right_and_quicker_and_a_prompts_need_not_be_by_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second tile computes something else, whatever its time."""
    weight, (first, second), asked = torch.randn(16, 8), gated_tiles.TOGETHER[:2], []
    monkeypatch.setitem(
        sys.modules,
        "headrace.kernels.norm.triton_activation",
        SimpleNamespace(gated_activation=reference.gated_activation),
    )
    monkeypatch.setattr(tune, "_tuned_product", lambda weight: torch.nn.functional.linear)

    def compute(x: Tensor, activation: Activation, tile: Tile) -> Tensor:
        right = reference.gated_activation(torch.nn.functional.linear(x, weight), activation)
        return right if tile is first else right + 1

    def best(seconds: float, gain: float) -> Tile | None:
        def held(forms: dict[Any, Any]) -> dict[Any, float]:
            asked.append(set(forms))
            return {None: 1.0, first: seconds}

        monkeypatch.setattr(tune, "_held", held)
        layers = [SimpleNamespace(weight=weight, compute=compute)]
        x = torch.randn(70, 8)
        return tune.fastest(
            tune.gate_trial(Shape(8, 8, True), x, layers, (first, second), Activation.SILU, gain=gain, held=True)
        ).form

    found = [best(seconds, gain) for seconds, gain in ((0.9, 1.02), (0.99, 1.02), (0.99, 1.0), (1.0, 1.0))]
    assert found == [first, None, first, None] and asked == [{None, first}] * 4


def test_the_source_compiles_for_every_tile() -> None:
    """Where NVRTC is; tests/gpu has it always."""
    pytest.importorskip("triton")
    from headrace.kernels.build import nvrtc as compiler
    from headrace.kernels.linear import cuda_gated as gated

    try:
        compiler._nvrtc()
    except compiler.CompileError:
        pytest.skip("no NVRTC here")
    for tile in gated_tiles.TILES:
        assert b"gated" in gated.machine_code(tile, Activation.SILU, tile.thin(1024))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("outs", [14336, 1024, 192])
def test_tall_tiles_spill_nothing_and_their_products_overlap(
    outs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their sums take 192 of 232 registers: a word more, and every product waits for the one before."""
    gated = pytest.importorskip("headrace.kernels.linear.cuda_gated", exc_type=ImportError)
    said = said_of(lambda: gated.machine_code(TALL[0], Activation.SILU, TALL[0].thin(outs)), tmp_path, monkeypatch)
    assert "0 bytes spill stores" in said and "serialized" not in said, said


@pytest.mark.parametrize("columns", [192, 128])
def test_a_gemm_of_8_bits_spills_nothing(columns: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gated = pytest.importorskip("headrace.kernels.linear.cuda_gated", exc_type=ImportError)
    said = said_of(lambda: gated.machine_code(Tile(columns, Form.TURNS), "int8", 0), tmp_path, monkeypatch)
    assert "0 bytes spill stores" in said and "serialized" not in said, said


def test_a_gemm_of_8_bits_takes_the_tile_whose_last_wave_leaves_least_undone() -> None:
    gated = pytest.importorskip("headrace.kernels.linear.cuda_gated", exc_type=ImportError)
    kernels = SimpleNamespace(processors=132)
    found = {
        (outs, rows): gated.EightBitGemm("int8", torch.empty(outs, 0), None, kernels, {}).tile(rows).columns
        for outs, rows in ((4096, 2048), (28672, 2048), (4096, 8192))
    }
    assert found == {(4096, 2048): 128, (28672, 2048): 192, (4096, 8192): 192}


def test_the_ring_fits_the_processor() -> None:
    gated = pytest.importorskip("headrace.kernels.linear.cuda_gated", exc_type=ImportError)
    for tile in gated_tiles.TILES:
        assert gated.stages_of(tile) >= 4 and gated._shared_bytes(tile) <= 232448
        text = gated.instruction(tile.columns)
        assert f"m64n{tile.columns}k16" in text and text.count('"+f"') == tile.columns // 2


def test_as_many_clusters_are_launched_as_there_are_tiles_to_share() -> None:
    gated = pytest.importorskip("headrace.kernels.linear.cuda_gated", exc_type=ImportError)
    cases = {(128, 224): (2, 3, 2), (129, 225): (6, 3, 2), (257, 1000): (27, 22, 12)}  # rows and columns of the result
    for (rows, outs), want in cases.items():
        assert tuple(gated.places(tile, rows, outs) for tile in (Tile(224), Tile(192, Form.TURNS), TALL[0])) == want, (
            rows,
            outs,
        )


def test_machine_code_that_a_disk_has_damaged_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    monkeypatch.setattr(compiler, "_nvrtc", lambda: None)
    monkeypatch.setattr(compiler, "_version", lambda nvrtc: "12.8")
    monkeypatch.setattr(compiler, "_compile", lambda nvrtc, text, options: made.append(text) or b"machine code")
    for damage in (
        lambda kept: kept,
        lambda kept: kept[:-3],
        lambda kept: kept[:-1] + b"!",
        lambda kept: b"",
        lambda kept: b"machine code",
    ):
        assert compiler.build("a", (), tmp_path) == compiler.build("a", (), tmp_path) == b"machine code"
        (kept,) = tmp_path.iterdir()
        kept.write_bytes(damage(kept.read_bytes()))
    assert len(made) == 4  # the first is whole


def test_tiles_are_compiled_side_by_side_and_each_is_loaded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One after another they took a cold start 1.8 s (8B), longer than any other kernel."""
    gated = pytest.importorskip("headrace.kernels.linear.cuda_gated", exc_type=ImportError)
    meeting, loaded = threading.Barrier(2, timeout=5), list[object]()

    def compiled(tile: Tile, activation: Activation, thin: int) -> object:
        meeting.wait()  # each waits for the other
        return tile

    monkeypatch.setattr(gated, "machine_code", compiled)
    monkeypatch.setattr(
        variants, "Module", lambda code, device: SimpleNamespace(function=lambda *_: loaded.append(code) or code)
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    for tiles in ((Tile(224), Tile(128)), (Tile(192), Tile(192))):
        kernels = gated.kernels_of(torch.device("cuda", 0))
        with ThreadPoolExecutor(2) as pool:
            assert list(
                pool.map(lambda tile, kernels=kernels: kernels.function((tile, Activation.SILU, 0)), tiles)
            ) == list(tiles)
    assert sorted(tile.columns for tile in loaded) == [128, 192, 224]  # type: ignore[attr-defined]
