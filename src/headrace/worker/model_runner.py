"""One step on one device: rows edited, inputs gathered, forward, sample, and the result read when it is collected.

What lives here: the order of a step and the two submissions it consists of. What may not: building tensors (rows.py),
picking tokens (sampler.py), loading or sizing (worker.py), threads.

``submit`` and ``sample`` are separate so that a row may wait for something (a grammar's mask) between the two. On a
device with a queue neither reads it; ``collect`` does.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from operator import eq
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from headrace.clock import Clock
from headrace.layers.pooling import Pooled
from headrace.parallel.pipeline import Pipe
from headrace.request import Singles, StepPlan, StepResult, TokenLogprobs, TokenMasks
from headrace.worker.passes import ForwardPasses, Pass, Whole
from headrace.worker.rows import Edits, Ints, Packing, ints, places_on, ship_all
from headrace.worker.sampler import RowMasks, SampleBatch, Sampler, Samples, Scores
from headrace.worker.speculator import Drafts, Logprobs, Speculator, Tokens

Events = tuple[torch.cuda.Event, torch.cuda.Event]
Read = tuple[Tokens, Logprobs, Mapping[int, str]]  # of samples, and what was wrong with logits

_NO_MASKS = TokenMasks()
_MOST_IN_FLIGHT = 24  # steps whose events are looked at: more than there ever are, and the one before them
UNUSABLE = "the model's logits for this sequence are unusable (NaN, infinite, or every token ruled out); check its biases and the checkpoint"


@dataclass(slots=True)
class Step:
    """A step under way: everything in it is still on the device, or on its way to the host, until there is a
    ``result``.

    An empty plan has neither packing nor hidden states; one that is replayed as a whole has ``draw``.
    """

    plan: StepPlan  # where drafts are verified, as it is computed
    started: float  # seconds, the runner's clock
    events: Events | None = None  # around the step and its copies to the host; None on a CPU
    number: int = 0  # of the runner's steps
    begun: bool = False  # the first of them is recorded
    packing: Packing | None = None
    hidden: Tensor | None = None  # [tokens, hidden], until it is sampled from
    draw: Callable[[], Ints] | None = None  # see Pass
    graph_tokens: int = 0  # see StepResult
    recorded: bool = False
    proposed: torch.cuda.Event | None = None  # of a step that waits for its masks: where its drafts are on the host,
    computed: torch.cuda.Event | None = None  # and its hidden states are there
    pause: Events | None = None  # around the time that it waited
    samples: tuple[Samples, ...] = ()  # consecutive pieces of the plan's samples, in order
    mailed: bool = False  # they come to the host by themselves
    # index into plan.rows, then ids, logprobs, ranks; in order of position
    prompt: tuple[tuple[int, Tensor, Tensor, Tensor], ...] = ()
    drafts: Drafts | None = None
    pooled: Tensor | None = None  # [samples, width], float32: in place of samples
    result: StepResult | None = None  # of a device without a queue, at once

    @property
    def cancelled(self) -> bool:
        """What it computes is not wanted."""
        return self.drafts is not None and self.drafts.cancelled


@dataclass(frozen=True, slots=True)
class _Awaited:
    """Tokens of a step that another stage samples, and where they go. ``plan``: as it is computed."""

    number: int  # of the runner's steps
    rows: Ints  # [samples]
    positions: Ints  # [samples]
    plan: StepPlan
    drafts: Drafts | None


class StepSeconds(NamedTuple):
    device: float  # from the step's first event to its last, without its pause
    idle: float  # from the last event of the step before to this one's first (0 for the first step), and its pause
    lent: float  # CPU seconds this thread spun until the step was done


class DeviceClock:
    """A CUDA stream's own time: steps of one stream, in order."""

    def __init__(self) -> None:
        self._last: torch.cuda.Event | None = None

    def wait(self, begun: torch.cuda.Event, arrived: torch.cuda.Event, pause: Events | None = None) -> StepSeconds:
        """Returns when ``arrived`` has happened. Waiting spins, and that is no work of the host's. ``pause``: between
        these two events the step had nothing to do, because something it needed was not there."""
        before = time.thread_time()
        arrived.synchronize()
        lent = time.thread_time() - before
        idle = self._last.elapsed_time(begun) / 1e3 if self._last is not None else 0.0
        self._last = arrived
        paused = max(0.0, pause[0].elapsed_time(pause[1]) / 1e3) if pause is not None else 0.0
        return StepSeconds(begun.elapsed_time(arrived) / 1e3 - paused, max(0.0, idle) + paused, lent)


class ModelRunner:
    """Runs plans over one decoder, one KV cache and one set of rows. ``max_logits_rows`` bounds how many rows of logits
    exist at once."""

    def __init__(
        self,
        passes: ForwardPasses,
        *,
        max_logits_rows: int,
        clock: Clock,
        queued: bool | None = None,  # by the rows' device
        speculator: Speculator | None = None,
        pipe: Pipe | None = None,
    ) -> None:
        """``pipe``: between the stages of a pipeline, of which this decoder is one."""
        self.passes = passes
        self.decoder, self._rows, self._kv_caches = passes.decoder, passes.rows, passes.kv_caches
        self._sampler = Sampler(passes.rows, passes.kernels)
        self._pipe = pipe
        self._awaited: deque[_Awaited] = deque()  # tokens that are sampled in the last stage
        self._number = self._collected = 0
        self._max_logits_rows = max_logits_rows
        self._clock = clock
        self._device_clock = DeviceClock()
        self._speculator = speculator
        self._verifying: deque[Step] = deque()  # steps of a queue whose rows' lengths are not known yet
        self._events = _pairs_of_events()
        # Where steps are queued. Asking torch for it each time takes longer than recording an event.
        device = self._rows.device
        queued = device.type == "cuda" if queued is None else queued
        self._stream = torch.cuda.current_stream(device) if queued else None

    @property
    def queued(self) -> bool:
        """Whether steps wait in a queue of the device until they are collected."""
        return self._stream is not None

    def submit(self, plan: StepPlan) -> Step:
        """The step, or where samples wait for their masks, the step as far as its hidden states. A queue is waited for
        by ``collect`` alone."""
        with torch.inference_mode():
            self._number += 1
            self._take_tokens(plan)
            step = self._forward(plan)
            return step if plan.masked else self._sample(step, _NO_MASKS)

    def drafts(self, step: Step) -> list[list[int]]:
        """Of a step that waits for its masks: what is proposed after each of its samples."""
        if step.proposed is not None:
            step.proposed.synchronize()
        return step.drafts.lists() if step.drafts is not None else []

    def sample(self, step: Step, masks: TokenMasks = _NO_MASKS) -> Step:
        """The rest of a step that waited for its masks."""
        with torch.inference_mode():
            return self._sample(step, masks)

    def collect(self, step: Step) -> StepResult:
        """Waits for the device, and brings the step's results to the host."""
        if step.result is None:
            step.result = self._read(step)
        self._collected = step.number
        return step.result

    def _take_tokens(self, plan: StepPlan | None = None) -> None:
        """What the last stage has sampled in steps so long ago, or collected already, that ``plan`` may go on from it.
        (A plan names no row whose token may still be on its way, unless it goes on from guesses: Scheduler,
        ``stages``.) None: all of it."""
        pipe = self._pipe
        while self._awaited and pipe is not None:
            awaited = self._awaited[0]
            if plan is not None and awaited.number > self._known(pipe, plan):
                return
            picked = torch.empty(len(awaited.rows), 2, dtype=torch.int32, device=self._rows.device)
            self._take_picked(awaited, pipe.receive_tokens(picked))
            self._awaited.popleft()

    def _known(self, pipe: Pipe, plan: StepPlan) -> int:
        """The last step whose tokens this stage goes on from: one that has passed the last stage meanwhile. The first
        stage needs what has been collected; others, whose ranks are not told of that in step, what refutes guesses."""
        ago = self._number - pipe.stages
        if self.decoder.embeds:
            return max(self._collected, ago)
        return ago + pipe.stage * any(map(eq, plan.drafts, plan.counts))

    def _take_picked(self, awaited: _Awaited, picked: Tensor) -> None:
        """``picked`` [samples, 2]: tokens, and whether they are usable."""
        if awaited.drafts is not None:
            tokens, _, wrong = _read_samples([Samples(picked, None)])
            self._accept(awaited.plan, awaited.drafts, tokens, {}, wrong)
            return
        self._rows.put(awaited.rows, awaited.positions, picked[:, 0])

    def run(self, plan: StepPlan, masks: TokenMasks | None = None) -> StepResult:
        """All of it. ``masks``: of a plan that waits for them."""
        step = self.submit(plan)
        result = self.collect(step if masks is None else self.sample(step, masks))
        self._take_tokens()  # another runner may follow this one
        return result

    # --- as far as hidden states

    def _forward(self, plan: StepPlan) -> Step:
        """Edits rows, copies blocks, computes every planned token."""
        events = None if self._stream is None else next(self._events)
        step = Step(plan, self._clock.now(), events, number=self._number)
        if self._speculator is not None:
            self._await_lengths()
            self._speculator.leave(plan)
        whole = self.passes.edit(plan)
        if plan.copy_group:
            self._copy_blocks(plan)
        if self._speculator is not None:
            if plan.drafts:
                self._begin(step)  # drafting is part of it
            step.plan, step.drafts = self._speculator.begin(plan)
        if plan.masked and step.drafts is not None:
            self.passes.release()
            if self._stream is None:
                return step  # computed without the drafts that grammars refute; a queue goes on, its tokens cost less
            step.proposed = _recorded()
        self._compute(step, whole)
        if plan.masked and self._stream is not None:
            step.computed = _recorded()
        return step

    def _await_lengths(self) -> None:
        """A step after one that verifies drafts, on a device with a queue, waits until it is known how long its rows
        are."""
        while self._verifying:
            step = self._verifying.popleft()
            if step.result is None:
                step.result = self._read(step)

    def _begin(self, step: Step) -> None:
        """Once the host has its part done: what the device waited for that is idle time, not this step's."""
        if step.events is not None and not step.begun:
            step.begun = True
            step.events[0].record(self._stream)

    def _compute(self, step: Step, whole: tuple[Whole, Edits] | None = None) -> None:
        """``whole``: as ``edit`` has found."""
        found = None
        if whole is not None:
            found = self.passes.whole(step.plan, *whole)
        elif step.plan.rows:
            found = self.passes.of(step.plan, step.drafts)
        if found is None or self.decoder.embeds:  # else it begins once it has what it goes on from
            self._begin(step)
        if found is not None:
            step.packing, step.draw, step.graph_tokens = found.packing, found.draw, found.graph_tokens
            step.hidden = found.compute() if self._pipe is None else self._through(self._pipe, step, found)

    def _through(self, pipe: Pipe, step: Step, found: Pass) -> Tensor | None:
        """What one stage computes. What it waits for the one before is idle time."""
        begun = None
        if found.entry is not None and not self.decoder.embeds:
            begun = found.entry()
            if step.drafts is None or not step.drafts.unsent:
                pipe.receive(begun)
            self._begin(step)
            if step.cancelled:
                return begun
        hidden = found.compute(begun)
        if hidden is not None and not self.decoder.answers:
            pipe.send(hidden)
        return hidden

    # --- from there to the host

    def _sample(self, step: Step, masks: TokenMasks) -> Step:
        """Picks a token for every sampled row, within its mask if it has one, and scores the prompts that asked for
        it."""
        if step.computed is not None:
            step.pause = step.computed, _recorded()
        if step.plan.masked and step.drafts is not None:
            masks = self._cut(step, masks)
        if step.draw is not None:
            step.samples, step.mailed = (Samples(step.draw()),), True
        elif step.packing is not None and step.hidden is not None:
            self._sample_eagerly(step, step.packing, step.hidden, masks)
            step.hidden = None  # whatever the next step allocates may lie there
        if step.events is None:
            step.result = self._read(step)
            return step
        if not step.mailed:
            _to_host(step)
        if step.drafts is not None and self.decoder.answers:
            self._verifying.append(step)
        step.events[1].record(self._stream)
        step.recorded = self.passes.record()
        return step

    def _cut(self, step: Step, masks: TokenMasks) -> TokenMasks:
        """Drafts that grammars refute are not verified; on a CPU they are not computed either."""
        assert step.drafts is not None and self._speculator is not None
        queued = self._stream is not None
        step.plan, step.drafts, samples = self._speculator.cut(step.plan, step.drafts, masks.samples, computed=queued)
        if not queued:
            self._compute(step)
        return replace(masks, samples=tuple(samples))

    def _sample_eagerly(self, step: Step, packing: Packing, hidden: Tensor, masks: TokenMasks) -> None:
        plan = step.plan
        if self.decoder.pooler is not None:
            step.pooled = self._pool(plan, packing, hidden)
            return
        if not self.decoder.answers:
            self._await_tokens(step, packing)
            return
        if step.cancelled and self._pipe is not None:
            picked = torch.zeros(len(plan.sample_rows), 2, dtype=torch.int32, device=self._rows.device)
            self._pipe.send_tokens(picked, to_all=True)
            step.samples = (Samples(picked, None),)
            return
        if step.drafts is None and not masks.samples:
            tokens = self.passes.drawn(plan, packing, hidden)
            if tokens is not None:
                step.samples, step.mailed = (Samples(tokens),), True
                return
        pieces = self._pieces(len(plan.sample_rows))
        step.samples = tuple(self._sample_piece(plan, packing, hidden, piece, masks) for piece in pieces)
        scored = (
            (index, *score)
            for index in plan.prompt_logprobs
            for score in self._score_prompt(plan, packing, hidden, index)
        )
        step.prompt = tuple(scored)
        if self._pipe is not None and step.samples:
            picked = torch.cat([torch.as_tensor(each.picked) for each in step.samples])
            self._pipe.send_tokens(picked, to_all=step.drafts is not None)

    def _await_tokens(self, step: Step, packing: Packing) -> None:
        """The first stage goes on from them; those between learn of drafts that are refuted."""
        plan = step.plan
        if (self.decoder.embeds or step.drafts is not None) and plan.sample_rows:
            rows = ints(plan.sample_rows)
            positions = packing.position[packing.sampled(plan)] + 1
            self._awaited.append(_Awaited(step.number, rows, positions, plan, step.drafts))

    def _pool(self, plan: StepPlan, packing: Packing, hidden: Tensor) -> Tensor | None:  # [samples, width], float32
        """Of the prompts that this step completes."""
        if not plan.sample_work:
            return None
        first, last = packing.begun(plan), packing.sampled(plan)
        if packing.wanted is not None:  # nothing else was computed to the end
            first = last = packing.hidden_rows(first if self.passes.pools_first else last)
        places = ship_all(self._rows.device, first, last)
        return self.decoder.pooled(hidden, Pooled(places[0].long(), places[1].long()))

    def _read(self, step: Step) -> StepResult:
        taken = None if step.events is None else self._device_clock.wait(*step.events, step.pause)
        tokens, scores, errors = _read_samples(step.samples)
        pooled: Mapping[int, bytes] = {}
        if step.pooled is not None:
            tokens, pooled, errors = _read_pooled(step.pooled)
        drafted: Sequence[int] = ()
        ahead = None if step.drafts is None else step.drafts.proposal.ahead
        if step.drafts is not None and self.decoder.answers:
            drafted = step.drafts.counts
            tokens, scores, errors = self._accept(step.plan, step.drafts, tokens, scores, errors)
        if taken is None:  # a device without a clock of its own
            device, idle, lent = self._clock.now() - step.started, None, 0.0
        else:
            device, idle, lent = taken
        prompt = _read_prompt(step) if step.plan.prompt_logprobs else {}
        found = step.plan.step_id, tokens, scores, prompt, errors, device, idle, step.graph_tokens, step.recorded
        return StepResult(*found, lent, drafted, ahead, pooled)

    def _accept(
        self,
        plan: StepPlan,
        drafts: Drafts,
        tokens: Tokens,
        logprobs: Logprobs,
        errors: Mapping[int, str],
    ) -> Read:
        """What rows get of their samples, as Speculator.end has it; it is counted."""
        assert self._speculator is not None
        taken, scores, wrong = self._speculator.end(plan, drafts, tokens, logprobs, errors)
        self._sampler.count(drafts.rows, taken)
        return taken, scores, wrong

    def forget(self) -> None:
        """Drops every row; KV blocks stay as they are, and what happened so far is no step's idle time."""
        self._take_tokens()
        self.passes.forget()
        self._verifying.clear()
        if self._speculator is not None:
            self._speculator.forget()
        self._device_clock = DeviceClock()

    def _copy_blocks(self, plan: StepPlan) -> None:
        for group, source, target in zip(plan.copy_group, plan.copy_source, plan.copy_target, strict=True):
            self._kv_caches[group][target].copy_(self._kv_caches[group][source], non_blocking=True)

    def _pieces(self, count: int) -> Iterator[slice]:
        for first in range(0, count, self._max_logits_rows):
            yield slice(first, min(first + self._max_logits_rows, count))

    def _sample_piece(
        self, plan: StepPlan, packing: Packing, hidden: Tensor, piece: slice, masks: TokenMasks
    ) -> Samples:
        places, source = np.unique(packing.sampled(plan)[piece], return_inverse=True)
        batch = SampleBatch(
            rows=ints(plan.sample_rows)[piece],
            positions=packing.position[places][source] + 1,
            source=source.astype(np.int32),
            drafts=_drafts_before(plan, piece) if plan.sample_back else None,
            masks=_masks_of(masks, piece) if masks.samples else None,
        )
        picked = hidden[places_on(self._rows.device, packing.hidden_rows(places))[0]]
        return self._sampler.sample(self.passes.logits(picked, ints(plan.rows)[packing.chunk[places]]), batch)

    def _score_prompt(
        self, plan: StepPlan, packing: Packing, hidden: Tensor, index: int
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Scores of the known next tokens of one chunk: position p scores token p + 1, as far as the prompt goes."""
        row, start = plan.rows[index], plan.starts[index]
        num_scored = min(plan.counts[index], int(self._rows.num_prompt_tokens[row]) - 1 - start)
        num_best = self._rows.host[row].params.prompt_logprobs or 0
        first_packed = int(packing.last[index]) + 1 - plan.counts[index]
        for piece in self._pieces(num_scored):
            scored = hidden[first_packed + piece.start : first_packed + piece.stop]
            logits = self.passes.logits(scored, np.full(len(scored), row, dtype=np.int32))
            targets = self._rows.token_ids[row, start + piece.start + 1 : start + piece.stop + 1].long()
            yield self._sampler.score(logits, targets, num_best)


def _pairs_of_events() -> Iterator[Events]:
    """A step's beginning and end, made once and used in turn: making one takes as long as recording it."""
    yield from cycle(
        [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(_MOST_IN_FLIGHT)]
    )


def _recorded() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _drafts_before(plan: StepPlan, piece: slice) -> Ints:
    """Drafts of the same chunk that stand before the place of each sample."""
    work = ints(plan.sample_work)[piece]
    back = ints(plan.sample_back)[piece]
    return ints(plan.drafts)[work] - back


def _masks_of(masks: TokenMasks, piece: slice) -> RowMasks | None:
    """Those of the samples in ``piece``, counted from its first."""
    samples = ints(masks.samples)
    inside = (samples >= piece.start) & (samples < piece.stop)
    words = np.frombuffer(masks.words, dtype=np.int32).reshape(len(samples), masks.words_each)
    return RowMasks(samples[inside] - piece.start, words[inside]) if inside.any() else None


def _to_host(step: Step) -> None:
    """Starts the copies of everything that ``_read`` looks at, into pinned memory."""

    def home(tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)

    def scores_home(scores: Scores | None) -> Scores | None:
        return scores and replace(
            scores, ids=home(scores.ids), logprobs=home(scores.logprobs), ranks=home(scores.ranks)
        )

    step.pooled = None if step.pooled is None else home(step.pooled)
    step.samples = tuple(Samples(home(torch.as_tensor(each.picked)), scores_home(each.scores)) for each in step.samples)
    step.prompt = tuple((index, home(ids), home(logprobs), home(ranks)) for index, ids, logprobs, ranks in step.prompt)


def _table(samples: Samples) -> Ints:  # [samples, 2]
    return samples.picked.cpu().numpy() if isinstance(samples.picked, Tensor) else samples.picked


def _read_samples(pieces: Sequence[Samples]) -> Read:
    """Tokens, logprobs and what was wrong with logits, by sample."""
    logprobs: dict[int, tuple[TokenLogprobs, ...]] = {}
    errors: dict[int, str] = {}
    if len(pieces) == 1 and pieces[0].scores is None and (table := _table(pieces[0]))[:, 1].all():
        return Singles(table[:, 0].copy()), logprobs, errors
    tokens: list[tuple[int, ...]] = []
    for samples in pieces:
        first, table = len(tokens), _table(samples)
        usable = table[:, 1]
        tokens += zip(table[:, 0].tolist())  # one-tuples
        if not usable.all():
            bad = [first + j for j, ok in enumerate(usable) if not ok]
            errors.update(dict.fromkeys(bad, UNUSABLE))
            for index in bad:
                tokens[index] = ()
        if samples.scores is not None:
            logprobs.update({first + j: (entry,) for j, entry in _read_scores(samples.scores) if usable[j]})
    return tokens, logprobs, errors


def _read_pooled(pooled: Tensor) -> tuple[Tokens, Mapping[int, bytes], Mapping[int, str]]:
    """A token that means nothing for each, values, and what was wrong with them."""
    values = pooled.cpu().numpy()
    usable = np.isfinite(values).all(axis=1)
    found = {j: row.tobytes() for j, row in enumerate(values) if usable[j]}
    return Singles([0] * len(values)), found, {int(j): UNUSABLE for j in np.flatnonzero(~usable)}


def _read_scores(scores: Scores) -> Iterator[tuple[int, TokenLogprobs]]:
    lists = zip(
        scores.which.tolist(),
        scores.num_best,
        scores.ids.tolist(),
        scores.logprobs.tolist(),
        scores.ranks.tolist(),
        strict=True,
    )
    for j, num_best, ids, logprobs, rank in lists:
        yield j, TokenLogprobs(tuple(ids[: 1 + num_best]), tuple(logprobs[: 1 + num_best]), rank)


def _read_prompt(step: Step) -> dict[int, tuple[TokenLogprobs, ...]]:
    entries: dict[int, tuple[TokenLogprobs, ...]] = {index: () for index in step.plan.prompt_logprobs}
    for index, ids, logprobs, ranks in step.prompt:
        piece = zip(ids.tolist(), logprobs.tolist(), ranks.tolist(), strict=True)
        entries[index] += tuple(TokenLogprobs(tuple(i), tuple(p), rank) for i, p, rank in piece)
    return entries
