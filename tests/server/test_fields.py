"""Every request field that users know from elsewhere, on every route that generates: taken, or refused by name, and judged alike everywhere."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from headrace.errors import InvalidRequest
from headrace.sampling_params import BOUNDS
from headrace.server.fields import CHAT, COMPLETION, MESSAGES, RESPONSES, Field, Use
from headrace.server.protocol.anthropic import parse_messages
from headrace.server.protocol.chat import parse_chat
from headrace.server.protocol.completion import parse_completion
from headrace.server.protocol.responses import parse_responses

USER = [{"role": "user", "content": "hi"}]
Parse = Callable[[Mapping[str, Any], Mapping[str, Any]], Any]
ROUTES: dict[str, tuple[tuple[Field, ...], Parse, dict[str, Any]]] = {
    "chat": (CHAT, parse_chat, {"messages": USER, "max_tokens": 16}),
    "completion": (COMPLETION, parse_completion, {"prompt": "x"}),
    "messages": (MESSAGES, parse_messages, {"messages": USER, "max_tokens": 16}),
    "responses": (RESPONSES, parse_responses, {"input": "hi", "max_output_tokens": 16}),
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
    fields, parse, base = ROUTES[route]
    plain, given = (parse({**base, **extra}, {}) for extra in ({}, {name: KNOWN[name]}))
    assert (plain.params, plain.options) != (given.params, given.options), "taken and ignored"
    assert any(field.name == name and field.help for field in fields)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", ELSEWHERE)
def test_fields_without_a_place_are_refused_by_name(route: str, name: str) -> None:
    expected = ("unsupported_parameter", name) if route in REFUSED_ON[name] else ("taken", None)
    assert verdict(route, **{name: ELSEWHERE[name]}) == expected


@pytest.mark.parametrize("name", ["chat_template_kwargs", "tools"])
def test_what_templates_get_is_taken_by_all_that_have_one(name: str) -> None:
    for route in ("chat", "messages", "responses"):
        assert verdict(route, **{name: {"thinking": False} if name == "chat_template_kwargs" else []}) == ("taken", None)
    assert verdict("completion", **{name: None})[0] == "unknown_parameter"


BAD_NUMBERS: tuple[Any, ...] = (
    -1, 0, 1, -0.5, 1e-30, 1e308, -1e308, 2**31 - 1, 2**31, 2**63, 2**64, 10**400, math.nan, math.inf, -math.inf, "1", "", True, False, [], [1], {},
)  # fmt: skip
BAD_OTHERS: tuple[Any, ...] = (
    "x", "", 5, 0, -1, 1.5, True, [], [None], [""], [-1], [2**31], [True], ["x" * 2000], ["x"] * 300, {}, {"x": 1}, {"-1": 1}, {"5": "x"},
)  # fmt: skip
SHARED = sorted(set.intersection(*({field.name for field in fields} for fields, _, _ in ROUTES.values())))
DIFFERENT = {"max_tokens", "n", "stop", "stream_options", "prompt_logprobs", "return_token_ids", "response_format", "prompt", "messages", "input"}


@pytest.mark.parametrize("name", [name for name in SHARED if name not in DIFFERENT])
def test_all_routes_give_the_same_verdict(name: str) -> None:
    """On every value; an error always names the field."""
    seen = set()
    for value in BAD_NUMBERS + BAD_OTHERS:
        verdicts = {verdict(route, **{name: value}) for route in ROUTES}
        assert len(verdicts) == 1, (value, verdicts)
        ((code, param),) = verdicts
        assert code == "taken" or param == name or (param or "").startswith(f"{name}."), (value, code, param)
        seen.add(code == "taken")
    assert False in seen, "nothing is wrong for this field"


@pytest.mark.parametrize("name", BOUNDS)
def test_both_sides_of_every_bound(name: str) -> None:
    bounds = BOUNDS[name]
    step: Any = 1 if bounds.integer else 1e-6
    cases = {bounds.low: not bounds.open_low, bounds.low - step: False, bounds.high: True, bounds.high + step: False, bounds.low + step: True}
    for route, (fields, _, _) in ROUTES.items():
        if not any(field.name == name and field.use is not Use.REFUSED and field.schema != "boolean" for field in fields):
            continue
        for value, taken in cases.items():
            limit = {"max_output_tokens" if route == "responses" else "max_tokens": 2**31 - 1} if name == "min_tokens" else {}
            code, param = verdict(route, **{**limit, name: int(value) if bounds.integer else value})
            assert (code == "taken") == taken and (taken or param == name), (route, value, code, param)


def test_every_field_is_told_apart_once() -> None:
    for fields, _, _ in ROUTES.values():
        names = [field.name for field in fields]
        assert len(names) == len(set(names))
        assert all(field.help for field in fields)
