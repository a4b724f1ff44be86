"""What the text of an answer must be, as clients write it: structured_outputs, or what their API has for it.

What lives here: reading all of them. What may not: whether it can be compiled (the engine's inputs ask).
"""

from __future__ import annotations

from typing import Any

from headrace.errors import InvalidRequest
from headrace.sampling_params import StructuredOutputs
from headrace.server.protocol.body import Body

_OWNERS = ("text", "output_config")  # objects with a format: the Responses API's and Anthropic's
_KINDS = ("json", "json_object", "regex", "choice", "grammar")


def format_name(body: Body) -> str:
    """What the client calls the field that says it."""
    return "structured_outputs" if "structured_outputs" in body else _api_name(body)


def _api_name(body: Body) -> str:
    return next((f"{owner}.format" for owner in _OWNERS if owner in body), "response_format")


def read_structured_outputs(body: Body) -> StructuredOutputs | None:
    """Raises InvalidRequest naming the field."""
    given, format = body.get("structured_outputs"), _read_api_format(body)
    if given is None:
        return format
    if format is not None:
        name = _api_name(body)
        raise InvalidRequest(f"structured_outputs and {name} both say what the answer must be; give one of them.", param=name)
    unknown = next((name for name in given if name not in _KINDS), None)
    if unknown is not None:
        known = ", ".join(_KINDS)
        raise InvalidRequest(
            f"structured_outputs has no field {unknown[:100]!r}; it takes one of {known}.", param="structured_outputs", code="unknown_parameter"
        )
    return StructuredOutputs(**{name: value for name, value in given.items() if value is not None})


def _read_api_format(body: Body) -> StructuredOutputs | None:
    for owner in _OWNERS:
        if body.get(owner, {}).get("format") is not None:
            name = f"{owner}.format"
            format = body.get(owner)["format"]
            return _read_format(name, format, format.get("schema") if isinstance(format, dict) else None)
    format = body.get("response_format")
    described = (format or {}).get("json_schema")
    return _read_format("response_format", format, described.get("schema") if isinstance(described, dict) else None)


def _read_format(name: str, format: Any, schema: Any) -> StructuredOutputs | None:
    """``schema`` is what stands where this API has it."""
    if format is None:
        return None
    kind = format.get("type") if isinstance(format, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputs(json_object=True)
    if kind != "json_schema":
        raise InvalidRequest(f"{name}.type must be text, json_object or json_schema.", param=name)
    if not isinstance(schema, dict):
        raise InvalidRequest(f"{name} must hold the schema, as an object; give it.", param=name)
    try:
        return StructuredOutputs(json=schema)  # type: ignore[arg-type]  # taken as users write it
    except InvalidRequest as error:
        raise InvalidRequest(error.message.replace("structured_outputs.json", f"{name}'s schema"), param=name) from None
