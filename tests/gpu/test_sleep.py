"""Sleep on the card: its memory is given back and taken again, and answers are the same; graphs, kernels and adapters
never notice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from headrace import LLM, LoRARequest, SamplingParams
from headrace.worker.device_memory import device_use
from tests.support import adapters, tiny
from tests.support.card import require_card

require_card()

CARD = torch.device("cuda")
GIB = 2**30
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
PROMPTS = ["Once upon a time", "The sea was", "def f(x):", "1, 2, 3,"] * 3
ENGINE: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", "kv_cache_memory": 2 * GIB, "max_num_seqs": 16}


def answers(llm: LLM, **more: Any) -> list[tuple[int, ...]]:
    return [tuple(each.outputs[0].token_ids) for each in llm.generate(PROMPTS, GREEDY, use_tqdm=False, **more)]


def test_memory_goes_and_comes_and_answers_stay() -> None:
    with LLM(**ENGINE, enable_sleep_mode=True) as llm:
        llm.engine.await_kernels()
        before, awake = answers(llm), device_use(CARD).used
        for level in (1, 2, 1):
            llm.sleep(level)
            asleep = device_use(CARD).used
            torch.full((GIB,), 255, dtype=torch.uint8, device=CARD)  # what was given back is written over
            torch.cuda.empty_cache()
            llm.wake_up()
            held = llm.info.memory["weights"] + llm.info.memory["kv_cache"]
            assert awake - asleep > held - 2**25, (level, awake, asleep, held)
            llm.engine.await_kernels()
            assert answers(llm) == before, level
            assert abs(device_use(CARD).used - awake) < 256 * 2**20, level


def test_adapters_sleep_too(tmp_path: Path) -> None:
    tiny.save("llama", tmp_path / "base")
    folder = adapters.write(tmp_path / "one", tiny.create("llama"), rank=8)
    lora = LoRARequest("one", 1, str(folder))
    keywords = {**ENGINE, "dtype": "float32", "kv_cache_memory": 2**24, "enable_lora": True}
    with LLM(tmp_path / "base", **keywords, enable_sleep_mode=True) as llm:
        before = answers(llm, lora_request=lora)
        for level in (1, 2):
            llm.sleep(level)
            llm.wake_up()
            assert answers(llm, lora_request=lora) == before != answers(llm)


@pytest.mark.parametrize("holding", [True, False])
def test_who_wakes_without_room_is_told_and_sleeps_on(holding: bool) -> None:
    taken: list[torch.Tensor] = []
    with LLM(**ENGINE, enable_sleep_mode=True) as llm:
        before = answers(llm)
        llm.sleep(1 if holding else 2)
        taken.append(torch.empty(torch.cuda.mem_get_info()[0] - 2**26, dtype=torch.uint8, device=CARD))
        with pytest.raises(Exception, match=r"memory|fit"):
            llm.wake_up()
        assert llm.is_sleeping
        taken.clear()
        torch.cuda.empty_cache()
        llm.wake_up()
        assert answers(llm) == before
