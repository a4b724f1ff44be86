"""Decoded JSON as msgspec structs: what the bodies of all routes have in common (fields that are a struct's, known ones
that are refused, and nothing else), queries, the one translator of what msgspec says is wrong into errors that name
the place; and the fields that all routes that generate share, and OpenAI's two older ones.

What lives here: reading, the errors' words, token ids, the way from fields to SamplingParams and what else a request
holds. What may not: the bounds of sampling parameters (request.py checks them once for every route), fields of
a single route, what is told of them (fields.toml).
"""

from __future__ import annotations

import re
import tomllib
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Generic, Literal, Self, TypeVar
from urllib.parse import parse_qsl

import msgspec
from msgspec import Meta, Struct, structs

from headrace.engine.inputs import model_defaults
from headrace.engine.template import check_template_variables
from headrace.errors import InvalidRequest
from headrace.request import (
    BOUNDS,
    EXPECTED,
    MAX_BAD_WORDS,
    MAX_ID_ENTRIES,
    MAX_STOP_LENGTH,
    MAX_STOP_STRINGS,
    Bounds,
    Expectations,
    Given,
    Json,
    RepetitionDetection,
    SamplingParams,
    StructuredOutputs,
    shown,
)
from headrace.server.dialects.conversation import MAX_TOOLS, Chat, Customs, FreeText, Mode, Name, ToolChoice, offer
from headrace.server.wire import PART_ITEMS, TEXT_ONLY, AnswerOptions

_WORDS = dict(str="a string", int="an integer", float="a number", bool="a boolean", array="a list", object="an object")
_EXPECTED = re.compile(
    r"Expected `(?P<kinds>.+?)`(?:, got `(?P<got>\w+)`| (?P<length>of length )?(?P<bound>[<>]=?) (?P<limit>\S+))"
)
_PLACE = re.compile(r"(?P<said>.*?)(?: - at (?P<key>`key` in )?`\$(?P<path>.*?)(?P<member>\[\.\.\.\])?`)?$", re.S)
_STEP = re.compile(r"\[(\d+)\]|\.(\w+)")


def read(kind: Any, value: Any, where: str = "", *, strict: bool = True) -> Any:
    """``where``: what the client calls the value; "" for a body. ``strict``: numbers are no texts. Raises
    InvalidRequest."""
    try:
        return msgspec.convert(value, kind, strict=strict, str_keys=True)
    except msgspec.ValidationError as error:
        raise _translated(kind, value, where, str(error)) from None


def _translated(kind: Any, value: Any, where: str, text: str) -> InvalidRequest:
    found = _PLACE.match(text)
    assert found is not None, text
    said, path = found["said"], found["path"] or ""
    place = (where + path).lstrip(".")
    given, nodes = _looked_up(kind, value, path)
    if said.startswith("Invalid"):
        words = [str(word).lower() for node in nodes for word in node.get("enum", ()) if word is not None]
        part = place.removesuffix(".type") if path.endswith("].type") or path == ".type" else ""
        return _unknown_word(place, part, given, words)
    if said.startswith("Object"):
        name = said.partition("`")[2].rstrip("`")[:100]
        return _wrong_member(
            f"{place}.{name}".lstrip("."),
            "missing" in said,
            [name for node in nodes for name in node.get("properties", ())],
        )
    if found["key"] or found["member"]:
        return _unexpected(place, f"{'a key' if found['key'] else 'a value'} of {place}", said, None)
    return _unexpected(place, place, said, given)


def _wrong_member(name: str, missing: bool, known: list[str]) -> InvalidRequest:
    if missing:
        return InvalidRequest(f"{name} is missing; it is required.", param=name, code="missing_required_parameter")
    others = f" or use {', '.join(known)}" if known else ""
    return InvalidRequest(f"{name} is not supported; leave it out{others}.", param=name, code="unsupported_parameter")


def _unexpected(param: str, name: str, said: str, given: Any) -> InvalidRequest:
    """``given``: the value; None where it is not known."""
    found = _EXPECTED.match(said)
    if found is None:  # a number beyond what floats and 64 bits hold
        return InvalidRequest(f"{name} is out of range; give a smaller number.", param=param)
    wanted = " or ".join(_WORDS[kind] for kind in found["kinds"].split(" | ") if kind in _WORDS)
    if found["got"]:
        what = shown(given) if isinstance(given, str) else _WORDS.get(found["got"], "null")
        return InvalidRequest(f"{name} must be {wanted}, not {what}.", param=param, code="invalid_type")
    limit = f"at {'most' if '<' in found['bound'] else 'least'} {found['limit']}"
    if found["length"]:
        unit = "characters" if found["kinds"] == "str" else "entries"
        return InvalidRequest(f"{name} has {len(given)} {unit}; give {limit}.", param=param)
    rule = "must be" if given is None else f"is {shown(given)}; give"
    return InvalidRequest(f"{name} {rule} {wanted} of {limit}.", param=param)


def _unknown_word(place: str, part: str, given: Any, taken: list[str]) -> InvalidRequest:
    """``part``: what is of that type, where the type says what it is."""
    if part:
        kinds = ", ".join(taken)
        return InvalidRequest(
            f"{part} is of type {given[:40]!r}; this server takes {kinds} here.", param=part, code="unsupported_content"
        )
    return InvalidRequest(f"{place} is {shown(given)}; give {' or '.join(taken)}.", param=place)


@cache
def _schema(kind: Any) -> tuple[Json, Json]:
    """And its parts. Making it takes milliseconds, which every request that is refused would take from the others."""
    (schema,), parts = msgspec.json.schema_components([kind])
    return schema, parts


def _looked_up(kind: Any, value: Any, path: str) -> tuple[Any, list[Json]]:
    """What stands at that path, and the schemas of what may stand there."""
    schema, parts = _schema(kind)
    nodes: list[Any] = [schema]
    for index, name in _STEP.findall(path):
        children = [
            node.get("items") if index else node.get("properties", {}).get(name)
            for node in _branches(nodes, parts, value)
        ]
        nodes = [child for child in children if child]
        value = value[int(index)] if index else value[name]
    return value, list(_branches(nodes, parts, value))


def _branches(nodes: Iterable[Json], parts: Json, value: Any) -> Iterator[Json]:
    """The schemas of a value, where it says itself which of several it is that one."""
    for node in nodes:
        held = parts[node["$ref"].rpartition("/")[2]] if "$ref" in node else node
        by_tag = held.get("discriminator", {"propertyName": "", "mapping": {}})
        tag = value.get(by_tag["propertyName"]) if isinstance(value, dict) else None
        one = by_tag["mapping"].get(tag) if isinstance(tag, str) else None
        if "anyOf" in held:
            yield from _branches([{"$ref": one}] if one else held["anyOf"], parts, value)
        else:
            yield held


_MAX_FIELDS = 8

Query = TypeVar("Query", bound=Struct)


def read_query(query: bytes, kind: type[Query]) -> Query:
    """Raises InvalidRequest naming the parameter."""
    try:
        pairs = parse_qsl(query.decode("latin-1"), keep_blank_values=True, max_num_fields=_MAX_FIELDS)
    except ValueError:
        known = ", ".join(kind.__struct_fields__)
        raise InvalidRequest(f"The query has more than {_MAX_FIELDS} parameters; use {known}.", param="query") from None
    names = [name for name, _ in pairs]
    twice = next((name for name in kind.__struct_fields__ if names.count(name) > 1), None)
    if twice is not None:
        raise InvalidRequest(f"{twice} is given more than once; give it once.", param=twice)
    found: Query = read(kind, dict(pairs), strict=False)
    return found


_ID_FIELDS = frozenset(("prompt", "tokens", "allowed_token_ids"))  # whose readers take packed ids
# Objects of ours, of which a null member asks for nothing. What others hold is the template's, or the client's own.
OBJECTS = frozenset(("stream_options", "structured_outputs", "text", "reasoning", "thinking", "output_config"))

_LARGEST = 2**31 - 1
Label = Annotated[str, Meta(max_length=4096)]
TokenId = Annotated[int, Meta(ge=0, le=_LARGEST)]
Ids = Annotated[
    Any, Meta(extra_json_schema={"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": _LARGEST}})
]  # may be packed

_TEXT, _ID = {"type": "string"}, {"type": "integer", "minimum": 0, "maximum": _LARGEST}


def many(item: Given, most: int) -> Json:
    """The schema of a list of these."""
    return {"type": "array", "minItems": 1, "maxItems": most, "items": item}


def prompts_schema(most: int) -> Json:
    """Of what ``read_prompts`` takes."""
    ids = {"type": "array", "minItems": 1, "items": _ID}
    return {"anyOf": [_TEXT, ids, many(_TEXT, most), many(ids, most)]}


def texts_schema(most: int) -> Json:
    return {"anyOf": [_TEXT, many(_TEXT, most)]}


TOLD = tomllib.loads(Path(__file__).with_name("fields.toml").read_text(encoding="utf-8"))


@dataclass(frozen=True, slots=True)
class Refused:
    """A field that is known elsewhere and not supported here: an error, unless its value asks for nothing."""

    instead: str
    unless: Sequence[Any] = ()
    code: str = "unsupported_parameter"

    def check(self, name: str, value: Any) -> None:
        if value is not None and not any(type(value) is type(neutral) and value == neutral for neutral in self.unless):
            raise InvalidRequest(f"{name} is not supported: {self.instead}.", param=name, code=self.code)


class Body(Struct):
    """The fields of a route. Null says the same as leaving a field out: it is gone before the struct is made."""

    also: ClassVar[tuple[str, ...]] = ()  # tables of fields.toml, beside those that bear its name and its bases'
    refused: ClassVar[dict[str, Refused]] = {}  # what stands in these
    one_of: ClassVar[tuple[str, ...]] = ()  # fields of which exactly one is given
    aliases: ClassVar[Mapping[str, str]] = {}  # other names of fields, where these are not given by their own

    def __init_subclass__(cls) -> None:
        tables = [name for each in reversed(cls.__mro__) for name in (*vars(each).get("also", ()), each.__name__)]
        entries = {name: entry for table in tables for name, entry in TOLD["refused"].get(table, {}).items()}
        cls.refused = {name: Refused(**({"instead": e} if isinstance(e, str) else e)) for name, e in entries.items()}

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """All that are known, taken or not."""
        return (*cls.__struct_fields__, *cls.refused)

    @classmethod
    def read(cls, raw: Given) -> Self:
        """Raises InvalidRequest naming the field."""
        taken, given = cls.__struct_fields__, {}
        for called, value in raw.items():
            meant = cls.aliases.get(called, called)
            name = called if meant in raw else meant
            if name in taken:
                if value is not None:
                    given[name] = _plain(name, value)
            elif name in cls.refused:
                cls.refused[name].check(name, value)
            else:
                raise InvalidRequest(
                    f"{name[:100]!r} is not a field of this route; leave it out or check its spelling.",
                    param=name[:100],
                    code="unknown_parameter",
                )
        body: Self = read(cls, given)
        return body


def _plain(name: str, value: Any) -> Any:
    if isinstance(value, array) and name not in _ID_FIELDS:
        return value.tolist()
    if name in OBJECTS and isinstance(value, dict):
        return {key: member for key, member in value.items() if member is not None}
    return value


def check_count(name: str, count: int, most: int) -> None:
    if count > most:
        raise InvalidRequest(f"{name} holds {count} entries; send at most {most} at once.", param=name)


def read_prompts(name: str, given: Any, most: int) -> list[str | array[int]]:
    """One text, one list of ids, or a list of either (not both kinds)."""
    if isinstance(given, str):
        return [given]
    if not isinstance(given, list | array) or not given:
        told = f"{name} must be a text, token ids, or a list of either, and not empty."
        raise InvalidRequest(told, param=name, code="invalid_type")
    if isinstance(given[0], int):
        return [read_ids(name, given)]
    check_count(name, len(given), most)
    if isinstance(given[0], str):
        if not all(isinstance(each, str) for each in given):
            raise InvalidRequest(f"{name} mixes texts with something else; give texts alone.", param=name)
        return list(given)
    return [read_ids(name, each) for each in given]


def read_ids(name: str, value: Any) -> array[int]:
    """The ids without their objects: what takes the list apart, a part at a time, leaves the interpreter to the event
    loop in between."""
    if isinstance(value, array):
        return value
    if not isinstance(value, list):
        raise _no_ids(name)
    ids: array[int] = array("i")
    for start in range(0, len(value), PART_ITEMS):
        part = value[start : start + PART_ITEMS]
        if set(map(type, part)) != {int}:
            raise _no_ids(name)
        if not -(2**31) <= min(part) <= max(part) < 2**31:
            raise InvalidRequest(
                f"{name} holds an id that is no 32-bit integer; give the model's own token ids.", param=name
            )
        ids.extend(part)
    while value:
        del value[-PART_ITEMS:]
    return ids


def _no_ids(name: str) -> InvalidRequest:
    return InvalidRequest(f"{name} must be a list of token ids (integers); check its items.", param=name)


Read = TypeVar("Read", bound="GeneratingBody")
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
MAX_SALT = 1024  # characters; the engine takes some more, for it gets the tenant's name, too
MAX_USER = 256  # characters that tell users apart
EXPECTED_NAMES = {"ttft": "expected_ttft", "tpot": "expected_tpot", "reading_speed": "reading_speed"}

# What a number may be that SamplingParams or Expectations check, for every route and for Python.
NUMBERS: Mapping[str, Bounds] = {
    **BOUNDS, **{theirs: EXPECTED[ours] for ours, theirs in EXPECTED_NAMES.items()},
    "max_completion_tokens": BOUNDS["max_tokens"], "max_output_tokens": BOUNDS["max_tokens"], "top_logprobs": BOUNDS["logprobs"],
}  # fmt: skip

_NAMED = {
    "additionalProperties": False,
    "properties": {name: {"type": "integer", "minimum": 1} for name in RepetitionDetection.__dataclass_fields__},
}
Word = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_LENGTH)]
Stops = Annotated[list[Word], Meta(max_length=MAX_STOP_STRINGS)]
Bias = Annotated[
    dict[TokenId, Annotated[float, Meta(ge=-100, le=100)]],
    Meta(max_length=MAX_ID_ENTRIES, extra_json_schema={"propertyNames": {"pattern": "^[0-9]{1,10}$"}}),
]
Count = Annotated[int, Meta(ge=0, le=_LARGEST)]
Priority = Annotated[int, Meta(ge=-(2**31), le=_LARGEST)]
Truncate = Annotated[int, Meta(ge=-1, le=_LARGEST, extra_json_schema={"not": {"const": 0}})]
Salt = Annotated[str, Meta(max_length=MAX_SALT)]
Variables = Annotated[Json, Meta(max_length=64)]  # of a chat template


class Structured(Struct, forbid_unknown_fields=True):
    json: Json | str | bool | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class ObjectFormat(Struct, tag="json_object"):
    pass


class SchemaFormat(Struct, tag="json_schema"):
    schema: Json


Format = FreeText | ObjectFormat | SchemaFormat


class Described(Struct):
    schema: Json


class DescribedFormat(Struct, tag="json_schema"):
    json_schema: Described


class StreamOptions(Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None
    continuous_usage_stats: bool | None = None


class Named(Struct):
    name: Name


class FunctionChoice(Struct, tag="function"):
    """Chat completions have the name inside of an object, responses beside the type."""

    function: Named | None = None
    name: Name | None = None


class CustomChoice(Struct, tag="custom"):
    custom: Named | None = None
    name: Name | None = None


ToolNames = Annotated[list[FunctionChoice | CustomChoice], Meta(min_length=1, max_length=MAX_TOOLS)]


class AllowedTools(Struct):
    tools: ToolNames | None = None
    mode: Literal["auto", "required"] = "auto"


class AllowedChoice(AllowedTools, tag="allowed_tools"):
    """As above, nested or not."""

    allowed_tools: AllowedTools | None = None


Choice = Literal["auto", "none", "required"] | FunctionChoice | CustomChoice | AllowedChoice


class GeneratingBody(Body):
    """The fields of every route that generates. Where None is the default, it is the model's or the server's."""

    model: str | None = None
    stream: bool = False
    logit_bias: Bias | None = None
    priority: Priority = 0
    expected_ttft: float | None = None
    expected_tpot: float | None = None
    reading_speed: float | None = None
    cache_salt: Salt = ""
    truncate_prompt_tokens: Truncate | None = None
    explain: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_ID_ENTRIES)] = []
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    skip_special_tokens: bool = True
    bad_words: Annotated[list[Word], Meta(max_length=MAX_BAD_WORDS)] = []
    allowed_token_ids: Annotated[Ids, Meta(extra_json_schema={"minItems": 1, "maxItems": 2**18})] | None = None
    repetition_detection: Annotated[bool | dict[str, int], Meta(extra_json_schema=_NAMED)] | None = None
    speculative: bool | None = None
    structured_outputs: Structured | None = None
    user: Label = ""
    metadata: Json = {}
    prompt_cache_key: Label = ""
    safety_identifier: Label = ""
    service_tier: Label = ""

    format_name: ClassVar[str] = "response_format"  # of the API's own field that says what the answer must be
    wire_names: ClassVar[Mapping[str, str]] = {}  # what clients call what SamplingParams call otherwise

    @property
    def limit_name(self) -> str | None:
        """Of the field that limits the answer; None: a default does, which may shrink to what fits."""
        names = ("max_completion_tokens", "max_output_tokens", "max_tokens")
        return next((name for name in names if getattr(self, name, None) is not None), None)

    @property
    def grammar_name(self) -> str:
        """Of the field that says what the answer must be."""
        return self.format_name if self.structured_outputs is None else "structured_outputs"

    @property
    def user_name(self) -> str:
        """Whom the client asks for: by OpenAI's field, or Anthropic's in metadata."""
        name = self.user or self.metadata.get("user_id")
        return name[:MAX_USER] if isinstance(name, str) else ""


class OlderBody(GeneratingBody, kw_only=True):
    """The fields of OpenAI's two older routes."""

    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool = False
    n: int = 1
    stop: Word | Stops | None = None
    response_format: FreeText | ObjectFormat | DescribedFormat | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """What a chat template gets. ``tools`` is None where it shall not see any; ``choice`` says what is made of them."""

    messages: Chat
    tools: list[Json] | None
    choice: ToolChoice
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: Json


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest(Generic[Read]):
    """A checked body of a route that generates: the fields themselves, and what is made of several of them."""

    body: Read
    params: SamplingParams
    expects: Expectations
    options: AnswerOptions = TEXT_ONLY


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest(GenerationRequest[Read]):
    """``echo``: the answer begins with the message that it continues. ``thinking_budget``: tokens; by the field that
    all routes have, it is refused where the model's reasoning format is unknown."""

    conversation: Conversation
    echo: bool = False
    thinking_budget: int | None = None


def choose(
    choice: Any, tools: list[Json], *, parallel: bool, customs: Customs, place: str = "function.parameters"
) -> tuple[list[Json] | None, ToolChoice]:
    """What the model is shown, and what is made of it. Raises InvalidRequest. ``place``: of a function's schema in a
    tool."""
    allowed = None
    if isinstance(choice, AllowedChoice):
        held = choice.allowed_tools or choice
        allowed, choice = frozenset(map(_name_of, held.tools or [FunctionChoice()])), held.mode
    named = "" if isinstance(choice, str) else _name_of(choice)
    asked = ToolChoice(Mode.NAMED, named, parallel=False) if named else ToolChoice(Mode(choice), parallel=parallel)
    return offer(asked, tools, allowed=allowed, place=place, customs=customs)


def _name_of(choice: FunctionChoice | CustomChoice) -> str:
    held = choice.function if isinstance(choice, FunctionChoice) else choice.custom
    name = choice.name if held is None else held.name
    if name is None:
        raise InvalidRequest(
            "tool_choice names no function; give its name.", param="tool_choice.name", code="missing_required_parameter"
        )
    return name


def template_variables(effort: Effort | None, given: Json) -> Json:
    """How much to think is the template's to say to the model. Of what is ``given`` besides nothing may be ours."""
    check_template_variables(given)
    return {
        **({} if effort is None else {"enable_thinking": False} if effort == "none" else {"reasoning_effort": effort}),
        **given,
    }


# What is handed on as it is; a field of another meaning or name is given beside them.
_BESIDE = ("logprobs", "max_tokens", "structured_outputs")
_SAMPLED = tuple(
    name for name in OlderBody.__struct_fields__ if name in SamplingParams.__dataclass_fields__ and name not in _BESIDE
)


def asked(body: Read, defaults: Given, **values: Any) -> Json:
    """What every GenerationRequest has, of the model's ``defaults``, a body's own fields, and ``values`` beside them.
    Raises InvalidRequest naming the field as the client wrote it."""
    given = {**{name: getattr(body, name, None) for name in _SAMPLED}, **values}
    own = {name: value for name, value in given.items() if value is not None}
    if body.truncate_prompt_tokens == 0:
        raise InvalidRequest(
            "truncate_prompt_tokens is 0; give at least 1, or -1 for as many as fit.", param="truncate_prompt_tokens"
        )
    try:
        params = SamplingParams(**{**model_defaults(defaults), **own}, structured_outputs=_structured_outputs(body))
        expects = Expectations(**{ours: getattr(body, theirs) for ours, theirs in EXPECTED_NAMES.items()})
    except InvalidRequest as error:
        raise _renamed(
            error, {"max_tokens": body.limit_name or "max_tokens", **EXPECTED_NAMES, **body.wire_names}
        ) from None
    return {"body": body, "params": params, "expects": expects}


def _renamed(error: InvalidRequest, wire_names: Mapping[str, str]) -> InvalidRequest:
    ours = error.param or ""
    theirs = wire_names.get(ours, ours)
    return InvalidRequest(error.message.replace(ours, theirs, 1), param=theirs, code=error.code)


def _format(body: GeneratingBody) -> Format | DescribedFormat | None:
    owner, _, name = body.format_name.rpartition(".")
    found: Format | DescribedFormat | None = getattr(getattr(body, owner) if owner else body, name, None)
    return found


def _structured_outputs(body: GeneratingBody) -> StructuredOutputs | None:
    given, format = body.structured_outputs, _format(body)
    if given is not None and not isinstance(format, FreeText | None):
        raise InvalidRequest(
            f"structured_outputs and {body.format_name} both say what the answer must be; give one of them.",
            param=body.format_name,
        )
    if given is not None:
        return StructuredOutputs(**{name: value for name, value in structs.asdict(given).items() if value is not None})
    if isinstance(format, FreeText | None):
        return None
    if isinstance(format, ObjectFormat):
        return StructuredOutputs(json_object=True)
    try:
        schema = format.schema if isinstance(format, SchemaFormat) else format.json_schema.schema
        return StructuredOutputs(json=schema)  # type: ignore[arg-type]  # taken as users write it
    except InvalidRequest as error:
        raise InvalidRequest(
            error.message.replace("structured_outputs.json", f"{body.format_name}'s schema"), param=body.format_name
        ) from None


def older_options(body: OlderBody, *, logprobs: bool) -> AnswerOptions:
    if body.prompt_logprobs is not None and body.stream:
        raise InvalidRequest("prompt_logprobs is not given in streams; set stream to false.", param="prompt_logprobs")
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options is given without stream; set stream to true.", param="stream_options")
    streamed = body.stream_options or StreamOptions()
    continuous = bool(streamed.continuous_usage_stats)
    if continuous and streamed.include_usage is False:
        raise InvalidRequest(
            "stream_options.continuous_usage_stats needs include_usage; set it to true.", param="stream_options"
        )
    return AnswerOptions(
        logprobs=logprobs, prompt_logprobs=body.prompt_logprobs is not None, token_ids=body.return_token_ids,
        include_usage=continuous or bool(streamed.include_usage), continuous_usage=continuous,
    )  # fmt: skip
