"""What runs a step. The core knows only this protocol: a worker, a simulation and a test double look the same to it.

What lives here: the protocol and the keyed-hash executor (no model). What may not: torch, scheduling.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from headrace.request import StepPlan, StepResult
from headrace.spec import KVSpec


@dataclass(frozen=True, slots=True)
class KVGroup:
    """One KV group as the executor holds it."""

    spec: KVSpec
    num_blocks: int


@dataclass(frozen=True, slots=True)
class ExecutorInfo:
    """What an executor offers; the scheduler and the validators are sized by it."""

    vocab_size: int  # width of the logits
    max_model_len: int  # tokens a sequence may have
    max_num_seqs: int  # rows
    kv_groups: tuple[KVGroup, ...]
    device: str
    memory: dict[str, int] = field(default_factory=dict)  # bytes by purpose: weights, kv_cache, activations, …


@dataclass(slots=True)
class Ticket:
    """A submitted step."""

    step_id: int


class Executor(Protocol):
    """``submit`` returns at once or after the work (an inline executor); tickets are collected in order of submission.

    ``collect`` raises StepFailed when the whole step failed; the executor must then still accept new plans.
    Nothing between submit and collect may read results on the host.
    """

    info: ExecutorInfo

    def submit(self, plan: StepPlan) -> Ticket: ...

    def collect(self, ticket: Ticket) -> StepResult: ...

    def close(self) -> None: ...
