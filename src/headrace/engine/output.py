"""From token ids to text: incremental detokenisation, stop strings, logprobs, and the outputs users hold.

What lives here: ``OutputProcessor`` (token ids in, deltas out), ``OutputCollector`` (deltas in, a RequestOutput out).
What may not: torch, loading tokenizers, sockets, queues.

The plain path (no stop strings, no logprobs) runs once a token for every stream of a server: it does one look-up, one
decode and makes one object.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from headrace.engine.detokenizer import IncrementalDecoder, StopMatcher
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

if TYPE_CHECKING:
    from headrace.engine.tokenizer import Tokenizer

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
        text = (
            self.decoder.push(token_ids[:num_textual] if num_textless else token_ids)
            if self.decoder is not None
            else ""
        )
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
        """``whole``: nobody looks at the answer before it has ended, so that its tokens may come as one delta then,
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
        """Gives everybody the tokens that were kept for them; those of requests that were dropped meanwhile are
        surplus."""
        for request_id, column in zip(self._kept_for, zip(*self._kept, strict=True), strict=False):
            held = self._held.get(request_id)
            if held is not None:
                held.extend(column)
        self._kept, self._kept_for = [], ()

    def feed(self, out: SequenceOutput) -> RequestDelta | None:
        """None when nobody waits for it."""
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
        given: Sequence[int] | None = None,
    ) -> None:
        """``given``: a list that ends with the prompt's ids; taking them from there makes no objects."""
        params, ids = request.params, request.prompt_token_ids
        self._token_text = tokenizer.token_text if tokenizer is not None and params.detokenize else None
        self._texts: list[list[str]] = [[] for _ in range(params.n)]
        answers = [CompletionOutput(index) for index in range(params.n)]
        if params.logprobs is not None:
            answers = [replace(each, logprobs=[], cumulative_logprob=0.0) for each in answers]
        scores: list[dict[int, Logprob] | None] | None = None if params.prompt_logprobs is None else [None]
        self._sum = RequestOutput(
            request_id, prompt, list(ids if given is None else given[-len(ids) :]), answers, prompt_logprobs=scores
        )

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
            whole.num_cached_tokens = (
                whole.num_cached_tokens if delta.num_cached_tokens is None else delta.num_cached_tokens
            )
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
