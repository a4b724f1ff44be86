"""What the dashboard shows: ten minutes of samples, the last steps, the scheduler's last decisions in words.

The engine is asked once a second, however many look: what was heard is kept here, bounded, and every answer is cut from
it.

What lives here: sampling, percentiles, words. What may not: HTTP pages (pages.py), drawing (data/web), Prometheus
(exposition.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta, Struct, structs

from headrace.engine.connection import SERIAL_SHIFT
from headrace.errors import EngineDead
from headrace.request import Given, Json
from headrace.server.dialects.body import read_query
from headrace.server.exchange import Exchange
from headrace.server.exposition import FINE, ServerMetrics
from headrace.server.inflight import SENTENCES
from headrace.server.limits import is_own, sees_all
from headrace.server.wire import encode
from headrace.techniques import TECHNIQUES

if TYPE_CHECKING:  # they hold our History
    from headrace.server.frontends.link import FindEngine
    from headrace.server.service import Service

SAMPLE_SECONDS = 1.0
ANSWER_SECONDS = 1.0  # that the engine has to answer: it may be in a long step
SAMPLES = 600
STEPS = 256
DECISIONS = 200
WINDOW = 10  # samples that percentiles and rates are taken over
QUANTILES = (0.5, 0.9, 0.99)

SAMPLE_COLUMNS = (
    "number", "time", "prompt_tokens", "generated_tokens", "prefilling", "decoding", "waiting", "preempted",
    "used_blocks", "cached_blocks", "prefix_queries", "prefix_hits", "preemptions", "draft_steps", "drafted", "accepted",
    "ttft_p50", "ttft_p90", "ttft_p99", "tpot_p50", "tpot_p90", "tpot_p99",
    "measured_seconds", "floor_seconds", "idle_seconds", "energy_joules", "energy_seconds",
)  # fmt: skip
STEP_COLUMNS = (
    "step_id", "kind", "rows", "tokens", "begin", "measured_seconds", "predicted_seconds", "floor_seconds", "fraction", "failed",
)  # fmt: skip
_Cursor = Annotated[int, Meta(ge=0, le=2**53 - 1)]  # what JSON's readers keep exact
ABOUT_ALL = ("failed", "overfull", "runs_begin", "runs_end")  # decisions that are about no one request

_TOTALS = ("steps", "failed_steps", "roofline_fraction", "idle_share")
_CACHED = {"admitted": "found in", "resumed": "still in"}

Row = tuple[Any, ...]


class Cursors(Struct, forbid_unknown_fields=True):
    """The last that a page has of each."""

    sample: _Cursor = -1
    step: _Cursor = -1
    decision: _Cursor = -1


class Samples:
    """The last SAMPLES rows, numbered from 1; as many are there from the start: ten minutes of growth would look like a
    leak."""

    def __init__(self) -> None:
        self._rows = deque((array("d", bytes(8 * len(SAMPLE_COLUMNS))) for _ in range(SAMPLES)), maxlen=SAMPLES)
        self._newest = 0

    def __len__(self) -> int:
        return min(self._newest, SAMPLES)

    def add(self, values: Row) -> None:
        """``values`` of all columns but the number."""
        self._newest += 1
        self._rows.append(array("d", (self._newest, *(math.nan if value is None else value for value in values))))

    def after(self, number: int) -> list[Row]:
        """Rows with higher numbers, oldest first."""
        return [tuple(map(_plain, row)) for row in self._rows if row[0] > max(number, 0)]


def _plain(cell: float) -> float | None:
    return None if math.isnan(cell) else int(cell) if cell.is_integer() else cell


class History:
    """What the dashboard knows. Bounded: SAMPLES, STEPS, DECISIONS."""

    def __init__(self) -> None:
        self.samples = Samples()
        self.steps: deque[Row] = deque(maxlen=STEPS)
        self.decisions: deque[Json] = deque(maxlen=DECISIONS)
        self.stats: Given = {}
        # the histograms' counts, of which differences are taken
        self._marks: deque[list[tuple[int, ...]]] = deque(maxlen=WINDOW)

    async def run(self, find_engine: FindEngine, metrics: Callable[[], ServerMetrics]) -> None:
        """Samples for ever. An engine in a long step is asked again a second later."""
        while True:
            await asyncio.sleep(SAMPLE_SECONDS)
            engine = find_engine()
            if engine is not None and engine.alive:
                with contextlib.suppress(TimeoutError, EngineDead):
                    stats = await asyncio.wait_for(engine.recent(*self.newest), ANSWER_SECONDS)
                    self.take(metrics(), stats, time.perf_counter())

    @property
    def newest(self) -> tuple[int, int]:
        """The last step and decision that are known."""
        return self.steps[-1][0] if self.steps else -1, self.decisions[-1]["number"] if self.decisions else 0

    def after(self, sample: int, step: int, decision: int) -> Json:
        """What a page that knows these has to be told."""
        steps = self.stats.get("steps") or {}
        return {
            "num_blocks": self.stats.get("num_blocks", 0),
            "totals": {name: steps.get(name, 0) for name in _TOTALS},
            "samples": self.samples.after(sample),
            "steps": [row for row in self.steps if row[0] > step],
            "decisions": [entry for entry in self.decisions if entry["number"] > decision],
        }

    def take(self, metrics: ServerMetrics, stats: Given, now: float) -> None:
        """One second's news."""
        self.stats = {name: value for name, value in stats.items() if name not in ("records", "decisions")}
        self.steps.extend(_step_row(record) for record in stats["records"])
        self.decisions.extend(_decision(*entry) for entry in stats["decisions"])
        shown = [metrics.histograms[name] for name in (FINE, "inter_token_latency_seconds")]
        mark = [tuple(each.counts) for each in shown]
        before = self._marks[0] if self._marks else [(0,) * len(each) for each in mark]
        self._marks.append(mark)
        latencies = (
            quantile(each.bounds, old, new, share)
            for each, old, new in zip(shown, before, mark, strict=True)
            for share in QUANTILES
        )
        self.samples.add((round(now, 3), *_gauges(metrics, stats), *latencies, *_sums(stats)))


def _decision(number: int, at: float, kind: str, request: int, values: Sequence[int], tenant: str) -> Json:
    """``tenant`` is for choosing who may see it, and is not shown."""
    return {"number": number, "time": at, "kind": kind, "text": sentence(kind, request, values), "tenant": tenant}


def _step_row(record: Given) -> Row:
    kind = "decode" if record["decodes"] == record["rows"] else "mixed" if record["decodes"] else "prefill"
    values = (kind if name == "kind" else record[name] for name in STEP_COLUMNS)
    return tuple(round(value, 7) if isinstance(value, float) else value for value in values)


def _gauges(metrics: ServerMetrics, stats: Given) -> Row:
    counters = stats["counters"]
    return (
        metrics.totals["prompt_tokens_total"], metrics.totals["generation_tokens_total"],
        stats["num_prefilling"], stats["num_running"] - stats["num_prefilling"],
        stats["num_waiting"] - stats["num_preempted"], stats["num_preempted"],
        stats["num_used_blocks"], stats["num_cached_blocks"],
        counters["prefix_queries"], counters["prefix_hits"], counters["preemptions"], *_drafts(stats.get("drafts")),
    )  # fmt: skip


def _drafts(counts: Given | None) -> tuple[int | None, ...]:
    """Verifications of one row, drafts in them, and how many of these were right; None where nothing drafts."""
    return (None,) * 3 if counts is None else (counts["steps"], sum(counts["drafted"]), sum(counts["accepted"]))


def _sums(stats: Given) -> Row:
    steps, energy = stats["steps"], stats["steps"]["energy"] or {"joules": None, "seconds": None}
    times = (steps[name] for name in ("measured_seconds", "floor_seconds", "idle_seconds"))
    return tuple(None if value is None else round(value, 6) for value in (*times, energy["joules"], energy["seconds"]))


def quantile(bounds: Sequence[float], before: Sequence[int], after: Sequence[int], share: float) -> float | None:
    """Of what was observed between two readings of a histogram's counts, straight lines inside its buckets; None if
    nothing was."""
    counts = [late - early for early, late in zip(before, after, strict=True)]
    wanted, seen, low = share * sum(counts), 0, 0.0
    if wanted == 0:
        return None
    for bound, count in zip(bounds, counts, strict=False):
        if count and seen + count >= wanted:
            return round(low + (bound - low) * (wanted - seen) / count, 6)
        seen, low = seen + count, bound
    return bounds[-1]


def sentence(kind: str, request: int, values: Sequence[int]) -> str:
    """One entry of the scheduler's log in words. Requests go by the engine's own numbers."""
    text, found = SENTENCES["decisions"].get(kind, "{who}: " + kind.replace("_", " ") + "."), ""
    if kind in _CACHED and values[1]:
        found = f", {values[1]:,} of them {_CACHED[kind]} the cache"
    return text.format(*values, who=_name(request), found=found, times=[_duration(value) for value in values])


def _name(request: int) -> str:
    """By the engine's own number; of several front ends, whose it is comes first."""
    front, number = divmod(request, 1 << SERIAL_SHIFT)
    return f"Request {front}.{number}" if front > 0 else f"Request {number}" if front == 0 else "The check at start"


def _duration(microseconds: int) -> str:
    return f"{microseconds / 1e6:.1f} s" if microseconds >= 1e6 else f"{microseconds / 1e3:.1f} ms"


# --- the endpoint


async def data(service: Service, exchange: Exchange) -> None:
    """Everything after the cursors that the page has; what never changes only to a page that has nothing yet."""
    cursors = read_query(exchange.query, Cursors)
    news = await service.observed.shared.dashboard(*structs.astuple(cursors))
    key = None if sees_all(service.config, exchange.key_name) else exchange.key_name
    answer = _answer(service, news, key, first=cursors.sample < 0)
    await exchange.reply(200, encode(answer), headers=((b"cache-control", b"no-store"),))


def seen(decisions: Sequence[Given], key: str | None) -> list[Json]:
    """Of one key's requests and of none; all of them for None."""
    shown = [each for each in decisions if key is None or each["kind"] in ABOUT_ALL or is_own(each["tenant"], key)]
    return [{name: value for name, value in each.items() if name != "tenant"} for each in shown]


def _answer(service: Service, news: Given, key: str | None, *, first: bool) -> Json:
    """``key``: whose requests are told one by one; sums are of all."""
    return {
        "object": "dashboard",
        "version": service.version,
        "created": service.created,
        "state": service.model.state.value,
        "now": round(time.perf_counter(), 3),
        "sample_seconds": SAMPLE_SECONDS,
        "window_seconds": WINDOW * SAMPLE_SECONDS,
        "num_blocks": news["num_blocks"],
        "finished": dict(service.observed.total().finished),
        "totals": news["totals"],
        "samples": {"columns": SAMPLE_COLUMNS, "rows": news["samples"]},
        "steps": {"columns": STEP_COLUMNS, "rows": news["steps"]},
        "scope": "all" if key is None else "own",
        "decisions": seen(news["decisions"], key),
        "engine": _engine(service) if first else None,
    }


def _engine(service: Service) -> Json | None:
    """What was decided at start, and stays."""
    if service.model.found is None:
        return None
    info = service.model.found.info
    plain = ("device", "dtype", "max_sequence_tokens", "max_num_seqs", "max_num_batched_tokens", "memory")
    told = ("name", "improves", "off_means", "source")
    known = [each for each in TECHNIQUES if each.name in info.techniques]
    return {
        "model": info.served_names[0],
        **{name: getattr(info, name) for name in plain},
        "decisions": [{"name": each.name, "value": str(each.value), "reason": each.reason} for each in info.decisions],
        "techniques": [
            {**{name: getattr(each, name) for name in told}, "state": info.techniques[each.name]} for each in known
        ],
    }
