"""What a model's steps cost on a device: by prices fitted to a run of this engine on it, or assumed ones; and what is
extrapolated.

How much of the model's keys and values the device would hold is divided by the engine's own rules (worker/memory.py);
what the engine measures on a real card is a bound or an assumption here.

What lives here: that choice, what is said of it, and the model as it would lie there. What may not: fitting
(calibrate.py), prices themselves (cost/), running; torch at import.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from headrace.config import Decision, DeviceConfig, EngineConfig, resolve_kv_format
from headrace.cost.calibrated import CalibratedSteps, Covered, best_calibrated
from headrace.cost.cost_model import CostModel, StepLoad
from headrace.cost.popularity import share_of_rows
from headrace.cost.prices import FrontPrices, StepPrices
from headrace.cost.prompt_shapes import PromptShapes, ShapeBounds
from headrace.cost.run_facts import switches_of
from headrace.cost.shapes import multiplications
from headrace.cost.sharing import shared_blocks
from headrace.engine.executor import ExecutorInfo
from headrace.engine.resolve import resolve_config
from headrace.errors import ConfigError
from headrace.parallel.context import check_context
from headrace.parallel.placement import held_experts
from headrace.parallel.shares import share
from headrace.parallel.stages import pooled_layers, split_layers, staged
from headrace.planner.devices import GIB, Device, known_devices
from headrace.planner.steadiness import Disturbances
from headrace.planner.step_time import LargestStep, StagedTime, StepTime
from headrace.sites import count_bytes
from headrace.spec import ELEMENT_BYTES, DecoderSpec, Held, KVSpec, LayerSpec, kv_groups


@dataclass(frozen=True, slots=True)
class Pricing:
    """``other``: in what the calibration is another's; it is an extrapolation then, whatever the load."""

    step_time: StepTime | StagedTime
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


@dataclass(frozen=True, slots=True)
class Priced:
    """A model on a device; of a pipeline, its first stage, unless ``stages`` (a rank of each, and its KV groups) count.
    ``config`` is resolved, by ``decisions``."""

    spec: DecoderSpec
    config: EngineConfig
    decisions: tuple[Decision, ...]
    device: Device
    dtype: str
    groups: tuple[KVSpec, ...]
    cost_model: CostModel
    pricing: Pricing
    stages: Sequence[tuple[DecoderSpec, tuple[KVSpec, ...]]]
    pooled: Sequence[tuple[int, ...]] = ()  # of each stage: layers that lie in the next one's memory

    @property
    def step_time(self) -> StepTime | StagedTime:
        return self.pricing.step_time

    def placed(self, draft: DecoderSpec | None = None) -> ExecutorInfo:
        """On the stage that has room for the fewest blocks, the first beside a ``draft`` model. Raises ConfigError or
        OutOfMemory where it does not fit."""
        drafts = (draft, *(None for _ in self.stages[1:]))
        pooled = self.pooled or [()] * len(self.stages)
        found = [
            place(spec, self.config, self.device, self.dtype, groups, each, (pooled[at], pooled[at - 1]))
            for at, (each, (spec, groups)) in enumerate(zip(drafts, self.stages, strict=True))
        ]
        least = min(found, key=lambda each: [group.num_blocks for group in each.kv_groups])
        longest = min(each.max_model_len for each in found)
        return replace(least, max_model_len=longest, stages=len(found))

    def kv_bytes(self, context: int) -> int:
        """Bytes of one sequence's keys and values, to the token."""
        return sum(
            group.bytes_per_block // group.block_size * min(context, group.window or context) for group in self.groups
        )

    def blocks(self, context: int) -> list[int]:
        """Blocks of one sequence, by KV group: a window needs one more, for it begins anywhere."""
        return [_blocks_of(group, context) for group in self.groups]

    def decode_seconds(self, rows: int, context: int) -> float:
        """Until each of ``rows`` sequences of ``context`` tokens has one token more; in a pipeline they share its steps."""
        rows = -(-rows // len(self.stages))
        price = self.step_time.of_load(decode_load(self.groups, rows, context), rows=rows)
        return max(price.seconds, len(self.stages) * max(price.stages, default=0.0))


def priced(spec: DecoderSpec, config: EngineConfig, device: Device, popularity: Sequence[float] = ()) -> Priced:
    """``popularity``: how often tokens pick each expert. Of ranks, one and its share, of each stage. Raises ConfigError
    for switches whose worth nobody knows."""
    check_context(spec, config)
    config, decisions = resolve_config(config, device.kind)
    stages = range(config.device.pipeline_parallel_size)
    parts = [_busiest(staged(spec, config, stage), config.device, tuple(popularity)) for stage in stages]
    dtype = dtype_of(spec, config, device)
    models = [cost_model_of(part, config, device, dtype, popularity) for part in parts]
    prices = [choose_prices(device, config, *model) for model in models]
    pricing, pooled = prices[0], list[tuple[int, ...]]()
    if len(parts) > 1:
        from headrace.worker.memory import layers_bytes

        split = split_layers(spec, len(stages), config.device.pipeline_layers)
        pooled = [pooled_layers(split, config.device, stage) for stage in stages]
        fetched = [layers_bytes(part, each, ELEMENT_BYTES[dtype]) for part, each in zip(parts, pooled, strict=True)]
        hidden = spec.hidden_size * ELEMENT_BYTES[dtype]
        times = [each.step_time for each in prices if isinstance(each.step_time, StepTime)]
        pricing = replace(pricing, step_time=StagedTime(times, device.link, hidden, fetched))
    placed = [(part, groups) for part, (_, groups) in zip(parts, models, strict=True)]
    return Priced(
        parts[0],
        config,
        tuple(decisions),
        device,
        dtype,
        models[0][1],
        models[0][0],
        pricing,
        placed,
        pooled,
    )


def _busiest(spec: DecoderSpec, device: DeviceConfig, popularity: tuple[float, ...]) -> DecoderSpec:
    """The share of the rank that all wait for: where ranks hold whole experts, in each layer the one with most rows."""
    size = device.tensor_parallel_size
    ranks = [held for rank in range(size) if (held := held_experts(spec, device, rank)) is not None]
    if device.expert_failover:
        raise ConfigError("expert_failover is on, but what ranks that may die take is not priced; leave it out.")
    if not ranks:
        return share(spec, size)

    def rows(layer: LayerSpec, held: tuple[Held, ...]) -> float:
        moe = layer.moe
        return 0.0 if moe is None else share_of_rows(moe.num_experts, moe.top_k, popularity, held)

    each = zip(spec.layers, zip(*ranks, strict=True), strict=True)
    return share(spec, size, tuple(max(helds, key=partial(rows, layer)) for layer, helds in each))


def cost_model_of(
    spec: DecoderSpec, config: EngineConfig, device: Device, dtype: str, popularity: Sequence[float] = ()
) -> tuple[CostModel, tuple[KVSpec, ...]]:
    """With the KV groups that it counts. ``config`` is resolved."""
    assert config.cache.block_size is not None, "resolved"
    size = ELEMENT_BYTES[dtype]
    groups = kv_groups(
        spec,
        config.cache.block_size,
        size,
        resolve_kv_format(config.cache.kv_cache_dtype, dtype, spec.head_dim),
        config.device.context_parallel_size,
    )
    return CostModel(
        spec, groups, device.profile, weight_bytes=size, dtype=dtype, popularity=popularity, link=device.link
    ), groups


def decode_load(groups: tuple[KVSpec, ...], rows: int, context: int) -> StepLoad:
    seen = tuple(float(rows * min(context, group.window or context)) for group in groups)
    return StepLoad(rows, rows, seen, seen, seen)


def _blocks_of(group: KVSpec, context: int) -> int:
    whole = -(-context // group.block_size)
    return whole if group.window is None else min(whole, -(-group.window // group.block_size) + 1)


def choose_prices(device: Device, config: EngineConfig, cost_model: CostModel, groups: tuple[KVSpec, ...]) -> Pricing:
    """``config`` is resolved. Raises ConfigError for switches whose worth on this device nobody has measured."""
    switches, spec, profile = switches_of(config.device), cost_model.spec, cost_model.profile
    found, other = best_calibrated(device.calibrated, spec, cost_model.dtype, switches)
    if found is None and switches:
        raise ConfigError(_unknown(device, switches))
    sharing = shared_blocks(config.device, device.kind, spec, cost_model.dtype, groups)
    if found is None:
        prices = device.efficiency.prices(
            len(spec.held_layers), step_seconds=profile.step_overhead, host_seconds=device.host_seconds
        )
        return Pricing(StepTime(cost_model, prices, sharing=sharing), None, None, (), device.efficiency.origin)
    prices = _for_layers(found.prices, len(spec.held_layers) / found.shape.layers)
    rate = found.rate if found.dtype == cost_model.dtype else profile.gemm_rate(cost_model.dtype)
    graphed = device.kind != "cpu" and config.device.prompt_graphs and not config.device.enforce_eager
    graphed = graphed and config.device.context_parallel_size == 1
    shapes = _prompt_shapes(config, cost_model.spec, groups) if graphed else None
    step_time = StepTime(cost_model, prices, bandwidth=found.bandwidth, rate=rate, sharing=sharing, shapes=shapes)
    return Pricing(step_time, found.front, found, other, device.efficiency.origin)


def _prompt_shapes(config: EngineConfig, spec: DecoderSpec, groups: Sequence[KVSpec]) -> PromptShapes:
    """Of an engine that was idle before its first request: it has recorded ahead what it records then."""
    tokens = config.scheduler.max_num_batched_tokens
    assert tokens is not None, "resolved"
    keys = sum(group.token_bytes for group in groups) / spec.num_layers
    shapes = PromptShapes(ShapeBounds(config.scheduler.rows, tokens, multiplications(spec), keys))
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
    host = replace(prices.host, launch=prices.host.launch * ratio, record=prices.host.record * ratio)
    return replace(prices, fixed=tuple(each * ratio for each in prices.fixed), shared=prices.shared * ratio, host=host)


def _beyond(covered: Covered, most: LargestStep, context: int) -> list[str]:
    found = []
    for what, had, fitted in (
        ("steps of {} tokens", most.tokens, covered.tokens),
        ("steps of {} sequences", most.sequences, covered.sequences),
        ("sequences of {} tokens", context, covered.context),
    ):
        if had > fitted:
            found.append(f"{what.format(f'{had:,}')} (fitted up to {fitted:,})")
    return found


CARD_BYTES = 3 * GIB // 2  # a context, kernels and graphs, as a start on an H200 takes them


def place(
    spec: DecoderSpec,
    config: EngineConfig,
    device: Device,
    dtype: str,
    groups: tuple[KVSpec, ...],
    draft: DecoderSpec | None = None,
    pool: tuple[tuple[int, ...], tuple[int, ...]] = ((), ()),
) -> ExecutorInfo:
    """What an executor on that device would say of itself. ``config`` is resolved. ``draft``: a model that drafts beside
    it, with keys and values under the same numbers. ``pool``: pooled layers, and kept ones. Raises ConfigError or OutOfMemory with the numbers."""
    from headrace.worker.memory import Room, bounds, plan_kv, with_copy, with_pool

    available = int(device.memory * (config.cache.gpu_memory_utilization if device.overlaps else 1.0))
    purposes = bounds(spec, config, ELEMENT_BYTES[dtype]) | (
        {"context, kernels and graphs": CARD_BYTES} if device.overlaps else {}
    )
    purposes = with_pool(purposes, spec, *pool, ELEMENT_BYTES[dtype])
    if draft is not None:
        assert config.cache.block_size is not None, "resolved"
        size = ELEMENT_BYTES[dtype]
        theirs = {each.window: each.bytes_per_block for each in kv_groups(draft, config.cache.block_size, size)}
        groups = tuple(replace(each, beside=theirs.get(each.window, 0)) for each in groups)
        purposes |= {"draft model": count_bytes(draft, size)}
    own, on_cpu = Room(available, purposes), not device.overlaps
    room = with_copy(own, spec, config, groups, int(ELEMENT_BYTES[dtype]), on_cpu=on_cpu)[0]
    _check_fits(spec, device, available, room.purposes)
    plan = plan_kv(groups, config, room, max_positions=spec.max_positions, on_cpu=on_cpu)
    memory = {**room.purposes, "kv_cache": plan.num_bytes}
    name = f"{device.kind} (modelled: {device.name})"
    return ExecutorInfo(spec.vocab_size, plan.max_model_len, config.scheduler.rows, plan.groups, name, memory)


def dtype_of(spec: DecoderSpec, config: EngineConfig, device: Device) -> str:
    """As the engine would choose; ``cpu`` is this one."""
    from headrace.worker.settings import resolve_dtype

    return str(resolve_dtype(config.model.dtype, spec.checkpoint_dtype, device.kind)[1].value)


def _check_fits(spec: DecoderSpec, device: Device, available: int, purposes: Mapping[str, int]) -> None:
    needed = sum(purposes.values())
    if needed < available:
        return
    parts = ", ".join(f"{name} {size / GIB:.1f} GiB" for name, size in purposes.items())
    share = available / device.memory
    larger = [name for name, each in known_devices().items() if each.memory * share > needed]
    smaller = "take a smaller model or --dtype bfloat16"
    if purposes["activations"] > purposes["weights"]:
        smaller = "lower --max-num-batched-tokens or --max-num-seqs"
    advice = (
        f"It would fit on: {', '.join(larger)}." if larger else f"No device that is known here holds it; {smaller}."
    )
    raise ConfigError(
        f"This model does not fit on {device.name}: {needed / GIB:.1f} GiB are needed ({parts}) before any KV, "
        f"and {available / GIB:.1f} of its {device.memory / GIB:.1f} GiB may be used. {advice}"
    )
