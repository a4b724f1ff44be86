"""An answer's way from the engine to the client, streamed or whole: its streams, its counts and times.

What lives here: driving engine streams into an Answer. What may not: how prompts and answers are made (generate.py, answers.py), SSE
framing (stream.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from array import array
from collections.abc import AsyncGenerator, Sequence
from functools import partial

from headrace.engine.inputs import ParsedPrompt
from headrace.engine.output import RequestDelta
from headrace.errors import EngineDead, InvalidRequest, StepFailed
from headrace.request import Request
from headrace.sampling_params import SamplingParams
from headrace.server.answers import Answer, with_usage
from headrace.server.budget import SCORE_BYTES, TOKEN_BYTES, Held, Price
from headrace.server.exchange import EventStream, Exchange
from headrace.server.exposition import FINE
from headrace.server.requests import Job, explained
from headrace.server.service import DeltaStream, EngineStream, Service
from headrace.server.thinking import Bound, BoundedStream

_STREAMS_A_TURN = 16  # of the event loop, that one request may open
_EVENT_BYTES = 64 * 1024  # of a stream, that are written at once

Merged = AsyncGenerator[tuple[int, Sequence[RequestDelta]], None]


class Delivery:
    """``requests``: one a prompt. ``grammar_name``: of the field that says what the answer must be. ``bound``: of its reasoning."""

    def __init__(
        self, service: Service, exchange: Exchange, answer: Answer, requests: Sequence[Request], grammar_name: str, *, stream: bool,
        bound: Bound | None = None,
    ) -> None:  # fmt: skip
        self._service, self._exchange, self._answer = service, exchange, answer
        self._requests, self._grammar_name, self._is_stream, self._bound = requests, grammar_name, stream, bound
        self._n = requests[0].params.n
        self._last = [0.0] * len(answer.choices)  # when each choice grew
        self._started = False
        self._job: Job

    async def run(self, cost: Price) -> None:
        held = self._service.limits.budget.hold(cost.reserved)
        try:
            await self._run(held)
        finally:
            held.release()

    async def _run(self, held: Held) -> None:
        service, answer, stream = self._service, self._answer, self._is_stream
        service.limits.bodies.release(self._exchange)
        sources: list[EngineStream] = []
        for each in self._requests:
            sources.append(service.model.engine.submit(each, whole=not stream))
            if len(sources) % _STREAMS_A_TURN == 0:
                await asyncio.sleep(0)
        with service.observed.inflight.follow(self._exchange, answer, sources, self._requests) as self._job:
            self._exchange.prompt_tokens = self._job.prompt_tokens
            service.observed.metrics.totals.add("prompt_tokens_total", self._job.prompt_tokens)
            try:
                judged = [service.judged(self._bounded(*each), each[1]) for each in zip(sources, self._requests, strict=True)]
                async with contextlib.aclosing(merge(judged)) as merged:
                    await (self._stream(merged) if stream else self._collect(merged, held))
            except InvalidRequest as error:  # what only the engine could find out
                if error.param == "structured_outputs":
                    error.param = self._grammar_name
                raise
            finally:
                self._count()
        if not stream:
            tokens = sum(choice.num_tokens for choice in answer.choices)
            pieces = await service.limits.threads.run(held.size + TOKEN_BYTES * tokens, lambda: list(answer.pieces()), self._exchange.tenant)
            held.set(sum(map(len, pieces)))
            await self._exchange.reply_pieces(pieces)

    def _bounded(self, source: EngineStream, request: Request) -> EngineStream:
        tokenizer = self._service.model.engine.tokenizer
        if self._bound is None or tokenizer is None:
            return source

        async def submit(ids: array[int], params: SamplingParams) -> EngineStream:
            engine = self._service.model.engine
            await engine.inputs.check_grammar_soon(params, self._exchange.tenant)
            following = engine.inputs.request(
                ParsedPrompt(None, ids), params, priority=request.priority, cache_salt=request.cache_salt, explain=request.explain,
                tenant=request.tenant, expects=request.expects,
            )  # fmt: skip
            return engine.submit(following, whole=not self._is_stream)

        decode = partial(tokenizer.decode, skip_special_tokens=request.params.skip_special_tokens)
        return BoundedStream(source, request, self._bound, decode, submit)

    async def _stream(self, merged: Merged) -> None:
        """What comes before the first token leaves with it, unless it is much."""
        answer, events = self._answer, EventStream(self._exchange)
        forget = self._service.observed.pulse.add(events)
        event, seen, begun = answer.event, self._seen, False

        async def write(text: str) -> str:
            await events.write(with_usage(text, answer.usage()) if answer.shape.continuous_usage else text)
            if len(text) > _EVENT_BYTES:
                await asyncio.sleep(0)
            return ""

        try:
            async for source, batch in merged:
                text = ""
                for opening in () if begun else answer.opening():
                    text += opening
                    if len(text) > _EVENT_BYTES:
                        text = await write(text)
                begun = True
                for delta in batch:
                    choice = seen(source, delta)
                    if delta.token_ids or delta.finish_reason is not None:
                        text += event(choice, delta)
                    if len(text) > _EVENT_BYTES:
                        text = await write(text)
                if text:
                    await write(text)
            answer.explained = await explained(self._service, self._job)
            await events.finish(answer.closing())
        finally:
            forget()

    async def _collect(self, merged: Merged, held: Held) -> None:
        scores, before = 0, held.size
        async for source, batch in merged:
            for delta in batch:
                self._answer.add(self._seen(source, delta), delta)
                for entry in delta.logprobs:
                    scores += len(entry.token_ids)
            if scores:
                held.grow(max(before, SCORE_BYTES * scores))
        self._answer.explained = await explained(self._service, self._job)

    def _seen(self, source: int, delta: RequestDelta) -> int:
        """Counts a delta and returns its choice. Raises what the delta says went wrong."""
        choice, metrics = source * self._n + delta.index, self._service.observed.metrics
        self._answer.choices[choice].count(delta)
        if delta.token_ids:
            now, last = time.perf_counter(), self._last[choice]
            self._last[choice] = now
            metrics.totals.add("generation_tokens_total", len(delta.token_ids))
            if last:
                metrics.observe("inter_token_latency_seconds", now - last)
            elif not self._started:
                self._started = True
                for name in ("time_to_first_token_seconds", FINE):
                    metrics.observe(name, now - self._exchange.arrival)
        if delta.finish_reason is not None:
            self._job.take(choice, delta)
            self._finished(choice, delta)
        return choice

    def _finished(self, choice: int, delta: RequestDelta) -> None:
        reason, metrics = delta.finish_reason or "", self._service.observed.metrics
        metrics.count_end(reason if delta.refusal is None else "refused")
        if delta.index == 0:
            self._exchange.times = delta.times
        metrics.count_phases(delta.times, self._answer.choices[choice].num_tokens)
        if reason == "error":
            raise delta.refusal or StepFailed(delta.error or "The step that computed this request failed; send it again.")
        if reason == "abort":
            raise EngineDead("The request was ended by the engine; send it again.")

    def _count(self) -> None:
        """What has become of it, however it ended."""
        exchange, metrics, choices, prompts = self._exchange, self._service.observed.metrics, self._answer.choices, self._answer.prompts
        exchange.completion_tokens = sum(choice.num_tokens for choice in choices)
        exchange.cached_tokens = sum(prompt.cached_tokens for prompt in prompts)
        exchange.finish_reason = choices[0].finish_reason
        for place, (prompt, request) in enumerate(zip(prompts, self._requests, strict=True)):
            lengths = [choice.num_tokens for choice in choices[place * self._n : (place + 1) * self._n]]
            metrics.count_lengths(len(prompt.token_ids), prompt.cached_tokens, lengths, request.params.max_tokens or 0)
        if all(choice.finish_reason is not None for choice in choices):
            metrics.observe("e2e_request_latency_seconds", time.perf_counter() - exchange.arrival)
        else:
            metrics.count_end("abort")


async def merge(sources: Sequence[DeltaStream]) -> Merged:
    """``(source, deltas)`` from all sources as they come; the first error ends all of them."""
    if len(sources) == 1:
        async with contextlib.aclosing(sources[0]) as only:
            async for batch in only:
                yield 0, batch
        return
    queue: asyncio.Queue[tuple[int, Sequence[RequestDelta] | Exception | None]] = asyncio.Queue()
    tasks = [asyncio.create_task(_pump(index, source, queue)) for index, source in enumerate(sources)]
    try:
        open_sources = len(sources)
        while open_sources:
            index, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                open_sources -= 1
            else:
                yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(index: int, source: DeltaStream, queue: asyncio.Queue[tuple[int, Sequence[RequestDelta] | Exception | None]]) -> None:
    try:
        async with contextlib.aclosing(source):
            async for batch in source:
                queue.put_nowait((index, batch))
        queue.put_nowait((index, None))
    except Exception as error:  # handed to the reader, which raises it
        queue.put_nowait((index, error))
