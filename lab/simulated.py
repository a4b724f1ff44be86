"""What benchmarks on simulated devices share: a model, a device, a load that can be offered at any rate, and a run of
it.

What lives here: their flags and one trial. What may not: what is compared (capacity.py, overload.py), modelling
(planner/).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from headrace.bench.arguments import output
from headrace.config import EngineConfig, ModelConfig
from headrace.errors import ConfigError
from headrace.models import families
from headrace.models.source import find_model
from headrace.planner.devices import Device, find_device
from headrace.planner.pricing import Pricing
from headrace.planner.simulator import Load, Report, simulate
from headrace.planner.workload.load import LoadRequest, arriving, traced
from headrace.planner.workload.statistics import Sample
from headrace.planner.workload.traces import MOST_ROWS
from headrace.request import Expectations
from headrace.spec import DecoderSpec

P90 = 1.2815515655446004  # of a standard normal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", required=True, metavar="PATH", help="config.json, its folder, or a hub id; no weights are read"
    )
    parser.add_argument("--device", default="a100", help="a device that headrace simulate knows (default: %(default)s)")
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="arrivals and lengths of a trace, faster or slower; without it lengths are drawn",
    )
    parser.add_argument("--requests", type=int, default=400, help="requests a run (default: %(default)s)")
    parser.add_argument(
        "--input",
        type=int,
        nargs=2,
        default=(1730, 5696),
        metavar=("MEDIAN", "P90"),
        help="prompt tokens (default: %(default)s)",
    )
    parser.add_argument(
        "--output",
        type=int,
        nargs=2,
        default=(415, 834),
        metavar=("MEDIAN", "P90"),
        help="output tokens (default: %(default)s)",
    )
    parser.add_argument(
        "--max-len",
        type=int,
        default=8192,
        help="longer prompts and answers are cut to this together (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of lengths and arrivals (default: %(default)s)")
    parser.add_argument("--output-json", type=output, metavar="FILE", help="write every point")


@dataclass(slots=True)
class Seen:
    """The prices of all runs so far, and the most that was asked of them."""

    pricing: Pricing | None = None
    longest: int = 0

    def note(self, report: Report) -> None:
        if self.pricing is not None:
            before, most = self.pricing.step_time.most, report.pricing.step_time.most
            most.tokens, most.sequences = max(before.tokens, most.tokens), max(before.sequences, most.sequences)
        self.pricing, self.longest = report.pricing, max(self.longest, report.longest)


@dataclass(frozen=True, slots=True)
class Bench:
    """One model on one device under one kind of load."""

    spec: DecoderSpec
    device: Device
    asked: Sequence[LoadRequest]  # drawn; of a trace: at its own rate
    traced: bool
    seed: int
    seen: Seen = field(default_factory=Seen)

    def base_rate(self) -> float:
        """Requests a second as the trace was recorded; 1 where they are drawn."""
        last = self.asked[-1].at if self.traced else None
        return len(self.asked) / last if last else 1.0

    def at_rate(self, rate: float, expects: Expectations | None = None) -> list[LoadRequest]:
        if self.traced:
            scale = self.base_rate() / rate  # 0 at an infinite rate
            found = [replace(each, at=(each.at or 0.0) * scale) for each in self.asked]
        else:
            found = arriving(self.asked, rate, burstiness=1.0, seed=self.seed)
        return found if expects is None else [replace(each, expects=expects) for each in found]

    def run(
        self, config: EngineConfig, asked: Sequence[LoadRequest], limits: Mapping[str, float] | None = None
    ) -> tuple[dict[str, Any], list[Sample]]:
        """Open loop; nothing is turned away for want of a place in the queue."""
        report = simulate(self.spec, config, self.device, Load(asked, self.seed, None, len(asked) + 1, limits))
        self.seen.note(report)
        return report.figures, report.samples

    def say_prices(self) -> dict[str, Any]:
        """Prints what the runs so far were priced by, and what of them lies beyond what was fitted; the same for a
        file."""
        assert self.seen.pricing is not None, "something has run"
        facts = self.seen.pricing.facts(self.seen.longest)
        print("\n".join([f"\nprices: {facts['prices']}", *(f"extrapolated: {each}" for each in facts["extrapolated"])]))
        return facts


def shape(args: argparse.Namespace) -> str:
    drawn = (
        f"prompts {args.input[0]} (p90 {args.input[1]}), answers {args.output[0]} ({args.output[1]}), Poisson arrivals"
    )
    return f"{args.requests} requests, {f'trace {args.trace.name}' if args.trace else drawn}"


def create(args: argparse.Namespace) -> Bench:
    """Raises ConfigError."""
    for name, low, high in (("--input", *args.input), ("--output", *args.output)):
        if not 1 <= low <= high:
            raise ConfigError(
                f"{name} is {low} {high}; give a median of at least 1, and a 90th percentile that is not below it."
            )
    if not 2 <= args.requests <= MOST_ROWS or args.max_len < 2 or args.seed < 0:
        given = f"--requests is {args.requests:,}, --max-len {args.max_len} and --seed {args.seed}"
        raise ConfigError(f"{given}; give at least 2, 2 and 0, and at most {MOST_ROWS:,} requests.")
    path = Path(args.model)
    source = find_model(
        ModelConfig(model=str(path.parent if path.name == "config.json" else args.model), load_format="dummy")
    )
    device = find_device(args.device, threads=1, memory=None, free_memory=0)
    return Bench(families.spec_from_config(source.config), device, _asked(args), args.trace is not None, args.seed)


def _asked(args: argparse.Namespace) -> list[LoadRequest]:
    if args.trace is not None:
        return traced(
            args.trace, count=args.requests, speed=1.0, max_prompt=args.max_len // 2, max_output=args.max_len // 2
        )
    draw = np.random.default_rng(args.seed)
    prompts = lognormal(draw, args.input, args.requests)
    outputs = np.minimum(lognormal(draw, args.output, args.requests), args.max_len // 2)
    return [
        LoadRequest(int(min(prompt, args.max_len - output)), int(output))
        for prompt, output in zip(prompts, outputs, strict=True)
    ]


def lognormal(draw: np.random.Generator, quantiles: tuple[int, int], count: int) -> np.ndarray:
    """Lengths with this median and 90th percentile."""
    median, p90 = quantiles
    drawn = np.exp(math.log(median) + draw.standard_normal(count) * (math.log(p90 / median) / P90))
    return np.maximum(1, drawn.astype(np.int64))
