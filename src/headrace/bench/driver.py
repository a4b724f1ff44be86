"""Runs conversations through an engine core in this process, without text and without transport.

Open loop (conversations with arrivals) and closed loop (without), on the core's own clock: for benchmarks of a
technique, which should measure the engine and nothing else.

What lives here: the loop that adds what is due and steps. What may not: figures (planner/workload/), engines'
configuration.
"""

from __future__ import annotations

import heapq
import itertools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace.engine.core import EngineCore
from headrace.planner.workload.conversations import Conversation, Turn
from headrace.planner.workload.statistics import Sample
from headrace.request import FinishReason, Request, SamplingParams, SequenceOutput


@dataclass(slots=True)
class Run:
    """The result: one sample and one answer per turn, in order of completion; ``seconds`` from start to the last
    token."""

    samples: list[Sample] = field(default_factory=list)
    answers: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)  # (conversation, turn) → token ids
    seconds: float = 0.0
    steps: int = 0
    most_running: int = 0  # turns under way at once
    most_scheduled: int = 0  # sequences that got a token in one step

    @property
    def output_tokens(self) -> int:
        return sum(sample.output_tokens for sample in self.samples)


@dataclass(slots=True)
class _Live:
    """A turn in progress."""

    conversation: int
    turn: int
    prompt: array[int]
    sample: Sample
    token_ids: list[int] = field(default_factory=list)


class Driver:
    """One run of one workload. ``max_concurrency`` bounds how many conversations have a turn in progress at once."""

    def __init__(
        self, core: EngineCore, conversations: Sequence[Conversation], *, max_concurrency: int | None = None
    ) -> None:
        self._core = core
        self._clock = core.clock
        self._conversations = conversations
        self._room = max_concurrency if max_concurrency is not None else len(conversations)
        self._ids = itertools.count()
        self._live: dict[int, _Live] = {}
        self._run = Run()
        self._origin = self._clock.now()
        self._due: list[tuple[float, int, int, array[int]]] = []  # (seconds, conversation, turn, history)
        for index, conversation in enumerate(conversations):
            heapq.heappush(self._due, (self._origin + (conversation.arrival or 0.0), index, 0, array("i")))

    def run(self) -> Run:
        core, clock = self._core, self._clock
        while self._due or self._live:
            self._send_due()
            if core.has_work:
                self._take(core.step())
                self._run.steps += 1
            elif self._due:
                clock.sleep_until(self._due[0][0])
        while core.has_work:  # steps still in flight
            core.step()
        return self._run

    def _send_due(self) -> None:
        while self._due and len(self._live) < self._room and self._due[0][0] <= self._clock.now():
            due, index, turn, history = heapq.heappop(self._due)
            open_loop = turn > 0 or self._conversations[index].arrival is not None
            self._send(index, turn, history, due if open_loop else None)

    def _send(self, index: int, number: int, history: array[int], due: float | None) -> None:
        turn = self._conversations[index].turns[number]
        prompt = history + array("i", turn.new_ids)
        request_id = next(self._ids)
        now = self._clock.now()
        self._live[request_id] = _Live(index, number, prompt, Sample(sent=now, due=due, prompt_tokens=len(prompt)))
        self._run.most_running = max(self._run.most_running, len(self._live))
        adapter = self._conversations[index].adapter
        self._core.add(
            Request(
                request_id=request_id, prompt_token_ids=prompt, params=greedy(turn), arrival_time=now, adapter=adapter
            )
        )

    def _take(self, outputs: Sequence[SequenceOutput]) -> None:
        now = self._clock.now()
        self._run.most_scheduled = max(self._run.most_scheduled, len(outputs))
        for output in outputs:
            live = self._live.get(output.request_id)
            if live is not None:  # surplus of an answer that was stopped
                self._take_one(live, output, now)

    def _take_one(self, live: _Live, output: SequenceOutput, now: float) -> None:
        if output.token_ids:
            live.sample.arrivals.append(now)
            live.token_ids += output.token_ids
        if output.num_cached_tokens is not None:
            live.sample.cached_tokens = output.num_cached_tokens
        stop_after = self._conversations[live.conversation].turns[live.turn].stop_after
        if output.finished is not None:
            if output.finished.reason is FinishReason.ERROR:
                live.sample.error = output.finished.message or "error"
            self._end(output.request_id, now)
        elif stop_after is not None and len(live.token_ids) >= stop_after:  # as a stop string would end it
            self._core.finish(output.request_id, 0, stop_after)
            self._end(output.request_id, now)

    def _end(self, request_id: int, now: float) -> None:
        live = self._live.pop(request_id)
        live.sample.ended, live.sample.output_tokens = now, len(live.token_ids)
        self._run.samples.append(live.sample)
        self._run.answers[live.conversation, live.turn] = tuple(live.token_ids)
        self._run.seconds = now - self._origin
        turns = self._conversations[live.conversation].turns
        if live.turn + 1 < len(turns) and live.sample.error is None:
            history = live.prompt + array("i", live.token_ids)
            heapq.heappush(
                self._due, (now + turns[live.turn + 1].think_seconds, live.conversation, live.turn + 1, history)
            )


def greedy(turn: Turn) -> SamplingParams:
    """Exactly ``max_tokens`` tokens, the most probable ones; with structured output, at most as many as it takes."""
    return SamplingParams(
        temperature=0.0,
        max_tokens=turn.max_tokens,
        ignore_eos=True,
        detokenize=False,
        structured_outputs=turn.structured,
    )


def drive(core: EngineCore, conversations: Sequence[Conversation], *, max_concurrency: int | None = None) -> Run:
    return Driver(core, conversations, max_concurrency=max_concurrency).run()
