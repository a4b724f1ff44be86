"""/v1/messages and /v1/messages/count_tokens, as Anthropic's Messages API has them: bodies, answers, events, errors,
the two handlers.

What lives here: these routes' own fields, blocks to messages and back. What may not: what routes share (body.py),
generation.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from headrace.errors import HeadraceError, InvalidRequest
from headrace.request import Given, Json
from headrace.server import generate
from headrace.server.answer_types import AnthropicError, Block, Message, MessageUsage
from headrace.server.dialects.body import (
    Body,
    ChatRequest,
    Conversation,
    Count,
    Effort,
    Format,
    GeneratingBody,
    Label,
    Stops,
    Variables,
    asked,
    template_variables,
)
from headrace.server.dialects.conversation import (
    MAX_MESSAGES,
    MAX_TOOLS,
    Chat,
    Mode,
    Name,
    ToolChoice,
    content_of,
    function_tool,
    offer,
    tool_call,
)
from headrace.server.dialects.parts import Kind, Part, PartsAnswer, event_of
from headrace.server.exchange import Exchange
from headrace.server.generate import ChatContext
from headrace.server.parsing.parser import OutputParser
from headrace.server.service import Service
from headrace.server.wire import (
    HOLE,
    AnswerOptions,
    ErrorFormat,
    PromptState,
    around,
    decode_object,
    encode,
    error_object,
    quote,
)


class TextBlock(Struct, tag="text"):
    text: str


Texts = str | list[TextBlock]


class ThinkingBlock(Struct, tag="thinking"):
    thinking: str


class ToolUse(Struct, tag="tool_use"):
    id: str
    name: str
    input: Json


class ToolResult(Struct, tag="tool_result"):
    tool_use_id: str
    content: Texts | None = None


class UserTurn(Struct, tag_field="role", tag="user"):
    content: str | Annotated[list[TextBlock | ToolResult], Meta(min_length=1)]


class AssistantTurn(Struct, tag_field="role", tag="assistant"):
    content: str | Annotated[list[TextBlock | ThinkingBlock | ToolUse], Meta(min_length=1)]


class CustomTool(Struct):
    """One that the client runs."""

    name: Name
    type: Literal["custom"] | None = None
    description: str | None = None
    input_schema: Json | None = None
    strict: Any = None


class AutoChoice(Struct, tag="auto"):
    disable_parallel_tool_use: bool | None = None


class AnyChoice(AutoChoice, tag="any"):
    pass


class NoChoice(AutoChoice, tag="none"):
    pass


class ToolNamed(AutoChoice, tag="tool", kw_only=True):
    name: str


class AdaptiveThinking(Struct, tag="adaptive", forbid_unknown_fields=True):
    display: Literal["summarized"] | None = None


class DisabledThinking(AdaptiveThinking, tag="disabled"):
    pass


class EnabledThinking(AdaptiveThinking, tag="enabled"):
    budget_tokens: Count | None = None


class OutputConfig(Struct, frozen=True, forbid_unknown_fields=True):
    effort: Effort | None = None
    format: Format | None = None


Turns = Annotated[list[UserTurn | AssistantTurn], Meta(min_length=1, max_length=MAX_MESSAGES)]
CustomTools = Annotated[list[CustomTool], Meta(max_length=MAX_TOOLS)]
ToolUseChoice = AutoChoice | AnyChoice | NoChoice | ToolNamed
Thinking = AdaptiveThinking | DisabledThinking | EnabledThinking


class MessagesBody(GeneratingBody, kw_only=True):
    messages: Turns
    max_tokens: int
    system: Texts | None = None
    tools: CustomTools = []
    tool_choice: ToolUseChoice | None = None
    output_config: OutputConfig = OutputConfig()
    thinking: Thinking | None = None
    chat_template_kwargs: Variables = {}
    cache_control: Json = {}
    stop_sequences: Stops = []
    thinking_token_budget: Count | None = None
    inference_geo: Label = ""

    format_name = "output_config.format"
    wire_names = {"stop": "stop_sequences"}
    also = ("parts", "CountBody")


class CountBody(Body, kw_only=True):
    model: str | None = None
    messages: Turns
    system: Texts | None = None
    tools: CustomTools = []
    tool_choice: ToolUseChoice | None = None
    output_config: OutputConfig = OutputConfig()
    thinking: Thinking | None = None
    chat_template_kwargs: Variables = {}
    cache_control: Json = {}


Prompt = MessagesBody | CountBody


def parse_messages(raw: Given, defaults: Given) -> ChatRequest[MessagesBody]:
    """``defaults`` are the model's own sampling defaults. Raises InvalidRequest naming the field."""
    body = MessagesBody.read(raw)
    own = body.thinking.budget_tokens if isinstance(body.thinking, EnabledThinking) else None
    return ChatRequest(
        conversation=_conversation(body),
        **asked(body, defaults, max_tokens=body.max_tokens, stop=body.stop_sequences),
        thinking_budget=own if body.thinking_token_budget is None else body.thinking_token_budget,
    )


def parse_count_tokens(raw: Given) -> tuple[CountBody, Conversation]:
    """Raises InvalidRequest naming the field."""
    body = CountBody.read(raw)
    return body, _conversation(body)


def _conversation(body: Prompt) -> Conversation:
    """One that ends with the assistant's words is to be gone on with. How much to think is the template's to say to the
    model."""
    tools = [function_tool(tool.name, tool.description, tool.input_schema, tool.strict) for tool in body.tools]
    shown, choice = offer(_choice(body.tool_choice or AutoChoice()), tools, place="input_schema")
    thinking = {} if body.thinking is None else {"enable_thinking": not isinstance(body.thinking, DisabledThinking)}
    continues = isinstance(body.messages[-1], AssistantTurn)
    return Conversation(
        messages=_messages(body),
        tools=shown,
        choice=choice,
        add_generation_prompt=not continues,
        continue_final_message=continues,
        variables=template_variables(body.output_config.effort, {**thinking, **body.chat_template_kwargs}),
    )


def _choice(choice: AutoChoice) -> ToolChoice:
    if isinstance(choice, ToolNamed):
        return ToolChoice(Mode.NAMED, choice.name, parallel=False)
    mode = Mode.REQUIRED if isinstance(choice, AnyChoice) else Mode.NONE if isinstance(choice, NoChoice) else Mode.AUTO
    return ToolChoice(mode, parallel=not choice.disable_parallel_tool_use)


def _texts(given: Texts | None) -> Any:
    return given or "" if given is None or isinstance(given, str) else content_of([block.text for block in given])


def _messages(prompt: Prompt) -> Chat:
    messages: Chat = [] if prompt.system is None else [{"role": "system", "content": _texts(prompt.system)}]
    for turn in prompt.messages:
        if isinstance(turn.content, str):
            messages.append({"role": "user" if isinstance(turn, UserTurn) else "assistant", "content": turn.content})
        else:
            messages += _of_user(turn.content) if isinstance(turn, UserTurn) else [_of_assistant(turn.content)]
    return messages


def _of_user(blocks: list[TextBlock | ToolResult]) -> Chat:
    """Results of tools are messages of their own, in the order of the blocks; texts side by side are one message."""
    messages: Chat = []
    texts: list[str] = []  # of the last message
    for block in blocks:
        if isinstance(block, ToolResult):
            messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": _texts(block.content)})
            continue
        if not messages or messages[-1]["role"] != "user":
            texts = []
            messages.append({"role": "user"})
        texts.append(block.text)
        messages[-1]["content"] = content_of(texts)
    return messages


def _of_assistant(blocks: list[TextBlock | ThinkingBlock | ToolUse]) -> Json:
    texts = [block.text for block in blocks if isinstance(block, TextBlock)]
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    calls = [tool_call(block.id, block.name, block.input) for block in blocks if isinstance(block, ToolUse)]
    message: Json = {"role": "assistant", "content": content_of(texts) if texts else None}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}
_ERROR_TYPES = {"internal_error": "api_error", "service_unavailable_error": "overloaded_error"}
_TOO_LARGE = 413
_DETAILED = ("thread_unsupported_request",)  # by their details clients of this API know what to do instead


async def messages(service: Service, exchange: Exchange) -> None:
    await generate.converse(service, exchange, parse_messages, _create_answer)


def _create_answer(context: ChatContext[ChatRequest[MessagesBody]]) -> MessageAnswer:
    return MessageAnswer(context.options, context.prompt, context.parsers[0], context.request.params.stop)


async def count_tokens(service: Service, exchange: Exchange) -> None:
    _ = service.model.engine  # raises while it takes nothing
    body, conversation = await service.limits.bodies.read(exchange, parse_count_tokens)
    service.model.check_model(body.model)
    parsed = await generate.render_chat(service, exchange, conversation)
    await exchange.reply_json({"input_tokens": len(parsed.token_ids or ())})


class AnthropicErrors(ErrorFormat):
    """Anthropic's clients look at ``type``, all others at ``error``, which has the fields it has everywhere."""

    def body(self, error: HeadraceError) -> bytes:
        shown = error_object(error).error
        shown.type = "request_too_large" if error.status == _TOO_LARGE else _ERROR_TYPES.get(error.type, error.type)
        if error.code in _DETAILED:
            shown.details = {"error_code": error.code}
        if error.code == "context_length_exceeded":
            shown.message = f"prompt is too long: {shown.message}"  # by these words clients of this API know it
        return encode(AnthropicError(shown))

    def event(self, error: HeadraceError) -> bytes:
        return b"event: error\ndata: " + self.body(error) + b"\n\n"


class MessageAnswer(PartsAnswer):
    """One message, whole or as events. ``stops`` are the request's own stop strings."""

    prefix = "msg_"

    def __init__(
        self, options: AnswerOptions, prompt: PromptState, parser: OutputParser | None, stops: tuple[str, ...]
    ) -> None:
        super().__init__(options, prompt, parser)
        self._stops = stops
        self._around: list[list[str]] = []  # each part's deltas, but for the text

    def begin(self) -> str:
        return event_of("message_start", message=self._message([], None, None)) + event_of("ping")

    def open(self, index: int, part: Part) -> str:
        kind, name = {
            Kind.REASONING: ("thinking_delta", "thinking"),
            Kind.TEXT: ("text_delta", "text"),
            Kind.CALL: ("input_json_delta", "partial_json"),
        }[part.kind]
        self._around.append(
            around({"type": "content_block_delta", "index": index, "delta": {"type": kind, name: HOLE}})
        )
        return event_of("content_block_start", index=index, content_block=_block(part))

    def grow(self, index: int, part: Part, text: str) -> str:
        return f"event: content_block_delta\ndata: {quote(text).join(self._around[index])}\n\n"

    def close(self, index: int, part: Part) -> str:
        return event_of("content_block_stop", index=index)

    def closing(self) -> str:
        reason, stop = self._stop()
        delta = {"stop_reason": reason, "stop_sequence": stop}
        return event_of("message_delta", delta=delta, usage=self.usage(), **self.extras()) + event_of("message_stop")

    def whole(self) -> Message:
        return self._message([_block(part) for part in self.parts], *self._stop())

    def _message(self, content: list[Block], stop_reason: Any, stop_sequence: str | None) -> Message:
        return Message(
            id=self.id, model=self.options.model, content=content, stop_reason=stop_reason, stop_sequence=stop_sequence,
            usage=self.usage(), **self.extras(),
        )  # fmt: skip

    def _stop(self) -> tuple[str, str | None]:
        reason = self.end_reason
        found = self.choice.stop_reason
        if reason == "stop" and isinstance(found, str) and found in self._stops:
            return "stop_sequence", found
        return _STOP_REASONS.get(reason, "end_turn"), None

    def usage(self) -> MessageUsage:
        """As Anthropic counts: what was read from the cache is not among the input tokens."""
        read, cached = len(self.prompts[0].token_ids), self.prompts[0].cached_tokens
        return MessageUsage(
            input_tokens=read - cached, cache_read_input_tokens=cached, output_tokens=self.choice.num_tokens
        )


def _block(part: Part) -> Block:
    if part.kind is Kind.REASONING:
        return Block("thinking", thinking=part.text, signature="")
    if part.kind is Kind.TEXT:
        return Block("text", text=part.text)
    return Block("tool_use", id=part.id, name=part.name, input=_arguments(part))


def _arguments(part: Part) -> Json:
    """Empty where they are not complete; the stop_reason then says why."""
    try:
        return decode_object(part.text.encode()) if part.closed else {}
    except InvalidRequest:
        return {}
