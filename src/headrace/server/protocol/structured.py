"""What the text of an answer must be, as clients write it: structured_outputs, or OpenAI's response_format.

What lives here: reading both. What may not: whether it can be compiled (the engine's inputs ask).
"""

from __future__ import annotations

from typing import Any

from headrace.errors import InvalidRequest
from headrace.request import StructuredOutputs
from headrace.server.protocol.body import Body

_KINDS = ("json", "json_object", "regex", "choice", "grammar")


def read_structured_outputs(body: Body) -> StructuredOutputs | None:
    """Raises InvalidRequest naming the field."""
    given, format = body.get("structured_outputs"), _read_format(body.get("response_format"))
    if given is None:
        return format
    if format is not None:
        raise InvalidRequest("structured_outputs and response_format both say what the answer must be; give one of them.", param="response_format")
    unknown = next((name for name in given if name not in _KINDS), None)
    if unknown is not None:
        known = ", ".join(_KINDS)
        raise InvalidRequest(
            f"structured_outputs has no field {unknown[:100]!r}; it takes one of {known}.", param="structured_outputs", code="unknown_parameter"
        )
    return StructuredOutputs(**{name: value for name, value in given.items() if value is not None})


def _read_format(format: dict[str, Any] | None) -> StructuredOutputs | None:
    kind = None if format is None else format.get("type")
    if format is None or kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputs(json_object=True)
    if kind != "json_schema":
        raise InvalidRequest("response_format.type must be text, json_object or json_schema.", param="response_format")
    described = format.get("json_schema")
    schema = described.get("schema") if isinstance(described, dict) else None
    if not isinstance(schema, dict):
        raise InvalidRequest("response_format.json_schema must hold the schema, as an object; give it.", param="response_format")
    try:
        return StructuredOutputs(json=schema)  # type: ignore[arg-type]  # taken as users write it
    except InvalidRequest as error:
        raise InvalidRequest(
            error.message.replace("structured_outputs.json", "response_format.json_schema.schema"), param="response_format"
        ) from None
