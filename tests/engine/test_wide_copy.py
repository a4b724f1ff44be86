"""A widened copy of matrices in few bits: many rows are multiplied by it, and mean the same; who gets one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace import LLM, SamplingParams
from headrace.config import CacheConfig, DeviceConfig, EngineConfig, ModelConfig, SchedulerConfig
from headrace.flags import technique_values
from headrace.kernels.linear.epilogue import MOST_ROWS
from headrace.layers.linear import Linear
from headrace.layers.packed import early_rows
from headrace.layers.wide_copy import LEAST, TakingTurns, copy_bytes, has_copy
from headrace.models.families import spec_from_config
from headrace.models.source import find_model
from headrace.sites import Role, weights
from headrace.spec import DecoderSpec, kv_groups
from headrace.worker.memory import COPY, GIB, Room, with_copy
from tests.support import quantised
from tests.support.forward import load_decoder

SHAPES = Path("lab/shapes")


@pytest.mark.parametrize("name", ("gptq-act-order", "nf4", "gptq-head"))
def test_few_rows_are_multiplied_by_codes_and_many_by_the_copy(name: str, tmp_path: Path) -> None:
    decoder = load_decoder(quantised.write(name, tmp_path)[0])
    linears = [each for each in decoder.modules() if isinstance(each, Linear)]
    few, many = (torch.randn(rows, 256, generator=torch.Generator().manual_seed(0)) for rows in (MOST_ROWS, LEAST))
    inputs = [[x[:, : each.site.ins] for x in (few, many)] for each in linears]
    with torch.inference_mode():
        plain = [[each.forward(x) for x in own] for each, own in zip(linears, inputs, strict=True)]
        for each in linears:
            each.reserve_copy()
        for each in linears:
            each.fill_copy()
            each.use_copy()
        for each, own, (y_few, y_many) in zip(linears, inputs, plain, strict=True):
            assert torch.equal(each.forward(own[0]), y_few)
            torch.testing.assert_close(each.forward(own[1]), y_many, rtol=2e-3, atol=2e-4)
    copied = [each for each in linears if isinstance(each._apply_weight, TakingTurns)]
    assert {each.site.name for each in copied} == {each.name for each in weights(decoder.spec) if has_copy(each)}
    assert any(each.site.role is Role.HEAD for each in copied) == (name == "gptq-head")
    assert sum(each.copy_bytes for each in copied) >= copy_bytes(decoder.spec, 4)


@pytest.mark.parametrize("name", ("compressed-w4a8", "fp8-channel"))
def test_what_rounds_inputs_has_no_copy(name: str, tmp_path: Path) -> None:
    config = find_model(ModelConfig(model=str(quantised.write(name, tmp_path)[0]))).config
    assert copy_bytes(spec_from_config(config), 2) == 0


def test_up_to_how_many_rows_a_gemm_of_ours_asks_for_its_weights_before_its_inputs_are_there() -> None:
    def rows(**more: Any) -> int:
        config = {**find_model(ModelConfig(model=str(SHAPES / "Llama-3.1-8B"), load_format="dummy", **more)).config}
        site = next(each for each in weights(spec_from_config(config)) if each.role is Role.QKV)
        return early_rows(site.formats)

    assert [rows(quantization=name) for name in ("fp8", "compressed-tensors", "bitsandbytes")] == [0, 256, 0]
    assert rows() == early_rows(()) == early_rows((None,)) == 0


def test_an_engine_with_a_copy_says_the_same_and_counts_it(tmp_path: Path) -> None:
    folder = str(quantised.write("compressed-w4a16", tmp_path)[0])
    prompts = [[1 + (7 * row + at) % 250 for at in range(100 + 9 * row)] for row in range(2)]
    texts, held = [], []
    for on in (True, None):
        with LLM(
            model=folder, device="cpu", dtype="float32", kv_cache_memory=2**22, max_num_seqs=4, max_num_batched_tokens=512,
            technique={"wide_copy": on},
        ) as llm:  # fmt: skip
            found = llm.generate(
                [{"prompt_token_ids": each} for each in prompts], SamplingParams(temperature=0.0, max_tokens=6)
            )
            texts.append([each.outputs[0].token_ids for each in found])
            info = llm.engine.core.executor.info
            held.append(info.memory.get(COPY, 0))
    assert texts[0] == texts[1]
    assert held[0] > 0 and held[1] == 0  # a CPU makes none unasked


# --- who gets one


def four_bits() -> DecoderSpec:
    source = find_model(
        ModelConfig(model=str(SHAPES / "Llama-3.1-8B"), load_format="dummy", quantization="compressed-tensors")
    )
    return spec_from_config(source.config)


def decided(spec: DecoderSpec, config: EngineConfig, available: float) -> bool:
    kv = kv_groups(spec, 16, 2)
    room, said = with_copy(Room(int(available * GIB), {"weights": 6 * GIB}), spec, config, kv, 2, on_cpu=False)
    assert said is not None and (COPY in room.purposes) == said.value
    assert room.purposes.get(COPY, 0) == (copy_bytes(spec, 2) if said.value else 0)
    return bool(said.value)


def test_a_copy_is_made_where_keys_and_values_keep_their_room() -> None:
    spec = four_bits()
    config = EngineConfig(scheduler=SchedulerConfig(max_num_seqs=256))
    assert 12.9 < copy_bytes(spec, 2) / GIB < 13.1
    assert decided(spec, config, 125) and not decided(spec, config, 40)
    many = replace(config, scheduler=SchedulerConfig(max_num_seqs=1024))
    assert not decided(spec, many, 125)  # 1,024 tokens of each would not fit
    assert decided(spec, replace(many, model=ModelConfig(max_model_len=512)), 125)
    assert not decided(spec, replace(config, cache=CacheConfig(kv_cache_memory=110 * GIB)), 125)
    few = replace(config, cache=CacheConfig(kv_cache_memory=10 * GIB))
    assert decided(spec, few, 80) and not decided(spec, few, 40)  # it may still be a card that others share
    for off in (DeviceConfig(batch_invariant=True), DeviceConfig(quantized_gemm=False), DeviceConfig(wide_copy=False)):
        assert not decided(spec, replace(config, device=off), 125)
    assert decided(spec, replace(config, device=DeviceConfig(wide_copy=True)), 40)
    assert technique_values(["wide_copy=auto"]) == {"wide_copy": None}
