"""A GGUF of random bfloat16 weights in a model's shape, for measuring llama.cpp on the same work.

What lives here: writing that file, a few tensors in memory at a time. What may not: reading GGUF (models/).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headrace.errors import ConfigError
from headrace.spec import DecoderSpec


def write_random_gguf(path: Path, spec: DecoderSpec, context: int) -> None:
    """Llama-shaped dense models only: RMS norms, gated feed-forward, no biases. Raises ConfigError for other shapes."""
    import gguf

    if spec.family not in ("llama", "mistral") or spec.qkv_bias or any(layer.moe for layer in spec.layers):
        raise ConfigError(f"a GGUF for the rival can be made of Llama-shaped dense models, not of {spec.family}; give another config.")
    writer = gguf.GGUFWriter(str(path), "llama", use_temp_file=False)
    writer.add_context_length(context)
    writer.add_embedding_length(spec.hidden_size)
    writer.add_block_count(spec.num_layers)
    writer.add_feed_forward_length(spec.intermediate_size)
    writer.add_head_count(spec.num_heads)
    writer.add_head_count_kv(spec.num_kv_heads)
    writer.add_rope_dimension_count(spec.head_dim)
    writer.add_key_length(spec.head_dim)
    writer.add_value_length(spec.head_dim)
    writer.add_rope_freq_base(spec.rope.theta if spec.rope else 10000.0)
    writer.add_layer_norm_rms_eps(spec.norm_eps)
    writer.add_vocab_size(spec.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    for name, tensor in _tensors(spec, np.random.default_rng(0)):
        if tensor.dtype == np.uint16:
            writer.add_tensor(name, tensor.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _tensors(spec: DecoderSpec, random: np.random.Generator) -> Iterator[tuple[str, NDArray[np.uint16] | NDArray[np.float32]]]:
    hidden, wide = spec.hidden_size, spec.intermediate_size
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    yield "token_embd.weight", _random_bf16(random, spec.vocab_size, hidden)
    yield "output_norm.weight", np.ones(hidden, np.float32)
    if not spec.tied_head:
        yield "output.weight", _random_bf16(random, spec.vocab_size, hidden)
    for index in range(spec.num_layers):
        shapes = {
            "attn_q": (queries, hidden),
            "attn_k": (keys, hidden),
            "attn_v": (keys, hidden),
            "attn_output": (hidden, queries),
            "ffn_gate": (wide, hidden),
            "ffn_up": (wide, hidden),
            "ffn_down": (hidden, wide),
        }
        for norm in ("attn_norm", "ffn_norm"):
            yield f"blk.{index}.{norm}.weight", np.ones(hidden, np.float32)
        for name, shape in shapes.items():
            yield f"blk.{index}.{name}.weight", _random_bf16(random, *shape)


def _random_bf16(random: np.random.Generator, rows: int, columns: int) -> NDArray[np.uint16]:
    """Uniform in ±0.035 (a deviation of 0.02), cut to bfloat16's upper 16 bits; a large matrix repeats its first million values."""
    values = (random.random(min(rows * columns, 1 << 20), np.float32) - 0.5) * 0.07
    return np.resize((values.view(np.uint32) >> 16).astype(np.uint16), (rows, columns))
