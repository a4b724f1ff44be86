"""JSON schemas of request bodies, written from the field tables and the bounds that the validator itself uses.

What lives here: one schema for each field name, and how a table becomes an object. What may not: validation, answers (answer_schemas.py).

A schema says what a field takes by itself. What depends on other fields, on the model or on the length of the prompt is not in it and
answered with 400 as everything else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from headrace.sampling_params import BOUNDS, EXPECTED, MAX_BAD_WORDS, MAX_ID_ENTRIES, MAX_STOP_LENGTH, MAX_STOP_STRINGS, Bounds, RepetitionDetection
from headrace.server.fields import Field, Use
from headrace.server.messages import MAX_MESSAGES, MAX_TEMPLATE_KWARGS, MAX_TOOLS, ROLES
from headrace.server.protocol.body import MAX_LABEL
from headrace.server.protocol.completion import MAX_PROMPTS
from headrace.server.protocol.sampling import EFFORTS, MAX_SALT

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
OBJECT: Schema = {"type": "object"}
_COUNT: Schema = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
_TOKEN_ID = _COUNT
_FUNCTION_NAME: Schema = {"type": "string", "minLength": 1}


def array(items: Schema, **further: int) -> Schema:
    return {"type": "array", "items": items, **further}


def either(*schemas: Schema) -> Schema:
    return {"anyOf": list(schemas)}


def record(required: Mapping[str, Schema], optional: Mapping[str, Schema] | None = None) -> Schema:
    """An object that may have further fields, which nobody reads."""
    return {"type": "object", "required": list(required), "properties": {**required, **(optional or {})}}


def nullable(schema: Schema) -> Schema:
    return either(schema, {"type": "null"})


def _typed(kind: str, required: Mapping[str, Schema] | None = None, optional: Mapping[str, Schema] | None = None) -> Schema:
    """A part, told from others by its type."""
    return record({"type": {"const": kind}, **(required or {})}, optional)


def _allowed(choice: Schema) -> Mapping[str, Schema]:
    return {"mode": {"enum": ["auto", "required"]}, "tools": array(choice, minItems=1, maxItems=MAX_TOOLS)}


_STOP = array({"type": "string", "minLength": 1, "maxLength": MAX_STOP_LENGTH}, maxItems=MAX_STOP_STRINGS)
_TEXT_PART = _typed("text", {"text": TEXT})
_CHAT_TEXT = either(TEXT, array(either(_TEXT_PART, _typed("refusal", {"refusal": TEXT}))))
_CHAT_CALL = either(
    record({"function": record({"name": TEXT}, {"arguments": either(TEXT, OBJECT)})}),
    _typed("custom", {"custom": record({"name": TEXT, "input": TEXT})}),
)
_CHAT_MESSAGE = either(
    record({"role": {"enum": [role for role in ROLES if role != "assistant"]}, "content": _CHAT_TEXT}),
    record({"role": {"const": "assistant"}}, {"content": nullable(_CHAT_TEXT), "tool_calls": nullable(array(_CHAT_CALL, maxItems=MAX_TOOLS))}),
)
_GRAMMAR = record({"syntax": {"enum": ["lark", "regex"]}, "definition": TEXT})
_FREE = _typed("text")
_CHAT_CUSTOM = {"description": nullable(TEXT), "format": nullable(either(_FREE, _typed("grammar", {"grammar": _GRAMMAR})))}
_CHAT_TOOL = either(
    _typed("function", {"function": record({"name": _FUNCTION_NAME}, {"parameters": OBJECT})}),
    _typed("custom", {"custom": record({"name": _FUNCTION_NAME}, _CHAT_CUSTOM)}),
)

_TEXTS = either(TEXT, array(_TEXT_PART))
_RESULT = _typed("tool_result", {"tool_use_id": TEXT}, {"content": nullable(_TEXTS)})
_SAID = either(_TEXT_PART, _typed("thinking", {"thinking": TEXT}), _typed("tool_use", {"id": TEXT, "name": TEXT, "input": OBJECT}))
_MESSAGE = either(
    record({"role": {"const": "user"}, "content": either(TEXT, array(either(_TEXT_PART, _RESULT), minItems=1))}),
    record({"role": {"const": "assistant"}, "content": either(TEXT, array(_SAID, minItems=1))}),
)
_MESSAGE_TOOL = record(
    {"name": _FUNCTION_NAME}, {"type": nullable({"const": "custom"}), "description": nullable(TEXT), "input_schema": nullable(OBJECT)}
)

_ITEM_PART = either(*(_typed(kind, {"text": TEXT}) for kind in ("input_text", "output_text", "text")), _typed("refusal", {"refusal": TEXT}))
_ITEM_TEXTS = either(TEXT, array(_ITEM_PART))
_ITEM = either(
    record({"role": {"enum": [role for role in ROLES if role != "tool"]}, "content": _ITEM_TEXTS}, {"type": nullable({"const": "message"})}),
    _typed("function_call", {"call_id": TEXT, "name": TEXT, "arguments": TEXT}),
    _typed("function_call_output", {"call_id": TEXT, "output": _ITEM_TEXTS}),
    _typed("custom_tool_call", {"call_id": TEXT, "name": TEXT, "input": TEXT}),
    _typed("custom_tool_call_output", {"call_id": TEXT, "output": _ITEM_TEXTS}),
    _typed("reasoning", {}, {"content": nullable(array(_typed("reasoning_text", {"text": TEXT})))}),
)
_ITEM_FORMAT = nullable(either(_FREE, _typed("grammar", dict(_GRAMMAR["properties"]))))
_ITEM_TOOL = either(
    _typed("function", {"name": _FUNCTION_NAME}, {"description": nullable(TEXT), "parameters": nullable(OBJECT)}),
    _typed("custom", {"name": _FUNCTION_NAME}, {"description": nullable(TEXT), "format": _ITEM_FORMAT}),
)


def _format(**schema: Schema) -> Schema:
    """What the answer must be, as the APIs have it. ``schema`` says where the JSON schema stands."""
    return either(record({"type": {"enum": ["text", "json_object"]}}), _typed("json_schema", dict(schema)))


# What a number may be, by field.
_NUMBERS: Mapping[str, Bounds] = {
    **BOUNDS, "expected_ttft": EXPECTED["ttft"], "expected_tpot": EXPECTED["tpot"], "reading_speed": EXPECTED["reading_speed"]
}  # fmt: skip
_DETECTION = {name: {"type": "integer", "minimum": 1} for name in RepetitionDetection.__dataclass_fields__}

# Where a field's JSON type is not all there is to say. Every route that has a field of that name takes the same.
_BY_NAME: Mapping[str, Schema] = {
    "stop": either(_STOP, {"type": "string", "minLength": 1, "maxLength": MAX_STOP_LENGTH}),
    "stop_sequences": _STOP,
    "stop_token_ids": array(_TOKEN_ID, maxItems=MAX_ID_ENTRIES),
    "allowed_token_ids": array(_TOKEN_ID, minItems=1, maxItems=2**18),
    "bad_words": array({"type": "string", "minLength": 1, "maxLength": MAX_STOP_LENGTH}, maxItems=MAX_BAD_WORDS),
    "logit_bias": {
        "type": "object",
        "maxProperties": MAX_ID_ENTRIES,
        "propertyNames": {"pattern": "^[0-9]{1,10}$"},
        "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
    },
    "priority": {"type": "integer", "minimum": -(2**31), "maximum": 2**31 - 1},
    "cache_salt": {"type": "string", "maxLength": MAX_SALT},
    "truncate_prompt_tokens": either({"const": -1}, {"type": "integer", "minimum": 1, "maximum": 2**31 - 1}),
    "chat_template_kwargs": {"type": "object", "maxProperties": MAX_TEMPLATE_KWARGS},
    "prompt": either(
        TEXT,
        array(_TOKEN_ID, minItems=1),
        array(TEXT, minItems=1, maxItems=MAX_PROMPTS),
        array(array(_TOKEN_ID), minItems=1, maxItems=MAX_PROMPTS),
    ),
    "tokens": array(_TOKEN_ID),
    "system": _TEXTS,
    "input": either(TEXT, array(_ITEM, minItems=1, maxItems=MAX_MESSAGES)),
    "response_format": _format(json_schema=record({"schema": OBJECT})),
    "text": {
        "type": "object",
        "properties": {"format": nullable(_format(schema=OBJECT)), "verbosity": {"enum": ["medium", None]}},
        "additionalProperties": False,
    },
    "output_config": {
        "type": "object",
        "properties": {"format": nullable(_format(schema=OBJECT)), "effort": {"enum": [*EFFORTS, None]}},
        "additionalProperties": {"type": "null"},
    },
    "structured_outputs": {
        "type": "object",
        "properties": {
            "json": {"type": ["object", "string", "boolean", "null"]},
            "json_object": {"type": ["boolean", "null"]},
            "regex": {"type": ["string", "null"]},
            "choice": nullable(array(TEXT)),
            "grammar": {"type": ["string", "null"]},
        },
        "additionalProperties": False,
    },
    "repetition_detection": either({"type": "boolean"}, {"type": "object", "properties": _DETECTION, "additionalProperties": False}),
    "thinking": {
        "type": "object",
        "required": ["type"],
        "properties": {
            "type": {"enum": ["enabled", "adaptive", "disabled"]},
            "budget_tokens": nullable(_COUNT),
            "display": {"enum": ["summarized", None]},
        },
        "additionalProperties": {"type": "null"},
    },
    "reasoning_effort": {"enum": list(EFFORTS)},
    "thinking_token_budget": _COUNT,
    "reasoning": {
        "type": "object",
        "properties": {"effort": {"enum": [*EFFORTS, None]}, "summary": {"enum": ["auto", None]},
                       "generate_summary": {"enum": ["auto", None]}},
        "additionalProperties": {"type": "null"},
    },
}  # fmt: skip

_CHOICES = {"enum": ["auto", "none", "required"]}
_CHAT_CHOICE = either(*(_typed(kind, {kind: record({"name": TEXT})}) for kind in ("function", "custom")))
_ITEM_CHOICE = either(*(_typed(kind, {"name": TEXT}) for kind in ("function", "custom")))
_ANSWER_TOKENS = {"type": "integer", "minimum": 1, "maximum": 2**31 - 1}
_CHAT_MESSAGES = array(_CHAT_MESSAGE, minItems=1, maxItems=MAX_MESSAGES)
_STREAM_OPTIONS: Schema = {
    "type": "object",
    "properties": {"include_usage": {"type": "boolean"}, "include_obfuscation": {"const": False}, "continuous_usage_stats": {"type": "boolean"}},
    "additionalProperties": False,
}
_ALONE: Mapping[str, Schema] = {"disable_parallel_tool_use": {"type": ["boolean", "null"]}}
_ANTHROPIC: Mapping[str, Schema] = {
    "messages": array(_MESSAGE, minItems=1, maxItems=MAX_MESSAGES),
    "tools": array(_MESSAGE_TOOL, maxItems=MAX_TOOLS),
    "tool_choice": either(record({"type": {"enum": ["auto", "any", "none"]}}, _ALONE), _typed("tool", {"name": TEXT}, _ALONE)),
}

# What fields of one name take on one route.
_BY_ROUTE: Mapping[str, Mapping[str, Schema]] = {
    "/v1/chat/completions": {
        "messages": _CHAT_MESSAGES,
        "tools": array(_CHAT_TOOL, maxItems=MAX_TOOLS),
        "tool_choice": either(_CHOICES, _CHAT_CHOICE, _typed("allowed_tools", {"allowed_tools": record(_allowed(_CHAT_CHOICE))})),
        "stream_options": _STREAM_OPTIONS,
        "max_completion_tokens": _ANSWER_TOKENS,
        "logprobs": {"type": "boolean"},
        "top_logprobs": {"type": "integer", "minimum": 0, "maximum": int(BOUNDS["logprobs"].high)},
    },
    "/v1/completions": {"stream_options": _STREAM_OPTIONS, "max_tokens": {**_ANSWER_TOKENS, "minimum": 0}},
    "/v1/messages": _ANTHROPIC,
    "/v1/messages/count_tokens": _ANTHROPIC,
    "/v1/responses": {
        "tools": array(_ITEM_TOOL, maxItems=MAX_TOOLS),
        "tool_choice": either(_CHOICES, _ITEM_CHOICE, _typed("allowed_tools", _allowed(_ITEM_CHOICE))),
        "max_output_tokens": _ANSWER_TOKENS,
    },
    "/tokenize": {"prompt": TEXT, "messages": _CHAT_MESSAGES, "tools": array(_CHAT_TOOL, maxItems=MAX_TOOLS)},
}
_REQUIRED: Mapping[str, tuple[str, ...]] = {
    "/v1/chat/completions": ("messages",),
    "/v1/completions": ("prompt",),
    "/v1/messages": ("max_tokens", "messages"),
    "/v1/messages/count_tokens": ("messages",),
    "/v1/responses": ("input",),
    "/detokenize": ("tokens",),
}


_HELLO = [{"role": "user", "content": "Hello"}]
EXAMPLES: Mapping[str, Mapping[str, Any]] = {
    "/v1/chat/completions": {"messages": _HELLO, "max_tokens": 16},
    "/v1/completions": {"prompt": "Hello", "max_tokens": 16},
    "/v1/messages": {"messages": _HELLO, "max_tokens": 16},
    "/v1/messages/count_tokens": {"messages": _HELLO},
    "/v1/responses": {"input": "Hello", "max_output_tokens": 16},
    "/tokenize": {"prompt": "Hello"},
    "/detokenize": {"tokens": [1, 2, 3]},
}


def body_schema(path: str, fields: Iterable[Field]) -> Schema:
    """All fields of a route. One that is required cannot be null; of all others null says the same as leaving them out."""
    required = _REQUIRED.get(path, ())
    own = _BY_ROUTE.get(path, {})
    properties = {field.name: _described(field, own, field.name in required) for field in fields}
    schema: Schema = {"type": "object", "properties": properties, "additionalProperties": False}
    if required:
        schema["required"] = list(required)
    if path == "/tokenize":
        schema["oneOf"] = [{"required": [name], "properties": {name: {"type": kind}}} for name, kind in (("prompt", "string"), ("messages", "array"))]
    return schema


def _described(field: Field, own: Mapping[str, Schema], required: bool) -> Schema:
    if field.use is Use.REFUSED:
        return {"enum": [None, *field.neutral], "description": f"Not supported: {field.help}.", "deprecated": True}
    schema = own.get(field.name) or _BY_NAME.get(field.name) or _of_bounds(_NUMBERS.get(field.name)) or _of_type(field)
    return {**(schema if required else nullable(schema)), "description": field.help}


def _of_bounds(bounds: Bounds | None) -> Schema | None:
    if bounds is None:
        return None
    low = "exclusiveMinimum" if bounds.open_low else "minimum"
    return {"type": "integer" if bounds.integer else "number", low: bounds.low, "maximum": bounds.high}


def _of_type(field: Field) -> Schema:
    schema: Schema = {"type": field.schema if isinstance(field.schema, str) else list(field.schema)}
    return {**schema, "maxLength": MAX_LABEL} if field.use is Use.LABEL and field.schema == "string" else schema
