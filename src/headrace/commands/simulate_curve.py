"""``headrace simulate --sweep-rate … --compare …``: a load curve, as a table, JSON and a plot.

What lives here: which configurations are compared, and showing their points. What may not: flags of a load
(simulate_load.py), running points (planner/curve.py).
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from headrace.bench.arguments import declare
from headrace.bench.sweep import Sweep
from headrace.commands.simulate_load import what_is_asked
from headrace.config import EngineConfig, ServerConfig
from headrace.errors import ConfigError
from headrace.flags import WORDS, CommandParser, add_config_flags, technique_values
from headrace.observe.report import load_pyplot, machine_facts, plot_curves, print_facts, table, write_json
from headrace.planner.curve import Point, Trial, curve_columns, run_trials
from headrace.worker.host import physical_cores

AS_GIVEN = "as given"
SHORT = {
    "request_throughput": "requests/s",
    "output_throughput": "tokens/s",
    "request_goodput": "good/s",
    "preemptions": "preempted",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    curve = parser.add_argument_group("load curve")
    declare(curve, "simulate_curve.arguments")


def variants(args: argparse.Namespace) -> Iterator[tuple[str, argparse.Namespace]]:
    """Every combination of compared values: its name, and its arguments. Raises ConfigError."""
    compared = [_values(entry) for entry in args.compare]
    for combination in itertools.product(*compared):
        changed = argparse.Namespace(**{**vars(args), "compare": []})
        for name, value in combination:
            _set(changed, name, value)
        yield ", ".join(f"{name}={value}" for name, value in combination) or AS_GIVEN, changed


def _values(entry: str) -> list[tuple[str, str]]:
    name, equals, text = entry.partition("=")
    values = [value.strip() for value in text.split(",") if value.strip()]
    if not equals or not name.strip() or not values:
        raise ConfigError(
            f"--compare has {entry!r}; write NAME=VALUE,VALUE with a flag or a technique, like scheduling_policy=fcfs,priority."
        )
    return [(name.strip(), value) for value in dict.fromkeys(values)]


def _set(args: argparse.Namespace, name: str, value: str) -> None:
    """As if the flag were on the command line, after all others."""
    if name == "device":
        args.simulated = value
        return
    flag = "--" + name.replace("_", "-")
    parser = CommandParser(prog="headrace simulate", add_help=False)
    add_config_flags(parser, EngineConfig, ServerConfig)
    action = parser.options().get(flag)
    if action is None:
        args.technique = [*getattr(args, "technique", []), _technique(f"{name}={value}")]
        return
    if name == "model":
        args.model_argument = None
    for dest, read in vars(parser.parse_args([_word(flag, value, action)])).items():
        setattr(args, dest, read)


def _technique(entry: str) -> str:
    try:
        technique_values([entry])
    except ConfigError as error:
        raise ConfigError(
            f"--compare {entry}: neither device, nor a flag of headrace serve, nor a technique: {error.message}"
        ) from error
    return entry


def _word(flag: str, value: str, action: argparse.Action) -> str:
    if action.nargs != 0:
        return f"{flag}={value}"
    if value.lower() not in WORDS:
        raise ConfigError(f"--compare {flag.removeprefix('--')}={value}: give on or off.")
    return flag if WORDS[value.lower()] else flag.replace("--", "--no-", 1)


def run_curve(args: argparse.Namespace, trials: Callable[[str, argparse.Namespace], Sequence[Trial]]) -> int:
    """``trials``: one configuration at each rate. Exit status 1 if no request of any point was answered."""
    if args.plot:
        load_pyplot()
    wanted = [trials(name, changed) for name, changed in variants(args)]
    ordered = [trial for same_rate in zip(*wanted, strict=True) for trial in same_rate]  # side by side
    processes = args.processes or physical_cores()[0]
    facts = machine_facts(
        "; ".join(dict.fromkeys(str(trial.device) for trial in ordered)),
        shape=_shape(args, ordered),
        server="simulated",
    )
    print_facts(facts)
    begin = time.perf_counter()
    sweep = Sweep()
    points, columns = _run(ordered, processes, args, sweep)
    _print(points, columns)
    print(f"{len(points)} points in {time.perf_counter() - begin:.1f} s")
    if args.output_json:
        write_json(args.output_json, {"facts": facts, "points": [point.row() for point in points]})
    if args.plot:
        _plot(args.plot, facts, points, columns)
    return sweep.status(0 if any(point.figures["completed"] for point in points) else 1)


def _shape(args: argparse.Namespace, trials: Sequence[Trial]) -> str:
    limits = f"; good: {' '.join(args.goodput)}" if args.goodput else ""
    each = " at each rate" if args.sweep_rate else ""
    return f"{what_is_asked(args, len(trials[0].load.asked))}{each}{limits}"


def _run(
    trials: Sequence[Trial], processes: int, args: argparse.Namespace, sweep: Sweep
) -> tuple[list[Point], list[str]]:
    """All points, and the columns to show. An unknown column is reported with the first point."""
    columns: list[str] = []

    def run() -> Iterator[Point]:
        for point in run_trials(trials, processes):
            columns[:] = columns or curve_columns(point.figures, max(args.metric_percentiles), args.columns)
            yield point

    return sweep.take(run()), columns


def _print(points: Sequence[Point], columns: Sequence[str]) -> None:
    swept = any(point.rate is not None for point in points)
    rows = [
        [*([point.rate] if swept else []), point.name, *(point.figures.get(column) for column in columns)]
        for point in points
    ]
    print(f"\n{table((*(['offered'] if swept else []), 'configuration', *map(_short, columns)), rows)}\n")
    for prices in dict.fromkeys(str(point.prices["prices"]) for point in points):
        print(f"prices: {prices}")
    for beyond, times in Counter(each for point in points for each in point.prices["extrapolated"]).items():
        print(f"extrapolated: {beyond} ({times} of {len(points)} points)")


def _short(column: str) -> str:
    return SHORT.get(column, column.removesuffix("_ms").replace("median", "p50").replace("_", " "))


def _plot(path: Path, facts: dict[str, Any], points: Sequence[Point], columns: Sequence[str]) -> None:
    """A panel for the served rate, one for each tail, and one for each requested column."""
    served = "request_goodput" if "request_goodput" in columns else "request_throughput"
    tails = [
        column for column in columns if column.startswith("p") and column.endswith(("ttft_ms", "tpot_ms", "itl_ms"))
    ]
    usual = columns.index("failed")
    panels = [_panel(points, column) for column in (served, *tails, *columns[usual + 1 :])]
    plot_curves(path, facts["shape"], panels, note=f"simulated: {facts['limits']}; {facts['date']}")


def _panel(points: Sequence[Point], column: str) -> dict[str, Any]:
    curves: dict[str, list[tuple[float, float]]] = {}
    for point in points:
        if (value := point.figures.get(column)) is not None and point.rate is not None:
            curves.setdefault(point.name, []).append((point.rate, value))
    log = "y" if column.endswith("_ms") and all(y > 0 for curve in curves.values() for _, y in curve) else ""
    return {
        "x": "offered requests per second",
        "y": _short(column) + (" (ms)" if column.endswith("_ms") else ""),
        "curves": curves,
        "log": log,
    }
