"""What ``quantization_config`` says of each matrix, and what is refused; without torch."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace.config import ModelConfig
from headrace.errors import ModelError
from headrace.models.draft_source import find_draft
from headrace.models.families import spec_from_config
from headrace.models.source import WeightFormat, find_model, quantised_as_asked
from headrace.sites import Role, count_bytes, is_plain, layer_matrices, weights
from tests.unit.test_families import LLAMA, config

GROUP = {
    "targets": ["Linear"],
    "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32},
}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": GROUP},
    "ignore": ["lm_head"],
}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}


def in_floats(form: str, size: int) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": size}
    return {**COMPRESSED, "format": form, "config_groups": {"g": {**GROUP, "weights": weights}}}


def labels(quantization: dict[str, Any], layer: int = 0, role: Role = Role.QKV) -> list[str]:
    site = layer_matrices(spec_from_config({**LLAMA, "quantization_config": quantization}), layer)[role]
    return [form.label for form in site.formats]


def test_parts_and_layers_keep_their_own_formats() -> None:
    eight = {**GROUP, "targets": ["re:.*v_proj"], "weights": {**GROUP["weights"], "num_bits": 8}}
    both = {
        **COMPRESSED,
        "config_groups": {"group_0": GROUP, "group_1": eight},
        "ignore": ["lm_head", "model.layers.1.self_attn.k_proj"],
    }
    four, wide = "packed integers, 4 bits, groups of 32", "packed integers, 8 bits, groups of 32"
    assert labels(both) == [four, four, wide]
    assert labels(both, 1) == [four, "unquantised", wide]
    assert labels({**COMPRESSED, "ignore": ["re:.*self_attn.*"]}) == []


def test_overrides_of_gptq_are_by_layer() -> None:
    mixed = {**GPTQ, "dynamic": {r"+:.*\.layers\.1\..*": {"bits": 8, "group_size": -1}, "-:.*q_proj": {}}}
    assert labels(mixed)[:2] == ["unquantised", "GPTQ, 4 bits, groups of 32"]
    assert labels(mixed, 1)[1] == "GPTQ, 8 bits, one scale a row"


def test_a_head_stays_plain_unless_the_config_says_otherwise() -> None:
    for quantization, quantised in (
        (GPTQ, False),
        ({**GPTQ, "lm_head": True}, True),
        (COMPRESSED, False),
        ({**COMPRESSED, "ignore": []}, True),
    ):
        spec = spec_from_config({**LLAMA, "quantization_config": quantization})
        assert [bool(site.formats) for site in weights(spec) if site.role is Role.HEAD] == [quantised]


def test_bytes_are_those_of_the_format() -> None:
    plain, packed = (spec_from_config({**LLAMA, **more}) for more in ({}, {"quantization_config": GPTQ}))
    site, wide = layer_matrices(packed, 0)[Role.DOWN], layer_matrices(plain, 0)[Role.DOWN]
    groups = wide.ins // 32
    assert site.num_elements == wide.num_elements and wide.num_bytes(2) == 2 * wide.outs * wide.ins
    assert site.num_bytes(2) == wide.outs * wide.ins / 2 + groups * wide.outs * 2 + groups * wide.outs / 2
    assert count_bytes(packed, 2) < 0.7 * count_bytes(plain, 2)


@pytest.mark.parametrize(
    ("quantization", "said"),
    [
        ("int4", "quantization_config is 'int4', not a mapping"),
        (
            {"quant_method": "aqlm"},
            r"quantised by 'aqlm', which is not supported\. Use a checkpoint in one of fp8, .*gguf",
        ),
        ({}, "quantised by 'None'"),
        (
            {**GPTQ, "bits": 5},
            r"quantization_config \(gptq\): bits is '5', which is not supported; supported are 2, 3, 4, 8",
        ),
        ({**GPTQ, "bits": True}, "bits is 'True'"),
        ({**GPTQ, "group_size": 0}, "group_size is '0'"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format is 'marlin', .*supported are gptq, gptq_v2"),
        ({**GPTQ, "dynamic": {"-:(": {}}}, "is no regular expression"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version is 'gemv'.*supported are gemm"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt is 'e5m2'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"weight_block_size is \[128\]"),
        ({"quant_method": "fp8", "ignored_layers": "lm_head"}, "a list of layers' names is needed"),
        ({**COMPRESSED, "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
        (
            {
                **COMPRESSED,
                "transform_config": {
                    "config_groups": {"r": {"type": "random-matrix", "apply": [{"location": "input"}]}}
                },
            },
            "transform_config random-matrix at input",
        ),
        ({**COMPRESSED, "format": "marlin-24"}, r"format 'marlin-24' of 4 bits \(int, group\)"),
        (in_floats("mxfp4-pack-quantized", 16), r"\(compressed-tensors\): group_size is '16', .*supported are 32"),
        (in_floats("nvfp4-pack-quantized", 32), r"\(compressed-tensors\): group_size is '32', .*supported are 16"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32}, r"\(modelopt\): group_size is '32'"),
        (
            {**COMPRESSED, "config_groups": {"g": {**GROUP, "input_activations": {"num_bits": 4}}}},
            "input_activations",
        ),
        ({**COMPRESSED, "config_groups": {}}, "config_groups is"),
        ({**COMPRESSED, "ignore": ["re:("]}, "is no regular expression"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo is 'W4A8_AWQ'"),
        (
            {"quant_method": "gguf", "types": {"model.layers.0.mlp.up_proj": "IQ2_XXS"}},
            "up_proj has GGUF type IQ2_XXS.*--quantization none",
        ),
    ],
)
def test_what_is_not_supported_is_named_with_what_would_work(quantization: Any, said: str) -> None:
    with pytest.raises(ModelError, match=said):
        spec_from_config({**LLAMA, "quantization_config": quantization})


def test_a_family_that_stores_its_matrices_turned_is_refused() -> None:
    from tests.unit.test_families import GPT2

    with pytest.raises(
        ModelError, match=r"transformer\.h\.0\.attn\.c_attn cannot be stored as FP8.*stores its matrices \[in, out\]"
    ):
        spec_from_config({**GPT2, "quantization_config": {"quant_method": "fp8"}})


def test_experts_in_different_formats_are_refused() -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    ignoring = {**COMPRESSED, "ignore": ["model.layers.0.mlp.experts.1.up_proj"]}
    with pytest.raises(
        ModelError, match=r"Experts of model\.layers\.0\.mlp\.experts\.0\.gate_proj are in different formats"
    ):
        spec_from_config(config("qwen3_moe", **experts, quantization_config=ignoring))


@pytest.mark.parametrize(
    ("method", "label"),
    [("fp8", "FP8, scales by tensor, fp8 inputs"), ("compressed-tensors", "packed integers, 4 bits, groups of 128")],
)
def test_random_weights_are_made_up_in_the_format_that_is_asked_for(method: str, label: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "hidden_size": 256, "intermediate_size": 512}))
    found = find_model(ModelConfig(model=str(tmp_path), load_format="dummy", quantization=method))
    site = layer_matrices(spec_from_config(found.config), 0)[Role.DOWN]
    assert [form.label for form in site.formats] == [label]
    with pytest.raises(
        ModelError, match=r"--quantization is gguf, but .* is not quantized; .* one of fp8, compressed-"
    ):
        find_model(ModelConfig(model=str(tmp_path), load_format="dummy", quantization="gguf"))
    with pytest.raises(ModelError, match=r"^quantization is gptq, but .* one of fp8, compressed-"):
        find_draft(ModelConfig(load_format="dummy"), str(tmp_path), "gptq", None)
    plain = find_model(ModelConfig(model=str(tmp_path), load_format="dummy"))
    with pytest.raises(ModelError, match=r"--quantization is fp8, but .* is not quantized; leave it out\.$"):
        quantised_as_asked(replace(plain, weights=WeightFormat.GGUF), "fp8")  # files of GGUF are never rounded


@pytest.mark.parametrize(
    ("asked", "capability", "layers", "made"),
    [
        ("auto", (9, 0), 16, "fp8"),
        ("auto", (9, 0), 2, None),  # its time is launches
        ("auto", (8, 9), 16, None),
        ("auto", None, 16, None),
        ("none", (9, 0), 16, None),
        ("fp8", None, 2, "fp8"),
        ("compressed-tensors", None, 2, "w4a16"),
    ],
)
def test_a_large_draft_is_rounded_where_fp8_is_fast(
    asked: str, capability: tuple[int, int] | None, layers: int, made: str | None, tmp_path: Path
) -> None:
    large = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": layers, "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **large}))
    found, said = find_draft(ModelConfig(load_format="dummy"), str(tmp_path), asked, capability)
    spec = spec_from_config(found.config)
    assert (found.makes, said is not None, is_plain(spec)) == (made, made is not None, made is None)
    assert spec.tied_head == (made is None) == (not spec.formats)


def test_a_draft_that_cannot_be_rounded_stays_as_it_is(tmp_path: Path) -> None:
    from tests.unit.test_families import GPT2

    (tmp_path / "config.json").write_text(json.dumps({**GPT2, "n_embd": 4096, "n_head": 32, "n_layer": 12}))
    found, said = find_draft(ModelConfig(load_format="dummy"), str(tmp_path), "auto", (9, 0))
    assert found.makes is None and said is not None and "stores its matrices [in, out]" in said.reason
