"""The routes, as a table, and the handlers that need no generation.

What lives here: which path takes which method, which is open, and what it is for (a schema can be generated from it).
What may not: HTTP mechanics (app.py, exchange.py), generation (generate.py).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec

from headrace.config import ServerConfig
from headrace.errors import NotFound
from headrace.server import adapters, dashboard, pages, requests
from headrace.server import answer_types as answers
from headrace.server.dialects import chat, completions, messages, responses, responses_body, tokens
from headrace.server.exchange import Exchange
from headrace.server.exposition import CONTENT_TYPE, render_process
from headrace.server.openapi import document
from headrace.server.route import Route
from headrace.server.service import Service


async def health(service: Service, exchange: Exchange) -> None:
    service.model.any_engine()
    await exchange.reply_json({"status": "ok"})


async def ready(service: Service, exchange: Exchange) -> None:
    service.check_ready()
    await exchange.reply_json({"status": "ready"})


async def version(service: Service, exchange: Exchange) -> None:
    await exchange.reply_json({"version": service.version})


async def metrics(service: Service, exchange: Exchange) -> None:
    page = service.observed.total().render(service.model.name, await service.observed.shared.engine_stats())
    if len(service.limits.counters.pages) == 1:  # of several front ends each would tell another's story
        page += render_process().encode()
    await exchange.reply(200, page, CONTENT_TYPE)


async def models(service: Service, exchange: Exchange) -> None:
    names = [*service.model.any_engine().info.served_names, *await adapters.names(service)]
    await exchange.reply_json(answers.Models([_model_card(service, name) for name in names]))


async def model(service: Service, exchange: Exchange) -> None:
    name = exchange.path.removeprefix("/v1/models/")
    await service.model.learn(name)
    if name not in service.model.any_engine().info.served_names and service.model.adapter_of(name) is None:
        raise NotFound(f"The model {name[:100]!r} is not served here; see /v1/models.", param="model", code="model_not_found")
    await exchange.reply_json(_model_card(service, name))


def _model_card(service: Service, name: str) -> answers.Model:
    info = service.model.any_engine().info
    base = info.served_names[0]
    parent = None if name in info.served_names else base
    return answers.Model(id=name, created=service.created, root=base, parent=parent, max_model_len=info.max_sequence_tokens)


async def openapi(service: Service, exchange: Exchange) -> None:
    config = service.config
    closed = config.unknown_fields == "refuse"
    await exchange.reply_json(document(ROUTES, service.version, keys=bool(config.api_key), closed=closed))


async def embeddings(service: Service, exchange: Exchange) -> None:
    raise NotFound("This server has no embeddings: it serves models that generate text; use a server for embedding models.", code="route_not_found")


async def ping(service: Service, exchange: Exchange) -> None:
    """As /health; the answer has no body, as the platforms that ask this want it."""
    service.model.any_engine()
    await exchange.reply(200, b"", b"text/plain")


async def load(service: Service, exchange: Exchange) -> None:
    """Requests that wait or run, with all front ends; prompts of one request count one by one."""
    await exchange.reply_json({"server_load": service.limits.counters.live})


async def server_info(service: Service, exchange: Exchange) -> None:
    """What was asked for, and what was chosen where nothing was."""
    info, config = service.model.any_engine().info, service.model.engine_config
    await exchange.reply_json(
        {
            "version": service.version,
            "config": {**_plain(config), "server": _without_secrets(service.config)},
            "decisions": [_plain(decision) for decision in (*info.decisions, *service.model.decisions)],
            "engine": _plain(replace(info, decisions=())),
        }
    )


async def reset_prefix_cache(service: Service, exchange: Exchange) -> None:
    await service.model.engine.reset_prefix_cache()
    await exchange.reply_json({"status": "ok"})


def _without_secrets(config: ServerConfig) -> dict[str, Any]:
    """Of keys only how many there are."""
    return {**_plain(config), "api_key": f"{len(config.api_key)} set"}


def _plain(record: Any) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.to_builtins(record, enc_hook=str)
    return found


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
    Route("GET", "/version", version, "the version of Headrace", answer=answers.Version),
    Route("GET", "/metrics", metrics, "Prometheus metrics", answer=str, content_types=("text/plain",)),
    Route("GET", "/openapi.json", openapi, "this description", answer=answers.Document),
    Route("GET", "/v1/models", models, "the names of the model, and adapters", answer=answers.Models),
    Route("GET", "/v1/models/{name}", model, "one name of the model", answer=answers.Model),
    Route("GET", "/v1/requests", requests.list_requests, "your requests that have not ended", answer=answers.ProgressList),
    Route("GET", "/v1/requests/{id}", requests.show_request, "where one of your requests stands, and why it waits", answer=answers.Progress),
    Route("POST", "/v1/chat/completions", chat.chat_completions, "answer a conversation", body=chat.ChatBody, answer=answers.ChatCompletion),
    Route("POST", "/v1/completions", completions.completions, "complete texts", body=completions.CompletionBody, answer=answers.Completion),
    Route(
        "POST", "/v1/responses", responses.responses, "the same, as OpenAI's Responses API",
        body=responses_body.ResponsesBody, answer=answers.Response,
    ),
    Route("GET", "/v1/responses/{id}", responses.show, "a response that was stored", answer=answers.Response, query=responses.Shown),
    Route("DELETE", "/v1/responses/{id}", responses.delete, "forget a stored response", answer=answers.Deleted),
    Route(
        "GET", "/v1/responses/{id}/input_items", responses.input_items, "what a stored response answers",
        answer=answers.Items, query=responses.Page,
    ),
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
    Route("POST", "/v1/embeddings", embeddings, "404: embeddings are not offered", answer=None),
    Route("POST", "/tokenize", tokens.tokenize, "text or a conversation to token ids", body=tokens.TokenizeBody, answer=answers.Tokens),
    Route("GET", "/tokenizer_info", tokens.tokenizer_info, "the tokenizer's configuration, with the chat template", answer=answers.Tokenizer),
    Route("POST", "/detokenize", tokens.detokenize, "token ids to text", body=tokens.DetokenizeBody, answer=answers.Prompt),
)  # fmt: skip
