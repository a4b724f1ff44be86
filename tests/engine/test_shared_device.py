"""Weights on a device that processes share, with memory of the host in place of a GPU's: who fills, who goes on when the
others end, and what nobody leaves behind."""

from __future__ import annotations

import gc
import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from headrace import LLM
from headrace.errors import ModelError
from headrace.worker import shared_device, worker
from headrace.worker.shared_device import Host, Span, share_on_device
from tests.engine.test_shared_weights import answer
from tests.support import tiny

FOLDER = Path("/dev/shm")
pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="needs /dev/shm")


class HostSpans:
    """As DeviceSpans: memory that a descriptor stands for, and that nobody owns."""

    def create(self, size: int) -> Span:
        fd = os.memfd_create("weights")
        os.ftruncate(fd, size)
        return self.adopt(fd, size)

    def adopt(self, fd: int, size: int) -> Span:
        return Span(fd, torch.frombuffer(mmap.mmap(fd, size), dtype=torch.uint8))


def module() -> nn.Module:
    """Two of its modules have one weight."""
    made = nn.ModuleList([nn.Linear(5, 3, device="meta"), nn.Linear(5, 3, bias=False, device="meta")])
    made[1].weight = made[0].weight  # type: ignore[assignment]
    return made


def filling(made: nn.Module, value: float) -> Callable[[], None]:
    def fill() -> None:
        for each in made.parameters():
            each.data.fill_(value)

    return fill


def never() -> None:
    pytest.fail("they were there")


def files() -> set[Path]:
    return set(FOLDER.glob(f"headrace-{os.getuid()}-*"))


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    gc.collect()
    before = files()
    yield
    gc.collect()
    assert files() == before


def test_who_comes_later_has_what_the_first_has_filled_whoever_ends() -> None:
    first, second, third, other = module(), module(), module(), module()
    assert not share_on_device(first, ("a",), filling(first, 2.5), HostSpans())
    assert not share_on_device(other, ("b",), filling(other, 1.0), HostSpans()), "another key"
    assert share_on_device(second, ("a",), never, HostSpans())
    assert torch.equal(second[0].weight, torch.full((3, 5), 2.5)) and second[0].weight is second[1].weight
    assert not second[0].weight.requires_grad
    first[0].weight.data[0, 0] = 7.0
    assert second[0].weight[0, 0] == 7.0, "it is one memory"
    del first
    gc.collect()
    assert share_on_device(third, ("a",), never, HostSpans()) and third[0].weight[0, 0] == 7.0


def test_a_second_engine_answers_from_the_first_ones_weights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A worker that takes this CPU for a card that shares."""
    monkeypatch.setattr(worker, "DeviceSpans", HostSpans)
    monkeypatch.setattr(worker.Worker, "_shares_device", property(lambda self: self._config.model.share_weights))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="card"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    tiny.create("llama", seed=3, tie_word_embeddings=True).save_pretrained(tmp_path)
    shared: dict[str, Any] = {"threads": 1, "share_weights": True}
    with LLM(tmp_path, threads=1) as plain, LLM(tmp_path, **shared) as first, LLM(tmp_path, **shared) as second:
        assert answer(plain) == answer(first) == answer(second)
        held = [llm.info.memory["weights"] for llm in (plain, first, second)]
        assert held[0] == held[1] > 4 * held[2], "of the second's are norms only"


@pytest.mark.slow
def test_one_that_is_killed_leaves_the_weights_to_the_others_and_no_more() -> None:
    code = (
        "import sys, time; from tests.engine.test_shared_device import *; made = module()\n"
        "share_on_device(made, ('killed',), filling(made, 4.0), HostSpans()); print('ready', flush=True); time.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
        made, later = module(), module()
        assert share_on_device(made, ("killed",), never, HostSpans())
        child.send_signal(signal.SIGKILL)
        child.wait()
        assert share_on_device(later, ("killed",), never, HostSpans()), "from the one that lives"
        assert torch.equal(later[0].bias, torch.full((3,), 4.0))
    finally:
        child.kill()
        child.wait()
    del made, later
    gc.collect()
    made = module()
    assert not share_on_device(made, ("killed",), filling(made, 1.0), HostSpans()), "it went with the last one"


def test_one_that_cannot_fill_leaves_nothing() -> None:
    def fail() -> None:
        raise ModelError("it is damaged")

    with pytest.raises(ModelError, match="damaged"):
        share_on_device(module(), ("fails",), fail, HostSpans())
    made = module()
    assert not share_on_device(made, ("fails",), filling(made, 1.0), HostSpans())


def test_other_users_get_nothing_and_are_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    made, later = module(), module()
    assert not share_on_device(made, ("users",), filling(made, 1.0), HostSpans())
    (path,) = (each for each in files() if each.is_socket())
    assert path.stat().st_mode & 0o077 == 0
    monkeypatch.setattr(shared_device, "_user_of", lambda peer: os.getuid() + 1)
    assert shared_device._ask(Path(str(path).rpartition(".")[0]), 8, HostSpans()) is None
    monkeypatch.undo()
    assert share_on_device(later, ("users",), never, HostSpans())


def test_one_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_device, "_PATIENCE", 0.05)
    monkeypatch.setattr(shared_device, "_serve", lambda listening, fd: None)
    host = Host(FOLDER / f"headrace-{os.getuid()}-silent", os.dup(0))
    try:
        with pytest.raises(ModelError, match="does not answer"):
            shared_device._ask(FOLDER / f"headrace-{os.getuid()}-silent", 8, HostSpans())
    finally:
        host.close()
