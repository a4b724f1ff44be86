"""Which replicas compute prompts and which answer, and whether that should change (``--technique swap_roles=on``).

Measured in each PERIOD:

    queue   seconds that a prompt waited before it was computed, beyond what its own computing took
    room    seconds that a request waited for KV blocks where it is answered
    gap     seconds between steps that brought tokens, where answers are given
    busy    share of the time with a prompt under way, summed over those who compute prompts

``late`` is the queue over the time in which readers expect a first token (--expected-ttft), ``slow`` the larger of room
over the same and gap over the time in which they read a token (--reading-speed). Above 1 that side needs a replica:

    late > 1, the others stay in time with one fewer     one more computes prompts
    late > 1, one answers, with time to spare            all do both: prompts need more than there is apart
    slow > 1, late < ½, prompts fit into fewer           those are left, and the others answer
    slow > 1, late < ½, one computes, and little         all do both
    slow > 1 while all do both, prompts are much         as many compute prompts as those fill

What is said PATIENCE times in a row is done. Then nothing changes for REST periods, and for twice as many after each
change back that comes SOON, so a load between two mixes changes roles ever more rarely. Whoever changes its role begins
with its next request, and ends what it has begun in the other role.

Source: TetriInfer (Hu et al. 2024), which turns instances over as their load changes.

What lives here: the measures, the rule. What may not: frames, sockets, who computes one request (engine/routing.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from headrace.config import SchedulerConfig

PERIOD = 1.0  # seconds
PATIENCE = 3  # periods
REST = 5
LONGEST_REST = 160
SOON = 4  # rests
FULL = 0.8  # of a replica's time that prompts may take before they queue
MUCH, LITTLE = 0.5, 0.3  # of one replica's time: prompts that are worth a replica, and that are not
SPARE = 0.5


@dataclass(frozen=True, slots=True)
class Targets:
    """Seconds."""

    first: float
    gap: float

    @classmethod
    def of(cls, config: SchedulerConfig) -> Targets:
        return cls(config.expected_ttft, 1.0 / config.reading_speed)


@dataclass(frozen=True, slots=True)
class Measured:
    """See the module."""

    queue: float = 0.0
    room: float = 0.0
    gap: float = 0.0
    busy: float = 0.0
    least: float = 0.0  # gap of any period so far: what a step takes however few answers there are


@dataclass(frozen=True, slots=True)
class Change:
    """``prompts``: this replica computes them from now on; otherwise it answers."""

    at: float
    replica: int
    prompts: bool
    why: Measured


def wanted(measured: Measured, prompts: int, answers: int, targets: Targets) -> int:
    """How many should compute prompts, of so many that do and so many that answer; 0: all do both."""
    late = measured.queue / targets.first
    slow = max(measured.room / targets.first, measured.gap / targets.gap)
    filled = math.ceil(measured.busy / FULL)
    if not prompts:
        return filled if slow > 1.0 and measured.busy > MUCH and filled < answers else 0
    if late > 1.0:
        if answers == 1:
            return 0 if slow < SPARE else prompts
        more = answers / (answers - 1)  # for those who are left
        gap = measured.least + (measured.gap - measured.least) * more
        return prompts + (max(measured.room * more / targets.first, gap / targets.gap) < 1.0)
    if slow > 1.0 and late < SPARE:
        return min(prompts, max(1, filled)) if prompts > 1 else int(measured.busy >= LITTLE)
    return prompts


@dataclass(slots=True)
class _Queue:
    """How many were in it, over time."""

    length: int = 0
    since: float = 0.0
    area: float = 0.0  # of length over time
    busy: float = 0.0  # seconds with any
    ended: int = 0

    def change(self, now: float, by: int) -> None:
        self.look(now)
        self.length += by
        self.ended += by < 0

    def look(self, now: float) -> None:
        passed = max(0.0, now - self.since)
        self.area += self.length * passed
        self.busy += passed if self.length else 0.0
        self.since = max(self.since, now)

    def clear(self) -> None:
        self.area = self.busy = 0.0
        self.ended = 0


@dataclass(slots=True)
class _Asked:
    answers: int
    computes: int
    room: bool = True  # it waits for that
    computing: bool = True


@dataclass(slots=True)
class _Load:
    """Of one replica."""

    prompts: _Queue = field(default_factory=_Queue)
    room: _Queue = field(default_factory=_Queue)
    answering: set[int] = field(default_factory=set)  # requests that have a token
    stepped: float | None = None  # when the last step brought tokens and more were to come
    gaps: float = 0.0
    steps: int = 0

    def measure(self, now: float) -> None:
        self.prompts.look(now)
        self.room.look(now)

    def clear(self) -> None:
        self.prompts.clear()
        self.room.clear()
        self.gaps, self.steps = 0.0, 0


class Roles:
    """``memory``: a role of each replica and the number of changes, which several front ends share; zeros at first.
    ``now``: seconds. ``targets``: None: others measure. ``changes``: roles do; otherwise ``advice`` says once that they
    should. ``share``: of the requests, one in so many is seen here. ``load``: what a replica has to do, in prompts and in
    answers."""

    def __init__(
        self,
        replicas: int,
        prompts: int,
        now: Callable[[], float],
        *,
        memory: memoryview | None = None,
        targets: Targets | None = None,
        changes: bool = False,
        share: int = 1,
        load: Callable[[int], tuple[int, int]] = lambda number: (0, 0),
    ) -> None:
        self._roles = memoryview(bytearray(memory_size(replicas))).cast("q") if memory is None else memory
        if not self._roles[0]:
            for number in range(replicas):
                self._roles[number] = _PROMPTS if number < prompts else _ANSWERS
        self._now, self._targets, self._changing, self._share, self._load = now, targets, changes, share, load
        self._loads = [_Load() for _ in range(replicas)]
        self._asked: dict[int, _Asked] = {}
        self._begun = now()
        self._said, self._times = 0, 0  # a wish, and how often it was heard
        self._rest, self._resting = REST, 0
        self._least = math.inf  # gap
        self._last = self._since = 0  # in which direction roles changed, and how many periods ago
        self.advice: str | None = None  # until somebody takes it
        self._advised = False

    # --- who does what

    def computes(self, number: int) -> bool:
        return bool(self._roles[number] == _PROMPTS)

    @property
    def told(self) -> dict[int, int]:
        """1 for each replica that computes prompts."""
        return {number: int(self.computes(number)) for number in range(len(self._loads))}

    @property
    def num_changes(self) -> int:
        return int(self._roles[len(self._loads)])

    def split(self, up: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
        """(who may compute prompts, who may answer). Where all that answer are gone, the others do."""
        prompts = [number for number in up if self.computes(number)]
        answers = [number for number in up if not self.computes(number)]
        return (prompts, answers) if answers else ((), up)

    # --- what happens

    def asked(self, request_id: int, answers: int, computes: int) -> None:
        """Its prompt is computed for another replica, or where it is answered."""
        now, asked = self._now(), _Asked(answers, computes, answers != computes)
        self._asked[request_id] = asked
        self._loads[computes].prompts.change(now, 1)
        if asked.room:
            self._loads[answers].room.change(now, 1)

    def moved(self, request_id: int, computes: int) -> None:
        """Another replica computes its prompt, in place of one that has died."""
        if (asked := self._asked.get(request_id)) is not None and asked.computing:
            self._end_prompt(asked)
            asked.computes, asked.computing = computes, True
            self._loads[computes].prompts.change(self._now(), 1)

    def has_room(self, request_id: int) -> None:
        if (asked := self._asked.get(request_id)) is not None:
            self._end_room(asked)

    def computed(self, request_id: int) -> None:
        """Its prompt is."""
        if (asked := self._asked.get(request_id)) is not None:
            self._end_prompt(asked)

    def began(self, request_id: int) -> None:
        """It has its first token."""
        if (asked := self._asked.get(request_id)) is not None:
            self._end_room(asked)
            self._end_prompt(asked)
            self._loads[asked.answers].answering.add(request_id)

    def ended(self, request_id: int) -> None:
        if (asked := self._asked.pop(request_id, None)) is not None:
            self._end_room(asked)
            self._end_prompt(asked)
            self._loads[asked.answers].answering.discard(request_id)

    def stepped(self, number: int, now: float) -> None:
        """It has brought tokens of answers; after what these meant for requests was told."""
        load = self._loads[number]
        if load.stepped is not None:
            load.gaps += max(0.0, now - load.stepped)
            load.steps += 1
        load.stepped = now if load.answering else None

    def _end_prompt(self, asked: _Asked) -> None:
        if asked.computing:
            asked.computing = False
            self._loads[asked.computes].prompts.change(self._now(), -1)

    def _end_room(self, asked: _Asked) -> None:
        if asked.room:
            asked.room = False
            self._loads[asked.answers].room.change(self._now(), -1)

    # --- whether roles change

    def look(self, up: Sequence[int]) -> Sequence[Change]:
        """What is to change now, of those that are well; done already."""
        now = self._now()
        if self._targets is None or now < self._begun + PERIOD or len(up) < 2:
            return ()
        if self._changing and all(map(self.computes, up)):  # nobody is left who answers
            for number in up:
                self._roles[number] = _ANSWERS
        prompts, answers = self.split(up)
        measured = self.measure(prompts or up, answers)
        self._resting, self._since = max(0, self._resting - 1), self._since + 1
        wish = wanted(measured, len(prompts), len(answers), self._targets) - len(prompts)
        self._times = self._times + 1 if wish and wish == self._said else int(bool(wish))
        self._said = wish
        if not wish or self._times < PATIENCE or self._resting:
            return ()
        if not self._changing:
            self._advise(wish, len(prompts), measured)
            return ()
        return self._change(prompts, answers, wish, measured)

    def _advise(self, wish: int, prompts: int, why: Measured) -> None:
        if self._advised or not prompts:
            return
        self._advised, better = True, f"--prefill-replicas {prompts + wish}" if prompts + wish else "none apart"
        self.advice = (
            f"This load has another mix of prompts and answers than --prefill-replicas {prompts} is good for: prompts wait {why.queue:.2f} s, "
            f"requests {why.room:.2f} s for room where they are answered, tokens come every {1e3 * why.gap:.0f} ms, and prompts fill "
            f"{why.busy:.2f} replicas. Better: {better}, or --technique swap_roles=on."
        )

    def measure(self, prompts: Sequence[int], answers: Sequence[int]) -> Measured:
        """Since the last time."""
        now = self._now()
        seconds, self._begun = now - self._begun, now
        for load in self._loads:
            load.measure(now)
        queues, rooms = [self._loads[each].prompts for each in prompts], [self._loads[each].room for each in answers]
        steps = sum(self._loads[each].steps for each in answers)
        gap = sum(self._loads[each].gaps for each in answers) / steps if steps else 0.0
        self._least = min(self._least, gap or math.inf)
        busy = sum(min(seconds, self._share * each.busy) for each in queues) / seconds
        queue = max(map(self._queueing, queues), default=0.0)
        room = sum(each.area for each in rooms) / max(1, sum(each.ended for each in rooms))
        for load in self._loads:
            load.clear()
        return Measured(queue, room, gap, busy, min(gap, self._least))

    def _queueing(self, queue: _Queue) -> float:
        """Of the mean time in it (Little: its area over those that left), what others' computing took."""
        length = self._share * queue.area / queue.busy if queue.busy else 1.0
        return queue.area / max(1, queue.ended) * max(0.0, 1.0 - 1.0 / length)

    def _change(
        self, prompts: Sequence[int], answers: Sequence[int], wish: int, measured: Measured
    ) -> Sequence[Change]:
        direction = 1 if wish > 0 else -1
        back = direction == -self._last and self._since < SOON * self._rest
        self._rest = min(LONGEST_REST, 2 * self._rest) if back else REST
        self._last, self._since, self._resting, self._times = direction, 0, self._rest, 0
        side = 1 if wish > 0 else 0
        lightest = sorted(answers if wish > 0 else prompts, key=lambda number: self._load(number)[side])
        return [self._turn(number, wish > 0, measured) for number in lightest[: abs(wish)]]

    def _turn(self, number: int, prompts: bool, measured: Measured) -> Change:
        self._roles[number] = _PROMPTS if prompts else _ANSWERS
        self._roles[len(self._loads)] += 1
        return Change(self._now(), number, prompts, measured)


_ANSWERS, _PROMPTS = 1, 2


def memory_size(replicas: int) -> int:
    """Bytes."""
    return 8 * (replicas + 1)
