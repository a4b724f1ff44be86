"""Which layers each stage of a pipeline holds, and that steps are planned so that no stage waits for another."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.config import AdapterConfig, CacheConfig, DeviceConfig, EngineConfig, SchedulerConfig
from headrace.engine.core import EngineCore
from headrace.engine.keyed_hash import keyed_hash_info
from headrace.errors import ConfigError
from headrace.lora.layout import create_layout, pack
from headrace.parallel.stages import _bounds, split_layers, staged
from headrace.sites import count_bytes, weights
from headrace.spec import DecoderSpec, MoESpec, attention_groups, kv_groups
from tests.support.hash_engine import VOCAB, assert_at_rest, engine, expected, plans_of, request, run
from tests.support.specs import SMALL


def spec(layers: int, **fields: object) -> DecoderSpec:
    return replace(SMALL, layers=SMALL.layers[:1] * layers, **fields)  # type: ignore[arg-type]


def split(layers: int, stages: int, **fields: object) -> list[int]:
    return [end - begin for begin, end in split_layers(spec(layers, **fields), stages)]


def test_layers_are_split_by_their_size_with_the_head_on_the_last() -> None:
    assert split(8, 2, vocab_size=1) == [4, 4] and split(7, 3, vocab_size=1) in ([3, 2, 2], [2, 3, 2], [2, 2, 3])
    assert split(3, 3, vocab_size=50_000) == [1, 1, 1]
    assert split(8, 2, vocab_size=50_000)[1] < 4  # a large head counts like layers
    for stages in range(1, 9):
        found = split_layers(spec(8), stages)
        assert found[0][0] == 0 and found[-1][1] == 8 and all(end > begin for begin, end in found)
        assert all(one[1] == two[0] for one, two in pairwise(found))


def test_a_dear_layer_stands_alone() -> None:
    assert _bounds([1, 1, 9, 1, 1, 1], 3) == [0, 2, 3, 6]
    assert _bounds([5, 1, 1, 1, 1, 1], 2) == [0, 1, 6]


@pytest.mark.parametrize(
    ("pooled", "message"),
    [
        ((-1, 0), "is -1 0, but the stages have 5 3 layers. Give as many numbers, each from 0 to its stage's"),
        ((1, 0), "is 1 0, but those of stage 0 take turns in memory of its own that would hold all of them"),
        ((0, 1), "those of stage 1"),
        ((0, 3), "those of stage 1"),
        ((5, 0), ""),
        ((2, 2), ""),
    ],
)
def test_pooled_layers_leave_room_where_they_were(pooled: tuple[int, ...], message: str) -> None:
    """Not one alone, nor three of two places, each as large as the last, which has experts."""
    small = SMALL.layers[0]
    model = replace(
        SMALL, layers=(small,) * 7 + (replace(small, moe=MoESpec(8, 2, SMALL.intermediate_size, renormalize=True)),)
    )
    device = DeviceConfig(pipeline_parallel_size=2, pipeline_layers=(5, 3), pooled_layers=pooled)
    with pytest.raises(ConfigError, match=message) if message else nullcontext():
        staged(model, EngineConfig(device=device), 0)


def test_stages_together_hold_everything_once() -> None:
    for tied in (False, True):
        whole = spec(5, tied_head=tied)
        config = EngineConfig(device=DeviceConfig(pipeline_parallel_size=3, pipeline_layers=(1, 3, 1)))
        parts = [staged(whole, config, rank) for rank in range(3)]
        names = [[each.name for each in weights(part)] for part in parts]
        assert [sum(name.endswith("qkv") for name in each) for each in names] == [1, 3, 1]
        assert ["head" in each for each in names] == [False, False, True]
        assert ["embedding" in each for each in names] == [True, False, tied]
        assert sum(count_bytes(part, 4) for part in parts) >= count_bytes(whole, 4)
        assert [len(layers) for part in parts for _, layers in attention_groups(part)] == [1, 3, 1]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("counts", [(1, 3, 1), (2, 2, 1)])
def test_stages_set_aside_as_many_blocks_of_an_adapter(counts: tuple[int, ...], tied: bool) -> None:
    """Whatever each holds of it; and its weights have a place on one stage each."""
    whole = spec(5, tied_head=tied)
    bounds = split_layers(whole, 3, counts)
    for cache in (CacheConfig(), CacheConfig(unified_paging=False)):
        made = []
        for held in bounds:
            mine = replace(whole, held=held)
            found = create_layout(mine, AdapterConfig(enable_lora=True), cache, kv_groups(mine, 16, 4), 4, bounds)
            assert found is not None
            made.append(found)
        assert len({(each.space, each.largest) for each in made}) == 1
        sites = [
            (name, part, 3, False)
            for each in made
            for name, at in each.by_name.items()
            for part in range(len(at.parts))
        ]
        assert len({each[:2] for each in sites}) == len(sites)
        some = sites[: len(sites) // 3]
        (count,) = {each.count_blocks(some) for each in made}
        assert count == max(pack(each.strips(some), each.block)[1] for each in made) < made[0].largest


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"device": DeviceConfig(pipeline_parallel_size=4)}, "is 4, but the model has 3 layers. Give at most 3"),
        ({"device": DeviceConfig(pipeline_parallel_size=2, pipeline_layers=(2, 2))}, "2 2, but 2 stages have 3 layers"),
        ({"device": DeviceConfig(pipeline_parallel_size=2, pipeline_layers=(3, 0))}, "3 0, but 2 stages"),
        ({"device": DeviceConfig(pipeline_parallel_size=2, pipeline_layers=(3,))}, "Give 2 numbers above 0"),
        (
            {
                "device": DeviceConfig(pipeline_parallel_size=2),
                "scheduler": SchedulerConfig(speculative_config='{"method": "mtp"}'),
            },
            "is 2, but draft heads go on from hidden states",
        ),
        (
            {
                "device": DeviceConfig(pipeline_parallel_size=2),
                "scheduler": SchedulerConfig(speculative_config='{"model": "a/draft", "tree": 2}'),
            },
            "branches of a draft tree are not moved",
        ),
    ],
)
def test_what_cannot_be_split_is_said_before_anything_is_loaded(config: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        staged(spec(3), EngineConfig(**config), 0)  # type: ignore[arg-type]


def test_more_stages_than_there_may_be() -> None:
    with pytest.raises(ConfigError, match="give 1 to 16"):
        DeviceConfig(pipeline_parallel_size=17)
    with pytest.raises(ConfigError, match="keyed-hash computes no model"):
        DeviceConfig(pipeline_parallel_size=2, executor="keyed-hash")


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("overlap", [0, 1])
def test_a_row_is_planned_again_once_its_token_can_be_there(stages: int, overlap: int) -> None:
    """Whatever the last ``stages`` steps sample is still on its way, unless it has been collected; and no step takes
    more than its share."""
    core = staged_engine(stages, overlap)
    asked = [request(i, range(20 + i, 30 + 2 * i), max_tokens=9 + i, n=1 + (i == 3)) for i in range(9)]
    for each in asked:
        core.add(each)
    plans, collected = plans_of(core), list[int]()
    collect = core.executor.collect
    core.executor.collect = lambda ticket: (collected.append(len(plans)), collect(ticket))[1]  # type: ignore[method-assign]
    answers = run(core)
    assert all(answers.tokens[i, 0] == expected(asked[i]) for i in range(9))
    assert_at_rest(core)
    for at, plan in enumerate(plans):
        known = sum(when <= at for when in collected)  # steps, the oldest ones
        on_its_way = {row for step in plans[max(known, at - stages + 1) : at] for row in step.sample_rows}
        assert not on_its_way & set(plan.rows), (at, known)
    decoding = [len(plan.rows) for plan in plans if plan.num_tokens == len(plan.rows)]
    assert len(decoding) > stages and max(decoding) <= -(-10 // stages) + 1


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_stages_change_no_answer(data: st.DataObject) -> None:
    """With little room, so that some are pushed out."""
    stages, overlap = data.draw(st.integers(2, 4)), data.draw(st.integers(0, 2))
    blocks, budget = data.draw(st.integers(12, 40)), data.draw(st.sampled_from((3, 16, 64)))
    core = staged_engine(
        stages, overlap, num_blocks=blocks, budget=budget, max_drafts=data.draw(st.sampled_from((0, 2)))
    )
    asked = [
        request(i, range(20, 20 + data.draw(st.integers(1, 20))), max_tokens=data.draw(st.integers(1, 12)))
        for i in range(6)
    ]
    for each in asked:
        core.add(each)
        for _ in range(data.draw(st.integers(0, 3))):
            core.step()
    answers = run(core) if core.has_work else None
    assert_at_rest(core)
    for each in asked if answers is not None else ():
        found = answers.tokens.get((each.request_id, 0), [])
        assert expected(each)[-len(found) :] == found or not found


def staged_engine(stages: int, overlap: int, **more: Any) -> EngineCore:
    drafts = more.get("max_drafts", 0)
    facts = keyed_hash_info(
        vocab_size=VOCAB, max_model_len=200, max_num_seqs=16, num_blocks=more.get("num_blocks", 200), block_size=4,
        max_drafts=drafts,
    )  # fmt: skip
    info = replace(facts, stages=stages)
    return engine(info=info, depth=stages - 1 + overlap, budget=more.get("budget", 64), max_drafts=drafts)
