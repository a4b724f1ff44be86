"""What ``python -m lab truth`` has measured: in memory, and in the folder that ``--keep`` leaves.

What lives here: both, and reading the one from the other. What may not: measuring (truth_run.py), judging.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import msgspec

from headrace.cost.profile import Limits
from headrace.errors import ConfigError
from headrace.observe.report import write_json
from lab.truth_loads import REPEATS, Part
from lab.truth_run import Figures, Runner

FILE = "measured.json"


@dataclass(slots=True)
class Measured:
    """What was seen so far. ``parts``: of A, by the names of their runs. ``runs``: of each part of B, by repeat.
    ``looks``: the machine's limits, each time between two loads. ``popularity``: of experts, by run of A, part of B, or
    row."""

    held: list[Part] = field(default_factory=list)
    parts: list[str] = field(default_factory=list)
    fronts: list[str] = field(default_factory=list)
    runs: dict[str, list[list[Figures]]] = field(default_factory=dict)
    looks: list[Limits] = field(default_factory=list)
    popularity: dict[str, list[float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Kept:
    """What the files beside do not say. ``kind``: of device; ``spans``: which steps were whose."""

    kind: str
    offline: bool
    long_steps: bool
    held: list[Part]
    parts: list[str]
    fronts: list[str]
    spans: Mapping[str, range]
    popularity: dict[str, list[float]] = field(default_factory=dict)
    repeats: int = REPEATS


def keep(folder: Path, kept: Kept) -> None:
    spans = {name: (span.start, span.stop) for name, span in kept.spans.items()}
    plain = {**{name: getattr(kept, name) for name in kept.__slots__}, "held": [asdict(part) for part in kept.held]}
    write_json(folder / FILE, {**plain, "spans": spans})


def read_kept(folder: Path) -> tuple[Kept, Runner, Measured]:
    """Raises ConfigError."""

    def read(name: str) -> Figures:
        found: Figures = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
        return found

    try:
        stored = json.loads((folder / FILE).read_text(encoding="utf-8"))
        held = [msgspec.convert(part, Part) for part in stored.pop("held")]
        spans = {name: range(*span) for name, span in stored.pop("spans").items()}
        kept = Kept(**stored, held=held, spans=spans)
        runs = {
            part.name: [[read(name) for name in part.names(repeat)] for repeat in range(kept.repeats)] for part in held
        }
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"--again {folder} is no kept measurement ({error}); give what --keep left.") from error
    seen = Measured(held, kept.parts, kept.fronts, runs, popularity=kept.popularity)
    return kept, Runner(folder, folder / "trace.json", lambda part, path: None, spans=spans), seen
