"""The pages: which files there are, with which headers; what the dashboard is told. How they behave is
tests/server/test_browser.py's."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import pytest

from headrace.errors import InvalidRequest
from headrace.observe.metrics import Energy, StepRecorder
from headrace.server import dashboard, pages
from headrace.server.dashboard import History, quantile, sentence
from headrace.server.dialects.body import read_query
from headrace.server.exposition import FINE, ServerMetrics
from tests.support.serving import Server, serving

KEY = "sk-page"
WEB = {
    file.name: file.read_text()
    for file in files("headrace").joinpath("data", "web").iterdir()
    if not file.name.startswith(".")
}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving("--api-key", KEY) as running:
        yield running


# --- files


@pytest.mark.parametrize(("path", "kind"), [("/", "text/html"), ("/dashboard", "text/html"), ("/web/chat.js", "text/javascript"),
                                            ("/web/base.css", "text/css"), ("/web/icon.svg", "image/svg+xml")])  # fmt: skip
def test_files_are_open_and_carry_the_policy(server: Server, path: str, kind: str) -> None:
    answer = server.ask("GET", path)
    assert answer.status == 200 and answer.headers["content-type"].startswith(kind)
    policy = dict(part.strip().partition(" ")[::2] for part in answer.headers["content-security-policy"].split(";"))
    assert (
        policy["default-src"] == "'none'"
        and policy["trusted-types"] == "'none'"
        and policy["frame-ancestors"] == "'none'"
    )
    assert all(policy[f"{name}-src"] == "'self'" for name in ("script", "style", "connect", "img"))
    assert answer.headers["x-content-type-options"] == "nosniff" and answer.headers["referrer-policy"] == "no-referrer"


def test_a_file_that_has_not_changed_is_not_sent_again(server: Server) -> None:
    first = server.ask("GET", "/web/chat.css")
    assert first.headers["cache-control"] == "no-cache"
    again = server.ask("GET", "/web/chat.css", headers={"If-None-Match": f'W/"old", {first.headers["etag"]}'})
    assert again.status == 304 and again.body == b"" and again.headers["etag"] == first.headers["etag"]
    assert server.ask("GET", "/web/chat.css", headers={"If-None-Match": '"other"'}).body == first.body
    head = server.ask("HEAD", "/")
    assert (
        head.status == 200
        and head.body == b""
        and int(head.headers["content-length"]) == len(WEB["chat.html"].encode())
    )


NO_FILES = (
    "nothing.js",
    "../server/app.py",
    "..%2f..%2f__init__.py",
    "%2e%2e/demo/config.json",
    "chat.js/",
    "chat.js%00",
    "x" * 3000,
)


@pytest.mark.parametrize("name", NO_FILES)
def test_what_is_no_file_of_the_pages_is_not_found(server: Server, name: str) -> None:
    refused = server.ask("GET", f"/web/{name}")
    assert refused.status == 404 and refused.error["code"] == "route_not_found" and len(refused.body) < 400


def test_only_reading_is_allowed(server: Server) -> None:
    assert server.ask("POST", "/", {}).status == 405
    assert server.ask("GET", "/", headers={"Origin": "http://evil.example"}).status == 403


def test_no_file_asks_anybody_else_or_writes_markup() -> None:
    """The browser would refuse both under the policy; here the source itself is held to it."""
    assert {"chat.html", "dashboard.html"} <= set(WEB)
    for name, text in WEB.items():
        outside = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+", text)) - {"http://www.w3.org"}
        assert not outside, (name, outside)
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|DOMParser|ContextualFragment",
            text,
        ), name
        assert not name.endswith(".html") or not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)", text), (
            name
        )


def test_every_file_that_is_named_exists() -> None:
    for name, text in WEB.items():
        named = re.findall(r'/web/([\w.-]+)"', text) + re.findall(r'from "\./([\w.-]+)"', text)
        assert set(named) <= set(WEB) == set(pages.pages()), (name, named)


def _colours(theme: str) -> dict[str, str]:
    """The palette of a theme, by name."""
    start = {"light": ":root {", "dark": ':root[data-theme="dark"] {'}[theme]
    blocks = [WEB[name].partition(start)[2].partition("}")[0] for name in ("base.css", "chat.css")]
    return dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", "".join(blocks)))


def _luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_stands_out_from_what_it_stands_on(theme: str) -> None:
    """WCAG's 4.5 to 1, for every colour of text on every ground."""
    colours = _colours(theme)
    texts = [name for name in colours if name.startswith("t-")] + ["text", "muted", "faint", "bad", "accent-strong"]
    assert len(texts) == 12
    for text in texts:
        for ground in ("surface", "page", "sunken"):
            light, dark = sorted((_luminance(colours[text]), _luminance(colours[ground])), reverse=True)
            assert (light + 0.05) / (dark + 0.05) >= 4.5, (text, ground)


# --- the dashboard's data


def test_data_needs_the_key_and_is_never_kept(server: Server) -> None:
    assert server.ask("GET", "/v1/dashboard").status == 401
    answer = server.ask("GET", "/v1/dashboard", headers={"Authorization": f"Bearer {KEY}"})
    assert answer.status == 200 and answer.headers["cache-control"] == "no-store"
    assert answer.json["state"] == "ready" and answer.json["engine"]["model"] == "demo"
    assert answer.json["samples"]["columns"][0] == "number"


BAD_QUERIES = (
    "sample=-1", "step=x", "decision=1.5", "sample=", "sample=9999999999999999",
    "step=%EF%BC%91", "step=1&step=2", "model=demo",
)  # fmt: skip


@pytest.mark.parametrize("query", BAD_QUERIES)
def test_cursors_are_checked(server: Server, query: str) -> None:
    refused = server.ask("GET", f"/v1/dashboard?{query}", headers={"Authorization": f"Bearer {KEY}"})
    assert refused.status == 400 and refused.error["param"] == query.partition("=")[0]


def test_a_query_of_many_parameters_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="more than 8 parameters"):
        read_query(b"&".join(b"sample=1" for _ in range(100_000)), dashboard.Cursors)


def stats(decisions: list[Any] = [], records: list[Any] = [], energy: Energy | None = None) -> dict[str, Any]:  # noqa: B006  never changed
    counters = {"prefix_queries": 100, "prefix_hits": 60, "preemptions": 2}
    requests = {"num_running": 5, "num_prefilling": 2, "num_waiting": 4, "num_preempted": 1}
    blocks = {"num_blocks": 10, "num_used_blocks": 6, "num_cached_blocks": 3}
    steps = StepRecorder(energy=lambda: energy).summary()
    return {**requests, **blocks, "counters": counters, "steps": steps, "records": records, "decisions": decisions}


def test_a_sample_tells_every_state_apart() -> None:
    history, metrics = History(), ServerMetrics([])
    metrics.observe(FINE, 0.03)
    history.take(metrics, stats(), 12.0)
    sample = dict(zip(dashboard.SAMPLE_COLUMNS, history.samples.after(0)[0], strict=True))
    assert [sample[name] for name in ("prefilling", "decoding", "waiting", "preempted")] == [2, 3, 3, 1]
    assert (
        sample["ttft_p50"] == pytest.approx(0.03, rel=0.1) and sample["tpot_p50"] is None and sample["used_blocks"] == 6
    )


def test_energy_is_in_the_samples_where_it_is_counted() -> None:
    history, metrics = History(), ServerMetrics([])
    for energy in (None, Energy(12.3456789, 0.25)):
        history.take(metrics, stats(energy=energy), 1.0)
    assert [row[dashboard.SAMPLE_COLUMNS.index("energy_joules") :] for row in history.samples.after(0)] == [
        (None, None),
        (12.345679, 0.25),
    ]


def test_drafts_are_in_the_samples_where_something_drafts() -> None:
    history, metrics = History(), ServerMetrics([])
    for counts in (None, {"steps": 4, "drafted": [4, 3], "accepted": [3, 1]}):
        history.take(metrics, {**stats(), "drafts": counts}, 1.0)
    first = dashboard.SAMPLE_COLUMNS.index("draft_steps")
    assert [row[first : first + 3] for row in history.samples.after(0)] == [(None, None, None), (4, 7, 4)]


def test_percentiles_are_of_the_window_alone() -> None:
    history, metrics = History(), ServerMetrics([])
    metrics.observe("inter_token_latency_seconds", 5.0)
    for second in range(30):
        metrics.observe("inter_token_latency_seconds", 0.003)
        history.take(metrics, stats(), float(second))
    last = dict(zip(dashboard.SAMPLE_COLUMNS, history.samples.after(0)[-1], strict=True))
    assert 0.0025 <= last["tpot_p99"] <= 0.005


def test_history_is_bounded() -> None:
    history, metrics = History(), ServerMetrics([])
    for number in range(700):
        history.take(metrics, stats([(number, 0.0, "aborted", number, (), "key1")]), 0.0)
    assert (len(history.samples), len(history.decisions)) == (dashboard.SAMPLES, dashboard.DECISIONS)
    rows = history.samples.after(-1)
    assert (
        [row[0] for row in rows] == list(range(101, 701))
        and history.samples.after(698) == rows[-2:]
        and not history.samples.after(700)
    )


def test_a_key_is_told_of_its_own_requests_alone() -> None:
    history = History()
    whose = ("key1", "key11", "key1/ann", "key2/key1", "", "key2")
    entries = [(number, 0.0, "aborted", number, (), tenant) for number, tenant in enumerate(whose)]
    history.take(ServerMetrics([]), stats([*entries, (9, 0.0, "failed", -1, (3,), "")]), 0.0)
    decisions = history.after(-1, -1, -1)["decisions"]
    assert [each["number"] for each in dashboard.seen(decisions, "key1")] == [0, 2, 9]
    assert [each["number"] for each in dashboard.seen(decisions, "key3")] == [9]
    assert len(dashboard.seen(decisions, None)) == 7 and all(
        "tenant" not in each for each in dashboard.seen(decisions, None)
    )


def test_quantile_by_hand() -> None:
    bounds = (1.0, 2.0, 4.0)
    assert quantile(bounds, (0, 0, 0, 0), (0, 0, 0, 0), 0.5) is None
    assert quantile(bounds, (5, 0, 0, 0), (5, 10, 0, 0), 0.5) == 1.5
    assert quantile(bounds, (0, 0, 0, 0), (1, 1, 2, 0), 0.75) == 3.0
    assert quantile(bounds, (0, 0, 0, 0), (0, 0, 0, 3), 0.5) == 4.0


@pytest.mark.parametrize(("kind", "values", "text"), [
    ("admitted", (1200, 0, 4_200), "Request 7 admitted after 4.2 ms: 1,200 prompt tokens."),
    ("admitted", (300, 256, 2_500_000), "Request 7 admitted after 2.5 s: 300 prompt tokens, 256 of them found in the cache."),
    ("resumed", (90, 80), "Request 7 admitted again after preemption: 90 tokens, 80 of them still in the cache."),
    ("preempted", (90, 9, 10), "Request 7 preempted to make room (9 of 10 blocks in use): its 90 tokens will be computed again."),
    ("waits_blocks", (500, 9, 10), "Request 7 waits for blocks: its 500 tokens do not fit beside the 9 of 10 blocks in use."),
    ("waits_rows", (1, 0), "Request 7 waits for a place in the batch: it needs 1, 0 are free."),
    ("waits_budget", (512,), "Request 7 waits for the next step: this one's 512 tokens are given out."),
    ("waits_time", (50_000,), "Request 7 waits for the next step: this one's 50.0 ms are given out."),
    ("overfull", (300, 50_000), "300 answers together take longer than the 50.0 ms that a step may take: prompts get little beside them."),
    ("runs_begin", (31_000, 42_000), "Drafts follow drafts that are on their way through the stages: a token takes 31.0 ms so, and 42.0 ms without."),
    ("runs_end", (9, 8), "No drafts follow drafts that are on their way through the stages: a token takes 0.0 ms so, and 0.0 ms without."),
    ("waits_batch", (), "Request 7 waits for the running batch to end: continuous batching is off."),
    ("refused", (5000,), "Request 7 refused: a prompt of 5,000 tokens cannot run here."),
    ("turned_away", (500,), "Request 7 turned away: with its prompt of 500 tokens it could not be served in time."),
    ("aborted", (), "Request 7 aborted: its client left."),
    ("failed", (3,), "A step failed: its 3 sequences end with an error, all others start over."),
    ("waits_mask", (1, 2, 3), "Request 7: waits mask."),
])  # fmt: skip
def test_decisions_in_words(kind: str, values: tuple[int, ...], text: str) -> None:
    assert sentence(kind, 7, values) == text
