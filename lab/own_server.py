"""A server of a benchmark's own, in a process beside it.

What lives here: starting, waiting until it is ready, stopping. What may not: loads, figures.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from headrace.bench.load import HttpClient
from headrace.bench.startup import READY_TIMEOUT, await_ready, keyless
from headrace.errors import BenchFailed

STOP_SECONDS = 60.0


@contextmanager
def own_server(flags: Sequence[str], log: Path, *, api_key: str | None = None) -> Iterator[str]:
    """``headrace serve`` with ``flags``; its URL once it is ready. Raises BenchFailed.

    ``log``: what it says. ``api_key``: one of those in ``flags``.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with log.open("wb") as said:
        command = [sys.executable, "-m", "headrace", "serve", *flags, "--port", str(port)]
        server = subprocess.Popen(command, stdout=said, stderr=said, env=keyless())
        try:
            asyncio.run(_wait(url, server, log, api_key))
            yield url
        finally:
            _stop(server)


async def _wait(url: str, server: subprocess.Popen[bytes], log: Path, api_key: str | None) -> None:
    client = HttpClient(url, api_key=api_key, timeout=READY_TIMEOUT)
    try:
        await await_ready(client, server)
    except BenchFailed as error:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["it said nothing"]
        raise BenchFailed(f"{error.message} It said: {lines[-1]}") from error
    finally:
        await client.close()


def _stop(server: subprocess.Popen[bytes]) -> None:
    """Asked to, so that what it writes at its end is whole."""
    server.send_signal(signal.SIGTERM)
    try:
        server.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()
