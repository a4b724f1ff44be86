"""Generation: from a checked request through the engine to an answer, streamed or whole.

What lives here: preparing prompts, driving engine streams into an Answer, counting. What may not: wire formats (answers.py,
protocol/), SSE framing (stream.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from array import array
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from headrace.engine.inputs import Message, ParsedPrompt
from headrace.engine.output import RequestDelta
from headrace.errors import EngineDead, InvalidRequest, StepFailed
from headrace.request import Request
from headrace.sampling_params import NO_EXPECTATIONS, SamplingParams, StructuredOutputs
from headrace.server.answers import Answer, ChatAnswer, CompletionAnswer, PromptState, Shape, with_usage
from headrace.server.budget import SCORE_BYTES, TOKEN_BYTES, Held, Price, price, shortened
from headrace.server.exchange import Exchange
from headrace.server.exposition import ServerMetrics
from headrace.server.inflight import Job
from headrace.server.messages import text_of
from headrace.server.parsed_answers import ParsedChatAnswer
from headrace.server.parsing import Form
from headrace.server.protocol import AnswerOptions, ChatRequest, TemplateOptions, parse_chat, parse_completion
from headrace.server.protocol.sampling import EXPECTED
from headrace.server.requests import explained
from headrace.server.service import CreateParser, DeltaStream, EngineStream, Service, Tokenizer
from headrace.server.stream import EventStream
from headrace.server.tenants import tenant_of
from headrace.server.thinking import Bound, BoundedStream
from headrace.server.threads import INLINE_BYTES
from headrace.server.tools import offered_schemas
from headrace.server.wire import encode

_STREAMS_A_TURN = 16  # of the event loop, that one request may open
_EVENT_BYTES = 64 * 1024  # of a stream, that are written at once
_ENDING = 256  # characters
_PIECE_BYTES = 128  # that a message, a part or a call costs beside its text

Asked = TypeVar("Asked", bound=ChatRequest)
Merged = AsyncGenerator[tuple[int, Sequence[RequestDelta]], None]


async def chat_completions(service: Service, exchange: Exchange) -> None:
    await converse(service, exchange, parse_chat, _chat_answer)


def _chat_answer(request: ChatRequest, shape: Shape, prompt: PromptState, tokenizer: Tokenizer | None, create_parser: CreateParser) -> Answer:
    """Without a parser the text is content throughout, and nothing looks at it."""
    parsers = [parser for _ in range(request.params.n) if (parser := create_parser()) is not None]
    echo = text_of(request.messages[-1]["content"]) if request.echo else ""
    if parsers:
        return ParsedChatAnswer(shape, prompt, parsers, tokenizer, echo=echo)
    return ChatAnswer(shape, prompt, request.params.n, tokenizer, echo=echo)


async def converse(
    service: Service,
    exchange: Exchange,
    parse: Callable[[Mapping[str, Any], Mapping[str, Any]], Asked],
    create_answer: Callable[[Asked, Shape, PromptState, Tokenizer | None, CreateParser], Answer],
    param: str = "messages",
    complete: Callable[[Asked], Awaitable[Asked]] | None = None,
) -> None:
    """Every route that answers a conversation. ``param`` is what the client calls the conversation.

    ``create_answer`` gets what makes a parser for one choice's text, or None where all of it is content. ``complete`` adds to the
    request what its body only refers to.
    """
    engine = service.engine
    request = await service.bodies.read(exchange, lambda raw: parse(raw, service.defaults))
    model = service.check_model(request.options.model)
    exchange.watch_disconnect()
    with service.admit(exchange, 1, request.options.user):
        request = request if complete is None else await complete(request)
        if request.options.truncate_prompt_tokens is None:
            engine.inputs.check_count(request.messages, param)
        parsed = await render_chat(service, exchange, request.messages, request.conversation, param)
        form, params, options = _formed(service, request, parsed.text or "")
        create_parser = form.create_parser
        params = service.parsed_params(params, create_parser)
        prepared = await _prepare(service, exchange, parsed, params, options, param)
        shape = _shape(service, model, params, options)
        echoed = text_of(request.messages[-1]["content"]) if request.echo else ""
        [prepared], cost = _priced(service, [prepared], shape, options, [_escaped_bytes(echoed)])
        state = PromptState(prepared.prompt_token_ids)
        answer = create_answer(request, shape, state, engine.tokenizer, create_parser)
        bound = await _bound(service, form, options, prepared.params)
        del request, parsed  # their texts may be large, and the answer may take long
        await _deliver(service, exchange, answer, [prepared], options, cost, bound)


async def _bound(service: Service, form: Form, options: AnswerOptions, params: SamplingParams) -> Bound | None:
    """Of the answer's reasoning, if there is any."""
    reasoning, tokens = form.reasoning, options.thinking_budget
    if tokens is not None and options.needs_reasoning and not service.reasons:
        raise InvalidRequest(
            "thinking_token_budget bounds reasoning, but how this model reasons is not known here; leave it out, or start with --reasoning-parser.",
            param="thinking_token_budget",
        )
    if reasoning is None or tokens is None:
        return None
    text = await service.closing(reasoning)
    closing = service.any_engine().inputs.encode(text, add_special_tokens=False)
    opened, most = form.opened or reasoning.implied, (params.max_tokens or 0) - len(closing) - 1
    return Bound(tokens=tokens, most=most, begin=reasoning.begin, end=reasoning.end, opened=opened, closing_text=text, closing=closing)


def _formed(service: Service, request: ChatRequest, prompt: str) -> tuple[Form, SamplingParams, AnswerOptions]:
    """What the answers are made of; where they are held to something, the grammar for it."""
    params, options, conversation = request.params, request.options, request.conversation
    wanted, choice = params.structured_outputs, conversation.choice
    if conversation.tools is not None and (choice.forced or wanted is not None):
        name = "tools" if choice.forced else options.grammar_name
        options = replace(options, grammar_name=name, tools=offered_schemas(conversation.tools, choice))
    continued = text_of(request.messages[-1]["content"]) if conversation.continue_final_message else None
    if continued is not None and choice.forced:
        raise InvalidRequest("tool_choice asks for a call, but the last message is to be continued; give one of them.", param="tool_choice")
    form, held = service.form(prompt[-_ENDING:], conversation.tools, choice, wanted, continued)
    return form, params if held is wanted else replace(params, structured_outputs=held), options


def weight(messages: Sequence[Message], tools: Sequence[Any] | None) -> int:
    """What rendering costs, in bytes of text: a conversation of ten thousand empty messages is a large one, too."""
    pieces = len(messages)
    for message in messages:
        content = message["content"]
        pieces += (len(content) if isinstance(content, list) else 0) + len(message.get("tool_calls") or ())
    objects = [tools, [message["tool_calls"] for message in messages if "tool_calls" in message]]
    return sum(len(text_of(message["content"])) for message in messages) + _PIECE_BYTES * pieces + sum(len(encode(each)) for each in objects if each)


async def render_chat(
    service: Service, exchange: Exchange, messages: Sequence[Message], options: TemplateOptions, param: str = "messages"
) -> ParsedPrompt:
    """Templates are programs and may take their time: never on the event loop."""
    render = partial(
        service.any_engine().inputs.chat_prompt,
        messages, tools=options.tools, add_generation_prompt=options.add_generation_prompt,
        continue_final_message=options.continue_final_message, **options.variables,
    )  # fmt: skip
    try:
        return await service.threads.run(INLINE_BYTES + 1 + weight(messages, options.tools), render, exchange.tenant)
    except InvalidRequest as error:
        error.param = param if error.param == "messages" else error.param
        raise


async def completions(service: Service, exchange: Exchange) -> None:
    engine = service.engine
    request = await service.bodies.read(exchange, partial(parse_completion, defaults=service.defaults))
    params, options = request.params, request.options
    model = service.check_model(options.model)
    if options.stream and request.echo and params.logprobs is not None:
        raise InvalidRequest("echo with logprobs is not given in streams; set stream to false.", param="echo")
    exchange.watch_disconnect()
    with service.admit(exchange, len(request.prompts), options.user):
        prepared = []
        for prompt in request.prompts:
            parsed = await encode_prompt(service, exchange, prompt, request.add_special_tokens, options.truncate_prompt_tokens)
            prepared.append(await _prepare(service, exchange, parsed, params, options, "prompt"))
            await asyncio.sleep(0)  # there may be a thousand
        shown = request.prompts if options.truncate_prompt_tokens is None else [each.prompt_token_ids for each in prepared]
        shape = _shape(service, model, params, options)
        states = [await _prompt_state(service, each, prompt, request.echo) for each, prompt in zip(prepared, shown, strict=True)]
        prepared, cost = _priced(service, prepared, shape, options, [_escaped_bytes(state.text) for state in states])
        answer = CompletionAnswer(shape, states, params.n, engine.tokenizer, echo=request.echo, discard=request.discard)
        del request, shown, parsed, prompt  # as above
        await _deliver(service, exchange, answer, prepared, options, cost)


async def encode_prompt(
    service: Service, exchange: Exchange, prompt: str | array[int], add_special_tokens: bool, truncate: int | None = None
) -> ParsedPrompt:
    """Text to ids, off the event loop if it is long; ids as they are. ``truncate`` None: a text that is far too long is refused early."""
    if not isinstance(prompt, str):
        return ParsedPrompt(None, prompt)
    encode = partial(service.any_engine().inputs.encode, prompt, add_special_tokens=add_special_tokens, truncate=truncate)
    return ParsedPrompt(prompt, array("i", await service.threads.run(len(prompt), encode, exchange.tenant)))


def _check_policy(service: Service, options: AnswerOptions) -> None:
    """What would change nothing here is refused."""
    if options.priority and service.scheduling_policy != "priority":
        raise InvalidRequest("priority needs a server started with --scheduling-policy priority; leave it out.", param="priority")
    if options.expects != NO_EXPECTATIONS and service.scheduling_policy not in ("qoe", "deadline"):
        name = next(theirs for ours, theirs in EXPECTED.items() if getattr(options.expects, ours) is not None)
        raise InvalidRequest(f"{name} needs a server started with --scheduling-policy qoe or deadline; leave it out.", param=name)


async def _prepare(
    service: Service, exchange: Exchange, parsed: ParsedPrompt, params: SamplingParams, options: AnswerOptions, param: str
) -> Request:
    """The engine's own validator: nothing is submitted before every prompt of the request has passed."""
    _check_policy(service, options)
    text_only = ParsedPrompt(None, parsed.token_ids)
    inputs = service.any_engine().inputs
    try:
        await inputs.check_grammar_soon(params, exchange.tenant)
        return inputs.request(
            0,
            text_only,
            params,
            arrival_time=time.perf_counter(),
            truncate_prompt_tokens=options.truncate_prompt_tokens,
            param=param,
            clamp=options.limit_name is None,
        )
    except InvalidRequest as error:
        if error.param == "structured_outputs" and options.tools:
            await _blame_tool(service, options, error, exchange.tenant)
        names = {"prompt_token_ids": param, "max_tokens": options.limit_name or "max_tokens", "structured_outputs": options.grammar_name}
        error.param = names.get(error.param or "", error.param)
        raise


async def _blame_tool(service: Service, options: AnswerOptions, error: InvalidRequest, tenant: str) -> None:
    """Names the tool whose schema alone cannot be followed either."""
    for place, schema in options.tools:
        wanted = StructuredOutputs(json=schema)
        try:
            await service.any_engine().inputs.check_grammar_soon(SamplingParams(structured_outputs=wanted), tenant)
        except InvalidRequest as found:
            error.message, error.param = found.message.replace("the JSON schema", place, 1), place
            return


def _priced(
    service: Service, prepared: list[Request], shape: Shape, options: AnswerOptions, echo: Sequence[int]
) -> tuple[list[Request], Price]:
    """What the answer costs at most; shorter, where nobody has said how long it may be. Raises InvalidRequest where it is too much."""
    cost = price(prepared, shape, stream=options.stream, echo=echo)
    if options.limit_name is None:
        prepared = shortened(prepared, cost, service.budget.each)
        cost = replace(price(prepared, shape, stream=options.stream, echo=echo), scores=0)  # they count as they come
    service.budget.check(cost)
    return prepared, cost


def _escaped_bytes(text: str) -> int:
    """In JSON, at most about."""
    return len(text) if text.isascii() else 6 * len(text)


async def _prompt_state(service: Service, request: Request, prompt: str | array[int], echo: bool) -> PromptState:
    """``text`` is what echo shows: the prompt as it was written, or as it reads after truncation."""
    ids, tokenizer = request.prompt_token_ids, service.any_engine().tokenizer
    if not echo:
        return PromptState(ids)
    if isinstance(prompt, str):
        return PromptState(ids, prompt)
    return PromptState(ids, "" if tokenizer is None else await service.threads.run(TOKEN_BYTES * len(ids), partial(tokenizer.decode, ids, False)))


def _shape(service: Service, model: str, params: SamplingParams, options: AnswerOptions) -> Shape:
    return Shape(
        model=model,
        fingerprint=service.fingerprint,
        logprobs=params.logprobs is not None,
        prompt_logprobs=options.prompt_logprobs,
        token_ids=options.return_token_ids,
        include_usage=options.include_usage,
        continuous_usage=options.continuous_usage,
    )


async def _deliver(
    service: Service, exchange: Exchange, answer: Answer, prepared: Sequence[Request], options: AnswerOptions, cost: Price, bound: Bound | None = None
) -> None:
    held = service.budget.hold(cost.reserved)
    try:
        await _answer(service, exchange, answer, prepared, options, held, bound)
    finally:
        held.release()


async def _answer(
    service: Service, exchange: Exchange, answer: Answer, prepared: Sequence[Request], options: AnswerOptions, held: Held, bound: Bound | None
) -> None:
    engine = service.engine
    service.bodies.release(exchange)
    sources, salt, tenant = [], service.cache_salt(exchange, options.cache_salt), tenant_of(service.config, exchange.key_name, options.user)

    def submit(ids: array[int], params: SamplingParams) -> EngineStream:
        prompt = ParsedPrompt(None, ids)
        return engine.stream(
            prompt, params, priority=options.priority, cache_salt=salt, explain=options.explain, tenant=tenant, expects=options.expects,
            whole=not options.stream,
        )  # fmt: skip

    async def go_on(ids: array[int], params: SamplingParams) -> EngineStream:
        await engine.inputs.check_grammar_soon(params, exchange.tenant)
        return submit(ids, params)

    def bounded(source: EngineStream, request: Request) -> EngineStream:
        if bound is None or engine.tokenizer is None:
            return source
        decode = partial(engine.tokenizer.decode, skip_special_tokens=request.params.skip_special_tokens)
        return BoundedStream(source, request, bound, decode, go_on)

    for each in prepared:
        sources.append(submit(each.prompt_token_ids, each.params))
        if len(sources) % _STREAMS_A_TURN == 0:
            await asyncio.sleep(0)
    with service.inflight.follow(exchange, answer, sources, prepared, explain=options.explain) as job:
        run = _Run(service.metrics, exchange, answer, job, [each.params.max_tokens or 0 for each in prepared])
        run.begin(job.prompt_tokens)
        try:
            judged = [service.judged(bounded(source, each), each) for source, each in zip(sources, prepared, strict=True)]
            async with contextlib.aclosing(merge(judged)) as merged:
                if options.stream:
                    await _stream(service, exchange, answer, merged, run, options)
                else:
                    await _collect(answer, merged, run, held)
                    answer.explained = await explained(service, job)
        except InvalidRequest as error:  # what only the engine could find out
            if error.param == "structured_outputs":
                error.param = options.grammar_name
            raise
        finally:
            run.end()
    if not options.stream:
        tokens = sum(choice.num_tokens for choice in answer.choices)
        pieces = await service.threads.run(held.size + TOKEN_BYTES * tokens, lambda: list(answer.pieces()), exchange.tenant)
        held.set(sum(map(len, pieces)))
        await exchange.reply_pieces(pieces)


async def _stream(service: Service, exchange: Exchange, answer: Answer, merged: Merged, run: _Run, options: AnswerOptions) -> None:
    events = EventStream(exchange)
    forget = service.pulse.add(events)
    event, seen, write, begun = answer.event, run.seen, events.write, False
    try:
        async for source, batch in merged:
            text = ""
            if not begun:
                begun, text = True, await _open(answer, events)
            for delta in batch:
                choice = seen(source, delta)
                if delta.token_ids or delta.finish_reason is not None:
                    text += event(choice, delta)
                if len(text) > _EVENT_BYTES:
                    await write(with_usage(text, answer.usage()) if options.continuous_usage else text)
                    text = ""
                    await asyncio.sleep(0)
            if text:
                await write(with_usage(text, answer.usage()) if options.continuous_usage else text)
        answer.explained = await explained(service, run.job)
        await events.finish(answer.closing())
    finally:
        forget()


async def _open(answer: Answer, events: EventStream) -> str:
    """Writes what comes before the first token, but for an end that is short enough to leave with it."""
    text = ""
    for event in answer.opening():
        if len(text) > _EVENT_BYTES:
            await events.write(text)
            text = ""
            await asyncio.sleep(0)
        text += event
    return text


async def _collect(answer: Answer, merged: Merged, run: _Run, held: Held) -> None:
    scores, before = 0, held.size
    async for source, batch in merged:
        for delta in batch:
            answer.choices[run.seen(source, delta)].add(delta)
            for entry in delta.logprobs:
                scores += len(entry.token_ids)
        if scores:
            held.grow(max(before, SCORE_BYTES * scores))


class _Run:
    """One answer's way through the engine: its counts and times."""

    __slots__ = ("_answer", "_choices", "_exchange", "_last", "_max_tokens", "_metrics", "_n", "_started", "job")

    def __init__(
        self, metrics: ServerMetrics, exchange: Exchange, answer: Answer, job: Job, max_tokens: Sequence[int]
    ) -> None:
        """``max_tokens``: of each prompt's answers, at most."""
        self.job = job
        self._max_tokens = max_tokens
        self._metrics = metrics
        self._exchange = exchange
        self._answer = answer
        self._choices = answer.choices
        self._n = job.n
        self._last = [0.0] * len(answer.choices)
        self._started = False

    def begin(self, prompt_tokens: int) -> None:
        self._exchange.prompt_tokens = prompt_tokens
        self._metrics.prompt_tokens += prompt_tokens

    def seen(self, source: int, delta: RequestDelta) -> int:
        """Counts a delta and returns its choice. Raises what the delta says went wrong."""
        choice = source * self._n + delta.index
        self._choices[choice].count(delta)
        if delta.token_ids:
            now, last = time.perf_counter(), self._last[choice]
            self._last[choice] = now
            self._metrics.generation_tokens += len(delta.token_ids)
            if last:
                self._metrics.inter_token.observe(now - last)
            elif not self._started:
                self._started = True
                self._metrics.time_to_first_token.observe(now - self._exchange.arrival)
                self._metrics.first_tokens.observe(now - self._exchange.arrival)
        if delta.finish_reason is not None:
            self.job.take(choice, delta)
            self._finished(choice, delta)
        return choice

    def _finished(self, choice: int, delta: RequestDelta) -> None:
        reason = delta.finish_reason or ""
        self._metrics.count_end(reason if delta.refusal is None else "refused")
        if delta.index == 0:
            self._exchange.times = delta.times
        self._metrics.count_phases(delta.times, self._choices[choice].num_tokens)
        if reason == "error":
            raise delta.refusal or StepFailed(delta.error or "The step that computed this request failed; send it again.")
        if reason == "abort":
            raise EngineDead("The request was ended by the engine; send it again.")

    def end(self) -> None:
        exchange = self._exchange
        exchange.completion_tokens = sum(choice.num_tokens for choice in self._choices)
        exchange.cached_tokens = sum(prompt.cached_tokens for prompt in self._answer.prompts)
        exchange.finish_reason = self._choices[0].finish_reason
        for place, (prompt, limit) in enumerate(zip(self._answer.prompts, self._max_tokens, strict=True)):
            lengths = [choice.num_tokens for choice in self._choices[place * self._n : (place + 1) * self._n]]
            self._metrics.count_lengths(len(prompt.token_ids), prompt.cached_tokens, lengths, limit)
        if all(choice.finish_reason is not None for choice in self._choices):
            self._metrics.end_to_end.observe(time.perf_counter() - self._exchange.arrival)
        else:
            self._metrics.count_end("abort")


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
