"""Thousands of short requests on the card in random order, many of them left in the middle; steps that fail; engines
closed and made again.

Nothing may leak: no block, no row, no memory of the device or of the host. What was not left is answered as it is
alone.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from headrace import LLM, SamplingParams
from headrace.engine.output import OutputCollector
from headrace.request import RequestOutput
from headrace.worker.host import process_memory
from tests.support import modes
from tests.support.card import STRICT, Judge, exhaust, params, require_card, runner_of

require_card()

MIB = 2**20
ASKED = (
    params(max_tokens=12),
    params(max_tokens=1),
    params(max_tokens=9, temperature=0.9, top_p=0.9, seed=1),
    params(max_tokens=12, temperature=1.0, seed=2),
    params(max_tokens=7, presence_penalty=0.6, frequency_penalty=0.3),
    params(max_tokens=6, logprobs=2),
    params(max_tokens=5, n=3, temperature=1.0, seed=3),
    params(max_tokens=8, logit_bias={5: 2.0}, min_tokens=3, ignore_eos=False),
)
BUSY: dict[str, Any] = {
    **STRICT,
    "max_num_seqs": 64,
    "num_blocks": 260,
    "block_size": 16,
    "max_num_batched_tokens": 256,
    "max_model_len": 512,
}


def kinds() -> list[tuple[list[int], SamplingParams]]:
    """48 requests; those of one parameter set share beginnings of prompts."""
    draw = random.Random(0)
    trunk = draw.choices(range(8000), k=60)
    return [
        (
            trunk[: draw.choice((0, 16, 33, 60))] + draw.choices(range(8000), k=draw.randint(1, 20)),
            ASKED[i % len(ASKED)],
        )
        for i in range(48)
    ]


class Storm:
    """Feeds one engine: about ``crowd`` requests at a time, some left before they run, some while they run."""

    def __init__(self, llm: LLM, seed: int, *, leaving: float, crowd: int = 120) -> None:
        self._llm = llm
        self._draw = random.Random(seed)
        self._leaving, self._crowd = leaving, crowd
        self._kinds = kinds()
        self._live: dict[int, tuple[int, OutputCollector]] = {}
        self.left = 0
        self.answered: list[tuple[list[int], SamplingParams, RequestOutput]] = []

    def run(self, count: int) -> None:
        """``count`` more requests, until all have ended."""
        while count or self._live:
            while count and len(self._live) < self._crowd:
                self._add()
                count -= 1
            if self._live and self._draw.random() < self._leaving:
                self._leave()
            self._llm.turn()
            self._reap()
        while self._llm.engine.core.has_work:
            self._llm.turn()
        modes.check_at_rest(self._llm)

    def _add(self) -> None:
        kind = self._draw.randrange(len(self._kinds))
        prompt, asked = self._kinds[kind]
        collector = self._llm.submit({"prompt_token_ids": prompt, "priority": self._draw.randrange(3)}, asked)
        self._live[int(collector.output().request_id)] = kind, collector

    def _leave(self) -> None:
        number = self._draw.choice(sorted(self._live))
        del self._live[number]
        self._llm._leave([number])
        self.left += 1

    def _reap(self) -> None:
        for number in [number for number, (_, collector) in self._live.items() if collector.finished]:
            kind, collector = self._live.pop(number)
            self.answered.append((*self._kinds[kind], collector.output()))

    def check(self, judge: Judge, *, may_fail: bool = False) -> None:
        for prompt, asked, found in self.answered:
            judge.check(prompt, asked, found, may_fail=may_fail)
        self.answered.clear()


@pytest.fixture(scope="module")
def judge() -> Iterator[Judge]:
    made = Judge(max_model_len=512)
    yield made
    made.close()


def on_device() -> int:
    """Bytes of the device that are taken, by whomever."""
    gc.collect()
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free


CROWDED = {"overlap": 2, "scheduling_policy": "priority", "num_blocks": 40}


@pytest.mark.parametrize("mode", [{"overlap": 1}, CROWDED, {"enforce_eager": True}], ids=str)
def test_thousands_of_short_requests_many_of_them_left(judge: Judge, mode: dict[str, Any]) -> None:
    with LLM(**{**BUSY, **mode}) as llm:
        storm = Storm(llm, 1, leaving=0.4)
        storm.run(1000)  # every bucket is captured, every kernel compiled, every buffer grown
        storm.check(judge)
        left, taken, held = storm.left, on_device(), process_memory()
        for _ in range(3):
            storm.run(800)
            storm.check(judge)
        assert storm.left > left + 100
        assert on_device() <= taken + 2 * MIB
        assert process_memory() <= held + 24 * MIB


def test_aborts_in_the_middle_of_everything(judge: Judge) -> None:
    """Whole crowds leave at once: with their prompts half computed, their steps queued, their blocks shared."""
    with LLM(**{**BUSY, "overlap": 2, "max_num_batched_tokens": 16}) as llm:
        asked = params(max_tokens=20)
        for turns in (1, 2, 3, 5, 9, 30):
            ids = [int(llm.submit({"prompt_token_ids": prompt}, asked).output().request_id) for prompt, _ in kinds()]
            for _ in range(turns):
                llm.turn()
            llm._leave(ids)
            modes.check_at_rest(llm)
        prompt = kinds()[5][0]
        judge.check(prompt, asked, llm.generate({"prompt_token_ids": prompt}, asked, use_tqdm=False)[0])


@pytest.mark.parametrize("overlap", [0, 1, 2])
def test_steps_that_fail_take_only_their_own_requests(judge: Judge, overlap: int) -> None:
    with LLM(**{**BUSY, "overlap": overlap}) as llm:
        modes.fail_steps(llm, 4, random.Random(3))
        storm = Storm(llm, 2, leaving=0.1, crowd=60)
        storm.run(500)
        failed = sum(any(each.finish_reason == "error" for each in found.outputs) for _, _, found in storm.answered)
        assert 0 < failed < len(storm.answered)
        storm.check(judge, may_fail=True)


def test_out_of_memory_names_what_to_lower_and_the_engine_goes_on(judge: Judge) -> None:
    """The device's own refusal, not a made-up one."""
    prompt, asked = kinds()[0][0], params(max_tokens=8)
    with LLM(**BUSY) as llm:
        runner = runner_of(llm)
        real = runner.forward
        runner.forward = exhaust
        refused = llm.generate({"prompt_token_ids": prompt}, asked, use_tqdm=False)[0].outputs[0]
        runner.forward = real
        assert refused.finish_reason == "error" and "--max-num-batched-tokens" in str(refused.stop_reason)
        judge.check(prompt, asked, llm.generate({"prompt_token_ids": prompt}, asked, use_tqdm=False)[0])


def test_memory_comes_back_when_an_engine_is_closed_at_rest_or_in_the_middle() -> None:
    """The device's memory, as the driver counts it, after engines with graphs, blocks and steps in flight."""
    taken = []
    for turns in (0, 3, 8, 40):
        llm = LLM(**{**BUSY, "overlap": 2, "num_blocks": None, "kv_cache_memory": 2**30})
        for prompt, _ in kinds():
            llm.submit({"prompt_token_ids": prompt}, params(max_tokens=30))
        for _ in range(turns):
            llm.turn()
        during, blocks = on_device(), llm.info.memory["kv_cache"]
        llm.shutdown()
        del llm
        taken.append(on_device())
        assert during > taken[-1] + blocks > taken[-1]
    assert max(taken) <= taken[0] + 64 * MIB, taken
