"""Writes what ``headrace quantize`` made as one .gguf file, as llama.cpp reads it.

What lives here: metadata, and tensors as a converter would write them; the next one is read while the last is written.
What may not: codes (gguf_blocks.py), reading (models/).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headrace.errors import ConfigError
from headrace.models.checkpoint import Checkpoint, KeyNames
from headrace.models.families import spec_from_config
from headrace.models.files import TokenizerFiles
from headrace.models.gguf_checkpoint import converted
from headrace.models.gguf_config import llama3_factors, read_gguf_config
from headrace.models.gguf_names import Origin, placed
from headrace.models.source import ModelSource
from headrace.models.weight_rules import weight_rules
from headrace.quantize.gguf_recipe import ARCHITECTURES, GGUFRecipe
from headrace.quantize.gguf_vocab import tokenizer_metadata
from headrace.quantize.run import quantised_spec
from headrace.spec import DecoderSpec


def write_gguf(
    path: Path, source: ModelSource, checkpoint: Checkpoint, recipe: GGUFRecipe, files: TokenizerFiles
) -> int:
    """``checkpoint``: what the recipe made, by names on disk. Returns the file's bytes; it is there under its name once
    it is whole. Raises ConfigError if it would not say what the model is."""
    import gguf

    spec = quantised_spec(spec_from_config(source.config), recipe)
    unfinished = path.with_suffix(".unfinished")
    writer = gguf.GGUFWriter(str(unfinished), ARCHITECTURES[spec.family])
    metadata = (*_general(source, recipe), *_shape(source, spec), *tokenizer_metadata(source, files, spec.vocab_size))
    for key, value in metadata:
        _add(writer, key, value)
    tensors = [*_constants(spec), *_tensors(spec, checkpoint, recipe)]
    for each in tensors:
        kind = None if each.kind is None else gguf.GGMLQuantizationType[each.kind]
        held = torch.empty(0, dtype=torch.float32 if kind is None else torch.uint8).numpy().dtype
        writer.add_tensor_info(each.name, each.shape, held, math.prod(each.shape) * held.itemsize, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for each in tensors:
        made = each.read()
        writer.write_tensor_data((made.float() if each.kind is None else made).contiguous().numpy())
    writer.close()
    _check(unfinished, spec)
    unfinished.replace(path)
    return path.stat().st_size


def _check(path: Path, spec: DecoderSpec) -> None:
    """What is read from the file is the model that went into it: GGUF has no word for some of what configs say."""
    found = spec_from_config(read_gguf_config(path)[0])
    known = {each.name for each in fields(spec)} - {"family", "checkpoint_dtype"}
    other = sorted(name for name in known if getattr(found, name) != getattr(spec, name))
    if other:
        path.unlink()
        said = ", ".join(f"{name} {str(getattr(spec, name))[:60]}" for name in other)
        raise ConfigError(f"a GGUF file cannot say all of this model: {said} would be lost; give another --format.")


@dataclass(frozen=True, slots=True)
class _Tensor:
    """``shape``: of its values, float32, or of a type's (``kind``) bytes."""

    name: str
    shape: tuple[int, ...]
    kind: str | None
    read: Callable[[], Tensor]


def _add(writer: Any, key: str, value: Any) -> None:
    """Whole numbers are unsigned, but for those in lists, which are types of tokens."""
    from gguf import GGUFValueType

    if isinstance(value, int) and not isinstance(value, bool):
        writer.add_uint32(key, value)
    else:
        writer.add_key_value(key, value, GGUFValueType.get_type(value))


def _general(source: ModelSource, recipe: GGUFRecipe) -> Iterator[tuple[str, Any]]:
    from gguf import LlamaFileType

    yield "general.name", source.name.rstrip("/").rpartition("/")[2]
    yield "general.quantization_version", 2
    yield "general.file_type", int(LlamaFileType[f"MOSTLY_{recipe.layout}"])


def _shape(source: ModelSource, spec: DecoderSpec) -> Iterator[tuple[str, Any]]:
    """What models/gguf_config.py reads."""
    at, config, moe = ARCHITECTURES[spec.family], source.config, spec.layers[0].moe
    found: dict[str, Any] = {
        "vocab_size": spec.vocab_size, "context_length": config["max_position_embeddings"], "embedding_length": spec.hidden_size,
        "block_count": spec.num_layers, "feed_forward_length": spec.intermediate_size, "attention.head_count": spec.num_heads,
        "attention.head_count_kv": spec.num_kv_heads, "attention.key_length": spec.head_dim, "attention.value_length": spec.head_dim,
        "attention.layer_norm_rms_epsilon": float(spec.norm_eps),
    }  # fmt: skip
    if windows := [layer.window for layer in spec.layers if layer.window]:
        found["attention.sliding_window"] = windows[0]
    for key, cap in (("attn", spec.attention_soft_cap), ("final", spec.logits_soft_cap)):
        if cap is not None:
            found[f"{key}_logit_softcapping"] = float(cap)
    if moe is not None:
        found |= {"expert_count": moe.num_experts, "expert_used_count": moe.top_k}
        found["expert_feed_forward_length"] = moe.intermediate_size
    if (rope := spec.rope) is not None:
        found |= {"rope.freq_base": float(rope.theta), "rope.dimension_count": rope.rotary_dim}
        if rope.kind in ("linear", "yarn"):
            found |= {"rope.scaling.type": rope.kind, "rope.scaling.factor": float(rope.factor)}
        if rope.kind in ("yarn", "longrope"):
            found["rope.scaling.original_context_length"] = rope.original_max_positions
    yield from ((f"{at}.{key}", value) for key, value in found.items())


def _constants(spec: DecoderSpec) -> Iterator[_Tensor]:
    """What GGUF keeps of rotary scaling in tensors."""
    rope = spec.rope
    if rope is None:
        return
    found = {"rope_factors_long": rope.long_factor, "rope_factors_short": rope.short_factor}
    if rope.kind == "llama3":
        bounds = rope.low_freq_factor, rope.high_freq_factor, rope.original_max_positions
        found["rope_freqs"] = tuple(llama3_factors(rope.rotary_dim, rope.theta, rope.factor, *bounds))
    for name, values in found.items():
        if values:
            yield _Tensor(f"{name}.weight", (len(values),), None, partial(torch.tensor, values))


def _tensors(spec: DecoderSpec, checkpoint: Checkpoint, recipe: GGUFRecipe) -> Iterator[_Tensor]:
    """Experts are one tensor, all of a layer."""
    names = KeyNames(checkpoint.keys())
    config = {
        "model_type": spec.family,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
    }
    for rule in weight_rules(spec):
        for copies in zip(*rule.sources, strict=True):
            keys, origin = [names[each] for each in copies], placed(copies[0], config)
            shape = (*((len(keys),) if rule.stack else ()), *checkpoint.shape(keys[0]))
            kind = recipe.types.get(copies[0].removesuffix(".weight"))
            yield _Tensor(origin.tensor, shape, kind, partial(_read, checkpoint, keys, origin, stack=rule.stack))


def _read(checkpoint: Checkpoint, keys: Sequence[str], origin: Origin, *, stack: bool) -> Tensor:
    parts = [converted(checkpoint.read(key), origin) for key in keys]
    return torch.stack(parts) if stack else parts[0]
