"""The content of messages in the form that a chat template understands: null, a text, or a list of text parts.

What lives here: what a template does with each form, found out by rendering short conversations, and messages put into the form that
it takes. What may not: Jinja, processes (template.py), what clients may send (server/messages.py).

A template that was written for null may test for it and mean something else by an empty text; one that was not writes "None". Some
go through a list of parts themselves, some print it as Python does, and a few know nothing but lists and drop a text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headrace.errors import InvalidRequest

Message = dict[str, Any]
Render = Callable[[Sequence[Message]], str | None]  # None: the template refuses the conversation

_MARK = "Zephyrus"
_END = "\u27e6end of the message\u27e7 "
_HELLO: Message = {"role": "user", "content": "Hello"}
_CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "look", "arguments": {"at": "it"}}}
_CALLING: Message = {"role": "assistant", "tool_calls": [_CALL]}
_RESULT: Message = {"role": "tool", "tool_call_id": "abcdefghi", "name": "look", "content": "seen"}
_NOTHING = ("None", "null")  # as templates write it

# What stands before and behind a message of a role in the shortest conversations that templates take.
_AROUND: Mapping[str, tuple[Sequence[Message], Sequence[Message]]] = {
    "system": ((), (_HELLO,)),
    "assistant": ((_HELLO,), (_HELLO,)),
    "tool": ((_HELLO, {**_CALLING, "content": ""}), ()),
}


class Contents:
    """What one template takes. Each thing is found out when it is first asked, once, so that later turns of a conversation read alike."""

    def __init__(self, render: Render) -> None:
        self._render = render
        self._known: dict[tuple[str, Any], bool] = {}

    def settled(self, message: Mapping[str, Any]) -> Message:
        """The message with its content in a form that the template takes."""
        content, role = message.get("content"), str(message.get("role"))
        if content is None:
            keeps = role == "assistant" and self._ask("null", bool(message.get("tool_calls")), self._takes_null)
            return {**message, "content": None if keeps else ""}
        if isinstance(content, str):
            return {**message, "content": _part(content)} if self._ask("drops", role, self._drops_text) else dict(message)
        if not isinstance(content, (list, tuple)) or not all(isinstance(part, Mapping) for part in content):
            return dict(message)  # nothing that any template is written for
        if len(content) > 1 and self._ask("parts", role, self._takes_parts):
            return dict(message)
        return self.settled({**message, "content": joined(content)})

    def _ask(self, what: str, about: Any, find_out: Callable[[Any], bool]) -> bool:
        if (what, about) not in self._known:
            self._known[what, about] = find_out(about)
        return self._known[what, about]

    def _takes_null(self, calling: bool) -> bool:
        """It does not write it out. Where the template refuses even an empty text nothing is known, and null is what was sent."""
        said, after = (_CALLING, _RESULT) if calling else ({"role": "assistant"}, _HELLO)
        null, empty = (self._render([_HELLO, {**said, "content": content}, after]) for content in (None, ""))
        return empty is None or (null is not None and all(null.count(word) <= empty.count(word) for word in _NOTHING))

    def _drops_text(self, role: str) -> bool:
        """It shows a text only as a part of a list."""
        text = self._render(_around(role, _MARK))
        return text is not None and not _shows(text) and _shows(self._render(_around(role, _part(_MARK))))

    def _takes_parts(self, role: str) -> bool:
        """A list of one reads like its text. (By length, not letter by letter: the time of day may be in it.)"""
        text, parts = self._render(_around(role, _MARK)), self._render(_around(role, _part(_MARK)))
        return text is not None and parts is not None and _shows(parts) and (len(parts) == len(text) or not _shows(text))


def with_mark(message: Message) -> Message:
    """A message that shall be continued, with a mark at the end of its content. Raises InvalidRequest."""
    content = message["content"]
    if message.get("tool_calls") or content is None or content == []:
        raise InvalidRequest("the last message has no text that could be continued; end with one that has.", param="messages")
    if isinstance(content, str):
        return {**message, "content": content + _END}
    return {**message, "content": [*content[:-1], {**content[-1], "text": content[-1]["text"] + _END}]}


def up_to_mark(text: str) -> str:
    """What the template makes of the conversation up to there: a template that trims would have trimmed the content. Raises InvalidRequest."""
    before, found, after = text.rpartition(_END.rstrip())
    if not found:
        raise InvalidRequest(
            "the chat template does not show the last message to its end, so it cannot be continued; end with another.", param="messages"
        )
    return before if after.startswith(" ") else before.rstrip()


def joined(parts: Sequence[Mapping[str, Any]]) -> str:
    """Parts of a text for templates that know no parts: a line each, so that words do not run together."""
    return "\n".join(str(part.get("text", "")) for part in parts)


def _part(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def _around(role: str, content: Any) -> list[Message]:
    before, after = _AROUND.get(role, ((), ()))
    message = {**_RESULT, "content": content} if role == "tool" else {"role": role, "content": content}
    return [*before, message, *after]


def _shows(text: str | None) -> bool:
    return text is not None and _MARK in text
