"""``python -m lab startup``: ``headrace bench startup``, and when each start was ready, so that nothing is built or
recorded any more where it would be waited for.

What lives here: that child. What may not: starts (bench/startup.py).
"""

from __future__ import annotations

import argparse

from headrace.bench import startup


def run(args: argparse.Namespace) -> int:
    return startup.run(args, "lab.startup_child")
