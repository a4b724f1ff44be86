"""One engine measured row by row: warm-up, repeats, median and spread, and what its steps say meanwhile.

What lives here: timing of rows through the public LLM API. What may not: torch, processes, peers, printing.

Everything said of a row beside its time (floor, host time) comes from the same runs as the time, by the same
definition.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, Protocol

from headrace.errors import BenchFailed
from headrace.observe.metrics import StepRecord
from lab.table_rows import Asked, Row, requests_of

WARM_UP_REQUESTS = 128  # of a row with more requests that is no decode row
WARM_UP_TOKENS = 2**17  # of a longer prompt: its further steps are like those before
LEAST_POWER_SECONDS = 1.0  # of work, to say what it drew: a card's counter moves some ten times a second


class Generates(Protocol):
    """What a row needs of an LLM."""

    def generate(self, prompts: Any, sampling_params: Any, *, use_tqdm: bool) -> Sequence[Any]: ...


class Records(Protocol):
    """What a row reads of a StepRecorder: sums that run on, and the last steps."""

    @property
    def records(self) -> Sequence[StepRecord]: ...

    def summary(self) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class Measured:
    """One row's figures. ``values``: one a repeat, in the row's unit; ``floor`` in the same unit by this device's own
    limits.

    ``host_ms`` (host time a decode step), ``idle`` (share of the time in which the device waited) and ``device_ms`` are
    of decode rows only. ``watts``: the device's mean power over all that was timed for the row, prompts of decode rows
    too; None where nothing counts it. ``slowest``: the step that took longest, for repeats that differ. ``problem`` says
    why there are no values.
    """

    row: str
    unit: str
    values: tuple[float, ...] = ()
    floor: float | None = None
    host_ms: float | None = None
    idle: float | None = None
    device_ms: float | None = None
    watts: float | None = None
    requests: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    slowest: str | None = None
    problem: str | None = None

    @property
    def median(self) -> float | None:
        return median(self.values) if self.values else None


@dataclass(frozen=True, slots=True)
class _Run:
    """One call of generate, or a figure made of two: its seconds, and the floor of its steps (0 where no limit is
    known)."""

    seconds: float
    floor: float

    def times(self, factor: float) -> _Run:
        return _Run(factor * self.seconds, factor * self.floor)


@dataclass(slots=True)
class _Power:
    """What the device used over some runs; ``known`` as long as it is counted."""

    joules: float = 0.0
    seconds: float = 0.0
    known: bool = True

    def add(self, before: float | None, after: float | None, seconds: float) -> None:
        self.known = self.known and before is not None and after is not None
        self.joules += (after or 0.0) - (before or 0.0)
        self.seconds += seconds

    @property
    def watts(self) -> float | None:
        return self.joules / self.seconds if self.known and self.seconds >= LEAST_POWER_SECONDS else None


@dataclass(slots=True)
class TableBench:
    """Runs rows on one LLM. ``now`` is the clock in seconds; ``joules``: what the device has used, where that is
    counted. ``stages``: of a pipeline, whose steps share a batch between them."""

    llm: Generates
    vocab_size: int
    recorder: Records
    repeats: int = 3
    now: Callable[[], float] = time.perf_counter
    joules: Callable[[], float | None] = lambda: None
    stages: int = 1
    _seeds: itertools.count[int] = field(default_factory=itertools.count)
    _power: _Power = field(default_factory=_Power)

    def measure(self, row: Row) -> Measured:
        """Raises BenchFailed when a request did not end as asked, and what ``generate`` raises."""
        asked = requests_of(row, self.vocab_size, 0)
        self._warm_up(row)
        taken, self._power = self._last_step(), _Power()
        figures = [self._repeat(row) for _ in range(self.repeats)]
        floors = [run.floor for run in figures]
        measured = Measured(
            row.name,
            row.unit,
            tuple(run.seconds for run in figures),
            median(floors) if min(floors) > 0 else None,
            requests=len(asked.prompts),
            prompt_tokens=asked.prompt_tokens,
            output_tokens=asked.output_tokens,
            watts=self._power.watts,
            slowest=_slowest([each for each in self.recorder.records if each.step_id > taken]),
        )
        return (
            replace(measured, **self._of_decode_steps(-(-row.count // self.stages), taken))
            if row.group == "decode"
            else measured
        )

    def _warm_up(self, row: Row) -> None:
        """What compiles, captures or grows at first use does it here; the same lengths as later, of a row of many
        requests only some."""
        asked = requests_of(row, self.vocab_size, next(self._seeds))
        some = len(asked.prompts) if row.group == "decode" else WARM_UP_REQUESTS
        prompts = [{"prompt_token_ids": each["prompt_token_ids"][:WARM_UP_TOKENS]} for each in asked.prompts[:some]]
        self._run(Asked(prompts, asked.params[:some]))
        if row.group == "decode":
            self._run(requests_of(row, self.vocab_size, next(self._seeds), one_token=True))

    def _repeat(self, row: Row) -> _Run:
        """The row's figure in its unit, and its floor in the same."""
        whole = self._fresh(row)
        if row.group == "decode":
            first = self._fresh(row, one_token=True)
            return _Run(whole.seconds - first.seconds, whole.floor - first.floor).times(1e3 / (row.output[0] - 1))
        return whole.times(1e3 if row.unit == "ms" else 1.0)

    def _fresh(self, row: Row, *, one_token: bool = False) -> _Run:
        return self._run(requests_of(row, self.vocab_size, next(self._seeds), one_token=one_token))

    def _run(self, asked: Asked) -> _Run:
        before, used = self.recorder.summary()["floor_seconds"], self.joules()
        begin = self.now()
        outputs = self.llm.generate(asked.prompts, asked.params, use_tqdm=False)
        seconds = self.now() - begin
        self._power.add(used, self.joules(), seconds)
        _check(asked, outputs)
        return _Run(seconds, self.recorder.summary()["floor_seconds"] - before)

    def _last_step(self) -> int:
        records = self.recorder.records
        return records[-1].step_id if records else -1

    def _of_decode_steps(self, rows: int, after: int) -> dict[str, Any]:
        """Of the steps after one in which all rows decoded; those that the recorder no longer holds are left out."""
        steps = [
            each
            for each in self.recorder.records
            if each.step_id > after and each.kind == "decode" and each.rows == rows and not each.failed
        ]
        if not steps:
            return {}
        idle, measured = sum(each.idle_seconds for each in steps), sum(each.measured_seconds for each in steps)
        return {
            "host_ms": 1e3 * median(each.host_seconds for each in steps),
            "device_ms": 1e3 * median(each.measured_seconds for each in steps),
            "idle": idle / (idle + measured) if measured > 0 else 0.0,
        }


def _slowest(steps: Sequence[StepRecord]) -> str | None:
    if not steps:
        return None
    each = max(steps, key=lambda each: each.idle_seconds + each.measured_seconds)
    device, idle, host = (f"{1e3 * s:.1f} ms" for s in (each.measured_seconds, each.idle_seconds, each.host_seconds))
    return f"{each.kind}, {each.rows} rows, {each.tokens} tokens: device {device}, waited {idle}, host {host}"


def _check(asked: Asked, outputs: Sequence[Any]) -> None:
    """Every answer has as many tokens as were asked for."""
    for output, params in zip(outputs, asked.params, strict=True):
        answer = output.outputs[0]
        if len(answer.token_ids) != params.max_tokens:
            reason = answer.stop_reason or answer.finish_reason
            raise BenchFailed(
                f"a request ended after {len(answer.token_ids)} of {params.max_tokens} tokens ({reason}); its time is worth nothing."
            )
