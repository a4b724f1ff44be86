"""GGUF tensors under Hugging Face names: which tensor, which part of it, and how it was changed when it was written.

What lives here: one table an architecture. What may not: torch, reading tensors (gguf_checkpoint.py applies the changes).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from headrace.models.gguf_file import GGUFFile


class Change(Enum):
    """What the converter did to a tensor, to be undone."""

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


# Inside a block: GGUF's word → checkpoint's word.
_LLAMA_BLOCK: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
_GPT_BLOCK: Mapping[str, str] = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
_MIXTRAL: Mapping[str, str] = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}
_GEMMA2: Mapping[str, str] = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_PHI3: Mapping[str, str] = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}

# by model_type of the synthesised config
_BLOCKS: Mapping[str, Mapping[str, str]] = {
    "gemma2": {**_LLAMA_BLOCK, **_GEMMA2},
    "phi3": {**_LLAMA_BLOCK, **_PHI3},
    "mixtral": {**_LLAMA_BLOCK, **_MIXTRAL},
    "gpt2": _GPT_BLOCK,
    "gpt_bigcode": _GPT_BLOCK,
}
_LLAMA_TOP: Mapping[str, str] = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_GPT_TOP: Mapping[str, str] = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
}

_INTERLEAVED = ("llama", "mistral", "mixtral")  # model types that are written as architecture "llama"
_TRANSPOSED = ("attn_qkv", "attn_output", "ffn_up", "ffn_down")  # gpt2's Conv1D
_CONSTANTS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")  # read into the config


def origins(file: GGUFFile, config: Mapping[str, Any]) -> dict[str, Origin]:
    """Every tensor of the file by its checkpoint name; one that has none keeps its own, so that the loader names it."""
    found: dict[str, Origin] = {}
    for tensor in file.tensors:
        if tensor not in _CONSTANTS:
            found.update(_named(file, tensor, config))
    return found


def _named(file: GGUFFile, tensor: str, config: Mapping[str, Any]) -> Iterator[tuple[str, Origin]]:
    family = config["model_type"]
    stem, _, suffix = tensor.rpartition(".")
    gpt = family in ("gpt2", "gpt_bigcode")
    if not stem.startswith("blk."):
        name = (_GPT_TOP if gpt else _LLAMA_TOP).get(stem)
        yield (tensor if name is None else f"{name}.{suffix}", Origin(tensor, _change(family, stem, suffix)))
        return
    _, index, word = stem.split(".", 2) if stem.count(".") >= 2 else ("", "", stem)
    name, expert = _block_name(family, word)
    prefix = f"transformer.h.{index}." if gpt else f"model.layers.{index}."
    origin = Origin(tensor, _change(family, word, suffix), _heads(word, config))
    if name is None:
        yield tensor, origin
    elif "{}" in name and expert is None:
        for part in range(file.tensors[tensor].shape[0]):
            yield f"{prefix}{name.format(part)}.{suffix}", Origin(tensor, part=part)
    else:
        yield f"{prefix}{name.format(expert)}.{suffix}", origin


def _block_name(family: str, word: str) -> tuple[str | None, str | None]:
    """The checkpoint's word, and the expert of a tensor that holds a single one (``ffn_up.3``, as older files have it)."""
    block = _BLOCKS.get(family, _LLAMA_BLOCK)
    base, _, expert = word.rpartition(".")
    if base and expert.isdigit():
        return block.get(base + "_exps"), expert
    return block.get(word), None


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
