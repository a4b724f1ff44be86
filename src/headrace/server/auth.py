"""Who may ask: API keys, and the Host and Origin rules that keep a browser from being led here by a foreign page.

What lives here: the checks and the start-up rule for keys. What may not: routes (api.py says which are open).
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import secrets
from collections.abc import Sequence

from headrace.config import ServerConfig
from headrace.errors import ConfigError, Unauthorized
from headrace.server.cors import Cors
from headrace.server.cors import Headers as Answered
from headrace.server.http_errors import Forbidden, HttpError
from headrace.server.tenants import key_name

Headers = Sequence[tuple[bytes, bytes]]


def is_loopback(host: str) -> bool:
    """Only this machine can reach it."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Guard:
    """Raises ConfigError when the address and the keys do not go together. ``secret``: of the start that this front end belongs to."""

    def __init__(self, config: ServerConfig, secret: bytes = b"") -> None:
        if any(not key.strip() or not key.isascii() for key in config.api_key):
            raise ConfigError("--api-key is empty or not ASCII; give a key of printable ASCII characters.")
        self._loopback = config.uds is None and is_loopback(config.host)
        if not self._loopback and config.uds is None and not config.api_key:
            raise ConfigError(f"--host {config.host} can be reached from other machines, but no key is set; add --api-key or HEADRACE_API_KEY.")
        self._host = config.host.lower()
        self._cors = Cors(config)
        self._digests = [hashlib.sha256(key.encode()).digest() for key in config.api_key]
        self.secret = secret or secrets.token_bytes(32)  # of this start: a tenant's name tells nothing of its key
        self.key_names = {self._tenant(digest): key_name(number) for number, digest in reversed(list(enumerate(self._digests, start=1)))}

    def check_browser(self, headers: Headers) -> Answered:
        """DNS rebinding (a foreign Host on a loopback server) and sites that --allowed-origins does not name are turned away.

        Returns the headers by which a browser knows that its page may read the answer.
        """
        hosts = [value.decode("latin-1").strip() for name, value in headers if name == b"host"]
        if len(hosts) > 1:
            raise HttpError("The request has several Host headers; send one.")
        host = hosts[0] if hosts else ""
        if self._loopback and host and not self._is_ours(_host_name(host)):
            raise Forbidden("The Host header names another machine than this one; use the address the server listens on.", code="foreign_host")
        allowed = None
        for name, value in headers:
            if name != b"origin":
                continue
            origin = value.decode("latin-1").strip()
            if self._cors.allows(origin):
                allowed = value.strip()
            elif origin.lower() not in (f"http://{host.lower()}", f"https://{host.lower()}"):
                raise Forbidden(
                    "The Origin header names another site; its pages may use this server only if --allowed-origins names it.",
                    code="foreign_origin",
                )
        return self._cors.headers(allowed)

    def preflight(self, method: str, headers: Headers) -> Answered | None:
        """What a browser that ``check_browser`` has let in is told of the request it asks about; None: it asks nothing."""
        asked = dict(headers)
        if not (self._cors.on and method == "OPTIONS" and b"origin" in asked and b"access-control-request-method" in asked):
            return None
        local = b"access-control-request-private-network" in asked
        return self._cors.preflight(asked.get(b"access-control-request-headers", b""), local)

    def _is_ours(self, name: str) -> bool:
        return name == self._host or is_loopback(name)

    def check_key(self, headers: Headers) -> str:
        """The tenant's name ("" where no key is needed). Every key is compared, in constant time, so that time tells nothing."""
        if not self._digests:
            return ""
        given = _given_keys(headers)
        digest = hashlib.sha256(given[0] if len(given) == 1 else b"").digest()
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        if len(given) != 1 or not any(matches):
            raise Unauthorized("The API key is missing or wrong; send Authorization: Bearer KEY.", code="invalid_api_key")
        return self._tenant(digest)

    def _tenant(self, digest: bytes) -> str:
        return hmac.new(self.secret, digest, hashlib.sha256).hexdigest()[:32]


def _host_name(host: str) -> str:
    """The name in ``name:port``, ``[v6]:port`` or a bare name."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.rpartition(":")[0].lower() if host.count(":") == 1 else host.lower()


def _given_keys(headers: Headers) -> list[bytes]:
    keys = []
    for name, value in headers:
        if name == b"authorization":
            scheme, _, key = value.partition(b" ")
            keys.append(key.strip() if scheme.lower() == b"bearer" else b"")
        elif name == b"x-api-key":
            keys.append(value.strip())
    return keys
