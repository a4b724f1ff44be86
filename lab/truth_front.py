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

HANDED_ON = "handed_on_seconds"  # of a front end's CPU, until a stopped engine had all requests
_FLOOR = 1e-4  # s: differences below are all alike


def front_work(loads: Sequence[Path]) -> FrontWork | None:
    """seconds ≈ the sum of FrontWork's prices, each times how often it was due, none negative; None where no more
    results than there are prices say how long the front end computed. What it computes of a request before the engine
    has it, and what once it has ended, is told apart by loads whose engine was stopped meanwhile; without one all of it
    is before."""
    rows = [json.loads(path.read_bytes()) for path in loads]
    rows = [row for row in rows if row.get("front_cpu_seconds")]
    if len(rows) < len(fields(FrontWork)):
        return None
    stopped = [row for row in rows if row.get(HANDED_ON)]
    design = [(*_dues(row), float(bool(stopped)) * row["completed"], 1.0) for row in rows]
    design += [(row["completed"], row["total_input_tokens"], *[0.0] * (len(design[0]) - 2)) for row in stopped]
    seconds = [row["front_cpu_seconds"] for row in rows] + [row[HANDED_ON] for row in stopped]
    values = least_absolute(np.array(design, dtype=np.float64), np.array(seconds), floor=_FLOOR)
    return FrontWork(*map(float, values[:-1]))


def _dues(row: Mapping[str, Any]) -> tuple[float, ...]:
    """How often FrontWork's prices were due, in its order, up to that of a step; ``front_work`` adds the ends, and
    once what a load costs besides: its connections, and being asked how long the front end computed. Tokens that a
    client saw at one time were one message."""
    messages = sum(len(set(each["arrivals"])) for each in row["requests"])
    return row["completed"], row["total_input_tokens"], row["total_output_tokens"], messages, row["steps"]
