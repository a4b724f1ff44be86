"""Which device is chosen, and what is said of a GPU that cannot be used: found, needed, what runs instead. No GPU is
needed here."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from headrace.commands import doctor
from headrace.errors import ConfigError
from headrace.spec import LayerSpec, MoESpec
from headrace.worker import driver, settings
from headrace.worker.driver import CardFacts, DriverFacts, ask_driver
from headrace.worker.settings import device_kind, find_gpu, resolve_device, takes_long_steps
from tests.support.specs import LLAMA_8B

CARD = CardFacts("NVIDIA T400", "GPU-1", 3 * 2**30, 4 * 2**30)


class Machine:
    """What torch and the driver say; a test changes it."""

    def __init__(self) -> None:
        self.available = True
        self.capability = (9, 0)
        self.warning = ""
        self.driver: DriverFacts | None = DriverFacts("580.1", (13, 0), (CARD,))
        self.broken = ""

    def is_available(self) -> bool:
        if self.warning:
            warnings.warn(self.warning, stacklevel=2)
        return self.available

    def name(self) -> str:
        if self.broken:
            raise RuntimeError(self.broken)
        return CARD.name


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    there = Machine()
    monkeypatch.setattr(torch.cuda, "is_available", there.is_available)
    monkeypatch.setattr(torch.cuda, "get_device_name", there.name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: there.capability)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(settings, "ask_driver", lambda: there.driver)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return there


def old_card(machine: Machine) -> None:
    machine.capability = (7, 5)


def old_driver(machine: Machine) -> None:
    machine.available, machine.warning = False, "The NVIDIA driver on your system is too old (found version 12020)."
    machine.driver = DriverFacts("535.54", (12, 2), (CARD,))


def broken_card(machine: Machine) -> None:
    machine.broken = "CUDA error: all CUDA-capable devices are busy or unavailable\nCUDA kernel errors might…"


def reason_unknown(machine: Machine) -> None:
    machine.available, machine.warning = False, "CUDA initialization: Unexpected error from cudaGetDeviceCount()."


@pytest.mark.parametrize(
    ("spoil", "found", "needed"),
    [
        (old_card, "NVIDIA T400 of compute capability 7.5", "8.0"),
        (old_driver, "driver 535.54, which runs CUDA up to 12.2", "CUDA 13.0"),
        (broken_card, "busy or unavailable", "one that does"),
        (reason_unknown, "Unexpected error from cudaGetDeviceCount", "NVIDIA T400"),
    ],
)
def test_a_gpu_that_cannot_be_used_is_one_line(
    machine: Machine, caplog: pytest.LogCaptureFixture, spoil: Callable[[Machine], None], found: str, needed: str
) -> None:
    spoil(machine)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch's own words do not come through
        with pytest.raises(ConfigError) as refused:
            device_kind("cuda")
        with caplog.at_level(logging.WARNING):
            kind, decision = resolve_device("auto")
    for text in (str(refused.value), decision.reason if decision else "", caplog.messages[-1]):
        assert found in text and needed in text and "--device cpu" in text and "\n" not in text
    assert kind == "cpu" and len(caplog.messages) == 1


def test_without_cuda_in_torch_a_card_is_named(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.available = False
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(ConfigError, match=r"NVIDIA T400, but torch .* is built without CUDA; needed is a CUDA build"):
        device_kind("cuda")


def test_a_hidden_card_is_named(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.available = False
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES is '' and hides it"):
        device_kind("cuda")


def test_no_gpu_is_no_warning(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    machine.available, machine.driver = False, None
    kind, decision = resolve_device("auto")
    assert kind == "cpu" and decision is not None and "no NVIDIA GPU" in decision.reason and not caplog.messages
    with pytest.raises(ConfigError, match=r"--device is cuda: found no NVIDIA GPU.*--device cpu runs here"):
        device_kind("cuda")


def test_a_good_card_is_taken_and_a_cpu_asked_for_is_not_questioned(machine: Machine) -> None:
    kind, decision = resolve_device("auto")
    assert kind == "cuda" and decision is not None and "compute capability 9.0" in decision.reason
    assert resolve_device("cuda") == ("cuda", None)
    machine.broken = "nobody asks"
    assert resolve_device("cpu") == ("cpu", None)
    assert find_gpu().problem is not None


def test_a_machine_without_a_driver_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "_LIBRARY", "libthere-is-none.so")
    assert ask_driver() is None
    monkeypatch.setattr(driver, "_LIBRARY", "libc.so.6")  # a library without those functions
    assert ask_driver() is None


def test_a_card_is_described_without_a_context(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver knows its memory; torch's own count would make a context, whatever --device says."""
    monkeypatch.setattr(driver, "ask_driver", lambda: machine.driver)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: SimpleNamespace(uuid="1"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: pytest.fail("a context"))
    assert doctor._card(find_gpu()).endswith("driver 580.1 for CUDA up to 13.0, 3.0 of 4.0 GiB free")
    machine.driver = None
    assert doctor._card(find_gpu()).endswith("driver unknown")


@pytest.mark.parametrize(
    ("name", "gains"),
    [("large", False), ("small", True), ("sparse", True)],
)
def test_who_gains_by_very_long_steps(name: str, gains: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the device has room for them."""
    small = replace(LLAMA_8B, hidden_size=2048, head_dim=64, intermediate_size=8192)
    sparse = replace(LLAMA_8B, layers=(LayerSpec(moe=MoESpec(8, 2, 1024, renormalize=True)), *LLAMA_8B.layers[1:]))
    spec = {"large": LLAMA_8B, "small": small, "sparse": sparse}[name]
    monkeypatch.setattr(settings.families, "spec_from_config", lambda config: spec)
    assert not takes_long_steps("cpu", {})
    for memory, roomy in ((80, True), (24, False)):
        monkeypatch.setattr(
            torch.cuda,
            "get_device_properties",
            lambda device, memory=memory: SimpleNamespace(total_memory=memory * 2**30),
        )
        assert takes_long_steps("cuda", {}) == (gains and roomy)
