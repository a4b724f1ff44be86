"""/v1/completions: a decoded body becomes a CompletionRequest, or an error that names the field.

What lives here: this route's own fields, prompts of every form. What may not: what routes share (sampling.py).
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace.errors import InvalidRequest
from headrace.sampling_params import SamplingParams
from headrace.server.fields import COMPLETION
from headrace.server.protocol.body import Body, read_ids
from headrace.server.protocol.sampling import AnswerOptions, answer_options, model_defaults, sampling_params

MAX_PROMPTS = 1024
MAX_CHOICES = 2048  # prompts x n
MAX_ALLOWED_IDS = 2**20  # prompts x allowed_token_ids: each prompt carries its own to the engine
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """A checked /v1/completions body. ``prompts`` holds texts and token ids. ``discard``: the one token that the engine
    makes for max_tokens 0 is not shown.
    """

    prompts: list[str | array[int]]
    echo: bool
    add_special_tokens: bool
    discard: bool
    params: SamplingParams
    options: AnswerOptions


def parse_completion(raw: Mapping[str, Any], defaults: Mapping[str, Any]) -> CompletionRequest:
    """``defaults`` are the model's own sampling defaults. Raises InvalidRequest naming the field."""
    body = Body(raw, COMPLETION)
    echo = body.get("echo", False)
    limit = body.get("max_tokens", model_defaults(defaults).get("max_tokens", DEFAULT_COMPLETION_TOKENS))
    discard = limit == 0 and echo
    values = {**model_defaults(defaults), **body.sampling(), "max_tokens": 1 if discard else limit}
    if "logprobs" in body:
        values["logprobs"] = body.get("logprobs")
    params = sampling_params(body, values, {}, echo_logprobs=echo)
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
        options=answer_options(body),
    )


def _read_prompts(prompt: Any) -> list[str | array[int]]:
    """One text, one list of ids, or a list of either (not both kinds)."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise InvalidRequest("prompt is an empty list; give a text, token ids, or a list of either.", param="prompt")
    if isinstance(prompt[0], int):
        return [read_ids("prompt", prompt)]
    if len(prompt) > MAX_PROMPTS:
        raise InvalidRequest(f"prompt holds {len(prompt)} prompts; send at most {MAX_PROMPTS} at once.", param="prompt")
    if isinstance(prompt[0], str):
        if not all(isinstance(item, str) for item in prompt):
            raise InvalidRequest("prompt mixes text with something else; give texts alone.", param="prompt")
        return list(prompt)
    return [read_ids("prompt", item) for item in prompt]
