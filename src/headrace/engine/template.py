"""Chat templates: messages to prompt text, rendered in processes that can be killed (template_worker.py).

What lives here: choosing a template, asking a renderer, and sentences for what templates do wrong.
What may not: Jinja (it is imported in the renderers alone), tokens.

A thread cannot be killed and ``'a' * 10**9`` cannot be interrupted, so limits that hold need a process. A renderer is started
at the first render (or by ``warm_up``) and stays; a render then costs one round trip through a pipe. While one renderer is busy
others serve, so a template that loops for its whole second holds up nobody else.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from headrace.engine.contents import Contents, up_to_mark, with_mark
from headrace.engine.sandbox import Reply, SandboxPool
from headrace.engine.template_frames import encode_frame
from headrace.errors import InvalidRequest, ModelError

RENDER_SECONDS = 1.0
MAX_OUTPUT_BYTES = 16 * 2**20

# What a template is given by its caller and not by a client; the first three would replace it, the others what it is made of.
RESERVED_VARIABLES = frozenset(
    {"chat_template", "tokenize", "continue_final_message", "messages", "tools", "add_generation_prompt", "self", "return_dict", "return_tensors"}
)
_REASONING = ("reasoning_content", "reasoning", "thinking")


def _check_compiled(reply: Reply | None) -> None:
    if reply is None or "text" not in reply:
        reason = "takes too long to compile" if reply is None else f"is not valid Jinja ({reply['error'] or reply['kind']})"
        raise ModelError(f"the model's chat template {reason}; give another with --chat-template.")


class ChatTemplate:
    """A model's chat templates by name ("default", "tool_use", …). Thread-safe; renders run side by side up to sandbox.MAX_PROCESSES."""

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, str], *, seconds: float = RENDER_SECONDS) -> None:
        self._templates = dict(templates)
        self._special_tokens = dict(special_tokens)
        self._seconds = seconds
        self._pool = SandboxPool("headrace.engine.template_worker", {"compile": self._templates}, _check_compiled)
        self._contents = {name: Contents(partial(self._try, name)) for name in self._templates}

    def warm_up(self) -> None:
        """Starts a renderer without waiting for it, so that the first render need not."""
        if self._templates:
            self._pool.warm_up()

    def close(self) -> None:
        self._pool.close()

    def check(self) -> None:
        """Raises ModelError, with the line, for a template that is not valid Jinja."""
        with self._pool.borrowed():
            pass

    def fault(self) -> str | None:
        """What would be wrong with the simplest conversation, told before the first one comes."""
        try:
            if self._templates:
                self.render([{"role": "user", "content": "Hello"}], None, True, {})
        except ModelError as error:
            return error.message.replace("; give another with --chat-template", "")
        except InvalidRequest as error:
            return error.message.replace("these messages", "even one short message").replace(" Change them accordingly.", "")
        return None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
        *,
        continue_final_message: bool = False,
    ) -> str:
        """The prompt. Raises InvalidRequest when the template refuses these messages or exceeds its limits.

        ``continue_final_message``: it ends where the last message's content does, not where that message does.
        """
        if continue_final_message and add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message and add_generation_prompt are both true, but a prompt ends in one way; leave one out.",
                param="continue_final_message",
            )
        name = self._choose(tools)
        settled = self._contents[name].settled
        given: dict[str, Any] = {
            **self._special_tokens,
            "documents": None,
            **variables,
            "messages": [settled(_plain_message(message)) for message in messages],
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        if continue_final_message:
            given["messages"][-1] = with_mark(given["messages"][-1])
        text = _text(self._ask_in_turn(name, given), self._seconds)
        return up_to_mark(text) if continue_final_message else text

    def _try(self, name: str, messages: Sequence[dict[str, Any]]) -> str | None:
        """A conversation of ours; None where the template refuses it."""
        given = {**self._special_tokens, "documents": None, "messages": messages, "tools": None, "add_generation_prompt": False}
        reply = self._ask_in_turn(name, given)
        return reply["text"] if reply is not None and "text" in reply else None

    def _ask_in_turn(self, name: str, given: Mapping[str, Any]) -> Reply | None:
        """As it was sent; where the template fails at it, as other templates want it."""
        first = reply = self._ask(name, given)
        for change in _changes(given["messages"]):
            if reply is None or reply.get("kind") != "raised":
                break
            reply = self._ask(name, {**given, "messages": [change(message) for message in given["messages"]]})
        return reply if reply is not None and "text" in reply else first

    def _ask(self, name: str, given: Mapping[str, Any]) -> Reply | None:
        frame = _render_frame(name, given, self._seconds)
        with self._pool.borrowed() as renderer:
            reply = renderer.request(frame)
            if reply is None or reply.get("kind") in ("size", "memory"):
                renderer.close()
        return reply

    def _choose(self, tools: Sequence[Any] | None) -> str:
        if tools and "tool_use" in self._templates:
            return "tool_use"
        if "default" in self._templates:
            return "default"
        if len(self._templates) == 1:
            return next(iter(self._templates))
        if self._templates:
            names = ", ".join(sorted(self._templates))
            raise InvalidRequest(
                f"the model has chat templates named {names} and none named default; choose one with --chat-template.", param="messages"
            )
        raise InvalidRequest(
            "the model has no chat template, so it does not say how a conversation is written; use completions, or give --chat-template.",
            param="messages",
        )


def _render_frame(name: str, variables: Mapping[str, Any], seconds: float) -> bytes:
    try:
        return encode_frame({"render": name, "variables": variables, "seconds": seconds, "max_bytes": MAX_OUTPUT_BYTES})
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(
            f"messages, tools and template variables must be plain JSON values ({error}); convert them first.", param="messages"
        ) from error


def _plain_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Keys without a value are left out, and reasoning is offered under each name that templates look for."""
    plain = {key: value for key, value in message.items() if value is not None}
    reasoning = next((plain[name] for name in _REASONING if name in plain), None)
    if reasoning is None:
        return plain
    return {"thinking": reasoning, **plain, "reasoning_content": reasoning}


def _changes(messages: Sequence[Mapping[str, Any]]) -> list[Callable[[dict[str, Any]], dict[str, Any]]]:
    """What else a conversation may look like: most templates want a call's arguments as an object, a few as a text of JSON; not all
    take null for content.
    """
    calls, nulls = any(each.get("tool_calls") for each in messages), any(each["content"] is None for each in messages)
    changes: list[Callable[[dict[str, Any]], dict[str, Any]]] = [_without_null] * nulls + [_with_argument_texts] * calls
    return [*changes, lambda message: _without_null(_with_argument_texts(message))] if calls and nulls else changes


def _without_null(message: dict[str, Any]) -> dict[str, Any]:
    return {**message, "content": ""} if message["content"] is None else message


def _with_argument_texts(message: dict[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    return {**message, "tool_calls": [_with_argument_text(call) for call in calls]} if isinstance(calls, list) else message


def _with_argument_text(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), Mapping):
        return call
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}


def _text(reply: Reply | None, seconds: float) -> str:
    if reply is None:
        raise InvalidRequest(f"the chat template did not finish these messages within {seconds:g} s and was stopped; shorten them.", param="messages")
    if "text" in reply:
        return str(reply["text"])
    if reply["kind"] in ("size", "memory"):
        raise InvalidRequest(f"the chat template makes more than {MAX_OUTPUT_BYTES} bytes of these messages; shorten them.", param="messages")
    raise InvalidRequest(f"the chat template refuses these messages: {reply['error'].rstrip('.')}. Change them accordingly.", param="messages")


def check_template_variables(variables: Mapping[str, Any]) -> None:
    """Raises InvalidRequest for a variable that a client may not set (chat_template_kwargs)."""
    reserved = sorted(RESERVED_VARIABLES & set(variables))
    if reserved:
        raise InvalidRequest(f"chat_template_kwargs may not set {reserved[0]!r}; leave it out.", param="chat_template_kwargs")
