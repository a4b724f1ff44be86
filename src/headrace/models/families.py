"""The model families, one row each: from a Hugging Face ``config.json`` (as written by transformers 4 or 5) to a
DecoderSpec.

What lives here: rows, and the few readers that rows share. What may not: torch, tensors, names of weights
(weight_rules.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from headrace.errors import ModelError
from headrace.models.fields import MISSING_FAMILIES, Fields
from headrace.models.pooling import KEY, with_pooling
from headrace.models.weight_rules import with_formats
from headrace.quant.config import read_quantization
from headrace.spec import Activation, DecoderSpec, LayerSpec, MoESpec, NormKind, RopeSpec

MAX_LAYERS = 1024
MAX_EXPERTS = 4096

Windows = Sequence[int | None]  # one entry a layer: keys a query may see, None = all
ReadWindows = Callable[[Fields, int], Windows]

_ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu": Activation.GELU,
    "gelu_python": Activation.GELU,
    "gelu_new": Activation.GELU_TANH,
    "gelu_fast": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
}

# --- attention windows ------------------------------------------------------------------------------------------------


def _none(fields: Fields, num_layers: int) -> Sequence[None]:
    """No windows, or no experts, in any layer."""
    return (None,) * num_layers


def _same_window(fields: Fields, num_layers: int) -> Windows:
    """The same window for every layer."""
    return (fields.optional_integer("sliding_window"),) * num_layers


def _switched_window(fields: Fields, num_layers: int) -> Windows:
    """The same window for every layer, if ``use_sliding_window`` is set."""
    fields.raw("max_window_layers")  # the family's reference implementation does not look at it
    window = fields.optional_integer("sliding_window")
    return (window if fields.boolean("use_sliding_window", False) else None,) * num_layers


def _upper_windows(fields: Fields, num_layers: int) -> Windows:
    """A window from layer ``max_window_layers`` on, if ``use_sliding_window`` is set; ``layer_types`` overrides."""
    first = fields.integer("max_window_layers", 28, low=0)
    window = fields.optional_integer("sliding_window", 4096)
    if not fields.boolean("use_sliding_window", False):
        window = None
    return _by_type(fields, [window if index >= first else None for index in range(num_layers)], window)


def _alternating_windows(fields: Fields, num_layers: int) -> Windows:
    """A window for every other layer, starting with the first; ``layer_types`` overrides."""
    window = fields.optional_integer("sliding_window", 4096)
    if fields.has("sliding_window_size") and fields.optional_integer("sliding_window_size") != window:
        raise fields.error("sliding_window_size", f"differs from sliding_window ({window}); make them equal")
    return _by_type(fields, [None if index % 2 else window for index in range(num_layers)], window)


def _by_type(fields: Fields, default: list[int | None], window: int | None) -> Windows:
    types = fields.raw("layer_types")
    if types is None:
        return default
    known = {"full_attention": None} if window is None else {"full_attention": None, "sliding_attention": window}
    if (
        not isinstance(types, list)
        or len(types) != len(default)
        or not all(isinstance(word, str) and word in known for word in types)
    ):
        problem = f"must name {len(default)} layers as {' or '.join(known)}; other types (or sliding without a window) are not supported"
        raise fields.error("layer_types", problem)
    return [known[word] for word in types]


# --- feed-forwards ----------------------------------------------------------------------------------------------------


def _mixtral_experts(fields: Fields, num_layers: int) -> Sequence[MoESpec | None]:
    num_experts = fields.integer("num_local_experts", high=MAX_EXPERTS)
    top_k = fields.integer("num_experts_per_tok", high=num_experts)
    return (MoESpec(num_experts, top_k, fields.integer("intermediate_size"), renormalize=True),) * num_layers


def _qwen_experts(fields: Fields, num_layers: int) -> Sequence[MoESpec | None]:
    """Sparse at every ``decoder_sparse_step``-th layer, except those in ``mlp_only_layers``."""
    num_experts = fields.integer("num_experts" if fields.has("num_experts") else "num_local_experts", high=MAX_EXPERTS)
    moe = MoESpec(
        num_experts=num_experts,
        top_k=fields.integer("num_experts_per_tok", high=num_experts),
        intermediate_size=fields.integer("moe_intermediate_size"),
        renormalize=fields.boolean("norm_topk_prob", False),
    )
    step = fields.integer("decoder_sparse_step", 1)
    dense = set(fields.integers("mlp_only_layers"))
    return tuple(moe if index not in dense and (index + 1) % step == 0 else None for index in range(num_layers))


# --- the two blocks' readers ------------------------------------------------------------------------------------------


def _rotary_decoder(
    fields: Fields,
    *,
    windows: ReadWindows = _none,
    feed_forwards: Callable[[Fields, int], Sequence[MoESpec | None]] = _none,
    head_dim: int | None = None,
    theta: float = 10000.0,
    partial_rotation: bool = False,
    always_qkv_bias: bool = False,
    qk_norm: bool = False,
    tied: bool = False,
    activation: str = "hidden_act",
    default_activation: str = "silu",
    **more: Any,
) -> DecoderSpec:
    """RMS norms, rotary positions, a gated feed-forward: Llama and its descendants. ``more`` goes into the spec."""
    num_layers, hidden, heads = _sizes(fields, "num_hidden_layers", "hidden_size", "num_attention_heads")
    head_size = fields.optional_integer("head_dim", head_dim, high=4096) or _even_share(fields, hidden, heads)
    positions = fields.integer("max_position_embeddings", 2048, high=2**31 - 1)
    rope = read_rope(fields, head_size, positions, default_theta=theta, partial=partial_rotation)
    max_positions = rope_context(rope, positions)
    bias = fields.boolean("attention_bias", False) and not always_qkv_bias
    return DecoderSpec(
        **_common(fields, tied),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=_kv_heads(fields, heads),
        head_dim=head_size,
        intermediate_size=fields.integer("intermediate_size"),
        layers=_layers(windows(fields, num_layers), feed_forwards(fields, num_layers), max_positions),
        max_positions=max_positions,
        rope=rope,
        norm_eps=fields.number("rms_norm_eps", 1e-6, high=1.0),
        activation=fields.choice(activation, _ACTIVATIONS, default_activation),
        qkv_bias=bias or always_qkv_bias,
        output_bias=bias,
        mlp_bias=fields.boolean("mlp_bias", False),
        qk_norm=qk_norm and fields.boolean("use_qk_norm", True),
        **{"attention_scale": head_size**-0.5, **more},
    )


def _learned_decoder(fields: Fields, *, default_activation: str, multi_query: bool = False) -> DecoderSpec:
    """A plain feed-forward after norms: GPT-2 and StarCoder."""
    num_layers, hidden, heads = _sizes(fields, "n_layer", "n_embd", "n_head")
    by_depth = fields.boolean("scale_attn_by_inverse_layer_idx", False)
    spec = _layer_normed(
        fields,
        (hidden, heads),
        intermediate_size=fields.optional_integer("n_inner", high=2**24) or 4 * hidden,
        layers=tuple(LayerSpec(attention_divisor=float(index + 1) if by_depth else 1.0) for index in range(num_layers)),
        max_positions=fields.integer("n_positions", high=2**24),
        norm_eps=fields.number("layer_norm_epsilon", 1e-5, high=1.0),
        activation=fields.choice("activation_function", _ACTIVATIONS, default_activation),
    )
    scale = spec.attention_scale if fields.boolean("scale_attn_weights", True) else 1.0
    return replace(spec, attention_scale=scale, num_kv_heads=1 if multi_query else heads)


def _encoder(fields: Fields, *, offset: bool = False) -> DecoderSpec:
    """Norms after each addition, token types: BERT. ``offset``: positions begin after the padding token's
    (RoBERTa)."""
    num_layers, hidden, heads = _sizes(fields, "num_hidden_layers", "hidden_size", "num_attention_heads")
    rows = fields.integer("max_position_embeddings", high=2**24)
    first = fields.integer("pad_token_id", 1, low=0, high=rows - 2) + 1 if offset else 0
    fields.choice("position_embedding_type", {"absolute": True}, "absolute")
    return _layer_normed(
        fields,
        (hidden, heads),
        intermediate_size=fields.integer("intermediate_size"),
        layers=(LayerSpec(),) * num_layers,
        max_positions=rows - first,
        norm_eps=fields.number("layer_norm_eps", 1e-12, high=1.0),
        activation=fields.choice("hidden_act", _ACTIVATIONS, "gelu"),
        causal=False,
        post_norm=True,
        token_types=fields.integer("type_vocab_size", 2, high=64),
        first_position=first,
        position_rows=rows,
    )


def _layer_normed(fields: Fields, sizes: tuple[int, int], **more: Any) -> DecoderSpec:
    """Layer norms, learned positions, biases everywhere. ``sizes``: the width, and heads."""
    (hidden, heads), head_size = sizes, _even_share(fields, *sizes)
    biases = dict.fromkeys(("qkv_bias", "output_bias", "mlp_bias"), True)
    more |= {"rope": None, "norm": NormKind.LAYER, "gated_mlp": False, "attention_scale": head_size**-0.5, **biases}
    shape: dict[str, Any] = {"hidden_size": hidden, "num_heads": heads, "num_kv_heads": heads, "head_dim": head_size}
    return DecoderSpec(**_common(fields, tied=True), **shape, **more)


def _sizes(fields: Fields, layers: str, hidden: str, heads: str) -> tuple[int, int, int]:
    return fields.integer(layers, high=MAX_LAYERS), fields.integer(hidden, high=2**20), fields.integer(heads, high=4096)


def _even_share(fields: Fields, hidden: int, heads: int) -> int:
    if hidden % heads:
        raise fields.error(
            "hidden_size",
            f"is {hidden}, which {heads} attention heads do not divide; the config is damaged or needs head_dim",
        )
    return hidden // heads


def _kv_heads(fields: Fields, heads: int) -> int:
    kv_heads = fields.optional_integer("num_key_value_heads", heads, high=heads) or heads
    if heads % kv_heads:
        problem = (
            f"is {kv_heads}, which does not divide num_attention_heads ({heads}); the config is damaged, fetch it again"
        )
        raise fields.error("num_key_value_heads", problem)
    return kv_heads


def _common(fields: Fields, tied: bool) -> dict[str, Any]:
    dtype = fields.raw("dtype") or fields.raw("torch_dtype") or "float32"
    if not isinstance(dtype, str):
        raise fields.error("torch_dtype", "is not a word such as bfloat16; the config is damaged, fetch it again")
    vocab_size = fields.integer("vocab_size")
    return {
        "family": fields.family,
        "vocab_size": vocab_size,
        "tied_head": fields.boolean("tie_word_embeddings", tied),
        "eos_token_ids": fields.integers("eos_token_id"),
        "predicting": fields.optional_integer("num_nextn_predict_layers", 0, low=0, high=64) or 0,
        "checkpoint_dtype": dtype.removeprefix("torch."),
    }


def _layers(windows: Windows, feed_forwards: Sequence[MoESpec | None], max_positions: int) -> tuple[LayerSpec, ...]:
    """A window that no context can exceed is no window: such layers share a KV group with those of full attention."""
    bounded = (None if window is None or window >= max_positions else window for window in windows)
    return tuple(LayerSpec(window, moe) for window, moe in zip(bounded, feed_forwards, strict=True))


# --- rows -------------------------------------------------------------------------------------------------------------


def _gemma2(fields: Fields) -> DecoderSpec:
    fields.raw("hidden_act")  # the family reads hidden_activation and leaves this one unused
    return _rotary_decoder(
        fields,
        windows=_alternating_windows,
        head_dim=256,
        tied=True,
        activation="hidden_activation",
        default_activation="gelu_pytorch_tanh",
        norm_offset=1.0,
        sandwich_norm=True,
        attention_scale=fields.number("query_pre_attn_scalar", 256) ** -0.5,
        attention_soft_cap=fields.optional_number("attn_logit_softcapping", 50.0),
        logits_soft_cap=fields.optional_number("final_logit_softcapping", 30.0),
        embedding_scale=fields.integer("hidden_size") ** 0.5,
    )


def _starcoder(fields: Fields) -> DecoderSpec:
    if not fields.boolean("multi_query", True):
        problem = "is false: heads with keys of their own, interleaved in c_attn, are not supported; use a multi-query checkpoint"
        raise fields.error("multi_query", problem)
    fields.raw("num_key_value_heads")  # 1, by multi_query
    return _learned_decoder(fields, default_activation="gelu_pytorch_tanh", multi_query=True)


FAMILIES: Mapping[str, Callable[[Fields], DecoderSpec]] = {
    "llama": _rotary_decoder,
    "mistral": partial(_rotary_decoder, windows=_same_window),
    "qwen2": partial(_rotary_decoder, windows=_upper_windows, always_qkv_bias=True),
    "mimo": partial(_rotary_decoder, windows=_upper_windows, always_qkv_bias=True),
    "qwen3": partial(_rotary_decoder, windows=_upper_windows, head_dim=128, qk_norm=True),
    "qwen3_moe": partial(_rotary_decoder, windows=_switched_window, feed_forwards=_qwen_experts, qk_norm=True),
    "mixtral": partial(_rotary_decoder, windows=_same_window, feed_forwards=_mixtral_experts, theta=1e6),
    "gemma2": _gemma2,
    "phi3": partial(_rotary_decoder, windows=_same_window, partial_rotation=True),
    "gpt2": partial(_learned_decoder, default_activation="gelu_new"),
    "gpt_bigcode": _starcoder,
    "bert": _encoder,
    "roberta": partial(_encoder, offset=True),
    "xlm-roberta": partial(_encoder, offset=True),
    "camembert": partial(_encoder, offset=True),
}


def spec_from_config(config: Mapping[str, Any]) -> DecoderSpec:
    """Normalizes a config, strictly.

    Raises ModelError, one sentence that names the family or the field: an unsupported family and what it would need, a
    field that is not understood, a value out of bounds.
    """
    fields = Fields(config, _family(config))
    spec, quantization = FAMILIES[fields.family](fields), fields.raw("quantization_config")
    spec = with_pooling(spec, fields.mapping(KEY))
    fields.finish()
    if quantization is None:
        return spec
    return with_formats(spec, read_quantization(quantization), embeddings=quantization.get("quant_method") == "gguf")


def _family(config: Mapping[str, Any]) -> str:
    supported = f"Supported families are {', '.join(FAMILIES)}."
    family = config.get("model_type")
    if not isinstance(family, str):
        raise ModelError(
            f"config.json names no model family (model_type is {family!r}). {supported}", param="model_type"
        )
    if family not in FAMILIES:
        needs = (
            f"it needs {MISSING_FAMILIES[family]}"
            if family in MISSING_FAMILIES
            else "no row of models/families.py describes its block"
        )
        raise ModelError(
            f"config.json names the model family {family[:40]!r}, which is not supported yet: {needs}. {supported}",
            param="model_type",
        )
    architectures = config.get("architectures") or []
    if config.get(KEY) is not None:
        return family
    if not isinstance(architectures, list) or not all(
        str(name).endswith(("ForCausalLM", "LMHeadModel")) for name in architectures
    ):
        raise ModelError(
            f"config.json ({family}): architectures is {str(architectures)[:80]}, but only causal language models (…ForCausalLM) generate text; "
            f"use a checkpoint with a language-model head, or --task embed for embeddings.",
            param="architectures",
        )
    return family


def read_rope(fields: Fields, head_dim: int, positions: int, *, default_theta: float, partial: bool) -> RopeSpec:
    """Reads a config's rotary fields; ``positions`` is its max_position_embeddings. ``partial``: the family may rotate
    part of a head."""
    theta = fields.number("rope_theta", default_theta)
    share = fields.number("partial_rotary_factor", 1.0, high=1.0) if partial else 1.0
    trained = fields.optional_integer("original_max_position_embeddings", 4096 if partial else None)
    scaling = fields.mapping("rope_scaling")
    modern = fields.mapping("rope_parameters")
    scaling = scaling or modern
    if scaling is None:
        return RopeSpec(theta=theta, rotary_dim=_rotary_dim(fields, head_dim, share))
    theta = scaling.number("rope_theta", theta)
    share = scaling.number("partial_rotary_factor", share, high=1.0) if partial else 1.0
    read = scaling.choice("rope_type" if scaling.has("rope_type") else "type", _KINDS, "default")
    scaling.raw("type")  # older configs carry both words
    scaling.raw("finetuned")
    found = read(scaling, _rotary_dim(fields, head_dim, share), positions, trained)
    scaling.finish()
    return RopeSpec(theta=theta, rotary_dim=_rotary_dim(fields, head_dim, share), **found)


def rope_context(rope: RopeSpec, positions: int) -> int:
    """The longest context. Linear and yarn scaling stretch the value in the config; for the others, it is already
    stretched."""
    if rope.kind == "linear":
        return int(positions * rope.factor)
    if rope.kind == "yarn":
        return max(positions, int(rope.original_max_positions * rope.factor))
    return positions


def _rotary_dim(fields: Fields, head_dim: int, share: float) -> int:
    rotary_dim = int(head_dim * share)
    if rotary_dim < 2 or rotary_dim % 2:
        problem = f"{head_dim} with {share:g} of it rotated gives {rotary_dim} elements, but pairs are rotated; the config is damaged"
        raise fields.error("head_dim", problem)
    return rotary_dim


def _dynamic(scaling: Fields, rotary_dim: int, positions: int, trained: int | None) -> dict[str, Any]:
    """Plain rotation up to max_position_embeddings, where the context ends: beyond it, keys already cached would have
    to be rotated again."""
    scaling.raw("original_max_position_embeddings")  # the reference implementation does not look at it
    scaling.number("factor", high=1e4)
    return {}


def _llama3(scaling: Fields, rotary_dim: int, positions: int, trained: int | None) -> dict[str, Any]:
    low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
    if low >= high:
        raise scaling.error(
            "low_freq_factor",
            f"is {low:g}, not below high_freq_factor ({high:g}); the config is damaged, fetch it again",
        )
    return {
        "kind": "llama3",
        "factor": scaling.number("factor", high=1e4),
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_positions": _trained_length(scaling, trained, positions),
    }


def _yarn(scaling: Fields, rotary_dim: int, positions: int, trained: int | None) -> dict[str, Any]:
    original = _trained_length(scaling, trained, positions)
    factor = scaling.optional_number("factor") or positions / original
    mscale, mscale_all = scaling.optional_number("mscale"), scaling.optional_number("mscale_all_dim")
    inferred = (
        _yarn_mscale(factor, mscale) / _yarn_mscale(factor, mscale_all)
        if mscale and mscale_all
        else _yarn_mscale(factor, 1.0)
    )
    return {
        "kind": "yarn",
        "factor": factor,
        "original_max_positions": original,
        "attention_factor": scaling.optional_number("attention_factor") or inferred,
        "beta_fast": scaling.optional_number("beta_fast") or 32.0,
        "beta_slow": scaling.optional_number("beta_slow") or 1.0,
        "truncate": scaling.boolean("truncate", True),
    }


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def _longrope(scaling: Fields, rotary_dim: int, positions: int, trained: int | None) -> dict[str, Any]:
    original = _trained_length(scaling, trained, positions)
    factor = scaling.optional_number("factor") or positions / original
    inferred = math.sqrt(1.0 + math.log(factor) / math.log(original)) if factor > 1.0 else 1.0
    return {
        "kind": "longrope",
        "factor": factor,
        "original_max_positions": original,
        "attention_factor": scaling.optional_number("attention_factor") or inferred,
        "short_factor": scaling.numbers("short_factor", rotary_dim // 2),
        "long_factor": scaling.numbers("long_factor", rotary_dim // 2),
    }


def _trained_length(scaling: Fields, trained: int | None, positions: int) -> int:
    """The config's own field takes precedence over the one inside the scaling."""
    inside = scaling.optional_integer("original_max_position_embeddings", low=2)
    return trained or inside or positions


_KINDS: dict[str, Callable[[Fields, int, int, int | None], dict[str, Any]]] = {
    "default": lambda scaling, *_: {},
    "linear": lambda scaling, *_: {"kind": "linear", "factor": scaling.number("factor", high=1e4)},
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "su": _longrope,  # longrope's first name
}
