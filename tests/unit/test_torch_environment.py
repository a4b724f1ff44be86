"""How compute threads wait and in which pages tensors lie is said before torch is loaded, and never against the user's
word."""

from __future__ import annotations

import os

import pytest

from headrace.torch_environment import HUGE_PAGES, SPIN_COUNT, prepare_for_torch


@pytest.mark.parametrize(
    ("said", "count", "pages"),
    [
        ({}, SPIN_COUNT, "1"),
        ({"GOMP_SPINCOUNT": "7"}, "7", "1"),
        ({"OMP_WAIT_POLICY": "active"}, None, "1"),
        ({HUGE_PAGES: "0"}, SPIN_COUNT, "0"),
    ],
)
def test_the_users_word_stands(
    said: dict[str, str], count: str | None, pages: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", HUGE_PAGES):
        monkeypatch.delenv(name, raising=False)
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    prepare_for_torch()
    assert (os.environ.get("GOMP_SPINCOUNT"), os.environ[HUGE_PAGES]) == (count, pages)
    for name in ("GOMP_SPINCOUNT", HUGE_PAGES):
        monkeypatch.delenv(name, raising=False)
