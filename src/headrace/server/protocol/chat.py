"""/v1/chat/completions: a decoded body becomes a ChatRequest, or an error that names the field.

What lives here: this route's own fields. What may not: what routes share (sampling.py), messages (server/messages.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace.errors import InvalidRequest
from headrace.sampling_params import SamplingParams
from headrace.server.fields import CHAT
from headrace.server.messages import read_messages
from headrace.server.protocol.body import Body
from headrace.server.protocol.sampling import (
    AnswerOptions,
    TemplateOptions,
    answer_options,
    model_defaults,
    sampling_params,
    template_options,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A checked /v1/chat/completions body. ``echo``: the answer begins with the message that it continues."""

    messages: list[dict[str, Any]]
    echo: bool = False
    conversation: TemplateOptions
    params: SamplingParams
    options: AnswerOptions


def parse_chat(raw: Mapping[str, Any], defaults: Mapping[str, Any]) -> ChatRequest:
    """``defaults`` are the model's own sampling defaults. Raises InvalidRequest naming the field."""
    body = Body(raw, CHAT)
    limit_name, limit = _chat_limit(body)
    values = {**model_defaults(defaults), **body.sampling()}
    if limit is not None:
        values["max_tokens"] = limit
    if body.get("logprobs", False):
        values["logprobs"] = body.get("top_logprobs", 0)
    elif body.get("top_logprobs", 0):
        raise InvalidRequest("top_logprobs is given without logprobs; set logprobs to true.", param="top_logprobs")
    return ChatRequest(
        messages=read_messages(body.require("messages")),
        echo=_echo(body),
        conversation=template_options(body),
        params=sampling_params(body, values, {"max_tokens": limit_name, "logprobs": "top_logprobs"}),
        options=answer_options(body),
    )


def _echo(body: Body) -> bool:
    echo: bool = body.get("echo", False)
    if echo and not body.get("continue_final_message"):
        raise InvalidRequest("echo shows the message that is continued, and none is; set continue_final_message or leave echo out.", param="echo")
    return echo


def _chat_limit(body: Body) -> tuple[str, int | None]:
    old, new = body.get("max_tokens"), body.get("max_completion_tokens")
    if old is not None and new is not None and old != new:
        raise InvalidRequest(f"max_tokens is {old} and max_completion_tokens is {new}; give one of them.", param="max_tokens")
    return ("max_tokens", old) if new is None else ("max_completion_tokens", new)
