"""Row 59: mixed load for as long as one likes, and whether anything grows meanwhile, front end and engine apart.

What lives here: the load, the samples, the judgement. What may not: pytest, the arithmetic of trends (trend.py).

The first third is warm-up: everything that has a bound has reached it by then. Over the rest each process is looked at
once a second: RssAnon + VmSwap, by which it is judged, and beside it Pss and Private_Dirty. What is held for a moment
is no growth, so the least of each of LEASTS spans counts; the slope through them is the median of the slopes of all
their pairs, with an interval of 95 %.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

from tests.reliability.checks_life import engine_of
from tests.reliability.checks_traffic import IDS
from tests.reliability.trend import Trend, leasts, trend
from tests.support.planted import Command, planted
from tests.support.serving import SERVE, Server, serving
from tests.support.snapshot import CANARY, MEMORY_SLACK, Memory, Snapshot, assert_back, memory_of, take
from tests.support.traffic import ask

FLAGS = (
    "--executor",
    "keyed-hash",
    "--device-time",
    "0.002",
    "--max-num-seqs",
    "32",
    "--num-blocks",
    "512",
    "--max-model-len",
    "2048",
)
CLIENTS = 24
POOLS = 8  # threads or descriptors that pools of a fixed size may still add, and so many each of their processes
PROCESSES_OF_POOLS = 3  # that those for templates and grammars may still start
SHORT = 1.0  # minutes in which what has no bound hardly grows: half as much is allowed
LONG = 20.0  # minutes from which on a slope is a figure; shorter runs bound the growth itself
SLOPE = 1.0  # MiB an hour
LEASTS = 40
DRIFT = 0.05  # of the 99th percentile of seconds a token
SHARE = 0.999
PROCESSES = ("front end", "engine")


LEAK = """
import threading, time
def leak(kept=[]):
    while True:
        kept.append(bytes({rate} * 2**20 * 2 // 3600))
        time.sleep(2.0)
threading.Thread(target=leak, daemon=True).start()
"""


@dataclass(slots=True)
class Tally:
    """What was asked and what became of it; (seconds, memory of the front end, memory of the engine) once a second."""

    kinds: Counter[str] = field(default_factory=Counter)
    bad: list[str] = field(default_factory=list)
    samples: list[tuple[float, Memory, Memory]] = field(default_factory=list)
    paces: list[tuple[float, float]] = field(default_factory=list)  # when, seconds a token


def soak(minutes: float, *, command: Command = SERVE) -> str:
    with serving(*FLAGS, command=command) as server:
        golden = server.ask("POST", "/v1/completions", CANARY).json["choices"][0]["token_ids"]
        tally, seconds = Tally(), 60 * minutes
        asyncio.run(_one_of_each(server))
        asyncio.run(_load(server, Tally(), seconds / 3, golden))
        server.wait_idle()
        before = take(server)
        asyncio.run(_load(server, tally, seconds * 2 / 3, golden))
        server.wait_idle()
        figure = judge(tally, minutes)
        assert_back(server, _settled(before, server), seconds=5.0)
    return figure


def leak_is_seen(minutes: float, rate: int = 4) -> str:
    """The negative control at full length: a front end that loses ``rate`` MiB an hour."""
    try:
        figure = soak(minutes, command=planted(LEAK.format(rate=rate)))
    except AssertionError as error:
        return f"a leak of {rate} MiB/h: {error}"
    raise AssertionError(f"a leak of {rate} MiB/h was not seen: {figure}")


def _settled(before: Snapshot, server: Server) -> Snapshot:
    """Memory is judged by its slope, and pools may have started what they had not needed before; all else is to be as
    it was."""
    now = take(server)
    started = now.children - before.children
    assert 0 <= started <= PROCESSES_OF_POOLS, f"processes {before.children} → {now.children}"
    grown = max(now.fds - before.fds, now.threads - before.threads)
    assert grown <= POOLS * (1 + started), (
        f"descriptors {before.fds} → {now.fds}, threads {before.threads} → {now.threads}"
    )
    return replace(before, memory=now.memory, fds=now.fds, threads=now.threads, children=now.children)


async def _one_of_each(server: Server) -> None:
    """What only some kinds need is loaded now: a soak of seconds may have none of them in its first third."""
    rng = random.Random(59)
    drawn = {kind: (path, body) for kind, path, body, _ in (_drawn(rng) for _ in range(400))}
    await asyncio.gather(*(ask(server.port, *each) for kind, each in drawn.items() if kind != "left"))


async def _load(server: Server, tally: Tally, seconds: float, golden: list[int]) -> None:
    end, engine = time.monotonic() + seconds, engine_of(server)
    clients = [
        asyncio.create_task(_client(server.port, random.Random(number), tally, end, golden))
        for number in range(CLIENTS)
    ]
    begun = time.monotonic()
    while time.monotonic() < end:
        tally.samples.append((time.monotonic() - begun, memory_of(server.process.pid), memory_of(engine)))
        await asyncio.sleep(min(1.0, seconds / 20))
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
        chat = {
            "messages": [{"role": "user", "content": f"number {rng.randrange(1000)}"}],
            "max_tokens": 16,
            "stream": rng.random() < 0.5,
        }
        return "chat", "/v1/chat/completions", chat, 200
    return "whole", "/v1/completions", body, 200


def judge(tally: Tally, minutes: float) -> str:
    """Raises AssertionError where a promise is broken; otherwise the figures."""
    total = sum(tally.kinds.values())
    share = 1 - len(tally.bad) / total
    assert share >= SHARE, f"{len(tally.bad)} of {total} failed, first {tally.bad[:3]}"
    told = "; ".join(_judge_memory(name, tally, which, minutes) for which, name in enumerate(PROCESSES, 1))
    return f"{minutes:g} min, {total} requests, {share * 100:.3f} % as they should be; {told}; {_judge_pace(tally.paces, minutes)}"


def _judge_memory(name: str, tally: Tally, which: int, minutes: float) -> str:
    times, memory = [sample[0] for sample in tally.samples], [sample[which] for sample in tally.samples]
    private, shared, dirty = (
        _growth(times, [getattr(each, kind) for each in memory]) for kind in ("private", "proportional", "dirty")
    )
    grown = memory[-1].private - memory[0].private
    if minutes >= LONG:
        assert private.slope < SLOPE, f"memory of the {name} grows by {private} MiB/h"
    else:
        assert grown < MEMORY_SLACK * (1 if minutes < SHORT else 2), f"memory of the {name} grew by {grown >> 10} KiB"
    return f"{name} {private} MiB/h ({grown >> 10:+d} KiB; Pss {shared}, Private_Dirty {dirty})"


def _growth(times: list[float], values: list[int]) -> Trend:
    """In MiB an hour."""
    return trend(*leasts(times, values, LEASTS)).scaled(3600 / 2**20)


def _judge_pace(paces: list[tuple[float, float]], minutes: float) -> str:
    """How the 99th percentile of seconds a token changes from the beginning to the end, as a share of its median."""
    paces = sorted(paces)
    size = max(1, len(paces) // 12)
    spans = [paces[start : start + size] for start in range(0, len(paces) - size + 1, size)]
    slow = [sorted(pace for _, pace in span)[int(0.99 * size)] for span in spans]
    middle = sorted(slow)[len(slow) // 2]
    drift = trend([span[0][0] for span in spans], slow).scaled((spans[-1][0][0] - spans[0][0][0]) / middle)
    assert minutes < LONG or drift.low < DRIFT, f"the slowest of a hundred tokens drift by {drift} of their time"
    return f"p99 of a token {middle * 1000:.1f} ms, drift {drift.scaled(100)} %"
