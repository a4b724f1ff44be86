"""Flags that describe a load: the same names and meanings for a server and for a simulation.

What lives here: the flags, and the requests that they describe. What may not: flags of one command alone, drawing
requests (planner/workload/).
"""

from __future__ import annotations

import argparse
from pathlib import Path

from headrace.bench.arguments import declare
from headrace.errors import ConfigError
from headrace.planner.workload.arrivals import DAY, GAPS, Swing
from headrace.planner.workload.load import (
    DrawsLengths,
    Lengths,
    LoadRequest,
    arriving,
    conversing,
    drawn,
    trace_lengths,
    traced,
)
from headrace.planner.workload.traces import MOST_ROWS

WORKLOADS = ("random", "shared-prefix", "conversation", "trace")
DEFAULTS = {
    "input_len": 128, "output_len": 64, "random_range_ratio": 0.0, "prefix_len": 256, "num_prefixes": 1, "turns": 4, "think_time": 1.0,
    "trace_speed": 1.0, "burstiness": 1.0, "gaps": "gamma", "diurnal": 0.0, "diurnal_period": DAY,
}  # fmt: skip
DRAWN = ("random", "shared-prefix", "conversation")
OF_WORKLOADS = {  # flags that mean something to some workloads only
    "input_len": DRAWN, "output_len": DRAWN, "random_range_ratio": DRAWN, "prefix_len": DRAWN[1:], "num_prefixes": DRAWN[1:2], "turns": DRAWN[2:],
    "think_time": DRAWN[2:], "trace_speed": ("trace",),
}  # fmt: skip
ARRIVALS = ("burstiness", "gaps", "diurnal", "diurnal_period")
MOST_TOKENS = 10_000_000  # of one text
REQUESTS = 64  # without --num-prompts
TEXTS = ("input_len", "output_len", "prefix_len", "num_prefixes")
TRACE_HELP = "from Azure (2023, 2024), BurstGPT or Mooncake, recognized by its columns"


def add_workload_flags(
    parser: argparse.ArgumentParser, *, trace: str, max_input: int | None, max_output: int | None
) -> None:
    """``trace``: the destination of --trace. The maxima are defaults; None: nothing is cut."""
    what = parser.add_argument_group("workload")
    declare(
        what,
        "load.workload",
        workload={"choices": WORKLOADS},
        trace={"dest": trace, "help": f"a recorded trace {TRACE_HELP}"},
        max_input_len={
            "default": max_input,
            "help": f"truncate a trace's longer prompts to this{_or_refused(max_input)}",
        },
        max_output_len={
            "default": max_output,
            "help": f"truncate a trace's longer answers to this{_or_refused(max_output)}",
        },
    )
    parser.set_defaults(**{name: DEFAULTS[name] for name in OF_WORKLOADS})


def _or_refused(maximum: int | None) -> str:
    return f" (default: {maximum})" if maximum is not None else "; by default, they are an error"


def add_arrival_flags(parser: argparse.ArgumentParser, *, clients: int) -> None:
    """``clients``: of a closed loop."""
    load = parser.add_argument_group("arrivals")
    declare(
        load,
        "load.arrival",
        gaps={"choices": GAPS},
        max_concurrency={"help": f"maximum number of concurrent requests (closed loop: default {clients})"},
    )
    parser.set_defaults(**{name: DEFAULTS[name] for name in ARRIVALS})


def add_figure_flags(shown: argparse._ActionsContainer, *, plotted: str) -> None:
    """``plotted``: what --plot shows of them."""
    declare(shown, "load.figure", plot={"help": f"plot the distributions{plotted}"})


def check_load_flags(args: argparse.Namespace, trace: Path | None) -> None:
    """Raises ConfigError for invalid numbers and combinations."""
    if getattr(args, "seed", 0) < 0:
        raise ConfigError(f"--seed is {args.seed}; give at least 0.")
    _check_sizes(args)
    _check_workload(args)
    if args.workload == "trace":
        _check_trace(args, trace)
    elif trace is not None:
        raise ConfigError(
            f"--trace is {trace}, but the workload is {args.workload}; give --workload trace, or --lengths-from for only its lengths."
        )
    else:
        _check_arrivals(args)


def _check_sizes(args: argparse.Namespace) -> None:
    """Rejects sizes that would fill the memory before they could be found too long for the model."""
    for name in TEXTS:
        if getattr(args, name) > MOST_TOKENS:
            raise ConfigError(f"--{name.replace('_', '-')} is {getattr(args, name):,}; give at most {MOST_TOKENS:,}.")
    if args.prefix_len * args.num_prefixes > MOST_TOKENS:
        raise ConfigError(
            f"{args.num_prefixes:,} prefixes of {args.prefix_len:,} tokens are more than {MOST_TOKENS:,} tokens; give fewer or shorter ones."
        )
    requests = (args.num_prompts or REQUESTS) * (args.turns if args.workload == "conversation" else 1)
    if requests > MOST_ROWS:
        raise ConfigError(
            f"That is {requests:,} requests; give at most {MOST_ROWS:,} (--num-prompts, and --turns in conversations)."
        )


def _check_workload(args: argparse.Namespace) -> None:
    """Rejects flags that have no effect, since they were meant for another workload."""
    for name, workloads in OF_WORKLOADS.items():
        if getattr(args, name) != DEFAULTS[name] and args.workload not in workloads:
            flag, meant = f"--{name.replace('_', '-')} {getattr(args, name):g}", " or ".join(workloads)
            raise ConfigError(
                f"{flag} has no effect in the workload {args.workload}; give --workload {meant}, or leave it out."
            )
    if args.lengths_from is not None and any(
        getattr(args, name) != DEFAULTS[name] for name in ("input_len", "output_len", "random_range_ratio")
    ):
        raise ConfigError(
            "--lengths-from sets its own lengths; leave --input-len, --output-len and --random-range-ratio out."
        )


def _check_arrivals(args: argparse.Namespace) -> None:
    given = [
        f"--{name.replace('_', '-')} {getattr(args, name)}"
        for name in ARRIVALS
        if getattr(args, name) != DEFAULTS[name]
    ]
    if given and args.request_rate is None and not getattr(args, "sweep_rate", None):
        raise ConfigError(f"{given[0]} needs a rate; give --request-rate.")
    if args.diurnal_period != DEFAULTS["diurnal_period"] and not args.diurnal:
        raise ConfigError(
            f"--diurnal-period is {args.diurnal_period:g}, but the rate does not vary; set by how much with --diurnal."
        )


def _check_trace(args: argparse.Namespace, trace: Path | None) -> None:
    if trace is None:
        raise ConfigError("--workload trace needs a file; name it with --trace FILE.")
    if args.request_rate is not None and args.trace_speed != 1.0:
        raise ConfigError(
            f"--trace-speed is {args.trace_speed:g} and --request-rate {args.request_rate:g}; both scale the trace, give one."
        )
    if args.lengths_from is not None or any(getattr(args, name) != DEFAULTS[name] for name in ARRIVALS):
        raise ConfigError(
            "A trace brings its own arrivals and lengths; leave --burstiness, --gaps, --diurnal, its period and --lengths-from out."
        )


def asked_of(args: argparse.Namespace, *, trace: Path | None, rate: float | None, seed: int) -> list[LoadRequest]:
    """The requests that the flags describe, in an open loop with their arrivals. ``rate`` replaces --request-rate.
    Raises ConfigError."""
    if trace is not None:
        cut = {"max_prompt": args.max_input_len, "max_output": args.max_output_len}
        return traced(trace, count=args.num_prompts, speed=args.trace_speed, rate=rate, **cut)
    asked = _drawn(args, args.num_prompts or REQUESTS, seed)
    if rate is None:
        return asked
    swing = Swing(args.diurnal, args.diurnal_period) if args.diurnal else None
    return arriving(asked, rate, burstiness=args.burstiness, gaps=args.gaps, swing=swing, seed=seed)


def _drawn(args: argparse.Namespace, count: int, seed: int) -> list[LoadRequest]:
    lengths = _lengths(args)
    if args.workload == "conversation":
        return conversing(count, args.turns, lengths, system=args.prefix_len, think=args.think_time, seed=seed)
    prefix = args.prefix_len if args.workload == "shared-prefix" else 0
    return drawn(count, lengths, prefix=prefix, num_prefixes=args.num_prefixes, seed=seed)


def _lengths(args: argparse.Namespace) -> DrawsLengths:
    if args.lengths_from is None:
        return Lengths(args.input_len, args.output_len, args.random_range_ratio)
    return trace_lengths(args.lengths_from, max_prompt=args.max_input_len, max_output=args.max_output_len)


def lengths_in_words(args: argparse.Namespace) -> str:
    if args.lengths_from is not None:
        return f"lengths of {args.lengths_from.name}"
    spread = f" (± {args.random_range_ratio:.0%})" if args.random_range_ratio else ""
    return f"{args.input_len} in, {args.output_len} out{spread}{_behind(args)}"


def _behind(args: argparse.Namespace) -> str:
    if args.workload == "conversation":
        return f", {args.turns} turns behind {args.prefix_len} tokens of system prompt"
    prefixes = f"{args.num_prefixes} prefixes" if args.num_prefixes > 1 else "a prefix"
    return f" behind {prefixes} of {args.prefix_len}" if args.workload == "shared-prefix" else ""


def arrivals_in_words(args: argparse.Namespace, clients: float) -> str:
    """``clients``: at once, in a closed loop."""
    if args.workload == "trace":
        return (
            f"{args.request_rate:g} requests/s"
            if args.request_rate is not None
            else f"{args.trace_speed:g} times as fast"
        )
    if args.request_rate is None:
        return f"closed loop, {clients:g} at once"
    shape = f", {args.gaps} gaps of shape {args.burstiness:g}" if args.burstiness != 1 else ""
    swing = f", ± {args.diurnal:.0%} in {args.diurnal_period:g} s" if args.diurnal else ""
    return f"open loop, {args.request_rate:g} requests/s{shape}{swing}"
