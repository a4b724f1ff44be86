"""The adapters of one worker: those in host memory, and the slots of its device.

What lives here: loading ahead in a thread, what has come of it, bringing adapters into slots and blocks as plans say. What may
not: when and which (cache/adapters.py, registry.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path

import torch

from headrace.engine.executor import AdapterOutcome
from headrace.errors import HeadraceError
from headrace.lora.layout import Layout
from headrace.lora.peft import read_adapter
from headrace.lora.reading import HostAdapter, Named, Packing, create_packing, read_factors
from headrace.lora.slots import AdapterSlots
from headrace.parallel.shares import Cut
from headrace.spec import DecoderSpec

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Reading:
    """How adapters are read: of which model (all of it), for which slots, as what; of several ranks, what is one's of
    each weight."""

    spec: DecoderSpec
    layout: Layout
    dtype: torch.dtype
    pinned: bool
    cuts: Mapping[str, Cut] = field(default_factory=dict)
    packing: Callable[[Named], Packing] = field(init=False)  # of what was read lately: most are alike

    def __post_init__(self) -> None:
        object.__setattr__(self, "packing", lru_cache(16)(partial(create_packing, self.layout)))

    def read(self, folder: str) -> HostAdapter:
        adapter = read_adapter(Path(folder), self.spec, self.layout.rank)
        return read_factors(adapter, self.packing, self.dtype, pinned=self.pinned, cuts=self.cuts)


def _outlive_copies(held: HostAdapter) -> None:
    """Copies from it may be under way, in a queue that the thread of steps does not wait for."""
    torch.cuda.synchronize()


class DeviceAdapters:
    """``load`` and ``drop`` are told by the executor's control verb; ``bring`` by plans, which name none but the
    loaded."""

    def __init__(self, slots: AdapterSlots, reading: Reading) -> None:
        self.slots = slots
        self._reading = reading
        self._held: dict[str, HostAdapter] = {}
        self._coming: dict[str, Future[HostAdapter]] = {}
        # beside a GPU the host has cores to spare
        self._pool = ThreadPoolExecutor(4 if reading.pinned else 1, "headrace-adapters")

    def load(self, name: str, folder: str) -> None:
        self._coming[name] = self._pool.submit(self._reading.read, folder)

    def drop(self, name: str) -> Callable[[], None]:
        """No plan will name it. What is returned lets go of it, behind those that do: it may be read again before."""
        self._coming.pop(name, None)
        return partial(self._let_go, name, self._held.get(name))

    def _let_go(self, name: str, held: HostAdapter | None) -> None:
        if self._held.get(name) is held:
            self._held.pop(name, None)
        if self._reading.pinned and held is not None:
            self._pool.submit(_outlive_copies, held)

    def outcomes(self, wait: float) -> list[AdapterOutcome]:
        """Of those that have come, or could not, since. ``wait``: seconds that the first may be waited for."""
        if wait and self._coming:
            wait_for(self._coming.values(), wait, FIRST_COMPLETED)
        return [self._outcome(name) for name, each in list(self._coming.items()) if each.done()]

    def _outcome(self, name: str) -> AdapterOutcome:
        try:
            self._held[name] = self._coming.pop(name).result()
        except HeadraceError as error:
            return AdapterOutcome(name, error.message)
        except Exception as error:  # whatever is wrong with it, it is this adapter's failure
            _log.exception("adapter %s could not be read", name)
            return AdapterOutcome(name, f"adapter {name} could not be read: {type(error).__name__}: {error}")
        return AdapterOutcome(name, blocks=self._held[name].num_blocks)

    def bring(self, adapters: Iterable[tuple[int, str, tuple[int, ...]]]) -> bool:
        """Whether captured steps with adapters are not what they were."""
        return any([self.slots.bring(slot, self._held[name], blocks) for slot, name, blocks in adapters])

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
