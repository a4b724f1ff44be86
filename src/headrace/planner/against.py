"""A simulated run beside a measured one of the same workload: the error of each figure.

What lives here: reading what ``headrace bench serve --output-json`` wrote, and comparing. What may not: running either, printing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.errors import ConfigError

COMPARED = (
    "duration",
    "output_throughput",
    *(f"{which}_{name}_ms" for name in ("ttft", "tpot", "itl", "e2el") for which in ("mean", "median", "p99")),
)
SAME_LOAD = ("completed", "total_input_tokens", "total_output_tokens")
ALLOWED = 0.02  # by which the two loads may differ


@dataclass(frozen=True, slots=True)
class Compared:
    """``error``: simulated / measured - 1."""

    figure: str
    simulated: float
    measured: float

    @property
    def error(self) -> float:
        return self.simulated / self.measured - 1.0


def compare(simulated: Mapping[str, Any], path: Path) -> list[Compared]:
    """Every figure that both have. Raises ConfigError where the file is not such a run, or one of another load."""
    measured = _read(path)
    for name in SAME_LOAD:
        if abs(measured[name] - simulated[name]) > ALLOWED * simulated[name]:
            raise ConfigError(
                f"--against {path}: its {name} is {measured[name]:g}, this run's {simulated[name]:g}, so the two are not the same load; "
                f"simulate with the flags that the run was measured with."
            )
    found = [Compared(name, simulated[name], measured[name]) for name in COMPARED if name in simulated and measured.get(name)]
    return [each for each in found if each.simulated]


def _read(path: Path) -> dict[str, float]:
    try:
        written = json.loads(path.read_text(encoding="utf-8"))
        figures = {name: float(written[name]) for name in (*SAME_LOAD, *COMPARED) if name in written}
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"--against {path} cannot be read ({error}); give what headrace bench serve --output-json wrote.") from error
    missing = [name for name in SAME_LOAD if name not in figures]
    if missing:
        raise ConfigError(f"--against {path} has no {', '.join(missing)}; give what headrace bench serve --output-json wrote.")
    return figures
