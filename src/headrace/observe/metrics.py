"""What the engine counts: the record of each step with its prediction, counters and histograms of fixed size.

What lives here: StepTimes, StepRecord, StepRecorder (a StepObserver of the core), Histogram, bucket bounds;
StepAccounts, which steps computed a request that asked for an account (``explain``). What may not: torch, rendering
(server/exposition.py), network. Nothing here grows with time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, takewhile
from typing import TYPE_CHECKING, Any, NamedTuple

from headrace.cost.cost_model import (
    CALIBRATED_EVERY,
    MISJUDGED,
    FadingError,
    Line,
    OnlineFit,
    Steering,
    StepCost,
    StepSpeed,
    Tail,
)
from headrace.request import Request, SequenceOutput, StepAccount, StepPlan, StepResult, column_of

if TYPE_CHECKING:
    from headrace.cost.cost_model import (
        CostModel,
        StepLoad,
    )  # the web process counts without pricing: it need not load numpy
    from headrace.scheduler.roster import Sequence as SequenceRecord

# Upper bounds, in seconds where nothing else is said.
FINE_BUCKETS = tuple(0.001 * 1.1**n for n in range(145))  # to about 900 s, for percentiles
STEP_TOKEN_BUCKETS = (1.0, *(2.0**n for n in range(3, 15)))
HOST_BUCKETS = (0.00005, 0.0001, 0.0002, 0.0003, 0.0005, 0.00075, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05)
STEP_BUCKETS = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
FRACTION_BUCKETS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.25)
ERROR_BUCKETS = (0.25, 0.5, 0.7, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.25, 1.5, 2.0, 4.0)  # measured / predicted

COUNTS = ("steps", "failed_steps", "tokens", "generated_tokens", "promised_steps", "kept_steps", "overfull_steps")
CAUTION = 2.0  # kernels reach half of the limits, as long as nothing is known of them
GAP_PACE = 0.05  # of one step, in the mean time between steps
AMOUNTS = ("bytes", "flops", "floor_seconds", "predicted_seconds", "measured_seconds", "idle_seconds", "host_seconds")

_UNKNOWN = StepCost(0.0, 0.0, 0.0, 0.0, 0.0)


class Histogram:
    """Counts under ascending upper bounds (``le``, inclusive), with the last bucket open, plus sum and count."""

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

    def as_dict(self) -> dict[str, Any]:
        return {"bounds": list(self.bounds), "counts": list(self.counts), "sum": self.total, "count": self.count}


@dataclass(frozen=True, slots=True)
class StepTimes:
    """When the core did what for one step, in seconds on its clock.

    ``host_seconds``: CPU time of the core's thread between the previous submission and this one, without what it
    computed inline for the device or spun waiting for it. ``continuous``: there was work all the time since the
    previous step.
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
    """One step: its work, its prediction, its measurement. Seconds, bytes, FLOPs.

    ``decodes`` of its rows computed a single token. ``fraction`` = floor / measured, the share of the physical limit;
    None without a device profile or a measured time. The device computed it from ``begin`` to ``end`` (on the engine's
    clock), after ``idle_seconds`` in which there was work but no step.
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
    """ "decode": every row computed one token (or the last of its prompt); "prefill": none did; "mixed": some did, or
    the single token of some row was a part of a prompt, after which nothing is sampled."""
    if decodes == rows and sampled >= rows:
        return "decode"
    return "mixed" if decodes else "prefill"


class Energy(NamedTuple):
    """Energy that a device has used, and over how many seconds."""

    joules: float
    seconds: float


class DeviceTimeline:
    """When the device was busy, from what is known about each step: its length, and the pause before it if the device
    reports that.

    A step begins neither before it was submitted nor before the previous one has ended, and ends before it is
    collected.
    """

    __slots__ = ("_free",)

    def __init__(self) -> None:
        self._free: float | None = None  # when the last step ended

    def place(self, times: StepTimes, measured: float, idle: float | None) -> tuple[float, float, float]:
        """(begin, end, idle seconds before it) of the next step; only time with work counts as idle."""
        free = self._free if self._free is not None else times.submitted
        begin = max(times.submitted, free if idle is None else free + idle)
        begin = max(free, min(begin, times.collected - measured))
        self._free = max(begin, min(begin + measured, times.collected))
        paused = begin - free if idle is None else idle
        return begin, self._free, paused if times.continuous else 0.0


class StepRecorder:
    """Observes every step, and keeps the last ``capacity`` records and running sums. Without a cost model, only times
    are kept."""

    def __init__(
        self,
        cost_model: CostModel | None = None,
        *,
        capacity: int = 1024,
        promise: float | None = None,
        calibrated: Callable[[StepLoad, bool], float] | None = None,
        energy: Callable[[], Energy | None] = lambda: None,
    ) -> None:
        """``promise``: seconds that a step with decode tokens may take (--max-step-ms); how often that held is counted.
        ``calibrated``: seconds of a load (and whether it has only decode tokens) by what was fitted to earlier runs on
        this device. ``energy``: what the device has used since the engine was loaded, if it counts that; called for
        each summary."""
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
        """What the scheduler estimates steps with; None without a device profile."""
        return self._cost_model

    def speed(self) -> StepSpeed:
        """How fast recent steps were. A kind that never occurred is assumed to be as slow as the slowest one that
        did."""
        if self._speed is None:
            lines = {kind: each.line for kind, each in self._fits.items() if each.ready}
            slowest = (
                Line(max(each.slope for each in lines.values()), max(each.overhead for each in lines.values()))
                if lines
                else self._guess()
            )
            decode, mixed, prefill = (lines.get(kind, slowest) for kind in ("decode", "mixed", "prefill"))
            self._speed = StepSpeed(decode, mixed, prefill, self._tail.ratio, self._gap, self._steering.share)
        return self._speed

    def _guess(self) -> Line:
        """Before any step: from the profile, if it was fitted."""
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
        """Uses the device's own time if the executor reports one, otherwise the time from submission to collection."""
        measured = (
            result.device_seconds
            if result is not None and result.device_seconds > 0
            else times.collected - times.submitted
        )
        begin, end, idle = self._timeline.place(times, measured, result.idle_seconds if result is not None else None)
        record = self._record(plan, result, measured, times.host_seconds, (idle, begin, end))
        self._ring.append(record)
        self._add(record, len(column_of(result.tokens)) if result is not None else 0)
        return record

    def predict(self, plan: StepPlan) -> float:
        """Seconds this step should take, judging by earlier steps of its kind; 0.0 without a cost model."""
        if self._cost_model is None:
            return 0.0
        return self._predicted(
            kind_of(len(plan.rows), plan.counts.count(1), len(plan.sample_work)), self._cost_model.estimate(plan)
        )

    def _predicted(self, kind: str, cost: StepCost) -> float:
        """From the profile alone until there were enough steps of this kind."""
        fitted = self._fits[kind]
        return fitted.predict(cost.floor_seconds) if fitted.ready else cost.seconds

    def _record(
        self,
        plan: StepPlan,
        result: StepResult | None,
        measured: float,
        host_seconds: float,
        placed: tuple[float, float, float],
    ) -> StepRecord:
        rows, decodes, sampled = len(plan.rows), plan.counts.count(1), len(plan.sample_work)
        kind, cost, predicted, fraction = kind_of(rows, decodes, sampled), _UNKNOWN, 0.0, None
        if self._cost_model is not None:
            load = self._cost_model.load_of(plan)
            cost = self._cost_model.estimate_load(load)
            fraction = cost.floor_seconds / measured if measured > 0 and result is not None else None
            # before this step teaches anything: its error is that of a true prediction
            predicted = self._predicted(kind, cost)
            if result is not None:
                self._learn(kind, cost.floor_seconds, predicted, measured, placed[0])
                self._errors["learned"].observe(predicted, measured)
                if self._calibrated is not None and plan.step_id % CALIBRATED_EVERY == 0:
                    computed = replace(load, graph_tokens=result.graph_tokens)
                    self._errors["calibrated"].observe(self._calibrated(computed, decodes == rows), measured)
        counts = plan.step_id, rows, decodes, plan.num_tokens, sampled
        seconds = cost.bytes, cost.flops, cost.floor_seconds, predicted, measured, host_seconds
        return StepRecord(*counts, *seconds, fraction, result is None, cost.overlapped_floor_seconds, *placed)

    def _learn(self, kind: str, floor: float, predicted: float, measured: float, idle: float) -> None:
        if kind == "mixed" and self._fits[kind].ready and predicted > 0.0:
            self._tail.observe(measured / predicted)
        self._fits[kind].observe(floor, measured)
        self._gap += GAP_PACE * (idle - self._gap)
        self._speed = None

    def _count_promise(self, record: StepRecord, promise: float) -> None:
        """Whether the promise was kept, including the time before the step; if not, whether its decode tokens alone
        were too many."""
        kept = record.measured_seconds + record.idle_seconds <= promise
        self._sums["promised_steps"] += 1
        self._sums["kept_steps"] += kept
        self._sums["overfull_steps"] += not kept and record.kind == "decode"
        # until then the price of a prompt is a guess, which steps will correct
        if record.kind == "decode" or self._fits["mixed"].ready:
            misjudged = record.measured_seconds > MISJUDGED * record.predicted_seconds
            self._steering.observe(record.tokens - min(record.decodes, record.sampled), kept=kept, misjudged=misjudged)
            self._speed = None

    def _add(self, record: StepRecord, generated: int) -> None:
        sums = self._sums
        sums["steps"] += 1
        sums["failed_steps"] += record.failed
        sums["tokens"] += record.tokens
        sums["generated_tokens"] += generated
        for name in AMOUNTS:
            sums[name] += getattr(record, name)
        if self.promise is not None and record.decodes:
            self._count_promise(record, self.promise)
        self.host_seconds.observe(record.host_seconds)
        self.step_seconds.observe(record.measured_seconds)
        self.step_tokens.observe(record.tokens)
        if record.fraction is not None:
            self.fraction.observe(record.fraction)
            self.prediction_error.observe(
                record.measured_seconds / record.predicted_seconds if record.predicted_seconds else 0.0
            )

    def summary(self) -> dict[str, Any]:
        """A plain dict of constant size: sums, histograms and the last record; it is sent to the front end
        unchanged."""
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


# --- which steps computed a request

MAX_KEPT = 256  # accounts of requests that have ended


@dataclass(slots=True)
class _Account:
    open_answers: set[int]
    steps: int = 0
    shares: int = 0  # steps whose share of the limit is known
    total_share: float = 0.0
    preemptions: dict[int, int] = field(default_factory=dict)  # by answer

    def add_step(self, share: float | None) -> None:
        self.steps += 1
        if share is not None:
            self.shares += 1
            self.total_share += share

    def read(self) -> StepAccount:
        return StepAccount(
            self.steps, self.total_share / self.shares if self.shares else None, sum(self.preemptions.values())
        )


class StepAccounts:
    """True while there are requests to count for."""

    def __init__(self) -> None:
        self._open: dict[int, _Account] = {}
        self._ended: dict[int, StepAccount] = {}  # oldest first

    def __bool__(self) -> bool:
        return bool(self._open)

    def open(self, request: Request) -> None:
        self._open[request.request_id] = _Account(set(range(request.params.n)))

    def end(self, request_id: int, index: int) -> None:
        """One answer of a request has ended."""
        account = self._open.get(request_id)
        if account is not None:
            account.open_answers.discard(index)
            if not account.open_answers:
                self.close(request_id)

    def close(self, request_id: int) -> None:
        account = self._open.pop(request_id, None)
        if account is not None:
            self._ended[request_id] = account.read()
            while len(self._ended) > MAX_KEPT:
                del self._ended[next(iter(self._ended))]

    def count(self, work: Iterable[SequenceRecord], share: float | None) -> None:
        """One step computed tokens of these sequences, at this fraction of the limit."""
        counted = set()
        for sequence in work:
            account = self._open.get(sequence.request_id) if sequence.request.explain else None
            if account is None:
                continue
            account.preemptions[sequence.index] = sequence.num_preemptions
            if sequence.request_id not in counted:
                counted.add(sequence.request_id)
                account.add_step(share)

    def settle(self, outputs: Sequence[SequenceOutput]) -> Sequence[SequenceOutput]:
        """The same outputs, with the counts added to those that ended."""
        if not self._open:
            return outputs
        return [out if out.finished is None else self._settled(out) for out in outputs]

    def _settled(self, out: SequenceOutput) -> SequenceOutput:
        account, finished = self._open.get(out.request_id), out.finished
        if account is None or finished is None:
            return out
        settled = out._replace(finished=replace(finished, account=account.read()))
        self.end(out.request_id, out.index)
        return settled

    def find(self, request_id: int) -> StepAccount | None:
        account = self._open.get(request_id)
        return account.read() if account is not None else self._ended.get(request_id)
