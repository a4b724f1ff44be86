"""``python -m lab policies-served``: what policies are worth on a server of this machine, beside what the simulation
says of the same load.

A server that goes by first come, first served and one with the policy are started in turn, each for one run; both are
asked the same lengths at the same times (never the same ids, so nothing is answered from a cache that the simulation
has not got). A load of 1 is what the first kind of server ends a second when everything is asked at once, measured at
the beginning of each comparison; the simulation is asked the same load of what it ends itself, so that a machine that
is slower today than when its prices were fitted does not make another load of it.

What lives here: the order of runs, the flags, the table. What may not: the cases and their figures (policy_cases.py),
servers (own_server.py), sending (load.py), modelling (planner/).
"""

from __future__ import annotations

import argparse
import asyncio
import math
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from headrace.bench.arguments import count, output
from headrace.bench.load import HttpClient, LoadGenerator, first_model
from headrace.bench.serve import limits_of
from headrace.bench.sweep import Sweep
from headrace.config import EngineConfig
from headrace.errors import ConfigError
from headrace.models import families
from headrace.models.source import find_model
from headrace.observe.report import machine_facts, print_facts, say, table, write_json
from headrace.planner.devices import Device, find_device, with_calibration
from headrace.planner.pricing import Pricing
from headrace.planner.simulator import Load, simulate
from headrace.planner.workload.conversations import Conversation, conversations_of
from headrace.planner.workload.load import BENCH_VOCAB, LoadRequest, arriving
from headrace.planner.workload.statistics import Sample
from headrace.spec import DecoderSpec
from lab.jobs import config_for, flags_of
from lab.own_server import own_server
from lab.policy_cases import CASES, Case, Run

ROWS = 4  # sequences at once: few requests are an overload
PROBE = 32  # requests that are asked at once to see what the server can do
WARM = 4  # requests before each run
COLUMNS = (
    "policy",
    "figure",
    "load",
    "requests/s",
    "fcfs",
    "policy's",
    "times",
    "simulated fcfs",
    "simulated",
    "times, simulated",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="folder or hub id; without it the demo model")
    parser.add_argument(
        "--only", nargs="+", choices=sorted(CASES), default=list(CASES), help="what is compared (default: all)"
    )
    parser.add_argument(
        "--seconds", type=float, default=10.0, help="of arrivals; a run lasts that times its load (default: 10)"
    )
    parser.add_argument("--repeats", type=count, default=2, help="runs of each side, in turn (default: 2)")
    parser.add_argument("--seed", type=int, default=0, help="of lengths and arrivals (default: 0)")
    parser.add_argument(
        "--calibration",
        type=Path,
        metavar="FILE",
        help="prices for the simulation (python -m lab truth --keep DIR makes them)",
    )
    parser.add_argument("--output-json", type=output, metavar="FILE", help="write every run")
    parser.add_argument("flags", nargs="*", metavar="-- FLAG", help="flags of the engine, behind --")


def run(args: argparse.Namespace, config: EngineConfig) -> int:
    if not 0.0 < args.seconds <= 600.0:
        raise ConfigError(f"--seconds is {args.seconds:g}; give a number above 0 and up to 600.")
    bench = _prepared(args, config)
    facts = machine_facts(limits_of("localhost"), model=str(args.model or "demo"), shape=_shape(args, bench))
    print_facts(facts)
    sweep = Sweep()
    with tempfile.TemporaryDirectory(prefix="headrace-policies-") as folder:
        found = dict(sweep.take((name, _compare(bench, CASES[name], Path(folder), args)) for name in args.only))
    print(f"\n{table(COLUMNS, [_row(CASES[name], each) for name, each in found.items()])}")
    for line in dict.fromkeys(line for each in found.values() for line in each.prices):
        print(line)
    if args.output_json:
        write_json(
            args.output_json,
            {"facts": facts, "found": {name: _as_dict(CASES[name], each) for name, each in found.items()}},
        )
    return sweep.status()


@dataclass(frozen=True, slots=True)
class _Bench:
    """What stays the same from run to run. ``config``: of the side without the policy, and ``flags`` are the same for a
    server."""

    config: EngineConfig
    flags: Sequence[str]
    spec: DecoderSpec
    device: Device


@dataclass(frozen=True, slots=True)
class _Found:
    """``measured``: pairs of runs, without and with the policy, as they followed each other."""

    rates: tuple[float, float]  # requests a second that were asked, of the server and of the simulation
    measured: Sequence[tuple[Run, Run]]
    simulated: tuple[Run, Run]
    prices: Sequence[str]


def _prepared(args: argparse.Namespace, config: EngineConfig) -> _Bench:
    from headrace.worker.host import available_memory, physical_cores
    from headrace.worker.settings import device_kind

    own = args.model is not None
    config = config_for(args.model, config) if own else config
    flags = flags_of(config, args.flags) if own else list(args.flags)
    rows, threads = config.scheduler.max_num_seqs or ROWS, config.device.threads or max(1, physical_cores()[0] - 1)
    if device_kind(config.device.device) != "cpu":
        raise ConfigError("These loads are made for a CPU; give -- --device cpu.")
    config = replace(
        config,
        scheduler=replace(config.scheduler, max_num_seqs=rows),
        device=replace(config.device, threads=threads, device="cpu"),
    )
    device = find_device("cpu", threads=threads, memory=None, free_memory=available_memory())
    if args.calibration is not None:
        device = with_calibration(device, args.calibration)
    spec = families.spec_from_config(
        find_model(replace(config.model, load_format="dummy") if own else config.model).config
    )
    return _Bench(
        config, [*flags, "--max-num-seqs", str(rows), "--threads", str(threads), "--device", "cpu"], spec, device
    )


def _shape(args: argparse.Namespace, bench: _Bench) -> str:
    config = bench.config
    at_once = f"{config.scheduler.max_num_seqs} sequences at once, {config.device.threads} computing threads"
    return f"{at_once}; {args.seconds:g} s of Poisson arrivals; {args.repeats} runs of each side in turn"


def _compare(bench: _Bench, case: Case, folder: Path, args: argparse.Namespace) -> _Found:
    probe = case.asked(PROBE, args.seed)
    ended = (
        len(probe) / _served(bench, case, {}, probe, folder, salt=0).seconds,
        len(probe) / _simulated(bench, {}, probe, args.seed)[0].seconds,
    )
    rate, simulated_rate = (case.load * each for each in ended)
    lengths = case.asked(max(8, round(rate * args.seconds)), args.seed)
    say(
        f"{case.name}: {ended[0]:.3g} requests/s end ({ended[1]:.3g} simulated); {len(lengths)} are asked at {rate:.3g} a second"
    )
    asked, measured = arriving(lengths, rate, burstiness=1.0, seed=args.seed), []
    for repeat in range(args.repeats):
        off, on = (
            _served(bench, case, fields, asked, folder, salt=2 * repeat + side + 1)
            for side, fields in enumerate(({}, case.fields))
        )
        say(f"{case.name}: {case.figure} {case.value(off):.4g} without, {case.value(on):.4g} with")
        measured.append((off, on))
    asked = arriving(lengths, simulated_rate, burstiness=1.0, seed=args.seed)
    (off, pricing, longest), (on, *_) = (_simulated(bench, fields, asked, args.seed) for fields in ({}, case.fields))
    prices = [
        f"prices of the simulation: {pricing.origin}",
        *(f"extrapolated: {each}" for each in pricing.extrapolated(longest)),
    ]
    return _Found((rate, simulated_rate), measured, (off, on), prices)


# --- runs


def _served(
    bench: _Bench, case: Case, fields: Mapping[str, Any], asked: Sequence[LoadRequest], folder: Path, salt: int
) -> Run:
    """One run on a server of its own. Raises BenchFailed."""
    keys = [f"key-of-{name}" for name in case.tenants]
    flags = [word for name, value in fields.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    key_flags = ["--api-key", *keys] if keys else []
    with own_server(
        [*bench.flags, *flags, *key_flags], folder / "server.log", api_key=keys[0] if keys else None
    ) as url:
        return asyncio.run(_load(url, dict(zip(case.tenants, keys, strict=True)) or {"": None}, asked, salt))


async def _load(url: str, keys: Mapping[str, str | None], asked: Sequence[LoadRequest], salt: int) -> Run:
    """Each tenant has connections of its own."""
    made = conversations_of(asked, vocab_size=BENCH_VOCAB, seed=salt)
    clients = {tenant: HttpClient(url, api_key=key) for tenant, key in keys.items()}
    try:
        model = await first_model(next(iter(clients.values())))
        generators = {
            tenant: LoadGenerator(client, model, "completions", math.inf, as_ids=True)
            for tenant, client in clients.items()
        }
        await next(iter(generators.values())).warm_up(made, WARM)
        begin = time.perf_counter()
        await asyncio.gather(*(generator.run(_of(tenant, asked, made)) for tenant, generator in generators.items()))
        return Run({tenant: generator.samples for tenant, generator in generators.items()}, time.perf_counter() - begin)
    finally:
        for client in clients.values():
            await client.close()


def _of(tenant: str, asked: Sequence[LoadRequest], made: Sequence[Conversation]) -> list[Conversation]:
    return [conversation for conversation, each in zip(made, asked, strict=True) if each.tenant == tenant]


def _simulated(
    bench: _Bench, fields: Mapping[str, Any], asked: Sequence[LoadRequest], seed: int
) -> tuple[Run, Pricing, int]:
    config = replace(bench.config, scheduler=replace(bench.config.scheduler, **fields))
    report = simulate(bench.spec, config, bench.device, Load(asked, seed=seed, max_queue=len(asked) + 1))
    by_tenant: dict[str, list[Sample]] = {}
    for sample, each in zip(report.samples, asked, strict=True):
        by_tenant.setdefault(each.tenant, []).append(sample)
    return Run(by_tenant, float(report.figures["duration"])), report.pricing, report.longest


# --- words


def _row(case: Case, found: _Found) -> list[Any]:
    off, on = (_told([case.value(pair[side]) for pair in found.measured]) for side in (0, 1))
    times = _told([case.times(*pair) for pair in found.measured])
    return [
        case.name,
        case.figure,
        case.load,
        found.rates[0],
        off,
        on,
        times,
        *map(case.value, found.simulated),
        case.times(*found.simulated),
    ]


def _told(values: Sequence[float | None]) -> str:
    """The median, and the spread where there is one."""
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return "from nothing"
    spread = f" ({min(known):.3g} – {max(known):.3g})" if len(known) > 1 else ""
    return f"{median(known):.3g}{spread}"


def _as_dict(case: Case, found: _Found) -> dict[str, Any]:
    told = {"figure": case.figure, "load": case.load, "requests_a_second": found.rates, "prices": list(found.prices)}
    return told | {
        "measured": [_pair(case, *pair) for pair in found.measured],
        "simulated": _pair(case, *found.simulated),
    }


def _pair(case: Case, off: Run, on: Run) -> dict[str, float | None]:
    return {"fcfs": case.value(off), "policy": case.value(on), "times": case.times(off, on)}
