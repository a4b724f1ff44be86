"""Formats of Headrace's own: what is stored gives the matrix back, and what cannot be one is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

from headrace.errors import ConfigError, ModelError  # noqa: E402
from headrace.quant import Format, FormatError, Tensors  # noqa: E402
from headrace.quant.config import read_quantization  # noqa: E402
from headrace.quant.dfloat11 import LONGEST, DFloat11, canonical, code_lengths  # noqa: E402
from headrace.quant.integers import PackedIntegers, TwoLevels  # noqa: E402
from headrace.quant.outliers import OutlierColumns, SparseOutliers  # noqa: E402
from headrace.quant.rotated import Rotated, rotated  # noqa: E402
from headrace.quant.scaled import ScaledWeight  # noqa: E402
from headrace.quant.ternary import Ternary  # noqa: E402
from headrace.quantize.grid import Grid, fit  # noqa: E402
from headrace.quantize.makers import (  # noqa: E402
    huffman_coded,
    levels_recipe,
    ternary_recipe,
)
from headrace.quantize.names import Choice  # noqa: E402


def bfloat16(kind: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    if kind == "every pattern":
        return torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(256, 256)
    if kind == "one exponent":
        return torch.full((7, 33), -1.5, dtype=torch.bfloat16)
    wide = torch.randn(96, 130, generator=generator)
    return (wide * wide.abs().pow(9)).bfloat16() if kind == "rare exponents" else (wide * 0.02).bfloat16()


@pytest.mark.parametrize("kind", ["usual", "rare exponents", "one exponent", "every pattern"])
def test_every_bit_of_bfloat16_comes_back(kind: str) -> None:
    weight, form = bfloat16(kind), DFloat11()
    tensors = form.prepare(huffman_coded(weight))
    for rows in (slice(None), slice(32, 64), torch.tensor([5, 0, 6, 5])):
        assert torch.equal(form.dense(tensors, rows, torch.bfloat16).view(torch.int16), weight[rows].view(torch.int16))
    if kind == "usual":
        assert len(huffman_coded(weight)["encoded_exponent"]) * 8 / weight.numel() < 3.0


def test_codes_are_a_prefix_code_and_short_enough() -> None:
    counts = [0] * 256
    for index, exponent in enumerate(range(90, 130)):  # Fibonacci: the longest codes there are
        counts[exponent] = 1 if index < 2 else counts[exponent - 1] + counts[exponent - 2]
    lengths = code_lengths(counts)
    codes = {f"{code:0{lengths[exponent]}b}" for exponent, code in canonical(lengths)}
    assert max(lengths) <= LONGEST and len(codes) == 40
    assert not any(other != code and other.startswith(code) for code in codes for other in codes)


def test_two_levels_are_those_that_lie_nearest() -> None:
    """Against all ways to part 8 weights in two; and what is stored is that."""
    weight = torch.randn(4, 64, generator=torch.Generator().manual_seed(3))
    weight[0], weight[1, :32] = 0.25, 0.0
    found = fit(weight[:, :8].contiguous(), Grid(1, 8, kind="levels", scales=torch.float32))
    for row, levels in zip(weight[:, :8], found.rounded(weight[:, :8].contiguous()), strict=True):
        ranked = row.sort().values
        parted = [
            float(sum((part - part.mean()).square().sum() for part in (ranked[:at], ranked[at:]) if len(part)))
            for at in range(8)
        ]
        assert float((row - levels).square().sum()) <= 1.35 * min(parted) + 1e-6
    recipe = levels_recipe(Choice("w1a16", "rtn", 1), group_size=32, asymmetric=False)
    made, form = recipe.made(weight, None, 1.0, Format()), TwoLevels(32)
    tensors = form.prepare(made)
    assert {each.name: each.shape for each in form.tensors(4, 64)} == {
        name: tuple(each.shape) for name, each in made.items()
    }
    torch.testing.assert_close(
        form.dense(tensors, slice(None), torch.float32), fit(weight, recipe.grid).rounded(weight)
    )
    made["weight_low"][1, 1] = float("nan")
    with pytest.raises(FormatError, match="1 of 8 values of weight_low are no scales"):
        form.prepare(made)
    with pytest.raises(ConfigError, match="give --group-size one of them"):
        levels_recipe(Choice("w1a16", "rtn", 1), group_size=0, asymmetric=False)
    config = {"quant_method": "headrace", "format": "two-levels", "ignore": []}
    assert read_quantization({**config, "group_size": 64})("model.layers.0.mlp.up_proj") == TwoLevels(64)
    with pytest.raises(ModelError):
        read_quantization({**config, "group_size": 48})


@pytest.mark.parametrize("size", [2, 16, 32, 128])
def test_a_rotation_is_hadamards_and_its_own_inverse(size: int) -> None:
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    x = torch.randn(3, 2 * size)
    want = torch.cat([part @ matrix / size**0.5 for part in x.split(size, 1)], 1)
    torch.testing.assert_close(rotated(x, size), want)
    torch.testing.assert_close(rotated(rotated(x, size), size), x)


def sparse() -> Tensors:
    return {
        "weight_packed": torch.zeros(32, 4, dtype=torch.int32), "weight_scale": torch.ones(32, 1),
        "outlier_rows": torch.arange(33, dtype=torch.int32),
        "outlier_columns": torch.arange(32, dtype=torch.int32), "outlier_values": torch.arange(32.0),
    }  # fmt: skip


def test_single_weights_stand_beside_a_matrix() -> None:
    form = SparseOutliers(PackedIntegers(4, 32, zero=False), 0.01)
    tensors = form.prepare(sparse())
    whole = form.dense(tensors, slice(None), torch.float32)
    assert torch.equal(whole + 8, torch.diag(torch.arange(32.0))) and torch.equal(
        form.dense(tensors, slice(16, 24), torch.float32), whole[16:24]
    )
    padded = sparse() | {
        "outlier_columns": torch.zeros(40, dtype=torch.int32),
        "outlier_values": torch.zeros(40),
    }  # as experts are
    assert torch.equal(form.dense(form.prepare(padded), slice(None), torch.float32), torch.full((32, 32), -8.0))


def change(name: str, at: int, value: float) -> Callable[[Tensors], None]:
    return lambda tensors: tensors[name].view(-1).__setitem__(at, value)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (change("outlier_rows", 3, 40), "outlier_rows ends at 32"),
        (change("outlier_rows", 32, 33), "outlier_rows ends at 33, and there are 32 columns"),
        (change("outlier_columns", 0, 32), "names inputs from 1 to 32, and there are 32"),
        (change("outlier_columns", 0, -1), "names inputs from -1 to 31"),
        (change("outlier_values", 5, float("nan")), "outlier_values holds NaN"),
        (change("weight_scale", 5, 0.0), "are no scales"),
    ],
)
def test_sparse_outliers_that_cannot_be_are_named(damage: Callable[[Tensors], None], said: str) -> None:
    tensors = sparse()
    damage(tensors)
    with pytest.raises(FormatError, match=said):
        SparseOutliers(PackedIntegers(4, 32, zero=False), 0.01).prepare(tensors)


def test_columns_that_cannot_be_are_named() -> None:
    form = OutlierColumns(ScaledWeight("int8", (1, 0)), 0.02)
    cases = (
        ([3, 64], 0.0, "names inputs from 3 to 64, and there are 64"),
        ([3, 3], 0.0, "each once"),
        ([3, 4], float("inf"), "NaN or"),
    )
    for index, value, said in cases:
        tensors = {
            "weight": torch.zeros(4, 64, dtype=torch.int8), "scale": torch.ones(4, 1),
            "outlier_index": torch.tensor(index), "outlier_weight": torch.full((4, 2), value),
        }  # fmt: skip
        with pytest.raises(FormatError, match=said):
            form.prepare(tensors)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (change("row_starts", 1, -1), "row_starts names bits from -1"),
        (change("row_starts", 1, 10**9), "row_starts names bits from 0 to 1000000000"),
        (change("code_lengths", 3, 17), "no Huffman code"),
        (change("code_lengths", 3, 1), "no Huffman code"),
    ],
)
def test_a_stream_that_cannot_be_is_named(damage: Callable[[Tensors], None], said: str) -> None:
    tensors = huffman_coded(bfloat16("usual"))
    damage(tensors)
    with pytest.raises(FormatError, match=said):
        DFloat11().prepare(tensors)


def test_three_values_come_back_from_the_book() -> None:
    """Of every density of zeros, and less than a bit each where most are; a row of zeros takes as few words as there
    can be."""
    form = Ternary()
    for scale in (1, 9):
        weight = torch.randn(64, 140, generator=torch.Generator().manual_seed(scale)).pow(scale)
        weight[7] = 0.0
        made = ternary_recipe("rtn").made(weight, None, 1.0, Format())
        want = fit(weight, Grid(2, 0, kind="ternary")).rounded(weight)
        assert torch.equal(form.dense(form.prepare(made), slice(None), torch.float32), want)
        assert torch.equal(form.dense(made, slice(32, 40), torch.float32), want[32:40])
        assert int(made["row_words"].diff()[7]) == 140 // 28
    assert len(made["words"]) * 8 / weight.numel() < 0.9


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda tensors: tensors["words"][:2].zero_(), "other than its 140 inputs"),
        (change("row_words", 1, 0), "other than its 140 inputs"),
        (change("row_words", 64, 10**6), "row_words ends at 1000000, and there are"),
        (change("levels", 1, float("inf")), "levels are no scales"),
        (change("shape", 1, 144), "other than its 144 inputs"),
    ],
)
def test_words_that_cannot_be_are_named(damage: Callable[[Tensors], None], said: str) -> None:
    made = ternary_recipe("rtn").made(
        torch.randn(64, 140, generator=torch.Generator().manual_seed(1)).pow(9), None, 1.0, Format()
    )
    damage(made)
    with pytest.raises(FormatError, match=said):
        Ternary().prepare(made)


def test_configs_of_our_own() -> None:
    own = {"quant_method": "headrace", "ignore": ["lm_head"]}
    assert read_quantization(own | {"format": "dfloat11"})("model.layers.0.mlp.up_proj") == DFloat11()
    assert read_quantization(own | {"format": "dfloat11"})("lm_head") is None
    with pytest.raises(ModelError, match="format is 'zip', which is not supported; supported are outlier-columns"):
        read_quantization(own | {"format": "zip"})
    for share in (None, 0.0, 2.0, "much"):
        with pytest.raises(ModelError, match="share is"):
            read_quantization(own | {"format": "outlier-columns", "share": share})


def test_rotations_of_inputs_are_read_and_others_refused() -> None:
    weights = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
    scheme = {
        "type": "hadamard",
        "head_dim": 32,
        "apply": [{"targets": ["Linear"], "location": "input", "ignore": ["lm_head"]}],
    }
    groups = {"a": {"targets": ["Linear"], "weights": weights}}
    config = {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized", "config_groups": groups}
    form = read_quantization(config | {"transform_config": {"config_groups": {"r": scheme}}})(
        "model.layers.0.mlp.up_proj"
    )
    assert isinstance(form, Rotated) and form.size == 32 and form.label == "MXFP4, inputs rotated by 32"
    for other in (
        {"type": "random-matrix"},
        {"head_dim": 24},
        {"head_dim": None},
        {"randomize": True},
        {"apply": [{"location": "k_cache"}]},
    ):
        with pytest.raises(ModelError, match="supported are Hadamard rotations of inputs"):
            read_quantization(config | {"transform_config": {"config_groups": {"r": scheme | other}}})
