"""Ranks that hold the keys of every sequence between them: which has which, and what does not go with it.

What lives here: that rule, as arithmetic on numbers and arrays alike. What may not: torch, tensors of a step
(worker/spread.py), how their results are merged (layers/basic.py).

    position            | 0 1 2 3 4 5 6 7 8 …       position p lies on rank p % ranks (Striped Attention, Brandon et al.
    rank (of 3)         | 0 1 2 0 1 2 0 1 2 …       2023), so that every rank has the same share of any prefix
    its key on the rank | 0 0 0 1 1 1 2 2 2 …

A block of the scheduler's is ``ranks`` times as long as one of a rank's cache, which holds the block's tokens that are
the rank's under the same number. So plans and block tables are everybody's as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from headrace.config import EngineConfig
from headrace.errors import ConfigError
from headrace.request import StepPlan
from headrace.spec import DecoderSpec
from headrace.speculative.settings import HEADS, read_settings

Number = TypeVar("Number", bound=Any)  # int, or an array or tensor of them


@dataclass(frozen=True, slots=True)
class KeyShare:
    """One rank's. ``group``: query heads of a KV head. ``quicker``: whether keys that go to the queries are waited for less
    than queries that go to the keys (CostModel.passes_keys); None: nobody knows the link. ``windows``: of each KV group;
    none: there are no windows."""

    rank: int
    size: int
    group: int = 1
    quicker: Callable[[StepPlan], bool] | None = None
    windows: tuple[int | None, ...] = ()

    def keys(self, position: Number) -> Number:
        """How many of the keys up to ``position`` the rank has; none up to -1."""
        return cast(Number, (position + self.size - self.rank) // self.size)

    def passes_keys(self, plan: StepPlan) -> bool:
        """Whether keys and values go to the queries (pass-KV), or queries to the keys, and what they find back (pass-Q):
        whichever is quicker, or else less to send (Yang et al. 2024, section 3.5)."""
        if self.quicker is not None:
            return self.quicker(plan)
        return sum(plan.starts) + plan.num_tokens < plan.num_tokens * self.group


def check_context(spec: DecoderSpec, config: EngineConfig) -> None:
    """Raises ConfigError where the keys of a sequence cannot lie on several ranks."""
    size = config.device.context_parallel_size
    if size > 1 and (problem := next(_problems(spec, config, size), None)):
        raise ConfigError(f"--context-parallel-size is {size}, but {problem}.")


def _problems(spec: DecoderSpec, config: EngineConfig, size: int) -> Iterator[str]:
    if spec.pooling is not None or not spec.causal:
        yield "this model's prompts are pooled; use --data-parallel-size"
    settings = read_settings(config.scheduler.speculative_config)
    if settings is not None and settings.method in HEADS:
        yield "draft heads go on from hidden states of all rows, of which each rank has its own; use another method"
    if settings is not None and settings.tree is not None:
        yield "accepted branches of a draft tree are not moved between ranks; leave tree out"
    for window in sorted({layer.window for layer in spec.layers if layer.window is not None}):
        if window % size:
            yield f"it does not divide the model's sliding window of {window} tokens; choose a number of ranks that does"
