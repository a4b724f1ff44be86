"""What /metrics says: counts kept by the server, numbers asked of the engine, in Prometheus' text format.

What lives here: names, labels, rendering. What may not: measuring (generate.py observes, the engine counts its own).
Every series is fixed at start: labels never hold what a client sends.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from headrace.metrics import E2E_BUCKETS, FINE_BUCKETS, ITL_BUCKETS, QUEUE_BUCKETS, TTFT_BUCKETS, Histogram, render_steps
from headrace.server.ledger import Page

FINISH_REASONS = ("stop", "length", "abort", "error", "refused")
CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"
_GRAMMARS = (
    ("compiled_total", "compiled", "counter", "grammars compiled"),
    ("compile_seconds_total", "compile_seconds", "counter", "compiling grammars, beside the steps"),
    ("masks_total", "masks", "counter", "tokens that waited for a mask"),
    ("mask_seconds_total", "mask_seconds", "counter", "making masks, while the device computes"),
    ("cache_bytes", "cached_bytes", "gauge", "compiled grammars that are kept, about"),
)
_IGNORED = "fields left out of requests, being unknown to their route (--unknown-fields ignore)"
_STATUS_CLASSES = ("2xx", "3xx", "4xx", "5xx")

Key = TypeVar("Key")


class SharedHistogram(Histogram):
    """A histogram whose counts lie on a page."""

    __slots__ = ("_sum",)

    def __init__(self, bounds: Sequence[float], page: Page) -> None:  # what is on the page stays: another may have counted before
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

    def __init__(self, keys: Iterable[Key], page: Page) -> None:
        self._places = {key: place for place, key in enumerate(dict.fromkeys(keys))}
        self._cells = page.take_ints(len(self._places))

    def add(self, key: Key) -> None:
        self._cells[self._places[key]] += 1

    def __getitem__(self, key: Key) -> int:
        return int(self._cells[self._places[key]])

    def __iter__(self) -> Iterator[Key]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


class ServerMetrics:
    """What one front end counts, on its page. ``routes`` are the templates of the route table."""

    def __init__(self, routes: Iterable[str], page: Page | None = None) -> None:
        page = page or Page()
        self._routes = tuple(routes)
        self.time_to_first_token = SharedHistogram(TTFT_BUCKETS, page)
        self.first_tokens = SharedHistogram(FINE_BUCKETS, page)  # the same, for the dashboard
        self.inter_token = SharedHistogram(ITL_BUCKETS, page)
        self.end_to_end = SharedHistogram(E2E_BUCKETS, page)
        self.queue_time = SharedHistogram(QUEUE_BUCKETS, page)
        self._tokens = page.take_ints(2)
        self.finished = Counts(FINISH_REASONS, page)
        self._ignored = page.take_ints(1)
        self.answers = Counts([(route, status) for route in (*self._routes, "-") for status in _STATUS_CLASSES], page)

    def summed(self, pages: Sequence[Page]) -> ServerMetrics:
        """What all front ends have counted so far."""
        total = Page()
        total.ints[:] = array("q", map(sum, zip(*(page.ints for page in pages), strict=True)))
        total.floats[:] = array("d", map(sum, zip(*(page.floats for page in pages), strict=True)))
        return ServerMetrics(self._routes, total)

    @property
    def prompt_tokens(self) -> int:
        return int(self._tokens[0])

    @prompt_tokens.setter
    def prompt_tokens(self, value: int) -> None:
        self._tokens[0] = value

    @property
    def generation_tokens(self) -> int:
        return int(self._tokens[1])

    @generation_tokens.setter
    def generation_tokens(self, value: int) -> None:
        self._tokens[1] = value

    def count_answer(self, route: str, status: int) -> None:
        self.answers.add((route, f"{min(max(status // 100, 2), 5)}xx"))

    def count_ignored(self, fields: int) -> None:
        self._ignored[0] += fields

    def count_end(self, reason: str) -> None:
        self.finished.add(reason if reason in self.finished else "error")

    def render(self, model: str, engine: Mapping[str, Any]) -> bytes:
        """``engine`` is AsyncLLM.stats(); empty while it loads."""
        page = _Page(model)
        self._add_engine(page, engine)
        page.scalar("prompt_tokens_total", "counter", "prompt tokens of accepted requests", self.prompt_tokens)
        page.scalar("generation_tokens_total", "counter", "tokens generated", self.generation_tokens)
        page.labelled("request_success_total", "counter", "choices by how they ended", "finished_reason", self.finished)
        page.histogram("time_to_first_token_seconds", "arrival to first token", self.time_to_first_token)
        page.histogram("inter_token_latency_seconds", "time between two tokens of one choice", self.inter_token)
        page.histogram("e2e_request_latency_seconds", "arrival to last token", self.end_to_end)
        page.histogram("request_queue_time_seconds", "arrival to first step", self.queue_time)
        page.lines.extend(self._answer_lines())
        page.scalar("ignored_fields_total", "counter", _IGNORED, self._ignored[0], prefixes=("headrace_",))
        text = "\n".join(page.lines) + "\n"
        steps = engine.get("steps")
        return (text + (render_steps(steps) if steps else "")).encode()

    def _add_engine(self, page: _Page, engine: Mapping[str, Any]) -> None:
        total, counters = engine.get("num_blocks", 0), engine.get("counters", {})
        usage = engine["num_used_blocks"] / total if total else 0.0
        page.scalar("num_requests_running", "gauge", "sequences in the running batch", engine.get("num_running", 0))
        page.scalar("num_requests_waiting", "gauge", "sequences waiting for the batch", engine.get("num_waiting", 0))
        page.scalar("kv_cache_usage_perc", "gauge", "share of the KV blocks in use, 0 to 1", usage)
        for name, key, help in (
            ("prefix_cache_queries", "prefix_queries", "prompt tokens looked up in the prefix cache"),
            ("prefix_cache_hits", "prefix_hits", "prompt tokens found in the prefix cache"),
        ):
            page.scalar(name, "counter", help, counters.get(key, 0))
            # vLLM's own documents name them without the suffix that its Prometheus client then adds: dashboards ask for this.
            page.scalar(f"{name}_total", "counter", help, counters.get(key, 0), prefixes=("vllm:",))
        page.scalar("num_preemptions_total", "counter", "sequences whose blocks were taken back", counters.get("preemptions", 0))
        grammars = engine.get("grammars") or {}
        for name, key, kind, help in _GRAMMARS:
            page.scalar(f"structured_output_{name}", kind, help, grammars.get(key, 0), prefixes=("headrace_",))

    def _answer_lines(self) -> Iterator[str]:
        yield "# HELP headrace_http_responses_total answers by route and status"
        yield "# TYPE headrace_http_responses_total counter"
        for (route, status), count in self.answers.items():
            yield f'headrace_http_responses_total{{route="{route}",status="{status}"}} {count}'


class _Page:
    """Lines of text; every metric under both names, each with the model's name."""

    prefixes = ("vllm:", "headrace_")

    def __init__(self, model: str) -> None:
        escaped = model.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        self._model = f'model_name="{escaped}"'
        self.lines: list[str] = []

    def scalar(self, name: str, kind: str, help: str, value: float, prefixes: tuple[str, ...] = prefixes) -> None:
        for prefix in prefixes:
            self._head(prefix + name, kind, help)
            self.lines.append(f"{prefix}{name}{{{self._model}}} {value}")

    def labelled(self, name: str, kind: str, help: str, label: str, values: Mapping[str, float]) -> None:
        for prefix in self.prefixes:
            self._head(prefix + name, kind, help)
            self.lines.extend(f'{prefix}{name}{{{self._model},{label}="{key}"}} {value}' for key, value in values.items())

    def histogram(self, name: str, help: str, histogram: Histogram) -> None:
        for prefix in self.prefixes:
            self._head(prefix + name, "histogram", help)
            seen = 0
            for bound, count in zip((*histogram.bounds, "+Inf"), histogram.counts, strict=True):
                seen += count
                self.lines.append(f'{prefix}{name}_bucket{{{self._model},le="{bound}"}} {seen}')
            self.lines.append(f"{prefix}{name}_sum{{{self._model}}} {histogram.total}")
            self.lines.append(f"{prefix}{name}_count{{{self._model}}} {histogram.count}")

    def _head(self, name: str, kind: str, help: str) -> None:
        self.lines += [f"# HELP {name} {help}", f"# TYPE {name} {kind}"]
