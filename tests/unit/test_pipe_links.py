"""Which links of a pipeline each rank opens on GPUs, and that both ends open them in one order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from headrace.config import DeviceConfig
from headrace.parallel import nccl
from headrace.parallel.device import count_ids


@pytest.mark.parametrize(("size", "stages"), [(1, 2), (1, 4), (2, 2), (2, 3)])
@pytest.mark.parametrize("drafts", [False, True])
def test_each_link_has_one_sender_and_one_receiver(
    monkeypatch: pytest.MonkeyPatch, size: int, stages: int, drafts: bool
) -> None:
    opened: dict[int, list[tuple[bytes, int]]] = {}
    rank = 0

    def link(id: bytes, end: int) -> object:
        opened.setdefault(rank, []).append((id, end))
        return object()

    monkeypatch.setattr(nccl, "NCCLLink", link)
    monkeypatch.setattr(nccl, "NCCLGroup", lambda id, *_, one_shot: id)
    config = DeviceConfig(tensor_parallel_size=size, pipeline_parallel_size=stages)
    ids = [bytes([number]) for number in range(count_ids(config, drafts=drafts))]
    pipes = []
    for rank in range(size * stages):
        pipes.append(nccl.NCCLPipe(ids[stages:], rank, size * stages, stages))
    assert all(pipe.all == ids[-1] for pipe in pipes) and [pipe.stage for pipe in pipes[::size]] == list(range(stages))
    ends: dict[bytes, dict[int, int]] = {}
    for number, links in opened.items():
        assert [id for id, _ in links] == sorted(id for id, _ in links)  # or two ranks might wait for each other
        for id, end in links:
            assert ends.setdefault(id, {}).setdefault(end, number) == number
    ways = []
    for each in ends.values():
        sender, receiver = each[0], each[1]
        assert sender % size == receiver % size
        ways.append((sender // size, receiver // size))
    told = range(stages - 1) if drafts else range(1)
    wanted = [*((stage, stage + 1) for stage in range(stages - 1)), *((stages - 1, stage) for stage in told)]
    assert sorted(ways) == sorted(size * wanted)


def test_one_stage_needs_no_links() -> None:
    assert count_ids(DeviceConfig(tensor_parallel_size=4)) == 1


class Stream:
    """Of a device that does nothing: who waits for whom."""

    def __init__(self, number: int) -> None:
        self.cuda_stream = number
        self.waits_for: list[int] = []

    def wait_stream(self, other: Stream) -> None:
        self.waits_for.append(other.cuda_stream)


class Library:
    """Takes calls as NCCL's C interface has them."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*given: Any) -> int:
            self.calls.append((name, given))
            return 0

        return call


@pytest.mark.parametrize(
    ("dtype", "code"), [(torch.bfloat16, 9), (torch.float16, 6), (torch.float32, 7), (torch.int32, 2)]
)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_link_sends_beside_what_is_computed_and_receives_in_turn(
    monkeypatch: pytest.MonkeyPatch, rank: int, dtype: torch.dtype, code: int
) -> None:
    """ncclSend and ncclRecv: address, elements, type, peer, communicator, stream (nccl.h)."""
    library, computing, side = Library(), Stream(1), Stream(2)
    monkeypatch.setattr(nccl, "_library", lambda: library)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: computing)
    monkeypatch.setattr(torch.cuda, "Stream", lambda *_: side)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, **_: zeros(*size))
    recorded: list[Stream] = []
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: recorded.append(stream))
    link = nccl.NCCLLink(bytes(128), rank)
    (_, (_, count, _, own)), (first, _) = library.calls
    assert (count, own) == (2, rank) and first == ("ncclRecv" if rank else "ncclSend")  # what connects them
    library.calls.clear(), side.waits_for.clear(), recorded.clear()
    x = zeros(3, 5, dtype=dtype)
    link.receive(x) if rank else link.send(x)
    ((name, (address, elements, kind, peer, comm, stream)),) = library.calls
    assert (address, elements, kind, peer, comm) == (x.data_ptr(), 15, code, 1 - rank, link._comm)
    assert (name, stream) == (("ncclRecv", 1) if rank else ("ncclSend", 2))
    # sent once it is computed, and its memory is nobody's until it is
    assert (side.waits_for, recorded) == (([], []) if rank else ([1], [side]))
    link.abort()
    link.abort()
    assert [name for name, _ in library.calls].count("ncclCommAbort") == 1
