"""Which checkpoint tensors make up which parameter of the decoder.

What lives here: the names families use on disk, and the rules that merge, stack and transpose. What may not: torch, reading.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from headrace.spec import DecoderSpec, MoESpec, NormKind


@dataclass(frozen=True, slots=True)
class WeightRule:
    """How one parameter is made of checkpoint tensors.

    Each inner tuple of ``sources`` is concatenated on dimension 0 (each tensor transposed first, if ``transpose``); the outer
    ones are stacked on a new dimension 0 if ``stack``, else there is exactly one. ``target`` is a name from the decoder's
    ``named_parameters()``, ``shape`` the finished shape. Names are those of the causal language model, with its leading
    ``model.`` or ``transformer.``; some checkpoints leave it out, and the loader finds them too.
    """

    target: str
    sources: tuple[tuple[str, ...], ...]
    shape: tuple[int, ...]
    stack: bool = False
    transpose: bool = False


@dataclass(frozen=True, slots=True)
class _Names:
    """A family's words on disk. Inside a layer they are relative to ``layer``."""

    prefix: str = "model."
    embedding: str = "embed_tokens"
    positions: str = ""
    norm: str = "norm"
    layer: str = "layers"
    attention_norm: str = "input_layernorm"
    feed_forward_norm: str = "post_attention_layernorm"
    post_attention_norm: str = ""
    post_feed_forward_norm: str = ""
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    output: str = "self_attn.o_proj"
    up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    router: str = "mlp.gate"
    experts: str = "mlp.experts"
    expert_up: tuple[str, ...] = ("gate_proj", "up_proj")
    expert_down: str = "down_proj"
    transposed: bool = False  # matrices are stored [in, out]


_LLAMA = _Names()
_GPT = _Names(
    prefix="transformer.",
    embedding="wte",
    positions="wpe",
    norm="ln_f",
    layer="h",
    attention_norm="ln_1",
    feed_forward_norm="ln_2",
    qkv=("attn.c_attn",),
    output="attn.c_proj",
    up=("mlp.c_fc",),
    down="mlp.c_proj",
)
_FAMILY_NAMES = {
    "gemma2": replace(
        _LLAMA,
        feed_forward_norm="pre_feedforward_layernorm",
        post_attention_norm="post_attention_layernorm",
        post_feed_forward_norm="post_feedforward_layernorm",
    ),
    "phi3": replace(_LLAMA, qkv=("self_attn.qkv_proj",), up=("mlp.gate_up_proj",)),
    "mixtral": replace(
        _LLAMA, router="block_sparse_moe.gate", experts="block_sparse_moe.experts", expert_up=("w1", "w3"), expert_down="w2"
    ),
    "gpt2": replace(_GPT, transposed=True),
    "gpt_bigcode": _GPT,
}
_HEAD = "lm_head"


def _names(spec: DecoderSpec) -> _Names:
    return _FAMILY_NAMES.get(spec.family, _LLAMA)


def count_weights(spec: DecoderSpec) -> int:
    """Elements of all tensors, a tied head's once."""
    return sum(math.prod(rule.shape) for rule in weight_rules(spec))


def ignored_keys(spec: DecoderSpec) -> tuple[str, ...]:
    """Regular expressions of keys that carry no weight: constants some checkpoints store, and a tied head's copy."""
    prefix = _names(spec).prefix.replace(".", r"\.")
    constants = rf"{prefix}(.*\.)?rotary_emb\.(inv_freq|cos_cached|sin_cached)", rf"{prefix}h\.\d+\.attn\.(bias|masked_bias)"
    return (*constants, rf"{_HEAD}\.weight") if spec.tied_head else constants


def weight_rules(spec: DecoderSpec) -> Iterator[WeightRule]:
    """One rule for every parameter of the decoder, in the order in which it computes."""
    names, hidden = _names(spec), spec.hidden_size
    yield WeightRule("embedding.weight", ((f"{names.prefix}{names.embedding}.weight",),), (spec.vocab_size, hidden))
    if spec.rope is None:
        yield WeightRule("positions.weight", ((f"{names.prefix}{names.positions}.weight",),), (spec.max_positions, hidden))
    for index in range(spec.num_layers):
        yield from _layer_rules(spec, names, index)
    yield from _norm_rules(spec, "norm", names.prefix + names.norm)
    if not spec.tied_head:
        yield WeightRule("head.weight", ((f"{_HEAD}.weight",),), (spec.vocab_size, hidden))


def _layer_rules(spec: DecoderSpec, names: _Names, index: int) -> Iterator[WeightRule]:
    target, source = f"layers.{index}.", f"{names.prefix}{names.layer}.{index}."
    yield from _norm_rules(spec, target + "attention_norm", source + names.attention_norm)
    yield from _attention_rules(spec, names, target + "attention.", source)
    if spec.sandwich_norm:
        yield from _norm_rules(spec, target + "post_attention_norm", source + names.post_attention_norm)
    yield from _norm_rules(spec, target + "feed_forward_norm", source + names.feed_forward_norm)
    moe = spec.layers[index].moe
    if moe is None:
        yield from _dense_rules(spec, names, target + "feed_forward.", source)
    else:
        yield from _sparse_rules(spec, names, moe, target + "feed_forward.", source)
    if spec.sandwich_norm:
        yield from _norm_rules(spec, target + "post_feed_forward_norm", source + names.post_feed_forward_norm)


def _attention_rules(spec: DecoderSpec, names: _Names, target: str, source: str) -> Iterator[WeightRule]:
    heads = spec.num_heads * spec.head_dim
    merged = heads + 2 * spec.num_kv_heads * spec.head_dim
    yield from _matrix_rules(names, target + "qkv", [source + name for name in names.qkv], merged, spec.hidden_size, spec.qkv_bias)
    if spec.qk_norm:
        yield WeightRule(target + "q_norm.weight", ((f"{source}{names.q_norm}.weight",),), (spec.head_dim,))
        yield WeightRule(target + "k_norm.weight", ((f"{source}{names.k_norm}.weight",),), (spec.head_dim,))
    yield from _matrix_rules(names, target + "output", [source + names.output], spec.hidden_size, heads, spec.output_bias)


def _dense_rules(spec: DecoderSpec, names: _Names, target: str, source: str) -> Iterator[WeightRule]:
    inner = spec.intermediate_size
    width = 2 * inner if spec.gated_mlp else inner
    yield from _matrix_rules(names, target + "up", [source + name for name in names.up], width, spec.hidden_size, spec.mlp_bias)
    yield from _matrix_rules(names, target + "down", [source + names.down], spec.hidden_size, inner, spec.mlp_bias)


def _sparse_rules(spec: DecoderSpec, names: _Names, moe: MoESpec, target: str, source: str) -> Iterator[WeightRule]:
    hidden, inner = spec.hidden_size, moe.intermediate_size
    experts = [f"{source}{names.experts}.{expert}." for expert in range(moe.num_experts)]
    ups = tuple(tuple(f"{expert}{name}.weight" for name in names.expert_up) for expert in experts)
    downs = tuple((f"{expert}{names.expert_down}.weight",) for expert in experts)
    yield WeightRule(target + "router.weight", ((f"{source}{names.router}.weight",),), (moe.num_experts, hidden))
    yield WeightRule(target + "gate_up", ups, (moe.num_experts, 2 * inner, hidden), stack=True)
    yield WeightRule(target + "down", downs, (moe.num_experts, hidden, inner), stack=True)


def _matrix_rules(names: _Names, target: str, sources: list[str], out: int, width: int, bias: bool) -> Iterator[WeightRule]:
    """Tensors merged in the order of ``sources``; the finished matrix is [out, in] whatever the disk's order."""
    yield WeightRule(f"{target}.weight", (tuple(f"{name}.weight" for name in sources),), (out, width), transpose=names.transposed)
    if bias:
        yield WeightRule(f"{target}.bias", (tuple(f"{name}.bias" for name in sources),), (out,))


def _norm_rules(spec: DecoderSpec, target: str, source: str) -> Iterator[WeightRule]:
    yield WeightRule(f"{target}.weight", ((f"{source}.weight",),), (spec.hidden_size,))
    if spec.norm is NormKind.LAYER:
        yield WeightRule(f"{target}.bias", ((f"{source}.bias",),), (spec.hidden_size,))
