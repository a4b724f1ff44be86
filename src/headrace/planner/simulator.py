"""One simulation from start to end: the engine's config, a device and a workload become figures.

The core, scheduler and cache are those of every other run; only the executor and the clock are not.

What lives here: putting the parts together. What may not: flags and printing (commands/simulate.py), any part's own work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.bench.statistics import Reader, Sample, experiences
from headrace.clock import VirtualClock
from headrace.config import Decision, EngineConfig
from headrace.cost.cost_model import CostModel
from headrace.cost.steadiness import Disturbances
from headrace.engine.core import EngineCore
from headrace.engine.executor import ExecutorInfo
from headrace.engine.resolve import resolve_config
from headrace.errors import ConfigError
from headrace.metrics import StepRecorder
from headrace.planner.devices import Device
from headrace.planner.drive import Drive
from headrace.planner.executor import ModelledExecutor
from headrace.planner.figures import check_limits, figures_of, promise_figures
from headrace.planner.placement import ELEMENT_BYTES, place
from headrace.planner.pricing import Pricing, choose_prices
from headrace.planner.step_time import StepTime
from headrace.planner.tenants import priority_figures, tenant_figures
from headrace.planner.workload import Asked, Prompts, check_lengths
from headrace.spec import DecoderSpec


@dataclass(frozen=True, slots=True)
class Load:
    """What comes, and what it is held against. ``limits``: of goodput, in seconds by name. ``stepwise``: no step is leapt. ``popularity``: how
    often tokens pick each expert; empty: evenly. ``front``: requests pass a front end, where one was measured. ``luck``: the seed of what comes
    between steps, where that was measured."""

    asked: Sequence[Asked]
    seed: int = 0
    max_concurrency: int | None = None
    max_queue: int = 1024
    limits: Mapping[str, float] | None = None
    percentiles: Sequence[float] = (99.0,)
    stepwise: bool = False
    popularity: Sequence[float] = ()
    front: bool = True
    luck: int = 0


@dataclass(frozen=True, slots=True)
class Report:
    """A simulation's result."""

    figures: dict[str, Any]
    samples: list[Sample]
    info: ExecutorInfo
    decisions: tuple[Decision, ...]
    pricing: Pricing
    longest: int  # tokens of one sequence

    @property
    def facts(self) -> dict[str, Any]:
        """Of its prices, for the run's JSON."""
        return self.pricing.facts(self.longest)


def simulate(spec: DecoderSpec, config: EngineConfig, device: Device, load: Load) -> Report:
    """Raises ConfigError where the answer would not be the one that was asked for."""
    if config.device.executor != "model":
        raise ConfigError("A simulation has an executor of its own; leave --executor out.")
    config, decisions = resolve_config(config, device.kind)
    placement = place(spec, config, device)
    weight_bytes = ELEMENT_BYTES[placement.dtype]
    cost_model = CostModel(spec, placement.kv_specs, device.profile, weight_bytes=weight_bytes, dtype=placement.dtype, popularity=load.popularity)
    pricing = choose_prices(device, config, cost_model, placement.kv_specs)
    step_time = pricing.step_time
    check_limits(load.limits or {}, step_time.shortest(len(placement.kv_specs)))
    recorder = StepRecorder(cost_model, capacity=1, promise=config.scheduler.max_step_seconds)
    core, executor = create_core(placement.info, config, step_time, recorder, pricing.disturbances(load.luck))
    check_lengths(load.asked, core.scheduler.max_sequence_tokens)
    ids = Prompts(load.asked, executor.answer_ids, vocab_size=spec.vocab_size, seed=load.seed)
    leaps, front = None if load.stepwise else executor, pricing.front.seconds if pricing.front is not None and load.front else None
    outcome = Drive(core, load.asked, ids, room=load.max_concurrency, max_queue=load.max_queue, leaps=leaps, front=front).run()
    figures = figures_of(outcome, core, executor.counts, device, placement.dtype, load.limits or {}, load.percentiles)
    figures |= promise_figures(recorder)
    figures |= experiences(outcome.samples, Reader(config.scheduler.expected_ttft, config.scheduler.reading_speed))
    figures |= tenant_figures(outcome.samples, outcome.tenants, outcome.seconds, config.scheduler)
    figures |= priority_figures(outcome.samples, outcome.priorities, outcome.seconds)
    decisions = (*decisions, Decision("dtype", placement.dtype, "as the engine would choose"))
    longest = max(each.prompt + each.output for each in load.asked)
    return Report(figures, outcome.samples, placement.info, decisions, pricing, longest)


def create_core(
    info: ExecutorInfo, config: EngineConfig, step_time: StepTime, recorder: StepRecorder, disturbances: Disturbances | None = None
) -> tuple[EngineCore, ModelledExecutor]:
    """The engine's own core, over a device that only takes time. The recorder is told of steps where the scheduler heeds how fast they go:
    it knows of the device what a real engine would, its limits and the steps before."""
    clock = VirtualClock()
    ratio = disturbances.ratio if disturbances is not None else None
    executor = ModelledExecutor(info, step_time.of_plan, clock, price_alike=step_time.of_tokens_alike, ratio=ratio)
    core = EngineCore(
        executor,
        scheduler=config.scheduler,
        cache=config.cache,
        eos_token_ids=frozenset(),
        clock=clock,
        depth=config.device.overlap or 0,
        forecast=recorder.floors,
        speed=recorder.speed,
    )
    if core.scheduler.wants_speed:
        core.observe(recorder)
    return core, executor
