"""What a simulated run says: the figures of ``headrace bench serve`` under the same names, and what only the inside can tell.

What lives here: arithmetic over a run's counts. What may not: running, printing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headrace.bench.statistics import summarise
from headrace.engine.core import EngineCore
from headrace.errors import ConfigError
from headrace.metrics import StepRecorder
from headrace.planner.devices import Device
from headrace.planner.drive import Outcome
from headrace.planner.executor import DeviceCounts


def figures_of(
    outcome: Outcome, core: EngineCore, counts: DeviceCounts, device: Device, dtype: str, limits: Mapping[str, float], percentiles: Sequence[float]
) -> dict[str, Any]:
    """Times as bench serve gives them; then the device, the scheduler and the cache."""
    seconds = outcome.seconds
    if not seconds:
        raise ConfigError("No request got a token, so there is nothing to say; raise --max-queue.")
    counters = core.stats().counters
    return {
        **summarise(outcome.samples, seconds, limits, percentiles),
        "device_busy_share": counts.busy_seconds / seconds,
        "limit_share": counts.floor_seconds / counts.busy_seconds,
        "bandwidth_share": counts.bytes / (seconds * device.profile.read_bandwidth),
        "flops_share": counts.flops / (seconds * device.profile.gemm_rate(dtype)),
        "steps": counts.steps,
        "mean_step_ms": counts.busy_seconds / counts.steps * 1e3,
        "mean_rows": counts.rows / counts.steps,
        "most_rows": counts.most_rows,
        "most_requests": outcome.most_running,
        "computed_tokens": counts.tokens,
        "preemptions": counters.preemptions,
        "prefix_hit_share": counters.prefix_hits / counters.prefix_queries if counters.prefix_queries else 0.0,
        "most_kv_used": outcome.most_used_blocks / core.scheduler.cache.num_blocks,
    }


def promise_figures(recorder: StepRecorder) -> dict[str, Any]:
    """Of --max-step-ms: steps that somebody's answer waited for, and how many of them kept to it; {} without."""
    if recorder.promise is None:
        return {}
    summary = recorder.summary()
    promised = summary["promised_steps"]
    return {
        "step_promise_ms": recorder.promise * 1e3,
        "promised_steps": promised,
        "promise_kept_share": summary["kept_steps"] / promised if promised else 1.0,
        "overfull_steps": summary["overfull_steps"],
        "promise_tail": summary["promise_tail"],
    }


def check_limits(limits: Mapping[str, float], shortest_step: float) -> None:
    """A limit that not even the least step meets is refused: every request would miss it, whatever the load. Raises ConfigError."""
    for name, limit in limits.items():
        if limit < shortest_step:
            raise ConfigError(
                f"--goodput {name}:{limit * 1e3:g} cannot be met: the least step of this model on this device takes {shortest_step * 1e3:.2f} ms. "
                f"Give more than that, or take a faster device or a smaller model."
            )
