"""From token ids to text: incremental detokenisation, stop strings, logprobs, and the outputs users hold.

What lives here: ``OutputProcessor`` (token ids in, deltas out), ``OutputCollector`` (deltas in, a RequestOutput out).
What may not: torch, loading tokenizers, sockets, queues.

The plain path (no stop strings, no logprobs) runs once a token for every stream of a server: it does one look-up, one decode
and makes one object.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from headrace.engine.stops import StopMatcher
from headrace.errors import HeadraceError, InvalidRequest, Overloaded
from headrace.request import (
    REPETITION,
    CompletionOutput,
    Finished,
    FinishReason,
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

_MOST_KEPT = 64  # steps kept in one piece


class TextDecoder(Protocol):
    """Token ids of one sequence in, text out; a character is never split."""

    def push(self, ids: Sequence[int]) -> str: ...

    def flush(self) -> str: ...


class TextSource(Protocol):
    """What output work needs of a tokenizer."""

    def stream_decoder(self, skip_special_tokens: bool = ..., /) -> TextDecoder: ...

    def token_text(self, token: int, /) -> str: ...


FinishCallback = Callable[[int, int, int], None]  # request_id, index, output tokens to keep


@dataclass(slots=True)
class RequestDelta:
    """What one step added to one of a request's n answers. ``last``: nothing more comes for the whole request.

    ``finish_reason`` is "stop", "length" or "error" (then ``error`` says why); ``stop_reason`` the stop token id or the stop string.
    ``text`` may be empty while a character is incomplete or could be the beginning of a stop string.
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

    def __init__(self, decoder: TextDecoder | None, stops: StopMatcher | None, min_tokens: int) -> None:
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
        text = self.decoder.push(token_ids[:num_textual] if num_textless else token_ids) if self.decoder is not None else ""
        return text, len(token_ids), None

    def flush(self) -> tuple[str, str | None]:
        """The rest of the text: bytes of an unfinished character, and what could have begun a stop string."""
        tail = self.decoder.flush() if self.decoder is not None else ""
        if self.stops is None:
            return tail, None
        text, stop = self.stops.push(tail, self.num_tokens > self.min_tokens)
        return (text, stop) if stop is not None else (text + self.stops.flush(), None)

    def _push_searching(self, token_ids: Sequence[int], num_textual: int) -> tuple[str, int, str | None]:
        """One token at a time: a stop string ends the answer at the token that completes it."""
        assert self.decoder is not None and self.stops is not None  # stop strings without text are refused by SamplingParams
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
    """Text work for all live requests. ``finish`` is called when a stop string ends a sequence that the core still runs.

    Outputs of requests that are unknown, dropped or ended at a stop string are ignored: they are surplus of steps in flight.
    """

    tokenizer: TextSource | None
    finish: FinishCallback
    now: Callable[[], float] = time.perf_counter
    _live: dict[int, _LiveRequest] = field(default_factory=dict)
    _held: dict[int, list[int] | None] = field(default_factory=dict)  # of requests wanted whole: the ids held back; None: none came yet
    _kept: list[list[int]] = field(default_factory=list)  # whole steps of such requests, not yet spread among them
    _kept_for: Sequence[int] = ()

    def add(self, request: Request, *, whole: bool = False) -> None:
        """``whole``: nobody looks at the answer before it has ended, so that its tokens may come as one delta then, where nothing in
        the text can end it."""
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
        self._live[request.request_id] = _LiveRequest(sequences, params.include_stop_str_in_output, request.arrival_time, params.n)

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
            delta = self.feed(*out)
            if delta is not None:
                yield request_id, delta

    def _keep(self, outputs: TokenOutputs) -> bool:
        """Whether nobody wants to see any of these tokens yet; then they are kept as they are."""
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
        """Gives everybody the tokens that were kept for them; those of requests that were dropped meanwhile are surplus."""
        for request_id, column in zip(self._kept_for, zip(*self._kept, strict=True), strict=False):
            held = self._held.get(request_id)
            if held is not None:
                held.extend(column)
        self._kept, self._kept_for = [], ()

    def feed(
        self,
        request_id: int,
        index: int,
        token_ids: Sequence[int],
        logprobs: tuple[TokenLogprobs, ...] = (),
        prompt_logprobs: tuple[TokenLogprobs, ...] = (),
        num_cached_tokens: int | None = None,
        finished: Finished | None = None,
        first_scheduled: float | None = None,
    ) -> RequestDelta | None:
        """The fields of one SequenceOutput, in their order; None when nobody waits for it."""
        live = self._live.get(request_id)
        sequence = live.sequences[index] if live is not None else None
        if live is None or sequence is None:
            return None
        if live.first_token is None and token_ids:
            live.first_scheduled, live.first_token = first_scheduled, self.now()
        ended_by_token = (
            finished is not None and finished.reason is FinishReason.STOP and finished.stop_reason != REPETITION and not live.include_stop
        )
        text, kept, stop = sequence.push(token_ids, 1 if ended_by_token and token_ids else 0)
        delta = RequestDelta(index, text, token_ids, logprobs, None, None, prompt_logprobs, num_cached_tokens)
        if stop is not None:
            self._end_at_stop(request_id, live, delta, kept, stop, finished)
        elif finished is not None:
            self._end(request_id, live, delta, sequence, finished)
        return delta

    def _end_at_stop(self, request_id: int, live: _LiveRequest, delta: RequestDelta, kept: int, stop: str, finished: Finished | None) -> None:
        sequence = live.sequences[delta.index]
        assert sequence is not None
        delta.token_ids, delta.logprobs = delta.token_ids[:kept], delta.logprobs[:kept]
        delta.finish_reason, delta.stop_reason = FinishReason.STOP.value, stop
        delta.times = finished.times if finished is not None else RequestTimes(live.arrival, live.first_scheduled, live.first_token, self.now())
        if finished is None:
            self.finish(request_id, delta.index, sequence.num_tokens)
        self._close(request_id, live, delta)

    def _end(self, request_id: int, live: _LiveRequest, delta: RequestDelta, sequence: _SequenceText, finished: Finished) -> None:
        tail, stop = sequence.flush()
        delta.text += tail
        delta.finish_reason, delta.stop_reason = finished.reason.value, finished.stop_reason
        if stop is not None and finished.reason is not FinishReason.ERROR:
            delta.finish_reason, delta.stop_reason = FinishReason.STOP.value, stop
        delta.times, delta.error, delta.account = finished.times, finished.message, finished.account
        delta.refusal = refusal_of(finished)
        self._close(request_id, live, delta)

    def _close(self, request_id: int, live: _LiveRequest, delta: RequestDelta) -> None:
        live.sequences[delta.index] = None
        live.num_live -= 1
        delta.last = live.num_live == 0
        if delta.last:
            self.drop(request_id)


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


class _Completion:
    """One answer being put together."""

    __slots__ = ("cumulative", "finish_reason", "logprobs", "parts", "stop_reason", "token_ids")

    def __init__(self, with_logprobs: bool) -> None:
        self.parts: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[dict[int, Logprob]] | None = [] if with_logprobs else None
        self.cumulative = 0.0
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None

    def output(self, index: int) -> CompletionOutput:
        if len(self.parts) > 1:
            self.parts = ["".join(self.parts)]
        return CompletionOutput(
            index=index,
            text=self.parts[0] if self.parts else "",
            token_ids=list(self.token_ids),
            cumulative_logprob=None if self.logprobs is None else self.cumulative,
            logprobs=None if self.logprobs is None else list(self.logprobs),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )


class OutputCollector:
    """Adds up one request's deltas; ``output()`` is a RequestOutput that later deltas do not change."""

    def __init__(
        self, request_id: str, prompt: str | None, request: Request, tokenizer: TextSource | None, given: Sequence[int] | None = None
    ) -> None:
        """``given``: a list that ends with the prompt's ids; taking them from there makes no objects."""
        params = request.params
        self._request_id = request_id
        self._prompt = prompt
        ids = request.prompt_token_ids
        self._prompt_token_ids = list(ids if given is None else given[-len(ids) :])
        self._token_text = tokenizer.token_text if tokenizer is not None and params.detokenize else None
        self._completions = [_Completion(params.logprobs is not None) for _ in range(params.n)]
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = None if params.prompt_logprobs is None else [None]
        self._num_cached_tokens = 0
        self._times: RequestTimes | None = None
        self.finished = False

    def add(self, delta: RequestDelta) -> None:
        completion = self._completions[delta.index]
        if delta.text:
            completion.parts.append(delta.text)
        completion.token_ids.extend(delta.token_ids)
        if completion.logprobs is not None:
            completion.logprobs.extend(public_logprobs(entry, self._token_text) for entry in delta.logprobs)
            completion.cumulative += sum(entry.logprobs[0] for entry in delta.logprobs)
        completion.finish_reason = delta.finish_reason
        completion.stop_reason = delta.error if delta.error is not None else delta.stop_reason
        self._add_request_fields(delta)

    def output(self) -> RequestOutput:
        return RequestOutput(
            request_id=self._request_id,
            prompt=self._prompt,
            prompt_token_ids=self._prompt_token_ids,
            outputs=[completion.output(index) for index, completion in enumerate(self._completions)],
            finished=self.finished,
            prompt_logprobs=None if self._prompt_logprobs is None else list(self._prompt_logprobs),
            num_cached_tokens=self._num_cached_tokens,
            metrics=self._times,
        )

    def aborted(self) -> RequestOutput:
        """The last output of a request that was aborted on purpose."""
        self.finished = True
        for completion in self._completions:
            completion.finish_reason = completion.finish_reason or FinishReason.ABORT.value
        return self.output()

    def _add_request_fields(self, delta: RequestDelta) -> None:
        if self._prompt_logprobs is not None:
            self._prompt_logprobs.extend(public_logprobs(entry, self._token_text) for entry in delta.prompt_logprobs)
        if delta.num_cached_tokens is not None and delta.index == 0:
            self._num_cached_tokens = delta.num_cached_tokens
        if delta.times is not None and delta.index == 0:
            self._times = delta.times
        self.finished = delta.last
