"""``headrace bench experts``: which experts a model's tokens choose, and how evenly that fills ranks that hold whole ones.

What lives here: the command: recording, and what placements are worth on rows that they were not made from. What may
not: placements (parallel/placement.py), watching layers (worker/routing.py).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.bench.offline import facts_here
from headrace.config import EngineConfig
from headrace.errors import ConfigError
from headrace.observe.report import print_facts, table, write_json
from headrace.parallel.balance import balanced, lower_bound
from headrace.parallel.placement import Layer, contiguous
from headrace.request import SamplingParams

STEPS = (16, 64, 256)  # rows
Choices = NDArray[np.int16]  # [rows, top_k]


def run(args: argparse.Namespace, config: EngineConfig) -> int:
    if args.copies and args.output and len(args.ranks) > 1:
        raise ConfigError(
            "--copies are placed for one number of ranks; give --ranks one number, or leave --output out."
        )
    made, held_out = _recorded(args, config)
    counts = {layer: _counts(choices, experts) for layer, (choices, experts) in made.items()}
    rows = [_figures(counts, held_out, ranks, args.copies) for ranks in args.ranks]
    facts = {**facts_here(config.device.device, shape=_shape(args, made, held_out)), "model": str(config.model.model)}
    print_facts(facts)
    print(table(_COLUMNS, [[str(each["ranks"]), *found] for each in rows for found in _rendered(each)]))
    if args.output is not None:
        _write(args, counts)
    if args.output_json is not None:
        write_json(args.output_json, {"facts": facts, "figures": rows})
    return 0


# --- recording

Recorded = dict[int, tuple[Choices, int]]  # by layer; the second: its experts


def _recorded(args: argparse.Namespace, config: EngineConfig) -> tuple[Recorded, Recorded]:
    """Of rows to place by, and of rows to judge by."""
    from headrace.engine.llm import LLM  # the engine, and torch with it
    from headrace.quantize.texts import read_rows
    from headrace.worker.routing import Routing

    config = replace(
        config,
        cache=replace(config.cache, enable_prefix_caching=False),  # each row is computed, in every layer
        device=replace(config.device, enforce_eager=True, prompt_graphs=False, last_layer_pruning=False),
    )
    device = config.device
    if device.pipeline_parallel_size > 1 or device.data_parallel_size > 1 or device.executor != "model":
        raise ConfigError(
            "bench experts records one process that computes a whole model; "
            "leave --pipeline-parallel-size, --data-parallel-size and --executor out."
        )
    with LLM.from_config(config) as llm:
        executor: Any = llm.engine.core.executor
        spec, tokenizer = executor.decoder.spec, llm.get_tokenizer()
        sizes = {index: layer.moe.num_experts for index, layer in enumerate(spec.layers) if layer.moe is not None}
        if not sizes or tokenizer is None:
            raise ConfigError("bench experts needs a model with experts and a tokenizer; this one lacks one of them.")
        if few := next((size for size in sizes.values() if size < max(args.ranks)), None):
            raise ConfigError(f"--ranks {max(args.ranks)} is more than a layer's {few} experts; give fewer ranks.")
        routing = Routing(executor.decoder)
        asked = SamplingParams(temperature=0, max_tokens=args.output_len, ignore_eos=True)
        found = []
        for rows in read_rows(args.calibration, tokenizer, length=args.calibration_length, count=args.calibration_rows):
            llm.generate([{"prompt_token_ids": row} for row in rows], asked, use_tqdm=False)
            found.append({layer: (choices.numpy(), sizes[layer]) for layer, choices in routing.take()})
    return found[0], found[1]


# --- judging


def _counts(choices: Choices, experts: int) -> list[float]:
    return [float(each) for each in np.bincount(choices.ravel(), minlength=experts)]


def _figures(counts: Mapping[int, list[float]], held_out: Recorded, ranks: int, copies: int) -> dict[str, Any]:
    """Of each placement: the busiest rank's rows over the mean, in the mean over layers, of all rows and of steps."""
    placements: dict[str, dict[int, Layer]] = {
        "neighbours together": {layer: contiguous(len(each), ranks) for layer, each in counts.items()},
        "balanced": {layer: balanced(each, ranks) for layer, each in counts.items()},
    }
    if copies:
        placements[f"with {copies} copies"] = {layer: balanced(each, ranks, copies) for layer, each in counts.items()}
    bounds = [_bound(each, ranks) for each in counts.values()]
    found = {
        name: {
            "recorded": _mean([_imbalance(_spread(counts[layer], held), 1) for layer, held in layers.items()]),
            "worst layer": max(_imbalance(_spread(counts[layer], held), 1) for layer, held in layers.items()),
            **{
                f"steps of {rows}" if rows else "all": _mean(
                    [_steps(held_out[layer][0], held, rows) for layer, held in layers.items()]
                )
                for rows in (0, *STEPS)
            },
        }
        for name, layers in placements.items()
    }
    return {"ranks": ranks, "bound": _mean(bounds), "placements": found}


def _bound(counts: Sequence[float], ranks: int) -> float:
    return lower_bound(counts, ranks) * ranks / max(sum(counts), 1.0)


def _spread(counts: Sequence[float], held: Layer) -> NDArray[np.float64]:  # [1, ranks]
    times = np.bincount([expert for rank in held for expert in rank], minlength=len(counts))
    return np.array([[sum(counts[expert] / times[expert] for expert in rank) for rank in held]])


def _imbalance(loads: NDArray[np.float64], steps: int) -> float:
    """Σ over steps of the busiest rank's rows, over Σ of the mean's: how much longer all of them take."""
    total = float(loads.sum())
    return float(loads.max(axis=1).sum()) * loads.shape[1] / total if total and steps else 1.0


def _steps(choices: Choices, held: Layer, rows: int) -> float:
    """``rows``: of each step, one after the other as they were recorded; 0: all in one."""
    size = min(rows or len(choices), len(choices))
    whole = len(choices) // size
    owner = _owners(held)
    turn = np.arange(len(choices)) % len(owner)
    ranks = owner[turn[:, None], choices][: whole * size].reshape(whole, -1)
    loads = np.stack([(ranks == rank).sum(axis=1) for rank in range(len(held))], axis=1).astype(np.float64)
    return _imbalance(loads, whole)


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


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values))


# --- saying

_COLUMNS = ("ranks", "placement", "recorded", "worst layer", "held out", *(f"steps of {rows}" for rows in STEPS))


def _rendered(figures: Mapping[str, Any]) -> list[list[str]]:
    rows = [[name, *(f"{value:.3f}" for value in found.values())] for name, found in figures["placements"].items()]
    return [*rows, ["without copies at least", f"{figures['bound']:.3f}", *[""] * (len(_COLUMNS) - 3)]]


def _shape(args: argparse.Namespace, made: Recorded, held_out: Recorded) -> str:
    (rows, held), layers = (len(next(iter(each.values()))[0]) for each in (made, held_out)), len(made)
    return (
        f"the busiest rank's rows over the mean, in the mean of {layers} layers; placed by {rows:,} rows of "
        f"{args.calibration}, held out: {held:,} others"
    )


def _write(args: argparse.Namespace, counts: Mapping[int, list[float]]) -> None:
    stored: dict[str, Any] = {"counts": counts}
    if args.copies:
        stored = {"experts": {layer: balanced(each, args.ranks[0], args.copies) for layer, each in counts.items()}}
    args.output.write_text(json.dumps(stored), encoding="utf-8")
    print(f"Wrote {args.output}, for --expert-placement.")
