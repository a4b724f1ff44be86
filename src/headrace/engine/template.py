"""Chat templates: messages to prompt text, rendered in processes that can be killed (template_worker.py).

What lives here: choosing a template, messages put into the form that it takes, asking a renderer, and sentences for
what templates do wrong; special tokens that a client wrote, kept apart from the template's own (``Boundaries``). What
may not: Jinja (it is imported in the renderers alone), other encoding (tokenizer.py).

A thread cannot be killed and ``'a' * 10**9`` cannot be interrupted, so limits that hold need a process. A renderer is
started at the first render (or by ``warm_up``) and stays; a render then costs one round trip through a pipe. While one
renderer is busy others serve, so a template that loops for its whole second holds up no other request.

A template that was written for null may test for it and mean something else by an empty text; one that was not writes
"None". Some go through a list of parts themselves, some print it as Python does, and a few know nothing but lists and
drop a text. What one does with each form of a content is found out by rendering short conversations (``Contents``).

In a message, a tool or a document a special token's text is plain text. A mark stands after the first character of
each such text, so the tokenizer, which looks for special tokens before its normaliser runs, finds only the template's.
Then the marks are taken out, and the text is encoded as any other. What has no such text in it is not marked.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import tokenizers
from tokenizers import normalizers, pre_tokenizers

from headrace.errors import InvalidRequest, ModelError
from headrace.processes.sandbox import Reply, SandboxPool, json_line
from headrace.request import Given, Json

RENDER_SECONDS = 1.0
MAX_OUTPUT_BYTES = 16 * 2**20

# What a template is given by its caller and not by a client: these would replace it, or what it is made of.
RESERVED_VARIABLES = frozenset(
    [
        "chat_template",
        "tokenize",
        "continue_final_message",
        "messages",
        "conversation",
        "tools",
        "add_generation_prompt",
        "self",
        "return_dict",
        "return_tensors",
        "bos_token",
        "eos_token",
    ]
)
_REASONING = ("reasoning_content", "reasoning", "thinking")

Message = Json
Render = Callable[[Sequence[Message]], str | None]  # None: the template refuses the conversation

_MARK = "Zephyrus"
_END = "\u27e6end of the message\u27e7 "
_HELLO: Message = {"role": "user", "content": "Hello"}
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "look", "arguments": {"at": "it"}}}
_CALLING: Message = {"role": "assistant", "tool_calls": [CALL]}
_RESULT: Message = {"role": "tool", "tool_call_id": "abcdefghi", "name": "look", "content": "seen"}
_NOTHING = ("None", "null")  # as templates write it

# What stands before and after a message of a role in the shortest conversations that templates take.
_AROUND: Mapping[str, tuple[Sequence[Message], Sequence[Message]]] = {
    "system": ((), (_HELLO,)),
    "assistant": ((_HELLO,), (_HELLO,)),
    "tool": ((_HELLO, {**_CALLING, "content": ""}), ()),
}


def _check_compiled(reply: Reply | None) -> None:
    if reply is None or "text" not in reply:
        reason = (
            "takes too long to compile" if reply is None else f"is not valid Jinja ({reply['error'] or reply['kind']})"
        )
        raise ModelError(f"the model's chat template {reason}; give another with --chat-template.")


class ChatTemplate:
    """A model's chat templates by name ("default", "tool_use", …). Thread-safe; renders run side by side up to
    sandbox.MAX_PROCESSES."""

    def __init__(
        self, templates: Mapping[str, str], special_tokens: Mapping[str, str], *, seconds: float = RENDER_SECONDS
    ) -> None:
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
        self._pool.check()

    def fault(self) -> str | None:
        """What would be wrong with the simplest conversation, told before the first one comes."""
        try:
            if self._templates:
                self.render([{"role": "user", "content": "Hello"}], None, True, {})
        except ModelError as error:
            return error.message.replace("; give another with --chat-template", "")
        except InvalidRequest as error:
            return error.message.replace("these messages", "even one short message").replace(
                " Change them accordingly.", ""
            )
        return None

    def render(
        self,
        messages: Sequence[Given],
        tools: Sequence[Any] | None,
        add_generation_prompt: bool,
        variables: Given,
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
        plain = [settled(_plain_message(message)) for message in messages]
        given = self._given(plain, tools, add_generation_prompt, variables)
        if continue_final_message:
            given["messages"][-1] = _with_mark(given["messages"][-1])
        text = _text(self._ask_in_turn(name, given), self._seconds)
        return _up_to_mark(text) if continue_final_message else text

    def _given(self, messages: Sequence[Message], tools: Any, opens: bool, variables: Given) -> Json:
        """All that a template is given."""
        fixed = {"messages": messages, "tools": tools, "add_generation_prompt": opens}
        return {**self._special_tokens, "documents": None, **variables, **fixed}

    def _try(self, name: str, messages: Sequence[Json]) -> str | None:
        """A conversation of ours; None where the template refuses it."""
        reply = self._ask_in_turn(name, self._given(messages, None, False, {}))
        return reply["text"] if reply is not None and "text" in reply else None

    def _ask_in_turn(self, name: str, given: Given) -> Reply | None:
        """As it was sent; where the template fails at it, as other templates want it."""
        first = reply = self._ask(name, given)
        for change in _changes(given["messages"]):
            if reply is None or reply.get("kind") != "raised":
                break
            reply = self._ask(name, {**given, "messages": [change(message) for message in given["messages"]]})
        return reply if reply is not None and "text" in reply else first

    def _ask(self, name: str, given: Given) -> Reply | None:
        line = _render_line(name, given, self._seconds)
        with self._pool.borrowed() as renderer:
            reply = renderer.request(line)
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
                f"the model has chat templates named {names} and none named default; choose one with --chat-template.",
                param="messages",
            )
        raise InvalidRequest(
            "the model has no chat template, so it does not say how a conversation is written; use completions, or give --chat-template.",
            param="messages",
        )


def _render_line(name: str, variables: Given, seconds: float) -> bytes:
    try:
        return json_line({"render": name, "variables": variables, "seconds": seconds, "max_bytes": MAX_OUTPUT_BYTES})
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(
            f"messages, tools and template variables must be plain JSON values ({error}); convert them first.",
            param="messages",
        ) from error


def _plain_message(message: Given) -> Json:
    """Keys without a value are left out, and reasoning is offered under each name that templates look for."""
    plain = {key: value for key, value in message.items() if value is not None}
    reasoning = next((plain[name] for name in _REASONING if name in plain), None)
    if reasoning is None:
        return plain
    return {"thinking": reasoning, **plain, "reasoning_content": reasoning}


def _changes(messages: Sequence[Given]) -> list[Callable[[Json], Json]]:
    """What else a conversation may look like: most templates want a call's arguments as an object, a few as a text of
    JSON; not all take null for content.
    """
    calls, nulls = any(each.get("tool_calls") for each in messages), any(each["content"] is None for each in messages)
    asked = ((_without_null, nulls), (_with_argument_texts, calls))
    changes: list[Callable[[Json], Json]] = [change for change, wanted in asked if wanted]
    return [*changes, lambda message: _without_null(_with_argument_texts(message))] if calls and nulls else changes


def _without_null(message: Json) -> Json:
    return {**message, "content": ""} if message["content"] is None else message


def _with_argument_texts(message: Json) -> Json:
    calls = message.get("tool_calls")
    return (
        {**message, "tool_calls": [_with_argument_text(call) for call in calls]} if isinstance(calls, list) else message
    )


def _with_argument_text(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), Mapping):
        return call
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}


def _text(reply: Reply | None, seconds: float) -> str:
    if reply is None:
        raise InvalidRequest(
            f"the chat template did not finish these messages within {seconds:g} s and was stopped; shorten them.",
            param="messages",
        )
    if "text" in reply:
        return str(reply["text"])
    if reply["kind"] in ("size", "memory"):
        raise InvalidRequest(
            f"the chat template makes more than {MAX_OUTPUT_BYTES} bytes of these messages; shorten them.",
            param="messages",
        )
    raise InvalidRequest(
        f"the chat template refuses these messages: {reply['error'].rstrip('.')}. Change them accordingly.",
        param="messages",
    )


def check_template_variables(variables: Given) -> None:
    """Raises InvalidRequest for a variable that a client may not set (chat_template_kwargs)."""
    taken = next((name for name in variables if name in RESERVED_VARIABLES or name.startswith("_")), None)
    if taken is not None:
        raise InvalidRequest(
            f"chat_template_kwargs may not set {taken[:40]!r}; leave it out.", param="chat_template_kwargs"
        )


# --- contents


class Contents:
    """What one template takes. Each thing is found out when it is first asked, once, so that later turns of a
    conversation read alike."""

    def __init__(self, render: Render) -> None:
        self._render = render
        self._known: dict[tuple[str, Any], bool] = {}

    def settled(self, message: Given) -> Message:
        """The message with its content in a form that the template takes."""
        content, role = message.get("content"), str(message.get("role"))
        if content is None:
            keeps = role == "assistant" and self._ask("null", bool(message.get("tool_calls")), self._takes_null)
            return {**message, "content": None if keeps else ""}
        if isinstance(content, str):
            return (
                {**message, "content": _part(content)} if self._ask("drops", role, self._drops_text) else dict(message)
            )
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
        """It does not write it out. Where the template refuses even an empty text nothing is known, and null is what
        was sent."""
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
        return (
            text is not None and parts is not None and _shows(parts) and (len(parts) == len(text) or not _shows(text))
        )


def _with_mark(message: Message) -> Message:
    """A message that shall be continued, with a mark at the end of its content. Raises InvalidRequest."""
    content = message["content"]
    if message.get("tool_calls") or content is None or content == []:
        raise InvalidRequest(
            "the last message has no text that could be continued; end with one that has.", param="messages"
        )
    if isinstance(content, str):
        return {**message, "content": content + _END}
    return {**message, "content": [*content[:-1], {**content[-1], "text": content[-1]["text"] + _END}]}


def _up_to_mark(text: str) -> str:
    """What the template makes of the conversation up to there: a template that trims would have trimmed the content.
    Raises InvalidRequest."""
    before, found, after = text.rpartition(_END.rstrip())
    if not found:
        raise InvalidRequest(
            "the chat template does not show the last message to its end, so it cannot be continued; end with another.",
            param="messages",
        )
    return before if after.startswith(" ") else before.rstrip()


def joined(parts: Sequence[Given]) -> str:
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


# Printable, without case, no white space: filters of templates leave it alone, and it is never written.
# --- special tokens that clients write

MARK = "\u2e13\ua8ce\u2e13"
_WINDOW = 1 << 15  # characters


class Boundaries:
    """For one tokenizer. A special token of one character cannot be marked, and stays one."""

    def __init__(self, backend: tokenizers.Tokenizer, specials: Iterable[str]) -> None:
        self._backend = backend
        texts = sorted((text for text in specials if len(text) > 1), key=len, reverse=True)
        self._pattern = re.compile(_any_of(texts)) if texts else None
        self._longest = len(texts[0]) if texts else 0
        self._marking: tokenizers.Tokenizer | None = None
        self.example = texts[0] if texts else None

    def marked(self, value: Any) -> Any:
        """The same with every special token's text in it marked; the very object where there is none."""
        if self._pattern is None:
            return value
        if isinstance(value, str):
            return self._marked_text(value)
        if isinstance(value, Mapping):
            pairs = [(self.marked(key), self.marked(item)) for key, item in value.items()]
            same = all(
                new is item and name is key for (name, new), (key, item) in zip(pairs, value.items(), strict=True)
            )
            return value if same else dict(pairs)
        if isinstance(value, (list, tuple)):
            return self._marked_list(value)
        return value

    def _marked_text(self, text: str) -> str:
        parts, at = [], 0
        while (found := self._find(text, at)) is not None:
            parts += [text[at : found + 1], MARK]
            at = found + 1  # the next may begin within this one
        return "".join([*parts, text[at:]]) if parts else text

    def _find(self, text: str, at: int) -> int | None:
        """Window by window: a search keeps the interpreter from everybody else until it returns."""
        assert self._pattern is not None
        for start in range(at, len(text), _WINDOW):
            found = self._pattern.search(text, start, start + _WINDOW + self._longest)
            if found is not None:
                return found.start()
        return None

    def _marked_list(self, items: list[Any] | tuple[Any, ...]) -> Any:
        """Parts of a message, which a template may join: none of them may begin within a special token."""
        marked = [self.marked(item) for item in items]
        texts = [_text_of(item) for item in marked]
        if len(texts) > 1 and all(text is not None for text in texts):
            joined = "".join(text or "" for text in texts)
            if self._marked_text(joined) is not joined:
                marked = [marked[0], *({**item, "text": MARK + item["text"]} for item in marked[1:])]
        return items if all(new is old for new, old in zip(marked, items, strict=True)) else marked

    def encode(self, marked: str) -> list[int] | None:
        """Token ids of a rendering with marks; None where this tokenizer cannot do it."""
        if self._marking is None:
            self._marking = _marking(self._backend)
        if self._marking.get_added_tokens_decoder().keys() != self._backend.get_added_tokens_decoder().keys():
            return None
        # others have the interpreter meanwhile
        ids: list[int] = self._marking.encode_batch_fast([marked], add_special_tokens=False)[0].ids
        return ids


def _any_of(texts: Iterable[str]) -> str:
    """A pattern for any of these that looks at each character once, however many hundred there are."""
    rests: dict[str, list[str]] = {}
    for text in texts:
        rests.setdefault(text[:1], []).append(text[1:])
    ends = rests.pop("", None) is not None
    branches = [re.escape(first) + (_any_of(rest) if any(rest) else "") for first, rest in rests.items()]
    joined = branches[0] if len(branches) == 1 and not ends else f"(?:{'|'.join(branches)})"
    return joined + "?" * ends


def _text_of(part: Any) -> str | None:
    text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
    return text if isinstance(text, str) else None


def _marking(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """The same tokenizer, which shares the model's tables with it, but passes over marks."""
    made = tokenizers.Tokenizer(backend.model)
    added = backend.get_added_tokens_decoder().values()
    normal = [] if backend.normalizer is None else [backend.normalizer]
    before = [] if backend.pre_tokenizer is None else [backend.pre_tokenizer]
    if any(token.special and backend.model.token_to_id(token.content) is not None for token in added):
        # the model could find them by itself in a text without a gap
        before.insert(0, pre_tokenizers.Split(MARK, "removed"))
    else:
        normal.insert(0, normalizers.Replace(MARK, ""))
    if normal:
        made.normalizer = normalizers.Sequence(normal)
    if before:
        made.pre_tokenizer = pre_tokenizers.Sequence(before)
    for _, token in sorted(backend.get_added_tokens_decoder().items()):
        flags = {name: getattr(token, name) for name in ("single_word", "lstrip", "rstrip", "normalized", "special")}
        if token.special:
            flags["normalized"] = False  # else the normaliser would take the marks out before it is looked for
        (made.add_special_tokens if token.special else made.add_tokens)([tokenizers.AddedToken(token.content, **flags)])
    return made
