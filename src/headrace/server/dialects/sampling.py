"""What the routes that generate share: the fields of all of them and of OpenAI's two older ones, and what is made of
these.

What lives here: the way from fields to SamplingParams and what else a request holds. What may not: the bounds of
sampling parameters (sampling_params.py checks them once for every route), fields of a single route.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeVar

from msgspec import Meta, Struct, structs

from headrace.engine.template import check_template_variables
from headrace.errors import InvalidRequest
from headrace.sampling_params import (
    BOUNDS,
    EXPECTED,
    MAX_BAD_WORDS,
    MAX_ID_ENTRIES,
    MAX_STOP_LENGTH,
    MAX_STOP_STRINGS,
    Bounds,
    Expectations,
    RepetitionDetection,
    SamplingParams,
    StructuredOutputs,
)
from headrace.server.answers import TEXT_ALONE, Shape
from headrace.server.dialects.body import Body, Ids, Label, Refused, TokenId, refused
from headrace.server.dialects.conversation import MAX_TOOLS, Chat, Customs, FreeText, Mode, ToolChoice, offer

Read = TypeVar("Read", bound="GeneratingBody")
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
MAX_SALT = 1024  # characters; the engine takes some more, for it gets the tenant's name, too
MAX_USER = 256  # characters that tell users apart
EXPECTED_NAMES = {"ttft": "expected_ttft", "tpot": "expected_tpot", "reading_speed": "reading_speed"}

# A model's generation_config.json and the server's own defaults, by the names of SamplingParams.
_DEFAULTS = {
    **{
        name: name
        for name in (
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "repetition_penalty",
            "repetition_detection",
            "speculative",
        )
    },
    "max_new_tokens": "max_tokens",
}

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
Bias = dict[TokenId, Annotated[float, Meta(ge=-100, le=100)]]
Budget = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Variables = Annotated[dict[str, Any], Meta(max_length=64)]  # of a chat template


class Structured(Struct, forbid_unknown_fields=True):
    json: dict[str, Any] | str | bool | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class ObjectFormat(Struct, tag="json_object"):
    pass


class SchemaFormat(Struct, tag="json_schema"):
    schema: dict[str, Any]


Format = FreeText | ObjectFormat | SchemaFormat


class Described(Struct):
    schema: dict[str, Any]


class DescribedFormat(Struct, tag="json_schema"):
    json_schema: Described


class StreamOptions(Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None
    continuous_usage_stats: bool | None = None


FunctionName = Annotated[str, Meta(min_length=1)]


class Named(Struct):
    name: FunctionName


class FunctionChoice(Struct, tag="function"):
    """Chat completions have the name inside of an object, responses beside the type."""

    function: Named | None = None
    name: FunctionName | None = None


class CustomChoice(Struct, tag="custom"):
    custom: Named | None = None
    name: FunctionName | None = None


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
    logit_bias: (
        Annotated[
            Bias, Meta(max_length=MAX_ID_ENTRIES, extra_json_schema={"propertyNames": {"pattern": "^[0-9]{1,10}$"}})
        ]
        | None
    ) = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] = 0
    expected_ttft: float | None = None
    expected_tpot: float | None = None
    reading_speed: float | None = None
    cache_salt: Annotated[str, Meta(max_length=MAX_SALT)] = ""
    truncate_prompt_tokens: (
        Annotated[int, Meta(ge=-1, le=2**31 - 1, extra_json_schema={"not": {"const": 0}})] | None
    ) = None
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
    metadata: dict[str, Any] = {}
    prompt_cache_key: Label = ""
    safety_identifier: Label = ""
    service_tier: Label = ""

    format_name: ClassVar[str] = "response_format"  # of the API's own field that says what the answer must be
    wire_names: ClassVar[Mapping[str, str]] = {}  # what clients call what SamplingParams call otherwise
    refused: ClassVar[Mapping[str, Refused]] = refused("GeneratingBody")

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

    refused: ClassVar[Mapping[str, Refused]] = refused("GeneratingBody", "OlderBody")


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """What a chat template gets. ``tools`` is None where it shall not see any; ``choice`` says what is made of them."""

    messages: Chat
    tools: list[dict[str, Any]] | None
    choice: ToolChoice
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest(Generic[Read]):
    """A checked body of a route that generates: the fields themselves, and what is made of several of them."""

    body: Read
    params: SamplingParams
    expects: Expectations
    shape: Shape = TEXT_ALONE


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest(GenerationRequest[Read]):
    """``echo``: the answer begins with the message that it continues. ``thinking_budget``: tokens; it is refused where
    nobody knows what reasoning is, if ``needs_reasoning``."""

    conversation: Conversation
    echo: bool = False
    thinking_budget: int | None = None
    needs_reasoning: bool = False


def choose(
    choice: Any, tools: list[dict[str, Any]], *, parallel: bool, customs: Customs, place: str = "function.parameters"
) -> tuple[list[dict[str, Any]] | None, ToolChoice]:
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


def template_variables(effort: Effort | None, given: dict[str, Any]) -> dict[str, Any]:
    """How much to think is the template's to say to the model. Of what is ``given`` besides nothing may be ours."""
    check_template_variables(given)
    return {
        **({} if effort is None else {"enable_thinking": False} if effort == "none" else {"reasoning_effort": effort}),
        **given,
    }


def model_defaults(defaults: Mapping[str, Any]) -> dict[str, Any]:
    return {ours: defaults[theirs] for theirs, ours in _DEFAULTS.items() if defaults.get(theirs) is not None}


# What is handed on as it is; a field of another meaning or name is given beside them.
_BESIDE = ("logprobs", "max_tokens", "structured_outputs")
_SAMPLED = tuple(
    name for name in OlderBody.__struct_fields__ if name in SamplingParams.__dataclass_fields__ and name not in _BESIDE
)


def asked(body: Read, defaults: Mapping[str, Any], **values: Any) -> dict[str, Any]:
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


def older_shape(body: OlderBody, *, logprobs: bool) -> Shape:
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
    return Shape(
        logprobs=logprobs, prompt_logprobs=body.prompt_logprobs is not None, token_ids=body.return_token_ids,
        include_usage=continuous or bool(streamed.include_usage), continuous_usage=continuous,
    )  # fmt: skip


def thinking_options(budget: int | None, own: int | None = None) -> dict[str, Any]:
    """``budget``: by the field that all routes have; ``own``: in the API's own, which asks for nothing where nobody
    reasons."""
    return {"thinking_budget": own if budget is None else budget, "needs_reasoning": budget is not None}
