"""The routes, as a table, and the handlers that need no generation.

What lives here: which path takes which method, which is open, and what it is for (a schema can be generated from it).
What may not: HTTP mechanics (app.py, exchange.py), generation (generate.py).
"""

from __future__ import annotations

from array import array
from functools import partial
from typing import Any

from headrace.errors import InvalidRequest, NotFound
from headrace.sampling_params import check_token_ids
from headrace.server import answer_schemas as answers
from headrace.server import anthropic, dashboard, fields, generate, operation, pages, requests, responses
from headrace.server.budget import TOKEN_BYTES
from headrace.server.exchange import Exchange
from headrace.server.exposition import CONTENT_TYPE
from headrace.server.openapi import document
from headrace.server.process_metrics import render_process
from headrace.server.protocol import parse_detokenize, parse_tokenize
from headrace.server.route import Route
from headrace.server.service import Service
from headrace.server.wire import encode_list, encode_object


async def health(service: Service, exchange: Exchange) -> None:
    service.any_engine()
    await exchange.reply_json({"status": "ok"})


async def ready(service: Service, exchange: Exchange) -> None:
    _ = service.engine  # raises while loading, draining or dead
    await exchange.reply_json({"status": "ready"})


async def version(service: Service, exchange: Exchange) -> None:
    await exchange.reply_json({"version": service.version})


async def metrics(service: Service, exchange: Exchange) -> None:
    page = service.total_metrics().render(service.model_name, await service.commons.engine_stats())
    if len(service.ledger.pages) == 1:  # of several front ends each would tell another's story
        page += render_process().encode()
    await exchange.reply(200, page, CONTENT_TYPE)


async def models(service: Service, exchange: Exchange) -> None:
    names = service.any_engine().info.served_names
    await exchange.reply_json({"object": "list", "data": [_model_card(service, name) for name in names]})


async def model(service: Service, exchange: Exchange) -> None:
    name = exchange.path.removeprefix("/v1/models/")
    if name not in service.any_engine().info.served_names:
        raise NotFound(f"The model {name[:100]!r} is not served here; see /v1/models.", param="model", code="model_not_found")
    await exchange.reply_json(_model_card(service, name))


def _model_card(service: Service, name: str) -> dict[str, Any]:
    info = service.any_engine().info
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "headrace",
        "root": info.served_names[0],
        "parent": None,
        "max_model_len": info.max_sequence_tokens,
    }


async def tokenize(service: Service, exchange: Exchange) -> None:
    engine = service.engine
    request = await service.bodies.read(exchange, parse_tokenize)
    service.check_model(request.model)
    if request.messages is not None:
        parsed = await generate.render_chat(service, exchange, request.messages, request.conversation)
        if request.add_special_tokens:
            parsed = await generate.encode_prompt(service, exchange, parsed.text or "", True)
    else:
        parsed = await generate.encode_prompt(service, exchange, request.prompt or "", request.add_special_tokens)
    ids, tokenizer = parsed.token_ids or array("i"), engine.tokenizer if request.return_token_strs else None
    strings = None if tokenizer is None else encode_list(map(tokenizer.token_text, ids))
    shown = {"count": len(ids), "max_model_len": engine.info.max_sequence_tokens, "tokens": encode_list(ids), "token_strs": strings}
    await exchange.reply_pieces(await service.threads.run(TOKEN_BYTES * len(ids), lambda: list(encode_object(shown)), exchange.tenant))


async def detokenize(service: Service, exchange: Exchange) -> None:
    engine = service.engine
    request = await service.bodies.read(exchange, parse_detokenize)
    service.check_model(request.model)
    if engine.tokenizer is None:
        raise InvalidRequest("This model has no tokenizer; start the server with --tokenizer.", param="tokens")
    check_token_ids("tokens", request.tokens, engine.info.vocab_size)
    text = await service.threads.run(len(request.tokens), partial(engine.tokenizer.decode, request.tokens, request.skip_special_tokens))
    await exchange.reply_json({"prompt": text})


async def tokenizer_info(service: Service, exchange: Exchange) -> None:
    tokenizer = service.any_engine().tokenizer
    if tokenizer is None:
        raise NotFound("This model has no tokenizer; start the server with --tokenizer.", code="tokenizer_not_found")
    await exchange.reply_json(tokenizer.description)


async def openapi(service: Service, exchange: Exchange) -> None:
    config = service.config
    closed = config.unknown_fields == "refuse"
    await exchange.reply_json(document(ROUTES, service.version, keys=bool(config.api_key), closed=closed))


async def embeddings(service: Service, exchange: Exchange) -> None:
    raise NotFound("This server has no embeddings: it serves models that generate text; use a server for embedding models.", code="route_not_found")


_PAGE = ("text/html",)
_ASSETS = ("text/css", "text/javascript", "image/svg+xml", "text/html")
_AS_ANTHROPIC = anthropic.AnthropicErrors()

ROUTES = (
    Route("GET", "/", pages.chat, "the chat in the browser", open=True, answer=answers.PAGE, content_types=_PAGE),
    Route("GET", "/dashboard", pages.dashboard, "the dashboard in the browser", open=True, answer=answers.PAGE, content_types=_PAGE),
    Route("GET", "/web/{name}", pages.asset, "files of the two pages", open=True, answer=answers.PAGE, content_types=_ASSETS),
    Route("GET", "/v1/dashboard", dashboard.data, "what the dashboard shows, as JSON", query=dashboard.CURSORS),
    Route("GET", "/health", health, "200 while the engine lives", open=True, answer=answers.STATUS),
    Route("GET", "/ready", ready, "200 while new requests are taken", open=True, answer=answers.STATUS),
    Route("GET", "/ping", operation.ping, "as /health", open=True, answer=answers.PAGE, content_types=("text/plain",)),
    Route("POST", "/ping", operation.ping, "as /health", open=True, answer=answers.PAGE, content_types=("text/plain",)),
    Route("GET", "/load", operation.load, "how many requests wait or run", answer=answers.LOAD),
    Route("GET", "/server_info", operation.server_info, "settings and automatic choices", answer=answers.SERVER_INFO),
    Route("POST", "/reset_prefix_cache", operation.reset_prefix_cache, "forget cached prefixes", answer=answers.STATUS),
    Route("GET", "/version", version, "the version of Headrace", answer=answers.VERSION),
    Route("GET", "/metrics", metrics, "Prometheus metrics", answer=answers.PAGE, content_types=("text/plain",)),
    Route("GET", "/openapi.json", openapi, "this description", answer=answers.DOCUMENT),
    Route("GET", "/v1/models", models, "the names of the model", answer=answers.MODELS),
    Route("GET", "/v1/models/{name}", model, "one name of the model", answer=answers.MODEL),
    Route("GET", "/v1/requests", requests.list_requests, "your requests that have not ended", answer=answers.REQUESTS),
    Route("GET", "/v1/requests/{id}", requests.show_request, "where one of your requests stands, and why it waits", answer=answers.REQUEST),
    Route("POST", "/v1/chat/completions", generate.chat_completions, "answer a conversation", body=fields.CHAT, answer=answers.CHAT),
    Route("POST", "/v1/completions", generate.completions, "complete texts", body=fields.COMPLETION, answer=answers.COMPLETION),
    Route("POST", "/v1/responses", responses.responses, "the same, as OpenAI's Responses API", body=fields.RESPONSES, answer=answers.RESPONSE),
    Route("GET", "/v1/responses/{id}", responses.show, "a response that was stored", answer=answers.RESPONSE),
    Route("DELETE", "/v1/responses/{id}", responses.delete, "forget a stored response", answer=answers.DELETED),
    Route("GET", "/v1/responses/{id}/input_items", responses.input_items, "what a stored response answers", answer=answers.ITEMS),
    Route(
        "POST", "/v1/messages", anthropic.messages, "the same, as Anthropic's Messages API",
        body=fields.MESSAGES, answer=answers.MESSAGE, errors=_AS_ANTHROPIC,
    ),
    Route(
        "POST", "/v1/messages/count_tokens", anthropic.count_tokens, "the length of a conversation in tokens",
        body=fields.COUNT_TOKENS, answer=answers.TOKEN_COUNT, errors=_AS_ANTHROPIC,
    ),
    Route("POST", "/v1/embeddings", embeddings, "404: embeddings are not offered", answer=None),
    Route("POST", "/tokenize", tokenize, "text or a conversation to token ids", body=fields.TOKENIZE, answer=answers.TOKENS),
    Route("GET", "/tokenizer_info", tokenizer_info, "the tokenizer's configuration, with the chat template", answer=answers.TOKENIZER),
    Route("POST", "/detokenize", detokenize, "token ids to text", body=fields.DETOKENIZE, answer=answers.PROMPT),
)  # fmt: skip


_VERSION = "/v1"


class RouteTable:
    """Exact paths first, then those with a ``{name}`` and something behind it, then those that end in one."""

    def __init__(self, routes: tuple[Route, ...] = ROUTES) -> None:
        self.routes = routes
        self._exact: dict[str, dict[str, Route]] = {}
        self._named: dict[tuple[str, str], dict[str, Route]] = {}
        for route in sorted(routes, key=lambda route: -len(route.path.partition("}")[2])):
            prefix, brace, rest = route.path.partition("{")
            by_method = self._named.setdefault((prefix, rest.partition("}")[2]), {}) if brace else self._exact.setdefault(prefix, {})
            by_method[route.method] = route

    def match(self, path: str) -> dict[str, Route]:
        """Routes by method; empty where there is no such path."""
        found = self._exact.get(path)
        if found is not None:
            return found
        for (prefix, suffix), by_method in self._named.items():
            if path.startswith(prefix) and path.endswith(suffix) and len(path) > len(prefix) + len(suffix):
                return by_method
        return {}

    def hint(self, path: str) -> str:
        """What a client's base URL should be, where that is all that is wrong with a path; else where the routes are listed."""
        if path.startswith(_VERSION * 2) and self.match(path.removeprefix(_VERSION)):
            return f"the client adds {_VERSION} itself, so set its base URL without it."
        if self.match(_VERSION + path):
            return f"it is {_VERSION}{path} here, so let the client's base URL end in {_VERSION} (http://HOST:PORT{_VERSION})."
        return "see the list in the documentation."
