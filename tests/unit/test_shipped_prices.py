"""Prices that come with Headrace say of the table's rows what a card measured."""

from __future__ import annotations

import pytest

from headrace.config import EngineConfig
from lab.jobs import config_for
from lab.ranks_predicted import predicted

ROWS = [
    "decode-1",
    "decode-8",
    "decode-32",
    "decode-128",
    "decode-256",
    "prefill-1x2048",
    "prefill-1x8192",
    "prefill-16x2048",
]
WITHIN = 0.10
# docs/performance/gpu.md: one H200, the code of 2026-11-28, ms; and s of the mixed row and the one with a prefix
MEASURED: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "Llama-3.1-8B": ((3.895, 4.048, 4.262, 5.626, 8.518, 41.7, 189.4, 691.8), (15.88, 1.047)),
    "Llama-3.2-1B": ((0.794, 0.870, 0.892, 1.367, 1.852, 8.077, 31.04, 105.8), (2.762, 0.284)),
    "Qwen3-30B-A3B": ((2.377, 7.490, 13.38, 16.76, 18.16, 28.37, 130.0, 405.4), ()),
}
# Random weights send one prompt to few experts: each is chosen so many times as often as the one before (`lab truth`).
ROUTED = {"Qwen3-30B-A3B": {"prefill-1x2048": 0.738, "prefill-1x8192": 0.480, "prefill-16x2048": 0.892}}
EXPERTS = 128


def errors(model: str, rows: list[str], measured: tuple[float, ...]) -> dict[str, float]:
    popularity = {row: [ratio**index for index in range(EXPERTS)] for row, ratio in ROUTED.get(model, {}).items()}
    found = predicted(config_for(model, EngineConfig()), rows, 1.0, "NVIDIA H200", popularity)
    return {row: found[row] / value - 1.0 for row, value in zip(rows, measured, strict=True)}


@pytest.mark.parametrize("model", MEASURED)
def test_steps_of_an_h200_take_what_its_prices_say(model: str) -> None:
    found = errors(model, ROWS, MEASURED[model][0])
    assert not {row: error for row, error in found.items() if abs(error) > WITHIN}


@pytest.mark.slow
@pytest.mark.parametrize("model", [model for model, (_, long) in MEASURED.items() if long])
def test_hundreds_of_requests_on_an_h200_take_what_its_prices_say(model: str) -> None:
    found = errors(model, ["mixed", "shared-prefix"], MEASURED[model][1])
    assert not {row: error for row, error in found.items() if abs(error) > WITHIN}
