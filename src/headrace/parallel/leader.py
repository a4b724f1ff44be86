"""The first rank: it has the engine, and what its executor is told it tells all ranks.

What lives here: the start of all, and the executor over them. What may not: processes (ranks.py), what a step computes
(worker/).

Scheduling happens here alone; a plan is the same for every rank, and so are the tokens that they sample: nothing is
sent back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from headrace.clock import RealClock
from headrace.config import Decision, EngineConfig
from headrace.engine.executor import AdapterOutcome, Control, DropAdapter, Executor, LoadAdapter, Sleep, Ticket, Wake
from headrace.errors import ConfigError, StepFailed
from headrace.models.source import ModelSource
from headrace.parallel import frames
from headrace.parallel.device import check_devices, create_group, device_here
from headrace.parallel.group import Group
from headrace.parallel.nccl import create_id
from headrace.parallel.ranks import Ranks
from headrace.processes.messages import pack
from headrace.processes.scratch import Scratch
from headrace.request import StepPlan, StepResult, TokenMasks
from headrace.worker.executor import DeviceExecutor
from headrace.worker.head_start import HeadStart, Stages
from headrace.worker.settings import device_kind
from headrace.worker.worker import create_executor as create_alone

_FIELDS = {LoadAdapter: "load", DropAdapter: "drop", Sleep: "sleep", Wake: "wake"}  # of frames.Control


def create_executor(
    config: EngineConfig,
    source: ModelSource,
    head_start: HeadStart | None = None,
    stages: Stages | None = None,
    meanwhile: Callable[[], object] = lambda: None,
    ranks: Ranks | None = None,
) -> tuple[Executor, tuple[Decision, ...]]:
    """As the worker's. ``ranks``: the others, begun and not launched; they are this executor's, and end with it."""
    if ranks is None:
        return create_alone(config, source, head_start, stages, meanwhile)
    size = config.device.tensor_parallel_size
    kind = device_kind(config.device.device)
    stages = stages or Stages(RealClock())
    config = replace(config, device=replace(config.device, device=kind))
    if kind == "cuda":
        check_devices(config.device, config.device.num_ranks)
    try:
        ranks.launch(config)
        group = _meet(ranks, kind, config)
        ranks.abort = group.abort
        stages.done("ranks")
        executor, decisions = create_alone(config, source, head_start, stages, meanwhile, group)
        assert isinstance(executor, DeviceExecutor)
        ranks.hear(frames.Ready)
    except Exception:
        if ranks.settle(1.0) is not None:
            ranks.check()
        raise
    said = Decision("ranks", size, f"each a process with a device of its own; over {group.account}")
    return RankedExecutor(executor, ranks, group), (said, *decisions)


def _meet(ranks: Ranks, kind: str, config: EngineConfig) -> Group:
    size = config.device.tensor_parallel_size
    here, others = device_here(kind), ranks.hear(frames.Here)
    if mixed := [each.device for each in others if each.device != here]:
        raise ConfigError(
            f"--tensor-parallel-size needs {size} equal devices, but the first is {here} and another {mixed[0]}. Use equal ones."
        )
    with ExitStack() as stack:
        place = (str(stack.enter_context(Scratch())), b"") if kind == "cpu" else ("", create_id())
        ranks.tell(pack(frames.Meet(*place)))
        return create_group(*place, 0, size, one_shot=config.device.one_shot_sums)


class RankedExecutor:
    """``inner``: the first rank's. Calls go to all ranks in one order; what a rank fails in alone is the end of all
    (EngineDead)."""

    def __init__(self, inner: DeviceExecutor, ranks: Ranks, group: Group) -> None:
        self.info = replace(inner.info, device=f"{inner.info.device} × {group.size}")
        self._inner, self._ranks, self._group = inner, ranks, group
        self._plans = frames.PlanPacker()
        inner.on_failure = lambda step_id, _: ranks.fail_too(step_id)

    def submit(self, plan: StepPlan) -> Ticket:
        self._ranks.tell(self._plans.pack(plan))
        return self._inner.submit(plan)

    def drafts(self, ticket: Ticket) -> Sequence[Sequence[int]]:
        return self._inner.drafts(ticket)  # every rank proposes the same

    def sample(self, ticket: Ticket, masks: TokenMasks) -> None:
        self._ranks.tell(pack(frames.Sample(ticket.step_id, masks.samples, masks.words_each, bytes(masks.words))))
        self._inner.sample(ticket, masks)

    def collect(self, ticket: Ticket) -> StepResult:
        self._ranks.tell(pack(frames.Collect(ticket.step_id)))
        try:
            result = self._inner.collect(ticket)
        except StepFailed as failure:
            raise StepFailed(self._ranks.settle() or failure.message) from failure
        self._ranks.check()  # a wait that was cut short brings nonsense
        return result

    def recover(self) -> None:
        self._ranks.tell(pack(frames.Recover()))
        self._inner.recover()
        self._ranks.agree(self._group.meetings)

    def prepare(self) -> bool:
        self._ranks.tell(pack(frames.Prepare()))
        return self._inner.prepare()

    def control(self, order: Control) -> None:
        field: dict[str, Any] = {_FIELDS[type(order)]: order}
        self._ranks.tell(pack(frames.Control(**field)))
        self._inner.control(order)

    def outcomes(self, wait: float = 0.0) -> list[AdapterOutcome]:
        return self._inner.outcomes(wait)

    def close(self) -> None:
        self._ranks.close()
        self._inner.close()
