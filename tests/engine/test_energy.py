"""The device's own count of what it uses: a card's by its driver, a CPU's by powercap; nothing where nothing counts."""

from __future__ import annotations

import ctypes
import gc
import re
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch

from headrace.observe.metrics import Energy, StepRecorder
from headrace.worker import driver, energy
from headrace.worker.energy import EnergyMeter, PackageCounters, create_energy_meter, power_limit
from tests.support.board import steps_page

NOT_SUPPORTED, NO_PERMISSION = 3, 4  # NVML's
LIBRARY = ctypes.CDLL


def within(found: Callable[[], bool], seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while not found() and time.monotonic() < end:
        time.sleep(0.001)
    return found()


def reads(meter: EnergyMeter, joules: float) -> bool:
    last = meter.read()
    return last is not None and last.joules == joules


def raising(device: int) -> NoReturn:
    raise RuntimeError("no CUDA GPUs are available")


class FakeDriver:
    """Two cards as NVML shows them; ``millijoules`` and ``status`` are the second one's; the first may be
    ``forbidden``."""

    def __init__(self) -> None:
        self.millijoules, self.status, self.forbidden = 5_000_000, 0, False

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = 2
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: Any, handle: Any) -> int:
        handle._obj.value = 100 + index.value
        return NO_PERMISSION if self.forbidden and index.value == 0 else 0

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


def test_a_card_counts_from_the_engines_start_on(card: FakeDriver) -> None:
    meter = create_energy_meter("cuda")
    assert meter.joules() == 0.0 and power_limit("cuda") == 650.0
    card.millijoules += 1_234_500
    assert meter.joules() == 1234.5
    last = meter.read()
    assert last is not None and last.joules == 1234.5 and 0.0 < last.seconds < 60.0


def test_it_is_read_again_and_again_until_nobody_wants_to_know(
    card: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(energy, "_PERIOD", 0.001)
    meter = create_energy_meter("cuda")
    meter.joules()
    card.millijoules += 3000
    assert within(partial(reads, meter, 3.0))
    thread = meter._thread
    del meter
    gc.collect()
    thread.join(10.0)
    assert not thread.is_alive()


def test_who_reads_does_not_wait_for_the_driver(card: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = Event()

    def slow() -> int:
        assert answers.wait(10.0)
        return 0

    monkeypatch.setattr(card, "nvmlInit_v2", slow)
    meter = create_energy_meter("cuda")
    assert meter.read() is None
    answers.set()
    assert meter.joules() == 0.0


def test_an_error_that_nobody_foresaw_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", told.append)

    def find() -> NoReturn:
        raise KeyError("uuid")

    meter = EnergyMeter(find)
    assert meter.joules() is None
    meter._thread.join(10.0)
    assert [each.exc_type for each in told] == [KeyError]


def test_a_counter_that_fails_stands_still_and_says_so_once(card: FakeDriver, caplog: pytest.LogCaptureFixture) -> None:
    meter = create_energy_meter("cuda")
    meter.joules()
    card.millijoules += 2000
    assert meter.joules() == 2.0
    card.status = NOT_SUPPORTED
    assert [meter.joules() for _ in range(3)] == [2.0] * 3 and len(caplog.messages) == 1
    meter._thread.join(10.0)
    assert not meter._thread.is_alive()


def test_a_driver_that_was_loaded_anew_goes_on(card: FakeDriver) -> None:
    meter = create_energy_meter("cuda")
    meter.joules()
    card.millijoules += 2000
    meter.joules()
    card.millijoules = 0
    meter.joules()
    card.millijoules = 1500
    assert meter.joules() == 3.5


@pytest.mark.parametrize(
    "broken", ["it does not count", "another card", "torch has none", "no library", "another library"]
)
def test_a_card_without_a_counter_has_no_figure(card: FakeDriver, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    if broken == "it does not count":
        card.status = NOT_SUPPORTED
    elif broken == "another card":
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid="102-b"))
    elif broken == "torch has none":
        monkeypatch.setattr(energy, "_uuid", raising)
    else:
        monkeypatch.setattr(ctypes, "CDLL", LIBRARY)
        monkeypatch.setattr(driver, "_LIBRARY", "libthere-is-none.so" if broken == "no library" else "libc.so.6")
    assert create_energy_meter("cuda").joules() is None and power_limit("cuda") is None


def test_ranks_count_the_cards_of_all(card: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ranks' cards are the same one here; where one of them is not found or not seen, there is no figure."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    card.millijoules = 500
    meter = create_energy_meter("cuda", 2)
    meter.joules()
    card.millijoules = 1500
    assert meter.joules() == 2.0
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid="102-b" if index else "101-b")
    )
    assert create_energy_meter("cuda", 2).joules() is None and create_energy_meter("cuda").joules() == 0.0
    assert create_energy_meter("cuda", 3).joules() is None


def test_a_card_that_is_not_shown_hides_no_other(card: FakeDriver) -> None:
    card.forbidden = True
    assert create_energy_meter("cuda").joules() == 0.0


def powercap(folder: Path, packages: list[int], most: int = 1000) -> list[Path]:
    """Counters at so many microjoules, a part of a package beside them, which is in its package already."""
    for number, (name, value) in enumerate(
        [("psys", 7), *((f"package-{index}", value) for index, value in enumerate(packages))]
    ):
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
    first.write_text("30")  # from 400 it would be 630 of 1,000
    assert counters.joules() == pytest.approx(480e-6)


def test_a_cpu_without_counters_or_with_others_has_no_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(energy, "PackageCounters", lambda: PackageCounters(tmp_path))
    assert create_energy_meter("cpu").joules() is None and power_limit("cpu") is None
    (counter,) = powercap(tmp_path, [100])
    meter = create_energy_meter("cpu")
    meter.joules()
    counter.write_text("300")
    assert meter.joules() == pytest.approx(200e-6)
    counter.write_text("?")
    assert meter.joules() == pytest.approx(200e-6)


def test_metrics_have_it_where_it_is_counted() -> None:
    assert "energy" not in steps_page(StepRecorder().summary())
    text = steps_page(StepRecorder(energy=lambda: Energy(12.5, 2.0)).summary())
    assert re.search(
        r"^# TYPE headrace_energy_joules_total counter\nheadrace_energy_joules_total 12\.5$", text, re.MULTILINE
    )
    assert re.search(r"^headrace_energy_seconds_total 2\.0$", text, re.MULTILINE)
