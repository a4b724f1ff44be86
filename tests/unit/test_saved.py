"""Runs are read back as they were written, and drawn beside each other."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from headrace import cli
from headrace.bench import serve
from headrace.errors import ConfigError
from headrace.planner.against import read_samples
from headrace.planner.workload.statistics import Sample

SAMPLES = [Sample(0.5, [1, 1.5, 2.5], 2.5, 0.25, 10, 3, 2), Sample(1.0, error="refused")]


def test_samples_come_back_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"completed": 1, "requests": [asdict(sample) | {"later": 5} for sample in SAMPLES]}))
    assert read_samples(path) == SAMPLES
    for text in (
        "{",
        "[]",
        "{}",
        '{"requests": 5}',
        '{"requests": [5]}',
        '{"requests": [{"sent": 1, "arrivals": ["x"]}]}',
        '{"requests": [{}]}',
    ):
        path.write_text(text)
        with pytest.raises(
            ConfigError, match=r"holds no requests .*give what headrace bench serve --output-json wrote"
        ):
            read_samples(path)
    with pytest.raises(ConfigError, match="No such file"):
        read_samples(tmp_path / "absent.json")


def test_a_curve_has_few_points_and_its_slowest() -> None:
    points = serve._cumulative([value / 1e3 for value in range(10_000, 0, -1)])
    assert len(points) == serve.POINTS and points[0] == (1.0, 1e-4) and points[-1] == (10_000.0, 1.0)
    assert serve._cumulative([]) == [] and serve._cumulative([0.0, 2.0]) == [(serve.LEAST_DRAWN, 0.5), (2000.0, 1.0)]


def test_a_simulated_and_a_measured_run_lie_in_one_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    drawn: list[Any] = []
    monkeypatch.setattr(serve, "plot_curves", lambda path, title, panels, note="": drawn.extend(panels))
    words = ["simulate", "--device", "h200", "--num-prompts", "9", "--request-rate", "20"]
    assert cli.main([*words, "--output-json", str(tmp_path / "run.json")]) == 0
    assert cli.main([*words, "--against", str(tmp_path / "run.json"), "--plot", str(tmp_path / "both.png")]) == 0
    assert [panel["x"] for panel in drawn] == ["TTFT (ms)", "ITL (ms)", "E2E (ms)"]
    for panel in drawn:
        mine, theirs = panel["curves"].values()
        assert list(panel["curves"]) == ["simulated", "measured (run)"] and mine == theirs and len(mine) > 3
