"""Graphs of a pipeline's stages without a GPU (support/recorded_graphs.py): as eager steps, with as many steps in flight
as there are stages."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.clock import VirtualClock
from headrace.kernels.inputs import ForwardInputs
from headrace.request import StepPlan
from headrace.spec import LayerSpec
from headrace.worker.graphs import DecodeGraphs
from headrace.worker.model_runner import ModelRunner
from headrace.worker.passes import ForwardPasses
from headrace.worker.recorder import Recorder
from headrace.worker.rows import Rows
from tests.support.hand_plans import GREEDY, Planned, Planner, take
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


def stage(number: int, belt: Belt, *, graphed: bool) -> ModelRunner:
    decoder, kernels = Stage(number), RecordableKernels()
    rows, caches = Rows(8, 64, VOCAB, (BLOCK,), CPU), [torch.full((BLOCKS + 1, BLOCK), 987654321, dtype=torch.int64)]
    graphs = None
    if graphed:
        entry = torch.full((8, 1), 5, dtype=torch.int64) if number else None
        made: Any = Recorder(decoder, kernels, rows, caches, entry=entry)  # type: ignore[arg-type]
        graphs = DecodeGraphs(made, max_num_seqs=8, max_model_len=64, max_logits_rows=100, stages=2)
        graphs.capture_all()
        assert not any(graphs.draws(count) for count in range(1, 9)) and graphs.serves(8)
    passes = ForwardPasses(decoder, caches, rows, kernels, graphs=graphs)  # type: ignore[arg-type]
    return ModelRunner(passes, pipe=belt, max_logits_rows=100, clock=VirtualClock(), queued=True)  # type: ignore[arg-type]


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
