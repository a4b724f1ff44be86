"""JSON on the wire: bytes in become plain objects, plain objects become bytes that every client can read; and an answer,
whole or in chunks: what all formats have, what those with choices share, and completions.

A stream's constant JSON is rendered once a choice; a plain token then costs one look-up, one string escape and two
joins.

What lives here: decoding under limits, encoding, the error body; formats of answers and what they add up, log
probabilities. What may not: fields of any route and the formats of one API (dialects/), HTTP, sending, the engine.
"""

from __future__ import annotations

import itertools
import json
import math
import time
import uuid
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import msgspec
from msgspec import Struct

from headrace.engine.output import RequestDelta
from headrace.errors import HeadraceError, InvalidRequest
from headrace.request import Given, Json, TokenLogprobs
from headrace.server.answer_types import CachedTokens, Error, ErrorDetail, Usage

MAX_DEPTH = 64  # nested lists and objects in a body
MAX_CONTAINERS = 100_000  # lists and objects
MAX_STRINGS = 250_000
MAX_ITEMS = 1_500_000  # of all lists and objects together: what the longest prompt in token ids needs

# ASCII only: U+2028, U+2029 and U+0085 leave as escapes, so no client takes them for line ends.
quote = json.encoder.encode_basestring_ascii

# A thread keeps the event loop waiting until a call of C has returned: what is long is worked on in parts.
PART_ITEMS = 1 << 15
_PART_BYTES = 1 << 17
_PACKED_BYTES = 1 << 11  # of a list of ids: fewer are taken as they come
_COUNTED_BYTES = 1 << 20
_SLICE_ITEMS = 256  # of a list that is encoded: with their scores, half a megabyte

_CONTAINERS = frozenset((dict, list))
_decoder = msgspec.json.Decoder()  # strict: no NaN, no Infinity, no lone surrogates, no bytes after the value
_outline = msgspec.json.Decoder(dict[str, msgspec.Raw])  # the same; what the fields hold is not built
_integers = msgspec.json.Decoder(list[int])


def decode_object(body: bytes | bytearray, *, pack: bool = False) -> Json:
    """A request body as a dict. Raises InvalidRequest for anything that is not one JSON object of bounded depth.

    ``pack``: a field that is a long list of 32-bit integers becomes an array of them, whose items need no check.
    """
    _check_size(body)
    try:
        value = _decode_parts(body, pack) if len(body) > _long(pack) else _decoder.decode(body)
    except RecursionError:
        raise _too_deep() from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:  # the text names bytes, never the content
        raise InvalidRequest(
            f"The body is not valid JSON in UTF-8 ({_cause(error)}); send one JSON object.", code="invalid_json"
        ) from None
    if not isinstance(value, dict):
        raise InvalidRequest("The body is JSON but not an object; send one JSON object.", code="invalid_json")
    check_depth(value)
    return value


def _long(pack: bool) -> int:
    return min(_PACKED_BYTES, _PART_BYTES) if pack else _PART_BYTES


def _decode_parts(body: bytes | bytearray, pack: bool) -> Any:
    """As the decoder does, but with the interpreter free in between."""
    try:
        fields = _outline.decode(body)
    except msgspec.ValidationError:  # no object
        return _decoder.decode(body)
    return {name: _decode_value(bytes(raw), pack) for name, raw in fields.items()}


def _decode_value(value: bytes, pack: bool) -> Any:
    """A long list of numbers part by part: a million of them would take the interpreter for a tenth of a second."""
    if len(value) <= _long(pack) or value[:1] != b"[" or value.count(b"[") > 1 or b"{" in value or b'"' in value:
        return _decoder.decode(value)
    ids: array[int] = array("i")
    try:
        for part in _list_parts(value) if pack else ():
            ids += array("i", _integers.decode(part))  # extend() takes twice as long
    except (msgspec.ValidationError, OverflowError):  # other numbers
        ids = array("i")
    return ids or [item for part in _list_parts(value) for item in _decoder.decode(part)]


def _list_parts(value: bytes) -> Iterator[bytes]:
    """A list without lists, objects and strings in it, as several."""
    start, last = 1, len(value) - 1
    while start <= last:
        end = value.find(b",", start + _PART_BYTES, last)
        end = last if end < 0 else end
        yield b"[%b]" % value[start:end]
        start = end + 1


def _cause(error: Exception) -> str:
    return "bad UTF-8" if isinstance(error, UnicodeDecodeError) else str(error).partition(" - at ")[0]


def _check_size(body: bytes | bytearray) -> None:
    """Counts before anything is built: a few bytes of JSON can become many objects, each of which takes memory and
    time."""
    if (
        _count(body, b"[") + _count(body, b"{") <= MAX_CONTAINERS
        and _count(body, b'"') <= 2 * MAX_STRINGS
        and _count(body, b",") < MAX_ITEMS
    ):
        return  # strings may hold such characters too, so this is the most there can be
    # every quote that is left begins or ends a string
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in body else body
    if _count(plain, b'"') > 2 * MAX_STRINGS:
        raise _too_large(f"{MAX_STRINGS} strings")
    outside = b"".join(plain.split(b'"')[::2])
    if _count(outside, b"[") + _count(outside, b"{") > MAX_CONTAINERS:
        raise _too_large(f"{MAX_CONTAINERS} lists and objects")
    if _count(outside, b",") >= MAX_ITEMS:
        raise _too_large(f"{MAX_ITEMS} items")


def _count(text: bytes | bytearray, mark: bytes) -> int:
    return sum(text.count(mark, start, start + _COUNTED_BYTES) for start in range(0, len(text), _COUNTED_BYTES))


def _too_large(what: str) -> InvalidRequest:
    return InvalidRequest(f"The body holds more than {what}; send less at once.", code="invalid_json")


def _too_deep() -> InvalidRequest:
    return InvalidRequest(f"The body nests deeper than {MAX_DEPTH} levels; flatten it.", code="invalid_json")


def _parts(node: Any) -> Iterator[Iterable[Any]]:
    """What a list or an object holds."""
    if type(node) is dict:
        yield node.values()
    else:
        yield from (node[start : start + PART_ITEMS] for start in range(0, len(node), PART_ITEMS))


def check_depth(value: Any) -> None:
    """Level by level, so that no input can exhaust the stack here or further in (templates recurse)."""
    level = [value]
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for node in level:
            for children in _parts(node):
                if not _CONTAINERS.isdisjoint(map(type, children)):  # a long list of ids is passed over without a loop
                    below.extend(child for child in children if type(child) in _CONTAINERS)
        if not below:
            return
        level = below
    raise _too_deep()


def encode(value: Any) -> bytes:
    """Compact ASCII JSON. NaN and Infinity, which would end a client's stream, become null."""
    try:
        data = msgspec.json.encode(value)
        if data.isascii():
            return data
    except (OverflowError, UnicodeEncodeError):  # integers of more than 64 bits, lone surrogates
        pass
    return json.dumps(msgspec.to_builtins(value), separators=(",", ":"), allow_nan=False).encode("ascii")


HOLE = "\x00"
_HOLE_JSON = '"\\u0000"'  # in no other text, for its quotes would be escaped


def around(value: Any) -> list[str]:
    """JSON before, between and behind the HOLEs in a value: what is written once for many events. Quoted text joins
    it."""
    return encode(value).decode().split(_HOLE_JSON)


def encode_object(members: Given) -> Iterator[bytes]:
    """As ``encode``, in pieces: a member that is an iterator gives pieces of JSON already."""
    begin = "{"
    for name, value in members.items():
        yield f"{begin}{quote(name)}:".encode("ascii")
        begin = ","
        if isinstance(value, Iterator):
            yield from value
        else:
            yield encode(value)
    yield b"{}" if begin == "{" else b"}"


def encode_list(items: Iterable[Any]) -> Iterator[bytes]:
    """As ``encode`` of a list, some items at a time: other threads run in between."""
    rest, begin = iter(items), b"["
    while part := list(itertools.islice(rest, _SLICE_ITEMS)):
        yield begin
        yield encode(part)[1:-1]
        begin = b","
    yield b"[]" if begin == b"[" else b"]"


def joined_lists(*lists: bytes) -> Iterator[bytes]:
    """One list of several that are JSON already."""
    inner = [each[1:-1] for each in lists if len(each) > 2]
    yield b"["
    for number, each in enumerate(inner):
        yield b"," + each if number else each
    yield b"]"


class ErrorFormat:
    """How an error reads on a route. A route may say more around the object that all of them have."""

    def body(self, error: HeadraceError) -> bytes:
        return encode(error_object(error))

    def event(self, error: HeadraceError) -> bytes:
        """In a stream that has begun."""
        return b"data: " + self.body(error) + b"\n\n"


def error_object(error: HeadraceError) -> Error:
    """The one form of an error, at every status and in streams."""
    return Error(ErrorDetail(error.message, error.type, error.param, error.code))


Rendered = TypeVar("Rendered")

DONE = "data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """What an answer carries besides text."""

    model: str = ""
    fingerprint: str = ""
    logprobs: bool = False
    prompt_logprobs: bool = False
    token_ids: bool = False
    include_usage: bool = False
    continuous_usage: bool = False  # in every chunk

    @property
    def plain(self) -> bool:
        return not (self.logprobs or self.token_ids)


TEXT_ONLY = AnswerOptions()


@dataclass(slots=True)
class PromptState:
    """One prompt of a request: its ids, and what came back about it. ``text`` is shown by echo."""

    token_ids: Sequence[int]
    text: str = ""
    cached_tokens: int = 0
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    _rendered: Json = field(default_factory=dict)

    def once(self, name: str, render: Callable[[], Rendered]) -> Rendered:
        """What all choices show of the prompt, as the first one has rendered it."""
        if name not in self._rendered:
            self._rendered[name] = render()
        found: Rendered = self._rendered[name]
        return found


@dataclass(slots=True)
class ChoiceState:
    """One choice as it grows. Texts, ids and logprobs are kept only for whole answers."""

    prompt: PromptState
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_tokens: int = 0

    def count(self, delta: RequestDelta) -> None:
        """What every answer needs, streamed or whole."""
        self.num_tokens += len(delta.token_ids)
        if delta.num_cached_tokens is not None and delta.index == 0:
            self.prompt.cached_tokens = delta.num_cached_tokens
        if delta.prompt_logprobs:
            self.prompt.logprobs.extend(delta.prompt_logprobs)
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason


class Answer(ABC):
    """A format bound to one request. ``choices[i]``: prompt-major, n to a prompt. ``explained`` is set before the end,
    where it is asked for."""

    prefix: str  # of its id
    explained: Given | None = None

    def __init__(self, options: AnswerOptions, prompts: Sequence[PromptState], choices: Sequence[ChoiceState]) -> None:
        self.options, self.prompts, self.choices = options, prompts, choices
        self.created = int(time.time())
        self.id = f"{self.prefix}{uuid.uuid4().hex}"

    @abstractmethod
    def usage(self) -> Struct:
        """So far."""

    def add(self, choice: int, delta: RequestDelta) -> None:
        """Keeps a delta of an answer that is sent whole."""
        state = self.choices[choice]
        state.texts.append(delta.text)
        state.token_ids.extend(delta.token_ids)
        state.logprobs.extend(delta.logprobs)

    def opening(self) -> Iterable[str]:
        """Events before the first token."""
        return ()

    def event(self, choice: int, delta: RequestDelta) -> str:
        """Events for one delta: one a token, and one for the end where the format wants it."""
        raise NotImplementedError("this answer is sent whole")

    def closing(self) -> str:
        """Events after the last token."""
        raise NotImplementedError("this answer is sent whole")

    @abstractmethod
    def pieces(self) -> Iterator[bytes]:
        """The answer in one object of JSON. What it was made of may be gone afterwards."""

    def extras(self) -> Json:
        """What the API does not know, for those who asked for it."""
        return {} if self.explained is None else {"explain": self.explained}


_NO_USAGE = ',"usage":null}\n\n'  # at the end of an event: no text in it can read so, for its quotes are escaped


def with_usage(events: str, usage: Struct) -> str:
    """Events that have a place for it, with usage in it."""
    return events.replace(_NO_USAGE, f',"usage":{encode(usage).decode()}}}\n\n')


class ChoicesAnswer(Answer):
    """What chat completions and completions share: a list of choices, usage, and the constant beginning and end of
    every event."""

    kind: str
    chunk_kind: str

    def __init__(self, options: AnswerOptions, prompts: Sequence[PromptState], n: int, tokenizer: Any) -> None:
        super().__init__(options, prompts, [ChoiceState(prompt) for prompt in prompts for _ in range(n)])
        self.format = LogprobFormat(tokenizer)
        self._head, self._tail = self._around(HOLE)

    def _around(self, choice: Any) -> list[str]:
        """What every event of this kind begins and ends with."""
        further = {"usage": None} if self.options.include_usage else {}
        parts = around({**self._of_answer(self.chunk_kind), "choices": [choice], **further})
        parts[0] = f"data: {parts[0]}"
        parts[-1] += "\n\n"
        return parts

    def _of_answer(self, kind: str) -> Json:
        shown = {"id": self.id, "object": kind, "created": self.created, "model": self.options.model}
        return {**shown, "system_fingerprint": self.options.fingerprint}

    def usage(self) -> Usage:
        prompt = sum(len(state.token_ids) for state in self.prompts)
        completion = sum(choice.num_tokens for choice in self.choices)
        cached = sum(state.cached_tokens for state in self.prompts)
        return Usage(prompt, completion, prompt + completion, CachedTokens(cached))

    def closing(self) -> str:
        told = {"usage": self.usage()} if self.options.include_usage else {}
        members = encode({**told, **self.extras()}).decode()
        return f"{self._head}],{members[1:]}\n\n{DONE}" if members != "{}" else DONE

    def event_of(self, choice: Json, **extra: Any) -> str:
        """An event that is not worth prerendering."""
        further = "".join(f",{quote(name)}:{encode(value).decode()}" for name, value in extra.items())
        return f"{self._head}{encode(choice).decode()}]{further}{self._tail[1:]}"

    def pieces(self) -> Iterator[bytes]:
        """Choice by choice; the scores of one that is written are needed no more."""
        members = {**self._of_answer(self.kind), "choices": self._choice_pieces(), "usage": self.usage()}
        return encode_object({**members, **self.extras(), **self._prompt_members()})

    def _choice_pieces(self) -> Iterator[bytes]:
        for index, choice in enumerate(self.choices):
            yield b"," if index else b"["
            yield from encode_object(self.choice(index, choice))
            choice.logprobs, choice.texts = [], []
        yield b"]"

    @abstractmethod
    def choice(self, index: int, choice: ChoiceState) -> Json:
        """Members of one choice; those that may be long are pieces of JSON."""

    def _prompt_members(self) -> Json:
        return {}

    def _prompt_scores(self, prompt: PromptState) -> Iterator[bytes]:
        yield prompt.once("scores", lambda: b"".join(self.format.prompt_pieces(prompt.logprobs)))

    @staticmethod
    def _prompt_ids(prompt: PromptState) -> Iterator[bytes]:
        yield prompt.once("ids", lambda: b"".join(encode_list(prompt.token_ids)))


LOWEST = -9999.0  # stands for minus infinity, which JSON does not have


class TokenTexts(Protocol):
    """What logprobs need of a tokenizer."""

    def token_text(self, token_id: int) -> str: ...

    def token_bytes(self, token_id: int) -> bytes: ...


class LogprobFormat:
    """``tokenizer`` None: tokens are shown as ``token_id:N``."""

    def __init__(self, tokenizer: TokenTexts | None) -> None:
        self._tokenizer = tokenizer

    def chat(self, entries: Iterable[TokenLogprobs]) -> Json:
        """``choices[].logprobs`` of chat completions."""
        return {"content": [self._chat_entry(entry) for entry in entries], "refusal": None}

    def _chat_entry(self, entry: TokenLogprobs) -> Json:
        chosen, *best = zip(entry.token_ids, entry.logprobs, strict=True)
        return {**self._token(*chosen), "top_logprobs": [self._token(*each) for each in best]}

    def _token(self, token_id: int, logprob: float) -> Json:
        raw = list(self._tokenizer.token_bytes(token_id)) if self._tokenizer is not None else None
        return {"token": self.text(token_id), "logprob": finite(logprob), "bytes": raw}

    def chat_pieces(self, entries: Iterable[TokenLogprobs]) -> Iterator[bytes]:
        """As ``chat``, encoded."""
        return encode_object({"content": encode_list(map(self._chat_entry, entries)), "refusal": None})

    def completion(
        self, entries: Sequence[TokenLogprobs | None], offset: int, prompt_ids: Iterable[int] = ()
    ) -> dict[str, list[Any]]:
        """``choices[].logprobs`` of completions. ``offset``: characters of text before. An entry of None is a prompt's
        first token."""
        return {name: list(column) for name, column in self.columns(entries, offset, prompt_ids).items()}

    def columns(
        self, entries: Sequence[TokenLogprobs | None], offset: int, prompt_ids: Iterable[int] = ()
    ) -> dict[str, Iterable[Any]]:
        first = next(iter(prompt_ids), 0)
        texts = [self.text(first if entry is None else entry.token_ids[0]) for entry in entries]
        return {
            "text_offset": itertools.accumulate(map(len, texts[:-1]), initial=offset) if texts else (),
            "token_logprobs": (None if entry is None else finite(entry.logprobs[0]) for entry in entries),
            "tokens": texts,
            "top_logprobs": (None if entry is None else self._by_text(entry) for entry in entries),
        }

    def _by_text(self, entry: TokenLogprobs) -> dict[str, float]:
        """The k best and the chosen one; of tokens with equal text the more probable."""
        found: dict[str, float] = {}
        for token_id, logprob in (
            *zip(entry.token_ids[1:], entry.logprobs[1:], strict=True),
            (entry.token_ids[0], entry.logprobs[0]),
        ):
            found.setdefault(self.text(token_id), finite(logprob))
        return found

    def prompt_pieces(self, entries: Iterable[TokenLogprobs]) -> Iterator[bytes]:
        """``prompt_logprobs``, encoded: nothing for the first token, then by token id: logprob, rank and text."""
        return encode_list(itertools.chain([None], map(self._by_id, entries)))

    def _by_id(self, entry: TokenLogprobs) -> Json:
        pairs = zip(entry.token_ids, entry.logprobs, strict=True)
        found: Json = {}
        for place, (token_id, logprob) in enumerate(pairs):
            rank = place or entry.rank
            found.setdefault(
                str(token_id), {"logprob": finite(logprob), "rank": rank, "decoded_token": self.text(token_id)}
            )
        return found

    def text(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._tokenizer is None else self._tokenizer.token_text(token_id)


def finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LOWEST
