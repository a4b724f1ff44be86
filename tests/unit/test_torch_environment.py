"""How compute threads wait and in which pages tensors lie is said before torch is loaded, and never against the user's
word."""

from __future__ import annotations

import os
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace

import pytest

from headrace import torch_environment
from headrace.torch_environment import HUGE_PAGES, SPIN_COUNT, leave_out_compilers, prepare_for_torch

LATER = "torch._meta_registrations"


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


@pytest.mark.parametrize("version", ["2.11.0", "2.13.0"])
def test_a_process_of_ours_leaves_out_what_that_torch_can_do_without(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "version.py").write_text(f"__version__ = '{version}+cu130'\n")
    found = ModuleSpec("torch", None, origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(torch_environment, "find_spec", lambda _: found)
    for name in ("torch", LATER):
        monkeypatch.delitem(sys.modules, name, raising=False)
    leave_out_compilers()
    assert (LATER in sys.modules) == (version == "2.11.0")
    if LATER in sys.modules:  # whoever wants it after all gets it
        monkeypatch.setattr(torch_environment, "import_module", lambda name: SimpleNamespace(meta=name))
        assert sys.modules[LATER].meta == LATER and LATER not in sys.modules
