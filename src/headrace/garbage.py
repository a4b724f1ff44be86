"""What the garbage collector need not look at: everything that a process holds once it has started.

What lives here: that one call. What may not: collecting at times of our own choosing.
"""

from __future__ import annotations

import gc


def freeze_start() -> None:
    """From now on only what is made later is looked through.

    The last call teaches the collector that nothing of it is old: it looks through all of its objects when those that have not
    been looked at since are a quarter of them, and would go on counting the frozen ones.
    """
    gc.collect()
    gc.freeze()
    gc.collect()
