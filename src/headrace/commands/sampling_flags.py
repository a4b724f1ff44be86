"""Sampling flags of ``chat`` and ``generate``, over the model's own defaults.

What lives here: flags to SamplingParams. What may not: defaults and checks (SamplingParams has them).
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from headrace.bench.arguments import declare, declared
from headrace.errors import ConfigError, InvalidRequest
from headrace.request import SamplingParams

PARAM_NAMES = frozenset(each.name for each in fields(SamplingParams))


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling (defaults: the model's own)", argument_default=argparse.SUPPRESS)
    declare(group, "sampling.arguments")


def sampling_values(args: argparse.Namespace) -> dict[str, Any]:
    """Values from the command line, by SamplingParams field. Raises ConfigError for a value out of range, which needs
    no model to detect."""
    flags = (flag.removeprefix("--").replace("-", "_") for flag in declared()["sampling"]["arguments"])
    values = {name: getattr(args, name) for name in flags if name in args}
    over_defaults(SamplingParams(), values)
    return values


def over_defaults(defaults: SamplingParams, values: Mapping[str, Any]) -> SamplingParams:
    """The model's own defaults, overridden by the flags. Raises ConfigError: a wrong flag is wrong usage, not a request
    that failed."""
    try:
        return with_values(defaults, values)
    except InvalidRequest as error:
        raise ConfigError(error.message, param=error.param) from error


def with_values(base: SamplingParams, values: Mapping[str, Any]) -> SamplingParams:
    """``base`` with some fields replaced. Raises InvalidRequest for an unknown one and for values out of range."""
    unknown = sorted(set(values) - PARAM_NAMES)
    if unknown:
        raise InvalidRequest(
            f"unknown fields {', '.join(unknown)}; the sampling fields are {', '.join(sorted(PARAM_NAMES))}.",
            param=unknown[0],
        )
    changed = {name: _ids_as_numbers(value) if name == "logit_bias" else value for name, value in values.items()}
    return replace(base, **changed)


def _ids_as_numbers(bias: Any) -> Any:
    """JSON object keys are strings."""
    if not isinstance(bias, Mapping):
        return bias
    return {
        int(token) if isinstance(token, str) and token.isascii() and token.isdigit() else token: value
        for token, value in bias.items()
    }
