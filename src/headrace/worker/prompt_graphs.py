"""CUDA graphs of steps with prompts: everything between a step's numbers on the host and its hidden states, launched as
one.

A layer of a prompt is seven to ten launches, each of which costs the host as much as some hundred tokens of a small
model cost the device. Which sequences a step has, how their queries and keys lie, is all read on the device; what a
launch fixes are sizes. So a graph is recorded for a shape: so many tokens, so many sequences, both rounded up. What
fills a step up is of no sequence:

    tokens      | sequence 0 . . . | sequence 1 | sequence 2 . . . | - - - -    position -1: they see no keys and write
    none
    sequences     0                  1            2                  3 4 5      no query, no key
    wanted        the last token of each, and that of the last one again for those that are none

Which shapes there are, and when one is worth a graph, is a rule of its own (cost/prompt_shapes.py). The memory of the
largest, captured first, is that of all. A step whose shape is recorded runs eagerly over the graph's own inputs, so
that every first use is paid for, and is captured after it.

What lives here: the static inputs of shapes, capture and replay. What may not: which shape serves a step
(cost/prompt_shapes.py), what a step computes (models/), decode steps (graphs.py), sampling.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from headrace.cost.prompt_shapes import PromptShapes, Shape, ShapeBounds
from headrace.kernels.inputs import AdapterRows
from headrace.request import StepPlan
from headrace.worker.recorder import Recorder
from headrace.worker.rows import Ints, Packing, ints

_log = logging.getLogger(__name__)

_ALIGNED = 4  # int32 values in 16 bytes
_MOST_ADAPTED = 32  # graphs beside those of the same shapes without adapters; what they take is not planned for


@dataclass(frozen=True, slots=True)
class Bounds(ShapeBounds):
    """What steps are. ``prune``: the last layer computes wanted tokens alone."""

    max_model_len: int
    prune: bool

    @property
    def most_wanted(self) -> int:
        """Hidden states that a step brings."""
        return self.sequences[-1] if self.prune else self.tokens[-1]


class PromptGraphs:
    """Of no use until the largest have been captured.

    Steps are taken in turn: ``shape_of``, and where there is one, ``write``, ``compute``, and after all that reads
    what it brings, ``record``.
    """

    def __init__(self, recorder: Recorder, bounds: Bounds, hidden: Tensor) -> None:
        """``hidden`` [bounds.most_wanted, hidden]: what every graph writes."""
        self._recorder = recorder
        self._device = recorder.rows.device
        self._bounds = bounds
        self._shapes = PromptShapes(bounds)
        self._graphs: dict[Shape, torch.cuda.CUDAGraph] = {}
        # of steps with adapters; whose a token is, they read on the device
        self._adapted: dict[Shape, torch.cuda.CUDAGraph] = {}
        self._due: tuple[Shape, bool] | None = None  # computed eagerly just now; whether with adapters
        self._shipped = torch.zeros(_places(self._shapes.largest)[-1].stop, dtype=torch.int32, device=self._device)
        self._hidden = hidden

    # --- what is captured at a start

    @property
    def most(self) -> int:
        """Graphs there may come to be."""
        return self._shapes.most

    @property
    def samples(self) -> tuple[Shape, ...]:
        """Those that show what graphs take, the largest first."""
        return self._shapes.samples

    @property
    def captured(self) -> tuple[Shape, ...]:
        return tuple(sorted(self._graphs))

    def capture_all(self) -> None:
        """What an engine begins with."""
        self.capture(self._shapes.first)

    def capture(self, shapes: Sequence[Shape]) -> None:
        """In this order."""
        with self._recorder.while_graphable(self._forget):
            for shape in shapes:
                self._warm_up_and_capture(shape)

    # --- steps

    def shape_of(self, plan: StepPlan, packing: Packing) -> Shape | None:
        """Which graph computes the step, or is recorded after it; None: the step is computed as it is."""
        tokens, sequences = len(packing.chunk), len(packing.context)
        if plan.prompt_logprobs or self._shares(plan, sequences):
            return None
        if (packing.wanted is not None) != self._bounds.prune:  # single tokens, more than decode steps have graphs for
            return None
        return self._shapes.shape_of(tokens, sequences)

    def write(self, shape: Shape, plan: StepPlan, packing: Packing) -> None:
        """What the host has to say of the step; ``compute`` must follow."""
        wanted = packing.last if packing.wanted is None else packing.wanted
        parts = (
            ints(plan.rows),
            packing.query_start,
            packing.context,
            packing.chunk,
            packing.position,
            wanted,
        )
        self._ship(shape, parts)

    def compute(self, shape: Shape, count: int, *, adapted: bool = False) -> Tensor:
        """Hidden states of the step just written: of its ``count`` first tokens, or of those that are wanted. The next
        one overwrites them; work queued before sees them. ``adapted``: some sequences have adapters."""
        graph = self._of(adapted).get(shape)
        if graph is None:
            self._run(shape, adapted=adapted)
            self._due = shape, adapted
        else:
            graph.replay()
        return self._hidden[:count]

    def record(self) -> bool:
        """Some milliseconds, once a shape: what was computed eagerly is a graph from now on. Whether there was one to
        record."""
        due, self._due = self._due, None
        if due is None or (due[1] and len(self._adapted) >= _MOST_ADAPTED):
            return False
        self._try(*due)
        return True

    def replays(self, shape: Shape, *, adapted: bool = False) -> bool:
        return shape in self._of(adapted)

    def forget_adapted(self) -> None:
        """Adapters change more than those that graphs were captured with."""
        if self._adapted:
            torch.cuda.synchronize(self._device)  # none is under way
        self._adapted.clear()

    def _of(self, adapted: bool) -> dict[Shape, torch.cuda.CUDAGraph]:
        return self._adapted if adapted else self._graphs

    def prepare(self) -> bool:
        """Records a shape that may come to be needed, while nothing is computed. Whether it did. Raises what computing
        raises."""
        shape = self._shapes.next_ahead()
        if shape is not None:
            self._warm_up_and_capture(shape)
        return shape is not None

    # --- parts

    def forget(self) -> None:
        """All of them, with their memory."""
        self._forget()
        self._recorder.renew()

    def _forget(self) -> None:
        self._graphs.clear()
        self._adapted.clear()
        self._shapes.captured.clear()

    def _try(self, shape: Shape, adapted: bool) -> None:
        """Where it fails, such steps go on as they are."""
        try:
            self._capture(shape, adapted=adapted)
        except Exception as error:  # the step that brought it has been queued as it should
            self._shapes.refuse(shape)
            _log.warning(
                "no graph for steps of %d tokens in %d sequences (%s); they are launched one by one",
                shape.tokens,
                shape.sequences,
                error,
            )

    def _shares(self, plan: StepPlan, sequences: int) -> bool:
        """Whether the step had better look for keys that its sequences share: graphs here do not."""
        if plan.shared_tokens == 0 or self._recorder.decoder.least_shared(sequences) is None:
            return False
        return plan.shared_tokens is None or self._shapes.reads_less(plan.shared_tokens)

    def _ship(self, shape: Shape, parts: Sequence[Ints]) -> None:
        places, device = _places(shape), self._device
        host = torch.empty(places[-1].stop, dtype=torch.int32, pin_memory=device.type == "cuda")
        _fill(host.numpy(), places, parts)
        self._shipped[: len(host)].copy_(host, non_blocking=True)

    def _run(self, shape: Shape, *, adapted: bool = False) -> None:
        """The step whose inputs are there."""
        row, query_start, context, chunk, position, wanted = (self._shipped[place] for place in _places(shape))
        # more than any sequence has: who fills a step up must not be taken for a query of the only one
        longest = shape.tokens + 1
        gather = self._recorder.gather
        inputs = gather.gathered(row, query_start, context, chunk, position, longest, self._bounds.max_model_len, 0)
        if self._bounds.prune:
            inputs = gather.wanting(inputs, wanted, chunk, position)
        if adapted:
            slots = self._recorder.rows.slots_of(row.index_select(0, chunk), position)
            few = AdapterRows(slots.index_select(0, wanted)) if self._bounds.prune else None
            inputs = replace(inputs, adapters=AdapterRows(slots, wanted=few))
        found = self._recorder.forward(inputs)
        self._hidden[: len(found)].copy_(found)

    def _warm_up_and_capture(self, shape: Shape) -> None:
        """After an eager step of padding, which pays for every first use."""
        with torch.inference_mode():
            self._ship(shape, _padding(shape))
            self._run(shape)
            self._capture(shape)

    def _capture(self, shape: Shape, *, adapted: bool = False) -> None:
        with self._recorder.captures():
            self._recorder.follow()
            with self._recorder.recording() as graph:
                self._run(shape, adapted=adapted)
        self._of(adapted)[shape] = graph
        if not adapted:
            self._shapes.add((shape,))


def _places(shape: Shape) -> tuple[slice, ...]:
    """Where rows, query starts, contexts, chunks, positions and wanted tokens lie among a step's numbers; each begins
    at 16 bytes."""
    sequences, tokens = shape.sequences, shape.tokens
    sizes = (sequences, sequences + 1, sequences, tokens, tokens, sequences)
    starts = accumulate((-(-size // _ALIGNED) * _ALIGNED for size in sizes), initial=0)
    return tuple(slice(start, start + size) for (start, _), size in zip(pairwise(starts), sizes, strict=True))


def _fill(numbers: Ints, places: Sequence[slice], parts: Sequence[Ints]) -> None:
    """``parts``, and after each what those of no sequence have: row 0, no query, no key, chunk 0, position -1, the
    last wanted token again."""
    others = (0, parts[1][-1], 0, 0, -1, parts[5][-1])
    for place, part, other in zip(places, parts, others, strict=True):
        numbers[place][: len(part)] = part
        numbers[place][len(part) :] = other


def _padding(shape: Shape) -> tuple[Ints, ...]:
    """A step of no sequence."""
    nothing, zero = np.zeros(0, dtype=np.int32), np.zeros(1, dtype=np.int32)
    return nothing, zero, nothing, nothing, nothing, zero
