"""What /metrics says: counts kept by the server, numbers asked of the engine, in Prometheus' text format.

What lives here: names, labels, rendering. What may not: measuring (generate.py observes, the engine counts its own).
Every series is fixed at start: labels never hold what a client sends.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from headrace.metrics import (
    E2E_BUCKETS,
    FINE_BUCKETS,
    ITL_BUCKETS,
    LENGTH_BUCKETS,
    QUEUE_BUCKETS,
    TTFT_BUCKETS,
    Histogram,
    render_steps,
)
from headrace.request import RequestTimes
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
_SOURCES = ("local_compute", "local_cache_hit")
ANSWER_BUCKETS = (1.0, 2.0, 5.0, 10.0, 20.0)
PROBES = frozenset(("/health", "/ping", "/ready", "/load", "/metrics", "/v1/dashboard"))
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

    def __init__(self, routes: Iterable[str], page: Page | None = None) -> None:
        page = page or Page()
        self._routes = tuple(dict.fromkeys(routes))
        self.time_to_first_token = SharedHistogram(TTFT_BUCKETS, page)
        self.first_tokens = SharedHistogram(FINE_BUCKETS, page)  # the same, for the dashboard
        self.inter_token = SharedHistogram(ITL_BUCKETS, page)
        self.end_to_end = SharedHistogram(E2E_BUCKETS, page)
        self.queue_time = SharedHistogram(QUEUE_BUCKETS, page)
        self.prefill_time = SharedHistogram(E2E_BUCKETS, page)
        self.decode_time = SharedHistogram(E2E_BUCKETS, page)
        self.inference_time = SharedHistogram(E2E_BUCKETS, page)
        self.time_per_token = SharedHistogram(ITL_BUCKETS, page)
        self.prompt_length = SharedHistogram(LENGTH_BUCKETS, page)
        self.answer_length = SharedHistogram(LENGTH_BUCKETS, page)
        self.longest_answer = SharedHistogram(LENGTH_BUCKETS, page)
        self.max_tokens = SharedHistogram(LENGTH_BUCKETS, page)
        self.num_answers = SharedHistogram(ANSWER_BUCKETS, page)
        self._sources = Counts(_SOURCES, page)
        self._tokens = page.take_ints(2)
        self.finished = Counts(FINISH_REASONS, page)
        self._ignored = page.take_ints(1)
        self._route_seconds = {route: page.take_float() for route in self._routes}
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

    def count_seconds(self, route: str, seconds: float) -> None:
        """From a request's arrival to the end of its answer."""
        cell = self._route_seconds.get(route)
        if cell is not None:
            cell[0] += seconds

    def count_phases(self, times: RequestTimes | None, tokens: int) -> None:
        """Of one answer that has come to its end, with so many tokens."""
        if times is None or times.first_scheduled is None:
            return
        self.queue_time.observe(times.first_scheduled - times.arrival)
        if times.first_token is not None and times.finished is not None:
            decode = times.finished - times.first_token
            self.prefill_time.observe(times.first_token - times.first_scheduled)
            self.decode_time.observe(decode)
            self.inference_time.observe(times.finished - times.first_scheduled)
            self.time_per_token.observe(decode / (tokens - 1) if tokens > 1 else 0.0)

    def count_lengths(self, prompt: int, cached: int, answers: Sequence[int], max_tokens: int) -> None:
        """Of one prompt whose answers have ended, in one way or another; ``answers``: their tokens."""
        self.prompt_length.observe(prompt)
        self.num_answers.observe(len(answers))
        self.max_tokens.observe(max_tokens)
        self.longest_answer.observe(max(answers))
        for tokens in answers:
            self.answer_length.observe(tokens)
        if any(answers):
            self._sources.add("local_cache_hit", cached)
            self._sources.add("local_compute", prompt - cached)

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
        page.histogram("request_prefill_time_seconds", "first step to first token", self.prefill_time)
        page.histogram("request_decode_time_seconds", "first token to last", self.decode_time)
        page.histogram("request_inference_time_seconds", "first step to last token", self.inference_time)
        per_token = "mean of one choice's tokens after the first"
        page.histogram("request_time_per_output_token_seconds", per_token, self.time_per_token)
        page.histogram("request_prompt_tokens", "tokens of a prompt", self.prompt_length)
        page.histogram("request_generation_tokens", "tokens of a choice", self.answer_length)
        page.histogram("request_max_num_generation_tokens", "tokens of a prompt's longest choice", self.longest_answer)
        page.histogram("request_params_max_tokens", "most tokens that a request allows", self.max_tokens)
        page.histogram("request_params_n", "choices that a request asks for", self.num_answers)
        sources, by_source = self._sources, "prompt tokens computed, and found cached"
        page.labelled("prompt_tokens_by_source_total", "counter", by_source, "source", sources)
        page.scalar("prompt_tokens_cached_total", "counter", "prompt tokens found cached", sources["local_cache_hit"])
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
        grammars = engine.get("grammars") or {}
        waiting = {"capacity": engine.get("num_waiting", 0), "deferred": grammars.get("compiling", 0)}
        reasons = "for room, and for their grammar to be compiled"
        page.labelled("num_requests_waiting_by_reason", "gauge", reasons, "reason", waiting)
        if "steps" in engine:
            tokens = engine["steps"]["histograms"]["step_tokens"]
            page.histogram("iteration_tokens_total", "tokens of a step", Histogram.of(tokens), prefixes=("vllm:",))
        page.scalar("kv_cache_usage_perc", "gauge", "share of the KV blocks in use, 0 to 1", usage)
        for name, key, help in (
            ("prefix_cache_queries", "prefix_queries", "prompt tokens looked up in the prefix cache"),
            ("prefix_cache_hits", "prefix_hits", "prompt tokens found in the prefix cache"),
        ):
            page.scalar(name, "counter", help, counters.get(key, 0))
            # vLLM's own documents name them without the suffix that its Prometheus client then adds: dashboards ask for this.
            page.scalar(f"{name}_total", "counter", help, counters.get(key, 0), prefixes=("vllm:",))
        page.scalar("num_preemptions_total", "counter", "sequences whose blocks were taken back", counters.get("preemptions", 0))
        for name, key, kind, help in _GRAMMARS:
            page.scalar(f"structured_output_{name}", kind, help, grammars.get(key, 0), prefixes=("headrace_",))

    def _answer_lines(self) -> Iterator[str]:
        yield "# HELP headrace_http_responses_total answers by route and status"
        yield "# TYPE headrace_http_responses_total counter"
        for (route, status), count in self.answers.items():
            yield f'headrace_http_responses_total{{route="{route}",status="{status}"}} {count}'
        # The names that vLLM's web framework gives them, where probes are left out.
        shown = [route for route in self._routes if route not in PROBES]
        yield "# HELP http_requests_total answers by route and status, without probes"
        yield "# TYPE http_requests_total counter"
        counts = {route: {status: self.answers[route, status] for status in _STATUS_CLASSES} for route in shown}
        for route, by_status in counts.items():
            yield from (f'http_requests_total{{handler="{route}",status="{each}"}} {by_status[each]}' for each in by_status)
        yield "# HELP http_request_duration_seconds arrival to the end of the answer, streams too"
        yield "# TYPE http_request_duration_seconds summary"
        for route in shown:
            yield f'http_request_duration_seconds_sum{{handler="{route}"}} {self._route_seconds[route][0]}'
            yield f'http_request_duration_seconds_count{{handler="{route}"}} {sum(counts[route].values())}'


class _Page:
    """Lines of text; every metric under both names, each with the model's name."""

    prefixes = ("vllm:", "headrace_")

    def __init__(self, model: str) -> None:
        escaped = model.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        model = f'model_name="{escaped}"'
        # vLLM numbers its engines, of which there is one here.
        self._labels = {"vllm:": f'{model},engine="0"', "headrace_": model}
        self.lines: list[str] = []

    def scalar(self, name: str, kind: str, help: str, value: float, prefixes: tuple[str, ...] = prefixes) -> None:
        for prefix in prefixes:
            self._head(prefix + name, kind, help)
            self.lines.append(f"{prefix}{name}{{{self._labels[prefix]}}} {value}")

    def labelled(self, name: str, kind: str, help: str, label: str, values: Mapping[str, float]) -> None:
        for prefix in self.prefixes:
            self._head(prefix + name, kind, help)
            labels = self._labels[prefix]
            self.lines.extend(f'{prefix}{name}{{{labels},{label}="{key}"}} {value}' for key, value in values.items())

    def histogram(self, name: str, help: str, histogram: Histogram, prefixes: tuple[str, ...] = prefixes) -> None:
        for prefix in prefixes:
            self._head(prefix + name, "histogram", help)
            seen, labels = 0, self._labels[prefix]
            for bound, count in zip((*histogram.bounds, "+Inf"), histogram.counts, strict=True):
                seen += count
                self.lines.append(f'{prefix}{name}_bucket{{{labels},le="{bound}"}} {seen}')
            self.lines.append(f"{prefix}{name}_sum{{{labels}}} {histogram.total}")
            self.lines.append(f"{prefix}{name}_count{{{labels}}} {seen}")

    def _head(self, name: str, kind: str, help: str) -> None:
        self.lines += [f"# HELP {name} {help}", f"# TYPE {name} {kind}"]
