"""The table of one model, for a terminal and as markdown.

What lives here: rendering of what was measured beside peer and floor. What may not: measuring, files.

A row without a figure is printed as missing, with its reason below. Where this run's limits differ from the peer's no
ratio is printed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from headrace.observe.report import VOID, is_void, table, void_note
from lab.table_peers import Peer, differences, said_limits
from lab.table_rows import ROWS, Row, scaled
from lab.table_techniques import curves_of, problems_of

MISSING = "missing"
NOT_COMPARABLE = "not comparable"
_CURVE_COLUMNS = ("technique", "figure", "off → on", "gain", "equal answers")
_KINDS, _STARTS = ("caches empty", "caches filled"), ("empty caches: ", "in one process: ")


@dataclass(frozen=True, slots=True)
class Line:
    """One row of figures. ``floor`` is the one stated beside the peer's figures, else this run's own; None where there
    is none."""

    row: Row
    measured: float | None
    spread: tuple[float, float] | None
    target: float | None
    peer: float | None
    floor: float | None
    floor_here: float | None
    host_ms: float | None
    idle: float | None
    watts: float | None
    problem: str | None

    @property
    def ratio(self) -> float | None:
        """How many times faster than the peer."""
        return self.peer / self.measured if self.peer and self.measured else None

    @property
    def excess(self) -> float:
        """By which share it is above its target; 0 where it is not, and where there is none."""
        return max(self.measured / self.target - 1, 0.0) if self.target and self.measured else 0.0

    @property
    def fraction(self) -> float | None:
        return self.floor / self.measured if self.floor and self.measured else None


def lines_of(model: Mapping[str, Any], peer: Peer) -> list[Line]:
    """All rows in their order, those that were not asked for too."""
    known = peer.find(model.get("config", {}), model.get("dtype", "")) if model["scale"] == 1 else None
    found = {row["row"]: row for row in model["rows"]}
    lines = []
    for row in ROWS:
        each = found.get(row.name, {"values": (), "problem": "not asked for"})
        values = each["values"]
        stated, here = known.floor(row.name) if known else None, each.get("floor")
        lines.append(
            Line(
                scaled(row, model["scale"]),
                median(values) if values else None,
                (min(values), max(values)) if values else None,
                known.target(row.name) if known else None,
                known.figure(row.name) if known else None,
                stated if stated is not None else here,
                here,
                each.get("host_ms"),
                each.get("idle"),
                each.get("watts"),
                each["problem"],
            )
        )
    return lines


def refusals(model: Mapping[str, Any], peer: Peer) -> list[str]:
    """Why this run may not be compared with the peer; nothing where it may."""
    if model["scale"] != 1:
        return [f"requests and lengths were scaled by {model['scale']:g}"]
    if peer.find(model.get("config", {}), model.get("dtype", "")) is None:
        return [f"no figures of {peer.name} for a model of this shape in {model.get('dtype', 'this precision')}"]
    if not model.get("limits"):
        return ["the limits of the device were not measured in this run"]
    return differences(model["limits"], peer.limits)


def _cells(line: Line, *, comparable: bool, power: bool) -> list[str]:
    ratio = f"{line.ratio:.2f}" if line.ratio is not None else ""
    return [
        _number(line.measured) or MISSING,
        f"{_number(line.spread[0])}–{_number(line.spread[1])}" if line.spread else "",
        _number(line.target),
        _number(line.peer),
        ratio if comparable or not ratio else NOT_COMPARABLE,
        _number(line.floor),
        VOID if is_void(line.fraction) else f"{line.fraction:.2f}" if line.fraction is not None else "",
        _number(line.floor_here),
        _number(line.host_ms),
        f"{line.idle:.1%}" if line.idle is not None else "",
        *([f"{line.watts:.0f}" if line.watts is not None else ""] if power else []),
    ]


def _number(value: float | None) -> str:
    """Four digits, as the peers' figures have; three after the point at most."""
    if value is None:
        return ""
    digits = 3 if value < 10 else 2 if value < 100 else 1 if value < 1000 else 0
    return f"{value:,.{digits}f}"


def _grid(model: Mapping[str, Any], peer: Peer) -> tuple[list[str], list[list[str]]]:
    """Columns and rows. Power has a column where the device counts it."""
    lines, comparable = lines_of(model, peer), not refusals(model, peer)
    power = any(line.watts is not None for line in lines)
    columns = [
        "",
        "measured",
        "spread",
        "target",
        peer.name,
        "ratio",
        "floor",
        "fraction",
        "floor, this run",
        "host ms a step",
        "idle",
    ]
    return [*columns, "W"] if power else columns, [
        [line.row.says, *_cells(line, comparable=comparable, power=power)] for line in lines
    ]


def terminal(model: Mapping[str, Any], peer: Peer) -> str:
    columns, grid = _grid(model, peer)
    widths = [max(len(row[i]) for row in [columns, *grid]) for i in range(len(columns))]
    right = [
        [row[0], *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        for row in [columns, *grid]
    ]
    parts = [
        _title(model),
        *(f"{name}: {value}" for name, value in _facts(model, peer)),
        "",
        table(right[0], right[1:]),
    ]
    parts += [f"missing: {text}" for text in _problems(model, peer)]
    parts += [void for void in [_void(model, peer)] if void]
    parts += ["", table(_CURVE_COLUMNS, _curves(model))] if model.get("techniques") else []
    parts += [f"{each['name']}: {each['value']} ({each['reason']})" for each in model.get("kernels", ())]
    return "\n".join(parts)


def markdown(model: Mapping[str, Any], peer: Peer) -> str:
    columns, grid = _grid(model, peer)
    lines = [f"## {_title(model)}", "", f"`{model['command']}`", ""]
    lines += [f"- {name}: {value}" for name, value in _facts(model, peer)]
    lines += ["", *_markdown_table(columns, grid), ""]
    lines += [f"Missing: {text}." for text in _problems(model, peer)]
    lines += [void for void in [_void(model, peer)] if void]
    if model.get("techniques"):
        lines += [
            "",
            "Techniques, off → on (gain: how many times better):",
            "",
            *_markdown_table(_CURVE_COLUMNS, _curves(model)),
            "",
        ]
    if model.get("start_stages"):
        lines += ["", *_markdown_table(("a start, stage by stage (s)", *_KINDS), _stages(model["start_stages"])), ""]
    if model.get("kernels"):
        rows = [[each["name"].removeprefix("kernel "), each["value"], each["reason"]] for each in model["kernels"]]
        lines += ["", *_markdown_table(["operation", "kernel chosen", "why, and what declined"], rows), ""]
    return "\n".join(lines)


def _curves(model: Mapping[str, Any]) -> list[list[str]]:
    return [
        [
            curve.technique,
            f"{curve.figure}, by {curve.x}",
            " · ".join(f"{x:g}: {off:.4g} → {on:.4g}" for x, off, on, _ in curve.points),
            " · ".join(f"{x:g}: {better:.2f}" for x, _, _, better in curve.points if better is not None),
            curve.equal,
        ]
        for curve in curves_of(model)
    ]


def _stages(seconds: Mapping[str, float]) -> list[list[str]]:
    """What both starts have, one beside the other."""
    first, second = (
        {name.removeprefix(kind): value for name, value in seconds.items() if name.startswith(kind)} for kind in _STARTS
    )
    return [[name, _seconds(first.get(name)), _seconds(second.get(name))] for name in dict.fromkeys([*first, *second])]


def _seconds(value: float | None) -> str:
    """A single step has more digits: whether it stayed within its bound must show."""
    return f"{value:.5f}" if value is not None and value < 0.01 else _number(value)


def _markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(columns)} |"
    yield f"|{'---|' * len(columns)}"
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', '/') for cell in row)} |"


def _title(model: Mapping[str, Any]) -> str:
    return f"{model['name']}, {model['dtype']}" if "dtype" in model else str(model["name"])


def _facts(model: Mapping[str, Any], peer: Peer) -> Iterator[tuple[str, str]]:
    """What every table carries, and whether the ratio may be read."""
    facts = model["facts"]
    for name in ("date", "device", "machine", "versions", "flags", "power limit"):
        if name in facts:
            yield name, facts[name]
    yield "limits of this run", said_limits(model["limits"]) if model.get("limits") else "not measured"
    reasons = refusals(model, peer)
    if reasons:
        yield f"not comparable with {peer.name}", "; ".join(reasons)
    else:
        yield (
            "compared with",
            f"{peer.name} ({peer.versions}) on {peer.device}, whose limits were {said_limits(peer.limits)}: {peer.origin}",
        )
    yield "figures", f"median of {model['repeats']} repeats with new ids each; ratio = {peer.name} / measured"
    if above := [f"{line.row.says} by {line.excess:.1%}" for line in lines_of(model, peer) if line.excess]:
        yield "above their targets", ", ".join(above)


def _void(model: Mapping[str, Any], peer: Peer) -> str | None:
    return void_note({line.row.says: line.fraction for line in lines_of(model, peer)})


def _problems(model: Mapping[str, Any], peer: Peer) -> list[str]:
    """Rows without a figure by their reason."""
    by_reason: dict[str, list[str]] = {}
    for line in lines_of(model, peer):
        if line.problem:
            by_reason.setdefault(line.problem, []).append(line.row.name)
    return [*(f"{', '.join(names)} ({reason})" for reason, names in by_reason.items()), *problems_of(model)]
