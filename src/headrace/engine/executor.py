"""What runs a step. The core knows only this protocol: a worker, a simulation and a test double look the same to it.

What lives here: the protocol. What may not: torch, scheduling, any executor (worker/, keyed_hash.py,
planner/executor.py).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Protocol

from headrace.request import StepPlan, StepResult, TokenMasks
from headrace.spec import AdapterSpace, KVGroup, PoolingSpec


@dataclass(frozen=True, slots=True)
class ExecutorInfo:
    """What an executor offers; the scheduler and the validators are sized by it."""

    vocab_size: int  # width of the logits
    max_model_len: int  # tokens a sequence may have
    max_num_seqs: int  # rows
    kv_groups: tuple[KVGroup, ...]
    device: str
    memory: dict[str, int] = field(default_factory=dict)  # bytes by purpose: weights, kv_cache, activations, …
    padded: bool = False  # a step costs its longest chunk times its chunks, not their sum
    max_drafts: int = 0  # tokens that it can propose after a row's last one, in one step; 0: it does not
    start_seconds: dict[str, float] = field(default_factory=dict)  # by stage, in order
    adapters: AdapterSpace | None = None  # None: the device holds none
    pooling: PoolingSpec | None = None  # what samples are, in place of tokens
    stages: int = 1  # a sampled token is there so many steps later, if no step is to wait for another
    runs_ahead: bool = (
        False  # of a pipeline: a step may go on from what is guessed to be sampled after drafts in flight
    )


@dataclass(frozen=True, slots=True)
class LoadAdapter:
    """Into host memory; steps may name it once its outcome is known."""

    name: str
    folder: str


@dataclass(frozen=True, slots=True)
class DropAdapter:
    """Out of host memory; no plan that follows brings it in."""

    name: str


@dataclass(frozen=True, slots=True)
class Sleep:
    """With nothing in flight. ``level`` 1: weights move to host memory and the KV cache is given up; 2: all that the
    start made is given up."""

    level: int


@dataclass(frozen=True, slots=True)
class Wake:
    """Everything is as before, but what the KV cache held; after level 2, adapters have to be loaded again, too."""


@dataclass(frozen=True, slots=True)
class OpenStaging:
    """The file ``fd`` (disagg/staging.py), with a region of ``slots`` for each of so many replicas. ``widths``: bytes of
    each KV group in a slot."""

    fd: int
    replicas: int
    widths: tuple[int, ...]
    slots: int


@dataclass(frozen=True, slots=True)
class ExportBlocks:
    """Copies blocks that no step writes into slots of a region. ``names``: what the slots then hold; ``blocks``: of
    each slot by KV group."""

    source: int
    slots: tuple[int, ...]
    names: tuple[bytes, ...]
    blocks: tuple[tuple[tuple[int, ...], ...], ...]


@dataclass(frozen=True, slots=True)
class ImportBlocks(ExportBlocks):
    """Copies from there into blocks that no step reads or writes."""


Control = LoadAdapter | DropAdapter | Sleep | Wake | OpenStaging | ExportBlocks


@dataclass(frozen=True, slots=True)
class AdapterOutcome:
    """What came of loading one. ``blocks``: that it takes on the device."""

    name: str
    error: str | None = None
    blocks: int = 0


@dataclass(slots=True)
class Ticket:
    """A submitted step."""

    step_id: int


class Executor(Protocol):
    """``submit`` returns at once or after the work (an inline executor); tickets are collected in order of submission.

    A plan with ``masked`` samples is computed by ``submit`` and sampled by ``sample``, which must follow before
    anything else is submitted, once every earlier step is collected; other plans are sampled at once. ``drafts``,
    between the two, tells what is proposed after each of its samples, so that masks can follow that. ``collect`` raises
    StepFailed when the whole step failed. From then on every plan fails *without touching rows or blocks* (its
    deltas build on what was lost), until the core, with nothing in flight, calls ``recover``: rows are forgotten, and
    the plans that follow build them anew. Nothing between submit and collect may read results on the host. ``prepare``,
    with nothing in flight and nothing to do: some milliseconds' worth of what later steps will want; whether there may
    be more. ``control`` changes a worker between two steps, every rank at the same place of the queue, and returns at
    once; what comes of it ``outcomes`` tells, each once (``wait``: seconds that may pass until there is one). Sleep and
    Wake return when it is done; they raise OutOfMemory, and everything is as it was. Exports and imports return when all
    is copied, beside whatever is in flight; an import raises HeadraceError where its slots hold something else.
    """

    info: ExecutorInfo

    def submit(self, plan: StepPlan) -> Ticket: ...

    def drafts(self, ticket: Ticket) -> Seq[Seq[int]]: ...

    def sample(self, ticket: Ticket, masks: TokenMasks) -> None: ...

    def collect(self, ticket: Ticket) -> StepResult: ...

    def recover(self) -> None: ...

    def prepare(self) -> bool: ...

    def control(self, order: Control) -> None: ...

    def outcomes(self, wait: float = 0.0) -> list[AdapterOutcome]: ...

    def close(self) -> None: ...
