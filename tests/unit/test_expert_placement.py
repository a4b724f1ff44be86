"""Experts on ranks: the balance that is found, the files that say it, and what is wrong with them."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.config import DeviceConfig, EngineConfig
from headrace.cost.cost_model import CostModel, StepLoad
from headrace.errors import ConfigError
from headrace.parallel.balance import balanced, copied, imbalance, lower_bound
from headrace.parallel.placement import check_agreed, contiguous, explained, held_experts
from headrace.parallel.shares import cuts, share
from headrace.planner.devices import known_devices
from headrace.planner.pricing import priced
from headrace.sites import count_bytes, weights
from headrace.spec import DecoderSpec, LayerSpec, MoESpec, kv_groups
from lab.experts import _figures, _steps
from tests.support.specs import SMALL

SPARSE = replace(SMALL, layers=(LayerSpec(moe=MoESpec(7, 2, 18, renormalize=True)), LayerSpec()), num_kv_heads=2)


def placed(path: Path | None = None, ranks: int = 2, **more: Any) -> DeviceConfig:
    return DeviceConfig(
        tensor_parallel_size=ranks, enable_expert_parallel=True, expert_placement=str(path) if path else None, **more
    )


def written(folder: Path, **stored: Any) -> Path:
    path = folder / "experts.json"
    path.write_text(json.dumps(stored), encoding="utf-8")
    return path


# --- balance


def assignments(items: int, ranks: int) -> Iterator[list[list[int]]]:
    most = -(-items // ranks)
    for each in product(range(ranks), repeat=items):
        held = [[item for item in range(items) if each[item] == rank] for rank in range(ranks)]
        if all(1 <= len(rank) <= most for rank in held):
            yield held


@pytest.mark.parametrize("seed", range(12))
def test_a_balance_is_close_to_the_best_there_is_and_no_better_than_the_bound(seed: int) -> None:
    draw = random.Random(seed)
    ranks, items = draw.choice([(2, 8), (2, 7), (3, 7)])
    counts = [draw.choice((0.0, draw.random(), draw.random() ** 4)) for _ in range(items)]
    best = min(max(sum(counts[each] for each in rank) for rank in held) for held in assignments(items, ranks))
    found = max(sum(counts[each] for each in rank) for rank in balanced(counts, ranks))
    assert lower_bound(counts, ranks) <= best * (1 + 1e-9) and best <= found * (1 + 1e-9) and found <= 1.1 * best


@pytest.mark.parametrize(("ranks", "copies"), [(2, 0), (4, 0), (8, 0), (4, 6), (8, 8), (3, 1)])
def test_every_expert_is_held_copies_on_ranks_of_their_own_and_ranks_equally_many(ranks: int, copies: int) -> None:
    for seed, size in product(range(5), (8, 61, 128)):
        draw = random.Random(seed)
        counts = [(1.0 + index) ** -draw.uniform(0.0, 1.5) for index in range(size)]
        draw.shuffle(counts)
        held = balanced(counts, ranks, copies)
        assert set().union(*held) == set(range(size)) and all(len(set(rank)) == len(rank) for rank in held)
        assert sum(map(len, held)) == size + min(copies, size * (ranks - 1))
        assert max(map(len, held)) == -(-sum(map(len, held)) // ranks)
        assert imbalance(counts, held) <= imbalance(counts, contiguous(size, ranks)) + 1e-9
        assert held == balanced(counts, ranks, copies)  # every rank finds it by itself


def test_skewed_experts_are_balanced_and_a_hot_one_only_with_copies() -> None:
    counts = [1000.0, *([10.0] * 31)]
    alone, helped = balanced(counts, 4), balanced(counts, 4, 3)
    assert imbalance(counts, contiguous(32, 4)) > 3 and 3.0 < imbalance(counts, alone) < 3.3
    assert imbalance(counts, helped) < 1.05 and copied(counts, 4, 3)[0] == 4
    assert copied(counts, 2, 3)[0] == 2 and sum(copied(counts, 2, 3)) == 35  # no more than one on each rank
    skewed = [(1.0 + each) ** -0.7 for each in range(128)]
    least = lower_bound(skewed, 8) * 8 / sum(skewed)  # the first expert, and as many of the last as a rank must hold
    assert least > 1.05 and imbalance(skewed, balanced(skewed, 8)) == pytest.approx(least)
    assert imbalance(skewed, contiguous(128, 8)) > 2.5


def test_steps_wait_for_their_busiest_rank_and_copies_take_turns() -> None:
    """Of two rows a step: loads 4, 0 and 2, 2; where both ranks hold expert 0, its second row goes to the second."""
    choices = np.array([[0, 1], [0, 1], [0, 2], [1, 3]], dtype=np.int16)
    assert _steps(choices, ((0, 1), (2, 3)), 2) == (4 + 2) / 4 and _steps(choices, ((0, 1), (2, 3)), 0) == 6 / 4
    assert _steps(choices, ((0, 1), (0, 2, 3)), 2) == (3 + 2) / 4  # 0, 1, 1 | 0; then 0, 1 | 2, 3


def test_placements_are_judged_on_rows_that_they_were_not_made_from() -> None:
    draw = np.random.default_rng(0)
    made, others = (draw.choice(8, (400, 2), p=np.arange(1, 9) / 36).astype(np.int16) for _ in range(2))
    counts = {0: [float(each) for each in np.bincount(made.ravel(), minlength=8)]}
    found = _figures(counts, {0: (others, 8)}, 4, 3)
    plain, balanced, copied = (
        found["placements"][name] for name in ("neighbours together", "balanced", "with 3 copies")
    )
    assert 1 <= found["bound"] <= balanced["recorded"] + 1e-9 <= plain["recorded"] + 2e-9
    assert copied["recorded"] <= balanced["recorded"] and plain["steps of 16"] >= plain["all"] >= balanced["all"] >= 1


@pytest.mark.parametrize(("size", "ranks"), [(8, 2), (7, 2), (9, 4), (128, 8), (4, 4)])
def test_neighbours_together_differ_by_one_at_most(size: int, ranks: int) -> None:
    layer = contiguous(size, ranks)
    sizes = [len(each) for each in layer]
    assert sum(layer, ()) == tuple(range(size)) and max(sizes) - min(sizes) <= 1 and min(sizes) > 0


# --- a rank's share


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_hold_every_expert_once_whole_and_the_rest_as_ever(ranks: int) -> None:
    """7 experts of 18 inner values: neither number divides by 4."""
    device, spec = placed(ranks=ranks), replace(SPARSE, num_heads=8, intermediate_size=64)
    shares = [share(spec, ranks, held_experts(spec, device, rank)) for rank in range(ranks)]
    held = [each.expert for mine in shares for each in mine.layers[0].moe.held]  # type: ignore[union-attr]
    assert sorted(held) == list(range(7))
    for mine in shares:
        own = {weight.name: weight for weight in weights(mine)}
        up = own["layers.0.feed_forward.up"]
        assert up.parts == (18, 18) and up.name not in cuts(spec, mine, 0)
        assert own["layers.0.feed_forward.router"].outs == 7
        assert own["layers.1.feed_forward.up"].parts == (64 // ranks,) * len(own["layers.1.feed_forward.up"].parts)
    whole = count_bytes(replace(spec, layers=spec.layers[:1]), 2)
    assert max(count_bytes(replace(mine, layers=mine.layers[:1]), 2) for mine in shares) < whole


def test_recorded_routing_is_balanced_and_said(tmp_path: Path) -> None:
    path = written(tmp_path, counts={0: [90, 80, 70, 1, 2, 3, 0]}, tokens=5)
    chosen, reason = explained(SPARSE, placed(path))
    assert chosen == "3 to 4 experts of a layer on each of 2 ranks" and "busiest rank has 1.22 times" in reason
    sides = [{each.expert for each in (held_experts(SPARSE, placed(path), rank) or ((),))[0]} for rank in range(2)]
    assert sorted(map(len, sides)) == [3, 4] and sorted(len(side & {1, 2}) for side in sides) == [0, 2]


def test_copies_are_numbered_in_the_order_of_ranks(tmp_path: Path) -> None:
    path = written(tmp_path, experts={0: [[0, 1, 2, 3], [4, 5, 6, 0]]})
    for rank in range(2):
        held = {each.expert: each for each in (held_experts(SPARSE, placed(path), rank) or ((),))[0]}
        assert (held[0].copy, held[0].copies) == (rank, 2) and all(held[each].copies == 1 for each in set(held) - {0})
    assert explained(SPARSE, placed(path))[1].endswith("; 1 copies")
    with pytest.raises(ConfigError, match="which --batch-invariant forbids"):
        held_experts(SPARSE, placed(path, batch_invariant=True), 0)


# --- what is wrong


@pytest.mark.parametrize(
    ("stored", "words"),
    [
        ({"experts": {0: [[0, 1, 2], [3, 4, 5]]}}, "layer 0 lacks expert 6: no rank holds it"),
        ({"experts": {0: [[0, 1, 2, 3], [4, 5, 7]]}}, "layer 0 names expert 7, but has experts 0 to 6"),
        ({"experts": {0: [[0, 1, 2, 3], [4], [5, 6]]}}, "is placed on 3 ranks, but --tensor-parallel-size is 2"),
        ({"experts": {0: [[0, 1, 2, 3, 4, 5, 6], []]}}, "a rank that holds no expert"),
        ({"experts": {0: [[0, 1, 2, 3, 3], [4, 5, 6]]}}, "or one twice"),
        ({"experts": {1: [[0], [1]]}}, "experts lack layer 0"),
        ({"experts": {0: [[0, 1, 2, 3], [4, 5, 6]], 1: [[0], [1]]}}, "name layer 1, which has none"),
        ({"counts": {0: [1, 2, 3]}}, "layer 0 has 3 counts, but 7 experts"),
        ({"counts": {0: [1, 2, 3, 4, 5, 6, -7]}}, "counts that are no numbers from 0"),
        ({"counts": {1: [1]}}, "counts lack layer 0"),
        ({}, "has neither counts nor experts"),
        ({"experts": "all"}, "cannot be read"),
        ({"experts": {0: [[0.5]]}}, "cannot be read"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_with_what_is_wrong(tmp_path: Path, stored: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        held_experts(SPARSE, placed(written(tmp_path, **stored)), 0)


def test_other_hostile_files_are_refused_too(tmp_path: Path) -> None:
    for text in ("", "[" * 100_000, "\x00", '{"counts": {"0": [NaN]}}'):
        path = tmp_path / "experts.json"
        path.write_text(text, encoding="utf-8")
        with pytest.raises(ConfigError, match="cannot be read"):
            held_experts(SPARSE, placed(path), 0)
    for path in (tmp_path, tmp_path / "missing.json"):
        with pytest.raises(ConfigError, match="cannot be read"):
            held_experts(SPARSE, placed(path), 0)


def _smaller(other: int, mark: int) -> int:
    """Of a second rank's mark, too."""
    return min(mark, other if mark > 0 else -other)


def test_a_file_that_changes_between_two_ranks_is_noticed_by_both(tmp_path: Path) -> None:
    path, marks = written(tmp_path, experts={0: [[0, 1, 2, 3], [4, 5, 6]]}), list[int]()
    check_agreed(SPARSE, placed(path), lambda mark: marks.append(mark) or mark)  # type: ignore[func-returns-value]
    written(tmp_path, experts={0: [[0, 1, 2, 4], [3, 5, 6]]})
    for first in (marks[0], 2**32 - marks[0]):
        with pytest.raises(ConfigError, match="was changed while ranks were reading it"):
            check_agreed(SPARSE, placed(path), partial(_smaller, first))


def test_what_has_no_experts_or_too_few_is_refused_and_one_rank_has_them_all(tmp_path: Path) -> None:
    dense = replace(SPARSE, layers=(LayerSpec(),))
    with pytest.raises(ConfigError, match="this model has no experts"):
        held_experts(dense, placed(), 0)
    with pytest.raises(ConfigError, match="is 8, but a layer has 7 experts, and each rank needs one"):
        held_experts(SPARSE, placed(ranks=8), 0)
    assert held_experts(SPARSE, placed(ranks=1), 0) is None
    for file in ("experts.json", ""):
        with pytest.raises(ConfigError, match="but enable_expert_parallel is off"):
            DeviceConfig(tensor_parallel_size=2, expert_placement=file)


# --- costs


def test_a_rank_is_charged_for_its_own_experts(tmp_path: Path) -> None:
    spec: DecoderSpec = replace(
        SPARSE, layers=(LayerSpec(moe=MoESpec(8, 2, 32, renormalize=True)),), num_heads=4, head_dim=4
    )
    profile = known_devices()["h100"].profile
    load = StepLoad(4096, 1, (0.0,), (0.0,))

    def experts(of: DecoderSpec, popularity: tuple[float, ...] = ()) -> tuple[float, float]:
        model = CostModel(of, kv_groups(of, 16, 2), profile, weight_bytes=2, dtype="bfloat16", popularity=popularity)
        return model.work(load).experts

    whole, skew = experts(spec), (7.0, *([1.0] * 7))
    halves = [share(spec, 2, held_experts(spec, placed(), rank)) for rank in range(2)]
    for mine in halves:
        assert experts(mine) == pytest.approx((whole[0] / 2, whole[1] / 2))
    hot, cold = (experts(mine, skew)[1] for mine in halves)
    assert hot + cold == pytest.approx(whole[1]) and hot > 1.3 * cold
    priced_skew = priced(spec, EngineConfig(device=placed()), known_devices()["h100"], tuple(reversed(skew)))
    assert [each.expert for each in priced_skew.spec.layers[0].moe.held] == [4, 5, 6, 7]  # type: ignore[union-attr]
    two = replace(spec, layers=spec.layers * 2)
    path = written(tmp_path, experts={0: [[0, 1, 2, 3], [4, 5, 6, 7]], 1: [[4, 5, 6, 7], [0, 1, 2, 3]]})
    slowest = priced(two, EngineConfig(device=placed(path)), known_devices()["h100"], skew).spec
    assert [layer.moe.held[0].expert for layer in slowest.layers] == [0, 0]  # type: ignore[union-attr, index]
