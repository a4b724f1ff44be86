"""Ranks that share a GPU: what their one-shot sums carry, and what goes through the host; and what they need said."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.config import CacheConfig, DeviceConfig, EngineConfig
from headrace.errors import ConfigError, EngineDead
from headrace.parallel import leader
from headrace.parallel.group import check_members, side_by_side
from headrace.parallel.one_device import OneDevice
from tests.support.ranks import ThreadGroup, together


class Sums:
    """Of threads, as OneShot has them: aligned, and few bytes at once."""

    lines = 4

    def __init__(self, group: ThreadGroup) -> None:
        self._group, self.count = group, 0

    def add(self, x: Tensor, stream: int) -> Tensor:
        assert 0 < x.nbytes <= 16 * self.lines and not x.nbytes % 16 and not x.data_ptr() % 16
        self.count += 1
        return self._group.all_reduce(x)


def test_sums_of_any_size_and_place_go_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OneDevice, "stream", 0)

    def run(group: ThreadGroup) -> list[Any]:
        sums = Sums(group)
        device: Any = OneDevice(group, lambda: sums)  # type: ignore[arg-type, return-value]
        whole = torch.arange(40.0) + 100 * group.rank
        odd = whole.clone()[1:8]
        found = [
            device.all_reduce(whole.clone()),
            device.all_reduce(odd),
            side_by_side(device, whole.view(4, 10)[:, :3], 5),
            device.all_reduce(whole[:0]),
        ]
        return [*found, device.all_gather_stacked(torch.tensor([group.rank], dtype=torch.uint8)), sums.count]

    for whole, odd, wide, none, small, count in together(2, run):
        expected = 2 * torch.arange(40.0) + 100
        assert torch.equal(whole, expected) and torch.equal(odd, expected[1:8])
        own = torch.arange(40.0).view(4, 10)
        assert torch.equal(wide, torch.cat([own[:, :3], own[:, :2] + 100], dim=1))
        assert small.tolist() == [[0], [1]] and count == 3 + 1 + 2 and not len(none)


def test_ranks_behind_the_last_column_have_none_of_it() -> None:
    for found in together(4, lambda group: side_by_side(group, torch.full((1, 2), group.rank), 5)):
        assert found.tolist() == [[0, 0, 1, 1, 2]]


def test_members_check_each_other_before_there_are_sums() -> None:
    def check(group: ThreadGroup, key: bytes) -> str:
        try:
            check_members(OneDevice(group, lambda: None), "a stage", key, "cpu")  # type: ignore[arg-type]
        except EngineDead as error:
            return error.message
        return ""

    assert together(2, lambda group: check(group, b"secret")) == ["", ""]
    assert all("met somebody" in each for each in together(2, lambda group: check(group, b"%d" % group.rank)))


def test_before_sums_are_tried_out_all_goes_through_the_host() -> None:
    def run(group: ThreadGroup) -> Tensor:
        return OneDevice(group, lambda: None).all_reduce(torch.ones(5))  # type: ignore[arg-type]

    assert [each.tolist() for each in together(2, run)] == [[2.0] * 5] * 2


def test_ranks_that_share_a_gpu_are_all_ranks_and_say_what_keys_take() -> None:
    with pytest.raises(ConfigError, match="give that number"):
        DeviceConfig(tensor_parallel_size=4, ranks_per_device=2)
    with pytest.raises(ConfigError, match="on one host"):
        DeviceConfig(tensor_parallel_size=2, ranks_per_device=2, pipeline_parallel_size=2)
    device = DeviceConfig(tensor_parallel_size=2, ranks_per_device=2, one_shot_sums=False)
    for kind in ("cpu", "auto"):  # which may be a CPU
        EngineConfig(device=replace(device, device=kind))
    with pytest.raises(ConfigError, match="leave --technique one_shot_sums=off out"):
        replace(device, device="cuda")
    device = replace(device, one_shot_sums=True, device="cuda")
    with pytest.raises(ConfigError, match="--kv-cache-memory"):
        EngineConfig(device=device)
    assert EngineConfig(device=device, cache=CacheConfig(kv_cache_memory=2**20)).device.num_ranks == 2


@pytest.mark.parametrize(
    ("more", "message"), [({"one_shot_sums": False}, "one_shot_sums=off out"), ({}, "give --kv-cache-memory")]
)
def test_where_automatic_is_a_gpu_ranks_say_what_they_lack(
    monkeypatch: pytest.MonkeyPatch, more: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr(leader, "device_kind", lambda _: "cuda")
    config = EngineConfig(device=DeviceConfig(tensor_parallel_size=2, ranks_per_device=2, **more))
    with pytest.raises(ConfigError, match=message):
        leader.create_executor(config, None, ranks=object())  # type: ignore[arg-type]
