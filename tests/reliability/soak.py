"""Row 59: mixed load for as long as one likes, and whether anything grows meanwhile, front end and engine apart.

What lives here: the load, the samples, the judgement. What may not: pytest.

The first third is warm-up. Memory is judged by the least-squares slope of RssAnon + VmSwap over the rest, sampled once a second.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

from tests.reliability.checks_life import engine_of
from tests.reliability.checks_traffic import IDS
from tests.support.planted import Command
from tests.support.serving import SERVE, Server, serving
from tests.support.snapshot import CANARY, MEMORY_SLACK, Snapshot, assert_back, private_bytes, take
from tests.support.traffic import ask

FLAGS = ("--executor", "keyed-hash", "--device-time", "0.002", "--max-num-seqs", "32", "--num-blocks", "512", "--max-model-len", "2048")
CLIENTS = 24
POOLS = 8  # threads or descriptors that pools of a fixed size may still add
LONG = 20.0  # minutes from which on a slope is a figure; shorter runs bound the growth itself
SLOPE = 1.0  # MiB an hour
SHARE = 0.999


@dataclass(slots=True)
class Tally:
    """What was asked and what became of it; (seconds, bytes of the front end, bytes of the engine) once a second."""

    kinds: Counter[str] = field(default_factory=Counter)
    bad: list[str] = field(default_factory=list)
    samples: list[tuple[float, int, int]] = field(default_factory=list)
    paces: list[tuple[float, float]] = field(default_factory=list)  # when, seconds a token


def soak(minutes: float, *, command: Command = SERVE) -> str:
    with serving(*FLAGS, command=command) as server:
        golden = server.ask("POST", "/v1/completions", CANARY).json["choices"][0]["token_ids"]
        tally, seconds = Tally(), 60 * minutes
        asyncio.run(_load(server, Tally(), seconds / 3, golden))
        server.wait_idle()
        before = take(server)
        asyncio.run(_load(server, tally, seconds * 2 / 3, golden))
        server.wait_idle()
        figure = judge(tally, minutes)
        assert_back(server, _settled(before, server), seconds=5.0)
    return figure


def _settled(before: Snapshot, server: Server) -> Snapshot:
    """Memory is judged by its slope, and pools may have started threads that they had not needed before; all else is to be as it was."""
    now = take(server)
    grown = max(now.fds - before.fds, now.threads - before.threads)
    assert grown <= POOLS, f"descriptors {before.fds} → {now.fds}, threads {before.threads} → {now.threads}"
    return replace(before, memory=now.memory, fds=now.fds, threads=now.threads)


async def _load(server: Server, tally: Tally, seconds: float, golden: list[int]) -> None:
    end, engine = time.monotonic() + seconds, engine_of(server)
    clients = [asyncio.create_task(_client(server.port, random.Random(number), tally, end, golden)) for number in range(CLIENTS)]
    begun = time.monotonic()
    while time.monotonic() < end:
        tally.samples.append((time.monotonic() - begun, private_bytes(server.process.pid), private_bytes(engine)))
        await asyncio.sleep(1.0)
    await asyncio.gather(*clients)


async def _client(port: int, rng: random.Random, tally: Tally, end: float, golden: list[int]) -> None:
    while (now := time.monotonic()) < end:
        kind, path, body, wanted = _drawn(rng)
        reply = await ask(port, path, body, cut=rng.uniform(0, 0.2) if kind == "left" else None)
        tally.kinds[kind] += 1
        good = kind == "left" or (reply.status == wanted and reply.complete)
        if good and kind == "canary":
            good = reply.json["choices"][0]["token_ids"] == golden
        if not good:
            tally.bad.append(f"{kind}: {reply.status} {reply.body[:200]!r}")
        elif kind == "whole":
            tally.paces.append((now, reply.seconds / body["max_tokens"]))


def _drawn(rng: random.Random) -> tuple[str, str, dict[str, Any], int]:
    """2 % wrong, 5 % left, 1 % with a grammar, 1 % the canary; the rest streamed or whole, short or long."""
    chance, prompt = rng.random(), [rng.randrange(8, 5000) for _ in range(rng.choice((3, 30, 200)))]
    body = {**IDS, "prompt": prompt, "max_tokens": rng.choice((4, 16, 64)), "cache_salt": f"s{rng.randrange(5)}"}
    if chance < 0.02:
        wrong = rng.choice(({"temperature": -1}, {"nope": 1}, {"prompt": []}, {"stop": [[]]}))
        return "wrong", "/v1/completions", {**body, **wrong}, 400
    if chance < 0.07:
        return "left", "/v1/completions", {**body, "stream": True, "max_tokens": 400}, 200
    if chance < 0.08:
        grammar = {"structured_outputs": {"choice": ["yes", "no"]}, "ignore_eos": False}
        return "grammar", "/v1/completions", {**body, **grammar, "max_tokens": 8}, 200
    if chance < 0.09:
        return "canary", "/v1/completions", CANARY, 200
    if chance < 0.5:
        return "streamed", "/v1/completions", {**body, "stream": True}, 200
    if chance < 0.6:
        chat = {"messages": [{"role": "user", "content": f"number {rng.randrange(1000)}"}], "max_tokens": 16, "stream": rng.random() < 0.5}
        return "chat", "/v1/chat/completions", chat, 200
    return "whole", "/v1/completions", body, 200


def judge(tally: Tally, minutes: float) -> str:
    """Raises AssertionError where a promise is broken; otherwise the figures."""
    total = sum(tally.kinds.values())
    share = 1 - len(tally.bad) / total
    assert share >= SHARE, f"{len(tally.bad)} of {total} failed, first {tally.bad[:3]}"
    times = [when for when, _, _ in tally.samples]
    slopes = [_slope(times, [sample[which] for sample in tally.samples]) * 3600 / 2**20 for which in (1, 2)]
    grown = [tally.samples[-1][which] - tally.samples[0][which] for which in (1, 2)]
    if minutes >= LONG:
        assert max(slopes) < SLOPE, f"memory grows by {slopes[0]:.2f} (front end) and {slopes[1]:.2f} (engine) MiB/h"
    else:
        assert max(grown) < 2 * MEMORY_SLACK, f"memory grew by {grown[0] >> 10} (front end) and {grown[1] >> 10} (engine) KiB"
    memory = ", ".join(f"{name} {slopes[which]:+.2f} MiB/h ({grown[which] >> 10:+d} KiB)" for which, name in enumerate(("front end", "engine")))
    drift = f"{_drift(tally.paces) * 100:+.0f} % from first to last third"
    return f"{minutes:g} min, {total} requests, {share * 100:.3f} % as they should be; memory {memory}; a token {drift}"


def _slope(times: list[float], values: list[int]) -> float:
    return statistics.linear_regression(times, values).slope if len(times) > 2 else 0.0


def _drift(paces: list[tuple[float, float]]) -> float:
    """Of the 99th percentile of seconds a token."""
    third = max(1, len(paces) // 3)
    first, last = (sorted(pace for _, pace in part)[int(0.99 * third) - 1] for part in (paces[:third], paces[-third:]))
    return last / first - 1
