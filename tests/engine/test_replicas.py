"""``LLM(data_parallel_size=…)`` answers as one engine does, and one replica's death is its own requests'."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import pytest

from headrace import LLM, SamplingParams
from headrace.errors import EngineDead, InvalidRequest
from tests.support import modes, tiny

PARAMS = [
    SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True),
    SamplingParams(max_tokens=9, temperature=1.0, seed=3, ignore_eos=True, n=2, logprobs=1),
    SamplingParams(max_tokens=20, temperature=0.0, stop=["e"]),
    SamplingParams(max_tokens=7, temperature=0.8, ignore_eos=True),
]
PROMPTS = ["The river", "A mill and its wheel", "Water", "Sixteen stones lie in the brook, and more"]


def test_two_replicas_answer_as_one_engine(tmp_path: Path) -> None:
    folder = str(tiny.save("llama", tmp_path))
    common = {"dtype": "float32", "device": "cpu", "threads": 1, "kv_cache_memory": 1 << 22, "seed": 5}
    asked = PROMPTS * 2, PARAMS * 2
    with LLM(folder, **common) as one, LLM(folder, data_parallel_size=2, **common) as two:
        two.turn()  # there is nothing to wait for
        wanted, found = (llm.generate(*asked, use_tqdm=False) for llm in (one, two))
        assert [[each.token_ids for each in output.outputs] for output in found] == [
            [each.token_ids for each in output.outputs] for output in wanted
        ]
        assert [output.outputs[0].text for output in found] == [output.outputs[0].text for output in wanted]
        assert "".join(delta.text for delta in two.stream("The river", PARAMS[0])) == wanted[0].outputs[0].text
        with pytest.raises(InvalidRequest):
            two.generate("x" * 5000, use_tqdm=False)


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("model", modes.FAMILIES)
@pytest.mark.parametrize("seed", range(500, 506))
def test_no_mode_of_two_replicas_changes_an_answer(model: str, seed: int, tmp_path: Path) -> None:
    folder, rng = str(tiny.save(model, tmp_path)), random.Random(seed)
    oracle = modes.Oracle(folder)
    cases, mode = modes.draw_cases(rng, oracle.vocab_size, 8), modes.draw_mode(rng, failing=False)
    with LLM(folder, **{**modes.PLAIN, **mode.keywords, "data_parallel_size": 2}) as llm:
        for case, found in zip(cases, modes.answers_of(llm, cases), strict=True):
            if found is not None:
                modes.compare(found, oracle.answer(case), may_fail=False)
    oracle.close()


def test_a_dead_replica_costs_its_own_requests() -> None:
    with LLM(executor="keyed-hash", device_time=0.002, data_parallel_size=2) as llm:
        sockets = llm.engine.core.engine.own  # type: ignore[attr-defined]
        params = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)
        streams = [llm.stream(f"prompt {number}", params) for number in range(4)]
        for stream in streams:
            next(stream)
        os.kill(sockets[0]._process.pid, signal.SIGKILL)
        ends = [list(stream)[-1] for stream in streams]
        assert sorted(end.error is None for end in ends) == [False, False, True, True]
        assert llm.generate("once more", params, use_tqdm=False)[0].outputs[0].finish_reason == "length"
        os.kill(sockets[1]._process.pid, signal.SIGKILL)
        assert llm.generate("once more", params, use_tqdm=False)[0].outputs[0].finish_reason == "error"
        with pytest.raises(EngineDead):
            llm.generate("once more", params, use_tqdm=False)
