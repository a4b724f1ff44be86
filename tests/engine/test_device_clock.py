"""The device's clock over events whose times are given."""

from __future__ import annotations

from typing import Any

from headrace.worker.model_runner import DeviceClock


class At:
    """An event that happened at ``ms``."""

    def __init__(self, ms: float) -> None:
        self.ms = ms
        self.waited = 0

    def synchronize(self) -> None:
        self.waited += 1

    def elapsed_time(self, end_event: At) -> float:
        return end_event.ms - self.ms


def test_each_step_has_its_length_and_the_pause_before_it() -> None:
    clock: Any = DeviceClock()
    ends = [At(3.0), At(8.0), At(9.0)]
    taken = [clock.wait(At(begin), end) for begin, end in zip((1.0, 5.0, 8.0), ends, strict=True)]
    assert [(step.device, step.idle) for step in taken] == [(0.002, 0.0), (0.003, 0.002), (0.001, 0.0)]
    assert [end.waited for end in ends] == [1, 1, 1] and all(step.lent >= 0 for step in taken)


def test_what_a_step_waited_for_its_masks_is_idle_time() -> None:
    clock: Any = DeviceClock()
    taken = clock.wait(At(1.0), At(9.0), (At(3.0), At(7.0)))
    assert (taken.device, taken.idle) == (0.004, 0.004)
    taken = clock.wait(At(10.0), At(12.0), (At(11.0), At(11.0)))
    assert (taken.device, taken.idle) == (0.002, 0.001)
