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
    """Joules from a beginning on. The counter is looked for in a thread of its own, since a driver's library takes its time to open and no
    start waits for it; the beginning is when it was found. A counter that fails later on stands still, with a word in the log.
    """

    def __init__(self, find: Callable[[], Counter | None]) -> None:
        self._counter: Counter | None = None
        self._begin = self._last = 0.0
        self._failed = False
        self._search = Thread(target=self._look, args=(find,), name="energy", daemon=True)
        self._search.start()

    def _look(self, find: Callable[[], Counter | None]) -> None:
        try:
            counter = find()
            self._begin = self._last = counter.joules() if counter is not None else 0.0
            self._counter = counter
        except _UNREADABLE:
            pass  # nothing counts here, or this user may not read it: then there is no figure

    def joules(self) -> float | None:
        """None where nothing counts, and until the counter is found."""
        if self._counter is None:
            return None
        try:
            self._last = max(self._last, self._counter.joules())
        except _UNREADABLE as error:
            if not self._failed:
                _log.warning("the device's energy is counted no further: %s", error)
            self._failed = True
        return self._last - self._begin

    def wait(self, seconds: float) -> None:
        """Until the counter was found, or not."""
        self._search.join(seconds)


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
