"""The comparisons of ``python -m lab policies-served``: of each policy a load that it is for, small enough for one CPU,
and the figure it is for.

What lives here: requests, flags and figures. What may not: running them (policies_served.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.bench.ablate import gain
from headrace.planner.workload.load import LoadRequest
from headrace.planner.workload.statistics import Reader, Sample, experiences, meets
from lab.policies import LIGHT, Kind, of_kinds, of_tenants

TARGETS = {"ttft": 1.0, "tpot": 0.1}  # s
STEP_MS = 30.0
CHAT = (Kind(1.0, (50, 120), (80, 160)),)
MIXED = (Kind(0.6, (80, 160), (8, 16)), Kind(0.4, (50, 120), (120, 240)))  # to classify; to write
LONG = (Kind(1.0, (700, 1100), (48, 64)),)  # prompts that are felt by those who are being answered


@dataclass(frozen=True, slots=True)
class Run:
    """What clients saw, by tenant, over ``seconds``: of a server or of a simulation."""

    by_tenant: Mapping[str, Sequence[Sample]]
    seconds: float

    @property
    def samples(self) -> list[Sample]:
        return [sample for own in self.by_tenant.values() for sample in own]


@dataclass(frozen=True, slots=True)
class Case:
    """``fields``: of the scheduler's config, on the policy's side. ``load``: times what the server can do. ``tenants``
    have a key each."""

    name: str
    figure: str
    value: Callable[[Run], float]
    higher_is_better: bool
    load: float
    kinds: Sequence[Kind]
    fields: Mapping[str, Any]
    tenants: Sequence[str] = ()

    def asked(self, count: int, seed: int) -> list[LoadRequest]:
        made = of_kinds(self.kinds, count, seed)
        return of_tenants(made, LIGHT, seed) if self.tenants else made

    def times(self, off: Run, on: Run) -> float | None:
        """How many times better with the policy; None where there is nothing without it."""
        return gain(self.value(off), self.value(on), higher_is_better=self.higher_is_better)


def _light_ttft(run: Run) -> float:
    return float(np.mean([sample.ttft for sample in run.by_tenant["light"] if sample.arrivals]))


def _qoe(run: Run) -> float:
    return experiences(run.samples, Reader())["mean_qoe"]


def _whole(run: Run) -> float:
    return float(np.mean([sample.e2e for sample in run.samples if sample.arrivals]))


def _goodput(run: Run) -> float:
    return sum(sample.error is None and meets(sample, TARGETS) for sample in run.samples) / run.seconds


def _gap(run: Run) -> float:
    return float(np.percentile([gap for sample in run.samples for gap in sample.gaps], 99)) * 1e3


_POLICY = "scheduling_policy"
_IN_TIME = {f"{name}_target_ms": seconds * 1e3 for name, seconds in TARGETS.items()}
CASES = {
    case.name: case
    for case in (
        Case(
            "fair",
            "s to the light tenant's first tokens, mean",
            _light_ttft,
            False,
            2.0,
            CHAT,
            {_POLICY: "fair"},
            ("light", "heavy"),
        ),
        Case("qoe", "QoE, mean", _qoe, True, 3.0, CHAT, {_POLICY: "qoe"}),
        Case("shortest-remaining", "s of a request, mean", _whole, False, 2.0, MIXED, {_POLICY: "shortest-remaining"}),
        Case("deadline", "requests/s in time", _goodput, True, 3.0, CHAT, {_POLICY: "deadline", **_IN_TIME}),
        Case("max-step-ms", "ms between tokens, p99", _gap, False, 0.7, LONG, {"max_step_ms": STEP_MS}),
    )
}
