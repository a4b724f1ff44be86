"""Servers in processes of their own, and a client that shows every byte.

What lives here: starting, asking, stopping. What may not: assertions about answers.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PYTHON = os.environ.get(
    "HEADRACE_TEST_PYTHON", sys.executable
)  # that runs servers, where the tests run in an environment without Headrace
FAKE = (PYTHON, str(ROOT / "tests" / "server" / "fake_engine.py"))
SERVE = (PYTHON, "-m", "headrace", "serve", "--port", "0")


def environment() -> dict[str, str]:
    """For processes that use the package as it stands here."""
    return {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    headers: Mapping[str, str]  # names in lower case
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error object; raises KeyError or ValueError when the body is not of the one shape that errors have.

        Epilogue it Anthropic's routes say that it is one.
        """
        assert self.headers["content-type"] == "application/json", self
        error = self.json["error"]
        assert (
            self.json.get("type", "error") == "error"
            and set(self.json) - {"type"} == {"error"}
            and set(error) == {"message", "type", "param", "code"}
        ), self
        assert isinstance(error["message"], str) and error["message"] and isinstance(error["type"], str), self
        return dict(error)


class Server:
    """A server process. ``lines`` is what it said on stderr so far."""

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        *,
        seconds: float = 30.0,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """``tls``: how its clients speak HTTPS, where it serves that."""
        self.tls = tls
        self._mark = f"SERVED_FOR_TEST={uuid.uuid4().hex}"
        self.process = subprocess.Popen(
            command,
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stdin=subprocess.DEVNULL,
            text=True,
            env={**environment(), **(env or {}), **dict([self._mark.split("=")])},
            start_new_session=True,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.url = self._wait_for_address(seconds)
        self.path = self.url.removeprefix("unix:") if self.url.startswith("unix:") else None  # of its Unix socket
        self.port = 0 if self.path else int(self.url.rpartition(":")[2])

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip("\n"))

    def _wait_for_address(self, seconds: float) -> str:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for line in list(self.lines):
                found = re.search(r"https?://(127\.0\.0\.1|0\.0\.0\.0):\d+|unix:\S+", line)
                if found:
                    return found[0].replace("0.0.0.0", "127.0.0.1")
            if self.process.poll() is not None:
                break
            time.sleep(0.01)
        raise AssertionError(f"no address from {self.process.args}: exit {self.process.poll()}, said {self.lines}")

    def wait_ready(self, seconds: float = 30.0) -> Server:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.process.poll() is None and self.ask("GET", "/ready").status == 200:
                return self
            time.sleep(0.02)
        raise AssertionError(f"not ready: exit {self.process.poll()}, said {self.lines}")

    def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        *,
        timeout: float = 20.0,
    ) -> Answer:
        """One request on a connection of its own. A body that is not bytes is sent as JSON."""
        with contextlib.closing(self.connect(timeout)) as connection:
            return send(connection, method, path, body, headers)

    def connect(self, timeout: float = 20.0) -> http.client.HTTPConnection:
        connection = (
            http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
            if self.tls is None
            else http.client.HTTPSConnection("127.0.0.1", self.port, timeout=timeout, context=self.tls)
        )
        if self.path is not None:
            connection.sock = self.raw()
        return connection

    def raw(self, data: bytes = b"", *, receive_buffer: int | None = None) -> socket.socket:
        """A connected socket, with ``data`` sent."""
        sock = socket.socket(socket.AF_INET if self.path is None else socket.AF_UNIX)
        sock.settimeout(20)
        if receive_buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        sock.connect(("127.0.0.1", self.port) if self.path is None else self.path)
        sock.sendall(data)
        return sock

    def running(self, headers: Mapping[str, str] | None = None) -> int:
        """Sequences that the engine holds."""
        page = self.ask("GET", "/metrics", headers=headers).body.decode()
        counts = [re.search(rf"^vllm:num_requests_{kind}{{.*}} (\d+)", page, re.M) for kind in ("running", "waiting")]
        return sum(int(found[1]) for found in counts if found)

    def wait_idle(self, seconds: float = 5.0, headers: Mapping[str, str] | None = None) -> None:
        wait_for(lambda: not self.running(headers), seconds, "no request holds the engine")

    def signal(self, kind: int = signal.SIGTERM) -> None:
        self.process.send_signal(kind)

    def wait(self, seconds: float) -> int:
        status = self.process.wait(seconds)
        self._reader.join(2)
        return status

    def stop(self) -> None:
        """Ends it and everything it started."""
        for pid in (self.process.pid, *self.children()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(10)

    def children(self) -> list[int]:
        """Processes that it started and that are alive, also after its own end: by descent, and by a mark in their
        environment."""
        parents = {pid: parent for pid in _pids() if (parent := _parent_of(pid)) is not None}
        found = {pid for pid in parents if _has_mark(pid, self._mark)}
        family = {self.process.pid}
        while more := {pid for pid, parent in parents.items() if parent in family} - family:
            family |= more
        return sorted((family | found) - {self.process.pid})

    def members(self, module: str) -> list[int]:
        """Children that were started as this module."""
        found = []
        for pid in self.children():
            with contextlib.suppress(OSError):  # it may be gone meanwhile
                found += [pid] if module.encode() in Path(f"/proc/{pid}/cmdline").read_bytes() else []
        return found


def wait_for(condition: Callable[[], Any], seconds: float = 10.0, what: str = "it happens") -> float:
    """Seconds until it was true."""
    begun = time.monotonic()
    while not condition():
        assert time.monotonic() - begun < seconds, f"{what}: not within {seconds} s"
        time.sleep(0.02)
    return time.monotonic() - begun


def _pids() -> list[int]:
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]


def _parent_of(pid: int) -> int | None:
    """None for a process that is gone or only waits to be collected."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[1])


def _has_mark(pid: int, mark: str) -> bool:
    try:
        return mark.encode() in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False


def send(
    connection: http.client.HTTPConnection,
    method: str,
    path: str,
    body: Any = None,
    headers: Mapping[str, str] | None = None,
) -> Answer:
    data = body if body is None or isinstance(body, (bytes, bytearray)) else json.dumps(body).encode()
    given = {"Content-Type": "application/json"} if data is not None else {}
    connection.request(method, path, data, {**given, **(headers or {})})
    response = connection.getresponse()
    return Answer(response.status, {name.lower(): value for name, value in response.getheaders()}, response.read())


def post_bytes(path: str, body: Any, *headers: str) -> bytes:
    """A POST as it goes over the wire."""
    data = json.dumps(body).encode()
    lines = [
        f"POST {path} HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        f"Content-Length: {len(data)}",
        *headers,
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + data


def read_until_closed(sock: socket.socket) -> bytes:
    """Everything up to the end of the connection, however it ends."""
    parts = []
    with contextlib.suppress(ConnectionResetError):
        while part := sock.recv(65536):
            parts.append(part)
    return b"".join(parts)


def read_until(sock: socket.socket, mark: bytes) -> bytes:
    data = b""
    while mark not in data:
        part = sock.recv(65536)
        assert part, f"closed before {mark!r}: {data[-500:]!r}"
        data += part
    return data


def split_response(data: bytes) -> tuple[bytes, bytes, bool]:
    """Headers, decoded chunked body, and whether the body came to its proper end."""
    head, _, rest = data.partition(b"\r\n\r\n")
    assert b"transfer-encoding: chunked" in head.lower(), head
    body = b""
    while rest:
        size_line, _, rest = rest.partition(b"\r\n")
        size = int(size_line, 16)
        if size == 0:
            return head, body, rest == b"\r\n"
        body, rest = body + rest[:size], rest[size + 2 :]
    return head, body, False


def events_of(body: bytes) -> list[Any]:
    """The data of each event: JSON, or "[DONE]". Comments are left out. Checks the framing strictly."""
    assert body.endswith(b"\n\n"), body[-200:]
    found: list[Any] = []
    for frame in body[:-2].split(b"\n\n"):
        assert b"\n" not in frame and b"\r" not in frame, frame
        if frame.startswith(b":"):
            continue
        assert frame.startswith(b"data: ") and len(frame) > 6, frame
        text = frame[6:].decode("ascii")
        found.append(text if text == "[DONE]" else json.loads(text, parse_constant=_refuse))
    return found


def _refuse(name: str) -> Any:
    raise AssertionError(f"{name} in JSON")


@contextlib.contextmanager
def serving(
    *arguments: str,
    command: Sequence[str] = FAKE,
    env: Mapping[str, str] | None = None,
    tls: ssl.SSLContext | None = None,
) -> Iterator[Server]:
    """A ready server for the length of a with block."""
    server = Server([*command, *arguments], env, tls=tls)
    try:
        yield server.wait_ready()
    finally:
        server.stop()
