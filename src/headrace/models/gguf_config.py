"""GGUF metadata as a Hugging Face config: one row per architecture.

What lives here: reading metadata keys (and the small tensors that hold rotary factors) into config.json's fields. What
may not: torch, reading weights (gguf_checkpoint.py), deciding what a field means (families.py).
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from headrace.errors import ModelError
from headrace.models.gguf_file import BF16, F16, F32, GGUFFile, read_gguf
from headrace.models.gguf_names import origins
from headrace.models.pooling import KEY

_NUMBER = (int, float)
_TYPE_NAMES = {F32: "float32", F16: "float16", BF16: "bfloat16"}


_POOLED = {1: "mean", 2: "cls", 3: "last"}  # as llama.cpp numbers them; its server normalizes


def read_gguf_config(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """(config, generation config) of a GGUF file. Raises ModelError for an architecture without a row."""
    file = read_gguf(path)
    architecture = file.require("general.architecture", str)
    if architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ModelError(
            f"{path} has the GGUF architecture {architecture[:40]!r}, which is not supported; supported are {known}. Use one of those."
        )
    values = _Values(file, architecture)
    config = {**_common(file), **ARCHITECTURES[architecture](values)}
    if (kind := _POOLED.get(values.integer("pooling_type") or 0)) is not None:
        config[KEY] = {"kind": kind, "normalize": True}
    if types := _packed_types(file, config):
        config["quantization_config"] = {"quant_method": "gguf", "types": types}
    ids: dict[str, Any] = {
        name: config[name] for name in ("bos_token_id", "eos_token_id") if config.get(name) is not None
    }
    return {name: value for name, value in config.items() if value is not None}, ids


class _Values:
    """An architecture's own metadata: keys without its prefix, numbers as they were intended."""

    def __init__(self, file: GGUFFile, architecture: str) -> None:
        self.file = file
        self._prefix = architecture + "."

    def integer(self, key: str) -> int | None:
        value: Any = self.file.get(self._prefix + key, (int, list))
        if isinstance(value, list):  # one entry a layer; only models whose layers are alike are supported
            if not value or len(set(value)) != 1 or not isinstance(value[0], int):
                raise ModelError(
                    f"{self.file.path}: {self._prefix}{key} differs from layer to layer, which is not supported; use another model."
                )
            value = value[0]
        return None if value is None else int(value)

    def need(self, key: str) -> int:
        value = self.integer(key)
        if value is None:
            raise ModelError(
                f"{self.file.path} has no {self._prefix}{key} in its metadata; it is not a complete model. Convert it again."
            )
        return value

    def number(self, key: str) -> float | None:
        value = self.file.get(self._prefix + key, _NUMBER)
        return None if value is None else shortest_float(float(value))

    def text(self, key: str) -> str | None:
        return self.file.get(self._prefix + key, str)

    def window(self) -> int | None:
        return self.integer("attention.sliding_window") or None  # 0 is how some writers say none

    def floats(self, tensor: str) -> list[float] | None:
        """A small float32 tensor's values."""
        info = self.file.tensors.get(tensor)
        if info is None:
            return None
        count = math.prod(info.shape)
        if info.type != F32 or count > 4096:
            raise self.file.damaged(f"{tensor} has type {info.type} and {count} elements")
        with self.file.path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            if info.start + 4 * count > len(data):
                raise self.file.damaged(f"{tensor} ends beyond the file")
            return [shortest_float(value) for value in struct.unpack_from(f"<{count}f", data, info.start)]


def shortest_float(value: float) -> float:
    """A widened float32 as it was originally written: 1e-05 instead of 9.999999747378752e-06."""
    if not math.isfinite(value) or abs(value) > 3e38:
        return value
    bits = struct.pack("<f", value)
    if struct.unpack("<f", bits)[0] != value:
        return value
    written = (float(f"{value:.{digits}g}") for digits in range(6, 10))
    return next((short for short in written if struct.pack("<f", short) == bits), value)


def _common(file: GGUFFile) -> dict[str, Any]:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelError(f"{file.path} has no tensor token_embd.weight; it is not a complete model. Convert it again.")
    return {
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "torch_dtype": _TYPE_NAMES.get(_weight_type(file), "bfloat16"),
        "bos_token_id": file.get("tokenizer.ggml.bos_token_id", int),
        "eos_token_id": _ends(file),
    }


def _packed_types(file: GGUFFile, config: Mapping[str, Any]) -> dict[str, str]:
    """The type of each quantized matrix, by its name in a checkpoint."""
    packed = {
        name: tensor.type
        for name, tensor in file.tensors.items()
        if tensor.type not in _TYPE_NAMES and len(tensor.shape) >= 2
    }
    if not packed:
        return {}
    from gguf.constants import GGMLQuantizationType

    words = {int(each): each.name for each in GGMLQuantizationType}
    found = ((key.removesuffix(".weight"), packed.get(origin.tensor)) for key, origin in origins(file, config).items())
    return {key: words.get(kind, str(kind)) for key, kind in found if kind is not None}


def _weight_type(file: GGUFFile) -> int:
    """The type of the first matrix of the first block: norms are in float32 whatever the rest is."""
    matrices = (
        tensor.type for name, tensor in file.tensors.items() if name.startswith("blk.0.") and len(tensor.shape) >= 2
    )
    return next(matrices, F32)


def _ends(file: GGUFFile) -> int | list[int] | None:
    """The end-of-text token and, if it is another one, the end-of-turn token."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    found = dict.fromkeys(file.get(f"tokenizer.ggml.{key}", int) for key in keys)
    ends = [token for token in found if token is not None]
    return ends[0] if len(ends) == 1 else ends or None


# --- what rotary architectures share ----------------------------------------------------------------------------------


def _rotary(values: _Values, model_type: str, architecture: str, *, partial: bool = False) -> dict[str, Any]:
    heads = values.need("attention.head_count")
    hidden = values.need("embedding_length")
    head_dim = values.integer("attention.key_length") or hidden // heads
    if values.integer("attention.value_length") not in (None, head_dim):
        raise ModelError(
            f"{values.file.path}: attention.value_length differs from key_length, which is not supported; use another model."
        )
    if not partial and values.integer("rope.dimension_count") not in (None, head_dim):
        raise ModelError(
            f"{values.file.path}: only part of each head is rotated, which {model_type} does not support here; use another model."
        )
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_size": hidden,
        "intermediate_size": values.need("feed_forward_length"),
        "num_hidden_layers": values.need("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": values.integer("attention.head_count_kv") or heads,
        "head_dim": head_dim,
        "max_position_embeddings": values.need("context_length"),
        "rms_norm_eps": values.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": values.number("rope.freq_base") or 10000.0,
        "rope_scaling": _rope_scaling(values, head_dim),
        "hidden_act": "silu",
    }


def _rope_scaling(values: _Values, head_dim: int) -> dict[str, Any] | None:
    factors = values.floats("rope_freqs.weight")
    if factors is not None and any(factor != 1.0 for factor in factors):
        return _llama3_scaling(values, factors, head_dim)
    kind, factor = values.text("rope.scaling.type"), values.number("rope.scaling.factor")
    if kind in (None, "none", "longrope") or not factor or factor == 1.0:
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        return {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": values.need("rope.scaling.original_context_length"),
        }
    raise ModelError(
        f"{values.file.path}: rope.scaling.type is {kind!r}, which is not supported; linear, yarn and longrope are."
    )


def _llama3_scaling(values: _Values, factors: list[float], head_dim: int) -> dict[str, Any]:
    """GGUF stores only the computed factors of Llama 3's scaling: finds the parameters that produce them, or rejects
    the file."""
    theta = values.number("rope.freq_base") or 10000.0
    factor = max(factors)
    for low, high in ((1.0, 4.0), (1.0, 2.0)):
        for original in (8192, 4096, 2048, 1024, 64):
            made = llama3_factors(head_dim, theta, factor, low, high, original)
            if len(made) == len(factors) and all(abs(a - b) <= 1e-3 * b for a, b in zip(made, factors, strict=True)):
                names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
                return {"rope_type": "llama3", **dict(zip(names, (factor, low, high, original), strict=True))}
    raise ModelError(
        f"{values.file.path}: the factors in rope_freqs.weight follow no known scaling; use the safetensors checkpoint."
    )


def llama3_factors(head_dim: int, theta: float, factor: float, low: float, high: float, original: int) -> list[float]:
    """What each frequency is divided by: 1 for short waves, ``factor`` for long ones, with a smooth transition."""
    result = []
    for pair in range(head_dim // 2):
        wavelength = 2 * math.pi * theta ** (2 * pair / head_dim)
        if wavelength < original / high:
            result.append(1.0)
        elif wavelength > original / low:
            result.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            result.append(1.0 / ((1.0 - smooth) / factor + smooth))
    return result


# --- rows -------------------------------------------------------------------------------------------------------------


def _llama(values: _Values) -> dict[str, Any]:
    """Llama, Mistral and Mixtral are all written as ``llama``; experts or a window distinguish them."""
    experts, window = values.integer("expert_count"), values.window()
    if experts:
        return {
            **_rotary(values, "mixtral", "MixtralForCausalLM"),
            "num_local_experts": experts,
            "num_experts_per_tok": values.need("expert_used_count"),
            "sliding_window": window,
        }
    if window:
        return {**_rotary(values, "mistral", "MistralForCausalLM"), "sliding_window": window}
    biased = {
        name: f"blk.0.{tensor}.bias" in values.file.tensors
        for name, tensor in (("attention_bias", "attn_q"), ("mlp_bias", "ffn_up"))
    }
    return {**_rotary(values, "llama", "LlamaForCausalLM"), **biased}


def _qwen3moe(values: _Values) -> dict[str, Any]:
    """Every layer is sparse; router weights are renormalized, as in all published models of this architecture."""
    return {
        **_rotary(values, "qwen3_moe", "Qwen3MoeForCausalLM"),
        "num_experts": values.need("expert_count"),
        "num_experts_per_tok": values.need("expert_used_count"),
        "moe_intermediate_size": values.need("expert_feed_forward_length"),
        "norm_topk_prob": True,
    }


def _gemma2(values: _Values) -> dict[str, Any]:
    """The query's scale is not in the metadata: it is the head's size in all models except the 27B, where it is
    hidden / heads."""
    config = _rotary(values, "gemma2", "Gemma2ForCausalLM")
    heads = config["num_attention_heads"]
    scalar = config["hidden_size"] // heads if config["num_hidden_layers"] == 46 else config["head_dim"]
    return {
        **config,
        "query_pre_attn_scalar": scalar,
        "attn_logit_softcapping": values.number("attn_logit_softcapping"),
        "final_logit_softcapping": values.number("final_logit_softcapping"),
        "sliding_window": values.window(),
        "hidden_activation": "gelu_pytorch_tanh",
    }


def _phi3(values: _Values) -> dict[str, Any]:
    config = _rotary(values, "phi3", "Phi3ForCausalLM", partial=True)
    rotated = values.integer("rope.dimension_count") or config["head_dim"]
    long, short = values.floats("rope_factors_long.weight"), values.floats("rope_factors_short.weight")
    if long and short:
        config["rope_scaling"] = {"rope_type": "longrope", "long_factor": long, "short_factor": short}
    return {
        **config,
        "partial_rotary_factor": rotated / config["head_dim"],
        "original_max_position_embeddings": values.integer("rope.scaling.original_context_length"),
        "sliding_window": values.window(),
    }


def _learned(values: _Values, model_type: str, architecture: str, activation: str) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "n_embd": values.need("embedding_length"),
        "n_layer": values.need("block_count"),
        "n_head": values.need("attention.head_count"),
        "n_positions": values.need("context_length"),
        "n_inner": values.integer("feed_forward_length"),
        "layer_norm_epsilon": values.number("attention.layer_norm_epsilon"),
        "activation_function": activation,
    }


def _starcoder(values: _Values) -> dict[str, Any]:
    if values.integer("attention.head_count_kv") not in (None, 1):
        raise ModelError(
            f"{values.file.path}: starcoder with more than one key head is not supported; use a multi-query model."
        )
    return {**_learned(values, "gpt_bigcode", "GPTBigCodeForCausalLM", "gelu_pytorch_tanh"), "multi_query": True}


ARCHITECTURES: Mapping[str, Callable[[_Values], dict[str, Any]]] = {
    "llama": _llama,
    "qwen2": partial(_rotary, model_type="qwen2", architecture="Qwen2ForCausalLM"),
    "qwen3": partial(_rotary, model_type="qwen3", architecture="Qwen3ForCausalLM"),
    "qwen3moe": _qwen3moe,
    "gemma2": _gemma2,
    "phi3": _phi3,
    "gpt2": partial(_learned, model_type="gpt2", architecture="GPT2LMHeadModel", activation="gelu_new"),
    "starcoder": _starcoder,
}
