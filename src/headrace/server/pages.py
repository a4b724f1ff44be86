"""The face in the browser: the chat at ``/``, the dashboard at ``/dashboard``, and the files they are made of.

Both are static and hold no data: whatever they show they fetch from the API, with the key. They ask no other server for
anything, and the content security policy makes the browser see to that; no text of a model can become markup.

What lives here: files from data/web and their headers. What may not: templates, data (dashboard.py).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

from headrace.errors import NotFound
from headrace.server.exchange import Exchange

if TYPE_CHECKING:  # handlers are given it
    from headrace.server.service import Service

TYPES = {
    "html": b"text/html; charset=utf-8",
    "css": b"text/css; charset=utf-8",
    "js": b"text/javascript; charset=utf-8",
    "svg": b"image/svg+xml",
}
POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; base-uri 'none'; form-action 'none'; "
    b"frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = (
    (b"cache-control", b"no-cache"),  # kept, and asked for again each time: the files of one version belong together
    (b"content-security-policy", POLICY),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
)


@dataclass(frozen=True, slots=True)
class Page:
    body: bytes
    content_type: bytes
    etag: bytes


@cache
def pages() -> dict[str, Page]:
    """Every file by its name: what is not here cannot be asked for, whatever a path says."""
    found = {}
    for file in files("headrace").joinpath("data", "web").iterdir():
        kind = TYPES.get(file.name.rpartition(".")[2])
        if kind is not None:
            body = file.read_bytes()
            found[file.name] = Page(body, kind, b'"%s"' % hashlib.sha256(body).hexdigest()[:32].encode())
    return found


async def chat(service: Service, exchange: Exchange) -> None:
    await _send(exchange, "chat.html")


async def dashboard(service: Service, exchange: Exchange) -> None:
    await _send(exchange, "dashboard.html")


async def asset(service: Service, exchange: Exchange) -> None:
    await _send(exchange, exchange.named)


async def _send(exchange: Exchange, name: str) -> None:
    page = pages().get(name)
    if page is None:
        raise NotFound(f"There is no file {name[:100]!r} here; the pages are / and /dashboard.", code="route_not_found")
    headers = (*HEADERS, (b"etag", page.etag))
    if page.etag in (exchange.header(b"if-none-match") or b""):
        await exchange.reply(304, b"", page.content_type, headers)
    else:
        await exchange.reply(200, page.body, page.content_type, headers)
