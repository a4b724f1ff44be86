"""The figures of a serving benchmark, defined once for every benchmark here.

    TTFT     send → first streamed token                        s, one a request
    E2E      send → last token                                  s, one a request
    TPOT     (E2E - TTFT) / (output tokens - 1)                 s, one a request with at least two tokens
    ITL      every gap between two arrivals of one request      s, pooled over requests
    goodput  requests that meet every stated limit, per second of the run
    QoE      share of the area below the curve of expected tokens that a reader kept (Andes, Liu et al. 2024), one a
    request; failed: 0

Several tokens that arrive together are one arrival. Percentiles interpolate linearly between order statistics.
What lives here: samples and arithmetic. What may not: clocks, sockets, printing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from headrace.errors import ConfigError

NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
GOODPUT_METRICS = ("ttft", "tpot", "e2el")


@dataclass(slots=True)
class Sample:
    """One request as its client saw it; times in seconds on one clock."""

    sent: float
    arrivals: list[float] = field(default_factory=list)  # of tokens, in order
    ended: float = 0.0
    due: float | None = None  # when the workload wanted it sent (open loop)
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    error: str | None = None

    @property
    def ttft(self) -> float:
        return self.arrivals[0] - self.sent

    @property
    def e2e(self) -> float:
        return self.arrivals[-1] - self.sent

    @property
    def tpot(self) -> float | None:
        return (self.e2e - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else None

    @property
    def gaps(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.arrivals, self.arrivals[1:], strict=False)]

    @property
    def lag(self) -> float:
        """How much later than wanted the client sent it."""
        return max(0.0, self.sent - self.due) if self.due is not None else 0.0


def parse_goodput(entries: Sequence[str]) -> dict[str, float]:
    """``ttft:500 tpot:50`` (milliseconds) → {"ttft": 0.5, "tpot": 0.05}. Raises ConfigError."""
    limits = {}
    for entry in entries:
        name, _, value = entry.partition(":")
        try:
            milliseconds = float(value)
        except ValueError:
            milliseconds = -1.0
        if name not in GOODPUT_METRICS or not milliseconds > 0:
            raise ConfigError(
                f"--goodput has {entry!r}; write METRIC:MILLISECONDS with a metric of {', '.join(GOODPUT_METRICS)}, like ttft:500."
            )
        limits[name] = milliseconds / 1e3
    return limits


def meets(sample: Sample, limits: Mapping[str, float]) -> bool:
    """A request without a TPOT (one token) meets any limit on it."""
    values = {"ttft": sample.ttft, "tpot": sample.tpot or 0.0, "e2el": sample.e2e}
    return all(values[name] <= limit for name, limit in limits.items())


@dataclass(frozen=True, slots=True)
class Reader:
    """Who reads an answer: seconds to the first token that it expects, and tokens a second from then on."""

    ttft: float = 1.0
    speed: float = 4.8


def experience(sample: Sample, reader: Reader) -> float:
    """QoE, 0 to 1. Token i is expected at e_i = sent + ttft + i / speed and begun at r_i, when it is here and the one
    before is read:

        1 - Σ (r_i - e_i) / Σ (end - e_i - 1 / (2 speed))      end: when the last token is read

    Reading begins at e_0 at the earliest: to be quicker than expected is no gain. Several tokens of one arrival are
    taken to be equally many.
    """
    if sample.error is not None or not sample.arrivals:
        return 0.0
    begin, pace = sample.sent + reader.ttft, max(1.0, sample.output_tokens / len(sample.arrivals)) / reader.speed
    free, delays, wanted = begin, 0.0, begin
    for arrival in sample.arrivals:
        read = max(arrival, free)
        delays += read - wanted
        free, wanted = read + pace, wanted + pace
    count = len(sample.arrivals)
    whole = count * (free - begin) - pace * count * count / 2.0
    return 1.0 - delays / whole


def experiences(samples: Sequence[Sample], reader: Reader) -> dict[str, float]:
    """``mean_qoe``, ``p10_qoe`` (nine of ten readers have it better) and the share of those at 0.9 and above. Failed
    requests count, as 0."""
    values = np.asarray([experience(sample, reader) for sample in samples] or [0.0])
    return {
        "mean_qoe": float(values.mean()),
        "p10_qoe": float(np.percentile(values, 10)),
        "good_qoe_share": float((values >= 0.9).mean()),
    }


def spread_of(values: Sequence[float], name: str, percentiles: Sequence[float] = (99.0,)) -> dict[str, float]:
    """``mean_NAME_ms``, ``median_…``, ``std_…``, ``p99_…`` of values in seconds; zeros when there are none."""
    data = np.asarray(values if len(values) else [0.0], dtype=np.float64) * 1e3
    figures = {
        f"mean_{name}_ms": float(data.mean()),
        f"median_{name}_ms": float(np.median(data)),
        f"std_{name}_ms": float(data.std()),
    }
    return figures | {
        f"p{percentile:g}_{name}_ms": float(np.percentile(data, percentile)) for percentile in percentiles
    }


def summarise(
    samples: Sequence[Sample],
    duration: float,
    limits: Mapping[str, float] | None = None,
    percentiles: Sequence[float] = (99.0,),
) -> dict[str, Any]:
    """The figures of a run of ``duration`` seconds, under the names that serving benchmarks use. Failures count only as
    failures."""
    good = [sample for sample in samples if sample.error is None and sample.arrivals]
    outputs = sum(sample.output_tokens for sample in good)
    prompts = sum(sample.prompt_tokens for sample in good)
    summary: dict[str, Any] = {
        "duration": duration,
        "completed": len(good),
        "failed": len(samples) - len(good),
        "total_input_tokens": prompts,
        "total_output_tokens": outputs,
        "cached_input_tokens": sum(sample.cached_tokens for sample in good),
        "request_throughput": len(good) / duration,
        "output_throughput": outputs / duration,
        "total_token_throughput": (prompts + outputs) / duration,
    }
    if limits:
        summary["request_goodput"] = sum(meets(sample, limits) for sample in good) / duration
    series = {
        "ttft": [sample.ttft for sample in good],
        "tpot": [sample.tpot for sample in good if sample.tpot is not None],
        "itl": [gap for sample in good for gap in sample.gaps],
        "e2el": [sample.e2e for sample in good],
    }
    for name, values in series.items():
        summary |= spread_of(values, name, percentiles)
    if any(sample.due is not None for sample in samples):
        summary |= spread_of([sample.lag for sample in samples], "client_lag", percentiles)
    return summary


def failure_reasons(samples: Sequence[Sample]) -> dict[str, int]:
    """How often each error was seen, most frequent first; an answer without a token is one. Errors that differ in
    numbers alone are one: the first of them stands for all."""
    first: dict[str, str] = {}
    reasons: dict[str, int] = {}
    for sample in samples:
        reason = sample.error if sample.error is not None else None if sample.arrivals else "an answer without a token"
        if reason is not None:
            shown = first.setdefault(NUMBER.sub("", reason), reason)
            reasons[shown] = reasons.get(shown, 0) + 1
    return dict(sorted(reasons.items(), key=lambda item: -item[1]))
