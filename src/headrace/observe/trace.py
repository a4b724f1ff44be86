"""A run's trace for Perfetto (ui.perfetto.dev) or chrome://tracing: what host and device did, step by step.

Chrome's JSON trace events, one per line, in order of time. The format allows the closing bracket to be missing, and
only whole events are written, so the file of a killed process can be opened, too. It holds numbers of tokens and of
sequences, but no text or token ids.

What lives here: events from the step record, and their file. What may not: measuring, the record itself (metrics.py),
torch.
"""

from __future__ import annotations

import heapq
import json
import logging
from collections.abc import Callable, Iterator
from operator import add
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.cost.run_facts import EVENT, RunFacts
from headrace.errors import ConfigError
from headrace.observe.metrics import StepRecord, StepRecorder, StepTimes
from headrace.request import StepPlan, StepResult

if TYPE_CHECKING:
    from headrace.cost.sharing import SharedBlocks
    from headrace.engine.core import EngineStats

_log = logging.getLogger(__name__)

FLUSH_BYTES = 1 << 16
FLUSH_SECONDS = 1.0  # of the engine's clock: what a killed process may lose
_encode = json.JSONEncoder(separators=(",", ":")).encode
_HOST, _DEVICE = 1, 2  # tracks
_PROCESS = 1


class TraceFile:
    """Appends whole events. If the file can no longer be written, the trace ends, but not the engine.

    Raises ConfigError when it cannot be opened.
    """

    def __init__(self, path: str) -> None:
        try:
            self._file = Path(path).open("wb", buffering=0)  # noqa: SIM115  closed by close()
        except OSError as error:
            raise ConfigError(
                f"The trace file {path} cannot be written ({error.strerror}). Give --trace a file in a folder that exists."
            ) from error
        self._path = path
        self._lines: list[bytes] = []
        self._size = 0
        self._separator = b"[\n"
        self._broken = False

    def add(self, event: dict[str, Any]) -> None:
        line = self._separator + _encode(event).encode()
        self._separator = b",\n"
        self._lines.append(line)
        self._size += len(line)
        if self._size >= FLUSH_BYTES:
            self.flush()

    def flush(self) -> None:
        """In one write, so that no event is incomplete."""
        data, self._lines, self._size = b"".join(self._lines), [], 0
        if self._broken or not data:
            return
        try:
            self._file.write(data)
        except OSError as error:
            self._broken = True
            _log.warning("the trace %s ends here: %s", self._path, error.strerror)

    def close(self) -> None:
        if not self._file.closed:
            self._lines.append(b"\n]\n" if self._separator != b"[\n" else b"[]\n")
            self.flush()
            self._file.close()


class StepTrace:
    """An observer of the core that records steps and writes each of them to the file. Its memory is bounded by the
    steps in flight.

    With ``facts`` and the load of each step (if the recorder has a cost model), step prices can be fitted to the run
    (``headrace simulate --calibrate``); ``sharing`` knows which keys several sequences share.

    Tracks: *host* (schedule, submit, collect, update), *device* (one slice per step, named by its kind), one counter
    for requests and one for blocks, and a slice for each sequence from the step that gives it a row to the one that
    takes it back.
    """

    def __init__(
        self,
        file: TraceFile,
        recorder: StepRecorder,
        gauges: Callable[[], EngineStats],
        *,
        name: str,
        facts: RunFacts | None = None,
        sharing: SharedBlocks | None = None,
    ) -> None:
        self._file = file
        self._recorder = recorder
        self._gauges = gauges
        self._origin: float | None = None  # seconds, the engine's clock: the trace's zero
        self._flushed = self._now = 0.0
        self._waiting: list[tuple[float, int, dict[str, Any]]] = []  # a heap: events that may not be the next ones yet
        self._count = 0
        self._sequences: dict[int, int] = {}  # row → sequence
        self._sharing = sharing
        for event in (
            *_names(name),
            *([{"ph": "M", "name": EVENT, "pid": _PROCESS, "args": facts.as_dict()}] if facts is not None else []),
        ):
            file.add(event)

    def on_step(self, plan: StepPlan, result: StepResult | None, times: StepTimes) -> StepRecord:
        record = self._recorder.on_step(plan, result, times)
        gauges = self._gauges()
        self._origin = times.scheduled if self._origin is None else self._origin
        for seconds, event in self._of_sequences(plan, times.scheduled):
            self._add(seconds, event)
        of_device = _of_device(record, {**_drafts(result), **self._load(plan, result, times)})
        for seconds, event in (*_of_host(plan.step_id, times), *of_device, *_of_gauges(gauges, times)):
            self._add(seconds, event)
        # What the next step does begins after this one was submitted, and after now if it is not submitted yet.
        self._write(until=times.queued if times.in_flight else times.settled)
        if not (gauges.num_running or gauges.num_waiting) or times.settled - self._flushed >= FLUSH_SECONDS:
            self._flushed = times.settled
            self._file.flush()
        return record

    def _load(self, plan: StepPlan, result: StepResult | None, times: StepTimes) -> dict[str, Any]:
        """The step's work as a cost model counts it: numbers by KV group."""
        floors = self._recorder.floors
        if floors is None:
            return {}
        load = floors.load_of(plan, self._sharing.observe(plan) if self._sharing is not None else ())
        longest = max(map(add, plan.starts, plan.counts), default=0)
        numbers = {"pairs": load.pairs, "keys": load.keys, "lone": load.decode_keys, "saved": load.saved}
        new = {"added": len(plan.rows_added), "added tokens": sum(len(each.token_ids) for each in plan.rows_added)}
        replayed = {"graph tokens": result.graph_tokens, "recorded": result.recorded} if result is not None else {}
        return {"load": {**numbers, **new, **replayed, "longest": longest, "continuous": times.continuous}}

    def close(self) -> None:
        """Ends the slices that are still open, and the file."""
        for row in list(self._sequences):
            self._add(self._now, self._end_of(row))
        self._write(until=float("inf"))
        self._file.close()

    def _of_sequences(self, plan: StepPlan, seconds: float) -> Iterator[tuple[float, dict[str, Any]]]:
        for row in plan.rows_dropped:
            if row in self._sequences:
                yield seconds, self._end_of(row)
        for new in plan.rows_added:
            if new.row in self._sequences:  # rebuilt
                yield seconds, self._end_of(new.row)
            self._sequences[new.row] = new.sequence_id
            tokens = {
                "prompt_tokens": new.num_prompt_tokens,
                "output_tokens": len(new.token_ids) - new.num_prompt_tokens,
            }
            yield seconds, {"ph": "b", **_sequence(new.sequence_id), "args": {"row": new.row, **tokens}}

    def _end_of(self, row: int) -> dict[str, Any]:
        return {"ph": "e", **_sequence(self._sequences.pop(row))}

    def _add(self, seconds: float, event: dict[str, Any]) -> None:
        self._now = max(self._now, seconds)
        self._count += 1
        heapq.heappush(self._waiting, (seconds, self._count, event))

    def _write(self, until: float) -> None:
        while self._waiting and self._waiting[0][0] <= until:
            seconds, _, event = heapq.heappop(self._waiting)
            self._file.add({**event, "ts": _microseconds(seconds - (self._origin or 0.0)), "pid": _PROCESS})


def _names(process: str) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "name": "process_name", "pid": _PROCESS, "args": {"name": process}}
    for track, name in ((_HOST, "host"), (_DEVICE, "device")):
        yield {"ph": "M", "name": "thread_name", "pid": _PROCESS, "tid": track, "args": {"name": name}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": _PROCESS, "tid": track, "args": {"sort_index": track}}


def _of_host(step_id: int, times: StepTimes) -> Iterator[tuple[float, dict[str, Any]]]:
    slices = (
        ("schedule", times.scheduled, times.submitted),
        ("submit", times.submitted, times.queued),
        ("collect", times.awaited, times.collected),
        ("update", times.collected, times.settled),
    )
    for name, begin, end in slices:
        args: dict[str, Any] = {"step": step_id}
        if name == "submit":
            args["host CPU ms since the last one"] = _milliseconds(times.host_seconds)
        yield begin, _slice(name, _HOST, end - begin, args)


def _of_device(record: StepRecord, load: dict[str, Any]) -> Iterator[tuple[float, dict[str, Any]]]:
    args = {
        "step": record.step_id,
        "rows": record.rows,
        "single tokens": record.decodes,
        "tokens": record.tokens,
        "sampled": record.sampled,
        "floor ms": _milliseconds(record.floor_seconds),
        "overlapped floor ms": _milliseconds(record.overlapped_floor_seconds),
        "predicted ms": _milliseconds(record.predicted_seconds),
        "measured ms": _milliseconds(record.measured_seconds),
        "fraction": None if record.fraction is None else round(record.fraction, 4),
        "idle before ms": _milliseconds(record.idle_seconds),
        **load,
    }
    yield record.begin, _slice("failed" if record.failed else record.kind, _DEVICE, record.end - record.begin, args)


def _drafts(result: StepResult | None) -> dict[str, Any]:
    """Tokens that were proposed in a step, and how many of these were right."""
    if result is None or not sum(result.drafted):
        return {}
    right = sum(
        max(0, len(tokens) - 1) for drafted, tokens in zip(result.drafted, result.tokens, strict=True) if drafted
    )
    ahead = {} if result.ahead is None else {"drafted ahead": result.ahead.used, "refuted ahead": result.ahead.refuted}
    return {"drafted": sum(result.drafted), "accepted": right, **ahead}


def _of_gauges(gauges: EngineStats, times: StepTimes) -> Iterator[tuple[float, dict[str, Any]]]:
    yield (
        times.settled,
        {"ph": "C", "name": "requests", "args": {"running": gauges.num_running, "waiting": gauges.num_waiting}},
    )
    yield times.settled, {"ph": "C", "name": "KV blocks", "args": {"used": gauges.num_used_blocks}}


def _slice(name: str, track: int, seconds: float, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": "step", "tid": track, "dur": _microseconds(seconds), "args": args}


def _sequence(sequence_id: int) -> dict[str, Any]:
    return {"name": f"sequence {sequence_id}", "cat": "sequence", "id": sequence_id, "tid": _HOST}


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _milliseconds(seconds: float) -> float:
    return round(seconds * 1e3, 6)
