"""/v1/messages and /v1/messages/count_tokens: answers as Anthropic's Messages API has them.

What lives here: the message, its events, its errors, the two handlers. What may not: reading requests (protocol/anthropic.py), generation.
"""

from __future__ import annotations

import uuid
from typing import Any

from headrace.errors import HeadraceError, InvalidRequest
from headrace.server import generate
from headrace.server.answers import PromptState, Shape
from headrace.server.exchange import Exchange
from headrace.server.parsing.segments import OutputParser
from headrace.server.parts import Kind, Part, PartsAnswer
from headrace.server.protocol.anthropic import parse_count_tokens, parse_messages
from headrace.server.protocol.chat import ChatRequest
from headrace.server.service import CreateParser, Service, Tokenizer
from headrace.server.wire import ErrorShape, decode_object, encode, error_object, quote

_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}
_ERROR_TYPES = {"internal_error": "api_error", "service_unavailable_error": "overloaded_error"}
_TOO_LARGE = 413
_DETAILED = ("thread_unsupported_request",)  # by their details clients of this API know what to do instead


async def messages(service: Service, exchange: Exchange) -> None:
    await generate.converse(service, exchange, parse_messages, _create_answer)


def _create_answer(
    request: ChatRequest, shape: Shape, prompt: PromptState, tokenizer: Tokenizer | None, create_parser: CreateParser
) -> MessageAnswer:
    return MessageAnswer(shape, prompt, create_parser(), request.params.stop)


async def count_tokens(service: Service, exchange: Exchange) -> None:
    _ = service.engine  # raises while it takes nothing
    request = await service.bodies.read(exchange, parse_count_tokens)
    service.check_model(request.model)
    parsed = await generate.render_chat(service, exchange, request.messages, request.conversation)
    await exchange.reply_json({"input_tokens": len(parsed.token_ids or ())})


class AnthropicErrors(ErrorShape):
    """Anthropic's clients look at ``type``; everybody else's at ``error``, which has the fields it has everywhere."""

    def body(self, error: HeadraceError) -> bytes:
        shown = error_object(error)["error"]
        kind = "request_too_large" if error.status == _TOO_LARGE else _ERROR_TYPES.get(error.type, error.type)
        if error.code in _DETAILED:
            shown["details"] = {"error_code": error.code}
        if error.code == "context_length_exceeded":
            shown["message"] = f"prompt is too long: {shown['message']}"  # by these words clients of this API know it
        return encode({"type": "error", "error": {**shown, "type": kind}})

    def event(self, error: HeadraceError) -> bytes:
        return b"event: error\ndata: " + self.body(error) + b"\n\n"


class MessageAnswer(PartsAnswer):
    """One message, whole or as events. ``stops`` are the request's own stop strings."""

    def __init__(self, shape: Shape, prompt: PromptState, parser: OutputParser | None, stops: tuple[str, ...]) -> None:
        super().__init__(shape, prompt, parser)
        self.id = self._id = f"msg_{uuid.uuid4().hex}"
        self._stops = stops
        self._heads: list[str] = []  # of each part's deltas, but for the text

    def begin(self) -> str:
        return _event("message_start", message=self._message([], None, None)) + _event("ping")

    def open(self, index: int, part: Part) -> str:
        kind, name = {
            Kind.REASONING: ("thinking_delta", "thinking"),
            Kind.TEXT: ("text_delta", "text"),
            Kind.CALL: ("input_json_delta", "partial_json"),
        }[part.kind]
        self._heads.append(f'event: content_block_delta\ndata: {{"type":"content_block_delta","index":{index},"delta":{{"type":"{kind}","{name}":')
        return _event("content_block_start", index=index, content_block=_block(part))

    def grow(self, index: int, part: Part, text: str) -> str:
        return f"{self._heads[index]}{quote(text)}}}}}\n\n"

    def close(self, index: int, part: Part) -> str:
        return _event("content_block_stop", index=index)

    def closing(self) -> str:
        reason, stop = self._stop()
        delta = {"stop_reason": reason, "stop_sequence": stop}
        return _event("message_delta", delta=delta, usage=self.usage(), **self.extras()) + _event("message_stop")

    def whole(self) -> dict[str, Any]:
        return self._message([_block(part) for part in self.parts], *self._stop())

    def _message(self, content: list[Any], stop_reason: str | None, stop_sequence: str | None) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self.shape.model,
            "content": content,
            "stop_reason": stop_reason,
            "stop_sequence": stop_sequence,
            "usage": self.usage(),
            **self.extras(),
        }

    def _stop(self) -> tuple[str, str | None]:
        reason = self.end_reason
        found = self.choice.stop_reason
        if reason == "stop" and isinstance(found, str) and found in self._stops:
            return "stop_sequence", found
        return _STOP_REASONS.get(reason, "end_turn"), None

    def usage(self) -> dict[str, Any]:
        """As Anthropic counts: what was read from the cache is not among the input tokens."""
        prompt = self.prompts[0]
        return {
            "input_tokens": len(prompt.token_ids) - prompt.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": prompt.cached_tokens,
            "output_tokens": self.choice.num_tokens,
        }


def _block(part: Part) -> dict[str, Any]:
    if part.kind is Kind.REASONING:
        return {"type": "thinking", "thinking": part.text, "signature": ""}
    if part.kind is Kind.TEXT:
        return {"type": "text", "text": part.text}
    return {"type": "tool_use", "id": part.id, "name": part.name, "input": _arguments(part)}


def _arguments(part: Part) -> dict[str, Any]:
    """Empty where they are not complete; the stop_reason then says why."""
    try:
        return decode_object(part.text.encode()) if part.closed else {}
    except InvalidRequest:
        return {}


def _event(kind: str, **fields: Any) -> str:
    return f"event: {kind}\ndata: {encode({'type': kind, **fields}).decode()}\n\n"
