"""/v1/responses: a decoded body becomes a ResponsesRequest, or an error that names the field.

What lives here: this route's own fields, items to messages. What may not: what routes share (sampling.py), answers (server/responses.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from headrace.errors import InvalidRequest
from headrace.server.custom import Grammar, read_custom
from headrace.server.fields import RESPONSES
from headrace.server.messages import MAX_MESSAGES, ROLES, check_template_kwargs, content_of
from headrace.server.parsing.texts import INPUT
from headrace.server.protocol.blocks import (
    Chat,
    check_count,
    check_messages,
    check_tools,
    function_tool,
    read_arguments,
    read_object,
    read_text,
    read_texts,
    read_type,
    refuse_type,
    tool_call,
)
from headrace.server.protocol.body import Body
from headrace.server.protocol.chat import ChatRequest
from headrace.server.protocol.sampling import TemplateOptions, answer_options, effort_variables, model_defaults, sampling_params
from headrace.server.tools import offer

_TEXT_KINDS = ("input_text", "output_text", "text", "refusal")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesRequest(ChatRequest):
    """A checked /v1/responses body. ``shown``: fields that the answer repeats. ``items``: the input; ``previous``: whose conversation it
    goes on with.
    """

    shown: Mapping[str, Any]
    items: Sequence[Any]
    previous: str | None
    store: bool

    def after(self, earlier: Sequence[Any]) -> ResponsesRequest:
        """With the items of a conversation before its own. Raises InvalidRequest."""
        messages = _read_items([("previous_response_id", earlier), ("input", self.items)])
        return replace(self, messages=[*_instructions(self.shown["instructions"]), *messages], items=[*earlier, *self.items])


def parse_responses(raw: Mapping[str, Any], defaults: Mapping[str, Any]) -> ResponsesRequest:
    """``defaults`` are the model's own sampling defaults. Raises InvalidRequest naming the field."""
    body = Body(raw, RESPONSES)
    values = {**model_defaults(defaults), **body.sampling()}
    if "max_output_tokens" in body:
        values["max_tokens"] = body.get("max_output_tokens")
    _check_text(body.get("text", {}))
    params = sampling_params(body, values, {"max_tokens": "max_output_tokens"})
    given = body.require("input")
    items = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": given}]}] if isinstance(given, str) else given
    return ResponsesRequest(
        messages=[*_instructions(body.get("instructions")), *_read_items([("input", items)])],
        items=items,
        previous=body.get("previous_response_id"),
        store=body.get("store", True),
        conversation=_template_options(body),
        params=params,
        options=answer_options(body),
        shown={
            "instructions": body.get("instructions"),
            "max_output_tokens": body.get("max_output_tokens"),
            "metadata": body.get("metadata", {}),
            "previous_response_id": body.get("previous_response_id"),
            "store": body.get("store", True),
            "parallel_tool_calls": body.get("parallel_tool_calls", True),
            "reasoning": {"effort": body.get("reasoning", {}).get("effort"), "summary": None},
            "temperature": params.temperature,
            "text": {"format": body.get("text", {}).get("format") or {"type": "text"}},
            "tool_choice": body.get("tool_choice", "auto"),
            "tools": body.get("tools", []),
            "top_p": params.top_p,
            "user": body.get("user"),
        },
    )


def _check_text(text: dict[str, Any]) -> None:
    for name, value in text.items():
        if name not in ("format", "verbosity"):
            raise InvalidRequest(f"text has no field {name[:100]!r}; leave it out.", param=f"text.{name[:100]}", code="unknown_parameter")
        if name == "verbosity" and value not in (None, "medium"):
            raise InvalidRequest("text.verbosity is not supported; say it in a message.", param="text.verbosity", code="unsupported_parameter")


def _template_options(body: Body) -> TemplateOptions:
    tools, customs = [], {}
    for index, tool in enumerate(check_tools(body.get("tools", []))):
        function, grammar = _read_tool(f"tools[{index}]", tool)
        tools.append(function)
        if tool["type"] == "custom":
            customs[function["function"]["name"]] = grammar
    choice, parallel = body.get("tool_choice", "auto"), body.get("parallel_tool_calls", True)
    shown, read = offer(_read_choice(choice), tools, parallel=parallel, place="parameters", customs=customs)
    variables = {**_effort(body.get("reasoning", {})), **check_template_kwargs(body.get("chat_template_kwargs"))}
    return TemplateOptions(tools=shown, choice=read, variables=variables)


def _read_tool(where: str, tool: Any) -> tuple[dict[str, Any], Grammar | None]:
    kind = read_type(where, tool)
    if kind == "custom":
        return read_custom(where, tool)
    if kind != "function":
        raise refuse_type(where, kind, "tools of type function and custom, which the client runs")
    return function_tool(where, tool, "parameters"), None


def _read_choice(choice: Any) -> Any:
    """``tool_choice`` as chat completions have it."""
    if isinstance(choice, str):
        if choice not in ("auto", "none", "required"):
            raise InvalidRequest("tool_choice must be auto, none, required or a function.", param="tool_choice")
        return choice
    kind = read_type("tool_choice", choice)
    if kind == "allowed_tools":
        return choice
    if kind not in ("function", "custom"):
        raise refuse_type("tool_choice", kind, "a choice of type function, custom or allowed_tools")
    return {"type": "function", "function": {"name": read_text("tool_choice", choice, "name")}}


def _effort(reasoning: dict[str, Any]) -> dict[str, Any]:
    """How much to think is the template's to say to the model. Reasoning is given whole, never as a summary."""
    for name, value in reasoning.items():
        neutral = (None, "auto") if name in ("summary", "generate_summary") else (None,)
        if name != "effort" and value not in neutral:
            where = f"reasoning.{name[:100]}"
            raise InvalidRequest(f"{where} is not supported; leave it out.", param=where, code="unsupported_parameter")
    return effort_variables("reasoning.effort", reasoning.get("effort"))


def _instructions(given: str | None) -> Chat:
    return [] if given is None else [{"role": "system", "content": given}]


def _read_items(lists: Sequence[tuple[str, Sequence[Any]]]) -> Chat:
    """Lists of items, by what errors call them, as one conversation."""
    reader = _Items()
    check_count("input", sum(len(items) for _, items in lists), MAX_MESSAGES)
    for name, items in lists:
        for index, item in enumerate(items):
            reader.add(f"{name}[{index}]", item)
    reader.end()
    return check_messages("input", reader.messages)


class _Items:
    """Items to messages: reasoning and calls belong to the assistant's message beside them."""

    def __init__(self) -> None:
        self.messages: Chat = []
        self._thoughts: list[str] = []

    def add(self, where: str, item: Any) -> None:
        kind = read_object(where, item).get("type")
        if kind in (None, "message"):
            self._add_message(where, item)
        elif kind in ("function_call", "custom_tool_call"):
            self._add_call(where, item)
        elif kind in ("function_call_output", "custom_tool_call_output"):
            output = read_texts(f"{where}.output", item.get("output"), _TEXT_KINDS)
            self.messages.append({"role": "tool", "tool_call_id": read_text(where, item, "call_id"), "content": content_of(output)})
        elif kind == "reasoning":
            self._thoughts += read_texts(f"{where}.content", item.get("content") or [], ("reasoning_text",))
        elif kind == "item_reference":
            raise InvalidRequest(f"{where} refers to an item, but only whole responses are stored; send the item itself.", param=where)
        else:
            raise refuse_type(where, str(kind), "messages, calls (function_call, custom_tool_call) and their outputs, and reasoning")

    def end(self) -> None:
        if self._thoughts:
            self._assistant()

    def _add_message(self, where: str, item: dict[str, Any]) -> None:
        role = item.get("role")
        if role not in ROLES or role == "tool":
            raise InvalidRequest(f"{where}.role must be one of system, developer, user, assistant.", param=f"{where}.role")
        content = content_of(read_texts(f"{where}.content", item.get("content"), _TEXT_KINDS))
        if role == "assistant":
            self._assistant()["content"] = content
        else:
            self.messages.append({"role": "system" if role == "developer" else role, "content": content})

    def _add_call(self, where: str, item: dict[str, Any]) -> None:
        if item["type"] == "custom_tool_call":
            arguments = {INPUT: read_text(where, item, INPUT)}
        else:
            arguments = read_arguments(f"{where}.arguments", read_text(where, item, "arguments"))
        call = tool_call(read_text(where, item, "call_id"), read_text(where, item, "name"), arguments)
        last = self.messages[-1] if self.messages else {}
        message = last if last.get("role") == "assistant" and not self._thoughts else self._assistant()
        message.setdefault("tool_calls", []).append(call)

    def _assistant(self) -> dict[str, Any]:
        """A new message, with what was thought before it."""
        message: dict[str, Any] = {"role": "assistant", "content": None}
        if self._thoughts:
            message["reasoning_content"], self._thoughts = "\n".join(self._thoughts), []
        self.messages.append(message)
        return message
