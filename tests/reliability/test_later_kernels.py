"""An engine that ends while kernels are still being built leaves no process and no thread behind, and does not wait for
the compiler."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

import headrace.kernels as registry
from headrace.kernels import Kernels
from headrace.kernels.build.ahead import CompileAhead
from headrace.kernels.build.later import Ended, Later, Missing
from headrace.kernels.candidate import Candidate, Sizes
from headrace.processes.builders import Builders
from headrace.worker import head_start
from headrace.worker.head_start import HeadStart
from tests.support.builders import compile_by_a_stand_in
from tests.support.kernel_cases import called, carried_out

SIZES = Sizes(None, torch.float32, 16, 64, 4, 64)  # type: ignore[arg-type]


def members_of(group: int) -> list[str]:
    """Processes of a process group that are not just waiting to be reaped."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            state, _, its_group = (
                (entry / "stat").read_text().rpartition(")")[2].split()[:3] if entry.name.isdigit() else ("Z", "", "0")
            )
        except OSError:
            continue
        if int(its_group) == group and state != "Z":
            found.append(entry.name)
    return found


def started(made: Builders, order: str) -> tuple[CompileAhead[None], list[str]]:
    """A start that is over, with one kernel to come, for which ``order`` is given to a builder."""
    said: list[str] = []

    def find() -> None:
        raise Missing

    def build() -> None:
        said.append("began")
        if not made.build(order) and made.closed:
            raise Ended
        said.append("built")

    candidate = Candidate(
        "kernel", lambda site: lambda *_: None, warm_up=lambda *_: [("shared", Later(find, find, build))]
    )
    registry.OPERATIONS = carried_out("rms_norm", candidate)  # type: ignore[misc]
    kernels = Kernels(torch.device("cpu"))
    kernels.choose(*called("rms_norm", dtype=torch.float32))
    ahead = CompileAhead(lambda: None, strict=True, threads=3, later=True)
    ahead.start(kernels, SIZES, lambda: None)
    ahead.finish()
    return ahead, said


@pytest.mark.timeout(60)
@pytest.mark.parametrize("order", ["hang", "build"])
def test_nothing_is_left_when_the_engine_is_closed(order: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_by_a_stand_in(tmp_path, monkeypatch)
    monkeypatch.setattr(registry, "OPERATIONS", registry.OPERATIONS)
    monkeypatch.setattr(head_start.HeadStart, "_thread", lambda *_: None)
    made = Builders(2)
    monkeypatch.setattr(head_start, "begin_builders", lambda mark: made)
    with HeadStart(tmp_path / "mark") as begun:
        ahead, said = started(made, order)
        later = ahead.hand_over(begun.hand_over())
        ahead.close()
    group = made._process.pid
    assert not made.closed and members_of(group), "the start is over, and they go on"
    deadline = time.monotonic() + 20
    while "began" not in said or (order == "build" and not later.there):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    begin = time.monotonic()
    later.close()
    assert time.monotonic() - begin < 2
    assert later.there is (order == "build") is (tmp_path / "mark").exists()
    assert made.closed and made._process.returncode is not None
    while members_of(group):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    while any(thread.is_alive() for thread in ahead._threads._threads):
        assert time.monotonic() < deadline
        time.sleep(0.005)
