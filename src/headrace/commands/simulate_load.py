"""The load of ``headrace simulate``: flags, and what they mean.

What lives here: flags to requests and the limits that they are checked against. What may not: drawing or reading them
(planner/workload/).
"""

from __future__ import annotations

import argparse
import re

from headrace.bench.arguments import declare
from headrace.bench.load_flags import (
    add_arrival_flags,
    add_workload_flags,
    arrivals_in_words,
    asked_of,
    check_load_flags,
    lengths_in_words,
)
from headrace.config import EngineConfig, ServerConfig
from headrace.errors import ConfigError
from headrace.planner.simulator import Load
from headrace.planner.tenants import among, with_priorities
from headrace.planner.workload.statistics import parse_goodput

CLOSED_LOOP = 8  # clients, as bench serve has them
MOST_TENANTS = 64
MOST_PRIORITY = 2**31 - 1
_PRIORITY = re.compile(r"(-?\d{1,10}):(\d{1,10}(?:\.\d{1,10})?|\.\d{1,10})")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_workload_flags(parser, trace="trace_file", max_input=None, max_output=None)
    add_arrival_flags(parser, clients=CLOSED_LOOP)
    who = parser.add_argument_group("tenants and priorities")
    declare(who, "simulate_load.arguments")


def check_numbers(args: argparse.Namespace) -> None:
    """Raises ConfigError."""
    if args.device_memory == 0:
        raise ConfigError("--device-memory is 0; give at least 1 byte.")
    check_load_flags(args, args.trace_file)
    _check_tenants(args)
    priorities_of(args)


def priorities_of(args: argparse.Namespace) -> dict[int, float]:
    """Shares by priority. Raises ConfigError."""
    shares: dict[int, float] = {}
    for entry in args.priorities:
        found = _PRIORITY.fullmatch(entry)
        if found is None or not float(found[2]) or abs(int(found[1])) > MOST_PRIORITY:
            raise ConfigError(
                f"--priorities has {entry!r}; write PRIORITY:SHARE, a whole number of at most {MOST_PRIORITY:,} and a number above 0, "
                f"like 0:0.1 1:0.9."
            )
        if int(found[1]) in shares:
            raise ConfigError(f"--priorities has {int(found[1])} twice; give each priority one share.")
        shares[int(found[1])] = float(found[2])
    return shares


def _check_tenants(args: argparse.Namespace) -> None:
    if args.tenants is None:
        if args.hog is not None:
            raise ConfigError(f"--hog is {args.hog:g}, but the load has one tenant; say of how many with --tenants.")
        return
    if not 2 <= args.tenants <= MOST_TENANTS:
        raise ConfigError(f"--tenants is {args.tenants}; give 2 to {MOST_TENANTS}.")
    if args.hog is not None and not 0.0 < args.hog < 1.0:
        raise ConfigError(f"--hog is {args.hog:g}; give a share of the requests above 0 and below 1.")


def load_of(args: argparse.Namespace, config: EngineConfig, server: ServerConfig, rate: float | None) -> Load:
    """``rate`` replaces --request-rate. Raises ConfigError."""
    open_loop = rate is not None or args.workload == "trace"
    room = args.max_concurrency or (None if open_loop else CLOSED_LOOP)
    asked = asked_of(args, trace=args.trace_file, rate=rate, seed=config.model.seed)
    if args.tenants is not None:
        asked = among(asked, args.tenants, args.hog, config.model.seed)
    if shares := priorities_of(args):
        asked = with_priorities(asked, shares, config.model.seed)
    return Load(asked, config.model.seed, room, server.max_queue, parse_goodput(args.goodput), args.metric_percentiles)


def what_is_asked(args: argparse.Namespace, count: int) -> str:
    """The requests in words, without their arrivals."""
    what = f"trace {args.trace_file.name}" if args.workload == "trace" else f"{args.workload}, {lengths_in_words(args)}"
    return f"{what}, {count} requests{_of_tenants(args)}"


def _of_tenants(args: argparse.Namespace) -> str:
    hog = f", {args.hog:.0%} of them key1's" if args.hog is not None else ""
    urgent = f", priorities {' '.join(args.priorities)}" if args.priorities else ""
    return f" of {args.tenants} tenants{hog}{urgent}" if args.tenants is not None else urgent


def shape(args: argparse.Namespace, count: int) -> str:
    """The load in words."""
    return f"{what_is_asked(args, count)}; {arrivals_in_words(args, args.max_concurrency or CLOSED_LOOP)}"
