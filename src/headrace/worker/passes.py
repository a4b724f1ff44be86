"""How a step's hidden states come to be: launched kernel by kernel, or as a graph, which may draw its tokens, too.

Which way a step takes follows from its plan and its rows' traits:

    as a whole      one token a row, each followed by a plain draw          its rows' edits go with its numbers
    as rows         one token a row, or drafts of which each is sampled     each token is a row of a decode step's graph
    as prompts      a shape that has a graph, or is due for one
    eagerly         everything else; over an arena, where there is one

What lives here: that choice, and what each way is told. What may not: capture and replay (graphs.py, prompt_graphs.py),
the order of a step (model_runner.py), sampling.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from headrace.kernels import Kernels
from headrace.kernels.inputs import ForwardInputs, adapter_rows
from headrace.lora.device import DeviceAdapters
from headrace.models.decoder import Decoder
from headrace.request import NO_SLOT, StepPlan
from headrace.worker.arena import Arena
from headrace.worker.graphs import DecodeGraphs
from headrace.worker.prompt_graphs import PromptGraphs
from headrace.worker.rows import Edits, Gather, Ints, Packing, Rows, even, ints, pack
from headrace.worker.sampler import Draw, draw_of
from headrace.worker.speculator import Drafts, branched

_NO_EDITS: Edits = ((), (), ())


@dataclass(frozen=True, slots=True)
class Whole:
    """A step that graphs take as a whole: its plan, its rows once more as they are written, how its tokens are
    drawn."""

    plan: StepPlan
    on_host: Ints  # [rows]
    how: Draw
    adapted: bool  # some have adapters

    def is_of(self, plan: StepPlan) -> bool:
        """By identity: arrays of plans do not change."""
        mine = self.plan
        return (
            plan.rows is mine.rows
            and plan.counts is mine.counts
            and plan.sample_work is mine.sample_work
            and plan.sample_rows is mine.sample_rows
        )


@dataclass(frozen=True, slots=True)
class Pass:
    """A step's inputs on their way to the device, and what computes hidden states from them. ``compute`` takes what a
    stage of a pipeline goes on from, which lies in ``entry``. ``draw``: the graph's own tokens, in place of hidden
    states. ``graph_tokens``: see StepResult."""

    compute: Callable[..., Tensor | None]
    packing: Packing | None = None
    entry: Callable[[], Tensor] | None = None
    draw: Callable[[], Ints] | None = None
    graph_tokens: int = 0


def _nothing(begun: Tensor | None = None) -> Tensor | None:
    return begun


class ForwardPasses:
    """Of one decoder over one KV cache and one set of rows.

    ``padded`` fills every sequence up to the longest. ``prune``: the last layer computes no more than is read (of a
    prompt, its last token). ``arena``: what ``kernels`` take their results' memory from, in steps that no graph
    computes. ``adapters``: None where rows have none. ``later``: first uses that an idle device is there for, one a
    turn.
    """

    def __init__(
        self,
        decoder: Decoder,
        kv_caches: Sequence[Tensor],  # one a KV group: [blocks, layers, 2, kv_heads, block_size, head_dim]
        rows: Rows,
        kernels: Kernels,
        *,
        padded: bool = False,
        prune: bool = False,
        graphs: DecodeGraphs | None = None,
        prompt_graphs: PromptGraphs | None = None,
        arena: Arena | None = None,
        adapters: DeviceAdapters | None = None,
        later: Iterator[object] | None = None,
    ) -> None:
        self.decoder, self.kv_caches, self.rows, self.kernels = decoder, tuple(kv_caches), rows, kernels
        self.graphs, self.prompt_graphs = graphs, prompt_graphs
        self._staged = not (decoder.embeds and decoder.answers)
        self.arena = None if self._staged else arena
        self._adapters, self._later = adapters, later or iter(())
        self._gather = Gather(rows, kernels)
        self._padded = padded
        pooling = decoder.spec.pooling
        self._prune = prune and decoder.spec.answers
        self.pools_first = pooling is not None and pooling.kind == "cls"
        self._last_whole: Whole | None = None
        self._every = array("i", range(len(rows.traits)))

    # --- before a step computes anything

    def edit(self, plan: StepPlan) -> tuple[Whole, Edits] | None:
        """Rows, and the adapters that they ask for, as the plan has them; of a step that a graph takes as a whole, how,
        and the edits that go with its numbers."""
        if plan.adapters and self._adapters is not None and self._adapters.bring(plan.adapters):
            self._last_whole = None
            for graphs in (self.graphs, self.prompt_graphs):
                if graphs is not None:
                    graphs.forget_adapted()
        edits = None if plan.drafts else self.rows.edits_of(plan)
        if edits is not None and (whole := self._as_whole(plan)) is not None:
            self.rows.drop(plan)
            return whole, edits
        self.rows.apply(plan)
        whole = self._as_whole(plan)
        return None if whole is None else (whole, _NO_EDITS)

    def record(self) -> bool:
        """Behind all that reads what a pass brings: whether there was a graph of it to capture."""
        return self.prompt_graphs is not None and self.prompt_graphs.record()

    def prepare(self) -> bool:
        """With nothing in flight: see Executor."""
        kinds = [graphs for graphs in (self.prompt_graphs, self.graphs) if graphs is not None]
        return any(graphs.prepare() for graphs in kinds) or next(self._later, None) is not None

    def forget(self) -> None:
        """All rows are gone."""
        self.rows.clear()
        self._last_whole = None
        if self.graphs is not None:
            self.graphs.restart()

    # --- the ways

    def whole(self, plan: StepPlan, whole: Whole, edits: Edits) -> Pass:
        """As ``edit`` has found."""
        assert self.graphs is not None
        context, how = ints(plan.starts) + 1, whole.how
        bucket = self.graphs.write(
            whole.on_host, context, edits, shared_tokens=plan.shared_tokens, adapted=whole.adapted
        )
        draw = partial(self.graphs.draw, bucket, len(whole.on_host), how)
        return Pass(partial(self.graphs.compute, bucket, how), draw=draw)

    def of(self, plan: StepPlan, drafts: Drafts | None) -> Pass:
        """Of a step with tokens. ``drafts``: that it verifies."""
        packing = pack(plan, padded=self._padded, prune=self._prune, first=self.pools_first)
        if drafts is not None and drafts.trees:
            packing = branched(packing, drafts.trees)
        if drafts is not None and drafts.cancelled:  # nothing is computed of it, whatever is received
            return Pass(_nothing, packing, partial(self._entry, len(packing.chunk)))
        slots = self._slots(plan.rows)
        found = self._as_rows(plan, packing, adapted=slots is not None)
        if found is None or found.draw is None:
            self.release()
        if found is None and not plan.drafts:
            found = self._as_prompts(plan, packing, adapted=slots is not None)
        return self._eager(plan, packing, slots) if found is None else found

    def _as_whole(self, plan: StepPlan) -> Whole | None:
        """Steps of the same rows have the same arrays as a rule, and are not looked at again."""
        last = self._last_whole
        if last is None or plan.rows_added or plan.drafts or plan.prompt_logprobs or not last.is_of(plan):
            self._last_whole = last = self._look_at(plan)
        return last

    def _look_at(self, plan: StepPlan) -> Whole | None:
        """Where every chunk is one token and gets the one after its own, and nothing else is asked for."""
        count, graphs = len(plan.rows), self.graphs
        if graphs is None or not count or plan.counts.count(1) != count or not graphs.draws(count):
            return None
        if plan.drafts or plan.prompt_logprobs or plan.sample_rows != plan.rows:
            return None
        adapted = self._slots(plan.rows) is not None
        if adapted and (self._head_adapted or not graphs.adapts(count)):
            return None  # the head that graphs draw with is the model's own
        if plan.sample_work != self._every[:count]:
            return None
        rows = ints(plan.rows)
        how = draw_of(self.rows.traits[rows])
        return None if how is None else Whole(plan, rows, how, adapted)

    def _as_rows(self, plan: StepPlan, packing: Packing, *, adapted: bool) -> Pass | None:
        """Steps that verify drafts are drawn from by the graph, too, where plain draws are all that rows ask for."""
        graphs, rows, count = self.graphs, ints(plan.rows), len(packing.chunk)
        if graphs is None:
            return None
        chained = not adapted and graphs.serves(count) and self._verifies_all(plan, packing)
        how = draw_of(self.rows.traits[rows]) if chained and graphs.draws(count) else None
        if how is None and count == len(rows):
            chained = False
            if not (graphs.adapts(count) if adapted else graphs.serves(count)):
                return None
        elif not chained:
            return None
        bucket = graphs.write(
            rows[packing.chunk],
            packing.position + 1,
            shared_tokens=plan.shared_tokens,
            adapted=adapted,
            chained=chained,
            tree=packing if chained and packing.tree is not None else None,
        )
        if how is not None:
            draw = partial(self._drawn_last, graphs, bucket, count, how)
            return Pass(partial(graphs.compute, bucket, how), packing, draw=draw)
        return Pass(partial(self._replayed, graphs, bucket, count), packing, partial(graphs.entry, bucket, count))

    @staticmethod
    def _drawn_last(graphs: DecodeGraphs, bucket: int, count: int, how: Draw) -> Ints:
        """Behind which nothing of the step is held any more."""
        found = graphs.draw(bucket, count, how)
        graphs.launches.release()
        return found

    def release(self) -> None:
        """What is held for the step's own graphs goes without them."""
        if self.graphs is not None:
            self.graphs.launches.release()

    def _verifies_all(self, plan: StepPlan, packing: Packing) -> bool:
        """Whether every token is sampled from, in order, in a step with drafts."""
        if not plan.drafts or plan.prompt_logprobs or self._padded:
            return False
        return plan.sample_back is even(len(plan.rows), plan.counts[0]).back or np.array_equal(
            packing.sampled(plan), np.arange(len(packing.chunk))
        )

    def _replayed(self, graphs: DecodeGraphs, bucket: int, count: int, _: Tensor | None = None) -> Tensor:
        hidden = graphs.hidden(bucket, count)
        return hidden if self.decoder.answers else hidden.clone()  # the next replay may be before it is sent

    def _as_prompts(self, plan: StepPlan, packing: Packing, *, adapted: bool) -> Pass | None:
        prompts = self.prompt_graphs
        if prompts is None or (shape := prompts.shape_of(plan, packing)) is None:
            return None
        prompts.write(shape, plan, packing)
        wanted = packing.chunk if packing.wanted is None else packing.wanted
        tokens = shape.tokens if prompts.replays(shape, adapted=adapted) else 0
        compute = partial(prompts.compute, shape, len(wanted), adapted=adapted)
        return Pass(compute, packing, graph_tokens=tokens)

    def _eager(self, plan: StepPlan, packing: Packing, slots: Ints | None) -> Pass:
        inputs = self._gather.inputs(plan, packing, slots)  # of ranks that share keys, not as many as are packed
        return Pass(partial(self._computed, inputs), packing, partial(self._entry, len(inputs.token_ids)))

    def _entry(self, tokens: int) -> Tensor:
        width = self.decoder.spec.hidden_size
        return torch.empty(tokens, width, dtype=self.kv_caches[0].dtype, device=self.rows.device)

    def _computed(self, inputs: ForwardInputs, begun: Tensor | None = None) -> Tensor:
        """Nothing else of the forward pass is read when another has been queued."""
        compute = partial(self.decoder.forward, inputs, self.kv_caches, *(() if begun is None else (begun,)))
        if self.arena is None:
            return compute()
        wanted = None if inputs.wanted is None else len(inputs.wanted)
        tokens, single = len(inputs.token_ids), inputs.attention[0].max_query_len == 1
        changed = 0 if inputs.adapters is None or self._adapters is None else self._adapters.slots.changed
        kind = self.decoder.composed(tokens), single, inputs.queries is not None, changed
        return self.arena.run(compute, tokens, wanted, kind=kind)

    # --- from hidden states on

    def drawn(self, plan: StepPlan, packing: Packing, hidden: Tensor) -> Ints | None:
        """Tokens that the graphs of decode steps draw from a step's hidden states; None where samples want more than a
        draw. (Sampling is some twenty launches, which take a host up to 2 ms.)"""
        graphs, count = self.graphs, len(plan.sample_rows)
        if graphs is None or not count or not graphs.draws(count) or plan.prompt_logprobs or self._head_adapted:
            return None
        rows, places = ints(plan.sample_rows), packing.sampled(plan)
        how, at = draw_of(self.rows.traits[rows]), packing.hidden_rows(places)
        if how is None or not np.array_equal(at, np.arange(count)):
            return None
        return graphs.draw_from(hidden[:count], rows, packing.position[places] + 1, how)

    def logits(self, hidden: Tensor, rows: Ints) -> Tensor:  # [n, hidden], of rows [n] → [n, vocab], float32
        slots = self._slots(rows) if self._head_adapted else None
        adapters = None if slots is None else adapter_rows(slots, self.rows.device)
        return self.decoder.logits(hidden, adapters).float()

    @property
    def _head_adapted(self) -> bool:
        return self._adapters is not None and self._adapters.slots.head_touched

    def _slots(self, rows: Sequence[int] | Ints) -> Ints | None:
        """Of these rows' adapters; None where none has one."""
        if self._adapters is None:
            return None
        slots = self.rows.adapter_slots[np.asarray(rows)]
        return slots if (slots != NO_SLOT).any() else None
