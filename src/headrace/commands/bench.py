"""``headrace bench``: which benchmark, with which engine.

What lives here: the list of benchmarks and their flags. What may not: any measuring (bench/). Importing this costs little:
what needs torch is imported by the benchmark that runs.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass

from headrace.bench import ablate, control_plane, offline, rival, serve, startup
from headrace.config import EngineConfig
from headrace.flags import add_config_flags, add_model_argument, engine_config

Run = Callable[[argparse.Namespace], int]


@dataclass(frozen=True, slots=True)
class Benchmark:
    """One sub-command. ``model``: takes MODEL; ``engine``: takes the engine's flags."""

    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Run
    model: bool = False
    engine: bool = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(metavar="BENCHMARK", title="benchmarks", dest="benchmark", required=True)
    for name, benchmark in BENCHMARKS.items():
        command = commands.add_parser(name, help=benchmark.help, description=benchmark.help[0].upper() + benchmark.help[1:] + ".")
        benchmark.add_arguments(command)
        if benchmark.model:
            add_model_argument(command)
        if benchmark.engine:
            add_config_flags(command, EngineConfig)


def run(args: argparse.Namespace) -> int:
    return BENCHMARKS[args.benchmark].run(args)


def _with_engine(measure: Callable[[argparse.Namespace, EngineConfig], int]) -> Run:
    return lambda args: measure(args, engine_config(args))


def _add_stream_rate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--base-url", help="a server that is running; without it one is started with the keyed-hash executor")
    parser.add_argument("--api-key", help="sent as bearer token")
    parser.add_argument("--clients", type=int, default=64, help="streams at once (default: 64)")
    parser.add_argument("--tokens", type=int, default=1000, help="tokens a client (default: 1000)")
    parser.add_argument("--endpoint", choices=("chat", "completions"), default="completions", help="default: completions")
    parser.add_argument("--repeats", type=int, default=3, help="timed repeats (default: 3)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")


def _run_stream_rate(args: argparse.Namespace) -> int:
    from headrace.bench import stream_rate

    if args.base_url:
        shape = {"clients": args.clients, "tokens": args.tokens, "route": args.endpoint, "api_key": args.api_key}
        rates = [stream_rate.measure(args.base_url, **shape) for _ in range(args.repeats)]
    else:
        rates = stream_rate.measure_own(args.clients, args.tokens, args.endpoint, args.repeats)
    print(json.dumps([asdict(rate) for rate in rates], indent=1) if args.json else "\n".join(map(stream_rate.show, rates)))
    return 0


_run_throughput, _run_latency = _with_engine(offline.run_throughput), _with_engine(offline.run_latency)

BENCHMARKS: dict[str, Benchmark] = {
    "throughput": Benchmark("many requests through the offline API", offline.add_throughput_arguments, _run_throughput, model=True, engine=True),
    "latency": Benchmark("one batch from start to end, and its steps", offline.add_latency_arguments, _run_latency, model=True, engine=True),
    "serve": Benchmark("load on any server that speaks OpenAI's API", serve.add_arguments, serve.run),
    "rival": Benchmark("the same shape on llama.cpp, in turn", rival.add_arguments, _with_engine(rival.run), model=True, engine=True),
    "startup": Benchmark("from the command to readiness, taken apart", startup.add_arguments, startup.run),
    "ablate": Benchmark("a technique on and off, over a whole load curve", ablate.add_arguments, _with_engine(ablate.run), engine=True),
    "control-plane": Benchmark("scheduling, cache and update without a model", control_plane.add_arguments, control_plane.run),
    "stream-rate": Benchmark("tokens a second one server streams, with nothing computed", _add_stream_rate_arguments, _run_stream_rate),
}
