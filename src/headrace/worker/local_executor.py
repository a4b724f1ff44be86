"""The executor of one device in this process: inline, or in one worker thread.

What lives here: the Executor protocol over a ModelRunner. What may not: what a step does.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Protocol

import torch

from headrace.engine.executor import ExecutorInfo, Ticket
from headrace.errors import StepFailed
from headrace.request import StepPlan, StepResult
from headrace.worker.failure import failure_of

_log = logging.getLogger(__name__)


class RunsPlans(Protocol):
    def run(self, plan: StepPlan) -> StepResult: ...

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
        # torch's thread count is set per calling thread, so the worker's own sets it again.
        self._pool = ThreadPoolExecutor(1, "headrace-worker", torch.set_num_threads, (threads,)) if overlap > 0 else None

    def submit(self, plan: StepPlan) -> Ticket:
        if self._pool is not None:
            outcome = self._pool.submit(self._run, plan)
        else:
            outcome = Future()
            outcome.set_result(self._run_here(plan))
        self._outcomes.append((plan.step_id, outcome))
        return Ticket(plan.step_id)

    def collect(self, ticket: Ticket) -> StepResult:
        step_id, outcome = self._outcomes.popleft()
        assert step_id == ticket.step_id, f"step {ticket.step_id} was collected before step {step_id}"
        result = outcome.result()
        if isinstance(result, StepFailed):
            raise result
        return result

    def recover(self) -> None:
        assert self._runner is not None and not self._outcomes, "recover needs every step in flight collected first"
        self._runner.forget()
        self._broken = False

    def close(self) -> None:
        """Lets go of the model: its memory is free even while somebody still holds this executor. Nothing can be submitted any more."""
        if self._pool is not None:
            self._pool.shutdown(wait=True)
        self._runner = None

    def _run_here(self, plan: StepPlan) -> StepResult | StepFailed:
        """In the submitting thread, whose time is the device's meanwhile."""
        begin = time.thread_time()
        result = self._run(plan)
        return result if isinstance(result, StepFailed) else replace(result, lent_seconds=time.thread_time() - begin)

    def _run(self, plan: StepPlan) -> StepResult | StepFailed:
        assert self._runner is not None, "submitted after close"
        if self._broken:
            return StepFailed("This step builds on one that failed. Try again.")
        try:
            return self._runner.run(plan)
        except Exception as error:  # whatever went wrong, it is this step's failure; its requests end with it, others go on
            self._broken = True
            _log.exception("step %d failed: %d tokens of %d sequences", plan.step_id, plan.num_tokens, len(plan.rows))
            return failure_of(error, plan, self.info.memory)
