"""Flags that describe a load: the same names and meanings for a server and for a simulation.

What lives here: the flags, and the requests that they describe. What may not: flags of one command alone, drawing
requests (planner/workload/).
"""

from __future__ import annotations

import argparse
from pathlib import Path

from headrace.bench.arguments import check_together, declare
from headrace.errors import ConfigError
from headrace.planner.workload.arrivals import GAPS, Swing
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
MOST_TOKENS = 10_000_000  # of one text
REQUESTS = 64  # without --num-prompts
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


def add_figure_flags(shown: argparse._ActionsContainer, *, plotted: str) -> None:
    """``plotted``: what --plot shows of them."""
    declare(shown, "load.figure", plot={"help": f"plot the distributions{plotted}"})


def check_load_flags(args: argparse.Namespace, trace: Path | None) -> None:
    """Raises ConfigError for invalid numbers and combinations, and for sizes that would fill the memory before they could
    be found too long for the model."""
    check_together(args, "load")
    if args.prefix_len * args.num_prefixes > MOST_TOKENS:
        raise ConfigError(
            f"{args.num_prefixes:,} prefixes of {args.prefix_len:,} tokens are more than {MOST_TOKENS:,} tokens; give fewer or shorter ones."
        )
    requests = (args.num_prompts or REQUESTS) * (args.turns if args.workload == "conversation" else 1)
    if requests > MOST_ROWS:
        raise ConfigError(
            f"That is {requests:,} requests; give at most {MOST_ROWS:,} (--num-prompts, and --turns in conversations)."
        )
    if args.workload == "trace" and trace is None:
        raise ConfigError("--workload trace needs a file; name it with --trace FILE.")
    if args.workload != "trace" and trace is not None:
        raise ConfigError(
            f"--trace is {trace}, but the workload is {args.workload}; give --workload trace, or --lengths-from for only its lengths."
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
