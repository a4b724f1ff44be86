"""The recorder that holds each step against this device's limits.

What lives here: putting model shape, KV groups and device profile together. What may not: the arithmetic (cost/), measuring
(profile.py), recording (metrics.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from headrace.config import Decision
from headrace.cost.cost_model import CostModel
from headrace.cost.profile import DeviceProfile
from headrace.engine.executor import ExecutorInfo
from headrace.metrics import StepRecorder
from headrace.models import families
from headrace.worker.profile import resolve_profile

ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


class DeviceLimits:
    """The limits of ``device`` ("cpu" or "cuda"), looked up or glanced at when they are first asked for: with torch's threads set, best
    while a start has to wait for something else. A glance at a card that was never measured borrows a GiB of it, and gives it back."""

    def __init__(self, device: str) -> None:
        self._device = device

    @cached_property
    def found(self) -> tuple[DeviceProfile | None, Decision]:
        return resolve_profile(self._device)


def create_recorder(
    model_config: Mapping[str, Any], info: ExecutorInfo, limits: DeviceLimits, *, dtype: str, promise: float | None = None
) -> tuple[StepRecorder, Decision]:
    """``dtype`` is the one weights are held in; ``promise``: seconds a step may take (--max-step-ms)."""
    profile, decision = limits.found
    if profile is None:
        return StepRecorder(promise=promise), decision
    groups = [group.spec for group in info.kv_groups]
    cost_model = CostModel(families.spec_from_config(model_config), groups, profile, weight_bytes=ELEMENT_BYTES[dtype], dtype=dtype)
    return StepRecorder(cost_model, promise=promise), decision
