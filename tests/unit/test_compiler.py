"""The compiler's head start needs a driver, and nothing that it meets may hurt."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from headrace import compiler


def test_without_a_driver_there_is_no_head_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(compiler, "_DRIVER", tmp_path / "nothing")
    assert compiler.begin_compiler() is None


@pytest.mark.parametrize("driver", [None, ModuleType("triton.backends.nvidia.driver")], ids=["no triton", "another triton"])
def test_what_goes_wrong_is_left_to_who_needs_it(driver: ModuleType | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(compiler, "_DRIVER", tmp_path)
    monkeypatch.setitem(sys.modules, "triton.backends.nvidia.driver", driver)
    thread = compiler.begin_compiler()
    assert thread is not None
    thread.join(30)
    assert not thread.is_alive()
