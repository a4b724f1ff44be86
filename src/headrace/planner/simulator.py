"""One simulation from start to end: the engine's config, a device and a workload become figures.

The core, scheduler and cache are those of every other run; only the executor and the clock are not.

What lives here: putting the parts together, and the figures: those of ``headrace bench serve`` under the same names,
and what only the inside can tell. What may not: flags and printing (commands/simulate.py), any part's own work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from headrace.clock import VirtualClock
from headrace.config import Decision, EngineConfig
from headrace.disagg.roles import Targets
from headrace.engine.core import EngineCore
from headrace.engine.executor import ExecutorInfo
from headrace.engine.routing import Router
from headrace.errors import ConfigError
from headrace.observe.metrics import StepRecorder
from headrace.planner.devices import Device
from headrace.planner.dovetail import asked_of
from headrace.planner.drafts import Drafting
from headrace.planner.drive import Between, Drive, Outcome
from headrace.planner.executor import DeviceCounts, ModelledExecutor
from headrace.planner.pricing import Priced, Pricing, priced
from headrace.planner.steadiness import Disturbances
from headrace.planner.step_time import StagedTime, StepTime
from headrace.planner.tenants import priority_figures, tenant_figures
from headrace.planner.workload.load import LoadRequest, Prompts, check_lengths
from headrace.planner.workload.statistics import Reader, Sample, experiences, summarise
from headrace.spec import DecoderSpec
from headrace.speculative.length import DraftCounts
from headrace.speculative.settings import UNNAMED, SpeculativeSettings, read_settings


@dataclass(frozen=True, slots=True)
class Load:
    """What comes, and what it is held against. ``limits``: of goodput, in seconds by name. ``popularity``: how often
    tokens pick each expert; empty: evenly. ``front``: requests pass a front end, where one was measured. ``luck``: the
    seed of what comes between steps, where that was measured. ``settled``: the engine has served the same before, so
    that graphs which are captured when a shape comes again are there."""

    asked: Sequence[LoadRequest]
    seed: int = 0
    max_concurrency: int | None = None
    max_queue: int = 1024
    limits: Mapping[str, float] | None = None
    percentiles: Sequence[float] = (99.0,)
    popularity: Sequence[float] = ()
    front: bool = True
    draft: DraftOn | None = None
    luck: int = 0
    settled: bool = False


@dataclass(frozen=True, slots=True)
class DraftOn:
    """A draft model and the device it has for itself; None: it is beside its target."""

    spec: DecoderSpec
    device: Device | None = None

    def priced(self, config: EngineConfig, device: Device) -> Priced:
        """``device``: the target's."""
        scheduler = replace(config.scheduler, speculative_config=None)
        return priced(self.spec, replace(config, scheduler=scheduler), self.device or device)


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
    count = config.device.data_parallel_size
    each_found = [priced(spec, config, device, load.popularity) for _ in range(count)]  # prices follow their replica
    found = each_found[0]
    beside = load.draft.spec if load.draft is not None and load.draft.device is None else None
    config, pricing, info = found.config, found.pricing, found.placed(beside)
    check_limits(load.limits or {}, found.step_time.shortest(len(found.groups)))
    promise = config.scheduler.max_step_seconds
    draft_seconds = None if load.draft is None else _draft_seconds(load.draft, config, device)
    recorders = [StepRecorder(each.cost_model, capacity=1, promise=promise) for each in each_found]
    front = pricing.front if load.front else None
    for _ in range(1 + load.settled):
        replicas = [
            create_core(info, config, each.step_time, recorder, each.pricing.disturbances(load.luck), draft_seconds)
            for each, recorder in zip(each_found, recorders, strict=True)
        ]
        cores, (core, executor) = [each for each, _ in replicas], replicas[0]
        check_lengths(load.asked, core.scheduler.max_sequence_tokens)
        ids = Prompts(load.asked, executor.answer_ids, vocab_size=spec.vocab_size, seed=load.seed)
        router = create_router(config, info) if count > 1 else None
        between = None
        if router is not None and config.device.prefill_replicas:
            between = Between(cores, config.device, router, Targets.of(config.scheduler), device.host_bandwidth)
        outcome = Drive(
            cores, load.asked, ids, room=load.max_concurrency, max_queue=load.max_queue, front=front, router=router, between=between,
            executors=dict(replicas),
        ).run()  # fmt: skip
    counts = [executor.counts for _, executor in replicas]
    figures = figures_of(outcome, cores, counts, device, found.dtype, load.limits or {}, load.percentiles)
    if between is not None:
        figures |= hand_over_figures(between, outcome)
    if "request_goodput" in figures and config.device.num_devices > 1:
        figures["request_goodput_per_device"] = figures["request_goodput"] / config.device.num_devices
    figures |= promise_figures(recorders)
    figures |= draft_figures([drafts for core in cores if (drafts := core.stats().drafts) is not None])
    figures |= experiences(outcome.samples, Reader(config.scheduler.expected_ttft, config.scheduler.reading_speed))
    figures |= tenant_figures(outcome.samples, outcome.tenants, outcome.seconds, config.scheduler)
    figures |= priority_figures(outcome.samples, outcome.priorities, outcome.seconds)
    decisions = (*found.decisions, Decision("dtype", found.dtype, "as the engine would choose"))
    longest = max(each.prompt + each.output for each in load.asked)
    return Report(figures, outcome.samples, info, decisions, pricing, longest)


def who_drafts(config: EngineConfig, *, apart: bool) -> SpeculativeSettings | None:
    """The model to price: on a device of its own (``apart``), or beside its target if it is named. Raises ConfigError
    where none drafts apart."""
    settings = asked_of(config)
    if apart and (settings is None or settings.device is None):
        raise ConfigError(
            "--draft-device is where a draft model computes apart from its target; give --speculative-config with its model and a "
            "device, or leave it out."
        )
    named = settings is not None and settings.device is None and settings.model != UNNAMED
    return settings if apart or named else None


def _draft_seconds(draft: DraftOn, config: EngineConfig, device: Device) -> Callable[[int, int], float] | None:
    """What its passes take; None: as draft_cost says. Raises ConfigError or OutOfMemory where it does not fit a device of
    its own."""
    settings, device_parts = read_settings(config.scheduler.speculative_config), config.device
    if draft.device is None and settings is not None and settings.draft_cost:
        return None
    alone = replace(device_parts, tensor_parallel_size=1, pipeline_parallel_size=1, pipeline_layers=())
    found = draft.priced(replace(config, device=alone), device)
    if draft.device is not None:
        found.placed()
    return found.decode_seconds


def create_core(
    info: ExecutorInfo,
    config: EngineConfig,
    step_time: StepTime | StagedTime,
    recorder: StepRecorder,
    disturbances: Disturbances | None = None,
    draft_seconds: Callable[[int, int], float] | None = None,
) -> tuple[EngineCore, ModelledExecutor]:
    """The engine's own core, over a device that only takes time. ``draft_seconds``: of one pass of a draft model, for so
    many rows of so many tokens, where it has a device of its own. The recorder is told of steps where the scheduler
    heeds how fast they go: it knows of the device what a real engine would, its limits and the steps before."""
    clock = VirtualClock()
    ratio = disturbances.ratio if disturbances is not None else None
    settings = read_settings(config.scheduler.speculative_config)
    drafting = None
    if settings is not None:
        ahead = config.device.drafts_ahead
        info = replace(info, max_drafts=settings.most, runs_ahead=ahead and info.stages > 1)
        ahead = ahead and settings.device is not None and settings.tree is None
        drafting = Drafting(settings.expected, settings.draft_cost, draft_seconds, settings.tree or 1, ahead)
    executor = ModelledExecutor(info, step_time.of_plan, clock, ratio=ratio, drafting=drafting)
    core = EngineCore(
        executor,
        scheduler=config.scheduler,
        cache=config.cache,
        eos_token_ids=frozenset(),
        namespace=b"",
        clock=clock,
        depth=(config.device.overlap or 0) + info.stages - 1,
        forecast=recorder.floors,
        speed=recorder.speed,
    )
    if core.scheduler.wants_speed:
        core.observe(recorder)
    return core, executor


def create_router(config: EngineConfig, info: ExecutorInfo) -> Router:
    router = Router(config.device.data_parallel_size, routing=config.device.data_parallel_routing)
    group = info.kv_groups[0]
    for number in range(config.device.data_parallel_size):
        router.learn(number, group.num_blocks, group.spec.block_size)
    return router


def draft_figures(counts: Sequence[DraftCounts]) -> dict[str, Any]:
    """Where some were verified: tokens that a verification gives a sequence, and drafts drawn ahead, by outcome."""
    steps = sum(each.steps for each in counts)
    if not steps:
        return {}
    ahead = {f"drafts_ahead_{name}": sum(each.ahead[name] for each in counts) for name in counts[0].ahead}
    return {"tokens_per_verification": 1 + sum(sum(each.accepted) for each in counts) / steps, **ahead}


def figures_of(
    outcome: Outcome,
    cores: Sequence[EngineCore],
    devices: Sequence[DeviceCounts],
    device: Device,
    dtype: str,
    limits: Mapping[str, float],
    percentiles: Sequence[float],
) -> dict[str, Any]:
    """Times as bench serve gives them; then the device, the scheduler and the cache: of replicas, sums, means and the
    largest."""
    seconds = outcome.seconds
    if not seconds:
        raise ConfigError("No request got a token, so there is nothing to say; raise --max-queue.")
    counters, counts = [core.stats().counters for core in cores], DeviceCounts()
    for each in devices:
        counts.join(each)
    queries, device_seconds = sum(each.prefix_queries for each in counters), seconds * len(cores)
    return {
        **summarise(outcome.samples, seconds, limits, percentiles),
        "device_busy_share": counts.busy_seconds / device_seconds,
        "limit_share": counts.floor_seconds / counts.busy_seconds,
        "bandwidth_share": counts.bytes / (device_seconds * device.profile.read_bandwidth),
        "flops_share": counts.flops / (device_seconds * device.profile.gemm_rate(dtype)),
        "steps": counts.steps,
        "mean_step_ms": counts.busy_seconds / counts.steps * 1e3,
        "mean_rows": counts.rows / counts.steps,
        "most_rows": counts.most_rows,
        "most_requests": outcome.most_running,
        "computed_tokens": counts.tokens,
        "preemptions": sum(each.preemptions for each in counters),
        "prefix_hit_share": sum(each.prefix_hits for each in counters) / queries if queries else 0.0,
        "most_kv_used": outcome.most_used_blocks / cores[0].scheduler.cache.num_blocks,
    }


def hand_over_figures(between: Between, outcome: Outcome) -> dict[str, Any]:
    """Of prompts that were computed by others than answered them. What was handed over is no hit."""
    counts = between.counts
    given = sum(each.given_bytes for each in counts)
    cached, asked = (
        sum(getattr(each, name) for each in outcome.samples) for name in ("cached_tokens", "prompt_tokens")
    )
    return {
        "prefix_hit_share": cached / asked,
        "handed_over_prompts": sum(each.given for each in counts),
        "handed_over_bytes": given,
        "handed_over_early_share": sum(each.early_bytes for each in counts) / given if given else 0.0,
        "role_changes": between.roles.num_changes,
    }


def promise_figures(recorders: Sequence[StepRecorder]) -> dict[str, Any]:
    """Of --max-step-ms: steps that somebody's answer waited for, and how many of them kept to it; {} without."""
    if (promise := recorders[0].promise) is None:
        return {}
    summaries = [each.summary() for each in recorders]
    promised, kept, overfull = (
        sum(each[name] for each in summaries) for name in ("promised_steps", "kept_steps", "overfull_steps")
    )
    return {
        "step_promise_ms": promise * 1e3,
        "promised_steps": promised,
        "promise_kept_share": kept / promised if promised else 1.0,
        "overfull_steps": overfull,
        "promise_tail": max(each["promise_tail"] for each in summaries),
    }


def check_limits(limits: Mapping[str, float], shortest_step: float) -> None:
    """A limit that not even the least step meets is refused: every request would miss it, whatever the load. Raises
    ConfigError."""
    for name, limit in limits.items():
        if limit < shortest_step:
            raise ConfigError(
                f"--goodput {name}:{limit * 1e3:g} cannot be met: the least step of this model on this device takes {shortest_step * 1e3:.2f} ms. "
                f"Give more than that, or take a faster device or a smaller model."
            )
