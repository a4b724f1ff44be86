"""Ctrl-C in a sweep: what was measured is printed and written, and the status is 130."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import headrace
from headrace import cli
from headrace.bench.sweep import Sweep
from headrace.planner import curve
from lab import __main__ as lab
from lab import simulated

DEMO = str(Path(headrace.__file__).parent / "data" / "demo")
SIZES = (
    "--model",
    DEMO,
    "--device",
    "h200",
    "--requests",
    "12",
    "--max-len",
    "60",
    "--input",
    "20",
    "40",
    "--output",
    "4",
    "8",
)


def points(*values: int) -> Iterator[int]:
    """The values, and then somebody presses Ctrl-C."""
    yield from values
    raise KeyboardInterrupt


def test_what_was_taken_until_then_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    sweep = Sweep()
    assert sweep.take([1, 2]) == [1, 2] and sweep.status(1) == 1
    assert sweep.take(points()) == []  # something was measured before
    assert sweep.take([3]) == [] and sweep.status(1) == 130  # nothing begins any more
    assert "interrupted when 2 measurements" in capsys.readouterr().err
    nested = Sweep()
    assert nested.take(nested.take(points(value, value)) for value in (5, 6)) == [[5, 5]]


def test_where_there_is_nothing_nothing_is_told() -> None:
    with pytest.raises(KeyboardInterrupt):
        Sweep().take(points())


def interrupt_at(call: int, work: Any) -> Any:
    """``work``, but somebody presses Ctrl-C during that call of it."""
    calls = iter(range(1, 1000))

    def run(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == call:
            raise KeyboardInterrupt
        return work(*args, **kwargs)

    return run


@pytest.mark.parametrize(
    ("words", "call", "kept"),
    [
        (("overload", "--loads", "0.5", "2"), 6, lambda found: len(found["points"]) == 4),
        (
            ("policies", "--only", "qoe", "fair", "--loads", "2"),
            5,
            lambda found: "qoe" in found and "fair" not in found,
        ),
    ],
)
def test_a_simulated_sweep_tells_what_it_has(
    words: tuple[str, ...],
    call: int,
    kept: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(simulated.Bench, "run", interrupt_at(call, simulated.Bench.run))
    written = tmp_path / "found.json"
    assert lab.main([*words, *SIZES, "--output-json", str(written)]) == 130
    assert kept(json.loads(written.read_text()))
    told = capsys.readouterr()
    assert "prices: " in told.out and "interrupted" in told.err


def test_a_load_curve_tells_the_points_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(curve, "run_trial", interrupt_at(3, curve.run_trial))
    written = tmp_path / "curve.json"
    words = (
        "--device",
        "h200",
        "--num-prompts",
        "12",
        "--input-len",
        "300",
        "--processes",
        "1",
        "--sweep-rate",
        "5",
        "50",
        "500",
    )
    assert cli.main(["simulate", *words, "--output-json", str(written)]) == 130
    assert [point["offered_rate"] for point in json.loads(written.read_text())["points"]] == [5.0, 50.0]
    assert "2 points" in capsys.readouterr().out
