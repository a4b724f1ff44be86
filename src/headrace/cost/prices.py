"""Prices of a device: for each kind of work, a multiple of its ideal time, and the fixed costs of a step.

    ideal seconds      = bytes / bandwidth, or FLOPs / rate, at the device's limits
    seconds of a kind  = max(slowness · ideal seconds of its bytes, slowness · ideal seconds of its FLOPs)
    seconds of a step  = Σ kinds + others + activations + fixed + sampled rows · a row's

GEMMs of few rows use other kernels than those of many, attention of few sequences does not fill a device, and a step
replayed as a graph differs from one launched kernel by kernel. So some slownesses depend on the class of the step (its
tokens, whether it computes parts of prompts, and whether a graph computes those). The head is a GEMM of the sampled
rows, in the class of as many tokens.

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
    """Measured over ideal seconds, for memory-bound and for compute-bound work: 1 is the device's limit, 0 costs
    nothing."""

    bytes: float
    flops: float

    def seconds(self, moved: float, worked: float) -> float:
        """Both arguments are ideal seconds."""
        by_bytes, by_flops = self.bytes * moved, self.flops * worked
        return by_bytes if by_bytes > by_flops else by_flops


@dataclass(frozen=True, slots=True)
class HostPrices:
    """Host seconds per step: fixed, per sequence, per new sequence, and per token of a new sequence.

    ``launch``: for a step with parts of prompts whose kernels the host launches one by one while the device already
    computes; such a step ends no sooner. ``record``: capturing a graph of one, after it. ``graphed``: submitting one
    that a graph computes, beyond a decode step's cost. Of all these, ``behind`` (of a step), ``graph_behind`` (of a
    graph) and what sequences take pass once the device has begun: for who waits for this step they do not count.
    """

    step: float = 0.0
    row: float = 0.0
    added: float = 0.0
    token: float = 0.0
    launch: float = 0.0
    record: float = 0.0
    graphed: float = 0.0
    behind: float = 0.0
    graph_behind: float = 0.0

    def seconds(self, rows: int, added: int = 0, tokens: int = 0, *, graphed: bool = False) -> float:
        """``added`` new sequences, with ``tokens`` tokens in all."""
        return (
            self.step + self.row * rows + self.added * added + self.token * tokens + (self.graphed if graphed else 0.0)
        )

    def seconds_behind(self, rows: int, *, graphed: bool = False) -> float:
        """Of ``seconds``."""
        if not self.behind:
            return 0.0
        return self.behind + self.row * rows + (self.graph_behind if graphed else 0.0)


@dataclass(frozen=True, slots=True)
class FrontWork:
    """CPU seconds of a front end's one event loop: per request and prompt token until the engine has it, output token,
    message (tokens of one request, sent on together), step, and request that has ended: its last events, its count."""

    request: float = 0.0
    prompt_token: float = 0.0
    output_token: float = 0.0
    message: float = 0.0
    step: float = 0.0
    ended: float = 0.0


@dataclass(frozen=True, slots=True)
class FrontPrices:
    """Seconds that a request spends outside the engine before its first token reaches the client: per request, and per
    prompt token. ``work``: how much of it the front end computes; without, all of it."""

    request: float = 0.0
    token: float = 0.0
    work: FrontWork | None = None

    def seconds(self, prompt_tokens: int) -> float:
        return self.request + self.token * prompt_tokens

    def working(self, prompt_tokens: int) -> float:
        """While everything else waits."""
        work = self.work or FrontWork(self.request, self.token)
        return work.request + work.prompt_token * prompt_tokens

    def resting(self, prompt_tokens: int) -> float:
        """The rest of a request's seconds."""
        return max(0.0, self.seconds(prompt_tokens) - self.working(prompt_tokens))

    @property
    def waking(self) -> float:
        """To take what steps brought."""
        return self.work.step if self.work is not None else 0.0

    def sending(self, tokens: int) -> float:
        """One message of so many tokens."""
        return self.work.message + self.work.output_token * tokens if self.work is not None else 0.0

    @property
    def ending(self) -> float:
        """An answer, behind its last message."""
        return self.work.ended if self.work is not None else 0.0


@dataclass(frozen=True, slots=True)
class Classes:
    """Classes of steps by their tokens (up to the first bound, the second, …, more). With ``apart``, steps with parts
    of prompts have the last two classes, one for those that graphs compute and one for those launched kernel by kernel,
    and the bounds apply to steps with decode tokens only.

    ``middle``: kernels are what they are however they are launched. So GEMMs of steps with prompts are in the class of
    as many single tokens up to its first number, in the last class but one up to its second, else in the last; and
    attention of decode tokens is in the class of as many sequences as are sampled. None: both are in the step's.
    """

    bounds: tuple[int, ...] = ()
    apart: bool = False
    middle: tuple[int, int] | None = None

    def place(self, tokens: int, *, decode: bool, graphed: bool = False) -> int:
        """``decode``: every sequence computes a single token. ``graphed``: one graph computes the prompts."""
        return (
            len(self.bounds) + (1 if graphed else 2) if self.apart and not decode else bisect_left(self.bounds, tokens)
        )

    def gemm_place(self, load: StepLoad, *, decode: bool) -> int:
        if self.middle is None or decode:
            return self.place(load.tokens, decode=decode, graphed=load.graphed)
        tokens = load.graph_tokens or load.tokens
        return self.place(tokens, decode=tokens <= self.middle[0], graphed=tokens <= self.middle[1])

    def keys_place(self, load: StepLoad, *, decode: bool) -> int:
        if self.middle is None or decode:
            return self.place(load.tokens, decode=decode, graphed=load.graphed)
        return self.place(load.sampled, decode=True)

    @property
    def names(self) -> tuple[str, ...]:
        """Suffixes of parameter names, one per class; empty if there is only one."""
        return (*self._names, *([" with prompts, as a graph", " with prompts"] if self.apart else []))

    @property
    def gemm_names(self) -> tuple[str, ...]:
        if self.middle is None:
            return self.names
        return (*self._names, f" with prompts, of up to {self.middle[1]} tokens", " with prompts, of more")

    @property
    def _names(self) -> list[str]:
        edges = (0, *self.bounds)
        kinds = [
            f" of {low + 1} to {high} tokens" if low + 1 < high else f" of {high} token{'s' * (high > 1)}"
            for low, high in pairwise(edges)
        ]
        kinds += [f" of more than {self.bounds[-1]} tokens"] if self.bounds else []
        kinds = [f"{each}, no prompts" for each in kinds] if self.apart else kinds
        return kinds or [" without prompts" if self.apart else ""]


@dataclass(frozen=True, slots=True)
class StepPrices:
    """``products``, ``decode`` (attention of decode tokens) and ``fixed`` (seconds per step) by class; ``sampled``:
    seconds per sampled row. Extra seconds of a step: ``woken``, if there was no work before it (threads slept);
    ``rested``, if there was none for RESTED (caches are cold, too); ``settling``, if it follows such a step within
    SETTLING (not everything has recovered yet); ``shared``, if its sequences share keys, for finding and merging them.
    """

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
        """Extra seconds of a step that comes ``pause`` seconds after the last work (0: no pause) and ``since`` seconds
        after a rest ended."""
        if pause > 0.0:
            return self.rested if pause > RESTED else self.woken
        return self.settling if since <= SETTLING else 0.0

    def seconds(self, work: Work, bandwidth: float, rate: float, load: StepLoad, *, decode: bool) -> float:
        """Seconds of a step with this work, which its ``load`` amounts to."""
        tokens, sampled = load.tokens, load.sampled
        place = self.classes.place(tokens, decode=decode, graphed=load.graphed)
        if not tokens:
            return self.fixed[place]
        parts = (
            (self.products[self.classes.gemm_place(load, decode=decode)], work.products),
            (self.products[self.classes.place(sampled, decode=True)], work.head),
            (self.experts, work.experts),
            (self.decode[self.classes.keys_place(load, decode=decode)], work.decode),
            (self.prompts, work.prompts),
        )
        total = 0.0
        for each, (moved, flops) in parts:
            total += each.seconds(moved / bandwidth, flops / rate)
        rest = (self.others * work.others + self.activations * work.activations) / bandwidth
        return total + rest + self.fixed[place] + self.sampled * sampled + (self.shared if any(load.saved) else 0.0)
