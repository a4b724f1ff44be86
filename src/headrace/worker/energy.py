"""What the engine's device uses, by the device's own counters: the driver's of a card, Linux' powercap (RAPL) of a CPU's packages.

What lives here: finding the counter, reading it from a beginning on. What may not: who shows it (metrics.py, bench/table.py).

A counter knows nothing of processes: whoever else uses the device is counted, too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Protocol

import torch

from headrace.worker.driver import CardCounter, find_counter

_log = logging.getLogger(__name__)
_POWERCAP = Path("/sys/class/powercap")
_UNREADABLE = (OSError, ValueError, AttributeError)  # AttributeError: a library too old to have the function


class Counter(Protocol):
    def joules(self) -> float:
        """From any beginning on; never less than before."""


class EnergyMeter:
    """Joules from a beginning on, which is when the counter was found. A driver takes its time, for opening its library and for every answer,
    and no start and no step waits for that: it is asked in threads of its own. A counter that fails later on stands still, with a word in the
    log.
    """

    def __init__(self, find: Callable[[], Counter | None]) -> None:
        self._counter: Counter | None = None
        self._begin = self._last = 0.0
        self._failed = False
        self._thread = Thread(target=self._search, args=(find,), name="energy", daemon=True)
        self._thread.start()

    def _search(self, find: Callable[[], Counter | None]) -> None:
        try:
            counter = find()
            self._begin = self._last = counter.joules() if counter is not None else 0.0
            self._counter = counter
        except _UNREADABLE:
            pass  # nothing counts here, or this user may not read it: then there is no figure

    def joules(self) -> float | None:
        """As it was when this was asked last; None where nothing counts, and until the counter is found. Returns at once."""
        if self._counter is None:
            return None
        known = self._last - self._begin
        if not self._thread.is_alive():
            self._thread = Thread(target=self._read, args=(self._counter,), name="energy", daemon=True)
            self._thread.start()
        return known

    def now(self) -> float | None:
        """The same, read now: some milliseconds."""
        self._thread.join()
        if self._counter is None:
            return None
        self._read(self._counter)
        return self._last - self._begin

    def _read(self, counter: Counter) -> None:
        try:
            self._last = max(self._last, counter.joules())
        except _UNREADABLE as error:
            if not self._failed:
                _log.warning("the device's energy is counted no further: %s", error)
            self._failed = True


class PackageCounters:
    """The packages of a CPU, in joules. Each counts microjoules up to its range and begins anew: to be read more often than that takes,
    which is a quarter of an hour at the least."""

    def __init__(self, folder: Path = _POWERCAP) -> None:
        """Raises OSError or ValueError where there is none, or none that may be read."""
        packages = [each for each in sorted(folder.glob("intel-rapl:*")) if (each / "name").read_text().startswith("package")]
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
        self._sum += sum((new - old) % most for new, old, most in zip(now, self._last, self._ranges, strict=True))
        self._last = now
        return self._sum / 1e6


def create_energy_meter(device: str) -> EnergyMeter:
    """Of the device ("cpu" or "cuda") that an engine would choose now."""
    return EnergyMeter(_card if device == "cuda" else PackageCounters)


def power_limit(device: str) -> float | None:
    """Watts that the card may draw; None for a CPU, and where the driver does not say."""
    try:
        counter = _card() if device == "cuda" else None
        return counter.power_limit() if counter is not None else None
    except _UNREADABLE:
        return None


def _card() -> CardCounter | None:
    return find_counter(str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid))
