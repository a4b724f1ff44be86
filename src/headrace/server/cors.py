"""Cross-origin requests: which sites' pages may use this server, and the headers that tell a browser so.

Off by default. Whoever is let in still needs the key; a preflight has none, asks for nothing and is answered without.

What lives here: the rule and its headers. What may not: keys and the Host rule (auth.py), gates (app.py).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from headrace.config import ServerConfig
from headrace.errors import ConfigError

Headers = tuple[tuple[bytes, bytes], ...]

ANY = "*"
PREFLIGHT_SECONDS = b"600"  # that a browser may remember an answer
_METHODS = b"GET, HEAD, POST, DELETE, OPTIONS"
_EXPOSED = b"x-request-id, retry-after"
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[a-z0-9._:\[\]-]+", re.ASCII)
_USUAL_PORT = re.compile(r"(?<=^https:)(//.*):443$|(?<=^http:)(//.*):80$")
_TOKEN = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+", re.ASCII)
_TOKENS = re.compile(rb"[A-Za-z0-9!#$%&'*+.^_`|~, -]{0,4096}")


class Cors:
    """Raises ConfigError for origins, methods and headers that no browser would ever send."""

    def __init__(self, config: ServerConfig) -> None:
        self._origins = frozenset(map(_as_sent, config.allowed_origins))
        self._any = ANY in self._origins
        self._credentials = config.allow_credentials
        self._methods, self._headers = _joined(config.allowed_methods), _joined(config.allowed_headers)
        _check(config)

    @property
    def on(self) -> bool:
        return bool(self._origins)

    def allows(self, origin: str) -> bool:
        return self._any or origin.lower() in self._origins

    def headers(self, origin: bytes | None) -> Headers:
        """Of every answer. ``origin``: who asks, if it is allowed. Caches learn that answers differ by it."""
        vary = () if self._any else ((b"vary", b"origin"),)
        if origin is None:
            return vary if self.on else ()
        credentials = ((b"access-control-allow-credentials", b"true"),) if self._credentials else ()
        allowed = b"*" if self._any else origin
        return (
            (b"access-control-allow-origin", allowed),
            *credentials,
            (b"access-control-expose-headers", _EXPOSED),
            *vary,
        )

    def preflight(self, wanted_headers: bytes, private_network: bool) -> Headers:
        """Beside ``headers``: what the page may go on to send. Where all headers are allowed, those that it names."""
        wanted = wanted_headers if _TOKENS.fullmatch(wanted_headers) else b""
        local = ((b"access-control-allow-private-network", b"true"),) if private_network else ()
        return (
            (b"access-control-allow-methods", self._methods or _METHODS),
            (b"access-control-allow-headers", self._headers or wanted),
            (b"access-control-max-age", PREFLIGHT_SECONDS),
            *local,
        )


def _as_sent(origin: str) -> str:
    """As browsers write it: small letters, no port where it is the scheme's own."""
    return _USUAL_PORT.sub(r"\1\2", origin.lower())


def _joined(words: Sequence[str]) -> bytes:
    """b"" where all are meant."""
    return b"" if ANY in words else ", ".join(words).encode("ascii", "replace")


def _check(config: ServerConfig) -> None:
    if not config.allowed_origins:
        asked = next(
            (name for name in ("allowed_methods", "allowed_headers", "allow_credentials") if getattr(config, name)),
            None,
        )
        if asked is not None:
            raise ConfigError(
                f"{asked} says what pages of other sites may do, but none may do anything; add --allowed-origins."
            )
    for origin in config.allowed_origins:
        if origin not in (ANY, "null") and not _ORIGIN.fullmatch(origin.lower()):
            raise ConfigError(
                f"allowed_origins has {origin[:100]!r}, which no browser sends; give a scheme, a host and a port if there is one, "
                f"without a path: https://chat.example, http://localhost:3000, or '*' for any."
            )
    for name in ("allowed_methods", "allowed_headers"):
        wrong = next((word for word in getattr(config, name) if not _TOKEN.fullmatch(word)), None)
        if wrong is not None:
            raise ConfigError(
                f"{name} has {wrong[:100]!r}, which HTTP does not allow; give names like {'POST' if 'meth' in name else 'Authorization'}."
            )
    if config.allow_credentials and ANY in config.allowed_origins:
        raise ConfigError(
            "allowed_origins is '*' and allow_credentials is on: any page could act as the person who opens it; name the origins."
        )
