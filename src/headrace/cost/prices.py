"""How long work takes on a device: of each kind of work, how many times its ideal seconds, and what a step costs
beside.

    ideal seconds      = bytes / bandwidth, or FLOPs / rate, at the device's limits
    seconds of a kind  = max(slowness · ideal seconds of its bytes, slowness · ideal seconds of its FLOPs)
    seconds of a step  = Σ kinds + others + activations + fixed + sampled rows · a row's

Products of few rows are other kernels than those of many, attention of few sequences does not fill a device, and a step
that a graph replays is another thing than one that is launched kernel by kernel: some slownesses are by the class of
the step (its tokens, whether it computes parts of prompts, and whether a graph computes those). The head is a product
of the rows that sample, in the class of as many tokens.

What lives here: the numbers and that sum. What may not: counting bytes (cost_model.py), fitting (planner/step_fit.py),
files (calibrated.py).
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from itertools import pairwise

from headrace.cost.cost_model import StepLoad, Work

RESTED = 0.03  # s without work: a client's next request comes sooner than that, somebody else's hardly
SETTLING = 0.1  # s


@dataclass(frozen=True, slots=True)
class Slowness:
    """Measured over ideal seconds, where bytes decide and where FLOPs do: 1 is the device's limit, 0 costs nothing."""

    bytes: float
    flops: float

    def seconds(self, moved: float, worked: float) -> float:
        """Both in ideal seconds."""
        by_bytes, by_flops = self.bytes * moved, self.flops * worked
        return by_bytes if by_bytes > by_flops else by_flops


@dataclass(frozen=True, slots=True)
class HostPrices:
    """Seconds of the host a step: whatever it holds, a sequence in it, a sequence that it begins and each token of
    that.

    ``launch``: of a step with parts of prompts whose kernels the host launches one by one, while the device is at it
    already; such a step ends no sooner. ``record``: of making a graph of one, behind it. ``graphed``: of handing over
    one that a graph computes, more than of a decode step.
    """

    step: float = 0.0
    row: float = 0.0
    added: float = 0.0
    token: float = 0.0
    launch: float = 0.0
    record: float = 0.0
    graphed: float = 0.0

    def seconds(self, rows: int, added: int = 0, tokens: int = 0, *, graphed: bool = False) -> float:
        """``added`` new sequences that begin with so many ``tokens``."""
        return self.step + self.row * rows + self.added * added + self.token * tokens + (self.graphed if graphed else 0.0)


@dataclass(frozen=True, slots=True)
class FrontPrices:
    """Seconds that a request spends outside the engine until its first token is with the client: each request, each
    prompt token."""

    request: float = 0.0
    token: float = 0.0

    def seconds(self, prompt_tokens: int) -> float:
        return self.request + self.token * prompt_tokens


@dataclass(frozen=True, slots=True)
class Classes:
    """Steps by their tokens (up to the first bound, the second, …, more); with ``apart`` those with parts of prompts
    are two classes of their own, the last, those that graphs compute and those that are launched, and the bounds are of
    steps of single tokens alone."""

    bounds: tuple[int, ...] = ()
    apart: bool = False

    def place(self, tokens: int, *, alone: bool, graphed: bool = False) -> int:
        """``alone``: every sequence computes a single token. ``graphed``: one graph computes the prompts."""
        return len(self.bounds) + (1 if graphed else 2) if self.apart and not alone else bisect_left(self.bounds, tokens)

    @property
    def names(self) -> tuple[str, ...]:
        """What is said of a class behind a parameter's name; nothing of the only one."""
        edges = (0, *self.bounds)
        kinds = [f" of {low + 1} to {high} tokens" if low + 1 < high else f" of {high} token{'s' * (high > 1)}" for low, high in pairwise(edges)]
        kinds += [f" of more than {self.bounds[-1]} tokens"] if self.bounds else []
        kinds = [f"{each}, no prompts" for each in kinds] if self.apart else kinds
        return (*(kinds or [" without prompts" if self.apart else ""]), *([" with prompts, as a graph", " with prompts"] if self.apart else []))


@dataclass(frozen=True, slots=True)
class StepPrices:
    """``products``, ``decode`` (attention of single tokens) and ``fixed`` (seconds a step) by class; ``sampled`` in
    seconds a row that samples; ``woken``: seconds that a step takes longer when there was no work before it (threads
    slept); ``rested``: that and more, where there was none for RESTED (caches have gone cold); ``settling``: steps that
    follow such a one within SETTLING (not all is as it was yet). ``shared``: seconds more of a step whose sequences
    share keys, for finding and merging them."""

    products: tuple[Slowness, ...]
    experts: Slowness
    decode: tuple[Slowness, ...]
    prompts: Slowness
    others: float
    activations: float
    classes: Classes = field(default_factory=Classes)
    fixed: tuple[float, ...] = (0.0,)
    sampled: float = 0.0
    woken: float = 0.0
    rested: float = 0.0
    settling: float = 0.0
    shared: float = 0.0
    host: HostPrices = field(default_factory=HostPrices)

    def after(self, pause: float, since: float) -> float:
        """Seconds more, ``pause`` seconds after the last work (0: there was work all the time), ``since`` seconds after
        a rest ended."""
        if pause > 0.0:
            return self.rested if pause > RESTED else self.woken
        return self.settling if since <= SETTLING else 0.0

    def seconds(self, work: Work, bandwidth: float, rate: float, load: StepLoad, *, alone: bool) -> float:
        """Of a step, whose ``load`` comes to that work."""
        tokens, sampled = load.tokens, load.sampled
        place = self.classes.place(tokens, alone=alone, graphed=load.filled > 0)
        if not tokens:
            return self.fixed[place]
        parts = (
            (self.products[place], work.products),
            (self.products[self.classes.place(sampled, alone=True)], work.head),
            (self.experts, work.experts),
            (self.decode[place], work.decode),
            (self.prompts, work.prompts),
        )
        total = 0.0
        for each, (moved, flops) in parts:
            total += each.seconds(moved / bandwidth, flops / rate)
        rest = (self.others * work.others + self.activations * work.activations) / bandwidth
        return total + rest + self.fixed[place] + self.sampled * sampled + (self.shared if load.shares else 0.0)
