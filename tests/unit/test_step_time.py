"""A step's price against the prices of its parts: whoever computes in a step is paid for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headrace.cost.prices import Slowness, StepPrices
from headrace.planner.step_time import StepTime
from headrace.request import StepPlan
from tests.support.specs import TINY
from tests.unit.test_cost_model import model, plan, profile

NOTHING = Slowness(0.0, 0.0)
ATTENTION = StepPrices((NOTHING,), NOTHING, (Slowness(3.0, 2.0),), Slowness(5.0, 7.0), others=0.0, activations=0.0)
DECODE, PROMPTS = ([40, 900, 7], [1, 1, 1]), ([0, 32], [64, 16])


@pytest.mark.parametrize("rate", [1e30, 1e3])
def test_a_mixed_step_costs_what_its_decode_rows_and_its_prompts_cost(rate: float) -> None:
    """Attention has no fixed part, so parts add up; one that is left out, or counted as the other kind, shows."""
    time = StepTime(model(TINY, profile(bandwidth=1e3, rate=rate)), ATTENTION)
    mixed, decode, prompts = (
        time.of_plan(plan(*rows)).seconds
        for rows in ([a + b for a, b in zip(DECODE, PROMPTS, strict=True)], DECODE, PROMPTS)
    )
    assert decode > 0 and prompts > 0 and mixed == pytest.approx(decode + prompts)


def test_a_mixed_steps_products_and_draws_are_of_all_its_tokens() -> None:
    prices = replace(ATTENTION, products=(Slowness(0.0, 1.0),), decode=(NOTHING,), prompts=NOTHING, sampled=0.5)
    time = StepTime(model(TINY, profile(bandwidth=1e3, rate=1e3)), prices)

    def seconds(step: StepPlan) -> float:
        return float(time.of_plan(step).seconds)

    mixed, decode, prompts = plan([40, 900, 7, 0, 32], [1, 1, 1, 64, 16]), plan(*DECODE), plan(*PROMPTS)
    assert seconds(mixed) == pytest.approx(seconds(decode) + seconds(prompts))
