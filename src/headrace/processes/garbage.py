"""Control of the garbage collector: which objects it can skip (everything that a process holds once it has started),
when it need not run, and what only it gives back.

What lives here: these calls. What may not: who makes them.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_LATELY, _EVERYTHING = 256, 8192  # turns


def freeze_start() -> None:
    """From now on, only objects created later are scanned.

    The last call tells the collector that there are no old objects: it scans all of its objects when those not scanned
    since amount to a quarter of them, and would otherwise keep counting the frozen ones.
    """
    gc.collect()
    gc.freeze()
    gc.collect()


def collect_frozen() -> None:
    """Of what was frozen, all that has been dropped since is freed."""
    frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    gc.collect()
    if frozen:
        gc.freeze()
        gc.collect()


def freeze_again() -> None:
    """What has come since, where what was there before is frozen."""
    if gc.get_freeze_count():
        freeze_start()


@contextmanager
def no_collections() -> Iterator[None]:
    """For periods in which many objects are created and none are dropped. A collection would scan everything that a
    process holds, which takes tens of milliseconds with torch in it, and find nothing.

    If the caller has switched collections off, they stay off. If two threads are here at once, collections are on again
    when the first one leaves.

    New objects are scanned at the end: otherwise the first object created afterwards would trigger that, and often a
    collection of everything, before the waiting caller gets the result.
    """
    were_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if were_on:
            if gc.get_count()[0] > gc.get_threshold()[0] > 0:
                gc.collect(0)
            gc.enable()


def collect_now_and_then(turn: int) -> None:
    """For a long call without collections (see above), once per iteration: recent objects are scanned in every 256th,
    which takes less than a millisecond, and everything in every 8,192nd."""
    if turn % _LATELY == 0:
        gc.collect(1 if turn % _EVERYTHING else 2)


def empty_free_lists() -> None:
    """Returns memory that the interpreter keeps for freed objects: up to 2000 tuples of each length, which only a full
    collection releases.

    A process that produces almost no garbage never has one by itself, and for an hour the growth looks like a leak.
    """
    gc.collect()
