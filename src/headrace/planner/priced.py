"""A model as it would lie on a device, with what its steps cost there: what reports ask without running anything.

What lives here: putting placement and prices together. What may not: reports, running.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.config import EngineConfig
from headrace.cost.cost_model import CostModel, StepLoad
from headrace.engine.resolve import resolve_config
from headrace.planner.devices import Device
from headrace.planner.placement import ELEMENT_BYTES, Placement, dtype_of, place
from headrace.planner.pricing import Pricing, choose_prices
from headrace.planner.step_time import StepTime
from headrace.spec import DecoderSpec, KVSpec, kv_groups


@dataclass(frozen=True, slots=True)
class Priced:
    """``config`` is resolved."""

    spec: DecoderSpec
    config: EngineConfig
    device: Device
    dtype: str
    groups: tuple[KVSpec, ...]
    cost_model: CostModel
    pricing: Pricing

    @property
    def step_time(self) -> StepTime:
        return self.pricing.step_time

    def placed(self) -> Placement:
        """Raises ConfigError or OutOfMemory where it does not fit."""
        return place(self.spec, self.config, self.device)

    def kv_bytes(self, context: int) -> int:
        """Bytes of one sequence's keys and values, to the token."""
        return sum(_token_bytes(group) * min(context, group.window or context) for group in self.groups)

    def blocks(self, context: int) -> list[int]:
        """Blocks of one sequence, by KV group: a window needs one more, for it begins anywhere."""
        return [_blocks_of(group, context) for group in self.groups]

    def decode_seconds(self, rows: int, context: int) -> float:
        """A step that gives ``rows`` sequences, each of ``context`` tokens, one token more."""
        return self.step_time.of_load(decode_load(self.groups, rows, context), rows=rows).seconds


def priced(spec: DecoderSpec, config: EngineConfig, device: Device) -> Priced:
    """Raises ConfigError for switches whose worth nobody knows."""
    config, _ = resolve_config(config, device.kind)
    dtype = dtype_of(spec, config, device)
    assert config.cache.block_size is not None, "resolved"
    groups = kv_groups(spec, config.cache.block_size, ELEMENT_BYTES[dtype])
    cost_model = CostModel(spec, groups, device.profile, weight_bytes=ELEMENT_BYTES[dtype], dtype=dtype)
    return Priced(spec, config, device, dtype, groups, cost_model, choose_prices(device, config, cost_model, groups))


def decode_load(groups: tuple[KVSpec, ...], rows: int, context: int) -> StepLoad:
    seen = tuple(float(rows * min(context, group.window or context)) for group in groups)
    return StepLoad(rows, rows, seen, seen, seen)


def _token_bytes(group: KVSpec) -> int:
    return group.bytes_per_block // group.block_size


def _blocks_of(group: KVSpec, context: int) -> int:
    whole = -(-context // group.block_size)
    return whole if group.window is None else min(whole, -(-group.window // group.block_size) + 1)
