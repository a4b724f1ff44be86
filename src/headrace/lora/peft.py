"""An adapter's folder as PEFT writes it: adapter_config.json beside adapter_model.safetensors.

What lives here: what both say, checked against the model before a byte of a tensor is read. What may not: torch, PEFT,
reading tensors (reading.py).

Keys are those of PEFT: ``base_model.model.`` and the module's name on disk, then ``lora_A.weight`` [rank, in] and
``lora_B.weight`` [out, rank]; of an embedding ``lora_embedding_A`` [rank, vocabulary] and ``lora_embedding_B``
[hidden, rank]; with DoRA ``lora_magnitude_vector`` [out].
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from headrace.errors import ModelError
from headrace.models.files import read_json
from headrace.models.safetensors_file import TensorEntry, read_header
from headrace.models.weight_rules import WRAPPERS, Module, adapted_modules
from headrace.sites import Role
from headrace.spec import DecoderSpec

MOST_RANK = 256
_CONFIG, _TENSORS, _PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
_WRAPPER = "base_model.model."
_FLOATS = ("F32", "BF16", "F16", "F64")
# What changes the mathematics and is not computed here; training's own fields say nothing to inference.
_REFUSED = (
    "modules_to_save", "layer_replication", "target_parameters", "trainable_token_indices", "alora_invocation_tokens",
    "lora_bias", "use_qalora", "use_bdlora", "arrow_config", "velora_config",
)  # fmt: skip
_PART = re.compile(
    r"(?P<module>.+)\.(?P<kind>lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)(\.weight)?"
)
_PATTERN = re.compile(r"\^?(?:[\w-]|\\?\.)+\$?")


@dataclass(frozen=True, slots=True)
class Factors:
    """W' = W + scale · b a of one module: ``a`` [rank, in], ``b`` [out, rank]. ``magnitude`` [out]: W' has rows of
    these lengths instead (DoRA, Liu et al. 2024)."""

    module: Module
    rank: int
    scale: float
    a: TensorEntry
    b: TensorEntry
    magnitude: TensorEntry | None = None


@dataclass(frozen=True, slots=True)
class Adapter:
    """One that fits the model."""

    folder: Path
    factors: tuple[Factors, ...]

    @property
    def rank(self) -> int:
        """The largest."""
        return max(each.rank for each in self.factors)


def read_adapter(folder: Path, spec: DecoderSpec, max_rank: int) -> Adapter:
    """Config and header of an adapter of this model. Raises ModelError for what is missing, damaged, of another model
    or not supported."""
    if not folder.is_dir():
        raise ModelError(
            f"{folder} is no folder; an adapter is a folder with {_CONFIG} and {_TENSORS}. Check the path."
        )
    config = read_json(folder / _CONFIG)
    _check_config(folder, config)
    if not (folder / _TENSORS).is_file():
        if (folder / _PICKLE).exists():
            raise ModelError(
                f"{folder} holds {_PICKLE}, a pickle, which may run code and is never read; save it as {_TENSORS}."
            )
        raise ModelError(f"{folder} has no {_TENSORS}. Download the adapter again.")
    found = tuple(_factors(folder, config, _by_module(folder, spec), max_rank))
    if not found:
        raise ModelError(f"{folder / _TENSORS} holds no tensor. Download the adapter again.")
    return Adapter(folder, found)


def _check_config(folder: Path, config: Mapping[str, Any]) -> None:
    kind = config.get("peft_type")
    if kind != "LORA":
        raise ModelError(
            f"{folder / _CONFIG} has peft_type {str(kind)[:40]!r}; LORA is served here. Use a LoRA adapter."
        )
    refused = [name for name in _REFUSED if config.get(name)]
    refused += ["bias"] if config.get("bias", "none") != "none" else []
    if refused:
        raise ModelError(
            f"{folder / _CONFIG} sets {', '.join(refused)}, which is not supported. Merge the adapter into its model instead."
        )
    for name in ("rank_pattern", "alpha_pattern"):
        held = config.get(name) or {}
        wrong = [each for each in held if not _PATTERN.fullmatch(each)] if isinstance(held, dict) else [held]
        if wrong:
            raise ModelError(
                f"{folder / _CONFIG}: {name} has {str(wrong[0])[:60]!r}; only names of modules are read. Write them out."
            )


def _by_module(folder: Path, spec: DecoderSpec) -> Mapping[str, tuple[Module, dict[str, TensorEntry]]]:
    """The tensors of each module that has some."""
    file, known = folder / _TENSORS, _modules(spec)
    found: dict[str, tuple[Module, dict[str, TensorEntry]]] = {}
    unknown = []
    for key, entry in read_header(file).items():
        match = _PART.fullmatch(key)
        name = "" if match is None else match["module"].removeprefix(_WRAPPER)
        spelled = (name, *(wrapper + name for wrapper in WRAPPERS))
        module = next((known[each] for each in spelled if each in known), None)
        if match is None or module is None:
            unknown.append(key)
            continue
        _, tensors = found.setdefault(module.name, (module, {}))
        if match["kind"] in tensors:
            raise ModelError(f"{file} has two tensors {match['kind']} of {module.name}. Download the adapter again.")
        tensors[match["kind"]] = entry
    if unknown:
        few = ", ".join(key[:100] for key in sorted(unknown)[:3])
        raise ModelError(
            f"{file} holds {len(unknown)} tensors that this model has no place for (first: {few}); experts and routers take no "
            f"adapters here. Check that the adapter belongs to this model."
        )
    return found


@lru_cache(4)
def _modules(spec: DecoderSpec) -> Mapping[str, Module]:
    return {module.name: module for module in adapted_modules(spec)}


def _factors(
    folder: Path, config: Mapping[str, Any], modules: Mapping[str, tuple[Module, dict[str, TensorEntry]]], max_rank: int
) -> Iterator[Factors]:
    file = folder / _TENSORS
    for module, tensors in modules.values():
        table = module.weight.role is Role.EMBEDDING
        first, second = ("lora_embedding_A", "lora_embedding_B") if table else ("lora_A", "lora_B")
        magnitude = tensors.get("lora_magnitude_vector")
        a, b = tensors.get(first), tensors.get(second)
        if a is None or b is None or len(tensors) != 2 + (magnitude is not None):
            raise ModelError(
                f"{file} has {', '.join(sorted(tensors))} of {module.name}, not {first} and {second}. Download it again."
            )
        if bool(config.get("use_dora")) != (magnitude is not None) or (table and magnitude is not None):
            raise ModelError(
                f"{file}: use_dora and the magnitudes of {module.name} do not belong together. Download it again."
            )
        rank = a.shape[0] if len(a.shape) == 2 else 0
        _check_rank(file, module, rank, _of_module(config, "rank_pattern", module.name, config.get("r")), max_rank)
        ins, outs = (module.outs, module.weight.ins) if table else (module.weight.ins, module.outs)
        wanted = {first: (rank, ins), second: (outs, rank), "lora_magnitude_vector": (outs,)}
        for kind, entry in tensors.items():
            if entry.shape != wanted[kind] or entry.dtype not in _FLOATS:
                raise ModelError(
                    f"{file}: {kind} of {module.name} is {list(entry.shape)} of {entry.dtype}, but this model calls for "
                    f"{list(wanted[kind])} of floats. Check that the adapter belongs to this model."
                )
        yield Factors(module, rank, _scale(folder, config, module.name, rank), a, b, magnitude)


def _check_rank(file: Path, module: Module, rank: int, said: Any, max_rank: int) -> None:
    if rank != said:
        raise ModelError(
            f"{file}: lora_A of {module.name} has rank {rank}, but the config says {said!r:.40}. Download it again."
        )
    if not 1 <= rank <= max_rank:
        raise ModelError(
            f"{file}: {module.name} has rank {rank}; this engine takes ranks from 1 to {max_rank}. Raise --max-lora-rank (up to {MOST_RANK})."
        )


def _scale(folder: Path, config: Mapping[str, Any], module: str, rank: int) -> float:
    alpha = _of_module(config, "alpha_pattern", module, config.get("lora_alpha"))
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not abs(alpha) <= sys.float_info.max:
        raise ModelError(
            f"{folder / _CONFIG}: lora_alpha is {alpha!r:.40}; a finite number is wanted. Download it again."
        )
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _of_module(config: Mapping[str, Any], patterns: str, module: str, usual: Any) -> Any:
    """The first pattern that names the module or the end of its name holds."""
    for pattern, value in (config.get(patterns) or {}).items():
        name = pattern.replace("\\", "").strip("^$")
        if module == name or module.endswith("." + name):
            return value
    return usual
