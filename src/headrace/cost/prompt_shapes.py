"""Rules that decide which CUDA graph computes a step with prompts, padded to which shape, and which graphs are
captured.

A graph has fixed sizes, so it is captured for a shape: a number of tokens and of sequences, both rounded up. There are
many shapes, and a graph costs some milliseconds and about a megabyte. At start-up, the largest shapes are captured, and
for prompts alone one per power of two, which serves steps down to half its length. Any other shape is captured when it
occurs a second time; an idle engine captures in advance first those of prompts alone, then a ladder of shapes with
decoding rows. Shapes whose time the device bounds are padded only slightly: there, the host has time to launch.

The worker follows these rules on a device (worker/prompt_graphs.py), a simulation on virtual time
(planner/step_time.py).

What lives here: shapes, and when one is worth a graph. What may not: torch, capture and replay.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

MOST_TOKENS = 2048  # of more, the device is what a step waits for, from a billion parameters on
MOST_GRAPHS = 96
_TOKENS = (16, 32, 48, 64, *range(96, 257, 32), *range(320, 1025, 64), *range(1152, MOST_TOKENS + 1, 128))
_DOUBLINGS = (32, 64, 128, 256, 512, 1024)
# beside decoding rows: a rung serves what is up to half as long
_LADDER = (64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
_BESIDE = 64  # sequences: of more, few shapes come again
_SEQUENCES = (1, 4, 16, 64, 256)
AGAIN = 2  # how often a shape comes until it is recorded, and where a larger graph serves it meanwhile
AGAIN_SERVED = 16
# Multiplications by a layer's weights that an H200 does while the host launches a layer (0.4 ms, at 700 TFLOP/s): with
# fewer the host is what a step waits for, and padding costs nothing. With more it may be so much of a step at most.
_HOST_BOUND = 1.4e11
_KEYS_BOUND = 1.6e9  # bytes of keys and values that it reads meanwhile
_HAIR = 1 / 32


@dataclass(frozen=True, slots=True, order=True)
class Shape:
    """The padded shape of a step."""

    tokens: int
    sequences: int


@dataclass(frozen=True, slots=True)
class ShapeBounds:
    """Bounds on steps. ``products``: multiplications by a layer's weights, for each token; ``key_bytes``: of its keys
    and values in a layer."""

    max_num_seqs: int
    tokens_a_step: int
    products: float
    key_bytes: float

    @property
    def tokens(self) -> tuple[int, ...]:
        """The numbers of tokens that steps are padded to, ascending."""
        most = min(self.tokens_a_step, MOST_TOKENS)
        return (*(size for size in _TOKENS if size < most), most)

    @property
    def sequences(self) -> tuple[int, ...]:
        return (*(size for size in _SEQUENCES if size < self.max_num_seqs), self.max_num_seqs)


class PromptShapes:
    """``captured``: the shapes that have a graph. Report steps in order: ``shape_of``, and ``add`` once a step's graph
    has been captured."""

    def __init__(self, bounds: ShapeBounds) -> None:
        self.captured: set[Shape] = set()
        self._bounds = bounds
        self._tokens, self._sequences = bounds.tokens, bounds.sequences
        self._lone = tuple(Shape(tokens, self._sequences[0]) for tokens in self._tokens if self._is_host_bound(tokens))
        beside = [sequences for sequences in self._sequences[1:] if sequences <= _BESIDE]
        ladder = [size for size in _LADDER if size in self._tokens and self._is_host_bound(size)]
        self._ahead = (*self._lone, *(Shape(size, each) for each in beside for size in ladder if size > each))
        self._seen: Counter[Shape] = Counter()  # how often, without a graph
        self._refused: set[Shape] = set()

    @property
    def most(self) -> int:
        """The largest possible number of graphs."""
        return min(MOST_GRAPHS, len(self._tokens) * len(self._sequences))

    @property
    def largest(self) -> Shape:
        return Shape(self._tokens[-1], self._sequences[-1])

    @property
    def samples(self) -> tuple[Shape, ...]:
        """Shapes that show how much memory graphs take, the largest first: its memory is shared by all."""
        few, middle, many = (self._tokens[at] for at in (0, len(self._tokens) // 2, -1))
        sequences = self._sequences
        shapes = (
            Shape(many, sequences[-1]),
            Shape(many, sequences[0]),
            Shape(middle, sequences[-1]),
            Shape(few, sequences[0]),
        )
        return tuple(dict.fromkeys(shapes))

    @property
    def first(self) -> tuple[Shape, ...]:
        """The shapes that an engine starts with."""
        return (*self.samples[:2], *(shape for shape in self._lone[::-1] if shape.tokens in _DOUBLINGS))

    def shape_of(self, tokens: int, sequences: int) -> Shape | None:
        """The shape whose graph computes such a step, or (if not captured) should be captured after it. None: the step
        is launched without a graph."""
        shape = self.rounded(tokens, sequences) if self.captured else None
        if shape is None or shape in self.captured:
            return shape
        larger = self._larger(shape)
        self._seen[shape] += 1
        due = self._seen[shape] >= (AGAIN if larger is None else AGAIN_SERVED)
        return shape if due and shape not in self._refused and len(self.captured) < self.most else larger

    def reads_less(self, saved_tokens: float) -> bool:
        """Whether a step without a graph, which reads keys that sequences share once for all of them, saves more than
        launching its kernels takes. ``saved_tokens``: what it does not read again."""
        return saved_tokens * self._bounds.key_bytes > _KEYS_BOUND

    def rounded(self, tokens: int, sequences: int) -> Shape | None:
        """The shape of such a step, or None if it is too large or would be padded too much and never gets one."""
        if tokens > self._tokens[-1]:
            return None
        shape = Shape(_above(self._tokens, tokens), _above(self._sequences, sequences))
        padding = shape.tokens - tokens
        return shape if self._is_host_bound(shape.tokens) or padding <= _HAIR * tokens else None

    def next_ahead(self) -> Shape | None:
        """A shape that may be needed later, for an idle engine to capture."""
        coming = (shape for shape in self._ahead if shape not in self.captured and shape not in self._refused)
        return next(coming, None) if 0 < len(self.captured) < self.most else None

    def add(self, shapes: Iterable[Shape]) -> None:
        self.captured.update(shapes)

    def refuse(self, shape: Shape) -> None:
        """The shape cannot be captured: such steps continue without a graph."""
        self._refused.add(shape)

    def _larger(self, shape: Shape) -> Shape | None:
        """The smallest captured shape that serves such a step in less time than launching its kernels takes."""
        sizes = range(shape.tokens, 2 * shape.tokens + 1)
        serving = (
            each
            for each in self.captured
            if each.tokens in sizes and each.sequences >= shape.sequences and self._is_host_bound(each.tokens)
        )
        return min(serving, default=None)

    def _is_host_bound(self, tokens: int) -> bool:
        return tokens * self._bounds.products <= _HOST_BOUND


def _above(sizes: tuple[int, ...], size: int) -> int:
    return sizes[bisect_left(sizes, size)]
