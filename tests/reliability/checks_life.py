"""The checks of a server's processes: killed, frozen, starved, restarted (rows 37, 39, 40, 41, 42, 43, 48, 49).

What lives here: the checks, each in a size its caller picks; a check raises AssertionError or returns its figure in
words. What may not: pytest, starting servers with defects.
"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.support.planted import Command
from tests.support.serving import (
    SERVE,
    Server,
    events_of,
    post_bytes,
    read_until,
    read_until_closed,
    serving,
    split_response,
    wait_for,
)
from tests.support.snapshot import listening
from tests.support.traffic import ask, send, together

HASH = ("--executor", "keyed-hash", "--device-time", "0.005", "--max-num-seqs", "16")
TEXT: dict[str, Any] = {"prompt": "hello there", "max_tokens": 3000, "ignore_eos": True, "stream": True}


@contextlib.contextmanager
def own_place() -> Iterator[tuple[dict[str, str], Callable[[], list[str]]]]:
    """An environment whose temporary files are in a folder of its own, and what is left in there (and in /dev/shm) of
    ours."""
    with tempfile.TemporaryDirectory() as folder:
        yield (
            {"TMPDIR": folder},
            lambda: sorted(str(path) for place in (folder, "/dev/shm") for path in Path(place).glob("headrace-*")),
        )


def engine_of(server: Server) -> int:
    """The child that was started as headrace.engine.process; 0 while there is none."""
    return next(iter(server.members("headrace.engine.process")), 0)


def _streams(server: Server, count: int) -> list[tuple[socket.socket, bytes]]:
    """Open streams that have had their first event, and what came of them so far."""
    socks = [server.raw(post_bytes("/v1/completions", {**TEXT, "prompt": [number + 9]})) for number in range(count)]
    return [(sock, read_until(sock, b"\n\n\r\n")) for sock in socks]


def assert_told(data: bytes) -> None:
    """The stream ended in an error event and a broken body, or in a broken body alone; a clean end would look like
    success."""
    _, body, complete = split_response(data)
    assert not complete and b"[DONE]" not in body, data[-300:]
    if body.endswith(b"\n\n") and b'"error"' in body:
        assert events_of(body)[-1]["error"]["type"] == "service_unavailable_error"


# --- rows 39, 40


def engine_killed(times: int, streams: int = 16, *, command: Command = SERVE) -> str:
    """kill -9 of the engine mid-stream: every client is told, the server ends with an error, nothing is left."""
    told, gone = [], []
    with own_place() as (env, leftovers):
        for _ in range(times):
            with serving(*HASH, command=command, env=env) as server:
                opened = _streams(server, streams)
                os.kill(engine_of(server), signal.SIGKILL)
                begun = time.monotonic()
                for sock, data in opened:
                    assert_told(data + read_until_closed(sock))
                told.append(time.monotonic() - begun)
                assert server.wait(10) != 0
                gone.append(time.monotonic() - begun)
                wait_for(lambda server=server: not server.children(), 5, "children are gone")
            assert not leftovers(), leftovers()
    assert max(told) < 5 and max(gone) < 10, (max(told), max(gone))
    return (
        f"{times} × {streams} streams: told within {max(told):.2f} s, exit ≠ 0 within {max(gone):.2f} s, nothing left"
    )


def server_killed(times: int, *, command: Command = SERVE) -> str:
    """kill -9 of the front end: the engine ends too, the port can be taken again at once."""
    took = []
    with own_place() as (env, leftovers):
        for _ in range(times):
            with serving(*HASH, command=command, env=env) as server:
                opened = _streams(server, 4)
                os.kill(server.process.pid, signal.SIGKILL)
                took.append(wait_for(lambda server=server: not server.children(), 5, "the engine is gone"))
                for sock, data in opened:
                    assert b"[DONE]" not in data + read_until_closed(sock)
                with socket.socket() as again:
                    again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    again.bind(("127.0.0.1", server.port))
            assert not leftovers(), leftovers()
    return f"{times} times: the engine was gone after {max(took):.2f} s at most, port and files free"


# --- rows 41, 42


def frozen_engine(*, thaw: bool, within: float = 10.0, command: Command = SERVE) -> str:
    """SIGSTOP of the engine: /health says so. Thawed in time it goes on; otherwise the server gives up and tells its
    clients."""
    with serving(*HASH, command=command) as server:
        ((sock, data),) = _streams(server, 1)
        pid = engine_of(server)
        os.kill(pid, signal.SIGSTOP)
        seen = wait_for(lambda: server.ask("GET", "/health").status == 503, within, "the hang is seen")
        if thaw:
            os.kill(pid, signal.SIGCONT)
            wait_for(lambda: server.ask("GET", "/health").status == 200, 5, "it is healthy again")
            sock.close()
            server.wait_idle()
            return f"unhealthy after {seen:.1f} s, healthy again when it goes on"
        sock.settimeout(60)
        assert_told(data + read_until_closed(sock))
        assert server.wait(60) != 0
        wait_for(lambda: not server.children(), 5, "children are gone")
    return f"unhealthy after {seen:.1f} s, given up by itself, the client told"


def long_step(seconds: float, *, command: Command = SERVE) -> str:
    """A step that takes long is no hang: no probe fails; a client with a short timeout hears comments (rows 37 and 41's
    control)."""
    flags = ("--executor", "keyed-hash", "--device-time", str(seconds))
    asked = post_bytes("/v1/completions", {**TEXT, "max_tokens": 1}, "Connection: close")
    with serving(*flags, command=command) as server, server.raw(asked) as sock:
        sock.settimeout(15)
        sock.setblocking(False)
        begun, heard, data, quiet = time.monotonic(), time.monotonic(), b"", 0.0
        while b"[DONE]" not in data:
            assert server.ask("GET", "/health").status == 200 and time.monotonic() - begun < 3 * seconds + 10
            with contextlib.suppress(BlockingIOError):
                data += sock.recv(65536)
                quiet, heard = max(quiet, time.monotonic() - heard), time.monotonic()
            time.sleep(0.2)
    assert quiet <= 10, f"nothing was heard for {quiet:.1f} s"
    assert data.count(b": ping") >= int(seconds / 10) and b"\nid:" not in data.partition(b"\r\n\r\n")[2], data
    return f"a step of {seconds:.0f} s: no failed probe, a byte at least every {quiet:.1f} s"


def saturated(seconds: float, *, command: Command = SERVE) -> str:
    """Long prompts without pause: every probe of /health succeeds, and asks nothing of the engine."""
    flags = ("--executor", "keyed-hash", "--device-time", "0.02", "--max-num-seqs", "16", "--max-model-len", "4096")
    with serving(*flags, command=command) as server:
        pid, times, end = os.fork(), [], time.monotonic() + seconds
        if not pid:
            _saturate(server.port, end)
        while time.monotonic() < end:
            begun = time.perf_counter()
            assert server.ask("GET", "/health").status == 200
            times.append(time.perf_counter() - begun)
            time.sleep(0.02)
        os.waitpid(pid, 0)
        server.wait_idle(10)
    times.sort()
    return f"{len(times)} probes, 0 failed, p99 {times[int(0.99 * len(times))] * 1000:.0f} ms"


def _saturate(port: int, end: float) -> None:
    """In a process of its own, so that the probes do not wait for the load's sending."""
    with contextlib.suppress(BaseException):
        while time.monotonic() < end:
            together(
                ask(port, "/v1/completions", {**TEXT, "prompt": [number + 8] * 3000, "max_tokens": 8})
                for number in range(32)
            )
    os._exit(0)


# --- row 43


def crash_loop(times: int, *, command: Command = SERVE) -> str:
    """kill -9 of front end or engine at random moments, the start included: each next start serves, nothing piles
    up."""
    rng, starts = random.Random(43), []
    with own_place() as (env, leftovers):
        for _ in range(times):
            _crash(rng, env)
            begun = time.monotonic()
            with serving(*HASH, command=command, env=env) as again:
                starts.append(time.monotonic() - begun)
                assert again.ask("POST", "/v1/completions", {"prompt": "x", "max_tokens": 2}).status == 200
                assert not leftovers(), f"the next start left what it found: {leftovers()}"
    return f"{times}/{times} restarts serve, after {max(starts):.1f} s at most, nothing left"


def _crash(rng: random.Random, env: Mapping[str, str]) -> None:
    """A server that is killed, or whose engine is, within its first second: it may still be loading."""
    server = Server([*SERVE, *HASH], env)
    try:
        time.sleep(rng.uniform(0, 1.0))
        victim = engine_of(server) if rng.random() < 0.5 else 0
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim or server.process.pid, signal.SIGKILL)
        server.process.wait(15)
        wait_for(lambda: not server.children(), 5, "children are gone")
    finally:
        server.stop()


# --- rows 48, 49


def memory_ceiling(extra: int = 128 << 20, *, command: Command = SERVE) -> str:
    """An address space that ends soon above what is used: bodies that would need more are refused, the process lives
    and serves."""
    with serving(*HASH, command=command) as server:
        together(ask(server.port, "/v1/completions", {"prompt": "x", "max_tokens": 1}) for _ in range(32))
        size = int(Path(f"/proc/{server.process.pid}/statm").read_text().split()[0]) * resource.getpagesize()
        resource.prlimit(server.process.pid, resource.RLIMIT_AS, (size + extra, size + extra))
        asked = post_bytes("/v1/completions", {"prompt": [8] * 1_400_000, "max_tokens": 1}, "Connection: close")
        replies = together(send(server.port, asked) for _ in range(12))
        statuses = sorted({reply.status for reply in replies})
        # 0: cut off before an answer, which a client sees; 408: what it sent could not be taken in, and it was told so.
        assert set(statuses) <= {0, 400, 408, 413, 429, 503}, statuses
        assert server.process.poll() is None
        answer = server.ask("POST", "/v1/completions", {"prompt": "x", "max_tokens": 2})
        assert answer.status == 200, answer
        assert not any("Traceback" in line for line in server.lines), server.lines
    return f"12 bodies of 4 MB in {extra >> 20} MiB: statuses {statuses}, the next request is served"


def sockets(*, command: Command = SERVE) -> str:
    """While it serves, one socket listens: the API's, on loopback; none of the engine's."""
    with serving(*HASH, command=command) as server:
        pids = [server.process.pid, *server.children()]
        assert len(pids) >= 2
        assert listening(pids) == [f"tcp 0100007F:{server.port:04X}"], listening(pids)
    return "one: 127.0.0.1, the API's port"
