"""Generation: from a checked request to the engine's, and its answer's way back to the client, streamed or whole; the
same for all APIs (dialects/).

What lives here: preparing prompts, what answers are held to and may cost; driving engine streams into an Answer, its
counts and times. What may not: wire formats (wire.py, dialects/), SSE framing (exchange.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from array import array
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from headrace.engine.inputs import Message, ParsedPrompt, attributes_of
from headrace.engine.output import RequestDelta
from headrace.errors import EngineDead, InvalidRequest, StepFailed
from headrace.request import NO_EXPECTATIONS, Given, Request, SamplingParams, StructuredOutputs
from headrace.server.dialects.body import (
    EXPECTED_NAMES,
    ChatRequest,
    Conversation,
    GeneratingBody,
    GenerationRequest,
)
from headrace.server.dialects.conversation import text_of
from headrace.server.exchange import EventStream, Exchange
from headrace.server.exposition import FINE
from headrace.server.inflight import TrackedRequest, explained
from headrace.server.limits import (
    INLINE_BYTES,
    SCORE_BYTES,
    TOKEN_BYTES,
    Price,
    Reservation,
    price,
    shortened,
)
from headrace.server.parsing import PLAIN, AnswerFormat
from headrace.server.parsing.parser import OutputParser
from headrace.server.service import DeltaStream, EngineStream, Service
from headrace.server.thinking import Bound, BoundedStream
from headrace.server.tools import offered_schemas
from headrace.server.wire import Answer, AnswerOptions, PromptState, encode, with_usage

if TYPE_CHECKING:
    from headrace.engine.tokenizer import Tokenizer


_ENDING = 256  # characters
_PIECE_BYTES = 128  # that a message, a part or a call costs beside its text

Chatting = TypeVar("Chatting", bound=ChatRequest[Any])
Schemas = Sequence[tuple[str, str]]  # where each stands in the request, and the schema


@dataclass(frozen=True, slots=True)
class ChatContext(Generic[Chatting]):
    """What the answer to a conversation is made from. ``parsers``: one a choice; None where all of its text is
    content."""

    request: Chatting
    options: AnswerOptions
    prompt: PromptState
    tokenizer: Tokenizer | None
    parsers: Sequence[OutputParser | None]
    echo: str  # what the answer begins with


async def converse(
    service: Service,
    exchange: Exchange,
    parse: Callable[[Given, Given], Chatting],
    create_answer: Callable[[ChatContext[Chatting]], Answer],
    param: str = "messages",
    complete: Callable[[Chatting], Awaitable[Chatting]] | None = None,
) -> None:
    """Every route that answers a conversation. ``param`` is what the client calls the conversation.

    ``complete`` adds to the request what its body only refers to.
    """
    engine = service.model.engine
    request = await service.limits.bodies.read(exchange, lambda raw: parse(raw, service.model.defaults))
    options = await options_of(service, request)
    exchange.watch_disconnect()
    with service.limits.admit(exchange, 1, request.body.user_name):
        request = request if complete is None else await complete(request)
        conversation = request.conversation
        if request.body.truncate_prompt_tokens is None:
            engine.inputs.check_count(conversation.messages, param)
        parsed = await render_chat(service, exchange, conversation, param)
        format, params, tools = _constrained(service, request, parsed.text or "")
        parsers = [None if format is PLAIN else format.create_parser() for _ in range(params.n)]
        params = params if parsers[0] is None else service.model.parsed_params(params)
        prepared = await prepare(service, exchange, request, param, parsed, params, tools)
        echoed = text_of(conversation.messages[-1]["content"]) if request.echo else ""
        [prepared], cost = priced(service, [prepared], options, request.body, [echoed])
        prompt = PromptState(prepared.prompt_token_ids)
        answer = create_answer(ChatContext(request, options, prompt, engine.tokenizer, parsers, echoed))
        bound = await _bound(service, format, request, prepared.params)
        stream, grammar_name = request.body.stream, _grammar_name(request)
        del request, conversation, parsed  # their texts may be large, and the answer may take long
        await Delivery(service, exchange, answer, [prepared], grammar_name, stream=stream, bound=bound).run(cost)


async def _bound(
    service: Service, format: AnswerFormat, request: ChatRequest[Any], params: SamplingParams
) -> Bound | None:
    """Of the answer's reasoning, if there is any."""
    reasoning, tokens = format.reasoning, request.thinking_budget
    if request.body.thinking_token_budget is not None and not service.model.reasons:
        raise InvalidRequest(
            "thinking_token_budget bounds reasoning, but how this model reasons is not known here; leave it out, or start with --reasoning-parser.",
            param="thinking_token_budget",
        )
    if reasoning is None or tokens is None:
        return None
    text = await service.model.closing(reasoning)
    closing = service.model.any_engine.inputs.encode(text, add_special_tokens=False)
    opened, most = format.opened or reasoning.implied, (params.max_tokens or 0) - len(closing) - 1
    return Bound(tokens, most, reasoning.begin, reasoning.end, opened, text, closing)


def _constrained(
    service: Service, request: ChatRequest[Any], prompt: str
) -> tuple[AnswerFormat, SamplingParams, Schemas]:
    """What the answers are made of; where they are held to something, the grammar for it, and the tools that it is made
    of."""
    params, conversation = request.params, request.conversation
    wanted, choice, tools = params.structured_outputs, conversation.choice, conversation.tools
    offered = offered_schemas(tools, choice) if tools is not None and (choice.forced or wanted is not None) else ()
    if conversation.continue_final_message and choice.forced:
        raise InvalidRequest(
            "tool_choice asks for a call, but the last message is to be continued; give one of them.",
            param="tool_choice",
        )
    answer, grammar = service.model.answer_format(prompt[-_ENDING:], conversation, wanted)
    return answer, params if grammar is wanted else replace(params, structured_outputs=grammar), offered


def _grammar_name(request: GenerationRequest[Any]) -> str:
    """Of the field that the answer's grammar is made of."""
    calls = (
        isinstance(request, ChatRequest)
        and request.conversation.tools is not None
        and request.conversation.choice.forced
    )
    return "tools" if calls else request.body.grammar_name


def weight(messages: Sequence[Message], tools: Sequence[Any] | None) -> int:
    """What rendering costs, in bytes of text: a conversation of ten thousand empty messages is a large one, too."""
    pieces = len(messages)
    for message in messages:
        content = message["content"]
        pieces += (len(content) if isinstance(content, list) else 0) + len(message.get("tool_calls") or ())
    objects = [tools, [message["tool_calls"] for message in messages if "tool_calls" in message]]
    return (
        sum(len(text_of(message["content"])) for message in messages)
        + _PIECE_BYTES * pieces
        + sum(len(encode(each)) for each in objects if each)
    )


async def render_chat(
    service: Service, exchange: Exchange, conversation: Conversation, param: str = "messages"
) -> ParsedPrompt:
    """Templates are programs and may take their time: never on the event loop."""
    messages, tools = conversation.messages, conversation.tools
    render = partial(
        service.model.any_engine.inputs.chat_prompt,
        messages, tools=tools, add_generation_prompt=conversation.add_generation_prompt,
        continue_final_message=conversation.continue_final_message, **conversation.variables,
    )  # fmt: skip
    try:
        return await service.limits.threads.run(INLINE_BYTES + 1 + weight(messages, tools), render, exchange.tenant)
    except InvalidRequest as error:
        error.param = param if error.param == "messages" else error.param
        raise


async def encode_prompt(
    service: Service, exchange: Exchange, prompt: str | array[int], special: bool, truncate: int | None = None
) -> ParsedPrompt:
    """Text to ids, off the event loop if it is long; ids as they are. ``truncate`` None: a text that is far too long is
    refused early."""
    if not isinstance(prompt, str):
        return ParsedPrompt(None, prompt)
    encode = partial(service.model.any_engine.inputs.encode, prompt, add_special_tokens=special, truncate=truncate)
    return ParsedPrompt(prompt, array("i", await service.limits.threads.run(len(prompt), encode, exchange.tenant)))


def _check_policy(service: Service, request: GenerationRequest[Any]) -> None:
    """What would change nothing here is refused."""
    service.model.check_priority(request.body.priority)
    if request.expects != NO_EXPECTATIONS and service.model.scheduling_policy not in ("qoe", "deadline"):
        name = next(theirs for ours, theirs in EXPECTED_NAMES.items() if getattr(request.expects, ours) is not None)
        raise InvalidRequest(
            f"{name} needs a server started with --scheduling-policy qoe or deadline; leave it out.", param=name
        )


async def prepare(
    service: Service, exchange: Exchange, request: GenerationRequest[Any], param: str, parsed: ParsedPrompt, params: SamplingParams,
    tools: Schemas = (),
) -> Request:  # fmt: skip
    """The engine's own validator: nothing is submitted before every prompt of the request has passed. ``tools``: that a
    grammar is made of."""
    _check_policy(service, request)
    inputs, body = service.model.any_engine.inputs, request.body
    attributes = service.request_attributes(
        exchange, body, body.user_name, explain=body.explain, expects=request.expects
    )
    try:
        await inputs.check_grammar_soon(params, exchange.tenant)
        return inputs.request(
            parsed, params, param=param, clamp=body.limit_name is None, truncate_prompt_tokens=body.truncate_prompt_tokens,
            **attributes,
        )  # fmt: skip
    except InvalidRequest as error:
        if error.param == "structured_outputs" and tools:
            await _blame_tool(service, tools, error, exchange.tenant)
        names = dict(prompt_token_ids=param, max_tokens=body.limit_name, structured_outputs=_grammar_name(request))
        error.param = names.get(error.param or "") or error.param
        raise


async def _blame_tool(service: Service, tools: Schemas, error: InvalidRequest, tenant: str) -> None:
    """Names the tool whose schema alone cannot be followed either."""
    for place, schema in tools:
        wanted = StructuredOutputs(json=schema)
        try:
            await service.model.any_engine.inputs.check_grammar_soon(SamplingParams(structured_outputs=wanted), tenant)
        except InvalidRequest as found:
            error.message, error.param = found.message.replace("the JSON schema", place, 1), place
            return


def priced(
    service: Service, prepared: list[Request], options: AnswerOptions, body: GeneratingBody, echoed: Sequence[str]
) -> tuple[list[Request], Price]:
    """What the answer costs at most; shorter, where the request has no limit. Raises InvalidRequest where it
    is too much."""
    echo = [len(text) if text.isascii() else 6 * len(text) for text in echoed]  # in JSON, at most about
    cost = price(prepared, options, stream=body.stream, echo=echo)
    if body.limit_name is None:
        prepared = shortened(prepared, cost, service.limits.budget.each)
        cost = replace(price(prepared, options, stream=body.stream, echo=echo), scores=0)  # they count as they come
    service.limits.budget.check(cost)
    return prepared, cost


async def options_of(service: Service, request: GenerationRequest[Any]) -> AnswerOptions:
    """Raises NotFound for a model that is not served, or does not generate."""
    service.model.check_task("generate")
    return await service.model.named(request.options, request.body.model)


# --- answers

_STREAMS_A_TURN = 16  # of the event loop, that one request may open
_EVENT_BYTES = 64 * 1024  # of a stream, that are written at once

Merged = AsyncGenerator[tuple[int, Sequence[RequestDelta]], None]
Arrivals = asyncio.Queue[tuple[int, Sequence[RequestDelta] | Exception | None]]


class Delivery:
    """``requests``: one a prompt. ``grammar_name``: of the field that says what the answer must be. ``bound``: of its
    reasoning."""

    def __init__(
        self, service: Service, exchange: Exchange, answer: Answer, requests: Sequence[Request], grammar_name: str, *, stream: bool,
        bound: Bound | None = None,
    ) -> None:  # fmt: skip
        self._service, self._exchange, self._answer = service, exchange, answer
        self._requests, self._grammar_name, self._is_stream, self._bound = requests, grammar_name, stream, bound
        self._n = requests[0].params.n
        self._last = [0.0] * len(answer.choices)  # when each choice grew
        self._started = False
        self._job: TrackedRequest

    async def run(self, cost: Price) -> None:
        reserved = self._service.limits.budget.reserve(cost.reserved)
        try:
            await self._run(reserved)
        finally:
            reserved.release()

    async def _run(self, reserved: Reservation) -> None:
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
                judged = [
                    service.judged(self._bounded(*each), each[1]) for each in zip(sources, self._requests, strict=True)
                ]
                async with contextlib.aclosing(merge(judged)) as merged:
                    await (self._stream(merged) if stream else self._collect(merged, reserved))
            except InvalidRequest as error:  # what only the engine could find out
                if error.param == "structured_outputs":
                    error.param = self._grammar_name
                raise
            finally:
                self._count()
        if not stream:
            tokens = sum(choice.num_tokens for choice in answer.choices)
            pieces = await service.limits.threads.run(
                reserved.size + TOKEN_BYTES * tokens, lambda: list(answer.pieces()), self._exchange.tenant
            )
            reserved.set(sum(map(len, pieces)))
            await self._exchange.reply_pieces(pieces)

    def _bounded(self, source: EngineStream, request: Request) -> EngineStream:
        tokenizer = self._service.model.engine.tokenizer
        if self._bound is None or tokenizer is None:
            return source

        async def submit(ids: array[int], params: SamplingParams) -> EngineStream:
            engine = self._service.model.engine
            await engine.inputs.check_grammar_soon(params, self._exchange.tenant)
            following = engine.inputs.request(ParsedPrompt(None, ids), params, **attributes_of(request))
            return engine.submit(following, whole=not self._is_stream)

        decode = partial(tokenizer.decode, skip_special_tokens=request.params.skip_special_tokens)
        return BoundedStream(source, request, self._bound, decode, submit)

    async def _stream(self, merged: Merged) -> None:
        """What comes before the first token leaves with it, unless it is much."""
        answer, events = self._answer, EventStream(self._exchange)
        forget = self._service.observed.pings.add(events)
        event, seen, begun = answer.event, self._seen, False

        async def write(text: str) -> str:
            await events.write(with_usage(text, answer.usage()) if answer.options.continuous_usage else text)
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

    async def _collect(self, merged: Merged, reserved: Reservation) -> None:
        scores, before = 0, reserved.size
        async for source, batch in merged:
            for delta in batch:
                self._answer.add(self._seen(source, delta), delta)
                for entry in delta.logprobs:
                    scores += len(entry.token_ids)
            if scores:
                reserved.grow(max(before, SCORE_BYTES * scores))
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
            raise delta.refusal or StepFailed(
                delta.error or "The step that computed this request failed; send it again."
            )
        if reason == "abort":
            raise EngineDead("The request was ended by the engine; send it again.")

    def _count(self) -> None:
        """What has become of it, however it ended."""
        exchange = self._exchange
        metrics = self._service.observed.metrics
        choices = self._answer.choices
        prompts = self._answer.prompts
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
    queue = Arrivals()
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


async def _pump(index: int, source: DeltaStream, queue: Arrivals) -> None:
    end: Exception | None = None
    try:
        async with contextlib.aclosing(source):
            async for batch in source:
                queue.put_nowait((index, batch))
    except Exception as error:  # handed to the reader, which raises it
        end = error
    queue.put_nowait((index, end))
