"""After a start no step asks the compiler for anything: what the warm-ups build is all that prompts, batches and
samplers use."""

from __future__ import annotations

import importlib.util
import json
from functools import cache
from typing import Any

import pytest

from tests.support import offline

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
LLAMA = SHAPE | {
    "model_type": "llama",
    "vocab_size": 2000,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": LLAMA | {"tie_word_embeddings": True, "attention_bias": False},
    # experts, head norms
    "qwen3_moe": LLAMA
    | {
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 128,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
    }
    | {"decoder_sparse_step": 1, "mlp_only_layers": []},
    # windows, soft caps, an odd vocabulary, a scaled embedding
    "gemma2": LLAMA
    | {
        "model_type": "gemma2",
        "vocab_size": 2001,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 64,
    }
    | {"sliding_window": 128, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    # layer norms, learned positions, plain activations
    "gpt2": {"model_type": "gpt2", "n_embd": 192, "n_layer": 2, "n_head": 3, "n_positions": 512, "vocab_size": 1001}
    | {"layer_norm_epsilon": 1e-5, "activation_function": "gelu_new"},
}
WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}
GROUPS: dict[str, Any] = {
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS}},
    "format": "pack-quantized",
    "ignore": ["lm_head"],
}
MODELS["w4a16"] = MODELS["llama"] | {"quantization_config": {"quant_method": "compressed-tensors"} | GROUPS}
MODELS["w4a16 experts"] = MODELS["qwen3_moe"] | {
    "quantization_config": {"quant_method": "compressed-tensors"} | GROUPS | {"ignore": ["lm_head", "re:.*mlp.gate$"]}
}
TOKENS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
ROUNDED = {"config_groups": {"group_0": GROUPS["config_groups"]["group_0"] | {"input_activations": TOKENS}}}
MODELS["w4a8"] = MODELS["llama"] | {"quantization_config": {"quant_method": "compressed-tensors"} | GROUPS | ROUNDED}
TURNS = [{"targets": ["Linear"], "location": "input", "ignore": ["lm_head"]}]
ROTATED = {"transform_config": {"config_groups": {"it": {"type": "hadamard", "head_dim": 32, "apply": TURNS}}}}
MODELS["rotated"] = MODELS["llama"] | {"quantization_config": {"quant_method": "compressed-tensors"} | GROUPS | ROTATED}
MODELS["gptq"] = MODELS["llama"] | {
    "quantization_config": {"quant_method": "gptq", "bits": 3, "group_size": 64, "desc_act": True}
}
MODELS["fp8"] = MODELS["llama"] | {"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}}
CASES = (*((name, ()) for name in MODELS), ("qwen3_moe", ("invariant",)))
COMPILED = tuple(
    ("triton_warmed_up", json.dumps(MODELS[name] | {"torch_dtype": "bfloat16"}), *mode) for name, mode in CASES
)


@cache
def steps() -> dict[tuple[str, tuple[str, ...]], dict[str, Any]]:
    """What each case warmed up, and what its steps then used."""
    return dict(zip(CASES, offline.found(*COMPILED), strict=True))


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("name", "mode"), CASES)
def test_a_step_needs_nothing_that_was_not_warmed_up(name: str, mode: tuple[str, ...]) -> None:
    found = steps()[name, mode]
    assert len(found["used"]) >= 12
    assert not found["chosen later"]
    assert not set(found["used"]) - set(found["warmed up"])
    # Quantised products have forms of their own, and a kernel that widens, rounds or rotates; codes in activation order
    # are gathered in each form. Experts of few rows take in what stands around them.
    coded, sparse = "quantization_config" in MODELS[name], "num_experts" in MODELS[name]
    most = 60 if name == "gptq" or (coded and sparse) else 48 if coded or sparse else 33
    assert len(found["warmed up"]) <= most, "few specialisations: each costs every cold start"
