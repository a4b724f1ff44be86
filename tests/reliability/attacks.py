"""Attacks by single requests (or a few), each with a polite client beside it: what one request may cost everybody else.

    python -m tests.reliability.attacks [--list] [NAME …]

Each attack gets a fresh server. A polite client in a process of its own asks ``/health`` and for a few tokens in a
closed loop, first alone, then beside the attack. An attack holds if the client's *slowest* answer (a percentile would
hide one long freeze) is at most ``SLOWER`` above its quiet one, the memory of all the server's processes stays within
``MORE_BYTES`` of what it was at rest, nothing was restarted, and the server still answers. Ends with 0 only if all
held.

To add one: a function ``(server) -> str`` that attacks, raises AssertionError for a wrong answer and returns what
happened in words; and a line in ``ATTACKS`` with a name, the flags of its server ("" are the defaults: the bundled
model) and the function. In CI a test calls ``held`` with the same function, smaller sizes (limits lowered by flags) and
a ``slack`` for a busy machine; ``command`` of ``planted`` shows that the defect is seen.

What lives here: attacks at full size, and how they are judged. What may not: pytest.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import re
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.reliability import attacks_fair as fair
from tests.support.planted import Command
from tests.support.serving import SERVE, Answer, Server, post_bytes, read_until_closed, serving
from tests.support.snapshot import private_bytes

SLOWER = 0.25  # seconds
MORE_BYTES = 600 << 20
QUIET_SECONDS = 3.0

Work = Callable[[Server], str]
COMPLETIONS = "/v1/completions"

# argv: port, headers as JSON, what else it asks for as JSON. Ends when its stdin does; prints the seconds of each kind
# of answer. A process of its own: it measures the server, not threads beside it.
_POLITE = """
import http.client, json, select, sys, time
asked = {"health": ("GET", "/health", None), "tokens": ("POST", "/v1/completions", json.dumps({"prompt": [9], "max_tokens": 4, "ignore_eos": True}))}
headers, taken = {"Content-Type": "application/json", **json.loads(sys.argv[2])}, {name: [] for name in asked}
connection, wrong = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]), timeout=120), []
for name, (path, body) in json.loads(sys.argv[3]).items():
    asked[name], taken[name] = ("POST", path, body), []
number = 0
while not select.select([sys.stdin], [], [], 0.01)[0]:
    number += 1
    for name, (method, path, body) in asked.items():
        begun = time.perf_counter()
        connection.request(method, path, body and body.replace("@", str(number)), headers)
        answer = connection.getresponse()
        text = answer.read()
        taken[name].append(time.perf_counter() - begun)
        if answer.status != 200:
            wrong.append([name, answer.status, text.decode()[:200]])
print(json.dumps({"taken": taken, "wrong": wrong}))
"""


@dataclass(slots=True)
class Watched:
    """What was seen while the block ran; filled when it has ended."""

    slowest: dict[str, float] = field(default_factory=dict)
    peak: int = 0  # bytes of all processes
    wrong: list[Any] = field(default_factory=list)


@contextlib.contextmanager
def watched(
    server: Server, headers: Mapping[str, str] | None = None, asks: Mapping[str, tuple[str, str]] | None = None
) -> Iterator[Watched]:
    """A polite client beside the block, which sends ``headers`` (its key), and a look at memory twenty times a second.
    ``asks``: what it asks for besides, by name: a path and a body, in which @ is another number each time."""
    found, over = Watched(), threading.Event()
    looker = threading.Thread(target=_look, args=(server, found, over), daemon=True)
    command = [
        sys.executable,
        "-c",
        _POLITE,
        str(server.port),
        json.dumps(dict(headers or {})),
        json.dumps(dict(asks or {})),
    ]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as polite:
        looker.start()
        try:
            yield found
        finally:
            said = polite.communicate("\n", timeout=130)[0]
            over.set()
            looker.join()
    told = json.loads(said or '{"taken": {}, "wrong": ["the polite client died"]}')
    found.slowest = {name: max(times, default=math.inf) for name, times in told["taken"].items()}
    found.wrong = told["wrong"]


def _look(server: Server, found: Watched, over: threading.Event) -> None:
    while not over.wait(0.05):
        found.peak = max(found.peak, _memory(server))


def _memory(server: Server) -> int:
    total = 0
    for pid in (server.process.pid, *server.children()):
        with contextlib.suppress(OSError):
            total += private_bytes(pid)
    return total


def held(
    attack: Work, flags: Sequence[str] = (), *, slack: float = 1.0, more_bytes: int = MORE_BYTES, quiet: float = QUIET_SECONDS,
    command: Command = SERVE, headers: Mapping[str, str] | None = None, asks: Mapping[str, tuple[str, str]] | None = None,
) -> str:  # fmt: skip
    """Starts a server and attacks it. ``slack``: by how much the figure in time may be missed where the machine does
    other things too."""
    with serving(*flags, command=command) as server:
        with watched(server, headers, asks) as before:
            time.sleep(quiet)
        with watched(server, headers, asks) as beside:
            time.sleep(0.2)
            happened = attack(server)
        assert server.process.poll() is None, f"the server is gone: {server.lines[-3:]}"
        restarts = [line for line in server.lines if "restart" in line]
    later = {name: beside.slowest.get(name, math.inf) - before.slowest[name] for name in before.slowest}
    told = ", ".join(
        f"{name} {beside.slowest.get(name, math.inf) * 1000:.0f} ms ({before.slowest[name] * 1000:.0f} quiet)"
        for name in later
    )
    grown = beside.peak - before.peak
    figure = f"{happened}; polite: {told}; {grown / 2**20:+.0f} MiB"
    assert not beside.wrong, f"{len(beside.wrong)} polite requests were refused, first {beside.wrong[0]}: {figure}"
    assert not restarts, f"{restarts[0]}: {figure}"
    assert max(later.values()) <= SLOWER * slack, figure
    assert grown <= more_bytes, figure
    return figure


# --- what one request multiplies


def one(path: str, body: Any, statuses: Sequence[int], *, times: int = 3) -> Work:
    """The same request ``times`` times, one after another, each answered with one of ``statuses``."""

    def attack(server: Server) -> str:
        begun, data, answers = time.perf_counter(), json.dumps(body).encode(), list[Answer]()
        for _ in range(times):
            answers.append(server.ask("POST", path, data, timeout=180))
            assert answers[-1].status in statuses, (answers[-1].status, answers[-1].body[:300])
        last = answers[-1]
        message = "" if last.status == 200 else f" ({last.error['message'][:160]})"
        return f"{times} × {last.status}, {len(last.body) / 1e6:.1f} MB{message} in {time.perf_counter() - begun:.1f} s"

    return attack


def unread(path: str, body: Any, clients: int, seconds: float, every: float = 0.0) -> Work:
    """Clients that never read. ``every``: seconds between them, so that their steps are not what others wait for."""

    def attack(server: Server) -> str:
        asked = post_bytes(path, body)
        socks = []
        for _ in range(clients):
            socks.append(server.raw(asked, receive_buffer=4096))
            time.sleep(every)
        time.sleep(seconds)
        for sock in socks:
            sock.close()
        return f"{clients} unread for {seconds:.0f} s"

    return attack


# --- HTTP that no honest client speaks

_HOST = b"Host: localhost\r\n"
_ASKED = {"prompt": "hi", "max_tokens": 3}
ODD = (  # bytes, and the statuses of all that is answered
    (post_bytes(COMPLETIONS, {**_ASKED, "user": "GET /health HTTP/1.1"}, "Connection: Upgrade", "Upgrade: h2c"), [200]),
    (
        b"POST /v1/completions HTTP/1.1\r\n"
        + _HOST
        + b"Upgrade: h2c\r\nContent-Length: 26\r\n\r\nGET /health HTTP/1.1\r\n\r\n..",
        [415],
    ),
    (b"GET /health HTTP/1.1\r\n" + _HOST + _HOST + b"\r\n", [400]),
    (post_bytes(COMPLETIONS, _ASKED) * 3, [200] * 3),
    (
        b"POST /nowhere HTTP/1.1\r\n"
        + _HOST
        + b"Connection: close\r\nContent-Length: 5000000\r\n\r\n"
        + b"a" * 5_000_000,
        [404],
    ),
)


def odd(seconds: float) -> Work:
    """Each in turn, by a client that closes its sending side and reads only then."""

    def attack(server: Server) -> str:
        until, times = time.monotonic() + seconds, 0
        while time.monotonic() < until:
            for sent, statuses in ODD:
                with server.raw(sent) as sock:
                    sock.shutdown(socket.SHUT_WR)
                    told = [int(each) for each in re.findall(rb"HTTP/1\.1 ([2-5]\d\d) ", read_until_closed(sock))]
                assert told == statuses, (sent[:120], told)
            times += 1
        return f"{times} × {len(ODD)} answered as they should be in {seconds:g} s"

    return attack


def _scored(prompt: int = 4000, n: int = 128) -> dict[str, Any]:
    return {"prompt": list(range(prompt)), "prompt_logprobs": 20, "n": n, "max_tokens": 1}


def _echoed(prompt: int = 4000, prompts: int = 16, n: int = 128) -> dict[str, Any]:
    return {"prompt": [[2598] * prompt] * prompts, "echo": True, "n": n, "max_tokens": 1}


def _allowed(ids: int = 262_144, width: int = 512) -> dict[str, Any]:
    return {
        "prompt": "a",
        "allowed_token_ids": [number % width for number in range(ids)],
        "max_tokens": 2000,
        "stream": True,
        "ignore_eos": True,
    }


@dataclass(frozen=True, slots=True)
class Attack:
    name: str
    work: Work
    flags: tuple[str, ...] = ()
    headers: Mapping[str, str] | None = None  # of the polite client
    asks: Mapping[str, tuple[str, str]] | None = None  # as ``watched`` has it


MASKED = ("--executor", "keyed-hash", "--device-time", "0.002", "--max-num-seqs", "160")
HASHED = (
    "--executor",
    "keyed-hash",
    "--device-time",
    "0.002",
    "--max-num-seqs",
    "64",
    "--max-queue",
    "64",
    "--scheduling-policy",
    "fair",
)
QUICK = ("--executor", "keyed-hash", "--max-model-len", "4096")  # where the bundled model would be what others wait for
ATTACKS = (
    Attack("scores-per-choice", one(COMPLETIONS, _scored(), (200, 400)), QUICK),
    Attack("scores-once", one(COMPLETIONS, _scored(n=1), (200, 400)), QUICK),
    Attack("truncated-text", one(COMPLETIONS, {"prompt": "word " * 4_400_000, "max_tokens": 1, "truncate_prompt_tokens": 10}, (200, 400))),
    Attack("long-text", one(COMPLETIONS, {"prompt": "word " * 76_000, "max_tokens": 1}, (200, 400))),
    Attack("echo", one(COMPLETIONS, _echoed(), (200, 400)), QUICK),
    Attack("echo-unread", unread(COMPLETIONS, _echoed(n=8), 40, 5.0, 0.4), QUICK),
    Attack("allowed-ids", unread(COMPLETIONS, _allowed(), 150, 30.0), QUICK),
    Attack("many-scores", one("/v1/chat/completions", {
        "messages": [{"role": "user", "content": "a"}], "n": 128, "logprobs": True, "top_logprobs": 20, "max_tokens": 100, "ignore_eos": True,
    }, (200,)), QUICK),
    Attack("many-messages", fair.crowd(fair.CHAT, fair.talk(10_000), 16, 15.0), asks=fair.TALK),
    Attack("many-messages-key", fair.crowd(fair.CHAT, fair.talk(2_000), 64, 15.0, fair.HOG), fair.TWO_KEYS, fair.POLITE, fair.TALK),
    Attack("mask-rows", fair.crowd(COMPLETIONS, fair.many_rows(128), 1, 15.0), MASKED),
    Attack("grammar-bombs", fair.crowd(COMPLETIONS, fair.bomb, 16, 15.0), MASKED, asks=fair.NEW_SCHEMA),
    Attack("grammar-heavy", fair.crowd(COMPLETIONS, fair.heavy, 16, 15.0), MASKED, asks=fair.NEW_SCHEMA),
    Attack("odd-http", odd(10.0), QUICK),
    Attack("queue-hog", fair.crowd(fair.CHAT, fair.long_answer, 200, 10.0, fair.HOG), (*HASHED, *fair.TWO_KEYS), fair.POLITE, fair.TALK),
    Attack(
        "queue-hog-two", fair.crowd(fair.CHAT, fair.long_answer, 200, 10.0, fair.HOG),
        (*HASHED, *fair.TWO_KEYS, "--api-server-count", "2"), fair.POLITE, fair.TALK,
    ),
)  # fmt: skip


def attempt(attack: Attack) -> tuple[bool, str]:
    try:
        return True, held(attack.work, attack.flags, headers=attack.headers, asks=attack.asks)
    except Exception as error:
        if not isinstance(error, AssertionError):
            traceback.print_exc(limit=-4)
        return False, f"{type(error).__name__}: {str(error)[:600]}"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.reliability.attacks", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument(
        "names",
        metavar="NAME",
        nargs="*",
        choices=[[], *(each.name for each in ATTACKS)],
        help="attacks to run; all without any",
    )
    parser.add_argument("--list", action="store_true", help="only their names")
    args = parser.parse_args()
    chosen = [each for each in ATTACKS if not args.names or each.name in args.names]
    passed = True
    for attack in chosen:
        if args.list:
            print(attack.name, *attack.flags)
            continue
        good, figure = attempt(attack)
        passed = passed and good
        print(f"{attack.name:<20}{'held' if good else 'FAILED':<7} {figure}", flush=True)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
