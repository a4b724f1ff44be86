"""Keys and values of a real model handed over between replicas: the tokens and logprobs of one engine, in float32."""

from __future__ import annotations

import os
import signal
from array import array
from pathlib import Path

import pytest

from headrace import LLM, SamplingParams
from headrace.disagg import roles
from headrace.disagg.staging import staging_size
from headrace.engine.assembly import create_engine
from headrace.engine.resolve import create_config
from headrace.portability import shared_file
from headrace.request import Request
from tests.support import tiny
from tests.support.hand_over import House
from tests.support.hash_engine import Answers, run

PARAMS = [
    SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=2),
    SamplingParams(max_tokens=8, temperature=1.0, ignore_eos=True, n=2, presence_penalty=1.0),
    SamplingParams(max_tokens=8, temperature=0.8, ignore_eos=True, repetition_penalty=1.3),
]


@pytest.mark.parametrize(("kind", "overlap", "kv"), [("llama", 0, "auto"), ("qwen2-windows", 1, "int8")])
def test_tokens_and_logprobs_are_those_of_one_engine(kind: str, overlap: int, kv: str, tmp_path: Path) -> None:
    config = create_config(
        str(tiny.save(kind, tmp_path)),
        **{"dtype": "float32", "device": "cpu", "threads": 1, "kv_cache_memory": 1 << 22, "block_size": 16},
        **{"max_num_batched_tokens": 64, "overlap": overlap, "kv_cache_dtype": kv},
    )
    asked = [
        Request(request_id=at, prompt_token_ids=array("i", range(at + 3, at + 90)), params=params, seed=at)
        for at, params in enumerate(PARAMS)
    ]
    fd = shared_file(staging_size(1))
    engines = [create_engine(config, with_tokenizer=False) for _ in range(3)]
    try:
        wanted, alone = Answers(), engines[2].core
        for each in asked:
            alone.add(each)
        run(alone, answers=wanted)
        house = House(fd, [each.core for each in engines[:2]])
        for each in asked:
            house.front.submit(each)
        house.run()
        assert house.answers.tokens == wanted.tokens and house.answers.logprobs == wanted.logprobs
        assert house.handed(1).taken == len(asked)
        assert house.handed(1).taken_bytes > 0 and not house.handed(1).alone
        house.assert_at_rest()
    finally:
        for engine in engines:
            engine.close()
        os.close(fd)


def test_roles_change_while_requests_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real processes, of which one computes prompts at first: these queue, and another one joins it."""
    monkeypatch.setattr(roles, "PERIOD", 0.02)
    with LLM(
        **{"executor": "keyed-hash", "device_time": 0.004, "data_parallel_size": 3, "prefill_replicas": 1},
        **{"swap_roles": True, "expected_ttft": 0.01, "max_num_batched_tokens": 128, "overlap": 0},
    ) as llm:
        params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
        calls = [[f"{call} prompt {number}" + " and so on" * 40 for number in range(6)] for call in range(6)]
        texts = [[each.outputs[0].text for each in llm.generate(call, params, use_tqdm=False)] for call in calls]
        engine = llm.engine.core.engine  # type: ignore[attr-defined]
        assert engine._told_roles["roles"]["changes"] > 0
        again = [[each.outputs[0].text for each in llm.generate(call, params, use_tqdm=False)] for call in calls]
        assert texts == again and all(all(call) for call in texts)


def test_requests_outlive_who_computes_their_prompts() -> None:
    """Two of three processes compute prompts; one after the other is killed while it does."""
    with LLM(executor="keyed-hash", device_time=0.004, data_parallel_size=3, prefill_replicas=2) as llm:
        sockets = llm.engine.core.engine.own  # type: ignore[attr-defined]
        params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
        for victim in (0, 1):
            prompts = [f"{victim} prompt {number}" + " and so on" * 60 for number in range(4)]
            streams = [llm.stream(text, params) for text in prompts]
            os.kill(sockets[victim]._process.pid, signal.SIGKILL)
            texts = ["".join(delta.text for delta in stream) for stream in streams]
            assert texts == [each.outputs[0].text for each in llm.generate(prompts, params, use_tqdm=False)]
        stopping = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True, stop=[texts[0][9:11]])
        (stopped,) = llm.generate(prompts[:1], stopping, use_tqdm=False)
        assert stopped.outputs[0].finish_reason == "stop"
        os.kill(sockets[2]._process.pid, signal.SIGKILL)
        assert llm.generate("once more", params, use_tqdm=False)[0].outputs[0].finish_reason == "error"
