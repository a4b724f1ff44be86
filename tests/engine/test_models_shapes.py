"""Decoders without values: parameters match their rules on every real config, frequencies match transformers', limits
hold."""

from __future__ import annotations

import json

import pytest
import torch

from headrace.errors import ConfigError, ModelError
from headrace.kernels import Kernels
from headrace.layers.rotary import inverse_frequencies, rotary_table
from headrace.models.decoder import Decoder
from headrace.models.families import spec_from_config
from headrace.models.weight_rules import weight_rules
from headrace.spec import DecoderSpec
from tests.support import tiny
from tests.support.outside import shared

CPU, META = torch.device("cpu"), torch.device("meta")


def empty_decoder(spec: DecoderSpec, max_model_len: int = 16) -> Decoder:
    return Decoder(spec, kernels=Kernels(CPU), dtype=torch.bfloat16, device=META, max_model_len=max_model_len)


def test_parameters_and_rules_agree_on_real_configs() -> None:
    compared = 0
    for path in sorted(shared("data", "model_configs").glob("*/config.json")):
        try:
            spec = spec_from_config(json.loads(path.read_text(encoding="utf-8")))
        except ModelError:
            continue
        found = {name: tuple(parameter.shape) for name, parameter in empty_decoder(spec).named_parameters()}
        assert found == {rule.target: rule.shape for rule in weight_rules(spec)}, path.parent.name
        compared += 1
    assert compared >= 15


def test_parameters_and_rules_agree_on_every_tiny_model() -> None:
    for name in tiny.MODELS:
        spec = spec_from_config(tiny.config_dict(name))
        found = {target: tuple(parameter.shape) for target, parameter in empty_decoder(spec).named_parameters()}
        assert found == {rule.target: rule.shape for rule in weight_rules(spec)}, name


@pytest.mark.parametrize("name", ["llama", "llama3", "llama-linear", "qwen3-yarn", "phi3-longrope"])
def test_frequencies_are_those_of_transformers(name: str) -> None:
    """On the model's own sizes and on 128-element heads with a large theta."""
    for fields in ({}, {"head_dim": 128}) if name != "phi3-longrope" else ({},):
        model = tiny.create(name, num_hidden_layers=1, **fields)
        rope = spec_from_config(model.config.to_dict()).rope
        assert rope is not None
        rotary = model.model.rotary_emb
        torch.testing.assert_close(inverse_frequencies(rope, 64), rotary.inv_freq, rtol=1e-6, atol=0)
        cos, sin = rotary(torch.zeros(1), torch.arange(64).unsqueeze(0))
        half = rope.rotary_dim // 2
        expected = torch.cat((cos[0, :, :half], sin[0, :, :half]), dim=-1)
        torch.testing.assert_close(rotary_table(rope, 64, CPU), expected, rtol=0, atol=1e-5)


def test_a_context_beyond_the_model_is_refused() -> None:
    spec = spec_from_config(tiny.config_dict("gpt2"))
    with pytest.raises(ConfigError, match="--max-model-len is 257, but the model has 256 positions"):
        empty_decoder(spec, 257)
    with pytest.raises(ConfigError, match="--max-model-len is 0"):
        empty_decoder(spec, 0)


def test_a_tied_head_holds_no_memory_of_its_own() -> None:
    spec = spec_from_config(tiny.config_dict("qwen3"))
    decoder = Decoder(spec, kernels=Kernels(CPU), dtype=torch.float32, device=CPU, max_model_len=16)
    assert decoder.head.weight is decoder.embedding.weight
    before = {name: parameter.data_ptr() for name, parameter in decoder.named_parameters()}
    decoder.finish_loading()
    assert decoder.head.weight_bytes == 0 and decoder.embedding.weight.data_ptr() == before["embedding.weight"]
