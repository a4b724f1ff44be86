"""How compute threads wait is said before torch is loaded, and never against the user's word."""

from __future__ import annotations

import os

import pytest

from headrace.waiting import SPIN_COUNT, limit_spinning


@pytest.mark.parametrize(
    ("said", "count"),
    [({}, SPIN_COUNT), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)],
)
def test_spinning_is_limited_unless_the_user_has_said_how_to_wait(said: dict[str, str], count: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    limit_spinning()
    assert os.environ.get("GOMP_SPINCOUNT") == count
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
