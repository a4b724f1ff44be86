"""Sampling flags of ``chat`` and ``generate``, over the model's own defaults.

What lives here: flags to SamplingParams. What may not: defaults and checks (SamplingParams has them).
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from headrace.errors import ConfigError, InvalidRequest
from headrace.request import SamplingParams

_FLAGS: dict[str, tuple[type, str]] = {
    "temperature": (float, "0: always the most probable token; 1: the model's own distribution"),
    "top_p": (float, "sample from the most probable tokens with this total probability"),
    "top_k": (int, "sample from the K most probable tokens; 0: all"),
    "min_p": (float, "exclude tokens less probable than this fraction of the most probable one"),
    "repetition_penalty": (float, "above 1: tokens that have occurred become less probable"),
    "max_tokens": (
        int,
        "maximum length of the answer in tokens (default: the model's default, or the rest of its context)",
    ),
}
PARAM_NAMES = frozenset(each.name for each in fields(SamplingParams))


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling (defaults: the model's own)")
    for name, (kind, help_text) in _FLAGS.items():
        group.add_argument(
            f"--{name.replace('_', '-')}",
            type=kind,
            default=argparse.SUPPRESS,
            help=help_text,
            metavar="X" if kind is float else "N",
        )
    group.add_argument(
        "--stop",
        action="append",
        default=argparse.SUPPRESS,
        metavar="TEXT",
        help="end the answer before this text (may be repeated)",
    )


def sampling_values(args: argparse.Namespace) -> dict[str, Any]:
    """Values from the command line, by SamplingParams field. Raises ConfigError for a value out of range, which needs
    no model to detect."""
    values = {name: value for name, value in vars(args).items() if name in (*_FLAGS, "stop")}
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
