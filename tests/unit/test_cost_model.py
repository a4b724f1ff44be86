"""The cost model against sums done by hand and against published floors of one card."""

from __future__ import annotations

import json
import time
from array import array
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from headrace.cost.cost_model import CostModel, StepLoad, load_of
from headrace.cost.popularity import touched_experts
from headrace.cost.profile import DeviceIdentity, DeviceProfile
from headrace.models.families import spec_from_config
from headrace.models.weight_rules import with_formats
from headrace.quant.codes import Activations
from headrace.quant.scaled import WHOLE, ScaledWeight
from headrace.request import StepPlan
from headrace.spec import DecoderSpec, KVKind, KVSpec, LayerSpec, MoESpec, kv_groups
from tests.support.outside import shared
from tests.support.specs import TINY


def profile(bandwidth: float = 1.0, rate: float = 1e30, **more: float) -> DeviceProfile:
    identity = DeviceIdentity(kind="cpu", name="test", threads=1)
    return DeviceProfile(
        identity=identity, read_bandwidth=bandwidth, copy_bandwidth=bandwidth, gemm_rates={"bfloat16": rate}, **more
    )


def plan(starts: list[int], counts: list[int], sampled: int | None = None) -> StepPlan:
    rows = array("i", range(len(starts)))
    sample = array("i", range(len(starts) if sampled is None else sampled))
    return StepPlan(
        0, rows=rows, starts=array("i", starts), counts=array("i", counts), sample_work=sample, sample_rows=sample
    )


def model(spec: DecoderSpec, device: DeviceProfile) -> CostModel:
    return CostModel(spec, kv_groups(spec, 16, 2), device, weight_bytes=2, dtype="bfloat16")


def by_name(cost: CostModel, load: StepLoad) -> dict[str, tuple[float, float]]:
    return {name: (moved, flops) for name, moved, flops in cost.costs(load)}


def brute_force(starts: list[int], counts: list[int], window: int | None) -> tuple[int, int]:
    """(pairs, distinct keys) by walking every query."""
    pairs = keys = 0
    for start, count in zip(starts, counts, strict=True):
        seen: set[int] = set()
        for position in range(start, start + count):
            visible = range(max(0, position + 1 - window) if window else 0, position + 1)
            pairs += len(visible)
            seen.update(visible)
        keys += len(seen)
    return pairs, keys


@pytest.mark.parametrize("window", [None, 1, 3, 8])
def test_load_equals_a_walk_over_every_query(window: int | None) -> None:
    starts, counts = [0, 0, 5, 7, 20, 2], [1, 9, 1, 4, 6, 2]
    load = load_of(plan(starts, counts, 4), (window,))
    assert (load.pairs[0], load.keys[0]) == brute_force(starts, counts, window)
    assert (load.tokens, load.sampled) == (sum(counts), 4)


def test_operators_of_a_tiny_model_by_hand() -> None:
    cost = by_name(model(TINY, profile()), StepLoad(tokens=5, sampled=2, pairs=(7.0,), keys=(9.0,)))
    assert cost["qkv"] == (3 * 4 * (4 + 2 + 2) * 2, 2 * 3 * 4 * 8 * 5)
    assert cost["output"] == (3 * 4 * 4 * 2, 2 * 3 * 16 * 5)
    assert cost["gate and up"] == (3 * 4 * 12 * 2, 2 * 3 * 48 * 5)
    assert cost["down"] == (3 * 6 * 4 * 2, 2 * 3 * 24 * 5)
    assert cost["attention"] == (
        9 * 3 * 2 * 2 * 2,
        7 * 3 * 4 * 2 * 2,
    )  # K and V of 1 head x 2 x bf16; QK and PV of 2 heads
    assert cost["kv_write"] == (5 * 3 * 2 * 2 * 2, 0)
    assert cost["LM head"] == (10 * 4 * 2, 2 * 40 * 2)
    assert cost["norms"][0] == 7 * 4 * 2
    assert cost["embedding"][0] == 5 * 4 * 2


def test_products_of_8_bit_numbers_may_be_twice_as_fast() -> None:
    """As a limit, which a measured step must not exceed; of weights whose inputs are not rounded, not."""
    device = profile(bandwidth=1e30, rate=1.0)
    flops = []
    for inputs in (None, Activations("fp8")):
        form = ScaledWeight("float8_e4m3fn", (1, WHOLE), activations=inputs)
        spec = with_formats(TINY, lambda name, form=form: None if name == "lm_head" else form)
        flops.append(by_name(model(spec, device), StepLoad(8, 0, (0.0,), (0.0,))))
    for name in ("qkv", "output", "down"):
        assert flops[1][name][1] == flops[0][name][1] / 2 > 0


def test_floor_is_a_sum_of_maxima_and_overlap_a_maximum_of_sums() -> None:
    load = StepLoad(tokens=5, sampled=2, pairs=(7.0,), keys=(9.0,))
    cost = model(TINY, profile(bandwidth=1e3, rate=5e3, efficiency=0.5, step_overhead=2.0))
    parts = cost.costs(load)
    total = cost.estimate_load(load)
    assert total.floor_seconds == pytest.approx(sum(max(moved / 1e3, flops / 5e3) for _, moved, flops in parts))
    assert total.overlapped_floor_seconds == pytest.approx(
        max(sum(moved for _, moved, _ in parts) / 1e3, sum(flops for _, _, flops in parts) / 5e3)
    )
    assert total.overlapped_floor_seconds < total.floor_seconds
    assert total.seconds == pytest.approx(total.floor_seconds / 0.5 + 2.0)


def test_a_step_that_samples_nothing_does_not_read_the_head() -> None:
    names = by_name(model(TINY, profile()), StepLoad(tokens=5, sampled=0, pairs=(7.0,), keys=(9.0,)))
    assert "LM head" not in names


def test_an_empty_step_costs_its_overhead_alone() -> None:
    cost = model(TINY, profile(step_overhead=3.0)).estimate(plan([], []))
    assert (cost.bytes, cost.flops, cost.floor_seconds, cost.seconds) == (0, 0, 0, 3.0)


def test_sliding_layers_read_their_window_only() -> None:
    spec = replace(TINY, layers=(LayerSpec(), LayerSpec(window=4), LayerSpec(window=4)))
    attention = [
        moved
        for name, moved, _ in model(spec, profile()).costs(load_of(plan([99], [1]), (None, 4)))
        if name == "attention"
    ]
    assert attention == [100 * 1 * 8, 4 * 2 * 8]


def test_experts_count_the_distinct_ones() -> None:
    moe = MoESpec(num_experts=8, top_k=2, intermediate_size=3, renormalize=True)
    cost = model(replace(TINY, layers=(LayerSpec(moe=moe),) * 3), profile())
    one = by_name(cost, StepLoad(1, 1, (1.0,), (1.0,)))
    assert one["experts"] == pytest.approx((3 * 2 * 3 * 4 * 3 * 2, 3 * 2 * 2 * 3 * 4 * 3))  # exactly top_k experts
    assert one["router"] == (3 * 8 * 4 * 2, 2 * 3 * 8 * 4)
    assert "gate and up" not in one
    assert touched_experts(8, 2, 2) == pytest.approx(3.5)  # 2 + 2 * 6 / 8
    assert touched_experts(8, 2, 10_000) == pytest.approx(8)


def test_biases_and_learned_positions_are_bytes_too() -> None:
    plain = by_name(model(TINY, profile()), StepLoad(5, 2, (7.0,), (9.0,)))
    spec = replace(TINY, qkv_bias=True, rope=None, gated_mlp=False)
    biased = by_name(model(spec, profile()), StepLoad(5, 2, (7.0,), (9.0,)))
    assert biased["qkv"][0] - plain["qkv"][0] == 3 * 8 * 2
    assert biased["embedding"][0] == 2 * plain["embedding"][0]
    assert biased["up"][0] * 2 == plain["gate and up"][0]


def shape_of(name: str) -> DecoderSpec:
    return spec_from_config(json.loads(shared("data", "model_configs", name, "config.json").read_text()))


DECODE = [
    (1, 256, 0.551, 3.345),
    (8, 128, 0.561, 3.382),
    (32, 128, 0.594, 3.517),
    (128, 128, 0.729, 4.054),
    (256, 128, 1.154, 6.268),
]
PREFILL = [(1, 2048, 5.5, 37.6), (1, 8192, 25.7, 166.3), (16, 2048, 85.9, 598.0)]


@pytest.mark.parametrize(("name", "column"), [("Llama-3.2-1B", 2), ("Llama-3.1-8B", 3)])
def test_floors_of_one_card_are_those_published(name: str, column: int) -> None:
    """4.50 TB/s and 795 TFLOP/s; decode at the mean context of prompts of 128 and the outputs named, ms a step."""
    cost = model(shape_of(name), profile(bandwidth=4.50e12, rate=795e12))
    for batch, out, *_ in DECODE:
        expected = next(row[column] for row in DECODE if row[0] == batch)
        context = 128 + out // 2
        seconds = cost.estimate(plan([context - 1] * batch, [1] * batch)).floor_seconds
        assert seconds * 1e3 == pytest.approx(expected, rel=2e-3), (batch, "decode")
    for batch, length, *published in PREFILL:
        seconds = cost.estimate(plan([0] * batch, [length] * batch)).floor_seconds
        assert seconds * 1e3 == pytest.approx(published[column - 2], rel=6e-3), (batch, length, "prefill")


@pytest.mark.parametrize("tokens", [1, 2, 8, 32, 128, 256])
def test_distinct_experts_are_those_that_random_routing_touches(tokens: int) -> None:
    """128 experts, 8 a token, as Qwen3-30B-A3B has them; 300 draws."""
    random = np.random.default_rng(tokens)
    touched = [len(np.unique(random.permuted(np.tile(np.arange(128), (tokens, 1)), axis=1)[:, :8])) for _ in range(300)]
    assert touched_experts(128, 8, tokens) == pytest.approx(np.mean(touched), rel=0.01)


def test_floors_of_a_sparse_model_by_hand() -> None:
    """Qwen3-30B-A3B on the same card: attention, router and head whole, of each layer's experts those that are
    touched."""
    cost = model(shape_of("Qwen3-30B-A3B"), profile(bandwidth=4.50e12, rate=795e12))
    hidden, layers, expert = 2048, 48, 3 * 2048 * 768
    attention = hidden * (32 + 2 * 4) * 128 + 32 * 128 * hidden
    for batch, distinct in ((1, 8.0), (8, 51.62), (128, 127.97)):
        context = 128 + 64
        weights = layers * (attention + hidden * 128 + distinct * expert) + 151936 * hidden
        keys = batch * context * layers * 2 * 4 * 128
        seconds = cost.estimate(plan([context - 1] * batch, [1] * batch)).floor_seconds
        assert seconds == pytest.approx(2 * (weights + keys) / 4.50e12, rel=2e-3), (
            batch
        )  # all of it is moved longer than computed


def test_estimating_is_cheap_enough_for_every_step() -> None:
    """20 µs at 256 rows on a quiet core, in which it multiplies and adds some 700 pairs of numbers one by one; a busy
    core is slower at both."""
    cost = model(replace(TINY, layers=(LayerSpec(), LayerSpec(window=4)) * 8), profile())
    step = plan(list(range(256)), [1] * 255 + [700])

    def multiply_and_add() -> int:
        total = 0
        for start, count in zip(step.starts, step.counts, strict=True):
            total += start * count
        return total

    def seconds(work: Callable[[], object]) -> float:
        begin = time.perf_counter()
        work()
        return time.perf_counter() - begin

    rounds = [(seconds(lambda: cost.estimate(step)), seconds(multiply_and_add)) for _ in range(300)]
    best, yardstick = (min(column) for column in zip(*rounds, strict=True))
    assert best < 5 * yardstick


def test_a_group_names_its_own_layers() -> None:
    spec = TINY
    group = KVSpec(layers=(0,), kind=KVKind.FULL, block_size=16, num_kv_heads=1, head_dim=2, dtype_bytes=4)
    cost = CostModel(spec, (group,), profile(), weight_bytes=2, dtype="bfloat16")
    assert by_name(cost, StepLoad(1, 1, (1.0,), (10.0,)))["attention"][0] == 10 * 2 * 2 * 4
