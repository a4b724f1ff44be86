"""How a benchmark shows its figures: the machine, its limits, tables, JSON, plots.

What lives here: facts about machine and versions, tables, files, plots. What may not: measuring and arithmetic.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from itertools import cycle
from pathlib import Path
from typing import Any

from headrace.cost.profile import cpu_identity
from headrace.errors import ConfigError
from headrace.portability import open_cpus

DASHES = ("-", "--", ":", "-.")
LEAST_SPAN = 3.0  # of an axis of powers, highest / lowest
MOST_FRACTION = 1.05  # of a physical limit; a twentieth is what measuring it may be wrong by
VOID = "void"
PACKAGES = ("headrace", "torch", "numpy", "triton")


def machine_facts(limits: str | None = None, **more: Any) -> dict[str, Any]:
    """What every table states: machine, cores, versions, date, the limits measured in the same run, and the shapes in
    ``more``."""
    identity = cpu_identity(len(open_cpus()))
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": f"{identity.name}, {identity.threads} cores, {_memory_gib():.0f} GiB ({', '.join(identity.features)})",
        "versions": f"python {platform.python_version()}, " + ", ".join(_versions()),
        "limits": limits or "not measured in this run",
        **more,
    }


def _versions() -> list[str]:
    found = []
    for name in PACKAGES:
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return found


def _memory_gib() -> float:
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")) / 2**30


def void_note(fractions: Mapping[str, float | None]) -> str | None:
    """Explains a fraction of the limit above MOST_FRACTION: nothing is faster than its limit, so the limit was measured on a
    busy machine."""
    beyond = {name: fraction for name, fraction in fractions.items() if is_void(fraction)}
    if not beyond:
        return None
    name, worst = max(beyond.items(), key=lambda each: each[1] or 0.0)
    return (
        f"VOID: {name} at {worst:.0%} of the limit{f', and {len(beyond) - 1} more' if len(beyond) > 1 else ''}. Nothing is faster than its limit: "
        "the machine was too busy when its limits were measured. On a quiet machine, run headrace doctor --profile, then this again."
    )


def is_void(fraction: float | None) -> bool:
    return fraction is not None and fraction > MOST_FRACTION


def shown_fraction(fraction: float | None) -> float | str | None:
    """A fraction as tables show it."""
    return VOID if is_void(fraction) else fraction


def print_facts(facts: Mapping[str, Any]) -> None:
    for name, value in facts.items():
        print(f"{name + ':':<10} {value}")


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Aligned text, numbers to the right; a missing value is printed as ``missing``."""
    cells = [[_cell(value) for value in row] for row in rows]
    widths = [
        max(len(column), *(len(row[i]) for row in cells)) if cells else len(column) for i, column in enumerate(columns)
    ]
    numeric = [all(isinstance(row[i], (int, float, type(None))) for row in rows) for i in range(len(columns))]
    lines = [[column.rjust(w) if n else column.ljust(w) for column, w, n in zip(columns, widths, numeric, strict=True)]]
    lines += [
        [cell.rjust(w) if n else cell.ljust(w) for cell, w, n in zip(row, widths, numeric, strict=True)]
        for row in cells
    ]
    return "\n".join("  ".join(line).rstrip() for line in lines)


def _cell(value: Any) -> str:
    if value is None:
        return "missing"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"
    return str(value)


def print_figures(figures: Mapping[str, Any]) -> None:
    """``name  value`` lines, in order."""
    width = max(map(len, figures), default=0)
    for name, value in figures.items():
        print(f"{name:<{width}}  {_cell(value)}")


def say(line: str) -> None:
    """Reports the progress of a long measurement."""
    print(f"[{time.strftime('%H:%M:%S')}] {line}", file=sys.stderr, flush=True)


def write_json(path: Path, payload: Mapping[str, Any]) -> None:
    write_text(path, json.dumps(payload, indent=1, allow_nan=False, default=str) + "\n")


def write_text(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror}); give another file.") from error


def load_pyplot() -> Any:
    """matplotlib.pyplot for drawing into files. Raises ConfigError with the way to install it."""
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib; install it with: pip install matplotlib") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as pyplot

    return pyplot


def _draw_legend(figure: Any, axes: Sequence[Any], panels: Sequence[Mapping[str, Any]]) -> float:
    """One legend below the panels if all show the same curves, otherwise one in each. Returns the share of the height
    that it takes."""
    names = [list(panel["curves"]) for panel in panels]
    if len(panels) == 1 or any(each != names[0] for each in names):
        for axis in axes:
            axis.legend(fontsize=8)
        return 0.0
    columns = min(len(names[0]), 2 * len(panels))
    figure.legend(
        *axes[0].get_legend_handles_labels(), loc="lower center", bbox_to_anchor=(0.5, 0.05), ncols=columns, fontsize=8
    )
    return 0.05 * -(-len(names[0]) // columns)


def _wide(panel: Mapping[str, Any], place: int) -> bool:
    """Whether values span enough for a logarithmic axis."""
    values = [point[place] for points in panel["curves"].values() for point in points]
    return bool(values) and max(values) > LEAST_SPAN * min(values)


def _use_powers(axes: Any, letter: str) -> None:
    """A logarithmic axis with plain numbers as labels."""
    from matplotlib.ticker import LogFormatter

    getattr(axes, f"set_{letter}scale")("log")
    axis = getattr(axes, f"{letter}axis")
    axis.set_major_formatter(LogFormatter())
    axis.set_minor_formatter(LogFormatter())


def plot_curves(path: Path, title: str, panels: Sequence[Mapping[str, Any]], note: str = "") -> None:
    """A row of panels: ``{"x", "y"}`` labels, ``curves`` {name: [(x, y), …]}, optionally ``log`` ("x", "y" or "xy")."""
    pyplot = load_pyplot()
    figure, axes = pyplot.subplots(1, len(panels), figsize=(5.2 * len(panels), 4.0), squeeze=False)
    for axis, panel in zip(axes[0], panels, strict=True):
        # where curves coincide, both are seen
        for (name, points), dashes in zip(panel["curves"].items(), cycle(DASHES), strict=False):
            axis.plot([x for x, _ in points], [y for _, y in points], dashes, marker="o", markersize=3, label=name)
        axis.set_xlabel(panel["x"])
        axis.set_ylabel(panel["y"])
        for place, letter in enumerate("xy"):
            if letter in panel.get("log", "") and _wide(panel, place):
                _use_powers(axis, letter)
            elif letter == "y":
                axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    figure.suptitle(title, fontsize=11)
    figure.text(0.01, 0.005, textwrap.fill(note, 75 * len(panels)), fontsize=6, color="0.4")
    figure.tight_layout(rect=(0, 0.06 + _draw_legend(figure, axes[0], panels), 1, 1))
    try:
        figure.savefig(path, dpi=130)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} cannot be written ({error}); give a file name ending in .png, .svg or .pdf."
        ) from error
    finally:
        pyplot.close(figure)
