"""Adapters side by side give what each gives alone: PEFT's golden answers, and models with the adapter merged into
their weights."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from headrace import LLM, LoRARequest, SamplingParams
from headrace.cache.adapters import AdapterBlocks
from headrace.cache.block_pool import PrefixTree
from headrace.config import AdapterConfig, CacheConfig
from headrace.engine.executor import AdapterOutcome
from headrace.errors import ConfigError, InvalidRequest, ModelError
from headrace.lora import peft
from headrace.lora.device import DeviceAdapters
from headrace.lora.layout import Layout, create_layout
from headrace.lora.peft import read_adapter
from headrace.lora.pinned import pinned_zeros
from headrace.lora.reading import HostAdapter, create_packing, read_factors
from headrace.lora.slots import AdapterSlots
from headrace.models.families import spec_from_config
from headrace.spec import ADDRESS_UNIT, kv_groups
from headrace.worker.rows import Gather
from tests.support import adapters, tiny
from tests.support.hash_engine import request
from tests.support.outside import shared

NAMES = ("novels", "rust", "shout", "tools")
GPT = ("c_attn", "c_proj", "c_fc")
PROMPTS = ([5, 9, 200, 31, 7, 7, 80], list(range(40, 61)), [17], [3, 250, 250, 12])
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False)


def test_an_adapter_that_is_read_again_outlives_its_eviction() -> None:
    """That was queued behind steps."""
    slots, reading = Mock(), Mock(read=lambda folder: SimpleNamespace(num_blocks=1))
    held = DeviceAdapters(slots, reading)
    held.load("x", "/x")
    held.outcomes(5.0)
    let_go = held.drop("x")
    held.load("x", "/x")
    assert held.outcomes(5.0) == [AdapterOutcome("x", blocks=1)]
    let_go()
    held.bring([(0, "x", (0,))])
    held.drop("x")()
    with pytest.raises(KeyError):
        held.bring([(0, "x", (0,))])
    held.close()


def engine(model: Path, **options: Any) -> LLM:
    return LLM(model, dtype="float32", threads=1, **options)


def golden(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((folder / "golden.json").read_text(encoding="utf-8"))["prompts"]
    return found


def ids(prompts: Any) -> list[dict[str, Any]]:
    return [{"prompt_token_ids": list(each)} for each in prompts]


def answers(llm: LLM, prompts: Any, lora: Any = None, params: Any = GREEDY) -> list[list[int]]:
    return [each.outputs[0].token_ids for each in llm.generate(ids(prompts), params, use_tqdm=False, lora_request=lora)]


def test_golden_answers_of_four_adapters_and_of_none_in_one_batch() -> None:
    folders = {name: shared("models", f"demo-lora-{name}") for name in NAMES}
    modules = [f"{name}={folder}" for name, folder in folders.items()]
    asked: list[tuple[Any, dict[str, Any]]] = [(None, each) for each in golden(shared("models", "demo"))]
    asked += [(LoRARequest(name), each) for name in NAMES for each in golden(folders[name])]
    asked = asked[::4] + asked[1::4]
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, detokenize=False)
    with engine(shared("models", "demo"), lora_modules=modules, max_loras=4) as llm:
        found = answers(llm, [each["prompt_ids"] for _, each in asked], [lora for lora, _ in asked], params)
    for (lora, each), tokens in zip(asked, found, strict=True):
        first = next(
            (at for at, pair in enumerate(zip(tokens, each["greedy_ids"], strict=False)) if pair[0] != pair[1]), None
        )
        assert first is None or each["gaps"][first] < 1e-4, (lora, each["name"], first)


CASES = {
    "llama": ("llama", adapters.LLAMA, {}),
    "rslora, ranks of modules": (
        "llama",
        adapters.LLAMA,
        {"use_rslora": True, "rank": 8, "ranks": {"k_proj": 1, "mlp.down_proj": 16}},
    ),
    "dora": ("qwen2", adapters.LLAMA, {"use_dora": True}),
    "embedding and head": ("llama", ("q_proj", "embed_tokens", "lm_head"), {}),
    "tied head, the embedding alone": ("qwen3", ("embed_tokens", "o_proj"), {}),
    "scaled embedding, norms around": ("gemma2", (*adapters.LLAMA, "embed_tokens", "lm_head"), {"strength": 1.0}),
    "merged on disk": ("phi3", ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"), {}),
    "turned on disk, biases": ("gpt2", GPT, {}),
    "attention beside experts": ("qwen3-moe", ("q_proj", "k_proj", "v_proj", "o_proj"), {}),
}


@pytest.mark.parametrize("case", CASES)
def test_an_adapter_is_its_model_with_the_weights_merged(case: str, tmp_path: Path) -> None:
    family, targets, config = CASES[case]
    model = tiny.create(family, seed=3)
    model.save_pretrained(tmp_path / "base")
    one = adapters.write(tmp_path / "one", model, targets=targets, seed=1, **config)
    two = adapters.write(tmp_path / "two", model, targets=targets[:1], rank=2, seed=2)
    with engine(tmp_path / "base", lora_modules=[f"one={one}", f"two={two}"], max_num_batched_tokens=24) as llm:
        base = answers(llm, PROMPTS)
        mixed = answers(
            llm, [*PROMPTS, *PROMPTS], [LoRARequest("one"), LoRARequest("two"), None, LoRARequest("one")] * 2
        )
        whole = answers(llm, PROMPTS, LoRARequest("one"))
    adapters.merge(model, one)  # in place: a head that is tied no more stays as it was
    wanted = [_greedy(model, prompt) for prompt in PROMPTS]
    assert whole == wanted != base
    assert mixed[0] == mixed[4] == wanted[0] and mixed[3] == mixed[7] == wanted[3] and mixed[2] == base[2]


def _greedy(model: Any, prompt: list[int]) -> list[int]:
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(GREEDY.max_tokens or 0):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder, model = tmp_path_factory.mktemp("llama"), tiny.create("llama", seed=3)
    model.save_pretrained(folder / "base")
    return model, folder


def test_more_adapters_than_slots_and_than_host_memory_holds(llama: tuple[Any, Path]) -> None:
    """Each gives what it gives alone, though each step computes with one or two and a few are in memory at once."""
    model, folder = llama
    for seed in range(6):
        adapters.write(folder / "many" / f"a{seed}", model, targets=("q_proj", "v_proj"), rank=1 + seed, seed=seed)
    names = [f"a{index % 6}" for index in range(15)]
    prompts = [PROMPTS[index % len(PROMPTS)] for index in range(15)]
    with engine(folder / "base", lora_dir=str(folder / "many"), max_loras=8) as llm:
        wanted = [answers(llm, [prompt], LoRARequest(name))[0] for name, prompt in zip(names, prompts, strict=True)]
    small = {"max_loras": 2, "max_cpu_loras": 3, "max_num_seqs": 4}
    with engine(folder / "base", lora_dir=str(folder / "many"), **small) as llm:
        assert answers(llm, prompts, [LoRARequest(name) for name in names]) == wanted
        desk = llm.engine.core.adapters
        assert desk is not None and desk.num_loads >= 6 and not desk.busy
    assert len({tuple(each) for each in wanted[: len(PROMPTS) * 3 : len(PROMPTS)]}) > 1


def _layout(llm: LLM) -> Layout:
    (said,) = (each for each in llm.info.decisions if each.name == "adapters")
    assert said.reason
    adapters = llm.engine.core.executor._adapters  # type: ignore[attr-defined]
    found: Layout = adapters.slots.layout
    return found


ALL = (*adapters.LLAMA, "embed_tokens", "lm_head")
# of blocks: as they are; so small that rows lie in chunks, and of fewer bits than the factors; and with too little in one
GEOMETRIES: dict[str, dict[str, Any]] = {
    "one row and more in a block": {},
    "rows in chunks": {"block_size": 8},
    "blocks of 8 bits": {"kv_cache_dtype": "fp8"},
    "few blocks": {"num_blocks": 12, "max_model_len": 64},
    "magnitudes in chunks": {"block_size": 8, "dora": True},
}


@pytest.mark.parametrize("case", GEOMETRIES)
def test_adapters_in_blocks_of_the_cache_are_those_in_blocks_of_their_own(
    case: str, llama: tuple[Any, Path], tmp_path: Path
) -> None:
    """Whatever a block is like; prompts, answers and adapters take blocks from each other."""
    (model, folder), options = llama, dict(GEOMETRIES[case])
    dora, narrow = options.pop("dora", False), options.get("block_size") == 8
    if narrow:  # whose blocks hold 256 elements
        model, folder = tiny.create("llama", seed=3, num_hidden_layers=1, num_key_value_heads=1), tmp_path
        model.save_pretrained(folder / "base")
    for seed in range(5):
        targets = (*adapters.LLAMA, "lm_head") if dora else ALL if seed % 2 else ("q_proj", "v_proj")
        adapters.write(tmp_path / f"a{seed}", model, targets=targets, rank=1 + 2 * seed, seed=seed, use_dora=dora)
    prompts = [PROMPTS[index % len(PROMPTS)] for index in range(20)]
    asked = [None if index % 7 == 6 else LoRARequest(f"a{index % 5}") for index in range(20)]
    found = []
    for on in (True, False):
        sizes = {"max_loras": 3, "max_cpu_loras": 5, "max_num_seqs": 6, "max_num_batched_tokens": 16}
        with engine(
            folder / "base", lora_dir=str(tmp_path), technique={"unified_paging": on}, **sizes, **options
        ) as llm:
            found.append([*answers(llm, prompts, asked), *answers(llm, prompts, asked)])
            layout, stats = _layout(llm), llm.engine.core.stats()
            assert layout.is_shared is on and stats.num_used_blocks == 0 and stats.adapters is not None
            assert (layout.chunk == 256) == (on and narrow)
            brought = stats.adapters.brought
            assert brought > 5 if case == "few blocks" and on else brought >= 5
    assert found[0] == found[1] and len({tuple(each) for each in found[0][:: len(PROMPTS)]}) > 2


def test_asleep_and_reloaded_under_the_same_name(llama: tuple[Any, Path], tmp_path: Path) -> None:
    """A request goes on with the adapter that its name stood for as it began, beside one of the new one; what a device
    gave up in its sleep comes again."""
    model, folder = llama
    for seed in (1, 2):
        adapters.write(tmp_path / f"{seed}", model, seed=seed, strength=0.6)
    long = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, detokenize=False)
    with engine(folder / "base", enable_lora=True, enable_sleep_mode=True, enable_prefix_caching=False) as llm:
        one = LoRARequest("x", 1, str(tmp_path / "1"))
        first = answers(llm, PROMPTS[:1], one, long)
        second = answers(llm, PROMPTS[:1], LoRARequest("y", 1, str(tmp_path / "2")), long)
        assert first != second
        core, desk = llm.engine.core, llm.engine.core.adapters
        assert desk is not None
        begun = request(1000, PROMPTS[0], adapter="x", max_tokens=24, temperature=0.0)
        core.add(begun)
        told: dict[int, list[int]] = {}

        def turn() -> None:
            for output in core.step():
                told.setdefault(output.request_id, []).extend(output.token_ids)

        while not told:
            turn()
        desk.unregister("x")
        desk.register("x", str(tmp_path / "2"))
        core.add(replace(begun, request_id=1001))
        while core.has_work:
            turn()
        assert [*told.values()] == [first[0], second[0]]
        for level in (1, 2):
            llm.sleep(level)
            llm.wake_up()
            assert answers(llm, PROMPTS[:1], LoRARequest("x"), long) == second
        adapters.write(tmp_path / "2", model, seed=1, strength=0.6)
        assert answers(llm, PROMPTS[:1], LoRARequest("x", 1, str(tmp_path / "2")), long) == second
        again = LoRARequest("x", load_inplace=True)
        said = llm.stream({"prompt_token_ids": PROMPTS[0]}, long, lora_request=again)
        assert [token for delta in said for token in delta.token_ids] == first[0]


def test_prefixes_of_adapters_never_mix(llama: tuple[Any, Path]) -> None:
    model, folder = llama
    one = adapters.write(folder / "prefix", model, seed=1)
    prompt = list(range(100, 180))
    with engine(folder / "base", enable_lora=True) as llm:
        asked = [None, LoRARequest("x", 1, str(one))] * 2
        found = [llm.generate(ids([prompt]), GREEDY, use_tqdm=False, lora_request=lora)[0] for lora in asked]
        assert [each.num_cached_tokens > 0 for each in found] == [False, False, True, True]
        tokens = [each.outputs[0].token_ids for each in found]
        assert tokens[:2] == tokens[2:] and tokens[0] != tokens[1]
    with engine(folder / "base", enable_lora=True, enable_prefix_caching=False) as plain:
        assert answers(plain, [prompt], LoRARequest("x", 1, str(one)))[0] == tokens[1]


def test_what_is_no_adapter_of_this_model_harms_nobody(llama: tuple[Any, Path], tmp_path: Path) -> None:
    model, folder = llama
    good = adapters.write(tmp_path / "good", model, seed=1)
    bad = adapters.write(tmp_path / "bad", model, seed=1)
    from safetensors.torch import load_file, save_file

    tensors = load_file(bad / "adapter_model.safetensors")
    next(iter(tensors.values()))[0, 0] = float("nan")
    save_file(tensors, bad / "adapter_model.safetensors")
    with engine(folder / "base", enable_lora=True) as llm:
        with pytest.raises(InvalidRequest, match="no folder"):
            answers(llm, PROMPTS[:1], LoRARequest("none", 1, str(tmp_path / "none")))
        with pytest.raises(InvalidRequest, match="no adapter 'unknown'"):
            answers(llm, PROMPTS[:1], LoRARequest("unknown"))
        both = [LoRARequest("good", 1, str(good)), LoRARequest("bad", 2, str(bad))]
        one, two = llm.generate(ids(PROMPTS[:2]), GREEDY, use_tqdm=False, lora_request=both)
        assert one.outputs[0].finish_reason == "length" and two.outputs[0].finish_reason == "error"
        assert "NaN" in str(two.outputs[0].stop_reason)
        worse = LoRARequest("good", 1, str(bad), load_inplace=True)
        assert llm.generate(ids(PROMPTS[:1]), GREEDY, lora_request=worse)[0].outputs[0].finish_reason == "error"
        assert answers(llm, PROMPTS[:1], LoRARequest("good")) == [one.outputs[0].token_ids]
        assert answers(llm, PROMPTS[:1]) and answers(llm, PROMPTS[:1], both[0]) == [one.outputs[0].token_ids]
    with engine(folder / "base") as plain, pytest.raises(InvalidRequest, match="--enable-lora"):
        answers(plain, PROMPTS[:1], LoRARequest("good", 1, str(good)))
    with pytest.raises(ModelError, match="rank 4; this engine takes ranks from 1 to 2"):
        LLM(str(folder / "base"), lora_modules=[f"good={good}"], max_lora_rank=2)
    with pytest.raises(ConfigError, match="NAME=PATH"):
        LLM(str(folder / "base"), lora_modules=["good"])
    with pytest.raises(ConfigError, match="no folder; check the path"):
        LLM(str(folder / "base"), lora_dir=str(tmp_path / "nowhere"))


def test_factors_that_the_type_cannot_hold_and_adapters_that_the_cache_cannot(
    llama: tuple[Any, Path], tmp_path: Path
) -> None:
    model, folder = llama
    large = adapters.write(tmp_path / "large", model, strength=1e7)
    spec = spec_from_config(json.loads((folder / "base" / "config.json").read_text()))
    config, kv = AdapterConfig(enable_lora=True, max_lora_rank=64), kv_groups(spec, 16, 2)
    layout = create_layout(spec, config, CacheConfig(), kv, 2)
    assert layout is not None
    packing = partial(create_packing, layout)
    with pytest.raises(ModelError, match="too large for torch"):
        read_factors(read_adapter(large, spec, 64), packing, torch.float16, pinned=False)
    read_factors(read_adapter(large, spec, 64), packing, torch.bfloat16, pinned=False)
    wide = adapters.write(tmp_path / "wide", model, rank=64)
    with engine(folder / "base", enable_lora=True, max_lora_rank=64, num_blocks=12, max_model_len=64) as llm:
        both = [LoRARequest("wide", 1, str(wide)), None]
        one, two = llm.generate(ids(PROMPTS[:2]), GREEDY, use_tqdm=False, lora_request=both)
        assert one.outputs[0].finish_reason == "error" and two.outputs[0].finish_reason == "length"
        assert "takes at most 0 beside adapter wide. Shorten it" in str(one.outputs[0].stop_reason)


# --- planted defects: what the tests above are worth ------------------------------------------------------------------


def _crowd(llama: tuple[Any, Path]) -> list[list[int]]:
    """Answers of four adapters in turn behind one long beginning, over two slots, which they take from each other."""
    model, folder = llama
    for seed in range(4):
        adapters.write(
            folder / "crowd" / f"c{seed}",
            model,
            targets=("q_proj", "v_proj", "down_proj"),
            rank=2 + seed,
            seed=seed,
            strength=0.6,
        )
    prompts = [[*range(100, 150), 7 + index] for index in range(12)]
    asked = [LoRARequest(f"c{index % 4}") for index in range(12)]
    with engine(
        folder / "base", lora_dir=str(folder / "crowd"), max_loras=2, max_num_seqs=4, max_num_batched_tokens=80
    ) as llm:
        return answers(llm, prompts, asked)


@pytest.fixture(scope="module")
def crowd(llama: tuple[Any, Path]) -> list[list[int]]:
    return _crowd(llama)


_bring, _place, _find, _ensure, _scale, _rows_of = (
    AdapterSlots.bring, AdapterBlocks._place, PrefixTree.find_root, PrefixTree.ensure_root, peft._scale, Gather._adapters
)  # fmt: skip


def _placed_first(self: AdapterBlocks, name: str) -> Any:
    """In a slot that is in use."""
    held = _place(self, name)
    held.slot = 0
    return held


DEFECTS: dict[str, dict[tuple[Any, str], Any]] = {
    "brought into the slot beside its own": {
        (AdapterSlots, "bring"): lambda self, slot, *rest: _bring(self, (slot + 1) % 2, *rest)
    },
    "rows have the slot of the row before": {
        (Gather, "_adapters"): lambda self, packing, slots: _rows_of(self, packing, np.roll(slots, 1))
    },
    "scaled by a rank too many": {
        (peft, "_scale"): lambda folder, config, module, rank: _scale(folder, config, module, rank + 1)
    },
    "in a slot that is in use": {(AdapterBlocks, "_place"): _placed_first},
    "prefixes of all adapters are one": {
        (PrefixTree, "find_root"): lambda self, salt, adapter: _find(self, salt, None),
        (PrefixTree, "ensure_root"): lambda self, salt, adapter: _ensure(self, salt, None),
    },
}


def test_a_crowd_gets_what_each_gets_alone(llama: tuple[Any, Path], crowd: list[list[int]]) -> None:
    _, folder = llama
    with engine(folder / "base", lora_dir=str(folder / "crowd"), enable_prefix_caching=False) as llm:
        alone = [answers(llm, [[*range(100, 150), 7 + index]], LoRARequest(f"c{index % 4}"))[0] for index in range(12)]
    assert crowd == alone


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_planted_defect_is_found(
    defect: str, llama: tuple[Any, Path], crowd: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for (owner, name), replacement in DEFECTS[defect].items():
        monkeypatch.setattr(owner, name, replacement)
    assert _crowd(llama) != crowd


def test_host_memory_of_adapters_is_registered_until_nobody_has_any_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    known, status = dict[int, int](), 0

    def register(address: int, size: int, _: int) -> int:
        known[address] = size
        return status

    card = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=known.pop)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: card)
    found = pinned_zeros(3, 2**20, torch.bfloat16)
    assert known == {found.data_ptr(): 6 * 2**20} and found.data_ptr() % 2**21 == 0
    assert found.shape == (3, 2**20) and not found.any()
    last = found[2]
    del found
    assert known
    del last
    assert not known
    status, other = 1, torch.zeros(1)
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: other)
    assert pinned_zeros(1, 8, torch.float32) is other


def test_addresses_reach_the_end_of_a_large_cache() -> None:
    """128 GiB in blocks of 2 MiB; beyond 32 GiB they were negative once."""
    one, layout = np.array([0]), SimpleNamespace(columns=1, num_parts=0, by_name={}, block=2**20)
    held = HostAdapter(torch.empty(0), (), one, one, one, 1)
    (address,) = held.row(layout, np.array([2**16 - 1]))  # type: ignore[arg-type]
    assert int(address) * ADDRESS_UNIT == (2**16 - 1) * layout.block
