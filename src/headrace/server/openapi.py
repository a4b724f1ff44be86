"""The description of the server that /openapi.json gives: OpenAPI 3.1, written from the route table and the structs
that bodies are read as.

What lives here: a row of that table, the document. What may not: the table itself (app.py), facts that are not in these
or checked by the tests of what is described.

A schema says what a field takes by itself. What depends on other fields, on the model or on the length of the prompt is
not in it and answered with 400 as everything else.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field

from msgspec import UNSET, Struct, structs
from msgspec.json import schema_components

from headrace.request import Json
from headrace.server import answer_types
from headrace.server.answer_types import AnthropicError, Error
from headrace.server.dialects.body import NUMBERS, TOLD, Body
from headrace.server.dialects.messages import AnthropicErrors
from headrace.server.exchange import Exchange
from headrace.server.service import Service
from headrace.server.wire import ErrorFormat

Handler = Callable[[Service, Exchange], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Route:
    """One route. ``path`` may end in ``{name}``, which takes the rest.

    ``open``: needs no key. ``body``: what a request holds. ``answer``: what a success says, in one of
    ``content_types``; None: it never succeeds. ``errors``: how they read. ``query``: what a query may hold.
    """

    method: str
    path: str
    handler: Handler
    summary: str
    open: bool = False
    body: type[Body] | None = None
    answer: type | None = dict
    content_types: tuple[str, ...] = ("application/json",)
    errors: ErrorFormat = field(default_factory=ErrorFormat)
    query: type[Struct] | None = None


Schema = Json

NO_MEANING = "accepted; changes nothing in the answer"
_ALWAYS = (400, 403, 405, 408, 431, 500, 503)
_WITH_BODY = (404, 413, 415, 429)
_SECURITY: list[dict[str, list[str]]] = [{"bearer": []}, {"key": []}]


def document(routes: Iterable[Route], version: str, *, keys: bool, closed: bool = True) -> Json:
    """``keys``: whether this server asks for one. ``closed``: it refuses fields that are not named here."""
    paths: dict[str, Json] = {}
    bodies, parts = body_schemas(route.body for route in routes if route.body)
    answers, further = _answer_schemas(route.answer for route in routes if route.answer)
    schemas = {**bodies, **answers}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, schemas, keys, closed)
    components: Json = {"schemas": {**parts, **further}}
    if keys:
        components["securitySchemes"] = {
            "bearer": {"type": "http", "scheme": "bearer"},
            "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
    info = {"title": "Headrace", "version": version, "description": "An LLM inference and serving engine."}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": components}


def body_schemas(bodies: Iterable[type[Body]]) -> tuple[dict[type[Body], Schema], dict[str, Schema]]:
    """What each route takes, and the structs in it by name."""
    kinds = tuple(dict.fromkeys(bodies))
    _, parts = schema_components(kinds, ref_template="#/components/schemas/{name}")
    for part in parts.values():
        if part.get("additionalProperties") is False:  # see OBJECTS
            part["additionalProperties"] = {"type": "null"}
    if "ChatCall" in parts:
        parts["ChatCall"]["anyOf"] = [
            {"required": ["function"]},
            {"required": ["type", "custom"], "properties": {"type": {"const": "custom"}}},
        ]
    if "MessageItem" in parts:  # which needs no type
        parts["MessageItem"]["required"].remove("type")
        parts["MessageItem"]["properties"]["type"]["enum"].append(None)
    return {kind: _body_schema(kind, parts.pop(kind.__name__)) for kind in kinds}, parts


def _body_schema(kind: type[Body], given: Schema) -> Schema:
    """One that is required cannot be null; of all others null says the same as leaving them out."""
    required = given["required"]
    properties = {
        name: _described(kind, name, schema, name in required) for name, schema in given["properties"].items()
    }
    for name, refused in kind.refused.items():
        told = f"Not supported: {refused.instead}."
        properties[name] = {"enum": [None, *refused.unless], "description": told, "deprecated": True}
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    if required:
        schema["required"] = required
    if kind.one_of:
        schema["oneOf"] = [
            {"required": [name], "properties": {name: {"not": {"type": "null"}}}} for name in kind.one_of
        ]
    return schema


def _described(kind: type[Body], name: str, schema: Schema, required: bool) -> Schema:
    schema.pop("default", None)
    own, bounds = schema.get("anyOf", [schema])[0], NUMBERS.get(name)
    if bounds is not None and own.get("type") in ("integer", "number") and "minimum" not in own:
        own["exclusiveMinimum" if bounds.open_low else "minimum"], own["maximum"] = bounds.low, bounds.high
    meaning = TOLD["meanings"].get(kind.__name__, {}).get(name, TOLD["meanings"][name])
    optional = {"type": "null"} not in schema.get("anyOf", ()) and not required
    return {**({"anyOf": [schema, {"type": "null"}]} if optional else schema), "description": meaning or NO_MEANING}


def _answer_schemas(answers: Iterable[type]) -> tuple[dict[type, Schema], dict[str, Schema]]:
    """Where what each route answers is described, and the structs by name."""
    kinds = [*dict.fromkeys([*answers, Error, AnthropicError])]
    schemas, parts = schema_components(kinds, ref_template="#/components/schemas/{name}")
    for name, part in parts.items():
        members = structs.fields(getattr(answer_types, name))
        part["required"] = [member.name for member in members if member.default is not UNSET]
    return dict(zip(kinds, schemas, strict=True)), parts


def _operation(route: Route, schemas: Mapping[type, Schema], keys: bool, closed: bool) -> Json:
    operation: Json = {
        "operationId": f"{route.method.lower()}_{re.sub(r'[^a-z0-9]+', '_', route.path).strip('_') or 'root'}",
        "summary": route.summary,
        "responses": {**_success(route, schemas), **_failures(route, keys)},
    }
    names = re.findall(r"{(\w+)}", route.path)
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}} for name in names
    ]
    if route.query:
        ((_, described),) = schema_components([route.query])[1].items()
        for name, schema in described["properties"].items():
            parameters.append({"name": name, "in": "query", "required": False, "schema": schema})
    if parameters:
        operation["parameters"] = parameters
    if route.body:
        schema = schemas[route.body] | ({} if closed else {"additionalProperties": True})
        content = {"schema": schema, "example": TOLD["examples"][route.body.__name__]}
        operation["requestBody"] = {"required": True, "content": {"application/json": content}}
    if keys:
        operation["security"] = [] if route.open else _SECURITY
    return operation


def _success(route: Route, schemas: Mapping[type, Schema]) -> Json:
    if route.answer is None:
        return {}
    content: Json = {kind: {"schema": schemas[route.answer]} for kind in route.content_types}
    if route.body and "stream" in route.body.__struct_fields__:
        content["text/event-stream"] = {
            "schema": {"type": "string", "description": "with stream: data: {JSON} one a line, blank lines between"}
        }
    return {"200": {"description": "as asked", "content": content}}


def _failures(route: Route, keys: bool) -> Json:
    statuses = {*_ALWAYS, *((401,) if keys and not route.open else ())}
    if route.body:
        statuses |= {*_WITH_BODY}
    if "{" in route.path or route.answer is None:
        statuses.add(404)
    schema = {
        "$ref": f"#/components/schemas/{'AnthropicError' if isinstance(route.errors, AnthropicErrors) else 'Error'}"
    }
    return {str(status): _failure(status, schema) for status in sorted(statuses)}


def _failure(status: int, schema: Schema) -> Json:
    failure: Json = {
        "description": TOLD["statuses"][str(status)],
        "content": {"application/json": {"schema": schema}},
    }
    if status in (429, 503):
        failure["headers"] = {"Retry-After": {"schema": {"type": "string"}, "description": "seconds, 1 to 30"}}
    return failure
