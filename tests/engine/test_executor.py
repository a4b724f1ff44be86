"""The executor over a device with a queue, and the ring it stages from, without a GPU: order, failures, recovery,
buffers in use.

The device is a list of things to do that nobody does before somebody waits for them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headrace.engine.executor import Ticket
from headrace.errors import StepFailed
from headrace.kernels.rows.reference import fetch_step, store_tokens
from headrace.request import StepPlan, StepResult, TokenMasks
from headrace.worker.executor import DeviceExecutor
from headrace.worker.graphs import Mailbox
from tests.support.recorded_graphs import info_of


class LateRunner:
    """``submit`` queues; ``collect`` is where the device is waited for. Steps in ``fails`` raise at the stage that is
    named."""

    def __init__(self, **fails: tuple[int, Exception]) -> None:
        self.calls: list[tuple[str, int]] = []
        self.fails = fails

    def _call(self, stage: str, step_id: int) -> None:
        self.calls.append((stage, step_id))
        failing, error = self.fails.get(stage, (None, None))
        if failing == step_id and error is not None:
            raise error

    queued = True

    def submit(self, plan: StepPlan) -> Any:
        self._call("submit", plan.step_id)
        return SimpleNamespace(plan=plan)

    def sample(self, step: Any, masks: TokenMasks) -> Any:
        self._call("sample", step.plan.step_id)
        return step

    def collect(self, step: Any) -> StepResult:
        self._call("collect", step.plan.step_id)
        return StepResult(step.plan.step_id, [])

    def forget(self) -> None:
        self._call("forget", -1)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was asked of torch.cuda."""
    asked: list[str] = []
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda name=name: asked.append(name))
    return asked


def executor_of(runner: Any, later: Any = None) -> DeviceExecutor:
    return DeviceExecutor(runner, info_of(2, 4, 4, 16), restore=lambda: runner._call("restore", -1), later=later)


def test_steps_are_launched_at_once_and_read_in_their_order() -> None:
    runner = LateRunner()
    executor = executor_of(runner)
    tickets = [executor.submit(StepPlan(step)) for step in range(3)]
    assert runner.calls == [("submit", 0), ("submit", 1), ("submit", 2)]
    assert [executor.collect(ticket).step_id for ticket in tickets] == [0, 1, 2]
    assert runner.calls[3:] == [("collect", 0), ("collect", 1), ("collect", 2)]


def test_collecting_out_of_order_is_our_own_mistake() -> None:
    executor = executor_of(LateRunner())
    executor.submit(StepPlan(0)), executor.submit(StepPlan(1))
    with pytest.raises(AssertionError, match="step 1 was collected before step 0"):
        executor.collect(Ticket(1))


@pytest.mark.parametrize(
    "error",
    [
        ValueError("a secret"),
        RuntimeError("CUDA error"),
        MemoryError(),
        torch.OutOfMemoryError("Tried to allocate 2 GiB"),
    ],
)
def test_a_launch_that_fails_is_told_at_its_collect_and_those_behind_it_are_not_tried(error: Exception) -> None:
    runner = LateRunner(submit=(1, error))
    executor = executor_of(runner)
    tickets = [executor.submit(StepPlan(step)) for step in range(3)]
    assert ("submit", 2) not in runner.calls
    assert executor.collect(tickets[0]).step_id == 0
    with pytest.raises(StepFailed) as caught:
        executor.collect(tickets[1])
    assert "secret" not in str(caught.value) and ("ran out of memory" in str(caught.value)) == (
        type(error).__name__ in ("MemoryError", "OutOfMemoryError")
    )
    with pytest.raises(StepFailed, match="builds on"):
        executor.collect(tickets[2])


@pytest.mark.parametrize(
    "error",
    [RuntimeError("CUDA error: an illegal memory access"), MemoryError("no room for the results"), ValueError("odd")],
)
def test_what_shows_only_at_reading_is_that_steps_failure_and_the_next_ones(error: Exception) -> None:
    runner = LateRunner(collect=(0, error))
    executor = executor_of(runner)
    first = executor.submit(StepPlan(0))
    with pytest.raises(StepFailed):
        executor.collect(first)
    second = executor.submit(StepPlan(1))
    assert ("submit", 1) not in runner.calls
    with pytest.raises(StepFailed, match="builds on"):
        executor.collect(second)


def test_recovery_restores_before_rows_are_forgotten_and_steps_run_again() -> None:
    runner = LateRunner(submit=(0, ValueError()))
    executor = executor_of(runner)
    ticket = executor.submit(StepPlan(0))
    with pytest.raises(AssertionError, match="collected first"):
        executor.recover()
    with pytest.raises(StepFailed):
        executor.collect(ticket)
    executor.recover()
    assert runner.calls[-2:] == [("restore", -1), ("forget", -1)]
    assert executor.collect(executor.submit(StepPlan(1))).step_id == 1


def test_a_closed_executor_waits_for_the_device_gives_memory_back_and_runs_nothing(calls: list[str]) -> None:
    executor = executor_of(LateRunner())
    executor.submit(StepPlan(0))
    executor.close()
    assert calls == ["synchronize", "empty_cache"]
    with pytest.raises(AssertionError, match="closed"):
        executor.submit(StepPlan(1))


# --- the mailbox ------------------------------------------------------------------------------------------------------


class Queue:
    """A device's stream: work is done when an event behind it is waited for."""

    def __init__(self) -> None:
        self.work: list[Callable[[], None]] = []
        self.done = 0

    def run(self, until: int) -> None:
        while self.done < until:
            self.work[self.done]()
            self.done += 1

    def event(self) -> Any:
        mark = SimpleNamespace(at=0)
        return SimpleNamespace(
            record=lambda stream: setattr(mark, "at", len(self.work)), synchronize=lambda: self.run(mark.at)
        )


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Queue:
    made = Queue()
    monkeypatch.setattr(torch.cuda, "Event", made.event)
    return made


def mailbox_of(slots: int = 4) -> Mailbox:
    return Mailbox((7, 2), (2, 2), torch.device("cpu"), Any, slots)


def send(mailbox: Mailbox, queue: Queue, value: int, arrived: list[int]) -> None:
    """A step that is told ``value`` and answers with its negative."""
    mailbox.next()[:3] = value
    step = torch.zeros(3, 2, dtype=torch.int32)
    nowhere, tokens = torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)

    def compute() -> None:
        fetch_step(mailbox.inward, mailbox.turn, step, torch.zeros(1, 1, dtype=torch.int32))
        arrived.append(int(step[2, 1]))
        tokens.fill_(-arrived[-1])
        store_tokens(
            torch.zeros(1, 1, dtype=torch.int32),
            nowhere,
            nowhere,
            tokens,
            nowhere.float(),
            mailbox.outward,
            mailbox.turn,
        )

    queue.work.append(compute)
    mailbox.queued()


@pytest.mark.parametrize("slots", [1, 2, 4])
def test_a_slot_is_not_written_again_before_it_has_been_fetched(queue: Queue, slots: int) -> None:
    mailbox, arrived = mailbox_of(slots), list[int]()
    for value in range(1, 20):
        send(mailbox, queue, value, arrived)
        assert len(queue.work) - queue.done <= slots
    queue.run(len(queue.work))
    assert arrived == list(range(1, 20))


def test_nobody_waits_while_there_are_slots_left_and_answers_stay_until_they_are_read(queue: Queue) -> None:
    mailbox, arrived, answers = mailbox_of(), list[int](), []
    for value in range(4):
        send(mailbox, queue, value, arrived)
        answers.append(mailbox.answer)
    assert queue.done == 0, "three steps in flight and the next one's inputs fit"
    queue.run(4)
    assert [answer.tolist() for answer in answers] == [[[-value, 1], [-value, 1]] for value in range(4)]


def test_a_mailbox_that_does_not_wait_is_noticed(queue: Queue) -> None:
    """The negative control: events that never wait."""
    mailbox, arrived = mailbox_of(2), list[int]()
    for event in mailbox._fetched:
        event.synchronize = lambda: None  # type: ignore[method-assign]
    for value in range(1, 7):
        send(mailbox, queue, value, arrived)
    queue.run(len(queue.work))
    assert arrived != list(range(1, 7))


def test_after_a_step_that_never_ran_both_sides_begin_again(queue: Queue) -> None:
    mailbox, arrived = mailbox_of(), list[int]()
    send(mailbox, queue, 1, arrived)
    mailbox.next()  # its launch failed
    queue.run(1)
    mailbox.restart()
    for value in (2, 3, 4):
        send(mailbox, queue, value, arrived)
    queue.run(4)
    assert arrived == [1, 2, 3, 4]


def masked(step_id: int) -> StepPlan:
    return replace(StepPlan(step_id), masked=(0,))


def test_a_masked_step_is_computed_before_the_one_before_it_is_read_and_sampled_after(calls: list[str]) -> None:
    runner = LateRunner()
    executor = executor_of(runner)
    first, second = executor.submit(StepPlan(0)), executor.submit(masked(1))
    executor.collect(first)
    executor.sample(second, TokenMasks())
    executor.collect(second)
    assert runner.calls == [("submit", 0), ("submit", 1), ("collect", 0), ("sample", 1), ("collect", 1)]


@pytest.mark.parametrize("stage", ["submit", "sample"])
def test_a_masked_step_that_fails_does_so_at_its_collect_and_takes_the_next_with_it(
    stage: str, calls: list[str]
) -> None:
    runner = LateRunner(**{stage: (0, RuntimeError("broken"))})
    executor = executor_of(runner)
    ticket = executor.submit(masked(0))
    executor.sample(ticket, TokenMasks())
    following = executor.submit(masked(1))
    executor.sample(following, TokenMasks())
    for each in (ticket, following):
        with pytest.raises(StepFailed):
            executor.collect(each)
    assert ("submit", 1) not in runner.calls
    executor.recover()
    again = executor.submit(masked(2))
    executor.sample(again, TokenMasks())
    assert executor.collect(again).step_id == 2


class Late:
    """Kernels that steps do without until ``there``."""

    def __init__(self) -> None:
        self.there = False
        self.closed = 0

    def close(self) -> None:
        self.closed += 1


def test_steps_do_without_kernels_that_are_still_to_come(calls: list[str]) -> None:
    runner, late, given = LateRunner(), Late(), list[int | None]()
    runner.submit = lambda plan: given.append(plan.shared_tokens) or SimpleNamespace(plan=plan)  # type: ignore[assignment, func-returns-value, method-assign, return-value]
    executor = executor_of(runner, late)
    executor.submit(StepPlan(0, shared_tokens=4096))
    late.there = True
    executor.submit(StepPlan(1, shared_tokens=4096))
    late.there = False  # nobody looks any more
    executor.submit(StepPlan(2, shared_tokens=4096))
    assert given == [0, 4096, 4096]
    executor.close()
    assert late.closed == 1
