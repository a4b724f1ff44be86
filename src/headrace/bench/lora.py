"""``headrace bench lora``: tokens per second and times to the first token with adapters beside those of the base model,
in one engine and one run.

What lives here: the command, adapters made from a seed, which request has which. What may not: adapters as an engine
holds them (lora/).

Popularities are those of Punica (Chen et al. 2023, section 7): each request its own adapter; all of the root of the
requests' number equally; each adapter 1.5 times as often as the next; one for all. Besides, a Zipf law over all that
are registered: the nth as often as 1/n.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.bench.arguments import declare
from headrace.bench.driver import Run, drive
from headrace.bench.sweep import Sweep
from headrace.config import EngineConfig
from headrace.errors import ConfigError
from headrace.observe.report import print_facts, table, write_json
from headrace.planner.workload.conversations import conversations_of
from headrace.planner.workload.load import Lengths, arriving, drawn
from headrace.request import LoRARequest
from headrace.spec import DecoderSpec

BASE, APART = "base", "apart"
SKEW = 1.5  # of one adapter's popularity over the next one's
TRIED = 64  # adapters, before anything is measured
Adapters = Sequence[LoRARequest | None]


def _drawn(requests: int, weights: NDArray[np.float64]) -> list[int]:
    return [int(each) for each in np.random.default_rng(0).choice(len(weights), requests, p=weights / weights.sum())]


POPULARITIES: Mapping[str, Callable[[int, int], list[int]]] = {  # of so many requests and adapters
    "distinct": lambda requests, adapters: list(range(requests)),
    "uniform": lambda requests, adapters: [index % math.ceil(math.sqrt(requests)) for index in range(requests)],
    "skewed": lambda requests, adapters: _drawn(requests, SKEW ** -np.arange(requests, dtype=np.float64)),
    "zipf": lambda requests, adapters: _drawn(requests, 1 / np.arange(1, adapters + 1, dtype=np.float64)),
    "identical": lambda requests, adapters: [0] * requests,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    declare(parser, "lora.arguments", popularity={"choices": (*POPULARITIES, APART)})


def run(args: argparse.Namespace, config: EngineConfig) -> int:
    from headrace import LLM  # the engine, and torch with it
    from headrace.bench.offline import facts_here

    shape = f"{args.num_prompts} requests, {args.input_len} in, {args.output_len} out"
    facts, sweep = facts_here(config.device.device, shape=shape), Sweep()
    with tempfile.TemporaryDirectory(prefix="headrace-adapters-") as folder:
        found, config = _adapters(args, config, Path(folder))
        with LLM.from_config(config) as llm:
            llm.engine.await_kernels()
            facts |= _engine_facts(llm, found)
            core = llm.engine.core
            if core.adapters is not None:
                for each in found:
                    core.adapters.require(each.lora_name, each.lora_path)
            _ask(llm, args, -1, [None, *found[-TRIED:]])  # every kernel has been used once, with the least popular
            sides = {BASE: [None] * args.num_prompts} | {
                name: _chosen(name, found, args.num_prompts) for name in args.popularity
            }
            timed = sweep.take(
                (name, _ask(llm, args, repeat, adapters, apart=name == APART))
                for repeat in range(args.repeats)
                for name, adapters in sides.items()
            )
    figures = {
        name: _figures([ran for side, ran in timed if side == name], adapters) for name, adapters in sides.items()
    }
    _show(args, facts, {name: each for name, each in figures.items() if each["tokens_per_second"]})
    return sweep.status()


def _engine_facts(llm: Any, found: Adapters) -> dict[str, str]:
    info = llm.info
    said = "; ".join(
        f"{each.name} {each.value}"
        for each in info.decisions
        if each.name in ("adapters", "kernel add_deltas", "graphs")
    )
    return {
        "model": f"{info.model}, {info.dtype} on {info.device}",
        "adapters": f"{len(found)} registered",
        "choices": said,
    }


# --- which adapters


def _adapters(args: argparse.Namespace, config: EngineConfig, folder: Path) -> tuple[list[LoRARequest], EngineConfig]:
    """Those that the flags name, or as many as they ask for made from a seed; and the engine that serves them. Raises
    ConfigError."""
    from headrace.models.families import spec_from_config
    from headrace.models.source import find_model

    given, number = config.adapters.modules, args.num_adapters or args.num_prompts
    if given:
        found = [LoRARequest(name) for name in given]
    else:
        spec = spec_from_config(find_model(config.model).config)
        places = [str(write_adapter(folder / f"rank-{rank}", spec, rank, args.targets)) for rank in args.ranks]
        found = [LoRARequest(f"adapter-{index}", 1, places[index % len(places)]) for index in range(number)]
    asked = config.adapters
    served = replace(
        asked, enable_lora=True, max_lora_rank=asked.max_lora_rank if given else max(asked.max_lora_rank, *args.ranks),
        max_cpu_loras=asked.max_cpu_loras or max(len(found), asked.max_loras or 0),
    )  # fmt: skip
    return found, replace(config, adapters=served)


def _factor(rng: np.random.Generator, *shape: int) -> tuple[str, tuple[int, ...], memoryview]:
    """It changes answers, and does not spoil them."""
    values = rng.standard_normal(shape, dtype=np.float32) * (0.3 / math.sqrt(shape[1]))
    return "F16", shape, values.astype(np.float16).data


def write_adapter(folder: Path, spec: DecoderSpec, rank: int, targets: Sequence[str] | None = None) -> Path:
    """As PEFT writes one. ``targets``: the last words of modules' names. Raises ConfigError for those that the model
    does not have."""
    from headrace.models.safetensors_file import write_file
    from headrace.models.weight_rules import adapted_modules

    modules = [module for module in adapted_modules(spec) if module.weight.layer is not None]
    known = {module.name.rpartition(".")[2] for module in modules}
    if unknown := sorted(set(targets or ()) - known):
        raise ConfigError(
            f"--targets names {', '.join(unknown)}, which the model does not have; it has {', '.join(sorted(known))}."
        )
    tensors, rng = {}, np.random.default_rng(0)
    for module in modules:
        if targets is None or module.name.rpartition(".")[2] in targets:
            at = f"base_model.model.{module.name}.lora"
            tensors[f"{at}_A.weight"] = _factor(rng, rank, module.weight.ins)
            tensors[f"{at}_B.weight"] = _factor(rng, module.outs, rank)
    folder.mkdir()
    write_file(folder / "adapter_model.safetensors", tensors)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": sorted(targets or known)}
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def _chosen(popularity: str, found: Sequence[LoRARequest], requests: int) -> list[LoRARequest]:
    choose = POPULARITIES["distinct" if popularity == APART else popularity]
    chosen = [found[index % len(found)] for index in choose(requests, len(found))]
    return sorted(chosen, key=lambda each: each.lora_name) if popularity == APART else chosen


# --- measuring


def _ask(llm: Any, args: argparse.Namespace, repeat: int, adapters: Adapters, *, apart: bool = False) -> Run:
    """Other tokens in each repeat. ``apart``: one batch an adapter, one after another."""
    lengths, seed = Lengths(args.input_len, args.output_len), repeat + 1
    asked = drawn(len(adapters), lengths, seed=seed)
    if args.request_rate:
        asked = arriving(asked, args.request_rate, seed=seed)
    talks = [
        replace(talk, adapter=None if lora is None else lora.lora_name)
        for talk, lora in zip(conversations_of(asked, vocab_size=llm.info.vocab_size, seed=seed), adapters, strict=True)
    ]
    batches = [list(batch) for _, batch in groupby(talks, key=lambda talk: talk.adapter)] if apart else [talks]
    runs = [drive(llm.engine.core, batch) for batch in batches]
    return Run([sample for each in runs for sample in each.samples], seconds=sum(each.seconds for each in runs))


def _figures(runs: Sequence[Run], adapters: Adapters) -> dict[str, Any]:
    """``ttft``: of the median, and that of which one in a hundred is slower, over the requests of all runs; seconds."""
    speeds = [run.output_tokens / run.seconds for run in runs]
    waits = [sample.ttft for run in runs for sample in run.samples if sample.arrivals]
    return {
        "adapters": len(set(adapters) - {None}),
        "tokens_per_second": median(speeds) if speeds else None,
        "runs": speeds,
        "failed": sum(sample.error is not None for run in runs for sample in run.samples),
        **{f"ttft_p{each}": float(np.percentile(waits, each)) if waits else None for each in (50, 99)},
    }


def _show(args: argparse.Namespace, facts: Mapping[str, Any], figures: dict[str, dict[str, Any]]) -> None:
    base = figures[BASE]["tokens_per_second"]
    for each in figures.values():
        each["of_base"] = each["tokens_per_second"] / base
    print_facts(facts)
    print()
    columns = ("popularity", "adapters", "output tokens/s", "lowest", "highest", "of base", "TTFT p50, ms", "p99, ms")
    print(table(columns, [
        (name, each["adapters"], each["tokens_per_second"], min(each["runs"]), max(each["runs"]), round(each["of_base"], 3),
         *(1e3 * each[f"ttft_p{point}"] for point in (50, 99)))
        for name, each in figures.items()
    ]))  # fmt: skip
    if failed := sum(each["failed"] for each in figures.values()):
        print(f"{failed} requests failed.")
    if args.output_json:
        write_json(args.output_json, {"facts": facts, "popularities": figures})
