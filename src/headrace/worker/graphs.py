"""CUDA graphs of decode steps: everything between a step's numbers on the host and its hidden states, or its tokens
there, launched as one.

A decode step of a small model is a few hundred kernels of a few microseconds each; launched one by one they wait for
the host. For every batch bucket graphs are captured when an engine starts: one fetches what the host has written
(Mailbox), gathers the inputs from rows and computes the forward pass, others go from there to tokens written into rows
and delivered to the host, one for each kind of draw (rows that ask for more are sampled eagerly, and so are buckets
whose logits would be more than a step may hold). Where the forward pass is one megakernel, one graph does both for
greedy steps: from graph to graph the device waits some microseconds, and no kernel begins early. Rows that fill a batch
up to its bucket are of no sequence: they see no keys, write none (slot -1) and store no token.

Three kinds of step have graphs of their own: those whose rows share keys that are worth reading once for all, those
with adapters, and those that verify drafts (each token of a sequence is a row of the batch, whichever sequence it is
of, so rows with more and fewer drafts share one; trees have one more, and so have long contexts where one kernel
computes all layers of short ones). A capture takes as long as ten steps, and a batch that empties passes
through every bucket: where a bucket of up to twice as many rows has the graph, that serves, until the bucket has been
asked for often or the engine has nothing to do.

Hidden states that something else has computed are drawn from by the same graphs.

What lives here: the buckets, their static inputs, what host and graphs tell each other, capture and replay. What may
not: what a step computes (models/), row state.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial

import numpy as np
import torch
from torch import Tensor

from headrace.cost.prompt_shapes import AGAIN_SERVED
from headrace.kernels.candidate import Facts
from headrace.kernels.inputs import AdapterRows, TreeInputs
from headrace.kernels.operations import FETCH_STEP
from headrace.worker.launches import Launches
from headrace.worker.memory import buckets_to_try, buckets_up_to
from headrace.worker.recorder import Recorder
from headrace.worker.rows import Edits, Ints, Packing, as_tree
from headrace.worker.sampler import Draw, Sampler

_log = logging.getLogger(__name__)
_ROW, _POSITION, _CONTEXT = range(3)  # what the host writes for each row of a step
_EDITS, _COUNT = slice(3, 6), 6  # and what it edits of the block table: row, index and block; how many
_TREE, _LINES = slice(7, 12), 12  # and of tokens that form trees: place, keys, first place, ancestors in two lines
_PADDING = np.array([[0], [-1], [0]], dtype=np.int32)
_ALIGNED = 4  # int32 values in 16 bytes
_SLOTS = 4  # one more than steps can be in flight, so that no step waits


class Kind(Enum):
    """Steps with a graph of their own, captured when such a step comes."""

    SHARED = "shared keys"
    ADAPTED = "adapters"
    CHAINED = "drafts"  # rows that see each other's keys
    LONG = "drafts in long contexts"  # where one kernel computes those in short ones
    TREE = "trees of drafts"


_CHAINS = Kind.CHAINED, Kind.LONG
_DRAFTS = *_CHAINS, Kind.TREE  # whose first step in a bucket is computed eagerly


@dataclass(slots=True)
class _Bucket:
    """What computes steps of so many rows. Every graph of a forward pass writes the same hidden states."""

    forward: torch.cuda.CUDAGraph  # of contexts up to ``megakernel``, where that is not 0
    hidden: Tensor  # [bucket, hidden]
    megakernel: int  # up to which context one kernel computes all layers; 0: none does
    long: torch.cuda.CUDAGraph | None = None  # of longer ones
    draws: dict[Draw, torch.cuda.CUDAGraph] = field(default_factory=dict)
    fetch: torch.cuda.CUDAGraph | None = None  # of a step whose hidden states something else computes
    greedy: torch.cuda.CUDAGraph | None = None  # the megakernel and the greedy draw
    least_shared: int | None = None  # from how many shared tokens on another graph computes them; None: never
    kinds: dict[Kind, torch.cuda.CUDAGraph | None] = field(default_factory=dict)  # None: it could not be captured
    asked: Counter[Kind] = field(default_factory=Counter)  # how often, while there was none

    def of(self, kind: Kind | None) -> torch.cuda.CUDAGraph | None:
        return None if kind is None else self.kinds.get(kind)


class DecodeGraphs:
    """Empty, and then of no use, until ``capture_all``."""

    def __init__(
        self,
        recorder: Recorder,
        *,
        max_num_seqs: int,
        max_model_len: int,
        max_logits_rows: int,
        built: bool = True,
        stages: int = 1,
        passes: int = 1,
    ) -> None:
        """``built``: so are the decoder's kernels for every bucket; else each is run once before it is captured.
        ``stages``: of a pipeline, whose last one samples eagerly, for it sends what it samples. ``passes``: that the
        host writes in one step of the engine's."""
        self._recorder = recorder
        self._stages = stages
        self._built = built
        self._rows = rows = recorder.rows
        self.launches = recorder.launches
        self._max_model_len = max_model_len
        self._max_logits_rows = max_logits_rows
        self._buckets = buckets_up_to(max_num_seqs)
        self._sampler = Sampler(rows, recorder.kernels)
        self._captured: dict[int, _Bucket] = {}
        self._drawn_already = False  # the step just computed has its tokens
        self._longest = 0  # context of the step just written
        self._kind: Kind | None = None  # of the step just written
        width = -(-self._buckets[-1] // _ALIGNED) * _ALIGNED
        self._fetch = recorder.kernels.choose(FETCH_STEP, Facts(torch.int32))
        self._mailbox = Mailbox(
            (_LINES, width),
            (width, 2),
            rows.device,
            torch.cuda.current_stream(rows.device),
            _SLOTS * passes + stages - 1,
            mark=self.launches.mark,
        )
        for slot in self._mailbox.slots:  # until a step writes there, rows of no sequence
            slot[_POSITION] = -1
        self._shipped = torch.zeros((3, width), dtype=torch.int32, device=rows.device)
        self._every = torch.arange(width + 1, dtype=torch.int32, device=rows.device)

    @property
    def captured(self) -> tuple[int, ...]:
        """Batch sizes there are graphs for, ascending."""
        return tuple(sorted(self._captured))

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
        """In this order."""
        with self._recorder.while_graphable(self._captured.clear), self._recorder.captures():
            for bucket in buckets:
                if not self._captured or not self._built:
                    self._run_eagerly(bucket)
                self._capture(bucket)
            self.restart()

    def forget(self) -> None:
        """All of them, with their memory."""
        self._captured.clear()
        self._recorder.renew()

    def _run_eagerly(self, bucket: int) -> None:
        """What a graph will hold, once: first-use costs are paid outside of captures."""
        hidden = self._hidden(bucket, self._max_model_len)
        for how in self._draws_of(bucket):
            self._drawn(bucket, hidden, how)
        self._recorder.follow()

    def serves(self, count: int) -> bool:
        """Whether there is a graph for a step of so many rows."""
        return self._bucket(count) is not None

    def adapts(self, count: int) -> bool:
        """Whether there is a graph for a step of so many rows with adapters."""
        bucket = self._bucket(count)
        return bucket is not None and self._serving(bucket, Kind.ADAPTED) is not None

    def forget_adapted(self) -> None:
        """Adapters change more than those that graphs were captured with."""
        if any(found.of(Kind.ADAPTED) is not None for found in self._captured.values()):
            torch.cuda.synchronize(self._rows.device)  # none is under way
        for found in self._captured.values():
            found.kinds.pop(Kind.ADAPTED, None)

    def prepare(self) -> bool:
        """Captures a graph that steps of a kind that has come may need, while nothing is computed; whether it did."""
        for kind in (Kind.SHARED, Kind.ADAPTED):
            if any(found.of(kind) is not None for found in self._captured.values()):
                for bucket in self._captured:
                    if kind not in self._captured[bucket].kinds and self._larger(bucket, kind) is None:
                        self._capture_kind(bucket, kind)
                        return True
        return False

    def _serving(self, bucket: int, kind: Kind) -> int | None:
        """The bucket whose graph computes a step of that kind; it is captured where none does. None: it cannot be."""
        found = self._captured[bucket]
        if kind not in found.kinds:
            found.asked[kind] += 1
            if found.asked[kind] < AGAIN_SERVED and (larger := self._larger(bucket, kind)) is not None:
                return larger
            self._capture_kind(bucket, kind)
        return None if found.kinds[kind] is None else bucket

    def _larger(self, bucket: int, kind: Kind) -> int | None:
        """The next larger bucket that has such a graph, and draws as this one does."""
        mine = self._captured[bucket]
        return min(
            (
                size
                for size, found in self._captured.items()
                if bucket < size <= 2 * bucket and found.of(kind) is not None and bool(found.draws) == bool(mine.draws)
            ),
            default=None,
        )

    def draws(self, count: int) -> bool:
        """Whether there are graphs for the tokens of so many rows too."""
        bucket = self._bucket(count)
        return bucket is not None and Draw.GREEDY in self._captured[bucket].draws

    def restart(self) -> None:
        """After steps that may have been launched in part: the host and the device agree again on whose turn it is."""
        self.launches.drop()
        torch.cuda.synchronize(self._rows.device)
        self._mailbox.restart()

    def write(
        self,
        rows: Ints,
        contexts: Ints,
        edits: Edits = ((), (), ()),
        *,
        shared_tokens: int | None = None,
        adapted: bool = False,
        chained: bool = False,
        tree: Packing | None = None,
    ) -> int:
        """What the host has to say of a step in which ``rows`` compute one token each and then see ``contexts`` keys;
        ``compute`` must follow. ``edits``: no more than there are rows. ``shared_tokens``: as StepPlan has it.
        ``adapted``: some have adapters. ``chained``: a row stands there once for each of its tokens. ``tree``: so it
        does, and these are that packing's tokens.

        Returns the bucket. There must be a graph for so many.
        """
        bucket = self._bucket(len(rows))
        assert bucket is not None, f"no graph serves {len(rows)} rows"
        drafts = Kind.TREE if tree is not None else Kind.CHAINED if chained else None
        bucket, self._kind = self._kind_of(bucket, shared_tokens, adapted=adapted, drafts=drafts)
        found = self._captured[bucket]
        self._longest = int(contexts.max()) if found.long is not None else 0
        if self._kind is Kind.CHAINED and self._longest > self._covered(found):
            self._kind = Kind.LONG
        host = self._write(bucket, rows, contexts)
        if tree is not None:
            _write_tree(host, tree, bucket)
        host[_COUNT, 0] = len(edits[0])
        if edits[0]:
            host[_EDITS, : len(edits[0])] = edits
        return bucket

    def _kind_of(
        self, bucket: int, shared_tokens: int | None, *, adapted: bool, drafts: Kind | None
    ) -> tuple[int, Kind | None]:
        """Which graph computes such a step of ``bucket`` rows."""
        if drafts is not None:
            return self._drafted(bucket, drafts), drafts
        if adapted:
            serving = self._serving(bucket, Kind.ADAPTED)
            assert serving is not None, "asked for by adapts"
            return serving, Kind.ADAPTED
        least = self._captured[bucket].least_shared
        if least is None or (shared_tokens is not None and shared_tokens < least):
            return bucket, None
        serving = self._serving(bucket, Kind.SHARED)
        return (bucket, None) if serving is None else (serving, Kind.SHARED)

    def _drafted(self, bucket: int, kind: Kind) -> int:
        """The bucket for a step that verifies drafts; the first one is computed eagerly."""
        found = self._captured[bucket]
        found.asked[kind] += 1
        if kind in found.kinds or found.asked[kind] >= AGAIN_SERVED:
            return bucket
        return self._larger(bucket, kind) or bucket

    def _write(self, bucket: int, rows: Ints, contexts: Ints) -> Ints:
        """Into the next step's slot."""
        count, host = len(rows), self._mailbox.next()
        host[_ROW, :count] = rows
        np.subtract(contexts, 1, out=host[_POSITION, :count])
        host[_CONTEXT, :count] = contexts
        if count < bucket:
            host[:3, count:bucket] = _PADDING
        return host

    def compute(self, bucket: int, how: Draw | None = None) -> None:
        """The forward pass of the step just written. ``how``: ``draw`` will follow with it; where one graph does both,
        this is all of it, and hidden states are nowhere."""
        found = self._captured[bucket]
        if self._kind in _DRAFTS and self._kind not in found.kinds:
            return self._compute_first(bucket, found, self._kind)
        graph = self._graph_of(found)
        self._drawn_already = found.greedy is not None and how is Draw.GREEDY and graph is found.forward
        graph = found.greedy if self._drawn_already else graph
        if graph is None:
            self.launches.release()
            found.hidden.copy_(self._hidden(bucket, self._max_model_len, kind=self._kind))
        else:
            self.launches.replay(graph)
        self._mailbox.queued()

    def _compute_first(self, bucket: int, found: _Bucket, kind: Kind) -> None:
        """Eagerly, over what the graph will read: every first use is paid for, and the graph is captured after it."""
        self._drawn_already = False
        self.launches.release()
        found.hidden.copy_(self._hidden(bucket, self._max_model_len, kind=kind))
        self._mailbox.queued()
        self._recorder.follow()
        self._capture_kind(bucket, kind)

    def _graph_of(self, found: _Bucket) -> torch.cuda.CUDAGraph | None:
        """Which one computes the step just written; None: drafts whose graph could not be captured."""
        if self._kind is not None:
            return found.of(self._kind)
        return found.forward if found.long is None or self._longest <= found.megakernel else found.long

    def draw_from(self, hidden: Tensor, rows: Ints, positions: Ints, how: Draw) -> Ints:
        """Tokens from ``hidden`` [n, hidden], which something else has computed, for ``rows`` [n] at ``positions`` [n].
        Returns as ``draw`` does; there must be graphs that draw for so many."""
        bucket = self._bucket(len(rows))
        assert bucket is not None, f"no graph serves {len(rows)} rows"
        found = self._captured[bucket]
        if hidden.data_ptr() != found.hidden.data_ptr():
            self.launches.release()
            found.hidden[: len(rows)].copy_(hidden)
        return self.draw_at(bucket, rows, positions, how)

    def draw_at(self, bucket: int, rows: Ints, positions: Ints, how: Draw) -> Ints:
        """The same from hidden states that lie in the bucket's own; a token at position 0 is stored nowhere."""
        found = self._captured[bucket]
        self._write(bucket, rows, positions - self._recorder.ahead)[_COUNT, 0] = 0
        self._fetch_alone(bucket, found)
        self._mailbox.queued()
        self.launches.replay(found.draws[how])
        return self._mailbox.answer[: len(rows)]

    def _fetch_alone(self, bucket: int, found: _Bucket) -> None:
        fetch = partial(
            self._fetch, self._mailbox.inward, self._mailbox.turn, self._columns(bucket), self._rows.tables[0]
        )
        if not self.launches.holding:
            fetch()
            return
        if found.fetch is None:
            with self._recorder.captures(), self._recorder.recording() as graph:
                fetch()
            found.fetch = graph  # not before it is whole
        self.launches.replay(found.fetch)

    def hidden(self, bucket: int, count: int) -> Tensor:
        """The forward pass of the step just written, and what it brings: [count, hidden]. The next one overwrites it;
        work queued before sees it."""
        self.compute(bucket)
        self.launches.release()
        return self._captured[bucket].hidden[:count]

    def entry(self, bucket: int, count: int) -> Tensor:
        """Of a stage or a head: where what the step just written goes on from must be before it is computed, [count,
        hidden]."""
        entry = self._recorder.entry
        assert entry is not None, "models begin with tokens"
        entry[count:bucket].zero_()  # what rows of no sequence go on from must not grow from step to step
        return self.entered(count)

    def entered(self, count: int) -> Tensor:
        """The same as it is now; a head leaves there what it goes on from."""
        assert self._recorder.entry is not None
        return self._recorder.entry[:count]

    def draw(self, bucket: int, count: int, how: Draw) -> Ints:
        """Tokens of the step just computed, written into its rows. Returns where (token, usable) of each will be on the
        host once the step has ended, [count, 2] int32, until more steps are queued than can be in flight."""
        if not self._drawn_already:
            self.launches.replay(self._captured[bucket].draws[how])
        return self._mailbox.answer[:count]

    def _bucket(self, count: int) -> int | None:
        at = bisect_left(self._buckets, count)
        return self._buckets[at] if at < len(self._buckets) and self._buckets[at] in self._captured else None

    def _draws_of(self, bucket: int) -> Sequence[Draw]:
        """None where the logits of so many rows must not exist at once (they are sampled in pieces), nor in a pipeline."""
        return tuple(Draw) if bucket <= self._max_logits_rows and self._stages == 1 else ()

    def _columns(self, bucket: int) -> Tensor:
        """[3, bucket]: what was fetched; each column begins at 16 bytes, so that a kernel is compiled once for all
        buckets."""
        return self._shipped[:, :bucket]

    def _hidden(self, bucket: int, longest: int, kind: Kind | None = None) -> Tensor:
        """Of contexts up to ``longest``."""
        columns, every = self._columns(bucket), self._every
        self._fetch(self._mailbox.inward, self._mailbox.turn, columns, self._rows.tables[0])
        row, position, context = columns
        place, seen, tree = position, context, None
        if kind is Kind.TREE:
            lines = self._mailbox.fetched(_TREE)
            place, seen, first = lines[:3, :bucket]
            tree = TreeInputs(first, lines[3:].view(-1).view(torch.int64)[:bucket])
        chunks = row, every[: bucket + 1], seen, every[:bucket], place
        shared_tokens = None if kind is Kind.SHARED else 0
        inputs = self._recorder.gather.gathered(*chunks, 1, longest, shared_tokens, 0, kind in _CHAINS)
        if tree is not None:
            inputs = as_tree(inputs, position.clamp(min=0), tree)
        if kind is Kind.ADAPTED:
            inputs = replace(inputs, adapters=AdapterRows(self._rows.slots_of(row, position)))
        return self._recorder.forward(inputs)

    def _drawn(self, bucket: int, hidden: Tensor, how: Draw) -> None:
        columns, ahead = self._columns(bucket), self._recorder.ahead
        # A row of no sequence has context 0, and no token is ever stored there.
        place = columns[_CONTEXT] + ahead * (columns[_CONTEXT] > 0).int() if ahead else columns[_CONTEXT]
        mailbox, decoder = self._mailbox, self._recorder.decoder
        self._sampler.draw(decoder, hidden, columns[_ROW], place, how, mailbox.outward, mailbox.turn)

    def _capture(self, bucket: int) -> None:
        decoder = self._recorder.decoder
        megakernel = decoder.megakernel_context(bucket, self._rows.block_sizes[0])
        covered = min(megakernel or self._max_model_len, self._max_model_len)
        with self._recorder.recording() as forward:
            hidden = self._hidden(bucket, covered)
        found = self._captured[bucket] = _Bucket(forward, hidden, megakernel)
        if 0 < megakernel < self._max_model_len:
            found.long = self._capture_again(bucket, hidden)
        found.least_shared = decoder.least_shared(bucket)
        for how in self._draws_of(bucket):
            with self._recorder.recording() as found.draws[how]:
                self._drawn(bucket, hidden, how)
        # a few launches: it takes a start no time that could be noticed, as it would with layers of their own
        if megakernel and found.draws:
            with self._recorder.recording() as found.greedy:
                self._drawn(bucket, self._hidden(bucket, covered), Draw.GREEDY)

    def _capture_again(
        self, bucket: int, hidden: Tensor, kind: Kind | None = None, longest: int = 0
    ) -> torch.cuda.CUDAGraph:
        """For contexts of any length, or up to ``longest``: what draws look at is in the same place."""
        with self._recorder.recording() as graph:
            hidden.copy_(self._hidden(bucket, longest or self._max_model_len, kind))
        return graph

    def _covered(self, found: _Bucket) -> int:
        """Up to which context the first graph of a bucket computes."""
        return found.megakernel if found.long is not None else self._max_model_len

    def _capture_kind(self, bucket: int, kind: Kind) -> None:
        """Some milliseconds, once a bucket; where it fails, such steps go the longer way."""
        found = self._captured[bucket]
        try:
            with self._recorder.captures():
                longest = self._covered(found) if kind is Kind.CHAINED else 0
                found.kinds[kind] = self._capture_again(bucket, found.hidden, kind, longest)
        except RuntimeError as error:
            found.kinds[kind] = None
            _log.warning("no graph for %d rows with %s (%s)", bucket, kind.value, error)


# --- numbers between the host and graphs


def _write_tree(host: Ints, packing: Packing, bucket: int) -> None:
    """Where keys of a step's tokens are and which they see; those that fill it up to ``bucket`` are in no tree."""
    assert packing.tree is not None
    tree, chunk, lines = packing.tree, packing.chunk, host[_TREE]
    lines[:, :bucket] = 0
    lines[0, :bucket] = -1
    seen = np.where(tree.ancestors == 0, packing.position + 1, packing.context[chunk])
    lines[:3, : len(chunk)] = tree.place, seen, tree.first[chunk]
    words = lines[3:].reshape(-1)  # int64 beginning in the first of two lines: a line's length is even
    words[: 2 * bucket] = 0
    words[: 2 * len(chunk)] = tree.ancestors.view(np.int32)


class Mailbox:
    """Numbers between the host and graphs without a copy: pinned memory that kernels read and write where it is, a slot
    for each step in turn. A graph cannot be told which slot is a step's, so the device counts the steps, and the host
    counts beside it.

        host        writes slot 0   writes slot 1   …            reads slot 0   …
        device                      reads, writes slot 0   …
        turn        0               1               2

    Slots are used in turn: as many as steps can be in flight, and one more.

    ``inward`` [slots, …] and ``outward`` [slots, …], int32: the memory, for kernels. ``turn`` [1], int32, on the
    device: the slot of the next step there; the kernel that fetches a step adds one."""

    def __init__(
        self,
        inward: tuple[int, ...],
        outward: tuple[int, ...],
        device: torch.device,
        stream: torch.cuda.Stream,
        slots: int = _SLOTS,
        mark: Callable[[torch.cuda.Event, torch.cuda.Stream], None] | None = None,
    ) -> None:
        """``stream``: where steps are queued. ``mark``: as Launches has it."""
        written, self.inward = shared_memory((slots, *inward), device)
        read, self.outward = shared_memory((slots, *outward), device)
        self.turn = torch.zeros(1, dtype=torch.int32, device=device)
        self.slots: list[Ints] = list(written.numpy())
        self._answers: list[Ints] = list(read.numpy())
        self._stream, self._mark = stream, mark or Launches().mark
        self._fetched = [torch.cuda.Event() for _ in range(slots)]
        self._at = -1

    def next(self) -> Ints:
        """Where to write what the next step fetches, which must be queued before another is asked for."""
        self._at = (self._at + 1) % len(self.slots)
        self._fetched[self._at].synchronize()  # at once, as a rule: its step was collected long ago
        return self.slots[self._at]

    def fetched(self, lines: slice) -> Tensor:  # [lines, width], int32
        """On the device: these of the slot fetched last."""
        last = (self.turn - 1).remainder(len(self.slots)).long()
        return self.inward[:, lines].index_select(0, last)[0]

    def queued(self) -> None:
        """What fetches the slot given out last is queued."""
        self._mark(self._fetched[self._at], self._stream)

    @property
    def answer(self) -> Ints:
        """Where that step's results are once it has ended, until as many more are queued as there are slots."""
        return self._answers[self._at]

    def restart(self) -> None:
        """Both count from the beginning again. Nothing may be under way."""
        self.turn.zero_()
        self._at = -1


def shared_memory(shape: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """The same zeros, int32, as the host and as the device has them."""
    host = torch.zeros(shape, dtype=torch.int32, pin_memory=device.type == "cuda")
    return host, host if device.type == "cpu" else torch.as_tensor(_Pinned(host), device=device)


class _Pinned:
    """Pinned memory, told to torch as memory of the device: it has the same address there."""

    def __init__(self, host: Tensor) -> None:
        self._host = host  # lives as long as whoever looks at it
        self.__cuda_array_interface__ = {
            "shape": tuple(host.shape),
            "typestr": "<i4",
            "data": (host.data_ptr(), False),
            "version": 3,
        }
