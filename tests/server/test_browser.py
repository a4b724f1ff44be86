"""The pages in a real Chromium, headless: what a reader sees and does, under the policy, without a word to anybody
else.

Needs ``pip install playwright`` and a Chromium on the path (Debian: apt-get install chromium); skipped with that reason
elsewhere.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from tests.support.serving import FAKE, SERVE, Server, post_bytes, serving, wait_for

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium: apt-get install chromium")

ARGUMENTS = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
             "--disable-component-update", "--disable-sync")  # fmt: skip
KEY = "sk-browser"
SILENT, STEP_FAILS = 1001, 1003  # behaviours of fake_engine.py, by seed

HOSTILE = (
    """# Title <img src=x onerror="window.planted=1">
<script>window.planted=1</script> and [a link](javascript:window.planted=1) and [good](https://example.org/a) and ![pic](https://example.org/p.png)

- one **bold** `code <b>`
- two
  1. nested

| a | b |
|---|---|
| <b>1</b> | 2 |

> quoted

```html
<div onclick="window.planted=1">"""
    + "x" * 300
    + """</div>
```

$\\text{<img src=x onerror="window.planted=1">} \\mathbb{<script>window.planted=1</script>} \\href{javascript:window.planted=1}{x}$

```"onmouseover="window.planted=1
<script>window.planted=1</script>
```
"""
)


@dataclass
class Watch:
    """What must not happen on a page."""

    faults: list[str] = field(default_factory=list)

    def on(self, page: Any, url: str) -> None:
        page.on(
            "console",
            lambda message: (
                self.faults.append(f"console: {message.text}") if message.type in ("error", "warning") else None
            ),
        )
        page.on("pageerror", lambda error: self.faults.append(f"error: {error}"))
        page.on(
            "request",
            lambda request: None if request.url.startswith(url) else self.faults.append(f"outside: {request.url}"),
        )

    def forgive(self, text: str) -> None:
        """Chromium itself writes a console line for every answer that is an error."""
        self.faults = [fault for fault in self.faults if text not in fault]


Open = Callable[..., Any]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=CHROMIUM, args=list(ARGUMENTS))
        yield running
        running.close()


@pytest.fixture(scope="module")
def demo() -> Iterator[Server]:
    with serving(command=SERVE) as running:
        yield running


@pytest.fixture(scope="module")
def fake() -> Iterator[Server]:
    with serving("--token-seconds", "0.02") as running:
        yield running


@pytest.fixture
def watch() -> Iterator[Watch]:
    watch = Watch()
    yield watch
    assert not watch.faults


@pytest.fixture
def visit(browser: Any, watch: Watch) -> Iterator[Open]:
    """Opens a page of a server in a profile of its own."""
    with contextlib.ExitStack() as stack:

        def visit(server: Server, path: str = "/", width: int = 1100, storage: dict[str, Any] | None = None) -> Any:
            context = browser.new_context(viewport={"width": width, "height": 760})
            stack.callback(context.close)
            for name, value in (storage or {}).items():
                context.add_init_script(
                    f"localStorage.getItem({name!r}) ?? localStorage.setItem({name!r}, {json.dumps(json.dumps(value))})"
                )
            page = context.new_page()
            page.set_default_timeout(15_000)
            watch.on(page, server.url)
            page.goto(server.url + path)
            return page

        yield visit


def until(page: Any, expression: str) -> None:
    """Waits until JavaScript says yes; playwright's own way needs eval in the page, which the policy refuses."""
    deadline = time.monotonic() + 15
    while not page.evaluate(expression):
        assert time.monotonic() < deadline, expression
        page.wait_for_timeout(20)


def say(page: Any, text: str, *, wait: bool = True) -> None:
    before = page.locator(".assistant").count()
    page.fill("#input", text)
    page.press("#input", "Enter")
    ended = "&& !document.querySelector('.working')" if wait else ""
    until(page, f"document.querySelectorAll('.assistant').length > {before} {ended}")


def answer(page: Any) -> str:
    return str(page.locator(".assistant > .prose").last.inner_text()).strip()


# --- the chat


def test_round_trip_with_the_demo_model(demo: Server, visit: Open) -> None:
    page = visit(demo, storage={"headrace.settings": {"temperature": "0"}})
    page.wait_for_selector("#model-name:text('demo')")
    say(page, "What is the capital of France?")
    assert "Paris" in answer(page)
    assert "tokens/s" in page.inner_text(".figures") and "first token" in page.inner_text(".figures")
    say(page, "Hello!")
    assert page.locator(".message").count() == 4 and page.locator("[data-action=regenerate]").count() == 1
    page.reload()
    until(page, "document.querySelectorAll('.message').length === 4")
    page.click("#new")
    assert page.locator(".message").count() == 0 and page.is_visible("#welcome")
    page.go_back()
    until(page, "document.querySelectorAll('.message').length === 4")


def test_settings_and_the_system_prompt_are_sent(fake: Server, visit: Open) -> None:
    page = visit(fake)
    bodies: list[Any] = []
    page.on("request", lambda request: bodies.append(request.post_data_json) if request.method == "POST" else None)
    page.click("#settings-toggle")
    for name, value in {
        "system": "Be brief.",
        "temperature": "0.5",
        "top_p": "0.9",
        "top_k": "40",
        "max_tokens": "3",
        "seed": "7",
    }.items():
        page.fill(f"#{name}", value)
    say(page, "one")
    sent = {name: bodies[0][name] for name in ("temperature", "top_p", "top_k", "max_tokens", "seed")}
    assert sent == {"temperature": 0.5, "top_p": 0.9, "top_k": 40, "max_tokens": 3, "seed": 7}
    assert bodies[0]["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "one"}]
    assert answer(page) == "tok0 tok1 tok2" and "reached the limit" in page.inner_text(".note")


def test_nothing_is_sent_while_the_settings_are_wrong(fake: Server, visit: Open) -> None:
    """Whoever asks, edits or tries again: the reason stands at the field, and what was written stays."""
    said = [{"role": "user", "content": "before"}, {"role": "assistant", "content": "so", "finish": "stop"}]
    page = visit(fake, storage={"headrace.conversation": said, "headrace.settings": {"max_tokens": "2"}})
    sent: list[str] = []
    page.on("request", lambda request: sent.append(request.url) if request.method == "POST" else None)
    page.click("#settings-toggle")
    for wrong, why in (
        ("{nonsense", "not JSON"),
        ('{"a": 1}', "must be a JSON list"),
        ('[{"type": "function"}, 5]', "Tool 2 is no JSON object"),
    ):
        page.fill("#tools", wrong)
        assert why in page.inner_text("#tools-error")
        page.fill("#input", "my question")
        page.press("#input", "Enter")
        assert why in page.inner_text("#fault") and page.input_value("#input") == "my question"
    page.click("[data-action=regenerate]")
    page.click("[data-action=edit]")
    page.fill("[data-form=edit] textarea", "edited")
    page.press("[data-form=edit] textarea", "Enter")
    assert (
        page.input_value("[data-form=edit] textarea") == "edited"
        and page.locator(".assistant").count() == 1
        and not sent
    )
    page.click("#settings-close")
    page.click("#fault-open")
    assert page.evaluate("document.activeElement.id") == "tools"
    page.fill("#tools", "")
    assert not page.is_visible("#fault")
    page.type("#temperature", "1e")
    page.press("#input", "Enter")
    assert "Temperature in the settings is not a number" in page.inner_text("#fault") and not sent
    page.fill("#temperature", "")
    page.press("#input", "Enter")
    until(page, "document.querySelectorAll('.assistant').length === 2 && !document.querySelector('.working')")
    assert len(sent) == 1 and page.locator(".user .text").last.inner_text() == "my question"


def test_stop_regenerate_and_edit(fake: Server, visit: Open) -> None:
    page = visit(fake, storage={"headrace.settings": {"max_tokens": "400"}})
    say(page, "first", wait=False)
    until(page, "document.querySelector('.assistant > .prose')?.innerText.includes('tok5')")
    page.keyboard.press("Escape")
    page.wait_for_selector(".note:text('You stopped this answer')")
    fake.wait_idle()
    assert "tok5" in answer(page) and "tok399" not in answer(page)
    page.click("[data-action=regenerate]")
    page.click("#stop")
    page.wait_for_selector("#send:visible")
    assert page.locator(".assistant").count() == 1
    page.click("[data-action=edit]")
    page.fill("[data-form=edit] textarea", "second")
    page.press("[data-form=edit] textarea", "Enter")
    page.click("#new")  # also while an answer is under way: that goes on
    assert page.locator(".message").count() == 0 and page.is_visible("#send")
    page.go_back()
    page.click("#stop")
    fake.wait_idle()
    page.click("#new")
    page.fill("#input", "two")
    page.press("#input", "Shift+Enter")
    page.type("#input", "lines")
    assert page.input_value("#input") == "two\nlines" and page.locator(".message").count() == 0


def titles(page: Any) -> list[str]:
    return list(page.eval_on_selector_all("#history-list .open span", "nodes => nodes.map((node) => node.textContent)"))


def test_several_conversations(fake: Server, visit: Open) -> None:
    page = visit(fake, width=1300, storage={"headrace.settings": {"max_tokens": "60"}})
    say(page, "the first one", wait=False)
    page.click("#history-new")
    say(page, "the second one", wait=False)
    assert titles(page) == ["the second one", "the first one"] and page.locator("#history-list .open i").count() == 2
    until(
        page, "!document.querySelector('.working') && !document.querySelector('#history-list .open i')"
    )  # both went on side by side
    page.click("#history-list .open:has-text('first')")
    assert "tok59" in answer(page) and page.locator(".user .text").all_inner_texts() == ["the first one"]
    page.click("#history-list li.current [data-do=rename]")
    page.fill("#history-list input", "Renamed <b>")
    page.press("#history-list input", "Enter")
    assert sorted(titles(page)) == ["Renamed <b>", "the second one"]
    page.click("#history-list li.current [data-do=rename]")
    page.fill("#history-list input", "never")
    page.press("#history-list input", "Escape")
    page.reload()
    page.wait_for_selector("#history-list .current:has-text('Renamed')")
    assert "tok59" in answer(page)
    page.click("#history-list .current [data-do=delete]")
    assert titles(page) == ["the second one"] and page.locator(".message").count() == 0
    page.click("#undo-button")
    assert sorted(titles(page)) == ["Renamed <b>", "the second one"] and "tok59" in answer(page)


def test_a_tab_that_is_closed_keeps_what_was_written(fake: Server, visit: Open) -> None:
    page = visit(fake, storage={"headrace.settings": {"max_tokens": "300"}})
    say(page, "go", wait=False)
    until(page, "document.querySelector('.assistant > .prose')?.innerText.includes('tok5')")
    page.reload()
    page.wait_for_selector(".note:text('You stopped this answer')")
    assert "tok5" in answer(page)


def test_a_full_store_is_told_and_loses_nothing(fake: Server, visit: Open) -> None:
    page = visit(fake, storage={"headrace.settings": {"max_tokens": "2"}})
    head = json.dumps({"title": "big", "updated": 1})
    page.evaluate(
        f"""localStorage.setItem('headrace.chat.big',
            {json.dumps(head)} + '\\n[{{"role":"user","content":"hi","other":"' + 'x'.repeat(3999870) + '"}}]')"""
    )
    page.reload()
    page.click("#new")
    say(page, "one more")
    assert "This browser keeps no more (1 conversation, 4 MB of at most 4 MB; this one has 1 KB)" in page.inner_text(
        "#store-fault"
    )
    assert (
        answer(page) == "tok0 tok1"
        and page.evaluate("Object.keys(localStorage).filter((name) => name.startsWith('headrace.chat.')).length") == 1
    )
    page.click("#history-toggle")
    page.hover("#history-list li:has-text('big')")
    page.click("#history-list li:has-text('big') [data-do=delete]")
    say(page, "and another")
    assert not page.is_visible("#store-fault")
    page.reload()
    until(page, "document.querySelectorAll('.message').length === 4")


def test_conversations_leave_as_files_and_come_back(fake: Server, visit: Open, tmp_path: Path) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"a": 1}'}}
    said: list[dict[str, Any]] = [
        {"role": "user", "content": "What is ```this```?"},
        {"role": "assistant", "content": "", "reasoning": "Hm.", "tool_calls": [call]},
        {"role": "tool", "content": "a ``` b", "tool_call_id": "call_1"},
        {"role": "assistant", "content": "**So.**", "finish": "length"},
    ]
    page = visit(fake, width=1300, storage={"headrace.conversation": said})

    def exported(button: str, name: str) -> str:
        with page.expect_download() as download:
            page.click(button)
        assert download.value.suggested_filename == name
        return Path(download.value.path()).read_text()

    text = exported("#export-markdown", "What-is-this.md")
    assert (
        text.startswith("# What is ```this```?\n\n## You\n\n")
        and "````\na ``` b\n````" in text
        and "## Answer (not complete)\n\n**So.**" in text
    )
    kept = exported("#export-all", "conversations.json")
    wanted = json.loads(exported("#export-json", "What-is-this.json"))["conversations"]
    assert wanted == json.loads(kept)["conversations"]
    page.click("#history-list .current [data-do=delete]")
    message = "Message 1 of conversation 1"
    bad = {
        "{": "not JSON",
        "[]": "no messages",
        "5": "no messages",
        '[{"role": "root", "content": "x"}]': message,
        '[{"role": "user", "content": {"a": 1}}]': message,
    }
    for wrong, why in bad.items():
        (tmp_path / "bad.json").write_text(wrong)
        page.set_input_files("#import-file", tmp_path / "bad.json")
        page.wait_for_selector(f"#history-fault:has-text('{why}')")
    (tmp_path / "kept.json").write_text(kept)
    page.set_input_files("#import-file", tmp_path / "kept.json")
    until(page, "document.querySelectorAll('.message').length === 4")
    assert json.loads(exported("#export-json", "What-is-this.json"))["conversations"] == wanted


def test_who_waits_sees_where_the_request_stands(visit: Open) -> None:
    slow = (
        "--executor",
        "keyed-hash",
        "--device-time",
        "0.25",
        "--max-num-seqs",
        "1",
        "--max-num-batched-tokens",
        "64",
    )
    with serving(*slow, command=SERVE) as server:
        page = visit(server, storage={"headrace.settings": {"max_tokens": "1"}})
        body = {"prompt": "hello", "max_tokens": 20, "ignore_eos": True, "stream": True}
        with server.raw(post_bytes("/v1/completions", body)):
            wait_for(lambda: server.running() == 1)
            say(page, "word " * 800, wait=False)
            page.wait_for_selector(
                ".waiting p:has-text('Waiting: number 1 of 1 in the queue. The first that cannot start needs 1 of the rows')"
            )
        page.wait_for_selector(".waiting p:has-text('Reading the prompt: ')")
        assert (
            re.search(r"\d+ of \d+ tokens", page.inner_text(".waiting p"))
            and 0 < page.evaluate("document.querySelector('.waiting progress').value") < 1
        )
        until(page, "!document.querySelector('.working')")
        assert not page.is_visible(".waiting")


def test_a_failure_in_the_stream_is_told_with_its_sentence(fake: Server, visit: Open, watch: Watch) -> None:
    page = visit(fake, storage={"headrace.settings": {"max_tokens": "9", "seed": str(STEP_FAILS)}})
    say(page, "go")
    page.wait_for_selector(".failure:has-text('the logits of this row were not finite')")
    assert "tok0 tok1" in answer(page) and page.is_visible(".failure [data-action=regenerate]")
    watch.forgive("ERR_INCOMPLETE_CHUNKED_ENCODING")


def test_a_full_queue_and_a_wrong_field_are_told(browser: Any, visit: Open, watch: Watch) -> None:
    with serving("--max-queue", "1") as server:
        page = visit(server)
        body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2, "seed": SILENT}
        with server.raw(post_bytes("/v1/chat/completions", body)):
            page.wait_for_timeout(200)
            say(page, "hello")
            page.wait_for_selector(".failure:has-text('The queue is full')")
        page.evaluate("localStorage.setItem('headrace.settings', JSON.stringify({top_p: '9'}))")
        page.reload()
        say(page, "again")
        page.wait_for_selector(".failure:has-text('top_p is 9')")
    watch.forgive("status of 429")
    watch.forgive("status of 400")


def test_a_server_that_loads_is_waited_for(visit: Open, watch: Watch) -> None:
    server = Server([*FAKE, "--load-seconds", "1.5"])
    try:
        page = visit(server)
        page.wait_for_selector("#banner:text('still loading')")
        page.wait_for_selector("#model-name:text('demo')")
        assert not page.is_visible("#banner")
    finally:
        server.stop()
    watch.forgive("status of 503")


def test_tool_calls_and_reasoning_are_shown(fake: Server, visit: Open) -> None:
    page = visit(fake, storage={"headrace.settings": {"max_tokens": "3"}})
    call = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": ""}}
    deltas: list[dict[str, Any]] = [
        {"role": "assistant"},
        {"reasoning_content": "Let me "},
        {"reasoning_content": "look."},
        {"tool_calls": [call]},
    ]
    deltas += [{"tool_calls": [{"index": 0, "function": {"arguments": part}}]} for part in ('{"city": ', '"Paris"}')]
    events = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    events.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]})
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + ": ping\n\ndata: [DONE]\n\n"
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(status=200, content_type="text/event-stream", body=body),
        times=1,
    )
    say(page, "weather?")
    page.wait_for_selector(".answer")
    assert page.inner_text(".tool header b") == "get_weather" and '"city": "Paris"' in page.inner_text(".tool pre")
    assert not page.is_visible(".reasoning .prose")
    page.click(".reasoning summary")
    assert page.inner_text(".reasoning .prose") == "Let me look."
    page.fill(".answer input", "sunny")
    page.press(".answer input", "Enter")
    until(page, "document.querySelectorAll('.assistant').length === 2 && !document.querySelector('.working')")
    assert page.locator(".result").count() == 1


def test_the_demo_model_calls_a_tool_and_goes_on_with_its_result(demo: Server, visit: Open) -> None:
    page = visit(demo, storage={"headrace.settings": {"temperature": "0"}})
    page.click("#settings-toggle")
    page.click("#tools-example")
    say(page, "What is the weather in Paris?")
    assert page.inner_text(".tool header b") == "get_weather" and '"city"' in page.inner_text(".tool pre")
    page.fill(".answer input", '{"temperature": 18}')
    page.press(".answer input", "Enter")
    until(page, "document.querySelectorAll('.assistant').length === 2 && !document.querySelector('.working')")
    assert answer(page) and not page.locator(".failure").count()


# --- what a model writes


def test_text_of_a_model_never_becomes_markup(fake: Server, visit: Open) -> None:
    said = [{"role": "user", "content": HOSTILE}, {"role": "assistant", "content": HOSTILE, "finish": "stop"}]
    page = visit(fake, width=360, storage={"headrace.conversation": said})
    page.wait_for_selector(".assistant .code")
    assert page.locator(".prose img, .prose script, .prose div[onclick], .user .text *").count() == 0
    assert page.eval_on_selector_all(".prose a", "links => links.map(link => link.getAttribute('href'))") == [
        "https://example.org/a",
        "https://example.org/p.png",
    ]
    assert page.locator(".prose td").first.inner_text() == "<b>1</b>"
    assert (
        page.locator(".prose li li").inner_text() == "nested"
        and page.locator(".prose blockquote").inner_text() == "quoted"
    )
    assert page.evaluate("window.planted") is None
    assert page.evaluate("document.documentElement.scrollWidth") == 360


@pytest.fixture(scope="module")
def blank(browser: Any, fake: Server) -> Iterator[Any]:
    """A page for tests that only call its modules."""
    page = browser.new_context().new_page()
    page.goto(fake.url)
    yield page
    page.context.close()


RENDER = """async (texts) => {
    const { Growing } = await import("/web/markdown.js");
    const render = (text, box) => (new Growing(box).update(text), box.innerHTML);
    return texts.map((text) => render(text, document.createElement("div")));
}"""
SPANS = {
    "***a** b*": "<em><strong>a</strong> b</em>",
    "***a* b**": "<strong><em>a</em> b</strong>",
    "**a *b* c**": "<strong>a <em>b</em> c</strong>",
    "*a **b** c*": "<em>a <strong>b</strong> c</em>",
    "*a**b*": "<em>a**b</em>",
    "***a***": "<em><strong>a</strong></em>",
    "_a __b__ c_ and snake_case_name": "<em>a <strong>b</strong> c</em> and snake_case_name",
    "a * b * c, 2**3**4": "a * b * c, 2<strong>3</strong>4",
    "**open *and": "**open *and",
    "~~a *b*~~ ~c~": "<s>a <em>b</em></s> ~c~",
    "`` a ` b `` `*c*` `open": "<code>a ` b</code> <code>*c*</code> `open",
    r"\*not\* a\b \$5": r"*not* a\b $5",
    "*x [a *b*](https://e.org/(c)) y*": '<em>x <a href="https://e.org/(c)" '
    'target="_blank" rel="noopener noreferrer nofollow">a <em>b</em></a> y</em>',
    "[a](javascript:x) <br>b": "[a](javascript:x) <br>b",
    "$5 and $10, $ x $": "$5 and $10, $ x $",
}


def test_spans_are_read_as_in_commonmark(blank: Any) -> None:
    shown = blank.evaluate(RENDER, list(SPANS))
    assert dict(zip(SPANS, shown, strict=True)) == {text: f"<p>{html}</p>" for text, html in SPANS.items()}


FORMULAS = {
    r"\frac{a}{2}": "<mfrac><mi>a</mi><mn>2</mn></mfrac>",
    r"x_i^2": "<msubsup><mi>x</mi><mi>i</mi><mn>2</mn></msubsup>",
    r"\alpha\le\mathbb{R}": '<mi>α</mi><mo>≤</mo><mi mathvariant="normal">ℝ</mi>',
    r"\sqrt[3]{x'}": "<mroot><msup><mi>x</mi><mo>′</mo></msup><mn>3</mn></mroot>",
    r"\text{if }x<y": "<mtext>if&nbsp;</mtext><mi>x</mi><mo>&lt;</mo><mi>y</mi>",
    r"\unknown{a}": r'<mtext class="tex">\unknown</mtext><mi>a</mi>',
    r"\frac{a": r'<mtext class="tex">\frac{a</mtext>',
}


def test_mathematics_becomes_mathml(blank: Any) -> None:
    shown = blank.evaluate(RENDER, [f"${tex}$" for tex in FORMULAS])
    assert all(
        wanted in html and 'display="inline"' in html for wanted, html in zip(FORMULAS.values(), shown, strict=True)
    ), shown
    block, lines, broken = blank.evaluate(
        RENDER, ["a\n$$\n+ b\n- c\n$$\nd", "\\[\na &= b \\\\\n&= c\n\\]", "$$\n+ b\n\n> c"]
    )
    assert block.count("<p>") == 2 and 'display="block"' in block and "<ul>" not in block
    assert lines.count("<mtr>") == 2 and lines.count("<mtd>") == 4
    assert "<math" not in broken and "<blockquote>" in broken


CODE: dict[str, tuple[str, dict[str, list[str]]]] = {
    "python": (
        "x = \"#no\"  # c\n'''long\nend''' if",
        {"string": ['"#no"', "'''long", "end'''"], "comment": ["# c"], "keyword": ["if"]},
    ),
    "ts": (
        "const f = g(0xff) /* a\nb */ return",
        {"keyword": ["const", "return"], "comment": ["/* a", "b */"], "call": ["g"], "number": ["0xff"]},
    ),
    "JSON": ('{"a": "b", "c": 1.5}', {"key": ['"a"', '"c"'], "string": ['"b"'], "number": ["1.5"]}),
    "sh": ("echo '#no' $HOME # c", {"keyword": ["echo"], "string": ["'#no'"], "note": ["$HOME"], "comment": ["# c"]}),
    "nonsense": ("if <b>x</b>", {}),
    "constructor": ("if", {}),
}


def test_code_has_colours_and_stays_what_it_is(blank: Any) -> None:
    texts = [f"```{name}\n{code}\n```" for name, (code, _) in CODE.items()]
    for (code, wanted), html in zip(CODE.values(), blank.evaluate(RENDER, texts), strict=True):
        body = html.partition("<code>")[2].partition("</code>")[0]
        spans: dict[str, list[str]] = {}
        for kind, text in re.findall(r'<span class="t-(\w+)">(.*?)</span>', body, re.S):
            spans.setdefault(kind, []).append(unescape(text))
        assert unescape(re.sub("<[^>]+>", "", body)) == code and spans == wanted


SIZE = 40_000  # characters, about 10,000 tokens
UNITS = (
    "*", "_", "***a ", "**a *b ", "*a **b ** c* ", "a*b_", "[", "[a](", "[a](b ", "![", "`", "``a`", "`a``b```", "$", "$a",
    "$$a\n", "\\(", "\\[\n", "$$\n",
    "~~", "~~a ", "# ", "#", "> ", ">", "- ", "1. ", "- a\n", "  - a\n", "|", "| a ", "|-", "a|b\n-|-\n", "---", " ", "\t", "- - ",
    "http://", "http://a",
    "https://a.b/....", "<br>", "```\n", "```a\n", "~~~\nx\n", "\\", "\\*", "&", "\u2028", "\r\n", "é*",
)  # fmt: skip
LINES = [f"a\n{begin}{' ' * SIZE}x" for begin in ("#", "-", "|", "```", "- - -", "$$")]
LINES += [f"```{' ' * SIZE}`", f"```{'a' * SIZE}`", f"# {'# ' * (SIZE // 2)}x"]
CODE_UNITS = (
    '"', "'", '"\\"', "/*", "/* ", "a", "a ", "0x", "1.", "#", "=", "<a ", "<!--", "a=", "a:", "-", "$(", "${", "--[[", "`",
    "!", "\\", "a.b", "@", " ",
)  # fmt: skip
LANGUAGES = ("python", "js", "html", "json", "yaml", "css", "bash", "toml", "rust", "sql")
TEX_UNITS = (
    "{", "}", r"\frac", r"\frac{a}", "^", "_a", r"\left(", r"\left(a\right)", r"\begin{matrix}", "&", r"\\", r"\sqrt[", r"\hat",
    r"\not", "'", r"\text{",
    r"\sum_", "a^{b",
)  # fmt: skip


def test_no_text_takes_longer_than_its_length(blank: Any) -> None:
    """Every pattern, repeated to the length of a long answer: what is quadratic takes many seconds."""
    lines = [(unit * 1990)[:1990] for unit in CODE_UNITS]
    texts = [(unit * SIZE)[:SIZE] for unit in UNITS] + LINES
    texts += [f"```{name}\n{line}\n{line}\n```\n" for name in LANGUAGES for line in lines]
    texts += [f"${(unit * 3990)[:3990]}$ " * 5 for unit in TEX_UNITS]
    slow = blank.evaluate(
        """async (texts) => {
            const { Growing } = await import("/web/markdown.js");
            return texts.flatMap((text) => {
                const begun = performance.now();
                new Growing(document.createElement("div")).update(text);
                const took = performance.now() - begun;
                return took > 1500 ? [[text.slice(0, 40), took]] : [];
            });
        }""",
        texts,
    )
    assert slow == []


def test_emphasis_is_not_nested_without_end(blank: Any) -> None:
    marks = "*_" * 1000
    text = "".join(f"{mark}a " for mark in marks) + "".join(f"a{mark} " for mark in reversed(marks))
    (html,) = blank.evaluate(RENDER, [text])
    assert 8 <= html.count("<em>") <= 12 and html.count("a") >= 4000


LONG = {
    "code": "```python\n" + "".join(f'x{at} = call("{at}")  # comment\n' for at in range(1200)),
    "prose": "".join(f"Paragraph {at} with **bold** and `code` and $x_{{{at}}}$.\n\n" for at in range(700)),
    "list": "".join(f"{at + 1}. item **{at}**\n" for at in range(2000)),
}


@pytest.mark.parametrize("kind", LONG)
def test_an_answer_of_ten_thousand_tokens_is_drawn_as_it_grows(blank: Any, kind: str) -> None:
    """Finished lines and blocks are left alone; a list is read again, which its pace makes up for."""
    median, kept = blank.evaluate(
        """async (text) => {
            const { Growing } = await import("/web/markdown.js");
            const box = document.createElement("div"), growing = new Growing(box);
            const begin = text.length * 0.9;
            growing.update(text.slice(0, begin));
            const first = box.querySelector("span.t-comment, p, li");
            const times = [];
            for (let end = begin; end < text.length; end += 400) {
                const begun = performance.now();
                growing.update(text.slice(0, end));
                times.push(performance.now() - begun);
            }
            return [times.sort((a, b) => a - b)[times.length >> 1], box.contains(first)];
        }""",
        LONG[kind],
    )
    assert median < (200 if kind == "list" else 10) and (kept or kind == "list")


def test_a_list_of_ten_thousand_tokens_does_not_freeze_the_page(fake: Server, visit: Open) -> None:
    """The slowest kind, at the network's own pace: no time between drawings is so long that a reader would notice
    twice."""
    text = LONG["list"]
    events = [{"choices": [{"index": 0, "delta": {"content": text[at : at + 8]}}]} for at in range(0, len(text), 8)]
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    page = visit(fake)
    page.route("**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=body))
    page.evaluate(
        """window.longest = 0; let last = performance.now();
        setInterval(() => { const now = performance.now(); longest = Math.max(longest, now - last); last = now; }, 10);"""
    )
    say(page, "go")
    assert page.locator(".assistant li").count() == 2000 and page.evaluate("longest") < 1500


def test_a_text_that_grows_looks_as_the_whole_text_does(blank: Any) -> None:
    more = "\n\n1. a\n\n2. b\n\nend *it* __b__ ~~s~~\n***\n## h\n$$\nx\n$$\n\n````py\n```\na = '''\nb\n````\n\n- x\n\n~~~\nopen \"a\n"
    grown, whole = blank.evaluate(
        """async (text) => {
            const { Growing } = await import("/web/markdown.js");
            const render = (steps) => { const box = document.createElement("div"), growing = new Growing(box);
                for (const end of steps) growing.update(text.slice(0, end)); return box.innerHTML; };
            return [render(Array.from(text, (_, at) => at + 1)), render([text.length])];
        }""",
        HOSTILE + more,
    )
    assert (
        grown == whole
        and "<strong>bold</strong>" in whole
        and "<em>it</em>" in whole
        and whole.count('class="code"') == 4
    )


def test_the_policy_refuses_what_the_page_does_not_do(fake: Server, visit: Open, watch: Watch) -> None:
    """The watch's negative control: each of these is a fault that the other tests would have seen."""
    page = visit(fake)
    page.wait_for_selector("#model-name:text('demo')")
    assert not watch.faults
    page.evaluate("document.body.append(Object.assign(new Image(), {src: 'http://192.0.2.1/x.png'}))")
    refused = page.evaluate(
        "(() => { try { document.body.innerHTML = '<b>x</b>'; return ''; } catch (error) { return error.name; } })()"
    )
    page.evaluate("fetch('http://192.0.2.1/').catch(() => {})")
    page.wait_for_timeout(200)
    assert refused == "TypeError" and sum("Content Security Policy" in fault for fault in watch.faults) >= 2
    watch.faults.clear()


# --- keys, phones, the dashboard


@pytest.mark.parametrize("path", ["/", "/dashboard"])
def test_the_key_is_asked_for_and_stays_in_the_tab(visit: Open, watch: Watch, path: str) -> None:
    with serving("--api-key", KEY) as server:
        page = visit(server, path)
        page.wait_for_selector("#key-dialog[open]")
        page.keyboard.press("Escape")
        page.keyboard.press("Escape")
        page.fill("#key", "wrong")
        page.press("#key", "Enter")
        page.wait_for_selector("#key-wrong:visible")
        page.fill("#key", KEY)
        page.press("#key", "Enter")
        page.wait_for_selector("#model-name:has-text('demo')")
        assert page.evaluate("sessionStorage.getItem('headrace.key')") == KEY
        assert KEY not in page.evaluate("JSON.stringify(localStorage)")
    watch.forgive("status of 401")
    watch.forgive("ERR_CONNECTION")


@pytest.mark.parametrize("path", ["/", "/dashboard"])
def test_phones_need_no_scrolling_sideways(demo: Server, visit: Open, path: str) -> None:
    page = visit(demo, path, width=360)
    page.wait_for_selector("#model-name:has-text('demo')", state="attached")
    page.wait_for_timeout(300)
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    if path == "/":
        page.click("#settings-toggle")
        assert page.evaluate("document.documentElement.scrollWidth") == 360
        page.click("#settings-close")


def test_colours_follow_the_system_until_they_are_chosen(fake: Server, visit: Open) -> None:
    page = visit(fake)
    theme = "document.documentElement.dataset.theme"
    assert page.evaluate(theme) == "light"
    page.emulate_media(color_scheme="dark")
    until(page, f"{theme} === 'dark'")
    page.click("[data-theme-toggle]")
    page.reload()
    assert page.evaluate(theme) == "light"


def test_every_control_has_a_name(fake: Server, visit: Open) -> None:
    for path in ("/", "/dashboard"):
        page = visit(fake, path)
        page.wait_for_selector("#model-name:has-text('demo')")
        nameless = page.evaluate(
            """[...document.querySelectorAll("button, input, select, textarea, a")].filter((node) =>
                !(node.labels?.length || node.getAttribute("aria-label") || node.textContent.trim())).map((node) => node.outerHTML)"""
        )
        assert nameless == []


def test_the_dashboard_shows_what_the_engine_does(demo: Server, visit: Open) -> None:
    body = {"messages": [{"role": "user", "content": "Tell me a long story. " * 8}], "max_tokens": 40, "temperature": 0}
    for _ in range(2):
        assert demo.ask("POST", "/v1/chat/completions", body).status == 200
    page = visit(demo, "/dashboard")
    page.wait_for_selector("#decisions li.admitted:has-text('found in the cache')")
    assert page.inner_text("#state") == "ready"
    assert page.locator("#blocks i").count() == 250 and page.locator("#techniques .technique").count() >= 9
    assert page.locator("#steps rect").count() > 40 and page.locator("#ttft .line, #ttft circle").count() >= 3
    assert "decode" in page.inner_text("#steps .legend") and page.locator("#generated text").count() >= 6
    page.hover("#steps", position={"x": 700, "y": 100})
    assert "measured" in page.inner_text("#steps .tip")
    assert "weights" in page.inner_text("#memory") and "block_size" in page.inner_text("#choices")
    before = page.inner_text("#footer")
    demo.ask("POST", "/v1/chat/completions", body)
    until(page, f"document.querySelector('#footer').innerText !== {json.dumps(before)}")


def test_the_dashboard_is_short_on_a_phone(demo: Server, visit: Open) -> None:
    """The essentials are open; what the reader opens stays open, on phones alone."""
    page = visit(demo, "/dashboard", width=390)
    page.wait_for_selector("#generated svg")
    assert page.evaluate("document.documentElement.scrollHeight") < 1800
    opened = "[...document.querySelectorAll('details.card[open]')].map((card) => card.id)"
    assert page.evaluate(opened) == ["card-generated", "card-requests"]
    page.focus("#card-choices summary")
    page.keyboard.press("Enter")
    page.click("#card-requests summary")
    page.click("#card-steps summary")
    page.wait_for_selector("#steps svg")
    page.reload()
    page.wait_for_selector("#choices tr")
    assert page.evaluate(opened) == ["card-generated", "card-steps", "card-choices"]
    page.set_viewport_size({"width": 1280, "height": 760})
    until(page, f"{opened}.length === document.querySelectorAll('details.card').length")


def test_the_dashboard_says_nothing_twice(demo: Server, visit: Open) -> None:
    page = visit(demo, "/dashboard")
    page.wait_for_selector("#choices tr")
    names = page.eval_on_selector_all("#choices tr", "rows => rows.map((row) => row.firstChild.textContent)")
    assert len(set(names)) == len(names) and {"max_num_seqs", "max_model_len", "native kernels"} <= set(names)
    assert not {"kernels", "max_sequence_tokens"} & set(names)
    techniques = page.inner_text("#techniques")
    assert techniques.count("needs a GPU") <= 1 and re.fullmatch(r"\d+ of \d+ on", page.inner_text("#techniques-on"))
