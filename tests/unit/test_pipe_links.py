"""Which links of a pipeline each rank opens on GPUs, and that both ends open them in one order."""

from __future__ import annotations

import pytest

from headrace.config import DeviceConfig
from headrace.parallel import nccl
from headrace.parallel.device import count_ids


@pytest.mark.parametrize(("size", "stages"), [(1, 2), (1, 4), (2, 2), (2, 3)])
def test_each_link_has_one_sender_and_one_receiver(monkeypatch: pytest.MonkeyPatch, size: int, stages: int) -> None:
    opened: dict[int, list[tuple[bytes, int]]] = {}
    rank = 0

    def link(id: bytes, end: int) -> object:
        opened.setdefault(rank, []).append((id, end))
        return object()

    monkeypatch.setattr(nccl, "NCCLLink", link)
    monkeypatch.setattr(nccl, "NCCLGroup", lambda id, *_, one_shot: id)
    config = DeviceConfig(tensor_parallel_size=size, pipeline_parallel_size=stages)
    ids = [bytes([number]) for number in range(count_ids(config))]
    pipes = []
    for rank in range(size * stages):
        pipes.append(nccl.NCCLPipe(ids[stages:], rank, size * stages, stages))
    assert all(pipe._all == ids[-1] for pipe in pipes) and [pipe.stage for pipe in pipes[::size]] == list(range(stages))
    ends: dict[bytes, dict[int, int]] = {}
    for number, links in opened.items():
        assert [id for id, _ in links] == sorted(id for id, _ in links)  # or two ranks might wait for each other
        for id, end in links:
            assert ends.setdefault(id, {}).setdefault(end, number) == number
    assert len(ends) == size * stages
    for each in ends.values():
        sender, receiver = each[0], each[1]
        assert sender % size == receiver % size and (sender // size + 1) % stages == receiver // size


def test_one_stage_needs_no_links() -> None:
    assert count_ids(DeviceConfig(tensor_parallel_size=4)) == 1
