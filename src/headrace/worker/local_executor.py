"""The executor of one device in this process: inline, or in one worker thread.

What lives here: the Executor protocol over a ModelRunner. What may not: what a step does.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Protocol, TypeVar

import torch

from headrace.engine.executor import ExecutorInfo, Ticket
from headrace.errors import StepFailed
from headrace.request import StepPlan, StepResult, TokenMasks
from headrace.worker.failure import failure_of
from headrace.worker.model_runner import Forwarded

_log = logging.getLogger(__name__)

T = TypeVar("T")


class RunsPlans(Protocol):
    def run(self, plan: StepPlan) -> StepResult: ...

    def begin(self, plan: StepPlan) -> Forwarded: ...

    def finish(self, step: Forwarded, masks: TokenMasks) -> StepResult: ...

    def forget(self) -> None: ...


class LocalExecutor:
    """Runs plans in the order of submission. With ``overlap`` 0 a step runs inside ``submit``, else in one worker thread.

    A step that fails raises StepFailed at its ``collect``, and so does every later one, untouched, until ``recover``.
    """

    def __init__(self, runner: RunsPlans, info: ExecutorInfo, *, overlap: int, threads: int) -> None:
        self.info = info
        self._runner: RunsPlans | None = runner  # None: closed
        self._broken = False
        self._outcomes: deque[tuple[int, Future[StepResult | StepFailed]]] = deque()
        self._begun: tuple[StepPlan, Future[Forwarded | StepFailed]] | None = None  # the last one, while it waits for its masks
        self._lent = 0.0  # seconds of the submitting thread that steps took since the last collect
        # torch's thread count is set per calling thread, so the worker's own sets it again.
        self._pool = ThreadPoolExecutor(1, "headrace-worker", torch.set_num_threads, (threads,)) if overlap > 0 else None

    def submit(self, plan: StepPlan) -> Ticket:
        assert self._runner is not None, "submitted after close"
        assert self._begun is None, "a step waits for its masks"
        if plan.masked:
            self._begun = plan, self._do(lambda: self._guarded(plan, lambda runner, plan: runner.begin(plan)))
        else:
            self._outcomes.append((plan.step_id, self._do(lambda: self._guarded(plan, lambda runner, plan: runner.run(plan)))))
        return Ticket(plan.step_id)

    def sample(self, ticket: Ticket, masks: TokenMasks) -> None:
        assert self._begun is not None and self._begun[0].step_id == ticket.step_id, f"step {ticket.step_id} waits for no masks"
        (plan, begun), self._begun = self._begun, None

        def finish() -> StepResult | StepFailed:
            step = begun.result()
            return step if isinstance(step, StepFailed) else self._guarded(plan, lambda runner, _: runner.finish(step, masks))

        self._outcomes.append((plan.step_id, self._do(finish)))

    def collect(self, ticket: Ticket) -> StepResult:
        step_id, outcome = self._outcomes.popleft()
        assert step_id == ticket.step_id, f"step {ticket.step_id} was collected before step {step_id}"
        result = outcome.result()
        lent, self._lent = self._lent, 0.0
        if isinstance(result, StepFailed):
            raise result
        return replace(result, lent_seconds=lent) if self._pool is None else result

    def recover(self) -> None:
        assert self._runner is not None and not self._outcomes, "recover needs every step in flight collected first"
        self._runner.forget()
        self._broken = False

    def prepare(self) -> bool:
        return False

    def close(self) -> None:
        """Lets go of the model: its memory is free even while somebody still holds this executor. Nothing can be submitted any more."""
        if self._pool is not None:
            self._pool.shutdown(wait=True)
        self._runner = None

    def _do(self, work: Callable[[], T]) -> Future[T]:
        """In the worker thread, or here and now: then this thread's time is the device's meanwhile."""
        if self._pool is not None:
            return self._pool.submit(work)
        begin = time.thread_time()
        outcome: Future[T] = Future()
        outcome.set_result(work())
        self._lent += time.thread_time() - begin
        return outcome

    def _guarded(self, plan: StepPlan, work: Callable[[RunsPlans, StepPlan], T]) -> T | StepFailed:
        assert self._runner is not None, "submitted after close"
        if self._broken:
            return StepFailed("This step builds on one that failed. Try again.")
        try:
            return work(self._runner, plan)
        except Exception as error:  # whatever went wrong, it is this step's failure; its requests end with it, others go on
            self._broken = True
            _log.exception("step %d failed: %d tokens of %d sequences", plan.step_id, plan.num_tokens, len(plan.rows))
            return failure_of(error, plan, self.info.memory)
