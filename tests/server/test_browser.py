"""The pages in a real Chromium, headless: what a reader sees and does, under the policy, without a word to anybody else.

Needs ``pip install playwright`` and a Chromium on the path (Debian: apt-get install chromium); skipped with that reason elsewhere.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.support.serving import FAKE, SERVE, Server, post_bytes, serving

CHROMIUM = next((found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None)
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium: apt-get install chromium")

ARGUMENTS = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
             "--disable-component-update", "--disable-sync")  # fmt: skip
KEY = "sk-browser"
SILENT, STEP_FAILS = 1001, 1003  # behaviours of fake_engine.py, by seed

HOSTILE = """# Title <img src=x onerror="window.planted=1">
<script>window.planted=1</script> and [a link](javascript:window.planted=1) and [good](https://example.org/a) and ![pic](https://example.org/p.png)

- one **bold** `code <b>`
- two
  1. nested

| a | b |
|---|---|
| <b>1</b> | 2 |

> quoted

```html
<div onclick="window.planted=1">""" + "x" * 300 + """</div>
```
"""


@dataclass
class Watch:
    """What must not happen on a page."""

    faults: list[str] = field(default_factory=list)

    def on(self, page: Any, url: str) -> None:
        page.on("console", lambda message: self.faults.append(f"console: {message.text}") if message.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: self.faults.append(f"error: {error}"))
        page.on("request", lambda request: None if request.url.startswith(url) else self.faults.append(f"outside: {request.url}"))

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
                context.add_init_script(f"localStorage.getItem({name!r}) ?? localStorage.setItem({name!r}, {json.dumps(json.dumps(value))})")
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
    assert page.evaluate("localStorage.getItem('headrace.conversation')") == "[]"


def test_settings_and_the_system_prompt_are_sent(fake: Server, visit: Open) -> None:
    page = visit(fake)
    bodies: list[Any] = []
    page.on("request", lambda request: bodies.append(request.post_data_json) if request.method == "POST" else None)
    page.click("#settings-toggle")
    for name, value in {"system": "Be brief.", "temperature": "0.5", "top_p": "0.9", "top_k": "40", "max_tokens": "3", "seed": "7"}.items():
        page.fill(f"#{name}", value)
    say(page, "one")
    sent = {name: bodies[0][name] for name in ("temperature", "top_p", "top_k", "max_tokens", "seed")}
    assert sent == {"temperature": 0.5, "top_p": 0.9, "top_k": 40, "max_tokens": 3, "seed": 7}
    assert bodies[0]["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "one"}]
    assert answer(page) == "tok0 tok1 tok2" and "reached the limit" in page.inner_text(".note")
    page.fill("#tools", "{nonsense")
    assert "not JSON" in page.inner_text("#tools-error")


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
    page.click("#new")  # also while an answer is under way
    fake.wait_idle()
    assert page.locator(".message").count() == 0
    page.fill("#input", "two")
    page.press("#input", "Shift+Enter")
    page.type("#input", "lines")
    assert page.input_value("#input") == "two\nlines" and page.locator(".message").count() == 0


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
    deltas: list[dict[str, Any]] = [{"role": "assistant"}, {"reasoning_content": "Let me "}, {"reasoning_content": "look."}, {"tool_calls": [call]}]
    deltas += [{"tool_calls": [{"index": 0, "function": {"arguments": part}}]} for part in ('{"city": ', '"Paris"}')]
    events = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    events.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]})
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + ": ping\n\ndata: [DONE]\n\n"
    page.route("**/v1/chat/completions", lambda route: route.fulfill(status=200, content_type="text/event-stream", body=body), times=1)
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
    assert page.eval_on_selector_all(".prose a", "links => links.map(link => link.getAttribute('href'))") == ["https://example.org/a", "https://example.org/p.png"]
    assert page.locator(".prose td").first.inner_text() == "<b>1</b>"
    assert page.locator(".prose li li").inner_text() == "nested" and page.locator(".prose blockquote").inner_text() == "quoted"
    assert page.evaluate("window.planted") is None
    assert page.evaluate("document.documentElement.scrollWidth") == 360


def test_a_text_that_grows_looks_as_the_whole_text_does(fake: Server, visit: Open) -> None:
    page = visit(fake)
    grown, whole = page.evaluate(
        """async (text) => {
            const { Growing } = await import("/web/markdown.js");
            const render = (steps) => { const box = document.createElement("div"), growing = new Growing(box);
                for (const end of steps) growing.update(text.slice(0, end)); return box.innerHTML; };
            return [render(Array.from(text, (_, at) => at + 1)), render([text.length])];
        }""",
        HOSTILE + "\n\n1. a\n\n2. b\n\nend *it* __b__ ~~s~~\n***\n## h",
    )
    assert grown == whole and "<strong>bold</strong>" in whole and "<em>it</em>" in whole


def test_the_policy_refuses_what_the_page_does_not_do(fake: Server, visit: Open, watch: Watch) -> None:
    """The watch's negative control: each of these is a fault that the other tests would have seen."""
    page = visit(fake)
    page.wait_for_selector("#model-name:text('demo')")
    assert not watch.faults
    page.evaluate("document.body.append(Object.assign(new Image(), {src: 'http://192.0.2.1/x.png'}))")
    refused = page.evaluate("(() => { try { document.body.innerHTML = '<b>x</b>'; return ''; } catch (error) { return error.name; } })()")
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
