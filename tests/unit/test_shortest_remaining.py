"""Shortest remaining first: its order, its bound on waiting, who is pushed out, what is predicted from what, and
settings that make no sense."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headrace.config import SchedulerConfig
from headrace.engine.core import EngineCore
from headrace.errors import ConfigError
from headrace.request import Request
from headrace.scheduler.policies import DynamicPolicy
from headrace.scheduler.policies.shortest_remaining import BEGINNING, ENOUGH, FIRST_GUESS, GROUPS, KEPT, History, _Kind
from headrace.scheduler.roster import Sequence
from tests.support.hash_engine import engine, request


def shortest(prediction: str = "max-tokens", **options: object) -> EngineCore:
    return engine(scheduling_policy="shortest-remaining", length_prediction=prediction, **options)  # type: ignore[arg-type]


def tick(core: EngineCore, seconds: float = 0.1) -> list[int]:
    """One step that takes ``seconds``; who ended."""
    core.clock.sleep_until(core.clock.now() + seconds)
    return [output.request_id for output in core.step() if output.finished is not None]


def ends(core: EngineCore) -> list[int]:
    ended: list[int] = []
    while core.has_work:
        ended += tick(core)
    return ended


# --- the order


def test_the_shortest_goes_first() -> None:
    core = shortest(max_num_seqs=1, ageing=1.0)
    for number, tokens in enumerate([3, 30, 10, 20, 1]):
        core.add(request(number, [5, number], max_tokens=tokens))
    assert ends(core) == [4, 0, 2, 3, 1]


def test_a_long_prompt_is_work_too() -> None:
    core = shortest(max_num_seqs=1)
    core.add(request(0, range(10, 170), max_tokens=6))
    core.add(request(1, [5, 6], max_tokens=12))
    assert ends(core) == [1, 0]


def test_whoever_needs_much_makes_room_for_whoever_needs_little() -> None:
    core = shortest(max_num_seqs=1, ageing=1.0)
    core.add(request(0, [5, 6], max_tokens=150))
    for _ in range(10):
        tick(core)
    core.add(request(1, [7, 8], max_tokens=10))
    assert ends(core) == [1, 0]
    assert core.stats().counters.preemptions == 1


def test_nobody_is_pushed_out_for_little() -> None:
    core = shortest(max_num_seqs=1, ageing=1.0)
    core.add(request(0, [5, 6], max_tokens=60))
    for _ in range(10):
        tick(core)
    core.add(request(1, [7, 8], max_tokens=30))
    assert ends(core) == [0, 1]
    assert core.stats().counters.preemptions == 0


def test_whoever_turns_out_to_be_long_makes_room_while_steps_are_alike() -> None:
    """It was taken for short, and is looked at again though nobody comes or goes."""
    core = shortest("history", max_num_seqs=1, ageing=0.1)
    kind = [3] * (BEGINNING + 1)
    for number in range(2 * ENOUGH):  # short ones, and a few that tell that who is not short is long
        core.add(request(number, kind, max_tokens=160 if number % 5 == 4 else 10))
        ends(core)
    core.add(request(100, kind, max_tokens=150))
    tick(core)
    core.add(request(101, kind, max_tokens=10))
    assert ends(core) == [101, 100]
    assert policy_wake(core) == math.inf, "nobody waits"


def policy_wake(core: EngineCore) -> float:
    policy = core.scheduler.policy
    assert isinstance(policy, DynamicPolicy)
    return policy.wake


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    ageing=st.sampled_from([0.5, 5.0, 100.0]),
    rows=st.sampled_from([1, 3]),
    depth=st.sampled_from([0, 1]),
)
def test_nobody_is_passed_by_those_who_came_too_late(seed: int, ageing: float, rows: int, depth: int) -> None:
    """The bound: who is admitted while an earlier one waits came less than (work of that one) / ageing seconds after
    it."""
    rng, core = random.Random(seed), shortest(max_num_seqs=rows, ageing=ageing, depth=depth)
    came: dict[int, float] = {}
    work: dict[int, float] = {}
    running: set[int] = set()
    for _ in range(80):
        for _ in range(rng.choice((0, 0, 1, 3))):
            number, prompt, tokens = len(came), rng.randint(1, 40), rng.randint(1, 60)
            core.add(request(number, [(number + position) % 500 for position in range(prompt)], max_tokens=tokens))
            came[number], work[number] = core.clock.now() + 0.1, tokens + prompt / 16  # the next step hears of it
        tick(core)
        now_running = {sequence.request_id for sequence in core.scheduler.roster.running}
        for late in now_running - running:
            for early in (sequence.request_id for sequence in core.scheduler.roster.waiting):
                assert came[late] - came[early] <= work[early] / ageing + 1e-9, f"{late} passed {early}"
        running = now_running


# --- what is predicted


def sequence_of(made: Request, outputs: int = 0) -> Sequence:
    core = engine()
    sequence = core.scheduler.roster.create(made, 0, (0.0, 0))
    sequence.token_ids.extend([9] * outputs)
    return sequence


def test_answers_to_prompts_that_begin_alike_are_taken_to_be_alike() -> None:
    history, instructions = History(), list(range(BEGINNING))
    asked = {
        name: request(number, [*[number] * BEGINNING, 7, 8], tenant="a")
        for number, name in enumerate(("short", "long"))
    }
    for _ in range(ENOUGH):
        history.ended(sequence_of(asked["short"], 5))
        history.ended(sequence_of(asked["long"], 80))
    assert history.remaining(sequence_of(asked["short"])) == 5.0
    assert history.remaining(sequence_of(asked["long"])) == 80.0
    assert history.remaining(sequence_of(request(9, [*instructions, 1], tenant="a"))) == pytest.approx(
        42.5
    )  # its tenant's
    assert history.remaining(sequence_of(request(9, [*instructions, 1], tenant="b"))) == pytest.approx(
        42.5
    )  # anybody's


def test_nothing_is_known_at_first() -> None:
    assert History().remaining(sequence_of(request(0, [1, 2]))) == FIRST_GUESS


def test_one_tenant_teaches_nothing_about_another_that_is_known() -> None:
    history = History()
    for _ in range(ENOUGH):
        history.ended(sequence_of(request(0, [1, 2], tenant="good"), 50))
    for _ in range(500):
        history.ended(sequence_of(request(0, [1, 2], tenant="bad"), 1))
    assert history.remaining(sequence_of(request(1, [3, 4], tenant="good"))) == 50.0


@example(lengths=[*range(150, 0, -1)], tokens=20)
@given(lengths=st.lists(st.integers(1, 200), min_size=1, max_size=20), tokens=st.integers(0, 250))
def test_what_is_left_is_the_mean_of_those_who_had_more(lengths: list[int], tokens: int) -> None:
    kind = _Kind()
    for length in lengths:
        kind.add(length)
    last = lengths[-KEPT:]
    longer = [length - tokens for length in last if length > tokens]
    assert kind.remaining(tokens) == pytest.approx(
        sum(longer) / len(longer) if longer else max(1.0, max(last) - sum(last) / len(last))
    )


def test_kinds_are_forgotten_when_they_are_many() -> None:
    history = History()
    made = sequence_of(request(0, list(range(BEGINNING + 1))), 3)
    for number in range(GROUPS):  # two new ones each
        made.request = request(number, [number] * (BEGINNING + 1), tenant=f"user{number}")
        history.ended(made)
    assert len(history._kinds) <= GROUPS


def test_it_learns_while_it_serves() -> None:
    core = shortest("history", max_num_seqs=1, ageing=0.5)
    kinds = {"short": [1] * (BEGINNING + 1), "long": [2] * (BEGINNING + 1)}
    for number in range(2 * ENOUGH):
        name = ("short", "long")[number % 2]
        core.add(request(number, kinds[name], max_tokens={"short": 2, "long": 30}[name]))
        ends(core)
    core.add(request(100, kinds["long"], max_tokens=30))
    core.add(request(101, kinds["short"], max_tokens=2))
    assert ends(core) == [101, 100]


def test_those_who_wait_are_ordered_anew_when_their_kind_becomes_known() -> None:
    """All came before anything had ended: once a few short answers have, the others of their kind go before the long
    ones."""
    core = shortest("history", max_num_seqs=1, ageing=0.1)
    for number in range(4 * ENOUGH):
        kind = number % 2
        core.add(request(number, [kind] * (BEGINNING + 1), max_tokens=(2, 40)[kind]))
    ended = ends(core)
    last_short = max(ended.index(number) for number in range(0, 4 * ENOUGH, 2))
    assert last_short <= 3 * ENOUGH


@pytest.mark.parametrize("prediction", ["history", "max-tokens"])
def test_further_answers_have_waited_as_long_as_the_first(prediction: str) -> None:
    core = shortest(prediction, max_num_seqs=4)
    core.clock.sleep_until(50.0)
    core.add(request(0, [1, 2, 3], n=3, max_tokens=9))
    tick(core)
    tick(core)
    running = core.scheduler.roster.running
    assert len(running) == 3
    assert len({sequence.order[-1] for sequence in running}) == 1
    ends(core)


# --- what makes no sense


@pytest.mark.parametrize("ageing", [0.0, -1.0, math.nan, math.inf])
def test_ageing_that_makes_no_sense_is_refused(ageing: float) -> None:
    with pytest.raises(ConfigError, match="ageing is"):
        SchedulerConfig(ageing=ageing)


def test_predictions_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ConfigError, match="length_prediction is 'oracle'"):
        SchedulerConfig(length_prediction="oracle")
