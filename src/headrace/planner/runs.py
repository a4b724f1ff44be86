"""Measured steps of a run of the engine, read from its trace (``--trace FILE`` of any command).

What lives here: reading and judging such a file. What may not: fitting (calibrate.py), writing traces (trace.py).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headrace.cost.cost_model import StepLoad
from headrace.cost.prices import RESTED
from headrace.cost.run_facts import EVENT, RunFacts, read_facts
from headrace.errors import ConfigError

REMEDY = "give a trace that the engine wrote: headrace serve|bench|generate … --trace FILE"
LEAST_PAUSE = 1e-6  # s
_HOST, _DEVICE = 1, 2  # tracks


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """One step that did not fail. Seconds; points in time count from the trace's beginning. ``alone``: every sequence computed one token.
    ``continuous``: there was work all the time since the step before; ``pause``: how long there was none; ``since``: how long ago a rest ended.
    ``waited``: of collecting, what the host did not work. ``recorded``: a graph was recorded behind it."""

    step_id: int
    load: StepLoad
    rows: int
    added: int
    added_tokens: int
    alone: bool
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
    """``sha256`` of the file's content; ``dropped``: steps that failed or whose record is not whole. ``begun``: prompts, in the order in which they
    got a row: when (the scheduling of that step, s) and how many tokens."""

    facts: RunFacts
    steps: tuple[RecordedStep, ...]
    sha256: str
    name: str
    dropped: int
    begun: tuple[tuple[float, int], ...] = ()

    def cut(self, spans: Sequence[range]) -> RecordedRun:
        """The steps whose numbers are in these alone, and the prompts that they began."""
        steps = tuple(step for step in self.steps if any(step.step_id in span for span in spans))
        began = {round(step.scheduled, 6) for step in steps}
        return replace(self, steps=steps, begun=tuple(each for each in self.begun if round(each[0], 6) in began))


def read_run(path: Path) -> RecordedRun:
    """Raises ConfigError when the file is no trace of steps with their loads."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"The run {path} cannot be read ({error.strerror}); {REMEDY}.") from error
    facts, host, device, begun = _sorted(path, _events(path, content))
    steps = [_step(path, event, host.get(event["args"]["step"], {})) for event in device]
    whole = _with_pauses([each for each in steps if each is not None])
    return RecordedRun(facts, tuple(whole), hashlib.sha256(content).hexdigest(), path.name, len(steps) - len(whole), tuple(begun))


def _events(path: Path, content: bytes) -> Iterator[dict[str, Any]]:
    """One a line; the closing bracket may be missing, and the last line may be torn."""
    lines = content.decode("utf-8", errors="replace").split("\n")
    if lines[0].strip() not in ("[", "[]"):
        raise ConfigError(f"The run {path} is no trace of this engine (it begins with {lines[0][:30]!r}); {REMEDY}.")
    for number, line in enumerate(lines[1:], start=2):
        text = line.strip().rstrip(",")
        if text in ("", "]"):
            continue
        try:
            event = json.loads(text)
        except (ValueError, RecursionError) as error:
            if number >= len(lines) - 1:
                return
            raise ConfigError(f"The run {path} is broken in line {number} ({error}); {REMEDY}.") from error
        if isinstance(event, dict):
            yield event


def _with_pauses(steps: Sequence[RecordedStep]) -> list[RecordedStep]:
    """What went before the first step nobody knows: it is taken to come after a rest."""
    found, end, rested = [], -math.inf, -math.inf
    for each in steps:
        pause = 0.0 if each.continuous else max(LEAST_PAUSE, each.scheduled - end)
        rested = each.scheduled if pause > RESTED else rested
        found.append(replace(each, pause=pause, since=each.scheduled - rested))
        end = each.collected
    return found


Host = dict[int, dict[str, tuple[float, float]]]  # step → slice → begin and end, s


Begun = list[tuple[float, int]]


def _sorted(path: Path, events: Iterable[dict[str, Any]]) -> tuple[RunFacts, Host, list[dict[str, Any]], Begun]:
    facts: RunFacts | None = None
    host: Host = {}
    device: list[dict[str, Any]] = []
    begun: Begun = []
    for event in events:
        if event.get("name") == EVENT:
            facts = _facts(path, event.get("args"))
        elif event.get("ph") == "b" and event.get("cat") == "sequence":
            begun += _prompt(event)
        elif event.get("cat") == "step" and event.get("tid") in (_HOST, _DEVICE):
            args, begin, length = _times(path, event)
            if event["tid"] == _HOST:
                host.setdefault(args["step"], {})[str(event.get("name"))] = (begin, begin + length)
            else:
                device.append({**event, "begin": begin, "length": length})
    if facts is None:
        raise ConfigError(
            f"The trace {path} does not say which model and device it is of: it was written by an earlier version, or on a device "
            f"without a profile. Measure the device (headrace doctor --profile) and write the trace again."
        )
    return facts, host, device, begun


def _prompt(event: Mapping[str, Any]) -> Begun:
    """Of a sequence that got a row for the first time; one that was pushed out before is none."""
    args, begin = event.get("args"), event.get("ts")
    if not isinstance(args, dict) or not isinstance(begin, (int, float)) or args.get("output_tokens") != 0:
        return []
    tokens = args.get("prompt_tokens")
    return [(begin * 1e-6, tokens)] if isinstance(tokens, int) and not isinstance(tokens, bool) else []


def _facts(path: Path, stored: Any) -> RunFacts:
    try:
        return read_facts(stored)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"The run {path} does not describe itself as this version reads it ({error}); {REMEDY}.") from error


def _times(path: Path, event: Mapping[str, Any]) -> tuple[dict[str, Any], float, float]:
    """Arguments, begin and length in seconds. Raises ConfigError for what is no time."""
    args, begin, length = event.get("args"), event.get("ts"), event.get("dur")
    if not isinstance(args, dict) or not isinstance(args.get("step"), int):
        raise ConfigError(f"The run {path} has a step without a number ({str(event)[:80]}); {REMEDY}.")
    for what, value in (("begins at", begin), ("takes", length)):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
            raise ConfigError(f"In the run {path} step {args['step']} {what} {value} µs, which is no time; {REMEDY}.")
    assert begin is not None and length is not None
    return args, begin * 1e-6, length * 1e-6


def _step(path: Path, event: Mapping[str, Any], host: Mapping[str, tuple[float, float]]) -> RecordedStep | None:
    args, load = event["args"], event["args"].get("load")
    if load is None:
        raise ConfigError(f"The run {path} does not say what step {args['step']} had to do; {REMEDY} on a device with a profile.")
    if event.get("name") == "failed" or not {"schedule", "submit", "collect"} <= host.keys():
        return None
    seconds = _number(path, args, "measured ms", args.get("measured ms")) * 1e-3
    tokens, rows = int(_number(path, args, "tokens", args.get("tokens"))), int(_number(path, args, "rows", args.get("rows")))
    if not seconds or not tokens:
        return None
    groups = {name: tuple(_number(path, args, name, each) for each in load.get(name) or ()) for name in ("pairs", "keys", "lone", "saved")}
    sampled = int(_number(path, args, "sampled", args.get("sampled")))
    (scheduled, _), (submitted, queued), (awaited, collected) = host["schedule"], host["submit"], host["collect"]
    filled = int(_number(path, args, "graph tokens", load.get("graph tokens", 0)))
    return RecordedStep(
        args["step"], StepLoad(tokens, sampled, **groups, filled=filled), rows, *_added(path, args, load), args.get("single tokens") == rows,
        int(load.get("longest", 0)), bool(load.get("continuous")), seconds, event["begin"] + event["length"],
        scheduled, submitted, queued, collected - awaited, collected, recorded=bool(load.get("recorded")),
    )  # fmt: skip


def _added(path: Path, args: Mapping[str, Any], load: Mapping[str, Any]) -> tuple[int, int]:
    """New sequences, and the tokens they begin with."""
    return int(_number(path, args, "added", load.get("added"))), int(_number(path, args, "added tokens", load.get("added tokens")))


def _number(path: Path, args: Mapping[str, Any], name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
        raise ConfigError(f"In the run {path} step {args['step']} has {name} = {value!r}, not a number of at least 0; {REMEDY}.")
    return float(value)
