"""Caches have a place also where nobody knows a home."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from headrace.cache_home import cache_home
from headrace.processes.builders import mark_of


def test_the_users_word_goes_before_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_home() == Path("/home/somebody/.cache")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert cache_home() == Path("/caches")


def test_a_user_without_a_home_has_a_place_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that runs under a number that no file names."""
    for name in ("HOME", "XDG_CACHE_HOME", "TRITON_CACHE_DIR", "TRITON_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda user: {}[user])
    assert cache_home() == Path(tempfile.gettempdir()) / f"headrace-of-{os.getuid()}"
    assert not mark_of("anything").exists()
