"""How long a device would take for a step: the cost model's bytes and FLOPs, operator by operator, at what kernels reach of the limits.

    seconds of an operator = max(bytes / (bandwidth · share), FLOPs / (rate · share))
    seconds of a step      = Σ operators + layers · a layer's overhead + the profile's step overhead

What lives here: that sum. What may not: counting bytes (cost/), devices (devices.py), clocks.
"""

from __future__ import annotations

from dataclasses import dataclass

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
        self._efficiency = device.efficiency
        self._bandwidth = device.profile.read_bandwidth
        self._rate = device.profile.gemm_rate(dtype)
        self._overhead = device.profile.step_overhead + cost_model.spec.num_layers * device.efficiency.layer_seconds

    def of_plan(self, plan: StepPlan) -> StepPrice:
        return self.of_load(self._cost_model.load_of(plan))

    def of_load(self, load: StepLoad) -> StepPrice:
        seconds, floor, moved, flops = self._overhead, 0.0, 0.0, 0.0
        for operator in self._cost_model.operators(load):
            if not operator.in_floor:
                continue
            share = self._efficiency.share(operator.name)
            seconds += max(operator.bytes / (self._bandwidth * share.bandwidth), operator.flops / (self._rate * share.rate))
            floor += operator.seconds
            moved += operator.bytes
            flops += operator.flops
        return StepPrice(seconds, floor, moved, flops)

    def shortest(self, groups: int) -> float:
        """Seconds of the least step there is: one token that sees itself."""
        ones = (1.0,) * groups
        return self.of_load(StepLoad(1, 1, ones, ones)).seconds
