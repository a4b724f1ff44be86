"""Keys: every route but /health, /ready and the static pages, whatever the path is dressed up as; what a server refuses
to start as."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from headrace.config import ServerConfig
from headrace.errors import ConfigError
from headrace.server.app import ROUTES
from headrace.server.limits import Guard
from tests.support.serving import Server, serving

KEY = "sk-right"
OPEN = {"/health", "/ping", "/ready", "/", "/dashboard", "/web/chat.html"}
WRONG = {
    "none": [],
    "wrong": [("Authorization", "Bearer sk-wrong")],
    "empty": [("Authorization", "Bearer ")],
    "bare": [("Authorization", KEY)],
    "basic": [("Authorization", f"Basic {KEY}")],
    "prefix": [("Authorization", f"Bearer {KEY[:-1]}")],
    "longer": [("Authorization", f"Bearer {KEY}x")],
    "two": [("Authorization", f"Bearer {KEY}"), ("Authorization", "Bearer sk-wrong")],
    "forwarded": [
        ("X-Forwarded-For", "127.0.0.1"),
        ("X-Forwarded-Host", "localhost"),
        ("X-Original-URL", "/health"),
        ("Forwarded", "for=127.0.0.1"),
    ],
}
DISGUISES = (
    "/health/", "//health", "/health/../v1/models", "/HEALTH", "/v1/models?x=/health", "/v1/%6dodels", "//v1/models", "/v1/models/", "/./health",
    "/nowhere", "/health;x", "/health%00", "/health%2f..%2fmetrics",
    "/ready%20", "/web", "/web/", "/dashboard/", "/index.html", "/v1/dashboard?/web/", "*",
)  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving("--api-key", KEY, "--api-key", "sk-second") as running:
        yield running


def status_of(server: Server, method: str, path: str, headers: list[tuple[str, str]]) -> int:
    connection = server.connect()
    connection.putrequest(method, path, skip_host=True)
    if not any(name == "Host" for name, _ in headers):
        connection.putheader("Host", "localhost")
    for name, value in headers:
        connection.putheader(name, value)
    connection.endheaders()
    response = connection.getresponse()
    response.read()
    connection.close()
    return response.status


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.path)
@pytest.mark.parametrize("wrong", WRONG)
def test_matrix(server: Server, route: object, wrong: str) -> None:
    path = route.path.replace("/web/{name}", "/web/chat.html").replace("{name}", "demo")  # type: ignore[attr-defined]
    status = status_of(server, route.method, path, WRONG[wrong])  # type: ignore[attr-defined]
    assert status == (200 if path in OPEN else 401)


@pytest.mark.parametrize("path", DISGUISES)
def test_disguised_paths_need_the_key_before_anything_is_said_about_them(server: Server, path: str) -> None:
    assert status_of(server, "GET", path, []) in (400, 401)
    assert status_of(server, "GET", path, [("Host", "localhost/health?x=")]) in (400, 401, 403)


def test_either_key_opens_by_either_header(server: Server) -> None:
    for key in (KEY, "sk-second"):
        for name, value in (("Authorization", f"Bearer {key}"), ("authorization", f"bearer {key}"), ("X-Api-Key", key)):
            assert server.ask("GET", "/v1/models", headers={name: value}).status == 200
    refused = server.ask("GET", "/v1/models")
    assert refused.headers["www-authenticate"] == "Bearer" and refused.error["type"] == "authentication_error"
    assert KEY not in refused.body.decode()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org", ""])
def test_an_open_address_needs_a_key(host: str) -> None:
    with pytest.raises(ConfigError, match="key"):
        Guard(ServerConfig(host=host))
    Guard(ServerConfig(host=host, api_key=("k",)))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "::1", "localhost"])
def test_loopback_needs_none(host: str) -> None:
    Guard(ServerConfig(host=host))


@pytest.mark.parametrize("key", ["", " ", "clé"])
def test_keys_that_could_not_be_sent_are_refused(key: str) -> None:
    with pytest.raises(ConfigError, match="--api-key"):
        Guard(ServerConfig(api_key=(key,)))


def test_foreign_hosts_pass_where_the_server_is_meant_to_be_reached() -> None:
    guard = Guard(ServerConfig(host="0.0.0.0", api_key=("k",)))
    guard.check_browser([(b"host", b"models.example:8000"), (b"origin", b"https://models.example:8000")])


def test_without_keys_a_sent_one_is_ignored() -> None:
    with serving() as open_server:
        assert open_server.ask("GET", "/v1/models", headers={"Authorization": "Bearer anything"}).status == 200
