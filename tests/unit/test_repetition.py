"""Answers that loop: found at the first token that makes them one, and never in a text that does not."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace import SamplingParams
from headrace.engine.keyed_hash import KeyedHashExecutor, keyed_hash_info
from headrace.errors import InvalidRequest
from headrace.request import FinishReason, RepetitionDetection, StepPlan, StepResult
from headrace.scheduler.repetition import FIRST_SCALE, RepetitionDetector
from tests.support.hash_engine import Answers, assert_at_rest, engine, expected, run
from tests.support.hash_engine import request as hash_request

# --- the search, against one that looks everywhere


def naive(ids: Sequence[int], asked: RepetitionDetection) -> int | None:
    """The first length at which the ids end in a loop."""
    runs = [0] * (asked.max_pattern_size + 1)
    for end in range(1, len(ids) + 1):
        for period in range(1, min(asked.max_pattern_size, end - 1) + 1):
            runs[period] = runs[period] + 1 if ids[end - 1] == ids[end - 1 - period] else 0
            if period >= asked.min_pattern_size and runs[period] + period >= max(
                asked.min_count * period, asked.min_tokens
            ):
                return end
    return None


def search(ids: Sequence[int], asked: RepetitionDetection, prompt: Sequence[int] = ()) -> tuple[int | None, int]:
    """The same by the detector, called only where it wants to be; and how often it was."""
    known, looks = array("i", prompt), 0
    detector = RepetitionDetector(asked, len(known))
    for token in ids:
        known.append(token)
        if len(known) >= detector.next_look:
            looks += 1
            if detector.look(known):
                return len(known) - len(prompt), looks
    return None, looks


detections = st.builds(
    lambda low, more, count, tokens: RepetitionDetection(min_pattern_size=low, max_pattern_size=low + more, min_count=count, min_tokens=tokens),
    st.integers(1, 12), st.integers(0, 60), st.integers(3, 6), st.integers(24, 90),
)  # fmt: skip
cycles = st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=40), st.integers(1, 160)).map(
    lambda pair: (pair[0] * pair[1])[: pair[1]]
)


@settings(max_examples=500, deadline=None)
@given(
    pieces=st.lists(cycles | st.lists(st.integers(0, 2), max_size=30), max_size=7),
    asked=detections,
    prompt=st.lists(st.integers(0, 1), max_size=40),
)
def test_a_loop_is_found_exactly_where_a_search_of_everything_finds_it(
    pieces: list[list[int]], asked: RepetitionDetection, prompt: list[int]
) -> None:
    ids = [token for piece in pieces for token in piece]
    assert search(ids, asked, prompt)[0] == naive(ids, asked)


@pytest.mark.parametrize("period", [1, 2, 7, 8, 9, 15, 16, 17, 31, 63, 64, 65, 127, 128, 129, 255, 256])
def test_every_scale_finds_its_periods_at_every_phase(period: int) -> None:
    asked = RepetitionDetection(min_count=3, min_tokens=24)
    cycle = list(range(100, 100 + period))
    for lead in range(0, 2 * FIRST_SCALE + 3):
        ids = [*range(10**6, 10**6 + lead), *(cycle * (24 // period + 4))]
        assert search(ids, asked)[0] == lead + max(3 * period, 24), lead


def test_cycles_that_hold_smaller_cycles_are_found_whole() -> None:
    """Runs of equal tokens inside the cycle: at many tokens the nearest equal stretch is not a period away."""
    for inner in range(1, 40):
        ids = ([5] * inner + [6]) * 12
        asked = RepetitionDetection(min_count=3, min_tokens=24)
        assert search(ids, asked)[0] == naive(ids, asked), inner


def test_a_cycle_over_the_largest_size_and_one_of_too_few_turns_are_none() -> None:
    cycle = list(range(65))
    assert search(cycle * 20, RepetitionDetection(max_pattern_size=64))[0] is None
    assert search(cycle * 3, RepetitionDetection(max_pattern_size=65, min_count=4, min_tokens=24))[0] is None
    assert search([1, 2] * 20, RepetitionDetection(min_pattern_size=3, min_count=5, min_tokens=24))[0] == 24
    assert (
        search([1, 2] * 20, RepetitionDetection(min_pattern_size=5, min_count=5, min_tokens=24))[0] == 30
    )  # five times six


def test_most_tokens_cost_nothing_but_the_comparison() -> None:
    ids = [(i * i * 7919 + i) % 5003 for i in range(8000)]
    found, looks = search(ids, RepetitionDetection(min_tokens=24, min_count=3))
    assert found is None and looks <= len(ids) // FIRST_SCALE


def test_candidates_stay_few_in_texts_full_of_repeats() -> None:
    fibonacci = [0]
    previous = [1]
    while len(fibonacci) < 4000:
        fibonacci, previous = fibonacci + previous, fibonacci
    known = array("i")
    detector = RepetitionDetector(RepetitionDetection(max_pattern_size=2048, min_count=10, min_tokens=4000), 0)
    most = 0
    for token in fibonacci:
        known.append(token)
        if len(known) >= detector.next_look:
            detector.look(known)
            most = max(most, len(detector._runs))
    assert 2 <= most <= 24


# --- ordinary text

CODE = "".join(f"    if value == {n}:\n        return table[{n}]\n    else:\n        pass\n" for n in range(60))
TABLE = "| step | tokens | ms |\n|---|---|---|\n" + "".join(
    f"| {n} | {n * 37 % 1000} | {n * 0.37:.2f} |\n" for n in range(200)
)
NUMBERS = ", ".join(str(n) for n in range(600))
RULERS = "\n".join(["=" * 80, "Title", "=" * 80, "", "-" * 80, "Text", "-" * 80] * 3)
LIST = "".join(f"{n}. Item number {n} is here, and so is its line.\n" for n in range(1, 120))


@pytest.mark.parametrize(
    "text", [CODE, TABLE, NUMBERS, RULERS, LIST], ids=["code", "table", "numbers", "rulers", "list"]
)
def test_ordinary_text_is_no_loop(text: str) -> None:
    """A token a character is the worst case: everything repeats sooner than in any tokenizer's ids."""
    assert search([ord(c) for c in text], RepetitionDetection())[0] is None


def test_a_stuck_answer_is_one() -> None:
    text = "I am sorry, I cannot say more about this. " * 40
    found, _ = search([ord(c) for c in text], RepetitionDetection())
    assert found == 256


# --- what users write


def test_true_and_objects_are_taken() -> None:
    assert SamplingParams(repetition_detection=True).repetition_detection == RepetitionDetection()  # type: ignore[arg-type]
    for off in (False, None):
        assert SamplingParams(repetition_detection=off).repetition_detection is None  # type: ignore[arg-type]
    given = SamplingParams(repetition_detection={"max_pattern_size": 20, "min_count": 3}).repetition_detection  # type: ignore[arg-type]
    assert given == RepetitionDetection(max_pattern_size=20, min_count=3)


@pytest.mark.parametrize(
    "value",
    [1, "yes", [], {"period": 3}, {"min_count": 2}, {"min_count": True}, {"max_pattern_size": 0}, {"max_pattern_size": 5000}, {"min_tokens": 8},
     {"min_pattern_size": 9, "max_pattern_size": 8}, {"min_tokens": float("nan")}, {"min_count": None}, {5: 5}, {"x" * 10**6: 1}],
)  # fmt: skip
def test_what_makes_no_sense_is_refused_by_name(value: object) -> None:
    with pytest.raises(InvalidRequest) as refused:
        SamplingParams(repetition_detection=value)  # type: ignore[arg-type]
    assert refused.value.param == "repetition_detection" and len(refused.value.message) < 300


# --- in the engine


class Looping(KeyedHashExecutor):
    """The keyed hash, but a token is one of ``cycle``, by its position, from ``begin`` on."""

    cycle = (3, 1, 4, 1, 5)
    begin = 12

    def _sample(self, plan: StepPlan, heads: list[int], allowed: Mapping[int, array[int]]) -> StepResult:
        result = super()._sample(plan, heads, allowed)
        tokens = list(result.tokens)
        for j, (work, target) in enumerate(zip(plan.sample_work, plan.sample_rows, strict=True)):
            position = plan.starts[work] + plan.counts[work]
            if position >= self.begin:
                token = self.cycle[position % len(self.cycle)]
                self._rows[target].token_ids[position] = token
                tokens[j] = (token,)
        return replace(result, tokens=tokens)


ASKED = RepetitionDetection(min_count=3, min_tokens=24)


def looping(**kwargs: object) -> Answers:
    settings = {"num_blocks": 64, "block_size": 4, "max_num_seqs": 8}
    info = keyed_hash_info(
        vocab_size=512, max_model_len=200, **{**settings, **{k: v for k, v in kwargs.items() if k in settings}}
    )  # type: ignore[arg-type]
    core = engine(executor=Looping(info, clock=None), info=info, depth=kwargs.get("depth", 0))  # type: ignore[arg-type]
    for number in range(6):
        params = {
            "max_tokens": 100,
            "n": 2 if number == 5 else 1,
            "repetition_detection": ASKED,
            **kwargs.get("params", {}),
        }  # type: ignore[dict-item]
        core.add(hash_request(number, [number + 1, 2], **params))
    answers = run(core)
    assert_at_rest(core)
    if kwargs.get("num_blocks", 64) != 64:
        assert core.stats().counters.preemptions > 0
    return answers


@pytest.mark.parametrize(
    "kwargs",
    [{}, {"depth": 1}, {"depth": 2}, {"num_blocks": 20}, {"num_blocks": 20, "depth": 1}, {"params": {"logprobs": 2}}],
)
def test_the_engine_ends_a_looping_answer_at_the_same_token_in_every_mode(kwargs: dict[str, object]) -> None:
    answers = looping(**kwargs)
    assert len(answers.finished) == 7
    for key, tokens in answers.tokens.items():
        finished = answers.finished[key]
        assert (finished.reason, finished.stop_reason) == (FinishReason.STOP, "repetition"), key
        assert len(tokens) == naive(tokens, ASKED), key


def test_no_end_before_min_tokens() -> None:
    answers = looping(params={"min_tokens": 60})
    assert {len(tokens) for tokens in answers.tokens.values()} == {60}


def test_without_the_field_nothing_ends() -> None:
    asked = hash_request(1, [1, 2, 3], max_tokens=40)
    core = engine()
    core.add(asked)
    assert run(core).tokens[1, 0] == expected(asked)
