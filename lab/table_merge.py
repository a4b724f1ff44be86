"""What earlier runs left, put together: rows of one model from several runs, and ablations of it.

What lives here: reading and combining files. What may not: measuring, rendering.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.errors import ConfigError

Model = Mapping[str, Any]
NEEDED = ("name", "command", "scale", "repeats", "rows", "facts")  # of a model, to show it


def read_files(paths: Iterable[Path]) -> list[Model]:
    """The models of earlier runs, each once. Raises ConfigError for what is no such file, or ablations of a model that
    none of them has."""
    entries = [(path, _read(path)) for path in paths]
    models = combine([model for path, entry in entries for model in _models(path, entry)])
    for path, entry in entries:
        models = _with_ablations(path, entry, models)
    return models


def combine(models: Sequence[Model]) -> list[Model]:
    """Each model once, in the order they first came: what was measured later stands for what was measured before."""
    found: list[Model] = []
    for model in models:
        at = next((index for index, each in enumerate(found) if _is_same(each, model)), len(found))
        found[at:] = [model if at == len(found) else _combined(found[at], model), *found[at + 1 :]]
    return found


def _is_same(first: Model, second: Model) -> bool:
    """A start alone does not know its precision."""
    precisions = {each["dtype"] for each in (first, second) if each.get("dtype")}
    return len(precisions) < 2 and all(first[name] == second[name] for name in ("name", "scale"))


def _combined(first: Model, second: Model) -> Model:
    rows = {row["row"]: row for row in first["rows"]}
    rows |= {
        row["row"]: row
        for row in second["rows"]
        if not row["problem"] or row["row"] not in rows or rows[row["row"]]["problem"]
    }
    both: dict[str, Any] = {**first, **{name: value for name, value in second.items() if value}}
    both["rows"] = list(rows.values())
    both["command"] = " ; ".join(dict.fromkeys([first["command"], second["command"]]))
    joined = {name: said for name in ("date", "power limit") if (said := _both(first, second, name))}
    both["facts"] = {**first["facts"], **second["facts"], **joined}
    both["limits"] = _worse(first.get("limits"), second.get("limits"))
    both["techniques"] = [*first.get("techniques", ()), *second.get("techniques", ())]
    both["repeats"] = min(first["repeats"], second["repeats"])
    return both


def _both(first: Model, second: Model, fact: str) -> str:
    """What two runs say, once where it is the same; nothing where neither says anything."""
    return " and ".join(dict.fromkeys(each["facts"][fact] for each in (first, second) if each["facts"].get(fact)))


def _worse(first: Mapping[str, float] | None, second: Mapping[str, float] | None) -> Mapping[str, float]:
    """Of two runs' limits the lower ones; none where one run has none. (A start alone measures none, and needs
    none.)"""
    if not first or not second:
        return first or second or {}
    return {name: min(value, second.get(name, value)) for name, value in first.items()}


def _read(path: Path) -> Mapping[str, Any]:
    try:
        entry = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(entry, dict):
            raise TypeError("no object")
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise ConfigError(
            f"--merge {path} cannot be read ({type(error).__name__}: {error}); give a file that --output-json wrote."
        ) from error
    return entry


def _models(path: Path, entry: Mapping[str, Any]) -> list[Model]:
    if "ablations" in entry:
        return []
    try:
        models: list[Model] = list(entry["models"])
        strange = [name for model in models for name in NEEDED if name not in model]
    except (KeyError, TypeError) as error:
        raise ConfigError(
            f"--merge {path} cannot be read ({type(error).__name__}: {error}); give a file that --output-json wrote."
        ) from error
    if strange:
        raise ConfigError(
            f"--merge {path} is of another benchmark: its models have no {strange[0]!r}; give a file that python -m lab table wrote."
        )
    return models


def _with_ablations(path: Path, entry: Mapping[str, Any], models: list[Model]) -> list[Model]:
    """What ``bench ablate --output-json`` wrote goes to the model it is of."""
    if "ablations" not in entry:
        return models
    name = Path(str(entry["facts"].get("model", "")).rpartition(",")[0]).name
    if name not in {model["name"] for model in models}:
        known = ", ".join(model["name"] for model in models) or "none"
        raise ConfigError(
            f"--merge {path} has ablations of {name or 'a model without a name'}, and the tables are of {known}; merge its table too."
        )
    date = entry["facts"]["date"]
    results = [{**each, "date": date} for each in entry["ablations"]]
    return [
        model if model["name"] != name else {**model, "techniques": [*model.get("techniques", ()), *results]}
        for model in models
    ]
