"""Layers whose weights lie in another stage's memory: what is computed with them, and how much of them is here."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headrace import LLM, SamplingParams
from headrace.errors import ConfigError
from headrace.kernels import Kernels
from headrace.layers.linear import Linear
from headrace.models.layer_pool import LayerPool
from headrace.parallel.stages import places_for
from tests.support import modes, tiny
from tests.support.forward import CPU, PagedRun, load_decoder

STEPS: Iterable[dict[str, list[int]]] = ({"a": list(range(30)), "b": [7, 8, 9]}, {"a": [3], "b": [4]}, {"b": [5, 6]})


@pytest.mark.parametrize("pooled", [(1,), (0, 1, 2), (0, 2)])
@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3-moe-mixed"])
def test_pooled_layers_compute_what_others_do(tmp_path: Path, name: str, pooled: tuple[int, ...]) -> None:
    """To the bit, in steps one after the other, dense layers and sparse ones in one place."""
    folder = tiny.save(name, tmp_path, tokenizer=False)
    kernels = {"max_model_len": 64, "kernels": Kernels(CPU, disabled=frozenset({"onednn"}))}
    wanted, found = (PagedRun(load_decoder(folder, **kernels, **more)) for more in ({}, {"pooled": pooled}))  # type: ignore[arg-type]
    for step in STEPS:
        pooled_logits = found.step(step)
        assert all(torch.equal(logits, pooled_logits[each]) for each, logits in wanted.step(step).items())


@pytest.mark.parametrize("pooled", [(0, 1), (0, 1, 2)])
def test_a_step_that_fails_leaves_the_first_layers_in_their_places(tmp_path: Path, pooled: tuple[int, ...]) -> None:
    """Or the next one would compute with the weights of others."""
    folder = tiny.save("llama", tmp_path, tokenizer=False)
    kernels = {"max_model_len": 64, "kernels": Kernels(CPU, disabled=frozenset({"onednn"}))}
    wanted, found = (PagedRun(load_decoder(folder, **kernels, **more)) for more in ({}, {"pooled": pooled}))  # type: ignore[arg-type]
    for failing in pooled:
        attention: Any = found.decoder.layers[failing].attention  # type: ignore[union-attr]
        with pytest.MonkeyPatch.context() as patched, pytest.raises(RuntimeError, match="memory"):
            patched.setattr(attention, "forward", lambda *_: _raise(RuntimeError("out of memory")))
            found.step({"c": [1, 2]})
        ids = {f"a{failing}": [5, 6, 7]}
        assert all(torch.equal(logits, found.step(ids)[each]) for each, logits in wanted.step(ids).items())


def test_no_layer_computes_with_what_is_still_to_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts' launch takes in the next layer's first GEMM, but where that layer's weights may be on their way."""
    folder = tiny.save("qwen3-moe", tmp_path, tokenizer=False)
    monkeypatch.setattr(Linear, "plain", torch.zeros(1))
    for pooled in ((), (1,)):
        decoder = load_decoder(
            folder, max_model_len=64, kernels=Kernels(CPU, disabled=frozenset({"onednn"})), pooled=pooled
        )
        first: Any = decoder.layers[0].feed_forward  # type: ignore[union-attr]
        first._fused = SimpleNamespace(takes=lambda output: 8)
        decoder._ask_linears()
        assert (first.later is None) == bool(pooled)


def _raise(error: Exception) -> None:
    raise error


def test_layers_share_a_place_and_their_neighbours_two() -> None:
    assert [places_for(each) for each in ((1,), (1, 3, 5), (1, 2), (0, 3, 4))] == [1, 1, 1, 2]
    layers = {at: torch.nn.Linear(64, 8 * (at + 1), device="meta") for at in (0, 2, 4)}
    pool = LayerPool(layers, CPU)
    assert pool.num_bytes == 64 * 4 * (8 + 24 + 40) and pool.saved == 64 * 4 * (8 + 24)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.save("llama", tmp_path_factory.mktemp("llama")))


def answers(model: str, **more: Any) -> tuple[list[tuple[int, ...]], int]:
    """And the bytes of weights on the first rank."""
    gc.collect()
    asked = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(model, **{**modes.PLAIN, "num_blocks": 32, "max_num_seqs": 4, **more}) as llm:
        found = llm.generate([[5, 9, 200, 31] * 5, [7, 8], [3]], asked, use_tqdm=False)
        weights = llm.info.memory["weights"]
    return [tuple(each.outputs[0].token_ids) for each in found], weights


def test_stages_lend_each_other_memory_and_say_what_one_device_says(tmp_path: Path) -> None:
    model, stages = str(tiny.save("llama", tmp_path, num_hidden_layers=4)), {"pipeline_parallel_size": 2}
    (wanted, _), (found, weights) = answers(model), answers(model, **stages, pooled_layers=(2, 2))
    assert found == wanted
    assert answers(model, **stages)[1] > 1.2 * weights
    gc.collect()
    assert not [each for each in Path("/proc/self/fd").iterdir() if "headrace-layers" in os.path.realpath(each)]


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [0, 1])
def test_ranks_of_stages_lend_each_other_memory(llama: str, overlap: int) -> None:
    stages = {"pipeline_parallel_size": 2, "pipeline_layers": (2, 1), "pooled_layers": (2, 0), "overlap": overlap}
    assert answers(llama, tensor_parallel_size=2, **stages)[0] == answers(llama)[0]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"pooled_layers": (1,)}, "give --pipeline-parallel-size"),
        ({"pipeline_parallel_size": 2, "pooled_layers": (1,)}, "the stages have"),
        ({"pipeline_parallel_size": 2, "pooled_layers": (0, 9)}, "Give as many numbers, each from 0 to its stage's"),
        ({"pipeline_parallel_size": 2, "pooled_layers": (2, 0), "share_weights": True}, "by one process; leave it out"),
    ],
)
def test_what_cannot_be_pooled_is_said_before_anything_is_loaded(
    llama: str, more: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(llama, **modes.PLAIN, **more)
