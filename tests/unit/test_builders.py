"""Processes that compile for a start: orders and answers, and nothing that becomes of them hurts who asked."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from headrace.processes import builders
from headrace.processes.builders import Builders, begin_builders, mark_of
from tests.support.builders import compile_by_a_stand_in


@pytest.fixture(autouse=True)
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_by_a_stand_in(tmp_path, monkeypatch)


def test_orders_are_carried_out_and_what_is_not_is_said() -> None:
    made = Builders(2)
    assert [made.build(order) for order in ("one", "refuse", "two", "refuse", "three")] == [
        True,
        False,
        True,
        False,
        True,
    ]
    made.close()
    assert not made.build("late")


def test_as_many_work_at_once_as_there_are() -> None:
    made, done = Builders(3), []
    assert made.build("is there")
    threads = [threading.Thread(target=lambda: done.append(made.build("sleep"))) for _ in range(6)]
    begin = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert done == [True] * 6
    assert time.monotonic() - begin < 6 * 0.05
    made.close()


def test_one_that_dies_fails_its_order_and_later_ones_go_to_the_others() -> None:
    made = Builders(2)
    assert not made.build("die")
    assert {made.build("one") for _ in range(4)} == {True, False}, (
        "a dead one answers at once, and whoever asked compiles himself"
    )
    made.close()


def test_closing_lets_go_of_who_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    made, done, killed = Builders(1), [], list[int]()
    kill = os.killpg
    monkeypatch.setattr(os, "killpg", lambda group, signal: killed.append(group) or kill(group, signal))
    waiting = threading.Thread(target=lambda: done.append(made.build("hang")))
    waiting.start()
    time.sleep(0.05)
    assert not made.closed
    made.close()
    waiting.join(5)
    assert done == [False] and made.closed
    made.close()
    assert killed == [made._process.pid], "once: later that number may be another's"


def state_of(entry: Path) -> list[str]:
    """Of a process by its entry in /proc: its state, its parent, and more."""
    try:
        return (entry / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ["gone", ""]


def test_one_that_hangs_is_not_waited_for_twice_and_ends_with_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Builders(1)
    assert made.build("is there")
    made._ours[0].settimeout(0.05)
    assert not made.build("hang") and not made.build("one")
    (hanging,) = [
        entry
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit() and state_of(entry)[1] == str(made._process.pid)
    ]
    made.close()
    deadline = time.monotonic() + 5
    while state_of(hanging)[0] not in ("gone", "Z"):
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_program_that_cannot_start_is_nobodys_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH")
    monkeypatch.chdir(tmp_path)
    for name in (
        "no_such_program",
        "fake_builder",
    ):  # this one is in the working directory, which is no place to import from
        monkeypatch.setattr(builders, "_PROGRAM", name)
        made = Builders(1)
        assert not made.build("one")
        made.close()


def test_who_has_built_before_or_has_few_cores_starts_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []
    monkeypatch.setattr(builders, "Builders", started.append)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(16), raising=False)
    begin_builders(tmp_path / "mark")
    assert started == [14]
    (tmp_path / "mark").touch()
    assert begin_builders(tmp_path / "mark") is None
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(3), raising=False)
    assert begin_builders(tmp_path / "other") is None and started == [14]


def test_a_mark_is_of_these_facts_and_these_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    kernels = tmp_path / "kernels"
    (kernels / "norm").mkdir(parents=True)
    (kernels / "norm" / "triton_norm.py").write_text("one")
    monkeypatch.setattr(builders, "_KERNELS", kernels)
    marks = [mark_of({"layers": 1}), mark_of({"layers": 1}), mark_of({"layers": 2})]
    assert marks[0] == marks[1] != marks[2] and marks[0].parent == tmp_path / "cache"
    (kernels / "norm" / "triton_norm.py").write_text("another")
    assert mark_of({"layers": 1}) not in marks
    monkeypatch.delenv("TRITON_CACHE_DIR")
    monkeypatch.setenv("TRITON_HOME", str(tmp_path))
    assert mark_of().parent == tmp_path / ".triton" / "cache"
