"""Forced tokens are told several at a time and computed as chunks: what is answered is what it is one token at a
time."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine.executor import ExecutorInfo
from headrace.engine.grammar import MAX_RUN, GrammarError, create_limits, create_matcher, create_tokenizer, forced_run
from headrace.engine.grammar_masks import GrammarMasks
from headrace.engine.keyed_hash import keyed_hash_info
from headrace.request import Finished, Request, StructuredOutputs
from headrace.scheduler.roster import Roster
from headrace.scheduler.step_planner import MASK_SECONDS
from tests.support.grammars import FIRST_BYTE, SPECIAL, create_masks, vocabulary
from tests.support.hash_engine import (
    VOCAB,
    Answers,
    CheckedExecutor,
    assert_at_rest,
    check_books,
    engine,
    plans_of,
    request,
)
from tests.support.journal import Journal, replay
from unit.test_forced_text import BRIDGED, KINDS, VOCABULARIES

TOKENIZER = create_tokenizer(vocabulary())
KEYS = {"aaaa_bbbb_0101_temperature": {"enum": [1, 2]}, "abab_the_name_of_a_city": {"enum": ["a", "bb"]}}
SCHEMA = {"type": "object", "properties": KEYS, "required": [*KEYS], "additionalProperties": False}
WANTED = (
    StructuredOutputs(json=SCHEMA),  # type: ignore[arg-type]
    StructuredOutputs(grammar='start: <|x|> "call: {" ("abba" | "ba") "}, and that is all" <|x|>'),
    StructuredOutputs(choice=("the only one of all that may come " * 4,)),
    StructuredOutputs(regex="[ab]{1,3} and then[01] is said at last"),
)
LOOSE = (StructuredOutputs(regex="[ab01](.|\n){20,60}x"), StructuredOutputs(json_object=True))
Told = tuple[dict[tuple[int, int], list[int]], dict[tuple[int, int], Finished], int]


def answers_of(asked: list[Request], *, fast: bool, depth: int, num_blocks: int = 400, **sizes: object) -> Told:
    """Tokens, ends, and how many steps there were."""
    masks = create_masks((*WANTED, *LOOSE))
    core, answers = (
        engine(depth=depth, masks=masks, num_blocks=num_blocks, max_model_len=300, fast_forward=fast, **sizes),
        Answers(),
    )  # type: ignore[arg-type]
    plans = plans_of(core)
    for each in asked:
        core.add(each)
    while core.has_work:
        answers.take(core.step())
        check_books(core)
    assert_at_rest(core)
    masks.close()
    return answers.tokens, answers.finished, len(plans)


def assert_the_same(asked: list[Request], **sizes: object) -> tuple[int, int]:
    """Returns the steps off and on."""
    off, on = (answers_of(asked, fast=fast, **sizes) for fast in (False, True))  # type: ignore[arg-type]
    assert on[0] == off[0]
    assert {key: (end.reason, end.stop_reason) for key, end in on[1].items()} == {
        key: (end.reason, end.stop_reason) for key, end in off[1].items()
    }
    return off[2], on[2]


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("which", range(len(WANTED)))
def test_one_answer_is_the_same_in_fewer_steps(which: int, depth: int) -> None:
    off, on = assert_the_same(
        [request(0, [1, 2, 3], max_tokens=250, structured_outputs=WANTED[which], ignore_eos=False)], depth=depth
    )
    assert on < 0.75 * off


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize(
    ("num_blocks", "budget"), [(400, 64), (80, 64), (400, 5), (80, 9)], ids=["room", "preempted", "in parts", "both"]
)
def test_many_answers_are_the_same(depth: int, num_blocks: int, budget: int) -> None:
    draw = random.Random(depth + num_blocks)
    asked = [
        request(
            number, range(10, 11 + draw.randint(0, 20)), n=draw.choice((1, 1, 2)), seed=number, max_tokens=draw.choice((7, 30, 120)),
            structured_outputs=draw.choice((*WANTED, None)), ignore_eos=draw.random() < 0.5,
            logprobs=draw.choice((None, None, None, 0)), min_tokens=draw.choice((0, 7)),
        )
        for number in range(10)
    ]  # fmt: skip
    assert_the_same(asked, depth=depth, num_blocks=num_blocks, budget=budget)


def mixed(draw: random.Random) -> list[Request]:
    return [
        request(
            number, range(10, 12 + 3 * number), n=draw.choice((1, 1, 2)), seed=number, max_tokens=draw.choice((7, 30, 120)),
            structured_outputs=draw.choice((*LOOSE, *WANTED, None)), ignore_eos=draw.random() < 0.5, min_tokens=draw.choice((0, 7)),
            logprobs=draw.choice((None, 0)), stop_token_ids=draw.choice(((), (5, 6))),
        )
        for number in range(10)
    ]  # fmt: skip


@pytest.mark.parametrize(("depth", "num_blocks", "budget"), [(0, 400, 64), (1, 80, 64), (2, 400, 9), (2, 80, 64)])
def test_drafts_along_a_grammar_change_no_answer(depth: int, num_blocks: int, budget: int) -> None:
    """Beside forced runs, which take the place of drafts; each draft is masked as its place would be without."""
    asked = mixed(random.Random(depth))
    plain, drafted = drafting(asked, depth=depth, num_blocks=num_blocks, budget=budget)
    assert drafted[0] == plain[0]
    assert {key: end.reason for key, end in drafted[1].items()} == {key: end.reason for key, end in plain[1].items()}


def drafting(asked: list[Request], *, num_blocks: int = 400, **sizes: Any) -> tuple[Told, Told]:
    """Without drafts, and with four a row and step."""
    info = keyed_hash_info(vocab_size=VOCAB, max_model_len=300, num_blocks=num_blocks, block_size=4, max_drafts=4)
    executor = CheckedExecutor(info, check=True, acceptance=0.9)
    plain = answers_of(asked, fast=True, num_blocks=num_blocks, **sizes)
    return plain, answers_of(asked, fast=True, executor=executor, info=info, max_drafts=4, **sizes)


@pytest.mark.parametrize("depth", [1, 2])
def test_drafts_end_though_masks_are_slow(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that make way for others' masks go on behind them, but not with what may be their last token while drafts in
    flight may be refuted: who is fully planned is planned no more."""
    draw = random.Random(2)

    def took(self: GrammarMasks, request_id: int, seconds: float) -> None:
        self.seconds[request_id] = draw.choice((0.0, 1.1 * MASK_SECONDS))

    monkeypatch.setattr(GrammarMasks, "_note_seconds", took)
    plain, drafted = drafting(mixed(random.Random(2)), depth=depth, num_blocks=80)
    assert drafted[0] == plain[0]


@pytest.mark.parametrize("depth", [0, 1])
def test_drafts_along_a_grammar_save_steps(depth: int) -> None:
    asked = [request(0, [1, 2, 3], max_tokens=120, structured_outputs=LOOSE[0], stop_token_ids=[FIRST_BYTE + 9])]
    plain, drafted = drafting(asked, depth=depth)
    assert drafted[0] == plain[0] and drafted[2] < 0.85 * plain[2]


@pytest.mark.parametrize("depth", [0, 1])
def test_max_tokens_and_stop_tokens_cut_a_run_where_they_are(depth: int) -> None:
    whole = answers_of([request(0, [1, 2], max_tokens=250, structured_outputs=WANTED[2])], fast=False, depth=0)[0][0, 0]
    for most in (1, 2, 3, *range(4, len(whole) + 2, 11), len(whole) - 1, len(whole), len(whole) + 1):
        asked = request(0, [1, 2], max_tokens=most, structured_outputs=WANTED[2])
        assert answers_of([asked], fast=True, depth=depth)[0][0, 0] == whole[:most]
    for stop in sorted({*whole[1::9]}):
        assert_the_same(
            [request(0, [1, 2], max_tokens=250, stop_token_ids=[stop], structured_outputs=WANTED[2], min_tokens=5)],
            depth=depth,
        )


def test_a_stop_string_within_a_run_ends_the_answer_there() -> None:
    """It is the output processor that finds it, and says how many tokens stay."""
    masks = create_masks(WANTED)
    core, answers = engine(depth=1, masks=masks, num_blocks=400, max_model_len=300), Answers()
    core.add(request(0, [1, 2], max_tokens=250, structured_outputs=WANTED[2]))
    while core.has_work:
        outputs = core.step()
        answers.take(outputs)
        if len(answers.tokens.get((0, 0), ())) > 20:
            core.finish(0, 0, 9)
            core.step()
            break
    assert len(max((output.token_ids for output in outputs), key=len)) > 10  # several at once
    while core.has_work:
        assert not core.step()
    assert_at_rest(core)
    masks.close()


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_step_that_fails_and_a_client_that_leaves_change_no_other_answer(depth: int) -> None:
    asked = [
        request(number, [1, 2, number], max_tokens=200, structured_outputs=WANTED[number % 4]) for number in range(5)
    ]
    right = answers_of(asked, fast=False, depth=0)[0]
    info: ExecutorInfo = keyed_hash_info(
        vocab_size=VOCAB, max_model_len=300, max_num_seqs=3, num_blocks=400, block_size=4
    )
    for bad in range(2, 12):
        masks = create_masks(WANTED)
        executor = CheckedExecutor(info, check=True, fault=lambda plan, bad=bad: plan.step_id == bad)  # type: ignore[misc]
        core, answers = engine(depth=depth, executor=executor, info=info, masks=masks), Answers()
        for each in asked:
            core.add(each)
        turns = 0
        while core.has_work:
            answers.take(output for output in core.step() if output.request_id != 4)
            turns += 1
            if turns == bad:
                core.abort(4)
            check_books(core)
        assert_at_rest(core)
        masks.close()
        for key, tokens in answers.tokens.items():
            assert tokens == (
                right[key] if answers.finished[key].reason.value != "error" else right[key][: len(tokens)]
            )


def test_a_rows_tables_stay_and_a_journal_replays() -> None:
    masks = create_masks(WANTED)
    core = engine(depth=1, masks=masks, num_blocks=400, max_model_len=300)
    plans, journal = plans_of(core), Journal.of(core.scheduler)
    core.add(request(0, range(10, 110), max_tokens=120, structured_outputs=WANTED[0]))
    while core.has_work:
        core.step()
    rebuilt = [plan for plan in plans[2:] if plan.rows_added]
    assert (
        rebuilt
        and max(len(plan.table_row) for plan in rebuilt) <= MAX_RUN // 4 + 1
        and max(max(plan.counts) for plan in rebuilt) > 3
    )
    fresh = engine(num_blocks=400, max_model_len=300).scheduler
    assert [plan for plan in replay(journal, fresh) if plan is not None] == plans
    assert core.stats().grammars.forced > 20  # type: ignore[union-attr]
    masks.close()


def test_those_who_decode_get_a_token_in_every_step_beside_a_run() -> None:
    masks = create_masks(WANTED)
    core = engine(masks=masks, num_blocks=400, max_model_len=300, budget=8)
    core.add(request(0, [1, 2], max_tokens=150, structured_outputs=WANTED[2]))
    core.add(request(1, [3, 4], max_tokens=60))
    plans = plans_of(core)
    answers = Answers()
    while core.has_work:
        answers.take(core.step())
    both = [plan for plan in plans if len(plan.counts) == 2]
    assert any(max(plan.counts) == 7 for plan in both) and all(sum(plan.counts) <= 8 for plan in plans)
    assert len(answers.tokens[1, 0]) == 60 and len(plans) < 75
    masks.close()


def test_prompts_that_came_earlier_do_not_hold_up_a_run() -> None:
    masks = create_masks(WANTED)
    core = engine(masks=masks, num_blocks=400, max_model_len=300, budget=16)
    core.add(request(1, range(10, 250), max_tokens=2))
    core.add(request(0, [1, 2], max_tokens=60, structured_outputs=WANTED[2]))
    plans = plans_of(core)
    while core.has_work:
        core.step()
    assert len(plans) < 26
    masks.close()


def single(matcher: object) -> int | None:
    """The one token that may come."""
    bits = int.from_bytes(matcher.compute_bitmask(), "little")  # type: ignore[attr-defined]
    return bits.bit_length() - 1 if bits.bit_count() == 1 else None


_NAMES = st.text("ab01_ éxyz ", min_size=1, max_size=14)
_SCHEMAS = st.recursive(
    st.one_of(
        st.sampled_from([{"type": "integer", "minimum": 0, "maximum": 9}, {"type": "null"}, {"type": "boolean"}]),
        st.builds(lambda text: {"const": text}, _NAMES),
        st.builds(lambda texts: {"enum": texts}, st.lists(_NAMES, min_size=1, max_size=3, unique=True)),
    ),
    lambda inner: st.builds(
        lambda fields: {"type": "object", "properties": fields, "required": [*fields], "additionalProperties": False},
        st.dictionaries(_NAMES, inner, min_size=1, max_size=3),
    ),
    max_leaves=5,
)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40, deadline=None)
@given(schema=_SCHEMAS, seed=st.integers(0, 99))
def test_a_run_is_what_the_masks_would_say_token_by_token(kind: str, schema: dict[str, object], seed: int) -> None:
    wanted = StructuredOutputs(json=json.dumps(schema))
    try:
        matcher = create_matcher(BRIDGED[kind], wanted, create_limits())
    except GrammarError:
        return
    draw, eos = random.Random(seed), set(VOCABULARIES[kind].eos)
    for _ in range(80):
        bits = int.from_bytes(matcher.compute_bitmask(), "little")
        run, alone = forced_run(matcher), matcher.deep_copy()
        for token in run:
            assert single(alone) == token, (schema, run)
            assert alone.consume_token(token)
        fine = [token for token in range(bits.bit_length()) if bits >> token & 1]
        token = draw.choice(fine)
        if token in eos or not matcher.consume_token(token) or matcher.is_stopped():
            break


@settings(max_examples=25, deadline=None)
@given(schema=_SCHEMAS, most=st.integers(1, 90), depth=st.integers(0, 2), many=st.integers(1, 3))
def test_any_schema_is_answered_the_same(schema: dict[str, object], most: int, depth: int, many: int) -> None:
    wanted = StructuredOutputs(json=json.dumps(schema))
    asked = [
        request(n, [1, 2, n], max_tokens=most, seed=n, structured_outputs=wanted, ignore_eos=False) for n in range(many)
    ]
    assert_the_same(asked, depth=depth)


def test_special_tokens_are_forced_as_well() -> None:
    matcher = create_matcher(TOKENIZER, WANTED[1], create_limits())
    assert forced_run(matcher)[0] == SPECIAL


# --- defects that must show


def _one_too_many(self: Roster, sequence: object, run: object) -> None:
    _force_tokens(self, sequence, (*run, 9))  # type: ignore[misc, arg-type]


def _without_limit(self: Roster, sequence: object, run: object) -> None:
    sequence.max_num_tokens = 290  # type: ignore[attr-defined]
    _force_tokens(self, sequence, run)  # type: ignore[arg-type]


def _row_is_forgotten(self: Roster, sequence: object, run: object) -> None:
    _force_tokens(self, sequence, run)  # type: ignore[arg-type]
    sequence.row_lags = False  # type: ignore[attr-defined]


def _place_is_forgotten(self: Roster, sequence: object, run: object) -> None:
    before = sequence.num_tokens  # type: ignore[attr-defined]
    _force_tokens(self, sequence, run)  # type: ignore[arg-type]
    sequence.num_tokens = before  # type: ignore[attr-defined]


_force_tokens = Roster.force_tokens


@pytest.mark.parametrize("defect", [_one_too_many, _without_limit, _row_is_forgotten, _place_is_forgotten])
@pytest.mark.parametrize("depth", [0, 1])
def test_a_planted_defect_shows(defect: object, depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Roster, "force_tokens", defect)
    with pytest.raises(Exception):  # noqa: B017
        for most in (12, 250):
            asked = [request(n, [1, 2, n], max_tokens=most, structured_outputs=WANTED[2 * n]) for n in range(2)]
            assert_the_same(asked, depth=depth)
