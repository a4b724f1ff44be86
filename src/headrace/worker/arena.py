"""The activation arena: results of a step's operations lie in one buffer, at places planned by how long each of them
lives.

A step asks for the same results in the same order as the last one of its kind; only their rows differ. So one step is
recorded on torch's allocator: what is asked for, and when the memory of each result is let go (a weak reference to the
storage says so; views keep it alive). From then on steps like it are handed places in one buffer, whose views are kept:
asking again costs a comparison in place of an allocation.

    operation --empty(shape, dtype)--> Arena --- no step, another thread --------------> torch's allocator
                                         |-- recorded: torch's allocator, and watched --> Trace (requests, lifetimes)
                                         '-- planned: as the trace expects? --- yes ----> view of the buffer
                                                                            '-- no -----> torch's allocator, for the
                                                                            rest of the step

Which trace a step follows is known from its number of rows: that of the nearest number seen. Where kernels change with
the rows, and with them what they ask for, the first such step finds out, and one near it is recorded. A trace is known
by what it asks for: paths that ask for the same and keep it for other times have to be of different kinds. What
outlives a step never lies in the buffer. On a GPU the buffer is torch's own memory, borrowed for each step and given
back after its last launch, so that sampling finds it free.

A plan lays the largest result first, each at the lowest place that is free for as long as it lives (greedy by size:
Pisarchyk and Lee 2020; with sequence lengths: TurboTransformers, Fang et al. 2021, section 4.2).

What lives here: recording, plans, handing out, when a trace holds. What may not: operations, what a step is.
"""

from __future__ import annotations

import math
import weakref
from bisect import insort
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from threading import get_ident

import torch
from torch import Tensor

from headrace.kernels.candidate import plainly_empty

ALIGNED = 512  # bytes: what torch's allocator rounds to, too
_PLANNED_ROWS = 32  # of which any row of 16 bytes makes a whole place
_MOST_SIZES = 64  # numbers of rows of one trace whose views are kept
# steps of one kind that said something new: one that never settles stays with torch's allocator, or with what is known
_MOST_LEARNT = 256

Shape = tuple[int, ...]


# --- plans


@dataclass(frozen=True, slots=True)
class Use:
    """One tensor of a step: bytes, and the events between which it lives: made at ``first``, gone at ``last``."""

    size: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Plan:
    offsets: tuple[int, ...]  # one a use
    size: int  # of the buffer


def rounded(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


def plan(uses: Sequence[Use]) -> Plan:
    """Greedy by size."""
    offsets, placed = [0] * len(uses), []  # type: list[int], list[tuple[int, int, Use]]
    for index in sorted(range(len(uses)), key=lambda index: -uses[index].size):
        use, at = uses[index], 0
        for begin, end, other in placed:  # by offset
            if other.last <= use.first or use.last <= other.first:
                continue
            if at + rounded(use.size) <= begin:
                break
            at = max(at, end)
        offsets[index] = at
        insort(placed, (at, at + rounded(use.size), use), key=lambda entry: entry[0])
    return Plan(tuple(offsets), max((end for _, end, _ in placed), default=0))


# --- steps


@dataclass(frozen=True, slots=True)
class Rows:
    """How many rows a step's results have: all ``tokens``, or those that are read, ``wanted`` (None: there is no
    difference)."""

    tokens: int
    wanted: int | None


@dataclass(frozen=True, slots=True)
class Request:
    """One result that steps of a trace ask for."""

    by_wanted: bool  # its rows are the wanted ones
    row: Shape  # the shape of one
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Of one row."""
        return math.prod(self.row) * self.dtype.itemsize


class Trace:
    """What steps ask for, in order. ``ends``: how many had been asked for when each was let go; None: it outlived the
    step.

    Every result has as many rows as there are tokens, or fewer. So one plan, of a few rows, made as soon as the trace
    is known (while the device is at the step), serves any number of them: places are so many times as far apart.
    """

    def __init__(self, requests: tuple[Request, ...], ends: tuple[int | None, ...]) -> None:
        self.requests = requests
        self.ends = ends
        self.dtypes = [request.dtype for request in requests]
        self.strides = [
            tuple(math.prod(request.row[place:]) for place in range(len(request.row) + 1)) for request in requests
        ]
        self.results = lru_cache(_MOST_SIZES)(partial(Results, self))  # by Rows
        self._place()

    def extend(self, ends: tuple[int | None, ...]) -> None:
        """Another step asked for the same; what lived longer there may live so long anywhere."""
        longer = tuple(None if a is None or b is None else max(a, b) for a, b in zip(self.ends, ends, strict=True))
        if longer != self.ends:
            self.ends = longer
            self._place()

    def _place(self) -> None:
        each = enumerate(zip(self.requests, self.ends, strict=True))
        self.plan = plan(
            [
                Use(0, at, at + 1) if end is None else Use(_PLANNED_ROWS * request.bytes, at, end)
                for at, (request, end) in each
            ]
        )
        self.results.cache_clear()


class Results:
    """What a step of so many rows asks for, and the places of it, as far as they have been asked for."""

    def __init__(self, trace: Trace, rows: Rows) -> None:
        tokens, wanted = rows.tokens, rows.wanted or 0
        self.shapes: list[Shape | None] = [
            (wanted if request.by_wanted else tokens, *request.row) for request in trace.requests
        ]
        self.views: list[Tensor | None] = [None] * len(self.shapes)
        self.shapes.append(None)  # no shape is the one after the last
        times = -(-tokens // _PLANNED_ROWS)
        self.offsets = [times * offset for offset in trace.plan.offsets]
        self.size = times * trace.plan.size


class Buffer:
    """One storage under all views. On a GPU it has memory while a step is queued alone, wherever torch's allocator
    finds it: views follow."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._storage: torch.UntypedStorage | None = None  # nothing is made on a device before it is used
        self._whole: dict[torch.dtype, Tensor] = {}
        self.size = 0  # bytes: never less than before, so that it lies in the same place as a rule

    def borrow(self, size: int) -> None:
        self.size = max(self.size, size)
        if self._storage is None:
            self._storage = torch.empty(0, dtype=torch.uint8, device=self._device).untyped_storage()
        if self._storage.nbytes() < self.size:
            self._storage.resize_(0)  # what it held is of no use
            try:
                self._storage.resize_(self.size)
            except BaseException:
                self.size = 0  # there was no room for so much: a smaller step asks for no more than it needs
                raise

    def give_back(self) -> None:
        """A CPU's stays: its pages have been touched, fresh ones would have to be."""
        if self._device.type != "cpu" and self._storage is not None:
            self._storage.resize_(0)

    def view(self, offset: int, shape: Shape, strides: Shape, dtype: torch.dtype) -> Tensor:
        """While there is memory."""
        assert self._storage is not None, "nothing has been borrowed"
        if dtype not in self._whole:
            self._whole[dtype] = torch.empty(0, dtype=dtype, device=self._device).set_(self._storage, 0, (0,), (1,))
        return self._whole[dtype].as_strided(shape, strides, offset // dtype.itemsize)

    def holds(self, tensor: Tensor) -> bool:
        return self._storage is not None and tensor.untyped_storage().data_ptr() == self._storage.data_ptr() != 0


class Recorded:
    """A step on torch's allocator, watched."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._requests: list[Request] = []
        self._ends: list[int | None] = []
        self._watched: list[weakref.ref[torch.UntypedStorage]] = []

    def take(self, shape: Shape, dtype: torch.dtype, device: torch.device) -> Tensor:
        made = plainly_empty(shape, dtype, device)
        if (by_wanted := _by_wanted(shape, self._rows)) is not None:
            self._watched.append(weakref.ref(made.untyped_storage(), partial(self._ended, len(self._requests))))
            self._requests.append(Request(by_wanted, tuple(shape[1:]), dtype))
            self._ends.append(None)
        return made

    def _ended(self, at: int, _: object) -> None:
        self._ends[at] = len(self._requests)

    def trace(self) -> Trace:
        """While the step's result is alive."""
        return Trace(tuple(self._requests), tuple(self._ends))


class Planned:
    """A step whose results lie in the buffer for as long as it asks for what its trace expects."""

    def __init__(self, trace: Trace, rows: Rows, buffer: Buffer) -> None:
        self.trace = trace
        self.differed = False
        self.results = trace.results(rows)
        self._rows = rows
        self._buffer = buffer
        self._shapes, self._dtypes, self._views = self.results.shapes, trace.dtypes, self.results.views
        self._at = 0
        self._given = 0
        self._others: list[Request] = []  # asked for since something was not as expected

    @property
    def given(self) -> int:
        """Results as the trace expects them."""
        return self._given if self.differed else self._at

    @property
    def as_expected(self) -> bool:
        """To the end."""
        return self.given == len(self.trace.requests) and not self.differed

    @property
    def asked(self) -> tuple[Request, ...]:
        """What the step really asked for."""
        return (*self.trace.requests[: self.given], *self._others)

    def take(self, shape: Shape, dtype: torch.dtype, device: torch.device) -> Tensor:
        at = self._at
        if self._shapes[at] == shape and self._dtypes[at] is dtype:
            self._at = at + 1
            view = self._views[at]
            return view if view is not None else self._first(at, shape, dtype, device)
        if (by_wanted := _by_wanted(shape, self._rows)) is not None:
            if not self.differed:
                self.differed, self._given, self._at = True, at, len(self._views)  # where nothing is as expected
            self._others.append(Request(by_wanted, tuple(shape[1:]), dtype))
        return plainly_empty(shape, dtype, device)

    def _first(self, at: int, shape: Shape, dtype: torch.dtype, device: torch.device) -> Tensor:
        """With so many rows for the first time; of what outlives a step, each time."""
        if self.trace.ends[at] is None:
            return plainly_empty(shape, dtype, device)
        view = self._views[at] = self._buffer.view(self.results.offsets[at], shape, self.trace.strides[at], dtype)
        return view


class Kind:
    """Steps that may follow one trace, or some, by their number of tokens."""

    def __init__(self) -> None:
        self._traces: list[Trace] = []
        self._seen: dict[int, Trace | None] = {}  # by tokens; None: they did what no trace says
        self._learnt = 0

    def expected(self, tokens: int) -> Trace | None:
        """What steps of so many are likely to follow; None: that is to be recorded."""
        near = self._nearest(tokens)
        return None if near is None else self._seen[near]

    @property
    def settled(self) -> bool:
        """Nothing is learnt any more."""
        return self._learnt >= _MOST_LEARNT

    def record(self, tokens: int, found: Trace) -> None:
        trace = self._known(found.requests)
        if trace is None:
            self._traces.append(trace := found)
        trace.extend(found.ends)
        near = self._nearest(tokens)
        if near is not None and self._seen[near] is None:
            del self._seen[near]
        self._learn(tokens, trace)

    def correct(self, tokens: int, asked: tuple[Request, ...]) -> None:
        """A step of so many tokens asked for something else than expected: for what another trace says, or what none
        does yet."""
        if not self.settled:
            self._learn(tokens, self._known(asked))

    def _known(self, requests: tuple[Request, ...]) -> Trace | None:
        return next((trace for trace in self._traces if trace.requests == requests), None)

    def _nearest(self, tokens: int) -> int | None:
        return min(self._seen, key=lambda seen: (abs(seen - tokens), seen), default=None)

    def _learn(self, tokens: int, trace: Trace | None) -> None:
        self._seen[tokens] = trace
        self._learnt += 1


@dataclass(slots=True)
class Served:
    """Steps so far, and results that lay in the buffer."""

    planned: int = 0  # to the end
    recorded: int = 0
    differed: int = 0  # from what was expected, or the buffer had no memory
    results: int = 0


class Arena:
    """Where results of operations lie. ``empty`` is what operations are given; ``run`` takes a step.

    Steps must follow each other on the device; ``empty`` gives plain memory to threads other than the one that runs a
    step.
    """

    PLANNED: type[Planned] = Planned

    def __init__(self, device: torch.device) -> None:
        self.served = Served()
        self.buffer = Buffer(device)
        self._kinds: dict[Hashable, Kind] = {}
        self._step: Recorded | Planned | None = None
        self._thread = 0

    def empty(self, shape: Shape, dtype: torch.dtype, device: torch.device) -> Tensor:
        """As ``torch.empty``. Who asks within a step asks for rows: the first dimension counts tokens of the step, or
        those that are wanted."""
        step = self._step
        if step is None or get_ident() != self._thread:
            return plainly_empty(shape, dtype, device)
        return step.take(shape, dtype, device)

    def run(
        self, compute: Callable[[], Tensor], tokens: int, wanted: int | None = None, kind: Hashable = None
    ) -> Tensor:
        """The result of a step, which is the caller's. ``kind``: whatever else makes steps of so many tokens differ."""
        rows, kind = Rows(tokens, wanted), self._kinds.setdefault((kind, wanted is None), Kind())
        step = self._begin(rows, kind)
        if step is None:
            return compute()
        self._step, self._thread = step, get_ident()
        try:
            result = compute()
            return self._learnt(step, rows, kind, result)
        finally:
            self._step = None
            if isinstance(step, Planned):
                self.buffer.give_back()

    def _begin(self, rows: Rows, kind: Kind) -> Recorded | Planned | None:
        if rows.tokens == rows.wanted:  # which rows a result has cannot be told
            return None
        trace = kind.expected(rows.tokens)
        if trace is None:
            return None if kind.settled else Recorded(rows)
        step = self.PLANNED(trace, rows, self.buffer)
        try:
            self.buffer.borrow(step.results.size)
        except torch.OutOfMemoryError:  # in one piece; there may be room for the step all the same
            self.served.differed += 1
            return None
        return step

    def _learnt(self, step: Recorded | Planned, rows: Rows, kind: Kind, result: Tensor) -> Tensor:
        if isinstance(step, Recorded):
            self.served.recorded += 1
            kind.record(rows.tokens, step.trace())
            return result
        self.served.results += step.given
        if step.as_expected:
            self.served.planned += 1
        else:
            self.served.differed += 1
            kind.correct(rows.tokens, step.asked)
        if self.buffer.holds(result):  # never, unless a result outlives a step that did not when it was recorded
            return result.clone()
        return result


def create_arena(device: torch.device) -> Arena | None:
    """None where there is nothing to gain: a CPU's allocator is quick, and pages that a prompt lets go it finds again
    (measured: no difference). Or where lifetimes cannot be seen."""
    return Arena(device) if device.type == "cuda" and sees_lifetimes() else None


def sees_lifetimes() -> bool:
    """Whether this torch tells when memory is let go that a view holds."""
    ended: list[object] = []
    made = torch.empty(2, 2)
    watched = weakref.ref(made.untyped_storage(), ended.append)
    view = made[1:]
    del made
    before = bool(ended)
    del view
    return not before and bool(ended) and watched() is None


def _by_wanted(shape: Shape, rows: Rows) -> bool | None:
    """Whose rows these are; None: of neither."""
    if not shape or shape[0] not in (rows.tokens, rows.wanted):
        return None
    return shape[0] != rows.tokens
