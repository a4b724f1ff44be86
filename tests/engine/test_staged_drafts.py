"""Drafts in a pipeline, its stages as executors of one process: as without, while runs of drafts are in flight behind
each other."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from headrace.clock import VirtualClock
from headrace.config import CacheConfig, DeviceConfig, EngineConfig, ModelConfig, SchedulerConfig
from headrace.engine.core import EngineCore
from headrace.engine.executor import Executor, Ticket
from headrace.models.source import find_model
from headrace.parallel.group import Peers
from headrace.request import StepPlan, StepResult, TokenMasks
from headrace.speculative.ahead import StagedRuns
from headrace.worker.draft_model import DraftModel
from headrace.worker.rows import Ints
from headrace.worker.speculator import Proposal
from headrace.worker.worker import create_executor
from tests.support import tiny
from tests.support.hash_engine import Answers, create_core, request, run
from tests.support.ranks import Belt, Belts

VOCAB = 300


class Line:
    """Stages that compute a step one after the other, and are told of a step's tokens as late as may be."""

    def __init__(self, parts: Sequence[Executor]) -> None:
        self._parts = parts
        self.info = parts[0].info
        self.plans: list[StepPlan] = []

    def submit(self, plan: StepPlan) -> Ticket:
        self.plans.append(plan)
        return [each.submit(plan) for each in self._parts][-1]

    def drafts(self, ticket: Ticket) -> Sequence[Sequence[int]]:
        return self._parts[0].drafts(ticket)

    def sample(self, ticket: Ticket, masks: TokenMasks) -> None:
        for each in self._parts:
            each.sample(ticket, masks)

    def collect(self, ticket: Ticket) -> StepResult:
        return [each.collect(ticket) for each in self._parts][-1]

    def prepare(self) -> bool:
        return False


def engine(folder: Path, stages: int, drafts: dict[str, Any] | None, *, ahead: bool = True, **more: int) -> EngineCore:
    """``more``: blocks, tokens of a step, overlap. Weights are random where drafts have an ``acceptance``."""
    load_format = "dummy" if drafts is not None and "acceptance" in drafts else "auto"
    config = EngineConfig(
        model=ModelConfig(model=str(folder), dtype="float32", max_model_len=120, load_format=load_format),
        cache=CacheConfig(num_blocks=more.get("blocks", 40), block_size=8),
        scheduler=SchedulerConfig(
            max_num_seqs=6,
            max_num_batched_tokens=more.get("budget", 64),
            speculative_config=None if drafts is None else json.dumps(drafts),
        ),
        device=DeviceConfig(device="cpu", overlap=0, threads=1, pipeline_parallel_size=stages, drafts_ahead=ahead),
    )
    source, belts = find_model(config.model), Belts()
    pipes: list[Any] = [Belt(belts, stage, stages) if stages > 1 else None for stage in range(stages)]
    with ThreadPoolExecutor(stages) as pool:  # they meet in their first steps
        parts = list(pool.map(lambda pipe: create_executor(config, source, peers=Peers(pipe=pipe))[0], pipes))
    line: Any = Line(parts)
    depth = stages - 1 + more.get("overlap", 0)
    return create_core(line, config.scheduler, VirtualClock(), cache=config.cache, depth=depth)


def answers(core: EngineCore, seed: int, count: int = 5) -> Answers:
    """Some requests alone and some beside others, with prefixes in common, n, sampling, penalties and scores."""
    rng = random.Random(seed)
    trunk, found = [rng.randrange(VOCAB) for _ in range(40)], Answers()
    for number in range(count):
        params = {
            "temperature": rng.choice((0.0, 0.8)),
            "max_tokens": rng.choice((3, 20, 40)),
            "n": rng.choice((1, 1, 1, 2)),
            "frequency_penalty": rng.choice((0.0, 0.0, 0.5)),
            "logprobs": rng.choice((None, 2)),
        }
        prompt = trunk[: rng.choice((3, 16, 24, 40))] + [rng.randrange(VOCAB)] * rng.choice((1, 4))
        core.add(request(number, prompt, seed=number, **params))
        for _ in range(rng.choice((0, 1, 9, 60))):
            if core.has_work:
                found.take(core.step())
    return run(core, answers=found)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    return tiny.save("llama", folder, tokenizer=False, vocab_size=VOCAB, num_hidden_layers=4)


def spoil(monkeypatch: pytest.MonkeyPatch, chance: float, seed: int = 0) -> None:
    """A draft model that is its own target is right; now each draft is with this chance, and some are missing. Runs are
    always wanted."""
    propose, coin = DraftModel.propose, random.Random(seed)

    def spoiled(self: DraftModel, rows: Ints, lengths: Ints, most: Ints, *more: Any) -> Proposal:
        made = propose(self, rows, lengths, most, *more)
        lists = [[each if coin.random() < chance else (each + 1) % VOCAB for each in tokens] for tokens in made.lists()]
        lists = [tokens[: coin.randrange(len(tokens) + 1)] if coin.random() < 0.1 else tokens for tokens in lists]
        return Proposal(np.array([len(each) for each in lists], dtype=np.int32), lists)

    monkeypatch.setattr(DraftModel, "propose", spoiled)
    monkeypatch.setattr(StagedRuns, "wanted", lambda *_: True)


def drafts_of(folder: Path, count: int) -> dict[str, Any]:
    return {"model": str(folder), "num_speculative_tokens": count}


@pytest.mark.parametrize("seed", [24, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(24))])
def test_runs_in_flight_change_no_answer(folder: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Two to four stages, overlap, few blocks, small budgets."""
    wanted = answers(engine(folder, 1, None), seed)
    spoil(monkeypatch, 0.75, seed)
    more: dict[str, Any] = {"overlap": seed % 3, "blocks": 30 if seed % 5 else 16, "budget": 64 if seed % 7 else 7}
    core = engine(folder, 2 + seed % 3, drafts_of(folder, 1 + seed % 4), **more)
    found = answers(core, seed)
    assert found.tokens == wanted.tokens
    for each, scores in wanted.scores.items():
        assert len(found.scores[each]) == len(scores)
    assert core.scheduler.speculation is not None
    counts = core.scheduler.speculation.counts
    assert counts.steps + sum(counts.ahead.values()) > 10


def forwards(core: EngineCore) -> list[int]:
    """How often each stage computes, from now on."""
    parts: Any = core.executor._parts  # type: ignore[attr-defined]
    counts = [0] * len(parts)

    def counted(stage: int, forward: Any) -> Any:
        def compute(*given: Any) -> Tensor:
            counts[stage] += 1
            return forward(*given)

        return compute

    for stage, part in enumerate(parts):
        part.decoder.forward = counted(stage, part.decoder.forward)
    return counts


def test_a_stream_has_runs_in_flight_and_wrong_ones_are_cancelled(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Right ones spare steps; of wrong ones the last stage computes nothing."""
    spoil(monkeypatch, 0.7)
    steps, found = {}, {}
    for ahead in (False, True):
        core = engine(folder, 2, drafts_of(folder, 1), ahead=ahead)
        computed = forwards(core)
        core.add(request(1, range(5, 25), max_tokens=60))
        found[ahead] = run(core).tokens[1, 0]
        plans: list[StepPlan] = core.executor.plans  # type: ignore[attr-defined]
        whole = sum(list(plan.drafts) == list(plan.counts) for plan in plans if plan.rows)
        counts = core.scheduler.speculation.counts.ahead if core.scheduler.speculation is not None else {}
        assert bool(whole) == bool(counts) == ahead
        steps[ahead] = computed[-1]
        assert not ahead or (counts["used"] > 10 and counts["spared"] > 5 and counts["refuted"] == 0)
        assert computed[-1] <= len(plans) - counts.get("spared", 0) // 2
    assert found[True] == found[False]


@pytest.mark.parametrize("stages", [3, 4])
def test_stages_between_compute_no_run_that_is_known_to_be_void(
    folder: Path, monkeypatch: pytest.MonkeyPatch, stages: int
) -> None:
    """Of a run behind others, the further it has come, the more is known."""
    asked = request(1, range(5, 25), max_tokens=60)
    alone = engine(folder, 1, None)
    alone.add(asked)
    wanted = run(alone).tokens
    spoil(monkeypatch, 0.6)
    core = engine(folder, stages, drafts_of(folder, stages - 1))
    computed = forwards(core)
    core.add(asked)
    assert run(core).tokens == wanted
    assert computed == sorted(computed, reverse=True)
    assert computed[0] > computed[1] + 5 and computed[-2] > computed[-1] + 5
    belts: Any = core.executor._parts[0]._runner._pipe._belts  # type: ignore[attr-defined]
    left = {way for way, queue in belts.sent.items() if not queue.empty()}
    assert all(kind == "tokens" for kind, _ in left), "each stage took what was sent, but for the last tokens"


@pytest.mark.parametrize(("chance", "stages"), [(1.0, 1), (1.0, 2), (0.7, 1), (0.7, 3), (0.0, 2)])
def test_coins_judge_alike_on_every_stage(
    folder: Path, monkeypatch: pytest.MonkeyPatch, chance: float, stages: int
) -> None:
    """Where weights are random nothing else could be right: runs in flight are used and refuted as coins say."""
    monkeypatch.setattr(StagedRuns, "wanted", lambda *_: True)
    core = engine(folder, stages, {**drafts_of(folder, 2), "acceptance": chance})
    core.add(request(1, range(5, 25), max_tokens=90))
    assert len(run(core).tokens[1, 0]) == 90
    assert core.scheduler.speculation is not None
    counts = core.scheduler.speculation.counts
    assert sum(counts.accepted[:1]) / counts.drafted[0] == pytest.approx(chance, abs=0.0 if chance in (0, 1) else 0.2)
    if stages > 1:
        used, lost = counts.ahead["used"], counts.ahead["refuted"] + counts.ahead["spared"]
        assert bool(used) == (chance > 0) and bool(lost) == (chance < 1)
