"""Chat templates: what they may use, what stops them, and that one that runs away holds up nobody."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest

from headrace.config import ModelConfig
from headrace.engine import template
from headrace.engine.template import ChatTemplate
from headrace.engine.tokenizer import load_tokenizer, read_chat_template
from headrace.errors import InvalidRequest, ModelError
from headrace.models.source import find_model
from headrace.processes.sandbox import MAX_PROCESSES, Sandbox, json_line

LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
LOOPS_IF_ASKED = "{% if messages[0].content == 'loop' %}" + LOOP + "{% endif %}ok"
USER = [{"role": "user", "content": "hi"}]


@pytest.fixture
def render() -> Iterator[object]:
    made: dict[tuple[str, float], ChatTemplate] = {}

    def call(
        text: str, messages: object = USER, *, seconds: float = 1.0, tools: object = None, **variables: object
    ) -> str:
        if (text, seconds) not in made:
            made[text, seconds] = ChatTemplate({"default": text}, {"bos_token": "<s>"}, seconds=seconds)
        return made[text, seconds].render(messages, tools, True, variables)  # type: ignore[arg-type]

    yield call
    for chat in made.values():
        chat.close()


def test_what_templates_are_given(render) -> None:
    text = "{{ bos_token }}{% for m in messages %}{{ m.role }}:{{ m.content }}{% endfor %}"
    text += "|{{ tools }}|{{ documents }}|{{ add_generation_prompt }}|{{ mood }}"
    assert render(text, mood="calm") == "<s>user:hi|None|None|True|calm"


def test_what_templates_may_use(render) -> None:
    assert render("{{ {'b': '<é>', 'a': [1, none]} | tojson }}") == '{"b": "<é>", "a": [1, null]}'
    assert render("{{ [1] | tojson(indent=2) }}") == "[\n  1\n]"
    assert render("{{ strftime_now('%Y') }}") == str(datetime.now().year)
    assert (
        render(
            "{% for i in range(5) %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}"
        )
        == "02"
    )
    assert render("a{% generation %}{{ messages[0].content }}{% endgeneration %}b") == "ahib"
    assert render("  {% if true %}\nx\n  {% endif %}\ny") == "x\ny"  # blocks take their line with them
    assert (
        render("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}")
        == "1"
    )


def test_empty_keys_are_left_out_and_reasoning_has_every_name(render) -> None:
    messages = [{"role": "assistant", "content": "", "name": None, "reasoning": "hm"}]
    assert (
        render("{{ 'name' in messages[0] }}|{{ messages[0].reasoning_content }}|{{ messages[0].thinking }}", messages)
        == "False|hm|hm"
    )


CALLED = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]},
]
EACH = "{% for m in messages %}"


@pytest.mark.parametrize(
    ("template", "shown"),
    [
        (
            EACH + "[{{ m.role }}{% if m.content is none %} calls{% else %} {{ m.content }}{% endif %}]{% endfor %}",
            "[user hi][assistant calls]",
        ),
        (EACH + "[{{ m['content'] }}]{% endfor %}", "[hi][]"),  # would write None
        (EACH + "[{{ m.content | tojson }}]{% endfor %}", '["hi"][""]'),
        (EACH + "[{{ '' + m['content'] }}]{% endfor %}", "[hi][]"),  # fails at null
        (
            EACH + "{{ raise_exception('short') if messages | length > 2 }}[{{ m.content is none }}]{% endfor %}",
            "[False][True]",
        ),  # nothing known
        (EACH + "{{ raise_exception('short') if messages | length > 2 }}[{{ '' + m.content }}]{% endfor %}", "[hi][]"),
        (
            EACH
            + "[{{ '' + m.content }}{% for c in m.tool_calls %}{{ '' + c.function.arguments }}{% endfor %}]{% endfor %}",
            "[hi][{}]",
        ),  # both
    ],
)
def test_no_content_is_null_where_a_template_takes_it(render, template: str, shown: str) -> None:
    assert render(template, CALLED) == render(template, [CALLED[0], {**CALLED[1], "content": None}]) == shown


def test_null_is_one_thing_with_calls_and_another_without(render) -> None:
    text = (
        EACH
        + "[{% if m.tool_calls %}{{ 'nothing' if m.content is none }}{% else %}{{ m.content }}{% endif %}]{% endfor %}"
    )
    assert render(text, [*CALLED, {"role": "assistant", "content": None}]) == "[hi][nothing][]"


PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]


IF_TEXT = EACH + "[{% if m.content is string %}{{ m.content }}{% else %}"


@pytest.mark.parametrize(
    ("template", "shown"),
    [
        (EACH + "[{{ m.content }}]{% endfor %}", "[a\nb]"),
        (
            IF_TEXT + "{% for p in m.content %}{{ p.text }};{% endfor %}{% endif %}]{% endfor %}",
            "[a\nb]",
        ),  # one part is not its text
        (IF_TEXT + "{{ m.content | map(attribute='text') | join('+') }}{% endif %}]{% endfor %}", "[a+b]"),
        (
            EACH + "[{% for p in m.content if p.type == 'text' %}{{ p.text }}{% endfor %}]{% endfor %}",
            "[ab]",
        ),  # knows lists alone
        (EACH + "[{{ '' + m.content }}]{% endfor %}", "[a\nb]"),
    ],
)
def test_parts_are_a_list_where_a_template_takes_one(render, template: str, shown: str) -> None:
    assert render(template, [{"role": "user", "content": PARTS}]) == shown
    one = shown.replace("a\nb", "a").replace("a+b", "a").replace("ab", "a")
    assert (
        render(template, [{"role": "user", "content": PARTS[:1]}])
        == render(template, [{"role": "user", "content": "a"}])
        == one
    )


def test_each_role_is_asked_about(render) -> None:
    text = (
        EACH + "[{% if m.role == 'user' and m.content is not string %}{% for p in m.content %}{{ p.text }}{% endfor %}"
    )
    text += "{% else %}{{ m.content }}{% endif %}]{% endfor %}"
    said = [{"role": role, "content": PARTS} for role in ("system", "user", "assistant", "tool")]
    assert render(text, said) == "[a\nb][ab][a\nb][a\nb]"


def test_arguments_are_a_text_where_the_template_wants_one(render) -> None:
    def said(arguments: object) -> list[dict[str, object]]:
        return [
            {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
        ]

    wants_text = (
        "{% for call in messages[0].tool_calls %}{{ call.function.name + call.function.arguments }}{% endfor %}"
    )
    assert render(wants_text, said({"a": "é"})) == render(wants_text, said('{"a": "é"}')) == 'f{"a": "é"}'
    assert render("{{ messages[0].tool_calls[0].function.arguments.a }}", said({"a": "é"})) == "é"
    with pytest.raises(InvalidRequest, match="can only concatenate"):
        render("{{ 'x' + 1 }}", said({}))


def test_a_template_can_refuse(render) -> None:
    with pytest.raises(InvalidRequest, match="refuses these messages: no system here") as caught:
        render("{{ raise_exception('no system here') }}")
    assert caught.value.param == "messages"
    with pytest.raises(InvalidRequest, match="refuses these messages: 'dict object' has no attribute 'nothing'"):
        render("{{ messages[0].nothing.more }}")


@pytest.mark.parametrize(
    "text",
    [
        "{% for i in range(10**9) %}{% endfor %}",
        LOOP,
        "{{ 10 ** (10 ** 10) }}",
        "{% macro f() %}{% for i in range(9999) %}{{ f() }}{% endfor %}{% endmacro %}{{ f() }}",
        "{% for i in range(99999) %}{{ ('a' * 9999999) | length }}{% endfor %}",
    ],
)
def test_a_template_that_does_not_end_is_stopped(text: str, render) -> None:
    start = time.monotonic()
    with pytest.raises(InvalidRequest):
        render(text, seconds=0.3)
    assert time.monotonic() - start < 2.0


@pytest.mark.parametrize(
    "text",
    [
        "{{ 'a' * 10**9 }}",
        "{% for i in range(99999) %}{{ 'a' * 1000 }}{% endfor %}",
        "{{ 'é' * (9 * 2**20) }}",
        "{% set ns = namespace(s='a') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s }}",
        "{{ '%999999999d' % 1 }}",
        "{{ 'a'.ljust(10**9) }}",
        "{{ range(99999) | join('a' * 9999) }}",
    ],
)
def test_output_is_bounded(text: str, render) -> None:
    with pytest.raises(InvalidRequest, match=r"more than 16777216 bytes"):
        render(text, seconds=3)


def test_sixteen_mebibytes_are_allowed(render) -> None:
    assert len(render("{{ 'a' * (16 * 2**20) }}", seconds=10)) == 16 * 2**20


@pytest.mark.parametrize(
    "text",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__globals__['__builtins__'] }}",
        "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ joiner | attr('__init__') }}",
        "{% set messages.x = 1 %}",
        "{{ messages.append(1) }}",
        "{{ self.__init__ }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
    ],
)
def test_nothing_outside_is_reachable(text: str, render) -> None:
    """The sandbox answers with an error or with an undefined value that prints as nothing."""
    try:
        assert render(text) == ""
    except (InvalidRequest, ModelError) as error:
        assert "root:" not in str(error)


def test_secrets_of_the_environment_stay_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_API_KEY", "secret")
    renderer = Sandbox("headrace.engine.template_worker", json_line({"compile": {"default": "x"}}))
    renderer.finish_start(template._check_compiled)
    environment = Path(f"/proc/{renderer._process.pid}/environ").read_bytes()
    renderer.close()
    assert b"PYTHONPATH" in environment and b"HEADRACE" not in environment


def test_after_a_runaway_the_next_render_works() -> None:
    chat = ChatTemplate({"default": LOOPS_IF_ASKED}, {}, seconds=0.3)
    with pytest.raises(InvalidRequest, match=r"within 0\.3 s and was stopped"):
        chat.render([{"content": "loop"}], None, True, {})
    assert chat.render(USER, None, True, {}) == "ok"
    chat.close()


def test_others_render_while_one_runs_away() -> None:
    chat = ChatTemplate({"default": LOOPS_IF_ASKED}, {}, seconds=1.0)
    ended: list[float] = []

    def run_away() -> None:
        with pytest.raises(InvalidRequest):
            chat.render([{"content": "loop"}], None, True, {})
        ended.append(time.monotonic())

    thread = threading.Thread(target=run_away)
    thread.start()
    while not chat._pool._slots._value < MAX_PROCESSES:  # the runaway has its renderer
        time.sleep(0.01)
    assert [chat.render(USER, None, True, {}) for _ in range(20)] == ["ok"] * 20
    answered = time.monotonic()
    thread.join()
    assert answered < ended[0]
    chat.close()


def test_closing_ends_what_still_renders() -> None:
    chat = ChatTemplate({"default": LOOPS_IF_ASKED}, {}, seconds=30.0)
    assert chat.render(USER, None, True, {}) == "ok"
    closing = threading.Timer(0.1, chat.close)
    closing.start()
    begun = time.monotonic()
    with pytest.raises(InvalidRequest, match="was stopped"):
        chat.render([{"content": "loop"}], None, True, {})
    assert time.monotonic() - begun < 5 and not chat._pool._idle and not chat._pool._busy
    closing.join()


def test_a_renderer_is_kept_and_ends_with_its_template() -> None:
    chat = ChatTemplate({"default": "ok"}, {})
    chat.warm_up()
    (renderer,) = chat._pool._idle
    for _ in range(3):
        chat.render(USER, None, True, {})
    assert chat._pool._idle == [renderer]
    chat.close()
    assert renderer._process.poll() is not None


def test_a_template_that_is_none_is_one_sentence(render) -> None:
    with pytest.raises(ModelError, match=r"chat template is not valid Jinja \(line 1: "):
        render("{% if %}")


def test_values_that_are_not_json_are_the_callers_mistake(render) -> None:
    with pytest.raises(InvalidRequest, match="plain JSON values"):
        render("x", [{"content": object()}])
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(InvalidRequest, match="plain JSON values"):
        render("x", [{"content": deep}])


def test_lone_surrogates_survive_the_trip(render) -> None:
    assert render("{{ messages[0].content }}", [{"content": "a\ud83d"}]) == "a\ud83d"


# --- which template ---------------------------------------------------------------------------------------------------


def test_named_templates() -> None:
    chat = ChatTemplate({"default": "plain", "tool_use": "tools"}, {})
    assert chat.render(USER, None, True, {}) == chat.render(USER, [], True, {}) == "plain"
    assert chat.render(USER, [{"type": "function"}], True, {}) == "tools"
    chat.close()
    with pytest.raises(InvalidRequest, match="named rag, summary and none named default"):
        ChatTemplate({"rag": "", "summary": ""}, {}).render(USER, None, True, {})
    with pytest.raises(InvalidRequest, match=r"no chat template.*--chat-template"):
        ChatTemplate({}, {}).render(USER, None, True, {})


def test_where_templates_are_found(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text(
        json.dumps({"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}})
    )
    source = find_model(ModelConfig(model=str(tmp_path), load_format="dummy"))

    def found() -> dict[str, str]:
        files = source.tokenizer_files()
        assert files is not None
        return dict(files.templates)

    assert found() == {}
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]})
    )
    assert found() == {"default": "a", "tool_use": "b"}
    (tmp_path / "chat_template.jinja").write_text("c")
    assert found() == {"default": "c"}
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("d")
    assert found() == {"default": "c", "rag": "d"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": 5}))
    with pytest.raises(ModelError, match="neither a string nor a list"):
        found()


def test_the_template_flag_takes_text_or_a_file(tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text("from file")
    assert read_chat_template(str(tmp_path / "t.jinja")) == "from file"
    assert read_chat_template("{{ messages }}") == "{{ messages }}"
    with pytest.raises(ModelError, match="neither a file nor a Jinja template"):
        read_chat_template("missing.jinja")
    tokenizer = load_tokenizer(find_model(ModelConfig()), chat_template="{{ messages[0].content }}!")
    assert tokenizer is not None
    assert tokenizer.apply_chat_template(USER) == "hi!"


def test_reserved_variables_are_refused() -> None:
    tokenizer = load_tokenizer(find_model(ModelConfig()))
    assert tokenizer is not None
    for name in ("chat_template", "messages", "self", "tokenize"):
        with pytest.raises(InvalidRequest, match=f"may not set '{name}'") as caught:
            tokenizer.apply_chat_template(USER, **{name: 1})
        assert caught.value.param == "chat_template_kwargs"


def test_the_bundled_template() -> None:
    tokenizer = load_tokenizer(find_model(ModelConfig()))
    assert tokenizer is not None
    text = tokenizer.apply_chat_template([{"role": "system", "content": "s"}, *USER])
    assert text == "<|bos|><|im_start|>system\ns<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.apply_chat_template(USER, add_generation_prompt=False).endswith("hi<|im_end|>\n")


@pytest.mark.parametrize(
    ("template", "fault"),
    [
        ("{{ messages[0].content }}", None),
        (
            "a\n{% if %}",
            "the model's chat template is not valid Jinja (line 2: Expected an expression, got 'end of statement block').",
        ),
        ("{{ nosuch.field }}", "the chat template refuses even one short message: 'nosuch' is undefined."),
    ],
)
def test_what_is_wrong_is_known_before_the_first_conversation(template: str, fault: str | None) -> None:
    chat = ChatTemplate({"default": template}, {})
    assert chat.fault() == fault
    chat.close()
    assert ChatTemplate({}, {}).fault() is None
