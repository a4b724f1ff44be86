"""A hub on 127.0.0.1 that serves folders as model repositories, as far as a client's downloads need it, with faults on
request.

What lives here: the server. What may not: knowledge of the client under test.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class FakeHub:
    """``repositories``: name → folder, revision "main". ``cut_after``: file → bytes after which its next response
    breaks off, once."""

    url: str
    repositories: dict[str, Path]
    gated: set[str] = field(default_factory=set)
    cut_after: dict[str, int] = field(default_factory=dict)
    served: list[tuple[str, int]] = field(default_factory=list)  # (file, first byte) of each body that was asked for

    def files(self, repository: str) -> list[Path]:
        folder = self.repositories[repository]
        return sorted(file for file in folder.rglob("*") if file.is_file())

    def fetched(self) -> set[str]:
        return {name for name, _ in self.served}


@contextmanager
def fake_hub(repositories: dict[str, Path]) -> Iterator[FakeHub]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    hub = FakeHub(f"http://127.0.0.1:{server.server_address[1]}", repositories)
    server.hub = hub  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def hub(self) -> FakeHub:
        return self.server.hub  # type: ignore[attr-defined, no-any-return]

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        parts = [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")]
        if parts[:2] == ["api", "models"]:
            self._api("/".join(parts[2:4]), parts[4:])
        elif len(parts) > 4 and parts[2] == "resolve":
            self._resolve("/".join(parts[:2]), parts[3], "/".join(parts[4:]))
        else:
            self._fail(404, "EntryNotFound")

    def _fail(self, status: int, code: str) -> None:
        self._send(status, b"{}", {"X-Error-Code": code, "X-Error-Message": code})

    def _known(self, repository: str, revision: str) -> bool:
        if repository not in self.hub.repositories:
            self._fail(404 if repository else 401, "RepoNotFound")
        elif repository in self.hub.gated:
            self._fail(403, "GatedRepo")
        elif revision not in ("main", COMMIT):
            self._fail(404, "RevisionNotFound")
        else:
            return True
        return False

    def _api(self, repository: str, rest: list[str]) -> None:
        if not self._known(repository, rest[1] if len(rest) > 1 else "main"):
            return
        folder, files = self.hub.repositories[repository], self.hub.files(repository)
        if rest[:1] == ["tree"]:
            rows = [
                {"type": "file", "path": str(file.relative_to(folder)), "size": file.stat().st_size, "oid": etag(file)}
                for file in files
            ]
            self._send(200, json.dumps(rows).encode())
            return
        siblings = [{"rfilename": str(file.relative_to(folder))} for file in files]
        self._send(
            200, json.dumps({"id": repository, "modelId": repository, "sha": COMMIT, "siblings": siblings}).encode()
        )

    def _resolve(self, repository: str, revision: str, name: str) -> None:
        if not self._known(repository, revision):
            return
        file = self.hub.repositories[repository] / name
        if not file.is_file():
            self._fail(404, "EntryNotFound")
            return
        body, start = file.read_bytes(), 0
        headers = {"ETag": f'"{etag(file)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        wanted = self.headers.get("Range")
        if wanted:
            start = int(wanted.removeprefix("bytes=").split("-")[0])
            headers["Content-Range"] = f"bytes {start}-{len(body) - 1}/{len(body)}"
        if self.command == "GET":
            self.hub.served.append((name, start))
        self._send(
            206 if wanted else 200,
            body[start:],
            headers,
            cut=self.hub.cut_after.pop(name, None) if self.command == "GET" else None,
        )

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None, cut: int | None = None) -> None:
        self.send_response(status)
        for name, value in {
            "Content-Type": "application/json",
            "Content-Length": str(len(body)),
            **(headers or {}),
        }.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[:cut])
        if cut is not None:
            self.wfile.flush()
            self.close_connection = True
            self.connection.close()


def etag(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
