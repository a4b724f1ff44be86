"""How compute threads wait for one another: briefly awake, then asleep.

GNU OpenMP's default is to spin for milliseconds at every barrier. With more runnable threads than cores (a server's front end
beside its engine, a benchmark's client, a busy laptop) the spinning thread burns the very core that the one it waits for needs,
and a step takes many times as long (the bundled model's decode on two busy cores: 5 to 44 tokens/s, about 200 with threads that sleep).

What lives here: that one setting. What may not: torch; it must be set before torch loads its OpenMP library.
"""

from __future__ import annotations

import os

SPIN_COUNT = "1000"  # iterations, a few microseconds: longer than a balanced barrier takes, far shorter than a time slice


def limit_spinning() -> None:
    """Sets GOMP_SPINCOUNT unless the user has said how threads wait. Too late, and harmless, once torch is imported."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
