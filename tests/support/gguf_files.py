"""Writes GGUF files from tiny Hugging Face folders with the gguf library, as a converter would.

What lives here: the conversions that converters make (and that the reader must undo). What may not: reading GGUF,
tests.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Q
from safetensors.numpy import load_file

ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gemma2": "gemma2",
    "phi3": "phi3",
    "gpt2": "gpt2",
    "gpt_bigcode": "starcoder",
}
_BLOCK = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "ln_1": "attn_norm",
    "ln_2": "ffn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}
_GEMMA2 = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_EXPERT = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}
_TOP = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "transformer.wte": "token_embd",
    "transformer.wpe": "position_embd",
    "transformer.ln_f": "output_norm",
}


def write_gguf(
    folder: Path,
    target: Path,
    *,
    kind: Q | Callable[[str], Q] = Q.F32,
    metadata: Mapping[str, Any] | None = None,
    shards_of: int = 0,
) -> Path:
    """The model in ``folder`` as a GGUF file whose matrices have type ``kind`` (or what it says of their name) where
    their rows allow it; in shards of so many tensors."""
    target.parent.mkdir(exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(target, ARCHITECTURES[config["model_type"]], split_max_tensors=shards_of)
    _write_config(writer, config)
    _write_rope(writer, config)
    _write_byte_level(writer, json.loads((folder / "tokenizer.json").read_text()), config)
    for key, value in (metadata or {}).items():
        (writer.add_uint32 if isinstance(value, int) else writer.add_string)(key, value)
    for name, values in _converted(folder, config):
        _add(writer, name, values, kind if isinstance(kind, Q) else kind(name))
    _finish(writer)
    return next(target.parent.glob(f"{target.stem}-00001-of-*.gguf")) if shards_of else target


def _finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: gguf.GGUFWriter, name: str, values: np.ndarray[Any, Any], kind: Q) -> None:
    block = gguf.GGML_QUANT_SIZES[kind][0]
    if values.ndim < 2 or values.shape[-1] % block or kind == Q.F32:
        kind = Q.F32
    data = gguf.quants.quantize(np.ascontiguousarray(values, dtype=np.float32), kind)
    writer.add_tensor(name, data, raw_dtype=kind)


def _write_config(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    heads = config.get("num_attention_heads") or config["n_head"]
    writer.add_context_length(config.get("max_position_embeddings") or config["n_positions"])
    writer.add_embedding_length(config.get("hidden_size") or config["n_embd"])
    writer.add_block_count(config.get("num_hidden_layers") or config["n_layer"])
    writer.add_feed_forward_length(config.get("intermediate_size") or config.get("n_inner") or 4 * config["n_embd"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(1 if config["model_type"] == "gpt_bigcode" else config.get("num_key_value_heads") or heads)
    if "rms_norm_eps" in config:
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    else:
        writer.add_layer_norm_eps(config["layer_norm_epsilon"])
    if config.get("head_dim"):
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    if config.get("sliding_window") and config["model_type"] in ("gemma2", "phi3", "mistral"):
        writer.add_sliding_window(config["sliding_window"])
    if config["model_type"] == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    experts = config.get("num_local_experts") or config.get("num_experts")
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if "moe_intermediate_size" in config:
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])


def _write_rope(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    rope = config.get("rope_parameters") or {}
    if "rope_theta" in rope:
        writer.add_rope_freq_base(rope["rope_theta"])
    if config["model_type"] == "phi3":
        head_dim = config["hidden_size"] // config["num_attention_heads"]
        writer.add_rope_dimension_count(int(head_dim * (rope.get("partial_rotary_factor") or 1.0)))
    kind = rope.get("rope_type", "default")
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if kind == "longrope":
        writer.add_rope_scaling_orig_ctx_len(config["original_max_position_embeddings"])
        for length in ("long", "short"):
            writer.add_tensor(f"rope_factors_{length}.weight", np.array(rope[f"{length}_factor"], dtype=np.float32))
    if kind == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_factors(rope, config))


def _llama3_factors(rope: Mapping[str, Any], config: Mapping[str, Any]) -> np.ndarray[Any, Any]:
    """By the definition published with Llama 3.1, on the vector of frequencies."""
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    frequency = 1.0 / rope["rope_theta"] ** (np.arange(0, dim, 2) / dim)
    turns = rope["original_max_position_embeddings"] * frequency / (2 * np.pi)
    smooth = np.clip((turns - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"]), 0.0, 1.0)
    scaled = frequency * smooth + frequency / rope["factor"] * (1.0 - smooth)
    return np.asarray(frequency / scaled, dtype=np.float32)


def _converted(folder: Path, config: Mapping[str, Any]) -> list[tuple[str, np.ndarray[Any, Any]]]:
    found: dict[str, np.ndarray[Any, Any]] = {}
    experts: dict[str, dict[int, np.ndarray[Any, Any]]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        for key, values in load_file(file).items():
            stem, _, suffix = key.rpartition(".")
            if ".experts." in stem:
                block, _, rest = stem.partition(".experts.")
                number, _, word = rest.partition(".")
                experts.setdefault(f"blk.{block.split('.')[2]}.ffn_{_EXPERT[word]}_exps.{suffix}", {})[int(number)] = (
                    values
                )
            else:
                name = _name(stem, config)
                found[f"{name}.{suffix}"] = _changed(name, suffix, values, config)
    found.update({name: np.stack([parts[i] for i in range(len(parts))]) for name, parts in experts.items()})
    return list(found.items())


def _name(stem: str, config: Mapping[str, Any]) -> str:
    if stem in _TOP:
        return _TOP[stem]
    words = {**_BLOCK, **(_GEMMA2 if config["model_type"] == "gemma2" else {})}
    _, _, index, word = stem.split(".", 3)
    return f"blk.{index}.{words[word]}"


def _changed(name: str, suffix: str, values: np.ndarray[Any, Any], config: Mapping[str, Any]) -> np.ndarray[Any, Any]:
    family, word = config["model_type"], name.rpartition(".")[2]
    if ARCHITECTURES[family] == "llama" and word in ("attn_q", "attn_k"):
        heads = config["num_attention_heads" if word == "attn_q" else "num_key_value_heads"]
        halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
        return halves.swapaxes(1, 2).reshape(values.shape)
    if family == "gpt2" and suffix == "weight" and word in ("attn_qkv", "attn_output", "ffn_up", "ffn_down"):
        return values.T
    if family == "gemma2" and word.endswith("norm"):
        return values + np.float32(1.0)
    return values


def _write_byte_level(writer: gguf.GGUFWriter, tokenizer: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    vocab = {token: index for token, index in tokenizer["model"]["vocab"].items()}
    special = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    vocab.update(special)
    words = {index: token for token, index in vocab.items()}
    size = max(words) + 1
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([words.get(index, f"[unused{index}]") for index in range(size)])
    types = gguf.TokenType
    writer.add_token_types([types.CONTROL if words.get(index) in special else types.NORMAL for index in range(size)])
    writer.add_token_merges(
        [merge if isinstance(merge, str) else " ".join(merge) for merge in tokenizer["model"]["merges"]]
    )
    for name in ("bos", "eos"):
        if isinstance(config.get(f"{name}_token_id"), int):
            getattr(writer, f"add_{name}_token_id")(config[f"{name}_token_id"])
