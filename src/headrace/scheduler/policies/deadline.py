"""Deadlines: the request whose first token is due first goes first, and what cannot be met is turned away before it
costs anything.

Each request has a target for its first token and one for the time between tokens: its own (``expects``) or the
configured ones. Order is earliest deadline first. When a request arrives, what it would meet is predicted; where that
misses a target it is refused with the numbers and with when to ask again: early rejection on a predicted load
(Mooncake, Qin et al., FAST 25, §7), judged before anything of a request is computed. One that was taken and turns out
to be late is turned away as long as none of it is computed. Without that, at twice the load a device can serve,
everybody is late and nothing that it computes counts.

How long answers will be is not known, so those of the past stand for those to come; prompts are known, and a cached
prefix of a request's own is taken off.

    until a place is free     rows and blocks that are missing / how fast those who run give them back
    prompts before its own    tokens left to compute / what steps compute of prompts beside the answers under way
    its own prompt            likewise

An engine with nothing to do takes whatever its limits do not forbid: a prediction that is too dark would otherwise
never meet a step that proves it wrong.

Steps take no longer than the shortest time between tokens that anybody under way was promised.

What lives here: targets, order, refusals, and that arithmetic over the scheduler's state. What may not: changing it,
HTTP.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from headrace.cost.cost_model import Forecast, StepSpeed, Tail
from headrace.errors import ConfigError
from headrace.request import Request, SequenceStatus
from headrace.scheduler.policies.protocol import DynamicPolicy, Order, Refusal
from headrace.scheduler.roster import Roster, Sequence
from headrace.scheduler.step_budget import StepMeter

# --- what a request would meet

FIRST_ANSWER = 128.0  # tokens, before any has ended


@dataclass(frozen=True, slots=True)
class Prospect:
    """Seconds. ``place``: until there is a row and blocks for it; ``others``, ``own``: prompts to compute; ``gap``:
    between two tokens."""

    place: float
    others: float
    own: float
    gap: float
    num_running: int

    @property
    def first_token(self) -> float:
        """Prompts are computed while others wait for a place."""
        return max(self.place, self.others) + self.own


@dataclass(frozen=True, slots=True)
class PromptPace:
    """Each step computes ``tokens`` of prompts and takes ``seconds``."""

    tokens: int
    seconds: float

    def time(self, tokens: float) -> float:
        return tokens / self.tokens * self.seconds


class Past:
    """What those who ended tell of those to come: the length of answers, a mean that fades."""

    __slots__ = ("answer",)

    def __init__(self) -> None:
        self.answer = FIRST_ANSWER

    def take(self, tokens: int) -> None:
        self.answer += 0.02 * (tokens - self.answer)

    def whole_of(self, sequence: Sequence) -> float:
        """Tokens that its answer is expected to have."""
        return max(1.0, min(self.answer, sequence.max_num_tokens - sequence.num_prompt_tokens))

    def left_of(self, sequence: Sequence) -> float:
        """Tokens that a sequence still writes, as things stand: never none."""
        most = sequence.max_num_tokens - len(sequence.token_ids)
        return max(1.0, min(most, max(self.answer - sequence.num_output_tokens, self.answer / 4)))


def prompt_pace(forecast: Forecast, roster: Roster, bound: float | None, context: int) -> PromptPace:
    """How fast prompts are computed beside those who run now, each token seeing ``context`` before it."""
    starts = [each.num_tokens - 1 for each in roster.running if each.num_computed_tokens >= each.num_prompt_tokens]
    room = max(1, roster.limits.max_num_batched_tokens - len(starts))
    meter = StepMeter(forecast, roster.speed, bound if bound is not None else 1e9, starts)
    tokens = meter.fits(context, room)
    return PromptPace(tokens, _seconds(roster.speed, meter.floor_with(context, tokens), alone=not starts))


def left_of_prompts(roster: Roster) -> int:
    """Tokens of prompts under way that are not computed yet."""
    return sum(max(0, each.num_prompt_tokens - each.num_computed_tokens) for each in roster.running)


def _seconds(speed: StepSpeed, floor: float, *, alone: bool) -> float:
    return (speed.prefill if alone else speed.mixed).seconds(floor) + speed.gap


def prospect(
    sequence: Sequence,
    work: int,
    ahead: Iterable[tuple[Sequence, int]],
    forecast: Forecast,
    roster: Roster,
    past: Past,
    bound: float | None,
) -> Prospect:
    """``work``: tokens of its prompt to compute; ``ahead``: those who go first, with theirs; ``bound``: seconds a step
    may take."""
    before = list(ahead)
    pace = prompt_pace(forecast, roster, bound, max(0, sequence.num_prompt_tokens - work // 2))
    others = pace.time(left_of_prompts(roster) + sum(tokens for _, tokens in before))
    own = _own_seconds(work, pace, forecast, roster, sequence)
    gap = _gap(sequence, before, forecast, roster)
    return Prospect(_place(sequence, work, before, roster, past, gap), others, own, gap, len(roster.running))


def _own_seconds(work: int, pace: PromptPace, forecast: Forecast, roster: Roster, sequence: Sequence) -> float:
    """A short prompt takes one step, and that is shorter than a full one."""
    if work > pace.tokens:
        return pace.time(work)
    return min(pace.seconds, alone(work, sequence.num_prompt_tokens - work, forecast, roster.speed) + pace.seconds / 2)


def alone(work: int, start: int, forecast: Forecast, speed: StepSpeed) -> float:
    """Seconds of a prompt on an idle engine, at least: in one step."""
    meter = StepMeter(forecast, speed, 1e9, ())
    return _seconds(speed, meter.floor_with(start, max(1, work)), alone=True)


def _gap(sequence: Sequence, before: list[tuple[Sequence, int]], forecast: Forecast, roster: Roster) -> float:
    """Seconds of a step once all of these write, as far as there are rows for them."""
    members = [*roster.running, *(each for each, _ in before), sequence]
    rows = min(len(members), roster.limits.max_num_seqs)
    keys = sum(each.num_tokens for each in members) * rows / len(members)
    seen = [keys if window is None else min(keys, float(rows * window)) for window in forecast.windows]
    return roster.speed.decode.seconds(forecast.floor_seconds(rows, rows, seen, seen)) + roster.speed.gap


def _place(
    sequence: Sequence, work: int, before: list[tuple[Sequence, int]], roster: Roster, past: Past, gap: float
) -> float:
    """Until enough of those who run have ended: of rows, of blocks, whichever takes longer."""
    running = roster.running
    if not running:
        return 0.0
    ends_a_second = sum(1.0 / past.whole_of(each) for each in running) / gap
    rows = sum(each.request.params.n for each, _ in before) + sequence.request.params.n - len(roster.free_rows)
    coming = sum(tokens + past.left_of(each) for each, tokens in before) + work + past.left_of(sequence)
    growing = sum(past.left_of(each) for each in running) / 2  # while some grow, others end
    free = min(
        pool.num_available * spec.block_size for spec, pool in zip(roster.cache.specs, roster.cache.pools, strict=True)
    )
    held = sum(each.num_tokens for each in running) / len(running)
    return max(0.0, rows / ends_a_second, (coming + growing - free) / (held * ends_a_second))


# --- the policy

LATE = 0.05  # of those taken may come later than predicted: the prediction is raised until that holds,
MOST_RAISED = 2.0  # ... so many times at most
MATTERS = 0.25  # of a target: whether less than that was predicted right decides nothing
LIMITS = StepSpeed()  # steps at the device's limits


@dataclass(slots=True)
class _Taken:
    """A request that was let in. ``work``: tokens of its prompt, without those found then; ``predicted``: seconds to
    its first token."""

    work: int
    predicted: float


class Deadline(DynamicPolicy):
    """``ttft``, ``tpot``: targets in seconds of requests that bring none. Without a ``forecast`` none is refused."""

    heeds_speed = True

    def __init__(self, ttft: float, tpot: float, forecast: Forecast | None) -> None:
        self._ttft, self._tpot = ttft, tpot
        self._forecast = forecast
        self._taken: dict[Sequence, _Taken] = {}
        self._past = Past()
        self._tail = Tail(LATE, MOST_RAISED)
        if forecast is not None:
            _check_possible(forecast, ttft, tpot)

    # --- order

    def order(self, request: Request, arrival_number: int) -> Order:
        return (request.arrival_time + self._ttft_of(request), arrival_number)

    def _ttft_of(self, request: Request) -> float:
        return self._ttft if request.expects.ttft is None else request.expects.ttft

    def _tpot_of(self, request: Request) -> float:
        return self._tpot if request.expects.tpot is None else request.expects.tpot

    # --- who comes

    def arrived(self, sequence: Sequence, roster: Roster) -> Refusal | None:
        work = self._work(sequence, roster)
        if self._forecast is None:
            self._taken[sequence] = _Taken(work, 0.0)
            return None
        refusal = self._impossible(sequence, work, self._forecast)
        if refusal is not None:
            return refusal
        ahead = [(each, self._work_ahead(each)) for each in roster.waiting.ahead_of(sequence)]
        found = prospect(sequence, work, ahead, self._forecast, roster, self._past, self._bound(sequence, roster))
        idle = not roster.running and not len(roster.waiting)
        refusal = None if idle else self._too_late(sequence, found, roster.now) or self._too_slow(sequence, found)
        if refusal is None:
            self._taken[sequence] = _Taken(work, found.first_token)
        return refusal

    def _work(self, sequence: Sequence, roster: Roster) -> int:
        usable = roster.limits.keeps_kv and not sequence.wants_scores
        found = roster.cache.lookup(sequence.kv, sequence.token_ids).num_tokens if usable else 0
        return sequence.num_prompt_tokens - found

    def _work_ahead(self, waiting: Sequence) -> int:
        """Further answers (n > 1) came with a prompt that was computed; one that was pushed out computes all it has."""
        taken = self._taken.get(waiting)
        return waiting.num_tokens if taken is None or waiting.first_scheduled is not None else taken.work

    def _bound(self, sequence: Sequence | None, roster: Roster) -> float | None:
        """Seconds a step may take with it."""
        targets = [self._tpot_of(each.request) for each in roster.running]
        if sequence is not None:
            targets.append(self._tpot_of(sequence.request))
        limit = roster.limits.max_step_seconds
        return min([*targets, *(() if limit is None else (limit,))], default=None)

    # --- refusals

    def _impossible(self, sequence: Sequence, work: int, forecast: Forecast) -> Refusal | None:
        """Waiting would not help: an idle engine would miss it, too."""
        request = sequence.request
        ttft, least = self._ttft_of(request), alone(work, sequence.num_prompt_tokens - work, forecast, LIMITS)
        if least > ttft:
            return Refusal(
                f"The first token is expected within {_said(ttft)}, but this prompt of {sequence.num_prompt_tokens:,} tokens takes {_said(least)} "
                f"alone on an idle engine, even at the device's limits. Give a longer expected_ttft, or a shorter prompt.",
                param="expected_ttft",
            )
        seen = [float(sequence.num_prompt_tokens)] * len(forecast.windows)
        tpot, gap = self._tpot_of(request), forecast.floor_seconds(1, 1, seen, seen)
        if gap > tpot:
            return Refusal(
                f"A token is expected every {_said(tpot)}, but after {sequence.num_prompt_tokens:,} tokens one takes {_said(gap)} alone on an idle "
                f"engine, even at the device's limits. Give a longer expected_tpot, or a shorter prompt.",
                param="expected_tpot",
            )
        return None

    def _too_late(self, sequence: Sequence, found: Prospect, now: float) -> Refusal | None:
        target = self._ttft_of(sequence.request)
        waited = max(0.0, now - sequence.request.arrival_time)
        wait, own = waited + max(found.place, found.others) * self._tail.ratio, found.own * self._tail.ratio
        if wait + own <= target:
            return None
        after = max(1.0, wait + own - target)
        return Refusal(
            f"The first token would come after about {_said(wait + own)} ({_said(wait)} for the {found.num_running} requests under way and those "
            f"before this one, {_said(own)} for its prompt), and it is expected within {_said(target)}. Try again in {after:.0f} s, or give a longer "
            f"expected_ttft.",
            retry_after=after,
        )

    def _too_slow(self, sequence: Sequence, found: Prospect) -> Refusal | None:
        target = self._tpot_of(sequence.request)
        if found.gap <= target:
            return None
        after = max(1.0, self._past.answer * found.gap * (1.0 - target / found.gap))
        return Refusal(
            f"With the {found.num_running} requests under way a token would take about {_said(found.gap)}, and one is expected every "
            f"{_said(target)}. Try again in {after:.0f} s, or give a longer expected_tpot.",
            retry_after=after,
        )

    # --- before a step

    def consider(self, roster: Roster) -> Iterable[tuple[Sequence, Refusal]]:
        """Those who wait and have become late are turned away: nothing of them is computed that would count."""
        bound = self._bound(None, roster)
        self.max_step_seconds, self.wake = (bound if bound is not None else self._tpot), math.inf
        if self._forecast is None or not len(roster.waiting):
            return ()
        return self._late(self._forecast, bound, roster)

    def _late(self, forecast: Forecast, bound: float | None, roster: Roster) -> list[tuple[Sequence, Refusal]]:
        """At the pace of this moment, and were they the next; on an idle engine, those that are late already. Wakes
        when the next one is."""
        found, pace = [], prompt_pace(forecast, roster, bound, 0)
        before = pace.time(left_of_prompts(roster))
        for each in roster.waiting:
            if each.first_scheduled is not None:
                continue
            target, waited = self._ttft_of(each.request), roster.now - each.request.arrival_time
            needed = before + pace.time(self._work_ahead(each)) if roster.running else 0.0
            if waited > 0 and waited + needed > target:
                found.append((each, _became_late(waited, target)))
            else:
                self.wake = min(self.wake, roster.now + max(0.0, target - needed - waited))
        return found

    # --- what became of it

    def left(self, sequence: Sequence, now: float) -> None:
        if sequence.status is not SequenceStatus.FINISHED:
            return
        taken = self._taken.pop(sequence, None)
        if sequence.num_output_tokens:
            self._past.take(sequence.num_output_tokens)
        if taken is not None and taken.predicted > 0 and sequence.first_token is not None:
            least = MATTERS * self._ttft_of(sequence.request)
            self._tail.observe((sequence.first_token - sequence.request.arrival_time) / max(taken.predicted, least))


def _became_late(waited: float, target: float) -> Refusal:
    return Refusal(
        f"It waited for {_said(waited)} and its first token can no longer come within the {_said(target)} in which it is expected: requests that "
        f"were due earlier took longer than predicted. Try again, or give a longer expected_ttft.",
        retry_after=max(1.0, target),
    )


def _said(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1.0 else f"{seconds * 1e3:.3g} ms"


def _check_possible(forecast: Forecast, ttft: float, tpot: float) -> None:
    """Targets below the least step there is are refused at the start. Raises ConfigError."""
    ones = [1.0] * len(forecast.windows)
    least = forecast.floor_seconds(1, 1, ones, ones)
    for flag, target in (("--ttft-target-ms", ttft), ("--tpot-target-ms", tpot)):
        if target < least:
            raise ConfigError(
                f"{flag} is {target * 1e3:g}, but the least step of this model takes {least * 1e3:.3g} ms on this device, even at its limits. "
                f"Give more than that, or take a smaller model."
            )
