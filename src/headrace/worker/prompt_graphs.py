"""CUDA graphs of steps with prompts: everything between a step's numbers on the host and its hidden states, launched as one.

A layer of a prompt is seven to ten launches, each of which costs the host as much as some hundred tokens of a small model cost the device. Which
sequences a step has, how their queries and keys lie, is all read on the device; what a launch fixes are sizes. So a graph is recorded for
a shape: so many tokens, so many sequences, both rounded up. What fills a step up is of no sequence:

    tokens      | sequence 0 . . . | sequence 1 | sequence 2 . . . | - - - -    position -1: they see no keys and write none
    sequences     0                  1            2                  3 4 5      no query, no key
    wanted        the last token of each, and that of the last one again for those that are none

Shapes are many and a graph costs some milliseconds and a megabyte. Captured at a start are the largest, in whose memory all others lie, and for
prompts by themselves one of every doubling, which serves what is up to half as long. Any other shape is recorded where it comes again: that
step runs eagerly over the graph's own inputs, so that every first use is paid for, and is recorded behind it. An idle engine records those of
prompts by themselves ahead. Shapes that the device bounds are padded by a hair at most: the host has time there.

What lives here: shapes, their static inputs, when one is worth a graph, capture and replay. What may not: what a step computes (models/),
decode steps (graphs.py), sampling.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from headrace.kernels import Kernels
from headrace.request import StepPlan
from headrace.worker.device_memory import scratch_of_graphs
from headrace.worker.graphs import ComputesInOne
from headrace.worker.inputs import Gather, Packing
from headrace.worker.recorder import Recorder
from headrace.worker.rows import Ints, Rows

_log = logging.getLogger(__name__)

MOST_TOKENS = 2048  # of more, the device is what a step waits for, from a billion parameters on
MOST_GRAPHS = 96
_TOKENS = (16, 32, 48, 64, *range(96, 257, 32), *range(320, 1025, 64), *range(1152, MOST_TOKENS + 1, 128))
_DOUBLINGS = (32, 64, 128, 256, 512, 1024)
_SEQUENCES = (1, 4, 16, 64, 256)
_AGAIN = 2  # how often a shape comes until it is recorded, and where a larger graph serves it meanwhile
_AGAIN_SERVED = 16
# Multiplications by a layer's weights that an H200 does while the host launches a layer (0.4 ms, at 700 TFLOP/s): with fewer the host is what
# a step waits for, and padding costs nothing. With more it may be so much of a step at most.
_HOST_BOUND = 1.4e11
_HAIR = 1 / 32
_ALIGNED = 4  # int32 values in 16 bytes


@dataclass(frozen=True, slots=True, order=True)
class Shape:
    """Of a step, filled up."""

    tokens: int
    sequences: int


@dataclass(frozen=True, slots=True)
class Bounds:
    """What steps are. ``products``: multiplications by a layer's weights, for each token. ``prune``: the last layer computes wanted tokens alone."""

    max_num_seqs: int
    max_model_len: int
    tokens_a_step: int
    products: float
    prune: bool

    @property
    def most_wanted(self) -> int:
        """Hidden states that a step brings."""
        return self.sequences[-1] if self.prune else self.tokens[-1]

    @property
    def tokens(self) -> tuple[int, ...]:
        """That steps are filled up to, ascending."""
        most = min(self.tokens_a_step, MOST_TOKENS)
        return (*(size for size in _TOKENS if size < most), most)

    @property
    def sequences(self) -> tuple[int, ...]:
        return (*(size for size in _SEQUENCES if size < self.max_num_seqs), self.max_num_seqs)


class PromptGraphs:
    """Graphs of one decoder over one KV cache and one set of rows; of no use until the largest have been captured.

    Steps are taken in turn: ``shape_of``, and where there is one, ``write``, ``compute``, and behind all that reads what it brings, ``record``.
    """

    def __init__(
        self,
        decoder: ComputesInOne,
        kernels: Kernels,
        rows: Rows,
        kv_caches: Sequence[Tensor],
        recorder: Recorder,
        bounds: Bounds,
        hidden: Tensor,  # [bounds.most_wanted, hidden]: what every graph writes
    ) -> None:
        self._decoder = decoder
        self._kernels = kernels
        self._rows = rows
        self._kv_caches = tuple(kv_caches)
        self._recorder = recorder
        self._bounds = bounds
        self._tokens, self._sequences = bounds.tokens, bounds.sequences
        self._lone = tuple(Shape(tokens, self._sequences[0]) for tokens in self._tokens if self._is_host_bound(tokens))
        self._gather = Gather(rows, kernels)
        self._graphs: dict[Shape, torch.cuda.CUDAGraph] = {}
        self._seen: Counter[Shape] = Counter()  # how often, without a graph
        self._refused: set[Shape] = set()  # that cannot be captured
        self._due: Shape | None = None  # computed eagerly just now
        most = Shape(self._tokens[-1], self._sequences[-1])
        self._shipped = torch.zeros(_places(most)[-1].stop, dtype=torch.int32, device=rows.device)
        self._hidden = hidden

    # --- what is captured at a start

    @property
    def most(self) -> int:
        """Graphs there may come to be."""
        return min(MOST_GRAPHS, len(self._tokens) * len(self._sequences))

    @property
    def samples(self) -> tuple[Shape, ...]:
        """Those that show what graphs take, the largest first: it has the memory that all share."""
        few, middle, many = (self._tokens[at] for at in (0, len(self._tokens) // 2, -1))
        sequences = self._sequences
        shapes = Shape(many, sequences[-1]), Shape(many, sequences[0]), Shape(middle, sequences[-1]), Shape(few, sequences[0])
        return tuple(dict.fromkeys(shapes))

    @property
    def captured(self) -> tuple[Shape, ...]:
        return tuple(sorted(self._graphs))

    def capture_all(self) -> None:
        """What an engine begins with."""
        self.capture((*self.samples[:2], *(shape for shape in self._lone[::-1] if shape.tokens in _DOUBLINGS)))

    def capture(self, shapes: Sequence[Shape]) -> None:
        """In this order. Where a kernel gives way, and to a twin that looks at the device, there are none in the end."""
        try:
            for shape in shapes:
                self._rehearse_and_capture(shape)
        except RuntimeError:
            if self._kernels.graphable:
                raise
            self._graphs.clear()

    # --- steps

    def shape_of(self, plan: StepPlan, packing: Packing) -> Shape | None:
        """Which graph computes the step, or is recorded behind it; None: the step is computed as it is."""
        tokens, sequences = len(packing.chunk), len(packing.context)
        if not self._graphs or tokens > self._tokens[-1] or plan.prompt_logprobs or self._shares(plan, sequences):
            return None
        if (packing.wanted is not None) != self._bounds.prune:  # single tokens, more than decode steps have graphs for
            return None
        shape = Shape(_above(self._tokens, tokens), _above(self._sequences, sequences))
        if not self._is_worth(tokens, shape):
            return None
        if shape in self._graphs:
            return shape
        larger = self._larger(shape)
        due = self._count(shape) >= (_AGAIN if larger is None else _AGAIN_SERVED)
        return shape if due and shape not in self._refused and len(self._graphs) < self.most else larger

    def write(self, shape: Shape, plan: StepPlan, packing: Packing) -> None:
        """What the host has to say of the step; ``compute`` must follow."""
        wanted = packing.last if packing.wanted is None else packing.wanted
        parts = np.asarray(plan.rows, dtype=np.int32), packing.query_start, packing.context, packing.chunk, packing.position, wanted
        self._ship(shape, parts)

    def compute(self, shape: Shape, count: int) -> Tensor:
        """Hidden states of the step just written: of its ``count`` first tokens, or of those that are wanted. The next one overwrites them; work
        queued before sees them."""
        graph = self._graphs.get(shape)
        if graph is None:
            self._run(shape)
            self._due = shape
        else:
            graph.replay()
        return self._hidden[:count]

    def record(self) -> None:
        """Some milliseconds, once a shape: what was computed eagerly is a graph from now on."""
        shape, self._due = self._due, None
        if shape is not None:
            self._try(shape)

    def prepare(self) -> bool:
        """Records a shape that a prompt by itself may come to need, while nothing is computed. Whether it did. Raises what computing raises."""
        coming = (shape for shape in self._lone if shape not in self._graphs and shape not in self._refused)
        shape = next(coming, None) if 0 < len(self._graphs) < self.most else None
        if shape is not None:
            self._rehearse_and_capture(shape)
        return shape is not None

    # --- parts

    def _try(self, shape: Shape) -> None:
        """Where it fails, such steps go on as they are."""
        try:
            self._capture(shape)
        except Exception as error:  # the step that brought it has been queued as it should
            self._refused.add(shape)
            _log.warning("no graph for steps of %d tokens in %d sequences (%s); they are launched one by one", shape.tokens, shape.sequences, error)

    def _larger(self, shape: Shape) -> Shape | None:
        """The smallest there is a graph for that serves such steps, in less time than launching them takes."""
        sizes = range(shape.tokens, 2 * shape.tokens + 1)
        serving = (each for each in self._graphs if each.tokens in sizes and each.sequences >= shape.sequences and self._is_host_bound(each.tokens))
        return min(serving, default=None)

    def _count(self, shape: Shape) -> int:
        """How often it has come, this time included."""
        self._seen[shape] += 1
        return self._seen[shape]

    def _is_worth(self, tokens: int, shape: Shape) -> bool:
        return self._is_host_bound(shape.tokens) or shape.tokens - tokens <= _HAIR * tokens

    def _is_host_bound(self, tokens: int) -> bool:
        return tokens * self._bounds.products <= _HOST_BOUND

    def _shares(self, plan: StepPlan, sequences: int) -> bool:
        """Whether the step looks for keys that its sequences share: graphs here do not."""
        if plan.shared_tokens == 0:
            return False
        least = self._decoder.least_shared(sequences)
        return least is not None and (plan.shared_tokens is None or plan.shared_tokens >= least)

    def _ship(self, shape: Shape, parts: Sequence[Ints]) -> None:
        places, device = _places(shape), self._rows.device
        host = torch.empty(places[-1].stop, dtype=torch.int32, pin_memory=device.type == "cuda")
        _fill(host.numpy(), places, parts)
        self._shipped[: len(host)].copy_(host, non_blocking=True)

    def _run(self, shape: Shape) -> None:
        """The step whose inputs are there."""
        row, query_start, context, chunk, position, wanted = (self._shipped[place] for place in _places(shape))
        longest = shape.tokens + 1  # more than any sequence has: who fills a step up must not be taken for a query of the only one
        inputs = self._gather.gathered(row, query_start, context, chunk, position, longest, self._bounds.max_model_len, 0)
        if self._bounds.prune:
            inputs = self._gather.wanting(inputs, wanted, chunk, position)
        found = self._decoder.forward(inputs, self._kv_caches)
        self._hidden[: len(found)].copy_(found)

    def _rehearse_and_capture(self, shape: Shape) -> None:
        """Behind an eager step of nobody's, which pays for every first use."""
        with torch.inference_mode():
            self._ship(shape, _nobody(shape))
            self._run(shape)
            self._capture(shape)

    def _capture(self, shape: Shape) -> None:
        with torch.inference_mode(), scratch_of_graphs(self._rows.device):
            self._recorder.follow()
            with self._recorder.recording() as graph:
                self._run(shape)
        self._graphs[shape] = graph


def _above(sizes: Sequence[int], size: int) -> int:
    return sizes[bisect_left(sizes, size)]


def _places(shape: Shape) -> tuple[slice, ...]:
    """Where rows, query starts, contexts, chunks, positions and wanted tokens lie among a step's numbers; each begins at 16 bytes."""
    sequences, tokens = shape.sequences, shape.tokens
    sizes = (sequences, sequences + 1, sequences, tokens, tokens, sequences)
    starts = accumulate((-(-size // _ALIGNED) * _ALIGNED for size in sizes), initial=0)
    return tuple(slice(start, start + size) for (start, _), size in zip(pairwise(starts), sizes, strict=True))


def _fill(numbers: Ints, places: Sequence[slice], parts: Sequence[Ints]) -> None:
    """``parts``, and behind each what those of no sequence have: row 0, no query, no key, chunk 0, position -1, the last wanted token again."""
    others = (0, parts[1][-1], 0, 0, -1, parts[5][-1])
    for place, part, other in zip(places, parts, others, strict=True):
        numbers[place][: len(part)] = part
        numbers[place][len(part) :] = other


def _nobody(shape: Shape) -> tuple[Ints, ...]:
    """A step of no sequence."""
    nothing, zero = np.zeros(0, dtype=np.int32), np.zeros(1, dtype=np.int32)
    return nothing, zero, nothing, nothing, nothing, zero
