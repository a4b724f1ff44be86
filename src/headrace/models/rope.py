"""Rotary scaling as configs write it: ``rope_theta`` and ``rope_scaling`` (transformers 4) or ``rope_parameters``
(transformers 5).

What lives here: reading them into a RopeSpec. What may not: torch, tables of cosines (layers/basic.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from headrace.models.fields import Fields
from headrace.spec import RopeSpec


def read_rope(fields: Fields, head_dim: int, positions: int, *, default_theta: float, partial: bool) -> RopeSpec:
    """Reads a config's rotary fields; ``positions`` is its max_position_embeddings. ``partial``: the family may rotate
    part of a head."""
    theta = fields.number("rope_theta", default_theta)
    share = fields.number("partial_rotary_factor", 1.0, high=1.0) if partial else 1.0
    trained = fields.optional_integer("original_max_position_embeddings", 4096 if partial else None)
    scaling = fields.mapping("rope_scaling")
    modern = fields.mapping("rope_parameters")
    scaling = scaling or modern
    if scaling is None:
        return RopeSpec(theta=theta, rotary_dim=_rotary_dim(fields, head_dim, share))
    theta = scaling.number("rope_theta", theta)
    share = scaling.number("partial_rotary_factor", share, high=1.0) if partial else 1.0
    read = scaling.choice("rope_type" if scaling.has("rope_type") else "type", _KINDS, "default")
    scaling.raw("type")  # older configs carry both words
    scaling.raw("finetuned")
    found = read(scaling, _rotary_dim(fields, head_dim, share), positions, trained)
    scaling.finish()
    return RopeSpec(theta=theta, rotary_dim=_rotary_dim(fields, head_dim, share), **found)


def rope_context(rope: RopeSpec, positions: int) -> int:
    """The longest context. Linear and yarn scaling stretch the value in the config; for the others, it is already
    stretched."""
    if rope.kind == "linear":
        return int(positions * rope.factor)
    if rope.kind == "yarn":
        return max(positions, int(rope.original_max_positions * rope.factor))
    return positions


def _rotary_dim(fields: Fields, head_dim: int, share: float) -> int:
    rotary_dim = int(head_dim * share)
    if rotary_dim < 2 or rotary_dim % 2:
        problem = f"{head_dim} with {share:g} of it rotated gives {rotary_dim} elements, but pairs are rotated; the config is damaged"
        raise fields.error("head_dim", problem)
    return rotary_dim


def _dynamic(scaling: Fields, rotary_dim: int, positions: int, trained: int | None) -> dict[str, Any]:
    """Plain rotation up to max_position_embeddings, where the context ends: beyond it, keys already cached would have
    to be rotated again."""
    scaling.raw("original_max_position_embeddings")  # the reference implementation does not look at it
    scaling.number("factor", high=1e4)
    return {}


def _llama3(scaling: Fields, rotary_dim: int, positions: int, trained: int | None) -> dict[str, Any]:
    low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
    if low >= high:
        raise scaling.error(
            "low_freq_factor",
            f"is {low:g}, not below high_freq_factor ({high:g}); the config is damaged, fetch it again",
        )
    return {
        "kind": "llama3",
        "factor": scaling.number("factor", high=1e4),
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_positions": _trained_length(scaling, trained, positions),
    }


def _yarn(scaling: Fields, rotary_dim: int, positions: int, trained: int | None) -> dict[str, Any]:
    original = _trained_length(scaling, trained, positions)
    factor = scaling.optional_number("factor") or positions / original
    mscale, mscale_all = scaling.optional_number("mscale"), scaling.optional_number("mscale_all_dim")
    inferred = (
        _yarn_mscale(factor, mscale) / _yarn_mscale(factor, mscale_all)
        if mscale and mscale_all
        else _yarn_mscale(factor, 1.0)
    )
    return {
        "kind": "yarn",
        "factor": factor,
        "original_max_positions": original,
        "attention_factor": scaling.optional_number("attention_factor") or inferred,
        "beta_fast": scaling.optional_number("beta_fast") or 32.0,
        "beta_slow": scaling.optional_number("beta_slow") or 1.0,
        "truncate": scaling.boolean("truncate", True),
    }


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def _longrope(scaling: Fields, rotary_dim: int, positions: int, trained: int | None) -> dict[str, Any]:
    original = _trained_length(scaling, trained, positions)
    factor = scaling.optional_number("factor") or positions / original
    inferred = math.sqrt(1.0 + math.log(factor) / math.log(original)) if factor > 1.0 else 1.0
    return {
        "kind": "longrope",
        "factor": factor,
        "original_max_positions": original,
        "attention_factor": scaling.optional_number("attention_factor") or inferred,
        "short_factor": scaling.numbers("short_factor", rotary_dim // 2),
        "long_factor": scaling.numbers("long_factor", rotary_dim // 2),
    }


def _trained_length(scaling: Fields, trained: int | None, positions: int) -> int:
    """The config's own field takes precedence over the one inside the scaling."""
    inside = scaling.optional_integer("original_max_position_embeddings", low=2)
    return trained or inside or positions


_KINDS: dict[str, Callable[[Fields, int, int, int | None], dict[str, Any]]] = {
    "default": lambda scaling, *_: {},
    "linear": lambda scaling, *_: {"kind": "linear", "factor": scaling.number("factor", high=1e4)},
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "su": _longrope,  # longrope's first name
}
