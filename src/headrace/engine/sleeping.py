"""An executor that can be given up and made again, while the engine above it stays: deep sleep (level 2).

What lives here: that. What may not: torch, what level 1 moves (worker/asleep.py), when to sleep (core.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from headrace.config import EngineConfig
from headrace.engine.executor import AdapterOutcome, Control, Executor, ExecutorInfo, Sleep, Ticket, Wake
from headrace.errors import OutOfMemory
from headrace.processes.garbage import collect_frozen, freeze_again
from headrace.request import StepPlan, StepResult, TokenMasks


def of_same_size(config: EngineConfig, info: ExecutorInfo) -> EngineConfig:
    """By which an executor is made once more with the same blocks and rows, whatever memory there is by then.
    ``config`` is resolved."""
    size = sum(group.num_blocks * group.spec.bytes_per_block for group in info.kv_groups)
    counted = config.cache.num_blocks is not None or not size  # an encoder has no KV
    cache = config.cache if counted else replace(config.cache, kv_cache_memory=size)
    return replace(config, cache=cache, model=replace(config.model, max_model_len=info.max_model_len))


class SleepingExecutor:
    """``create`` makes the inner one again."""

    def __init__(self, inner: Executor, create: Callable[[], Executor]) -> None:
        self.info: ExecutorInfo = inner.info
        self._create = create
        self._wake(inner)

    @property
    def later(self) -> Any:
        """As the inner one has it (Engine.await_kernels)."""
        return getattr(self._inner, "later", None)

    def _wake(self, inner: Executor) -> None:
        self._inner: Executor | None = inner
        self.submit: Callable[[StepPlan], Ticket] = inner.submit
        self.drafts: Callable[[Ticket], Sequence[Sequence[int]]] = inner.drafts
        self.sample: Callable[[Ticket, TokenMasks], None] = inner.sample
        self.collect: Callable[[Ticket], StepResult] = inner.collect
        self.recover: Callable[[], None] = inner.recover

    def prepare(self) -> bool:
        return self._inner is not None and self._inner.prepare()

    def outcomes(self, wait: float = 0.0) -> list[AdapterOutcome]:
        return [] if self._inner is None else self._inner.outcomes(wait)

    def control(self, order: Control) -> None:
        if isinstance(order, Sleep) and order.level > 1:
            self.close()
        elif isinstance(order, Wake) and self._inner is None:
            self._wake(self._made_again())
            freeze_again()
        elif self._inner is not None:
            self._inner.control(order)

    def _made_again(self) -> Executor:
        inner = self._create()
        if inner.info.kv_groups != self.info.kv_groups:
            inner.close()
            blocks = [[group.num_blocks for group in info.kv_groups] for info in (self.info, inner.info)]
            raise OutOfMemory(
                f"There were {blocks[0]} KV blocks, and now there is room for {blocks[1]}. Free memory and wake it again."
            )
        return inner

    def close(self) -> None:
        inner, self._inner = self._inner, None
        if inner is not None:
            del self.submit, self.drafts, self.sample, self.collect, self.recover
            inner.close()
            del inner
            collect_frozen()
