"""Who may ask: API keys, the Host and Origin rules that keep a browser from being led here by a foreign page, and
which other sites' pages may use this server all the same (CORS: off by default; whoever is let in still needs the
key, but a preflight has none and is answered without). And who is a tenant: a key by its place among --api-key, or the
user that a request names.

What lives here: the checks, their headers and the start-up rules, tenants' names. What may not: sharing
(scheduler/policies/fair.py, counters.py), routes (app.py says which are open),
gates (app.py).
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
import secrets
import zlib
from collections.abc import Sequence

from headrace.config import SchedulerConfig, ServerConfig
from headrace.errors import ConfigError, Unauthorized
from headrace.server.frontends.counters import CELLS
from headrace.server.http_errors import Forbidden, HttpError

Headers = Sequence[tuple[bytes, bytes]]
Answered = tuple[tuple[bytes, bytes], ...]
ANY = "*"
PREFLIGHT_SECONDS = b"600"  # that a browser may remember an answer
_METHODS = b"GET, HEAD, POST, DELETE, OPTIONS"
_EXPOSED = b"x-request-id, retry-after"
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[a-z0-9._:\[\]-]+", re.ASCII)
_USUAL_PORT = re.compile(r"(?<=^https:)(//.*):443$|(?<=^http:)(//.*):80$")
_TOKEN = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+", re.ASCII)
_TOKENS = re.compile(rb"[A-Za-z0-9!#$%&'*+.^_`|~, -]{0,4096}")


def is_loopback(host: str) -> bool:
    """Only this machine can reach it."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Guard:
    """Raises ConfigError when the address and the keys do not go together. ``secret``: of the start that this front
    end belongs to."""

    def __init__(self, config: ServerConfig, secret: bytes = b"") -> None:
        if any(not key.strip() or not key.isascii() for key in config.api_key):
            raise ConfigError("--api-key is empty or not ASCII; give a key of printable ASCII characters.")
        self._loopback = config.uds is None and is_loopback(config.host)
        if not self._loopback and config.uds is None and not config.api_key:
            raise ConfigError(
                f"--host {config.host} can be reached from other machines, but no key is set; add --api-key or HEADRACE_API_KEY."
            )
        self._host = config.host.lower()
        self._cors = Cors(config)
        self._digests = [hashlib.sha256(key.encode()).digest() for key in config.api_key]
        self.secret = secret or secrets.token_bytes(32)  # of this start: a tenant's name tells nothing of its key
        self.key_names = {
            self._tenant(digest): key_name(number)
            for number, digest in reversed(list(enumerate(self._digests, start=1)))
        }

    def check_browser(self, headers: Headers) -> Answered:
        """DNS rebinding (a foreign Host on a loopback server) and sites that --allowed-origins does not name are
        turned away.

        Returns the headers by which a browser knows that its page may read the answer.
        """
        hosts = [value.decode("latin-1").strip() for name, value in headers if name == b"host"]
        if len(hosts) > 1:
            raise HttpError("The request has several Host headers; send one.")
        host = hosts[0] if hosts else ""
        if self._loopback and host and not self._is_ours(_host_name(host)):
            raise Forbidden(
                "The Host header names another machine than this one; use the address the server listens on.",
                code="foreign_host",
            )
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
        """What a browser that ``check_browser`` has let in is told of the request it asks about; None: it asks
        nothing."""
        asked = dict(headers)
        if not (
            self._cors.on and method == "OPTIONS" and b"origin" in asked and b"access-control-request-method" in asked
        ):
            return None
        local = b"access-control-request-private-network" in asked
        return self._cors.preflight(asked.get(b"access-control-request-headers", b""), local)

    def _is_ours(self, name: str) -> bool:
        return name == self._host or is_loopback(name)

    def check_key(self, headers: Headers) -> str:
        """The tenant's name ("" where no key is needed). Every key is compared, in constant time, so that time tells
        nothing."""
        if not self._digests:
            return ""
        given = _given_keys(headers)
        digest = hashlib.sha256(given[0] if len(given) == 1 else b"").digest()
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        if len(given) != 1 or not any(matches):
            raise Unauthorized(
                "The API key is missing or wrong; send Authorization: Bearer KEY.", code="invalid_api_key"
            )
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


class Cors:
    """Raises ConfigError for origins, methods and headers that no browser would ever send."""

    def __init__(self, config: ServerConfig) -> None:
        self._origins = frozenset(map(_as_sent, config.allowed_origins))
        self._any = ANY in self._origins
        self._credentials = config.allow_credentials
        self._methods, self._headers = _joined(config.allowed_methods), _joined(config.allowed_headers)
        _check_origins(config)

    @property
    def on(self) -> bool:
        return bool(self._origins)

    def allows(self, origin: str) -> bool:
        return self._any or origin.lower() in self._origins

    def headers(self, origin: bytes | None) -> Answered:
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

    def preflight(self, wanted_headers: bytes, private_network: bool) -> Answered:
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


def _check_origins(config: ServerConfig) -> None:
    if not config.allowed_origins:
        asked = next(
            (name for name in ("allowed_methods", "allowed_headers", "allow_credentials") if getattr(config, name)),
            None,
        )
        if asked is not None:
            says = "says what pages of other sites may do, but none may do anything"
            raise ConfigError(f"{asked} {says}; add --allowed-origins.")
    for origin in config.allowed_origins:
        if origin not in (ANY, "null") and not _ORIGIN.fullmatch(origin.lower()):
            remedy = "give a scheme, a host and a port if there is one, without a path: https://chat.example, http://localhost:3000, or '*' for any"
            raise ConfigError(f"allowed_origins has {origin[:100]!r}, which no browser sends; {remedy}.")
    for name, like in (("allowed_methods", "POST"), ("allowed_headers", "Authorization")):
        wrong = next((word for word in getattr(config, name) if not _TOKEN.fullmatch(word)), None)
        if wrong is not None:
            raise ConfigError(f"{name} has {wrong[:100]!r}, which HTTP does not allow; give names like {like}.")
    if config.allow_credentials and ANY in config.allowed_origins:
        means = "any page could act as the person who opens it"
        raise ConfigError(f"allowed_origins is '*' and allow_credentials is on: {means}; name the origins.")


_KEY = "key"


def key_name(number: int) -> str:
    """Of the key that is number ``number``, from 1: it tells nothing of the key."""
    return f"{_KEY}{number}"


def are_keys(config: ServerConfig) -> bool:
    return config.tenant_by == "key" or (config.tenant_by == "auto" and len(config.api_key) > 1)


def tenant_of(config: ServerConfig, key: str, user: str, adapter: str | None = None) -> str:
    """``key``: the name of the one that was sent. Users of several keys are told apart by key: nobody takes another
    key's share."""
    if are_keys(config):
        return key
    user = (adapter or "") if config.tenant_by == "adapter" else user
    return f"{key}/{user}" if len(config.api_key) > 1 else user


def cell_of(config: ServerConfig, key: str, user: str) -> int | None:
    """Whose places of the queue a request takes; None where all clients are one. Anybody may call itself many users, so
    they are told apart only where the operator says that users are the tenants, and never within a key among others."""
    if len(config.api_key) > 1:
        return int(key.removeprefix(_KEY)) % CELLS
    return zlib.crc32(user.encode("utf-8", "surrogatepass")) % CELLS if config.tenant_by == "user" else None


def sees_all(config: ServerConfig, key: str) -> bool:
    """An operator's key, or there are no others."""
    return len(config.api_key) <= 1 or key in config.operator_key


def is_own(tenant: str, key: str) -> bool:
    """``tenant``: as tenant_of named it, where there are several keys."""
    return tenant.partition("/")[0] == key


def check_operators(config: ServerConfig) -> None:
    """Raises ConfigError for an operator that is no key."""
    keys = _key_names(config)
    unknown = next((name for name in config.operator_key if name not in keys), None)
    if unknown is not None:
        known = f"{keys[0]} to {keys[-1]} in the order of --api-key" if keys else "none is set"
        raise ConfigError(
            f"operator_key names {unknown[:80]!r}, which is no key ({known}); name one, never the key itself."
        )


def _key_names(config: ServerConfig) -> list[str]:
    return [key_name(number) for number in range(1, len(config.api_key) + 1)]


def check_weights(scheduler: SchedulerConfig, config: ServerConfig) -> None:
    """Raises ConfigError for weights that would change nothing."""
    names = list(scheduler.tenant_weights)
    if names and scheduler.scheduling_policy != "fair":
        raise ConfigError(
            f"tenant_weight is given, but --scheduling-policy is {scheduler.scheduling_policy}, which knows no shares; add --scheduling-policy fair."
        )
    keys = _key_names(config)
    unknown = next((name for name in names if are_keys(config) and name not in keys), None)
    if unknown is not None:
        known = f"{keys[0]} to {keys[-1]} in the order of --api-key" if keys else "none is set"
        raise ConfigError(
            f"tenant_weight names {unknown[:80]!r}, but tenants are API keys here ({known}); name one, or add --tenant-by user."
        )
