"""What the engine's device uses, by the device's own counters: the driver's of a card, Linux' powercap (RAPL) of a
CPU's packages.

What lives here: finding the counter, reading it from a beginning on. What may not: who shows it (observe/metrics.py).

A counter knows nothing of processes: whoever else uses the device is counted, too.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Protocol

import torch

from headrace.observe.metrics import Energy
from headrace.worker.driver import find_counter

_log = logging.getLogger(__name__)
_POWERCAP = Path("/sys/class/powercap")
_PERIOD = 0.25  # seconds between two readings; a card's driver moves its counter some ten times a second
# RuntimeError: what torch raises of a card; AttributeError: a driver's library too old to have the function.
_UNREADABLE = (OSError, ValueError, AttributeError, RuntimeError)


class Counter(Protocol):
    def joules(self) -> float:
        """From any beginning on. Less than before: it has begun anew."""


class EnergyMeter:
    """Joules since the counter was found. A driver takes its time, for opening its library and for every answer, and no
    start and no step waits for that: a thread asks, as long as this object is held. A counter that fails is
    asked no more, and stands still, with a word in the log.
    """

    def __init__(self, find: Callable[[], Counter | None]) -> None:
        self._last: Energy | None = None
        self._counter: Counter | None = None
        self._counted = self._begin = 0.0
        self._lock = Lock()
        self._looked = Event()  # for the counter
        self._thread = Thread(target=_watch, args=(weakref.ref(self), find, self._looked), name="energy", daemon=True)
        self._thread.start()

    def read(self) -> Energy | None:
        """As it was a moment ago; None where nothing counts, and until the counter is found. Returns at once."""
        return self._last

    def joules(self) -> float | None:
        """As it is now: some milliseconds."""
        self._looked.wait()
        self._look()
        return self._last.joules if self._last is not None else None

    def _start(self, counter: Counter, counted: float) -> None:
        self._counted, self._begin, self._counter = counted, time.perf_counter(), counter
        self._look()

    def _look(self) -> bool:
        """Whether it counts on."""
        with self._lock:
            if self._counter is None:
                return False
            try:
                counted, now = self._counter.joules(), time.perf_counter()
            except _UNREADABLE as error:
                _log.warning("the device's energy is counted no further: %s", error)
                self._counter = None
                return False
            before = self._last.joules if self._last is not None else 0.0
            self._last = Energy(before + max(0.0, counted - self._counted), now - self._begin)
            self._counted = counted
            return True


def _watch(meter: weakref.ref[EnergyMeter], find: Callable[[], Counter | None], looked: Event) -> None:
    try:
        counter = find()
        counted = counter.joules() if counter is not None else 0.0
        if counter is not None and (held := meter()) is not None:
            held._start(counter, counted)
            del held
    except _UNREADABLE:
        return  # nothing counts here, or this user may not read it: then there is no figure
    finally:
        looked.set()  # whatever happened: it may be waited for
    while (held := meter()) is not None and held._look():
        del held
        time.sleep(_PERIOD)


class PackageCounters:
    """The packages of a CPU, in joules. Each counts microjoules up to its range, the smallest of which lasts for
    minutes, and begins anew."""

    def __init__(self, folder: Path = _POWERCAP) -> None:
        """Raises OSError or ValueError where there is none, or none that may be read."""
        packages = [
            each for each in sorted(folder.glob("intel-rapl:*")) if (each / "name").read_text().startswith("package")
        ]
        if not packages:
            raise OSError(f"{folder} has no package")
        self._counters = [each / "energy_uj" for each in packages]
        self._ranges = [int((each / "max_energy_range_uj").read_text()) for each in packages]
        self._last = self._now()
        self._sum = 0

    def _now(self) -> list[int]:
        return [int(each.read_text()) for each in self._counters]

    def joules(self) -> float:
        """Since it was made. Raises OSError, ValueError."""
        now = self._now()
        self._sum += sum(map(_grown, self._last, now, self._ranges))
        self._last = now
        return self._sum / 1e6


def _grown(before: int, now: int, most: int) -> int:
    """Between two readings a counter goes through a small part of its range; more than half of it says that it was set
    to zero meanwhile."""
    grown = now - before if now >= before else now - before + most
    return grown if grown <= most // 2 else now


class CardCounters:
    """Those of several cards."""

    def __init__(self, uuids: Sequence[str]) -> None:
        """Raises OSError or AttributeError where one of them does not count."""
        found = [find_counter(uuid) for uuid in uuids]
        self._counters = [each for each in found if each is not None]
        if len(self._counters) < len(uuids):
            raise OSError(f"{len(self._counters)} of {len(uuids)} cards were found")

    def joules(self) -> float:
        return sum(each.joules() for each in self._counters)


def create_energy_meter(device: str, ranks: int = 1) -> EnergyMeter:
    """Of the device ("cpu" or "cuda") that an engine would choose in this thread now; of ``ranks``, all of theirs, or none
    where this process does not see them all (other hosts', Ray's)."""
    try:
        if device != "cuda":
            return EnergyMeter(PackageCounters)
        first = torch.cuda.current_device()
        if ranks > 1 and first + ranks > torch.cuda.device_count():
            return EnergyMeter(lambda: None)
        return EnergyMeter(partial(CardCounters, [_uuid(first + rank) for rank in range(ranks)]))
    except _UNREADABLE:
        return EnergyMeter(lambda: None)


def power_limit(device: str) -> float | None:
    """Watts that the card may draw; None for a CPU, and where the driver does not say."""
    try:
        counter = find_counter(_uuid(torch.cuda.current_device())) if device == "cuda" else None
        return counter.power_limit() if counter is not None else None
    except _UNREADABLE:
        return None


def _uuid(device: int) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)
