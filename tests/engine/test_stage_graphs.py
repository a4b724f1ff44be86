"""Graphs of a pipeline's stages without a GPU (support/recorded_graphs.py): as eager steps, with as many steps in flight
as there are stages."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace.clock import VirtualClock
from headrace.config import SchedulerConfig
from headrace.engine.core import EngineCore
from headrace.kernels.inputs import ForwardInputs
from headrace.request import NewRow, StepPlan
from headrace.spec import LayerSpec
from headrace.speculative.ahead import StagedRuns
from headrace.worker.executor import DeviceExecutor
from headrace.worker.graphs import DecodeGraphs, Kind
from headrace.worker.model_runner import ModelRunner
from headrace.worker.passes import ForwardPasses
from headrace.worker.recorder import Recorder
from headrace.worker.rows import Ints, Rows
from headrace.worker.speculator import Proposal, Proposer
from headrace.worker.staged_drafts import StagedSpeculator
from tests.engine.test_staged_drafts import Line
from tests.support.hand_plans import GREEDY, Planned, Planner, take
from tests.support.hash_engine import FIXED, Answers, create_core, request, run
from tests.support.ranks import Belt as RankBelt
from tests.support.ranks import Belts
from tests.support.recorded_graphs import (
    CPU,
    STAND_IN,
    VOCAB,
    RecordableKernels,
    SlotDecoder,
    info_of,
    without_a_gpu,
)

BLOCK, BLOCKS = 4, 140


class Stage(SlotDecoder):
    """Half of a decoder: what it sees in its own cache is added to what the other half saw."""

    def __init__(self, number: int) -> None:
        super().__init__(BLOCK)
        self.spec = replace(STAND_IN, hidden_size=1, layers=(LayerSpec(),) * 2, held=(number, number + 1))
        self.embeds, self.answers = self.spec.embeds, self.spec.answers

    def forward(self, inputs: ForwardInputs, kv_caches: Sequence[Tensor], hidden: Tensor | None = None) -> Tensor:
        found = super().forward(inputs, kv_caches)
        return found if hidden is None else found + 31 * hidden[: len(found)]


class Belt:
    """Between two stages; what is sent lies where it was until it is received."""

    backend, stages, comm_ops = "belt", 2, 0

    def __init__(self) -> None:
        self.hidden: deque[Tensor] = deque()
        self.tokens: deque[Tensor] = deque()

    def send(self, hidden: Tensor) -> None:
        self.hidden.append(hidden)

    def receive(self, hidden: Tensor) -> Tensor:
        return hidden.copy_(self.hidden.popleft())

    def send_tokens(self, picked: Tensor, *, to_all: bool = False) -> None:
        self.tokens.append(picked)

    def receive_tokens(self, picked: Tensor) -> Tensor:
        return picked.copy_(self.tokens.popleft())


def stage(number: int, belt: Any, *, graphed: bool, proposer: Proposer | None = None) -> ModelRunner:
    """``proposer``: steps verify drafts, in both stages."""
    decoder, kernels = Stage(number), RecordableKernels()
    rows, caches = Rows(8, 64, VOCAB, (BLOCK,), CPU), [torch.full((BLOCKS + 1, BLOCK), 987654321, dtype=torch.int64)]
    graphs = None
    most = 8 if proposer is None else 32
    if graphed:
        entry = torch.full((most, 1), 5, dtype=torch.int64) if number else None
        made: Any = Recorder(decoder, kernels, rows, caches, entry=entry)  # type: ignore[arg-type]
        graphs = DecodeGraphs(made, max_num_seqs=most, max_model_len=64, max_logits_rows=100, stages=2)
        graphs.capture_all()
        assert not any(graphs.draws(count) for count in range(1, 9)) and graphs.serves(8)
    passes = ForwardPasses(decoder, caches, rows, kernels, graphs=graphs)  # type: ignore[arg-type]
    how: dict[str, Any] = {"max_logits_rows": 100, "clock": VirtualClock(), "queued": True}
    if proposer is not None:
        how["speculator"] = StagedSpeculator(rows, proposer if number == 0 else Proposer(), belt)
    return ModelRunner(passes, pipe=belt, **how)


def answers(*, graphed: bool) -> list[list[int]]:
    """Of six sequences in two groups, so that a step of each is in flight at once; the second stage comes late."""
    belt, draw = Belt(), random.Random(3)
    first, last = (stage(number, belt, graphed=graphed) for number in range(2))
    planner = Planner(info_of(8, BLOCKS, BLOCK, 64).kv_groups)
    every = [Planned(row, [draw.randrange(VOCAB) for _ in range(3 + row)], GREEDY) for row in range(6)]
    groups = every[:3], every[3:]

    def both(plans: Sequence[StepPlan]) -> None:
        begun = [first.submit(plan) for plan in plans]
        ended = [last.submit(plan) for plan in plans]
        for step, done, group in zip(begun, ended, groups, strict=True):
            first.collect(step)
            take(last.collect(done), group)

    prompts = []
    for group in groups:
        for each in group:
            planner.add(each)
        prompts.append(planner.plan([(each, 0, len(each.prompt)) for each in group]))
    both(prompts)
    for _ in range(8):
        both([planner.plan([each.next for each in group]) for group in groups])
    return [each.output for each in every]


def test_graphs_of_stages_compute_what_eager_ones_do(monkeypatch: pytest.MonkeyPatch) -> None:
    without_a_gpu(monkeypatch)
    wanted, found = answers(graphed=False), answers(graphed=True)
    assert found == wanted and len(set(map(tuple, found))) == 6 and all(len(each) == 9 for each in found)


class Known(Proposer):
    """Proposes what the answers are, three times in four."""

    def __init__(self, answers: Mapping[int, Sequence[int]]) -> None:
        self._answers, self._draw, self._of = answers, random.Random(5), dict[int, NewRow]()

    def begins(self, plan: StepPlan) -> None:
        self._of |= {new.row: new for new in plan.rows_added}

    def propose(self, rows: Ints, lengths: Ints, most: Ints) -> Proposal:
        tokens = [
            [
                (each + (self._draw.random() > 0.75)) % VOCAB
                for each in self._answers[self._of[row].sequence_id][at : at + many]
            ]
            for row, at, many in zip(rows.tolist(), self._begun(rows, lengths), most.tolist(), strict=True)
        ]
        return Proposal(np.array([len(each) for each in tokens], dtype=np.int32), tokens)

    def _begun(self, rows: Ints, lengths: Ints) -> list[int]:
        return [end - self._of[row].num_prompt_tokens for row, end in zip(rows.tolist(), lengths.tolist(), strict=True)]


def drafted(proposer: Proposer, drafts: int, count: int, *, graphed: bool) -> tuple[EngineCore, Answers]:
    belts = Belts()
    runners = [stage(number, RankBelt(belts, number, 2), graphed=graphed, proposer=proposer) for number in range(2)]
    info = replace(info_of(8, BLOCKS, BLOCK, 64), max_drafts=3, stages=2, runs_ahead=True)
    line: Any = Line([DeviceExecutor(runner, info) for runner in runners])
    config = SchedulerConfig(max_num_seqs=8, speculative_config=FIXED % drafts if drafts else None)
    core, draw = create_core(line, config, VirtualClock(), depth=1), random.Random(3)
    for number in range(count):
        prompt = [draw.randrange(VOCAB) for _ in range(3 + number)]
        core.add(request(number, prompt, max_tokens=20 + 30 // count, seed=number, temperature=0.8 * (number % 2)))
    return core, run(core)


@pytest.mark.parametrize("runs", [False, True])
def test_graphs_of_stages_verify_drafts(monkeypatch: pytest.MonkeyPatch, runs: bool) -> None:
    """Also of runs behind each other, some of which are cancelled after the stage before has sent them."""
    without_a_gpu(monkeypatch)
    monkeypatch.setattr(StagedRuns, "wanted", lambda *_: runs)
    count = 1 if runs else 6  # alone, it leaves a stage with nothing to do
    _, plain = drafted(Proposer(), 0, count, graphed=False)
    known = {number: tokens for (number, _), tokens in plain.tokens.items()}
    replayed = [0, 0]
    real = DecodeGraphs.compute

    def counted(self: DecodeGraphs, bucket: int, how: Any = None) -> None:
        replayed[self._kind is Kind.CHAINED] += 1
        real(self, bucket, how)

    monkeypatch.setattr(DecodeGraphs, "compute", counted)
    core, found = drafted(Known(known), 3, count, graphed=True)
    assert found.tokens == plain.tokens
    speculation = core.scheduler.speculation
    assert speculation is not None and sum(speculation.counts.accepted) > 15 and replayed[True] > 15
    ahead = speculation.counts.ahead
    assert not runs or (ahead["spared"] and ahead["used"])
