"""Who may ask, and what requests may take of the server's memory and threads.

Who: API keys, the Host and Origin rules that keep a browser from being led here by a foreign page, and which other
sites' pages may use this server all the same (CORS: off by default; whoever is let in still needs the key, but a
preflight has none and is answered without). And who is a tenant: a key by its place among --api-key, or the user that a
request names.

How much: a body is received under limits of size, time and memory in all, then decoded and checked where nothing else
waits for it. What an answer may cost at most is known before it is admitted; so is how much of that all answers may
cost together. Bytes are those of the JSON; what is held to make it (scores above all) takes about as many. Text alone
is priced for one answer and not held against the budget of all: how many tokens live at once is bounded by the KV
cache.

What lives here: these checks, their headers and start-up rules; prices in bytes and the budget they are counted
against; the way from pieces of a body to a parsed request; threads for work that would keep the event loop from its
streams, much work apart from little. What may not: sharing (scheduler/policies/fair.py, exposition.py), routes and gates
(app.py says which are open), JSON itself (wire.py), fields (dialects/), whose turn it is (engine/fair_threads.py), the
number of requests (service.limits.admit), the engine's own memory.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import logging
import os
import re
import secrets
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TypeVar

import msgspec

from headrace.config import SchedulerConfig, ServerConfig
from headrace.engine.fair_threads import FairThreads
from headrace.errors import ConfigError, InvalidRequest, Overloaded, PayloadTooLarge, Unauthorized, Unavailable
from headrace.processes.sandbox import MAX_PROCESSES
from headrace.request import Json, Request, SamplingParams
from headrace.server.dialects.body import Body
from headrace.server.exchange import Exchange
from headrace.server.exposition import CELLS
from headrace.server.http_errors import Forbidden, HttpError, RequestTimeout, UnsupportedMediaType
from headrace.server.wire import AnswerOptions, decode_object

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
        hosts, origins = (
            [value.decode("latin-1").strip() for name, value in headers if name == kind]
            for kind in (b"host", b"origin")
        )
        if len(hosts) > 1:
            raise HttpError("The request has several Host headers; send one.")
        host = hosts[0] if hosts else ""
        name = _host_name(host)
        if self._loopback and host and name != self._host and not is_loopback(name):
            raise Forbidden(
                "The Host header names another machine than this one; use the address the server listens on.",
                code="foreign_host",
            )
        allowed = None
        for origin in origins:
            if self._cors.allows(origin):
                allowed = origin.encode("latin-1")
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
        # as browsers write them: small letters, no port where it is the scheme's own
        self._origins = frozenset(_USUAL_PORT.sub(r"\1\2", each.lower()) for each in config.allowed_origins)
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


def _joined(words: Sequence[str]) -> bytes:
    """b"" where all are meant."""
    return b"" if ANY in words else ", ".join(words).encode("ascii", "replace")


def _check_origins(config: ServerConfig) -> None:
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
    """``key``: the name of the one that was sent. Users of several keys are told apart by key: none takes another
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
    _check_keys(config, "operator_key", config.operator_key, "which is no key", "never the key itself")


def _check_keys(config: ServerConfig, field: str, names: Iterable[str], why: str, remedy: str) -> None:
    keys = [key_name(number) for number in range(1, len(config.api_key) + 1)]
    unknown = next((name for name in names if name not in keys), None)
    if unknown is not None:
        known = f"{keys[0]} to {keys[-1]} in the order of --api-key" if keys else "none is set"
        raise ConfigError(f"{field} names {unknown[:80]!r}, {why} ({known}); name one, {remedy}.")


def check_weights(scheduler: SchedulerConfig, config: ServerConfig) -> None:
    """Raises ConfigError for weights that would change nothing."""
    names = list(scheduler.tenant_weights)
    if names and scheduler.scheduling_policy != "fair":
        raise ConfigError(
            f"tenant_weight is given, but --scheduling-policy is {scheduler.scheduling_policy}, which knows no shares; add --scheduling-policy fair."
        )
    if are_keys(config):
        _check_keys(config, "tenant_weight", names, "but tenants are API keys here", "or add --tenant-by user")


# --- what answers may cost

TOKEN_BYTES = 8  # of text, or as an id
SCORE_BYTES = 80  # one token's logprob, with its text
_HOLDERS = 3  # of ids that a request names: this process, the scheduler, the worker
_ENTRY_BYTES = 100  # of an id with its bias, as objects
_RETRY_SECONDS = 2


def scores_at(k: int | None) -> int:
    """Bytes of one position's logprobs: the chosen token and the k best."""
    return 0 if k is None else SCORE_BYTES * (1 + k)


@dataclass(frozen=True, slots=True)
class Price:
    """Bytes. ``fixed``: of the answer, whatever is generated. ``tokens``: of what is generated, at most, of which
    ``scores`` are logprobs. ``fields``: of what is held of the request itself. ``why``: what makes most of it, the
    field first."""

    fixed: int
    tokens: int
    scores: int
    fields: int
    why: tuple[str, str]

    @property
    def answer(self) -> int:
        return self.fixed + self.tokens

    @property
    def reserved(self) -> int:
        return self.fixed + self.scores + self.fields


def fields_bytes(params: SamplingParams) -> int:
    """Of one prompt's parameters, in every process that holds them."""
    ids = 0 if params.allowed_token_ids is None else len(params.allowed_token_ids.packed)
    return _HOLDERS * (ids + _ENTRY_BYTES * (len(params.logit_bias or ()) + len(params.stop_token_ids)))


def price(requests: Sequence[Request], options: AnswerOptions, *, stream: bool, echo: Sequence[int]) -> Price:
    """``echo``: bytes of each prompt's text where it is shown, else 0. Streams leave token by token, and cost what
    comes before that."""
    params = requests[0].params
    lengths = [len(each.prompt_token_ids) for each in requests]
    scored = scores_at(params.prompt_logprobs) if options.prompt_logprobs and not stream else 0
    echoed_scores = scores_at(params.logprobs) if any(echo) and not stream else 0
    parts = {
        "prompt_logprobs": (scored + echoed_scores) * sum(lengths),
        "echo": sum(echo),
        "return_token_ids": TOKEN_BYTES * sum(lengths) if options.token_ids else 0,
    }
    fixed = params.n * sum(parts.values())
    most = 0 if stream else len(requests) * params.n * (params.max_tokens or 0)
    scores = most * scores_at(params.logprobs)
    tokens = most * TOKEN_BYTES * (2 if options.token_ids else 1) + scores
    return Price(
        fixed, tokens, scores, len(requests) * fields_bytes(params), _why(parts, fixed, tokens, scores, requests)
    )


def _why(parts: dict[str, int], fixed: int, tokens: int, scores: int, requests: Sequence[Request]) -> tuple[str, str]:
    """The field to lower, and the multiplication."""
    params, prompts = requests[0].params, len(requests)
    if fixed >= tokens:
        name = max(parts, key=lambda each: parts[each])
        what = f"{parts[name]} bytes of {name}"
    else:
        name = "logprobs" if scores > tokens // 2 else "max_tokens"
        what = f"max_tokens {params.max_tokens}" + (f" with logprobs {params.logprobs}" if scores else "")
        what += f" × {prompts} prompts" if prompts > 1 else ""
    return ("n", f"n {params.n} × {what}") if params.n > 1 else (name, what)


def shortened(requests: Sequence[Request], cost: Price, limit: int) -> list[Request]:
    """With as many tokens as an answer of ``limit`` bytes holds, where the request does not limit them."""
    if cost.answer <= limit or cost.fixed >= limit:
        return list(requests)
    most = max(
        (requests[0].params.max_tokens or 1) * (limit - cost.fixed) // cost.tokens, 1, requests[0].params.min_tokens
    )
    return [
        replace(each, params=replace(each.params, max_tokens=min(most, each.params.max_tokens or most)))
        for each in requests
    ]


class Budget:
    """Of one front end. ``each``: bytes of an answer, at most. What an answer holds up to ``free`` bytes is counted and
    never refused, so that large answers never block small ones."""

    def __init__(self, each: int, total: int, queue: int) -> None:
        self.each = min(each, total)
        self.total = total
        self.free = total // queue
        self.held = 0

    def check(self, cost: Price) -> None:
        """Raises InvalidRequest for more than one answer may be."""
        if cost.answer > self.each:
            field, why = cost.why
            raise InvalidRequest(
                f"The answer could have {_size(cost.answer)} ({why}), more than the {_size(self.each)} that one may have (--max-answer-bytes); "
                f"lower {field}, or stream it.",
                param=field,
            )
        if cost.fields > self.total:
            raise InvalidRequest(
                f"allowed_token_ids and logit_bias of all prompts take {_size(cost.fields)} of the {_size(self.total)} for all requests "
                "(--max-answers-bytes); send fewer prompts at once.",
                param="allowed_token_ids",
            )  # fmt: skip

    def reserve(self, size: int) -> Reservation:
        """Raises Unavailable where so much is not left. Release it at the end."""
        reservation = Reservation(self)
        reservation.grow(size)
        return reservation


class Reservation:
    """One answer's part of the budget."""

    __slots__ = ("_budget", "size")

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self.size = 0

    def grow(self, size: int) -> None:
        """To ``size`` bytes in all. Raises Unavailable where they are not left."""
        budget = self._budget
        if size > self.size and size > budget.free and budget.held + size - self.size > budget.total:
            raise Unavailable(
                f"Answers in flight hold {_size(budget.held)} of {_size(budget.total)} (--max-answers-bytes), and this one needs {_size(size)}; "
                f"try again in {_RETRY_SECONDS} s.",
                retry_after=_RETRY_SECONDS,
            )
        self.set(max(size, self.size))

    def set(self, size: int) -> None:
        """What it turned out to be."""
        self._budget.held += size - self.size
        self.size = size

    def release(self) -> None:
        self.set(0)


def _size(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count >= 100_000 else f"{count} bytes"


# --- threads

INLINE_BYTES = 4096  # up to here a thread costs more than it saves
_LARGE_BYTES = 256 * 1024

Result = TypeVar("Result")


class Threads:
    """A few threads; the rest of the machine's cores belong to the streams and the engine."""

    def __init__(self) -> None:
        cores = os.cpu_count() or 1
        # mostly they wait for a template's process
        self._small = FairThreads(max(MAX_PROCESSES, cores // 4), "headrace-small")
        self._large = FairThreads(max(1, cores // 8), "headrace-large")

    async def run(self, size: int, work: Callable[[], Result], tenant: str = "") -> Result:
        """``work()`` on about ``size`` bytes, at once or in the threads for its size; dropped if the caller is
        cancelled before it began."""
        if size <= INLINE_BYTES:
            return work()
        return await (self._large if size > _LARGE_BYTES else self._small).run(work, tenant)

    def close(self) -> None:
        """Threads that work on are not waited for."""
        for each in (self._small, self._large):
            each.close()


# --- bodies

IDLE_SECONDS = 30.0  # between two pieces of a body
WHOLE_SECONDS = 300.0  # for all of it
HELD_BODIES = 8  # as many of the largest allowed may be in memory at once, and one more in small ones
_SHARE = 4  # times what it leaves free a key may hold
_DECODED_INLINE = 64 * 1024  # decoding is faster than tokenising
_PATIENT_BYTES = 256 * 1024  # what is longer waits its turn for every further piece

Parsed = TypeVar("Parsed")

MAX_NAMES = 64  # that are told by name
_SHOWN = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}", re.ASCII)

log = logging.getLogger("headrace.server")


class IgnoredFields:
    """Where they are left out (``--unknown-fields ignore``), the operator is told: ``count`` how many, the log each
    name once."""

    def __init__(self, count: Callable[[int], None]) -> None:
        self._count = count
        self._warned: set[tuple[str, str]] = set()

    def note(self, route: str, names: Iterable[str]) -> None:
        """A client chooses the names: few are shown, and none that is not one word."""
        left_out = list(names)
        self._count(len(left_out))
        for name in left_out:
            shown = name if _SHOWN.fullmatch(name) else "(no plain name)"
            if (route, shown) not in self._warned and len(self._warned) < MAX_NAMES:
                self._warned.add((route, shown))
                log.warning("The field %s is unknown to %s and left out of requests; this is told once.", shown, route)


class _Named(msgspec.Struct):
    model: str | None = None


_named = msgspec.json.Decoder(_Named)


class Bodies:
    """All bodies that a server holds. ``max_bytes``: of one; nothing larger is ever in memory.

    ``ignored`` hears of fields that their route does not know, which are left out then; None: they are errors.
    """

    def __init__(self, max_bytes: int, threads: Threads, ignored: IgnoredFields | None = None) -> None:
        self._ignored = ignored
        self.max_bytes = max_bytes
        self._threads = threads
        self._limit = HELD_BODIES * max_bytes
        self._turn = asyncio.Lock()
        self._held: dict[Exchange, int] = {}
        self._of_keys: Counter[str] = Counter()
        self._total = 0

    async def read(self, exchange: Exchange, parse: Callable[[Json], Parsed]) -> Parsed:
        """The parsed body, which counts as held until ``release``. Raises 408, 413, 415, 429 and 400 errors."""
        body = await self._receive(exchange) if exchange.whole is None else exchange.whole
        if self._ignored is None:
            return await self._decoded(exchange, body, lambda: parse(decode_object(body, pack=True)))
        parsed, unknown = await self._decoded(exchange, body, lambda: _parse_known(body, exchange.body or Body, parse))
        if unknown:
            self._ignored.note(exchange.route, unknown)
        return parsed

    async def peek_model(self, exchange: Exchange) -> str | None:
        """The ``model`` of a body that ``read`` will read; None where it has none, or is no object."""
        body = exchange.whole = await self._receive(exchange)
        with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):  # which ``read`` tells of
            return (await self._decoded(exchange, body, lambda: _named.decode(body))).model
        return None

    async def _decoded(self, exchange: Exchange, body: bytearray, work: Callable[[], Result]) -> Result:
        return await self._threads.run(len(body) if len(body) > _DECODED_INLINE else 0, work, exchange.tenant)

    def release(self, exchange: Exchange) -> None:
        """Nothing of its body is needed any more. May be called again."""
        exchange.whole = None
        size = self._held.pop(exchange, 0)
        self._total -= size
        self._of_keys[exchange.tenant] -= size

    async def _receive(self, exchange: Exchange) -> bytearray:
        _check_kind(exchange)
        announced = int(exchange.header(b"content-length") or b"0")
        # A client that waits for 100 Continue has sent nothing yet; what is far too large is not even read to be thrown
        # away.
        if announced > self._most_dropped or (announced > self.max_bytes and exchange.header(b"expect") is not None):
            raise self._too_large()
        body, received, more = bytearray(), 0, True
        deadline = time.perf_counter() + WHOLE_SECONDS
        while more:
            if received > _PATIENT_BYTES:
                # one goes on in each turn of the event loop: many large bodies leave most of it to the streams
                async with self._turn:
                    await asyncio.sleep(0)
            piece = await _receive_piece(exchange, deadline)
            received += len(piece)
            more = exchange.more_body
            if received <= self.max_bytes:
                self._hold(exchange, len(piece))
                body += piece
            elif received > self._most_dropped:
                raise self._too_large()
        # A client that is still sending would not read an answer, so a body that is too large is dropped piece by piece
        # before.
        if received > self.max_bytes:
            raise self._too_large()
        return body

    def _too_large(self) -> PayloadTooLarge:
        return PayloadTooLarge(f"The body is larger than {self.max_bytes} bytes; send less.", code="body_too_large")

    @property
    def _most_dropped(self) -> int:
        return 4 * self.max_bytes + 2**20

    def _hold(self, exchange: Exchange, size: int) -> None:
        held, total = self._held.get(exchange, 0) + size, self._total + size
        of_key = self._of_keys[exchange.tenant] + size
        limit = self._limit + (self.max_bytes if held <= _DECODED_INLINE else 0)
        told = ""
        if total > limit:
            told = f"Bodies fill the {limit} bytes that are kept for them"
        elif exchange.tenant and of_key > _SHARE * (limit - total):
            told = f"Bodies of your key hold {of_key - size} of the {limit} bytes that are kept for bodies, and the rest is for others"
        if told:
            raise Overloaded(f"{told}; try again in 1 s.", retry_after=1)
        self._held[exchange], self._total, self._of_keys[exchange.tenant] = held, total, of_key


def _parse_known(body: bytearray, kind: type[Body], parse: Callable[[Json], Parsed]) -> tuple[Parsed, list[str]]:
    """And the names of fields that were left out, for ``kind`` knows none of these."""
    raw, known = decode_object(body, pack=True), {*kind.names(), *kind.aliases}
    return parse({name: value for name, value in raw.items() if name in known}), [
        name for name in raw if name not in known
    ]


def _check_kind(exchange: Exchange) -> None:
    kind = (exchange.header(b"content-type") or b"").partition(b";")[0].strip().lower()
    if kind != b"application/json":
        raise UnsupportedMediaType("The body must be JSON; send Content-Type: application/json.")
    if (exchange.header(b"content-encoding") or b"identity").strip().lower() != b"identity":
        raise UnsupportedMediaType("Compressed bodies are not taken; send the JSON as it is.")


async def _receive_piece(exchange: Exchange, deadline: float) -> bytearray:
    try:
        async with asyncio.timeout(min(IDLE_SECONDS, max(deadline - time.perf_counter(), 0.0))):
            return await exchange.next_piece()
    except TimeoutError:
        raise RequestTimeout("The body did not arrive in time; send it at once.") from None
