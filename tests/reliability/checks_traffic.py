"""The checks of many clients against one running server (rows 20, 29, 30, 33, 34, 36, 38, 58), with the engine in its
own process and no model.

What lives here: the checks, each in a size its caller picks; a check raises AssertionError or returns its figure in
words. What may not: pytest, starting servers with defects.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import time
from collections import Counter
from typing import Any

from tests.support.planted import Command
from tests.support.serving import (
    SERVE,
    Server,
    post_bytes,
    read_until,
    read_until_closed,
    serving,
    split_response,
    wait_for,
)
from tests.support.snapshot import assert_back, at_rest, canary, metric, private_bytes, take
from tests.support.traffic import Reply, all_of, ask, leave, together
from tests.support.wire_rules import check_stream

HASH = ("--executor", "keyed-hash", "--device-time", "0.005", "--max-num-seqs", "16", "--max-queue", "2048")
QUICK = ("--executor", "keyed-hash", "--device-time", "0.001", "--max-num-seqs", "16", "--max-queue", "2048")
TEXT: dict[str, Any] = {"prompt": "hello there", "max_tokens": 400, "ignore_eos": True, "stream": True}
IDS = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}


def warm(server: Server) -> None:
    """What a server allocates once, it has allocated: threads, buffers, the first steps."""
    together(
        ask(server.port, "/v1/completions", {**TEXT, "max_tokens": 3, "stream": number % 2 == 0})
        for number in range(64)
    )
    server.wait_idle()


# --- row 34


def mass_disconnect(clients: int, rounds: int, *, seconds: float = 2.0, command: Command = SERVE) -> str:
    """Clients cut at random moments (queued, prefill, decode, flush): all is as before within ``seconds`` of each
    round's last cut."""
    rng, took = random.Random(34), []
    with serving(
        *HASH, "--max-queue", str(3 * clients + 64), command=command
    ) as server:  # places that are not given back are missed
        warm(server)
        for _ in range(2):  # what so many clients need at once is allocated now
            together(_cut_off(server, rng) for _ in range(clients))
        server.wait_idle(seconds)
        before = at_rest(server)
        with canary(server, refusals=True) as voice:
            for _ in range(rounds):
                together(_cut_off(server, rng) for _ in range(clients))
                with voice:
                    took.append(assert_back(server, before, seconds=seconds))
    return f"{rounds} rounds of {clients} clients, as before after {max(took):.2f} s at most"


async def _cut_off(server: Server, rng: random.Random) -> Reply:
    prompt = [rng.randrange(8, 8000) for _ in range(rng.choice((1, 50, 400)))]
    body = {
        **TEXT,
        "prompt": prompt,
        "stream": rng.random() < 0.7,
        "n": rng.choice((1, 1, 2)),
        "max_tokens": rng.choice((2, 20, 3000)),
    }
    return await ask(server.port, "/v1/completions", body, cut=rng.choice((0.0, 0.01, 0.1, 0.3)) * rng.random())


# --- row 20


def equal_names(server: Server, clients: int) -> str:
    """Requests that all call themselves the same (or alike, or nothing); every third leaves. Nobody else's tokens
    change."""
    names = ("same", "same", "sam", "same1", "", "0", "1")
    golden = {word: _tokens(server, word) for word in range(6)}

    async def one(number: int) -> list[int] | None:
        header, word = f"X-Request-Id: {names[number % len(names)]}", number % 6
        if number % 3 == 0:
            await ask(server.port, "/v1/completions", {**TEXT, "prompt": [word + 8]}, header, cut=0.05)
            return None
        reply = await ask(server.port, "/v1/completions", {**IDS, "prompt": [word + 8] * 5, "max_tokens": 40}, header)
        return list(reply.json["choices"][0]["token_ids"])

    answers = together(one(number) for number in range(clients))
    wrong = [number for number, answer in enumerate(answers) if answer is not None and answer != golden[number % 6]]
    assert not wrong, f"{len(wrong)} answers are not their own, first that of client {wrong[0]}"
    server.wait_idle()
    return f"{clients} clients, {sum(answer is None for answer in answers)} left, 0 affected"


def _tokens(server: Server, word: int) -> list[int]:
    return list(
        server.ask("POST", "/v1/completions", {**IDS, "prompt": [word + 8] * 5, "max_tokens": 40}).json["choices"][0][
            "token_ids"
        ]
    )


# --- row 29


def unservable(normal: int, *, command: Command = SERVE) -> str:
    """Prompts that the whole cache could not hold are refused at once; what comes after them is served."""
    small = ("--executor", "keyed-hash", "--num-blocks", "32", "--block-size", "16", "--max-num-seqs", "8")
    with serving(*small, command=command) as server:
        times = []
        for length, asked in itertools.product(
            (512, 600, 1500), ({"max_tokens": 4}, {})
        ):  # {}: as many as the context leaves, which is no room
            answer, seconds = _timed(server, {"prompt": [9] * length, **asked})
            assert (
                answer.status == 400
                and answer.error["code"] == "context_length_exceeded"
                and answer.error["param"] == "prompt"
            ), answer
            assert "maximum context length is" in answer.error["message"]
            times.append(seconds)
        replies = together(
            ask(server.port, "/v1/completions", {"prompt": [9] * 100, "max_tokens": 8, "ignore_eos": True})
            for _ in range(normal)
        )
        assert [reply.status for reply in replies] == [200] * normal
        server.wait_idle()
    return f"refused in {max(times) * 1000:.0f} ms, {normal} of {normal} others served"


def _timed(server: Server, body: Any) -> tuple[Any, float]:
    begun = time.perf_counter()
    return server.ask("POST", "/v1/completions", body), time.perf_counter() - begun


# --- row 30


def overload(seconds: float, *, step: float = 0.02, slack: float = 1.0, command: Command = SERVE) -> str:
    """Ten times what the server can do, in an open loop: the excess is told to come back at once, what was admitted
    ends about as soon as it would behind a full queue, and nothing is left.

    ``step``: seconds of one on the device; ten make an answer. ``slack``: by how much the figures in time may be
    missed, on a machine that does other things too.
    """
    tokens, rows = 10, 4
    flags = ("--executor", "keyed-hash", "--device-time", str(step), "--max-num-seqs", str(rows), "--max-queue", "16")
    body = {**TEXT, "max_tokens": tokens}
    with serving(*flags, command=command) as server:
        warm_up = together(ask(server.port, "/v1/completions", body) for _ in range(8))
        assert all(reply.complete for reply in warm_up)
        before = take(server)
        replies = asyncio.run(_open_loop(server.port, body, 10 * rows / (tokens * step), seconds))
        served = [reply for reply in replies if reply.status == 200]
        refused = [reply for reply in replies if reply.status != 200]
        assert refused, "nothing was refused: this was no overload"
        assert (others := Counter(reply.status for reply in refused if reply.status not in (429, 503))) == {}, (
            f"of {len(replies)}: {others}"
        )
        assert all(reply.retry_after is not None and 1 <= reply.retry_after <= 30 for reply in refused), (
            "refusals do not say when"
        )
        assert all(reply.complete and b"[DONE]" in reply.body for reply in served)
        wait = _share([reply.seconds for reply in refused], 0.99)
        assert wait < 0.1 * slack, f"refusals took {wait:.3f} s"
        full = asyncio.run(_closed_loop(server.port, body, 16, min(seconds, 10.0)))
        assert_back(server, before, seconds=10.0, slack=16 << 20)
    goodput, peak = len(served) / seconds, len(full) / min(seconds, 10.0)
    first, usual = (_share([reply.first for reply in replies], 0.99) for replies in (served, full))
    assert goodput >= 0.9 * peak / min(slack, 2.0), f"{goodput:.1f} answers/s under overload, {peak:.1f} at the best"
    assert first <= 2 * usual * slack, f"the first token took {first:.2f} s, {usual:.2f} s behind a full queue"
    told = f"{len(refused)} refused (p99 {wait * 1000:.0f} ms), first token p99 {first:.2f} s ({usual:.2f} s behind a full queue)"
    return f"{goodput:.1f} of {peak:.1f} answers/s, {told}, as before afterwards"


async def _closed_loop(port: int, body: Any, clients: int, seconds: float) -> list[Reply]:
    """Answers with as many clients as the queue holds."""
    end = time.monotonic() + seconds

    async def client() -> list[Reply]:
        replies = []
        while time.monotonic() < end:
            replies.append(await ask(port, "/v1/completions", body))
        return [reply for reply in replies if reply.status == 200]

    return [reply for replies in await all_of(client() for _ in range(clients)) for reply in replies]


async def _open_loop(port: int, body: Any, rate: float, seconds: float) -> list[Reply]:
    """Clients come when they come, not when others have left."""
    begun, running = time.monotonic(), []
    while (now := time.monotonic() - begun) < seconds:
        while len(running) < now * rate:
            running.append(asyncio.create_task(ask(port, "/v1/completions", body)))
        await asyncio.sleep(0.005)
    return await all_of(running)


def _share(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


# --- row 33


def ledger(server: Server, requests: int) -> str:
    """Everything that came in is counted once as what it became, and usage is the tokens that were given out."""
    rng, before, replies = random.Random(33), _books(server), []
    for start in range(0, requests, 200):
        replies += together(_mixed(server.port, rng) for _ in range(start, min(start + 200, requests)))
        server.wait_idle()
    books = {name: value - before[name] for name, value in _books(server).items()}
    done, wrong = (
        [reply for reply, kind in replies if reply is not None and kind == name] for name in ("whole", "wrong")
    )
    left = [kind for _, kind in replies if kind == "left"]
    assert all(reply.status == 200 for reply in done) and all(reply.status == 400 for reply in wrong)
    assert books["2xx"] + books["4xx"] == requests and books["5xx"] == 0 and books["4xx"] >= len(wrong), books
    choices = [choice for reply in done for choice in reply.json["choices"]]
    usage = [reply.json["usage"] for reply in done]
    given, asked = sum(len(choice["token_ids"]) for choice in choices), sum(each["prompt_tokens"] for each in usage)
    assert sum(each["completion_tokens"] for each in usage) == given
    assert books["finished"] == len(choices) and books["aborted"] == len(left), books
    assert books["tokens"] >= given and books["prompt"] == asked + len(left), books
    assert left or books["tokens"] == given, books
    return f"{requests} received = {len(done)} finished + {len(wrong)} refused + {len(left)} left; {given} tokens given = {given} in usage"


async def _mixed(port: int, rng: random.Random) -> tuple[Reply | None, str]:
    kind = rng.choice(("whole", "whole", "whole", "wrong", "left"))
    if kind == "left":
        await leave(port, "/v1/completions", {**TEXT, "prompt": [9], "max_tokens": 4000})
        return None, kind
    body = {
        **IDS,
        "prompt": [rng.randrange(8, 900)] * rng.randint(1, 60),
        "max_tokens": rng.randint(1, 20),
        "n": rng.choice((1, 1, 3)),
    }
    if kind == "wrong":
        body |= rng.choice(({"temperature": -1}, {"nonsense": 1}, {"prompt": [10**6]}, {"n": 0}))
    return await ask(port, "/v1/completions", body), kind


def _books(server: Server) -> dict[str, int]:
    page = server.ask("GET", "/metrics").body.decode()
    lines = [
        line
        for line in page.splitlines()
        if line.startswith("headrace_http_responses_total{") and "/v1/completions" in line
    ]
    by_class = {
        name: sum(int(line.rsplit(" ", 1)[1]) for line in lines if f'"{name}"' in line)
        for name in ("2xx", "4xx", "5xx")
    }
    ended = {
        name: int(metric(page, "headrace_request_success_total", f'"{name}"'))
        for name in ("stop", "length", "error", "abort")
    }
    tokens = {
        name: int(metric(page, f"headrace_{series}_tokens_total"))
        for name, series in (("tokens", "generation"), ("prompt", "prompt"))
    }
    return {
        **by_class,
        **tokens,
        "aborted": ended["abort"],
        "finished": ended["stop"] + ended["length"] + ended["error"],
    }


# --- row 36


def slow_readers(clients: int, seconds: float, *, command: Command = SERVE) -> str:
    """Clients that take a byte now and then cost little memory; others go on as before."""
    long = {**TEXT, "max_tokens": 3000, "logprobs": 5}
    flags = (
        "--executor",
        "keyed-hash",
        "--device-time",
        "0.002",
        "--max-num-seqs",
        str(clients + 4),
        "--max-model-len",
        "4096",
    )
    with serving(*flags, command=command) as server:
        warm(server)
        alone = _pace(server)
        before = private_bytes(server.process.pid)
        slow = [server.raw(post_bytes("/v1/completions", long), receive_buffer=2048) for _ in range(clients)]
        end = time.monotonic() + seconds
        most, beside = before, [_pace(server)]
        while time.monotonic() < end:
            for sock in slow:
                sock.recv(1)
            most = max(most, private_bytes(server.process.pid))
            beside.append(_pace(server))
        each = (most - before) / clients
        assert each < (1 << 20) + (1 << 18), f"{each / 2**20:.1f} MiB for each slow reader"
        for sock in slow:
            sock.close()
        server.wait_idle()
    return f"{clients} slow readers, {each / 2**10:.0f} KiB each; a token takes others {statistics.median(beside) / alone:.2f}× as long (median)"


def _pace(server: Server) -> float:
    """Seconds a token, for somebody who reads."""
    answer, seconds = _timed(server, {"prompt": [9, 9], "max_tokens": 40, "ignore_eos": True})
    assert answer.status == 200
    return seconds / 40


# --- row 38


def drain(streams: int, *, command: Command = SERVE) -> str:
    """SIGTERM: not ready at once, new requests are sent away, every answer, streamed or whole, ends as it would have,
    and the exit is 0."""
    with serving(*HASH, "--shutdown-timeout", "30", "--max-num-seqs", str(2 * streams), command=command) as server:
        socks = [
            server.raw(post_bytes("/v1/completions", {**TEXT, "max_tokens": 80}, "Connection: close"))
            for _ in range(streams)
        ]
        heads = [read_until(sock, b"\n\n") for sock in socks]
        asked = {**TEXT, "max_tokens": 80, "stream": False}
        whole = [server.raw(post_bytes("/v1/completions", asked, "Connection: close")) for _ in range(streams)]
        wait_for(lambda: server.running() == 2 * streams, 5, "all of them run")
        server.signal()
        begun = time.monotonic()
        while server.ask("GET", "/ready").status != 503:
            assert time.monotonic() - begun < 0.5
        refused = server.ask("POST", "/v1/completions", {"prompt": "x"})
        assert refused.status == 503 and 1 <= int(refused.headers["retry-after"]) <= 30
        for sock, head in zip(socks, heads, strict=True):
            _, body, complete = split_response(head + read_until_closed(sock))
            assert complete and b'"finish_reason":"length"' in body and body.endswith(b"data: [DONE]\n\n")
        for sock in whole:
            answer = read_until_closed(sock)
            assert answer.startswith(b"HTTP/1.1 200") and b'"finish_reason":"length"' in answer, answer[:300]
        status, took = server.wait(30), time.monotonic() - begun
        assert status == 0 and not server.children()
    return f"{streams} streams and as many whole answers ended with a finish_reason, exit 0 after {took:.1f} s"


# --- row 58


def conforming_streams(server: Server, count: int, at_once: int = 32) -> str:
    """Streams of both routes with whatever can be asked: every byte as the rules have it."""
    rng, events = random.Random(58), 0
    for _ in range(0, count, at_once):
        drawn = [_drawn(rng) for _ in range(at_once)]
        replies = together(ask(server.port, path, body) for path, body, _ in drawn)
        for reply, (path, body, choices) in zip(replies, drawn, strict=True):
            assert reply.status == 200 and reply.complete, (body, reply)
            events += check_stream(reply.body, chat="chat" in path, n=choices, usage=bool(body["stream_options"]))[
                "events"
            ]
    server.wait_idle()
    return f"{count} streams, {events} events, 0 violations"


def _drawn(rng: random.Random) -> tuple[str, dict[str, Any], int]:
    chat = rng.random() < 0.5
    body: dict[str, Any] = {
        "stream": True,
        "n": rng.choice((1, 1, 2)),
        "max_tokens": rng.randint(1, 12),
        "seed": rng.randrange(99),
    }
    body["stream_options"] = rng.choice((None, {"include_usage": True}))
    body["temperature"] = rng.choice((0, 1))
    if rng.random() < 0.3:
        body["stop"] = rng.sample(["a", "e", " th", "in"], 2)
    if chat:
        asked = {
            "messages": [{"role": "user", "content": f"number {rng.randrange(99)} \u2028 é"}],
            "logprobs": rng.random() < 0.3,
        }
        return "/v1/chat/completions", {**body, **asked}, body["n"]
    prompts = [[rng.randrange(8, 999)] for _ in range(rng.choice((1, 1, 2)))]
    asked = {"prompt": prompts, **rng.choice(({}, {"logprobs": 2}, {"echo": True}))}
    return "/v1/completions", {**body, **asked}, body["n"] * len(prompts)
