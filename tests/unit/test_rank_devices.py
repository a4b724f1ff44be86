"""Which GPUs a replica gets, and too few of them: said before anything is loaded."""

from __future__ import annotations

import os

import pytest

from headrace.config import DeviceConfig, EngineConfig
from headrace.errors import ConfigError
from headrace.parallel import device, frames, leader


@pytest.mark.parametrize(
    ("named", "replica", "got"),
    [("", 0, "0,1"), ("", 1, "2,3"), ("5,3,1,0", 1, "1,0"), ("GPU-a, GPU-b,GPU-c,GPU-d", 0, "GPU-a,GPU-b")],
)
def test_a_replica_takes_the_next_devices(monkeypatch: pytest.MonkeyPatch, named: str, replica: int, got: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    monkeypatch.setattr(device.torch.cuda, "device_count", lambda: 4)
    device.take_gpus(DeviceConfig(data_parallel_size=2, tensor_parallel_size=2), replica)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == got


def test_too_few_devices_are_told_with_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(device.torch.cuda, "device_count", lambda: 3)
    with pytest.raises(
        ConfigError, match="--tensor-parallel-size 2 times --data-parallel-size 2 is 4 devices, but 3 GPUs"
    ):
        device.take_gpus(DeviceConfig(data_parallel_size=2, tensor_parallel_size=2), 0)
    monkeypatch.setattr(device.torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match="--tensor-parallel-size 2 is 2 devices, but 1 GPU is visible"):
        device.check_devices(DeviceConfig(data_parallel_size=4, tensor_parallel_size=2), 2)
    monkeypatch.setattr(device.torch.cuda, "device_count", lambda: 0)
    with pytest.raises(
        ConfigError, match=r"-size 2 with --ranks-per-device 2 is 1 device, but 0 GPUs .* here. Make more"
    ):
        device.check_devices(DeviceConfig(tensor_parallel_size=2, ranks_per_device=2), 2)
    device.take_gpus(DeviceConfig(data_parallel_size=2), 1)  # CPUs, where no GPU was asked for
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""


def test_unequal_devices_are_refused() -> None:
    class Others:
        def hear(self, kind: type[frames.Here]) -> list[frames.Here]:
            return [kind("cpu"), kind("NVIDIA H100, 80 GiB")]

    config = EngineConfig(device=DeviceConfig(tensor_parallel_size=3))
    with pytest.raises(ConfigError, match="3 equal devices, but the first is cpu and another NVIDIA H100"):
        leader._meet(Others(), "cpu", config, None)  # type: ignore[arg-type]
