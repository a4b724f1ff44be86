"""Attacks by many requests of one client: on the queue, on templates, on grammars and their masks (attacks.py judges
and runs them).

What lives here: what is sent. What may not: how it is judged.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from tests.support.serving import Server
from tests.support.traffic import ask

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
KEYS = ("sk-polite", "sk-hog")
POLITE = {"Authorization": f"Bearer {KEYS[0]}"}
HOG = f"Authorization: Bearer {KEYS[1]}"
TWO_KEYS = ("--api-key", KEYS[0], "--api-key", KEYS[1])
# What the polite client asks for besides, by name: where, and a body in which @ stands for a number that grows.
TALK: Mapping[str, tuple[str, str]] = {
    "chat": (CHAT, json.dumps({"messages": [{"role": "user", "content": "hi @"}], "max_tokens": 2}))
}
NEW_SCHEMA: Mapping[str, tuple[str, str]] = {
    "schema": (
        COMPLETIONS,
        json.dumps({"prompt": [9], "max_tokens": 4, "structured_outputs": {"choice": ["yes @", "no @"]}}),
    )
}

Work = Callable[[Server], str]


def crowd(path: str, body: Callable[[int], Any], clients: int, seconds: float, *headers: str) -> Work:
    """So many clients, each of which asks again once it has its answer, whatever that is. ``body``: of the so many-th
    request."""

    async def client(server: Server, first: int, until: float, seen: Counter[int]) -> None:
        number = first
        while time.monotonic() < until:
            reply = await ask(server.port, path, body(number), *headers, timeout=120)
            seen[reply.status] += 1
            number += clients
            if reply.status == 429:
                await asyncio.sleep(0.1)

    async def all_clients(server: Server) -> Counter[int]:
        seen, until = Counter[int](), time.monotonic() + seconds
        await asyncio.gather(*(client(server, first, until, seen) for first in range(clients)))
        return seen

    def attack(server: Server) -> str:
        seen = asyncio.run(all_clients(server))
        assert seen[0] == seen[500] == 0, seen
        return f"{clients} clients for {seconds:g} s: {', '.join(f'{count} × {status}' for status, count in sorted(seen.items()))}"

    return attack


def talk(messages: int) -> Callable[[int], Any]:
    return lambda number: {"messages": [{"role": "user", "content": "a"}] * messages, "max_tokens": 1}


def long_answer(number: int) -> Any:
    return {"messages": [{"role": "user", "content": f"a {number}"}], "max_tokens": 100, "ignore_eos": True}


PERSON = {
    "type": "object",
    "properties": {name: {"type": "string"} for name in ("name", "street", "city", "country")}
    | {"age": {"type": "integer"}},
    "required": ["name", "street", "city", "country", "age"],
}


def many_rows(n: int, tokens: int = 60) -> Callable[[int], Any]:
    return lambda number: {
        "prompt": [9, number % 99],
        "n": n,
        "max_tokens": tokens,
        "structured_outputs": {"json": PERSON},
    }


def bomb(number: int) -> Any:
    """Takes nearly all the time that the trial of a grammar gets, and is refused; each another."""
    branches = {"anyOf": [{"properties": {f"z{place}": {} for place in range(30)}}] * 10}
    return {
        "prompt": [9],
        "structured_outputs": {
            "json": {"type": "object", "properties": {f"k{number}_{place}": branches for place in range(60)}}
        },
    }


def heavy(number: int) -> Any:
    """Takes a second to try out, and as long to compile for the model; each another."""
    return {
        "prompt": [9],
        "max_tokens": 4,
        "structured_outputs": {"choice": [f"v{number} {place}" for place in range(90_000)]},
    }
