"""Load curves: one workload at several rates, under several configurations, each point a simulation of its own.

Points are independent, so they are run side by side in processes; which of them runs where changes no figure.

What lives here: trials, running them, the columns of a curve. What may not: flags and printing
(commands/simulate_curve.py), one simulation (simulator.py).
"""

from __future__ import annotations

import math
import multiprocessing
import signal
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

from headrace.config import EngineConfig
from headrace.errors import ConfigError
from headrace.planner.devices import Device
from headrace.planner.simulator import Load, simulate
from headrace.spec import DecoderSpec


@dataclass(frozen=True, slots=True)
class Trial:
    """One point to run. ``name`` says which configuration, ``rate`` how many requests a second ``load`` offers (None:
    as many as it says itself)."""

    name: str
    rate: float | None
    spec: DecoderSpec
    config: EngineConfig
    device: Device
    load: Load


@dataclass(frozen=True, slots=True)
class Point:
    """A trial's figures, and what its prices are and how far they reach."""

    name: str
    rate: float | None
    figures: Mapping[str, Any]
    prices: Mapping[str, Any]

    def row(self) -> dict[str, Any]:
        return {"configuration": self.name, "offered_rate": self.rate, **self.figures, "prices": self.prices}


def run_trial(trial: Trial) -> Point:
    report = simulate(trial.spec, trial.config, trial.device, trial.load)
    return Point(trial.name, trial.rate, report.figures, report.facts)


def run_trials(trials: Sequence[Trial], processes: int) -> Iterator[Point]:
    """Points in the order of their trials, each as soon as it and those before it are there. Raises ConfigError."""
    if processes <= 1 or len(trials) <= 1:
        yield from map(run_trial, trials)
        return
    fresh = multiprocessing.get_context("spawn")  # a fork would inherit the threads of whatever was loaded here
    quiet = signal.SIGINT, signal.SIG_DFL  # Ctrl-C ends them without a word; their parent tells what there is
    with ProcessPoolExecutor(
        min(processes, len(trials)), mp_context=fresh, initializer=signal.signal, initargs=quiet
    ) as pool:
        yield from pool.map(run_trial, trials)


def check_rates(rates: Sequence[float]) -> None:
    """Raises ConfigError."""
    wrong = [rate for rate in rates if not 0 < rate < math.inf]
    if wrong:
        raise ConfigError(f"--sweep-rate has {wrong[0]:g}; give finite numbers of requests a second above 0.")
    if len(set(rates)) < len(rates):
        raise ConfigError(
            f"--sweep-rate has {len(rates)} rates and only {len(set(rates))} different ones; give each once."
        )


def curve_columns(figures: Mapping[str, Any], percentile: float, more: Sequence[str]) -> list[str]:
    """Names of the figures that a curve is shown by, as far as the runs have them. Raises ConfigError for wanted ones
    that they have not."""
    unknown = [name for name in more if name not in figures]
    if unknown:
        raise ConfigError(f"--columns has {unknown[0]!r}, which a run has not; its figures are: {', '.join(figures)}.")
    spreads = [f"{which}_{name}_ms" for name in ("ttft", "tpot", "itl") for which in ("median", f"p{percentile:g}")]
    usual = ["request_throughput", "output_throughput", "request_goodput", *spreads, "preemptions", "failed"]
    return [name for name in dict.fromkeys([*usual, *more]) if name in figures]
