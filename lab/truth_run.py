"""Runs of ``python -m lab truth``: one server, or one engine in this process, under one part of a load after another.
It writes one trace; which of its steps were which part's is noted as it grows.

What lives here: starting, loading and stopping. What may not: loads (truth_loads.py), fitting, comparing.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import json
import math
import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from headrace.bench.driver import drive
from headrace.bench.load import HttpClient, LoadGenerator, first_model
from headrace.bench.serve import measure_load
from headrace.config import EngineConfig
from headrace.observe.report import write_json
from headrace.planner.runs import RecordedRun, read_run
from headrace.planner.workload.conversations import Conversation
from headrace.planner.workload.statistics import Sample, summarise
from lab.own_server import own_server
from lab.truth_front import HANDED_ON
from lab.truth_loads import Part

_PRIMES = 7919
ANSWERED = 600.0  # s: a request that takes longer has failed
TAIL = 1 << 16  # bytes of a trace that hold its last step
_STEP = re.compile(rb'"step":(\d+)\b')
QUIET, QUIET_SHARE = 0.1, 0.05  # s between looks at a front end, and how busy one is that has handed all on
SETTLES = 0.12  # s after a part until its last steps are in the trace
Figures = dict[str, Any]


@dataclass(slots=True)
class Runner:
    """``bench``: a part under load, its figures into a file. ``until``: the number of the first step that is nobody's
    yet."""

    folder: Path
    trace: Path
    bench: Callable[[Part, Path], None]
    until: int = 0
    spans: dict[str, range] = field(default_factory=dict)

    def run(self, part: Part, name: str) -> Figures:
        path = self.path(name)
        self.bench(part, path)
        time.sleep(SETTLES)
        begin, self.until = self.until, _steps_so_far(self.trace)
        self.spans[name] = range(self.until if part.stopped else begin, self.until)
        found: Figures = json.loads(path.read_text(encoding="utf-8"))
        return found

    def path(self, name: str) -> Path:
        return self.folder / f"{name}.json"

    def recorded(self, names: Sequence[str]) -> RecordedRun:
        """The steps of these parts."""
        return cut(read_run(self.trace), [self.spans[name] for name in names])


def cut(run: RecordedRun, spans: Sequence[range]) -> RecordedRun:
    """The steps whose numbers are in these alone, and the prompts that they began."""
    steps = tuple(step for step in run.steps if any(step.step_id in span for span in spans))
    began = {round(step.scheduled, 6) for step in steps}
    return replace(run, steps=steps, begun=tuple(each for each in run.begun if round(each[0], 6) in began))


def _steps_so_far(trace: Path) -> int:
    """By the numbers in the trace's last lines."""
    with trace.open("rb") as file:
        file.seek(max(0, trace.stat().st_size - TAIL))
        numbers = [int(each) for each in _STEP.findall(file.read())]
    return max(numbers, default=-1) + 1


# --- over HTTP


@contextmanager
def served(flags: Sequence[str], folder: Path) -> Iterator[Runner]:
    """A server with ``flags`` (MODEL and the engine's). Raises BenchFailed."""
    trace = folder / "trace.json"
    with own_server([*flags, "--trace", str(trace)], folder / "server.log") as url:
        yield Runner(folder, trace, lambda part, path: asyncio.run(_load(url, part, path)))


async def _load(url: str, part: Part, path: Path) -> None:
    """As ``headrace bench serve``, without its process: sixty of them would take longer to start than to measure."""
    client = HttpClient(url, timeout=ANSWERED)
    room = float(part.room) if part.room is not None else math.inf
    kind = _Stopped if part.stopped else LoadGenerator
    generator = kind(client, await first_model(client), "completions", room, as_ids=True, reads_late=True)
    conversations = part.conversations(0, part.vocabulary)
    await client.open(part.room or 0)
    gc.collect()
    gc.freeze()  # a collection amid a load takes this client 80 ms
    outcome = await measure_load(client, generator, conversations)
    busy = {"client_cpu_share": outcome.cpu_seconds / outcome.seconds}
    if isinstance(generator, _Stopped) and generator.handed_on is not None:
        busy[HANDED_ON] = generator.handed_on
    _write(path, outcome.samples, outcome.seconds, outcome.step_figures | busy)


class _Stopped(LoadGenerator):
    """Stops the engine of the server that is this process's child until its front end has handed all on: ``handed_on``,
    CPU seconds of that; None where this machine does not tell. A front end does as much again for an answer's end."""

    handed_on: float | None = None

    async def run(self, conversations: Sequence[Conversation]) -> None:
        try:
            front = _child_of(os.getpid(), b"serve")
            engine = _child_of(front, b"headrace.engine.process")
            begin = _cpu_of(front)
        except (OSError, StopIteration):
            await super().run(conversations)
            return
        os.kill(engine, signal.SIGSTOP)
        try:
            running, last = asyncio.create_task(super().run(conversations)), begin
            await asyncio.sleep(QUIET)
            while (now := _cpu_of(front)) - last > QUIET_SHARE * QUIET:
                last = now
                await asyncio.sleep(QUIET)
            self.handed_on = last - begin
        finally:
            os.kill(engine, signal.SIGCONT)
        await running


def _child_of(parent: int, named: bytes) -> int:
    """Raises OSError, or StopIteration where there is none."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            of = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if of == parent and named in (folder / "cmdline").read_bytes():
                return int(folder.name)
    raise StopIteration


def _cpu_of(process: int) -> float:
    """Seconds, of all its threads; CPUCLOCK_SCHED of such a process is a clock."""
    return time.clock_gettime((~process << 3) | 2)


def _write(path: Path, samples: Sequence[Sample], seconds: float, steps: Mapping[str, float]) -> None:
    write_json(path, {**summarise(samples, seconds), **steps, "requests": [asdict(sample) for sample in samples]})


# --- in this process


@dataclass(slots=True)
class _Measured:
    """Device seconds of the steps of one part, in front of another observer."""

    inner: Any
    seconds: list[float] = field(default_factory=list)

    def on_step(self, *step: Any) -> Any:
        record = self.inner.on_step(*step)
        if not record.failed:
            self.seconds.append(record.measured_seconds)
        return record


@contextmanager
def offline(config: EngineConfig, folder: Path) -> Iterator[Runner]:
    """One engine, each part with other ids: no HTTP, as LLM.generate. Raises what the engine raises."""
    from headrace.engine.assembly import trace_into
    from headrace.engine.llm import LLM

    salts, trace = itertools.count(_PRIMES, _PRIMES), folder / "trace.json"
    with LLM.from_config(config) as llm:
        engine, vocab = llm.engine, llm.info.vocab_size
        engine.await_kernels()
        engine.prepare()
        for part in (
            Part("warm", 64, 300, 8, 0.9),
            Part("warm shared", 32, 64, 8, prefix=1024),
        ):  # what is built or captured at first use
            drive(engine.core, part.conversations(next(salts), vocab))
        observer = trace_into(str(trace), engine, replace(config.device, overlap=engine.core.depth))
        try:
            yield Runner(
                folder, trace, lambda part, path: _drive(engine.core, observer, part, next(salts), vocab, path)
            )
        finally:
            engine.core.observe(engine.recorder)
            observer.close()


def _drive(core: Any, observer: Any, part: Part, salt: int, vocab: int, path: Path) -> None:
    measured = _Measured(observer)
    core.observe(measured)
    made = drive(core, part.conversations(salt, vocab), max_concurrency=part.room)
    for sample in made.samples:  # a client elsewhere sends when a request is due, also while a step runs
        sample.sent = sample.sent if sample.due is None else sample.due
    seconds = measured.seconds
    steps = {"steps": len(seconds), "mean_step_ms": sum(seconds) / len(seconds) * 1e3} if seconds else {}
    _write(path, made.samples, made.seconds, steps)
