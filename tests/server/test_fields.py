"""Every request field that users know from elsewhere, on every route that generates: taken, or refused by name, and
judged alike everywhere."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from headrace.errors import InvalidRequest
from headrace.request import BOUNDS
from headrace.server import generate
from headrace.server.app import ROUTES as ROUTE_TABLE
from headrace.server.dialects.body import TOLD, Body
from headrace.server.dialects.chat import ChatBody, parse_chat
from headrace.server.dialects.completions import CompletionBody, parse_completion
from headrace.server.dialects.messages import MessagesBody, parse_messages
from headrace.server.dialects.responses import ResponsesBody, parse_responses
from headrace.server.openapi import body_schemas
from headrace.server.service import Service

USER = [{"role": "user", "content": "hi"}]
Parse = Callable[[Mapping[str, Any], Mapping[str, Any]], Any]
ROUTES: dict[str, tuple[type[Body], Parse, dict[str, Any]]] = {
    "chat": (ChatBody, parse_chat, {"messages": USER, "max_tokens": 16}),
    "completion": (CompletionBody, parse_completion, {"prompt": "x"}),
    "messages": (MessagesBody, parse_messages, {"messages": USER, "max_tokens": 16}),
    "responses": (ResponsesBody, parse_responses, {"input": "hi", "max_output_tokens": 16}),
}
# Beyond the APIs' own: a value that each takes.
KNOWN: dict[str, Any] = {
    "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 1, "stop_token_ids": [3], "include_stop_str_in_output": True,
    "ignore_eos": True, "skip_special_tokens": False, "bad_words": ["x"], "allowed_token_ids": [3, 4], "logit_bias": {"5": 1.5},
    "truncate_prompt_tokens": 5, "structured_outputs": {"regex": "a+"}, "priority": 1, "cache_salt": "s", "temperature": 0.5, "top_p": 0.5,
    "seed": 7, "presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_detection": True, "explain": True,
    "expected_ttft": 0.5, "expected_tpot": 0.05, "reading_speed": 8,
}  # fmt: skip
# Where an answer has no place for it, or the API has another name: refused by name.
ELSEWHERE: dict[str, Any] = {"prompt_logprobs": 1, "return_token_ids": True, "n": 2, "stop": ["x"]}
IN_PARTS = {"messages", "responses"}
REFUSED_ON = {"prompt_logprobs": IN_PARTS, "return_token_ids": IN_PARTS, "n": IN_PARTS, "stop": {"messages"}}


def verdict(route: str, **fields: Any) -> tuple[str, str | None]:
    """What a route says: taken, or the code and the field of its error."""
    _, parse, base = ROUTES[route]
    try:
        parse({**base, **fields}, {})
    except InvalidRequest as error:
        return error.code or "invalid", error.param
    return "taken", None


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", KNOWN)
def test_known_fields_reach_the_request(route: str, name: str) -> None:
    kind, parse, base = ROUTES[route]
    plain, given = (parse({**base, **extra}, {}) for extra in ({}, {name: KNOWN[name]}))
    changed = {each for each in kind.__struct_fields__ if getattr(plain.body, each) != getattr(given.body, each)}
    assert changed == {name}
    read_there = any(
        f"body.{name}" in inspect.getsource(each) for each in (generate.prepare, Service.request_attributes)
    )
    assert read_there or (plain.params, plain.expects, plain.options) != (given.params, given.expects, given.options), (
        "taken and ignored"
    )
    assert name in kind.__struct_fields__


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", ELSEWHERE)
def test_fields_without_a_place_are_refused_by_name(route: str, name: str) -> None:
    expected = ("unsupported_parameter", name) if route in REFUSED_ON[name] else ("taken", None)
    assert verdict(route, **{name: ELSEWHERE[name]}) == expected


@pytest.mark.parametrize("name", ["chat_template_kwargs", "tools"])
def test_what_templates_get_is_taken_by_all_that_have_one(name: str) -> None:
    for route in ("chat", "messages", "responses"):
        assert verdict(route, **{name: {"thinking": False} if name == "chat_template_kwargs" else []}) == (
            "taken",
            None,
        )
    assert verdict("completion", **{name: None})[0] == "unknown_parameter"


BAD_NUMBERS: tuple[Any, ...] = (
    -1, 0, 1, -0.5, 1e-30, 1e308, -1e308, 2**31 - 1, 2**31, 2**63, 2**64, 10**400, math.nan, math.inf, -math.inf, "1", "", True, False, [], [1], {},
)  # fmt: skip
BAD_OTHERS: tuple[Any, ...] = (
    "x", "", 5, 0, -1, 1.5, True, [], [None], [""], [-1], [2**31], [True], ["x" * 2000], ["x"] * 300, {}, {"x": 1}, {"-1": 1}, {"5": "x"},
)  # fmt: skip
SHARED = sorted(set.intersection(*(set(kind.names()) for kind, _, _ in ROUTES.values())))
DIFFERENT = {
    "max_tokens",
    "n",
    "stop",
    "stream_options",
    "prompt_logprobs",
    "return_token_ids",
    "response_format",
    "prompt",
    "messages",
    "input",
}


@pytest.mark.parametrize("name", [name for name in SHARED if name not in DIFFERENT])
def test_all_routes_give_the_same_verdict(name: str) -> None:
    """On every value; an error always names the field."""
    seen = set()
    for value in BAD_NUMBERS + BAD_OTHERS:
        verdicts = {verdict(route, **{name: value}) for route in ROUTES}
        assert len(verdicts) == 1, (value, verdicts)
        ((code, param),) = verdicts
        assert code == "taken" or param == name or (param or "").startswith((f"{name}.", f"{name}[")), (
            value,
            code,
            param,
        )
        seen.add(code == "taken")
    assert False in seen, "nothing is wrong for this field"


@pytest.mark.parametrize("name", BOUNDS)
def test_both_sides_of_every_bound(name: str) -> None:
    bounds = BOUNDS[name]
    step: Any = 1 if bounds.integer else 1e-6
    cases = {
        bounds.low: not bounds.open_low,
        bounds.low - step: False,
        bounds.high: True,
        bounds.high + step: False,
        bounds.low + step: True,
    }
    for route, (kind, _, _) in ROUTES.items():
        if name not in kind.__struct_fields__ or (route, name) == ("chat", "logprobs"):  # there a boolean
            continue
        for value, taken in cases.items():
            limit = (
                {"max_output_tokens" if route == "responses" else "max_tokens": 2**31 - 1}
                if name == "min_tokens"
                else {}
            )
            code, param = verdict(route, **{**limit, name: int(value) if bounds.integer else value})
            assert (code == "taken") == taken and (taken or param == name), (route, value, code, param)


def test_every_field_is_told_apart_once() -> None:
    schemas, _ = body_schemas(kind for kind, _, _ in ROUTES.values())
    for kind, schema in schemas.items():
        assert len(kind.names()) == len(set(kind.names())) == len(schema["properties"])
        assert all(each["description"] for each in schema["properties"].values())


def test_what_is_told_is_of_fields_that_there_are() -> None:
    bodies = {route.body.__name__: route.body for route in ROUTE_TABLE if route.body}
    taken = {name for body in bodies.values() for name in body.__struct_fields__}
    assert {name for name, told in TOLD["meanings"].items() if isinstance(told, str) and name not in taken} == set()
    own = {(kind, name) for kind, told in TOLD["meanings"].items() if isinstance(told, dict) for name in told}
    assert all(name in bodies[kind].__struct_fields__ for kind, name in own) and set(TOLD["examples"]) == set(bodies)
