"""The checks of what one request may hold and one connection may do (rows 2, 3, 4, 5, 6, 7, 14), on every route of the
table that takes fields.

What lives here: the checks, each in a size its caller picks; a check raises AssertionError or returns its figure in
words. What may not: pytest, starting servers with defects.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from headrace.request import SamplingParams
from headrace.server.app import ROUTES, Route
from tests.support.planted import Command
from tests.support.serving import SERVE, Answer, Server, read_until_closed, send, serving
from tests.support.snapshot import private_bytes
from tests.support.traffic import ask, together
from tests.support.wire_rules import unclean

HASH = ("--executor", "keyed-hash", "--max-num-seqs", "16", "--max-model-len", "512")
BODIES = tuple(route for route in ROUTES if route.body)
VALUES: tuple[Any, ...] = (
    0, 1, -1, 2, 0.5, 1e-30, 1e308, -1e308, 2**31, 2**63, 2**64 + 1, 129, 20, 21, "", "1", "x" * 5000, "\x00\ud800", None, True, False,
    [], [1], [-1], [2**31], ["a"], [""], [[]], {}, {"1": 1}, {"-1": 1}, {"a": 1}, {"type": "x"},
)  # fmt: skip
RAW = (b"NaN", b"Infinity", b"-Infinity", b"1e400", b"0x1", b"01")
# What a field needs to hold so that its route answers at all, and answers soon.
FILLED: Mapping[str, Any] = {
    "messages": [{"role": "user", "content": "hi"}], "prompt": "hi", "input": "hi", "tokens": [9, 10], "max_tokens": 16, "max_output_tokens": 16,
    "lora_name": "a", "lora_path": "/none", "query": "hi", "documents": ["hi"], "text_1": "hi", "text_2": "hi",
}  # fmt: skip


SAMPLED = frozenset(SamplingParams.__dataclass_fields__) - {
    "max_tokens",
    "logprobs",
    "prompt_logprobs",
    "structured_outputs",
}


def _names(route: Route) -> tuple[str, ...]:
    return route.body.names() if route.body else ()


def base_of(route: Route) -> dict[str, Any]:
    """The least that a route answers with 200."""
    assert route.body is not None
    names = set(route.body.__struct_fields__)
    if {"messages", "prompt"} <= names:
        names -= {"messages"}
    return {name: FILLED[name] for name in FILLED if name in names}


def problem(answer: Answer, names: Iterable[str]) -> str | None:
    """Why this is no good answer to a body whose fields ``names`` were changed; None if it is one."""
    if answer.status == 200:
        return None
    if not 400 <= answer.status < 500 or answer.headers.get("content-type") != "application/json":
        return f"status {answer.status}"
    error = answer.json["error"]
    if answer.status != 400 or error.get("code") in (
        "invalid_json",
        "context_length_exceeded",
    ):  # of the whole body, or of all that makes the prompt
        return None
    told = f"{error.get('param')} {error['message']}"
    return None if any(name in told for name in names) else f"neither field is named: {error}"


# --- row 3


def lattice(pairs: int, server: Server, *, every: int = 1, seed: int = 3) -> str:
    """Every field of every route with every value, then ``pairs`` random pairs: an answer, or a 400 that names the
    field; one verdict everywhere.

    ``every``: only each so many-th value of a field.
    """
    connection, verdicts, count = server.connect(), {}, 0
    for route in BODIES:
        for name, (number, value) in itertools.product(_names(route), enumerate((*VALUES, *RAW))):
            if (number + len(name)) % every:
                continue
            answer = _try(connection, route, {name: value})
            count += 1
            if name in SAMPLED and route.body and name in route.body.__struct_fields__:
                verdicts.setdefault((name, number), {})[route.path] = answer.status == 200
    split = {key: found for key, found in verdicts.items() if len(set(found.values())) > 1}
    assert not split, (
        f"{len(split)} values are taken on one route and refused on another, first {next(iter(split.items()))}"
    )
    count += _pairs(connection, random.Random(seed), pairs)
    connection.close()
    server.wait_idle()
    return f"{count} bodies on {len(BODIES)} routes, 0 × 5xx, every 400 names its field"


def _pairs(connection: http.client.HTTPConnection, rng: random.Random, pairs: int) -> int:
    for _ in range(pairs):
        route = rng.choice(BODIES)
        first, second = rng.sample(_names(route), 2)
        _try(connection, route, {first: rng.choice(VALUES), second: rng.choice(VALUES)})
    return pairs


def _try(connection: http.client.HTTPConnection, route: Route, changes: Mapping[str, Any]) -> Answer:
    body = {**base_of(route), **{name: value for name, value in changes.items() if not isinstance(value, bytes)}}
    data = json.dumps(body).encode()
    for name, value in changes.items():
        if isinstance(value, bytes):
            data = data[:-1] + b',"' + name.encode() + b'":' + value + b"}"
    begun = time.perf_counter()
    answer = send(connection, route.method, route.path, data)
    wrong = problem(answer, changes)
    assert wrong is None, (route.path, data[:300], wrong, answer.body[:300])
    assert time.perf_counter() - begun < 10, (route.path, data[:300])
    return answer


# --- row 4


def token_ids(server: Server, rounds: int = 1) -> str:
    """Ids outside the logits, everywhere an id can stand, beside 16 live neighbours whose tokens stay what they are
    alone."""
    width = (
        int(server.ask("POST", "/detokenize", {"tokens": [2**30]}).error["message"].rsplit(" ", 1)[1].rstrip(".")) + 1
    )
    asked = {"max_tokens": 60, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    bodies = [{**asked, "prompt": [number + 20] * 9} for number in range(16)]
    alone = [server.ask("POST", "/v1/completions", body).json["choices"][0]["token_ids"] for body in bodies]
    refused = 0
    for _ in range(rounds):
        found: list[Any] = []
        neighbours = threading.Thread(
            target=lambda found=found: found.extend(
                together(ask(server.port, "/v1/completions", body) for body in bodies)
            )
        )
        neighbours.start()
        for bad in (-1, width, 2**31 - 1, 2**31, 2**63):
            for change in (
                {"prompt": [bad]},
                {"logit_bias": {str(bad): 1}},
                {"allowed_token_ids": [bad]},
                {"stop_token_ids": [bad]},
            ):
                answer = server.ask("POST", "/v1/completions", {"prompt": [9], "max_tokens": 1, **change})
                assert answer.status == 400 and answer.error["param"].partition("[")[0] in change, (change, answer)
                refused += 1
        neighbours.join()
        assert [reply.json["choices"][0]["token_ids"] for reply in found] == alone, "a neighbour's tokens changed"
    return f"{refused} bad ids refused beside 16 neighbours, whose tokens stayed"


# --- row 5


def fan_out(server: Server, million: int = 10**6, *, seconds: float = 1.0) -> str:
    """Requests that would become millions of things (or tenths of them): each is refused within ``seconds`` and before
    it is built."""
    text = {"prompt": "x", "max_tokens": 1}
    message, tool = {"role": "user", "content": ""}, {"type": "function", "function": {"name": "f"}}
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", {**text, "n": 10**9}),
        ("/v1/completions", {**text, "prompt": ["x"] * million}),
        ("/v1/completions", {**text, "prompt": [[9]] * million}),
        ("/v1/completions", {**text, "stop": ["x"] * (million // 10)}),
        ("/v1/completions", {**text, "bad_words": ["x"] * (million // 10)}),
        ("/v1/completions", {**text, "logit_bias": {str(number): 1 for number in range(million)}}),
        ("/v1/chat/completions", {"messages": [message], "tools": [tool] * (million // 10), "max_tokens": 1}),
        ("/v1/chat/completions", {"messages": [message] * million, "max_tokens": 1}),
    ]
    data = [(path, json.dumps(body).encode()) for path, body in bodies]
    slowest, before = 0.0, private_bytes(server.process.pid)
    for path, body in data:
        begun = time.perf_counter()
        answer = server.ask("POST", path, body)
        slowest = max(slowest, time.perf_counter() - begun)
        assert answer.status in (400, 413), (path, body[:80], answer)
        assert slowest < seconds, f"{body[:80]!r} was refused after {slowest:.1f} s"
    grown = private_bytes(server.process.pid) - before
    assert grown < 50 << 20, f"{grown >> 20} MiB more afterwards"
    return f"{len(bodies)} bombs refused, the slowest in {slowest:.2f} s, {max(grown, 0) >> 20} MiB more afterwards"


def longest_legal(server: Server) -> str:
    """What is allowed at its largest: the longest prompt with scores for every token, as many at once as run."""
    body = {"prompt": [9] * 500, "prompt_logprobs": 20, "logprobs": 20, "max_tokens": 10, "n": 1}
    replies = together(
        ask(server.port, "/v1/completions", {**body, "prompt": [number + 8] * 500}) for number in range(16)
    )
    assert [reply.status for reply in replies] == [200] * 16
    return "16 of the largest at once: all answered"


# --- row 6


# In processes of their own: they measure the server, not how long threads beside them wait for their interpreter.
PROBE = """
import http.client, json, select, sys, time
connection, times = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1])), []
while not select.select([sys.stdin], [], [], 0.01)[0]:
    begun = time.perf_counter()
    connection.request("GET", "/health")
    answer = connection.getresponse()
    assert answer.status == 200 and answer.read()
    times.append(time.perf_counter() - begun)
print(json.dumps(sorted(times)))
"""
READER = """
import http.client, json, select, sys, time
asked, gaps = json.dumps({"prompt": [9], "max_tokens": 300, "ignore_eos": True, "stream": True}), []
while not select.select([sys.stdin], [], [], 0)[0]:
    connection = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]))
    connection.request("POST", "/v1/completions", asked, {"Content-Type": "application/json"})
    answer, last = connection.getresponse(), None
    for line in answer:
        if line.startswith(b"data: {"):
            now = time.perf_counter()
            if last is not None:
                gaps.append(now - last)
            last = now
        if len(gaps) > 20 and select.select([sys.stdin], [], [], 0)[0]:
            break
    connection.close()
print(json.dumps(sorted(gaps)))
"""


@contextlib.contextmanager
def _measured(script: str, port: int) -> Iterator[list[float]]:
    """What the script has measured while the block ran, in order of size: filled when it has ended."""
    command, found = [sys.executable, "-c", script, str(port)], list[float]()
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield found
        finally:
            found += json.loads(process.communicate("\n", timeout=30)[0])


def _p99(times: list[float]) -> float:
    return times[int(0.99 * len(times))]


def million_tokens(senders: int, large: int, *, slack: float, command: Command = SERVE) -> str:
    """Prompts of a million tokens from many clients at once: refused soon, while probes and a stream go on.

    ``slack``: by how much the figures in time may be missed, on a machine that does other things too; the refusal's
    twice at most.
    """
    text = json.dumps({"prompt": "Once upon a time there was a cat. " * (large // 34)}).encode()
    ids = json.dumps({"prompt": [8000] * (large // 6)}).encode()
    found: list[tuple[int, float]] = []
    with serving(*HASH, "--device-time", "0.02", command=command) as server:

        def push(body: bytes) -> None:
            begun = time.perf_counter()
            found.append((server.ask("POST", "/v1/completions", body, timeout=120).status, time.perf_counter() - begun))

        with _measured(READER, server.port) as alone:
            time.sleep(0.8)
        with _measured(PROBE, server.port) as probes, _measured(READER, server.port) as gaps:
            time.sleep(0.3)
            threads = [threading.Thread(target=push, args=((text, ids)[number % 2],)) for number in range(senders)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    statuses, slowest = sorted({status for status, _ in found}), max(seconds for _, seconds in found)
    told = f"{senders} bodies of {large >> 20} MB: statuses {statuses} within {slowest:.1f} s; probes p99 {_p99(probes) * 1000:.0f} ms, "
    told += f"a token p99 {_p99(gaps) * 1000:.0f} ms ({_p99(alone) * 1000:.0f} alone)"
    assert set(statuses) <= {400, 413, 429} and len(found) == senders, told
    assert _p99(probes) < 0.1 * slack and _p99(gaps) < 2 * _p99(alone) * slack and slowest < 2.0 * min(slack, 2.0), told
    return told


# --- row 7


def dribble(server: Server, chunks: int) -> str:
    """A body in chunks of one byte: taken as it is, or refused; the server's memory does not follow the number of
    chunks."""
    body = json.dumps({"prompt": "x", "max_tokens": 1, "user": "y" * 4000, "stop": ["z" * 100]}).encode()
    body += b" " * (chunks - len(body))
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n"
    before = private_bytes(server.process.pid)
    with server.raw(head + b"Connection: close\r\n\r\n") as sock:
        sock.settimeout(120)
        for start in range(0, len(body), 10_000):
            sock.sendall(b"".join(b"1\r\n%c\r\n" % byte for byte in body[start : start + 10_000]))
        sock.sendall(b"0\r\n\r\n")
        answer = read_until_closed(sock)
    assert answer.startswith((b"HTTP/1.1 200", b"HTTP/1.1 413")), answer[:200]
    grown = private_bytes(server.process.pid) - before
    assert grown < 64 << 20, f"{grown >> 20} MiB more"
    return f"{chunks} chunks of a byte: {answer[9:12].decode()}, {max(grown, 0) >> 10} KiB more"


def pipeline(server: Server, requests: int) -> str:
    """Requests of all kinds, good and bad, sent at once on one connection: answered in their order."""
    asked, wanted = b"", []
    for number in range(requests):
        body = [b'{"prompt":"x","max_tokens":1}', b'{"prompt":', b'{"prompt":"x","n":0}'][number % 3]
        asked += b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX-Request-Id: p%d\r\n" % number
        asked += b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        wanted.append((b"200", b"400", b"400")[number % 3])
    asked += b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Request-Id: last\r\nConnection: close\r\n\r\n"
    with server.raw(asked) as sock:
        data = read_until_closed(sock)
    parts = data.split(b"HTTP/1.1 ")[1:]
    assert [part[:3] for part in parts] == [*wanted, b"200"]
    names = [part.partition(b"x-request-id: ")[2].partition(b"\r\n")[0] for part in parts]
    assert names == [*(b"p%d" % number for number in range(requests)), b"last"]
    return f"{requests} requests on one connection, answered in order"


def slowloris(server: Server, connections: int) -> str:
    """Connections that send a header's first bytes and wait: others are served."""
    socks = [server.raw(b"GET /health HTTP/1.1\r\nX-A: ") for _ in range(connections)]
    answer = server.ask("POST", "/v1/completions", {"prompt": "x", "max_tokens": 1})
    assert answer.status == 200
    for sock in socks:
        sock.close()
    return f"{connections} half-sent requests held, others served"


# --- row 14

SECRET, PROMPT = "sk-hidden-9f3a", "xylophone-quartz-marmalade"


def hygiene(bodies: int, seed: int = 14, *, command: Command = SERVE) -> str:
    """Everything that leaves a server over a hostile hour: no address, path, traceback, key, and no prompt in the
    log."""
    rng = random.Random(seed)
    with serving(*HASH, "--api-key", SECRET, command=command, env={"HEADRACE_LOG_LEVEL": "debug"}) as server:
        sent = b"".join(_hostile_answers(server, rng, bodies))
        server.signal()
        server.wait(15)
        logged = "\n".join(server.lines).encode()
    found = [*unclean(sent, SECRET.encode()), *unclean(logged, SECRET.encode(), PROMPT.encode())]
    assert not found, f"{len(found)} places, first {found[0]!r}"
    return f"{len(sent) >> 10} KiB of answers and {len(logged) >> 10} KiB of log: 0 hits"


def _hostile_answers(server: Server, rng: random.Random, bodies: int) -> Iterable[bytes]:
    """What has no route comes first: of refusals only so many a second have a line of their own in the log
    (LINES_A_SECOND)."""
    key = {"Authorization": f"Bearer {SECRET}"}
    for data in (
        b"GET /\x1b[31m\xff HTTP/1.1\r\n\r\n",
        b"\x00" * 100,
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nX: \x1b\r\n\r\n",
    ):
        with server.raw(data) as sock:
            yield read_until_closed(sock)
    for path in ("/etc/passwd", "/v1/models/%0d%0aX:y", "/%1b", "/v1/" + "x" * 3000, f"/v1/{PROMPT}"):
        yield server.ask("GET", path, headers=key).body
    for number in range(bodies):
        route = rng.choice(BODIES)
        body = {
            **base_of(route),
            **{rng.choice(_names(route)): rng.choice((*VALUES, PROMPT, "\x1b[31m", "\r\nX: y")) for _ in range(2)},
        }
        if rng.random() < 0.5:
            body = json.loads(
                json.dumps(body).replace('"hi"', json.dumps(PROMPT))
            )  # wherever a text stands: messages, input, prompt
        yield server.ask(route.method, route.path, body, key if number % 5 else {"X-Api-Key": SECRET + "x"}).body
    for route in BODIES:  # what is taken has a text as well, and hardly any of those above were
        body = json.loads(json.dumps(base_of(route)).replace('"hi"', json.dumps(PROMPT)))
        yield server.ask(route.method, route.path, body, key).body
    leaver = server.raw(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
    leaver.close()
