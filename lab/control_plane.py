"""``python -m lab control-plane``: what scheduling, cache and update cost, without a model.

Steady decoding at a number of running requests (CPU µs a step: schedule, update, telling 7 other ranks), the match of a cached prefix
of 2,048 tokens, what passes until an offline batch's first step begins, and memory over many requests.

What lives here: these four measurements. What may not: torch, any executor but the keyed-hash one.
"""

from __future__ import annotations

import argparse
import gc
import socket
import subprocess
import time
from array import array
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from statistics import median
from typing import Any

from headrace.bench.arguments import count, natural, output
from headrace.clock import RealClock
from headrace.config import CacheConfig, SchedulerConfig
from headrace.engine.core import EngineCore, create_scheduler
from headrace.engine.executor import Executor, ExecutorInfo, Ticket
from headrace.engine.keyed_hash import KeyedHashExecutor, keyed_hash_info
from headrace.engine.llm import LLM
from headrace.observe.report import machine_facts, print_facts, table, write_json
from headrace.parallel.frames import PlanPacker
from headrace.portability import process_status
from headrace.request import Request, SamplingParams, StepPlan
from headrace.scheduler.events import AddRequest
from headrace.scheduler.scheduler import Scheduler
from lab.table_rows import Row, requests_of, select_rows

PREFIX = 2048  # tokens
MATCHES = 20  # of it
BUDGETS = {64: 100.0, 256: 300.0}  # CPU µs a step, schedule and update together
MATCH_BUDGET = 100.0  # µs
RANKS, TOLD_BUDGET = 8, 50.0  # CPU µs a step of 256 rows
ADMITTED = ("shared-prefix", "mixed")
ADMISSION_BUDGET = {"shared-prefix": 20.0, "mixed": 35.0}  # ms


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--rows", type=count, nargs="+", default=[64, 256], metavar="N", help="running requests (default: 64 256)"
    )
    parser.add_argument("--steps", type=count, default=400, help="timed steps a figure (default: 400)")
    parser.add_argument("--batches", type=count, default=7, help="offline batches a figure (default: 7)")
    parser.add_argument(
        "--requests",
        type=natural,
        default=100_000,
        help="requests of the memory test; 0 leaves it out (default: 100000)",
    )
    parser.add_argument("--output-json", type=output, metavar="FILE", help="write all figures as JSON")


def run(args: argparse.Namespace) -> int:
    facts = machine_facts(
        "none: no model is computed", shape=f"decode rows {args.rows}, prompts of 128 ids, prefix {PREFIX}"
    )
    print_facts(facts)
    print()
    steps = [steady_steps(rows, args.steps) for rows in args.rows]
    columns = ("rows", "schedule µs", "update µs", "sum µs", "sum p99 µs", "budget µs", "told µs")
    print(table(columns, [[step[column] for column in columns] for step in steps]))
    print(f"told: packed, and sent to {RANKS - 1} ranks (budget of 256 rows {TOLD_BUDGET:.0f} µs)")
    match = prefix_match_seconds() * 1e6
    print(f"\nprefix of {PREFIX:,} tokens matched in {match:.1f} µs (budget {MATCH_BUDGET:.0f})")
    admitted = [admission(select_rows([name])[0], args.batches) for name in ADMITTED]
    shown = ("requests", "ids", "first step after ms", "lowest ms", "budget ms")
    print(
        f"\nan offline batch, of the table's rows\n{table(('row', *shown), [[each[name] for name in ('row', *shown)] for each in admitted])}\n"
    )
    memory = memory_growth(args.requests) if args.requests else None
    if memory:
        print(
            f"{args.requests:,} requests ({memory['requests_per_second']:,.0f}/s): {memory['first_mib']:.1f} MiB after a tenth of them, ",
            end="",
        )
        print(f"{memory['last_mib']:.1f} MiB at the end")
    if args.output_json:
        write_json(
            args.output_json,
            {"facts": facts, "steps": steps, "prefix_match_us": match, "admission": admitted, "memory": memory},
        )
    return 0


def steady_steps(rows: int, steps: int) -> dict[str, Any]:
    """CPU time of one decode step with ``rows`` running requests, median over ``steps``; the executor's own time is
    left out."""
    length = 128 + steps + 64
    info = keyed_hash_info(max_num_seqs=rows, max_model_len=4096, num_blocks=rows * (length // 16 + 2))
    with _other_ranks(RANKS - 1) as others:
        return _steady_steps(_Telling(info, others), rows, steps)


def _steady_steps(executor: _Telling, rows: int, steps: int) -> dict[str, Any]:
    scheduler = create_scheduler(
        executor, SchedulerConfig(max_num_seqs=rows, max_num_batched_tokens=8192), CacheConfig(), frozenset(), b""
    )
    events = [AddRequest(_request(index, 128, steps + 60)) for index in range(rows)]
    _turn(scheduler, executor, events)
    while scheduler.num_waiting:
        _turn(scheduler, executor, [])
    gc.collect()
    gc.freeze()
    timed = [_turn(scheduler, executor, []) for _ in range(steps)]
    gc.unfreeze()
    sums = sorted(schedule + update for schedule, update in timed)
    return {
        "rows": rows,
        "schedule µs": median(schedule for schedule, _ in timed) * 1e6,
        "update µs": median(update for _, update in timed) * 1e6,
        "sum µs": median(sums) * 1e6,
        "sum p99 µs": sums[int(0.99 * (len(sums) - 1))] * 1e6,
        "budget µs": BUDGETS.get(rows),
        "told µs": median(executor.told[-steps:]) * 1e6,
    }


class _Telling(KeyedHashExecutor):
    """It first tells other ranks of a step, as parallel/leader.py does."""

    def __init__(self, info: ExecutorInfo, others: list[socket.socket]) -> None:
        super().__init__(info)
        self._packer, self._others = PlanPacker(), others
        self.told: list[float] = []  # CPU seconds

    def submit(self, plan: StepPlan) -> Any:
        begin = time.thread_time()
        message = self._packer.pack(plan)
        for each in self._others:
            each.sendall(message)
        self.told.append(time.thread_time() - begin)
        return super().submit(plan)


@contextmanager
def _other_ranks(count: int) -> Iterator[list[socket.socket]]:
    """Processes that read what they are told."""
    with ExitStack() as stack:
        ours = []
        for _ in range(count):
            own, other = socket.socketpair()
            with other:
                reader = subprocess.Popen(["cat"], stdin=other.fileno(), stdout=subprocess.DEVNULL)
            stack.callback(reader.wait)
            ours.append(stack.enter_context(own))
        yield ours


def _turn(scheduler: Scheduler, executor: KeyedHashExecutor, events: list[Any]) -> tuple[float, float]:
    """One step; CPU seconds of this thread in (schedule, update)."""
    now = time.perf_counter()
    begin = time.thread_time()
    plan = scheduler.schedule(now, events)
    scheduled = time.thread_time()
    assert plan is not None
    result = executor.collect(executor.submit(plan))
    collected = time.thread_time()
    scheduler.update(result, now)
    return scheduled - begin, time.thread_time() - collected


def prefix_match_seconds() -> float:
    """The cost of admitting a request whose first 2,048 tokens are cached, less that of one with nothing to match
    (medians)."""
    info = keyed_hash_info(num_blocks=4096)
    executor = KeyedHashExecutor(info)
    scheduler = create_scheduler(
        executor, SchedulerConfig(max_num_batched_tokens=4096), CacheConfig(), frozenset(), b""
    )
    ids = iter(range(1_000_000))
    _finish(scheduler, executor, _request(next(ids), PREFIX + 16, 1))
    hits, plain = [], []
    for _ in range(MATCHES):
        hits.append(_finish(scheduler, executor, _request(next(ids), PREFIX + 16, 1)))
        plain.append(_finish(scheduler, executor, _request(next(ids), 1, 1, start=9)))
    return max(0.0, median(hits) - median(plain))


def _finish(scheduler: Scheduler, executor: KeyedHashExecutor, request: Request) -> float:
    """Runs one request to its end; CPU seconds of the step that admitted it, scheduling only."""
    first, _ = _turn(scheduler, executor, [AddRequest(request)])
    while scheduler.has_work:
        _turn(scheduler, executor, [])
    return first


def _request(request_id: int, prompt_len: int, max_tokens: int, start: int = 0) -> Request:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
    prompt = array(
        "i", ((start + index * 7 + (request_id if prompt_len == 128 else 0)) % 500 for index in range(prompt_len))
    )
    return Request(request_id=request_id, prompt_token_ids=prompt, params=params)


def admission(row: Row, batches: int) -> dict[str, Any]:
    """Milliseconds from calling ``LLM.generate`` with a row's requests until its first step is handed over, median and
    lowest."""
    with LLM(
        executor="keyed-hash",
        max_model_len=4096,
        max_num_seqs=512,
        num_blocks=8192,
        block_size=128,
        max_num_batched_tokens=16384,
        overlap=1,
    ) as llm:
        stamp = llm.engine.core.executor = _FirstStep(llm.engine.core.executor)
        passed: list[float] = []
        for seed in range(batches + 1):
            asked = requests_of(row, llm.info.vocab_size, seed, one_token=True)
            stamp.at, begin = None, time.perf_counter()
            llm.generate(asked.prompts, asked.params, use_tqdm=False)
            assert stamp.at is not None
            passed.append(1e3 * (stamp.at - begin))
    del passed[0]  # what is made once
    figures = (len(asked.prompts), asked.prompt_tokens, median(passed), min(passed), ADMISSION_BUDGET[row.name])
    return {
        "row": row.name,
        **dict(zip(("requests", "ids", "first step after ms", "lowest ms", "budget ms"), figures, strict=True)),
    }


class _FirstStep:
    """An executor that notes when it was given a step first."""

    def __init__(self, inner: Executor) -> None:
        self.info, self.collect, self.sample, self.recover, self.close = (
            inner.info,
            inner.collect,
            inner.sample,
            inner.recover,
            inner.close,
        )
        self.prepare, self._submit, self.control, self.outcomes = (
            inner.prepare,
            inner.submit,
            inner.control,
            inner.outcomes,
        )
        self.drafts = inner.drafts
        self.at: float | None = None

    def submit(self, plan: StepPlan) -> Ticket:
        self.at = self.at or time.perf_counter()
        return self._submit(plan)


def memory_growth(count: int) -> dict[str, float]:
    """Resident memory after a tenth of ``count`` short requests and after all of them: it must not grow."""
    core = EngineCore(
        KeyedHashExecutor(keyed_hash_info(max_num_seqs=64, num_blocks=512)),
        scheduler=SchedulerConfig(max_num_seqs=64),
        cache=CacheConfig(),
        eos_token_ids=frozenset(),
        namespace=b"",
        clock=RealClock(),
    )
    begin = time.perf_counter()
    first = 0.0
    for request_id in range(count):
        core.add(_short(request_id))
        while request_id % 64 == 63 and core.has_work:
            core.step()
        if request_id == count // 10:
            first = _resident_mib()
    while core.has_work:
        core.step()
    return {
        "first_mib": first,
        "last_mib": _resident_mib(),
        "requests_per_second": count / (time.perf_counter() - begin),
    }


def _short(request_id: int) -> Request:
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, detokenize=False)
    prompt = array("i", ((request_id * 31 + index * index) % 509 for index in range(24)))
    return Request(request_id=request_id, prompt_token_ids=prompt, params=params)


def _resident_mib() -> float:
    gc.collect()
    return int(process_status().get("VmRSS", "0 kB").split()[0]) / 2**10
