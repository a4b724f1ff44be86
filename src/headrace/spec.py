"""A model's shape as data: everything the cost model, the cache and the decoder need to know, and no tensor.

What lives here: frozen descriptions. What may not: torch, file reading, names of model families
(models/families.py normalises a Hugging Face config into a DecoderSpec).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class NormKind(str, Enum):
    RMS = "rms"
    LAYER = "layer"


class Activation(str, Enum):
    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding of the first ``rotary_dim`` elements of a head, rotated as two halves.

    ``kind``: "default", "linear", "llama3", "yarn" or "longrope". ``original_max_positions`` is the trained length
    that llama3, yarn and longrope scale from. ``attention_factor`` (yarn, longrope) multiplies cos and sin.
    ``short_factor`` and ``long_factor`` (length rotary_dim / 2) belong to longrope alone: short serves a context of up to
    ``original_max_positions`` tokens, long a longer one; one of them is chosen for the whole run, by max_model_len.
    Sources: RoFormer (Su et al. 2021), YaRN (Peng et al. 2023), LongRoPE (Ding et al. 2024), Llama 3 as published.
    """

    theta: float
    rotary_dim: int
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 0
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True  # yarn: round the ramp's ends to whole dimensions
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class MoESpec:
    """Sparse feed-forward: ``top_k`` of ``num_experts`` experts a token; router weights renormalised or not."""

    num_experts: int
    top_k: int
    intermediate_size: int
    renormalize: bool


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What differs from layer to layer. ``window`` is the number of keys a query may see, itself included; None = all.

    ``moe`` None means a dense feed-forward. ``attention_divisor`` divides the model's attention_scale (GPT-2 variants
    that scale by depth).
    """

    window: int | None = None
    moe: MoESpec | None = None
    attention_divisor: float = 1.0


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """A decoder-only transformer. Sizes in elements, positions in tokens.

    ``layers`` has one entry a layer. ``max_positions`` is the longest context the model allows. ``rope`` None means learned
    positions (``max_positions`` rows). ``attention_scale`` multiplies q·k, then ``attention_soft_cap`` c turns a score s
    into c·tanh(s/c), as ``logits_soft_cap`` does with logits. ``norm_offset`` is added to norm weights (Gemma's 1 + w).
    ``sandwich_norm``: a norm after attention and after the feed-forward too (Gemma 2). ``qk_norm``: an RMS norm over each
    head of q and k, before rotation. ``norm`` LAYER has a weight and a bias. ``gated_mlp``: act(gate) · up instead of
    act(up). ``output_bias``: of the projection after attention. ``mlp_bias``: of both feed-forward projections.
    ``embedding_scale`` multiplies the token embedding. ``checkpoint_dtype`` is the config's word for its weights.
    """

    family: str
    vocab_size: int  # rows of the embedding = width of the logits
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    layers: tuple[LayerSpec, ...]
    max_positions: int
    rope: RopeSpec | None
    norm: NormKind = NormKind.RMS
    norm_eps: float = 1e-5
    norm_offset: float = 0.0
    sandwich_norm: bool = False
    qk_norm: bool = False
    activation: Activation = Activation.SILU
    gated_mlp: bool = True
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    tied_head: bool = False
    attention_scale: float = 0.0  # every family fills it; 0 is refused by the decoder
    attention_soft_cap: float | None = None
    logits_soft_cap: float | None = None
    embedding_scale: float | None = None
    eos_token_ids: tuple[int, ...] = ()
    checkpoint_dtype: str = "float32"

    @property
    def num_layers(self) -> int:
        return len(self.layers)


class KVKind(str, Enum):
    FULL = "full"
    SLIDING = "sliding"


@dataclass(frozen=True, slots=True)
class KVSpec:
    """One KV group: layers that share a block table, an allocation and a lifetime rule.

    The allocation is block-major, ``[num_blocks, layers, 2 (K, V), num_kv_heads, block_size, head_dim]``,
    so that a block of all its layers is one contiguous span.
    """

    layers: tuple[int, ...]
    kind: KVKind
    block_size: int  # tokens
    num_kv_heads: int
    head_dim: int
    dtype_bytes: int
    window: int | None = None  # tokens; sliding only

    @property
    def bytes_per_block(self) -> int:
        return len(self.layers) * 2 * self.num_kv_heads * self.block_size * self.head_dim * self.dtype_bytes


@dataclass(frozen=True, slots=True)
class KVGroup:
    """One KV group as an executor holds it."""

    spec: KVSpec
    num_blocks: int


def attention_groups(spec: DecoderSpec) -> tuple[tuple[int | None, tuple[int, ...]], ...]:
    """(window, layers) of each KV group: layers that keep the same keys. Full attention first, windows in order of first appearance."""
    by_window: dict[int | None, list[int]] = {}
    for index, layer in enumerate(spec.layers):
        by_window.setdefault(layer.window, []).append(index)
    ordered = sorted(by_window.items(), key=lambda item: item[0] is not None)
    return tuple((window, tuple(layers)) for window, layers in ordered)


def kv_groups(spec: DecoderSpec, block_size: int, dtype_bytes: int) -> tuple[KVSpec, ...]:
    """The cache's view of ``attention_groups``: one KVSpec each, in that order."""
    return tuple(
        KVSpec(
            layers=layers,
            kind=KVKind.FULL if window is None else KVKind.SLIDING,
            block_size=block_size,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            dtype_bytes=dtype_bytes,
            window=window,
        )
        for window, layers in attention_groups(spec)
    )
