"""``--speculative-config``: JSON, by the names that vLLM's users know.

What lives here: its fields, their bounds and errors. What may not: models, torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from headrace.config import QUANTIZATION
from headrace.errors import ConfigError
from headrace.speculative.tree import MOST

METHODS = ("ngram", "suffix", "draft_model", "eagle", "eagle3", "mtp")
HEADS = ("eagle", "eagle3", "mtp")  # that go on from the target's hidden states
MOST_DRAFTS = 16  # a row and step: what verification was tested with
DEVICES = ("cpu", "cuda")
UNNAMED = "-"  # a draft model that a simulation knows nothing of but its cost
_ELSEWHERE = ("medusa", "mlp_speculator")
_COMPUTING = ("draft_model", *HEADS)
_WITH_MODEL = ("draft_model", "eagle", "eagle3")
_WHOLE = "draft_tensor_parallel_size"
_USUAL_ACCEPTANCE = 0.7
_ALSO_MTP = "_mtp"  # deepseek_mtp, mimo_mtp, qwen3_next_mtp …: the target says which it is


Acceptance = float | tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeSettings:
    """``num_speculative_tokens`` None (``"auto"``): decided step by step. ``tree``: a draft model's tokens form a tree,
    with the best so many continuations of each looked at; the number is then a tree's. ``prompt_lookup_min`` to
    ``prompt_lookup_max``: how many tokens must stand elsewhere as they stand at the end, so that what follows there is
    proposed here. ``suffix_tokens``: of earlier answers that are kept for each tenant. ``disable_by_batch_size``: from
    so many running sequences on nothing is drafted. ``draft_memory``: all that a draft model or head may hold, in bytes,
    or as a share (below 1) of that and all keys and values. ``quantization``: of a draft model, as ``--quantization`` has
    it for the target; ``auto``: FP8 where that pays (models/draft_source.py). ``acceptance``: how likely a draft is right
    when those before it are (of several numbers, by place: the last one's for all behind it), in simulations,
    and of models with random weights, where coins decide then (worker/judge.py).
    In simulations alone: ``draft_cost``, what proposing one more for all rows takes, as a share of the target's step."""

    method: str
    model: str | None = None
    num_speculative_tokens: int | None = None
    tree: int | None = None
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 5
    suffix_tokens: int = 65_536
    disable_by_batch_size: int | None = None
    draft_memory: float | None = None
    device: str | None = None
    quantization: str = "auto"
    acceptance: Acceptance | None = None
    draft_cost: float = 0.0

    @property
    def most(self) -> int:
        """Drafts of one row in one step."""
        if self.tree is not None:
            return self.num_speculative_tokens or MOST_DRAFTS
        return self.num_speculative_tokens or (MOST_DRAFTS // 2 if self.method in _COMPUTING else MOST_DRAFTS)

    @property
    def expected(self) -> Acceptance:
        """``acceptance``, as far as a plan goes."""
        return _USUAL_ACCEPTANCE if self.acceptance is None else self.acceptance

    @property
    def fixed(self) -> int | None:
        """Drafts of each row and step; None: that is decided. Of a tree, what fewer would give is not known."""
        return self.most if self.tree is not None else self.num_speculative_tokens


_INTEGERS: Mapping[str, tuple[int, int]] = {
    "num_speculative_tokens": (1, MOST_DRAFTS),
    "tree": (1, 32),
    "prompt_lookup_min": (1, 64),
    "prompt_lookup_max": (1, 64),
    "suffix_tokens": (64, 2**26),
    "disable_by_batch_size": (2, 2**20),
    _WHOLE: (1, 1),  # each rank has the draft whole: vLLM's users say 1 by habit
}


def read_settings(text: str | None) -> SpeculativeSettings | None:
    """Raises ConfigError that names the field."""
    if text is None:
        return None
    try:
        given = json.loads(text)
    except ValueError as error:
        raise ConfigError(
            f'speculative_config is no JSON ({error}); give an object like {{"method": "ngram"}}.'
        ) from None
    if not isinstance(given, dict):
        raise ConfigError(
            f'speculative_config is {text[:80]}; give an object like {{"method": "ngram"}} or {{"model": "a/draft"}}.'
        )
    return _checked(given)


def _checked(given: dict[str, Any]) -> SpeculativeSettings:
    known = [each.name for each in fields(SpeculativeSettings)]
    if unknown := [name for name in given if name not in (*known, _WHOLE)]:
        raise ConfigError(
            f"speculative_config has {unknown[0][:80]!r}, which means nothing here; its fields are {', '.join(known)}."
        )
    model = given.get("model")
    if model is not None and not (isinstance(model, str) and model):
        raise ConfigError(
            f"speculative_config.model is {str(model)[:80]!r}; give the draft model's folder, .gguf file or hub id."
        )
    given["method"] = _method(given.get("method"), model)
    if given.get("num_speculative_tokens") == "auto":
        del given["num_speculative_tokens"]
    for name, (low, high) in _INTEGERS.items():
        value = given.get(name)
        high = MOST if name == "num_speculative_tokens" and given.get("tree") is not None else high
        if value is not None and (type(value) is not int or not low <= value <= high):
            raise ConfigError(
                f"speculative_config.{name} is {str(value)[:80]}; give a whole number from {low} to {high}."
            )
    for name in ("acceptance", "draft_cost"):
        value = given.get(name)
        several = value if name == "acceptance" and isinstance(value, list) and 0 < len(value) <= MOST_DRAFTS else None
        if value is not None and not all(map(_is_share, several or [value])):
            more = ", or one for each place" if name == "acceptance" else ""
            raise ConfigError(f"speculative_config.{name} is {str(value)[:80]}; give a number from 0 to 1{more}.")
        if several:
            given[name] = tuple(several)
    given.pop(_WHOLE, None)
    if given.get("prompt_lookup_min") is None and given.get("prompt_lookup_max") == 1:
        given["prompt_lookup_min"] = 1
    _check_memory(given)
    _check_device(given)
    _check_quantization(given)
    if given.get("tree") is not None and given["method"] != "draft_model":
        raise ConfigError(
            f"speculative_config.tree is {given['tree']}, but method {given['method']} grows no trees; give a draft model, or leave it out."
        )
    settings = SpeculativeSettings(**{name: value for name, value in given.items() if value is not None})
    if settings.prompt_lookup_min > settings.prompt_lookup_max:
        bounds = f"prompt_lookup_min is {settings.prompt_lookup_min} and prompt_lookup_max {settings.prompt_lookup_max}"
        raise ConfigError(f"speculative_config.{bounds}; give a minimum that is no more than the maximum.")
    return settings


def _is_share(value: object) -> bool:
    return type(value) in (int, float) and 0 <= value <= 1  # type: ignore[operator]


def chance(acceptance: Acceptance, at: int) -> float:
    """That the draft at a place is right when those before it are."""
    return acceptance[min(at, len(acceptance) - 1)] if isinstance(acceptance, tuple) else acceptance


def _check_memory(given: Mapping[str, Any]) -> None:
    value = given.get("draft_memory")
    if value is None:
        return
    if type(value) not in (int, float) or not (0 < value < 1 or (type(value) is int and value > 1)):
        raise ConfigError(
            f"speculative_config.draft_memory is {str(value)[:80]}; give a whole number of bytes, or a share above 0 and below 1."
        )
    if given["method"] not in _COMPUTING:
        raise ConfigError(
            f"speculative_config.draft_memory bounds a draft model or head, but method is {given['method']!r}; leave it out."
        )


def _check_device(given: Mapping[str, Any]) -> None:
    value = given.get("device")
    if value is None:
        return
    if value not in DEVICES:
        raise ConfigError(f"speculative_config.device is {str(value)[:80]!r}; give one of {', '.join(DEVICES)}.")
    if given["method"] != "draft_model":
        raise ConfigError(
            f"speculative_config.device is where a draft model computes, but method is {given['method']!r}; leave it out."
        )


def _check_quantization(given: dict[str, Any]) -> None:
    value = given.get("quantization")
    if value is None:
        return
    known = ("auto", *QUANTIZATION["choices"])
    given["quantization"] = value = QUANTIZATION["aliases"].get(str(value), value)
    if value not in known:
        raise ConfigError(f"speculative_config.quantization is {str(value)[:80]!r}; give one of {', '.join(known)}.")
    if given["method"] != "draft_model":
        raise ConfigError(
            f"speculative_config.quantization is of a draft model, but method is {given['method']!r}; leave it out."
        )


def _method(method: Any, model: str | None) -> str:
    if method is None and model is not None:
        return "draft_model"
    if isinstance(method, str) and method.endswith(_ALSO_MTP):
        method = "mtp"
    if method in _ELSEWHERE:
        raise ConfigError(
            f"speculative_config.method is {method!r}, whose heads are not supported; give one of {', '.join(METHODS)}."
        )
    if method not in METHODS:
        raise ConfigError(f"speculative_config.method is {str(method)[:80]!r}; give one of {', '.join(METHODS)}.")
    if (method in _WITH_MODEL) != (model is not None):
        missing = "needs the model that drafts" if model is None else f"asks no model, but model is {model!r}"
        raise ConfigError(
            f"speculative_config.method {method!r} {missing}; give method {', '.join(_WITH_MODEL)} with a model, or another method without."
        )
    return str(method)
