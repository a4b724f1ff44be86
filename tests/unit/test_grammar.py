"""Grammars: what llguidance is told, what it may cost, and what is answered to those it cannot follow."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from array import array
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.cache.manager import SequenceKV
from headrace.engine import grammar_check, grammar_masks
from headrace.engine.fair_threads import QUICK_SECONDS
from headrace.engine.grammar import (
    GrammarError,
    Vocabulary,
    check_start,
    create_limits,
    create_matcher,
    create_tokenizer,
    vocabulary_of,
)
from headrace.engine.grammar_check import GrammarCheck
from headrace.engine.grammar_masks import GrammarMasks
from headrace.engine.output import refusal_of
from headrace.errors import InvalidRequest, ModelError
from headrace.processes import sandbox
from headrace.request import SamplingParams, StructuredOutputs
from headrace.scheduler.roster import Sequence as LiveSequence
from headrace.worker.host import process_memory
from tests.support.grammars import CONSTRAINTS, SPECIAL, create_masks, vocabulary
from tests.support.hash_engine import EOS, engine, request, run

BYTES = Vocabulary([bytes([byte]) for byte in range(256)] + [b"<eos>", b"<end>", b"", b""], (256, 257), (256, 257))
TOKENIZER = create_tokenizer(BYTES)


def allowed(matcher) -> set[int]:
    bits = int.from_bytes(matcher.compute_bitmask(), "little")
    return {token for token in range(8 * len(matcher.compute_bitmask())) if bits >> token & 1}


def start(**fields: object):
    matcher = create_matcher(TOKENIZER, StructuredOutputs(**fields), create_limits())  # type: ignore[arg-type]
    check_start(matcher)
    return matcher


def accepts(text: str, **fields: object) -> bool:
    matcher = start(**fields)
    data = list(text.encode())
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()


# --- the bridge


def test_an_answer_may_end_only_where_it_is_complete_and_must_where_nothing_follows() -> None:
    matcher = start(regex="ab?")
    assert allowed(matcher) == {ord("a")}
    matcher.consume_token(ord("a"))
    assert allowed(matcher) == {ord("b"), 256, 257}
    matcher.consume_token(ord("b"))
    assert allowed(matcher) == {256, 257}


def test_ids_without_a_token_are_never_allowed_and_special_ones_only_by_name() -> None:
    tokenizer = create_tokenizer(vocabulary())
    anything = create_matcher(tokenizer, StructuredOutputs(regex="(.|\n)*"), create_limits())
    assert not allowed(anything) & ({*range(SPECIAL + 1), *range(300, 512)} - {EOS})
    named = create_matcher(tokenizer, StructuredOutputs(grammar="start: <|x|>"), create_limits())
    assert allowed(named) == {SPECIAL}
    written = create_matcher(tokenizer, StructuredOutputs(choice=("<|x|>",)), create_limits())
    assert allowed(written) == {8 + ord("<")}  # its letters, never the token


@settings(max_examples=50, deadline=None)
@given(st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=5, unique=True))
def test_a_choice_is_each_of_its_texts_and_nothing_else(texts: list[str]) -> None:
    for text in texts:
        assert accepts(text, choice=tuple(texts))
    assert not accepts("".join(texts) + "!", choice=tuple(texts))


@pytest.mark.parametrize(
    ("fields", "good", "bad"),
    [
        ({"json_object": True}, '{"a": [1, null]}', "[1]"),
        ({"json": "true"}, "[1, {}]", "x"),
        ({"json": {"type": "integer", "minimum": 3}}, "12", "2"),
        ({"json": {"type": "object"}}, '{\n    "a": 1\n}', '{"a": 1'),
        (
            {"json": {"type": "object"}},
            '{"a":\n' + " " * 40 + "1}",
            '{"a":\n' + " " * 41 + "1}",
        ),  # indentation ends somewhere
        ({"json": {"type": "object"}}, '{ "a" : 1 }', '{"a":  1}'),
        ({"regex": "[0-9]{2}"}, "12", "123"),
        ({"regex": ""}, "", "a"),
        ({"grammar": 'start: "a" start | "b"'}, "aab", "ba"),
        ({"grammar": 'root ::= "a" root | "b"'}, "aab", "ba"),
    ],
)
def test_every_kind_of_constraint(fields: dict[str, object], good: str, bad: str) -> None:
    assert accepts(good, **fields) and not accepts(bad, **fields)


def test_a_tokenizer_that_does_not_say_what_its_tokens_write_is_refused() -> None:
    with pytest.raises(GrammarError, match="no tokenizer"):
        vocabulary_of(None, 10, (1,))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "holds nothing"),
        ({"regex": "a", "json_object": True}, "holds regex and json_object"),
        ({"regex": 5}, "must be a text"),
        ({"json": [1]}, "must be a text"),
        ({"choice": "ab"}, "list of at most"),
        ({"choice": [""]}, "non-empty"),
        ({"json": {"a": float("nan")}}, "plain JSON"),
        ({"regex": "a" * (2**20 + 1)}, "1048577 characters"),
        ({"regex": "\ud800"}, "lone surrogate"),
        ({"json_object": "yes"}, "true or false"),
    ],
)
def test_what_is_no_constraint_is_said(fields: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        StructuredOutputs(**fields)  # type: ignore[arg-type]
    assert (caught.value.param or "").startswith("structured_outputs")


def test_what_would_leave_no_token_is_not_combined() -> None:
    with pytest.raises(InvalidRequest, match="may leave no token"):
        SamplingParams(structured_outputs=StructuredOutputs(regex="a"), allowed_token_ids=[1])  # type: ignore[arg-type]


# --- trying out


@pytest.fixture(scope="module")
def check() -> Iterator[GrammarCheck]:
    made = GrammarCheck(["<|x|>"])
    yield made
    made.close()


def refusal(check: GrammarCheck, **fields: object) -> str:
    with pytest.raises(InvalidRequest) as caught:
        check.require(StructuredOutputs(**fields))  # type: ignore[arg-type]
    assert (
        caught.value.param == "structured_outputs"
        and len(caught.value.message) < 500
        and "backtrace" not in caught.value.message
    )
    return caught.value.message


DEEP = 30_000
BOMBS: dict[str, dict[str, object]] = {
    "nested repeats": {"regex": "(a+)+b"},
    "parentheses": {"regex": "(" * DEEP + "a" + ")" * DEEP},
    "lark parentheses": {"grammar": "start: " + "(" * DEEP + '"a"' + ")" * DEEP},
    "BNF parentheses": {"grammar": "root ::= " + "(" * DEEP + '"a"' + ")" * DEEP},
    "repeated repeats": {"regex": "(((a{1,1000}){1,1000}){1,1000}){1,1000}b"},
    "brackets": {"json": "[" * 100_000},
    "deep items": {"json": '{"items":' * DEEP + "{}" + "}" * DEEP},
    "endless reference": {"json": '{"$ref": "#"}'},
    "reference to itself in parts": {
        "json": {"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}]}}}
    },
    "large enum": {"json": {"enum": list(range(100_000))}},
    "many choices": {"choice": [f"v{index}" for index in range(100_000)]},
    "branches of branches": {
        "json": {
            "properties": {
                f"k{i}": {"anyOf": [{"properties": {f"z{j}": {} for j in range(30)}}] * 10} for i in range(60)
            },
            "type": "object",
        }
    },
    "long strings": {"json": '{"type": "string", "minLength": 1000000000}'},
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_are_followed_or_refused_in_bounded_time(name: str, check: GrammarCheck) -> None:
    begin = time.perf_counter()
    try:
        check.require(StructuredOutputs(**BOMBS[name]))  # type: ignore[arg-type]
    except InvalidRequest as error:
        assert error.param == "structured_outputs" and len(error.message) < 500
    assert time.perf_counter() - begin < 10.0  # 2 s of CPU, on a machine that others use too
    check.require(StructuredOutputs(regex="still [a-z]+"))


def test_too_much_time_is_said_and_the_next_one_is_served() -> None:
    check = GrammarCheck([], seconds=0.02)
    assert "more than 0.02 s of CPU time" in refusal(check, choice=[f"v{index}" for index in range(20_000)])
    check.require(StructuredOutputs(regex="a"))
    check.close()


def test_a_short_trial_waits_for_no_process_that_a_long_one_took(monkeypatch: pytest.MonkeyPatch) -> None:
    """Starting another takes longer than the trial."""
    started, long_choice = list[str](), StructuredOutputs(choice=tuple(f"v{index}" for index in range(20_000)))
    start = sandbox.Sandbox.__init__

    def noted(self: sandbox.Sandbox, *given: Any, **named: Any) -> None:
        started.append(threading.current_thread().name)
        start(self, *given, **named)

    monkeypatch.setattr(sandbox.Sandbox, "__init__", noted)

    async def short_beside_long() -> None:
        await check.require_soon(StructuredOutputs(regex="a"))
        long = asyncio.create_task(check.require_soon(long_choice))
        while len(started) < 2 and not long.done():
            await asyncio.sleep(0.001)
        await check.require_soon(StructuredOutputs(regex="ab"))
        await long

    check = GrammarCheck([])
    asyncio.run(short_beside_long())
    assert [name.rpartition("_")[0] for name in started] == ["headrace-grammar", "headrace-long-grammar"]
    assert check.require(StructuredOutputs(regex="ab")) < QUICK_SECONDS < check.require(long_choice)
    check.close()


def test_reasons_are_sentences_of_one_line(check: GrammarCheck) -> None:
    assert "unclosed group" in refusal(check, regex="(")
    assert "look-around" in refusal(check, regex="(?=a)b")
    assert "Unimplemented keys" in refusal(check, json={"type": "array", "uniqueItems": True})
    assert "nothing satisfies it" in refusal(check, json={"$ref": "#"})
    assert "unknown name" in refusal(check, grammar="start: x")
    assert "BNF" in refusal(check, grammar='root ::= (("a"')
    assert "\n" not in refusal(check, regex="a\n(")


def test_verdicts_are_remembered_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_check, "MAX_VERDICTS", 50)
    check = GrammarCheck([])
    for index in range(100):
        check.require(StructuredOutputs(regex=f"a{{{index}}}"))
    assert len(check._verdicts) == 50
    check._pool.close()  # what is remembered asks no process
    begin = time.perf_counter()
    for index in range(50, 100):
        check.require(StructuredOutputs(regex=f"a{{{index}}}"))
    assert time.perf_counter() - begin < 0.05 and not check._pool._idle
    check.close()


def test_the_event_loop_goes_on_while_a_grammar_is_tried_out() -> None:
    check = GrammarCheck([])

    async def both() -> int:
        task = asyncio.create_task(check.require_soon(StructuredOutputs(choice=tuple(f"v{i}" for i in range(20_000)))))
        turns = 0
        while not task.done():
            await asyncio.sleep(0.001)
            turns += 1
        await task
        return turns

    assert asyncio.run(both()) > 10
    check.close()


# --- whatever is asked for: refused, or followed

_ODD = st.sampled_from(
    [
        None,
        "",
        "a",
        "{}",
        "[]",
        "true",
        "null",
        0,
        5,
        True,
        False,
        [],
        {},
        ["a"],
        ["a", "ab", ""],
        {"type": 5},
        {"enum": []},
        "\x00",
    ]
)
_PATTERNS = st.text(alphabet="ab01()[]*+?{}|\\\\.^$,-", max_size=14)
_SCHEMAS = st.recursive(
    st.sampled_from(
        [
            {},
            {"type": "null"},
            {"type": "string", "maxLength": 2},
            {"const": "a"},
            {"type": ["integer", "null"]},
            {"$ref": "#"},
            {"enum": [1, "b"]},
        ]
    ),
    lambda inner: st.one_of(
        st.fixed_dictionaries({"type": st.just("array"), "items": inner, "maxItems": st.integers(0, 2)}),
        st.fixed_dictionaries(
            {
                "type": st.just("object"),
                "properties": st.dictionaries(st.sampled_from("ab"), inner),
                "required": st.just(["a"]),
            }
        ),
        st.dictionaries(
            st.sampled_from(["anyOf", "allOf", "oneOf"]), st.lists(inner, max_size=2), min_size=1, max_size=1
        ),
    ),
    max_leaves=4,
)
FIELDS = st.one_of(
    st.dictionaries(st.sampled_from(["json", "json_object", "regex", "choice", "grammar"]), _ODD, max_size=2),
    st.builds(lambda pattern: {"regex": pattern}, _PATTERNS),
    st.builds(lambda pattern: {"grammar": f"start: /{pattern}/"}, _PATTERNS),
    st.builds(lambda schema: {"json": schema}, _SCHEMAS),
)


def follow_or_refuse(check: GrammarCheck, fields: dict[str, object], min_tokens: int, ignore_eos: bool) -> bool:
    """Whether it was followed; then the answer must be what was asked for, or its beginning."""
    try:
        wanted = StructuredOutputs(**fields)  # type: ignore[arg-type]
        check.require(wanted)
    except InvalidRequest as error:
        assert error.param and error.param.startswith("structured_outputs")
        return False
    masks = GrammarMasks(vocabulary)
    core = engine(masks=masks, depth=1)
    core.add(request(0, [1, 2], max_tokens=12, min_tokens=min_tokens, ignore_eos=ignore_eos, structured_outputs=wanted))
    answers = run(core)
    masks.close()
    tokens, finished = [token for token in answers.tokens[0, 0] if token != EOS], answers.finished[0, 0]
    matcher = create_matcher(create_tokenizer(vocabulary()), wanted, create_limits())
    assert matcher.try_consume_tokens(tokens) == len(tokens), (fields, tokens)
    assert finished.reason.value == "length" or (finished.reason.value == "stop" and matcher.is_accepting()), finished
    return True


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(fields=FIELDS, min_tokens=st.sampled_from([0, 5]), ignore_eos=st.booleans())
def test_whatever_is_asked_for_is_refused_or_followed(
    check: GrammarCheck, fields: dict[str, object], min_tokens: int, ignore_eos: bool
) -> None:
    follow_or_refuse(check, fields, min_tokens, ignore_eos)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@settings(max_examples=5000, deadline=None, suppress_health_check=list(HealthCheck))
@given(fields=FIELDS, min_tokens=st.sampled_from([0, 5]), ignore_eos=st.booleans())
def test_whatever_is_asked_for_five_thousand_times(
    check: GrammarCheck, fields: dict[str, object], min_tokens: int, ignore_eos: bool
) -> None:
    follow_or_refuse(check, fields, min_tokens, ignore_eos)


# --- in the engine


def test_compiled_grammars_are_kept_by_size() -> None:
    masks = GrammarMasks(vocabulary, cache_bytes=3 * 2**20)
    core = engine(masks=masks)
    for index in range(40):
        core.add(
            request(index, [1, 2], max_tokens=6, structured_outputs=StructuredOutputs(regex=f"[ab]{{{index + 1}}}"))
        )
    answers = run(core)
    assert len(answers.finished) == 40
    stats = core.stats().grammars
    assert stats is not None and stats.compiled == 40 and stats.cached_bytes <= 3 * 2**20 and 5 < stats.cached < 40
    assert stats.masks > 40 and stats.mask_seconds > 0 and not masks._live
    core.add(request(100, [1, 2], max_tokens=6, structured_outputs=StructuredOutputs(regex="[ab]{40}")))
    run(core)
    assert core.stats().grammars.compiled == 40  # type: ignore[union-attr]  # the last one was there
    masks.close()


@pytest.mark.parametrize(("alone", "threads"), [(32, 2), (0, 2), (0, 1)], ids=["one by one", "in threads", "one core"])
def test_masks_of_many_rows_are_those_of_each(alone: int, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However they are made: with constraints side by side, some at their start, some on their way, one that has left
    its grammar."""
    monkeypatch.setattr(grammar_masks, "_ROWS_ALONE", alone)
    masks = create_masks()
    masks._threads = threads
    written = ([], [0], [1], [0], [], [200], [1])
    sequences = []
    for index, tokens in enumerate(written):
        asked = request(index, [1], structured_outputs=CONSTRAINTS[index % len(CONSTRAINTS)], ignore_eos=False)
        masks.begin(asked)
        masks.take_compiled(1.0)
        sequences.append(LiveSequence(asked, 0, frozenset(), 99, (), SequenceKV("", None, []), array("i", [1])))
        for place in tokens:  # the so many-th of the tokens that may come
            words = np.frombuffer(masks.masks([(0, sequences[-1])]).words, dtype=np.uint32)
            fine = [token for token in range(32 * len(words)) if words[token >> 5] >> np.uint32(token & 31) & 1]
            sequences[-1].token_ids.append(fine[place] if place < len(fine) else 7)
    together = masks.masks(list(enumerate(sequences)))
    assert together.samples == tuple(range(len(written)))
    rows = np.frombuffer(together.words, dtype=np.uint32).reshape(len(written), -1)
    for row, sequence in zip(rows, sequences, strict=True):
        assert row.tobytes() == masks.masks([(0, sequence)]).words
    assert [bool(row.any()) for row in rows] == [True] * 5 + [False, True] and len({row.tobytes() for row in rows}) > 4


def test_what_this_vocabulary_cannot_write_ends_with_a_reason_and_nobody_else_does() -> None:
    masks = create_masks()
    core = engine(masks=masks)
    core.add(request(0, [1, 2], structured_outputs=StructuredOutputs(grammar="start: <|unheard|>")))
    core.add(request(1, [1, 2], structured_outputs=StructuredOutputs(regex="[ab]+")))
    answers = run(core)
    assert (
        "unknown special token" in (answers.finished[0, 0].message or "")
        and answers.finished[0, 0].param == "structured_outputs"
    )
    assert isinstance(refusal_of(answers.finished[0, 0]), InvalidRequest)
    assert len(answers.tokens[1, 0]) == 8


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize(
    ("fields", "written"),
    [
        *(
            ({"regex": "ab☃b"}, 0),
            ({"grammar": 'start: "ab" X\nX: "☃"'}, 0),
            ({"json": {"enum": ["☃"]}}, 0),
            ({"regex": "[☃é]"}, 0),
        ),
        ({"regex": "(ab){20}☃b"}, 40),  # further on than grammars are tried
    ],
)
def test_where_no_token_leads_on_an_answer_neither_ends_nor_leaves_its_grammar(
    fields: dict[str, object], written: int, depth: int
) -> None:
    """A vocabulary of ASCII alone, as of a model whose tokens do not hold every byte."""
    ascii_alone = replace(vocabulary(), tokens=[token if token.isascii() else b"" for token in vocabulary().tokens])
    masks = GrammarMasks(lambda: ascii_alone)
    core = engine(masks=masks, depth=depth)
    core.add(request(0, [1, 2], n=2, max_tokens=60, structured_outputs=StructuredOutputs(**fields)))  # type: ignore[arg-type]
    core.add(request(1, [1, 2], structured_outputs=StructuredOutputs(regex="[ab]+")))
    core.add(request(2, [1, 2]))
    answers = run(core)
    for index in range(2):
        ended = answers.finished[0, index]
        assert sum(len(ascii_alone.tokens[token]) for token in answers.tokens[0, index]) == written
        assert ended.param == "structured_outputs" and "cannot be followed" in (ended.message or ""), ended
        told = refusal_of(ended)
        assert isinstance(told, InvalidRequest) and told.status == 400
    assert len(answers.tokens[1, 0]) == len(answers.tokens[2, 0]) == 8
    masks.close()


def test_a_vocabulary_that_is_gone_ends_the_request_that_asked_for_it_and_nobody_else() -> None:
    there = iter((OSError("/secret/tokenizer.json"), ModelError("/secret/tokenizer.json is gone")))

    def vanished() -> Vocabulary:
        error = next(there, None)
        if error is None:
            return vocabulary()
        raise error

    masks = GrammarMasks(vanished)
    core = engine(masks=masks)
    for request_id in range(3):
        core.add(request(request_id, [1, 2], structured_outputs=StructuredOutputs(regex="a+"), max_tokens=2))
        core.add(request(10 + request_id, [3, 4], max_tokens=2))
    finished = {request_id: each for (request_id, _), each in run(core).finished.items()}
    assert [finished[each].reason.value for each in (0, 1, 2, 10, 11, 12)] == [
        "error",
        "error",
        "length",
        "length",
        "length",
        "length",
    ]
    assert "OSError" in (finished[0].message or "") and "secret" not in f"{finished[0].message}{finished[1].message}"
    masks.close()


def test_a_request_that_leaves_while_it_is_compiled_never_begins() -> None:
    masks = GrammarMasks(vocabulary)
    core = engine(masks=masks)
    core.add(
        request(
            0, [1, 2], structured_outputs=StructuredOutputs(json=json.dumps({"enum": [str(i) for i in range(3000)]}))
        )
    )
    core.abort(0)
    assert not run(core).tokens and not masks._live
    masks.close()


def test_long_grammars_wait_for_themselves_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there are: whoever asks for a short one has it at once."""
    masks, gate = GrammarMasks(vocabulary), threading.Event()
    compiled = masks._compile

    def compile_slowly(wanted: StructuredOutputs):
        assert not wanted.choice or gate.wait(10)
        return compiled(wanted)

    monkeypatch.setattr(masks, "_compile", compile_slowly)
    for index in range(4):
        long = request(index, [1, 2], structured_outputs=StructuredOutputs(choice=("a", f"b{index}")))
        masks.begin(replace(long, grammar_seconds=1.0))
    masks.begin(request(9, [1, 2], structured_outputs=StructuredOutputs(regex="a+")))
    assert [event.request.request_id for event in masks.take_compiled(5.0)] == [9] and masks.stats.compiling == 4
    gate.set()
    masks.close()


def test_an_engine_without_masks_refuses() -> None:
    with pytest.raises(InvalidRequest, match="follows no grammars"):
        engine().add(request(0, [1], structured_outputs=StructuredOutputs(regex="a")))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ten_thousand_different_schemas_take_no_more_than_the_first_thousands(check: GrammarCheck) -> None:
    masks = GrammarMasks(vocabulary, cache_bytes=64 * 2**20)
    core, held = engine(masks=masks, depth=1), []
    for index in range(10_000):
        properties = {f"k{index}": {"type": "string", "maxLength": index % 50 + 1}, "n": {"enum": [index, index + 1]}}
        wanted = StructuredOutputs(json={"type": "object", "properties": properties, "required": ["n"]})  # type: ignore[arg-type]
        check.require(wanted)
        core.add(request(index, [1, 2], max_tokens=3, structured_outputs=wanted))
        if index % 8 == 7:
            run(core)
        if index % 2500 == 2499:
            held.append(process_memory())
    masks.close()
    assert held[-1] - held[0] < 16 * 2**20, held
