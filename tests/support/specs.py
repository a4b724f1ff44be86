"""Shapes of decoders that several tests need, as data.

What lives here: DecoderSpecs without torch. What may not: models with weights and their configs (tiny.py).
"""

from __future__ import annotations

from dataclasses import replace

from headrace.spec import DecoderSpec, LayerSpec, RopeSpec

LLAMA_8B = DecoderSpec(
    family="llama",
    vocab_size=128256,
    hidden_size=4096,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=14336,
    layers=(LayerSpec(),) * 32,
    max_positions=131072,
    rope=RopeSpec(theta=500000.0, rotary_dim=128),
    attention_scale=128**-0.5,
)
LLAMA_1B = replace(
    LLAMA_8B,
    hidden_size=2048,
    head_dim=64,
    intermediate_size=8192,
    layers=(LayerSpec(),) * 16,
    rope=RopeSpec(theta=500000.0, rotary_dim=64),
    attention_scale=64**-0.5,
)
# For steps that are priced, not computed.
SMALL = DecoderSpec(
    "llama", 512, 64, 4, 2, 16, 128, (LayerSpec(),) * 2, 4096, RopeSpec(10_000.0, 16), checkpoint_dtype="bfloat16"
)
# So small that bytes and operations are counted by hand.
TINY = DecoderSpec("tiny", 10, 4, 2, 1, 2, 6, (LayerSpec(),) * 3, 64, RopeSpec(1e4, 2), attention_scale=1.0)
