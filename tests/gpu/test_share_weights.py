"""Weights on the card that two processes share: the second adds little, both say the same, and the first may go."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace import LLM, SamplingParams
from headrace.errors import ConfigError
from headrace.worker.device_memory import device_use
from tests.support.card import require_card

require_card()

CARD, GIB = torch.device("cuda"), 2**30
ROOT = Path(__file__).parents[2]
SHAPE = str(ROOT / "lab" / "shapes" / "Llama-3.2-1B")
ENGINE: dict[str, Any] = {
    "device": "cuda", "dtype": "bfloat16", "load_format": "dummy", "max_model_len": 1024, "max_num_seqs": 8,
    "kv_cache_memory": 128 * 2**20, "share_weights": True,
}  # fmt: skip
CHILD = """
import json, sys
from headrace import LLM
from tests.gpu.test_share_weights import ENGINE, SHAPE, answer, shared
with LLM(SHAPE, **ENGINE) as llm:
    while True:
        print(json.dumps([answer(llm), shared(llm)]), flush=True)
        if sys.stdin.readline() != "again\\n":
            break
"""


def answer(llm: LLM) -> list[int]:
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, detokenize=False)
    found = llm.generate([{"prompt_token_ids": list(range(5, 37))}], params, use_tqdm=False)
    return list(found[0].outputs[0].token_ids)


def shared(llm: LLM) -> str:
    return next(each.reason for each in llm.info.decisions if each.name == "weights" and each.value == "shared")


def files() -> set[Path]:
    return set(Path("/dev/shm").glob(f"headrace-{os.getuid()}-*"))


@pytest.mark.timeout(300)
def test_a_second_process_adds_little_and_goes_on_alone() -> None:
    before, empty = files(), device_use(CARD).used
    with LLM(SHAPE, **{**ENGINE, "share_weights": False}) as llm:
        plain = answer(llm)
    del llm
    gc.collect()
    torch.cuda.empty_cache()
    llm = LLM(SHAPE, **ENGINE)
    weights = llm.info.memory["weights"]
    assert answer(llm) == plain and "others that start now" in shared(llm) and weights > 2 * GIB
    alone = device_use(CARD).used
    assert alone - empty < 2 * weights, "it holds them once"
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert child.stdin is not None and child.stdout is not None
    try:
        said = json.loads(child.stdout.readline())
        assert said[0] == plain and "another process" in said[1]
        assert device_use(CARD).used - alone < GIB
        llm.shutdown()
        del llm
        gc.collect()
        torch.cuda.empty_cache()
        torch.full((2 * GIB,), 255, dtype=torch.uint8, device=CARD)  # what was given back is written over
        child.stdin.write("again\n")
        child.stdin.flush()
        assert json.loads(child.stdout.readline())[0] == plain, "its weights stayed where they are"
    finally:
        child.communicate("end\n", timeout=60)
    torch.cuda.empty_cache()
    assert device_use(CARD).used - empty < GIB and files() == before


def test_what_cannot_be_shared_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot sleep"):
        LLM(SHAPE, **ENGINE, enable_sleep_mode=True)
