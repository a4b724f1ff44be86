"""An expert rank that dies is nobody's failure where others hold its experts: the rest answer as one rank does, every
request of it."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from headrace import LLM, SamplingParams
from headrace.errors import ConfigError, EngineDead
from tests.support import modes, tiny

ASKED = [SamplingParams(temperature=0.8 * (at % 2), seed=at, max_tokens=16, ignore_eos=True) for at in range(8)]
PROMPTS = [[(7 * at + 3 * place) % 250 for place in range(4 + 12 * at)] for at in range(8)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.save("qwen3-moe", tmp_path_factory.mktemp("model")))


def engine(model: str, size: int = 3, **more: Any) -> LLM:
    ranks = {"tensor_parallel_size": size, "enable_expert_parallel": size > 1, "expert_failover": size > 1}
    sizes = {"num_blocks": 64, "block_size": 8, "max_num_seqs": 6, "max_num_batched_tokens": 32}
    return LLM(model, **{**modes.PLAIN, **sizes, **ranks, **more})


def answers(llm: LLM, kill: dict[int, tuple[int, int]] | None = None) -> list[list[int]]:
    """``kill``: at which turn which rank, and by which signal."""
    collectors = [llm.submit(prompt, params) for prompt, params in zip(PROMPTS, ASKED, strict=True)]
    turn = 0
    while not all(each.finished for each in collectors):
        if kill and turn in kill:
            number, sign = kill[turn]
            os.kill(pid_of(llm, number), sign)
        llm.turn()
        turn += 1
    return [list(each.output().outputs[0].token_ids) for each in collectors]


def pid_of(llm: LLM, number: int) -> int:
    ranks = llm.engine.core.executor._ranks._ranks  # type: ignore[attr-defined]
    return next(rank.process.pid for rank in ranks if rank.number == number)


@pytest.fixture(scope="module")
def wanted(model: str) -> list[list[int]]:
    with engine(model, 1) as llm:
        return answers(llm)


def test_a_rank_dies_and_no_request_is_lost(model: str, wanted: list[list[int]]) -> None:
    """Nor is one of those that come later, which the first rank answers alone."""
    with engine(model, 2) as llm:
        assert answers(llm, {9: (1, signal.SIGKILL)}) == wanted
        assert answers(llm) == wanted


@pytest.mark.slow
def test_a_second_rank_takes_experts_with_it_that_nobody_else_has(model: str, wanted: list[list[int]]) -> None:
    with engine(model) as llm:
        assert answers(llm, {9: (1, signal.SIGKILL)}) == wanted
        assert answers(llm) == wanted
        last = pid_of(llm, 2)
        with pytest.raises(EngineDead, match=rf"rank 2 \(process {last}\) was ended by signal 9"):
            answers(llm, {9: (2, signal.SIGKILL)})


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_ranks_die_at_any_time(model: str, wanted: list[list[int]], seed: int) -> None:
    """Of five ranks two that are no neighbours, by the clock, with steps in flight or not."""
    rng = random.Random(seed)
    with engine(model, 5, overlap=seed % 3) as llm:
        begun = time.monotonic()
        assert answers(llm) == wanted
        seconds = time.monotonic() - begun
        for number in rng.choice(((1, 3), (4, 2), (2, 4), (3, 1))):
            pid = pid_of(llm, number)
            timer = threading.Timer(rng.random() * seconds, os.kill, (pid, signal.SIGKILL))
            timer.start()
            assert answers(llm) == wanted
            timer.join()


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_rank_that_hangs_is_done_without(model: str, wanted: list[list[int]]) -> None:
    with engine(model) as llm:
        assert answers(llm, {9: (2, signal.SIGSTOP)}) == wanted


def test_what_does_not_go_with_it_is_said_before_anything_starts(model: str, tmp_path: Path) -> None:
    alone = tmp_path / "alone.json"
    experts = {str(layer): [[0, 1, 2], [3, 4, 5], [6, 7]] for layer in range(3)}
    alone.write_text(json.dumps({"experts": experts}), encoding="utf-8")
    for more, said in (
        ({"enable_expert_parallel": False}, "experts are not on several devices"),
        ({"pipeline_parallel_size": 2}, "for --tensor-parallel-size alone"),
        ({"batch_invariant": True}, "neither Ray nor"),
        ({"expert_placement": str(alone)}, "each rank has an expert that no other has"),
    ):
        with pytest.raises(ConfigError, match=said):
            engine(model, **more)
