"""Which prices a simulation runs on: those that were fitted to a run of this engine on this device, or assumed ones; and what is extrapolated.

What lives here: that choice, and what is said of it. What may not: fitting (calibrate.py), prices themselves (cost/).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from headrace.config import EngineConfig
from headrace.cost.calibrated import CalibratedSteps, Covered, best_calibrated
from headrace.cost.cost_model import CostModel
from headrace.cost.prices import FrontPrices, StepPrices
from headrace.cost.prompt_shapes import PromptShapes, ShapeBounds
from headrace.cost.run_facts import cascades, switches_of
from headrace.cost.shapes import multiplications
from headrace.cost.sharing import SharedBlocks
from headrace.cost.steadiness import Disturbances
from headrace.errors import ConfigError
from headrace.planner.devices import Device
from headrace.planner.step_time import Most, StepTime
from headrace.spec import DecoderSpec, KVSpec


@dataclass(frozen=True, slots=True)
class Pricing:
    """``other``: in what the calibration is another's; it is an extrapolation then, whatever the load."""

    step_time: StepTime
    front: FrontPrices | None
    calibrated: CalibratedSteps | None
    other: tuple[str, ...]
    assumed: str

    def disturbances(self, seed: int) -> Disturbances | None:
        """What comes between steps where these prices were fitted."""
        steadiness = self.calibrated.steadiness if self.calibrated is not None else None
        return None if steadiness is None else Disturbances(steadiness, seed)

    @property
    def origin(self) -> str:
        return f"{self.assumed}" if self.calibrated is None else str(self.calibrated)

    def extrapolated(self, context: int) -> tuple[str, ...]:
        """What of a run lies beyond the calibration. ``context``: the longest sequence, in tokens."""
        if self.calibrated is None:
            return ()
        return (*self.other, *_beyond(self.calibrated.covered, self.step_time.most, context))

    def facts(self, context: int) -> dict[str, Any]:
        """For a run's JSON."""
        found = self.calibrated
        return {
            "prices": self.origin,
            "fitted_parameters": len(found.fitted) if found is not None else 0,
            "disturbed": str(found.steadiness) if found is not None and found.steadiness is not None else "",
            "fitted_runs": [run.sha256 for run in found.runs] if found is not None else [],
            "extrapolated": list(self.extrapolated(context)),
        }


def choose_prices(device: Device, config: EngineConfig, cost_model: CostModel, groups: tuple[KVSpec, ...]) -> Pricing:
    """``config`` is resolved. Raises ConfigError for switches whose worth on this device nobody has measured."""
    switches, spec, profile = switches_of(config.device), cost_model.spec, cost_model.profile
    found, other = best_calibrated(device.calibrated, spec, cost_model.dtype, switches)
    if found is None and switches:
        raise ConfigError(_unknown(device, switches))
    sharing = SharedBlocks(groups, spec.num_heads // spec.num_kv_heads) if cascades(config.device, device.kind, cost_model.dtype) else None
    if found is None:
        prices = device.efficiency.prices(spec.num_layers, step_seconds=profile.step_overhead, host_seconds=device.host_seconds)
        return Pricing(StepTime(cost_model, prices, sharing=sharing), None, None, (), device.efficiency.origin)
    prices = _for_layers(found.prices, spec.num_layers / found.shape.layers)
    rate = found.rate if found.dtype == cost_model.dtype else profile.gemm_rate(cost_model.dtype)
    shapes = _prompt_shapes(config, spec) if device.kind != "cpu" and config.device.prompt_graphs else None
    step_time = StepTime(cost_model, prices, bandwidth=found.bandwidth, rate=rate, sharing=sharing, shapes=shapes)
    return Pricing(step_time, found.front, found, other, device.efficiency.origin)


def _prompt_shapes(config: EngineConfig, spec: DecoderSpec) -> PromptShapes:
    """Of an engine that was idle before its first request: it has recorded ahead what it records then."""
    tokens = config.scheduler.max_num_batched_tokens
    assert tokens is not None, "resolved"
    shapes = PromptShapes(ShapeBounds(config.scheduler.rows, tokens, multiplications(spec)))
    shapes.add(shapes.first)
    while (coming := shapes.next_ahead()) is not None:
        shapes.add((coming,))
    return shapes


def _unknown(device: Device, switches: Mapping[str, Any]) -> str:
    changed = " and ".join(switches)
    return (
        f"No run on {device.name} was calibrated with {changed} as asked, so nobody knows what that changes about a step's time; "
        f"leave it out, or measure a run with it (--trace FILE) and calibrate: headrace simulate --calibrate FILE."
    )


def _for_layers(prices: StepPrices, ratio: float) -> StepPrices:
    """Seconds a step are seconds of its layers: of another number of layers, as many times more."""
    return replace(prices, fixed=tuple(each * ratio for each in prices.fixed), host=replace(prices.host, launch=prices.host.launch * ratio))


def _beyond(covered: Covered, most: Most, context: int) -> list[str]:
    found = []
    for what, had, fitted in (
        ("steps of {} tokens", most.tokens, covered.tokens),
        ("steps of {} sequences", most.sequences, covered.sequences),
        ("sequences of {} tokens", context, covered.context),
    ):
        if had > fitted:
            found.append(f"{what.format(f'{had:,}')} (fitted up to {fitted:,})")
    return found
