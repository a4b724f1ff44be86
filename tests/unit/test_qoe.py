"""Readers' experience: the paper's figure on drawn curves, who is pushed out for whom, the cap, turns, and expectations
that make no sense."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.config import SchedulerConfig
from headrace.engine.core import EngineCore
from headrace.errors import ConfigError, InvalidRequest
from headrace.planner.workload.statistics import Reader as Expected
from headrace.planner.workload.statistics import Sample, experience, experiences
from headrace.request import Expectations
from headrace.scheduler.policies.qoe import TURN, QualityOfExperience, Reader
from tests.support.hash_engine import engine, request

READER = Expected(ttft=1.0, speed=5.0)


def sample(arrivals: list[float], **fields: object) -> Sample:
    return Sample(sent=10.0, arrivals=[10.0 + at for at in arrivals], output_tokens=len(arrivals), **fields)  # type: ignore[arg-type]


def by_area(arrivals: list[float], reader: Expected, step: float = 1e-3) -> float:
    """The definition itself: both curves walked through in small steps of time."""
    read, expected, kept, wanted, now = 0.0, 0.0, 0.0, 0.0, 0.0
    while read < len(arrivals) - 1e-9:
        here = sum(arrival <= now for arrival in arrivals)
        if now >= reader.ttft:
            expected = min(len(arrivals), expected + reader.speed * step)
            read = min(here, read + reader.speed * step)
        kept, wanted, now = kept + read * step, wanted + expected * step, now + step
    return kept / wanted


# --- the figure


def test_what_comes_in_time_is_perfect() -> None:
    assert experience(sample([0.2 + 0.01 * i for i in range(50)]), READER) == 1.0
    assert experience(sample([1.0 + 0.2 * i for i in range(50)]), READER) == pytest.approx(1.0)


def test_what_never_comes_is_nothing() -> None:
    assert experience(sample([]), READER) == experience(sample([0.1, 0.2], error="429"), READER) == 0.0


@settings(max_examples=15, deadline=None)
@given(
    gaps=st.lists(st.sampled_from([0.0, 0.05, 0.2, 0.5, 3.0]), min_size=2, max_size=12),
    first=st.sampled_from([0.1, 1.0, 2.5]),
)
def test_the_sum_is_the_area(gaps: list[float], first: float) -> None:
    arrivals = [first]
    for gap in gaps:
        arrivals.append(arrivals[-1] + gap)
    assert experience(sample(arrivals), READER) == pytest.approx(by_area(arrivals, READER), abs=0.02)


def test_a_later_beginning_is_never_better() -> None:
    """All of it later, that is: of one late token the definition makes a longer text, in which what came before weighs
    less."""
    rng = random.Random(5)
    for _ in range(100):
        arrivals = sorted(rng.uniform(0.0, 8.0) for _ in range(rng.randint(1, 30)))
        now, later = (
            experience(sample([at + delay for at in arrivals]), READER) for delay in (0.0, rng.uniform(0.1, 5.0))
        )
        assert 0.0 < later <= now + 1e-12 <= 1.0 + 1e-9


def test_the_mean_counts_those_who_got_nothing() -> None:
    figures = experiences([sample([0.5, 0.6]), sample([], error="429: full")], READER)
    assert figures == {"mean_qoe": 0.5, "p10_qoe": pytest.approx(0.1), "good_qoe_share": 0.5}


# --- one reader


@settings(max_examples=60, deadline=None)
@given(gaps=st.lists(st.floats(0.01, 2.0), min_size=1, max_size=40))
def test_a_reader_that_is_seen_at_every_token_is_exact(gaps: list[float]) -> None:
    reader, arrivals, now = Reader(start=11.0, speed=5.0, dry=11.0, seen=10.0), [], 10.0
    for count, gap in enumerate(gaps, start=1):
        now += gap
        arrivals.append(now - 10.0)
        reader.seen = now  # it came now, not since
        reader.take(count, now)
    seen = sample(arrivals)
    whole = reader.tokens * (reader.dry - reader.start) - reader.tokens**2 / (2 * 5.0)
    assert 1.0 - reader.delays / whole == pytest.approx(experience(seen, READER), abs=1e-6)


def test_nothing_is_gained_while_there_is_text_to_read() -> None:
    reader = Reader(start=1.0, speed=5.0, dry=1.0, seen=0.0)
    reader.take(50, 2.0)
    assert reader.dry == pytest.approx(1.0 + 50 / 5.0)
    assert reader.experience(2.0, 100.0) == reader.experience(10.9, 100.0) == 1.0
    assert reader.experience(12.0, 100.0) < 1.0
    late = Reader(start=1.0, speed=5.0, dry=1.0, seen=9.9)
    late.take(50, 10.0)
    assert late.expected(50) < 12.0 < late.dry
    assert late.experience(12.0, 100.0) == late.experience(late.dry, 100.0) > late.experience(late.dry + 1.0, 100.0)


def test_the_longer_a_wait_the_less_its_next_second_costs() -> None:
    reader = Reader(start=1.0, speed=5.0, dry=1.0, seen=0.0)
    costs = [reader.experience(now, 100.0) - reader.experience(now + 1.0, 100.0) for now in (1.0, 5.0, 30.0, 200.0)]
    assert costs == sorted(costs, reverse=True)
    assert costs[-1] > 0.0


# --- the policy


def reading(**options: object) -> EngineCore:
    return engine(scheduling_policy="qoe", **options)  # type: ignore[arg-type]


def policy_of(core: EngineCore) -> QualityOfExperience:
    assert isinstance(core.scheduler.policy, QualityOfExperience)
    return core.scheduler.policy


def run(core: EngineCore, seconds: float, tick: float = 0.1) -> list[tuple[float, int]]:
    """Steps of ``tick`` seconds; (when, whose) for every token."""
    tokens, end = [], core.clock.now() + seconds
    while core.clock.now() < end - 1e-9 and core.has_work:
        core.clock.sleep_until(core.clock.now() + tick)
        tokens += [(core.clock.now(), output.request_id) for output in core.step() if output.token_ids]
    return tokens


def test_whoever_has_text_in_stock_makes_room_for_whoever_has_none() -> None:
    """One row, ten tokens a second, readers of two: the first answer is interrupted for the second, and neither reader
    notices."""
    core = reading(max_num_seqs=1, qoe_preemptions=1.0)
    expects = Expectations(ttft=1.0, reading_speed=2.0)
    core.add(request(0, [1, 2, 3], max_tokens=60, expects=expects, arrival_time=0.0))
    tokens = run(core, 2.0)
    core.add(request(1, [4, 5, 6], max_tokens=20, expects=expects, arrival_time=2.0))
    tokens += run(core, 60.0)
    first = next(at for at, who in tokens if who == 1)
    assert first < 3.5
    assert core.stats().counters.preemptions >= 1
    for who, sent in ((0, 0.0), (1, 2.0)):
        seen = Sample(sent=sent, arrivals=[at for at, whose in tokens if whose == who], output_tokens=1)
        assert experience(seen, Expected(1.0, 2.0)) > 0.97


def test_without_preemptions_nobody_is_pushed_out() -> None:
    core = reading(max_num_seqs=1, qoe_preemptions=0.0)
    core.add(request(0, [1, 2, 3], max_tokens=40))
    run(core, 2.0)
    core.add(request(1, [4, 5, 6], max_tokens=20, arrival_time=2.0))
    tokens = run(core, 60.0)
    assert [who for _, who in tokens] == sorted(who for _, who in tokens)
    assert core.stats().counters.preemptions == 0


@pytest.mark.parametrize("cap", [0.5, 2.0])
def test_preemptions_keep_to_their_number(cap: float) -> None:
    core, rng = reading(max_num_seqs=2, num_blocks=400, qoe_preemptions=cap), random.Random(3)
    for number in range(60):
        core.add(
            request(number, range(number, number + 6), max_tokens=rng.randint(5, 60), arrival_time=core.clock.now())
        )
        run(core, 1.0)
    while core.has_work:
        run(core, 10.0)
    assert 0 < core.stats().counters.preemptions <= cap * 60


def test_who_gives_way_for_want_of_blocks_leaves_no_debt() -> None:
    """Else a cache that was too small for a while keeps readers waiting long after: nobody may make room for them."""
    core = reading(max_num_seqs=4, num_blocks=20, qoe_preemptions=0.1)
    for number in range(4):
        core.add(request(number, range(9 * number, 9 * number + 8), max_tokens=60, arrival_time=core.clock.now()))
    least = 0.0
    while core.has_work:
        run(core, 0.1)
        least = min(least, policy_of(core)._credit)
    assert core.stats().counters.preemptions > 1
    assert least == 0.0


def test_nobody_starves() -> None:
    """The turns: with ever new requests that gain more, an old one is admitted within TURN admissions for each that
    came before it."""
    core = reading(max_num_seqs=1, qoe_preemptions=0.0)
    core.add(
        request(0, [1, 2, 3], max_tokens=4, expects=Expectations(ttft=1e-3, reading_speed=0.01), arrival_time=-1e4)
    )  # a lost cause
    admitted, number = 0, 1
    core.add(request(number, [9], max_tokens=1, arrival_time=0.0))
    while not any(who == 0 for _, who in run(core, 0.1)):
        number += 1
        eager = Expectations(ttft=0.05, reading_speed=100.0)
        core.add(request(number, [9, number % 300], max_tokens=2, expects=eager, arrival_time=core.clock.now()))
        admitted = policy_of(core)._admitted
        assert admitted <= 2 * TURN
    assert admitted > 2, "it was no lost cause"


def test_looks_are_rare_and_wake_steps_that_are_alike() -> None:
    core = reading(max_num_seqs=2)
    core.add(request(0, [1, 2], max_tokens=60))
    run(core, 2.0)
    assert policy_of(core).wake == math.inf
    for number in range(1, 4):
        core.add(request(number, [number, 2], max_tokens=60, arrival_time=core.clock.now()))
    run(core, 0.2)
    assert core.clock.now() <= policy_of(core).wake <= core.clock.now() + 0.05


def test_a_clock_that_jumps_changes_no_end() -> None:
    core = reading(max_num_seqs=2)
    for number in range(6):
        core.add(request(number, [number, 2], max_tokens=20, arrival_time=random.Random(number).uniform(-1e9, 1e9)))
    run(core, 1.0)
    core.clock.sleep_until(1e7)
    while core.has_work:
        core.step()
    assert not policy_of(core)._readers


# --- what makes no sense


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf, 1e9, "4", True, None])
def test_expectations_that_make_no_sense_are_refused(value: object) -> None:
    for name in ("ttft", "tpot", "reading_speed"):
        if value is None:
            assert getattr(Expectations(**{name: value}), name) is None  # type: ignore[arg-type]
            continue
        with pytest.raises(InvalidRequest, match=name):
            Expectations(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("expected_ttft", 0.0),
        ("expected_ttft", math.nan),
        ("reading_speed", -3.0),
        ("reading_speed", math.inf),
        ("qoe_preemptions", math.inf),
    ],
)
def test_defaults_that_make_no_sense_are_refused(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=name):
        SchedulerConfig(**{name: value})  # type: ignore[arg-type]
