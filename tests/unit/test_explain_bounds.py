"""The predicted start of every waiting request, asked at every step, beside when it did start: under each kind of wait
its bounds hold.

python -m pytest -m "slow or not slow" -s tests/unit/test_explain_bounds.py     # prints the shares, and how narrow
bounds were
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from statistics import median
from typing import Any

import pytest

from headrace.config import CacheConfig
from headrace.engine.core import EngineCore
from headrace.observe.metrics import StepRecorder
from headrace.request import Expectations, Request, SequenceStatus
from headrace.scheduler.explain import RECENT, pace_of, predicted_start
from tests.support.hash_engine import request
from tests.support.modelled import machine

HELD = 0.9  # of the polls
EVERY = 8
DRAFTS = '{"method": "ngram", "num_speculative_tokens": 4, "acceptance": 0.9}'

Arrivals = list[tuple[float, Request]]


@dataclass(slots=True)
class Told:
    """One poll of one request."""

    kind: str
    now: float
    earliest: float | None
    latest: float | None


@dataclass(slots=True)
class Polls:
    told: dict[int, list[Told]] = field(default_factory=dict)
    started: dict[int, float] = field(default_factory=dict)

    def checked(self) -> list[tuple[Told, float]]:
        """With the seconds that were left in truth, of those that had a prediction."""
        known = [
            (each, start - each.now) for number, start in self.started.items() for each in self.told.get(number, [])
        ]
        return [(each, left) for each, left in known if each.earliest is not None]

    def held(self) -> list[bool]:
        return [
            each.earliest - 1e-9 <= left <= (left if each.latest is None else each.latest) + 1e-9
            for each, left in self.checked()
        ]  # type: ignore[operator]


def poll(core: EngineCore, recorder: StepRecorder, arrivals: Arrivals) -> Polls:
    """Runs them all; before one of EVERY turns each request that waits is asked about."""
    polls, coming, turns = Polls(), sorted(arrivals, key=lambda each: each[0]), count()
    while coming or core.has_work:
        now = core.clock.now()
        while coming and coming[0][0] <= now:
            core.add(coming.pop(0)[1])
        if not core.has_work:
            core.clock.sleep_until(coming[0][0])
            continue
        if next(turns) % EVERY == 0:
            _ask(core, recorder, polls)
        core.step()
        for number, told in polls.told.items():
            siblings = core.scheduler.roster.requests.get(number)
            if number not in polls.started and not (siblings and siblings[0].status is SequenceStatus.WAITING):
                first = siblings[0].first_scheduled if siblings else None
                polls.started[number] = max(told[-1].now, now if first is None else first)
    return polls


def _ask(core: EngineCore, recorder: StepRecorder, polls: Polls) -> None:
    pace, snapshot = pace_of(recorder.after(-1, at_most=RECENT), core.step_tokens), core.snapshot()
    for number in core.request_ids:
        state = snapshot.explain(number)
        if state is not None and not state.running and number not in polls.started:
            found = predicted_start(state, pace)
            assert state.wait is not None
            polls.told.setdefault(number, []).append(
                Told(state.wait.kind, core.clock.now(), found["earliest"], found["latest"])
            )


def asked(
    number_of: int,
    prompt: tuple[int, int],
    output: tuple[int, int],
    *,
    rate: float | None = None,
    seed: int = 0,
    shared: int = 0,
    **fields: Any,
) -> Arrivals:
    """``rate`` None: all at once. ``shared`` tokens begin all prompts."""
    draw, now, found = random.Random(seed), 0.0, []
    for number in range(number_of):
        ids = [*range(10, 10 + shared), *(draw.randint(8, 599) for _ in range(draw.randint(*prompt)))]
        now += draw.expovariate(rate) if rate is not None else 0.0
        made = {name: value(draw) if callable(value) else value for name, value in fields.items()}
        made["arrival_time"] = now
        found.append((now, request(number, ids, max_tokens=draw.randint(*output), **made)))
    return found


@dataclass(frozen=True, slots=True)
class Case:
    kind: str  # of wait that most polls are told
    fields: dict[str, Any]
    asked: Callable[[], Arrivals]
    bounded: bool = True  # a later bound is told, too


def _by(policy: str, **fields: Any) -> Case:
    """Under which later requests may go first, so that nobody is told a later bound."""
    return Case(
        "rows",
        {"scheduling_policy": policy},
        lambda: asked(40, (50, 150), (20, 60), rate=100.0, **fields),
        bounded=False,
    )


CASES = {
    "rows": Case("rows", {}, lambda: asked(40, (50, 150), (20, 120))),
    "rows, arriving": Case("rows", {}, lambda: asked(60, (50, 300), (20, 90), rate=20.0)),
    "rows, answers that may end": Case("rows", {}, lambda: asked(40, (50, 150), (20, 200), ignore_eos=False)),
    "rows of several answers": Case("rows", {}, lambda: asked(24, (50, 150), (20, 80), n=lambda draw: draw.choice([1, 3]))),
    "rows, drafts": Case("rows", {"speculative_config": DRAFTS}, lambda: asked(40, (50, 150), (20, 120))),
    "tokens": Case("token_budget", {"max_num_batched_tokens": 64}, lambda: asked(30, (60, 400), (4, 12), rate=15.0)),
    "tokens, many rows": Case("token_budget", {"max_num_batched_tokens": 64, "max_num_seqs": 48}, lambda: asked(40, (60, 400), (4, 30))),
    "tokens, whole prompts": Case("token_budget", {"chunked_prefill": False, "max_num_seqs": 64}, lambda: asked(40, (100, 400), (4, 30))),
    "time": Case("time", {"max_step_ms": 25.0, "max_num_seqs": 8}, lambda: asked(24, (700, 900), (40, 80))),
    "time, many rows": Case("time", {"max_step_ms": 25.0, "max_num_seqs": 64}, lambda: asked(60, (200, 500), (20, 60), rate=30.0)),
    "blocks": Case("blocks", {"num_blocks": 60, "max_num_seqs": 32}, lambda: asked(30, (100, 300), (20, 90)), bounded=False),
    "blocks, reserved": Case(
        "blocks", {"num_blocks": 60, "max_num_seqs": 32, "cache": CacheConfig(block_size=16, paged_allocation=False)},
        lambda: asked(30, (100, 300), (20, 90)), bounded=False,
    ),
    "prefixes": Case("token_budget", {"max_num_batched_tokens": 128, "max_num_seqs": 32}, lambda: asked(40, (5, 60), (4, 12), shared=600)),
    "batch": Case("batch", {"continuous_batching": False}, lambda: asked(30, (50, 150), (20, 60))),
    "priority": _by("priority", priority=lambda draw: draw.randint(0, 2)),
    "fair": _by("fair", tenant=lambda draw: draw.choice("aab")),
    "qoe": _by("qoe"),
    "deadline": _by("deadline", expects=Expectations(ttft=60.0, tpot=60.0)),
    "shortest": _by("shortest-remaining"),
}  # fmt: skip


@pytest.mark.parametrize("depth", [pytest.param(0, marks=pytest.mark.slow), 1])
@pytest.mark.parametrize("name", CASES)
def test_a_start_lies_within_the_bounds_that_were_told(name: str, depth: int) -> None:
    case = CASES[name]
    polls = poll(*machine(depth, **case.fields), case.asked())
    checked, held = polls.checked(), polls.held()
    kinds = [each.kind for each, _ in checked]
    early = sum(left < each.earliest - 1e-9 for each, left in checked if each.earliest is not None)
    bounded = [(each, left) for each, left in checked if each.latest is not None]
    late = sum(left > each.latest + 1e-9 for each, left in bounded if each.latest is not None)
    real, lows = median(left for _, left in checked), median(each.earliest or 0.0 for each, _ in checked)
    highs = median(each.latest or 0.0 for each, _ in bounded) if bounded else None
    share = sum(held) / len(held)
    told = f"{lows:.2f} to {'?' if highs is None else f'{highs:.2f}'} told; { ({kind: kinds.count(kind) for kind in sorted(set(kinds))}) }"
    print(
        f"\n{name}, depth {depth}: {share:.1%} of {len(held)} polls held ({early} began before, {late} after their bounds)",
        end="",
    )
    print(f"; in the median {real:.2f} s to go, {told}", end="")
    assert len(polls.started) == len(polls.told) and share >= HELD
    assert max(set(kinds), key=kinds.count) == case.kind
    assert not case.bounded or len(bounded) > 0.8 * len(checked)
    next_step = [left <= 1e-9 for each, left in checked if each.kind == "next_step"]
    assert sum(next_step) >= HELD * len(next_step) or name in ("qoe", "shortest"), (
        "whose orders change with each arrival"
    )
