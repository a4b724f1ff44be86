"""What a front end adds to a first token: parsing, sockets, streaming, of which a step knows nothing.

The same run is known from inside, by its trace, and from outside, by what ``headrace bench serve`` saw. Of requests that came to an idle engine
and whose prompt was one step, what the client waited beyond that step is the front end's: two numbers, a request's and a prompt token's, with
least absolute errors. (Other requests wait for other steps, too, and say less.)

What lives here: that fit. What may not: steps (calibrate.py).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from headrace.cost.calibrated import CalibratedSteps, FittedRun
from headrace.cost.nnls import nnls
from headrace.cost.prices import FrontPrices
from headrace.errors import ConfigError
from headrace.planner.runs import RecordedRun, RecordedStep

LEAST_REQUESTS = 5
MOST_CACHED = 0.05  # of the prompt tokens: what was found in a cache cannot be told from lengths
_ROUNDS, _FLOOR = 30, 1e-4  # s


def fit_front(paths: Sequence[Path], found: CalibratedSteps, run: RecordedRun) -> CalibratedSteps:
    """``found`` with the front end's prices, the files among its runs. ``run``: the trace of the same run. Raises ConfigError."""
    late, files = [], []
    for path in paths:
        sha256, seen = _late(path, run)
        files.append(FittedRun(sha256, path.name, len(seen)))
        late += seen
    front = least_absolute([prompt for prompt, _ in late], [seconds for _, seconds in late])
    return replace(found, front=front, runs=(*found.runs, *files))


def _late(path: Path, run: RecordedRun) -> tuple[str, list[tuple[int, float]]]:
    """The file's hash; of each request that came to an idle engine its prompt tokens, and the seconds that its client waited beyond the step."""
    content, requests = _requests(path)
    ordered = sorted(requests, key=lambda each: float(each["sent"]))
    steps = _steps_of(path, run, [each["prompt_tokens"] for each in ordered])
    late = [
        (each["prompt_tokens"], each["arrivals"][0] - each["sent"] - (step.collected - step.scheduled))
        for each, step in zip(ordered, steps, strict=True)
        if step is not None and each["arrivals"]
    ]
    if len(late) < LEAST_REQUESTS:
        raise ConfigError(
            f"Of the {len(ordered)} requests of --front-of {path} only {len(late)} came to an idle engine with a prompt that was one step, and at "
            f"least {LEAST_REQUESTS} are needed; send some one by one: headrace bench serve --max-concurrency 1."
        )
    return hashlib.sha256(content).hexdigest(), late


def _steps_of(path: Path, run: RecordedRun, prompts: Sequence[int]) -> list[RecordedStep | None]:
    """The step of each prompt, where nothing else was going on; prompts are found in the trace by their lengths, in order."""
    lengths = [tokens for _, tokens in run.begun]
    places = range(len(lengths) - len(prompts), -1, -1)
    first = next((place for place in places if lengths[place : place + len(prompts)] == list(prompts)), None)
    if first is None:
        raise ConfigError(
            f"The {len(prompts)} prompts of --front-of {path} are not found in {run.name} in their order of sending: another run, or requests "
            f"overtook each other; send some one by one: headrace bench serve --max-concurrency 1."
        )
    steps = {round(step.scheduled, 6): step for step in run.steps}
    found = [steps.get(round(begin, 6)) for begin, _ in run.begun[first : first + len(prompts)]]
    return [step if step is not None and _alone(step, prompt) else None for step, prompt in zip(found, prompts, strict=True)]


def _alone(step: RecordedStep, prompt: int) -> bool:
    return not step.continuous and step.rows == 1 and step.load.tokens == prompt and step.load.sampled == 1


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
        answered = [each for each in rows if each["error"] is None and each["prompt_tokens"]]
        for each in answered:
            _check(each)
        good = [each for each in answered if each["arrivals"]]
    except (OSError, ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise ConfigError(f"--front-of {path} cannot be read ({type(error).__name__}: {error}); {remedy}.") from error
    if len(good) < LEAST_REQUESTS:
        raise ConfigError(f"--front-of {path} has {len(good)} requests with an answer, and at least {LEAST_REQUESTS} are needed; {remedy}.")
    cached, total = sum(each["cached_tokens"] for each in good), sum(each["prompt_tokens"] for each in good)
    if cached > MOST_CACHED * total:
        raise ConfigError(f"--front-of {path}: {cached / total:.0%} of its prompt tokens came from the cache; take a run of random prompts.")
    return content, answered


def _check(each: Mapping[str, Any]) -> None:
    """Raises ValueError."""
    times = [each["sent"], *each["arrivals"]]
    if not all(math.isfinite(float(time)) and float(time) >= 0 for time in times):
        raise ValueError("a time that is negative or none")
    if any(later < earlier for earlier, later in pairwise(times)):
        raise ValueError("times that go back")
    if int(each["prompt_tokens"]) < 1:
        raise ValueError("a length below 1")
