"""What a front end computes for requests, tokens and messages, from results of loads of many kinds.

What lives here: that fit. What may not: a front end's seconds before a first token (planner/calibrate.py), running loads.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from headrace.cost.prices import FrontWork
from headrace.planner.least_squares import least_absolute

_FLOOR = 1e-4  # s: differences below are all alike


def front_work(loads: Sequence[Path]) -> FrontWork | None:
    """seconds ≈ the sum of FrontWork's prices, each times how often it was due, none negative; None where no more
    results than there are prices say how long the front end computed. Tokens that a client saw at one time were one
    message."""
    rows = [json.loads(path.read_bytes()) for path in loads]
    rows = [row for row in rows if row.get("front_cpu_seconds")]
    if len(rows) <= len(fields(FrontWork)):
        return None
    design = np.array([_dues(row) for row in rows], dtype=np.float64)
    values = least_absolute(design, np.array([row["front_cpu_seconds"] for row in rows]), floor=_FLOOR)
    return FrontWork(*map(float, values[:-1]))


def _dues(row: Mapping[str, Any]) -> tuple[float, ...]:
    """How often each of FrontWork's prices was due, in its order; and once what a load costs besides: its connections,
    and being asked how long the front end computed."""
    messages = sum(len(set(each["arrivals"])) for each in row["requests"])
    return row["completed"], row["total_input_tokens"], row["total_output_tokens"], messages, row["steps"], 1.0
