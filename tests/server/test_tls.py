"""HTTPS and pages of other sites, on a server with two front ends: real handshakes, streams and errors; and what a
start says of bad files.

(No model: keyed hash.)
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.config import ServerConfig
from headrace.errors import ConfigError
from headrace.server import connection, tls
from headrace.server.connection import Acceptor
from headrace.server.exposition import CounterPage
from headrace.server.tls import create_context
from tests.support.certificates import MISSING, Pair, create_pair, trusting
from tests.support.serving import SERVE, Answer, Server, events_of, serving

pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
KEY = {"Authorization": "Bearer key-one"}
CHAT = "https://chat.example"
TEXT: dict[str, Any] = {"prompt": "hello there", "max_tokens": 8, "ignore_eos": True}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return create_pair(tmp_path_factory.mktemp("tls"), "server")


@pytest.fixture(scope="module")
def server(pair: Pair) -> Iterator[Server]:
    flags = (
        "--executor",
        "keyed-hash",
        "--device-time",
        "0.002",
        "--api-server-count",
        "2",
        "--api-key",
        "key-one",
        "--allowed-origins",
        CHAT,
    )
    files = ("--ssl-certfile", str(pair.certificate), "--ssl-keyfile", str(pair.key))
    with serving(*flags, *files, command=SERVE, tls=trusting(pair)) as running:
        yield running


def ask(server: Server, method: str, path: str, body: Any = None, **headers: str) -> Answer:
    return server.ask(method, path, body, {**KEY, "Origin": CHAT, **headers})


def may_read(answer: Answer) -> bool:
    """A browser lets the page see it."""
    return answer.headers.get("access-control-allow-origin") == CHAT and answer.headers["vary"] == "origin"


def test_answers_streams_and_errors_go_to_pages_that_were_named(server: Server) -> None:
    assert server.url.startswith("https://127.0.0.1:")  # as the start says
    whole = ask(server, "POST", "/v1/completions", TEXT)
    streamed = ask(server, "POST", "/v1/completions", {**TEXT, "stream": True})
    assert whole.status == streamed.status == 200 and may_read(whole) and may_read(streamed)
    events = events_of(streamed.body)
    assert (
        events[-1] == "[DONE]"
        and "".join(event["choices"][0]["text"] for event in events[:-1]) == whole.json["choices"][0]["text"]
    )
    wrong = [
        (ask(server, "POST", "/v1/completions", {"prompt": 5}), 400),
        (ask(server, "GET", "/v1/models", Authorization="Bearer wrong"), 401),
        (ask(server, "GET", "/nowhere"), 404),
        (ask(server, "DELETE", "/v1/models"), 405),
        (ask(server, "POST", "/v1/completions", b" " * (33 << 20)), 413),
    ]
    assert all(answer.status == status and may_read(answer) and answer.error for answer, status in wrong), wrong


def test_a_preflight_needs_no_key_and_a_stranger_gets_nothing(server: Server) -> None:
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    for path in ("/v1/chat/completions", "/nowhere"):
        answer = server.ask("OPTIONS", path, headers={"Origin": CHAT, **asked})
        assert answer.status == 200 and may_read(answer) and not answer.body
        assert answer.headers["access-control-allow-headers"] == "authorization,content-type"
    stranger = server.ask("OPTIONS", "/v1/chat/completions", headers={"Origin": "https://evil.example", **asked})
    assert (
        stranger.status == 403
        and stranger.error["code"] == "foreign_origin"
        and "access-control-allow-origin" not in stranger.headers
    )
    assert server.ask("GET", "/v1/models", headers={**KEY, "Origin": "https://evil.example"}).status == 403
    plain = server.ask("GET", "/v1/models", headers=KEY)
    assert (
        plain.status == 200 and plain.headers["vary"] == "origin" and "access-control-allow-origin" not in plain.headers
    )
    assert (
        server.ask("OPTIONS", "/v1/models", headers={"Origin": CHAT, **KEY}).status == 405
    )  # no preflight: a method like any other


def test_both_front_ends_speak_tls_and_nothing_else(server: Server, pair: Pair) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(6):  # dealt out over both
            connection = stack.enter_context(contextlib.closing(server.connect()))
            connection.request("GET", "/v1/models", headers=KEY)
            assert connection.getresponse().status == 200
            assert isinstance(connection.sock, ssl.SSLSocket) and connection.sock.version() in ("TLSv1.2", "TLSv1.3")
    for hello in (b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n", b"\x16\x03\x01\xff\xff" + os.urandom(64), b""):
        with server.raw(hello) as stranger:
            stranger.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionResetError):
                assert b"HTTP" not in stranger.recv(4096)
    with pytest.raises(ssl.SSLError), socket.create_connection(("127.0.0.1", server.port), 5) as sock:
        ssl.create_default_context().wrap_socket(sock, server_hostname="127.0.0.1")  # who does not know the certificate
    assert server.ask("GET", "/ready").status == 200 and not any("Traceback" in line for line in server.lines)


def test_a_stream_that_is_left_frees_its_place(server: Server) -> None:
    connection = server.connect()
    connection.request("POST", "/v1/completions", b'{"prompt": "x", "max_tokens": 3000, "ignore_eos": true, "stream": true}', {
        "Content-Type": "application/json", **KEY
    })  # fmt: skip
    assert connection.getresponse().read(200)
    assert server.running(KEY) == 1
    connection.close()
    server.wait_idle(headers=KEY)


def test_prefixes_are_forgotten_whichever_front_end_is_asked(server: Server) -> None:
    body = {"prompt": "a plan " * 60, "max_tokens": 1}

    def cached() -> int:
        return int(
            server.ask("POST", "/v1/completions", body, KEY).json["usage"]["prompt_tokens_details"]["cached_tokens"]
        )

    for _ in range(2):
        cached()
        assert cached() > 0
        assert server.ask("POST", "/reset_prefix_cache", headers=KEY).status == 200 and cached() == 0


def test_clients_certificates(pair: Pair, tmp_path: Path) -> None:
    """In one process, by the context alone: who must show one and does not is turned away at the handshake."""
    authority, stranger = create_pair(tmp_path, "authority"), create_pair(tmp_path, "stranger")
    friend = create_pair(tmp_path, "friend", authority)
    config = ServerConfig(
        ssl_certfile=str(pair.certificate), ssl_keyfile=str(pair.key), ssl_ca_certs=str(authority.certificate), ssl_cert_reqs=2
    )  # fmt: skip
    assert (
        shaken(config, trusting(pair, friend))
        and not shaken(config, trusting(pair, stranger))
        and not shaken(config, trusting(pair))
    )


def shaken(config: ServerConfig, client: ssl.SSLContext) -> bool:
    """Both sides agree, in memory."""
    context = create_context(config)
    assert context is not None
    ways = [ssl.MemoryBIO() for _ in range(2)]
    ours = context.wrap_bio(ways[0], ways[1], server_side=True)
    theirs = client.wrap_bio(ways[1], ways[0], server_hostname="127.0.0.1")
    with contextlib.suppress(ssl.SSLCertVerificationError, ssl.SSLError):
        for _ in range(10):
            for side in (theirs, ours):
                with contextlib.suppress(ssl.SSLWantReadError):
                    side.do_handshake()
        theirs.write(b"x")
        return ours.read() == b"x"
    return False


def test_bad_files_end_the_start_with_a_sentence(pair: Pair, tmp_path: Path) -> None:
    other = create_pair(tmp_path, "other")
    (tmp_path / "junk.pem").write_text("-----BEGIN nothing-----")
    locked = tmp_path / "locked.key"
    subprocess.run(
        ["openssl", "ec", "-in", str(other.key), "-aes128", "-passout", "pass:x", "-out", str(locked)],
        check=True,
        capture_output=True,
    )
    cert, key = str(pair.certificate), str(pair.key)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"ssl_certfile": str(tmp_path / "none.pem"), "ssl_keyfile": key}, "none.pem: no such file"),
        ({"ssl_certfile": cert, "ssl_keyfile": str(tmp_path / "none.key")}, "none.key: no such file"),
        ({"ssl_certfile": cert, "ssl_keyfile": str(other.key)}, "do not belong together"),
        ({"ssl_certfile": str(tmp_path / "junk.pem"), "ssl_keyfile": key}, "no certificate and private key in PEM"),
        ({"ssl_certfile": cert}, "no certificate and private key in PEM"),
        ({"ssl_certfile": str(other.certificate), "ssl_keyfile": str(locked)}, "encrypted"),
        ({"ssl_keyfile": key}, "add --ssl-certfile"),
        ({"ssl_ca_certs": cert}, "add --ssl-certfile"),
        ({"ssl_certfile": cert, "ssl_keyfile": key, "ssl_ca_certs": cert}, "--ssl-cert-reqs 2"),
        ({"ssl_certfile": cert, "ssl_keyfile": key, "ssl_cert_reqs": 1}, "--ssl-ca-certs"),
        (
            {"ssl_certfile": cert, "ssl_keyfile": key, "ssl_ca_certs": str(tmp_path / "junk.pem"), "ssl_cert_reqs": 1},
            "no certificates in PEM",
        ),
        ({"ssl_certfile": str(tmp_path), "ssl_keyfile": key}, "is a directory"),
    ]
    for fields, complaint in cases:
        with pytest.raises(ConfigError, match=complaint):
            create_context(ServerConfig(**fields))
    assert create_context(ServerConfig()) is None
    (tmp_path / "both.pem").write_text(pair.certificate.read_text() + pair.key.read_text())
    assert create_context(ServerConfig(ssl_certfile=str(tmp_path / "both.pem"))) is not None
    ended = subprocess.run(
        [*SERVE, "--ssl-certfile", cert, "--ssl-keyfile", str(other.key)],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert ended.returncode == 2 and ended.stderr.count("\n") == 1 and "do not belong together" in ended.stderr


def test_who_never_finishes_the_handshake_keeps_nobody_out(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest of them gives way, and the others go by themselves."""
    monkeypatch.setattr(connection, "MAX_HANDSHAKES", 8)

    class Echo(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            assert isinstance(transport, asyncio.Transport)
            transport.write(b"hello")

    async def live() -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        listener.setblocking(False)
        page, context = (
            CounterPage(),
            create_context(ServerConfig(ssl_certfile=str(pair.certificate), ssl_keyfile=str(pair.key))),
        )
        acceptor = Acceptor(listener, Echo, page, [page], context)
        acceptor.start()
        address = listener.getsockname()[:2]
        idle = [socket.create_connection(address) for _ in range(20)]
        reader, writer = await asyncio.open_connection(*address, ssl=trusting(pair), server_hostname="127.0.0.1")
        assert await reader.readexactly(5) == b"hello"
        await asyncio.sleep(0)
        cut = 0
        for each in idle:
            each.setblocking(False)
            with contextlib.suppress(BlockingIOError, ConnectionResetError):
                cut += each.recv(1) == b""
        assert cut >= 11 and len(acceptor._tasks) <= 9
        writer.close()
        acceptor.close()
        for each in (*idle, listener):
            each.close()

    asyncio.run(live())


def test_a_renewed_certificate_serves_new_connections(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr(tls, "LOOK_SECONDS", 0.01)
    old, new = create_pair(tmp_path, "old"), create_pair(tmp_path, "new")
    files = Pair(tmp_path / "live.pem", tmp_path / "live.key")

    def install(certificate: Path, key: Path) -> None:
        files.key.write_bytes(key.read_bytes())
        files.certificate.write_bytes(certificate.read_bytes())
        os.utime(files.certificate, ns=(time.time_ns(), time.time_ns()))

    install(old.certificate, old.key)
    config = ServerConfig(ssl_certfile=str(files.certificate), ssl_keyfile=str(files.key))
    context = create_context(config)
    monkeypatch.setattr(f"{__name__}.create_context", lambda _: context)

    async def live() -> None:
        following = asyncio.create_task(tls.follow_files(context, config))
        await asyncio.sleep(0)
        assert shaken(config, trusting(old))
        install(new.certificate, old.key)  # half of a pair: not taken
        await asyncio.sleep(0.1)
        assert shaken(config, trusting(old)) and "cannot be used" in caplog.text
        install(new.certificate, new.key)
        await asyncio.sleep(0.1)
        assert shaken(config, trusting(new)) and not shaken(config, trusting(old))
        following.cancel()

    asyncio.run(live())
