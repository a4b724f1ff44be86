"""Predictions learned from the steps before."""

from __future__ import annotations

import random

from headrace.cost.cost_model import STEPS_BEFORE_USE, OnlineFit


def learned(steps: list[tuple[float, float]]) -> OnlineFit:
    fitted = OnlineFit()
    for floor, measured in steps:
        fitted.observe(floor, measured)
    return fitted


def test_slope_and_overhead_are_found_from_steps_of_different_size() -> None:
    draw = random.Random(1)
    floors = [draw.uniform(1e-3, 2e-2) for _ in range(100)]
    fitted = learned([(floor, floor / 0.7 + 5e-4) for floor in floors])
    for floor in (1e-3, 7e-3, 2e-2):
        assert abs(fitted.predict(floor) / (floor / 0.7 + 5e-4) - 1) < 1e-3


def test_steps_of_one_size_give_a_share_of_the_limit() -> None:
    fitted = learned([(3e-3, 4e-3)] * 20)
    assert abs(fitted.predict(3e-3) - 4e-3) < 1e-6
    assert abs(fitted.predict(3.3e-3) - 4.4e-3) < 1e-5


def test_a_disturbed_step_hardly_counts() -> None:
    steps = [(3e-3, 4e-3)] * 30
    steps[15] = (3e-3, 2.0)  # a kernel was compiled
    assert abs(learned(steps).predict(3e-3) / 4e-3 - 1) < 0.02


def test_it_follows_a_device_that_slows_down() -> None:
    fitted = learned([(3e-3, 4e-3)] * 100 + [(3e-3, 5e-3)] * 200)
    assert abs(fitted.predict(3e-3) / 5e-3 - 1) < 0.02


def test_nothing_is_learned_from_steps_without_a_floor_or_a_time() -> None:
    fitted = learned([(0.0, 1e-3), (1e-3, 0.0)] * STEPS_BEFORE_USE)
    assert not fitted.ready
    assert learned([(1e-3, 2e-3)] * STEPS_BEFORE_USE).ready
