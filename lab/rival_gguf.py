"""A GGUF of random weights in a model's shape, bfloat16 or in blocks, for measuring llama.cpp on the same work.

What lives here: writing that file, a tensor at a time. What may not: reading GGUF (models/).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headrace.errors import ConfigError
from headrace.quantize.gguf_recipe import MIXTURES, finer_layer
from headrace.spec import DecoderSpec

FORMATS = ("BF16", "Q4_0", "Q8_0", "Q4_K_M")
_SCALES = {"Q4_0": (0,), "Q8_0": (0,), "Q4_K": (0, 2), "Q6_K": (208,)}  # where a block's float16 scales are


def write_random_gguf(path: Path, spec: DecoderSpec, context: int, form: str = "BF16") -> None:
    """Llama-shaped dense models only: RMS norms, gated feed-forward, no biases. ``form``: one of FORMATS, mixed from
    matrix to matrix as llama.cpp's own quantizer does. Raises ConfigError for other shapes."""
    import gguf

    if spec.family not in ("llama", "mistral") or spec.qkv_bias or any(layer.moe for layer in spec.layers):
        raise ConfigError(
            f"a GGUF for the rival can be made of Llama-shaped dense models, not of {spec.family}; give another config."
        )
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
    writer.add_tokenizer_model("none")
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{form}"])
    random = np.random.default_rng(0)
    for name, shape in _shapes(spec):
        if len(shape) == 1:
            writer.add_tensor(name, np.ones(shape, np.float32))
        else:
            kind = _kind(form, name, spec.num_layers)
            raw = (
                _random_bf16(random, *shape).view(np.uint8) if kind == "BF16" else _random_blocks(random, kind, *shape)
            )
            writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _shapes(spec: DecoderSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, wide = spec.hidden_size, spec.intermediate_size
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    yield "token_embd.weight", (spec.vocab_size, hidden)
    yield "output_norm.weight", (hidden,)
    if not spec.tied_head:
        yield "output.weight", (spec.vocab_size, hidden)
    for index in range(spec.num_layers):
        shapes = {
            "attn_norm": (hidden,),
            "ffn_norm": (hidden,),
            "attn_q": (queries, hidden),
            "attn_k": (keys, hidden),
            "attn_v": (keys, hidden),
            "attn_output": (hidden, queries),
            "ffn_gate": (wide, hidden),
            "ffn_up": (wide, hidden),
            "ffn_down": (hidden, wide),
        }
        for name, shape in shapes.items():
            yield f"blk.{index}.{name}.weight", shape


def _kind(form: str, name: str, layers: int) -> str:
    if form == "BF16":
        return form
    most, fine, head = MIXTURES[form]
    if name in ("token_embd.weight", "output.weight"):
        return head
    finer = ("attn_v" in name or "ffn_down" in name) and finer_layer(int(name.split(".")[1]), layers)
    return fine if finer else most


def _random_blocks(random: np.random.Generator, kind: str, rows: int, columns: int) -> NDArray[np.uint8]:
    """Random codes under scales of 2^-10; a large matrix repeats its first rows."""
    import gguf

    elements, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    made = random.integers(0, 256, (min(rows, 256), columns // elements, size), np.uint8)
    for at in _SCALES[kind]:
        made[:, :, at], made[:, :, at + 1] = 0, 0x14
    return np.resize(made.reshape(len(made), -1), (rows, columns // elements * size))


def _random_bf16(random: np.random.Generator, rows: int, columns: int) -> NDArray[np.uint16]:
    """Uniform in ±0.035 (a deviation of 0.02), cut to bfloat16's upper 16 bits; a large matrix repeats its first
    million values."""
    values = (random.random(min(rows * columns, 1 << 20), np.float32) - 0.5) * 0.07
    return np.resize((values.view(np.uint32) >> 16).astype(np.uint16), (rows, columns))
