"""Text that a grammar forces, in the tokens that the model itself would write: every kind of tokenizer, whole
characters and parts of them."""

from __future__ import annotations

import gzip
import json
import lzma
import os
import random
from array import array
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.cache.manager import SequenceKV
from headrace.engine.grammar import (
    ForcedText,
    GrammarError,
    Vocabulary,
    create_limits,
    create_matcher,
    create_tokenizer,
    special_name,
    vocabulary_of,
)
from headrace.engine.grammar_masks import GrammarMasks
from headrace.engine.tokenizer import Tokenizer
from headrace.models.files import TokenizerFiles
from headrace.request import StructuredOutputs
from headrace.scheduler.events import AddRequest, RefuseRequest
from headrace.scheduler.roster import Sequence as LiveSequence
from tests.support.hash_engine import request
from tests.support.outside import shared
from unit.test_tokenizer import demo, spm

KINDS = {"bytes": demo(), "pieces": spm(), "pieces-no-prefix": spm(False)}
SPECIAL_TEXT = "<|im_end|>"
EVERY = 1 if os.environ.get("HEADRACE_ALL_SCHEMAS") else 60
TEXTS = st.text(max_size=12) | st.text("ab é🦙犬 \n", max_size=12) | st.just(f"x{SPECIAL_TEXT}</s>y")


def vocabulary(tokenizer: Tokenizer) -> Vocabulary:
    end = tokenizer.eos_token_id
    assert end is not None
    return vocabulary_of(tokenizer, tokenizer.vocab_size, (end,))


VOCABULARIES = {kind: vocabulary(tokenizer) for kind, tokenizer in KINDS.items()}
FORCED = {kind: ForcedText(each) for kind, each in VOCABULARIES.items()}
MASKS = {kind: GrammarMasks(partial(VOCABULARIES.__getitem__, kind)) for kind in KINDS}
BRIDGED = {kind: create_tokenizer(each) for kind, each in VOCABULARIES.items()}


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=80, deadline=None)
@given(text=TEXTS)
def test_forced_text_is_written_to_the_byte_and_never_by_special_tokens(kind: str, text: str) -> None:
    ids, known = FORCED[kind](text.encode()), VOCABULARIES[kind]
    assert b"".join(known.tokens[id] for id in ids) == text.encode()
    assert not {*ids} & {*known.special}


@settings(max_examples=80, deadline=None)
@given(text=TEXTS)
def test_forced_text_is_the_models_own_encoding(text: str) -> None:
    if SPECIAL_TEXT not in text:
        assert FORCED["bytes"](text.encode()) == KINDS["bytes"].encode(text, False)
        behind = KINDS["pieces-no-prefix"].encode("." + text, False)  # nothing merges with a full stop there
        assert (
            FORCED["pieces"](text.encode())
            == FORCED["pieces-no-prefix"](text.encode())
            == behind[behind.index(ord(".") + 3) + 1 :]
        )


def test_long_text_is_encoded_once() -> None:
    text = "temperature is 21 degrees; " * 400
    canonical = KINDS["bytes"].encode(text, False)
    assert FORCED["bytes"](text.encode()) == canonical
    calls = 0

    def encode(text: str) -> list[int]:
        nonlocal calls
        calls += 1
        return KINDS["bytes"].encode(text, False)

    forced = ForcedText(replace(VOCABULARIES["bytes"], encode=encode))
    for at in range(0, 200):
        assert forced(KINDS["bytes"].decode(canonical[at:]).encode()) == canonical[at:]
    assert calls == 1


def test_without_an_encoding_the_longest_token_is_taken_as_far_as_there_is_one() -> None:
    forced = ForcedText(Vocabulary([b"a", b"ab", b"b", b"<x>", b""], (3,), (3,)))
    assert forced(b"abba<x>") == [1, 2, 0] and forced(b"") == []


# --- followed


def allowed(mask: bytes) -> list[int]:
    return [8 * at + bit for at, byte in enumerate(mask) if byte for bit in range(8) if byte >> bit & 1]


ALIKE = "ab \U0001f600\U0001f601\U00010348犬é\ufffd<"


def answering(kind: str, wanted: StructuredOutputs) -> tuple[GrammarMasks, LiveSequence]:
    """A live answer, and whoever says what it may be."""
    masks, asked = MASKS[kind], request(1, [1], structured_outputs=wanted)
    masks.keep(())
    masks.begin(asked)
    (taken,) = masks.take_compiled(10.0)
    assert isinstance(taken, AddRequest), taken
    return masks, LiveSequence(asked, 0, frozenset(), 999, (), SequenceKV("", None, []), array("i", [1]))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40, deadline=None)
@given(texts=st.lists(st.text(ALIKE, min_size=1, max_size=6), min_size=1, max_size=4), seed=st.integers(0, 99))
def test_any_token_that_may_come_leads_to_a_choice(kind: str, texts: list[str], seed: int) -> None:
    """Characters that begin alike, whose bytes are tokens of their own: what is forced then begins within a
    character."""
    masks, sequence = answering(kind, StructuredOutputs(choice=tuple(texts)))
    draw = random.Random(seed)
    while sequence.token_ids[-1] not in VOCABULARIES[kind].eos or len(sequence.token_ids) == 1:
        fine = allowed(masks.masks([(0, sequence)]).words)
        assert fine, (texts, sequence.token_ids, masks.dead_end(1, 0))
        sequence.token_ids.append(draw.choice(fine))
    assert KINDS[kind].decode(sequence.token_ids[1:-1], False) in texts


@pytest.mark.parametrize("text", ["\U0001f600xy", "\U00010348xy"])
def test_what_is_forced_may_begin_within_a_character(text: str) -> None:
    """Two characters whose first byte is one: the second byte decides, and the third and all behind it are certain."""
    wanted = StructuredOutputs(choice=("\U0001f600xy", "\U00010348xy"))
    masks, asked = (
        GrammarMasks(lambda: Vocabulary([*(bytes([byte]) for byte in range(256)), b"<eos>"], (256,), (256,))),
        request(1, [1]),
    )
    masks.begin(replace(asked, params=replace(asked.params, structured_outputs=wanted)))
    assert isinstance(masks.take_compiled(10.0)[0], AddRequest)
    sequence = LiveSequence(asked, 0, frozenset(), 999, (), SequenceKV("", None, []), array("i", [1]))
    for byte in (*text.encode(), 256):
        assert byte in allowed(masks.masks([(0, sequence)]).words), sequence.token_ids
        sequence.token_ids.append(byte)
    masks.close()


def test_a_key_is_a_word_and_no_letters() -> None:
    schema = {
        "type": "object",
        "properties": {"temperature": {"type": "integer"}},
        "required": ["temperature"],
        "additionalProperties": False,
    }
    matcher = create_matcher(BRIDGED["bytes"], StructuredOutputs(json=schema), create_limits())  # type: ignore[arg-type]
    tokenizer = KINDS["bytes"]
    for token in tokenizer.encode('{"temperature": 21}', False):
        assert token in allowed(matcher.compute_bitmask()) and matcher.consume_token(token)
    matcher.reset()
    matcher.consume_tokens(tokenizer.encode('{"', False))
    assert [tokenizer.token_text(id) for id in allowed(matcher.compute_bitmask())] == ["temperature"]


def test_markers_are_tokens_whether_special_or_not() -> None:
    """A plain token of that text is its encoding; a special one is named, whatever it looks like."""
    tokenizer = KINDS["bytes"]
    calls = create_matcher(BRIDGED["bytes"], StructuredOutputs(grammar='start: "<tool_call>" /[a-z]/'), create_limits())
    assert allowed(calls.compute_bitmask()) == tokenizer.encode("<tool_call>", False)
    known = Vocabulary([*(bytes([byte]) for byte in range(256)), b"[CALLS]", b"<eos>"], (256, 257), (257,))
    named = create_matcher(
        create_tokenizer(known), StructuredOutputs(grammar=f'start: {special_name("[CALLS]")} "["'), create_limits()
    )
    assert allowed(named.compute_bitmask()) == [256] and named.consume_tokens([256, ord("[")]) and named.is_accepting()


# --- a space that is dropped


def begun(kind: str, wanted: StructuredOutputs) -> set[str]:
    """The texts of tokens that may begin an answer."""
    masks, sequence = answering(kind, wanted)
    first = allowed(masks.masks([(0, sequence)]).words)
    return {KINDS[kind].token_text(id) for id in first}


def test_a_space_that_is_dropped_may_begin_an_answer_and_must_where_the_text_has_one() -> None:
    assert begun("pieces", StructuredOutputs(regex="ab[cd]")) == {" ", "a", "ab", " a", " ab"}
    assert begun("pieces-no-prefix", StructuredOutputs(regex="ab[cd]")) == {"ab"}
    assert begun("pieces", StructuredOutputs(regex=" ?ab[cd]")) == {" ", "  ", " a", " ab"}


# --- what costs too much


@pytest.mark.parametrize(
    "schema", [{"pattern": "^(\\S+\\s+){0,99}\\S+$", "maxLength": 5000}, {"pattern": "^(\\S+\\s+){0,99}\\S+$"}], ids=str
)
def test_what_the_lexer_cannot_hold_is_refused_before_an_answer_begins(schema: dict[str, object]) -> None:
    """Or answered to its end."""
    wanted = StructuredOutputs(json={"type": "string", **schema})  # type: ignore[arg-type]
    masks, asked = MASKS["bytes"], request(1, [1], structured_outputs=wanted)
    masks.keep(())
    masks.begin(asked)
    (taken,) = masks.take_compiled(10.0)
    if "maxLength" in schema:
        assert isinstance(taken, RefuseRequest) and "too many" in taken.message
        return
    sequence = LiveSequence(asked, 0, frozenset(), 999, (), SequenceKV("", None, []), array("i", [1]))
    for token in [
        *KINDS["bytes"].encode('"the quick brown fox jumps over it and is gone"', False),
        VOCABULARIES["bytes"].eos[0],
    ]:
        assert token in allowed(masks.masks([(0, sequence)]).words)
        sequence.token_ids.append(token)


# --- real tokenizers


@pytest.mark.parametrize(
    "name", ["gpt-2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("llama-bpe", "qwen2"))]
)
def test_real_tokenizers_write_instances_of_schemas_as_they_would_themselves(name: str) -> None:
    """Whatever stands in a valid instance, all that its schema forces is the instance's own encoding."""
    folder = shared("data", "tokenizers", name)
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    with lzma.open(folder / "tokenizer.json.xz", "rt", encoding="utf-8") as file:
        tokenizer = Tokenizer(TokenizerFiles(name, file.read(), config))
    assert tokenizer.eos_token_id is not None
    bridged = create_tokenizer(vocabulary_of(tokenizer, tokenizer.vocab_size, (tokenizer.eos_token_id,)))
    with gzip.open(shared("data", "json_schemas", "maskbench_sample.jsonl.gz"), "rt", encoding="utf-8") as lines:
        cases = [json.loads(line) for line in list(lines)[::EVERY]]
    followed = 0
    for case in cases:
        try:
            matcher = create_matcher(bridged, StructuredOutputs(json=case["schema"]), create_limits())
        except GrammarError:
            continue
        for text in (json.dumps(test["data"], ensure_ascii=False) for test in case["tests"] if test["valid"]):
            matcher.reset()
            tokens = tokenizer.encode(text, False)[:150]
            for at, token in enumerate(tokens):
                mask = matcher.compute_bitmask()
                if matcher.is_error() or not matcher.validate_tokens(tokens[at : at + 1]):
                    break  # an instance whose keys come in another order, or one that the lexer cannot hold
                assert mask[token >> 3] >> (token & 7) & 1, (
                    case["id"],
                    tokenizer.decode(tokens[: at + 1]),
                    matcher.compute_ff_tokens(),
                )
                matcher.consume_token(token)
                followed += 1
    assert followed > 500
