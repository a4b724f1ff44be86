"""Graphs of drafts and of steps that verify them, without a GPU (support/recorded_graphs.py): tokens are those of eager
steps without drafts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from headrace.clock import VirtualClock
from headrace.config import SchedulerConfig
from headrace.request import Request, StructuredOutputs
from headrace.worker.graphs import DecodeGraphs, Kind
from tests.support.hash_engine import FIXED, assert_at_rest, create_core, request, run
from tests.support.recorded_graphs import VOCAB, recorded_executor, without_a_gpu
from tests.support.residue_masks import ResidueMasks

ASKED: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.9, "top_p": 0.9, "top_k": 40},
    {"temperature": 1.1},
    {"speculative": False},
    {"temperature": 0.8, "presence_penalty": 0.7, "frequency_penalty": 0.5},
    {"logit_bias": {3: 4.0}, "n": 2},
    {"structured_outputs": StructuredOutputs(choice=("1 2",)), "temperature": 0.9},  # drafts are forbidden now and then
)


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    without_a_gpu(monkeypatch)


def _requests(asked: Sequence[dict[str, Any]]) -> list[Request]:
    draw = random.Random(7)
    return [
        request(n, draw.choices(range(VOCAB), k=draw.randint(1, 20)), max_tokens=12 + 2 * n, seed=100 + n, **fields)
        for n, fields in enumerate(asked)
    ]


def _answers(
    asked: Sequence[dict[str, Any]], *, graphed: bool, drafts: int, depth: int = 0, **sizes: Any
) -> tuple[dict[tuple[int, int], list[int]], float]:
    """Tokens, and the share of drafts that were right."""
    with recorded_executor(graphed=graphed, drafts=drafts, overlap=0 if graphed else depth, **sizes) as (
        executor,
        _,
        _,
    ):
        config = SchedulerConfig(max_num_seqs=8, speculative_config=FIXED % drafts if drafts else None)
        core = create_core(executor, config, VirtualClock(), depth=depth, masks=ResidueMasks(VOCAB))
        for each in _requests(asked):
            core.add(each)
        found = run(core)
        assert_at_rest(core)
        speculation = core.scheduler.speculation
        counts = speculation.counts if speculation is not None else None
        return found.tokens, sum(counts.accepted) / max(1, sum(counts.drafted)) if counts is not None else 0.0


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("drafts", [1, 3])
def test_graphs_draft_and_verify_what_eager_steps_compute(drafts: int, depth: int) -> None:
    plain, _ = _answers(ASKED, graphed=False, drafts=0)
    found, right = _answers(ASKED, graphed=True, drafts=drafts, depth=depth)
    assert found == plain
    # The draft model is the target: what is wrong is a key that is missing. What is drafted beyond an end is not taken.
    assert right > 0.75


def test_steps_that_verify_are_captured_once_and_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    captured: list[int] = []
    real = DecodeGraphs._capture_kind

    def count(self: DecodeGraphs, bucket: int, kind: Kind) -> None:
        captured.extend([bucket] if kind is Kind.CHAINED else [])
        real(self, bucket, kind)

    monkeypatch.setattr(DecodeGraphs, "_capture_kind", count)
    _, right = _answers(ASKED[:1] * 3, graphed=True, drafts=3)
    assert right > 0.75 and captured and len(captured) <= 2 * len(set(captured))  # the target's and the draft's


def test_where_none_can_be_captured_drafts_are_launched_one_by_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = DecodeGraphs._capture_again

    def broken(self: DecodeGraphs, bucket: int, hidden: Any, *shared: Any, **kind: bool) -> Any:
        if "chained" in kind:
            raise RuntimeError("CUDA error: out of memory")
        return real(self, bucket, hidden, *shared, **kind)

    plain, _ = _answers(ASKED, graphed=False, drafts=0)
    with monkeypatch.context() as patched:
        patched.setattr(DecodeGraphs, "_capture_again", broken)
        found, _ = _answers(ASKED, graphed=True, drafts=3)
    assert found == plain and "rows with drafts" in caplog.text


def test_preempted_rows_draft_again() -> None:
    plain, _ = _answers(ASKED, graphed=False, drafts=0)
    found, _ = _answers(ASKED, graphed=True, drafts=3, depth=1, num_blocks=24)
    assert found == plain
