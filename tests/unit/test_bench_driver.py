"""The in-process driver, on virtual time and without a model."""

from __future__ import annotations

import pytest

from headrace.bench.driver import drive
from headrace.clock import VirtualClock
from headrace.config import SchedulerConfig
from headrace.engine.core import EngineCore
from headrace.engine.keyed_hash import keyed_hash_info
from headrace.planner.workload.conversations import Conversation, Turn, random_conversations
from headrace.planner.workload.load import Lengths
from tests.support.hash_engine import CheckedExecutor, create_core


def core(device_time: float = 0.01, **info: int) -> EngineCore:
    clock = VirtualClock(5.0)
    executor = CheckedExecutor(keyed_hash_info(**info), device_time=device_time, clock=clock, check=True)
    return create_core(executor, SchedulerConfig(), clock, ends={3})


def test_open_loop_sends_when_due_and_stamps_each_token() -> None:
    run = drive(core(), [Conversation((Turn((1, 2, 3), 4),), arrival=when) for when in (0.0, 1.0)])
    assert [sample.due for sample in run.samples] == pytest.approx([5.0, 6.0])
    assert run.samples[1].sent == pytest.approx(6.0)
    assert [len(sample.arrivals) for sample in run.samples] == [4, 4]
    assert run.samples[0].ttft == pytest.approx(0.01)
    assert run.samples[0].tpot == pytest.approx(0.01)
    assert run.seconds == pytest.approx(1.04)


def test_closed_loop_never_has_more_than_its_bound_under_way() -> None:
    run = drive(core(), random_conversations(7, Lengths(20, 5), vocab_size=100), max_concurrency=2)
    assert run.most_running == 2
    assert run.steps >= 4 * 5
    assert run.output_tokens == 35


def test_a_conversation_goes_on_from_the_answer_it_got_after_thinking() -> None:
    run = drive(core(), [Conversation((Turn(tuple(range(40)), 8), Turn((7,), 8, think_seconds=2.0)))])
    first, second = run.samples
    assert second.sent == pytest.approx(first.ended + 2.0)
    assert second.prompt_tokens == 40 + 8 + 1
    assert second.cached_tokens == 32  # whole blocks of what the first turn computed
    assert set(run.answers) == {(0, 0), (0, 1)}


def test_a_refused_request_is_a_failed_sample_and_the_others_go_on() -> None:
    run = drive(core(max_model_len=32), [Conversation((Turn(tuple(range(60)), 4),)), Conversation((Turn((1, 2), 4),))])
    assert sorted(sample.error is None for sample in run.samples) == [False, True]


def test_an_answer_that_stops_early_ends_there_and_frees_its_place() -> None:
    engine = core()
    run = drive(engine, [Conversation((Turn((1, 2, 3), 100, stop_after=5), Turn((4,), 100, stop_after=2)))])
    assert [sample.output_tokens for sample in run.samples] == [5, 2]
    assert run.samples[1].prompt_tokens == 3 + 5 + 1
    assert not engine.has_work and engine.stats().num_running == 0
