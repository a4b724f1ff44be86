"""What all generating routes share: sampling parameters, how an answer is written, what a chat template gets.

What lives here: the way from fields to SamplingParams, AnswerOptions and TemplateOptions. What may not: the bounds of sampling
parameters (sampling_params.py checks them once for every route), fields of a single route.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace.errors import InvalidRequest
from headrace.sampling_params import Expectations, SamplingParams, shown
from headrace.server.messages import check_template_kwargs, read_customs, read_tools
from headrace.server.protocol.body import Body, check_size
from headrace.server.protocol.structured import format_name, read_structured_outputs
from headrace.server.tools import ToolChoice, offer

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
MAX_SALT = 1024  # characters; the engine takes some more, for it gets the tenant's name, too
MAX_USER = 256  # characters that tell users apart
EXPECTED = {"ttft": "expected_ttft", "tpot": "expected_tpot", "reading_speed": "reading_speed"}

# A model's generation_config.json and the server's own defaults, by the names of SamplingParams.
_SAME = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "repetition_detection")
_DEFAULTS = {name: name for name in _SAME} | {"max_new_tokens": "max_tokens"}


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerOptions:
    """How the answer is written, for both generating routes."""

    model: str | None
    stream: bool
    include_usage: bool
    continuous_usage: bool  # in every chunk
    return_token_ids: bool
    prompt_logprobs: bool
    priority: int
    cache_salt: str
    user: str  # as the client names its own
    expects: Expectations
    truncate_prompt_tokens: int | None  # -1: as many as fit
    limit_name: str | None  # of the field that limits the answer; None: a default, which may shrink to what fits
    explain: bool = False
    thinking_budget: int | None = None  # tokens
    needs_reasoning: bool = False  # the budget is refused where nobody knows what reasoning is
    grammar_name: str = "structured_outputs"  # of the field that says what the answer must be
    tools: tuple[tuple[str, str], ...] = ()  # of which a grammar is made: where each schema stands, and the schema


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateOptions:
    """What a chat template gets besides messages. ``tools`` is None where it shall not see any; ``choice`` says what is made of them."""

    tools: list[dict[str, Any]] | None
    choice: ToolChoice
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: dict[str, Any]


def template_options(body: Body) -> TemplateOptions:
    """For the routes that take tools and variables as chat completions do."""
    tools = read_tools(body.get("tools"))
    choice, parallel, customs = body.get("tool_choice", "auto"), body.get("parallel_tool_calls", True), read_customs(body.get("tools"))
    tools, read = offer(choice, tools, parallel=parallel, customs=customs)
    continues = body.get("continue_final_message", False)
    return TemplateOptions(
        tools=tools,
        choice=read,
        add_generation_prompt=body.get("add_generation_prompt", not continues),
        continue_final_message=continues,
        variables={
            **effort_variables("reasoning_effort", body.get("reasoning_effort")),
            **check_template_kwargs(body.get("chat_template_kwargs")),
        },
    )


def effort_variables(where: str, effort: Any) -> dict[str, Any]:
    """How much to think is the template's to say to the model."""
    if effort is None:
        return {}
    if effort not in EFFORTS:
        raise InvalidRequest(f"{where} must be one of {', '.join(EFFORTS)}.", param=where)
    return {"enable_thinking": False} if effort == "none" else {"reasoning_effort": effort}


def model_defaults(defaults: Mapping[str, Any]) -> dict[str, Any]:
    return {ours: defaults[theirs] for theirs, ours in _DEFAULTS.items() if defaults.get(theirs) is not None}


def sampling_params(body: Body, values: dict[str, Any], wire_names: Mapping[str, str], *, echo_logprobs: bool = False) -> SamplingParams:
    """SamplingParams, with its errors renamed to what the client wrote."""
    check_size(wire_names.get("max_tokens", "max_tokens"), values.get("max_tokens"))
    values["prompt_logprobs"] = body.get("prompt_logprobs")
    if echo_logprobs and values["prompt_logprobs"] is None:
        values["prompt_logprobs"] = values.get("logprobs")
    if "logit_bias" in body:
        values["logit_bias"] = _read_logit_bias(body.get("logit_bias"))
    values["structured_outputs"] = read_structured_outputs(body)
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
        check_size("logit_bias", bias)
    return {int(key): bias for key, bias in value.items()}


def answer_options(body: Body) -> AnswerOptions:
    stream = body.get("stream", False)
    streamed = _stream_options(body, stream)
    options = AnswerOptions(
        model=body.get("model"),
        stream=stream,
        include_usage=streamed.get("include_usage", streamed.get("continuous_usage_stats", False)),
        continuous_usage=streamed.get("continuous_usage_stats", False),
        return_token_ids=body.get("return_token_ids", False),
        prompt_logprobs="prompt_logprobs" in body,
        priority=body.get("priority", 0),
        cache_salt=body.get("cache_salt", ""),
        user=_user(body),
        expects=_expectations(body),
        truncate_prompt_tokens=body.get("truncate_prompt_tokens"),
        limit_name=next((name for name in ("max_completion_tokens", "max_output_tokens", "max_tokens") if name in body), None),
        explain=body.get("explain", False),
        thinking_budget=_thinking_budget(body),
        needs_reasoning="thinking_token_budget" in body,
        grammar_name=format_name(body),
    )
    _check_options(options)
    return options


def _thinking_budget(body: Body) -> int | None:
    """By the field that all routes have, or in Anthropic's own."""
    if "thinking_token_budget" in body:
        return read_budget("thinking_token_budget", body.get("thinking_token_budget"))
    return read_budget("thinking.budget_tokens", body.get("thinking", {}).get("budget_tokens"))


def read_budget(name: str, tokens: Any) -> int | None:
    if tokens is None:
        return None
    if type(tokens) is not int:
        raise InvalidRequest(f"{name} must be an integer.", param=name, code="invalid_type")
    if not 0 <= tokens < 2**31:
        raise InvalidRequest(f"{name} is {shown(tokens)}; give a number of tokens, from 0.", param=name)
    return int(tokens)


def _user(body: Body) -> str:
    """OpenAI's field, or Anthropic's in metadata."""
    name = body.get("user") or body.get("metadata", {}).get("user_id")
    return name[:MAX_USER] if isinstance(name, str) else ""


def _expectations(body: Body) -> Expectations:
    """With errors renamed to what the client wrote."""
    try:
        return Expectations(**{ours: body.get(theirs) for ours, theirs in EXPECTED.items()})
    except InvalidRequest as error:
        ours = str(error.param)
        raise InvalidRequest(error.message.replace(ours, EXPECTED[ours], 1), param=EXPECTED[ours]) from None


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


def _stream_options(body: Body, stream: bool) -> dict[str, bool]:
    given: dict[str, Any] = body.get("stream_options", {})
    if "stream_options" in body and not stream:
        raise InvalidRequest("stream_options is given without stream; set stream to true.", param="stream_options")
    for name, value in given.items():
        if name not in ("include_usage", "include_obfuscation", "continuous_usage_stats"):
            raise InvalidRequest(f"stream_options has no field {name[:100]!r}; leave it out.", param="stream_options", code="unknown_parameter")
        if not isinstance(value, bool):
            raise InvalidRequest(f"stream_options.{name} must be a boolean.", param="stream_options", code="invalid_type")
        if value and name == "include_obfuscation":
            raise InvalidRequest(f"stream_options.{name} is not supported; leave it out.", param="stream_options", code="unsupported_parameter")
    if given.get("continuous_usage_stats") and given.get("include_usage") is False:
        raise InvalidRequest("stream_options.continuous_usage_stats needs include_usage; set it to true.", param="stream_options")
    return given
