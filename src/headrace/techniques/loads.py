"""What techniques are measured under, on and off: what both sides are asked, and the figures that are shown of it.

What lives here: the kind of data that loads.toml holds, and reading that. What may not: running it (bench/ablate.py).
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

Settings = Mapping[str, Any]  # config paths → values, such as {"scheduler.max_num_seqs": 8}


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One curve: requests drawn from a seed, all at once, while the field named ``over`` takes each of ``values``.

    ``x`` is its column. Over ``rate`` they arrive one by one (Poisson), and ``values`` are shares of the requests a
    second that the engine computes when all are there at once. ``figures`` are names that bench/ablate.py knows.
    ``quick``: what is smaller when it is only to be seen that it runs.
    """

    title: str  # with fields in braces
    x: str
    over: str
    values: tuple[float, ...]
    figures: tuple[str, ...]
    quick: Mapping[str, Any]
    log: str = ""  # axes to draw logarithmically
    # Requests.
    count: int = 1  # with ``at_once``: for each that may be under way
    prompt: int = 32
    output: int = 1
    spread: float = 0.0  # lengths are drawn from length * (1 ± spread)
    percent: float = 0.0  # the same in percent
    prefix: int = 0  # tokens that all begin with, before ``prompt``
    turns: int = 1  # of conversations; the points are turns then
    stop_after: int | None = None  # answers end after so many tokens, though more were asked for
    structured: Mapping[str, Any] = field(default_factory=dict)  # what answers must be: one field of StructuredOutputs
    at_once: int | None = None  # one begins as another ends
    rate: float = 0.0  # a second
    seconds: float = 0.0  # of arrivals at each rate, of at least ``least`` requests
    least: int = 0
    batch_order: bool = False  # in the order of an offline batch
    # How they are timed: runs of other requests before the first repeat, and of how many runs the quickest counts.
    untimed: int = 0
    timed: int = 1
    # Engines: beneath both sides and not worth a word; of both sides; each side's own, of which it gets the best.
    engine: Settings = field(default_factory=dict)
    settings: Settings = field(default_factory=dict)
    choices: Mapping[str, Sequence[Settings]] = field(default_factory=dict)
    pick: str = ""  # the figure by which it is the best, at ``trial`` (as one of ``values``; a rate of 0: all at once)
    trial: float = 0.0

    @property
    def shortened(self) -> Load:
        return replace(self, **self.quick)

    @property
    def requests(self) -> int:
        return max(self.least, round(self.rate * self.seconds)) if self.rate else self.count * (self.at_once or 1)

    @property
    def said(self) -> str:
        own = {each.name: getattr(self, each.name) for each in fields(self)}
        rows, blocks = map(self.settings.get, ("scheduler.max_num_seqs", "cache.num_blocks"))
        return self.title.format(**own | {"percent": round(100 * self.spread), "rows": rows, "blocks": blocks})

    def at(self, value: float) -> Load:
        change: dict[str, Any] = {self.over: value}
        return replace(self, **change)

    def candidates(self, mode: str) -> list[dict[str, Any]]:
        return [{**choice, **self.settings} for choice in self.choices.get(mode, ({},))]


def read_loads() -> dict[str, Load]:
    """By name, as loads.toml has them; ``like`` names an earlier one, from which the load differs."""
    found: dict[str, Load] = {}
    for name, entry in tomllib.loads(Path(__file__).with_name("loads.toml").read_text(encoding="utf-8")).items():
        base, given = found.get(entry.pop("like", "")), _ready(entry)
        if "quick" in given:
            given["quick"] = _ready(given["quick"])
        found[name] = Load(**given) if base is None else replace(base, **given)
    return found


def _ready(entry: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in entry.items()}
    if "choices" in found:
        found["choices"] = {mode: _each(values) for mode, values in found["choices"].items()}
    return found


def _each(values: Mapping[str, Sequence[Any]]) -> tuple[Settings, ...]:
    return tuple({path: value} for path, each in values.items() for value in each)
