"""/tokenize and /detokenize: a decoded body becomes a TokenizeRequest or a DetokenizeRequest, or an error that names the field.

What lives here: these routes' fields. What may not: tokenizers.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace.errors import InvalidRequest
from headrace.server.fields import DETOKENIZE, TOKENIZE
from headrace.server.messages import read_messages
from headrace.server.protocol.body import Body, read_ids
from headrace.server.protocol.sampling import TemplateOptions, template_options


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizeRequest:
    """A checked /tokenize body: a text, or messages."""

    model: str | None
    prompt: str | None
    messages: list[dict[str, Any]] | None
    conversation: TemplateOptions
    add_special_tokens: bool
    return_token_strs: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DetokenizeRequest:
    """A checked /detokenize body."""

    model: str | None
    tokens: array[int]
    skip_special_tokens: bool


def parse_tokenize(raw: Mapping[str, Any]) -> TokenizeRequest:
    """Raises InvalidRequest naming the field."""
    body = Body(raw, TOKENIZE)
    if ("prompt" in body) == ("messages" in body):
        raise InvalidRequest("Give either prompt or messages.", param="prompt", code="missing_required_parameter")
    messages = read_messages(body.get("messages")) if "messages" in body else None
    return TokenizeRequest(
        model=body.get("model"),
        prompt=body.get("prompt"),
        messages=messages,
        conversation=template_options(body),
        add_special_tokens=body.get("add_special_tokens", messages is None),
        return_token_strs=body.get("return_token_strs", False),
    )


def parse_detokenize(raw: Mapping[str, Any]) -> DetokenizeRequest:
    """Raises InvalidRequest naming the field."""
    body = Body(raw, DETOKENIZE)
    return DetokenizeRequest(
        model=body.get("model"), tokens=read_ids("tokens", body.require("tokens")), skip_special_tokens=body.get("skip_special_tokens", False)
    )
