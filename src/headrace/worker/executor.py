"""The executor of one device in this process. A CPU computes a step inside ``submit``, or with overlap in one worker
thread. A GPU has a queue of its own: a submitted step is queued, a collected one waited for, and nothing between the
two reads the device, so that the next step's kernels stand after this one's before it has ended.

What lives here: the Executor protocol over a ModelRunner, failures, recovery, copies of blocks into memory that replicas
share. What may not: what a step does, which blocks are handed over (disagg/hand_over.py).
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import product

import torch
from torch import Tensor

from headrace.disagg.staging import Staging
from headrace.engine.executor import (
    AdapterOutcome,
    Control,
    ExecutorInfo,
    ExportBlocks,
    ImportBlocks,
    LoadAdapter,
    OpenStaging,
    Sleep,
    Ticket,
    Wake,
)
from headrace.errors import StepFailed
from headrace.kernels.build.ahead import PendingKernels
from headrace.lora.device import DeviceAdapters
from headrace.models.decoder import Decoder
from headrace.request import StepPlan, StepResult, TokenMasks
from headrace.worker.asleep import Asleep
from headrace.worker.failure import failure_of
from headrace.worker.model_runner import ModelRunner, Step

_log = logging.getLogger(__name__)

Outcome = Callable[[], Step | StepFailed]  # may wait for the worker thread


class DeviceExecutor:
    """Steps run in the order of submission. A step that fails raises StepFailed at its ``collect``, and so does every
    one submitted after that was known, untouched, until ``recover`` (one that was under way is read, and the core drops
    it); that calls ``restore`` first, with nothing of the failed step left on the device, and ``go_on`` last, with no row
    left.

    ``threads``: of the worker thread, where steps are computed by one. ``caches``: of each KV group all that lies under
    a block's number, as BlockMover has it. ``asleep``: what is given up while this sleeps;
    None: it never does. ``later``: kernels for keys that sequences share
    which are still to come, its own now. Until they are there, steps are told that theirs share none: captured, fused
    and plain attention are asked as for any such step, and what is computed is the same but for rounding.
    """

    def __init__(
        self,
        runner: ModelRunner,
        info: ExecutorInfo,
        *,
        threads: int | None = None,
        restore: Callable[[], None] = lambda: None,
        later: PendingKernels | None = None,
        adapters: DeviceAdapters | None = None,
        asleep: Asleep | None = None,
        caches: Sequence[Sequence[Tensor]] = (),
        go_on: Callable[[], None] = lambda: None,
    ) -> None:
        self.info = info
        self._caches = caches
        self._mover: BlockMover | None = None
        self._asleep = asleep
        self._adapters = adapters
        self.later = later
        self._lacks = later is not None
        self._restore, self._go_on = restore, go_on
        self._runner: ModelRunner | None = runner  # None: closed
        self._queued = runner.queued
        self._broken = False
        self._prepares, self._sleeps = True, False
        self._outcomes: deque[tuple[StepPlan, Outcome]] = deque()
        self._begun: tuple[StepPlan, Outcome] | None = None  # the last one, while it waits for its masks
        # told at once, by the thread that computes
        self.on_failure: Callable[[int, StepFailed], None] = lambda step_id, failure: None
        self._lent = 0.0  # seconds of the submitting thread that steps took since the last collect
        # torch's thread count is set per calling thread, so the worker's own sets it again.
        self._pool = (
            None if threads is None else ThreadPoolExecutor(1, "headrace-worker", torch.set_num_threads, (threads,))
        )

    @property
    def decoder(self) -> Decoder:
        assert self._runner is not None, "a closed executor has none"
        return self._runner.decoder

    def submit(self, plan: StepPlan) -> Ticket:
        assert self._runner is not None, "a closed executor runs nothing"
        assert self._begun is None, "a step waits for its masks"
        if self._lacks:
            plan = self._without_later_kernels(plan)
        runner = self._runner
        outcome = self._do(lambda: self._guarded(plan, lambda: runner.submit(plan)))
        if plan.masked:
            self._begun = plan, outcome
        else:
            self._outcomes.append((plan, outcome))
        return Ticket(plan.step_id)

    def drafts(self, ticket: Ticket) -> Sequence[Sequence[int]]:
        assert self._begun is not None and self._runner is not None, f"step {ticket.step_id} waits for no masks"
        step = self._begun[1]()
        if isinstance(step, StepFailed):
            return ()
        try:
            return self._runner.drafts(step)
        except Exception as error:  # that the device reports here: the step has failed
            self._fail(error, self._begun[0])
            return ()

    def sample(self, ticket: Ticket, masks: TokenMasks) -> None:
        assert self._begun is not None and self._begun[0].step_id == ticket.step_id, (
            f"step {ticket.step_id} waits for no masks"
        )
        assert self._runner is not None
        (plan, begun), self._begun, runner = self._begun, None, self._runner

        def finish() -> Step | StepFailed:
            step = begun()
            return step if isinstance(step, StepFailed) else self._guarded(plan, lambda: runner.sample(step, masks))

        self._outcomes.append((plan, self._do(finish)))

    def collect(self, ticket: Ticket) -> StepResult:
        plan, outcome = self._outcomes.popleft()
        assert plan.step_id == ticket.step_id, f"step {ticket.step_id} was collected before step {plan.step_id}"
        assert self._runner is not None
        step = outcome()
        lent, self._lent = self._lent, 0.0
        if isinstance(step, StepFailed):
            raise step
        try:
            result = self._runner.collect(step)
        except Exception as error:  # what the device reports late, or reading has no memory for, belongs to this step
            raise self._fail(error, plan) from error
        return result if self._queued or self._pool is not None else replace(result, lent_seconds=lent)

    def recover(self) -> None:
        assert self._runner is not None and not self._outcomes, "recover needs every step in flight collected first"
        self._restore()
        self._runner.forget()
        self._go_on()
        self._broken = False

    def prepare(self) -> bool:
        assert self._runner is not None and not self._outcomes and self._begun is None, "nothing may be in flight"
        if self._broken or self._sleeps or not self._prepares:  # one that sleeps has no weights
            return False
        try:
            return self._runner.passes.prepare()
        except Exception:  # nothing waits for it: it is not tried again
            self._prepares = False
            _log.exception("nothing more is prepared ahead")
            with suppress(RuntimeError):  # of a device that answers nothing any more: the next step says so
                self._restore()
            return False

    def control(self, order: Control) -> None:
        if isinstance(order, Sleep | Wake):
            assert self._asleep is not None and not self._outcomes, "it can sleep, and nothing is in flight"
            work = self._asleep.sleep if isinstance(order, Sleep) else self._asleep.wake
            work() if self._pool is None else self._pool.submit(work).result()
            self._sleeps = isinstance(order, Sleep)
            return
        if isinstance(order, OpenStaging):
            self._mover = BlockMover(Staging(order.fd, order.replicas, order.widths, order.slots), self._caches)
            return
        if isinstance(order, ExportBlocks):
            assert self._mover is not None, "the memory for it is open"
            self._mover.move(order)
            return
        adapters = self._adapters
        assert adapters is not None, "this device holds no adapters"
        if isinstance(order, LoadAdapter):
            adapters.load(order.name, order.folder)
            return
        let_go = adapters.drop(order.name)
        if self._pool is None:
            let_go()
        else:  # after the steps that may still bring it in
            self._pool.submit(let_go)

    def outcomes(self, wait: float = 0.0) -> list[AdapterOutcome]:
        return [] if self._adapters is None else self._adapters.outcomes(wait)

    def close(self) -> None:
        """Lets go of the model: its memory is free even while this executor is still held. Nothing can be
        submitted any more."""
        if self._pool is not None:
            self._pool.shutdown(wait=True)
        if self._adapters is not None:
            self._adapters.close()
        self._outcomes.clear()
        self._begun = None
        self._runner, self._go_on = None, lambda: None
        self._caches, self._mover, self._adapters = (), None, None
        if self.later is not None:
            self.later.close()
        if self._asleep is not None:  # what it wakes with leads back to the model
            self._asleep.close()
        if self._queued:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def _without_later_kernels(self, plan: StepPlan) -> StepPlan:
        assert self.later is not None
        self._lacks = not self.later.there
        return replace(plan, shared_tokens=0) if self._lacks and plan.shared_tokens != 0 else plan

    def _do(self, work: Outcome) -> Outcome:
        """In the worker thread, or here and now: then this thread's time is the device's meanwhile."""
        if self._pool is not None:
            return self._pool.submit(work).result
        begin = time.thread_time()
        step = work()
        self._lent += time.thread_time() - begin
        return lambda: step

    def _guarded(self, plan: StepPlan, work: Callable[[], Step]) -> Step | StepFailed:
        if self._broken:
            return StepFailed("This step builds on one that failed. Try again.")
        try:
            return work()
        except (
            Exception
        ) as error:  # whatever went wrong, it is this step's failure; its requests end with it, others go on
            return self._fail(error, plan)

    def _fail(self, error: Exception, plan: StepPlan) -> StepFailed:
        self._broken = True
        _log.exception("step %d failed: %d tokens of %d sequences", plan.step_id, plan.num_tokens, len(plan.rows))
        failure = failure_of(error, plan, self.info.memory)
        self.on_failure(plan.step_id, failure)
        return failure


class BlockMover:
    """Blocks out of the KV cache into memory that replicas share, and from there into another replica's cache. On a GPU
    that memory is pinned, and copies have a stream of their own, beside whatever step is under way: the blocks are those
    that no step in flight touches. ``move`` returns when all is copied.

    ``caches``: of each KV group all that lies under a block's number, first dimension blocks: keys and values, perhaps a
    draft model's, too.
    """

    def __init__(self, staging: Staging, caches: Sequence[Sequence[Tensor]]) -> None:
        self._staging = staging
        self._caches = [
            [each.view(torch.uint8).view(len(each), -1) if len(each) else each for each in group] for group in caches
        ]
        self._shared = torch.frombuffer(staging.map, dtype=torch.uint8)
        device = caches[0][0].device
        self._stream = None
        if device.type == "cuda":
            cudart = torch.cuda.cudart()
            for region in range(staging.replicas):
                begin = self._shared.data_ptr() + staging.offset(region, 0)
                torch.cuda.check_error(cudart.cudaHostRegister(begin, staging.region_bytes, 0))
            self._stream = torch.cuda.Stream(device)

    @torch.inference_mode()
    def move(self, order: ExportBlocks) -> None:
        """Imports raise HeadraceError where something else lies there: the blocks then hold nothing of use."""
        brings, staging = isinstance(order, ImportBlocks), self._staging
        (staging.check if brings else staging.clear)(order)
        with self._copying():
            for shared, block in self._pairs(order):
                source, target = (shared, block) if brings else (block, shared)
                target.copy_(source, non_blocking=True)
        (staging.check if brings else staging.seal)(order)

    @contextmanager
    def _copying(self) -> Iterator[None]:
        """What is copied within is there at the end."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield
        self._stream.synchronize()

    def _pairs(self, order: ExportBlocks) -> Iterator[tuple[Tensor, Tensor]]:
        """(where it lies in shared memory, the block), of each cache."""
        for slot, blocks in zip(order.slots, order.blocks, strict=True):
            at = self._staging.offset(order.source, slot)
            for held, caches, width in zip(blocks, self._caches, self._staging.widths, strict=True):
                begin = at
                for block, cache in product(held, caches):
                    size = cache.shape[1]
                    yield self._shared[begin : begin + size], cache[block]
                    begin += size
                assert begin <= at + width, "blocks are as large as the cache says"
                at += width
