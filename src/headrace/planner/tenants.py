"""Several tenants and priorities in one simulated load: whose request is whose, how urgent it is, and what each of them
got.

What lives here: sharing requests out, figures by tenant and by priority, how far services drift apart. What may not:
what is promised (scheduler/policies/fair.py), running.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any, TypeVar

import numpy as np

from headrace.config import SchedulerConfig
from headrace.planner.workload.load import LoadRequest
from headrace.planner.workload.statistics import Sample

T = TypeVar("T")
INPUT, OUTPUT = 1.0, 2.0  # prices of tokens, as the engine has them by default


def among(asked: Sequence[LoadRequest], count: int, hog: float | None, seed: int) -> list[LoadRequest]:
    """The same requests of ``count`` tenants, named as keys of a server are (key1, key2 …). The first sends the share
    ``hog`` of the requests, the others the rest in equal shares; None: all are alike. Turns of a conversation are of
    one tenant."""
    first = 1.0 / count if hog is None else hog
    shares = [first, *[(1.0 - first) / (count - 1)] * (count - 1)]
    drawn = np.random.default_rng((seed, 9)).choice(count, len(asked), p=shares)
    shared: list[LoadRequest] = []
    for each, which in zip(asked, drawn.tolist(), strict=True):
        tenant = f"key{which + 1}" if each.follows is None else shared[each.follows].tenant
        shared.append(replace(each, tenant=tenant))
    return shared


def with_priorities(asked: Sequence[LoadRequest], shares: Mapping[int, float], seed: int) -> list[LoadRequest]:
    """The same requests, each of one of these priorities, drawn by their shares. Turns of a conversation have one
    priority."""
    total = sum(shares.values())
    drawn = np.random.default_rng((seed, 10)).choice(
        list(shares), len(asked), p=[share / total for share in shares.values()]
    )
    found: list[LoadRequest] = []
    for each, priority in zip(asked, drawn.tolist(), strict=True):
        found.append(replace(each, priority=priority if each.follows is None else found[each.follows].priority))
    return found


def priority_figures(samples: Sequence[Sample], priorities: Sequence[int], seconds: float) -> dict[str, Any]:
    """{} where all are alike."""
    of, figures = _by_whom(samples, priorities), dict[str, Any]()
    for name in sorted(of) if len(of) > 1 else ():
        figures |= _group_figures(f"priority{name}", of[name], seconds)
    return figures


def _by_whom(samples: Sequence[Sample], whose: Sequence[T]) -> dict[T, list[Sample]]:
    found: dict[T, list[Sample]] = {}
    for sample, each in zip(samples, whose, strict=True):
        found.setdefault(each, []).append(sample)
    return found


def _group_figures(name: str, samples: Sequence[Sample], seconds: float) -> dict[str, Any]:
    good = [sample for sample in samples if sample.error is None and sample.arrivals]
    return {
        f"{name}_completed": len(good),
        f"{name}_output_throughput": sum(sample.output_tokens for sample in good) / seconds,
        f"{name}_mean_ttft_ms": float(np.mean([sample.ttft for sample in good])) * 1e3 if good else 0.0,
    }


def tenant_figures(
    samples: Sequence[Sample], tenants: Sequence[str], seconds: float, scheduler: SchedulerConfig
) -> dict[str, Any]:
    """{} where there are fewer than two. ``tenants``: of each sample; ``scheduler``: resolved. Services and their bound
    by weight, in prices of the scheduler's."""
    of = _by_whom(samples, tenants)
    names = sorted(of, key=lambda name: (len(name), name))
    if len(names) < 2:
        return {}
    weights = {name: scheduler.tenant_weights.get(name, 1.0) for name in names}
    prices = scheduler.fair_input_price, scheduler.fair_output_price
    pairs = combinations(names, 2)
    figures: dict[str, Any] = {
        "service_drift": max(drift(of[one], of[other], prices, (weights[one], weights[other])) for one, other in pairs),
        "service_drift_bound": _bound(samples, scheduler, min(weights.values())),
    }
    for name in names:
        figures |= _group_figures(name, of[name], seconds)
    return figures


def _bound(samples: Sequence[Sample], scheduler: SchedulerConfig, weight: float) -> float:
    """What ``fair`` promises of any two of them."""
    prompt, output = max(sample.prompt_tokens for sample in samples), max(sample.output_tokens for sample in samples)
    return 2.0 * (scheduler.fair_input_price * prompt + scheduler.fair_output_price * scheduler.rows * output) / weight


def drift(
    one: Sequence[Sample],
    other: Sequence[Sample],
    prices: tuple[float, float] = (INPUT, OUTPUT),
    weights: tuple[float, float] = (1.0, 1.0),
) -> float:
    """The most by which two tenants' services, by weight, differ between any two moments of a time in which both have
    requests without a token. Whoever found no place in the queue never waited."""
    mine, theirs = _events(one, prices), _events(other, prices)
    times, more, service = (np.concatenate(pair) for pair in zip(mine, theirs, strict=True))
    whose = np.repeat([1, 0], [len(mine[0]), len(theirs[0])])
    order = np.lexsort((service, more, whose, times))
    more, whose = more[order], whose[order]
    ahead = np.cumsum(np.where(whose == 1, service[order] / weights[0], -service[order] / weights[1]))
    both = (np.cumsum(more * whose) > 0) & (np.cumsum(more * (1 - whose)) > 0)
    edges = np.flatnonzero(np.diff(np.concatenate(([0], both.astype(np.int8), [0]))))
    widest = 0.0
    for begin, end in zip(edges[::2], edges[1::2], strict=True):
        within = ahead[max(0, begin - 1) : end] if begin else np.concatenate(([0.0], ahead[:end]))
        widest = max(widest, float(within.max() - within.min()))
    return widest


def _events(samples: Sequence[Sample], prices: tuple[float, float]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of one tenant: when, how many more of its requests wait, what service it got."""
    times: list[float] = []
    more: list[int] = []
    service: list[float] = []
    for sample in samples:
        if not sample.arrivals and not sample.ended:
            continue
        computed = prices[0] * (sample.prompt_tokens - sample.cached_tokens) if sample.arrivals else 0.0
        times += [sample.sent, sample.arrivals[0] if sample.arrivals else sample.ended, *sample.arrivals]
        more += [1, -1, *[0] * len(sample.arrivals)]
        service += [0.0, computed, *[prices[1]] * len(sample.arrivals)]
    return np.asarray(times), np.asarray(more, np.int64), np.asarray(service)
