"""``python -m lab NAME …``, in the repository's root: which measurement of what Headrace claims, with which engine.

What lives here: the list. What may not: any measuring. What measures a user's deployment is ``headrace bench``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.cli import answer
from headrace.commands.bench import Benchmark, declare_all, run_one
from headrace.config import EngineConfig
from headrace.flags import CommandParser, add_config_flags, engine_config

PROG = "python -m lab"


@dataclass(frozen=True, slots=True)
class Behind(Benchmark):
    """Takes the engine's flags behind ``--``, as ``args.flags``, because they are given on to other processes."""


BENCHMARKS: dict[str, Benchmark] = {
    "table": Behind("lab.table", "every row of the performance table, beside its floor and a peer's figure"),
    "truth": Behind("lab.truth", "how true a simulation is here: prices fitted to one load, held against another"),
    "startup": Benchmark(
        "lab.startup",
        "the time from the command until no step is slower than a steady one, by stage",
        flags="startup.arguments",
    ),
    "profile": Behind("lab.profile_page", "where a start's time goes and where a step's, on one page"),
    "ranks": Benchmark(
        "lab.ranks", "one model over several numbers of ranks, and their sums alone", model=True, engine=True
    ),
    "embeddings": Benchmark(
        "lab.embeddings", "texts embedded by the engine and in a torch loop, in turn", model=True, engine=True
    ),
    "sleep": Benchmark("lab.sleep", "asleep and awake again, beside the link's time", model=True, engine=True),
    "share": Behind("lab.share", "processes with one copy of the weights: ready when, with how much memory"),
    "skip": Benchmark("lab.skip", "does the device wait for launches, or they for it (GPU)", model=True, engine=True),
    "rival": Benchmark("lab.rival", "the same shape on llama.cpp, both sides in turn", model=True, engine=True),
    "arena": Benchmark(
        "lab.arena", "activations planned by lifetime beside torch's allocator (GPU)", model=True, engine=True
    ),
    "experts": Benchmark(
        "lab.experts",
        "how evenly placements of experts fill several devices, on rows that they were not made from",
        model=True,
        engine=True,
        flags="experts.arguments",
    ),
    "capacity": Benchmark("lab.capacity", "requests a second within a bound on the time between tokens, simulated"),
    "overload": Benchmark(
        "lab.overload", "requests served in time when more are asked than a device can do, simulated"
    ),
    "policies": Benchmark(
        "lab.policies", "orders of service, each by its own measure, over a whole load curve, simulated"
    ),
    "policies-served": Behind("lab.policies_served", "the same on a CPU server of this machine, beside its simulation"),
    "lossless": Benchmark(
        "lab.lossless", "random requests with drafts and without, bit for bit", model=True, engine=True
    ),
    "speculation": Benchmark(
        "lab.speculation", "drafts on and off, in one engine, turn by turn", model=True, engine=True
    ),
    "train-head": Benchmark("lab.train_head", "a small EAGLE head for a target, trained on what it says itself"),
    "trees": Benchmark(
        "lab.trees", "accepted drafts of trees and of chains of as many tokens", model=True, engine=True
    ),
    "control-plane": Benchmark("lab.control_plane", "scheduling, cache and update without a model"),
    "drafts-host": Benchmark(
        "lab.drafts_host", "what a step with drafts costs the host, over graphs that compute nothing"
    ),
    "masks": Benchmark("lab.masks", "structured output: a schema's first mask, and each token's"),
    "kernels": Benchmark(
        "lab.kernels",
        "every candidate of every operation, compared with its floor and its twin",
        flags="kernels.arguments",
    ),
    "stream-rate": Benchmark("lab.stream_rate", "tokens a second one server streams, nothing computed"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status, as that of ``headrace``."""
    return answer(_run, argv)


def _run(words: list[str]) -> int:
    parser = CommandParser(prog=PROG, description="Measures what Headrace claims.")
    declare_all(parser, BENCHMARKS)
    args = parser.parse_args(words)
    benchmark = BENCHMARKS[args.benchmark]
    return _run_behind(benchmark, args) if isinstance(benchmark, Behind) else run_one(benchmark, args)


def _run_behind(benchmark: Behind, args: argparse.Namespace) -> int:
    """A wrong flag is said before minutes are spent."""
    parser = CommandParser(prog=f"{PROG} {args.benchmark} … --")
    add_config_flags(parser, EngineConfig)
    config = engine_config(parser.parse_args(list(args.flags)))
    status: int = benchmark.load().run(args, config)
    return status


if __name__ == "__main__":
    sys.exit(main())
