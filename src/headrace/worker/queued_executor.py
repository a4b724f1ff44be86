"""The executor of a device with a queue of its own (CUDA): a submitted step is queued, a collected one waited for.

Nothing between the two reads the device, so with overlap 1 the next step's kernels stand behind this one's before it has ended.

What lives here: the Executor protocol over such a runner. What may not: what a step does.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol, TypeVar

import torch

from headrace.engine.executor import ExecutorInfo, Ticket
from headrace.errors import StepFailed
from headrace.request import StepPlan, StepResult, TokenMasks
from headrace.worker.failure import failure_of
from headrace.worker.later import LaterKernels
from headrace.worker.model_runner import Launched, Sampled

_log = logging.getLogger(__name__)

T = TypeVar("T")


class QueuesPlans(Protocol):
    def launch(self, plan: StepPlan) -> Sampled: ...

    def launch_forward(self, plan: StepPlan) -> Launched: ...

    def launch_sample(self, step: Launched, masks: TokenMasks) -> Sampled: ...

    def read(self, step: Sampled) -> StepResult: ...

    def forget(self) -> None: ...

    def prepare(self) -> bool: ...


class QueuedExecutor:
    """Steps run in the order of submission. A step that fails raises StepFailed at its ``collect``, and so does every one submitted
    after that was known, untouched, until ``recover`` (one that was under way is read, and the core drops it); that calls
    ``restore`` first, with nothing of the failed step left on the device. ``later``: kernels that are still to come, which are its own now."""

    def __init__(self, runner: QueuesPlans, info: ExecutorInfo, restore: Callable[[], None], later: LaterKernels | None = None) -> None:
        self.info = info
        self.later = later
        self._lacks = later is not None
        self._restore = restore
        self._runner: QueuesPlans | None = runner  # None: closed
        self._broken = False
        self._prepares = True
        self._queued: deque[tuple[StepPlan, Sampled | StepFailed]] = deque()
        self._launched: tuple[StepPlan, Launched | StepFailed] | None = None  # the last one, while it waits for its masks

    def submit(self, plan: StepPlan) -> Ticket:
        assert self._runner is not None, "a closed executor runs nothing"
        assert self._launched is None, "a step waits for its masks"
        if self._lacks:
            plan = self._without(plan)
        if plan.masked:
            self._launched = plan, self._guarded(plan, self._runner.launch_forward)
        else:
            self._queued.append((plan, self._guarded(plan, self._runner.launch)))
        return Ticket(plan.step_id)

    def sample(self, ticket: Ticket, masks: TokenMasks) -> None:
        assert self._runner is not None and self._launched is not None and self._launched[0].step_id == ticket.step_id
        (plan, step), self._launched, runner = self._launched, None, self._runner
        sampled = step if isinstance(step, StepFailed) else self._guarded(plan, lambda _: runner.launch_sample(step, masks))
        self._queued.append((plan, sampled))

    def collect(self, ticket: Ticket) -> StepResult:
        plan, step = self._queued.popleft()
        assert plan.step_id == ticket.step_id, f"step {ticket.step_id} was collected before step {plan.step_id}"
        assert self._runner is not None
        if isinstance(step, StepFailed):
            raise step
        try:
            return self._runner.read(step)
        except Exception as error:  # what the device reports late, or reading has no memory for, belongs to this step
            raise self._fail(error, plan) from error

    def recover(self) -> None:
        assert self._runner is not None and not self._queued, "recover needs every step in flight collected first"
        self._restore()
        self._runner.forget()
        self._broken = False

    def prepare(self) -> bool:
        assert self._runner is not None and not self._queued and self._launched is None, "nothing may be in flight"
        if self._broken or not self._prepares:
            return False
        try:
            return self._runner.prepare()
        except Exception:  # nobody waits for it: it is left alone from now on
            self._prepares = False
            _log.exception("nothing more is prepared ahead")
            with suppress(RuntimeError):  # of a device that answers nothing any more: the next step says so
                self._restore()
            return False

    def close(self) -> None:
        """Lets go of the model and gives its memory back to the device. Nothing can be submitted any more."""
        self._queued.clear()
        self._launched = None
        self._runner = None
        if self.later is not None:
            self.later.close()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

    def _without(self, plan: StepPlan) -> StepPlan:
        assert self.later is not None
        self._lacks = not self.later.there
        return self.later.without(plan) if self._lacks else plan

    def _guarded(self, plan: StepPlan, launch: Callable[[StepPlan], T]) -> T | StepFailed:
        if self._broken:
            return StepFailed("This step builds on one that failed. Try again.")
        try:
            return launch(plan)
        except Exception as error:  # whatever went wrong, it is this step's failure; its requests end with it, others go on
            return self._fail(error, plan)

    def _fail(self, error: Exception, plan: StepPlan) -> StepFailed:
        self._broken = True
        _log.exception("step %d failed: %d tokens of %d sequences", plan.step_id, plan.num_tokens, len(plan.rows))
        return failure_of(error, plan, self.info.memory)
