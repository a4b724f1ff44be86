"""What Nsight Compute counted of the kernels of single steps, summed up by step.

The program it watches puts a marker kernel in front of each step, so that one run tells several steps apart. Shares are
weighted with each kernel's time: a share of a step is the share of the time in which its kernels ran.

What lives here: the command line of ncu, reading its CSV, sums. What may not: torch, the steps themselves
(profile_step.py).
"""

from __future__ import annotations

import csv
import glob
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.errors import BenchFailed

SM_ACTIVE = "sm__cycles_active.avg.pct_of_peak_sustained_elapsed"
TENSOR_ACTIVE = "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed"
BANDWIDTH = "dram__bytes.sum.per_second"
DURATION = "gpu__time_duration.sum"
METRICS = (SM_ACTIVE, TENSOR_ACTIVE, BANDWIDTH, DURATION)
MARKER = "spin_kernel"  # of torch.cuda._sleep, which no model launches
PLACES = ("/usr/local/cuda/bin/ncu", "/opt/nvidia/nsight-compute/*/ncu")
FACTORS = {"": 1.0, "%": 1.0}
_PREFIXES = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
FACTORS |= {
    f"{prefix}{unit}": factor for prefix, factor in _PREFIXES.items() for unit in ("byte/second", "byte/s", "B/s")
}
FACTORS |= {name: 1e-9 for name in ("nsecond", "ns")} | {name: 1e-6 for name in ("usecond", "us")}
FACTORS |= {name: 1e-3 for name in ("msecond", "ms")} | {name: 1.0 for name in ("second", "s")}


@dataclass(frozen=True, slots=True)
class Kernel:
    """One launch. Seconds, bytes/s, shares of 1; None where the counter gave nothing."""

    name: str
    seconds: float
    sm_active: float | None
    tensor_active: float | None
    bandwidth: float | None


@dataclass(frozen=True, slots=True)
class Share:
    """Some launches together: how many, how long, and what of that time the units were at work."""

    name: str
    count: int
    seconds: float
    sm_active: float | None
    tensor_active: float | None
    bandwidth: float | None


def find_ncu() -> str | None:
    return shutil.which("ncu") or next(
        (path for place in PLACES for path in sorted(glob.glob(place), reverse=True)), None
    )


def ncu_command(ncu: str, log: Path) -> list[str]:
    """What stands before the program. Clocks and caches are left as the engine meets them; the program says which
    kernels count."""
    watched = ["--target-processes", "application-only", "--profile-from-start", "off"]
    options = [*watched, "--clock-control", "none", "--cache-control", "none", "--metrics", ",".join(METRICS)]
    return [ncu, *options, "--csv", "--page", "raw", "--print-units", "base", "--log-file", str(log)]


def read_kernels(lines: Iterable[str]) -> list[Kernel]:
    """Launches in order, from ncu's raw CSV; lines around it are passed over. Raises BenchFailed for what holds
    none."""
    rows = [row for row in csv.reader(lines) if len(row) > 1]
    start = next((number for number, row in enumerate(rows) if row[0] == "ID"), None)
    if start is None or len(rows) < start + 3:
        raise BenchFailed("ncu reported no kernels; run its command by hand to see why.")
    columns, units = rows[start], rows[start + 1]
    places = {name: columns.index(name) for name in ("Kernel Name", *METRICS) if name in columns}
    missing = [name for name in METRICS if name not in places]
    if missing:
        raise BenchFailed(f"ncu reported nothing for {', '.join(missing)}; this device or version has no such counter.")
    return [_kernel(row, places, units) for row in rows[start + 2 :] if row[0].isdigit()]


def _kernel(row: Sequence[str], places: dict[str, int], units: Sequence[str]) -> Kernel:
    def value(metric: str) -> float | None:
        text, unit = row[places[metric]].replace(",", ""), units[places[metric]]
        if unit not in FACTORS:
            raise BenchFailed(f"ncu gave {metric} in {unit!r}, which is not understood.")
        try:
            return float(text) * FACTORS[unit]
        except ValueError:  # "n/a"
            return None

    sm, tensor = value(SM_ACTIVE), value(TENSOR_ACTIVE)
    return Kernel(
        row[places["Kernel Name"]],
        value(DURATION) or 0.0,
        sm / 100 if sm is not None else None,
        tensor / 100 if tensor is not None else None,
        value(BANDWIDTH),
    )


def split_steps(kernels: Sequence[Kernel]) -> list[list[Kernel]]:
    """The kernels of each step: a marker stands before every one."""
    steps: list[list[Kernel]] = []
    for kernel in kernels:
        if MARKER in kernel.name:
            steps.append([])
        elif steps:
            steps[-1].append(kernel)
    return steps


def sum_up(name: str, kernels: Sequence[Kernel]) -> Share:
    return Share(
        name,
        len(kernels),
        sum(kernel.seconds for kernel in kernels),
        _weighted([(kernel.sm_active, kernel.seconds) for kernel in kernels]),
        _weighted([(kernel.tensor_active, kernel.seconds) for kernel in kernels]),
        _weighted([(kernel.bandwidth, kernel.seconds) for kernel in kernels]),
    )


def by_kernel(kernels: Sequence[Kernel]) -> list[Share]:
    """Launches of one name together, the longest first."""
    groups: dict[str, list[Kernel]] = {}
    for kernel in kernels:
        groups.setdefault(kernel.name, []).append(kernel)
    return sorted((sum_up(name, group) for name, group in groups.items()), key=lambda share: -share.seconds)


def _weighted(values: Iterable[tuple[float | None, float]]) -> float | None:
    known = [(value, weight) for value, weight in values if value is not None]
    total = sum(weight for _, weight in known)
    return sum(value * weight for value, weight in known) / total if total > 0 else None
