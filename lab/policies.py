"""``python -m lab policies``: what orders of service are worth, each by its own measure, from an idle device to three
times what it can do.

Every policy runs the same requests at the same times as first come, first served, through the engine's own scheduler on
a simulated device. Loads are shares of what the device does when everything is asked at once.

    fair                 one tenant asks nine times as much as the other: what the other's requests take; then both ask
    more than their
                         share: how far their services drift apart, beside the bound
    qoe                  the experience of readers (Andes)
    shortest-remaining   four kinds of requests: the mean time they take, with lengths predicted and with lengths known

What lives here: the three comparisons and their tables. What may not: runs (simulated.py), figures of one, modelling
(planner/).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from headrace.bench.sweep import Sweep
from headrace.config import EngineConfig, SchedulerConfig
from headrace.errors import ConfigError
from headrace.observe.report import machine_facts, print_facts, table, write_json
from headrace.planner.workload.load import LoadRequest
from lab import simulated

LOADS = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 2.5, 3.0)
LIGHT = 0.1  # of the requests are the modest tenant's
QUARTER = 0.25  # where both ask more than their share
GOOD = 0.9  # QoE at which readers are content
ROWS = 64  # that run at once where services are compared: the bound is in proportion
BEGINNING = 64  # tokens that prompts of a kind share

Point = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Kind:
    """Requests of one application: their share, and medians and 90th percentiles of lengths."""

    share: float
    prompt: tuple[int, int]
    output: tuple[int, int]


KINDS = (
    Kind(0.40, (300, 500), (8, 20)),  # to classify
    Kind(0.35, (400, 1200), (200, 500)),  # to chat
    Kind(0.15, (2000, 3000), (120, 250)),  # to summarise
    Kind(0.10, (600, 1200), (900, 1800)),  # to write programs
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    simulated.add_arguments(parser)
    parser.add_argument(
        "--only", nargs="+", choices=sorted(COMPARISONS), default=sorted(COMPARISONS), help="policies (default: all)"
    )
    parser.add_argument(
        "--loads",
        type=float,
        nargs="+",
        default=LOADS,
        metavar="X",
        help="shares of what the device can do (default: 0.25 … 3)",
    )
    parser.add_argument(
        "--preemptions", type=float, nargs="+", metavar="X", help="qoe: also compare these of --qoe-preemptions"
    )
    parser.set_defaults(device="l40s", requests=1500, input=(160, 600), output=(200, 600), max_len=4096)


def run(args: argparse.Namespace) -> int:
    if any(not 0.0 <= each < math.inf for each in args.preemptions or ()):
        raise ConfigError(
            f"--preemptions is {' '.join(f'{each:g}' for each in args.preemptions)}; give finite numbers of at least 0."
        )
    if any(not 0.0 < load < math.inf for load in args.loads):
        raise ConfigError(f"--loads is {' '.join(f'{load:g}' for load in args.loads)}; give finite numbers above 0.")
    bench = simulated.create(args)
    facts = machine_facts(str(bench.device), shape=simulated.shape(args), model=args.model)
    print_facts(facts)
    sweep = Sweep()
    found = dict(sweep.take((name, COMPARISONS[name](bench, sorted(args.loads))) for name in args.only))
    if args.preemptions and not sweep.stopped:
        found["preemptions"] = _preemptions(bench, sorted(args.loads), args.preemptions)
    prices = bench.say_prices()
    if args.output_json:
        write_json(args.output_json, {"facts": facts, "prices": prices, **found})
    return sweep.status()


def _config(policy: str, **fields: Any) -> EngineConfig:
    return EngineConfig(scheduler=SchedulerConfig(scheduling_policy=policy, **fields))


def _capacity(bench: simulated.Bench) -> float:
    """Requests a second when everything is asked at once."""
    figures, _ = bench.run(_config("fcfs"), bench.at_rate(math.inf))
    return len(bench.asked) / float(figures["duration"])


def _show(title: str, points: Sequence[Point], capacity: float) -> None:
    print(f"\n{title} (1.00 is {capacity:.2f} requests/s)\n")
    print(table(tuple(points[0]), [list(point.values()) for point in points]))


# --- readers


def _qoe(bench: simulated.Bench, loads: Sequence[float]) -> Mapping[str, Any]:
    capacity, points = _capacity(bench), []
    for load in loads:
        point: Point = {"load": load}
        for policy in ("fcfs", "qoe"):
            figures, _ = bench.run(_config(policy), bench.at_rate(load * capacity))
            point[f"QoE {policy}"] = figures["mean_qoe"]
            point[f"p10 {policy}"] = figures["p10_qoe"]
            point[f"ttft s {policy}"] = figures["median_ttft_ms"] / 1e3
            point[f"tokens/s {policy}"] = figures["output_throughput"]
        points.append(point)
    _show("qoe: experience of readers", points, capacity)
    gain = max(point["QoE qoe"] / point["QoE fcfs"] for point in points)
    kept = {policy: _reach(points, f"QoE {policy}") for policy in ("fcfs", "qoe")}
    print(
        f"\nup to {gain:.2f} times the QoE; QoE stays at {GOOD:g} up to a load of {kept['fcfs']:.2f} with fcfs and {kept['qoe']:.2f} with qoe"
    )
    return {"capacity": capacity, "points": points, "gain": gain, "kept": kept}


def _preemptions(bench: simulated.Bench, loads: Sequence[float], allowed: Sequence[float]) -> Mapping[str, Any]:
    """The share of readers who are content, by how often they may be pushed out."""
    capacity, points = _capacity(bench), list[Point]()
    for load in loads:
        point: Point = {"load": load}
        for name, config in [
            ("fcfs", _config("fcfs")),
            *((f"{each:g}", _config("qoe", qoe_preemptions=each)) for each in allowed),
        ]:
            figures, _ = bench.run(config, bench.at_rate(load * capacity))
            point |= {name: figures["good_qoe_share"], f"p10 {name}": figures["p10_qoe"]}
        points.append(point)
    _show(
        f"qoe: share of readers with at least {GOOD:g}, and the worst tenth's, by preemptions a request",
        points,
        capacity,
    )
    return {"capacity": capacity, "points": points}


def _reach(points: Sequence[Point], column: str) -> float:
    """The load up to which a column stays at GOOD, between two points by a straight line."""
    last: Point | None = None
    for point in points:
        if point[column] < GOOD:
            if last is None:
                return 0.0
            share = (last[column] - GOOD) / (last[column] - point[column])
            return float(last["load"] + share * (point["load"] - last["load"]))
        last = point
    return float(points[-1]["load"])


# --- tenants


def _fair(bench: simulated.Bench, loads: Sequence[float]) -> Mapping[str, Any]:
    capacity, points = _capacity(bench), []
    asked = of_tenants(bench.asked, LIGHT, bench.seed)
    for load in loads:
        point: Point = {"load": load}
        for policy in ("fcfs", "fair"):
            here = replace(bench, asked=asked).at_rate(load * capacity)
            _, samples = bench.run(_config(policy), here)
            for tenant in ("light", "heavy"):
                own = [sample for sample, each in zip(samples, here, strict=True) if each.tenant == tenant]
                point[f"{tenant} ttft s {policy}"] = float(np.mean([sample.ttft for sample in own]))
        points.append(point)
    _show(
        f"fair: mean time to the first token of two tenants; the light one sends {LIGHT:.0%} of the requests",
        points,
        capacity,
    )
    return {"capacity": capacity, "points": points, "drift": _drift(bench, capacity)}


def of_tenants(asked: Sequence[LoadRequest], share: float, seed: int) -> list[LoadRequest]:
    """``share`` of the requests are the light one's."""
    light = np.random.default_rng((seed, 7)).random(len(asked)) < share
    return [replace(each, tenant="light" if is_light else "heavy") for each, is_light in zip(asked, light, strict=True)]


def _drift(bench: simulated.Bench, capacity: float) -> Mapping[str, float]:
    """How far the services of two tenants, who both ask more than half of everything, drift apart while both do."""
    asked = replace(bench, asked=of_tenants(bench.asked, QUARTER, bench.seed)).at_rate(3.0 * capacity)
    found: dict[str, float] = {}
    for policy in ("fcfs", "fair"):
        figures, _ = bench.run(_config(policy, max_num_seqs=ROWS), asked)
        found |= {policy: figures["service_drift"], "bound": figures["service_drift_bound"]}
    shown = f"{found['fcfs']:,.0f} with fcfs, {found['fair']:,.0f} with fair; the bound is {found['bound']:,.0f}"
    print(
        f"\nboth ask more than their share, one three times as much as the other: their services differ by up to {shown}"
    )
    return found


# --- lengths


def _shortest(bench: simulated.Bench, loads: Sequence[float]) -> Mapping[str, Any]:
    mixed = replace(bench, asked=of_kinds(KINDS, len(bench.asked), bench.seed), traced=False)
    capacity, points = _capacity(mixed), []
    ways = {
        "fcfs": _config("fcfs"),
        "predicted": _config("shortest-remaining"),
        "known": _config("shortest-remaining", length_prediction="max-tokens"),
    }
    for load in loads:
        point: Point = {"load": load}
        for name, config in ways.items():
            figures, _ = mixed.run(config, mixed.at_rate(load * capacity))
            point[f"mean s {name}"] = figures["mean_e2el_ms"] / 1e3
            point[f"p99 s {name}"] = figures["p99_e2el_ms"] / 1e3
        points.append(point)
    _show("shortest-remaining: what requests of four kinds take", points, capacity)
    gains = {
        name: max(point["mean s fcfs"] / point[f"mean s {name}"] for point in points) for name in ("predicted", "known")
    }
    print(
        f"\nthe mean is up to {gains['predicted']:.2f} times as short with predicted lengths, {gains['known']:.2f} times with known ones"
    )
    return {"capacity": capacity, "points": points, "gains": gains}


def of_kinds(kinds: Sequence[Kind], count: int, seed: int) -> list[LoadRequest]:
    """Prompts of a kind begin alike."""
    rng = np.random.default_rng((seed, 8))
    picked = rng.choice(len(kinds), count, p=[kind.share for kind in kinds])
    lengths = [
        (simulated.lognormal(rng, kind.prompt, count), simulated.lognormal(rng, kind.output, count)) for kind in kinds
    ]
    return [
        LoadRequest(
            int(lengths[kind][0][index]) + BEGINNING, int(lengths[kind][1][index]), pieces=(int(kind),), piece=BEGINNING
        )
        for index, kind in enumerate(picked)
    ]


COMPARISONS = {"fair": _fair, "qoe": _qoe, "shortest-remaining": _shortest}
