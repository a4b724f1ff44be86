"""Techniques on and off beside a model's table: ``bench ablate`` as a child process, its curves as one line each.

What lives here: that call, and reading a curve. What may not: what a technique's benchmark does
(techniques/loads.toml), rendering.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.bench.ablate import gain
from headrace.observe.report import say
from headrace.techniques import TECHNIQUES, find_technique


@dataclass(frozen=True, slots=True)
class Curve:
    """One technique's first figure: (x, off, on, how many times better on) at every point."""

    technique: str
    figure: str
    x: str
    points: tuple[tuple[float, float, float, float | None], ...]
    equal: str  # answers with equal tokens on and off


def chosen_techniques(names: Sequence[str]) -> list[str]:
    """By name; for no names those that need a GPU. Raises ConfigError with the names there are."""
    return [find_technique(name).name for name in names] or [each.name for each in TECHNIQUES if each.needs_gpu]


def measure_techniques(names: Sequence[str], flags: Sequence[str]) -> list[dict[str, Any]]:
    """The curves of each; one that fails is a curve with a problem, and the others go on."""
    return [result for name in names for result in _measure(name, flags)]


def _measure(name: str, flags: Sequence[str]) -> list[dict[str, Any]]:
    say(f"technique {name}")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ablation.json"
        model, *rest = flags
        command = [
            sys.executable,
            "-m",
            "headrace",
            "bench",
            "ablate",
            name,
            "--output-json",
            str(path),
            "--model",
            model,
            *rest,
        ]
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode or not path.exists():
            said = (done.stderr.strip().splitlines() or [f"bench ablate ended with status {done.returncode}"])[-1]
            return [{"technique": name, "problem": said}]
        entry = json.loads(path.read_text(encoding="utf-8"))
        return [{**each, "date": entry["facts"]["date"]} for each in entry["ablations"]]


def curves_of(model: Mapping[str, Any]) -> Iterator[Curve]:
    """Of a technique that was measured more than once, the last."""
    latest = {
        (each["technique"], each.get("title")): each for each in model.get("techniques", ()) if "problem" not in each
    }
    for result in latest.values():
        figure, sides = result["figures"][0], {curve["mode"]: curve["points"] for curve in result["curves"]}
        pairs = [(off, on) for off in sides["off"] for on in sides["on"] if off[result["x"]] == on[result["x"]]]
        name, better = figure["name"], figure["higher_is_better"]
        points = tuple(
            (off[result["x"]], off[name], on[name], gain(off[name], on[name], higher_is_better=better))
            for off, on in pairs
        )
        yield Curve(
            result["technique"],
            name,
            result["x"],
            points,
            f"{result['same']} of {result['compared']}" if result["compared"] else "",
        )


def problems_of(model: Mapping[str, Any]) -> list[str]:
    return [f"{each['technique']} ({each['problem']})" for each in model.get("techniques", ()) if "problem" in each]
