"""Equality of tokens with each technique on and off: the same requests, the same answers, whatever the schedule."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from headrace.bench import ablate
from headrace.bench.ablate import FIGURES, Ablation
from headrace.config import CacheConfig, DeviceConfig, EngineConfig, ModelConfig, SchedulerConfig
from headrace.errors import ConfigError
from headrace.kernels.build.c_compiler import native_library
from headrace.kernels.candidate import Declined
from headrace.techniques import TECHNIQUES, Technique, find_technique
from headrace.techniques.loads import read_loads
from tests.support import tiny


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    """A tiny random Llama in float32, where equal tokens are promised."""
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "config.json").write_text(json.dumps(tiny.config_dict("llama")))
    return EngineConfig(
        model=ModelConfig(model=str(folder), dtype="float32", load_format="dummy", seed=7),
        cache=CacheConfig(kv_cache_memory=2**24),
        scheduler=SchedulerConfig(max_num_seqs=16),
        device=DeviceConfig(threads=1, device="cpu"),
    )


@pytest.fixture(scope="module")
def measured(config: EngineConfig) -> Callable[[str], list[Any]]:
    """The quick measurement of a technique, made once."""

    @cache
    def measure(name: str) -> list[Any]:
        bundled = replace(config, model=ModelConfig(dtype="float32"))  # grammars want a tokenizer
        return ablate.measure(name, bundled if name == "fast_forward" else config, quick=True)

    return measure


@pytest.mark.parametrize("technique", TECHNIQUES, ids=str)
def test_what_a_technique_is_measured_under_can_be_run(technique: Technique) -> None:
    for load in (each for full in technique.loads for each in (full, full.shortened)):
        assert load.values and set(load.figures) <= FIGURES.keys() and "{" not in load.said
        for value in load.values:
            assert getattr(load.at(value), load.over) == value
        many = max(len(load.candidates(mode)) for mode in ("off", "on"))
        assert many == 1 or load.pick in load.figures


def _name(technique: Technique) -> Any:
    """Replicas are processes, which take their time to start."""
    several = any("device.data_parallel_size" in load.engine for load in technique.loads)
    return pytest.param(technique.name, marks=pytest.mark.slow) if several else technique.name


@pytest.mark.parametrize("name", [_name(technique) for technique in TECHNIQUES if not technique.needs_gpu])
def test_tokens_are_equal_on_and_off(name: str, measured: Callable[[str], list[Any]]) -> None:
    for result in measured(name):
        assert result.compared > 0
        assert result.same == result.compared
        pairs = list(result.pairs())
        assert len(pairs) == len(result.curves[0].points) > 0
        assert result.title in ablate.render(result)


def test_compressed_weights_are_measured_in_bfloat16(config: EngineConfig) -> None:
    """In float32 there are none, so what is compared above is one engine with itself."""
    found = native_library()
    if isinstance(found, Declined) or not found.library["headrace_has_compressed"]():
        pytest.skip("no C compiler, or no AVX-512 with BF16")
    steps, prompts = ablate.measure(
        "compressed_weights", replace(config, model=replace(config.model, dtype="bfloat16")), quick=True
    )
    assert all(
        "kernel packed_linear lossless" in ablate.render(each) and list(each.pairs()) for each in (steps, prompts)
    )


def test_off_is_really_off(measured: Callable[[str], list[Any]]) -> None:
    """What only the technique can do is seen on one side alone."""
    shared, talk = measured("prefix_caching")
    for off, on in list(shared.pairs())[1:] + list(talk.pairs()):
        assert off["cached share"] == 0 < on["cached share"]
    (paged,) = measured("paged_allocation")
    off, on = list(paged.pairs())[-1]
    assert off["running at once"] < on["running at once"]


def test_the_command_writes_every_curve(
    config: EngineConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out.json"
    assert ablate.run(Namespace(name="kv-caching", quick=True, output_json=path, plot=None), config) == 0
    (written,) = json.loads(path.read_text())["ablations"]
    assert [curve["mode"] for curve in written["curves"]] == ["off", "on"]
    printed = capsys.readouterr().out
    assert all(
        word in printed
        for word in ("machine:", "limits:", "versions:", "quick form", "gain", "equal tokens on and off: 2 of 2")
    )


def test_what_needs_a_gpu_says_so_and_is_left_out_of_all(
    config: EngineConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match=r"cuda_graphs needs a GPU, .* on cpu, .*CUDA device"):
        ablate.run(Namespace(name="cuda-graphs", quick=True, output_json=None, plot=None), config)
    assert "cuda_graphs" not in ablate._possible("cpu") and "cuda_graphs: missing" in capsys.readouterr().err
    assert ablate._possible("cuda") == [technique.name for technique in TECHNIQUES if not technique.needs_cpu]
    with pytest.raises(ConfigError, match=r"compressed_weights needs a CPU, .* on cuda, .*--device cpu"):
        ablate.check_device(["compressed_weights"], "cuda")


def test_steps_with_decoding_rows_beside_prompts_are_measured_with_equal_tokens(config: EngineConfig) -> None:
    """For techniques that need a GPU: with the switch of another one here."""
    result = Ablation(config, find_technique("chunked_prefill"), quick=True).under(read_loads()["mixed"].shortened)
    ((off, on),) = result.pairs()
    assert result.same == result.compared > 0 and off["s in all"] > 0 < on["s in all"]
