"""Measured steps of a run of the engine, read from its trace (``--trace FILE`` of any command).

What lives here: reading and judging such a file. What may not: fitting (calibrate.py), writing traces
(observe/trace.py).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import msgspec

from headrace.cost.cost_model import StepLoad
from headrace.cost.prices import RESTED
from headrace.cost.run_facts import EVENT, RunFacts, read_facts
from headrace.errors import ConfigError

REMEDY = "give a trace that the engine wrote on a device with a profile: headrace serve|bench|generate … --trace FILE"
LEAST_PAUSE = 1e-6  # s
_HOST, _DEVICE = 1, 2  # tracks
_UNREADABLE = (msgspec.MsgspecError, KeyError, TypeError, ValueError, AttributeError, RecursionError)


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """One step that did not fail. Seconds; points in time count from the trace's beginning. ``decode``: every sequence
    computed one token. ``continuous``: there was work all the time since the step before; ``pause``: how long there was
    none; ``since``: how long ago a rest ended. ``waited``: of collecting, what the host did not work. ``recorded``: it
    was captured behind it."""

    step_id: int
    load: StepLoad
    rows: int
    added: int
    added_tokens: int
    decode: bool
    longest: int
    continuous: bool
    seconds: float
    ended: float
    scheduled: float
    submitted: float
    queued: float
    waited: float
    collected: float
    pause: float = 0.0
    since: float = math.inf
    recorded: bool = False


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """``sha256`` of the file's content; ``dropped``: steps that failed or whose record is not whole. ``begun``:
    prompts, in the order in which they got a row: when (the scheduling of that step, s) and how many tokens."""

    facts: RunFacts
    steps: tuple[RecordedStep, ...]
    sha256: str
    name: str
    dropped: int
    begun: tuple[tuple[float, int], ...] = ()


def read_run(path: Path) -> RecordedRun:
    """Raises ConfigError when the file is no trace of steps with their loads."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"The run {path} cannot be read ({error.strerror}); {REMEDY}.") from error
    trace = _read(path, content)
    if trace.facts is None:
        raise ConfigError(
            f"The trace {path} does not say which model and device it is of: it was written by an earlier version, or on a device "
            f"without a profile. Measure the device (headrace doctor --profile) and write the trace again."
        )
    whole = _with_pauses([each for each in map(trace.step, trace.steps) if each is not None])
    dropped = len(trace.steps) - len(whole)
    return RecordedRun(
        trace.facts, tuple(whole), hashlib.sha256(content).hexdigest(), path.name, dropped, tuple(trace.begun)
    )


def _read(path: Path, content: bytes) -> _Trace:
    """One event a line; the closing bracket may be missing, and the last line may be torn."""
    lines = content.decode("utf-8", errors="replace").split("\n")
    if lines[0].strip() not in ("[", "[]"):
        raise ConfigError(f"The run {path} is no trace of this engine (it begins with {lines[0][:30]!r}); {REMEDY}.")
    trace = _Trace()
    for number, line in enumerate(lines[1:], start=2):
        text = line.strip().rstrip(",")
        try:
            if text not in ("", "]"):
                trace.take(text)
        except _UNREADABLE as error:
            if number >= len(lines) - 1 and not isinstance(error, msgspec.ValidationError):
                break
            raise ConfigError(f"The run {path} cannot be read in line {number} ({error}); {REMEDY}.") from error
    return trace


def _with_pauses(steps: Sequence[RecordedStep]) -> list[RecordedStep]:
    """What went before the first step nobody knows: it is taken to come after a rest."""
    found, end, rested = [], -math.inf, -math.inf
    for each in steps:
        pause = 0.0 if each.continuous else max(LEAST_PAUSE, each.scheduled - end)
        rested = each.scheduled if pause > RESTED else rested
        found.append(replace(each, pause=pause, since=each.scheduled - rested))
        end = each.collected
    return found


# --- events, as far as they are of use here


_Number = Annotated[float, msgspec.Meta(ge=0)]
_Count = Annotated[int, msgspec.Meta(ge=0)]


class _Load(msgspec.Struct, rename={"added_tokens": "added tokens", "graph_tokens": "graph tokens"}):
    """What a step had to do; tuples are by KV group."""

    added: _Count
    added_tokens: _Count
    pairs: tuple[_Number, ...] = ()
    keys: tuple[_Number, ...] = ()
    lone: tuple[_Number, ...] = ()
    saved: tuple[_Number, ...] = ()
    graph_tokens: _Count = 0
    longest: _Count = 0
    continuous: bool = False
    recorded: bool = False


class _Step(msgspec.Struct, rename={"single": "single tokens", "measured": "measured ms"}):
    step: _Count
    rows: _Count
    single: _Count
    tokens: _Count
    sampled: _Count
    measured: _Number
    load: _Load


class _HostSlice(msgspec.Struct):
    step: _Count


class _Sequence(msgspec.Struct):
    """One that got a row; one that was pushed out before has output tokens."""

    prompt_tokens: _Count = 0
    output_tokens: int = -1


class _Event(msgspec.Struct):
    """Times in µs."""

    name: str = ""
    ph: str = ""
    cat: str = ""
    tid: int = 0
    ts: _Number = 0.0
    dur: _Number = 0.0
    args: msgspec.Raw = msgspec.Raw(b"{}")

    @property
    def span(self) -> tuple[float, float]:
        """Begin and end in seconds."""
        return self.ts * 1e-6, self.ts * 1e-6 + self.dur * 1e-6


class _Trace:
    """What was read so far."""

    def __init__(self) -> None:
        self.facts: RunFacts | None = None
        self.host: dict[int, dict[str, tuple[float, float]]] = {}  # step → slice → begin and end, s
        self.steps: list[tuple[_Event, _Step]] = []
        self.begun: list[tuple[float, int]] = []

    def take(self, line: str) -> None:
        """Raises one of _UNREADABLE."""
        event = msgspec.json.decode(line, type=_Event)
        if event.name == EVENT:
            self.facts = read_facts(msgspec.json.decode(event.args))
        elif event.ph == "b" and event.cat == "sequence":
            sequence = msgspec.json.decode(event.args, type=_Sequence)
            self.begun += [(event.span[0], sequence.prompt_tokens)] if not sequence.output_tokens else []
        elif event.cat == "step" and event.tid == _HOST:
            self.host.setdefault(msgspec.json.decode(event.args, type=_HostSlice).step, {})[event.name] = event.span
        elif event.cat == "step" and event.tid == _DEVICE:
            self.steps.append((event, msgspec.json.decode(event.args, type=_Step)))

    def step(self, recorded: tuple[_Event, _Step]) -> RecordedStep | None:
        """None where it failed or its record is not whole."""
        (event, found), load = recorded, recorded[1].load
        host = self.host.get(found.step, {})
        if (
            event.name == "failed"
            or not {"schedule", "submit", "collect"} <= host.keys()
            or not found.measured
            or not found.tokens
        ):
            return None
        (scheduled, _), (submitted, queued), (awaited, collected) = host["schedule"], host["submit"], host["collect"]
        saved = () if load.graph_tokens else load.saved  # a graph reads shared keys for each of its sequences
        return RecordedStep(
            step_id=found.step,
            load=StepLoad(found.tokens, found.sampled, load.pairs, load.keys, load.lone, saved, load.graph_tokens),
            rows=found.rows,
            added=load.added,
            added_tokens=load.added_tokens,
            decode=found.single == found.rows,
            longest=load.longest,
            continuous=load.continuous,
            seconds=found.measured * 1e-3,
            ended=event.span[1],
            scheduled=scheduled,
            submitted=submitted,
            queued=queued,
            waited=collected - awaited,
            collected=collected,
            recorded=load.recorded,
        )
