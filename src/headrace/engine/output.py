"""From token ids to text: incremental detokenisation, stop strings, logprobs, and the outputs users hold.

What lives here: the bytes or piece behind each id; one incremental decoder a kind of tokenizer, whose concatenated
output is the definition of ``decode``: text that was given out never changes, and no character is ever split; the
matcher of stop strings; ``OutputProcessor`` (token ids in, deltas out), ``OutputCollector`` (deltas in, a RequestOutput
out). What may not: torch, loading tokenizers, encoding, chat templates, sockets, queues.

Three kinds, by the decoder in tokenizer.json:
  bytes    ids are byte strings (GPT-2's byte-level BPE and its descendants): a table and UTF-8's own incremental
  decoder.
  pieces   ids are texts with a mark for the space, or single bytes <0xNN> (SentencePiece): runs of bytes wait for their
  end.
  window   anything else: decode a short window twice and give out the difference.

The stop string that is *complete first* wins (of those that complete at the same character the longest), so the answer
does not depend on how the text was cut into pieces. Text is held back only while it is the beginning of a stop string:
the held length is always the longest suffix that is a prefix of one, kept by a Knuth-Morris-Pratt state per string
(Knuth, Morris, Pratt 1977), so the cost a character does not depend on how long the strings are.

The plain path (no stop strings, no logprobs) runs once a token for every stream of a server: it does one look-up, one
decode and makes one object.
"""

from __future__ import annotations

import codecs
import math
import re
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from headrace.errors import HeadraceError, InvalidRequest, Overloaded
from headrace.request import (
    REPETITION,
    CompletionOutput,
    Finished,
    FinishReason,
    Json,
    Logprob,
    Request,
    RequestOutput,
    RequestTimes,
    SequenceOutput,
    StepAccount,
    TokenLogprobs,
    TokenOutputs,
    column_of,
)

if TYPE_CHECKING:
    from headrace.engine.tokenizer import Tokenizer

MAX_BYTE_RUN = 64  # bytes held back before a run of byte tokens is given out up to its last whole character
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE_MARK = "▁"


class IncrementalDecoder(Protocol):
    """``push`` gives the text that is certain by now, ``flush`` what was held back; then the decoder is as new."""

    def push(self, ids: Sequence[int]) -> str: ...

    def flush(self) -> str: ...


def _byte_characters() -> dict[str, int]:
    """GPT-2's printable stand-ins: bytes that print stand for themselves, the others follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    return table | {chr(0x100 + offset): byte for offset, byte in enumerate(others)}


_BYTE_OF = _byte_characters()


def bytes_of_token(token: str) -> bytes:
    """A byte-level token's bytes; a token with any other character (an added one) is its own UTF-8."""
    try:
        return bytes([_BYTE_OF[character] for character in token])
    except KeyError:
        return token.encode("utf-8", "replace")


class ByteDecoder:
    """Byte-level BPE. ``table[id]`` is the id's bytes, empty for a token to be skipped."""

    def __init__(self, table: Mapping[int, bytes]) -> None:
        self._table = table
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Sequence[int]) -> str:
        table = self._table
        if len(ids) == 1:
            return self._utf8.decode(table[ids[0]])
        return self._utf8.decode(b"".join([table[token] for token in ids]))

    def flush(self) -> str:
        text = self._utf8.decode(b"", True)
        self._utf8.reset()
        return text


class PieceDecoder:
    """SentencePiece. ``table[id]`` is a text, or an int for a single byte; None is skipped.

    Bytes wait until their run ends, because the reference decoder replaces every byte of a run that is not valid as a
    whole. A run longer than MAX_BYTE_RUN is given out by whole characters instead of being held for ever.
    """

    def __init__(self, table: Mapping[int, str | int | None], strip_left: int, drop_first_marks: bool) -> None:
        self._table = table
        self._strip_left = strip_left
        self._drop_first_marks = drop_first_marks
        self._restart()

    def _restart(self) -> None:
        self._run = bytearray()
        self._to_strip = self._strip_left
        self._first = self._drop_first_marks

    def push(self, ids: Sequence[int]) -> str:
        parts: list[str] = []
        for token in ids:
            piece = self._table[token]
            if isinstance(piece, int):
                parts.append(self._push_byte(piece))
            elif piece is not None:
                if self._run:
                    parts.append(self._end_run())
                parts.append(self._text(piece))
        return self._strip("".join(parts))

    def _text(self, piece: str) -> str:
        if self._first:
            self._first = False
            return piece.replace(_SPACE_MARK, "")
        return piece.replace(_SPACE_MARK, " ")

    def _push_byte(self, byte: int) -> str:
        self._run.append(byte)
        self._first = False
        if len(self._run) <= MAX_BYTE_RUN:
            return ""
        whole = len(self._run) - _incomplete_tail(self._run)
        text = _run_text(self._run[:whole])
        del self._run[:whole]
        return text

    def _end_run(self) -> str:
        text = _run_text(self._run)
        self._run.clear()
        return text

    def _strip(self, text: str) -> str:
        """Takes up to ``strip_left`` spaces off the front of the whole text, wherever the pieces end."""
        while self._to_strip and text:
            if not text.startswith(" "):
                self._to_strip = 0
                break
            text = text[1:]
            self._to_strip -= 1
        return text

    def flush(self) -> str:
        text = self._strip(self._end_run())
        self._restart()
        return text


def _run_text(run: bytes | bytearray) -> str:
    try:
        return run.decode("utf-8")
    except UnicodeDecodeError:
        return "\ufffd" * len(run)


def _incomplete_tail(run: bytes | bytearray) -> int:
    """How many bytes at the end are the beginning of a character that could still become whole."""
    for back in range(1, min(3, len(run)) + 1):
        byte = run[-back]
        if byte >= 0xC0:
            needed = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return back if back < needed else 0
        if byte < 0x80:
            return 0
    return 0


class WindowDecoder:
    """Any decoder whose text at one place depends on a few ids before it: decodes a window with and without the new
    ids.

    ``table[id]`` is None for an id that says nothing (skipped, or without a token): a window of such ids would have no
    context.
    """

    def __init__(self, decode: Callable[[list[int]], str], table: Mapping[int, object], context: int = 6) -> None:
        self._decode = decode
        self._table = table
        self._context = context
        self._restart()

    def _restart(self) -> None:
        self._ids: list[int] = []
        self._given = 0  # how many of the window's ids have been given out

    def push(self, ids: Sequence[int]) -> str:
        self._ids.extend([token for token in ids if self._table[token] is not None])
        return self._advance(final=False)

    def flush(self) -> str:
        text = self._advance(final=True)
        self._restart()
        return text

    def _advance(self, *, final: bool) -> str:
        before = self._decode(self._ids[: self._given])
        after = self._decode(self._ids)
        held = after.endswith("\ufffd") and len(self._ids) - self._given < MAX_BYTE_RUN
        if not after.startswith(before) or (held and not final):
            return after[len(before) :] if final else ""
        surplus = max(0, len(self._ids) - self._context)
        self._given = len(self._ids) - surplus
        del self._ids[:surplus]
        return after[len(before) :]


@dataclass(frozen=True, slots=True)
class PieceRules:
    """What a SentencePiece-like decoder does besides replacing marks."""

    byte_fallback: bool
    strip_left: int = 0
    drop_first_marks: bool = False


def piece_rules(decoder: Json | None) -> PieceRules | None:
    """The rules of a decoder that PieceDecoder can stand for; None for any other."""
    if decoder is None:
        return None
    if decoder.get("type") == "Metaspace" and decoder.get("replacement") == _SPACE_MARK:
        return PieceRules(False, drop_first_marks=decoder.get("prepend_scheme", "always") != "never")
    steps = decoder.get("decoders", []) if decoder.get("type") == "Sequence" else []
    return _sequence_rules([(step.get("type"), step) for step in steps])


def _sequence_rules(steps: list[tuple[Any, Json]]) -> PieceRules | None:
    """Replace(▁→space), ByteFallback, Fuse, then perhaps Strip: as converted Llama, Mistral, Gemma and Phi tokenizers
    have it."""
    if [kind for kind, _ in steps[:3]] != ["Replace", "ByteFallback", "Fuse"] or len(steps) > 4:
        return None
    replace = steps[0][1]
    if replace.get("pattern") != {"String": _SPACE_MARK} or replace.get("content") != " ":
        return None
    if len(steps) == 3:
        return PieceRules(True)
    kind, strip = steps[3]
    if kind != "Strip" or strip.get("content") != " " or strip.get("stop") != 0:
        return None
    return PieceRules(True, strip_left=int(strip.get("start", 0)))


def is_byte_level(decoder: Json | None) -> bool:
    if decoder is None:
        return False
    steps = decoder.get("decoders", []) if decoder.get("type") == "Sequence" else [decoder]
    return len(steps) == 1 and steps[0].get("type") == "ByteLevel"


def piece_of_token(token: str, rules: PieceRules) -> str | int:
    match = _BYTE_TOKEN.fullmatch(token) if rules.byte_fallback else None
    return int(match[1], 16) if match else token


# --- stop strings


def _failure_links(word: str) -> array[int]:
    """links[i] = length of the longest proper prefix of ``word`` that ends at word[i]."""
    links = array("i", bytes(4 * len(word)))
    matched = 0
    for i in range(1, len(word)):
        while matched and word[i] != word[matched]:
            matched = links[matched - 1]
        matched += word[i] == word[matched]
        links[i] = matched
    return links


class StopMatcher:
    """Feeds on text, gives back what may be shown, and says when a stop string is complete."""

    __slots__ = ("_firsts", "_held", "_include", "_links", "_matched", "_words")

    def __init__(self, words: tuple[str, ...], include: bool) -> None:
        self._words = words
        self._include = include
        self._links: list[array[int]] | None = None  # made when a first character turns up
        self._firsts = frozenset(word[0] for word in words)
        self._matched = [0] * len(words)
        self._held = ""

    def push(self, text: str, armed: bool) -> tuple[str, str | None]:
        """``(text to show, the stop string that is complete or None)``. Not ``armed``: matches that end in ``text`` do
        not count."""
        if not self._held and self._firsts.isdisjoint(text):
            return text, None  # nothing has begun, and nothing begins here
        pending = self._held + text
        shown = len(self._held) if self._include else 0  # with the stop string included, nothing is ever held back
        for position, char in enumerate(text, len(self._held) + 1):
            word = self._advance(char)
            if word is not None and armed:
                return pending[shown : position if self._include else position - len(word)], word
        keep = len(pending) - max(self._matched)
        self._held = pending[keep:]
        return pending[shown : None if self._include else keep], None

    def flush(self) -> str:
        """The text ended without a stop string: what was held back is text after all."""
        return "" if self._include else self._held

    def _advance(self, char: str) -> str | None:
        """One character further in every string; the longest one that is complete now."""
        if self._links is None:
            self._links = [_failure_links(word) for word in self._words]
        complete: str | None = None
        for i, word in enumerate(self._words):
            matched, links = self._matched[i], self._links[i]
            while matched and word[matched] != char:
                matched = links[matched - 1]
            matched += word[matched] == char
            if matched == len(word):
                matched = links[matched - 1]
                if complete is None or len(word) > len(complete):
                    complete = word
            self._matched[i] = matched
        return complete


_MOST_KEPT = 64  # steps kept in one piece


FinishCallback = Callable[[int, int, int], None]  # request_id, index, output tokens to keep


@dataclass(slots=True)
class RequestDelta:
    """What one step added to one of a request's n answers. ``last``: nothing more comes for the whole request.

    ``finish_reason`` is "stop", "length" or "error" (then ``error`` says why); ``stop_reason`` the stop token id or the
    stop string. ``text`` may be empty while a character is incomplete or could be the beginning of a stop string.
    """

    index: int
    text: str
    token_ids: Sequence[int]
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    num_cached_tokens: int | None = None
    times: RequestTimes | None = None
    error: str | None = None
    refusal: HeadraceError | None = None  # beside ``error``, where nothing failed: the request was turned away
    last: bool = False
    account: StepAccount | None = None  # with finish_reason, where it was asked for
    pooled: bytes = b""  # see SequenceOutput

    def absorb(self, later: RequestDelta) -> None:
        """Becomes the sum of itself and the next delta of the same index."""
        self.text += later.text
        self.token_ids = [*self.token_ids, *later.token_ids]
        self.logprobs += later.logprobs
        self.prompt_logprobs += later.prompt_logprobs
        self.finish_reason, self.stop_reason = later.finish_reason, later.stop_reason
        self.times, self.error, self.last, self.account = later.times, later.error, later.last, later.account
        self.refusal = later.refusal
        if self.num_cached_tokens is None:
            self.num_cached_tokens = later.num_cached_tokens


class _SequenceText:
    """The text state of one sequence."""

    __slots__ = ("decoder", "min_tokens", "num_tokens", "stops")

    def __init__(self, decoder: IncrementalDecoder | None, stops: StopMatcher | None, min_tokens: int) -> None:
        self.decoder = decoder
        self.stops = stops
        self.min_tokens = min_tokens
        self.num_tokens = 0

    def push(self, token_ids: Sequence[int], num_textless: int) -> tuple[str, int, str | None]:
        """``(text, tokens kept, stop string)`` of new ids, the last ``num_textless`` of which have no text."""
        num_textual = len(token_ids) - num_textless
        if self.stops is not None:
            return self._push_searching(token_ids, num_textual)
        self.num_tokens += len(token_ids)
        if self.decoder is None:
            return "", len(token_ids), None
        return self.decoder.push(token_ids[:num_textual] if num_textless else token_ids), len(token_ids), None

    def flush(self) -> tuple[str, str | None]:
        """The rest of the text: bytes of an unfinished character, and what could have begun a stop string."""
        tail = self.decoder.flush() if self.decoder is not None else ""
        if self.stops is None:
            return tail, None
        text, stop = self.stops.push(tail, self.num_tokens > self.min_tokens)
        return (text, stop) if stop is not None else (text + self.stops.flush(), None)

    def _push_searching(self, token_ids: Sequence[int], num_textual: int) -> tuple[str, int, str | None]:
        """One token at a time: a stop string ends the answer at the token that completes it."""
        # stop strings without text are refused by SamplingParams
        assert self.decoder is not None and self.stops is not None
        parts = []
        for position, token_id in enumerate(token_ids, 1):
            self.num_tokens += 1
            if position > num_textual:
                continue
            text, stop = self.stops.push(self.decoder.push((token_id,)), self.num_tokens > self.min_tokens)
            parts.append(text)
            if stop is not None:
                return "".join(parts), position, stop
        return "".join(parts), len(token_ids), None


@dataclass(slots=True)
class _LiveRequest:
    sequences: list[_SequenceText | None]  # None: this one has ended
    include_stop: bool
    arrival: float
    num_live: int
    first_scheduled: float | None = None
    first_token: float | None = None


@dataclass(slots=True)
class OutputProcessor:
    """Text work for all live requests. ``finish`` is called when a stop string ends a sequence that the core still
    runs.

    Outputs of requests that are unknown, dropped or ended at a stop string are ignored: they are surplus of steps in
    flight.
    """

    tokenizer: Tokenizer | None
    finish: FinishCallback
    now: Callable[[], float] = time.perf_counter
    _live: dict[int, _LiveRequest] = field(default_factory=dict)
    # of requests wanted whole: the ids held back; None: none came yet
    _held: dict[int, list[int] | None] = field(default_factory=dict)
    _kept: list[list[int]] = field(default_factory=list)  # whole steps of such requests, not yet spread among them
    _kept_for: Sequence[int] = ()

    def add(self, request: Request, *, whole: bool = False) -> None:
        """``whole``: the answer is not read before it has ended, so that its tokens may come as one delta then,
        where nothing in the text can end it."""
        params = request.params
        if whole and params.n == 1 and not params.stop and params.logprobs is None and params.prompt_logprobs is None:
            self._held[request.request_id] = None
        tokenizer = self.tokenizer if params.detokenize else None
        sequences: list[_SequenceText | None] = [
            _SequenceText(
                None if tokenizer is None else tokenizer.stream_decoder(params.skip_special_tokens),
                StopMatcher(params.stop, params.include_stop_str_in_output) if params.stop else None,
                params.min_tokens,
            )
            for _ in range(params.n)
        ]
        self._live[request.request_id] = _LiveRequest(
            sequences, params.include_stop_str_in_output, request.arrival_time, params.n
        )

    def drop(self, request_id: int) -> None:
        """Nothing more is wanted of this request."""
        self._live.pop(request_id, None)
        self._held.pop(request_id, None)

    def end_answer(self, request_id: int, index: int) -> None:
        """Nothing more is wanted of one answer: the core ends it where it is."""
        live = self._live.get(request_id)
        sequence = live.sequences[index] if live is not None else None
        if live is None or sequence is None:
            return
        self.finish(request_id, index, sequence.num_tokens)
        live.sequences[index] = None
        live.num_live -= 1
        if live.num_live == 0:
            self.drop(request_id)

    @property
    def num_live(self) -> int:
        return len(self._live)

    def process(self, outputs: Iterable[SequenceOutput]) -> Iterator[tuple[int, RequestDelta]]:
        """``(request_id, delta)`` for everything that is still wanted."""
        if isinstance(outputs, TokenOutputs) and self._keep(outputs):
            return
        self._spread()
        for out in outputs:
            request_id = out.request_id
            if request_id in self._held:
                held = self._held[request_id]
                if held is None:
                    self._held[request_id] = []  # the first tokens are passed on at once: their time is of interest
                elif out.finished is None:
                    held.extend(out.token_ids)
                    continue
                else:
                    out = out._replace(token_ids=(*held, *out.token_ids))
            delta = self.feed(out)
            if delta is not None:
                yield request_id, delta

    def _keep(self, outputs: TokenOutputs) -> bool:
        """Whether none of these tokens is wanted yet; then they are kept as they are."""
        if outputs.request_ids is not self._kept_for:
            self._spread()
            if any(self._held.get(request_id) is None for request_id in outputs.request_ids):
                return False
            self._kept_for = outputs.request_ids
        elif len(self._kept) >= _MOST_KEPT:
            self._spread()
            self._kept_for = outputs.request_ids
        self._kept.append(column_of(outputs.tokens))
        return True

    def _spread(self) -> None:
        """Gives everybody the tokens that were kept for them; those of requests that were dropped meanwhile are
        surplus."""
        for request_id, column in zip(self._kept_for, zip(*self._kept, strict=True), strict=False):
            held = self._held.get(request_id)
            if held is not None:
                held.extend(column)
        self._kept, self._kept_for = [], ()

    def feed(self, out: SequenceOutput) -> RequestDelta | None:
        """None when it is not waited for."""
        (request_id, index, token_ids, logprobs, prompt_logprobs, num_cached_tokens, finished, first_scheduled, pooled,
        ) = out  # fmt: skip
        live = self._live.get(request_id)
        sequence = live.sequences[index] if live is not None else None
        if live is None or sequence is None:
            return None
        if live.first_token is None and token_ids:
            live.first_scheduled, live.first_token = first_scheduled, self.now()
        stopped = finished is not None and finished.reason is FinishReason.STOP and finished.stop_reason != REPETITION
        text, kept, stop = sequence.push(token_ids, 1 if stopped and token_ids and not live.include_stop else 0)
        delta = RequestDelta(index, text, token_ids, logprobs, None, None, prompt_logprobs, num_cached_tokens)
        if pooled:
            delta.pooled = pooled
        if stop is not None:
            delta.token_ids, delta.logprobs = token_ids[:kept], logprobs[:kept]
            delta.times = RequestTimes(live.arrival, live.first_scheduled, live.first_token, self.now())
        if finished is not None:
            stop = self._take_end(delta, finished, sequence, stop)
        elif stop is not None:
            self.finish(request_id, index, sequence.num_tokens)
        if stop is not None:
            delta.finish_reason, delta.stop_reason = FinishReason.STOP.value, stop
        if delta.finish_reason is not None:
            live.sequences[index] = None
            live.num_live -= 1
            delta.last = live.num_live == 0
            if delta.last:
                self.drop(request_id)
        return delta

    def _take_end(
        self, delta: RequestDelta, finished: Finished, sequence: _SequenceText, stop: str | None
    ) -> str | None:
        """How the core has ended it; returns the stop string that it ends at nevertheless."""
        delta.times, delta.account = finished.times, finished.account
        if stop is not None:
            return stop
        tail, stop = sequence.flush()
        delta.text += tail
        delta.finish_reason, delta.stop_reason = finished.reason.value, finished.stop_reason
        delta.error, delta.refusal = finished.message, refusal_of(finished)
        return None if finished.reason is FinishReason.ERROR else stop


def refusal_of(finished: Finished) -> HeadraceError | None:
    """What was turned away, by a policy or because its grammar leads nowhere, as the error that its client is told."""
    message = finished.message or ""
    if finished.param is not None:
        return InvalidRequest(message, param=finished.param, code="cannot_be_met")
    if finished.retry_after is not None:
        return Overloaded(message, retry_after=math.ceil(min(max(finished.retry_after, 1.0), 30.0)), code="too_late")
    return None


def public_logprobs(entry: TokenLogprobs, token_text: Callable[[int], str] | None) -> dict[int, Logprob]:
    """The chosen token first, then the k best by rank (the chosen one is not repeated)."""
    ids, values = entry.token_ids, entry.logprobs
    texts = [None] * len(ids) if token_text is None else [token_text(i) for i in ids]
    found = {ids[0]: Logprob(values[0], entry.rank, texts[0])}
    for rank in range(1, len(ids)):
        if ids[rank] not in found:
            found[ids[rank]] = Logprob(values[rank], rank, texts[rank])
    return found


class OutputCollector:
    """Adds up one request's deltas; ``output()`` is a RequestOutput that later deltas do not change."""

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        request: Request,
        tokenizer: Tokenizer | None,
        given: Sequence[int] = (),
    ) -> None:
        """``given``: a list that ends with the prompt's ids; taking them from there makes no objects."""
        params, ids = request.params, request.prompt_token_ids
        self._token_text = tokenizer.token_text if tokenizer is not None and params.detokenize else None
        self._texts: list[list[str]] = [[] for _ in range(params.n)]
        answers = [CompletionOutput(index) for index in range(params.n)]
        if params.logprobs is not None:
            answers = [replace(each, logprobs=[], cumulative_logprob=0.0) for each in answers]
        scores: list[dict[int, Logprob] | None] | None = None if params.prompt_logprobs is None else [None]
        shown = list(given[-len(ids) :] if len(given) > len(ids) else given or ids)
        self._sum = RequestOutput(request_id, prompt, shown, answers, prompt_logprobs=scores)

    @property
    def finished(self) -> bool:
        return self._sum.finished

    def add(self, delta: RequestDelta) -> None:
        whole, answer = self._sum, self._sum.outputs[delta.index]
        if delta.text:
            self._texts[delta.index].append(delta.text)
        answer.token_ids.extend(delta.token_ids)
        if answer.logprobs is not None and answer.cumulative_logprob is not None:
            answer.logprobs.extend(public_logprobs(entry, self._token_text) for entry in delta.logprobs)
            answer.cumulative_logprob += sum(entry.logprobs[0] for entry in delta.logprobs)
        answer.finish_reason = delta.finish_reason
        answer.stop_reason = delta.error if delta.error is not None else delta.stop_reason
        if whole.prompt_logprobs is not None:
            whole.prompt_logprobs.extend(public_logprobs(entry, self._token_text) for entry in delta.prompt_logprobs)
        if delta.index == 0:
            if delta.num_cached_tokens is not None:
                whole.num_cached_tokens = delta.num_cached_tokens
            whole.metrics = delta.times or whole.metrics
        whole.finished = delta.last
        whole.pooled = whole.pooled or delta.pooled

    def output(self) -> RequestOutput:
        self._texts = [["".join(parts)] for parts in self._texts]
        answers = [
            replace(
                each,
                text=text,
                token_ids=each.token_ids[:],
                logprobs=None if each.logprobs is None else each.logprobs[:],
            )
            for each, (text,) in zip(self._sum.outputs, self._texts, strict=True)
        ]
        scores = self._sum.prompt_logprobs
        return replace(self._sum, outputs=answers, prompt_logprobs=None if scores is None else scores[:])

    def aborted(self) -> RequestOutput:
        """The last output of a request that was aborted on purpose."""
        self._sum.finished = True
        for answer in self._sum.outputs:
            answer.finish_reason = answer.finish_reason or FinishReason.ABORT.value
        return self.output()
