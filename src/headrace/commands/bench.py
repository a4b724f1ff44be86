"""``headrace bench``: which benchmark, with which engine.

What lives here: the list of benchmarks, and their flags when one is chosen. What may not: any measuring (bench/).
A benchmark's module is imported only when it is the one that runs, so ``headrace bench --help`` needs none of them.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from headrace.config import EngineConfig
from headrace.flags import CommandParser, add_config_flags, add_model_argument, engine_config


@dataclass(frozen=True, slots=True)
class Benchmark:
    """One sub-command: functions ``arguments`` and ``run`` of ``module``. ``flags``: the module that has ``arguments``, where that is
    another, because ``module`` itself imports torch. ``model``: takes MODEL; ``engine``: the engine's flags.

    ``behind``: it takes the engine's flags behind ``--``, as ``args.flags``, because they are given on to other processes.
    """

    module: str
    help: str
    arguments: str = "add_arguments"
    run: str = "run"
    model: bool = False
    engine: bool = False
    behind: bool = False
    flags: str | None = None

    def load(self) -> ModuleType:
        return importlib.import_module(self.module)

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        getattr(importlib.import_module(self.flags or self.module), self.arguments)(parser)
        if self.model:
            add_model_argument(parser)
        if self.engine:
            add_config_flags(parser, EngineConfig)


BENCHMARKS: dict[str, Benchmark] = {
    "throughput": Benchmark(
        "headrace.bench.offline", "many requests through the offline API", "add_throughput_arguments", "run_throughput", model=True, engine=True
    ),
    "latency": Benchmark(
        "headrace.bench.offline", "one batch from start to end, and its steps", "add_latency_arguments", "run_latency", model=True, engine=True
    ),
    "serve": Benchmark("headrace.bench.serve", "load on any server that speaks OpenAI's API"),
    "rival": Benchmark("headrace.bench.rival", "the same shape on llama.cpp, both sides in turn", model=True, engine=True),
    "startup": Benchmark("headrace.bench.startup", "from the command to readiness, taken apart"),
    "table": Benchmark("headrace.bench.table", "every row of the performance table, beside its floor and a peer's figure", behind=True),
    "truth": Benchmark("headrace.bench.truth", "how true a simulation is here: prices fitted to one load, held against another", behind=True),
    "profile": Benchmark("headrace.bench.profile_page", "where a start's time goes and where a step's, on one page", behind=True),
    "kernels": Benchmark(
        "headrace.bench.kernels", "every candidate of every operation beside its floor and its twin", flags="headrace.bench.kernels_flags"
    ),
    "ablate": Benchmark("headrace.bench.ablate", "a technique on and off, over a whole load curve", engine=True),
    "arena": Benchmark("headrace.bench.arena", "activations planned by lifetime beside torch's allocator (GPU)", model=True, engine=True),
    "capacity": Benchmark("headrace.bench.capacity", "requests a second within a bound on the time between tokens, simulated"),
    "overload": Benchmark("headrace.bench.overload", "requests served in time when more are asked than a device can do, simulated"),
    "policies": Benchmark("headrace.bench.policies", "orders of service, each by its own measure, over a whole load curve, simulated"),
    "policies-served": Benchmark("headrace.bench.policies_served", "the same on a CPU server of this machine, beside its simulation", behind=True),
    "control-plane": Benchmark("headrace.bench.control_plane", "scheduling, cache and update without a model"),
    "masks": Benchmark("headrace.bench.masks", "structured output: a schema's first mask, and each token's"),
    "stream-rate": Benchmark("headrace.bench.stream_rate", "tokens a second one server streams, nothing computed"),
}


class _LateParser(CommandParser):
    """Gets its arguments when it is used."""

    benchmark: Benchmark | None = None

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self.declare()
        return super().parse_known_args(args, namespace)

    def declare(self) -> None:
        benchmark, self.benchmark = self.benchmark, None
        if benchmark is not None:
            benchmark.add_arguments(self)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(metavar="BENCHMARK", title="benchmarks", dest="benchmark", required=True, parser_class=_LateParser)
    for name, benchmark in BENCHMARKS.items():
        command = commands.add_parser(name, help=benchmark.help, description=benchmark.help[0].upper() + benchmark.help[1:] + ".")
        command.benchmark = benchmark


def run(args: argparse.Namespace) -> int:
    benchmark = BENCHMARKS[args.benchmark]
    measure = getattr(benchmark.load(), benchmark.run)
    status: int
    if benchmark.behind:
        status = measure(args, _config_behind(args.benchmark, args.flags))
    else:
        status = measure(args, engine_config(args)) if benchmark.engine else measure(args)
    return status


def _config_behind(name: str, flags: Sequence[str]) -> EngineConfig:
    """A wrong flag is said before minutes are spent."""
    parser = CommandParser(prog=f"headrace bench {name} … --")
    add_config_flags(parser, EngineConfig)
    return engine_config(parser.parse_args(list(flags)))
