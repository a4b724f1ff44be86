"""GGUF tensors under Hugging Face names: which tensor, which part of it, and how the converter changed it.

What lives here: GGUF's names (gguf.toml). What may not: torch, names in checkpoints (weight_rules.py), reading tensors
(gguf_checkpoint.py undoes the changes).
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

from headrace.models.gguf_file import GGUFFile
from headrace.models.weight_rules import names_of


class Change(Enum):
    """What the converter did to a tensor, and what reading undoes."""

    NONE = "none"
    INTERLEAVED = "interleaved"  # rows of each head reordered for a rotation of neighbouring elements
    TRANSPOSED = "transposed"  # stored [out, in] where the checkpoint's layer has [in, out]
    PLUS_ONE = "plus one"  # a norm's weight with its offset added


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a tensor is in the file: all of ``tensor``, or its ``part``-th slice along the first dimension."""

    tensor: str
    change: Change = Change.NONE
    heads: int = 0  # of an interleaved tensor
    part: int | None = None


OWN: Mapping[str, Any] = tomllib.loads(Path(__file__).with_name("gguf.toml").read_text(encoding="utf-8"))

_INTERLEAVED = ("llama", "mistral", "mixtral")  # model types that are written as architecture "llama"
_TRANSPOSED = ("attn_qkv", "attn_output", "ffn_up", "ffn_down")  # gpt2's Conv1D
_CONSTANTS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")  # read into the config


def origins(file: GGUFFile, config: Mapping[str, Any]) -> dict[str, Origin]:
    """Every tensor of the file by its checkpoint name; a tensor without one keeps its own name, so that the loader can
    report it."""
    found: dict[str, Origin] = {}
    for tensor in file.tensors:
        if tensor not in _CONSTANTS:
            found.update(_named(file, tensor, config))
    return found


def placed(name: str, config: Mapping[str, Any]) -> Origin:
    """Where a converter puts a checkpoint's tensor: ``origins``, backwards. Raises KeyError for one that has no place."""
    family = config["model_type"]
    stem, _, suffix = name.rpartition(".")
    words, prefix = {own: word for word, own in _checkpoint_words(family).items()}, ""
    if stem.startswith(layer := f"{names_of(family).layer}."):
        index, _, stem = stem.removeprefix(layer).partition(".")
        prefix = f"blk.{index}."
    expert = re.search(r"(?<=\.)\d+(?=\.)", stem)
    word = words[stem if expert is None else f"{stem[: expert.start()]}{{}}{stem[expert.end() :]}"]
    part = None if expert is None else int(expert[0])
    return Origin(f"{prefix}{word}.{suffix}", _change(family, word, suffix), _heads(word, config), part)


def _named(file: GGUFFile, tensor: str, config: Mapping[str, Any]) -> Iterator[tuple[str, Origin]]:
    family = config["model_type"]
    stem, _, suffix = tensor.rpartition(".")
    words, prefix, word = _checkpoint_words(family), "", stem
    if stem.startswith("blk.") and stem.count(".") >= 2:
        _, index, word = stem.split(".", 2)
        prefix = f"{names_of(family).layer}.{index}."
    base, _, expert = word.rpartition(".")
    if base and expert.isdigit():  # a tensor that holds a single expert, as older files have it
        name = words.get(base + "_exps")
    else:
        name, expert = words.get(word), ""
    if name is None:
        yield tensor, Origin(tensor)
    elif "{}" in name and not expert:
        for part in range(file.tensors[tensor].shape[0]):
            yield f"{prefix}{name.format(part)}.{suffix}", Origin(tensor, part=part)
    else:
        yield (
            f"{prefix}{name.format(expert)}.{suffix}",
            Origin(tensor, _change(family, word, suffix), _heads(word, config)),
        )


@cache
def _checkpoint_words(family: str) -> Mapping[str, str]:
    """GGUF's name → the checkpoint's, with braces for an expert's number."""
    words = names_of(family).words
    found: dict[str, str] = {}
    for name, own in ((name, own) for name, forms in OWN["words"].items() for own in forms):
        if len(own) == len(words.get(name, ())):
            within = f"{words['experts'][0]}.{{}}." if name.startswith("experts.") else ""
            found.update(zip(own, (within + word for word in words[name]), strict=True))
    return found


def _change(family: str, word: str, suffix: str) -> Change:
    if family in _INTERLEAVED and word in ("attn_q", "attn_k"):
        return Change.INTERLEAVED
    if family == "gpt2" and word in _TRANSPOSED and suffix == "weight":
        return Change.TRANSPOSED
    if family == "gemma2" and word.endswith("norm"):
        return Change.PLUS_ONE
    return Change.NONE


def _heads(word: str, config: Mapping[str, Any]) -> int:
    if word == "attn_q":
        return int(config["num_attention_heads"])
    return int(config["num_key_value_heads"]) if word == "attn_k" else 0
