"""JSON schemas of answers: what a client may rely on finding in them.

What lives here: one schema an answer, and the two shapes of errors. What may not: request bodies (schemas.py), rendering.
"""

from __future__ import annotations

from headrace.server.schemas import OBJECT, TEXT, Schema, array, nullable, record

PAGE: Schema = TEXT  # of whatever text the content type says
COUNT: Schema = {"type": "integer", "minimum": 0}
_REASON: Schema = {"enum": ["stop", "length", "tool_calls", "content_filter"]}
_STOP_REASON: Schema = {"type": ["string", "integer", "null"]}
_IDS = array({"type": "integer"})

_ERROR_FIELDS = record({"message": TEXT, "type": TEXT, "param": nullable(TEXT), "code": nullable(TEXT)})
ERROR = record({"error": _ERROR_FIELDS})
ANTHROPIC_ERROR = record({"type": {"const": "error"}, "error": {**_ERROR_FIELDS, "properties": {**_ERROR_FIELDS["properties"], "details": OBJECT}}})

STATUS = record({"status": TEXT})
LOAD = record({"server_load": COUNT})
SERVER_INFO = record({"version": TEXT, "config": OBJECT, "decisions": array(OBJECT), "engine": OBJECT})
VERSION = record({"version": TEXT})
MODEL = record({"id": TEXT, "object": {"const": "model"}, "created": COUNT, "owned_by": TEXT, "max_model_len": COUNT})
MODELS = record({"object": {"const": "list"}, "data": array(MODEL, minItems=1)})

_NUMBER: Schema = {"type": "number"}
_STANDING = {
    "id": TEXT, "object": {"const": "request"}, "client_request_id": nullable(TEXT), "route": TEXT, "created": COUNT,
    "state": {"enum": ["waiting", "running", "finished"]},
}  # fmt: skip
_PROGRESS = {"seconds": _NUMBER, "prompt_tokens": COUNT, "completion_tokens": COUNT, "finish_reasons": array(nullable(TEXT))}
REQUEST = record(
    {**_STANDING, **_PROGRESS}, {name: OBJECT for name in ("prompts", "queue", "waits_for", "predicted_start", "explain")} | {"preemptions": COUNT}
)
REQUESTS = record({"object": {"const": "list"}, "data": array(REQUEST)})

_USAGE = record(
    {"prompt_tokens": COUNT, "completion_tokens": COUNT, "total_tokens": COUNT, "prompt_tokens_details": record({"cached_tokens": COUNT})}
)
_CALL = {"id": TEXT, "type": {"enum": ["function", "custom"]}}
_FUNCTION_CALL = record(_CALL, {"function": record({"name": TEXT, "arguments": TEXT}), "custom": record({"name": TEXT, "input": TEXT})})
_ITEM = record({"id": TEXT, "type": {"enum": ["message", "reasoning", "function_call", "custom_tool_call"]}, "status": TEXT})
_CHAT_CHOICE = record(
    {
        "index": COUNT,
        "message": record({"role": {"const": "assistant"}, "content": nullable(TEXT)}, {"tool_calls": array(_FUNCTION_CALL)}),
        "finish_reason": _REASON,
        "stop_reason": _STOP_REASON,
        "logprobs": nullable(OBJECT),
    },
    {"token_ids": _IDS},
)
_TEXT_CHOICE = record({"index": COUNT, "text": TEXT, "finish_reason": _REASON, "stop_reason": _STOP_REASON, "logprobs": nullable(OBJECT)})


def _with_choices(kind: str, choice: Schema) -> Schema:
    """What OpenAI's older routes answer."""
    head = {"id": TEXT, "object": {"const": kind}, "created": COUNT, "model": TEXT, "system_fingerprint": TEXT}
    return record({**head, "choices": array(choice, minItems=1), "usage": _USAGE})


CHAT = _with_choices("chat.completion", _CHAT_CHOICE)
COMPLETION = _with_choices("text_completion", _TEXT_CHOICE)

MESSAGE = record(
    {
        "id": TEXT,
        "type": {"const": "message"},
        "role": {"const": "assistant"},
        "model": TEXT,
        "content": array(record({"type": {"enum": ["text", "thinking", "tool_use"]}}), minItems=1),
        "stop_reason": {"enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use", "refusal"]},
        "stop_sequence": nullable(TEXT),
        "usage": record({"input_tokens": COUNT, "cache_creation_input_tokens": COUNT, "cache_read_input_tokens": COUNT, "output_tokens": COUNT}),
    }
)
TOKEN_COUNT = record({"input_tokens": COUNT})

RESPONSE = record(
    {
        "id": TEXT,
        "object": {"const": "response"},
        "created_at": COUNT,
        "status": {"enum": ["completed", "incomplete"]},
        "model": TEXT,
        "output": array(_ITEM, minItems=1),
        "incomplete_details": nullable(record({"reason": {"enum": ["max_output_tokens", "content_filter"]}})),
        "error": {"type": "null"},
        "usage": record(
            {
                "input_tokens": COUNT,
                "input_tokens_details": record({"cached_tokens": COUNT}),
                "output_tokens": COUNT,
                "output_tokens_details": record({"reasoning_tokens": COUNT}),
                "total_tokens": COUNT,
            }
        ),
        "store": {"type": "boolean"},
        "previous_response_id": nullable(TEXT),
    }
)
DELETED = record({"id": TEXT, "object": {"const": "response"}, "deleted": {"const": True}})
ITEMS = record({"object": {"const": "list"}, "data": array(OBJECT), "has_more": {"type": "boolean"}})

TOKENS = record({"count": COUNT, "max_model_len": COUNT, "tokens": _IDS, "token_strs": nullable(array(TEXT))})
TOKENIZER = record({"tokenizer_class": TEXT, "chat_template": nullable(TEXT)})
PROMPT = record({"prompt": TEXT})
DOCUMENT = record({"openapi": TEXT, "info": OBJECT, "paths": OBJECT})
