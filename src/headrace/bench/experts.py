"""``headrace bench experts``: records which experts a model's tokens choose, for ``--expert-placement``, and says how
evenly placements made from that would fill ranks that hold whole experts.

What lives here: the command, recording. What may not: placements (parallel/placement.py), watching layers
(worker/routing.py), judging placements on other rows (lab/experts.py).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.config import EngineConfig
from headrace.errors import ConfigError
from headrace.observe.report import machine_facts, print_facts, table, write_json
from headrace.parallel.balance import balanced, imbalance
from headrace.parallel.placement import Layer, contiguous
from headrace.request import SamplingParams

Choices = NDArray[np.int16]  # [rows, top_k]
Recorded = dict[int, tuple[Choices, int]]  # by layer; the second: its experts
Counts = Mapping[int, list[float]]  # by layer: rows of each expert


def run(args: argparse.Namespace, config: EngineConfig) -> int:
    if args.copies and args.output and len(args.ranks) > 1:
        raise ConfigError(
            "--copies are placed for one number of ranks; give --ranks one number, or leave --output out."
        )
    counts = counted(recorded(args, config)[0])
    found = {
        ranks: {
            name: mean([imbalance(counts[layer], held) for layer, held in layers.items()])
            for name, layers in placements(counts, ranks, args.copies).items()
        }
        for ranks in args.ranks
    }
    facts = machine_facts(
        model=str(config.model.model), shape="rows of the busiest rank over the mean of all, in the mean of layers"
    )
    print_facts(facts)
    print(table(("ranks", *found[args.ranks[0]]), [[str(ranks), *each.values()] for ranks, each in found.items()]))
    if args.output is not None:
        _write(args, counts)
    if args.output_json is not None:
        write_json(args.output_json, {"facts": facts, "imbalance": found})
    return 0


def recorded(args: argparse.Namespace, config: EngineConfig) -> tuple[Recorded, Recorded]:
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


def counted(made: Recorded) -> Counts:
    """Rows of each expert."""
    return {
        layer: [float(each) for each in np.bincount(choices.ravel(), minlength=experts)]
        for layer, (choices, experts) in made.items()
    }


def placements(counts: Counts, ranks: int, copies: int) -> dict[str, dict[int, Layer]]:
    """By name, and layer."""
    found: dict[str, dict[int, Layer]] = {
        "neighbours together": {layer: contiguous(len(each), ranks) for layer, each in counts.items()},
        "balanced": {layer: balanced(each, ranks) for layer, each in counts.items()},
    }
    if copies:
        found[f"with {copies} copies"] = {layer: balanced(each, ranks, copies) for layer, each in counts.items()}
    return found


def mean(values: Sequence[float]) -> float:
    return float(np.mean(values))


def _write(args: argparse.Namespace, counts: Counts) -> None:
    stored: dict[str, Any] = {"counts": counts}
    if args.copies:
        stored = {"experts": {layer: balanced(each, args.ranks[0], args.copies) for layer, each in counts.items()}}
    args.output.write_text(json.dumps(stored), encoding="utf-8")
    print(f"Wrote {args.output}, for --expert-placement.")
