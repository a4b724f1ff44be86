"""What llguidance is told: a constraint as its grammar, a tokenizer as its vocabulary, and how much work it may do.

It is imported with the first constraint: an engine that is asked for none runs on a machine that lacks it.

What lives here: the bridge, alike in the process that tries a grammar out and in the engine that follows it. What may not: processes,
threads, caches, tokens of a running answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING, Protocol

from headrace.sampling_params import StructuredOutputs

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

# Between the parts of a JSON text: a space, or a new line and its indentation. What has no end a model may never end.
_WHITESPACE = r"( |\r?\n[ \t]{0,40})?"
_MAX_REASON = 300  # characters
_NOTHING = "nothing satisfies it, or nothing that this model's tokens can write"
_NAMEABLE = re.compile(r"<[^<>\s]+>")  # a special token's name in Lark
_JSON_OBJECT = '{"type": "object"}'


class GrammarError(Exception):
    """The constraint cannot be followed; the text says why, as a clause."""


def create_limits() -> LLParserLimits:
    """Work that one grammar may cause: about 20 ms to build its lexer, and about 15 ms for a mask, whatever the grammar.

    A state of the lexer takes one to two kB.
    """
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=50_000,
        max_items_in_row=2_000,
        max_lexer_states=50_000,
        max_grammar_size=500_000,
        verbose_errors=False,
    )


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """``tokens[id]``: the bytes of each column of the logits, empty where there is no token: such an id is never allowed.

    A special token has its name there, and is allowed only where a grammar names it. ``eos`` are ids that end an answer.
    """

    tokens: Sequence[bytes]
    special: Sequence[int]
    eos: Sequence[int]


class Writes(Protocol):
    """What a vocabulary needs of a tokenizer."""

    @property
    def special_token_ids(self) -> frozenset[int]: ...

    @property
    def composes(self) -> bool: ...

    def token_bytes(self, token: int) -> bytes: ...


def vocabulary_of(tokenizer: Writes | None, width: int, eos: Sequence[int]) -> Vocabulary:
    """Of logits with ``width`` columns. Raises GrammarError when tokens do not say what they write."""
    if tokenizer is None:
        raise GrammarError("the model has no tokenizer")
    if not tokenizer.composes:
        raise GrammarError("what this model's tokenizer writes is not its tokens' texts put together")
    tokens = [tokenizer.token_bytes(token) for token in range(width)]
    special = {token for token in tokenizer.special_token_ids if token < width}
    ends = sorted(token for token in eos if token < width)
    return Vocabulary(tokens, sorted(special.union(ends)), ends)


def special_name(text: str) -> str:
    """What a grammar calls the special token that is written ``text``: only what stands in angle brackets has a name in Lark."""
    return text if _NAMEABLE.fullmatch(text) else f"<{text.encode().hex()}>"


@dataclass(slots=True)
class _Wrapped:
    """A vocabulary as llguidance asks for it. It encodes what a grammar forces, as far as it can be written, a token for each byte."""

    tokens: list[bytes]
    special_token_ids: list[int]
    eos_token_id: int
    bos_token_id: int | None = None
    first: dict[int, int] = field(default_factory=dict)  # byte → the id of that byte alone

    def __call__(self, text: bytes) -> list[int]:
        return [self.first[byte] for byte in takewhile(self.first.__contains__, text)]


def create_tokenizer(vocabulary: Vocabulary) -> LLTokenizer:
    from llguidance import LLTokenizer, TokenizerWrapper

    special = set(vocabulary.special)
    first = {token[0]: id for id, token in enumerate(vocabulary.tokens) if len(token) == 1 and id not in special}
    tokens = list(vocabulary.tokens)
    for id in special:
        tokens[id] = special_name(tokens[id].decode("utf-8", "replace")).encode() if tokens[id] else b""
    wrapped = _Wrapped(tokens, sorted(special), vocabulary.eos[0], first=first)
    return LLTokenizer(TokenizerWrapper(wrapped), eos_token=list(vocabulary.eos))


def grammar_of(wanted: StructuredOutputs) -> str:
    """The constraint in llguidance's terms, behind what may stand before it. Raises GrammarError for a schema that is no JSON."""
    answer = _answer_of(wanted)
    if not wanted.preface:
        return answer
    own = {"lark_grammar": answer} if wanted.grammar is not None else json.loads(answer)["grammars"][0]
    return json.dumps({"grammars": [{"lark_grammar": wanted.preface}, {**own, "name": "answer"}]})


def _answer_of(wanted: StructuredOutputs) -> str:
    from llguidance import LLMatcher

    if wanted.regex is not None:
        return LLMatcher.grammar_from_regex(wanted.regex)
    if wanted.grammar is not None:
        return LLMatcher.grammar_from_lark(_lark(wanted.grammar))
    if wanted.choice:
        return LLMatcher.grammar_from_regex("|".join(map(_literal, wanted.choice)))
    schema = _JSON_OBJECT if wanted.json is None else "{}" if wanted.json.strip() == "true" else wanted.json
    try:
        return LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_pattern": _WHITESPACE})
    except ValueError as error:
        raise GrammarError(f"the schema is no JSON object: {_short(str(error))}") from None


def _literal(text: str) -> str:
    """A regular expression for this text alone."""
    return "".join(character if character.isalnum() else f"\\x{{{ord(character):x}}}" for character in text)


def _lark(grammar: str) -> str:
    """Lark as it is; the BNF of llama.cpp ("root ::= …") in Lark's terms."""
    if "::=" not in grammar or grammar.startswith("start:"):
        return grammar
    from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark

    try:
        return gbnf_to_lark(grammar)
    except (GbnfToLarkError, RecursionError) as error:
        raise GrammarError(f"the BNF cannot be read: {_short(str(error) or 'it is too deep')}") from None


def create_matcher(tokenizer: LLTokenizer, wanted: StructuredOutputs, limits: LLParserLimits) -> LLMatcher:
    """A matcher at the start of an answer. Raises GrammarError."""
    from llguidance import LLMatcher

    matcher = LLMatcher(tokenizer, grammar_of(wanted), log_level=0, limits=limits)
    if matcher.is_error():
        raise GrammarError(_short(matcher.get_error()))
    return matcher


def check_start(matcher: LLMatcher) -> bytes:
    """The first token's mask. Raises GrammarError when no token may begin an answer, or finding out which takes too much."""
    mask = matcher.compute_bitmask()
    reason = why_stuck(matcher)
    if reason is not None or not any(mask):
        raise GrammarError(reason or _NOTHING)
    return mask


def why_stuck(matcher: LLMatcher) -> str | None:
    """Why nothing may follow, as a clause, of a matcher that has left its grammar or found no way on; None: it goes on."""
    if not matcher.is_error():
        return None
    return _NOTHING if "NoExtension" in matcher.get_error() else _short(matcher.get_error())


def _short(reason: str) -> str:
    """A library's message as a clause of one line."""
    if reason.startswith("panic"):
        return "the grammar compiler gave up on it"
    line = " ".join(reason.replace("<non-verbose/>", "").split()).rstrip(".")
    return line if len(line) <= _MAX_REASON else line[:_MAX_REASON] + "…"
