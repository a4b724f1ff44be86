"""The description of the server that /openapi.json gives: OpenAPI 3.1, written from the route table and the field tables.

What lives here: the document. What may not: facts that are not in the tables or checked by the tests of what is described.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from headrace.server.answer_schemas import ANTHROPIC_ERROR, ERROR
from headrace.server.anthropic import AnthropicErrors
from headrace.server.dashboard import MAX_CURSOR
from headrace.server.route import Route
from headrace.server.schemas import EXAMPLES, Schema, body_schema

_STATUSES: Mapping[int, str] = {
    400: "a field's name, type or value; a prompt that does not fit; JSON or HTTP that cannot be read",
    401: "no key, or a wrong one",
    403: "a foreign Host or Origin",
    404: "an unknown model, name or file",
    405: "a method that this route does not take",
    408: "headers or body came too slowly",
    413: "the body is too large",
    415: "the body is not plain application/json",
    429: "the queue, or the room for large bodies, is full; Retry-After says how long",
    431: "the headers are too large",
    500: "the request failed in the engine or the server",
    503: "loading, draining, no connection free, or the engine has died; Retry-After says how long",
}
_ALWAYS = (400, 403, 405, 408, 431, 500, 503)
_WITH_BODY = (404, 413, 415, 429)
_SECURITY: list[dict[str, list[str]]] = [{"bearer": []}, {"key": []}]


def document(routes: Iterable[Route], version: str, *, keys: bool, closed: bool = True) -> dict[str, Any]:
    """``keys``: whether this server asks for one. ``closed``: it refuses fields that are not named here."""
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, keys, closed)
    components: dict[str, Any] = {"schemas": {"Error": ERROR, "AnthropicError": ANTHROPIC_ERROR}}
    if keys:
        components["securitySchemes"] = {
            "bearer": {"type": "http", "scheme": "bearer"},
            "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
    info = {"title": "Headrace", "version": version, "description": "An LLM inference and serving engine."}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": components}


def _operation(route: Route, keys: bool, closed: bool) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": f"{route.method.lower()}_{re.sub(r'[^a-z0-9]+', '_', route.path).strip('_') or 'root'}",
        "summary": route.summary,
        "responses": {**_success(route), **_failures(route, keys)},
    }
    name = re.search(r"{(\w+)}", route.path)
    if name:
        operation["parameters"] = [{"name": name[1], "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}]
    if route.query:
        integer = {"type": "integer", "minimum": 0, "maximum": MAX_CURSOR}
        operation["parameters"] = [{"name": each, "in": "query", "required": False, "schema": integer} for each in route.query]
    if route.body:
        schema = body_schema(route.path, route.body) | ({} if closed else {"additionalProperties": True})
        content = {"schema": schema, "example": EXAMPLES[route.path]}
        operation["requestBody"] = {"required": True, "content": {"application/json": content}}
    if keys:
        operation["security"] = [] if route.open else _SECURITY
    return operation


def _success(route: Route) -> dict[str, Any]:
    if route.answer is None:
        return {}
    content: dict[str, Any] = {kind: {"schema": route.answer} for kind in route.content_types}
    if any(field.name == "stream" for field in route.body):
        content["text/event-stream"] = {"schema": {"type": "string", "description": "with stream: data: {JSON} one a line, blank lines between"}}
    return {"200": {"description": "as asked", "content": content}}


def _failures(route: Route, keys: bool) -> dict[str, Any]:
    statuses = {*_ALWAYS, *((401,) if keys and not route.open else ())}
    if route.body:
        statuses |= {*_WITH_BODY}
    if "{" in route.path or route.answer is None:
        statuses.add(404)
    schema = {"$ref": f"#/components/schemas/{'AnthropicError' if isinstance(route.errors, AnthropicErrors) else 'Error'}"}
    return {str(status): _failure(status, schema) for status in sorted(statuses)}


def _failure(status: int, schema: Schema) -> dict[str, Any]:
    failure: dict[str, Any] = {"description": _STATUSES[status], "content": {"application/json": {"schema": schema}}}
    if status in (429, 503):
        failure["headers"] = {"Retry-After": {"schema": {"type": "string"}, "description": "seconds, 1 to 30"}}
    return failure
