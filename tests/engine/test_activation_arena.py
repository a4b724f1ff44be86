"""Steps whose results lie in the arena compute what they compute on torch's allocator, bit for bit, with everything
dead overwritten."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace.engine.executor import Executor
from headrace.errors import StepFailed
from headrace.request import SamplingParams, StepResult
from headrace.worker import worker
from headrace.worker.arena import Arena
from tests.support import tiny
from tests.support.hand_plans import Planned, Planner, generate, run, worker_for
from tests.support.poisoned import PoisonedArena

# Dense, biased, windows and sandwich norms, norms of heads, experts among dense layers, learnt positions.
FAMILIES = ("llama", "llama-biased-mha-tied", "gemma2", "qwen3", "qwen3-moe-mixed", "gpt2")
ASKED = SamplingParams(temperature=0.0, logprobs=5)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: tiny.save(name, tmp_path_factory.mktemp(name), tokenizer=False) for name in FAMILIES}


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, which else has none."""
    monkeypatch.setattr(worker, "create_arena", PoisonedArena)


def arena_of(executor: Any) -> Arena:
    arena: Arena = executor._runner.passes.arena
    return arena


def served(executor: Executor, seed: int = 0) -> list[list[StepResult]]:
    """Prompts of many lengths, whole and in chunks, beside sequences that decode, and decoding alone."""
    draw = random.Random(seed)
    turns = ((9, 1, 23), 5), ((40,), 100), ((31, 17), 100), ((12, 50, 3), 16), ((64,), 48)
    return [turn(executor, draw, lengths, chunk) for lengths, chunk in turns]


def turn(executor: Executor, draw: random.Random, lengths: Sequence[int], chunk: int) -> list[StepResult]:
    prompts = [
        Planned(row, [draw.randrange(256) for _ in range(length)], ASKED, seed=row)
        for row, length in enumerate(lengths)
    ]
    return generate(executor, prompts, 4, chunk=chunk)


def said(turns: Sequence[Sequence[StepResult]]) -> list[Any]:
    return [(list(each.tokens), each.logprobs) for results in turns for each in results]


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_computes_the_same(name: str, folders: dict[str, Path], poisoned: None) -> None:
    plain, planned = worker_for(folders[name], device={"activation_arena": False}), worker_for(folders[name])
    assert said(served(planned)) == said(served(plain))
    found = arena_of(planned).served
    assert (found.recorded, found.differed) == (2, 0) and found.planned > 20 and found.results > 5 * found.planned


@pytest.mark.parametrize(
    "device", [{"token_concatenation": False}, {"last_layer_pruning": False}, {"batch_invariant": True}, {"overlap": 1}]
)
def test_every_way_to_take_a_step_computes_the_same(
    device: dict[str, Any], folders: dict[str, Path], poisoned: None
) -> None:
    plain, planned = (worker_for(folders["gemma2"], device={**device, "activation_arena": on}) for on in (False, True))
    assert said(served(planned)) == said(served(plain))
    assert arena_of(planned).served.planned > 20
    plain.close()
    planned.close()


def test_scores_of_prompts_are_the_same(folders: dict[str, Path], poisoned: None) -> None:
    """All hidden states are read behind the step."""
    plain, planned = (worker_for(folders["llama"], device={"activation_arena": on}) for on in (False, True))
    assert _scores(planned) == _scores(plain)
    assert arena_of(planned).served.planned == 3


def _scores(executor: Executor) -> list[Any]:
    return [_first(executor, length, replace(ASKED, prompt_logprobs=3)).prompt_logprobs for length in (40, 9, 23, 70)]


def _first(executor: Executor, length: int, params: SamplingParams = ASKED) -> StepResult:
    """Of the step that computes a prompt."""
    planner, draw = Planner(executor.info.kv_groups), random.Random(length)
    prompt = planner.add(Planned(0, [draw.randrange(256) for _ in range(length)], params))
    return run(executor, planner.plan([(prompt, 0, length)], prompt_logprobs=(0,) if params.prompt_logprobs else ()))


def test_a_wrong_lifetime_shows(folders: dict[str, Path], poisoned: None) -> None:
    """Each that lasts beyond the next request, in turn, is made to end with it: what is read then is NaN, or
    another's."""
    executor = worker_for(folders["llama"])
    expected = said([[_first(executor, 21)]])
    (trace,) = arena_of(executor)._kinds[((False, False), False, False, 0), False]._traces
    right, long, shown = trace.ends, 0, 0
    for at, end in enumerate(right):
        if end is not None and end > at + 1:
            trace.ends = (*right[:at], at + 1, *right[at + 1 :])
            trace._place()
            long, shown = long + 1, shown + (said([[_first(executor, 21)]]) != expected)
    assert long >= 10 and shown > long // 2, (long, shown)
    trace.ends = right
    trace._place()
    assert said([[_first(executor, 21)]]) == expected


def test_a_failed_step_leaves_the_arena_usable(folders: dict[str, Path], poisoned: None) -> None:
    plain, planned = (worker_for(folders["llama"], device={"activation_arena": on}) for on in (False, True))
    turn(planned, random.Random(2), (19,), 100)
    block = planned._runner.decoder.layers[1].feed_forward  # type: ignore[attr-defined]
    real = block.forward

    def fail(x: Any) -> Any:
        raise RuntimeError("no such luck")

    block.forward = fail
    with pytest.raises(StepFailed):
        turn(planned, random.Random(3), (25,), 100)
    block.forward = real
    planned.recover()
    assert said([turn(planned, random.Random(4), (30,), 100)]) == said([turn(plain, random.Random(4), (30,), 100)])
    assert (arena_of(planned).served.recorded, arena_of(planned).served.differed) == (2, 0)
