"""What the garbage collector need not look at (everything that a process holds once it has started), when it need not
look, and what only it gives back.

What lives here: these calls. What may not: who makes them.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_LATELY, _EVERYTHING = 256, 8192  # turns


def freeze_start() -> None:
    """From now on only what is made later is looked through.

    The last call teaches the collector that nothing of it is old: it looks through all of its objects when those that
    have not been looked at since are a quarter of them, and would go on counting the frozen ones.
    """
    gc.collect()
    gc.freeze()
    gc.collect()


@contextmanager
def no_collections() -> Iterator[None]:
    """For moments in which much is made and nothing is dropped. A collection then looks through all that a process
    holds, which takes tens of milliseconds with torch in it, and finds nothing.

    Who has switched collections off keeps them off. Where two threads are here at once, they are on again when the
    first one leaves.

    What was made meanwhile is looked through at the end: else the first object made afterwards would begin that, and
    often a collection of everything, before who waits for what is done has it.
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
    """For a long call without collections (see above), once a turn: what was made lately is looked through in every
    256th, which takes less than a millisecond, and everything in every 8,192nd."""
    if turn % _LATELY == 0:
        gc.collect(1 if turn % _EVERYTHING else 2)


def empty_free_lists() -> None:
    """Gives back what the interpreter keeps of freed objects: up to 2000 tuples of each length, which only a full
    collection lets go.

    A process that leaves next to no garbage has none of its own accord, and what gathers looks like a leak for an hour.
    """
    gc.collect()
