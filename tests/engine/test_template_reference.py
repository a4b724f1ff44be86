"""Chat templates of many model makers read as the reference library reads them: with and without tools, calls, results,
reasoning."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest

from headrace.engine.template import ChatTemplate
from headrace.errors import InvalidRequest
from tests.support.outside import shared

FOLDER = shared("data", "chat_templates")
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather <b>é</b>",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "c"}, "n": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
CALL: Any = {
    "id": "abcdefghi",
    "type": "function",
    "function": {"name": "get_weather", "arguments": {"city": "Bézier", "n": 2}},
}
USER = {"role": "user", "content": " hi <&> "}
CALLED = [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
RESULT = {"role": "tool", "tool_call_id": "abcdefghi", "name": "get_weather", "content": '{"t": 5}'}
PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
NULL = {"null": True}  # what stands for it while a case is made
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "user": [USER],
    "system": [
        {"role": "system", "content": "be <kind>"},
        USER,
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "more"},
    ],
    "parts": [{"role": "user", "content": PARTS}],
    "null": [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}, RESULT],
    "result": [*CALLED, RESULT],
    "after a result": [*CALLED, RESULT, {"role": "assistant", "content": "Five."}, {"role": "user", "content": "ok"}],
    "reasoning": [
        USER,
        {"role": "assistant", "content": "a", "reasoning_content": "hm"},
        {"role": "user", "content": "r"},
    ],
}


def as_text(message: dict[str, Any]) -> dict[str, Any]:
    """With a call's arguments as a text, which a few templates want."""
    if "tool_calls" not in message:
        return message
    function = {**CALL["function"], "arguments": json.dumps(CALL["function"]["arguments"], ensure_ascii=False)}
    return {**message, "tool_calls": [{**CALL, "function": function}]}


ENDINGS = ["Sure, ", "Sure", [{"type": "text", "text": "a"}], "<think>\nhm", "<think>\nhm\n</think>\n\nSo"]
Case = tuple[
    list[dict[str, Any]], list[Any] | None, bool, dict[str, Any]
]  # messages, tools, add_generation_prompt, variables


def reference(
    text: str, messages: list[dict[str, Any]], tools: list[Any] | None, prompt: bool, variables: dict[str, Any]
) -> str | None:
    """None where the template refuses the conversation."""
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        rendered, _ = render_jinja_template(
            [messages], tools=tools, chat_template=text, add_generation_prompt=prompt, **SPECIAL, **variables
        )
    except Exception:  # whatever a template raises
        return None
    return str(rendered[0])


def with_content(messages: list[dict[str, Any]], old: Any, new: Any) -> list[dict[str, Any]]:
    return [{**message, "content": new if message["content"] == old else message["content"]} for message in messages]


def expected_of(text: str, case: Case) -> str | None:
    """As the reference reads it; null where that is not written out as a word, a list of parts where one part reads
    like a text."""
    messages, *rest = case
    if messages is CONVERSATIONS["null"]:
        null, empty = (expected_of(text, (with_content(messages, None, content), *rest)) for content in (NULL, ""))
        return empty if null is None or "None" in null or "null" in null else null
    if messages is CONVERSATIONS["parts"]:
        one, alone = (reference(text, [{"role": "user", "content": content}], *rest) for content in (PARTS[:1], "a"))
        if one != alone:
            messages = [{"role": "user", "content": "a\nb"}]
    messages = with_content(messages, NULL, None)
    return reference(text, messages, *rest) or reference(text, [as_text(message) for message in messages], *rest)


def ours(chat: ChatTemplate, case: Case) -> str | None:
    try:
        return chat.render(*case)
    except InvalidRequest:
        return None


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.jinja")))
def test_rendered_as_the_reference_renders(name: str) -> None:
    text = (FOLDER / f"{name}.jinja").read_text()
    chat = ChatTemplate({"default": text}, SPECIAL, seconds=5)
    cases: list[Case] = [
        (messages, tools, prompt, {})
        for messages in CONVERSATIONS.values()
        for tools in (None, [TOOL])
        for prompt in (True, False)
    ]
    cases += [(messages, tools, True, {"enable_thinking": False}) for messages, tools, prompt, _ in cases if prompt]
    expected = [expected_of(text, case) for case in cases]
    assert [ours(chat, case) for case in cases] == expected
    assert sum(each is not None for each in expected) >= 8
    chat.close()


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.jinja")))
def test_a_message_is_continued_as_the_reference_continues_it(name: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    text = (FOLDER / f"{name}.jinja").read_text()
    chat = ChatTemplate({"default": text}, SPECIAL, seconds=5)
    seen = 0
    for content in ENDINGS:
        messages = [USER, {"role": "assistant", "content": content if isinstance(content, str) else content[0]["text"]}]
        with contextlib.suppress(
            ValueError
        ):  # the reference wants the text as it was, where a template has tidied up reasoning in it
            rendered, _ = render_jinja_template([messages], chat_template=text, continue_final_message=True, **SPECIAL)
            shown = [USER, {"role": "assistant", "content": content}]
            assert chat.render(shown, None, False, {}, continue_final_message=True) == rendered[0], content
            seen += 1
    assert seen >= 3
    chat.close()
