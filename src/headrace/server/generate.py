"""Generation: from a checked request to the engine's, the same for all APIs (dialects/).

What lives here: preparing prompts, what answers are held to and may cost. What may not: wire formats (answers.py, dialects/), how answers
reach the client (delivery.py).
"""

from __future__ import annotations

from array import array
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from headrace.engine.inputs import Message, ParsedPrompt
from headrace.errors import InvalidRequest
from headrace.request import Request
from headrace.sampling_params import NO_EXPECTATIONS, SamplingParams, StructuredOutputs
from headrace.server.answers import Answer, PromptState, Shape
from headrace.server.auth import tenant_of
from headrace.server.bodies import INLINE_BYTES
from headrace.server.budget import Price, price, shortened
from headrace.server.delivery import Delivery
from headrace.server.exchange import Exchange
from headrace.server.messages import text_of
from headrace.server.parsing import Form
from headrace.server.protocol.sampling import EXPECTED_NAMES, Asked, ChatRequest, Conversation, GeneratingBody
from headrace.server.service import CreateParser, Service
from headrace.server.thinking import Bound
from headrace.server.tools import offered_schemas
from headrace.server.wire import encode

if TYPE_CHECKING:
    from headrace.engine.tokenizer import Tokenizer

_ENDING = 256  # characters
_PIECE_BYTES = 128  # that a message, a part or a call costs beside its text

Chatting = TypeVar("Chatting", bound=ChatRequest[Any])
Schemas = Sequence[tuple[str, str]]  # where each stands in the request, and the schema


async def converse(
    service: Service,
    exchange: Exchange,
    parse: Callable[[Mapping[str, Any], Mapping[str, Any]], Chatting],
    create_answer: Callable[[Chatting, Shape, PromptState, Tokenizer | None, CreateParser], Answer],
    param: str = "messages",
    complete: Callable[[Chatting], Awaitable[Chatting]] | None = None,
) -> None:
    """Every route that answers a conversation. ``param`` is what the client calls the conversation.

    ``create_answer`` gets what makes a parser for one choice's text, or None where all of it is content. ``complete`` adds to the
    request what its body only refers to.
    """
    engine = service.model.engine
    request = await service.limits.bodies.read(exchange, lambda raw: parse(raw, service.model.defaults))
    shape = await shape_of(service, request)
    exchange.watch_disconnect()
    with service.limits.admit(exchange, 1, request.body.user_name):
        request = request if complete is None else await complete(request)
        conversation = request.conversation
        if request.body.truncate_prompt_tokens is None:
            engine.inputs.check_count(conversation.messages, param)
        parsed = await render_chat(service, exchange, conversation, param)
        form, params, tools = _formed(service, request, parsed.text or "")
        params = service.model.parsed_params(params, form.create_parser)
        prepared = await prepare(service, exchange, request, param, parsed, params, tools)
        echoed = text_of(conversation.messages[-1]["content"]) if request.echo else ""
        [prepared], cost = priced(service, [prepared], shape, request.body, [echoed])
        answer = create_answer(request, shape, PromptState(prepared.prompt_token_ids), engine.tokenizer, form.create_parser)
        bound = await _bound(service, form, request, prepared.params)
        stream, grammar_name = request.body.stream, _grammar_name(request)
        del request, conversation, parsed  # their texts may be large, and the answer may take long
        await Delivery(service, exchange, answer, [prepared], grammar_name, stream=stream, bound=bound).run(cost)


async def _bound(service: Service, form: Form, request: ChatRequest[Any], params: SamplingParams) -> Bound | None:
    """Of the answer's reasoning, if there is any."""
    reasoning, tokens = form.reasoning, request.thinking_budget
    if tokens is not None and request.needs_reasoning and not service.model.reasons:
        raise InvalidRequest(
            "thinking_token_budget bounds reasoning, but how this model reasons is not known here; leave it out, or start with --reasoning-parser.",
            param="thinking_token_budget",
        )
    if reasoning is None or tokens is None:
        return None
    text = await service.model.closing(reasoning)
    closing = service.model.any_engine().inputs.encode(text, add_special_tokens=False)
    opened, most = form.opened or reasoning.implied, (params.max_tokens or 0) - len(closing) - 1
    return Bound(tokens=tokens, most=most, begin=reasoning.begin, end=reasoning.end, opened=opened, closing_text=text, closing=closing)


def _formed(service: Service, request: ChatRequest[Any], prompt: str) -> tuple[Form, SamplingParams, Schemas]:
    """What the answers are made of; where they are held to something, the grammar for it, and the tools that it is made of."""
    params, conversation = request.params, request.conversation
    wanted, choice, tools = params.structured_outputs, conversation.choice, conversation.tools
    offered = offered_schemas(tools, choice) if tools is not None and (choice.forced or wanted is not None) else ()
    continued = text_of(conversation.messages[-1]["content"]) if conversation.continue_final_message else None
    if continued is not None and choice.forced:
        raise InvalidRequest("tool_choice asks for a call, but the last message is to be continued; give one of them.", param="tool_choice")
    form, held = service.model.form(prompt[-_ENDING:], tools, choice, wanted, continued)
    return form, params if held is wanted else replace(params, structured_outputs=held), offered


def _grammar_name(request: Asked[Any]) -> str:
    """Of the field that the answer's grammar is made of."""
    calls = isinstance(request, ChatRequest) and request.conversation.tools is not None and request.conversation.choice.forced
    return "tools" if calls else request.body.grammar_name


def weight(messages: Sequence[Message], tools: Sequence[Any] | None) -> int:
    """What rendering costs, in bytes of text: a conversation of ten thousand empty messages is a large one, too."""
    pieces = len(messages)
    for message in messages:
        content = message["content"]
        pieces += (len(content) if isinstance(content, list) else 0) + len(message.get("tool_calls") or ())
    objects = [tools, [message["tool_calls"] for message in messages if "tool_calls" in message]]
    return sum(len(text_of(message["content"])) for message in messages) + _PIECE_BYTES * pieces + sum(len(encode(each)) for each in objects if each)


async def render_chat(service: Service, exchange: Exchange, conversation: Conversation, param: str = "messages") -> ParsedPrompt:
    """Templates are programs and may take their time: never on the event loop."""
    messages, tools = conversation.messages, conversation.tools
    render = partial(
        service.model.any_engine().inputs.chat_prompt,
        messages, tools=tools, add_generation_prompt=conversation.add_generation_prompt,
        continue_final_message=conversation.continue_final_message, **conversation.variables,
    )  # fmt: skip
    try:
        return await service.limits.threads.run(INLINE_BYTES + 1 + weight(messages, tools), render, exchange.tenant)
    except InvalidRequest as error:
        error.param = param if error.param == "messages" else error.param
        raise


async def encode_prompt(
    service: Service, exchange: Exchange, prompt: str | array[int], add_special_tokens: bool, truncate: int | None = None
) -> ParsedPrompt:
    """Text to ids, off the event loop if it is long; ids as they are. ``truncate`` None: a text that is far too long is refused early."""
    if not isinstance(prompt, str):
        return ParsedPrompt(None, prompt)
    encode = partial(service.model.any_engine().inputs.encode, prompt, add_special_tokens=add_special_tokens, truncate=truncate)
    return ParsedPrompt(prompt, array("i", await service.limits.threads.run(len(prompt), encode, exchange.tenant)))


def _check_policy(service: Service, request: Asked[Any]) -> None:
    """What would change nothing here is refused."""
    if request.body.priority and service.model.scheduling_policy != "priority":
        raise InvalidRequest("priority needs a server started with --scheduling-policy priority; leave it out.", param="priority")
    if request.expects != NO_EXPECTATIONS and service.model.scheduling_policy not in ("qoe", "deadline"):
        name = next(theirs for ours, theirs in EXPECTED_NAMES.items() if getattr(request.expects, ours) is not None)
        raise InvalidRequest(f"{name} needs a server started with --scheduling-policy qoe or deadline; leave it out.", param=name)


async def prepare(
    service: Service, exchange: Exchange, request: Asked[Any], param: str, parsed: ParsedPrompt, params: SamplingParams, tools: Schemas = ()
) -> Request:
    """The engine's own validator: nothing is submitted before every prompt of the request has passed. ``tools``: that a grammar is made of."""
    _check_policy(service, request)
    inputs, body, adapter = service.model.any_engine().inputs, request.body, service.model.adapter_of(request.body.model)
    try:
        await inputs.check_grammar_soon(params, exchange.tenant)
        return inputs.request(
            parsed, params, param=param, clamp=body.limit_name is None, truncate_prompt_tokens=body.truncate_prompt_tokens,
            priority=body.priority, cache_salt=service.cache_salt(exchange, body.cache_salt), explain=body.explain,
            tenant=tenant_of(service.config, exchange.key_name, body.user_name, adapter), expects=request.expects, adapter=adapter,
        )  # fmt: skip
    except InvalidRequest as error:
        if error.param == "structured_outputs" and tools:
            await _blame_tool(service, tools, error, exchange.tenant)
        names = {"prompt_token_ids": param, "max_tokens": body.limit_name or "max_tokens", "structured_outputs": _grammar_name(request)}
        error.param = names.get(error.param or "", error.param)
        raise


async def _blame_tool(service: Service, tools: Schemas, error: InvalidRequest, tenant: str) -> None:
    """Names the tool whose schema alone cannot be followed either."""
    for place, schema in tools:
        wanted = StructuredOutputs(json=schema)
        try:
            await service.model.any_engine().inputs.check_grammar_soon(SamplingParams(structured_outputs=wanted), tenant)
        except InvalidRequest as found:
            error.message, error.param = found.message.replace("the JSON schema", place, 1), place
            return


def priced(
    service: Service, prepared: list[Request], shape: Shape, body: GeneratingBody, echoed: Sequence[str]
) -> tuple[list[Request], Price]:
    """What the answer costs at most; shorter, where nobody has said how long it may be. Raises InvalidRequest where it is too much."""
    echo = [len(text) if text.isascii() else 6 * len(text) for text in echoed]  # in JSON, at most about
    cost = price(prepared, shape, stream=body.stream, echo=echo)
    if body.limit_name is None:
        prepared = shortened(prepared, cost, service.limits.budget.each)
        cost = replace(price(prepared, shape, stream=body.stream, echo=echo), scores=0)  # they count as they come
    service.limits.budget.check(cost)
    return prepared, cost


async def shape_of(service: Service, request: Asked[Any]) -> Shape:
    """Raises NotFound for a model that is not served."""
    await service.model.learn(request.body.model)
    return replace(request.shape, model=service.model.check_model(request.body.model), fingerprint=service.model.fingerprint)
