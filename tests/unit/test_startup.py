"""When an engine counts as ready."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from headrace.bench import startup
from lab.startup_child import Round, judge

STEADY = [Round(float(turn), 0.010, (0.002,) * 100) for turn in range(1, 8)]


def first(first: float, *slow: float) -> Round:
    return Round(0.0, first, (*slow, *(0.002,) * (100 - len(slow))))


def test_a_steady_first_round_is_ready_at_once() -> None:
    found = judge([first(0.0199, 0.0029), *STEADY])
    assert found.ready == 0
    assert (found.steady_first, found.steady_step) == (0.010, 0.002)


@pytest.mark.parametrize("begin", [first(0.021), first(0.010, 0.0031)], ids=["first token", "one step"])
def test_a_round_beyond_a_bound_belongs_to_the_start(begin: Round) -> None:
    found = judge([begin, begin, *STEADY])
    assert found.ready == 2


def test_an_engine_that_stays_unsteady_is_never_ready() -> None:
    assert judge([first(0.010, 0.1) for _ in range(8)]).ready is None


def test_children_find_no_compiled_kernel_but_their_models(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/home/somebody/cache")
    monkeypatch.delenv("HF_HOME", raising=False)
    found = startup._caches_in(tmp_path)
    own = {
        "TRITON_CACHE_DIR": f"{tmp_path}/triton",
        "XDG_CACHE_HOME": str(tmp_path),
        "CUDA_CACHE_PATH": f"{tmp_path}/cuda",
    }
    assert found == own | {"HF_HOME": "/home/somebody/cache/huggingface"}


def test_a_figure_that_one_run_lacks_is_lacking() -> None:
    assert startup._by_name([{"a": 1.0, "ready": 2.0}, {"a": 3.0}], "b: ") == {"b: a": [1.0, 3.0]}


def test_children_find_bytecode_where_this_process_may_not_write_it(monkeypatch: pytest.MonkeyPatch) -> None:
    environments: list[dict[str, str]] = []
    monkeypatch.setattr(startup.subprocess, "run", lambda command, env, **_: environments.append(env))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    with startup.bytecode() as environment:
        assert "PYTHONDONTWRITEBYTECODE" not in environment and Path(environment["PYTHONPYCACHEPREFIX"]).is_dir()
    assert environments == [environment] and not Path(environment["PYTHONPYCACHEPREFIX"]).exists()
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    with startup.bytecode() as environment:
        assert "PYTHONPYCACHEPREFIX" not in environment or environment["PYTHONPYCACHEPREFIX"] == os.environ.get(
            "PYTHONPYCACHEPREFIX"
        )
    assert len(environments) == 1
