"""What the engine counts: the record of each step beside its prediction, counters and histograms of fixed size.

What lives here: StepTimes, StepRecord, StepRecorder (a StepObserver of the core), Histogram, bucket bounds, plain-text rendering.
What may not: torch, labels chosen by clients, network. Nothing here grows with time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import TYPE_CHECKING, Any, NamedTuple

from headrace.cost.online_fit import OnlineFit
from headrace.cost.speed import MISJUDGED, Line, Steering, StepSpeed, Tail
from headrace.cost.step_error import CALIBRATED_EVERY, FadingError
from headrace.request import StepPlan, StepResult, column_of

if TYPE_CHECKING:  # the web process counts without pricing: it need not load numpy
    from headrace.cost.cost_model import CostModel, StepCost, StepLoad

# Upper bounds in seconds. Time to first token spans a cached prompt to a queue of minutes; gaps between tokens are finer.
TTFT_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0)
FINE_BUCKETS = tuple(0.001 * 1.1**n for n in range(145))  # to about 900 s, for percentiles
ITL_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
E2E_BUCKETS = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 60.0, 120.0, 240.0, 480.0, 960.0)
QUEUE_BUCKETS = TTFT_BUCKETS
LENGTH_BUCKETS = (*(digit * 10.0**zeros for zeros in range(6) for digit in (1, 2, 5)), 1e6)  # tokens
STEP_TOKEN_BUCKETS = (1.0, *(2.0**n for n in range(3, 15)))
HOST_BUCKETS = (0.00005, 0.0001, 0.0002, 0.0003, 0.0005, 0.00075, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05)
STEP_BUCKETS = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
FRACTION_BUCKETS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.25)
ERROR_BUCKETS = (0.25, 0.5, 0.7, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.25, 1.5, 2.0, 4.0)  # measured / predicted

COUNTS = ("steps", "failed_steps", "tokens", "generated_tokens", "promised_steps", "kept_steps", "overfull_steps")
CAUTION = 2.0  # kernels reach half of the limits, as long as nothing is known of them
GAP_PACE = 0.05  # of one step, in the mean time between steps
AMOUNTS = ("bytes", "flops", "floor_seconds", "predicted_seconds", "measured_seconds", "idle_seconds", "host_seconds")


class Histogram:
    """Counts under ascending upper bounds (``le``, inclusive), the last bucket open; sum and count beside them."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    @property
    def count(self) -> int:
        return sum(self.counts)

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> Histogram:
        """Back from ``as_dict``."""
        found = cls(plain["bounds"])
        found.counts, found.total = list(plain["counts"]), plain["sum"]
        return found

    def as_dict(self) -> dict[str, Any]:
        return {"bounds": list(self.bounds), "counts": list(self.counts), "sum": self.total, "count": self.count}


@dataclass(frozen=True, slots=True)
class StepTimes:
    """When the core did what for one step, in seconds on its clock.

    ``host_seconds``: CPU time of the core's thread between the last submission and this one, without what it computed inline for
    the device or spun waiting for it. ``continuous``: there was work all the time since the step before.
    """

    scheduled: float  # scheduling began
    submitted: float  # the plan was handed over
    queued: float  # ... completely
    awaited: float  # collecting began
    collected: float
    settled: float  # its tokens are in the scheduler's books
    host_seconds: float
    continuous: bool
    in_flight: int = 0  # steps submitted and not yet collected, when this one was settled


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step: what it had to do, what was predicted, what was measured. Seconds, bytes, FLOPs.

    ``decodes`` of its rows computed a single token. ``fraction`` = floor / measured, the share of the physical limit; None
    without a device profile or a measured time. The device was at it from ``begin`` to ``end`` (the engine's clock), after
    ``idle_seconds`` with work but without a step.
    """

    step_id: int
    rows: int
    decodes: int
    tokens: int
    sampled: int
    bytes: float
    flops: float
    floor_seconds: float
    predicted_seconds: float
    measured_seconds: float
    host_seconds: float
    fraction: float | None
    failed: bool = False
    overlapped_floor_seconds: float = 0.0
    idle_seconds: float = 0.0
    begin: float = 0.0
    end: float = 0.0

    @property
    def kind(self) -> str:
        return kind_of(self.rows, self.decodes, self.sampled)


def kind_of(rows: int, decodes: int, sampled: int) -> str:
    """"decode": every row computed one token (or the last of its prompt); "prefill": none did; "mixed": some did, or the single token of some
    row was a part of a prompt, after which nothing is sampled."""
    if decodes == rows and sampled >= rows:
        return "decode"
    return "mixed" if decodes else "prefill"


class Energy(NamedTuple):
    """What a device has used, and over how many seconds."""

    joules: float
    seconds: float


class DeviceTimeline:
    """When the device worked, from what is known of each step: its length, and the pause before it where the device tells.

    A step cannot begin before it was submitted nor before the one before it has ended, and ends before it is collected.
    """

    __slots__ = ("_free",)

    def __init__(self) -> None:
        self._free: float | None = None  # when the last step ended

    def place(self, times: StepTimes, measured: float, idle: float | None) -> tuple[float, float, float]:
        """(begin, end, idle seconds before it) of the next step; idle counts only while there was work."""
        free = self._free if self._free is not None else times.submitted
        begin = max(times.submitted, free if idle is None else free + idle)
        begin = max(free, min(begin, times.collected - measured))
        self._free = max(begin, min(begin + measured, times.collected))
        paused = begin - free if idle is None else idle
        return begin, self._free, paused if times.continuous else 0.0


class StepRecorder:
    """Hears of every step, keeps the last ``capacity`` records and running sums. Without a cost model only times are kept."""

    def __init__(
        self,
        cost_model: CostModel | None = None,
        *,
        capacity: int = 1024,
        promise: float | None = None,
        calibrated: Callable[[StepLoad, bool], float] | None = None,
        energy: Callable[[], Energy | None] = lambda: None,
    ) -> None:
        """``promise``: seconds that a step may take while somebody's answer waits for it (--max-step-ms); how often that held is counted.
        ``calibrated``: seconds of a load (and whether it is of single tokens alone) by what was fitted to earlier runs here.
        ``energy``: what the device has used since the engine was loaded, where it counts that; asked when a summary is."""
        self._cost_model = cost_model
        self._calibrated = calibrated
        self._energy = energy
        self._errors = {"learned": FadingError(), "calibrated": FadingError()}
        self.promise = promise
        self._ring: deque[StepRecord] = deque(maxlen=capacity)
        self._timeline = DeviceTimeline()
        self._fits = {kind: OnlineFit() for kind in ("decode", "mixed", "prefill")}
        self._tail, self._gap, self._steering = Tail(), 0.0, Steering()
        self._speed: StepSpeed | None = None  # as it was last told, until another step teaches something
        self._sums = dict.fromkeys((*COUNTS, *AMOUNTS), 0.0)
        self.step_seconds = Histogram(STEP_BUCKETS)
        self.step_tokens = Histogram(STEP_TOKEN_BUCKETS)
        self.host_seconds = Histogram(HOST_BUCKETS)
        self.fraction = Histogram(FRACTION_BUCKETS)
        self.prediction_error = Histogram(ERROR_BUCKETS)

    @property
    def floors(self) -> CostModel | None:
        """What the scheduler prices steps with; None without a device profile."""
        return self._cost_model

    def speed(self) -> StepSpeed:
        """How fast steps have been going. What was never seen is taken to be as slow as the slowest kind that was."""
        if self._speed is None:
            lines = {kind: each.line for kind, each in self._fits.items() if each.ready}
            slowest = Line(max(each.slope for each in lines.values()), max(each.overhead for each in lines.values())) if lines else self._guess()
            decode, mixed, prefill = (lines.get(kind, slowest) for kind in ("decode", "mixed", "prefill"))
            self._speed = StepSpeed(decode, mixed, prefill, self._tail.ratio, self._gap, self._steering.share)
        return self._speed

    def _guess(self) -> Line:
        """Before any step: by the profile, if somebody has fitted that."""
        profile = self._cost_model.profile if self._cost_model is not None else None
        if profile is None or profile.efficiency == 1.0:
            return Line(CAUTION)
        return Line(1.0 / profile.efficiency, profile.step_overhead)

    @property
    def records(self) -> tuple[StepRecord, ...]:
        """Oldest first."""
        return tuple(self._ring)

    def after(self, step_id: int, *, at_most: int) -> list[StepRecord]:
        """The newest records of later steps, oldest first."""
        newest = takewhile(lambda record: record.step_id > step_id, reversed(self._ring))
        return list(islice(newest, at_most))[::-1]

    def on_step(self, plan: StepPlan, result: StepResult | None, times: StepTimes) -> StepRecord:
        """The device's own time is taken where the executor gives one, else the way from submission to collection."""
        measured = result.device_seconds if result is not None and result.device_seconds > 0 else times.collected - times.submitted
        begin, end, idle = self._timeline.place(times, measured, result.idle_seconds if result is not None else None)
        record = self._record(plan, measured, times.host_seconds, (idle, begin, end), failed=result is None)
        self._ring.append(record)
        self._add(record, len(column_of(result.tokens)) if result is not None else 0)
        return record

    def predict(self, plan: StepPlan) -> float:
        """Seconds this step should take, as steps of its kind have taken; 0.0 without a cost model."""
        if self._cost_model is None:
            return 0.0
        return self._predicted(kind_of(len(plan.rows), plan.counts.count(1), len(plan.sample_work)), self._cost_model.estimate(plan))

    def _predicted(self, kind: str, cost: StepCost) -> float:
        """By the profile alone until some steps of this kind have been seen."""
        fitted = self._fits[kind]
        return fitted.predict(cost.floor_seconds) if fitted.ready else cost.seconds

    def _record(self, plan: StepPlan, measured: float, host_seconds: float, placed: tuple[float, float, float], *, failed: bool) -> StepRecord:
        rows, decodes, sampled = len(plan.rows), plan.counts.count(1), len(plan.sample_work)
        if self._cost_model is None:
            tokens = plan.num_tokens
            return StepRecord(plan.step_id, rows, decodes, tokens, sampled, 0.0, 0.0, 0.0, 0.0, measured, host_seconds, None, failed, 0.0, *placed)
        load = self._cost_model.load_of(plan)
        cost = self._cost_model.estimate_load(load)
        fraction = cost.floor_seconds / measured if measured > 0 and not failed else None
        kind = kind_of(rows, decodes, sampled)
        predicted = self._predicted(kind, cost)  # before this step teaches anything: its error is that of a true prediction
        if not failed:
            self._learn(kind, cost.floor_seconds, predicted, measured, placed[0])
            self._errors["learned"].observe(predicted, measured)
            if self._calibrated is not None and plan.step_id % CALIBRATED_EVERY == 0:
                self._errors["calibrated"].observe(self._calibrated(load, decodes == rows), measured)
        return StepRecord(
            plan.step_id, rows, decodes, load.tokens, sampled, cost.bytes, cost.flops,
            cost.floor_seconds, predicted, measured, host_seconds, fraction, failed, cost.overlapped_floor_seconds, *placed,
        )

    def _learn(self, kind: str, floor: float, predicted: float, measured: float, idle: float) -> None:
        if kind == "mixed" and self._fits[kind].ready and predicted > 0.0:
            self._tail.observe(measured / predicted)
        self._fits[kind].observe(floor, measured)
        self._gap += GAP_PACE * (idle - self._gap)
        self._speed = None

    def _count_promise(self, record: StepRecord, promise: float) -> None:
        """Kept, the time before the step included, or not; and then, whether its single tokens alone were too many."""
        kept = record.measured_seconds + record.idle_seconds <= promise
        self._sums["promised_steps"] += 1
        self._sums["kept_steps"] += kept
        self._sums["overfull_steps"] += not kept and record.kind == "decode"
        if record.kind == "decode" or self._fits["mixed"].ready:  # until then the price of a prompt is a guess, which steps will correct
            misjudged = record.measured_seconds > MISJUDGED * record.predicted_seconds
            self._steering.observe(record.tokens - min(record.decodes, record.sampled), kept=kept, misjudged=misjudged)
            self._speed = None

    def _add(self, record: StepRecord, generated: int) -> None:
        sums = self._sums
        sums["steps"] += 1
        sums["failed_steps"] += record.failed
        sums["tokens"] += record.tokens
        sums["generated_tokens"] += generated
        sums["bytes"] += record.bytes
        sums["flops"] += record.flops
        sums["floor_seconds"] += record.floor_seconds
        sums["predicted_seconds"] += record.predicted_seconds
        sums["measured_seconds"] += record.measured_seconds
        sums["idle_seconds"] += record.idle_seconds
        sums["host_seconds"] += record.host_seconds
        if self.promise is not None and record.decodes:
            self._count_promise(record, self.promise)
        self.host_seconds.observe(record.host_seconds)
        self.step_seconds.observe(record.measured_seconds)
        self.step_tokens.observe(record.tokens)
        if record.fraction is not None:
            self.fraction.observe(record.fraction)
            self.prediction_error.observe(record.measured_seconds / record.predicted_seconds if record.predicted_seconds else 0.0)

    def summary(self) -> dict[str, Any]:
        """A plain dict of constant size: sums, histograms and the last record; it travels to the front end as it is."""
        sums = self._sums
        measured = sums["measured_seconds"]
        return {
            **{name: int(sums[name]) for name in COUNTS},
            **{name: sums[name] for name in AMOUNTS},
            "roofline_fraction": sums["floor_seconds"] / measured if measured > 0 else 0.0,
            "energy": energy._asdict() if (energy := self._energy()) is not None else None,
            "promise_seconds": self.promise,
            "promise_tail": self._tail.ratio,
            "prediction_errors": {name: each.as_dict() for name, each in self._errors.items() if each.count},
            "idle_share": sums["idle_seconds"] / (sums["idle_seconds"] + measured) if measured > 0 else 0.0,
            "histograms": {
                "step_seconds": self.step_seconds.as_dict(),
                "step_tokens": self.step_tokens.as_dict(),
                "step_host_seconds": self.host_seconds.as_dict(),
                "step_roofline_fraction": self.fraction.as_dict(),
                "step_measured_over_predicted": self.prediction_error.as_dict(),
            },
            "last_step": {name: getattr(self._ring[-1], name) for name in StepRecord.__slots__} if self._ring else None,
        }


def render_histogram(name: str, histogram: Mapping[str, Any], help: str) -> list[str]:
    """Prometheus text lines of one histogram given as ``Histogram.as_dict()``."""
    lines = [f"# HELP {name} {help}", f"# TYPE {name} histogram"]
    seen = 0
    for bound, count in zip((*histogram["bounds"], "+Inf"), histogram["counts"], strict=True):
        seen += count
        lines.append(f'{name}_bucket{{le="{bound}"}} {seen}')
    return [*lines, f"{name}_sum {histogram['sum']}", f"{name}_count {histogram['count']}"]


def render_value(name: str, value: float, kind: str, help: str) -> list[str]:
    """Prometheus text lines of one counter or gauge."""
    return [f"# HELP {name} {help}", f"# TYPE {name} {kind}", f"{name} {value}"]


def render_steps(summary: Mapping[str, Any]) -> str:
    """The step record as Prometheus text: what ``StepRecorder.summary()`` holds, under constant names."""
    counters = (
        ("steps_total", "steps", "steps collected"),
        ("failed_steps_total", "failed_steps", "steps that failed as a whole"),
        ("step_tokens_total", "tokens", "tokens computed"),
        ("step_bytes_total", "bytes", "bytes the steps had to move"),
        ("step_flops_total", "flops", "floating-point operations the steps had to do"),
        ("step_floor_seconds_total", "floor_seconds", "seconds the device's limits allow at best"),
        ("step_predicted_seconds_total", "predicted_seconds", "seconds predicted"),
        ("step_measured_seconds_total", "measured_seconds", "seconds measured"),
        ("step_idle_seconds_total", "idle_seconds", "seconds the device waited for its next step although there was work"),
    )
    lines: list[str] = []
    for name, key, help in counters:
        lines += render_value(f"headrace_{name}", summary[key], "counter", help)
    lines += _render_energy(summary["energy"])
    lines += _render_promise(summary)
    lines += _render_errors(summary["prediction_errors"])
    lines += _render_last(summary["last_step"])
    lines += render_value("headrace_device_idle_share", summary["idle_share"], "gauge", "idle / (idle + measured) seconds since the start")
    histograms = summary["histograms"]
    lines += render_histogram("headrace_step_seconds", histograms["step_seconds"], "seconds a step took")
    lines += render_histogram("headrace_step_host_seconds", histograms["step_host_seconds"], "CPU seconds of the engine's thread a step")
    lines += render_histogram("headrace_step_fraction", histograms["step_roofline_fraction"], "floor / measured, by step")
    lines += render_histogram("headrace_step_measured_over_predicted", histograms["step_measured_over_predicted"], "error of the prediction, by step")
    return "\n".join(lines) + "\n"


def _render_errors(errors: Mapping[str, Mapping[str, float]]) -> Iterable[str]:
    """By which prediction: what this engine learns as it goes, or what was calibrated here before."""
    names = (
        ("step_prediction_error", "signed", "predicted / measured - 1 of the last steps, fading: above 0, steps are quicker than predicted"),
        ("step_prediction_absolute_error", "absolute", "the same without its sign"),
    )
    for name, key, help in names if errors else ():
        yield from (f"# HELP headrace_{name} {help}", f"# TYPE headrace_{name} gauge")
        yield from (f'headrace_{name}{{prediction="{which}"}} {each[key]}' for which, each in errors.items())


def _render_energy(energy: Mapping[str, float] | None) -> Iterable[str]:
    if energy is None:
        return []
    return [
        *render_value("headrace_energy_joules_total", energy["joules"], "counter", "joules the device has used, by its own counter, whoever used it"),
        *render_value("headrace_energy_seconds_total", energy["seconds"], "counter", "seconds over which they were counted"),
    ]


def _render_promise(summary: Mapping[str, Any]) -> Iterable[str]:
    if summary["promise_seconds"] is None:
        return []
    return [
        *render_value("headrace_step_promise_seconds", summary["promise_seconds"], "gauge", "seconds a step may take while answers wait for it"),
        *render_value("headrace_step_promises_total", summary["promised_steps"], "counter", "steps that somebody's answer waited for"),
        *render_value("headrace_step_promises_kept_total", summary["kept_steps"], "counter", "... that took no longer than promised"),
        *render_value("headrace_step_overfull_total", summary["overfull_steps"], "counter", "... that took longer by their single tokens alone"),
        *render_value("headrace_step_promise_tail", summary["promise_tail"], "gauge", "measured / predicted that 99 of 100 mixed steps stay below"),
    ]


def _render_last(last: Mapping[str, Any] | None) -> Iterable[str]:
    if last is None:
        return []
    fraction = last["fraction"] if last["fraction"] is not None else 0.0
    return [
        *render_value("headrace_step_roofline_fraction", fraction, "gauge", "last step's floor / measured"),
        *render_value("headrace_step_predicted_seconds", last["predicted_seconds"], "gauge", "last step's predicted seconds"),
        *render_value("headrace_step_measured_seconds", last["measured_seconds"], "gauge", "last step's measured seconds"),
    ]
