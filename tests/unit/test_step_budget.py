"""A step budget in seconds: what fits beside single tokens, against the plain search; progress, promises, and what is
said when they break."""

from __future__ import annotations

import math
import random
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.config import EngineConfig, SchedulerConfig
from headrace.cost.calibrated import SHARES, Steadiness
from headrace.cost.cost_model import (
    EXCEED,
    MISJUDGED,
    MOST,
    Line,
    Steering,
    StepSpeed,
    Tail,
    keys_of,
    load_of,
    pairs_of,
)
from headrace.observe.metrics import StepRecorder, kind_of
from headrace.planner.devices import known_devices
from headrace.planner.simulator import Load, simulate
from headrace.planner.workload.load import LoadRequest, arriving
from headrace.request import StepPlan
from headrace.scheduler.step_budget import LEAST_SHARE, NEAR, SLICE, StepMeter
from headrace.spec import DecoderSpec, LayerSpec, RopeSpec
from tests.support.hash_engine import request
from tests.support.modelled import machine


@dataclass(frozen=True)
class Floors:
    """Bytes or FLOPs, whichever takes longer, and experts' bytes, which are concave in tokens."""

    windows: tuple[int | None, ...] = (None,)
    weights: float = 1e-3
    a_token: float = 1e-5
    a_key: float = 1e-8
    a_pair: float = 1e-9
    experts: float = 0.0

    def floor_seconds(self, tokens: int, sampled: int, pairs: Sequence[float], keys: Sequence[float]) -> float:
        attention = sum(max(p * self.a_pair, k * self.a_key) for p, k in zip(pairs, keys, strict=True))
        return (
            max(self.weights, tokens * self.a_token) + attention + self.experts * (1.0 - 0.98**tokens) + sampled * 1e-7
        )


def meter(
    seconds: float, starts: Sequence[int] = (100,), speed: StepSpeed | None = None, floors: Floors | None = None
) -> StepMeter:
    return StepMeter(floors or Floors(), speed or StepSpeed(), seconds, starts)


positions = st.lists(st.integers(0, 5000), min_size=1, max_size=40)
shapes = st.builds(
    Floors,
    windows=st.sampled_from([(None,), (None, 64), (256,)]),
    weights=st.floats(1e-4, 5e-3),
    a_token=st.floats(1e-6, 1e-4),
    a_pair=st.floats(1e-10, 1e-8),
    experts=st.sampled_from([0.0, 1e-3]),
)


@given(
    shapes,
    positions,
    st.floats(1e-3, 2e-2),
    st.integers(0, 4000),
    st.integers(1, 3000),
    st.floats(0.5, 3.0),
    st.floats(0.0, 1e-3),
)
@settings(max_examples=80, deadline=None)
def test_what_fits_is_what_the_plain_search_finds_or_a_little_less(
    floors: Floors, starts: list[int], seconds: float, start: int, most: int, slope: float, gap: float
) -> None:
    speed = StepSpeed(mixed=Line(slope, 1e-4), tail=1.1, gap=gap)
    step = StepMeter(floors, speed, seconds, starts)
    found = step.fits(start, most)
    assert 1 <= found <= most

    def floor(count: int) -> float:
        pairs = [sum(pairs_of(each, 1, w) for each in starts) + pairs_of(start, count, w) for w in floors.windows]
        keys = [sum(keys_of(each, 1, w) for each in starts) + keys_of(start, count, w) for w in floors.windows]
        return floors.floor_seconds(len(starts) + count, len(starts) + 1, pairs, keys)

    pairs = [sum(pairs_of(each, 1, w) for each in starts) for w in floors.windows]
    alone = floors.floor_seconds(len(starts), len(starts), pairs, pairs)
    room = max(speed.promised(seconds), alone + LEAST_SHARE * seconds / slope)
    assert found == 1 or floor(found) <= room * (1 + 1e-9)
    if found < most:  # what lies beyond is little: in time, or in tokens
        beyond = sum(1 for count in range(found + 1, most + 1) if floor(count) <= room)
        assert floor(found) >= room - NEAR * (room - alone) - 1e-12 or beyond <= 0.02 * most + 1


@given(positions, st.integers(0, 300), st.integers(1, 300), st.sampled_from([None, 1, 7, 64, 1000]))
def test_pairs_and_keys_of_a_chunk_are_those_of_the_cost_model(
    starts: list[int], start: int, count: int, window: int | None
) -> None:
    rows, counts = array("i", range(len(starts) + 1)), array("i", [1] * len(starts) + [count])
    plan = StepPlan(
        0, rows=rows, starts=array("i", [*starts, start]), counts=counts, sample_work=rows, sample_rows=rows
    )
    load = load_of(plan, (window,))
    assert load.pairs[0] == pytest.approx(
        sum(pairs_of(each, 1, window) for each in starts) + pairs_of(start, count, window)
    )
    assert load.keys[0] == pytest.approx(
        sum(keys_of(each, 1, window) for each in starts) + keys_of(start, count, window)
    )


def test_a_step_that_nobody_s_answer_waits_for_has_no_bound() -> None:
    assert meter(1e-6, starts=()).fits(0, 100_000) == 100_000


def test_single_tokens_over_the_budget_alone_are_said_and_prompts_go_on() -> None:
    step = meter(0.5e-3, starts=[100] * 300)
    assert step.overfull
    assert step.fits(0, 5000) >= 1
    step.add(0, step.fits(0, 5000))
    assert step.fits(0, 5000) == 0  # a second prompt has to wait


def test_a_prompt_goes_on_by_one_token_where_not_even_that_fits() -> None:
    assert meter(1e-9, floors=Floors(a_token=1.0)).fits(0, 50) == 1


def test_a_second_prompt_gets_what_is_left_or_nothing() -> None:
    floors = Floors(weights=0.0, a_token=1e-5, a_key=0.0, a_pair=0.0)
    step = meter(100.5e-5, floors=floors)
    step.add(0, 60)
    assert 35 <= step.fits(0, 500) <= 39
    step.add(0, 30)
    assert step.fits(0, 500) == 0  # room for a few: less than a slice
    assert step.fits(0, 3) == 3 < SLICE  # but the whole of a short one


def test_the_same_question_is_answered_once() -> None:
    asked = 0

    @dataclass(frozen=True)
    class Counted(Floors):
        def floor_seconds(self, tokens: int, sampled: int, pairs: Sequence[float], keys: Sequence[float]) -> float:
            nonlocal asked
            asked += 1
            return super().floor_seconds(tokens, sampled, pairs, keys)

    step = meter(3e-3, floors=Counted())
    first = step.fits(0, 1000)
    spent = asked
    assert step.fits(0, 1000) == first and asked == spent <= 16


def test_longer_context_gives_shorter_chunks_and_more_time_longer_ones() -> None:
    by_start = [meter(6e-3).fits(start, 10_000) for start in (0, 2000, 20_000, 100_000)]
    assert by_start == sorted(by_start, reverse=True) and by_start[0] > 1.5 * by_start[-1]
    by_seconds = [meter(seconds).fits(0, 10_000) for seconds in (2e-3, 4e-3, 8e-3)]
    assert by_seconds == sorted(by_seconds) and len(set(by_seconds)) == 3


def test_the_tail_settles_where_one_step_in_a_hundred_exceeds_it() -> None:
    import random

    draw, tail, above = random.Random(3), Tail(), 0
    for step in range(40_000):
        ratio = draw.lognormvariate(0.0, 0.1)
        above += step >= 10_000 and ratio > tail.ratio
        tail.observe(ratio)
    assert above / 30_000 == pytest.approx(EXCEED, rel=0.3)


def test_the_tail_of_steps_that_keep_to_their_prediction_is_1_and_has_a_top() -> None:
    tail = Tail()
    for _ in range(1000):
        tail.observe(0.9)
    assert tail.ratio == 1.0
    for _ in range(1000):
        tail.observe(1e9)
    assert tail.ratio <= 4.0


@given(st.floats(0.2, 5.0), st.floats(0.0, 5e-3), st.floats(1.0, 4.0), st.floats(0.0, 5e-3), st.floats(1e-2, 1.0))
def test_a_promise_leaves_room_for_the_tail_and_the_time_between_steps(
    slope: float, overhead: float, tail: float, gap: float, seconds: float
) -> None:
    speed = StepSpeed(mixed=Line(slope, overhead), tail=tail, gap=gap)
    assert speed.mixed.seconds(speed.promised(seconds)) * tail + gap == pytest.approx(seconds)


def test_a_promise_is_kept_on_a_device_whose_speed_must_be_learned() -> None:
    """The simulated device reaches other shares of its limits for each kind of operator; the engine knows the limits
    alone, and the steps before."""
    spec = DecoderSpec(
        "llama", 32_000, 2048, 16, 8, 128, 8192, (LayerSpec(),) * 16, 32_768, RopeSpec(5e5, 128), checkpoint_dtype="bfloat16"
    )  # fmt: skip
    asked = arriving(
        [LoadRequest(1500 + 97 * index % 3000, 50 + 13 * index % 40) for index in range(36)],
        9.0,
        burstiness=1.0,
        seed=2,
    )
    found = {}
    for name, scheduler in (("tokens", SchedulerConfig()), ("time", SchedulerConfig(max_step_ms=12.0))):
        found[name] = simulate(spec, EngineConfig(scheduler=scheduler), known_devices()["a100"], Load(asked)).figures
    assert found["time"]["p99_itl_ms"] <= 12.0 * 1.02 < found["tokens"]["p99_itl_ms"] / 2
    assert found["time"]["promise_kept_share"] >= 0.98 and found["time"]["promised_steps"] > 200
    assert found["time"]["overfull_steps"] == 0 and "promised_steps" not in found["tokens"]


def test_where_prices_are_wrong_promises_steer() -> None:
    """Limits that are wrong tenfold let every token seem free; the share of what seems to fit comes down to what
    does."""
    steering, promise, kept = Steering(), 0.03, []
    for step in range(600):
        chunk = meter(promise, floors=Floors(weights=20e-3, a_token=1e-6), speed=StepSpeed(share=steering.share)).fits(
            0, 2000
        )
        seconds = 5e-3 + 1e-4 * chunk
        kept.append(seconds <= promise)
        steering.observe(chunk, kept=kept[-1], misjudged=seconds > MISJUDGED * max(20e-3, chunk * 1e-6))
        assert 1 <= chunk <= 2000, step
    assert not kept[0] and sum(kept[200:]) / 400 > 0.95 and steering.share < 0.2


@pytest.mark.parametrize("without_prompt", [0.5, 0.0])
def test_promises_that_other_programs_break_are_no_reason_for_small_chunks(without_prompt: float) -> None:
    """One in five breaks and takes long, whatever is planned; also where a prompt is always under way."""
    draw, steering = random.Random(3), Steering()
    for _ in range(4000):
        disturbed = draw.random() < 0.2
        steering.observe(0 if draw.random() < without_prompt else 500, kept=not disturbed, misjudged=disturbed)
    assert steering.share == 1.0
    for _ in range(400):  # answers that are too many by themselves are judged right
        steering.observe(500, kept=False, misjudged=False)
    assert steering.share == 1.0


@pytest.mark.slow
def test_prompts_on_a_noisy_machine_do_not_wait_much_longer_for_a_bound() -> None:
    """Some steps take over four times their price. Planned for a quarter of their time, and for four tenths of what
    fits in that, steps made the median first token come after 7.4 times as long as without a bound."""
    noise = tuple(math.exp(0.3 * (share - 0.5) + 10.0 * max(0.0, share - 0.85)) for share in SHARES)

    def median_ttft(**bound: float) -> tuple[float, StepRecorder]:
        core, recorder = machine(0, max_num_seqs=32, steadiness=Steadiness(noise, noise, 0.4, 0.1), **bound)
        draw, sent, first = random.Random(1), 0.0, list[float]()
        coming = deque[tuple[float, int]]()
        for number in range(120):
            sent += draw.expovariate(3.0)
            coming.append((sent, number))
        while coming or core.has_work:
            while coming and coming[0][0] <= core.clock.now():
                at, number = coming.popleft()
                ids = [draw.randint(8, 599) for _ in range(draw.randint(300, 900))]
                core.add(request(number, ids, max_tokens=draw.randint(150, 250), arrival_time=at))
            if not core.has_work:
                core.clock.sleep_until(coming[0][0])
                continue
            times = [each.finished.times for each in core.step() if each.finished is not None]
            first += [
                each.first_token - each.arrival for each in times if each is not None and each.first_token is not None
            ]
        return sorted(first)[len(first) // 2], recorder

    free, _ = median_ttft()
    bounded, recorder = median_ttft(max_step_ms=80.0)
    assert bounded < 2.0 * free and recorder.speed().tail <= MOST and recorder.speed().share == 1.0


def test_a_part_of_a_prompt_that_is_one_token_is_no_answer() -> None:
    """Else nothing would be learned of mixed steps any more, once chunks are that small."""
    assert [kind_of(3, 3, sampled) for sampled in (3, 2)] == ["decode", "mixed"]
    assert kind_of(3, 0, 0) == "prefill" and kind_of(3, 1, 1) == "mixed"
