"""Wire types: a decoded body becomes a ChatRequest, CompletionRequest, TokenizeRequest or DetokenizeRequest, or an error
that names the field.

What lives here: which fields a route takes and how they map to SamplingParams. What may not: HTTP, the bounds of sampling
parameters (request.py checks them once for every route), rendering of answers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from headrace.errors import InvalidRequest
from headrace.request import SamplingParams
from headrace.server.fields import CHAT, COMPLETION, DETOKENIZE, TOKENIZE, Field, Use
from headrace.server.messages import check_template_kwargs, read_messages, read_tools

MAX_PROMPTS = 1024
MAX_CHOICES = 2048  # prompts x n
MAX_ALLOWED_IDS = 2**20  # prompts x allowed_token_ids: each prompt carries its own to the engine
MAX_LABEL = 4096  # characters of a label
MAX_SALT = 1024  # characters; the engine takes no more
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's
_LARGEST_INTEGER = 2**64

# A model's generation_config.json, by the names of SamplingParams.
_DEFAULTS = {name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")} | {"max_new_tokens": "max_tokens"}

_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
    "array": (list,),
    "object": (dict,),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerOptions:
    """How the answer is written, for both generating routes."""

    model: str | None
    stream: bool
    include_usage: bool
    return_token_ids: bool
    prompt_logprobs: bool
    priority: int
    cache_salt: str
    truncate_prompt_tokens: int | None  # -1: as many as fit
    limit_name: str | None  # of the field that limits the answer; None: a default, which may shrink to what fits


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateOptions:
    """What a chat template gets besides messages. ``tools`` is None where it shall not see any."""

    tools: list[dict[str, Any]] | None
    add_generation_prompt: bool
    variables: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A checked /v1/chat/completions body."""

    messages: list[dict[str, Any]]
    conversation: TemplateOptions
    params: SamplingParams
    options: AnswerOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """A checked /v1/completions body. ``prompts`` holds texts and lists of token ids. ``discard``: the one token that the engine
    makes for max_tokens 0 is not shown.
    """

    prompts: list[str | list[int]]
    echo: bool
    add_special_tokens: bool
    discard: bool
    params: SamplingParams
    options: AnswerOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizeRequest:
    """A checked /tokenize body: a text, or messages."""

    model: str | None
    prompt: str | None
    messages: list[dict[str, Any]] | None
    conversation: TemplateOptions
    add_special_tokens: bool
    return_token_strs: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DetokenizeRequest:
    """A checked /detokenize body."""

    model: str | None
    tokens: list[int]
    skip_special_tokens: bool


class Body:
    """A body whose fields are all known to its route; null means absent."""

    def __init__(self, raw: Mapping[str, Any], fields: Iterable[Field]) -> None:
        self._fields = {field.name: field for field in fields}
        self._values = {name: value for name, value in raw.items() if value is not None}
        unknown = next((name for name in raw if name not in self._fields), None)
        if unknown is not None:
            raise InvalidRequest(
                f"{unknown[:100]!r} is not a field of this route; leave it out or check its spelling.", param=unknown[:100], code="unknown_parameter"
            )
        for name, value in self._values.items():
            _check(self._fields[name], value)

    def get(self, name: str, default: Any = None) -> Any:
        return self._values.get(name, default)

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def require(self, name: str) -> Any:
        if name not in self._values:
            raise InvalidRequest(f"{name} is missing; it is required.", param=name, code="missing_required_parameter")
        return self._values[name]

    def sampling(self) -> dict[str, Any]:
        return {name: value for name, value in self._values.items() if self._fields[name].use is Use.SAMPLING}


def _check(field: Field, value: Any) -> None:
    """Types of everything but sampling parameters, which have a validator of their own."""
    if field.use is Use.REFUSED:
        if not any(type(value) is type(neutral) and value == neutral for neutral in field.neutral):
            raise InvalidRequest(f"{field.name} is not supported: {field.help}.", param=field.name, code="unsupported_parameter")
    elif field.use is Use.SAMPLING:
        _check_size(field.name, value)
    else:
        _check_type(field, value)


def _check_type(field: Field, value: Any) -> None:
    names = (field.schema,) if isinstance(field.schema, str) else field.schema
    accepted = tuple(kind for name in names for kind in _TYPES[name])
    if not isinstance(value, accepted) or (isinstance(value, bool) and "boolean" not in names):
        raise InvalidRequest(f"{field.name} must be {_either(names)}, not {_shown(value)}.", param=field.name, code="invalid_type")
    if field.use is Use.LABEL and isinstance(value, str) and len(value) > MAX_LABEL:
        raise InvalidRequest(f"{field.name} has {len(value)} characters; give at most {MAX_LABEL}.", param=field.name)


def _check_size(name: str, value: Any) -> None:
    """JSON integers have no bound; beyond 64 bits they are nobody's meaning and overflow floats."""
    if isinstance(value, int) and abs(value) > _LARGEST_INTEGER:
        raise InvalidRequest(f"{name} is an integer beyond 64 bits; give a smaller one.", param=name)


def _either(names: tuple[str, ...]) -> str:
    return " or ".join(f"{'an' if name[0] in 'aio' else 'a'} {name}" for name in names)


def _shown(value: Any) -> str:
    words = {bool: "a boolean", int: "an integer", float: "a number", str: "a string", list: "an array", dict: "an object"}
    return words[type(value)]


def parse_chat(raw: Mapping[str, Any], defaults: Mapping[str, Any]) -> ChatRequest:
    """``defaults`` are the model's own sampling defaults. Raises InvalidRequest naming the field."""
    body = Body(raw, CHAT)
    limit_name, limit = _chat_limit(body)
    choice = body.get("tool_choice", "auto")
    if choice not in ("auto", "none"):
        raise InvalidRequest("tool_choice is supported as auto or none only; leave it out.", param="tool_choice", code="unsupported_parameter")
    values = {**_model_defaults(defaults), **body.sampling()}
    if limit is not None:
        values["max_tokens"] = limit
    if body.get("logprobs", False):
        values["logprobs"] = body.get("top_logprobs", 0)
    elif body.get("top_logprobs", 0):
        raise InvalidRequest("top_logprobs is given without logprobs; set logprobs to true.", param="top_logprobs")
    return ChatRequest(
        messages=read_messages(body.require("messages")),
        conversation=_template_options(body, with_tools=choice == "auto"),
        params=_sampling_params(body, values, {"max_tokens": limit_name, "logprobs": "top_logprobs"}),
        options=_options(body),
    )


def _template_options(body: Body, *, with_tools: bool) -> TemplateOptions:
    tools = read_tools(body.get("tools"))
    return TemplateOptions(
        tools=tools if with_tools else None,
        add_generation_prompt=body.get("add_generation_prompt", True),
        variables=check_template_kwargs(body.get("chat_template_kwargs")),
    )


def _chat_limit(body: Body) -> tuple[str, int | None]:
    old, new = body.get("max_tokens"), body.get("max_completion_tokens")
    if old is not None and new is not None and old != new:
        raise InvalidRequest(f"max_tokens is {old} and max_completion_tokens is {new}; give one of them.", param="max_tokens")
    return ("max_tokens", old) if new is None else ("max_completion_tokens", new)


def parse_completion(raw: Mapping[str, Any], defaults: Mapping[str, Any]) -> CompletionRequest:
    """``defaults`` are the model's own sampling defaults. Raises InvalidRequest naming the field."""
    body = Body(raw, COMPLETION)
    echo = body.get("echo", False)
    limit = body.get("max_tokens", _model_defaults(defaults).get("max_tokens", DEFAULT_COMPLETION_TOKENS))
    discard = limit == 0 and echo
    values = {**_model_defaults(defaults), **body.sampling(), "max_tokens": 1 if discard else limit}
    if "logprobs" in body:
        values["logprobs"] = body.get("logprobs")
    params = _sampling_params(body, values, {}, echo_logprobs=echo)
    prompts = _read_prompts(body.require("prompt"))
    if len(prompts) * params.n > MAX_CHOICES:
        raise InvalidRequest(f"{len(prompts)} prompts with n {params.n} make more than {MAX_CHOICES} choices; ask for fewer.", param="n")
    if len(prompts) * len(params.allowed_token_ids or ()) > MAX_ALLOWED_IDS:
        raise InvalidRequest(
            f"{len(prompts)} prompts with {len(params.allowed_token_ids or ())} allowed ids each are too many; send fewer at once.",
            param="allowed_token_ids",
        )
    return CompletionRequest(
        prompts=prompts,
        echo=echo,
        add_special_tokens=body.get("add_special_tokens", True),
        discard=discard,
        params=params,
        options=_options(body),
    )


def _read_prompts(prompt: Any) -> list[str | list[int]]:
    """One text, one list of ids, or a list of either (not both kinds)."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise InvalidRequest("prompt is an empty list; give a text, token ids, or a list of either.", param="prompt")
    if isinstance(prompt[0], int):
        return [_read_ids("prompt", prompt)]
    if len(prompt) > MAX_PROMPTS:
        raise InvalidRequest(f"prompt holds {len(prompt)} prompts; send at most {MAX_PROMPTS} at once.", param="prompt")
    if isinstance(prompt[0], str):
        if not all(isinstance(item, str) for item in prompt):
            raise InvalidRequest("prompt mixes text with something else; give texts alone.", param="prompt")
        return list(prompt)
    return [_read_ids("prompt", item) for item in prompt]


def _read_ids(name: str, value: Any) -> list[int]:
    if not isinstance(value, list) or set(map(type, value)) - {int}:
        raise InvalidRequest(f"{name} must be a list of token ids (integers); check its items.", param=name)
    if value and not -(2**31) <= min(value) <= max(value) < 2**31:
        raise InvalidRequest(f"{name} holds an id that is no 32-bit integer; give the model's own token ids.", param=name)
    return value


def parse_tokenize(raw: Mapping[str, Any]) -> TokenizeRequest:
    """Raises InvalidRequest naming the field."""
    body = Body(raw, TOKENIZE)
    if ("prompt" in body) == ("messages" in body):
        raise InvalidRequest("Give either prompt or messages.", param="prompt", code="missing_required_parameter")
    messages = read_messages(body.get("messages")) if "messages" in body else None
    return TokenizeRequest(
        model=body.get("model"),
        prompt=body.get("prompt"),
        messages=messages,
        conversation=_template_options(body, with_tools=True),
        add_special_tokens=body.get("add_special_tokens", messages is None),
        return_token_strs=body.get("return_token_strs", False),
    )


def parse_detokenize(raw: Mapping[str, Any]) -> DetokenizeRequest:
    """Raises InvalidRequest naming the field."""
    body = Body(raw, DETOKENIZE)
    return DetokenizeRequest(
        model=body.get("model"), tokens=_read_ids("tokens", body.require("tokens")), skip_special_tokens=body.get("skip_special_tokens", False)
    )


def _model_defaults(defaults: Mapping[str, Any]) -> dict[str, Any]:
    return {ours: defaults[theirs] for theirs, ours in _DEFAULTS.items() if defaults.get(theirs) is not None}


def _sampling_params(body: Body, values: dict[str, Any], wire_names: Mapping[str, str], *, echo_logprobs: bool = False) -> SamplingParams:
    """SamplingParams, with its errors renamed to what the client wrote."""
    _check_size("max_tokens", values.get("max_tokens"))
    values["prompt_logprobs"] = body.get("prompt_logprobs")
    if echo_logprobs and values["prompt_logprobs"] is None:
        values["prompt_logprobs"] = values.get("logprobs")
    if "logit_bias" in body:
        values["logit_bias"] = _read_logit_bias(body.get("logit_bias"))
    try:
        return SamplingParams(**values)
    except InvalidRequest as error:
        name = wire_names.get(error.param or "", error.param)
        if name == error.param:
            raise
        raise InvalidRequest(error.message.replace(str(error.param), str(name), 1), param=name, code=error.code) from None


def _read_logit_bias(value: dict[str, Any]) -> dict[int, Any]:
    """JSON keys are strings; the engine's are token ids."""
    for key, bias in value.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise InvalidRequest(f"logit_bias has the key {key[:40]!r}; give token ids.", param="logit_bias")
        _check_size("logit_bias", bias)
    return {int(key): bias for key, bias in value.items()}


def _options(body: Body) -> AnswerOptions:
    stream = body.get("stream", False)
    options = AnswerOptions(
        model=body.get("model"),
        stream=stream,
        include_usage=_include_usage(body, stream),
        return_token_ids=body.get("return_token_ids", False),
        prompt_logprobs="prompt_logprobs" in body,
        priority=body.get("priority", 0),
        cache_salt=body.get("cache_salt", ""),
        truncate_prompt_tokens=body.get("truncate_prompt_tokens"),
        limit_name=next((name for name in ("max_completion_tokens", "max_tokens") if name in body), None),
    )
    _check_options(options)
    return options


def _check_options(options: AnswerOptions) -> None:
    if options.prompt_logprobs and options.stream:
        raise InvalidRequest("prompt_logprobs is not given in streams; set stream to false.", param="prompt_logprobs")
    if not -(2**31) <= options.priority < 2**31:
        raise InvalidRequest(f"priority is {options.priority}; give an integer of 32 bits.", param="priority")
    if len(options.cache_salt) > MAX_SALT:
        raise InvalidRequest(f"cache_salt has {len(options.cache_salt)} characters; give at most {MAX_SALT}.", param="cache_salt")
    keep = options.truncate_prompt_tokens
    if keep is not None and keep != -1 and not 1 <= keep < 2**31:
        raise InvalidRequest(f"truncate_prompt_tokens is {keep}; give at least 1, or -1 for as many as fit.", param="truncate_prompt_tokens")


def _include_usage(body: Body, stream: bool) -> bool:
    given = body.get("stream_options")
    if given is None:
        return False
    if not stream:
        raise InvalidRequest("stream_options is given without stream; set stream to true.", param="stream_options")
    for name, value in given.items():
        if name not in ("include_usage", "include_obfuscation", "continuous_usage_stats"):
            raise InvalidRequest(f"stream_options has no field {name[:100]!r}; leave it out.", param="stream_options", code="unknown_parameter")
        if not isinstance(value, bool):
            raise InvalidRequest(f"stream_options.{name} must be a boolean.", param="stream_options", code="invalid_type")
        if value and name != "include_usage":
            raise InvalidRequest(f"stream_options.{name} is not supported; leave it out.", param="stream_options", code="unsupported_parameter")
    return bool(given.get("include_usage", False))
