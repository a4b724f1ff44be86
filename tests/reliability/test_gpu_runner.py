"""The script that runs the tests of the card: what it makes of pytest's record, without a card."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.gpu import run as runner


def write(path: Path, *lines: tuple[str, str, float]) -> Path:
    path.write_text(
        "".join(
            json.dumps({"name": name, "outcome": outcome, "seconds": seconds}) + "\n"
            for name, outcome, seconds in lines
        )
    )
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


@cache
def real_runs() -> tuple[runner.Outcome, subprocess.CompletedProcess[str]]:
    """One group, and the whole script: in processes of their own, at once."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU: this would take minutes")
    with ThreadPoolExecutor(2) as pool:
        group = pool.submit(runner.run_group, "long", deadline=float("inf"), extra=[])
        script = pool.submit(
            subprocess.run, [sys.executable, runner.__file__], capture_output=True, text=True, check=False
        )
        return group.result(), script.result()


def test_a_group_is_really_run_and_recorded() -> None:
    """Here every module says why it skips."""
    found, _ = real_runs()
    assert (found.passed, found.skipped, found.failed, found.unfinished) == (0, 1, (), False)
    assert "there is no GPU" in found.output


def test_without_a_gpu_it_says_so() -> None:
    _, done = real_runs()
    assert done.returncode == 2 and "no GPU" in done.stdout
