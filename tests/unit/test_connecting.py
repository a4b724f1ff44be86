"""Ranks on GPUs connect in a thread: who needs them waits, and hears what went wrong; what must be agreed on before goes
through the store."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.errors import EngineDead
from headrace.parallel import nccl
from headrace.parallel.group import Agreement


class Communicator:
    """Of one rank, that is there once ``door`` is open."""

    door = threading.Event()
    problem = ""

    def __init__(self, id: bytes, rank: int, size: int) -> None:
        self.ended = False
        assert self.door.wait(10)
        if self.problem:
            raise RuntimeError(self.problem)

    def all_reduce(self, x: Tensor) -> Tensor:
        return x.mul_(2)

    def abort(self) -> None:
        self.ended = True


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> nccl.NCCLGroup:
    for name, value in (("current_device", 0), ("set_device", None), ("get_device_capability", (8, 0))):
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(Communicator, "door", threading.Event())
    monkeypatch.setattr(nccl, "Communicator", Communicator)
    made = nccl.NCCLGroup(bytes(128), 0, 2, one_shot=True)
    threading.Thread(target=made.connect, daemon=True).start()
    return made


def test_a_sum_waits_until_all_are_connected(group: nccl.NCCLGroup) -> None:
    found: list[Tensor] = []
    summing = threading.Thread(target=lambda: found.append(group.all_reduce(torch.ones(2))))
    summing.start()
    summing.join(0.05)
    assert summing.is_alive() and group.max_onto_rows(64, torch.bfloat16) == 0 and "capability" in group.backend
    Communicator.door.set()
    summing.join(10)
    assert found[0].tolist() == [2, 2] and group.comm_ops == 1
    group.abort()
    assert group.connected().ended  # type: ignore[attr-defined]


def test_what_went_wrong_is_told_to_who_needs_them(group: nccl.NCCLGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Communicator, "problem", "NCCL: unhandled system error")
    Communicator.door.set()
    with pytest.raises(EngineDead, match="unhandled system error"):
        group.all_reduce(torch.ones(2))


def test_nobody_is_waited_for_once_all_is_to_end(group: nccl.NCCLGroup) -> None:
    threading.Timer(0.05, group.abort).start()
    with pytest.raises(EngineDead, match="they are to end"):
        group.connected()
    Communicator.door.set()


class Shelf:
    """A store of threads."""

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}
        self.came = threading.Condition()

    def set(self, key: str, value: bytes) -> None:
        with self.came:
            self.kept[key] = value
            self.came.notify_all()

    def expect(self, key: str) -> bytes:
        with self.came:
            assert self.came.wait_for(lambda: key in self.kept, 10)
            return self.kept[key]


def test_members_agree_on_the_least_time_after_time() -> None:
    shelf, found = Shelf(), dict[int, list[int]]()
    gives = [[5, -3, 2**40], [7, 9, 2**41], [6, 0, 2**42]]

    def settle(rank: int) -> None:
        agreement: Any = Agreement(shelf, "stage", rank, len(gives))
        found[rank] = [agreement.all_reduce_min(value) for value in gives[rank]]

    threads = [threading.Thread(target=settle, args=(rank,)) for rank in range(len(gives))]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert list(found.values()) == [[5, -3, 2**40]] * 3
