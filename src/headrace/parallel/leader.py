"""The first rank: it has the engine, and what its executor is told it tells all ranks.

What lives here: the start of all, and the executor over them. What may not: processes (ranks.py), what a step computes
(worker/).

Scheduling happens here alone; a plan is the same for every rank, and so are the tokens that they sample: nothing is
sent back.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from secrets import token_bytes
from typing import Any

from headrace.clock import RealClock
from headrace.config import Decision, EngineConfig
from headrace.engine.executor import AdapterOutcome, Control, DropAdapter, Executor, LoadAdapter, Sleep, Ticket, Wake
from headrace.errors import ConfigError, StepFailed
from headrace.models.decoder import Decoder
from headrace.models.families import spec_from_config
from headrace.models.source import ModelSource
from headrace.parallel import frames
from headrace.parallel.device import check_devices, count_ids, create_peers, device_here
from headrace.parallel.group import Peers, Store
from headrace.parallel.nccl import create_id, use_interface
from headrace.parallel.ranks import Ranks, files_mark
from headrace.parallel.stages import split_layers
from headrace.processes.messages import pack
from headrace.request import StepPlan, StepResult, TokenMasks, adapter_name
from headrace.spec import DecoderSpec
from headrace.worker.executor import DeviceExecutor
from headrace.worker.head_start import HeadStart, Stages
from headrace.worker.settings import device_kind
from headrace.worker.worker import create_executor as create_alone

log = logging.getLogger(__name__)

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
    size = config.device.num_ranks
    kind = device_kind(config.device.device)
    stages = stages or Stages(RealClock())
    config = replace(config, device=replace(config.device, device=kind))
    if kind == "cuda":
        check_devices(config.device, config.device.ranks_here)
    try:
        ranks.launch(config)
        peers = _meet(ranks, kind, config, spec_from_config(source.config))
        ranks.abort = peers.abort
        stages.done("ranks")
        executor, decisions = create_alone(config, source, head_start, stages, meanwhile, peers)
        assert isinstance(executor, DeviceExecutor)
        ranks.hear(frames.Ready)
        stages.done("other ranks")
        ranks.survivors = peers.experts
    except Exception:
        if ranks.settle(1.0) is not None:
            ranks.check()
        raise
    where = "on one device" if config.device.ranks_per_device > 1 else "with a device of its own"
    said = [Decision("ranks", size, f"each a process {where}; over {peers.all[0].backend}")]
    if peers.pipe is not None:
        said.append(_split(config, source, peers.pipe.stages))
    return RankedExecutor(executor, ranks, peers, size), (*said, *decisions)


def _split(config: EngineConfig, source: ModelSource, stages: int) -> Decision:
    bounds = split_layers(spec_from_config(source.config), stages, config.device.pipeline_layers)
    counts = " + ".join(str(end - begin) for begin, end in bounds)
    return Decision("stages", stages, f"of {counts} layers; so many steps are in flight")


def _meet(ranks: Ranks, kind: str, config: EngineConfig, spec: DecoderSpec) -> Peers:
    size = config.device.num_ranks
    here, others = device_here(kind), ranks.hear(frames.Here)
    if mixed := [each.device for each in others if each.device != here]:
        raise ConfigError(
            f"Ranks need {size} equal devices, but the first is {here} and another {mixed[0]}. Use equal ones."
        )
    ids: tuple[bytes, ...] = ()
    if kind != "cpu":
        use_interface(ranks.addresses[0])
        drafts = config.scheduler.speculative_config is not None
        ids = tuple(create_id() for _ in range(count_ids(config.device, drafts=drafts)))
    place = frames.Rendezvous(ids, ranks.addresses, token_bytes(32))
    ranks.tell(pack(place))
    return create_peers(place, 0, config.device, spec, Store(ranks.put, ranks.get, partial(ranks.get, seconds=None)))


class RankedExecutor:
    """``inner``: the first rank's. Calls go to all ranks in one order; what a rank fails in alone is the end of all
    (EngineDead)."""

    def __init__(self, inner: DeviceExecutor, ranks: Ranks, peers: Peers, size: int) -> None:
        self.info = replace(inner.info, device=f"{inner.info.device} × {size}")
        self._inner, self._ranks, self._peers = inner, ranks, peers
        self._plans = frames.PlanPacker()
        self._folders: dict[str, str] = {}  # of adapters that are read
        self._unsure: list[AdapterOutcome] = []  # here they have come, and not all other hosts have said what they have
        inner.on_failure = lambda step_id, _: ranks.fail_too(step_id)

    @property
    def decoder(self) -> Decoder:
        """The first rank's."""
        return self._inner.decoder

    def _meetings(self) -> int:
        return self._peers.comm_ops

    def submit(self, plan: StepPlan) -> Ticket:
        self._ranks.tell(self._plans.pack(plan))
        with self._ranks.watched(f"step {plan.step_id}", self._meetings):
            return self._inner.submit(plan)

    def drafts(self, ticket: Ticket) -> Sequence[Sequence[int]]:
        return self._inner.drafts(ticket)  # every rank proposes the same

    def sample(self, ticket: Ticket, masks: TokenMasks) -> None:
        self._ranks.tell(pack(frames.Sample(ticket.step_id, masks.samples, masks.words_each, bytes(masks.words))))
        self._inner.sample(ticket, masks)

    def collect(self, ticket: Ticket) -> StepResult:
        self._ranks.tell(pack(frames.Collect(ticket.step_id)))
        with self._ranks.watched(f"step {ticket.step_id}", self._meetings):
            try:
                result = self._inner.collect(ticket)
            except StepFailed as failure:
                raise StepFailed(self._ranks.settle() or failure.message) from failure
            self._ranks.check()  # a wait that was cut short brings nonsense
            self._ranks.check_step()
            # of a pipeline, the last stage samples, and tells what
            return result if self._peers.pipe is None else self._ranks.result(ticket.step_id)

    def recover(self) -> None:
        lost = self._ranks.fewer
        self._ranks.tell(pack(frames.Recover()))
        self._inner.recover()
        self._ranks.agree(self._peers.stage_comm_ops, lost=lost)

    def prepare(self) -> bool:
        self._ranks.tell(pack(frames.Prepare()))
        return self._inner.prepare()

    def control(self, order: Control) -> None:
        if isinstance(order, LoadAdapter):
            self._ranks.forget_adapter(order.name)
            self._folders[order.name] = order.folder
        field: dict[str, Any] = {_FIELDS[type(order)]: order}
        self._ranks.tell(pack(frames.Control(**field)))
        self._inner.control(order)

    def outcomes(self, wait: float = 0.0) -> list[AdapterOutcome]:
        """Of an adapter, once all hosts have said that they have the same."""
        found = [*self._unsure, *self._inner.outcomes(0.0 if self._unsure else wait)]
        sure = [self._agreed(each, wait) for each in found]
        self._unsure = [each for each, known in zip(found, sure, strict=True) if known is None]
        return [each for each in sure if each is not None]

    def _agreed(self, outcome: AdapterOutcome, wait: float) -> AdapterOutcome | None:
        others = self._ranks.without_adapter(outcome.name, partial(files_mark, self._folders[outcome.name]), wait)
        if others is None:
            return None
        del self._folders[outcome.name]
        if not others or outcome.error is not None:
            return outcome
        self.control(DropAdapter(outcome.name))
        name = adapter_name(outcome.name)
        log.error("adapter %s is refused: %s has other files than this host, or none", name, others)
        return AdapterOutcome(outcome.name, f"adapter {name} is not the same on all hosts; the log names them.")

    def close(self) -> None:
        self._ranks.close()
        self._inner.close()
