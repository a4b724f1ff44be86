"""Testing by simulation: schedules of events drawn from seeds, lived through by the whole control plane, everything
looked at after each event.

    python tests/reliability/simulate.py --seeds 100000 --jobs 2     every seed; what fails is shrunk and printed
    python tests/reliability/simulate.py --seed 17 [--save FILE]     one seed; its schedule to a file
    python tests/reliability/simulate.py --replay FILE               a schedule from a file
    python tests/reliability/simulate.py --exhaust                   every interleaving of a small world
    python tests/reliability/simulate.py --defects                   ten defects, planted one at a time: the table of
    docs/testing.md

Ends with 0 if nothing failed (``--defects``: if every defect was found). Run it from the repository's root.

What lives here: the command. What may not: the runner (tests/support/simulation).
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parents[2])]

from headrace.scheduler.policies import POLICIES
from tests.support.simulation import defects, exhaust
from tests.support.simulation.drawing import draw
from tests.support.simulation.life import Failure, live
from tests.support.simulation.schedule import Schedule, from_text, to_text
from tests.support.simulation.shrinking import shrink
from tests.support.simulation.sweep import Sweep, replays, sweep

EVERY = 20.0  # seconds between two lines of a sweep


def main(arguments: list[str] | None = None) -> int:
    args = create_parser().parse_args(arguments)
    if args.exhaust:
        for depth in (0, 1, 2):
            print(exhaust.explore(depth), flush=True)
        return 0
    if args.defects:
        return _defects(args)
    if args.replay is not None:
        return _one(from_text(args.replay.read_text()), args)
    if args.seed is not None:
        return _one(draw(args.seed, args.events, args.policy), args)
    return _many(args)


def create_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="simulate.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seeds", type=int, help="how many seeds to live through (1000; with --defects at most so many for each, 200)"
    )
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--events", type=int, default=500, help="events a seed")
    parser.add_argument(
        "--policy", choices=tuple(POLICIES), help="this scheduling policy, instead of the one that a seed draws"
    )
    parser.add_argument("--seed", type=int, help="one seed alone")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="a schedule that --save wrote")
    parser.add_argument(
        "--save", type=Path, metavar="FILE", help="write the schedule, shrunk if it failed and shrinking is on"
    )
    parser.add_argument("--shrink", action=argparse.BooleanOptionalAction, default=True, help="make what fails small")
    parser.add_argument("--exhaust", action="store_true", help="every interleaving of a small world")
    parser.add_argument(
        "--defects", action="store_true", help="plant ten defects, one at a time, and say how each is found"
    )
    return parser


def _defects(args: argparse.Namespace) -> int:
    print(defects.HEAD)
    missed = 0
    for plant in defects.DEFECTS:
        found = defects.find_one(plant, args.seeds or 200, args.events)
        missed += found.seeds is None
        print(defects.row(found), flush=True)
    return int(missed > 0)


def _one(schedule: Schedule, args: argparse.Namespace) -> int:
    outcome = live(schedule)
    if isinstance(outcome, Failure):
        schedule = _show(schedule, outcome, args)
    else:
        print(
            f"{schedule.name}: held, {outcome.turns} turns; {_counts(outcome.seen)}\nreplayed byte for byte: {replays(schedule)[:16]}"
        )
    if args.save is not None:
        args.save.write_text(to_text(schedule))
    return int(isinstance(outcome, Failure))


def _many(args: argparse.Namespace) -> int:
    last = [time.monotonic()]

    def tell(so_far: Sweep) -> None:
        if time.monotonic() - last[0] > EVERY:
            last[0] = time.monotonic()
            print(f"  {so_far.lives} seeds in {so_far.seconds:.0f} s, {len(so_far.failures)} failed", flush=True)

    count = 1000 if args.seeds is None else args.seeds
    done = sweep(
        range(args.first, args.first + count), events=args.events, policy=args.policy, jobs=args.jobs, tell=tell
    )
    each = 1e3 * done.cpu_seconds / max(1, done.lives)
    time_taken = f"{done.seconds:.1f} s on {args.jobs} processes, {each:.1f} ms of a core each"
    print(f"{done.lives} seeds, {done.events} events, {done.turns} turns in {time_taken}")
    print(_counts(done.seen))
    shown: set[str] = set()
    for seed, failure in sorted(done.failures.items()):
        if failure.kind not in shown:
            shown.add(failure.kind)
            schedule = _show(draw(seed, args.events, args.policy), failure, args)
            if args.save is not None:
                args.save.with_suffix(f".{seed}.json").write_text(to_text(schedule))
    print(f"{len(done.failures)} failed" + (f": seeds {sorted(done.failures)[:50]}" if done.failures else ""))
    return int(bool(done.failures))


def _show(schedule: Schedule, failure: Failure, args: argparse.Namespace) -> Schedule:
    """How it failed, that it fails so again, and the smallest schedule that does."""
    print(f"\n{schedule.name} FAILED: {failure}\nreplayed byte for byte: {replays(schedule)[:16]}", flush=True)
    if args.shrink:
        schedule, failure = shrink(schedule, failure)
        print(f"{len(schedule.events)} events are enough ({failure}):\n{to_text(schedule)}", flush=True)
    return schedule


def _counts(seen: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(seen.items(), key=lambda item: -item[1]))


if __name__ == "__main__":
    logging.disable(logging.ERROR)  # what loops refuse
    sys.exit(main())
