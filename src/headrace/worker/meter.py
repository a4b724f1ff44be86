"""The recorder that holds each step against this device's limits.

What lives here: putting model shape, KV groups and device profile together. What may not: the arithmetic (cost/), measuring
(profile.py), recording (metrics.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.config import Decision
from headrace.cost.cost_model import CostModel
from headrace.engine.executor import ExecutorInfo
from headrace.metrics import StepRecorder
from headrace.models import families
from headrace.worker.profile import resolve_profile

ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


def create_recorder(model_config: Mapping[str, Any], info: ExecutorInfo, *, dtype: str, device: str) -> tuple[StepRecorder, Decision]:
    """``dtype`` is the one weights are held in; ``device`` is "cpu" or "cuda". Called after the worker has set its threads and
    taken its memory: a glance at a card that was never measured borrows a GiB of what is left, and gives it back."""
    profile, decision = resolve_profile(device)
    if profile is None:
        return StepRecorder(), decision
    groups = [group.spec for group in info.kv_groups]
    cost_model = CostModel(families.spec_from_config(model_config), groups, profile, weight_bytes=ELEMENT_BYTES[dtype], dtype=dtype)
    return StepRecorder(cost_model), decision
