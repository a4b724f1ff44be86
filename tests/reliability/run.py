"""The heavy forms of the checks, by one command, and one table of how they went.

    python -m tests.reliability.run [--minutes 3] [--controls] [ROW …]

``--minutes``: what a row may take, about; rows with a number of rounds of their own end when they have done them. Run
it from the repository's root, on a machine that does nothing else: several rows judge time. Ends with 0 only if all
passed.

What lives here: how much of each check, and the table. What may not: the checks.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.reliability import (
    checks_boundary,
    checks_core,
    checks_grammar,
    checks_life,
    checks_security,
    checks_tenants,
    checks_traffic,
    soak,
)
from tests.support.serving import SERVE, Server, serving
from tests.support.simulation import exhaust
from tests.unit.test_cache_machine import CacheMachine

Work = Callable[[float], str]  # seconds → figure; raises AssertionError


@dataclass(frozen=True, slots=True)
class Heavy:
    row: int
    check: str
    work: Work


def rounds(seconds: float, most: int) -> Iterator[int]:
    """Numbers until the time is over, at least one and at most ``most``."""
    end = time.monotonic() + seconds
    for number in range(most):
        yield number
        if time.monotonic() > end:
            return


def again(work: Callable[[int], str], most: int) -> Work:
    """``work(seed)`` with fresh seeds while there is time."""

    def repeat(seconds: float) -> str:
        done = [work(1000 + number) for number in rounds(seconds, most)]
        return f"{len(done)} × ({done[-1]})"

    return repeat


def on_a_server(work: Callable[[Server], str], *flags: str) -> Work:
    def run(seconds: float) -> str:
        with serving(*(flags or checks_boundary.HASH), command=SERVE) as server:
            return work(server)

    return run


def cache_machine(seconds: float) -> str:
    size = settings(
        max_examples=500, stateful_step_count=100, deadline=None, suppress_health_check=list(HealthCheck), database=None
    )
    done = [run_state_machine_as_test(CacheMachine, settings=size) for _ in rounds(seconds, 20)]
    return f"{len(done)} × 500 runs of 100 steps"


def growing(check: Callable[[int], str], count: int, seconds_each: float) -> Work:
    """One run whose size follows the time: ``count`` at most, fewer where one takes ``seconds_each``."""
    return lambda seconds: check(max(1, min(count, int(seconds / seconds_each))))


def by_pytest(test: str, **environment: str) -> Work:
    """A test that has its heavy form by itself."""

    def run(seconds: float) -> str:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", test]
        ran = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stdout[-3000:]
        return f"{', '.join(environment.values())} each: {ran.stdout.strip().splitlines()[-1]}"

    return run


HEAVY = (
    Heavy(1, "mutated bodies on every route", by_pytest("tests/server/test_mutations.py", HEADRACE_MUTATIONS="10000")),
    Heavy(2, "schemathesis, all phases", by_pytest("tests/server/test_openapi.py", HEADRACE_SCHEMA_EXAMPLES="500")),
    Heavy(
        3, "lattice, all singles and random pairs", on_a_server(lambda server: checks_boundary.lattice(20_000, server))
    ),
    Heavy(4, "token ids beside neighbours", on_a_server(lambda server: checks_boundary.token_ids(server, 20))),
    Heavy(
        5,
        "fan-out, full size",
        on_a_server(lambda server: f"{checks_boundary.fan_out(server)}; {checks_boundary.longest_legal(server)}"),
    ),
    Heavy(6, "million-token prompts, 5 MB", lambda seconds: checks_boundary.million_tokens(50, 5 << 20, slack=1.0)),
    Heavy(6, "million-token prompts, 27 MB", lambda seconds: checks_boundary.million_tokens(50, 27 << 20, slack=1.0)),
    Heavy(7, "a million chunks of a byte", on_a_server(lambda server: checks_boundary.dribble(server, 1_000_000))),
    Heavy(7, "500 half-sent requests", on_a_server(lambda server: checks_boundary.slowloris(server, 500))),
    Heavy(7, "pipelining", on_a_server(lambda server: checks_boundary.pipeline(server, 2000))),
    Heavy(8, "different schemas", growing(checks_grammar.different_schemas, 10_000, 0.016)),
    Heavy(8, "bombs", lambda seconds: checks_grammar.bombs()),
    Heavy(9, "structured output, drawn", growing(checks_grammar.totality, 5000, 0.034)),
    Heavy(14, "hygiene of every byte", again(lambda seed: checks_boundary.hygiene(3000, seed), 100)),
    Heavy(18, "prefixes of others", growing(checks_tenants.foreign_prefixes, 1000, 0.15)),
    Heavy(
        20,
        "equal request ids",
        on_a_server(lambda server: checks_traffic.equal_names(server, 1000), *checks_traffic.QUICK),
    ),
    Heavy(23, "unusable rows", again(lambda seed: checks_core.poisoned_rows(500), 10)),
    Heavy(24, "characters split over tokens", again(lambda seed: checks_core.characters_split(100_000, seed), 10)),
    Heavy(25, "stop strings", again(lambda seed: checks_core.stops_cut(5000, seed), 10)),
    Heavy(26, "allocator state machine", cache_machine),
    Heavy(
        27,
        "simulated lives of 500 events",
        lambda seconds: checks_core.simulate(10_000 + each for each in rounds(seconds, 100_000)),
    ),
    Heavy(28, "every interleaving", lambda seconds: "; ".join(str(exhaust.explore(depth)) for depth in (0, 1, 2))),
    Heavy(29, "unservable prompts", lambda seconds: checks_traffic.unservable(100)),
    Heavy(30, "ten times overload", lambda seconds: checks_traffic.overload(min(seconds, 600.0))),
    Heavy(31, "preemption storm", lambda seconds: checks_core.preemption_storm(2000)),
    Heavy(32, "long prefill beside 32 decoders", lambda seconds: checks_core.long_prefill(100_000)),
    Heavy(33, "ledger", on_a_server(lambda server: checks_traffic.ledger(server, 3000), *checks_traffic.QUICK)),
    Heavy(34, "500 clients cut", growing(lambda count: checks_traffic.mass_disconnect(500, count), 20, 6.0)),
    Heavy(35, "aborts everywhere", lambda seconds: checks_core.abort_everywhere()),
    Heavy(36, "64 slow readers", lambda seconds: checks_traffic.slow_readers(64, min(seconds, 300.0))),
    Heavy(37, "a step of a minute", lambda seconds: checks_life.long_step(60.0)),
    Heavy(38, "SIGTERM drains", lambda seconds: checks_traffic.drain(32)),
    Heavy(39, "kill -9 of the front end", growing(checks_life.server_killed, 20, 2.0)),
    Heavy(40, "kill -9 of the engine, 16 streams", growing(checks_life.engine_killed, 100, 2.0)),
    Heavy(41, "SIGSTOP of the engine", lambda seconds: checks_life.frozen_engine(thaw=False)),
    Heavy(42, "health under saturation", lambda seconds: checks_life.saturated(min(seconds, 600.0))),
    Heavy(43, "crash loop", growing(checks_life.crash_loop, 50, 3.0)),
    Heavy(48, "memory ceiling", lambda seconds: checks_life.memory_ceiling()),
    Heavy(49, "listening sockets", lambda seconds: checks_life.sockets()),
    Heavy(
        50,
        "audit hook, under -O",
        lambda seconds: checks_security.audited(lambda s: checks_boundary.lattice(2000, s), optimised=True),
    ),
    Heavy(
        51,
        "strangers and damaged frames",
        lambda seconds: f"{checks_security.strangers()}; {checks_security.damaged_frames(100_000)}",
    ),
    Heavy(52, "timing of keys", lambda seconds: checks_security.key_timing(10_000)),
    Heavy(54, "unique names", lambda seconds: checks_security.cardinality(100_000 if seconds > 600 else 10_000)),
    Heavy(55, "damaged model files", again(lambda seed: checks_security.model_files(5000, seed), 20)),
    Heavy(
        58,
        "streams byte by byte",
        on_a_server(lambda server: checks_traffic.conforming_streams(server, 10_000), *checks_traffic.QUICK),
    ),
    Heavy(59, "soak", lambda seconds: soak.soak(seconds / 60)),
)

CONTROLS = (
    Heavy(59, "soak of a server that leaks 4 MiB/h", lambda seconds: soak.leak_is_seen(max(seconds / 60, soak.LONG))),
)


def attempt(heavy: Heavy, seconds: float) -> tuple[bool, str]:
    try:
        return True, heavy.work(seconds)
    except Exception as error:
        traceback.print_exc(limit=-4)
        return False, f"{type(error).__name__}: {str(error)[:300]}"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.reliability.run", description=__doc__.partition("\n")[0] if __doc__ else ""
    )
    parser.add_argument("rows", metavar="ROW", nargs="*", type=int, help="rows to run; all without any")
    parser.add_argument("--minutes", type=float, default=3.0, help="what a row may take, about")
    parser.add_argument("--controls", action="store_true", help="instead: planted defects that need as long to be seen")
    args = parser.parse_args()
    print(f"{'row':>3}  {'check':<40}{'seconds':>8}  {'':<6}  figure", flush=True)
    passed = True
    for heavy in CONTROLS if args.controls else HEAVY:
        if args.rows and heavy.row not in args.rows:
            continue
        begun = time.monotonic()
        good, figure = attempt(heavy, 60 * args.minutes)
        passed = passed and good
        print(
            f"{heavy.row:>3}  {heavy.check:<40}{time.monotonic() - begun:>8.1f}  {'pass' if good else 'FAILED':<6}  {figure}",
            flush=True,
        )
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
