"""CUDA graphs of decode steps: everything between a step's numbers on the host and its hidden states, or its tokens there, launched as one.

A decode step of a small model is a few hundred kernels of a few microseconds each; launched one by one they wait for the host. For
every batch bucket graphs are captured when an engine starts: one fetches what the host has written (pinned.py), gathers the inputs from
rows and computes the forward pass, others go from there to tokens written into rows and delivered to the host, one for each kind of draw
(rows with more on their minds are sampled eagerly, and so are buckets whose logits would be more than a step may hold). Where the forward
pass is brief, one graph does both for greedy steps: from graph to graph the device waits some microseconds, and no kernel begins early. Rows
that fill a batch up to its bucket are of no sequence: they see no keys, write none (slot -1) and store no token. Steps whose rows share keys
that are worth reading once for all have a graph of their own, captured when the first of them comes.

What lives here: the buckets, their static inputs, capture and replay. What may not: what a step computes (models/), row state.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from headrace.kernels import Kernels
from headrace.layers.inputs import ForwardInputs
from headrace.worker.device_memory import scratch_of_graphs
from headrace.worker.inputs import Gather
from headrace.worker.memory import buckets_to_try
from headrace.worker.pinned import Mailbox
from headrace.worker.recorder import Recorder
from headrace.worker.rows import Edits, Ints, Rows
from headrace.worker.sampler import Draw, Sampler

_log = logging.getLogger(__name__)
_ROW, _POSITION, _CONTEXT = range(3)  # what the host writes for each row of a step
_EDITS, _COUNT, _LINES = slice(3, 6), 6, 7  # and what it edits of the block table: row, index and block; how many
_NOBODY = np.array([[0], [-1], [0]], dtype=np.int32)
_ALIGNED = 4  # int32 values in 16 bytes


class Computes(Protocol):
    """What a runner needs of a decoder."""

    def forward(self, inputs: ForwardInputs, kv_caches: Sequence[Tensor]) -> Tensor: ...  # [tokens, hidden]

    def logits(self, hidden: Tensor) -> Tensor: ...  # [n, hidden] → [n, vocab], float32 or as the head gives them

    def way(self, tokens: int) -> Hashable: ...  # steps that go different ways ask for different memory


class ComputesInOne(Computes, Protocol):
    """What graphs need besides."""

    def brief(self, rows: int, block_size: int) -> int: ...  # up to which context such steps are computed in a way of their own; 0: none are

    def least_shared(self, rows: int) -> int | None: ...  # from how many shared tokens on they are, too; None: never


def buckets_up_to(max_num_seqs: int) -> tuple[int, ...]:
    """1, 2, 4, then multiples of 8 up to 256, then of 32: padding costs at most an eighth of a large batch."""
    sizes = (1, 2, 4, *range(8, 256, 8), *range(256, max_num_seqs + 32, 32))
    enough = next(size for size in sizes if size >= max_num_seqs)
    return tuple(size for size in sizes if size <= enough)


@dataclass(frozen=True, slots=True)
class _Captured:
    """One graph and the hidden states that every replay of it writes."""

    graph: torch.cuda.CUDAGraph
    result: Tensor


class DecodeGraphs:
    """Graphs of one decoder over one KV cache and one set of rows. Empty, and then of no use, until ``capture_all``."""

    def __init__(
        self,
        decoder: ComputesInOne,
        kernels: Kernels,
        rows: Rows,
        kv_caches: Sequence[Tensor],
        recorder: Recorder,
        *,
        max_num_seqs: int,
        max_model_len: int,
        max_logits_rows: int,
    ) -> None:
        self._decoder = decoder
        self._kernels = kernels
        self._rows = rows
        self._kv_caches = tuple(kv_caches)
        self._max_model_len = max_model_len
        self._max_logits_rows = max_logits_rows
        self._buckets = buckets_up_to(max_num_seqs)
        self._gather = Gather(rows, kernels)
        self._sampler = Sampler(rows, kernels)
        self._recorder = recorder
        self._forward: dict[int, _Captured] = {}  # by bucket; each writes hidden states, [bucket, hidden]
        self._draw: dict[tuple[int, Draw], torch.cuda.CUDAGraph] = {}
        self._whole: dict[int, torch.cuda.CUDAGraph] = {}  # by bucket: the brief forward pass and the greedy draw
        self._drawn_already = False  # the step just computed has its tokens
        self._long: dict[int, tuple[int, torch.cuda.CUDAGraph]] = {}  # by bucket: above which context another graph writes the same
        self._longest = 0  # context of the step just written
        self._least_shared: dict[int, int] = {}  # by bucket: from how many shared tokens on another graph writes the same
        self._shared: dict[int, torch.cuda.CUDAGraph | None] = {}  # that graph; None: it cannot be captured
        self._shares = False  # whether the step just written has so many
        width = -(-self._buckets[-1] // _ALIGNED) * _ALIGNED
        self._fetch: Callable[..., None] = kernels.choose("fetch_step", dtype=torch.int32)
        self._mailbox = Mailbox((_LINES, width), (width, 2), rows.device, torch.cuda.current_stream(rows.device))
        for slot in self._mailbox.slots:  # until a step writes there, rows of no sequence
            slot[_POSITION] = -1
        self._shipped = torch.zeros((3, width), dtype=torch.int32, device=rows.device)
        self._every = torch.arange(width + 1, dtype=torch.int32, device=rows.device)

    @property
    def captured(self) -> tuple[int, ...]:
        """Batch sizes there are graphs for, ascending."""
        return tuple(sorted(self._forward))

    @property
    def most(self) -> int:
        """Batch sizes there are to be graphs for."""
        return len(self._buckets)

    @property
    def samples(self) -> tuple[int, ...]:
        """Those that show what graphs take, the largest first: it has the memory that all share."""
        return buckets_to_try(self._buckets)

    def capture_all(self) -> None:
        """Every bucket, the largest first, so that the others find its memory."""
        self.capture(tuple(reversed(self._buckets)))

    def capture(self, buckets: Sequence[int]) -> None:
        """In this order. Each step has run eagerly before: a capture compiles nothing.

        Where a kernel gives way all the same, and to a twin that looks at the device, there are no graphs in the end.
        """
        try:
            with torch.inference_mode(), scratch_of_graphs(self._rows.device):
                self._capture_each(buckets)
        except RuntimeError:
            if self._kernels.graphable:
                raise
            self._forward.clear()
            self._draw.clear()
            self._whole.clear()
            self._long.clear()
            self._least_shared.clear()

    def _capture_each(self, buckets: Sequence[int]) -> None:
        for bucket in buckets:
            if not self._forward:
                self._run_eagerly(bucket)
            self._capture(bucket)
        self.restart()

    def _run_eagerly(self, bucket: int) -> None:
        """What a graph will hold, once: first-use costs are paid outside of captures."""
        hidden = self._hidden(bucket, self._max_model_len)
        for how in self._draws_of(bucket):
            self._drawn(bucket, hidden, how)
        self._recorder.follow()

    def serves(self, count: int) -> bool:
        """Whether there is a graph for a step of so many rows."""
        return self._bucket(count) is not None

    def draws(self, count: int) -> bool:
        """Whether there are graphs for the tokens of so many rows too."""
        return (self._bucket(count), Draw.GREEDY) in self._draw

    def restart(self) -> None:
        """After steps that may have been launched in part: the host and the device agree again on whose turn it is."""
        torch.cuda.synchronize(self._rows.device)
        self._mailbox.restart()

    def write(self, rows: Ints, contexts: Ints, edits: Edits = ((), (), ()), *, shared_tokens: int | None = None) -> int:
        """What the host has to say of a step in which ``rows`` compute one token each and then see ``contexts`` keys; ``compute`` must follow.
        ``edits``: no more than there are rows. ``shared_tokens``: as StepPlan has it.

        Returns the bucket. There must be a graph for so many.
        """
        count, bucket = len(rows), self._bucket(len(rows))
        assert bucket is not None, f"no graph serves {count} rows"
        self._longest = int(contexts.max()) if bucket in self._long else 0
        self._shares = bucket in self._least_shared and (shared_tokens is None or shared_tokens >= self._least_shared[bucket])
        host = self._mailbox.next()
        host[_ROW, :count] = rows
        np.subtract(contexts, 1, out=host[_POSITION, :count])
        host[_CONTEXT, :count] = contexts
        if count < bucket:
            host[:3, count:bucket] = _NOBODY
        host[_COUNT, 0] = len(edits[0])
        if edits[0]:
            host[_EDITS, : len(edits[0])] = edits
        return bucket

    def compute(self, bucket: int, how: Draw | None = None) -> None:
        """The forward pass of the step just written. ``how``: ``draw`` will follow with it; where one graph does both, this is all of it, and
        hidden states are nowhere."""
        graph, whole = self._graph_of(bucket), self._whole.get(bucket)
        self._drawn_already = whole is not None and how is Draw.GREEDY and graph is self._forward[bucket].graph
        (whole if whole is not None and self._drawn_already else graph).replay()
        self._mailbox.queued()

    def _graph_of(self, bucket: int) -> torch.cuda.CUDAGraph:
        """Which of them computes the step just written."""
        if self._shares:
            if bucket not in self._shared:
                self._shared[bucket] = self._try_shared(bucket)
            if (shared := self._shared[bucket]) is not None:
                return shared
        most, long = self._long.get(bucket, (self._max_model_len, None))
        return self._forward[bucket].graph if long is None or self._longest <= most else long

    def hidden(self, bucket: int, count: int) -> Tensor:
        """What ``compute`` brings: [count, hidden]. The next one overwrites it; work queued before sees it."""
        return self._forward[bucket].result[:count]

    def draw(self, bucket: int, count: int, how: Draw) -> Ints:
        """Tokens of the step just computed, written into its rows. Returns where (token, usable) of each will be on the host once the step
        has ended, [count, 2] int32, until more steps are queued than can be in flight."""
        if not self._drawn_already:
            self._draw[bucket, how].replay()
        return self._mailbox.answer[:count]

    def _bucket(self, count: int) -> int | None:
        at = bisect_left(self._buckets, count)
        return self._buckets[at] if at < len(self._buckets) and self._buckets[at] in self._forward else None

    def _draws_of(self, bucket: int) -> Sequence[Draw]:
        """None where the logits of so many rows must not exist at once: they are sampled in pieces."""
        return tuple(Draw) if bucket <= self._max_logits_rows else ()

    def _columns(self, bucket: int) -> Tensor:
        """[3, bucket]: what was fetched; each column begins at 16 bytes, so that a kernel is compiled once for all buckets."""
        return self._shipped[:, :bucket]

    def _hidden(self, bucket: int, longest: int, shared_tokens: int | None = 0) -> Tensor:
        """Of contexts up to ``longest``."""
        columns, every = self._columns(bucket), self._every
        self._fetch(self._mailbox.inward, self._mailbox.turn, columns, self._rows.tables[0])
        chunks = columns[_ROW], every[: bucket + 1], columns[_CONTEXT], every[:bucket], columns[_POSITION]
        inputs = self._gather.gathered(*chunks, 1, longest, shared_tokens)
        return self._decoder.forward(inputs, self._kv_caches)

    def _drawn(self, bucket: int, hidden: Tensor, how: Draw) -> None:
        columns = self._columns(bucket)
        # A row of no sequence has context 0, and no token is ever stored there.
        mailbox = self._mailbox
        self._sampler.draw(self._decoder.logits(hidden), columns[_ROW], columns[_CONTEXT], how, mailbox.outward, mailbox.turn)

    def _capture(self, bucket: int) -> None:
        brief = self._decoder.brief(bucket, self._rows.block_sizes[0])
        with self._recorder.recording() as forward:
            hidden = self._hidden(bucket, self._covered(brief))
        self._forward[bucket] = _Captured(forward, hidden)
        if 0 < brief < self._max_model_len:
            self._long[bucket] = brief, self._capture_again(bucket, hidden)
        if (least := self._decoder.least_shared(bucket)) is not None:
            self._least_shared[bucket] = least
        for how in self._draws_of(bucket):
            with self._recorder.recording() as graph:
                self._drawn(bucket, hidden, how)
            self._draw[bucket, how] = graph
        if brief and self._draws_of(bucket):
            self._whole[bucket] = self._capture_whole(bucket, brief)

    def _capture_again(self, bucket: int, hidden: Tensor, shared_tokens: int | None = 0) -> torch.cuda.CUDAGraph:
        """For contexts of any length: what draws look at is in the same place."""
        with self._recorder.recording() as graph:
            hidden.copy_(self._hidden(bucket, self._max_model_len, shared_tokens))
        return graph

    def _capture_whole(self, bucket: int, brief: int) -> torch.cuda.CUDAGraph:
        """A few launches: it takes a start no time that could be noticed, as it would with layers of their own."""
        with self._recorder.recording() as graph:
            self._drawn(bucket, self._hidden(bucket, self._covered(brief)), Draw.GREEDY)
        return graph

    def _covered(self, brief: int) -> int:
        """Contexts of a bucket's forward pass."""
        return min(brief or self._max_model_len, self._max_model_len)

    def _try_shared(self, bucket: int) -> torch.cuda.CUDAGraph | None:
        """Some milliseconds, once a bucket; where it fails, every row reads its keys by itself."""
        try:
            with torch.inference_mode(), scratch_of_graphs(self._rows.device):
                return self._capture_again(bucket, self._forward[bucket].result, None)
        except RuntimeError as error:
            _log.warning("no graph for %d rows with shared keys (%s); each row reads its own", bucket, error)
            return None
