"""The device's own count of what it uses: a card's by its driver, a CPU's by powercap; nothing where nothing counts."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headrace.metrics import StepRecorder, render_steps
from headrace.worker import driver, energy
from headrace.worker.energy import EnergyMeter, PackageCounters, create_energy_meter, power_limit

NOT_SUPPORTED = 3  # NVML's


class FakeDriver:
    """Two cards as NVML shows them; ``millijoules`` and ``status`` are the second one's."""

    def __init__(self) -> None:
        self.millijoules, self.status = 5_000_000, 0

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = 2
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: Any, handle: Any) -> int:
        handle._obj.value = 100 + index.value
        return 0

    def nvmlDeviceGetUUID(self, handle: Any, buffer: Any, length: Any) -> int:
        buffer.value = f"GPU-{handle.value}-b".encode()
        return 0

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: Any, value: Any) -> int:
        assert handle.value == 101
        value._obj.value = self.millijoules
        return self.status

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: Any, value: Any) -> int:
        assert handle.value == 101
        value._obj.value = 650_000
        return self.status


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    fake = FakeDriver()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: fake)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid="101-b"))
    return fake


def found(device: str) -> EnergyMeter:
    meter = create_energy_meter(device)
    meter.now()
    return meter


def test_a_card_counts_from_the_engines_start_on(card: FakeDriver) -> None:
    meter = found("cuda")
    assert meter.now() == 0.0 and power_limit("cuda") == 650.0
    card.millijoules += 1_234_500
    assert meter.now() == 1234.5


def test_who_asks_does_not_wait_for_the_driver(card: FakeDriver) -> None:
    """It is told what was last known, and the driver is asked behind it, once at a time."""
    meter, asked, answers = found("cuda"), 0, Event()
    driver_answers = card.nvmlDeviceGetTotalEnergyConsumption

    def slow(handle: Any, value: Any) -> int:
        nonlocal asked
        asked += 1
        assert answers.wait(10.0)
        return driver_answers(handle, value)

    card.nvmlDeviceGetTotalEnergyConsumption = slow  # type: ignore[method-assign]
    card.millijoules += 3000
    assert [meter.joules() for _ in range(5)] == [0.0] * 5 and asked == 1
    answers.set()
    assert meter.now() == 3.0


def test_a_counter_that_fails_stands_still_and_says_so_once(card: FakeDriver, caplog: pytest.LogCaptureFixture) -> None:
    meter = found("cuda")
    card.millijoules += 2000
    assert meter.now() == 2.0
    card.status = NOT_SUPPORTED
    assert [meter.now() for _ in range(3)] == [2.0] * 3 and len(caplog.messages) == 1
    card.status, card.millijoules = 0, 0  # a driver that was loaded anew
    assert meter.now() == 2.0


def test_a_card_that_does_not_count_has_no_figure(card: FakeDriver) -> None:
    card.status = NOT_SUPPORTED
    assert found("cuda").now() is None and power_limit("cuda") is None


def test_no_driver_and_another_card_are_no_errors(card: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid="102-b"))
    assert found("cuda").now() is None and power_limit("cuda") is None
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid="1"))
    for library in ("libthere-is-none.so", "libc.so.6"):
        monkeypatch.setattr(driver, "_LIBRARY", library)
        assert found("cuda").now() is None and power_limit("cuda") is None


def powercap(folder: Path, packages: list[int], most: int = 1000) -> list[Path]:
    """Counters at so many microjoules, a part of a package beside them, which is in its package already."""
    for number, (name, value) in enumerate([("psys", 7), *((f"package-{index}", value) for index, value in enumerate(packages))]):
        for place, what in ((folder / f"intel-rapl:{number}", name), (folder / f"intel-rapl:{number}:0", "core")):
            place.mkdir(parents=True)
            for file, text in (("name", what), ("energy_uj", value), ("max_energy_range_uj", most)):
                (place / file).write_text(f"{text}\n")
    return [folder / f"intel-rapl:{number + 1}" / "energy_uj" for number in range(len(packages))]


def test_packages_are_summed_and_begin_anew_at_their_range(tmp_path: Path) -> None:
    first, second = powercap(tmp_path, [100, 900])
    counters = PackageCounters(tmp_path)
    assert counters.joules() == 0.0
    first.write_text("400")
    second.write_text("950")
    assert counters.joules() == pytest.approx(350e-6)
    second.write_text("50")
    assert counters.joules() == pytest.approx(450e-6)


def test_a_cpu_without_counters_or_with_others_has_no_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(energy, "PackageCounters", lambda: PackageCounters(tmp_path))
    assert found("cpu").now() is None and power_limit("cpu") is None
    (counter,) = powercap(tmp_path, [100])
    meter = found("cpu")
    counter.write_text("300")
    assert meter.now() == pytest.approx(200e-6)
    counter.write_text("?")
    assert meter.now() == pytest.approx(200e-6)


def test_metrics_have_it_where_it_is_counted() -> None:
    assert "energy" not in render_steps(StepRecorder().summary())
    assert "energy" not in render_steps(StepRecorder(energy=lambda: None).summary())
    text = render_steps(StepRecorder(energy=lambda: 12.5).summary())
    assert re.search(r"^# TYPE headrace_energy_joules_total counter\nheadrace_energy_joules_total 12\.5$", text, re.MULTILINE)
