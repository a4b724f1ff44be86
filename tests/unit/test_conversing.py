"""Conversations in a simulation: a turn follows the end of an answer and its client's thought, and asks with all that
was said."""

from __future__ import annotations

from array import array
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from headrace.bench.driver import drive
from headrace.clock import VirtualClock
from headrace.config import EngineConfig, SchedulerConfig
from headrace.engine.core import EngineCore
from headrace.engine.keyed_hash import keyed_hash_info
from headrace.planner.devices import known_devices
from headrace.planner.drive import Drive, Outcome
from headrace.planner.executor import ModelledExecutor
from headrace.planner.simulator import Load, simulate
from headrace.planner.step_time import StepPrice
from headrace.planner.workload.conversations import conversations_of
from headrace.planner.workload.load import Lengths, LoadRequest, Prompts, arriving, conversing
from headrace.request import Request
from tests.support.command import status_of
from tests.support.hash_engine import create_core
from tests.support.specs import SMALL

STEADY = StepPrice(0.125, 0.1, 1.0, 1.0)
LENGTHS = Lengths(20, 12, 0.5)


def driven(
    asked: list[LoadRequest], *, room: int | None = None, max_queue: int = 1000, depth: int = 1
) -> tuple[Outcome, dict[int, Request], EngineCore]:
    """With the requests as the core got them, by number."""
    clock = VirtualClock()
    info = keyed_hash_info(block_size=4, num_blocks=2000)
    executor = ModelledExecutor(info, lambda plan: STEADY, clock)
    core = create_core(executor, SchedulerConfig(max_num_batched_tokens=64), clock, depth=depth)
    got: dict[int, Request] = {}
    add = core.add
    core.add = lambda request: (got.update({request.request_id: request}), add(request))[1]  # type: ignore[method-assign]
    prompts = Prompts(asked, executor.answer_ids, vocab_size=info.vocab_size, seed=0)
    return Drive([core], asked, prompts, room=room, max_queue=max_queue).run(), got, core


def test_a_turn_asks_with_all_that_was_said_and_finds_it_in_the_cache() -> None:
    asked = conversing(1, 4, LENGTHS, system=16, think=1.0)
    answers: dict[int, array[int]] = {index: array("i") for index in range(4)}
    clock = VirtualClock()
    executor = ModelledExecutor(keyed_hash_info(block_size=4), lambda plan: STEADY, clock)
    core = create_core(executor, SchedulerConfig(), clock)
    prompts = Prompts(asked, executor.answer_ids, vocab_size=512, seed=0)
    said: list[array[int]] = []
    drive_ = Drive([core], asked, lambda index: (said.append(prompts(index)), said[-1])[1], room=None, max_queue=9)
    take = drive_._take
    drive_._take = lambda outputs, now: (
        [answers[o.request_id].extend(o.token_ids) for o in outputs],
        take(outputs, now),
    )[1]  # type: ignore
    samples = drive_.run().samples
    for turn in range(1, 4):
        before = said[turn - 1] + answers[turn - 1]
        assert said[turn][: len(before)] == before and len(said[turn]) == asked[turn].prompt > len(before)
        assert samples[turn].cached_tokens == (len(before) - 1) // 4 * 4, (
            "but the last token's keys, which nobody computed"
        )
        assert samples[turn].sent == pytest.approx(samples[turn - 1].ended + asked[turn].think)
    assert not prompts._said, "what was said is forgotten with the last turn"


@pytest.mark.parametrize("rate", [None, 0.7])
@pytest.mark.parametrize("room", [2, 5])
def test_turns_come_when_the_driver_of_an_engine_would_send_them(rate: float | None, room: int) -> None:
    """The same conversations over the same seconds a step through the benchmarks' own driver, which puts real answers
    in front."""
    asked = conversing(6, 3, LENGTHS, system=8, think=0.0, seed=3)
    if rate is not None:
        asked = arriving(asked, rate, seed=3)
    talks = conversations_of(asked, vocab_size=1000, seed=3)
    mine, _, _ = driven(asked, room=room, depth=0)
    clock = VirtualClock()
    executor = ModelledExecutor(keyed_hash_info(block_size=4, num_blocks=2000), lambda plan: STEADY, clock)
    core = create_core(executor, SchedulerConfig(max_num_batched_tokens=64), clock, depth=0)
    theirs = drive(core, talks, max_concurrency=room)
    assert sorted(each.prompt_tokens for each in mine.samples) == sorted(each.prompt_tokens for each in theirs.samples)
    assert sum(each.output_tokens for each in mine.samples) == theirs.output_tokens
    if rate is not None and room == 5:
        assert mine.seconds == pytest.approx(theirs.seconds, abs=0.3)


def test_a_client_has_one_request_under_way_and_thinks_between_them() -> None:
    """Prompts tell the turns apart: conversation c asks with 10 + c, 40 + c and 70 + c tokens."""
    asked = [
        LoadRequest(10 + 30 * turn + c, 4, follows=3 * c + turn - 1 if turn else None, think=2.0)
        for c in range(6)
        for turn in range(3)
    ]
    outcome, _, _ = driven(asked, room=2)
    by_prompt = {sample.prompt_tokens: sample for sample in outcome.samples}
    assert len(by_prompt) == 18 and not any(sample.error for sample in outcome.samples)
    talks = [[by_prompt[each.prompt] for each in asked[first : first + 3]] for first in range(0, 18, 3)]
    for turns in talks:
        assert [after.sent - before.ended for before, after in pairwise(turns)] == pytest.approx([2.0, 2.0])
    spans = [(turns[0].sent, turns[-1].ended) for turns in talks]
    assert max(sum(begin <= when < end for begin, end in spans) for when, _ in spans) == 2, (
        "nobody takes the place of a client that thinks"
    )
    assert [sample.due is None for sample in talks[0]] == [True, False, False], (
        "a closed loop's first turns are due when a client is free"
    )


def test_a_conversation_ends_with_a_turn_that_fails() -> None:
    asked = arriving(conversing(8, 4, LENGTHS, system=0, think=0.0), 1e6, seed=0)
    outcome, _, core = driven(asked, max_queue=3)
    failed = [sample for sample in outcome.samples if sample.error]
    assert len(failed) >= 5 and len(outcome.samples) < 8 * 4 and not core.has_work
    assert len(outcome.samples) == 8 + 3 * (8 - len(failed)), "those that were taken went on to their end"


def test_prefixes_are_reused_from_turn_to_turn() -> None:
    asked = conversing(4, 5, Lengths(200, 100), system=512, think=1.0)
    alone = [replace(each, follows=None, pieces=(index,), piece=each.prompt) for index, each in enumerate(asked)]
    talk, single = (
        simulate(SMALL, EngineConfig(), known_devices()["l40s"], Load(each, max_concurrency=1)).figures
        for each in (asked, alone)
    )
    assert talk["prefix_hit_share"] > 0.7 and single["prefix_hit_share"] < 0.1
    assert talk["total_input_tokens"] == single["total_input_tokens"]


def told(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    status = status_of("simulate", "--device", "h200", *words)
    found = capsys.readouterr()
    return status, found.out, found.err


def test_the_command_takes_conversations_and_lengths_of_a_trace(
    capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text("Timestamp,Request tokens,Response tokens\n1,30,4\n2,50,6\n")
    words = (
        "--workload",
        "conversation",
        "--num-prompts",
        "5",
        "--turns",
        "3",
        "--lengths-from",
        str(trace),
        "--prefix-len",
        "0",
    )
    status, out, err = told(
        capsys, *words, "--request-rate", "2", "--gaps", "weibull", "--burstiness", "0.5", "--diurnal", "0.5"
    )
    assert status == 0, err
    assert (
        "completed               15" in out
        and "lengths of t.csv" in out
        and "weibull gaps of shape 0.5" in out
        and "± 50%" in out
    )


WRONG = {
    "--think-time -1": "argument --think-time: '-1' is not a finite number of at least 0",
    "--turns 0": "argument --turns: '0' is not a whole number",
    "--diurnal 0.5": "needs a rate; give --request-rate",
    "--diurnal 1.5 --request-rate 2": "The rate swings by 1.5",
    "--trace x.csv": "--workload trace, or --lengths-from",
    "--workload trace --trace x.csv --diurnal 0.5": "A trace brings its own arrivals",
    "--workload trace --trace x.csv --trace-speed 2 --request-rate 3": "both scale the trace",
    "--lengths-from absent.csv": "cannot be read (No such file",
}


@pytest.mark.parametrize("words", WRONG)
def test_a_load_that_cannot_be_meant_is_a_sentence(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = told(capsys, *words.split())
    assert status == 2 and WRONG[words] in err and err.count("\n") == 1
