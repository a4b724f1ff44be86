"""The checks of structured output on a running server (rows 8 and 9): whatever is asked for is refused by name or
followed, in bounded memory.

What lives here: the checks, each in a size its caller picks; a check raises AssertionError or returns its figure in
words. What may not: pytest, starting servers with defects, what is drawn (tests/unit/test_grammar.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import jsonschema
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from headrace.engine.grammar import create_limits, create_matcher
from headrace.engine.grammar_masks import CACHE_BYTES
from headrace.request import StructuredOutputs
from tests.support.planted import Command
from tests.support.serving import SERVE, Server, serving
from tests.support.snapshot import canary, metric, private_bytes
from tests.support.traffic import Reply, all_of, ask
from tests.unit.test_grammar import BOMBS, FIELDS, TOKENIZER

FLAGS = ("--executor", "keyed-hash", "--max-num-seqs", "32", "--max-model-len", "512")
AT_ONCE = 16
GROWTH = 16 << 20  # bytes that a process may gain after the first quarter beside what it says of its cache
CACHE = "headrace_structured_output_cache_bytes"
FORMATS: tuple[Any, ...] = (
    None, "", "json", 0, True, [], {}, {"type": None}, {"type": "text"}, {"type": "json_object"}, {"type": "json_schema"}, {"type": "xml"},
    {"type": "json_schema", "json_schema": None}, {"type": "json_schema", "json_schema": {}}, {"type": "json_schema", "json_schema": []},
    {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": [1, "b"]}}},
    {"type": "json_schema", "json_schema": {"name": "x", "schema": "{}"}},
    {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": 5}}},
)  # fmt: skip


# --- row 9


def totality(count: int, *, draws: int = 9, command: Command = SERVE) -> str:
    """``count`` drawn constraints on every route that takes them: a 400 that names the field, or an answer that keeps
    it."""
    with serving(*FLAGS, command=command) as server, canary(server, every=1.0):
        asked = list(itertools.islice(_drawn(draws, min(count, 500)), count))
        statuses: Counter[int] = Counter()
        for start in range(0, count, AT_ONCE):
            part = asked[start : start + AT_ONCE]
            for (path, body), reply in zip(part, _together(server, part), strict=True):
                statuses[reply.status] += 1
                _check_reply(path, body, reply)
        errors = metric(server.ask("GET", "/metrics").body.decode(), "headrace_request_success_total", '"error"')
        assert errors == 0 and not any("Traceback" in line for line in server.lines), (errors, server.lines)
    return f"{count} drawn: {statuses[200]} followed, {statuses[400]} refused by name, 0 errors of the engine"


def _drawn(number: int, at_once: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Bodies without end."""
    found: list[dict[str, Any]] = []
    for again in itertools.count(number):

        @seed(again)
        @settings(
            max_examples=at_once,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate],
            database=None,
        )
        @given(fields=FIELDS, format=st.sampled_from(FORMATS), both=st.integers(0, 9))
        def draw(fields: dict[str, Any], format: Any, both: int) -> None:
            given = {"structured_outputs": fields} if both else {"response_format": format}
            found.append({**given, "response_format": format} if both == 1 else given)

        found.clear()
        draw()
        for turn, fields in enumerate(found):
            yield _request(turn, fields)


def _request(number: int, fields: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    if number % 3 or "response_format" in fields:
        return "/v1/chat/completions", {
            "messages": [{"role": "user", "content": "hi"}],
            "max_tokens": 60,
            "seed": number,
            **fields,
        }
    return "/v1/completions", {"prompt": "hi", "max_tokens": 60, "seed": number, **fields}


def _together(server: Server, asked: list[tuple[str, dict[str, Any]]]) -> list[Reply]:
    return asyncio.run(all_of(ask(server.port, path, body) for path, body in asked))


def _check_reply(path: str, body: Mapping[str, Any], reply: Reply) -> None:
    assert reply.status in (200, 400), (body, reply)
    if reply.status == 400:
        error = reply.json["error"]
        assert str(error["param"]).partition(".")[0] in ("structured_outputs", "response_format"), (body, error)
        return
    choice = reply.json["choices"][0]
    assert choice["finish_reason"] in ("stop", "length"), (body, choice)
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    wanted = {name: value for name, value in (body.get("structured_outputs") or {}).items() if value is not None}
    if wanted:
        matcher = create_matcher(TOKENIZER, StructuredOutputs(**wanted), create_limits())
        assert matcher.try_consume_tokens([*text.encode()]) == len(text.encode()), (body, text)
    if choice["finish_reason"] == "stop":
        _check_text(wanted, text)


def _check_text(wanted: Mapping[str, Any], text: str) -> None:
    """What other programs say of a finished answer."""
    if wanted.get("choice"):
        assert text in wanted["choice"], (wanted, text)
    elif wanted.get("json_object"):
        assert isinstance(json.loads(text), dict), (wanted, text)
    elif wanted.get("json") is not None:
        schema = json.loads(wanted["json"]) if isinstance(wanted["json"], str) else wanted["json"]
        value = json.loads(text)
        with contextlib.suppress(jsonschema.SchemaError):  # it is taken although the standard knows no such schema
            jsonschema.validate(value, schema)


# --- row 8


def different_schemas(count: int, *, growth: int = GROWTH, command: Command = SERVE) -> str:
    """So many schemas, each another: after the first quarter no process grows by more than the gauge of the cache,
    which has a bound."""
    with serving(*FLAGS, command=command) as server:
        pids, held, cached, begun = [server.process.pid], [], 0, time.monotonic()
        for start in range(0, count, AT_ONCE):
            replies = _together(server, [_schema(number) for number in range(start, start + AT_ONCE)])
            assert {reply.status for reply in replies} == {200}, replies[0]
            if start >= count // 4 and not held:
                pids = [server.process.pid, *server.children()]
                held, cached = [private_bytes(pid) for pid in pids], _gauge(server)
        server.wait_idle()
        assert [pid for pid in pids[1:] if pid not in server.children()] == [], "a process has ended"
        grown = [private_bytes(pid) - before for pid, before in zip(pids, held, strict=True)]
        now = _gauge(server)
    assert now <= CACHE_BYTES and max(grown) < growth + now - cached, (
        f"processes have grown by {[each >> 10 for each in grown]} KiB"
    )
    told = f"{max(grown) >> 10} KiB more after the first quarter, where the cache says {(now - cached) >> 10} KiB"
    return f"{count} different schemas ({count / (time.monotonic() - begun):.0f}/s): {told}"


def _gauge(server: Server) -> int:
    return int(metric(server.ask("GET", "/metrics").body.decode(), CACHE))


def _schema(number: int) -> tuple[str, dict[str, Any]]:
    properties = {f"k{number}": {"type": "string", "maxLength": number % 50 + 1}, "n": {"enum": [number, number + 1]}}
    wanted = {"json": {"type": "object", "properties": properties, "required": ["n"]}}
    return "/v1/completions", {"prompt": [9, 9], "max_tokens": 2, "structured_outputs": wanted}


def bombs(*, seconds: float = 10.0, command: Command = SERVE) -> str:
    """Each constraint that explodes: answered in bounded time, while the canary sings and memory stays bounded."""
    with serving(*FLAGS, command=command) as server, canary(server):
        slowest, statuses = 0.0, Counter[int]()
        for name, fields in BOMBS.items():
            begun = time.perf_counter()
            answer = server.ask(
                "POST", "/v1/completions", {"prompt": "x", "max_tokens": 2, "structured_outputs": fields}, timeout=60
            )
            slowest = max(slowest, time.perf_counter() - begun)
            assert answer.status == 200 or (answer.status == 400 and answer.error["param"]), (name, answer)
            assert slowest < seconds, f"{name}: {slowest:.1f} s"
            statuses[answer.status] += 1
        server.wait_idle(10)
        memory = max(private_bytes(pid) for pid in (server.process.pid, *server.children()))
        assert memory < 512 << 20, f"{memory >> 20} MiB in one process"
    told = f"{statuses[200]} followed, {statuses[400]} refused, after {slowest:.1f} s at most"
    return f"{len(BOMBS)} bombs: {told}; {memory >> 20} MiB at most in a process"
