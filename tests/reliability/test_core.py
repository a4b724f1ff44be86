"""The checks of checks_core.py in their fast form, each with a planted defect that turns it red."""

from __future__ import annotations

import pytest

from headrace.engine.output import ByteDecoder, StopMatcher
from headrace.scheduler.roster import WaitingQueue
from headrace.scheduler.step_planner import StepPlanner
from tests.reliability import checks_core
from tests.support.simulation import defects


def test_an_unusable_row_ends_its_own_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    checks_core.poisoned_rows(16)
    defects.an_unusable_row_is_not_noticed(monkeypatch)
    with pytest.raises(AssertionError):
        checks_core.poisoned_rows(1)


def test_aborts_at_every_moment_touch_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    checks_core.abort_everywhere((0, 2))
    defects.rows_of_aborted_requests_are_lost(monkeypatch)
    with pytest.raises(AssertionError):
        checks_core.abort_everywhere((2,))


def test_a_crowd_that_leaves_the_queue_is_counted_out(monkeypatch: pytest.MonkeyPatch) -> None:
    checks_core.crowd_leaves(500)

    def discard_too_early(queue: WaitingQueue) -> None:
        queue._gone += 1
        if queue._gone > 64:
            queue._gone = 0

    monkeypatch.setattr(WaitingQueue, "discard", discard_too_early)
    with pytest.raises(AssertionError, match="said to wait"):
        checks_core.crowd_leaves(500)


def test_a_storm_of_preemptions_passes() -> None:
    checks_core.preemption_storm(200)


def test_a_storm_without_progress_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        StepPlanner, "_plan_running", lambda self, *given: self.roster.running and self.roster.preempt_last()
    )
    with pytest.raises(AssertionError):
        checks_core.preemption_storm(40)


def test_a_long_prompt_slows_others_by_a_bounded_factor() -> None:
    checks_core.long_prefill(20_000)
    with pytest.raises(AssertionError, match="beside the long prompt"):
        checks_core.long_prefill(20_000, budget=20_000)


def test_characters_are_never_split(monkeypatch: pytest.MonkeyPatch) -> None:
    checks_core.characters_split(3000)
    monkeypatch.setattr(ByteDecoder, "push", lambda self, ids: bytes(ids).decode("utf-8", "replace"))
    with pytest.raises(AssertionError):
        checks_core.characters_split(50)


def test_stop_strings_cut_at_their_earliest_end(monkeypatch: pytest.MonkeyPatch) -> None:
    checks_core.stops_cut(1500)
    flush = StopMatcher.flush
    monkeypatch.setattr(StopMatcher, "flush", lambda self: flush(self)[:-1])
    with pytest.raises(AssertionError):
        checks_core.stops_cut(200)
