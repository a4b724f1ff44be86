"""``headrace simulate``: the engine's figures on a device that is not there, on virtual time.

What lives here: flags to a device, a workload and a load, and printing. What may not: any modelling (planner/).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.config import EngineConfig, ServerConfig
from headrace.errors import ConfigError
from headrace.flags import add_config_flags, add_model_argument, engine_config, parse_size, server_config

if TYPE_CHECKING:
    from headrace.models.source import ModelSource
    from headrace.planner.against import Compared
    from headrace.planner.devices import Device
    from headrace.planner.simulator import Load, Report
    from headrace.planner.workload import Asked

CLOSED_LOOP = 8  # clients, as bench serve has them
DEVICES = "h200, h100, a100, l40s, rtx4090, cpu (this one, measured) or a profile's file (*.json)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    add_config_flags(parser, EngineConfig, ServerConfig)
    parser.conflict_handler = "resolve"  # --device and --trace mean a simulation's here
    where = parser.add_argument_group("device")
    where.add_argument("--device", dest="simulated", metavar="DEVICE", required=True, help=DEVICES)
    where.add_argument("--device-memory", type=parse_size, metavar="SIZE", help="bytes of memory the device has, instead of what is known of it")
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
    shown = parser.add_argument_group("figures")
    shown.add_argument("--goodput", nargs="+", default=[], metavar="METRIC:MS", help="limits a good request meets: ttft:500 tpot:50 e2el:5000")
    shown.add_argument("--metric-percentiles", type=float, nargs="+", default=[99.0], metavar="P", help="default: 99")
    shown.add_argument("--against", type=Path, metavar="RUN.json", help="a run of bench serve with the same load: print the error of each figure")
    shown.add_argument("--output-json", type=Path, metavar="FILE", help="write figures and every request, as bench serve does")
    shown.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the distributions, as bench serve does")


def run(args: argparse.Namespace) -> int:
    """Exit status 1 when every request failed."""
    from headrace.bench.report import load_pyplot
    from headrace.models import families
    from headrace.planner.against import compare
    from headrace.planner.simulator import simulate

    if args.plot:
        load_pyplot()
    config, server = engine_config(args), server_config(args)
    source = _source(config)
    _check_numbers(args)
    device, load = _device(args, config), _load(args, config, server)
    begin = time.perf_counter()
    report = simulate(families.spec_from_config(source.config), config, device, load)
    facts = _facts(args, source, device, report, time.perf_counter() - begin)
    compared = compare(report.figures, args.against) if args.against else []
    _print(facts, report, compared)
    _write(args, facts, report, compared)
    return 0 if report.figures["completed"] else 1


def _print(facts: Mapping[str, Any], report: Report, compared: Sequence[Compared]) -> None:
    from headrace.bench.report import print_facts, print_figures, table
    from headrace.bench.statistics import failure_reasons

    print_facts(facts)
    print()
    print_figures(report.figures)
    for reason, count in failure_reasons(report.samples).items():
        print(f"failed: {count} x {reason}")
    if compared:
        rows = [[each.figure, each.simulated, each.measured, f"{each.error:+.1%}"] for each in compared]
        print(f"\n{table(('figure', 'simulated', 'measured', 'error'), rows)}")


def _write(args: argparse.Namespace, facts: Mapping[str, Any], report: Report, compared: Sequence[Compared]) -> None:
    from headrace.bench.report import write_json

    if args.output_json:
        errors = {f"error_of_{each.figure}": each.error for each in compared}
        requests = [asdict(sample) for sample in report.samples]
        write_json(args.output_json, {"facts": facts, **report.figures, **errors, "requests": requests})
    if args.plot:
        from headrace.bench.serve import plot_distributions

        plot_distributions(args.plot, facts, report.samples)


def _source(config: EngineConfig) -> ModelSource:
    """The model's description; its weights are not looked for. A config.json may be named itself."""
    from headrace.models.source import find_model

    model = config.model.model
    if model is not None and Path(model).name == "config.json":
        model = str(Path(model).parent)
    return find_model(replace(config.model, model=model, load_format="dummy"))


def _device(args: argparse.Namespace, config: EngineConfig) -> Device:
    from headrace.planner.devices import find_device
    from headrace.worker.host import available_memory, physical_cores

    threads = config.device.threads or physical_cores()[0]
    return find_device(args.simulated, threads=threads, memory=args.device_memory, free_memory=available_memory())


def _load(args: argparse.Namespace, config: EngineConfig, server: ServerConfig) -> Load:
    from headrace.bench.statistics import parse_goodput
    from headrace.planner.simulator import Load

    open_loop = args.request_rate is not None or args.workload == "trace"
    room = args.max_concurrency or (None if open_loop else CLOSED_LOOP)
    asked = _asked(args, config.model.seed)
    return Load(asked, config.model.seed, room, server.max_queue, parse_goodput(args.goodput), args.metric_percentiles, args.stepwise)


def _asked(args: argparse.Namespace, seed: int) -> list[Asked]:
    from headrace.planner.workload import arriving

    if args.workload == "trace":
        return _trace(args)
    asked = _drawn(args, seed)
    return asked if args.request_rate is None else arriving(asked, args.request_rate, burstiness=args.burstiness, seed=seed)


def _check_numbers(args: argparse.Namespace) -> None:
    for name in ("num_prompts", "input_len", "output_len", "num_prefixes", "max_input_len", "max_output_len", "max_concurrency", "device_memory"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} is {value}; give at least 1.")
    if args.prefix_len < 0 or not 0 <= args.random_range_ratio <= 1:
        raise ConfigError(f"--prefix-len is {args.prefix_len} and --random-range-ratio {args.random_range_ratio:g}; give at least 0, and 0 to 1.")
    wrong = [each for each in args.metric_percentiles if not 0 <= each <= 100]
    if wrong:
        raise ConfigError(f"--metric-percentiles has {wrong[0]:g}; give numbers from 0 to 100.")


def _trace(args: argparse.Namespace) -> list[Asked]:
    from headrace.planner.workload import traced

    if args.trace_file is None:
        raise ConfigError("--workload trace needs a file; name it with --trace FILE.")
    if args.request_rate is not None:
        raise ConfigError("A trace brings its own arrivals; use --trace-speed instead of --request-rate.")
    return traced(args.trace_file, count=args.num_prompts, speed=args.trace_speed, max_prompt=args.max_input_len, max_output=args.max_output_len)


def _drawn(args: argparse.Namespace, seed: int) -> list[Asked]:
    from headrace.bench.workload import Lengths
    from headrace.planner.workload import drawn

    lengths = Lengths(args.input_len, args.output_len, args.random_range_ratio)
    prefix = args.prefix_len if args.workload == "shared-prefix" else 0
    return drawn(args.num_prompts or 64, lengths, prefix=prefix, num_prefixes=args.num_prefixes, seed=seed)


def _facts(args: argparse.Namespace, source: ModelSource, device: Device, report: Report, seconds: float) -> dict[str, Any]:
    from headrace.bench.report import machine_facts

    blocks = " + ".join(f"{group.num_blocks} blocks of {group.spec.block_size}" for group in report.info.kv_groups)
    chosen = ", ".join(f"{each.name} {each.value}" for each in report.decisions)
    return machine_facts(
        str(device),
        shape=_shape(args, len(report.samples)),
        server=f"simulated, model {source.name}",
        engine=f"{chosen}; KV {blocks}",
        took=f"{seconds:.1f} s of this machine for {report.figures['duration']:.1f} s",
    )


def _shape(args: argparse.Namespace, count: int) -> str:
    if args.workload == "trace":
        return f"trace {args.trace_file.name}, {count} requests, {args.trace_speed:g} times as fast"
    rate = args.request_rate
    load = f"open loop, {rate:g} requests/s" if rate is not None else f"closed loop, {args.max_concurrency or CLOSED_LOOP} at once"
    return f"{args.workload}, {count} requests, {args.input_len} in, {args.output_len} out; {load}"
