"""The script that runs the tests of the card: what it makes of pytest's record, without a card."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.gpu import run as runner


def write(path: Path, *lines: tuple[str, str, float]) -> Path:
    path.write_text("".join(json.dumps({"name": name, "outcome": outcome, "seconds": seconds}) + "\n" for name, outcome, seconds in lines))
    return path


def test_a_record_becomes_a_line(tmp_path: Path) -> None:
    record = write(tmp_path / "record", ("a", "passed", 1.0), ("b", "skipped", 0.0), ("c", "passed", 7.2))
    found = runner.read_record("engine", record, 9.0, 0, "")
    assert found.good and (found.passed, found.skipped, found.failed, found.slowest) == (2, 1, (), (7.2, "c"))
    assert found.line.split()[:5] == ["engine", "3", "2", "1", "9.0"] and "FAILED" not in found.line


def test_a_test_that_passes_and_fails_at_its_end_has_failed(tmp_path: Path) -> None:
    record = write(tmp_path / "record", ("a", "passed", 1.0), ("a", "failed", 1.1))
    found = runner.read_record("engine", record, 9.0, 1, "")
    assert not found.good and (found.passed, found.failed) == (0, ("a",)) and "FAILED" in found.line


@pytest.mark.parametrize("code", [None, -11, 2, 4])
def test_a_process_that_was_stopped_or_died_is_no_success(tmp_path: Path, code: int | None) -> None:
    found = runner.read_record("engine", write(tmp_path / "record", ("a", "passed", 1.0)), 9.0, code, "")
    assert not found.good and "UNFINISHED" in found.line
    assert not runner.read_record("engine", tmp_path / "none", 9.0, 0, "").good, "a group that ran nothing"


def test_every_file_is_a_group_and_those_that_run_alone_exist() -> None:
    assert {"engine", "families", "modes", *runner.ALONE} <= set(runner.groups())


GROUP = """
import pytest

def test_good(): pass

def test_bad(): assert False

@pytest.mark.skip
def test_left(): pass
"""


def test_a_group_is_really_run_and_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.joinpath("test_small.py").write_text(GROUP)
    monkeypatch.setattr(runner, "HERE", tmp_path)
    found = runner.run_group("small", deadline=float("inf"), extra=[])
    assert (found.passed, found.skipped, found.failed, found.unfinished) == (1, 1, ("test_bad",), False)
    assert "assert False" in found.output


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(runner, "device_line", lambda: None)
    monkeypatch.setattr("sys.argv", ["run.py"])
    assert runner.main() == 2 and "no GPU" in capsys.readouterr().out
