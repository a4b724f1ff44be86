"""The recorder that holds each step against this device's limits.

What lives here: putting model shape, KV groups and device profile together. What may not: the arithmetic (cost/), measuring
(profile.py), recording (metrics.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from headrace.config import Decision
from headrace.cost.calibrated import SHIPPED, best_calibrated, find_calibrated, price_of
from headrace.cost.cost_model import CostModel, StepLoad
from headrace.cost.profile import DeviceProfile, profile_folder
from headrace.engine.executor import ExecutorInfo
from headrace.errors import ConfigError
from headrace.metrics import StepRecorder
from headrace.models import families
from headrace.spec import DecoderSpec
from headrace.worker.energy import create_energy_meter
from headrace.worker.profile import resolve_profile

_log = logging.getLogger(__name__)

ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


class DeviceLimits:
    """The limits of ``device`` ("cpu" or "cuda"), looked up or glanced at when they are first asked for: with torch's threads set, best
    while a start has to wait for something else. A glance at a card that was never measured borrows a GiB of it, and gives it back."""

    def __init__(self, device: str) -> None:
        self.device = device

    @cached_property
    def found(self) -> tuple[DeviceProfile | None, Decision]:
        return resolve_profile(self.device)


def create_recorder(
    model_config: Mapping[str, Any],
    info: ExecutorInfo,
    limits: DeviceLimits,
    *,
    dtype: str,
    promise: float | None = None,
    switches: Mapping[str, Any] | None = None,
) -> tuple[StepRecorder, Decision]:
    """``dtype`` is the one weights are held in; ``promise``: seconds a step may take (--max-step-ms); ``switches``: as run_facts.py has them."""
    profile, decision = limits.found
    energy = create_energy_meter(limits.device).read
    if profile is None:
        return StepRecorder(promise=promise, energy=energy), decision
    groups = [group.spec for group in info.kv_groups]
    spec = families.spec_from_config(model_config)
    cost_model = CostModel(spec, groups, profile, weight_bytes=_bytes_a_weight(spec, info, dtype, switches or {}), dtype=dtype)
    plain = CostModel(spec, groups, profile, weight_bytes=ELEMENT_BYTES[dtype], dtype=dtype)  # what prices were fitted with
    return StepRecorder(cost_model, promise=promise, calibrated=find_price(plain, switches or {}), energy=energy), decision


def _bytes_a_weight(spec: DecoderSpec, info: ExecutorInfo, dtype: str, switches: Mapping[str, Any]) -> float:
    """In the mean over all that is held, where some are compressed: some per cent too many, for an embedding and angles are among it."""
    if not switches.get("compressed_weights"):
        return ELEMENT_BYTES[dtype]
    return min(info.memory["weights"] / families.count_weights(spec), ELEMENT_BYTES[dtype])


def find_price(cost_model: CostModel, switches: Mapping[str, Any], folders: Sequence[Path] = ()) -> Callable[[StepLoad, bool], float] | None:
    """What was calibrated on this device for this very model, precision and these switches; files that cannot be read are passed over, with a
    word: an engine starts without them."""
    try:
        found = find_calibrated(cost_model.profile.identity, folders or (profile_folder(), SHIPPED))
    except ConfigError as error:
        _log.warning("%s", error)
        return None
    best, other = best_calibrated(found, cost_model.spec, cost_model.dtype, switches)
    return price_of(best, cost_model) if best is not None and not other else None
