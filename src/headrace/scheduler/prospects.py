"""What a request would meet if it were taken: seconds until its first token, and from one token to the next.

After Mooncake (Qin et al., FAST 25, §7): load is judged by what is predicted, before anything of a request is computed. Nobody knows how long
answers will be, so those of the past stand for those to come; prompts are known, and a cached prefix of a request's own is taken off.

    until a place is free     rows and blocks that are missing / how fast those who run give them back
    prompts before its own    tokens left to compute / what steps compute of prompts beside the answers under way
    its own prompt            likewise

What lives here: that arithmetic over the scheduler's state. What may not: what is promised, refusing (policies/deadline.py), changing anything.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from headrace.cost.speed import StepSpeed
from headrace.scheduler.roster import Roster
from headrace.scheduler.step_budget import StepFloors, StepMeter
from headrace.sequence import Sequence

FIRST_ANSWER = 128.0  # tokens, before any has ended


@dataclass(frozen=True, slots=True)
class Prospect:
    """Seconds. ``place``: until there is a row and blocks for it; ``others``, ``own``: prompts to compute; ``gap``: between two tokens."""

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


def prompt_pace(floors: StepFloors, standing: Roster, bound: float | None, context: int) -> PromptPace:
    """How fast prompts are computed beside those who run now, each token seeing ``context`` before it."""
    starts = [each.num_tokens - 1 for each in standing.running if each.num_computed_tokens >= each.num_prompt_tokens]
    room = max(1, standing.limits.max_num_batched_tokens - len(starts))
    meter = StepMeter(floors, standing.speed, bound if bound is not None else 1e9, starts)
    tokens = meter.fits(context, room)
    return PromptPace(tokens, _seconds(standing.speed, meter.floor_with(context, tokens), alone=not starts))


def left_of_prompts(standing: Roster) -> int:
    """Tokens of prompts under way that are not computed yet."""
    return sum(max(0, each.num_prompt_tokens - each.num_computed_tokens) for each in standing.running)


def _seconds(speed: StepSpeed, floor: float, *, alone: bool) -> float:
    return (speed.prefill if alone else speed.mixed).seconds(floor) + speed.gap


def prospect(
    sequence: Sequence, work: int, ahead: Iterable[tuple[Sequence, int]], floors: StepFloors, standing: Roster, past: Past, bound: float | None
) -> Prospect:
    """``work``: tokens of its prompt to compute; ``ahead``: those who go first, with theirs; ``bound``: seconds a step may take."""
    before = list(ahead)
    pace = prompt_pace(floors, standing, bound, max(0, sequence.num_prompt_tokens - work // 2))
    others, own = pace.time(left_of_prompts(standing) + sum(tokens for _, tokens in before)), _own_seconds(work, pace, floors, standing, sequence)
    gap = _gap(sequence, before, floors, standing)
    return Prospect(_place(sequence, work, before, standing, past, gap), others, own, gap, len(standing.running))


def _own_seconds(work: int, pace: PromptPace, floors: StepFloors, standing: Roster, sequence: Sequence) -> float:
    """A short prompt takes one step, and that is shorter than a full one."""
    if work > pace.tokens:
        return pace.time(work)
    return min(pace.seconds, alone(work, sequence.num_prompt_tokens - work, floors, standing.speed) + pace.seconds / 2)


def alone(work: int, start: int, floors: StepFloors, speed: StepSpeed) -> float:
    """Seconds of a prompt on an idle engine, at least: in one step."""
    meter = StepMeter(floors, speed, 1e9, ())
    return _seconds(speed, meter.floor_with(start, max(1, work)), alone=True)


def _gap(sequence: Sequence, before: list[tuple[Sequence, int]], floors: StepFloors, standing: Roster) -> float:
    """Seconds of a step once all of these write, as far as there are rows for them."""
    members = [*standing.running, *(each for each, _ in before), sequence]
    rows = min(len(members), standing.limits.max_num_seqs)
    keys = sum(each.num_tokens for each in members) * rows / len(members)
    seen = [keys if window is None else min(keys, float(rows * window)) for window in floors.windows]
    return standing.speed.decode.seconds(floors.floor_seconds(rows, rows, seen, seen)) + standing.speed.gap


def _place(sequence: Sequence, work: int, before: list[tuple[Sequence, int]], standing: Roster, past: Past, gap: float) -> float:
    """Until enough of those who run have ended: of rows, of blocks, whichever takes longer."""
    running = standing.running
    if not running:
        return 0.0
    ends_a_second = sum(1.0 / past.whole_of(each) for each in running) / gap
    rows = sum(each.request.params.n for each, _ in before) + sequence.request.params.n - len(standing.free_rows)
    coming = sum(tokens + past.left_of(each) for each, tokens in before) + work + past.left_of(sequence)
    growing = sum(past.left_of(each) for each in running) / 2  # while some grow, others end
    free = min(pool.num_available * spec.block_size for spec, pool in zip(standing.cache.specs, standing.cache.pools, strict=True))
    held = sum(each.num_tokens for each in running) / len(running)
    return max(0.0, rows / ends_a_second, (coming + growing - free) / (held * ends_a_second))
