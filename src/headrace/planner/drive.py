"""Runs requests through a core, or through several replicas, on virtual time, as clients of a server would send them.

A request is sent when it is due, also while a step runs; the core takes it before the next one, and its times count
from when it was sent. Each core has a clock of its own; what happens next is what is earliest on any of them, and what
a step brought is seen when it ends.

A front end is one event loop, turn after turn. A turn takes all that has come by its beginning. Tokens that steps
brought meanwhile are sent on together, one message a request, however many of its tokens they are: a front end that
falls behind sends fewer and longer messages. Of requests that come at once, all are read before the first is handed
on, and then one after the other is parsed and handed on.

What lives here: the loop that adds what is due and steps, a front end's turns. What may not: figures and building a
core (simulator.py), prices (cost/prices.py).
"""

from __future__ import annotations

import heapq
import itertools
import math
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, count
from types import MappingProxyType
from typing import Any

from headrace.config import DeviceConfig
from headrace.cost.prices import FrontPrices
from headrace.disagg.hand_over import HandOver, HandOverCounts, prompt_alone
from headrace.disagg.notes import Note, Sent, Want
from headrace.disagg.roles import Roles, Targets
from headrace.engine.core import EngineCore
from headrace.engine.routing import Router
from headrace.planner.executor import ModelledExecutor
from headrace.planner.workload.load import LoadRequest
from headrace.planner.workload.statistics import Sample
from headrace.request import FinishReason, Request, SamplingParams, SequenceOutput

# Bytes that the socket between a front end and an engine holds (Linux's default): the engine empties it before each
# step, so of a burst of long prompts no more join one.
PIPE, ID_BYTES, REQUEST_BYTES = 212_992, 4, 200
READ = 0.15  # of a request's work: seen in bursts of 160 requests of 256 and 2,112 tokens
Message = tuple[float, list[SequenceOutput]]  # when its client sees it, and what the request got, in order


class FrontEnd:
    """Times are seconds."""

    def __init__(self, prices: FrontPrices) -> None:
        self._prices = prices
        self.free = 0.0  # when the last turn ends
        self._number = count()
        # heaps, by when they came
        self._requests: list[tuple[float, int, int, int]] = []
        self._outputs: list[tuple[float, int, Sequence[SequenceOutput]]] = []

    def take(self, at: float, index: int, prompt_tokens: int) -> None:
        heapq.heappush(self._requests, (at, next(self._number), index, prompt_tokens))

    def bring(self, at: float, outputs: Sequence[SequenceOutput]) -> None:
        """What a step brought at its end."""
        heapq.heappush(self._outputs, (at, next(self._number), outputs))

    @property
    def due(self) -> float:
        """When the next turn begins; infinite where nothing has come."""
        first = min((heap[0][0] for heap in (self._requests, self._outputs) if heap), default=math.inf)
        return max(first, self.free)

    def turn(self) -> tuple[list[Message], list[tuple[float, int]]]:
        """The next one: messages, by when they are sent; and requests, when each is in the core."""
        begun, prices = self.due, self._prices
        brought = [outputs for _, _, outputs in _until(begun, self._outputs)]
        taken = [(index, tokens) for _, _, index, tokens in _until(begun, self._requests)]
        now, messages = begun + (prices.waking if brought else 0.0), []
        for outputs in _by_request(brought):
            now += prices.sending(sum(len(output.token_ids) for output in outputs))
            messages.append((now, outputs))
            now += prices.ending if outputs[-1].finished is not None else 0.0
        work = [prices.working(tokens) for _, tokens in taken]
        now += READ * sum(work)
        through = accumulate(((1.0 - READ) * each for each in work), initial=now)
        *_, self.free = ends = list(through)
        waits = [prices.resting(tokens) for _, tokens in taken]
        return messages, [(end + wait, index) for end, wait, (index, _) in zip(ends[1:], waits, taken, strict=True)]


def _until(now: float, heap: list[Any]) -> Iterator[Any]:
    while heap and heap[0][0] <= now:
        yield heapq.heappop(heap)


def _by_request(brought: Sequence[Sequence[SequenceOutput]]) -> Iterable[list[SequenceOutput]]:
    if len(brought) == 1:
        return ([output] for output in brought[0])
    found: dict[int, list[SequenceOutput]] = {}
    for outputs in brought:
        for output in outputs:
            found.setdefault(output.request_id, []).append(output)
    return found.values()


def wake(core: EngineCore, now: float) -> None:
    """One that has nothing to do sees the time."""
    core.clock.sleep_until(now if not core.has_work else 0.0)


class Between:
    """Replicas of which some compute prompts for the others, as ``device`` says. What they tell each other arrives at
    once, and keys and values once they have crossed two links, of ``bandwidth`` bytes/s each: out of one device, into the
    other. Each link carries one after the other."""

    def __init__(
        self, cores: Sequence[EngineCore], device: DeviceConfig, router: Router, targets: Targets, bandwidth: float
    ) -> None:
        self._cores, self._router, self._bandwidth, self._at = cores, router, bandwidth, 0.0
        self.roles = Roles(
            len(cores), device.prefill_replicas, lambda: self._at, memory=router.roles, load=router.load, targets=targets,
            changes=device.swap_roles,
        )  # fmt: skip
        self._hand_overs = [HandOver(core, number) for number, core in enumerate(cores)]
        for core, hand_over in zip(cores, self._hand_overs, strict=True):
            core.hand_over = hand_over
        self._notes: list[tuple[float, int, int, Note]] = []  # a heap: when, and to whom
        self._number = count()
        self._free = [0.0] * len(cores)  # until when each link is in use
        self._apart: dict[int, tuple[int, int]] = {}  # who answers and who computes, by request
        self._cached: dict[int, int] = {}  # tokens that one of them had

    @property
    def counts(self) -> list[HandOverCounts]:
        return [each.counts for each in self._hand_overs]

    def add(self, request: Request, now: float) -> None:
        self._at = max(self._at, now)
        self.roles.look(range(len(self._cores)))
        prompts, answers = self.roles.split(range(len(self._cores)))
        answer, computes = self._router.pair(request, answers, prompts)
        self.roles.asked(request.request_id, answer, computes)
        for number in {answer, computes}:
            wake(self._cores[number], now)
        if answer == computes:
            if not self._hand_overs[answer].joins(request):
                self._cores[answer].add(request)
            return
        self._apart[request.request_id] = answer, computes
        self._hand_overs[answer].expect(request)
        self._hand_overs[computes].give(prompt_alone(request))
        self._collect(answer)

    @property
    def due(self) -> float:
        return self._notes[0][0] if self._notes else math.inf

    def pass_on(self) -> None:
        now, _, number, note = heapq.heappop(self._notes)
        wake(self._cores[number], now)
        self._hand_overs[number].hear(note)
        self._collect(number)

    def _collect(self, number: int) -> None:
        for note in self._hand_overs[number].take_notes():
            answer, computes = self._apart[note.request_id]
            at = self._cores[number].clock.now()
            if isinstance(note, Sent):
                seconds = len(note.slots) * sum(self._hand_overs[number].widths) / self._bandwidth
                for link in (computes, answer):
                    at = self._free[link] = max(at, self._free[link]) + seconds
            elif isinstance(note, Want):
                self._at = max(self._at, at)
                self.roles.has_room(note.request_id)
                self._keep(note.request_id, note.cached)
            heapq.heappush(self._notes, (at, next(self._number), computes if number == answer else answer, note))

    def _keep(self, request_id: int, cached: int) -> None:
        self._cached[request_id] = max(cached, self._cached.get(request_id, 0))

    def seen(self, core: EngineCore, outputs: Sequence[SequenceOutput]) -> Sequence[SequenceOutput]:
        """What clients see of a step."""
        number = self._cores.index(core)
        self._collect(number)
        self._at = max(self._at, core.clock.now())
        theirs = [each for each in outputs if self._apart.get(each.request_id, (number,))[0] == number]
        for each in outputs:
            if self._apart.get(each.request_id, (number,))[0] != number:
                self._keep(each.request_id, each.num_cached_tokens or 0)
                self.roles.computed(each.request_id)
        theirs = [self._honest(each) if each.num_cached_tokens is not None else each for each in theirs]
        for each in theirs:
            if each.finished is not None:
                self.roles.ended(each.request_id)
        if theirs:
            self.roles.stepped(number, core.clock.now())
        return theirs

    def _honest(self, output: SequenceOutput) -> SequenceOutput:
        """With its first token. What was handed over was cached nowhere."""
        self.roles.began(output.request_id)
        if output.request_id not in self._apart:
            return output
        return output._replace(num_cached_tokens=self._cached.get(output.request_id, 0))


@dataclass(slots=True)
class Outcome:
    """One sample a request, in order of sending, whose it is and how urgent; ``seconds`` from the first request's zero
    to the last token."""

    samples: list[Sample] = field(default_factory=list)
    tenants: list[str] = field(default_factory=list)
    priorities: list[int] = field(default_factory=list)
    seconds: float = 0.0
    most_used_blocks: int = 0
    most_running: int = 0  # requests under way at once
    steps: int = 0  # that brought something


class Drive:
    """One run over the replicas ``cores``, which ``router`` chooses from. ``room``: requests under way at once that
    clients keep to; ``max_queue``: beyond so many the server says 429. ``front``: prices of the front end; None: none."""

    def __init__(
        self,
        cores: Sequence[EngineCore],
        asked: Sequence[LoadRequest],
        ids: Callable[[int], array[int]],
        *,
        room: int | None,
        max_queue: int,
        front: FrontPrices | None = None,
        router: Router | None = None,
        between: Between | None = None,
        executors: Mapping[EngineCore, ModelledExecutor] = MappingProxyType({}),
    ) -> None:
        """``between``: cores that compute prompts and those that answer; None: all do both. ``executors``: that say when
        they collected a step; of others, the host has done all that comes behind it."""
        self._cores, self._router, self._between, self._executors = cores, router, between, executors
        # a heap: what steps brought, by their end
        self._brought: list[tuple[float, int, Sequence[SequenceOutput]]] = []
        self._asked = asked
        self._ids = ids
        self._room = len(asked) if room is None else room
        self._max_queue = max_queue
        self._front = None if front is None else FrontEnd(front)
        # heaps: messages on their way to clients, by when they see them; and when a request that was sent is in the core
        self._messages: list[tuple[float, int, list[SequenceOutput]]] = []
        self._coming: list[tuple[float, int]] = []
        self._sent_on = itertools.count()
        self._first = deque(index for index, each in enumerate(asked) if each.follows is None)
        self._turn_after = {each.follows: index for index, each in enumerate(asked) if each.follows is not None}
        self._later: list[tuple[float, int]] = []  # a heap: when a turn whose predecessor has ended is due
        # arrivals come by the clock, not when a client is free
        self._open = any(asked[index].at is not None for index in self._first)
        # closed loop: since when each client that is in no conversation has been free
        self._free = [] if self._open else [0.0] * min(self._room, len(asked))
        self._piped = 0  # bytes of requests that came since the last step
        self._held_until = 0.0  # a socket that was full is written to again in the front end's next turn
        self._full_until = 0.0  # as many as there is room for were under way
        self._now = 0.0
        self._live: dict[int, Sample] = {}
        self._params: dict[int, SamplingParams] = {}  # by output tokens: each is checked once
        self._outcome = Outcome()

    def run(self) -> Outcome:
        while self._first or self._later or self._live:
            core, now = self._next_step()
            at, happens = min(self._events(), key=lambda event: event[0])
            if at <= now:
                self._now = max(self._now, at)
                happens()
            else:
                self._now = now
                self._step(core)
        for core in self._cores:
            while core.has_work:  # steps still in flight
                core.step()
        return self._outcome

    def _events(self) -> Iterator[tuple[float, Callable[[], None]]]:
        """What comes next of each kind, and when; of those at one time the first happens first."""
        yield (self._brought[0][0] if self._brought else math.inf), self._end_step
        yield (self._messages[0][0] if self._messages else math.inf), self._show
        yield self._next_due(), self._send_due
        yield (self._front.due if self._front is not None else math.inf), self._turn
        yield self._next_coming(), self._deliver
        if self._between is not None:
            yield self._between.due, self._between.pass_on

    def _next_step(self) -> tuple[EngineCore, float]:
        """The core whose step begins next, and when; infinitely late where none has work."""
        core = min(self._cores, key=lambda each: each.clock.now() if each.has_work else math.inf)
        return core, core.clock.now() if core.has_work else math.inf

    def _step(self, core: EngineCore) -> None:
        self._piped = 0
        outputs, blocks = core.step(), core.scheduler.cache
        if self._between is not None:
            outputs = self._between.seen(core, outputs)
        self._outcome.most_used_blocks = max(self._outcome.most_used_blocks, blocks.num_used_blocks)
        if outputs:
            at = self._executors[core].collected_at if core in self._executors else core.clock.now()
            heapq.heappush(self._brought, (at, self._outcome.steps, outputs))
            self._outcome.steps += 1

    def _next_due(self) -> float:
        """When the next request is sent; infinite where that waits for the end of another."""
        return min((queue[0][0] for queue in self._sendable()), default=math.inf)

    def _sendable(self) -> list[list[tuple[float, int]]]:
        """Queues whose head may be sent once it is due. In a closed loop a later turn has its client already."""
        has_room = len(self._live) < self._room
        found = [self._later] if self._later and (has_room or not self._open) else []
        if self._first and (has_room if self._open else self._free):
            at = self._asked[self._first[0]].at or 0.0
            found.append([(at if self._open else max(at, self._free[0]), self._first[0])])
        return found

    def _next_coming(self) -> float:
        """When the next request is in a core; infinite where it must wait for a step, which makes room for it."""
        full = self._piped >= PIPE * len(self._cores) and any(core.has_work for core in self._cores)
        return max(self._coming[0][0], self._held_until) if self._coming and not full else math.inf

    def _deliver(self) -> None:
        index = heapq.heappop(self._coming)[1]
        self._piped += REQUEST_BYTES + ID_BYTES * self._asked[index].prompt
        if self._piped >= PIPE * len(self._cores) and self._front is not None:
            self._held_until = self._front.free
        self._add(index)

    def _send_due(self) -> None:
        queue = min(self._sendable())
        due, index = heapq.heappop(queue)
        if queue is not self._later:
            self._first.popleft()
            if not self._open:
                heapq.heappop(self._free)
        asked, sent = self._asked[index], max(due, self._full_until) if self._open else due
        wanted = asked.at if asked.follows is None else due if asked.think else None
        self._send(index, sent, wanted)

    def _send(self, index: int, sent: float, due: float | None) -> None:
        """``sent``: a client that had to wait for another's end sends later than it was due."""
        asked = self._asked[index]
        sample = Sample(sent=sent, due=due, prompt_tokens=asked.prompt)
        self._outcome.samples.append(sample)
        self._outcome.tenants.append(asked.tenant)
        self._outcome.priorities.append(asked.priority)
        if len(self._live) >= self._max_queue:
            sample.error = f"429: {len(self._live)} requests wait or run"
            self._leave(sent)
            return
        self._live[index] = sample
        self._outcome.most_running = max(self._outcome.most_running, len(self._live))
        if self._front is None:
            self._add(index)
        else:
            self._front.take(sent, index, asked.prompt)

    def _turn(self) -> None:
        assert self._front is not None
        messages, taken = self._front.turn()
        for at, outputs in messages:
            heapq.heappush(self._messages, (at, next(self._sent_on), outputs))
        for coming in taken:
            heapq.heappush(self._coming, coming)

    def _add(self, index: int) -> None:
        asked, sent = self._asked[index], self._live[index].sent
        request = Request(
            request_id=index,
            prompt_token_ids=self._ids(index),
            params=self._greedy(asked.output),
            arrival_time=sent,
            priority=asked.priority,
            tenant=asked.tenant,
            expects=asked.expects,
        )
        if self._between is not None:
            self._between.add(request, self._now)
            return
        up = range(len(self._cores))
        core = self._cores[0 if self._router is None else self._router.route(request, up)]
        wake(core, self._now)
        core.add(request)

    def _greedy(self, max_tokens: int) -> SamplingParams:
        if max_tokens not in self._params:
            self._params[max_tokens] = SamplingParams(
                temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
            )
        return self._params[max_tokens]

    def _end_step(self) -> None:
        at, _, outputs = heapq.heappop(self._brought)
        if self._front is None:
            self._take(outputs, at)
        else:
            self._front.bring(at, outputs)

    def _show(self) -> None:
        at, _, outputs = heapq.heappop(self._messages)
        self._take(outputs, at)

    def _take(self, outputs: Sequence[SequenceOutput], now: float) -> None:
        for output in outputs:
            sample = self._live[output.request_id]
            sample.arrivals += [now] * len(output.token_ids)
            if output.num_cached_tokens is not None:
                sample.cached_tokens = output.num_cached_tokens
                if self._router is not None:
                    self._router.began(output.request_id)
            if output.finished is not None:
                self._end(output, now)

    def _end(self, output: SequenceOutput, now: float) -> None:
        if len(self._live) == self._room:
            self._full_until = now
        if self._router is not None:
            self._router.ended(output.request_id)
        sample = self._live.pop(output.request_id)
        sample.ended, sample.output_tokens = now, len(sample.arrivals)
        self._outcome.seconds = now
        assert output.finished is not None
        if output.finished.reason is FinishReason.ERROR:
            sample.error = output.finished.message or "error"
        self._go_on(output.request_id, sample, now)

    def _go_on(self, index: int, sample: Sample, now: float) -> None:
        """The next turn of the conversation, once its client has thought; one that failed is over."""
        follower = self._turn_after.get(index)
        if follower is None or sample.error is not None:
            self._leave(now)
        else:
            heapq.heappush(self._later, (now + self._asked[follower].think, follower))

    def _leave(self, now: float) -> None:
        """A conversation is over."""
        if not self._open:
            heapq.heappush(self._free, now)
