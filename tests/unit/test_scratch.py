"""Folders of dead processes go, those of live ones stay: whatever their names and ages."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from headrace.processes import scratch
from headrace.processes.scratch import Scratch

OWNER = """
import sys, time
from headrace.processes.scratch import Scratch
folder = Scratch(sys.argv[1])
(folder.path / "engine").touch()
print(folder.path, flush=True)
time.sleep(60)
"""


def owner(parent: Path) -> tuple[subprocess.Popen[str], Path]:
    source = str(Path(scratch.__file__).parents[2])
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(parent)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": source},
    )
    assert process.stdout is not None
    with process.stdout:
        return process, Path(process.stdout.readline().strip())


def test_a_dead_owners_folder_is_swept_and_a_live_ones_is_not(tmp_path: Path) -> None:
    dead, dead_folder = owner(tmp_path)
    live, live_folder = owner(tmp_path)
    os.utime(live_folder, (0, 0))  # a live peer may be old
    dead.send_signal(signal.SIGKILL)
    dead.wait()
    with Scratch(tmp_path) as mine:
        assert not dead_folder.exists() and (live_folder / "engine").exists() and mine.stat().st_mode & 0o777 == 0o700
    assert not mine.exists() and live_folder.exists()
    live.kill()
    live.wait()
    scratch.sweep(tmp_path)
    assert not list(tmp_path.iterdir())


def test_what_is_not_a_folder_of_ours_stays(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").touch()
    (tmp_path / "headrace-run-link").symlink_to(outside)
    (tmp_path / "headrace-run-file").touch()
    (tmp_path / "headrace-else").mkdir()
    Scratch(tmp_path).close()
    assert len(list(tmp_path.iterdir())) == 4 and (outside / "file").exists()


def test_closing_twice_or_after_somebody_replaced_it_removes_nothing_else(tmp_path: Path) -> None:
    folder = Scratch(tmp_path)
    folder.path.rmdir()
    folder.path.mkdir()
    folder.close()
    folder.close()
    assert folder.path.exists()
