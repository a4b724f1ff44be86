"""``headrace bench serve``: load on any server with an OpenAI-compatible API, from this or another engine.

What lives here: the command: from flags to a workload, a run, and printed figures, including those of the server's own
steps (from its /metrics before and after; other servers have none). What may not: sending (load.py), figures and
workloads (planner/workload/), starting servers.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from headrace.bench.arguments import add_server_arguments, declare
from headrace.bench.load import ROUTES, BrokenAnswer, HttpClient, LoadGenerator, first_model
from headrace.bench.load_flags import (
    add_arrival_flags,
    add_figure_flags,
    add_workload_flags,
    arrivals_in_words,
    asked_of,
    check_load_flags,
    lengths_in_words,
)
from headrace.bench.sweep import Sweep
from headrace.observe.report import load_pyplot, machine_facts, plot_curves, print_facts, print_figures, write_json
from headrace.planner.workload.conversations import Conversation, conversations_of
from headrace.planner.workload.statistics import (
    Reader,
    Sample,
    experiences,
    failure_reasons,
    parse_goodput,
    spread_of,
    summarise,
)

LOOPBACK = ("127.0.0.1", "localhost", "::1")
CLOSED_LOOP = 8  # clients
POINTS = 400  # of a drawn curve
LEAST_DRAWN = 0.1  # ms: an axis of powers has no 0
DISTRIBUTIONS: Mapping[str, Callable[[Sample], Sequence[float]]] = {
    "TTFT": lambda sample: [sample.ttft],
    "ITL": lambda sample: sample.gaps,
    "E2E": lambda sample: [sample.e2e],
}
TICK = 0.01  # s between looks at how late the client's own loop is


def add_arguments(parser: argparse.ArgumentParser) -> None:
    where = parser.add_argument_group("server")
    add_server_arguments(where)
    declare(where, "serve.arguments", endpoint={"choices": sorted(ROUTES)})
    add_workload_flags(parser, trace="trace", max_input=8192, max_output=1024)
    add_arrival_flags(parser, clients=CLOSED_LOOP)
    sent = parser.add_argument_group("requests")
    declare(sent, "serve.arguments_2")
    shown = parser.add_argument_group("figures")
    declare(shown, "serve.arguments_3")
    add_figure_flags(shown, plotted="")


def run(args: argparse.Namespace) -> int:
    """Exit status 1 if every request failed."""
    limits = parse_goodput(args.goodput)
    if args.plot:
        load_pyplot()
    conversations = create_workload(args)
    client = HttpClient(args.base_url, api_key=args.api_key, timeout=args.timeout)
    limits_here = limits_of(client.host)
    outcome, sweep = asyncio.run(_measure(args, client, conversations)), Sweep()
    figures = summarise(outcome.samples, outcome.seconds, limits, args.metric_percentiles)
    figures |= experiences(outcome.samples, Reader(args.expected_ttft, args.reading_speed))
    figures |= outcome.step_figures
    if "device_joules" in figures and figures["total_output_tokens"]:
        figures["joules_per_output_token"] = figures["device_joules"] / figures["total_output_tokens"]
    figures |= spread_of(outcome.loop_lags, "client_loop_lag") | {
        "client_cpu_share": outcome.cpu_seconds / outcome.seconds
    }
    facts = machine_facts(
        limits_here, shape=_shape(args, len(conversations)), server=f"{args.base_url}, model {outcome.model}"
    )
    if outcome.stopped:
        facts["stopped"] = (
            f"by Ctrl-C when {len(outcome.samples)} of {sum(len(each.turns) for each in conversations)} requests had ended"
        )
        sweep.stop(facts["stopped"].partition("when ")[2])
    print_facts(facts)
    print()
    print_figures(figures)
    _print_problems(outcome.samples, figures)
    if args.output_json:
        write_json(
            args.output_json, {"facts": facts, **figures, "requests": [asdict(sample) for sample in outcome.samples]}
        )
    if args.plot:
        plot_distributions(args.plot, facts, {"measured": outcome.samples})
    return sweep.status(0 if figures["completed"] else 1)


def limits_of(host: str) -> str:
    """This machine's limits if the server runs on it too, measured before there is any load."""
    if host not in LOOPBACK:
        return "not measured: the server runs on another machine"
    from headrace.worker.profile import glance_limits

    return str(glance_limits())


def create_workload(args: argparse.Namespace) -> list[Conversation]:
    """The conversations that the flags ask for, with arrivals in an open loop. Raises ConfigError."""
    check_load_flags(args, args.trace)
    asked = asked_of(args, trace=args.trace, rate=args.request_rate, seed=args.seed)
    return conversations_of(asked, vocab_size=args.vocab_size, seed=args.seed)


def _shape(args: argparse.Namespace, count: int) -> str:
    what = f"trace {args.trace.name}" if args.workload == "trace" else f"{args.workload}, {lengths_in_words(args)}"
    many = "conversations" if args.workload == "conversation" else "requests"
    return f"{what}, {count} {many}, {args.endpoint}; {arrivals_in_words(args, _concurrency(args))}"


def _concurrency(args: argparse.Namespace) -> float:
    """Open loops have no bound unless one is given."""
    if args.max_concurrency is not None:
        return float(max(1, args.max_concurrency))
    return math.inf if args.request_rate is not None or args.workload == "trace" else CLOSED_LOOP


@dataclass(slots=True)
class Outcome:
    """What the client saw, and how busy the client itself was."""

    model: str
    samples: list[Sample]
    seconds: float
    loop_lags: list[float]
    cpu_seconds: float
    step_figures: dict[str, float]  # of the server's steps; empty where it does not tell
    stopped: bool  # by Ctrl-C; requests under way have no sample


async def _measure(args: argparse.Namespace, client: HttpClient, conversations: Sequence[Conversation]) -> Outcome:
    model = args.model or await first_model(client)
    as_ids = args.endpoint != "chat" and args.workload != "conversation"  # whose history is text
    generator = LoadGenerator(client, model, args.endpoint, _concurrency(args), as_ids=as_ids)
    await generator.warm_up(conversations, args.num_warmups)
    return await measure_load(client, generator, conversations)


async def measure_load(client: HttpClient, generator: LoadGenerator, conversations: Sequence[Conversation]) -> Outcome:
    """Sends ``conversations`` and closes ``client``. Ctrl-C ends it early, with what was answered."""
    before = await read_steps(client)
    lags: list[float] = []
    meter = asyncio.create_task(_watch_loop(lags))
    cpu, begin, stopped = time.process_time(), time.perf_counter(), False
    try:
        await generator.run(conversations)
    except asyncio.CancelledError:  # Ctrl-C, as asyncio.run passes it on: what was answered is told
        if not generator.samples:
            raise
        stopped = True
    seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
    meter.cancel()
    generator.read_late()
    steps = step_figures(before, await read_steps(client))
    await client.close()
    return Outcome(generator.model, generator.samples, seconds, lags, cpu, steps, stopped)


async def _watch_loop(lags: list[float]) -> None:
    """How late this process wakes up from a short sleep, which is what it would add to every timestamp."""
    while True:
        begin = time.perf_counter()
        await asyncio.sleep(TICK)
        lags.append(max(0.0, time.perf_counter() - begin - TICK))


def _print_problems(samples: Sequence[Sample], figures: Mapping[str, Any]) -> None:
    for reason, times in failure_reasons(samples).items():
        print(f"failed: {times} x {reason}")
    if figures["client_cpu_share"] > 0.8:
        share = f"{figures['client_cpu_share']:.0%}"
        print(
            f"note: this client used {share} of a core, so the figures may be its own limit; spread the load over several clients"
        )


def plot_distributions(path: Path, facts: Mapping[str, Any], runs: Mapping[str, Sequence[Sample]]) -> None:
    """Cumulative distributions of TTFT, ITL and E2E, one curve per run."""
    panels = []
    for name, of in DISTRIBUTIONS.items():
        curves = {run: _cumulative([value for sample in samples if sample.error is None and sample.arrivals for value in of(sample)])
                  for run, samples in runs.items()}  # fmt: skip
        panels.append(
            {
                "x": f"{name} (ms)",
                "y": "share of requests" if name != "ITL" else "share of gaps",
                "curves": curves,
                "log": "x",
            }
        )
    plot_curves(path, facts["shape"], panels, note=f"{facts['server']}; client {facts['machine']}; {facts['date']}")


def _cumulative(seconds: Sequence[float]) -> list[tuple[float, float]]:
    """(milliseconds, share of values that are not larger), at most POINTS of them; the slowest is always included."""
    ordered = sorted(seconds)
    last = len(ordered) - 1
    places = sorted({round(last * step / (POINTS - 1)) for step in range(POINTS)}) if last > 0 else range(last + 1)
    return [(max(ordered[place] * 1e3, LEAST_DRAWN), (place + 1) / (last + 1)) for place in places]


_SUMS = {
    "steps": "headrace_steps_total",
    "tokens": "headrace_step_tokens_total",
    "measured": "headrace_step_measured_seconds_total",
    "predicted": "headrace_step_predicted_seconds_total",
}
_ENERGY = {
    "joules": "headrace_energy_joules_total",
    "joules_seconds": "headrace_energy_seconds_total",
}  # where the server's device counts them
_FRONT_CPU = "process_cpu_seconds_total"
_LINE = re.compile(rf"^(headrace_\w+|{_FRONT_CPU})(\{{[^}}]*\}})? (\S+)$", re.MULTILINE)
_CALIBRATED = ("headrace_step_prediction_error", '{prediction="calibrated"}')


async def read_steps(client: HttpClient) -> dict[str, float] | None:
    """Sums since the server's start; None if the server does not report them."""
    try:
        answer = await client.get("/metrics")
    except (OSError, TimeoutError, BrokenAnswer):
        return None
    return parse_steps(answer.body.decode("utf-8", errors="replace")) if answer.status == 200 else None


def parse_steps(page: str) -> dict[str, float] | None:
    """The sums from a page in Prometheus's text format."""
    found: dict[tuple[str, str], float] = {}
    for name, labels, value in _LINE.findall(page):
        try:
            found[name, labels] = float(value)
        except ValueError:
            continue
    sums = {key: found[name, ""] for key, name in _SUMS.items() if (name, "") in found}
    if len(sums) < len(_SUMS):
        return None
    more = {
        "calibrated": _CALIBRATED,
        "front_cpu": (_FRONT_CPU, ""),
        **{key: (name, "") for key, name in _ENERGY.items()},
    }
    return sums | {key: found[line] for key, line in more.items() if line in found}


def step_figures(before: Mapping[str, float] | None, after: Mapping[str, float] | None) -> dict[str, float]:
    """For the steps in between: errors are predicted / measured − 1 (of a calibration: of the last steps)."""
    if before is None or after is None or after["steps"] <= before["steps"]:
        return {}
    steps, measured = after["steps"] - before["steps"], after["measured"] - before["measured"]
    figures = {
        "steps": steps,
        "mean_step_ms": measured / steps * 1e3,
        "computed_tokens": after["tokens"] - before["tokens"],
    }
    if "front_cpu" in before and "front_cpu" in after:
        figures["front_cpu_seconds"] = after["front_cpu"] - before["front_cpu"]
    predicted = after["predicted"] - before["predicted"]
    if predicted > 0 and measured > 0:
        figures["step_prediction_error"] = predicted / measured - 1.0
    if "calibrated" in after:
        figures["step_calibration_error"] = after["calibrated"]
    joules, seconds = (after.get(key, 0.0) - before.get(key, 0.0) for key in _ENERGY)
    if "joules" in before and seconds > 0:
        figures |= {"device_joules": joules, "mean_device_watts": joules / seconds}
    return figures
