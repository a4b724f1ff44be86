"""One step on one device: rows edited, inputs gathered, forward, sample, and the result read when it is collected.

What lives here: the order of a step and the two submissions it consists of. What may not: building tensors (rows.py),
picking tokens (sampler.py), loading or sizing (worker.py), threads.

``submit`` and ``sample`` are separate so that a row may wait for something (a grammar's mask) between the two. On a
device with a queue neither reads it; ``collect`` does.
"""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from operator import eq

import numpy as np
import torch
from torch import Tensor

from headrace.clock import Clock
from headrace.kernels import Kernels
from headrace.kernels.inputs import AdapterRows, ForwardInputs, adapter_rows
from headrace.layers.pooling import Pooled
from headrace.lora.device import DeviceAdapters
from headrace.models.decoder import Decoder
from headrace.parallel.pipeline import Pipe
from headrace.request import NO_SLOT, Singles, StepPlan, StepResult, TokenLogprobs, TokenMasks
from headrace.worker.arena import Arena
from headrace.worker.branches import branched
from headrace.worker.graphs import DecodeGraphs
from headrace.worker.prompt_graphs import PromptGraphs
from headrace.worker.rows import Gather, Ints, Packing, Rows, ints, pack, places_on, ship_all
from headrace.worker.sampler import Draw, RowMasks, SampleBatch, Sampler, Samples, Scores, draw_of
from headrace.worker.speculator import Drafts, Speculator

Events = tuple[torch.cuda.Event, torch.cuda.Event]

_NO_MASKS = TokenMasks()
_MOST_IN_FLIGHT = 24  # steps whose events are looked at: more than there ever are, and the one before them
UNUSABLE = "the model's logits for this sequence are unusable (NaN, infinite, or every token ruled out); check its biases and the checkpoint"


@dataclass(frozen=True, slots=True)
class Drawn:
    """A step that graphs take as a whole: its plan's arrays, its rows once more as they are written, how its tokens are
    drawn."""

    rows: array[int]
    counts: array[int]
    sample_work: array[int]
    sample_rows: array[int]
    on_host: Ints  # [rows]
    how: Draw
    adapted: bool  # some have adapters

    def is_of(self, plan: StepPlan) -> bool:
        """By identity: arrays of plans do not change."""
        return (
            plan.rows is self.rows
            and plan.counts is self.counts
            and plan.sample_work is self.sample_work
            and plan.sample_rows is self.sample_rows
        )


@dataclass(slots=True)
class Step:
    """A step under way: everything in it is still on the device, or on its way to the host, until there is a
    ``result``.

    An empty plan has neither packing nor hidden states, nor has a ``drawn`` step: a graph of ``bucket`` rows computes
    it, and another draws.
    """

    plan: StepPlan  # where drafts are verified, as it is computed
    started: float  # seconds, the runner's clock
    events: Events | None = None  # around the step and its copies to the host; None on a CPU
    number: int = 0  # of the runner's steps
    begun: bool = False  # the first of them is recorded
    packing: Packing | None = None
    hidden: Tensor | None = None  # [tokens, hidden], until it is sampled from
    drawn: Drawn | None = None
    bucket: int = 0
    graph_tokens: int = 0  # see StepResult
    recorded: bool = False
    proposed: torch.cuda.Event | None = None  # of a step that waits for its masks: where its drafts are on the host,
    computed: torch.cuda.Event | None = None  # and its hidden states are there
    pause: Events | None = None  # around the time that it waited
    samples: tuple[Samples, ...] = ()  # consecutive pieces of the plan's samples, in order
    mailed: bool = False  # a graph brings them to the host
    # index into plan.rows, then ids, logprobs, ranks; in order of position
    prompt: tuple[tuple[int, Tensor, Tensor, Tensor], ...] = ()
    drafts: Drafts | None = None
    pooled: Tensor | None = None  # [samples, width], float32: in place of samples
    result: StepResult | None = None  # of a device without a queue, at once

    @property
    def cancelled(self) -> bool:
        """Nobody wants what it computes."""
        return self.drafts is not None and self.drafts.cancelled


@dataclass(frozen=True, slots=True)
class _Awaited:
    """Tokens of a step that another stage samples, and where they go. ``plan``: as it is computed."""

    number: int  # of the runner's steps
    rows: Ints  # [samples]
    positions: Ints  # [samples]
    plan: StepPlan
    drafts: Drafts | None


@dataclass(frozen=True, slots=True)
class StepSeconds:
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
    """Runs plans over one decoder, one KV cache and one set of rows.

    ``max_logits_rows`` bounds how many rows of logits exist at once. ``padded`` fills every sequence up to the longest.
    ``prune``: the last layer computes no more than is read (of a prompt, its last token). ``arena``: what ``kernels``
    take their results' memory from, in steps that no graph computes. ``adapters``: None where rows have none.
    """

    def __init__(
        self,
        decoder: Decoder,
        kv_caches: Sequence[Tensor],  # one a KV group: [blocks, layers, 2, kv_heads, block_size, head_dim]
        rows: Rows,
        kernels: Kernels,
        *,
        max_logits_rows: int,
        padded: bool,
        prune: bool = False,
        clock: Clock,
        graphs: DecodeGraphs | None = None,
        prompt_graphs: PromptGraphs | None = None,
        arena: Arena | None = None,
        adapters: DeviceAdapters | None = None,
        queued: bool | None = None,  # by the rows' device
        speculator: Speculator | None = None,
        pipe: Pipe | None = None,
    ) -> None:
        """``pipe``: between the stages of a pipeline, of which this decoder is one."""
        self.decoder = decoder
        self._pipe = pipe
        self._awaited: deque[_Awaited] = deque()  # tokens that are sampled in the last stage
        self._number = self._collected = 0
        self._arena = arena
        self._adapters = adapters
        self.graphs = graphs
        self.prompt_graphs = prompt_graphs
        self._kv_caches = tuple(kv_caches)
        self._rows = rows
        self._gather = Gather(rows, kernels)
        self._sampler = Sampler(rows, kernels)
        self._max_logits_rows = max_logits_rows
        self._padded = padded
        pooling = decoder.spec.pooling
        self._prune = prune and decoder.spec.answers
        self._first = pooling is not None and pooling.kind == "cls"
        self._clock = clock
        self._device_clock = DeviceClock()
        self._speculator = speculator
        self._verifying: deque[Step] = deque()  # steps of a queue whose rows' lengths are not known yet
        self._last_drawn: Drawn | None = None
        self._events = _pairs_of_events()
        self._every = array("i", range(len(rows.traits)))
        # Where steps are queued. Asking torch for it each time takes longer than recording an event.
        queued = rows.device.type == "cuda" if queued is None else queued
        self._stream = torch.cuda.current_stream(rows.device) if queued else None

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
        """Of a step that waits for its masks: what is proposed behind each of its samples."""
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
        if plan.adapters and self._adapters is not None:
            self._bring(self._adapters, plan)
        edits, drawn = self._rows.edits_of(plan), None
        if edits is not None and (drawn := self._drawn(plan)) is not None:
            self._rows.drop(plan)
        else:
            edits = (), (), ()
            self._rows.apply(plan)
            drawn = self._drawn(plan)
        if plan.copy_group:
            self._copy_blocks(plan)
        if self._speculator is not None:
            if plan.drafts:
                self._begin(step)  # drafting is part of it
            step.plan, step.drafts = self._speculator.begin(plan)
        if plan.masked and step.drafts is not None:
            if self._stream is None:
                return step  # computed without the drafts that grammars refute; a queue goes on, its tokens cost less
            step.proposed = _recorded()
        if drawn is not None and self.graphs is not None:
            context = ints(plan.starts) + 1
            step.bucket = self.graphs.write(
                drawn.on_host, context, edits, shared_tokens=plan.shared_tokens, adapted=drawn.adapted
            )
            self._begin(step)
            self.graphs.compute(step.bucket, drawn.how)
            step.drawn = drawn
        else:
            self._compute(step)
        if plan.masked and self._stream is not None:
            step.computed = _recorded()
        return step

    def _bring(self, adapters: DeviceAdapters, plan: StepPlan) -> None:
        if not adapters.bring(plan.adapters):
            return
        self._last_drawn = None
        for graphs in (self.graphs, self.prompt_graphs):
            if graphs is not None:
                graphs.forget_adapted()

    def _await_lengths(self) -> None:
        """A step behind one that verifies drafts, on a device with a queue, waits until it is known how long its rows
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

    def _compute(self, step: Step) -> None:
        """A step that goes on eagerly from its hidden states."""
        plan = step.plan
        packing = pack(plan, padded=self._padded, prune=self._prune, first=self._first) if plan.rows else None
        if packing is not None and step.drafts is not None and step.drafts.trees:
            packing = branched(packing, step.drafts.trees)
        if packing is not None and plan.drafts and self._verify_drawn(step, packing):
            return
        compute, graph_tokens = (None, 0) if packing is None else self._prepared(step, packing)
        if packing is None or self.decoder.embeds:  # else it begins once it has what it goes on from
            self._begin(step)
        if compute is not None:
            step.packing, step.hidden, step.graph_tokens = packing, compute(), graph_tokens

    def _verify_drawn(self, step: Step, packing: Packing) -> bool:
        """Whether graphs compute a step that verifies drafts and draw at all of its tokens."""
        plan, graphs, tokens = step.plan, self.graphs, len(packing.chunk)
        rows = ints(plan.rows)
        how = draw_of(self._rows.traits[rows])
        if graphs is None or how is None or not self._chains(plan, packing) or not graphs.draws(tokens):
            return False
        rows = rows[packing.chunk]
        step.bucket = graphs.write(rows, packing.position + 1, chained=True, tree=_tree_of(packing))
        self._begin(step)
        graphs.compute(step.bucket, how)
        step.drawn = Drawn(plan.rows, plan.counts, plan.sample_work, plan.sample_rows, rows, how, adapted=False)
        return True

    def _chains(self, plan: StepPlan, packing: Packing) -> bool:
        """Whether a graph of decode steps computes this one, each of its tokens as a row: every one of them is sampled
        from, in order."""
        tokens = len(packing.chunk)
        if (
            self.graphs is None
            or plan.prompt_logprobs
            or not self.graphs.serves(tokens)
            or self._slots(plan.rows) is not None
        ):
            return False
        return not self._padded and np.array_equal(packing.sampled(plan), np.arange(tokens))

    def _prepared(self, step: Step, packing: Packing) -> tuple[Callable[[], Tensor], int]:
        """The step's inputs on their way to the device; what computes its hidden states from them, and the tokens of a
        prompt graph that does."""
        plan = step.plan
        graphs, prompts, slots = self.graphs, self.prompt_graphs, self._slots(plan.rows)
        if (
            graphs is not None
            and len(packing.chunk) == len(plan.rows)
            and self._serves(graphs, len(plan.rows), adapted=slots is not None)
        ):
            rows, shared = ints(plan.rows), plan.shared_tokens
            bucket = graphs.write(rows, packing.context, shared_tokens=shared, adapted=slots is not None)
            return partial(self._replayed, step, graphs, bucket, len(rows)), 0
        if graphs is not None and self._pipe is None and plan.drafts and self._chains(plan, packing):
            rows = ints(plan.rows)[packing.chunk]
            bucket = graphs.write(rows, packing.position + 1, chained=True, tree=_tree_of(packing))
            return partial(graphs.hidden, bucket, len(rows)), 0
        if prompts is not None and not plan.drafts and (shape := prompts.shape_of(plan, packing)) is not None:
            prompts.write(shape, plan, packing)
            wanted = packing.chunk if packing.wanted is None else packing.wanted
            adapted = slots is not None
            compute = partial(prompts.compute, shape, len(wanted), adapted=adapted)
            return compute, shape.tokens if prompts.replays(shape, adapted=adapted) else 0
        return partial(self._computed, step, self._gather.inputs(plan, packing, slots)), 0

    @staticmethod
    def _serves(graphs: DecodeGraphs, count: int, *, adapted: bool) -> bool:
        return graphs.adapts(count) if adapted else graphs.serves(count)

    def _slots(self, rows: Sequence[int] | Ints) -> Ints | None:
        """Of these rows' adapters; None where none has one."""
        if self._adapters is None:
            return None
        slots = self._rows.adapter_slots[np.asarray(rows)]
        return slots if (slots != NO_SLOT).any() else None

    def _adapted(self, rows: Ints) -> AdapterRows | None:
        """What the head is told of hidden states of these rows."""
        slots = self._slots(rows) if self._adapters is not None and self._adapters.slots.head_touched else None
        return None if slots is None else adapter_rows(slots, self._rows.device)

    def _computed(self, step: Step, inputs: ForwardInputs) -> Tensor:
        """Hidden states. Nothing else of the forward pass is read when another has been queued."""
        compute = partial(self.decoder.forward, inputs, self._kv_caches)
        if self._pipe is not None:
            shape = len(inputs.token_ids), self.decoder.spec.hidden_size
            entry = partial(torch.empty, shape, dtype=self._kv_caches[0].dtype, device=self._rows.device)
            return self._through(self._pipe, step, entry, partial(self.decoder.forward, inputs, self._kv_caches))
        if self._arena is None:
            return compute()
        wanted = None if inputs.wanted is None else len(inputs.wanted)
        tokens = len(inputs.token_ids)
        changed = 0 if inputs.adapters is None or self._adapters is None else self._adapters.slots.changed
        kind = self.decoder.composed(tokens), inputs.attention[0].max_query_len == 1, inputs.alone is not None, changed
        return self._arena.run(compute, tokens, wanted, kind=kind)

    def _replayed(self, step: Step, graphs: DecodeGraphs, bucket: int, count: int) -> Tensor:
        """The same of a step that a graph computes."""
        if self._pipe is None:
            return graphs.hidden(bucket, count)

        def compute(_: Tensor | None) -> Tensor:
            hidden = graphs.hidden(bucket, count)
            return hidden if self.decoder.answers else hidden.clone()  # the next replay may be before it is sent

        return self._through(self._pipe, step, partial(graphs.entry, bucket, count), compute)

    def _through(
        self, pipe: Pipe, step: Step, entry: Callable[[], Tensor], compute: Callable[[Tensor | None], Tensor]
    ) -> Tensor:
        """What one stage computes, from what comes to lie in ``entry``. What it waits for the one before is idle
        time."""
        begun = None
        if not self.decoder.embeds:
            begun = entry()
            if step.drafts is None or not step.drafts.unsent:
                pipe.receive(begun)
            self._begin(step)
        if step.cancelled and begun is not None:
            return begun
        hidden = compute(begun)
        if not self.decoder.answers:
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
        if step.drawn is not None and self.graphs is not None:
            tokens = self.graphs.draw(step.bucket, len(step.drawn.on_host), step.drawn.how)
            step.samples, step.mailed = (Samples(tokens),), True
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
        step.recorded = self.prompt_graphs is not None and self.prompt_graphs.record()
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
        if (tokens := self._drawn_behind(step, packing, hidden, masks)) is not None:
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

    def _drawn_behind(self, step: Step, packing: Packing, hidden: Tensor, masks: TokenMasks) -> Ints | None:
        """Tokens that the graphs of decode steps draw from a step's hidden states; None where samples want more than a
        draw. (Sampling is some twenty launches, which take a host up to 2 ms.)"""
        plan, graphs, count = step.plan, self.graphs, len(step.plan.sample_rows)
        if graphs is None or step.drafts is not None or not count or not graphs.draws(count):
            return None
        if masks.samples or plan.prompt_logprobs or (self._adapters is not None and self._adapters.slots.head_touched):
            return None
        rows, places = ints(plan.sample_rows), packing.sampled(plan)
        how, at = draw_of(self._rows.traits[rows]), packing.hidden_rows(places)
        if how is None or not np.array_equal(at, np.arange(count)):
            return None
        return graphs.draw_from(hidden[:count], rows, packing.position[places] + 1, how)

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
            first = last = packing.hidden_rows(first if self._first else last)
        places = ship_all(self._rows.device, first, last)
        return self.decoder.pooled(hidden, Pooled(places[0].long(), places[1].long()))

    def _read(self, step: Step) -> StepResult:
        taken = None if step.events is None else self._device_clock.wait(*step.events, step.pause)
        tokens, logprobs, errors = _read_samples(step.samples)
        pooled: Mapping[int, bytes] = {}
        if step.pooled is not None:
            tokens, pooled, errors = _read_pooled(step.pooled)
        scores: Mapping[int, tuple[TokenLogprobs, ...]] = logprobs
        wrong: Mapping[int, str] = errors
        drafted: Sequence[int] = ()
        ahead = None if step.drafts is None else step.drafts.proposal.ahead
        if step.drafts is not None and self.decoder.answers:
            drafted = step.drafts.counts
            tokens, scores, wrong = self._accept(step.plan, step.drafts, tokens, logprobs, errors)
        found = step.plan.step_id, tokens, scores, _read_prompt(step) if step.plan.prompt_logprobs else {}, wrong
        if taken is None:  # a device without a clock of its own
            seconds = self._clock.now() - step.started
            return StepResult(*found, device_seconds=seconds, drafted=drafted, ahead=ahead, pooled=pooled)
        clock = taken.device, taken.idle
        return StepResult(
            *found,
            *clock,
            step.graph_tokens,
            step.recorded,
            drafted=drafted,
            ahead=ahead,
            lent_seconds=taken.lent,
            pooled=pooled,
        )

    def _accept(
        self,
        plan: StepPlan,
        drafts: Drafts,
        tokens: Sequence[tuple[int, ...]],
        logprobs: Mapping[int, tuple[TokenLogprobs, ...]],
        errors: Mapping[int, str],
    ) -> tuple[Sequence[tuple[int, ...]], Mapping[int, tuple[TokenLogprobs, ...]], Mapping[int, str]]:
        """What rows get of their samples, as Speculator.end has it; it is counted."""
        assert self._speculator is not None
        taken, scores, wrong = self._speculator.end(plan, drafts, tokens, logprobs, errors)
        self._sampler.count(drafts.rows, taken)
        return taken, scores, wrong

    def prepare(self) -> bool:
        """With nothing in flight: see Executor."""
        return (self.prompt_graphs is not None and self.prompt_graphs.prepare()) or (
            self.graphs is not None and self.graphs.prepare()
        )

    def forget(self) -> None:
        """Drops every row; KV blocks stay as they are, and what happened so far is no step's idle time."""
        self._take_tokens()
        self._rows.clear()
        self._verifying.clear()
        if self._speculator is not None:
            self._speculator.forget()
        self._last_drawn = None
        self._device_clock = DeviceClock()
        if self.graphs is not None:
            self.graphs.restart()

    def _copy_blocks(self, plan: StepPlan) -> None:
        for group, source, target in zip(plan.copy_group, plan.copy_source, plan.copy_target, strict=True):
            self._kv_caches[group][target].copy_(self._kv_caches[group][source], non_blocking=True)

    def _drawn(self, plan: StepPlan) -> Drawn | None:
        """How graphs take the whole step; None where it wants more than they do. Its rows have been edited.

        Steps of the same rows have the same arrays as a rule, and are not looked at again.
        """
        last = self._last_drawn
        if last is None or plan.rows_added or plan.drafts or plan.prompt_logprobs or not last.is_of(plan):
            self._last_drawn = last = self._look_at(plan)
        return last

    def _look_at(self, plan: StepPlan) -> Drawn | None:
        """Where every chunk is one token and gets the one after its own, and nothing else is asked for."""
        count, graphs = len(plan.rows), self.graphs
        if graphs is None or not count or plan.counts.count(1) != count or not graphs.draws(count):
            return None
        adapted = self._slots(plan.rows) is not None
        if adapted and (self._adapters is None or self._adapters.slots.head_touched or not graphs.adapts(count)):
            return None  # the head that graphs draw with is the model's own
        if (
            plan.drafts
            or plan.prompt_logprobs
            or plan.sample_rows != plan.rows
            or plan.sample_work != self._every[:count]
        ):
            return None
        rows = ints(plan.rows)
        how = draw_of(self._rows.traits[rows])
        return (
            None
            if how is None
            else Drawn(plan.rows, plan.counts, plan.sample_work, plan.sample_rows, rows, how, adapted)
        )

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
        adapters = self._adapted(ints(plan.rows)[packing.chunk[places]])
        return self._sampler.sample(self.decoder.logits(picked, adapters).float(), batch)

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
            logits = self.decoder.logits(scored, self._adapted(np.full(len(scored), row))).float()
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


def _tree_of(packing: Packing) -> Packing | None:
    return None if packing.tree is None else packing


def _drafts_before(plan: StepPlan, piece: slice) -> Ints:
    """Drafts of the same chunk that stand before the place of each sample."""
    work = ints(plan.sample_work)[piece]
    back = ints(plan.sample_back)[piece]
    return ints(plan.drafts)[work] - back


def _masks_of(masks: TokenMasks, piece: slice) -> RowMasks | None:
    """Those of the samples in ``piece``, counted from its first."""
    samples = np.array(masks.samples, dtype=np.int32)
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


def _read_samples(
    pieces: Sequence[Samples],
) -> tuple[Sequence[tuple[int, ...]], dict[int, tuple[TokenLogprobs, ...]], dict[int, str]]:
    """Tokens, logprobs and what was wrong with logits, by sample."""
    logprobs: dict[int, tuple[TokenLogprobs, ...]] = {}
    errors: dict[int, str] = {}
    if len(pieces) == 1 and pieces[0].scores is None and (table := _table(pieces[0]))[:, 1].all():
        return Singles(table[:, 0].tolist()), logprobs, errors
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


def _read_pooled(pooled: Tensor) -> tuple[Sequence[tuple[int, ...]], dict[int, bytes], dict[int, str]]:
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
