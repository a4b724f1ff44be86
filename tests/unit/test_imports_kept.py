"""Dataclasses that are defined during a start: the same with what was kept, which is used, and trusted only if whole."""

from __future__ import annotations

import builtins
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from headrace.processes.imports import importing


def define() -> Any:
    with importing(), importing():

        @dataclasses.dataclass(frozen=True, slots=True, order=True)
        class Point:
            x: int
            y: tuple[int, ...] = dataclasses.field(default_factory=tuple)

    assert "exec" not in vars(dataclasses)
    return Point


def test_what_was_kept_defines_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (plain,) = {type(define()(1, (2,)))}
    (kept,) = (tmp_path / "headrace" / "dataclasses").iterdir()
    whole, compiled, own = kept.read_bytes(), list[str](), builtins.compile
    monkeypatch.setattr(
        builtins, "compile", lambda text, *more, **how: (compiled.append(text), own(text, *more, **how))[1]
    )
    again = define()
    assert not compiled and repr(again(1)) == repr(plain(1)) and again(1) < again(2) == again(2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        again(1).x = 2
    kept.write_bytes(whole[:-1] + b"\x00")
    assert define()(1).y == () and compiled and kept.read_bytes() == whole
    kept.unlink()
    kept.parent.chmod(0o500)
    assert define()(3).x == 3
