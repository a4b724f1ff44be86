"""A simulated run beside measured ones of the same workload: the error of each figure, and whether it is within what
may be asked.

    bound of a p99    20 %
    of the others     10 %, or twice the spread of the measured runs where that is more
    void              measured runs that are more than 15 % apart: nothing holds against those, and nothing is missed

What lives here: reading what ``headrace bench serve --output-json`` wrote, and comparing. What may not: running either,
printing.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from headrace.cost.calibrated import CalibratedSteps
from headrace.errors import ConfigError
from headrace.planner.workload.statistics import Sample

COMPARED = (
    "duration",
    "output_throughput",
    "mean_step_ms",
    *(f"{which}_{name}_ms" for name in ("ttft", "tpot", "itl", "e2el") for which in ("mean", "median", "p99")),
)
SAME_LOAD = ("completed", "total_input_tokens", "total_output_tokens")
ALLOWED = 0.02  # by which the two loads may differ
BOUND, TAIL_BOUND, SPREADS, VOID = 0.10, 0.20, 2.0, 0.15
VOID_STATUS = 3  # exit status: nothing was missed, but not everything could be judged
COLUMNS = ("figure", "simulated", "measured", "error", "spread", "bound", "verdict")

Verdict = Literal["", "holds", "MISSED", "void"]


@dataclass(frozen=True, slots=True)
class Compared:
    """``measured``: the mean of the runs. ``spread``: (highest − lowest) / mean of them; None of a single run, which
    gives no verdict."""

    figure: str
    simulated: float
    measured: float
    spread: float | None = None

    @property
    def error(self) -> float:
        """Simulated / measured − 1."""
        return self.simulated / self.measured - 1.0

    @property
    def bound(self) -> float:
        return TAIL_BOUND if self.figure.startswith("p99") else max(BOUND, SPREADS * (self.spread or 0.0))

    @property
    def verdict(self) -> Verdict:
        if self.spread is None:
            return ""
        if self.spread > VOID:
            return "void"
        return "holds" if abs(self.error) <= self.bound else "MISSED"

    def row(self) -> list[Any]:
        """As a line under COLUMNS."""
        spread = "one run" if self.spread is None else f"{self.spread:.1%}"
        bound = "" if self.verdict == "void" else f"{self.bound:.0%}"
        return [self.figure, self.simulated, self.measured, f"{self.error:+.1%}", spread, bound, self.verdict]


def status_of(compared: Iterable[Compared]) -> int:
    """The exit status: 1 where something was missed, else VOID_STATUS where something is void."""
    verdicts = {each.verdict for each in compared}
    return 1 if "MISSED" in verdicts else VOID_STATUS if "void" in verdicts else 0


def compare(simulated: Mapping[str, Any], paths: Sequence[Path]) -> list[Compared]:
    """Every figure that all have. Raises ConfigError where a file is not such a run, or one of another load."""
    measured = [_read(path) for path in paths]
    for path, each in zip(paths, measured, strict=True):
        _check_same_load(simulated, path, each)
    return compare_figures(simulated, measured)


def compare_figures(simulated: Mapping[str, Any], measured: Sequence[Mapping[str, float]]) -> list[Compared]:
    """Figures of one load, simulated and measured once or more."""
    found = []
    for name in COMPARED:
        values = [each[name] for each in measured if each.get(name)]
        if simulated.get(name) and len(values) == len(measured):
            mean = sum(values) / len(values)
            found.append(
                Compared(name, simulated[name], mean, (max(values) - min(values)) / mean if len(values) > 1 else None)
            )
    return found


def check_unseen(paths: Sequence[Path], calibrated: CalibratedSteps | None) -> None:
    """A run that prices were fitted to says nothing about them. Raises ConfigError. (What cannot be read is said by
    ``compare``.)"""
    fitted = {run.sha256: run.name for run in calibrated.runs} if calibrated is not None else {}
    for path in paths:
        name = (
            fitted.get(hashlib.sha256(path.read_bytes()).hexdigest())
            if path.is_file() and os.access(path, os.R_OK)
            else None
        )
        if name is not None:
            raise ConfigError(
                f"--against {path} is {name}, which the prices were fitted to; hold them against a run of another workload."
            )


def _check_same_load(simulated: Mapping[str, Any], path: Path, measured: Mapping[str, float]) -> None:
    for name in SAME_LOAD:
        if abs(measured[name] - simulated[name]) > ALLOWED * simulated[name]:
            raise ConfigError(
                f"--against {path}: its {name} is {measured[name]:g}, this run's {simulated[name]:g}, so the two are not the same load; "
                f"simulate with the flags that the run was measured with."
            )


def _read(path: Path) -> dict[str, float]:
    try:
        written = json.loads(path.read_text(encoding="utf-8"))
        figures = {name: float(written[name]) for name in (*SAME_LOAD, *COMPARED) if name in written}
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise ConfigError(
            f"--against {path} cannot be read ({error}); give what headrace bench serve --output-json wrote."
        ) from error
    missing = [name for name in SAME_LOAD if name not in figures]
    if missing:
        raise ConfigError(
            f"--against {path} has no {', '.join(missing)}; give what headrace bench serve --output-json wrote."
        )
    wrong = [name for name, value in figures.items() if not math.isfinite(value) or value < 0]
    if wrong:
        raise ConfigError(
            f"--against {path} has {wrong[0]} = {figures[wrong[0]]}, which is no number of at least 0; measure it again."
        )
    return figures


def read_samples(path: Path) -> list[Sample]:
    """Raises ConfigError."""
    import msgspec

    try:
        found: dict[str, Any] = json.loads(path.read_bytes())
        return msgspec.convert(found["requests"], list[Sample])
    except OSError as error:
        raise ConfigError(
            f"The run {path} cannot be read ({error.strerror}); give what --output-json wrote."
        ) from error
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ConfigError(
            f"The run {path} holds no requests ({error}); give what headrace bench serve --output-json wrote."
        ) from error
