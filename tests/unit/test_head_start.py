"""The head start needs a driver and a process without torch, and nothing that it meets may hurt."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from headrace.worker import head_start
from headrace.worker.driver import CardFacts, DriverFacts

MARK = Path("/nowhere/mark")


@pytest.fixture
def early(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A driver, and no torch yet."""
    monkeypatch.setattr(head_start, "_DRIVER", tmp_path)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(head_start, "begin_builders", lambda mark: None)


def test_without_a_driver_or_with_torch_there_is_no_head_start(
    early: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))
    assert head_start.begin_head_start(MARK) is None
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setattr(head_start, "_DRIVER", tmp_path / "nothing")
    assert head_start.begin_head_start(MARK) is None


@pytest.mark.parametrize(
    "driver", [None, ModuleType("triton.backends.nvidia.driver")], ids=["no triton", "another triton"]
)
def test_what_goes_wrong_is_left_to_who_needs_it(
    early: None, driver: ModuleType | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "triton.backends.nvidia.driver", driver)
    monkeypatch.setattr(head_start, "_LIBRARY", "libnothing.so")
    monkeypatch.setattr(head_start, "ask_driver", lambda: None)
    begun = head_start.begin_head_start(MARK)
    assert begun is not None and begun.free_before("1") is None
    begun.join()


def test_memory_is_read_before_the_context_is_made(early: None, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def ask() -> DriverFacts:
        calls.append("asked")
        return DriverFacts("580.1", (13, 0), (CardFacts("H0", "GPU-1-a", 7, 9), CardFacts("H1", "GPU-1-b", 8, 9)))

    def answer(name: str, status: int = 0) -> object:
        return lambda *_: calls.append(name) or status

    names = ("cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain")
    monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace(**{name: answer(name) for name in names}))
    monkeypatch.setattr(head_start, "ask_driver", ask)
    monkeypatch.setitem(sys.modules, "triton.backends.nvidia.driver", None)
    begun = head_start.begin_head_start(MARK)
    assert begun is not None
    assert (begun.free_before("1-a"), begun.free_before("1-b"), begun.free_before("2"), begun.free_before("")) == (
        7,
        8,
        None,
        None,
    )
    assert calls == ["asked", *names]


class Told:
    closed = 0

    def close(self) -> None:
        self.closed += 1


def test_builders_end_with_the_start_and_a_start_that_has_built_all_leaves_a_mark(
    early: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    builders = Told()
    monkeypatch.setattr(head_start, "begin_builders", lambda mark: None if mark.exists() else builders)
    monkeypatch.setattr(head_start.HeadStart, "_thread", lambda *_: None)
    with pytest.raises(RuntimeError), head_start.HeadStart(tmp_path / "mark") as begun:
        assert begun.builders is builders
        raise RuntimeError("the start fails")
    assert builders.closed == 1
    with head_start.HeadStart(tmp_path / "mark") as begun:
        begun.has_built()
        assert builders.closed == 2, "before the start is over"
    assert builders.closed == 2
    assert (tmp_path / "mark").exists()
    with head_start.HeadStart(tmp_path / "mark") as begun:
        assert begun.builders is None
    head_start.HeadStart(MARK).has_built()  # a cache that cannot be written is nobody's failure


def test_builders_that_were_handed_over_end_when_they_are_told_and_leave_a_mark_if_all_is_built(
    early: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(head_start.HeadStart, "_thread", lambda *_: None)
    for built in (False, True):
        builders = Told()
        monkeypatch.setattr(head_start, "begin_builders", lambda mark, builders=builders: builders)
        with head_start.HeadStart(tmp_path / "mark") as begun:
            end = begun.hand_over()
        assert builders.closed == 0, "the start is over, and they go on"
        end(built)
        assert builders.closed == 1 and (tmp_path / "mark").exists() is built
