"""Configs become specs strictly: both of transformers' spellings, real configs, refusals that name what they refuse."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import ModelError
from headrace.models.families import FAMILIES, spec_from_config
from headrace.models.pooling import ENCODERS, KEY
from headrace.models.weight_rules import ignored_keys, weight_rules
from headrace.spec import Activation, LayerSpec, NormKind, RopeSpec, attention_groups
from tests.support.outside import shared

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "eos_token_id": [7, 9],
    "bos_token_id": 5,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 320,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 128,
    "n_ctx": 128,
}


def config(family: str = "llama", **fields: Any) -> dict[str, Any]:
    return {**LLAMA, "architectures": None, "model_type": family, **fields}


def smallest(family: str) -> dict[str, Any]:
    """A config with no more than the family needs."""
    if family.startswith("gpt"):
        return {**GPT2, "model_type": family}
    if family in ENCODERS:
        return {**ENCODER, "model_type": family}
    experts = {"mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2}, "qwen3_moe": EXPERTS}
    return config(family, **experts.get(family, {}))


ENCODER: dict[str, Any] = {
    "architectures": ["BertModel"],
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    KEY: {"kind": "mean"},
}


def windows(family: str, **fields: Any) -> list[int | None]:
    return [layer.window for layer in spec_from_config(config(family, **fields)).layers]


def refusal(fields: dict[str, Any]) -> ModelError:
    with pytest.raises(ModelError) as caught:
        spec_from_config(fields)
    return caught.value


# --- what a spec says ---------------------------------------------------------------------------------------------------


def test_encoders() -> None:
    spec, offset = (spec_from_config({**smallest(family), "pad_token_id": 1}) for family in ("bert", "roberta"))
    assert (spec.causal, spec.post_norm, spec.token_types, attention_groups(spec)) == (False, True, 2, ((None, ()),))
    assert (spec.max_positions, spec.position_rows, spec.first_position) == (256, 256, 0)
    assert (offset.max_positions, offset.position_rows, offset.first_position) == (254, 256, 2)
    norms = {rule.target: rule.sources[0][0] for rule in weight_rules(spec) if "norm.weight" in rule.target}
    assert norms["layers.0.attention_norm.weight"] == "bert.embeddings.LayerNorm.weight"
    assert norms["layers.1.attention_norm.weight"] == "bert.encoder.layer.0.output.LayerNorm.weight"
    assert norms["norm.weight"] == "bert.encoder.layer.3.output.LayerNorm.weight"
    assert "absolute" in refusal({**smallest("bert"), "position_embedding_type": "relative_key"}).message
    plain = {name: value for name, value in smallest("bert").items() if name != KEY}
    assert "generate no text" in refusal({**plain, "architectures": []}).message


def test_llama() -> None:
    spec = spec_from_config(LLAMA)
    assert (spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.attention_scale) == (
        4,
        4,
        2,
        16,
        0.25,
    )
    assert spec.layers == (LayerSpec(),) * 4
    assert spec.rope == RopeSpec(theta=10000.0, rotary_dim=16)
    assert (spec.eos_token_ids, spec.checkpoint_dtype, spec.tied_head) == ((7, 9), "bfloat16", False)


def test_gemma2_has_its_own_mathematics() -> None:
    spec = spec_from_config(
        config("gemma2", head_dim=24, query_pre_attn_scalar=16, sliding_window=100, final_logit_softcapping=None)
    )
    assert (spec.norm_offset, spec.sandwich_norm, spec.tied_head, spec.activation) == (
        1.0,
        True,
        True,
        Activation.GELU_TANH,
    )
    assert (spec.attention_scale, spec.attention_soft_cap, spec.logits_soft_cap, spec.embedding_scale) == (
        0.25,
        50.0,
        None,
        8.0,
    )
    assert attention_groups(spec) == ((None, (1, 3)), (100, (0, 2)))


def test_gpt2_is_not_shaped_like_llama() -> None:
    spec = spec_from_config({**GPT2, "scale_attn_by_inverse_layer_idx": True})
    assert (spec.rope, spec.norm, spec.gated_mlp, spec.num_kv_heads) == (None, NormKind.LAYER, False, 4)
    assert (spec.qkv_bias, spec.output_bias, spec.mlp_bias, spec.tied_head, spec.intermediate_size) == (
        True,
        True,
        True,
        True,
        256,
    )
    assert [layer.attention_divisor for layer in spec.layers] == [1.0, 2.0]
    assert spec.activation is Activation.GELU_TANH


def test_starcoder_shares_one_key_head() -> None:
    assert spec_from_config({**GPT2, "model_type": "gpt_bigcode", "multi_query": True}).num_kv_heads == 1
    assert "multi_query" in refusal({**GPT2, "model_type": "gpt_bigcode", "multi_query": False}).message


def test_biases_follow_the_family_or_the_config() -> None:
    qwen2, llama = spec_from_config(config("qwen2")), spec_from_config(config(attention_bias=True, mlp_bias=True))
    assert (qwen2.qkv_bias, qwen2.output_bias, qwen2.mlp_bias) == (True, False, False)
    assert (llama.qkv_bias, llama.output_bias, llama.mlp_bias) == (True, True, True)


def test_windows() -> None:
    assert windows("mistral", sliding_window=100) == [100] * 4
    assert windows("mistral", sliding_window=256) == [None] * 4  # never shorter than the context
    assert windows("qwen2", sliding_window=100, max_window_layers=1) == [None] * 4  # use_sliding_window is off
    assert windows("qwen2", sliding_window=100, max_window_layers=1, use_sliding_window=True) == [None, 100, 100, 100]
    types = ["sliding_attention", "full_attention"] * 2
    assert windows("qwen3", sliding_window=100, use_sliding_window=True, layer_types=types) == [100, None, 100, None]
    assert (
        windows("qwen3_moe", sliding_window=100, use_sliding_window=True, max_window_layers=2, **EXPERTS) == [100] * 4
    )
    assert "layer_types" in refusal(config("qwen3", layer_types=["chunked_attention"] * 4)).message
    assert "layer_types" in refusal(config("qwen3", layer_types=types)).message  # sliding, but no window


def test_experts_stand_where_the_config_puts_them() -> None:
    spec = spec_from_config(config("qwen3_moe", decoder_sparse_step=2, mlp_only_layers=[3], **EXPERTS))
    assert [layer.moe is not None for layer in spec.layers] == [False, True, False, False]
    assert spec_from_config(config("qwen3_moe", **EXPERTS)).layers[0].moe == spec.layers[1].moe
    mixtral = spec_from_config(config("mixtral", num_local_experts=4, num_experts_per_tok=2)).layers[0].moe
    assert mixtral is not None and (mixtral.renormalize, mixtral.intermediate_size) == (True, 96)
    assert "num_experts_per_tok" in refusal(config("mixtral", num_local_experts=4, num_experts_per_tok=5)).message


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
SCALINGS = [
    ("llama", {"rope_type": "default"}),
    ("llama", {"rope_type": "llama3", **LLAMA3}),
    ("llama", {"type": "linear", "factor": 2.0}),
    ("qwen2", {"type": "yarn", "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}),
    ("phi3", {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2] * 8}),
]


@pytest.mark.parametrize(
    ("family", "scaling"), SCALINGS, ids=[f"{family}-{scaling.get('type')}" for family, scaling in SCALINGS]
)
def test_both_spellings_of_transformers_give_one_spec(family: str, scaling: dict[str, Any]) -> None:
    old = config(family, rope_theta=5e5, rope_scaling=scaling, torch_dtype="float16")
    new = {key: value for key, value in old.items() if key not in ("rope_theta", "rope_scaling", "torch_dtype")}
    new |= {"dtype": "float16", "rope_parameters": {"rope_theta": 5e5, **scaling}}
    assert spec_from_config(old) == spec_from_config(new)
    assert spec_from_config(old).rope.theta == 5e5  # type: ignore[union-attr]


def test_scaling_sets_the_longest_context() -> None:
    def context(**fields: Any) -> int:
        return spec_from_config(config(**fields)).max_positions

    assert context(rope_scaling={"type": "linear", "factor": 4.0}) == 1024
    assert context(rope_scaling={"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}) == 512
    assert context(rope_scaling={"rope_type": "llama3", **LLAMA3}) == 256
    assert context(rope_scaling={"type": "dynamic", "factor": 4.0}) == 256


def test_phi3_rotates_a_part_of_a_head_by_its_own_trained_length() -> None:
    scaling = {
        "type": "su",
        "short_factor": [1.0] * 6,
        "long_factor": [2.0] * 6,
        "original_max_position_embeddings": 32,
    }
    fields = config("phi3", partial_rotary_factor=0.75, original_max_position_embeddings=64, rope_scaling=scaling)
    rope = spec_from_config(fields).rope
    assert rope is not None and (rope.kind, rope.rotary_dim, rope.original_max_positions) == ("longrope", 12, 64)
    assert rope.attention_factor == pytest.approx((1 + 1 / 3) ** 0.5)  # sqrt(1 + ln(256 / 64) / ln(64))
    assert (
        "short_factor has 5 entries"
        in refusal({**fields, "rope_scaling": {**scaling, "short_factor": [1.0] * 5}}).message
    )
    assert "partial_rotary_factor" in refusal(config(partial_rotary_factor=0.5)).message  # Llama rotates whole heads


# --- refusals -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"attention_multiplier": 2.0}, "attention_multiplier is 2.0"),
        (
            {"quantization_config": {"quant_method": "aqlm"}},
            "quantised by 'aqlm', which is not supported. Use a checkpoint in one of fp8",
        ),
        ({"rope_scaling": {"rope_type": "mrope"}}, "rope_scaling.rope_type is 'mrope'"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "beta": 1}}, "rope_scaling.beta"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "rope_parameters.full_attention"),
        ({"hidden_act": "relu2"}, "hidden_act is 'relu2'"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; an integer from 1 to"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"hidden_size": 66, "head_dim": None}, "hidden_size is 66"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"vocab_size": None}, "vocab_size"),
        ({"eos_token_id": ["</s>"]}, "eos_token_id"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "architectures"),
        ({"is_encoder_decoder": True}, "encoders"),
        ({"sliding_window": 64}, "sliding_window is 64"),  # Llama has none: silence would be wrong answers
        ({"model_type": None}, "names no model family"),
        ({"model_type": "rwkv"}, "'rwkv'"),
        ({"model_type": "deepseek_v3"}, "multi-head latent attention"),
        ({"model_type": "gpt_oss"}, "attention sinks"),
    ],
)
def test_refusals_name_what_they_refuse(fields: dict[str, Any], named: str) -> None:
    message = refusal({**LLAMA, **fields}).message
    assert named in message and "\n" not in message and message.endswith(".")


def test_a_missing_field_is_named() -> None:
    fields = {key: value for key, value in LLAMA.items() if key != "hidden_size"}
    assert "hidden_size is missing" in refusal(fields).message


def test_harmless_fields_are_known_by_name() -> None:
    harmless = {
        "use_cache": True,
        "attention_dropout": 0.1,
        "auto_map": {"AutoModel": "x.Y"},
        "id2label": {"0": "a"},
        "anything": None,
    }
    assert spec_from_config({**LLAMA, **harmless}) == spec_from_config(LLAMA)


# What published configs carry beside the fields a spec is made of.
CARRIED: dict[str, dict[str, Any]] = {
    "llama": {
        "pretraining_tp": 1,
        "max_sequence_length": 2048,
        "rope_interleaved": False,
        "is_llama_config": True,
        "mlp_bias": False,
    },
    "qwen2": {"use_mrope": False, "sliding_window": 131072, "use_sliding_window": False, "max_window_layers": 21},
    "qwen3_moe": {
        "use_qk_norm": True,
        "qkv_bias": False,
        "shared_expert_intermediate_size": 0,
        "router_aux_loss_coef": 0.001,
    },
    "gemma2": {
        "hidden_act": "gelu_pytorch_tanh",
        "cache_implementation": "hybrid",
        "sliding_window": 128,
        "sliding_window_size": 128,
    },
    "phi3": {
        "full_attn_mod": 1,
        "interpolate_factor": 1,
        "lm_head_bias": False,
        "attention_bias": False,
        "embd_pdrop": 0.0,
    },
    "gpt2": {
        "summary_type": "cls_index",
        "task_specific_params": {"text-generation": {"do_sample": True}},
        "n_ctx": 128,
    },
    "gpt_bigcode": {
        "inference_runner": 0,
        "pad_key_length": True,
        "validate_runner_input": True,
        "attention_softmax_in_fp32": True,
    },
}


@pytest.mark.parametrize("family", CARRIED)
def test_what_published_configs_carry_is_known(family: str) -> None:
    assert spec_from_config({**smallest(family), **CARRIED[family]}).num_layers > 0


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
DAMAGED = sorted(
    {
        *LLAMA,
        "rope_scaling",
        "rope_parameters",
        "head_dim",
        "sliding_window",
        "layer_types",
        "max_window_layers",
        *EXPERTS,
    }
)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(FAMILIES)), st.dictionaries(st.sampled_from(DAMAGED), JSON, min_size=1, max_size=3))
def test_a_damaged_config_is_a_model_error_or_a_spec(family: str, damage: dict[str, Any]) -> None:
    try:
        spec = spec_from_config({**smallest(family), **damage})
    except ModelError as error:
        assert "config.json" in error.message
    else:
        assert spec.attention_scale > 0 and spec.num_heads % spec.num_kv_heads == 0


# --- real configs -------------------------------------------------------------------------------------------------------


def test_real_configs_parse_or_are_refused_for_what_is_missing() -> None:
    refused = {}
    for path in sorted(shared("data", "model_configs").glob("*/config.json")):
        try:
            spec = spec_from_config(json.loads(path.read_text(encoding="utf-8")))
            assert len({rule.target for rule in weight_rules(spec)}) > spec.num_layers, path
        except ModelError as error:
            refused[path.parent.name] = error.message
    assert set(refused) == {"DeepSeek-R1", "gpt-oss-20b"}
    assert "latent attention" in refused["DeepSeek-R1"] and "sinks" in refused["gpt-oss-20b"]


# --- weight rules -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_is_used_once_and_a_tied_head_is_ignored(family: str, tied: bool) -> None:
    spec = spec_from_config({**smallest(family), "tie_word_embeddings": tied})
    rules = list(weight_rules(spec))
    names = [name for rule in rules for group in rule.sources for name in group]
    tied = tied or family in ENCODERS  # which have no head
    assert len(names) == len(set(names)) and len(rules) == len({rule.target for rule in rules})
    assert ("lm_head.weight" in names) is not tied
    assert any("lm_head" in pattern for pattern in ignored_keys(spec)) is tied
    assert all(rule.stack or len(rule.sources) == 1 for rule in rules)
