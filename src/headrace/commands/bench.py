"""``headrace bench``: selects a benchmark and its engine.

What lives here: the list of benchmarks, and the flags of the selected one. What may not: any measuring (bench/). A
benchmark's module is imported only when it runs, so ``headrace bench --help`` needs none of them.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from headrace.bench.arguments import declare, declared
from headrace.config import EngineConfig
from headrace.flags import CommandParser, add_config_flags, add_model_argument, engine_config


@dataclass(frozen=True, slots=True)
class Benchmark:
    """One sub-command: functions ``add_arguments`` and ``run`` of ``module``. ``flags``: its section of flags.toml,
    where that is all. ``model``: takes MODEL; ``engine``: takes the engine's flags."""

    module: str
    help: str
    run: str = "run"
    model: bool = False
    engine: bool = False
    flags: str | None = None

    def load(self) -> ModuleType:
        return importlib.import_module(self.module)

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        if self.flags is None:
            self.load().add_arguments(parser)
        else:
            declare(parser, self.flags)
        if self.model:
            add_model_argument(parser)
        if self.engine:
            add_config_flags(parser, EngineConfig)


BENCHMARKS = {name: Benchmark(**row) for name, row in declared()["benchmarks"].items()}


class _LateParser(CommandParser):
    """Adds its arguments when it is used."""

    benchmark: Benchmark | None = None

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self.declare()
        return super().parse_known_args(args, namespace)

    def declare(self) -> None:
        benchmark, self.benchmark = self.benchmark, None
        if benchmark is not None:
            benchmark.add_arguments(self)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    declare_all(parser, BENCHMARKS)


def declare_all(parser: argparse.ArgumentParser, benchmarks: Mapping[str, Benchmark]) -> None:
    commands = parser.add_subparsers(
        metavar="BENCHMARK", title="benchmarks", dest="benchmark", required=True, parser_class=_LateParser
    )
    for name, benchmark in benchmarks.items():
        command = commands.add_parser(
            name, help=benchmark.help, description=benchmark.help[0].upper() + benchmark.help[1:] + "."
        )
        command.benchmark = benchmark


def run(args: argparse.Namespace) -> int:
    return run_one(BENCHMARKS[args.benchmark], args)


def run_one(benchmark: Benchmark, args: argparse.Namespace) -> int:
    measure = getattr(benchmark.load(), benchmark.run)
    status: int = measure(args, engine_config(args)) if benchmark.engine else measure(args)
    return status
