"""Longest answers first: which requests it orders, what it keeps together, and what a batch takes with it."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.config import CacheConfig, DeviceConfig, EngineConfig, ModelConfig, SchedulerConfig
from headrace.engine.core import create_scheduler
from headrace.engine.keyed_hash import KeyedHashExecutor, keyed_hash_info
from headrace.planner.devices import find_device
from headrace.planner.simulator import Load, Report, simulate
from headrace.planner.workload.load import LoadRequest
from headrace.request import Request, SamplingParams, StructuredOutputs
from headrace.scheduler.events import AddRequest
from headrace.scheduler.roster import longest_first
from headrace.scheduler.scheduler import Scheduler
from lab.simulated import lognormal
from tests.support.specs import LLAMA_8B

BLOCK = 4


def request(number: int, length: int, prompt: Sequence[int] = (1, 2), **params: Any) -> Request:
    asked = SamplingParams(
        **{"max_tokens": length, "ignore_eos": True, "temperature": 0.0, "detokenize": False, **params}
    )
    return Request(request_id=number, prompt_token_ids=array("i", prompt), params=asked)


def order(requests: Sequence[Request], capacity: float = math.inf) -> list[int]:
    return [each.request_id for each in longest_first(requests, block_tokens=BLOCK, capacity=capacity)]


def test_the_longest_goes_first_and_equals_stay_in_their_order() -> None:
    assert order([request(n, length) for n, length in enumerate((3, 9, 3, 12, 9))]) == [3, 1, 4, 0, 2]
    assert order([]) == []


@pytest.mark.parametrize(
    "params",
    [
        {"ignore_eos": False},
        {"stop_token_ids": (5,)},
        {"stop": ("x",), "detokenize": True},
        {"repetition_detection": True},
        {"structured_outputs": StructuredOutputs(regex="a+"), "detokenize": True, "min_tokens": 5, "max_tokens": 5},
        {"ignore_eos": False, "min_tokens": 4},
    ],
)
def test_one_answer_that_may_end_by_itself_leaves_all_as_given(params: dict[str, Any]) -> None:
    assert order([request(0, 3), request(1, 5, **params), request(2, 9)]) == [0, 1, 2]


def test_a_length_is_known_too_where_nothing_may_end_before_it() -> None:
    known = {"ignore_eos": False, "stop_token_ids": (5,)}
    assert order([request(n, length, min_tokens=length, **known) for n, length in enumerate((3, 9))]) == [1, 0]


def test_where_not_all_fits_those_who_begin_alike_stay_together() -> None:
    """Two documents behind one system prompt, questions in turn; and one question of its own."""
    system, documents = [7] * 8, ([1] * 8, [2] * 8)
    asked = [request(n, length, [*system, *documents[n % 2], n]) for n, length in enumerate((3, 5, 4, 9, 8, 2))] + [
        request(6, 6, [50 + n for n in range(9)])
    ]
    assert order(asked) == [3, 4, 6, 1, 2, 0, 5]
    assert order(asked, capacity=100) == [3, 1, 5, 4, 2, 0, 6]


def test_equal_prompts_and_prompts_within_prompts_come_to_an_end() -> None:
    chain = [request(n, 1 + n % 5, [1] * (1 + n)) for n in range(60)] + [
        request(100 + n, n % 3 + 1, [1] * 30) for n in range(20)
    ]
    assert sorted(order(chain, capacity=0)) == [each.request_id for each in chain]


@given(st.lists(st.tuples(st.integers(1, 9), st.lists(st.integers(0, 1), min_size=1, max_size=20)), max_size=30))
def test_nobody_is_lost_and_the_longest_of_all_goes_first(drawn: list[tuple[int, list[int]]]) -> None:
    asked = [request(n, length, prompt) for n, (length, prompt) in enumerate(drawn)]
    for capacity in (0.0, math.inf):
        found = order(asked, capacity)
        assert sorted(found) == list(range(len(asked)))
        assert not found or drawn[found[0]][0] == max(length for length, _ in drawn)


# --- in an engine


def create(**fields: Any) -> Scheduler:
    executor = KeyedHashExecutor(
        keyed_hash_info(max_num_seqs=4, num_blocks=fields.pop("num_blocks", 4096), block_size=8)
    )
    return create_scheduler(
        executor, SchedulerConfig(max_num_batched_tokens=64, **fields), CacheConfig(), frozenset(), b""
    )


def test_only_an_engine_that_serves_by_arrival_orders_a_batch() -> None:
    asked = [request(n, length) for n, length in enumerate((3, 9))]
    assert [each.request_id for each in create().batch_order(asked)] == [1, 0]
    for fields in (
        {"longest_first": False},
        {"scheduling_policy": "priority"},
        {"scheduling_policy": "shortest-remaining"},
    ):
        assert create(**fields).batch_order(asked) is asked


def run(scheduler: Scheduler, requests: Sequence[Request]) -> tuple[int, int]:
    """Prompt tokens found in the cache, and steps."""
    executor = KeyedHashExecutor(keyed_hash_info(max_num_seqs=4, num_blocks=scheduler.cache.num_blocks, block_size=8))
    events, steps = [AddRequest(each) for each in requests], 0
    while events or scheduler.has_work:
        plan = scheduler.schedule(float(steps), events)
        events, steps = [], steps + 1
        assert plan is not None
        scheduler.update(executor.collect(executor.submit(plan)), float(steps))
    return scheduler.counters.prefix_hits, steps


@pytest.mark.parametrize("num_blocks", [4096, 40])
def test_prefixes_are_found_as_often_as_in_the_given_order(num_blocks: int) -> None:
    """Eight documents, each with its questions one after another; forty blocks hold four documents and a little."""
    rng = np.random.default_rng(3)
    lengths = rng.integers(1, 24, 64).tolist()
    asked = [request(n, length, [n // 8] * 64 + [n, n + 1]) for n, length in enumerate(lengths)]
    plain, ordered = create(num_blocks=num_blocks, longest_first=False), create(num_blocks=num_blocks)
    given_hits, _ = run(plain, plain.batch_order(asked))
    hits, _ = run(ordered, ordered.batch_order(asked))
    assert hits == given_hits == 56 * 64
    if num_blocks == 40:  # what staying together is for
        scattered, _ = run(
            create(num_blocks=num_blocks), sorted(asked, key=lambda each: -(each.params.max_tokens or 0))
        )
        assert scattered < hits


# --- simulated, at an H200's prices


def simulated(asked: Sequence[LoadRequest], *, on: bool, blocks: int | None = None) -> Report:
    config = EngineConfig(
        model=ModelConfig(max_model_len=4096),
        scheduler=SchedulerConfig(max_num_seqs=32, max_num_batched_tokens=2048),
        cache=CacheConfig(num_blocks=blocks),
        device=DeviceConfig(overlap=1),
    )
    given = [request(number, each.output) for number, each in enumerate(asked)]
    numbers = (
        [each.request_id for each in longest_first(given, block_tokens=128, capacity=math.inf)]
        if on
        else range(len(asked))
    )
    device = find_device("h200", threads=1, memory=None, free_memory=0)
    return simulate(
        LLAMA_8B,
        config,
        device,
        Load([replace(asked[number], at=0.0) for number in numbers], max_queue=len(asked), front=False),
    )


@pytest.mark.parametrize(("blocks", "share"), [(None, 0.99), (64, 0.93)])
def test_batches_take_less(blocks: int | None, share: float) -> None:
    """All of them together: no order is the best one for every batch. The more, the fewer blocks there are."""
    given = ordered = 0.0
    for seed in range(2):
        rng = np.random.default_rng(seed)
        prompts, outputs = lognormal(rng, (160, 600), 96), np.minimum(lognormal(rng, (60, 200), 96), 1000)
        asked = [
            LoadRequest(int(min(prompt, 2000)), int(output)) for prompt, output in zip(prompts, outputs, strict=True)
        ]
        given += simulated(asked, on=False, blocks=blocks).figures["duration"]
        ordered += simulated(asked, on=True, blocks=blocks).figures["duration"]
    assert ordered < share * given
