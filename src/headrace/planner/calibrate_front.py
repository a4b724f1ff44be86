"""What a front end adds to a first token: parsing, sockets, streaming, of which a step knows nothing.

A run that ``headrace bench serve`` saw from outside is simulated from its own requests with calibrated steps alone. What its first tokens
really took longer is fitted by two numbers, a request's and a prompt token's, with least absolute errors.

What lives here: that fit. What may not: steps (calibrate.py).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from headrace.config import EngineConfig
from headrace.cost.calibrated import CalibratedSteps, FittedRun
from headrace.cost.nnls import nnls
from headrace.cost.prices import FrontPrices
from headrace.errors import ConfigError
from headrace.planner.devices import Device
from headrace.planner.simulator import Load, simulate
from headrace.planner.workload import Asked
from headrace.spec import DecoderSpec

LEAST_REQUESTS = 8
MOST_CACHED = 0.05  # of the prompt tokens: what was found in a cache cannot be told from lengths
_ROUNDS, _FLOOR = 30, 1e-4  # s


def fit_front(path: Path, found: CalibratedSteps, spec: DecoderSpec, config: EngineConfig, device: Device) -> CalibratedSteps:
    """``found`` with the front end's prices, the file among its runs. Raises ConfigError."""
    content, requests = _requests(path)
    origin = min(each["sent"] for each in requests)
    ordered = sorted(requests, key=lambda each: float(each["sent"]))
    asked = [Asked(each["prompt_tokens"], each["output_tokens"], each["sent"] - origin) for each in ordered]
    alone = replace(device, calibrated=(replace(found, front=None),))
    simulated = simulate(spec, config, alone, Load(asked, stepwise=True)).samples
    late = [each["arrivals"][0] - each["sent"] - other.ttft for each, other in zip(ordered, simulated, strict=True)]
    front = least_absolute([each.prompt for each in asked], late)
    run = FittedRun(hashlib.sha256(content).hexdigest(), path.name, len(requests))
    return replace(found, front=front, runs=(*found.runs, run))


def least_absolute(prompts: list[int], late: list[float]) -> FrontPrices:
    """late ≈ request + token · prompt, neither negative."""
    design = np.stack([np.ones(len(prompts)), np.array(prompts, dtype=np.float64)], axis=1)
    if max(prompts) == min(prompts):  # nothing tells the two apart
        design = design[:, :1]
    target, weights = np.array(late), np.ones(len(late))
    for _ in range(_ROUNDS):
        values = nnls(design * weights[:, None], target * weights)
        weights = 1.0 / np.sqrt(np.maximum(np.abs(design @ values - target), _FLOOR))
    return FrontPrices(float(values[0]), float(values[1]) if len(values) > 1 else 0.0)


def _requests(path: Path) -> tuple[bytes, list[dict[str, Any]]]:
    remedy = "give what headrace bench serve --output-json wrote of the same run"
    try:
        content = path.read_bytes()
        rows = json.loads(content)["requests"]
        good = [each for each in rows if each["error"] is None and each["arrivals"]]
        for each in good:
            _check(each)
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise ConfigError(f"--front-of {path} cannot be read ({type(error).__name__}: {error}); {remedy}.") from error
    if len(good) < LEAST_REQUESTS:
        raise ConfigError(f"--front-of {path} has {len(good)} requests with an answer, and at least {LEAST_REQUESTS} are needed; {remedy}.")
    cached, total = sum(each["cached_tokens"] for each in good), sum(each["prompt_tokens"] for each in good)
    if cached > MOST_CACHED * total:
        raise ConfigError(f"--front-of {path}: {cached / total:.0%} of its prompt tokens came from the cache; take a run of random prompts.")
    return content, good


def _check(each: Mapping[str, Any]) -> None:
    """Raises ValueError."""
    times = [each["sent"], *each["arrivals"]]
    if not all(math.isfinite(float(time)) and float(time) >= 0 for time in times):
        raise ValueError("a time that is negative or none")
    if any(later < earlier for earlier, later in pairwise(times)):
        raise ValueError("times that go back")
    if int(each["prompt_tokens"]) < 1 or int(each["output_tokens"]) < 1:
        raise ValueError("a length below 1")
