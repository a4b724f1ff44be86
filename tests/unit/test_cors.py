"""Which sites' pages may use a server, and what a browser is told: the rule alone."""

from __future__ import annotations

import argparse

import pytest

from headrace import flags
from headrace.commands import serve
from headrace.config import ServerConfig
from headrace.errors import ConfigError
from headrace.server.http_errors import Forbidden
from headrace.server.limits import Cors, Guard

CHAT = "https://chat.example"


def answered(config: ServerConfig, origin: str, host: str = "localhost:8000") -> dict[bytes, bytes]:
    return dict(Guard(config).check_browser([(b"host", host.encode()), (b"origin", origin.encode())]))


@pytest.mark.parametrize(
    "origin",
    [CHAT, "HTTPS://Chat.Example", "http://localhost:3000", "null", "capacitor://localhost", "http://[::1]:3000"],
)
def test_named_sites_are_let_in_by_their_own_name(origin: str) -> None:
    found = answered(
        ServerConfig(
            allowed_origins=(CHAT, "http://localhost:3000", "null", "capacitor://localhost", "http://[::1]:3000")
        ),
        origin,
    )
    assert found[b"access-control-allow-origin"] == origin.encode() and found[b"vary"] == b"origin"
    assert b"access-control-allow-credentials" not in found


@pytest.mark.parametrize("origin", [
    "https://evil.example", "http://chat.example", "https://chat.example:8443", "https://chat.example.evil.example", "https://xchat.example",
    "https://evil.example/https://chat.example", "null", "", "*", "https://chat.example, https://evil.example", "https://chät.example",
])  # fmt: skip
def test_nobody_else_is(origin: str) -> None:
    with pytest.raises(Forbidden, match="--allowed-origins"):
        Guard(ServerConfig(allowed_origins=(CHAT,))).check_browser(
            [(b"host", b"localhost"), (b"origin", origin.encode("utf-8"))]
        )


def test_two_origins_are_as_foreign_as_the_stranger_of_them() -> None:
    headers = [(b"host", b"localhost"), (b"origin", CHAT.encode()), (b"origin", b"https://evil.example")]
    for given in (headers, headers[::-1]):
        with pytest.raises(Forbidden):
            Guard(ServerConfig(allowed_origins=(CHAT,))).check_browser(given)


def test_off_unless_asked_for_and_a_foreign_host_stays_foreign() -> None:
    assert answered(ServerConfig(), "http://localhost:8000") == {}
    with pytest.raises(Forbidden, match="another site"):
        answered(ServerConfig(), CHAT)
    for origins in ((CHAT,), ("*",)):
        with pytest.raises(Forbidden, match="Host"):
            answered(ServerConfig(allowed_origins=origins), CHAT, host="evil.example")


def test_all_sites_and_credentials() -> None:
    anybody = answered(ServerConfig(allowed_origins=("*",)), "https://any.example")
    assert anybody[b"access-control-allow-origin"] == b"*" and b"vary" not in anybody
    trusted = answered(ServerConfig(allowed_origins=(CHAT,), allow_credentials=True), CHAT)
    assert (
        trusted[b"access-control-allow-credentials"] == b"true"
        and trusted[b"access-control-allow-origin"] == CHAT.encode()
    )
    assert answered(ServerConfig(allowed_origins=("https://chat.example:443",)), CHAT)  # as a browser writes it


def preflight(config: ServerConfig, *more: tuple[bytes, bytes], method: str = "OPTIONS") -> dict[bytes, bytes] | None:
    found = Guard(config).preflight(method, [(b"origin", CHAT.encode()), *more])
    return None if found is None else dict(found)


def test_a_preflight_is_told_what_may_come() -> None:
    asked, config = (b"access-control-request-method", b"POST"), ServerConfig(allowed_origins=(CHAT,))
    open_to_all = preflight(config, asked, (b"access-control-request-headers", b"authorization, content-type"))
    assert open_to_all is not None and b"POST" in open_to_all[b"access-control-allow-methods"]
    assert open_to_all[b"access-control-allow-headers"] == b"authorization, content-type"
    assert b"access-control-allow-private-network" not in open_to_all
    local = preflight(config, asked, (b"access-control-request-private-network", b"true"))
    assert local is not None and local[b"access-control-allow-private-network"] == b"true"
    narrow = preflight(
        ServerConfig(allowed_origins=(CHAT,), allowed_methods=("GET",), allowed_headers=("Authorization", "X-Mine")),
        asked,
    )
    assert narrow is not None
    assert (narrow[b"access-control-allow-methods"], narrow[b"access-control-allow-headers"]) == (
        b"GET",
        b"Authorization, X-Mine",
    )
    hostile = preflight(config, asked, (b"access-control-request-headers", b"x\x00y<script>"))
    assert hostile is not None and hostile[b"access-control-allow-headers"] == b""


def test_what_is_no_preflight() -> None:
    asked, config = (b"access-control-request-method", b"POST"), ServerConfig(allowed_origins=(CHAT,))
    assert (
        preflight(ServerConfig(), asked) is None
        and preflight(config, asked, method="POST") is None
        and preflight(config) is None
    )
    assert Guard(config).preflight("OPTIONS", [asked]) is None


@pytest.mark.parametrize(("config", "complaint"), [
    ({"allowed_origins": ("chat.example",)}, "no browser sends"),
    ({"allowed_origins": ("https://chat.example/",)}, "without a path"),
    ({"allowed_origins": ("https://*.example",)}, "no browser sends"),
    ({"allowed_origins": ("https://chät.example",)}, "no browser sends"),
    ({"allowed_origins": ("",)}, "no browser sends"),
    ({"allowed_origins": ("https://a.example\r\nset-cookie: x",)}, "no browser sends"),
    ({"allowed_origins": ("*",), "allow_credentials": True}, "name the origins"),
    ({"allowed_origins": (CHAT,), "allowed_methods": ("GET POST",)}, "allowed_methods"),
    ({"allowed_origins": (CHAT,), "allowed_headers": ("X:y",)}, "allowed_headers"),
    ({"allowed_methods": ("GET",)}, "add --allowed-origins"),
    ({"allow_credentials": True}, "add --allowed-origins"),
])  # fmt: skip
def test_what_could_never_work_ends_the_start(config: dict[str, object], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        Cors(ServerConfig(**config))  # type: ignore[arg-type]


def parsed(*words: str) -> ServerConfig:
    parser = flags.CommandParser(prog="headrace serve")
    serve.add_arguments(parser)
    args: argparse.Namespace = parser.parse_args(list(words))
    return flags.server_config(args)


def test_a_list_is_words_a_repeated_flag_or_json(tmp_path: object) -> None:
    both = (CHAT, "http://localhost:3000")
    for words in (
        ["--allowed-origins", *both],
        [f"--allowed-origins={each}" for each in both],
        ["--allowed-origins", f'["{both[0]}", "{both[1]}"]'],
    ):
        assert parsed(*words).allowed_origins == both
    assert parsed("--api-key", "one", "--api-key", "[two").api_key == (
        "one",
        "[two",
    )  # none is lost, and a key is no JSON
    for wrong in ("[", "[1]", '["a", 2]'):
        with pytest.raises(SystemExit):
            parsed("--allowed-origins", wrong)


def test_the_command_lines_list_takes_the_place_of_the_files(tmp_path: object) -> None:
    file = f"{tmp_path}/serve.yaml"
    with open(file, "w") as out:
        out.write("allowed-origins: [https://file.example]\napi_key: [from-file]\n")
    config = parsed("--config", file, "--allowed-origins", CHAT)
    assert config.allowed_origins == (CHAT,) and config.api_key == ("from-file",)
