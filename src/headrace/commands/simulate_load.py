"""The load of ``headrace simulate``: flags, and what they mean.

What lives here: flags to requests and the limits they are held against. What may not: drawing or reading them (planner/workload.py).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.config import EngineConfig, ServerConfig
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from headrace.planner.simulator import Load
    from headrace.planner.workload import Asked

CLOSED_LOOP = 8  # clients, as bench serve has them
COUNTS = (
    "num_prompts",
    "input_len",
    "output_len",
    "num_prefixes",
    "max_input_len",
    "max_output_len",
    "max_concurrency",
    "device_memory",
    "processes",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("workload (names and meanings are those of headrace bench serve)")
    what.add_argument("--workload", choices=("random", "shared-prefix", "trace"), default="random", help="default: random")
    what.add_argument("--num-prompts", type=int, help="requests (default: 64; of a trace, all)")
    what.add_argument("--input-len", type=int, default=128, help="prompt tokens a request (default: 128)")
    what.add_argument("--output-len", type=int, default=64, help="output tokens (default: 64)")
    what.add_argument("--random-range-ratio", type=float, default=0.0, help="lengths are drawn from length * (1 ± RATIO) (default: 0)")
    what.add_argument("--prefix-len", type=int, default=256, help="shared prefix, before the prompt tokens (default: 256)")
    what.add_argument("--num-prefixes", type=int, default=1, help="different shared prefixes (default: 1)")
    what.add_argument("--trace", dest="trace_file", type=Path, metavar="FILE", help=".csv (Azure) or .jsonl (Mooncake)")
    what.add_argument("--trace-speed", type=float, default=1.0, help="times as fast as it was recorded (default: 1)")
    what.add_argument("--max-input-len", type=int, help="longer prompts of a trace are cut to this; without it they are an error")
    what.add_argument("--max-output-len", type=int, help="longer answers of a trace are cut to this; without it they are an error")
    what.add_argument("--request-rate", type=float, help="open loop: arrivals a second (inf: all at once); without it a closed loop")
    what.add_argument("--burstiness", type=float, default=1.0, help="shape of the gamma distributed gaps; 1 is Poisson, inf all equal (default: 1)")
    what.add_argument("--max-concurrency", type=int, help=f"at most so many requests at once (closed loop: default {CLOSED_LOOP})")
    what.add_argument("--stepwise", action="store_true", help="never take steps that are alike many at once: the same figures, slower")


def check_numbers(args: argparse.Namespace) -> None:
    """Raises ConfigError."""
    for name in COUNTS:
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} is {value}; give at least 1.")
    if args.prefix_len < 0 or not 0 <= args.random_range_ratio <= 1:
        raise ConfigError(f"--prefix-len is {args.prefix_len} and --random-range-ratio {args.random_range_ratio:g}; give at least 0, and 0 to 1.")
    wrong = [each for each in args.metric_percentiles if not 0 <= each <= 100]
    if wrong:
        raise ConfigError(f"--metric-percentiles has {wrong[0]:g}; give numbers from 0 to 100.")


def load_of(args: argparse.Namespace, config: EngineConfig, server: ServerConfig, rate: float | None) -> Load:
    """``rate`` stands for --request-rate. Raises ConfigError."""
    from headrace.bench.statistics import parse_goodput
    from headrace.planner.simulator import Load

    open_loop = rate is not None or args.workload == "trace"
    room = args.max_concurrency or (None if open_loop else CLOSED_LOOP)
    asked = _trace(args, rate) if args.workload == "trace" else _drawn(args, config.model.seed, rate)
    return Load(asked, config.model.seed, room, server.max_queue, parse_goodput(args.goodput), args.metric_percentiles, args.stepwise)


def _trace(args: argparse.Namespace, rate: float | None) -> list[Asked]:
    from headrace.planner.workload import traced

    if args.trace_file is None:
        raise ConfigError("--workload trace needs a file; name it with --trace FILE.")
    speed, limits = args.trace_speed, {"max_prompt": args.max_input_len, "max_output": args.max_output_len}
    return traced(args.trace_file, count=args.num_prompts, speed=speed, rate=rate, **limits)


def _drawn(args: argparse.Namespace, seed: int, rate: float | None) -> list[Asked]:
    from headrace.bench.workload import Lengths
    from headrace.planner.workload import arriving, drawn

    lengths = Lengths(args.input_len, args.output_len, args.random_range_ratio)
    prefix = args.prefix_len if args.workload == "shared-prefix" else 0
    asked = drawn(args.num_prompts or 64, lengths, prefix=prefix, num_prefixes=args.num_prefixes, seed=seed)
    return asked if rate is None else arriving(asked, rate, burstiness=args.burstiness, seed=seed)


def shape(args: argparse.Namespace, count: int) -> str:
    """The load in words."""
    if args.workload == "trace":
        speed = f"{args.trace_speed:g} times as fast" if args.request_rate is None else f"{args.request_rate:g} requests/s"
        return f"trace {args.trace_file.name}, {count} requests, {speed}"
    rate = args.request_rate
    load = f"open loop, {rate:g} requests/s" if rate is not None else f"closed loop, {args.max_concurrency or CLOSED_LOOP} at once"
    return f"{args.workload}, {count} requests, {args.input_len} in, {args.output_len} out; {load}"
