"""``python -m lab drafts-host``: what a step with drafts costs the host, without a GPU.

Scheduler, speculator, draft model and graphs are an engine's own, over stand-ins whose graphs compute nothing when they
are replayed (tests/support/recorded_graphs.py): tokens of a coin are there already. So this is all that Python does in a
step; a driver's launches, two of each pass, come on top of it.

What lives here: that measurement. What may not: stand-ins.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from statistics import median
from typing import Any

from headrace.bench.arguments import count, natural, output
from headrace.observe.report import machine_facts, print_facts, table, write_json

PROMPT, WARM = 8, 10  # tokens; steps before those that count
BUDGET = 200.0  # µs, of 64 rows with 4 drafts
PARTS = ("schedule", "prepare", "take", "update")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=count, nargs="+", default=[8, 64], metavar="N", help="(default: 8 64)")
    parser.add_argument("--drafts", type=natural, nargs="+", default=[0, 4], metavar="N", help="(default: 0 4)")
    parser.add_argument("--steps", type=count, default=200, help="timed steps a figure (default: 200)")
    parser.add_argument("--output-json", type=output, metavar="FILE", help="write all figures as JSON")


def run(args: argparse.Namespace) -> int:
    facts = machine_facts("none: nothing is computed", shape=f"rows {args.rows}, drafts {args.drafts}")
    print_facts(facts)
    found = [measure(rows, drafts, args.steps) for rows in args.rows for drafts in args.drafts]
    print(f"\nCPU µs a step, medians\n{table(tuple(found[0]), [tuple(each.values()) for each in found])}")
    print(f"budget of 64 rows with 4 drafts: {BUDGET:.0f} µs")
    if args.output_json:
        write_json(args.output_json, {"facts": facts, "steps": found})
    return 0


def measure(rows: int, drafts: int, steps: int) -> dict[str, Any]:
    """µs of the thread: planning, what a worker does before and after the device, and what comes of it; medians, and of
    their sum the least, which other work on the machine disturbs least."""
    from headrace.clock import RealClock
    from headrace.config import SchedulerConfig

    engines, stand_ins = import_module("tests.support.hash_engine"), import_module("tests.support.recorded_graphs")
    length = PROMPT + (steps + WARM + 8) * (1 + drafts)
    sizes: dict[str, Any] = {
        "max_num_seqs": rows,
        "max_model_len": length + 64,
        "block_size": 64,
        "max_logits_rows": 512,
    }
    with (
        _without_computing(),
        stand_ins.recorded_executor(graphed=True, drafts=drafts, num_blocks=rows * (length // 64 + 3), **sizes) as (
            executor,
            runner,
            _,
        ),
    ):
        config = SchedulerConfig(max_num_seqs=rows, speculative_config=engines.FIXED % drafts if drafts else None)
        core = engines.create_core(executor, config, RealClock(), depth=1)
        for number in range(rows):
            core.add(engines.request(number, range(1, 1 + PROMPT), max_tokens=length - PROMPT, seed=number))
        for _ in range(WARM):
            core.step()
        spent = _Spent()
        spent.of(core.scheduler, "schedule", "schedule")
        spent.of(runner, "submit", "prepare")
        spent.of(runner, "_read", "take")
        spent.of(core.scheduler, "update", "update")
        parts = [spent.during(core.step) for _ in range(steps)]
    whole = sorted(sum(each.values()) for each in parts)
    each = {part: round(median(step[part] for step in parts), 1) for part in PARTS}
    return {"rows": rows, "drafts": drafts, **each, "sum": round(median(whole), 1), "least": round(whole[0], 1)}


class _Spent:
    """CPU µs in some methods, what one calls of the others left out."""

    def __init__(self) -> None:
        self._inside: list[float] = []
        self._found: dict[str, float] = {}

    def of(self, owner: Any, name: str, part: str) -> None:
        real = getattr(owner, name)

        def timed(*given: Any, **named: Any) -> Any:
            begin = time.thread_time_ns()
            self._inside.append(0.0)
            try:
                return real(*given, **named)
            finally:
                whole = (time.thread_time_ns() - begin) / 1e3
                self._found[part] = self._found.get(part, 0.0) + whole - self._inside.pop()
                if self._inside:
                    self._inside[-1] += whole

        setattr(owner, name, timed)

    def during(self, step: Callable[[], object]) -> dict[str, float]:
        self._found = dict.fromkeys(PARTS, 0.0)
        step()
        return self._found


@contextmanager
def _without_computing() -> Iterator[None]:
    """Graphs of few sizes, which leave what a coin says where their tokens would be: each draft is right half the time."""
    import numpy as np

    from headrace.worker import graphs

    # beside tests alone, and so is what it patches with
    stand_ins, pytest = import_module("tests.support.recorded_graphs"), import_module("pytest")
    recorded = stand_ins.RecordedGraph
    coins, made = np.random.Generator(np.random.SFC64(0)), graphs.Mailbox.__init__

    def answered(mailbox: Any, *given: Any, **named: Any) -> None:
        made(mailbox, *given, **named)
        for answer in mailbox._answers:
            answer[:, 0], answer[:, 1] = coins.integers(1, 3, len(answer)), 1

    with pytest.MonkeyPatch.context() as patched:
        stand_ins.without_a_gpu(patched)
        patched.setattr(recorded, "replay", lambda _: None)
        patched.setattr(recorded, "capture_begin", lambda *_, **__: None)
        patched.setattr(recorded, "capture_end", lambda _: None)
        patched.setattr(graphs.Mailbox, "__init__", answered)
        patched.setattr(graphs, "buckets_up_to", lambda most: (most,))
        yield
