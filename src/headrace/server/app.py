"""The application: every request passes the same gates in the same order, ends in exactly one visible way, and leaves
one line in the log: figures, never anything of its body; a flood of requests that cost their sender nothing becomes a
count.

What lives here: the routes as a table (which path takes which method, which is open, and what it is for: a schema can
be generated from it), handlers that need no generation; gates, the outermost error handling, the access log. What may
not: what other routes do, HTTP mechanics (exchange.py), generation (generate.py), forms of lines (observe/logs.py).

Gates: Host and Origin (a browser's preflight ends here), the matched route, the key, the method. No layers of
middleware: one coroutine, one exchange.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from headrace.errors import HeadraceError, NotFound, Unavailable
from headrace.request import Json, RequestTimes
from headrace.server import adapters, dashboard, inflight, pages
from headrace.server import answer_types as answers
from headrace.server.dialects import completions, messages, pooling, responses, tokens
from headrace.server.dialects.chat import ChatBody, chat_completions
from headrace.server.exchange import Exchange, fail_stream
from headrace.server.exposition import CONTENT_TYPE, PROBES, Lines, add_process, model_label
from headrace.server.http_errors import ClientLeft, ClientTooSlow, HttpError, MethodNotAllowed
from headrace.server.limits import Guard
from headrace.server.openapi import Handler, Route, document
from headrace.server.service import Service, SleepQuery, is_sleeping, sleep, wake_up

# --- handlers that need no generation


async def health(service: Service, exchange: Exchange) -> None:
    service.check_alive()
    await exchange.reply_json({"status": "ok"})


async def ready(service: Service, exchange: Exchange) -> None:
    service.check_ready()
    await exchange.reply_json({"status": "ready"})


async def version(service: Service, exchange: Exchange) -> None:
    await exchange.reply_json({"version": service.version})


async def metrics(service: Service, exchange: Exchange) -> None:
    page = Lines()
    for each in service.services:
        name, engine = each.model.name, await each.observed.shared.engine_stats()
        each.observed.total().show(page, name, engine)
        page.add_steps(engine.get("steps"), "" if each is service else model_label(name))
    service.observed.total().show_answers(page)
    service.show_budget(page)
    if len(service.limits.counters.pages) == 1:  # of several front ends each would tell another's story
        add_process(page)
    await exchange.reply(200, str(page).encode(), CONTENT_TYPE)


async def models(service: Service, exchange: Exchange) -> None:
    service.check_alive()
    names = [(each, name) for each in service.services for name in (*each.model.names, *await adapters.names(each))]
    await exchange.reply_json(answers.Models([_model_card(each, name) for each, name in names]))


async def model(service: Service, exchange: Exchange) -> None:
    await exchange.reply_json(_model_card(await service.find(exchange.named), exchange.named))


def _model_card(service: Service, name: str) -> answers.Model:
    """Of one that has not loaded, little is known."""
    engine, served = service.model.found, service.model.names
    return answers.Model(
        id=name,
        created=service.created,
        root=served[0],
        parent=None if name in served else served[0],
        max_model_len=None if engine is None else engine.info.max_sequence_tokens,
        state=service.condition(),
    )


async def openapi(service: Service, exchange: Exchange) -> None:
    config = service.config
    closed = config.unknown_fields == "refuse"
    await exchange.reply_json(document(ROUTES, service.version, keys=bool(config.api_key), closed=closed))


async def ping(service: Service, exchange: Exchange) -> None:
    """As /health; the answer has no body, as the platforms that ask this want it."""
    service.check_alive()
    await exchange.reply(200, b"", b"text/plain")


async def load(service: Service, exchange: Exchange) -> None:
    """Requests that wait or run, with all front ends; prompts of one request count one by one."""
    await exchange.reply_json({"server_load": sum(each.limits.counters.live for each in service.services)})


async def server_info(service: Service, exchange: Exchange) -> None:
    """What was asked for, and what was chosen where nothing was."""
    info, config = service.model.any_engine.info, service.model.engine_config
    keys = len(service.config.api_key)  # of these only how many
    await exchange.reply_json(
        {
            "version": service.version,
            "config": {**_plain(config), "server": {**_plain(service.config), "api_key": f"{keys} set"}},
            "decisions": [_plain(decision) for decision in (*info.decisions, *service.model.decisions)],
            "engine": _plain(replace(info, decisions=())),
        }
    )


async def reset_prefix_cache(service: Service, exchange: Exchange) -> None:
    await service.model.engine.reset_prefix_cache()
    await exchange.reply_json({"status": "ok"})


def _plain(record: Any) -> Json:
    found: Json = msgspec.to_builtins(record, enc_hook=str)
    return found


# --- the table

_PAGE = ("text/html",)
_ASSETS = ("text/css", "text/javascript", "image/svg+xml", "text/html")
_AS_ANTHROPIC = messages.AnthropicErrors()

ROUTES = (
    Route("GET", "/", pages.chat, "the chat in the browser", open=True, answer=str, content_types=_PAGE),
    Route("GET", "/dashboard", pages.dashboard, "the dashboard in the browser", open=True, answer=str, content_types=_PAGE),
    Route("GET", "/web/{name}", pages.asset, "files of the two pages", open=True, answer=str, content_types=_ASSETS),
    Route("GET", "/v1/dashboard", dashboard.data, "what the dashboard shows, as JSON", query=dashboard.Cursors),
    Route("GET", "/health", health, "200 while the engine lives", open=True, answer=answers.Status),
    Route("GET", "/ready", ready, "200 while new requests are taken", open=True, answer=answers.Status),
    Route("GET", "/ping", ping, "as /health", open=True, answer=str, content_types=("text/plain",)),
    Route("POST", "/ping", ping, "as /health", open=True, answer=str, content_types=("text/plain",)),
    Route("GET", "/load", load, "how many requests wait or run", answer=answers.Load),
    Route("GET", "/server_info", server_info, "settings and automatic choices", answer=answers.ServerInfo),
    Route("POST", "/reset_prefix_cache", reset_prefix_cache, "forget cached prefixes", answer=answers.Status),
    Route("POST", "/sleep", sleep, "give up memory; requests wait until it is woken", answer=answers.Status, query=SleepQuery),
    Route("POST", "/wake_up", wake_up, "take the memory back", answer=answers.Status),
    Route("GET", "/is_sleeping", is_sleeping, "whether it sleeps, or is about to", answer=answers.Sleeping),
    Route("GET", "/version", version, "the version of Headrace", answer=answers.Version),
    Route("GET", "/metrics", metrics, "Prometheus metrics", answer=str, content_types=("text/plain",)),
    Route("GET", "/openapi.json", openapi, "this description", answer=answers.Document),
    Route("GET", "/v1/models", models, "the names of the model, and adapters", answer=answers.Models),
    Route("GET", "/v1/models/{name}", model, "one name of the model", answer=answers.Model),
    Route("GET", "/v1/requests", inflight.list_requests, "your requests that have not ended", answer=answers.ProgressList),
    Route("GET", "/v1/requests/{id}", inflight.show_request, "where one of your requests stands, and why it waits", answer=answers.Progress),
    Route("POST", "/v1/chat/completions", chat_completions, "answer a conversation", body=ChatBody, answer=answers.ChatCompletion),
    Route("POST", "/v1/completions", completions.completions, "complete texts", body=completions.CompletionBody, answer=answers.Completion),
    Route(
        "POST", "/v1/responses", responses.responses, "the same, as OpenAI's Responses API",
        body=responses.ResponsesBody, answer=answers.Response,
    ),
    Route("GET", "/v1/responses/{id}", responses.show, "a response that was stored", answer=answers.Response, query=responses.Shown),
    Route("DELETE", "/v1/responses/{id}", responses.delete, "forget a stored response", answer=answers.Deleted),
    Route(
        "POST", "/v1/messages", messages.messages, "the same, as Anthropic's Messages API",
        body=messages.MessagesBody, answer=answers.Message, errors=_AS_ANTHROPIC,
    ),
    Route(
        "POST", "/v1/messages/count_tokens", messages.count_tokens, "the length of a conversation in tokens",
        body=messages.CountBody, answer=answers.TokenCount, errors=_AS_ANTHROPIC,
    ),
    Route("POST", "/v1/load_lora_adapter", adapters.load, "serve one more adapter", body=adapters.LoadAdapterBody, answer=answers.Status),
    Route(
        "POST", "/v1/unload_lora_adapter", adapters.unload, "serve an adapter no more", body=adapters.UnloadAdapterBody, answer=answers.Status
    ),
    Route("POST", "/v1/embeddings", pooling.embeddings, "embed texts", body=pooling.EmbeddingBody, answer=answers.Embeddings),
    *(
        Route("POST", path, pooling.rerank, "order documents by how well they answer a query", body=pooling.RerankBody, answer=answers.Ranking)
        for path in ("/v1/rerank", "/v2/rerank", "/rerank")
    ),
    *(
        Route("POST", path, pooling.score, "how well pairs of texts belong together", body=pooling.ScoreBody, answer=answers.Scores)
        for path in ("/v1/score", "/score")
    ),
    Route("POST", "/tokenize", tokens.tokenize, "text or a conversation to token ids", body=tokens.TokenizeBody, answer=answers.Tokens),
    Route("GET", "/tokenizer_info", tokens.tokenizer_info, "the tokenizer's configuration, with the chat template", answer=answers.Tokenizer),
    Route("POST", "/detokenize", tokens.detokenize, "token ids to text", body=tokens.DetokenizeBody, answer=answers.Prompt),
)  # fmt: skip


# --- gates, and the log

_FIELDS = frozenset(name for route in ROUTES if route.body for name in route.body.names())
_VERSION = "/v1"
LINES_A_SECOND = 20  # of one kind, that clients can cause at will

access_log = logging.getLogger("headrace.access")
log = logging.getLogger("headrace.server")


class Rate:
    """How many lines of one kind are written. ``clock`` gives seconds."""

    def __init__(self, kind: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._kind = kind
        self._clock = clock
        self._second = clock()
        self._seen = 0  # since then

    def allows(self) -> bool:
        """Tells how many it has held back, once that second is over."""
        now = self._clock()
        if now - self._second >= 1.0:
            if self._seen > LINES_A_SECOND:
                access_log.info("… and %d more %s", self._seen - LINES_A_SECOND, self._kind)
            self._second, self._seen = now, 0
        self._seen += 1
        return self._seen <= LINES_A_SECOND


class AccessLog:
    """What was generated has a line of its own, always: a place in the queue was needed for it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._others = Rate("requests without a generation", clock)

    def record(self, exchange: Exchange, status: int) -> None:
        """Probes, whatever their answer, are for debugging only: they come by the second and their reason is told
        elsewhere."""
        if exchange.route in PROBES:
            self._write(logging.DEBUG, exchange, status)
        elif exchange.prompt_tokens or self._others.allows():
            self._write(logging.INFO, exchange, status)

    def _write(self, level: int, exchange: Exchange, status: int) -> None:
        if access_log.isEnabledFor(level):
            access_log.log(level, "request", extra={"facts": _facts(exchange, status)})


def _facts(exchange: Exchange, status: int) -> Json:
    """Figures, and names of ours. ``id`` is the client's own only where that is harmless to repeat."""
    facts: Json = dict(method=exchange.method if exchange.route != "-" else "-", route=exchange.route, status=status)
    facts |= {"seconds": round(time.perf_counter() - exchange.arrival, 6), "id": exchange.request_id}
    facts |= _reason(exchange.error)
    if exchange.prompt_tokens:
        facts |= dict(tokens_in=exchange.prompt_tokens, tokens_out=exchange.completion_tokens)
        facts |= {"cached": exchange.cached_tokens, "finish_reason": exchange.finish_reason or "none"}
        facts |= _phases(exchange.times)
    return facts


def _reason(error: HeadraceError | None) -> dict[str, str]:
    """Why a request was refused: a code of ours, and the field. Of what a client called a field only names that we know
    are repeated."""
    if error is None:
        return {}
    field = re.split(r"[.\[]", error.param or "")[0]
    return {"error": error.code or error.type, **({"param": field} if field in _FIELDS else {})}


def _phases(times: RequestTimes | None) -> dict[str, float]:
    """Seconds in the queue, in the prompt's computing, and in the answer's."""
    if times is None or times.first_scheduled is None:
        return {}
    phases = {"queue": times.first_scheduled - times.arrival}
    if times.first_token is not None:
        phases["prefill"] = times.first_token - times.first_scheduled
        if times.finished is not None:
            phases["decode"] = times.finished - times.first_token
    return {name: round(seconds, 6) for name, seconds in phases.items()}


class RouteTable:
    """Exact paths first, then those with a ``{name}`` and something behind it, then those that end in one."""

    def __init__(self, routes: Sequence[Route] = ROUTES) -> None:
        self._exact: dict[str, dict[str, Route]] = {}
        self._named: dict[re.Pattern[str], dict[str, Route]] = {}
        for route in sorted(routes, key=lambda route: -len(route.path.partition("}")[2])):
            before, name, after = re.fullmatch(r"([^{]*)({\w+})?(.*)", route.path).groups()  # type: ignore[union-attr]
            pattern = re.compile(f"{re.escape(before)}(.+){re.escape(after)}", re.DOTALL)
            by_method = self._named.setdefault(pattern, {}) if name else self._exact.setdefault(before, {})
            by_method[route.method] = route

    def match(self, path: str) -> tuple[dict[str, Route], str]:
        """Routes by method, empty where there is no such path; and what stands for the ``{name}``."""
        if (exact := self._exact.get(path)) is not None:
            return exact, ""
        found = ((by_method, pattern.fullmatch(path)) for pattern, by_method in self._named.items())
        return next(((by_method, match[1]) for by_method, match in found if match), ({}, ""))

    def hint(self, path: str) -> str:
        """What a client's base URL should be, where that is all that is wrong with a path; else where the routes are
        listed."""
        if path.startswith(_VERSION * 2) and self.match(path.removeprefix(_VERSION))[0]:
            return f"the client adds {_VERSION} itself, so set its base URL without it."
        if self.match(_VERSION + path)[0]:
            return f"it is {_VERSION}{path} here, so let the client's base URL end in {_VERSION} (http://HOST:PORT{_VERSION})."
        return "see the list in the documentation."


class App:
    """``answer`` is called once a request."""

    def __init__(self, service: Service, guard: Guard, routes: Sequence[Route] = ROUTES) -> None:
        self._service = service
        self._guard = guard
        self._table = RouteTable(routes)
        self._access_log = AccessLog()
        self._failures = Rate("failures")

    async def answer(self, exchange: Exchange) -> None:
        try:
            await self._dispatch(exchange)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if exchange.cause is None or task is None:
                raise
            task.uncancel()
            await self._end(exchange, exchange.cause)
        except HeadraceError as error:
            await self._end(exchange, error)
        except MemoryError:  # this request's alone: what it held is free again once it has ended
            log.error("%s %s: out of memory", exchange.method, exchange.route)
            await self._end(
                exchange,
                Unavailable("There is no memory for this request now; send less at once or try again.", retry_after=5),
            )
        except Exception:
            if self._failures.allows():
                log.exception("%s %s failed", exchange.method, exchange.route)
            await self._end(
                exchange, HeadraceError("The server failed at this request; it is a defect of ours, please report it.")
            )
        finally:
            exchange.close()
            self._service.limits.bodies.release(exchange)
            self._record(exchange)

    async def _dispatch(self, exchange: Exchange) -> None:
        if exchange.http_version == "1.1" and exchange.header(b"host") is None:
            raise HttpError("The request has no Host header; HTTP/1.1 needs one.", code="invalid_http")
        exchange.cors = self._guard.check_browser(exchange.headers)
        preflight = self._guard.preflight(exchange.method, exchange.headers)
        if preflight is not None:  # it carries no key
            await exchange.reply(200, b"", b"text/plain", preflight)
            return
        handler = self._gate(exchange)
        await handler(self._service, exchange)

    def _gate(self, exchange: Exchange) -> Handler:
        by_method, exchange.named = self._table.match(exchange.path)
        if by_method:
            exchange.errors = next(iter(by_method.values())).errors
        if not by_method or not all(route.open for route in by_method.values()):
            exchange.tenant = self._guard.check_key(exchange.headers)
            exchange.key_name = self._guard.key_names.get(exchange.tenant, "")
        if not by_method:
            raise NotFound(
                f"There is no route {exchange.path[:100]!r}; {self._table.hint(exchange.path)}", code="route_not_found"
            )
        exchange.route = next(iter(by_method.values())).path
        method = "GET" if exchange.method == "HEAD" else exchange.method
        if method not in by_method:
            raise MethodNotAllowed(exchange.method, ", ".join([*by_method, *(["HEAD"] if "GET" in by_method else [])]))
        exchange.body = by_method[method].body
        return by_method[method].handler

    async def _end(self, exchange: Exchange, error: HeadraceError) -> None:
        """The last thing a client sees of a request that failed."""
        exchange.error = error
        if isinstance(error, ClientLeft):
            exchange.status = exchange.status or error.status
            if isinstance(error, ClientTooSlow):
                exchange.cut()
        elif exchange.status is None:
            await exchange.reply_error(error)
        elif not exchange.finished:
            await fail_stream(exchange, error)
        if error.status == 500 and self._failures.allows():  # 503 is a state that was told when it began
            log.warning("%s %s: %s", exchange.method, exchange.route, error.message)

    def _record(self, exchange: Exchange) -> None:
        status = exchange.status or 500
        self._service.observed.metrics.count_answer(exchange.route, status)
        self._service.observed.metrics.count_seconds(exchange.route, time.perf_counter() - exchange.arrival)
        self._access_log.record(exchange, status)
