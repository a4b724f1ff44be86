"""One step on one device: rows edited, inputs gathered, forward, sample, and the result read when it is collected.

What lives here: the order of a step and the two submissions it consists of. What may not: building tensors (inputs.py), picking
tokens (sampler.py), loading or sizing (worker.py), threads.

``forward`` and ``sample`` are separate so that a row may wait for something (a grammar's mask) between the two. Neither reads the
device; ``read`` does, at collect.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle

import numpy as np
import torch
from torch import Tensor

from headrace.clock import Clock
from headrace.kernels import Kernels
from headrace.layers.inputs import ForwardInputs
from headrace.request import Singles, StepPlan, StepResult, TokenLogprobs, TokenMasks
from headrace.worker.arena import Arena
from headrace.worker.device_clock import DeviceClock
from headrace.worker.graphs import Computes, DecodeGraphs
from headrace.worker.inputs import Gather, Packing, pack
from headrace.worker.prompt_graphs import PromptGraphs
from headrace.worker.rows import Ints, Rows, ship
from headrace.worker.sampler import Draw, RowMasks, SampleBatch, Sampler, Samples, Scores, draw_of

_NO_MASKS = TokenMasks()
_MOST_IN_FLIGHT = 8  # steps whose events are looked at: more than there ever are, and the one before them
UNUSABLE = "the model's logits for this sequence are unusable (NaN, infinite, or every token ruled out); check its biases and the checkpoint"


@dataclass(frozen=True, slots=True)
class Drawn:
    """A step that graphs take as a whole: its plan's arrays, its rows once more as they are written, how its tokens are drawn."""

    rows: array[int]
    counts: array[int]
    sample_work: array[int]
    sample_rows: array[int]
    on_host: Ints  # [rows]
    how: Draw

    def is_of(self, plan: StepPlan) -> bool:
        """By identity: arrays of plans do not change."""
        return plan.rows is self.rows and plan.counts is self.counts and plan.sample_work is self.sample_work and plan.sample_rows is self.sample_rows


@dataclass(frozen=True, slots=True)
class Forwarded:
    """A step whose hidden states are (being) computed. An empty plan has neither packing nor hidden states, nor has a ``drawn`` one: a graph of
    ``bucket`` rows computes them, and another goes on from there."""

    plan: StepPlan
    started: float  # seconds, the runner's clock
    packing: Packing | None = None
    hidden: Tensor | None = None  # [tokens, hidden]
    drawn: Drawn | None = None
    bucket: int = 0
    graph_tokens: int = 0  # see StepResult


@dataclass(frozen=True, slots=True)
class Launched:
    """A step that is queued as far as its hidden states; ``begun`` and ``ended`` are CUDA events for its beginning and end."""

    step: Forwarded
    begun: torch.cuda.Event
    ended: torch.cuda.Event  # not recorded yet
    computed: torch.cuda.Event | None = None  # of a step that waits for its masks: where its hidden states are there


@dataclass(frozen=True, slots=True)
class Sampled:
    """A step whose tokens are (being) sampled; everything in it is still on the device, or on its way to the host.

    ``begun`` and ``arrived`` are CUDA events around the step and its copies to the host; None on a CPU. ``pause``: events around the time
    it waited for its masks.
    """

    plan: StepPlan
    started: float
    samples: tuple[Samples, ...] = ()  # consecutive pieces of the plan's samples, in order
    prompt: tuple[tuple[int, Tensor, Tensor, Tensor], ...] = ()  # index into plan.rows, then ids, logprobs, ranks; in order of position
    begun: torch.cuda.Event | None = None
    arrived: torch.cuda.Event | None = None
    pause: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
    graph_tokens: int = 0  # see StepResult
    recorded_graph: bool = False


class ModelRunner:
    """Runs plans over one decoder, one KV cache and one set of rows.

    ``max_logits_rows`` bounds how many rows of logits exist at once. ``padded`` fills every sequence up to the longest.
    ``prune``: the last layer computes no more than is read (of a prompt, its last token). ``arena``: what ``kernels`` take their results' memory
    from, in steps that no graph computes.
    """

    def __init__(
        self,
        decoder: Computes,
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
    ) -> None:
        self._decoder = decoder
        self._arena = arena
        self.graphs = graphs
        self.prompt_graphs = prompt_graphs
        self._kv_caches = tuple(kv_caches)
        self._rows = rows
        self._gather = Gather(rows, kernels)
        self._sampler = Sampler(rows, kernels)
        self._max_logits_rows = max_logits_rows
        self._padded = padded
        self._prune = prune
        self._clock = clock
        self._device_clock = DeviceClock()
        self._last_drawn: Drawn | None = None
        self._events = _pairs_of_events()
        self._every = array("i", range(len(rows.traits)))
        # Where steps are queued. Asking torch for it each time takes longer than recording an event.
        self._stream = torch.cuda.current_stream(rows.device) if rows.device.type == "cuda" else None

    def run(self, plan: StepPlan) -> StepResult:
        """The whole step."""
        with torch.inference_mode():
            return self.read(self.sample(self.forward(plan)))

    def begin(self, plan: StepPlan) -> Forwarded:
        """The step as far as its hidden states."""
        with torch.inference_mode():
            return self.forward(plan)

    def finish(self, step: Forwarded, masks: TokenMasks) -> StepResult:
        """The rest of it."""
        with torch.inference_mode():
            return self.read(self.sample(step, masks))

    def launch(self, plan: StepPlan) -> Sampled:
        """Queues the whole step and what brings its results to the host; waits for nothing. On CUDA alone."""
        with torch.inference_mode():
            return self._queue_sample(self._queue_forward(plan), _NO_MASKS)

    def launch_forward(self, plan: StepPlan) -> Launched:
        """Queues the step as far as its hidden states."""
        with torch.inference_mode():
            return self._queue_forward(plan)

    def launch_sample(self, launched: Launched, masks: TokenMasks = _NO_MASKS) -> Sampled:
        """Queues the rest of it."""
        with torch.inference_mode():
            return self._queue_sample(launched, masks)

    def _queue_forward(self, plan: StepPlan) -> Launched:
        begun, ended = next(self._events)
        return Launched(self.forward(plan, begun), begun, ended, _recorded() if plan.masked else None)

    def _queue_sample(self, launched: Launched, masks: TokenMasks) -> Sampled:
        pause = None if launched.computed is None else (launched.computed, _recorded())
        step = self.sample(launched.step, masks)
        if launched.step.drawn is None:
            step = _to_host(step)
        launched.ended.record(self._stream)
        recorded = self.prompt_graphs is not None and self.prompt_graphs.record()
        events = launched.begun, launched.ended, pause
        return Sampled(step.plan, step.started, step.samples, step.prompt, *events, launched.step.graph_tokens, recorded)

    def forward(self, plan: StepPlan, begun: torch.cuda.Event | None = None) -> Forwarded:
        """Edits rows, copies blocks, computes every planned token.

        ``begun`` is recorded once the host has its part done: what the device waited for that is idle time, not this step's.
        """
        started = self._clock.now()
        edits, drawn = self._rows.edits_of(plan), None
        if edits is not None and (drawn := self._drawn(plan)) is not None:
            self._rows.drop(plan)
        else:
            edits = (), (), ()
            self._rows.apply(plan)
            drawn = self._drawn(plan)
        if plan.copy_group:
            self._copy_blocks(plan)
        if drawn is not None and self.graphs is not None:
            bucket = self.graphs.write(drawn.on_host, np.asarray(plan.starts, dtype=np.int32) + 1, edits, shared_tokens=plan.shared_tokens)
            if begun is not None:
                begun.record(self._stream)
            self.graphs.compute(bucket, drawn.how)
            return Forwarded(plan, started, None, None, drawn, bucket)
        return self._compute(plan, started, begun)

    def _compute(self, plan: StepPlan, started: float, begun: torch.cuda.Event | None) -> Forwarded:
        """A step that goes on eagerly from its hidden states."""
        packing = pack(plan, padded=self._padded, prune=self._prune) if plan.rows else None
        compute, graph_tokens = (None, 0) if packing is None else self._prepared(plan, packing)
        if begun is not None:
            begun.record(self._stream)
        if compute is None:
            return Forwarded(plan, started)
        return Forwarded(plan, started, packing, compute(), graph_tokens=graph_tokens)

    def _prepared(self, plan: StepPlan, packing: Packing) -> tuple[Callable[[], Tensor], int]:
        """The step's inputs on their way to the device; what computes its hidden states from them, and the tokens of a prompt graph that does."""
        graphs, prompts = self.graphs, self.prompt_graphs
        if graphs is not None and self._graphed(plan, packing):
            bucket = graphs.write(np.asarray(plan.rows, dtype=np.int32), packing.context, shared_tokens=plan.shared_tokens)
            return partial(self._replayed, graphs, bucket, len(plan.rows)), 0
        if prompts is not None and (shape := prompts.shape_of(plan, packing)) is not None:
            prompts.write(shape, plan, packing)
            wanted = packing.chunk if packing.wanted is None else packing.wanted
            return partial(prompts.compute, shape, len(wanted)), shape.tokens if prompts.replays(shape) else 0
        return partial(self._computed, self._gather.inputs(plan, packing)), 0

    def _replayed(self, graphs: DecodeGraphs, bucket: int, count: int) -> Tensor:
        graphs.compute(bucket)
        return graphs.hidden(bucket, count)

    def _computed(self, inputs: ForwardInputs) -> Tensor:
        """Hidden states. Nothing else of the forward pass is read when another has been queued."""
        compute = partial(self._decoder.forward, inputs, self._kv_caches)
        if self._arena is None:
            return compute()
        wanted = None if inputs.wanted is None else len(inputs.wanted)
        tokens = len(inputs.token_ids)
        kind = self._decoder.way(tokens), inputs.attention[0].max_query_len == 1, inputs.alone is not None
        return self._arena.run(compute, tokens, wanted, kind=kind)

    def _graphed(self, plan: StepPlan, packing: Packing) -> bool:
        """Whether every chunk is one token and there is a graph for so many."""
        return self.graphs is not None and len(packing.chunk) == len(plan.rows) and self.graphs.serves(len(plan.rows))

    def sample(self, step: Forwarded, masks: TokenMasks = _NO_MASKS) -> Sampled:
        """Picks a token for every sampled row, within its mask if it has one, and scores the prompts that asked for it."""
        if step.drawn is not None and self.graphs is not None:
            tokens = self.graphs.draw(step.bucket, len(step.drawn.on_host), step.drawn.how)
            return Sampled(step.plan, step.started, (Samples(tokens),))
        if step.packing is None or step.hidden is None:
            return Sampled(step.plan, step.started)
        samples = tuple(self._sample_piece(step.plan, step.packing, step.hidden, piece, masks) for piece in self._pieces(len(step.plan.sample_rows)))
        prompt = tuple(
            (index, *score) for index in step.plan.prompt_logprobs for score in self._score_prompt(step.plan, step.packing, step.hidden, index)
        )
        return Sampled(step.plan, step.started, samples, prompt)

    def read(self, step: Sampled) -> StepResult:
        """Waits for the device and brings the step's results to the host."""
        taken = None
        if step.begun is not None and step.arrived is not None:
            taken = self._device_clock.wait(step.begun, step.arrived, step.pause)
        elif self._stream is not None:
            self._stream.synchronize()
        tokens, logprobs, errors = _read_samples(step.samples)
        found = step.plan.step_id, tokens, logprobs, _read_prompt(step) if step.plan.prompt_logprobs else {}, errors
        if taken is None:  # a device without a clock of its own
            return StepResult(*found, device_seconds=self._clock.now() - step.started)
        clock = taken.device, taken.idle
        return StepResult(*found, *clock, step.graph_tokens, step.recorded_graph, lent_seconds=taken.lent)

    def prepare(self) -> bool:
        """With nothing in flight: see Executor."""
        return self.prompt_graphs is not None and self.prompt_graphs.prepare()

    def forget(self) -> None:
        """Drops every row; KV blocks stay as they are."""
        self._rows.clear()
        self._last_drawn = None
        if self.graphs is not None:
            self.graphs.restart()

    # --- parts of forward

    def _copy_blocks(self, plan: StepPlan) -> None:
        for group, source, target in zip(plan.copy_group, plan.copy_source, plan.copy_target, strict=True):
            self._kv_caches[group][target].copy_(self._kv_caches[group][source], non_blocking=True)

    # --- parts of sample

    def _drawn(self, plan: StepPlan) -> Drawn | None:
        """How graphs take the whole step; None where it wants more than they do. Its rows have been edited.

        Steps of the same rows have the same arrays as a rule, and are not looked at again.
        """
        last = self._last_drawn
        if last is None or plan.rows_added or plan.prompt_logprobs or not last.is_of(plan):
            self._last_drawn = last = self._look_at(plan)
        return last

    def _look_at(self, plan: StepPlan) -> Drawn | None:
        count = len(plan.rows)
        if self.graphs is None or not count or plan.counts.count(1) != count or not self.graphs.draws(count):
            return None
        how = self._draw_of(plan)
        arrays = plan.rows, plan.counts, plan.sample_work, plan.sample_rows
        return None if how is None else Drawn(*arrays, np.asarray(plan.rows, dtype=np.int32), how)

    def _draw_of(self, plan: StepPlan) -> Draw | None:
        """How every chunk gets the token after its own, where nothing else is asked for."""
        if plan.prompt_logprobs or plan.sample_rows != plan.rows or len(plan.sample_work) != len(plan.rows):
            return None
        if plan.sample_work != self._every[: len(plan.rows)]:
            return None
        return draw_of(self._rows.traits[np.asarray(plan.rows, dtype=np.int32)])

    def _pieces(self, count: int, start: int = 0) -> Iterator[slice]:
        for first in range(start, start + count, self._max_logits_rows):
            yield slice(first, min(first + self._max_logits_rows, start + count))

    def _sample_piece(self, plan: StepPlan, packing: Packing, hidden: Tensor, piece: slice, masks: TokenMasks) -> Samples:
        work = np.asarray(plan.sample_work, dtype=np.int32)[piece]
        starts, counts = np.asarray(plan.starts, dtype=np.int32), np.asarray(plan.counts, dtype=np.int32)
        chunks, source = np.unique(work, return_inverse=True)
        batch = SampleBatch(
            rows=np.asarray(plan.sample_rows, dtype=np.int32)[piece],
            positions=(starts + counts)[work],
            source=source.astype(np.int32),
            masks=_masks_of(masks, piece) if masks.samples else None,
        )
        return self._sampler.sample(self._decoder.logits(hidden[ship(packing.hidden_rows(chunks), self._rows.device)]).float(), batch)

    def _score_prompt(self, plan: StepPlan, packing: Packing, hidden: Tensor, index: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Scores of the known next tokens of one chunk: position p scores token p + 1, as far as the prompt goes."""
        row, start = plan.rows[index], plan.starts[index]
        num_scored = min(plan.counts[index], int(self._rows.num_prompt_tokens[row]) - 1 - start)
        num_best = self._rows.host[row].params.prompt_logprobs or 0
        first_packed = int(packing.last[index]) + 1 - plan.counts[index]
        for piece in self._pieces(num_scored):
            logits = self._decoder.logits(hidden[first_packed + piece.start : first_packed + piece.stop]).float()
            targets = self._rows.token_ids[row, start + piece.start + 1 : start + piece.stop + 1].long()
            yield self._sampler.score(logits, targets, num_best)


def _pairs_of_events() -> Iterator[tuple[torch.cuda.Event, torch.cuda.Event]]:
    """A step's beginning and end, made once and used in turn: making one takes as long as recording it."""
    yield from cycle([(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(_MOST_IN_FLIGHT)])


def _recorded() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _masks_of(masks: TokenMasks, piece: slice) -> RowMasks | None:
    """Those of the samples in ``piece``, counted from its first."""
    samples = np.array(masks.samples, dtype=np.int32)
    inside = (samples >= piece.start) & (samples < piece.stop)
    words = np.frombuffer(masks.words, dtype=np.int32).reshape(len(samples), masks.words_each)
    return RowMasks(samples[inside] - piece.start, words[inside]) if inside.any() else None


def _to_host(step: Sampled) -> Sampled:
    """Starts the copies of everything that ``read`` looks at, into pinned memory."""

    def home(tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)

    def scores_home(scores: Scores | None) -> Scores | None:
        return scores and replace(scores, ids=home(scores.ids), logprobs=home(scores.logprobs), ranks=home(scores.ranks))

    samples = tuple(Samples(home(torch.as_tensor(each.picked)), scores_home(each.scores)) for each in step.samples)
    prompt = tuple((index, home(ids), home(logprobs), home(ranks)) for index, ids, logprobs, ranks in step.prompt)
    return replace(step, samples=samples, prompt=prompt)


def _table(samples: Samples) -> Ints:  # [samples, 2]
    return samples.picked.cpu().numpy() if isinstance(samples.picked, Tensor) else samples.picked


def _read_samples(pieces: Sequence[Samples]) -> tuple[Sequence[tuple[int, ...]], dict[int, tuple[TokenLogprobs, ...]], dict[int, str]]:
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


def _read_scores(scores: Scores) -> Iterator[tuple[int, TokenLogprobs]]:
    lists = zip(scores.which.tolist(), scores.num_best, scores.ids.tolist(), scores.logprobs.tolist(), scores.ranks.tolist(), strict=True)
    for j, num_best, ids, logprobs, rank in lists:
        yield j, TokenLogprobs(tuple(ids[: 1 + num_best]), tuple(logprobs[: 1 + num_best]), rank)


def _read_prompt(step: Sampled) -> dict[int, tuple[TokenLogprobs, ...]]:
    entries: dict[int, tuple[TokenLogprobs, ...]] = {index: () for index in step.plan.prompt_logprobs}
    for index, ids, logprobs, ranks in step.prompt:
        piece = zip(ids.tolist(), logprobs.tolist(), ranks.tolist(), strict=True)
        entries[index] += tuple(TokenLogprobs(tuple(i), tuple(p), rank) for i, p, rank in piece)
    return entries
