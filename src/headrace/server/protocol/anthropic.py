"""/v1/messages and its count_tokens: a decoded body becomes a ChatRequest, or an error that names the field.

What lives here: these routes' own fields, blocks to messages. What may not: what routes share (sampling.py), answers (server/anthropic.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace.errors import InvalidRequest
from headrace.server.fields import COUNT_TOKENS, MESSAGES
from headrace.server.messages import MAX_MESSAGES, check_template_kwargs, content_of
from headrace.server.protocol.blocks import (
    Chat,
    check_count,
    check_messages,
    check_tools,
    function_tool,
    read_object,
    read_text,
    read_texts,
    read_type,
    refuse_type,
    tool_call,
)
from headrace.server.protocol.body import Body
from headrace.server.protocol.chat import ChatRequest
from headrace.server.protocol.sampling import TemplateOptions, answer_options, effort_variables, model_defaults, read_budget, sampling_params
from headrace.server.tools import offer


@dataclass(frozen=True, slots=True, kw_only=True)
class CountRequest:
    """A checked /v1/messages/count_tokens body."""

    model: str | None
    messages: Chat
    conversation: TemplateOptions


def parse_messages(raw: Mapping[str, Any], defaults: Mapping[str, Any]) -> ChatRequest:
    """``defaults`` are the model's own sampling defaults. Raises InvalidRequest naming the field."""
    body = Body(raw, MESSAGES)
    values = {**model_defaults(defaults), **body.sampling(), "max_tokens": body.require("max_tokens"), "stop": body.get("stop_sequences")}
    messages = _read_conversation(body)
    return ChatRequest(
        messages=messages,
        conversation=_template_options(body, messages),
        params=sampling_params(body, values, {"stop": "stop_sequences"}),
        options=answer_options(body),
    )


def parse_count_tokens(raw: Mapping[str, Any]) -> CountRequest:
    """Raises InvalidRequest naming the field."""
    body = Body(raw, COUNT_TOKENS)
    messages = _read_conversation(body)
    return CountRequest(model=body.get("model"), messages=messages, conversation=_template_options(body, messages))


def _effort(given: dict[str, Any]) -> dict[str, Any]:
    """``format`` is read where all routes' are."""
    further = next((name for name, value in given.items() if name not in ("effort", "format") and value is not None), None)
    if further is not None:
        name = f"output_config.{further[:100]}"
        raise InvalidRequest(f"{name} is not supported; leave it out.", param=name, code="unsupported_parameter")
    return effort_variables("output_config.effort", given.get("effort"))


def _template_options(body: Body, messages: Chat) -> TemplateOptions:
    """A conversation that ends with the assistant's words is one to go on with."""
    tools = [_read_tool(f"tools[{index}]", tool) for index, tool in enumerate(check_tools(body.get("tools", [])))]
    given = body.get("tool_choice", {"type": "auto"})
    shown, choice = offer(_read_choice(given), tools, parallel=not given.get("disable_parallel_tool_use"), place="input_schema")
    effort = _effort(body.get("output_config", {}))
    variables = {**effort, **_thinking(body.get("thinking")), **check_template_kwargs(body.get("chat_template_kwargs"))}
    continues = messages[-1]["role"] == "assistant"
    return TemplateOptions(tools=shown, choice=choice, variables=variables, add_generation_prompt=not continues, continue_final_message=continues)


def _read_tool(where: str, tool: Any) -> dict[str, Any]:
    kind = read_object(where, tool).get("type")
    if kind not in (None, "custom"):
        raise refuse_type(where, str(kind), "tools of type custom, which the client runs")
    return function_tool(where, tool, "input_schema")


def _read_choice(choice: dict[str, Any]) -> Any:
    """``tool_choice`` as chat completions have it."""
    if not isinstance(choice.get("disable_parallel_tool_use"), bool | None):
        where = "tool_choice.disable_parallel_tool_use"
        raise InvalidRequest(f"{where} must be a boolean.", param=where, code="invalid_type")
    kind = read_type("tool_choice", choice)
    if kind == "tool":
        return {"type": "function", "function": {"name": read_text("tool_choice", choice, "name")}}
    if kind not in ("auto", "any", "none"):
        raise InvalidRequest("tool_choice.type must be auto, any, tool or none.", param="tool_choice.type")
    return "required" if kind == "any" else kind


def _thinking(given: dict[str, Any] | None) -> dict[str, Any]:
    """Whether to think is the template's to say to the model. The budget is read where all routes' are."""
    if given is None:
        return {}
    kind = read_type("thinking", given)
    if kind not in ("enabled", "adaptive", "disabled"):
        raise InvalidRequest("thinking.type must be enabled, adaptive or disabled.", param="thinking.type")
    for name, value in given.items():
        if name not in ("type", "budget_tokens") and value not in ((None, "summarized") if name == "display" else (None,)):
            name = f"thinking.{name[:100]}"
            raise InvalidRequest(f"{name} is not supported; leave it out.", param=name, code="unsupported_parameter")
    if read_budget("thinking.budget_tokens", given.get("budget_tokens")) is not None and kind != "enabled":
        where = "thinking.budget_tokens"
        raise InvalidRequest(f"{where} goes with the type enabled, not {kind}; leave it out.", param=where)
    return {"enable_thinking": kind != "disabled"}


def _read_conversation(body: Body) -> Chat:
    given = body.require("messages")
    check_count("messages", len(given), MAX_MESSAGES)
    messages: Chat = []
    if "system" in body:
        messages.append({"role": "system", "content": content_of(read_texts("system", body.get("system")))})
    before = len(messages)
    for index, message in enumerate(given):
        messages += _read_message(f"messages[{index}]", message)
    check_messages("messages", messages[before:])
    return messages


def _read_message(where: str, message: Any) -> Chat:
    role, content = read_object(where, message).get("role"), message.get("content")
    if role not in ("user", "assistant"):
        raise InvalidRequest(f"{where}.role must be user or assistant; a system prompt goes into system.", param=f"{where}.role")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list) or not content:
        raise InvalidRequest(f"{where}.content must be a string or a list of blocks.", param=f"{where}.content", code="invalid_type")
    return [_read_assistant(f"{where}.content", content)] if role == "assistant" else _read_user(f"{where}.content", content)


def _read_user(where: str, blocks: list[Any]) -> Chat:
    """Results of tools are messages of their own, in the order of the blocks; texts side by side are one message."""
    messages: Chat = []
    texts: list[str] = []  # of the last message
    for index, block in enumerate(blocks):
        place = f"{where}[{index}]"
        kind = read_type(place, block)
        if kind == "tool_result":
            result = [] if block.get("content") is None else read_texts(f"{place}.content", block["content"])
            messages.append({"role": "tool", "tool_call_id": read_text(place, block, "tool_use_id"), "content": content_of(result)})
        elif kind != "text":
            raise refuse_type(place, kind, "text and tool_result from the user")
        else:
            if not messages or messages[-1]["role"] != "user":
                texts = []
                messages.append({"role": "user"})
            texts.append(read_text(place, block, "text"))
            messages[-1]["content"] = content_of(texts)
    return messages


def _read_assistant(where: str, blocks: list[Any]) -> dict[str, Any]:
    texts, thoughts, calls = [], [], []
    for index, block in enumerate(blocks):
        place = f"{where}[{index}]"
        kind = read_type(place, block)
        if kind == "text":
            texts.append(read_text(place, block, "text"))
        elif kind == "thinking":
            thoughts.append(read_text(place, block, "thinking"))
        elif kind == "tool_use":
            arguments = read_object(f"{place}.input", block.get("input"))
            calls.append(tool_call(read_text(place, block, "id"), read_text(place, block, "name"), arguments))
        else:
            raise refuse_type(place, kind, "text, thinking and tool_use from the assistant")
    message: dict[str, Any] = {"role": "assistant", "content": content_of(texts) if texts else None}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message
