"""A cache in 8 and 4 bits, whole engines: however a request is run, its answer has the same bits; scales of
checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace import LLM, SamplingParams
from headrace.config import ModelConfig
from headrace.errors import ModelError
from headrace.kernels import Kernels
from headrace.models.decoder import Decoder
from headrace.models.loader import load_kv_scales, open_checkpoint
from headrace.models.source import find_model
from headrace.spec import KV_FORMATS
from tests.support import tiny
from tests.support.forward import CPU, PagedRun, load_decoder
from tests.support.kernel_cases import native

TRUNK = [3 + 5 * at % 200 for at in range(48)]
PROMPTS = [TRUNK + [7 + (11 * row + 3 * at) % 200 for at in range(30 + 4 * row)] for row in range(6)]
PARAMS = SamplingParams(max_tokens=24, temperature=0.7, seed=5, n=2, logprobs=1, ignore_eos=True)


def answers(folder: Path, kv: str, *, together: bool, **keywords: Any) -> tuple[list[Any], Any]:
    common = {
        "device": "cpu",
        "threads": 1,
        "dtype": "float32",
        "max_model_len": 240,
        "block_size": 8,
        "overlap": 0,
        "batch_invariant": True,
    }
    with LLM(str(folder), kv_cache_dtype=kv, **common | keywords) as llm:
        asked = [PROMPTS] if together else [[prompt] for prompt in PROMPTS]
        outputs = [each for some in asked for each in llm.generate(some, PARAMS, use_tqdm=False)]
        found = [
            [
                (each.token_ids, [float(next(iter(step.values())).logprob) for step in each.logprobs])
                for each in out.outputs
            ]
            for out in outputs
        ]
        return found, llm.engine.core.stats().counters


@pytest.mark.parametrize("kv", ["int8", "int4", "fp8"])
def test_however_a_request_is_run_its_answer_has_the_same_bits(kv: str, tmp_path: Path) -> None:
    """Whole prompts alone; then chunks, hits, copies of shared blocks and preemption, among others. Gemma has windows
    and caps."""
    native("linear", batch_invariant=True, dtype=torch.float32, in_features=64, out_features=64)
    folder = tiny.save("gemma2", tmp_path)
    alone, _ = answers(folder, kv, together=False, max_num_seqs=2, num_blocks=80, enable_prefix_caching=False)
    among, counters = answers(folder, kv, together=True, max_num_seqs=12, max_num_batched_tokens=40, num_blocks=70)
    assert among == alone and counters.preemptions > 0


# --- scales of checkpoints


def with_scales(tmp_path: Path, change: dict[str, Any], name: str = "self_attn.{0}_scale") -> Path:
    folder = tiny.save("llama", tmp_path, tokenizer=False)
    tensors = load_file(folder / "model.safetensors")
    layers = sum(key.endswith("self_attn.o_proj.weight") for key in tensors)
    made = {
        f"model.layers.{layer}.{name.format(letter)}": torch.tensor(0.5 + layer)
        for layer in range(layers)
        for letter in "kv"
    }
    for key, value in change.items():
        if value is None:
            del made[key]
        else:
            made[key] = value
    save_file(tensors | made, folder / "model.safetensors")
    return folder


def loaded(folder: Path, kv: str | None) -> tuple[Decoder, int]:
    plain = load_decoder(folder)
    decoder = Decoder(
        plain.spec,
        kernels=Kernels(CPU),
        dtype=torch.float32,
        device=CPU,
        max_model_len=64,
        kv=None if kv is None else KV_FORMATS[kv],
    )
    checkpoint = open_checkpoint(find_model(ModelConfig(model=str(folder))))
    try:
        return decoder, load_kv_scales(decoder, checkpoint)
    finally:
        checkpoint.close()


@pytest.mark.parametrize(
    "name", ["self_attn.{0}_scale", "self_attn.{0}_proj.{0}_scale", "self_attn.{0}_proj.output_scale"]
)
def test_scales_of_a_checkpoint_are_heeded(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    heads = torch.tensor([0.25, 2.0])
    folder = with_scales(tmp_path, {f"model.layers.0.{name.format('v')}": heads}, name)
    decoder, count = loaded(folder, "fp8_e4m3")
    held = [block.attention.quantized for block in decoder.blocks]
    assert (
        count == 2 * len(held) and held[0] is not None and held[0].k_scales is not None and held[0].v_scales is not None
    )
    assert held[0].k_scales.tolist() == [0.5, 0.5] and held[0].v_scales.tolist() == heads.tolist()
    assert "not used" not in caplog.text
    assert loaded(folder, "int8")[1] == loaded(folder, None)[1] == 0
    assert f"{count} scales for keys and values in FP8 are not used" in caplog.text


K0 = "model.layers.0.self_attn.k_scale"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({K0: torch.tensor(float("nan"))}, r"layers\.0\.self_attn\.k_scale is nan"),
        ({K0: torch.tensor(0.0)}, "k_scale is 0.0"),
        ({K0: torch.tensor(float("inf"))}, "k_scale is inf"),
        ({K0: torch.tensor(-1.0)}, "k_scale is -1.0"),
        ({K0: torch.ones(7)}, "7 elements"),
        ({K0: None}, "lacks 1"),
    ],
)
def test_what_is_no_scale_is_named(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    folder = with_scales(tmp_path, change)
    with pytest.raises(ModelError, match=said):
        loaded(folder, "fp8_e4m3")
    assert loaded(folder, "int8")[1] == 0


def test_scales_bring_large_values_into_reach(tmp_path: Path) -> None:
    """Values 2¹⁴ times as large saturate, but with a scale of 2¹⁴ they have the very codes of those they are made
    from."""
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)

    def scored(folder: Path) -> list[float]:
        with LLM(
            str(folder), device="cpu", dtype="float32", kv_cache_dtype="fp8", num_blocks=40, max_model_len=64
        ) as llm:
            found = llm.generate([TRUNK], params, use_tqdm=False)[0].prompt_logprobs
            return [next(iter(each.values())).logprob for each in found[1:]]

    folder = tiny.save("llama", tmp_path)
    want, tensors = scored(folder), load_file(folder / "model.safetensors")
    for key in [key for key in tensors if "v_proj.weight" in key]:
        tensors[key] *= 2.0**14
        tensors[key.replace("v_proj.weight", "o_proj.weight")] *= 2.0**-14
        tensors[key.replace("v_proj.weight", "v_scale")] = torch.tensor(2.0**14)
        tensors[key.replace("v_proj.weight", "k_scale")] = torch.tensor(1.0)
    save_file(tensors, folder / "model.safetensors")
    assert scored(folder) == want
    save_file(
        {key: value for key, value in tensors.items() if not key.endswith("_scale")}, folder / "model.safetensors"
    )
    assert max(abs(one - other) for one, other in zip(scored(folder), want, strict=True)) > 0.1


@pytest.mark.parametrize("kv", KV_FORMATS)
def test_logits_are_those_of_the_twins(tmp_path: Path, kv: str) -> None:
    folder, form = tiny.save("llama", tmp_path, tokenizer=False), KV_FORMATS[kv]
    prompt = {"a": [1 + 7 * at % 250 for at in range(40)]}
    twins = PagedRun(
        load_decoder(folder, kv=form, kernels=Kernels(CPU, disabled=frozenset({"native", "onednn"}))), kv=form
    ).step(prompt)["a"]
    run = PagedRun(load_decoder(folder, kv=form), kv=form)
    ours = torch.cat([run.step({"a": prompt["a"][at : at + 8]})["a"] for at in range(0, 40, 8)])  # in chunks
    plain = PagedRun(load_decoder(folder)).step(prompt)["a"]
    off, cost = ((each - twins).norm() / twins.norm() for each in (ours, plain))
    assert off < 0.1 * cost, (off, cost)  # another order of summation, and now and then another code
