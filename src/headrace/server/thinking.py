"""A bound on how much a model reasons: at so many tokens its reasoning is closed in the family's way, and the answer
goes on.

What lives here: a request's stream under such a bound. What may not: what reasoning looks like (parsing/formats.py),
request fields.

An engine's request cannot be told what to write. So the answer is ended where the bound is, and goes on as another
request whose prompt is everything so far and the closing; what was computed for it is found in the prefix cache. Noise
is keyed by seed and position in a request, hence the other request has a seed of its own, made from the first one's.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from headrace.engine.inputs import derived_seed
from headrace.engine.output import RequestDelta
from headrace.request import Request, SamplingParams
from headrace.server.service import EngineStream

_INCOMPLETE = "\ufffd"  # a character that further tokens complete
_CHARACTER_TOKENS = 4  # at most

Deltas = Sequence[RequestDelta]
GoOn = Callable[["array[int]", SamplingParams], Awaitable[EngineStream]]  # a request with this prompt


@dataclass(frozen=True, slots=True)
class Bound:
    """At most ``tokens`` between ``begin`` and ``end``; then ``closing`` is written. ``opened``: reasoning begins with
    the answer.

    ``most``: tokens of an answer behind which its own limit leaves no room for more; what has come so far is not cut
    any more.
    """

    tokens: int
    most: int
    begin: str
    end: str
    opened: bool
    closing_text: str
    closing: Sequence[int]

    @property
    def slack(self) -> int:
        """Tokens beyond the bound that may complete what must not be cut: a character, or the end itself."""
        return max(_CHARACTER_TOKENS, len(self.end))

    def is_cuttable(self, text: str) -> bool:
        return not text.endswith(_INCOMPLETE) and not any(
            text.endswith(self.end[:size]) for size in range(1, len(self.end))
        )


class BoundedStream:
    """The deltas of a request of n answers, each of which reasons within the bound. ``decode`` is that of its text."""

    def __init__(
        self, source: EngineStream, request: Request, bound: Bound, decode: Callable[[Sequence[int]], str], go_on: GoOn
    ) -> None:
        self._request, self._bound, self._decode, self._go_on = request, bound, decode, go_on
        self._answers = [_BoundedAnswer(bound, decode) for _ in range(request.params.n)]
        self._source = source
        # with the answer it goes on with; None: it has all of them
        self._streams: dict[EngineStream, int | None] = {source: None}
        self._pending: dict[asyncio.Task[Deltas | None], EngineStream] = {}
        self._deltas = self._read()

    def __aiter__(self) -> AsyncIterator[Deltas]:
        return self._deltas

    def end_answer(self, index: int) -> None:
        self._answers[index].ended = True
        stream = next((stream for stream, owner in self._streams.items() if owner == index), self._source)
        stream.end_answer(index if stream is self._source else 0)

    async def aclose(self) -> None:
        await self._deltas.aclose()  # type: ignore[attr-defined]  # a generator has it
        await self._close()

    async def _close(self) -> None:
        streams, self._streams = self._streams, {}
        tasks, self._pending = self._pending, {}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for stream in streams:
            await stream.aclose()

    async def _read(self) -> AsyncIterator[Deltas]:
        iterators: dict[EngineStream, AsyncIterator[Deltas]] = {}
        try:
            if first := [delta for index in range(len(self._answers)) for delta in await self._cut_if_due(index, [])]:
                yield first
            while not all(answer.ended for answer in self._answers):
                for stream in self._streams.keys() - self._pending.values():
                    iterator = iterators.setdefault(stream, aiter(stream))
                    self._pending[asyncio.create_task(_next(iterator))] = stream
                done, _ = await asyncio.wait(self._pending, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    stream = self._pending.pop(task)
                    batch = task.result()
                    if batch is None:
                        self._streams.pop(stream, None)
                    elif stream in self._streams and (
                        seen := [each for delta in batch for each in await self._take(stream, delta)]
                    ):
                        yield seen
                if not self._streams:
                    return
        finally:
            await self._close()

    async def _take(self, stream: EngineStream, delta: RequestDelta) -> list[RequestDelta]:
        owner = self._streams.get(stream)  # the source may have been closed by what came just before
        index = delta.index if owner is None else owner
        answer = self._answers[index]
        if answer.ended or (owner is None and answer.cut):
            return []
        answer.ended = delta.finish_reason is not None
        passed = replace(delta, index=index, last=answer.ended and all(each.ended for each in self._answers))
        if owner is not None:  # what came with the first token was told of the first request
            return [replace(passed, num_cached_tokens=None, prompt_logprobs=())]
        answer.push(delta)
        return await self._cut_if_due(index, [passed])

    async def _cut_if_due(self, index: int, passed: list[RequestDelta]) -> list[RequestDelta]:
        """An answer's newest delta, as it is or up to the bound, and the closing."""
        answer, bound = self._answers[index], self._bound
        kept = answer.find_cut()
        if kept is None:
            return passed
        if all(each.cut or each.ended for each in self._answers):
            self._streams.pop(self._source)
            await self._source.aclose()
        else:
            self._source.end_answer(index)
        written = [*answer.ids[:kept], *bound.closing]
        prompt = array("i", [*self._request.prompt_token_ids, *written])
        self._streams[await self._go_on(prompt, _rest(self._request, index, len(written)))] = index
        return [
            *(answer.up_to(delta, kept) for delta in passed),
            RequestDelta(index, bound.closing_text, bound.closing),
        ]


class _BoundedAnswer:
    """One answer, until it is known whether the bound concerns it."""

    def __init__(self, bound: Bound, decode: Callable[[Sequence[int]], str]) -> None:
        self.ended = self.cut = False
        self.ids: list[int] = []
        self._bound, self._decode = bound, decode
        self._shown = 0  # characters of what was pushed before the newest delta
        self._newest = RequestDelta(0, "", ())
        self._settled = False
        self._start = 0 if bound.opened else None  # tokens before the reasoning
        self._blank = 0  # tokens of white space that the answer begins with

    def push(self, delta: RequestDelta) -> None:
        if not self._settled:
            self._shown += len(self._newest.text)
            self._newest = delta
            self.ids += delta.token_ids

    def find_cut(self) -> int | None:
        """Once its reasoning has come to the bound: how many tokens stay, the same however they arrived."""
        if self._settled or not self._has_started():
            return None
        least = (self._start or 0) + self._bound.tokens
        for kept in range(least, len(self.ids) + 1):
            text = self._decode(self.ids[:kept])
            if self._bound.end not in text and kept < least + self._bound.slack and not self._bound.is_cuttable(text):
                continue
            self._settled = True
            by_itself = self.ended and kept == len(self.ids)
            self.cut = not by_itself and self._bound.end not in text and kept <= self._bound.most
            self.ended = self.ended and not self.cut  # an end behind the bound does not count
            return kept if self.cut else None
        return None

    def _has_started(self) -> bool:
        """An answer that does not begin with reasoning has none."""
        for count in range(self._blank + 1, len(self.ids) + 1) if self._start is None else ():
            text = self._decode(self.ids[self._blank : count]).lstrip()
            if not text:
                self._blank = count
            if text.startswith(self._bound.begin):
                self._start = count
                break
            if not self._bound.begin.startswith(text.rstrip(_INCOMPLETE)):
                self._settled = True
                break
        return self._start is not None

    def up_to(self, newest: RequestDelta, kept: int) -> RequestDelta:
        """What of it is within the bound, with text that was held back."""
        ids = newest.token_ids[: len(newest.token_ids) - (len(self.ids) - kept)]
        text = self._decode(self.ids[:kept]).rstrip(_INCOMPLETE)[self._shown :]
        kept_of = replace(newest, finish_reason=None, stop_reason=None, last=False)
        return replace(kept_of, text=text, token_ids=ids, logprobs=newest.logprobs[: len(ids)])


def _rest(request: Request, index: int, written: int) -> SamplingParams:
    """Of the request that goes on after so many tokens: nothing reasons before its structure any more."""
    params = request.params
    wanted = params.structured_outputs
    return replace(
        params,
        n=1,
        max_tokens=(params.max_tokens or 0) - written,
        min_tokens=max(0, params.min_tokens - written),
        seed=derived_seed(request.seed, index),
        prompt_logprobs=None,
        structured_outputs=None if wanted is None else replace(wanted, preface=""),
    )


async def _next(stream: AsyncIterator[Deltas]) -> Deltas | None:
    return await anext(stream, None)
