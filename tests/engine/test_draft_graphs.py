"""Graphs of drafts and of steps that verify them, without a GPU (support/recorded_graphs.py): tokens are those of eager
steps without drafts."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Sequence
from typing import Any

import pytest

from headrace.clock import VirtualClock
from headrace.config import SchedulerConfig
from headrace.kernels.build.driver import DriverError
from headrace.request import Request, StructuredOutputs
from headrace.worker import launches
from headrace.worker.graphs import DecodeGraphs, Kind
from tests.support.hash_engine import FIXED, assert_at_rest, create_core, request, run
from tests.support.recorded_graphs import VOCAB, RecordedChain, recorded_executor, without_a_gpu
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
        request(
            n, draw.choices(range(VOCAB), k=draw.randint(1, 20)), **{"max_tokens": 12 + 2 * n, "seed": 100 + n} | fields
        )
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
        config = SchedulerConfig(max_num_seqs=8, speculative_config=_speculation(drafts, sizes.get("tree")))
        core = create_core(executor, config, VirtualClock(), depth=depth, masks=ResidueMasks(VOCAB))
        for each in _requests(asked):
            core.add(each)
        found = run(core)
        assert_at_rest(core)
        speculation = core.scheduler.speculation
        counts = speculation.counts if speculation is not None else None
        return found.tokens, sum(counts.accepted) / max(1, sum(counts.drafted)) if counts is not None else 0.0


@functools.cache
def _plain() -> dict[tuple[int, int], list[int]]:
    return _answers(ASKED, graphed=False, drafts=0)[0]


def _speculation(drafts: int, tree: int | None) -> str | None:
    fields = {"method": "draft_model", "model": "itself", "num_speculative_tokens": drafts, "tree": tree}
    return json.dumps(fields) if tree else FIXED % drafts if drafts else None


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("drafts", [1, 3])
def test_graphs_draft_and_verify_what_eager_steps_compute(drafts: int, depth: int) -> None:
    plain = _plain()
    found, right = _answers(ASKED, graphed=True, drafts=drafts, depth=depth)
    assert found == plain
    # The draft model is the target: what is wrong is a key that is missing. What is drafted beyond an end is not taken.
    assert right > 0.75


KINDS: dict[str, tuple[int, dict[str, Any]]] = {"head": (3, {"head": True}), "tree": (7, {"tree": 3})}


@pytest.mark.parametrize(("kind", "depth"), [("head", 2), ("tree", 0)])
def test_graphs_of_heads_and_trees_are_as_right_as_eager_steps(kind: str, depth: int) -> None:
    """Drafts, and so which of them are right, are the same where graphs compute nothing of them."""
    drafts, more = KINDS[kind]
    plain = _plain()
    found, right = _answers(ASKED, graphed=True, drafts=drafts, depth=depth, **more)
    eager, expected = _answers(ASKED, graphed=False, drafts=drafts, depth=depth, **more)
    assert found == eager == plain
    assert right > 0.75 if kind == "head" else right == expected > 0.2


@pytest.mark.parametrize("kind", KINDS)
def test_heads_and_trees_find_their_keys_again_when_they_were_preempted(kind: str) -> None:
    drafts, more = KINDS[kind]
    plain = _plain()
    found, right = _answers(ASKED, graphed=True, drafts=drafts, depth=1, num_blocks=24, **more)
    assert found == plain and right > (0.7 if kind == "head" else 0.2)


@pytest.mark.parametrize("kind", KINDS)
def test_passes_of_heads_and_trees_are_captured_once_and_replayed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    captured: list[tuple[Kind, int]] = []
    real = DecodeGraphs._capture_kind

    def count(self: DecodeGraphs, bucket: int, kind: Kind) -> None:
        captured.append((kind, bucket))
        real(self, bucket, kind)

    monkeypatch.setattr(DecodeGraphs, "_capture_kind", count)
    drafts, more = KINDS[kind]
    _answers(ASKED[:1] * 3, graphed=True, drafts=drafts, **more)
    expected = Kind.CHAINED if kind == "head" else Kind.TREE
    mine = [bucket for each, bucket in captured if each is expected]
    assert len(mine) > 2 and len(mine) <= 2 * len(set(mine))  # the target's and the draft's


def test_steps_that_verify_are_captured_once_and_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    captured: list[int] = []
    real = DecodeGraphs._capture_kind

    def count(self: DecodeGraphs, bucket: int, kind: Kind) -> None:
        captured.extend([bucket] if kind is Kind.CHAINED else [])
        real(self, bucket, kind)

    monkeypatch.setattr(DecodeGraphs, "_capture_kind", count)
    _, right = _answers(ASKED[:1] * 3, graphed=True, drafts=3)
    assert right > 0.75 and captured and len(captured) <= 2 * len(set(captured))  # the target's and the draft's


LONG = ({"temperature": 1.1, "max_tokens": 32},) * 2


def test_drafts_and_their_verification_are_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[int] = []

    class Counted(RecordedChain):
        def launch(self, stream: int) -> None:
            launched.append(len(self._graphs))
            super().launch(stream)

    monkeypatch.setattr(launches, "GraphChain", Counted)
    monkeypatch.setattr(launches, "_AGAIN", 1)
    found, right = _answers(LONG, graphed=True, drafts=3)
    assert found == _answers(LONG, graphed=False, drafts=0)[0] and right > 0.75
    # a forward pass and a draw, of three drafts and of the target; where the first pass catches up, its draw looks elsewhere
    assert sum(each >= 8 for each in launched) > 3 and max(launched) <= 9


@pytest.mark.parametrize("when", ["__init__", "launch"])
def test_drafts_are_launched_one_by_one_where_the_driver_joins_nothing(
    when: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(*_: object) -> None:
        raise DriverError("joining graphs: out of memory (CUDA error 2)")

    monkeypatch.setattr(launches, "GraphChain", type("Refused", (RecordedChain,), {when: refused}))
    found, right = _answers(LONG, graphed=True, drafts=3)
    assert found == _answers(LONG, graphed=False, drafts=0)[0] and right > 0.75
    assert caplog.text.count("one by one") == 1


def test_where_none_can_be_captured_drafts_are_launched_one_by_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = DecodeGraphs._capture_again

    def broken(self: DecodeGraphs, bucket: int, hidden: Any, kind: Kind | None = None, longest: int = 0) -> Any:
        if kind in (Kind.CHAINED, Kind.LONG):
            raise RuntimeError("CUDA error: out of memory")
        return real(self, bucket, hidden, kind, longest)

    plain = _plain()
    with monkeypatch.context() as patched:
        patched.setattr(DecodeGraphs, "_capture_again", broken)
        found, _ = _answers(ASKED, graphed=True, drafts=3)
    assert found == plain and "rows with drafts" in caplog.text


def test_preempted_rows_draft_again() -> None:
    plain = _plain()
    found, _ = _answers(ASKED, graphed=True, drafts=3, depth=1, num_blocks=24)
    assert found == plain
