"""What llguidance is told: a constraint as its grammar, a tokenizer as its vocabulary, and how much work it may do.

It is imported with the first constraint: an engine that is asked for none runs on a machine that lacks it.

What lives here: the bridge, alike in the process that tries a grammar out and in the engine that follows it. What may
not: processes, threads, caches, tokens of a running answer.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from headrace.request import StructuredOutputs

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

    from headrace.engine.tokenizer import Tokenizer

# Between the parts of a JSON text: a space, or a new line and its indentation. What has no end a model may never end.
_WHITESPACE = r"( |\r?\n[ \t]{0,40})?"
_MAX_REASON = 300  # characters
_NOTHING = "nothing satisfies it, or nothing that this model's tokens can write"
_LONG, _MOST_LONG = 4096, 16  # bytes of a forced text whose encoding is kept, how many of these
# A tokenizer may begin a text with a space of its own, or drop one: then it is asked for the text after something that
# it keeps apart.
_BEFORE = ("", "\x02", "\n", ".")
_NAMEABLE = re.compile(r"<[^<>\s]+>")  # a special token's name in Lark
_JSON_OBJECT = '{"type": "object"}'
MIN_RUN = 2  # tokens, the one that is sampled among them: each further one spares a step
MAX_RUN = 64  # tokens told at once: each holds up the loop for 10 to 30 µs; what follows is found with the next mask


class GrammarError(Exception):
    """The constraint cannot be followed; the text says why, as a clause."""


def create_limits() -> LLParserLimits:
    """Work that one grammar may cause: about 20 ms to build its lexer, and about 15 ms for a mask, whatever the
    grammar.

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
    """``tokens[id]``: the bytes of each column of the logits, empty where there is no token: such an id is never
    allowed.

    A special token has its name there, and is allowed only where a grammar names it. ``eos`` are ids that end an
    answer. ``encode``: the model's own encoding of a text; without it the longest token that fits is taken.
    ``drops_first_space``: a space at the very beginning of an answer's tokens is none of its text.
    """

    tokens: Sequence[bytes]
    special: Sequence[int]
    eos: Sequence[int]
    encode: Callable[[str], Sequence[int]] | None = None
    drops_first_space: bool = False


def vocabulary_of(tokenizer: Tokenizer | None, width: int, eos: Sequence[int]) -> Vocabulary:
    """Of logits with ``width`` columns. Raises GrammarError when tokens do not say what they write."""
    if tokenizer is None:
        raise GrammarError("the model has no tokenizer")
    if not tokenizer.composes:
        raise GrammarError("what this model's tokenizer writes is not its tokens' texts put together")
    tokens = [tokenizer.token_bytes(token) for token in range(width)]
    special = {token for token in tokenizer.special_token_ids if token < width}
    ends = sorted(token for token in eos if token < width)
    encode = partial(tokenizer.encode, add_special_tokens=False)
    return Vocabulary(tokens, sorted(special.union(ends)), ends, encode, tokenizer.drops_first_space)


def special_name(text: str) -> str:
    """What a grammar calls the special token that is written ``text``: only what stands in angle brackets has a name in
    Lark."""
    return text if _NAMEABLE.fullmatch(text) else f"<{text.encode().hex()}>"


class ForcedText:
    """Text that a grammar forces, in the tokens that the model itself would write: llguidance calls this with what
    stands before it, too."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._tokens = vocabulary.tokens
        self._special = frozenset(vocabulary.special)
        self._encode = vocabulary.encode
        plain = [(token, id) for id, token in enumerate(vocabulary.tokens) if token and id not in self._special]
        self._ids = dict(plain)
        self._longest = max((len(token) for token, _ in plain), default=0)
        names = sorted(
            (re.escape(vocabulary.tokens[id].decode("utf-8", "replace")) for id in self._special), key=len, reverse=True
        )
        self._names = re.compile("|".join(name for name in names if name) or "(?!)")
        # texts that would take long to encode at each of their tokens
        self._long: OrderedDict[bytes, list[int]] = OrderedDict()

    def __call__(self, data: bytes) -> list[int]:
        """As far as it can be written."""
        if len(data) < _LONG:
            return self._of(data.decode())
        for text, ids in list(self._long.items()):  # threads share it
            if text.endswith(data):
                begins = accumulate((len(self._tokens[id]) for id in ids), initial=0)
                at = next((index for index, begin in enumerate(begins) if begin == len(text) - len(data)), None)
                if at is not None:
                    return ids[at:]
        ids = self._long[data] = self._of(data.decode())
        if len(self._long) > _MOST_LONG:
            self._long.popitem(last=False)
        return ids

    def _of(self, text: str) -> list[int]:
        if self._encode is not None:
            for before in _BEFORE:
                ids = self._behind(before, text)
                if ids is not None:
                    return ids
        return self._greedily(text.encode())

    def _behind(self, before: str, text: str) -> list[int] | None:
        """The tokens of ``text`` where it stands after ``before``; None where they do not write it, to the byte."""
        assert self._encode is not None
        whole = before + text
        ids = self._encode(whole)
        if not self._special.isdisjoint(ids):  # their names, in an answer, are text like any other
            cuts = [0, *(found.start() + 1 for found in self._names.finditer(whole)), len(whole)]
            ids = [id for begin, end in pairwise(cuts) for id in self._encode(whole[begin:end])]
        lead, written = 0, b""
        while before and lead < len(ids) and written.lstrip(b" ") != before.encode():
            written += self._tokens[ids[lead]]
            lead += 1
        fits = self._special.isdisjoint(ids) and b"".join([self._tokens[id] for id in ids[lead:]]) == text.encode()
        return list(ids[lead:]) if fits else None

    def _greedily(self, data: bytes) -> list[int]:
        ids, begin = [], 0
        while begin < len(data):
            ends = range(min(len(data), begin + self._longest), begin, -1)
            end = next((end for end in ends if data[begin:end] in self._ids), None)
            if end is None:
                break
            ids.append(self._ids[data[begin:end]])
            begin = end
        return ids


@dataclass(frozen=True, slots=True)
class _Wrapped:
    """A vocabulary as llguidance asks for it."""

    tokens: list[bytes]
    special_token_ids: list[int]
    eos_token_id: int
    encode: ForcedText
    bos_token_id: int | None = None

    def __call__(self, text: bytes) -> list[int]:
        return self.encode(text)


def create_tokenizer(vocabulary: Vocabulary) -> LLTokenizer:
    from llguidance import LLTokenizer, TokenizerWrapper

    special = sorted(set(vocabulary.special))
    tokens = list(vocabulary.tokens)
    for id in special:
        tokens[id] = special_name(tokens[id].decode("utf-8", "replace")).encode() if tokens[id] else b""
    wrapped = _Wrapped(tokens, special, vocabulary.eos[0], ForcedText(vocabulary))
    return LLTokenizer(TokenizerWrapper(wrapped), eos_token=list(vocabulary.eos))


def characters(wanted: StructuredOutputs) -> int:
    """Of all texts that it is made of."""
    return sum(map(len, filter(None, (wanted.json, wanted.regex, wanted.grammar, wanted.preface, *wanted.choice))))


def grammar_of(wanted: StructuredOutputs) -> str:
    """The constraint in llguidance's terms, after what may stand before it. Raises GrammarError for a schema that is
    no JSON."""
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


def create_matcher(
    tokenizer: LLTokenizer, wanted: StructuredOutputs, limits: LLParserLimits, *, lead: str = ""
) -> LLMatcher:
    """A matcher at the start of an answer, or of what ``lead``, in Lark, says may stand there. Raises GrammarError."""
    from llguidance import LLMatcher

    grammar = grammar_of(wanted)
    if lead:
        parts = json.loads(grammar)["grammars"] if grammar.startswith("{") else [{"lark_grammar": grammar}]
        grammar = json.dumps(
            {"grammars": [{"lark_grammar": f"start: {lead} @begun"}, {**parts[0], "name": "begun"}, *parts[1:]]}
        )
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    if matcher.is_error():
        raise GrammarError(_short(matcher.get_error()))
    return matcher


def create_spaced_matcher(
    tokenizer: LLTokenizer, wanted: StructuredOutputs, limits: LLParserLimits, spaced: Sequence[int]
) -> LLMatcher:
    """``create_matcher`` where a space is dropped at the very beginning: one may stand there, and must if the text can
    begin with one.

    ``spaced``: the tokens that begin with a space. Raises GrammarError.
    """
    mask = create_matcher(tokenizer, wanted, limits).compute_bitmask()
    must = any(mask[id >> 3] >> (id & 7) & 1 for id in spaced)
    return create_matcher(tokenizer, wanted, limits, lead='" "' if must else '" "?')


def check_start(matcher: LLMatcher) -> bytes:
    """The first token's mask. Raises GrammarError when no token may begin an answer, or finding out which takes too
    much."""
    mask = matcher.compute_bitmask()
    reason = why_stuck(matcher)
    if reason is not None or not any(mask):
        raise GrammarError(reason or _NOTHING)
    return mask


def forced_run(matcher: LLMatcher) -> tuple[int, ...]:
    """The tokens that must come next, each as the mask in its place would say; none where there are fewer than MIN_RUN.

    An encoding's rest need not be the encoding of the rest, so every token is asked for in its own place.
    """
    ahead = matcher.compute_ff_tokens()
    if len(ahead) < MIN_RUN:
        return ()
    run, walker = list[int](), matcher.deep_copy()  # what is too much for a walk must not stop the answer before that
    while ahead and len(run) < MAX_RUN:
        run.append(ahead[0])
        if not walker.consume_token(ahead[0]):
            break
        ahead = walker.compute_ff_tokens()
    return tuple(run) if len(run) >= MIN_RUN else ()


def why_stuck(matcher: LLMatcher) -> str | None:
    """Why nothing may follow, as a clause, of a matcher that has left its grammar or found no way on; None: it goes
    on."""
    if not matcher.is_error():
        return None
    return _NOTHING if "NoExtension" in matcher.get_error() else _short(matcher.get_error())


def _short(reason: str) -> str:
    """A library's message as a clause of one line."""
    if reason.startswith("panic"):
        return "the grammar compiler gave up on it"
    line = " ".join(reason.replace("<non-verbose/>", "").split()).rstrip(".")
    return line if len(line) <= _MAX_REASON else line[:_MAX_REASON] + "…"
