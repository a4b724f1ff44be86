"""How long a device would take for a step: the cost model's bytes and FLOPs, operator by operator, at what kernels reach of the limits.

    seconds of an operator = max(bytes / (bandwidth · share), FLOPs / (rate · share))
    seconds of a step      = Σ operators + layers · a layer's overhead + the profile's step overhead

What lives here: that sum. What may not: counting bytes (cost/), devices (devices.py), clocks.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from headrace.cost.cost_model import CostModel, StepLoad
from headrace.planner.devices import Device
from headrace.request import StepPlan


@dataclass(frozen=True, slots=True)
class StepPrice:
    """``floor_seconds``: at the limits themselves."""

    seconds: float
    floor_seconds: float
    bytes: float
    flops: float


class StepTime:
    """Prices steps of one model on one device; ``dtype`` names the rate of its products."""

    def __init__(self, cost_model: CostModel, device: Device, dtype: str) -> None:
        self._cost_model = cost_model
        self._bandwidth = device.profile.read_bandwidth
        self._rate = device.profile.gemm_rate(dtype)
        self._reached = _Reached(self._bandwidth, self._rate, device)
        self._overhead = device.profile.step_overhead + cost_model.spec.num_layers * device.efficiency.layer_seconds

    def of_plan(self, plan: StepPlan) -> StepPrice:
        return self.of_load(self._cost_model.load_of(plan))

    def of_load(self, load: StepLoad) -> StepPrice:
        return StepPrice(*self._sums(load, max))

    def of_tokens_alike(self, starts: array[int], steps: int) -> list[StepPrice]:
        """Of ``steps`` steps in a row that compute one token for each of those at ``starts``, each step a position further."""
        rows = len(starts)
        seen = tuple(_keys_seen(starts, steps, window) for window in self._cost_model.windows)
        sums = self._sums(StepLoad(rows, rows, seen, seen), np.maximum)  # type: ignore[arg-type]  # columns: a number for each step
        return [StepPrice(*each) for each in zip(*(np.broadcast_to(column, steps).tolist() for column in sums), strict=True)]

    def _sums(self, load: StepLoad, larger: Callable[[float, float], float]) -> tuple[float, float, float, float]:
        seconds, floor, moved, flops = self._overhead, 0.0, 0.0, 0.0
        for name, operator_bytes, operator_flops in self._cost_model.costs(load):
            bandwidth, rate = self._reached[name]
            seconds = seconds + larger(operator_bytes / bandwidth, operator_flops / rate)
            floor = floor + larger(operator_bytes / self._bandwidth, operator_flops / self._rate)
            moved, flops = moved + operator_bytes, flops + operator_flops
        return seconds, floor, moved, flops

    def shortest(self, groups: int) -> float:
        """Seconds of the least step there is: one token that sees itself."""
        ones = (1.0,) * groups
        return self.of_load(StepLoad(1, 1, ones, ones)).seconds


class _Reached(dict[str, tuple[float, float]]):
    """Bytes and FLOPs a second by operator, looked up once each."""

    def __init__(self, bandwidth: float, rate: float, device: Device) -> None:
        self._limits = bandwidth, rate, device.efficiency

    def __missing__(self, operator: str) -> tuple[float, float]:
        bandwidth, rate, efficiency = self._limits
        share = efficiency.share(operator)
        found = self[operator] = bandwidth * share.bandwidth, rate * share.rate
        return found


def _keys_seen(starts: array[int], steps: int, window: int | None) -> np.ndarray:
    """Keys that these tokens see, together, in each of the steps."""
    further = np.arange(steps, dtype=np.float64)
    if window is None:
        return float(sum(starts) + len(starts)) + len(starts) * further
    seen: np.ndarray = np.minimum(np.asarray(starts, dtype=np.float64)[:, None] + 1 + further, window).sum(axis=0)
    return seen
