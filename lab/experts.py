"""``python -m lab experts``: how evenly placements fill ranks that hold whole experts, on rows that they were not made from.

What lives here: judging them, step by step. What may not: recording (bench/experts.py), placements
(parallel/placement.py).
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.bench.experts import Choices, Recorded, counted, mean, placements, recorded
from headrace.bench.offline import facts_here
from headrace.config import EngineConfig
from headrace.errors import ConfigError
from headrace.observe.report import print_facts, table, write_json
from headrace.parallel.balance import imbalance, lower_bound
from headrace.parallel.placement import Layer

STEPS = (16, 64, 256)  # rows
COLUMNS = ("ranks", "placement", "recorded", "worst layer", "held out", *(f"steps of {rows}" for rows in STEPS))


def run(args: argparse.Namespace, config: EngineConfig) -> int:
    if args.output is not None:
        raise ConfigError("--output is what headrace bench experts writes; use that, or leave --output out.")
    made, held_out = recorded(args, config)
    counts = counted(made)
    rows = [_figures(counts, held_out, ranks, args.copies) for ranks in args.ranks]
    facts = {**facts_here(config.device.device, shape=_shape(args, made, held_out)), "model": str(config.model.model)}
    print_facts(facts)
    print(table(COLUMNS, [[str(each["ranks"]), *found] for each in rows for found in _rendered(each)]))
    if args.output_json is not None:
        write_json(args.output_json, {"facts": facts, "figures": rows})
    return 0


def _figures(counts: Mapping[int, list[float]], held_out: Recorded, ranks: int, copies: int) -> dict[str, Any]:
    """Of each placement: the busiest rank's rows over the mean, in the mean over layers, of all rows and of steps."""
    found = {}
    for name, layers in placements(counts, ranks, copies).items():
        own = [imbalance(counts[layer], held) for layer, held in layers.items()]
        steps = {
            f"steps of {rows}" if rows else "all": mean(
                [_steps(held_out[layer][0], held, rows) for layer, held in layers.items()]
            )
            for rows in (0, *STEPS)
        }
        found[name] = {"recorded": mean(own), "worst layer": max(own), **steps}
    bounds = [lower_bound(each, ranks) * ranks / max(sum(each), 1.0) for each in counts.values()]
    return {"ranks": ranks, "bound": mean(bounds), "placements": found}


def _steps(choices: Choices, held: Layer, rows: int) -> float:
    """``rows``: of each step, one after the other as they were recorded; 0: all in one. Σ over steps of the busiest
    rank's rows, over Σ of the mean's: how much longer all of them take."""
    size = min(rows or len(choices), len(choices))
    whole = len(choices) // size
    owner = _owners(held)
    turn = np.arange(len(choices)) % len(owner)
    ranks = owner[turn[:, None], choices][: whole * size].reshape(whole, -1)
    loads = np.stack([(ranks == rank).sum(axis=1) for rank in range(len(held))], axis=1).astype(np.float64)
    total = float(loads.sum())
    return float(loads.max(axis=1).sum()) * loads.shape[1] / total if total and whole else 1.0


def _owners(held: Layer) -> NDArray[np.int64]:
    """The rank that computes each expert's pairs, for each turn of the rows, [turns, experts]."""
    holders: dict[int, list[int]] = {}
    for rank, experts in enumerate(held):
        for expert in experts:
            holders.setdefault(expert, []).append(rank)
    turns = int(np.lcm.reduce([len(each) for each in holders.values()]))
    return np.array(
        [[holders[expert][turn % len(holders[expert])] for expert in sorted(holders)] for turn in range(turns)]
    )


def _rendered(figures: Mapping[str, Any]) -> list[list[str]]:
    rows = [[name, *(f"{value:.3f}" for value in found.values())] for name, found in figures["placements"].items()]
    return [*rows, ["without copies at least", f"{figures['bound']:.3f}", *[""] * (len(COLUMNS) - 3)]]


def _shape(args: argparse.Namespace, made: Recorded, held_out: Recorded) -> str:
    (rows, held), layers = (len(next(iter(each.values()))[0]) for each in (made, held_out)), len(made)
    return (
        f"the busiest rank's rows over the mean, in the mean of {layers} layers; placed by {rows:,} rows of "
        f"{args.calibration}, held out: {held:,} others"
    )
