"""What /metrics says, in Prometheus' text format: counts kept by the server, numbers asked of the engine; and where the
counts of all front ends are: in one block of memory that they share. Each writes its own page, all may read every page.

So counters are sums that are true at any moment, whoever is asked; what a front end that died has counted stays, and
the next one at its place counts on. A server with one front end keeps its page to itself.

What lives here: pages, their cells, places of the queue; counting and rendering; metrics.toml has names, helps and
buckets. What may not: measuring (generate.py observes, the engine counts its own), processes. Every series is fixed at
start: labels never hold what a client sends.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import resource
import time
import tomllib
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from headrace.observe.metrics import FINE_BUCKETS, Histogram
from headrace.portability import shared_file
from headrace.request import Given, Json, RequestTimes

_INTS, _FLOATS = 960, 64
CELLS = 1024  # of tenants' places
_PAGE_BYTES = 8 * (_INTS + _FLOATS + CELLS)
_SHARE = 8  # a tenant holds at most so many times as many places as are left free
_NAMED = 5  # cells that have a name
STAMP_SECONDS = 0.5


def _cell(place: int) -> Any:
    """A number of a page that has a name; others are handed out behind these."""
    return property(lambda page: page.ints[place], lambda page, value: page.ints.__setitem__(place, value))


class CounterPage:
    """One front end's numbers: 64-bit integers and floats, zero at first."""

    live: int = _cell(0)  # places of the queue that its requests hold
    connections: int = _cell(1)
    turns: int = _cell(2)  # grows while its event loop turns
    up: int = _cell(3)  # a front end accepts connections here
    served: int = _cell(4)  # a front end here has had the engine, this one or one that it replaced

    def __init__(self, memory: memoryview | None = None) -> None:
        whole = memoryview(bytearray(_PAGE_BYTES)) if memory is None else memory
        self.ints: memoryview[int] = whole[: 8 * _INTS].cast("q")
        self.floats: memoryview[float] = whole[8 * _INTS : 8 * (_INTS + _FLOATS)].cast("d")
        self.held: memoryview[int] = whole[8 * (_INTS + _FLOATS) :].cast("q")  # of ``live``, by tenant
        self._next_int, self._next_float = _NAMED, 0

    def take_ints(self, count: int) -> memoryview[int]:
        """The next cells: whoever takes them in the same order gets the same."""
        begin = self._next_int
        self._next_int += count
        assert self._next_int <= _INTS
        return self.ints[begin : self._next_int]

    def take_float(self) -> memoryview[float]:
        begin = self._next_float
        self._next_float += 1
        assert self._next_float <= _FLOATS
        return self.floats[begin : self._next_float]

    async def stamp(self) -> None:
        """For ever, from the event loop that is to be watched."""
        while True:
            self.turns += 1
            await asyncio.sleep(STAMP_SECONDS)

    def vacate(self) -> None:
        """Whoever wrote here is gone, and holds nothing any more. What it counted stays."""
        self.live = self.connections = 0
        self.held[:] = memoryview(bytes(8 * CELLS)).cast("q")
        self.up = False


class Counters:
    """``pages[number]``, one a front end. ``fd``: what another process opens it by, -1 where it is private."""

    def __init__(self, memory: memoryview, count: int, fd: int = -1) -> None:
        self.fd = fd
        self.pages: Sequence[CounterPage] = [
            CounterPage(memory[number * _PAGE_BYTES : (number + 1) * _PAGE_BYTES]) for number in range(count)
        ]

    @classmethod
    def private(cls) -> Counters:
        return cls(memoryview(bytearray(_PAGE_BYTES)), 1)

    @classmethod
    def create(cls, count: int) -> Counters:
        """To be inherited, by fork or by descriptor."""
        return cls.open(shared_file(count * _PAGE_BYTES), count)

    @classmethod
    def open(cls, fd: int, count: int) -> Counters:
        return cls(memoryview(mmap.mmap(fd, count * _PAGE_BYTES)), count, fd)

    @property
    def live(self) -> int:
        return sum(page.live for page in self.pages)

    def held_by(self, cell: int) -> int:
        return sum(page.held[cell] for page in self.pages)

    def try_hold(self, page: CounterPage, count: int, limit: int, cell: int | None = None) -> bool:
        """Takes ``count`` places for ``page``. They are taken first and counted then: two at once may both be refused,
        never let in.

        ``cell``: of the tenant, where there are several. A tenant may hold _SHARE times as many places as it leaves
        free: alone nearly all, k that want more equal parts, and there is always something left for one that comes (the
        dynamic thresholds of shared switch buffers, Choudhury and Hahne 1998). Whoever has nothing gets a place as long
        as there is one.
        """
        self.give_back(page, -count, cell)
        free = limit - self.live
        if free >= 0 and (cell is None or (held := self.held_by(cell)) == 1 or held <= _SHARE * free):
            return True
        self.give_back(page, count, cell)
        return False

    def give_back(self, page: CounterPage, count: int, cell: int | None = None) -> None:
        page.live -= count
        if cell is not None:
            page.held[cell] -= count


def most_places(limit: int, cell: int | None) -> int:
    """That one tenant can ever hold."""
    return limit if cell is None else max(1, limit * _SHARE // (_SHARE + 1))


class Watch:
    """Tells that an event loop does not turn: ``looks`` at its page in a row saw no change. (Looks, not seconds:
    whoever was stopped together with it has seen nothing.)"""

    def __init__(self, page: CounterPage, looks: int) -> None:
        self._page = page
        self._limit = looks
        self._looks, self._seen = 0, page.turns

    def hung(self) -> bool:
        seen = self._page.turns
        self._looks = self._looks + 1 if seen == self._seen else 0
        self._seen = seen
        return self._looks >= self._limit


FINISH_REASONS = ("stop", "length", "abort", "error", "refused")
SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")  # by level, as vLLM calls them
CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"
PROBES = frozenset(("/health", "/ping", "/ready", "/load", "/metrics", "/v1/dashboard"))
_STATUS_CLASSES = ("2xx", "3xx", "4xx", "5xx")
FINE = "time_to_first_token_fine"  # for the dashboard, and not shown here

Key = TypeVar("Key")
Sample = tuple[str, str, float]  # what its name ends in, labels, value
Value = float | Iterable[Sample]


class Metric(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A line of metrics.toml."""

    kind: Literal["counter", "gauge", "histogram"]
    help: str
    at: str = ""
    label: str = ""
    only: str | None = None
    buckets: str = ""


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """metrics.toml."""

    counters: tuple[str, ...]
    buckets: dict[str, tuple[float, ...]]
    served: dict[str, Metric]
    steps: dict[str, Metric]


TABLE = msgspec.convert(tomllib.loads(Path(__file__).with_name("metrics.toml").read_text(encoding="utf-8")), Table)


class SharedHistogram(Histogram):
    """A histogram whose counts lie on a page."""

    __slots__ = ("_sum",)

    def __init__(self, bounds: Sequence[float], page: CounterPage) -> None:
        # what is on the page stays: another may have counted before
        self.bounds = tuple(bounds)
        self.counts = page.take_ints(len(self.bounds) + 1)  # type: ignore[assignment]
        self._sum = page.take_float()

    @property
    def total(self) -> float:
        return float(self._sum[0])

    @total.setter
    def total(self, value: float) -> None:
        self._sum[0] = value


class Counts(Mapping[Key, int]):
    """Counters by a fixed set of keys, on a page. A key that is given twice has one."""

    def __init__(self, keys: Iterable[Key], page: CounterPage) -> None:
        self._places = {key: place for place, key in enumerate(dict.fromkeys(keys))}
        self._cells = page.take_ints(len(self._places))

    def add(self, key: Key, count: int = 1) -> None:
        self._cells[self._places[key]] += count

    def __getitem__(self, key: Key) -> int:
        return int(self._cells[self._places[key]])

    def __iter__(self) -> Iterator[Key]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


class ServerMetrics:
    """What one front end counts, on its page. ``routes`` are the templates of the route table."""

    def __init__(self, routes: Iterable[str], page: CounterPage | None = None) -> None:
        page = page or CounterPage()
        self._routes = tuple(dict.fromkeys(routes))
        bounds = {name: TABLE.buckets[metric.buckets] for name, metric in TABLE.served.items() if metric.buckets}
        self.histograms = {name: SharedHistogram(each, page) for name, each in {**bounds, FINE: FINE_BUCKETS}.items()}
        self.totals = Counts(TABLE.counters, page)
        self.finished = Counts(FINISH_REASONS, page)
        self._route_seconds = {route: page.take_float() for route in self._routes}
        self.answers = Counts([(route, status) for route in (*self._routes, "-") for status in _STATUS_CLASSES], page)

    def summed(self, pages: Sequence[CounterPage]) -> ServerMetrics:
        """What all front ends have counted so far."""
        total = CounterPage()
        total.ints[:] = array("q", map(sum, zip(*(page.ints for page in pages), strict=True)))
        total.floats[:] = array("d", map(sum, zip(*(page.floats for page in pages), strict=True)))
        return ServerMetrics(self._routes, total)

    def observe(self, name: str, value: float) -> None:
        """``name``: of a histogram."""
        self.histograms[name].observe(value)

    def count_answer(self, route: str, status: int) -> None:
        self.answers.add((route, f"{min(max(status // 100, 2), 5)}xx"))

    def count_seconds(self, route: str, seconds: float) -> None:
        """From a request's arrival to the end of its answer."""
        cell = self._route_seconds.get(route)
        if cell is not None:
            cell[0] += seconds

    def count_phases(self, times: RequestTimes | None, tokens: int) -> None:
        """Of one answer that has come to its end, with so many tokens."""
        if times is None or times.first_scheduled is None:
            return
        self.observe("request_queue_time_seconds", times.first_scheduled - times.arrival)
        if times.first_token is not None and times.finished is not None:
            decode = times.finished - times.first_token
            self.observe("request_prefill_time_seconds", times.first_token - times.first_scheduled)
            self.observe("request_decode_time_seconds", decode)
            self.observe("request_inference_time_seconds", times.finished - times.first_scheduled)
            self.observe("request_time_per_output_token_seconds", decode / (tokens - 1) if tokens > 1 else 0.0)

    def count_lengths(self, prompt: int, cached: int, answers: Sequence[int], max_tokens: int) -> None:
        """Of one prompt whose answers have ended, in one way or another; ``answers``: their tokens."""
        self.observe("request_prompt_tokens", prompt)
        self.observe("request_params_n", len(answers))
        self.observe("request_params_max_tokens", max_tokens)
        self.observe("request_max_num_generation_tokens", max(answers))
        for tokens in answers:
            self.observe("request_generation_tokens", tokens)
        if any(answers):
            self.totals.add("prompt_tokens_cached_total", cached)
            self.totals.add("local_compute", prompt - cached)

    def count_ignored(self, fields: int) -> None:
        self.totals.add("ignored_fields_total", fields)

    def count_end(self, reason: str) -> None:
        self.finished.add(reason if reason in self.finished else "error")

    def show(self, page: Lines, model: str, engine: Given) -> None:
        """``engine`` is AsyncLLM.stats(); empty while it loads. Of replicas, under vLLM's names each has its own number as
        ``engine``, and under ours stands their sum."""
        labels, values = model_label(model), self._values(engine)
        ours, first = {labels: values}, {f'{labels},engine="0"': values}
        apart = {
            f'{labels},engine="{number}"': self._values(each) for number, each in engine.get("replicas", {}).items()
        }
        for name, metric in TABLE.served.items():
            of_engine = metric.at and metric.at.partition(".")[0] not in _OF_FRONT_ENDS
            page.add_metric("vllm:", name, metric, (apart or first) if of_engine else first)
            page.add_metric("headrace_", name, metric, ours)

    def show_answers(self, page: Lines) -> None:
        """Of HTTP; and under the names that vLLM's web framework gives them, where probes are left out."""
        values = [("", f'route="{route}",status="{status}"', count) for (route, status), count in self.answers.items()]
        page.add("headrace_http_responses_total", "counter", "answers by route and status", values)
        by_status, seconds = list[Sample](), list[Sample]()
        for route in self._routes:
            if route not in PROBES:
                label = f'handler="{route}"'
                counts = {status: self.answers[route, status] for status in _STATUS_CLASSES}
                by_status += [("", f'{label},status="{status}"', count) for status, count in counts.items()]
                seconds += [("_sum", label, self._route_seconds[route][0]), ("_count", label, sum(counts.values()))]
        page.add("http_requests_total", "counter", "answers by route and status, without probes", by_status)
        page.add("http_request_duration_seconds", "summary", "arrival to the end of the answer, streams too", seconds)

    def _values(self, engine: Given) -> Json:
        """What the lines of [served] look in."""
        total = engine.get("num_blocks", 0)
        grammars = engine.get("grammars") or {}
        waiting = engine.get("num_waiting", 0)
        held, asleep, handed = engine.get("num_held", 0), engine.get("asleep", 0), engine.get("hand_over")
        coming = handed["waiting"] if handed else 0
        return {
            "counters": {},
            **engine,
            "kv_usage": engine["num_used_blocks"] / total if total else 0.0,
            "grammars": grammars,
            "hand_over": {**handed, "seconds": {"out": handed["given_seconds"], "in": handed["taken_seconds"]}}
            if handed
            else None,
            "waiting": {
                "capacity": waiting - held - coming,
                "deferred": grammars.get("compiling", 0),
                "asleep": held,
                "prefill": coming,
            },
            "sleep_states": {name: int(level == asleep) for level, name in enumerate(SLEEP_STATES)},
            "sources": {
                "local_compute": self.totals["local_compute"],
                "local_cache_hit": self.totals["prompt_tokens_cached_total"],
            },
            "finished": self.finished,
            **self.totals,
            **{name: histogram.as_dict() for name, histogram in self.histograms.items()},
        }


class Lines:
    """A page in Prometheus' format: each metric stands in one place, however many models have samples of it."""

    def __init__(self) -> None:
        self._metrics: dict[str, list[str]] = {}

    def __str__(self) -> str:
        return "".join(chain.from_iterable(self._metrics.values()))

    def add(self, name: str, kind: str, help: str, value: Value, labels: str = "") -> None:
        """``labels``: of every sample, before its own."""
        lines = self._metrics.setdefault(name, [f"# HELP {name} {help}\n# TYPE {name} {kind}\n"])
        for suffix, own, number in [("", "", value)] if isinstance(value, int | float) else value:
            every = f"{{{labels}{',' if labels and own else ''}{own}}}" if labels or own else ""
            lines.append(f"{name}{suffix}{every} {number}\n")

    def add_metric(self, prefix: str, name: str, metric: Metric, values: Mapping[str, Given]) -> None:
        """Its samples, as found in the ``values`` of each set of labels."""
        if metric.only in (None, prefix):
            for labels, given in values.items():
                if (found := _find(metric.at or name, given)) is not None:
                    self.add(prefix + name, metric.kind, metric.help, _samples(metric, found[0]), labels)

    def add_steps(self, summary: Given | None, labels: str = "") -> None:
        """The step record: what ``StepRecorder.summary()`` holds, under constant names."""
        if summary:
            errors = summary["prediction_errors"]
            by_kind = {kind: {which: each[kind] for which, each in errors.items()} for kind in ("signed", "absolute")}
            promise = summary if summary["promise_seconds"] is not None else None
            values = {labels: {**summary, "promise": promise, "errors": by_kind if errors else None}}
            for name, metric in TABLE.steps.items():
                self.add_metric("headrace_", name, metric, values)


_OF_FRONT_ENDS = ("sources", "finished")


def _find(path: str, values: Given) -> tuple[Any] | None:
    """None where what it is part of is missing."""
    *owners, last = path.split(".")
    held: Given | None = values
    for owner in owners:
        held = held.get(owner) if held is not None else None
    return None if held is None else (held.get(last),)


def _samples(metric: Metric, value: Any) -> Value:
    if metric.kind == "histogram":
        return _buckets(value)
    if metric.label:
        by_key = enumerate(value) if isinstance(value, Sequence) else value.items()
        return [("", f'{metric.label}="{key}"', each) for key, each in by_key]
    return sum(value) if isinstance(value, Sequence) else 0 if value is None else value


def _buckets(histogram: Given) -> Iterator[Sample]:
    """Of ``Histogram.as_dict()``."""
    seen = 0
    for bound, count in zip((*histogram["bounds"], "+Inf"), histogram["counts"], strict=True):
        seen += count
        yield "_bucket", f'le="{bound}"', seen
    yield "_sum", "", histogram["sum"]
    yield "_count", "", seen


_STAT, _STATM, _DESCRIPTORS = Path("/proc/self/stat"), Path("/proc/self/statm"), Path("/proc/self/fd")


def add_process(page: Lines) -> None:
    """Of the front end alone; the engine's process is not in it. Without /proc only what every Unix knows."""
    page.add("process_cpu_seconds_total", "counter", "CPU seconds, of user and system", time.process_time())
    page.add("process_max_fds", "gauge", "open files at most", resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    if _STAT.exists():
        virtual, resident = (int(pages) * resource.getpagesize() for pages in _STATM.read_text().split()[:2])
        page.add("process_virtual_memory_bytes", "gauge", "virtual memory", virtual)
        page.add("process_resident_memory_bytes", "gauge", "memory that is held", resident)
        page.add("process_open_fds", "gauge", "open files", len(os.listdir(_DESCRIPTORS)))
        page.add("process_start_time_seconds", "gauge", "its start, in seconds since 1970", _started())


def _started() -> float:
    """The kernel counts from its own start, on a clock that never jumps."""
    ticks = int(_STAT.read_text().rpartition(")")[2].split()[19])
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")


def model_label(name: str) -> str:
    escaped = name.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'model_name="{escaped}"'
