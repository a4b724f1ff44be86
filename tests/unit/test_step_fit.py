"""Fitting prices of steps: known ones are found again, what cannot be told apart is said, disturbed steps do not
count."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.cost.cost_model import CostModel, StepLoad
from headrace.cost.popularity import picked, read_popularity, touched_experts, zipf
from headrace.cost.prices import Classes, Slowness, StepPrices
from headrace.cost.profile import DeviceIdentity, DeviceProfile
from headrace.errors import ConfigError
from headrace.planner.least_squares import nnls
from headrace.planner.step_fit import Observed, fit_steps
from headrace.spec import DecoderSpec, LayerSpec, MoESpec, RopeSpec, kv_groups

BANDWIDTH, RATE = 1e9, 1e11
CLASSES = Classes((8,), apart=True)
ONE = Slowness(1.0, 1.0)
ASSUMED = StepPrices((ONE,) * 4, ONE, (ONE,) * 4, ONE, 1.0, 1.0, CLASSES, (0.0,) * 4)
TRUE = StepPrices(
    products=(Slowness(1.3, 1.0), Slowness(1.6, 1.2), Slowness(1.2, 1.3), Slowness(1.0, 1.4)),
    experts=ONE,
    decode=(Slowness(2.0, 1.0), Slowness(1.5, 1.0), Slowness(2.5, 1.0), Slowness(3.0, 1.0)),
    prompts=Slowness(0.0, 2.5),
    others=1.0,
    activations=1.0,
    classes=CLASSES,
    fixed=(0.0, 0.0, 1e-3, 2e-3),
    sampled=4e-5,
    shared=5e-4,
)


def cost_model(moe: MoESpec | None = None) -> CostModel:
    spec = DecoderSpec("llama", 2000, 256, 4, 2, 64, 512, (LayerSpec(moe=moe),) * 4, 4096, RopeSpec(1e4, 64))
    identity = DeviceIdentity(kind="cuda", name="test", threads=0)
    profile = DeviceProfile(
        identity=identity, read_bandwidth=BANDWIDTH, copy_bandwidth=BANDWIDTH, gemm_rates={"bfloat16": RATE}
    )
    return CostModel(spec, kv_groups(spec, 16, 2), profile, weight_bytes=2, dtype="bfloat16")


def load(rows: int, context: int, prompt: int = 0, filled: int = 0, saved: float = 0.0) -> StepLoad:
    """``rows`` single tokens that see ``context`` keys each, beside a whole prompt."""
    lone, pairs = float(rows * context), prompt * (prompt + 1) / 2
    return StepLoad(rows + prompt, rows + bool(prompt), (lone + pairs,), (lone + prompt,), (lone,), (saved,), filled)


LOADS = [load(rows, context) for rows, context in product((1, 2, 4, 8, 12, 20, 40, 80), (20, 200, 900))]
LOADS += [load(rows, 300, prompt) for rows, prompt in product((0, 3, 30), (20, 100, 300, 700))]
LOADS += [
    load(rows, 300, prompt, size)
    for rows, (prompt, size) in product((0, 3, 30), ((20, 64), (100, 192), (300, 384), (700, 768), (700, 1024)))
]
LOADS += [load(rows, 900, saved=rows * 500.0) for rows in (2, 8, 20, 40, 80)]


def price(prices: StepPrices, model: CostModel, each: StepLoad) -> float:
    alone = each.decode_keys == each.keys
    return float(prices.seconds(model.work(each), BANDWIDTH, RATE, each, decode=alone))


def observed(
    model: CostModel, prices: StepPrices, loads: list[StepLoad], noise: float = 0.0, seed: int = 0
) -> list[Observed]:
    rng, found = np.random.default_rng(seed), []
    for each in loads:
        seconds = price(prices, model, each) * float(np.exp(noise * rng.standard_normal()))
        found.append(Observed(each, model.work(each), each.decode_keys == each.keys, seconds))
    return found


def fitted(steps: list[Observed], assumed: StepPrices = ASSUMED, least: float = 0.0):  # type: ignore[no-untyped-def]
    return fit_steps(steps, assumed, bandwidth=BANDWIDTH, rate=RATE, least=least)


def test_known_prices_are_found_again() -> None:
    model = cost_model()
    found = fitted(observed(model, TRUE, LOADS))
    assert found.median_error < 1e-3 and found.p90_error < 5e-3 and abs(found.bias) < 1e-3
    for steps in LOADS:
        assert price(found.prices, model, steps) == pytest.approx(price(TRUE, model, steps), rel=0.01)
    assert found.prices.products[0].bytes == pytest.approx(1.3, rel=0.02) and found.prices.decode[
        0
    ].bytes == pytest.approx(2.0, rel=0.05)
    assert found.prices.prompts.flops == pytest.approx(2.5, rel=0.05)


def test_loads_that_were_not_fitted_are_priced_as_well() -> None:
    """Also with noise, and with some steps disturbed many times over."""
    model = cost_model()
    steps = observed(model, TRUE, LOADS * 3, noise=0.03, seed=1)
    steps = [replace(each, seconds=each.seconds * (4.0 if index % 9 == 0 else 1.0)) for index, each in enumerate(steps)]
    found = fitted(steps)
    for each in (load(3, 500), load(16, 400), load(60, 100), load(10, 100, 200), load(0, 0, 500)):
        assert price(found.prices, model, each) == pytest.approx(price(TRUE, model, each), rel=0.1)


def test_disturbed_steps_do_not_make_steps_seem_quicker() -> None:
    """A third took five times as long: the others' price is found, and no lower one (a relative error alone would
    favour too little)."""
    model = cost_model()
    steps = observed(model, TRUE, LOADS * 4)
    hit = np.random.default_rng(5).random(len(steps)) < 1 / 3
    steps = [
        replace(each, seconds=each.seconds * (5.0 if disturbed else 1.0))
        for each, disturbed in zip(steps, hit, strict=True)
    ]
    assert fitted(steps).median_error < 0.1


def test_every_parameter_says_how_sure_it_is_and_nothing_is_counted_that_was_not_fitted() -> None:
    found = fitted(observed(cost_model(), TRUE, LOADS, noise=0.05, seed=3))
    sure = {each.name: each for each in found.parameters}
    products = sure["products of 1 to 8 tokens, no prompts, bytes"]
    assert products.error > 0 and abs(products.value - 1.3) < 5 * products.error + 0.1
    assert 0 < sum(not each.note for each in found.parameters) < len(found.parameters)
    assert "no step was decided by it" in sure["experts, bytes"].note and sure["experts, bytes"].steps == 0


def test_steps_of_one_load_tell_one_parameter_and_say_so_of_the_others() -> None:
    found = fitted(observed(cost_model(), TRUE, [load(4, 100)] * 30))
    assert sum(not each.note for each in found.parameters) == 1 and found.p90_error < 1e-6
    notes = {each.name: each.note for each in found.parameters}
    assert (
        "cannot be told apart by these steps; kept as assumed"
        in notes["attention of single tokens of 1 to 8 tokens, no prompts, bytes"]
    )
    assert (
        "taken to be that of products of 1 to 8 tokens, no prompts, bytes"
        in notes["products of more than 8 tokens, no prompts, bytes"]
    )
    assert found.prices.products[1].bytes == found.prices.products[0].bytes


def test_a_sparse_model_tells_its_experts() -> None:
    model = cost_model(MoESpec(32, 2, 256, True))
    true = replace(TRUE, experts=Slowness(1.7, 1.0))
    found = fitted(observed(model, true, LOADS))
    assert found.prices.experts.bytes == pytest.approx(1.7, rel=0.05) and found.p90_error < 0.02


def test_nothing_is_quicker_than_the_least() -> None:
    quick = replace(TRUE, products=(Slowness(0.5, 1.0),) * 4)
    found = fitted(observed(cost_model(), quick, LOADS), least=1.0)
    decided = [
        each
        for each in found.parameters
        if each.steps and not each.name.endswith("seconds") and "norms" not in each.name
    ]
    assert min(each.value for each in decided) >= 1.0


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.integers(5, 12))
def test_nnls_is_the_best_of_all_choices_of_columns(seed: int, columns: int, rows: int) -> None:
    rng = np.random.default_rng(seed)
    design, target = rng.standard_normal((rows, columns)), rng.standard_normal(rows)
    x = nnls(design, target)
    assert (x >= 0).all()
    best = float(np.linalg.norm(target))
    for chosen in product((False, True), repeat=columns):
        free = np.array(chosen)
        values = np.linalg.lstsq(design[:, free], target, rcond=None)[0] if free.any() else np.zeros(0)
        if (values >= 0).all():
            best = min(best, float(np.linalg.norm(design[:, free] @ values - target)))
    assert float(np.linalg.norm(design @ x - target)) <= best * (1 + 1e-8) + 1e-12


def test_nnls_takes_columns_that_are_alike_and_columns_of_nothing() -> None:
    design = np.array([[1.0, 1.0, 0.0], [2.0, 2.0, 0.0]])
    x = nnls(design, np.array([3.0, 6.0]))
    assert x[0] + x[1] == pytest.approx(3.0) and x[2] == 0.0 and nnls(np.zeros((2, 0)), np.ones(2)).shape == (0,)


# --- experts that are picked unevenly


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 64), st.data(), st.floats(0, 3), st.integers(0, 300))
def test_skew_touches_no_more_experts_than_even_routing_and_top_k_a_token(
    experts: int, data: st.DataObject, skew: float, tokens: int
) -> None:
    top_k = data.draw(st.integers(1, experts))
    popular = zipf(experts, skew)
    assert sum(picked(popular, top_k)) == pytest.approx(top_k, rel=1e-6)
    even, uneven = touched_experts(experts, top_k, tokens), touched_experts(experts, top_k, tokens, popular)
    assert uneven <= even * (1 + 1e-6) + 1e-9
    if tokens == 1:
        assert uneven == pytest.approx(top_k, rel=1e-6)


def test_skew_by_hand_and_even_popularity_is_even_routing() -> None:
    assert touched_experts(4, 1, 2, (1.0, 1.0, 1.0, 1.0)) == pytest.approx(touched_experts(4, 1, 2))
    assert touched_experts(2, 1, 3, (3.0, 1.0)) == pytest.approx((1 - 0.25**3) + (1 - 0.75**3), rel=1e-6)


@pytest.mark.parametrize(
    "text", ["{", "{}", '["a"]', "[1, 2]", "[1, -2, 3]", "[1, NaN, 3]", "[1, 0, 0]", "[true, 1, 1]"]
)
def test_counts_of_experts_that_are_none_are_refused(text: str, tmp_path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "counts.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="JSON list of 3 counts"):
        read_popularity(path, 3, 2)
    with pytest.raises(ConfigError, match="exponent of a Zipf law"):
        zipf(8, float("nan"))


def test_noise_that_multiplies_does_not_bias_prices() -> None:
    """Steps that are as often twice as long as half: half of them lie above their price."""
    model = cost_model()
    steps = observed(model, TRUE, LOADS * 12, noise=0.9, seed=7)
    found = fitted(steps)
    ratios = [price(found.prices, model, each) / step.seconds for each, step in zip(LOADS * 12, steps, strict=True)]
    assert float(np.median(ratios)) == pytest.approx(1.0, abs=0.12)


def test_what_is_taken_from_a_neighbour_counts_in_the_fit_too() -> None:
    """All larger batches are alike: attention there is that of the smaller ones, and the rest is the products'."""
    alike = replace(TRUE, decode=(Slowness(2.0, 1.0),) * 3, fixed=(0.0, 0.0, 0.0), sampled=0.0)
    loads = [load(rows, context) for rows, context in product((1, 2, 4, 8), (20, 200, 900))] + [load(12, 900)] * 12
    found = fitted(observed(cost_model(), alike, loads))
    notes = {each.name: each.note for each in found.parameters}
    assert "taken to be that of" in notes["attention of single tokens of more than 8 tokens, no prompts, bytes"]
    assert found.prices.decode[1].bytes == found.prices.decode[0].bytes == pytest.approx(2.0, rel=0.05)
    assert found.prices.products[1].bytes == pytest.approx(1.6, rel=0.05)
