"""Prices of this engine's steps on a device, from runs of it: ``headrace simulate --calibrate RUN``.

    what                      from which steps
    slownesses, a step's      those whose time is the device's own: not those that waited for launches
    launches                  those that the device had ended as soon as the last kernel was launched
    the host                  those that came right after another: the time between two, less what the device or
    launching took

What a front end adds to a first token (parsing, sockets, streaming) is fitted to a run that is known from inside, by
its trace, and from outside, by what ``headrace bench serve`` saw: of requests that came to an idle engine and whose
prompt was one step, what the client waited beyond that step. Two numbers, a request's and a prompt token's, with least
absolute errors. (Other requests wait for other steps, too, and say less.)

What lives here: from recorded runs to calibrated steps, and to what is said of them. What may not: reading traces
(runs.py), the fit of steps (step_fit.py), simulating.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from statistics import median

import numpy as np

from headrace.cost.calibrated import CalibratedSteps, Covered, FittedRun, Parameter, Steadiness, same_device
from headrace.cost.cost_model import CostModel, Work
from headrace.cost.prices import FrontPrices, HostPrices
from headrace.cost.run_facts import RunFacts, shape_of
from headrace.cost.shapes import multiplications
from headrace.errors import ConfigError
from headrace.planner.against import read_samples
from headrace.planner.devices import Device, classes_of
from headrace.planner.least_squares import least_absolute
from headrace.planner.runs import RecordedRun, RecordedStep
from headrace.planner.steadiness import fit_steadiness
from headrace.planner.step_fit import LEAST_STEPS, Observed, fit_steps
from headrace.planner.workload.statistics import Sample

WorkOf = Callable[[RecordedStep], Work]
LAUNCHED_LATE = 1e-3  # s: a step that ends so soon after its last launch may have waited for it
LEAST_LIMIT = 0.95  # on a card nothing is quicker than its limits, which were measured to a few parts in a hundred
LEAST_IDLE = 5  # steps that an idle device began with
_HOST_FLOOR = 2e-5  # s: differences below are all alike


def calibrate(
    runs: Sequence[RecordedRun], device: Device, cost_model: CostModel, works: Sequence[WorkOf] = ()
) -> CalibratedSteps:
    """``cost_model``: of the runs' model, at the device's limits. ``works``: of each run, what its steps amount to where
    that is known better than by their load. Raises ConfigError where the runs are not of it, or say too little."""
    facts = runs[0].facts
    for run in runs:
        _check_same(run, facts, device, cost_model)
    steps = [step for run in runs for step in run.steps]
    if len(steps) < LEAST_STEPS:
        raise ConfigError(
            f"{_names(runs)} has {len(steps)} whole steps, and at least {LEAST_STEPS} are needed; let the engine run longer."
        )
    own = [step for step in steps if not _waits_for_launches(step, facts)]
    if len(own) < LEAST_STEPS:
        raise ConfigError(
            f"Of the {len(steps)} steps of {_names(runs)} only {len(own)} were not waiting for launches, and at least {LEAST_STEPS} are needed: "
            f"this device is hardly busy with this model. Give it longer prompts or more sequences at once."
        )
    works = works or [lambda step: cost_model.work(step.load)] * len(runs)
    work_of = {id(step): work for run, work in zip(runs, works, strict=True) for step in run.steps}
    return _fitted(runs, steps, own, device, cost_model, [_observed(step, work_of[id(step)]) for step in own])


def _fitted(
    runs: Sequence[RecordedRun],
    steps: Sequence[RecordedStep],
    own: Sequence[RecordedStep],
    device: Device,
    cost_model: CostModel,
    observed: Sequence[Observed],
) -> CalibratedSteps:
    facts, profile = runs[0].facts, device.profile
    bandwidth, rate = profile.read_bandwidth, profile.gemm_rate(facts.dtype)
    eager = bool(facts.switches.get("enforce_eager"))
    classes = classes_of(device.kind, eager=eager, products=multiplications(cost_model.spec))
    assumed = device.efficiency.prices(0, classes=classes)
    found = fit_steps(
        observed, assumed, bandwidth=bandwidth, rate=rate, least=0.0 if device.kind == "cpu" else LEAST_LIMIT
    )
    host, host_parameters = fit_host(runs, steps)
    return CalibratedSteps(
        device=facts.device,
        model=facts.model,
        shape=facts.shape,
        dtype=facts.dtype,
        switches=dict(facts.switches),
        bandwidth=bandwidth,
        rate=rate,
        prices=replace(found.prices, host=host),
        front=None,
        parameters=(*found.parameters, *host_parameters),
        covered=_covered(steps),
        runs=tuple(FittedRun(run.sha256, run.name, len(run.steps)) for run in runs),
        median_error=found.median_error,
        p90_error=found.p90_error,
        steps=len(own),
        date=datetime.now(UTC).strftime("%Y-%m-%d"),
        version=facts.engine,
        steadiness=_steadiness(runs, own, found.ratios),
    )


def _steadiness(runs: Sequence[RecordedRun], own: Sequence[RecordedStep], ratios: Sequence[float]) -> Steadiness | None:
    of = dict(zip(map(id, own), ratios, strict=True))
    fitted = [[step for step in run.steps if id(step) in of] for run in runs]
    times = [np.array([step.scheduled for step in steps]) for steps in fitted]
    found = [np.array([of[id(step)] for step in steps]) for steps in fitted]
    return fit_steadiness(times, found, [np.array([step.decode for step in steps]) for steps in fitted])


def _observed(step: RecordedStep, work: WorkOf) -> Observed:
    return Observed(step.load, work(step), step.decode, step.seconds, pause=step.pause, since=step.since)


def _check_same(run: RecordedRun, first: RunFacts, device: Device, cost_model: CostModel) -> None:
    facts, shape = run.facts, shape_of(cost_model.spec)
    if not same_device(device.profile.identity, facts.device):
        measured = _described(facts)
        asked = f"{device.profile.identity.name} with {device.profile.identity.threads} threads"
        raise ConfigError(
            f"The run {run.name} is of {measured}, but --device is {asked}; name the device that the run was measured on."
        )
    if facts.shape != shape or facts.dtype != cost_model.dtype:
        raise ConfigError(
            f"The run {run.name} is of another model: {facts.shape}, {facts.dtype}; --model is {shape}, {cost_model.dtype}. "
            f"Name the model that the run was measured with."
        )
    if (facts.overlap, dict(facts.switches)) != (first.overlap, dict(first.switches)):
        raise ConfigError(
            f"The run {run.name} was measured with overlap {facts.overlap} and {dict(facts.switches) or 'no switches'}, the first one with overlap "
            f"{first.overlap} and {dict(first.switches) or 'no switches'}; calibrate each by itself."
        )


def _described(facts: RunFacts) -> str:
    return f"{facts.device.name} with {facts.device.threads} threads"


def _names(runs: Sequence[RecordedRun]) -> str:
    return " and ".join(run.name for run in runs)


def _covered(steps: Sequence[RecordedStep]) -> Covered:
    return Covered(
        max(step.load.tokens for step in steps), max(step.rows for step in steps), max(step.longest for step in steps)
    )


# --- launches and the host


def _launched(step: RecordedStep, facts: RunFacts) -> bool:
    """Kernel by kernel, beside the device: neither replayed as a graph nor computed by the submitting thread."""
    return facts.device.kind != "cpu" and (
        bool(facts.switches.get("enforce_eager")) or not (step.decode or step.load.graphed)
    )


def _waits_for_launches(step: RecordedStep, facts: RunFacts) -> bool:
    return _launched(step, facts) and step.ended < step.queued + LAUNCHED_LATE


def fit_host(runs: Sequence[RecordedRun], steps: Sequence[RecordedStep]) -> tuple[HostPrices, tuple[Parameter, ...]]:
    """Seconds a step, a sequence, a new sequence and its tokens, by least absolute errors; and of launching a step
    kernel by kernel."""
    rows = [[1.0, step.rows, step.added, step.added_tokens, seconds] for run in runs for step, seconds in _between(run)]
    values, errors, count = (
        _least_absolute(np.array(rows)) if len(rows) >= LEAST_STEPS else (np.zeros(4), np.zeros(4), 0)
    )
    launch, spread, launched = _launch_seconds(
        [step for step in steps if _launched(step, runs[0].facts) and not step.recorded]
    )
    note = "" if count else f"fewer than {LEAST_STEPS} steps came right after another; taken to be nothing"
    names = ("a step", "a sequence", "a new sequence", "a token of one")
    named = tuple(f"the host, {name}, seconds" for name in names)
    parameters = [
        Parameter(name, float(value), float(error), count, note)
        for name, value, error in zip(named, values, errors, strict=True)
    ]
    none = "" if launched else "no step was launched kernel by kernel beside the device; taken to be nothing"
    parameters.append(Parameter("launching a step, seconds", launch, spread, launched, none))
    decode = [step for step in steps if step.decode]
    plain = [step for step in steps if not (step.recorded or step.decode or step.load.graphed)]
    record, times = _longer([step for step in steps if step.recorded], plain)  # behind a step that was launched
    graphed, replayed = _longer([step for step in steps if step.load.graphed], decode)
    none = "" if replayed else "no graph computed a step with prompts; taken to be nothing"
    parameters.append(Parameter("handing over a graph with prompts, seconds", graphed, 0.0, replayed, none))
    none = "" if times else "no step was recorded; taken to be nothing"
    parameters.append(Parameter("recording a graph, seconds", record, 0.0, times, none))
    step, row, added, token = (float(each) for each in values)
    host = HostPrices(step, row, added, token, launch, record, graphed)
    if not runs[0].facts.inline:
        behind, graph_behind = behind_of(host, decode, [step for step in steps if step.load.graphed])
        host = replace(host, behind=behind, graph_behind=graph_behind)
    return host, tuple(parameters)


def behind_of(host: HostPrices, decode: Sequence[RecordedStep], graphed: Sequence[RecordedStep]) -> tuple[float, float]:
    """Of a step's and of a graph's seconds, those that pass once the device could begin: a step's, once it is handed
    over; a graph's, once an idle device has begun."""
    if not decode:
        return 0.0, 0.0
    handed_over = median(step.queued - step.scheduled for step in decode)
    idle = [step for step in graphed if not step.continuous]
    if len(idle) < LEAST_IDLE:
        return max(0.0, host.step - handed_over), 0.0
    begun = [
        step.ended - step.seconds - step.scheduled - host.added * step.added - host.token * step.added_tokens
        for step in idle
    ]
    return max(0.0, host.step - handed_over), max(0.0, host.graphed - (median(begun) - handed_over))


def _between(run: RecordedRun) -> list[tuple[RecordedStep, float]]:
    """Each step with the seconds that the host worked from its scheduling to that of the next, where there was work all
    the time."""
    waits = [(step.step_id, step.waited) for step in run.steps]
    depth = run.facts.overlap
    collected = dict(waits)
    found = []
    for step, following in pairwise(run.steps):
        if following.step_id != step.step_id + 1 or not following.continuous:
            continue
        taken = collected.get(step.step_id - depth, 0.0)
        taken += step.seconds if run.facts.inline else 0.0
        taken += step.queued - step.submitted if _launched(step, run.facts) or step.load.graphed else 0.0
        found.append((step, max(0.0, following.scheduled - step.scheduled - taken)))
    return found


def _least_absolute(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
    design, target = rows[:, :-1], rows[:, -1]
    values = least_absolute(design, target, floor=_HOST_FLOOR)
    spread = float(np.median(np.abs(design @ values - target))) / 0.6745
    inverse = np.linalg.pinv(design.T @ design)
    return values, np.sqrt(np.maximum(np.diag(inverse), 0.0)) * spread, len(target)


def _longer(steps: Sequence[RecordedStep], than: Sequence[RecordedStep]) -> tuple[float, int]:
    """By how much, in the middle, handing over such steps takes longer than others; and how many there are."""
    taken, plain = ([step.queued - step.submitted for step in each] for each in (steps, than))
    return max(0.0, median(taken) - (median(plain) if plain else 0.0)) if taken else 0.0, len(taken)


def _launch_seconds(steps: Sequence[RecordedStep]) -> tuple[float, float, int]:
    """The lower quartile of what handing over takes, for half of what a load of all sizes launches is launched for the
    first time, which takes twice as long and does not come again; how far half of them lie from that; and how many they
    are."""
    if not steps:
        return 0.0, 0.0, 0
    taken = [step.queued - step.submitted for step in steps]
    found = float(np.percentile(taken, 25))
    return found, median(abs(each - found) for each in taken), len(taken)


LEAST_REQUESTS = 5
MOST_CACHED = 0.05  # of the prompt tokens: what was found in a cache cannot be told from lengths
_FLOOR = 1e-4  # s: differences below are all alike


def fit_front(paths: Sequence[Path], found: CalibratedSteps, run: RecordedRun) -> CalibratedSteps:
    """``found`` with the front end's prices, the files among its runs. ``run``: the trace of the same run. Raises
    ConfigError."""
    late, files = [], []
    for path in paths:
        sha256, seen = _late(path, run)
        files.append(FittedRun(sha256, path.name, len(seen)))
        late += seen
    if len(late) < LEAST_REQUESTS:
        raise ConfigError(
            f"Of the requests of --front-of {', '.join(map(str, paths))} only {len(late)} came to an idle engine with a prompt that was one step, "
            f"and at least {LEAST_REQUESTS} are needed; send some one by one: headrace bench serve --max-concurrency 1."
        )
    return replace(found, front=front_of(*map(list, zip(*late, strict=True))), runs=(*found.runs, *files))


def _late(path: Path, run: RecordedRun) -> tuple[str, list[tuple[int, float]]]:
    """The file's hash; of each request that came to an idle engine its prompt tokens, and the seconds that its client
    waited beyond the step."""
    ordered = sorted(_requests(path), key=lambda each: each.sent)
    steps = _steps_of(path, run, [each.prompt_tokens for each in ordered])
    late = [
        (each.prompt_tokens, each.ttft - (step.collected - step.scheduled))
        for each, step in zip(ordered, steps, strict=True)
        if step is not None and each.arrivals
    ]
    return hashlib.sha256(path.read_bytes()).hexdigest(), late


def _steps_of(path: Path, run: RecordedRun, prompts: Sequence[int]) -> list[RecordedStep | None]:
    """The step of each prompt, where nothing else was going on; prompts are found in the trace by their lengths, in
    order."""
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
    return [
        step if step is not None and _alone(step, prompt) else None for step, prompt in zip(found, prompts, strict=True)
    ]


def _alone(step: RecordedStep, prompt: int) -> bool:
    return not step.continuous and step.rows == 1 and step.load.tokens == prompt and step.load.sampled == 1


def front_of(prompts: list[int], late: list[float]) -> FrontPrices:
    """late ≈ request + token · prompt, neither negative."""
    design = np.stack([np.ones(len(prompts)), np.array(prompts, dtype=np.float64)], axis=1)
    if max(prompts) == min(prompts):  # nothing tells the two apart
        design = design[:, :1]
    values = least_absolute(design, np.array(late), floor=_FLOOR)
    return FrontPrices(float(values[0]), float(values[1]) if len(values) > 1 else 0.0)


def _requests(path: Path) -> list[Sample]:
    """Those that were answered."""
    answered = [each for each in read_samples(path) if each.error is None and each.prompt_tokens]
    for each in answered:
        _check(path, each)
    good = [each for each in answered if each.arrivals]
    if len(good) < LEAST_REQUESTS:
        raise ConfigError(
            f"--front-of {path} has {len(good)} requests with an answer, and at least {LEAST_REQUESTS} are needed; give what headrace bench serve "
            f"--output-json wrote of the same run."
        )
    cached, total = sum(each.cached_tokens for each in good), sum(each.prompt_tokens for each in good)
    if cached > MOST_CACHED * total:
        raise ConfigError(
            f"--front-of {path}: {cached / total:.0%} of its prompt tokens came from the cache; take a run of random prompts."
        )
    return answered


def _check(path: Path, each: Sample) -> None:
    times = [each.sent, *each.arrivals]
    if not all(0 <= time < math.inf for time in times) or any(gap < 0 for gap in each.gaps) or each.prompt_tokens < 1:
        raise ConfigError(
            f"--front-of {path} has a request sent at {each.sent:g} s with tokens at {', '.join(f'{time:g}' for time in each.arrivals[:3])} …, "
            f"which cannot have happened; measure it again."
        )
