"""How long a device would take for a step: the cost model's bytes and FLOPs at the prices of that device
(cost/prices.py).

Prices are assumed (a device's shares of its limits) or calibrated (fitted to measured steps). What lies beyond the
steps that prices were fitted to is counted, so that nobody takes it for measured.

What lives here: a step's price. What may not: counting bytes, prices (cost/), devices (devices.py), clocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from headrace.cost.cost_model import CostModel, StepLoad, Work
from headrace.cost.links import Link
from headrace.cost.prices import StepPrices
from headrace.cost.prompt_shapes import PromptShapes
from headrace.cost.sharing import SharedBlocks
from headrace.request import StepPlan


@dataclass(frozen=True, slots=True)
class StepPrice:
    """``floor_seconds``: at the limits themselves. ``host_seconds`` pass on the host before it hands a step over, but for
    ``host_behind`` of them, which pass once it has collected the step; ``launch_seconds`` while it hands it over: the
    device is at it meanwhile, and ends no sooner. ``record_seconds`` pass on the host behind it. ``after`` says what
    comes on top, so many seconds after the last work and since a rest ended."""

    seconds: float
    floor_seconds: float
    bytes: float
    flops: float
    host_seconds: float = 0.0
    host_behind: float = 0.0
    launch_seconds: float = 0.0
    record_seconds: float = 0.0
    after: Callable[[float, float], float] | None = None
    decode: bool = True  # every sequence computes a single token
    graph_tokens: int = 0  # see StepResult
    stages: tuple[float, ...] = ()  # of a pipeline: seconds of each; all else is their mean or, seconds, their sum
    hop_seconds: float = 0.0  # from each stage to the next


@dataclass(slots=True)
class LargestStep:
    """The largest step that was priced."""

    tokens: int = 0
    sequences: int = 0


class StepTime:
    """Prices steps of one model on one device. ``bandwidth`` and ``rate``: what the prices are multiples of; None: the
    profile's limits. ``sharing``: who knows which keys a step reads once for several sequences; None: none. ``shapes``:
    which captured shape a step with prompts is filled up to; None: it is launched."""

    def __init__(
        self,
        cost_model: CostModel,
        prices: StepPrices,
        *,
        bandwidth: float | None = None,
        rate: float | None = None,
        sharing: SharedBlocks | None = None,
        shapes: PromptShapes | None = None,
    ) -> None:
        profile = cost_model.profile
        self.most = LargestStep()
        self._cost_model = cost_model
        self._prices = prices
        self._sharing = sharing
        self._shapes = shapes
        self._limits = profile.read_bandwidth, profile.gemm_rate(cost_model.dtype)
        self._units = bandwidth or self._limits[0], rate or self._limits[1]

    def of_plan(self, plan: StepPlan) -> StepPrice:
        saved = self._sharing.observe(plan) if self._sharing is not None else ()
        load = self._cost_model.load_of(plan, saved)
        rows = len(plan.rows)
        decode, recorded = plan.counts.count(1) == rows, False
        if not decode and not plan.prompt_logprobs:
            load, recorded = self._graphed(load, rows)
        tokens = sum(len(new.token_ids) for new in plan.rows_added)
        prices = self._prices.host
        price = self._price(load, rows, decode)
        return replace(
            price,
            host_seconds=prices.seconds(rows, len(plan.rows_added), tokens, graphed=load.graphed),
            host_behind=prices.seconds_behind(rows, graphed=load.graphed),
            record_seconds=prices.record if recorded else 0.0,
        )

    def of_load(self, load: StepLoad, *, rows: int = 1, decode: bool = True) -> StepPrice:
        """``rows`` sequences; ``decode``: each computes a single token. Of an engine that has captured what it
        needs."""
        if not decode and self._shapes is not None:
            shape = self._shapes.rounded(load.tokens, rows)
            load = load if shape is None else replace(load, graph_tokens=shape.tokens)
        return self._price(load, rows, decode)

    def _graphed(self, load: StepLoad, rows: int) -> tuple[StepLoad, bool]:
        """As a captured step computes it, and whether one is captured behind it; none reads shared keys once."""
        if self._shapes is None or self._shapes.reads_less(sum(load.saved)):
            return load, False
        shape = self._shapes.shape_of(load.tokens, rows)
        if shape is None:
            return load, False
        load = replace(load, saved=())
        if shape in self._shapes.captured:
            return replace(load, graph_tokens=shape.tokens), False
        self._shapes.add((shape,))
        return load, True

    def _price(self, load: StepLoad, rows: int, decode: bool) -> StepPrice:
        self._note(load.tokens, rows)
        seconds, floor, moved, flops = self._sums(load, decode)
        launch = 0.0 if (decode or load.graphed) and self._prices.classes.apart else self._prices.host.launch
        after, graph = self._prices.after, load.graph_tokens
        return StepPrice(
            seconds, floor, moved, flops, launch_seconds=launch, after=after, decode=decode, graph_tokens=graph
        )

    def _note(self, tokens: int, rows: int) -> None:
        if tokens > self.most.tokens:
            self.most.tokens = tokens
        if rows > self.most.sequences:
            self.most.sequences = rows

    def _sums(self, load: StepLoad, decode: bool) -> tuple[float, float, float, float]:
        work = self._cost_model.work(load)
        bandwidth, rate = self._units
        seconds = self._prices.seconds(work, bandwidth, rate, load, decode=decode)
        floor = work if not load.graphed else self._cost_model.work(replace(load, graph_tokens=0))
        linked, sent = self._cost_model.link_seconds(load)
        least, moved, flops = _floor(floor, *self._limits)
        return seconds + linked, least + sent, moved, flops

    def shortest(self, groups: int) -> float:
        """Seconds of the least step there is: one token that sees itself."""
        ones = (1.0,) * groups
        return self.of_load(StepLoad(1, 1, ones, ones, ones)).seconds


class StagedTime:
    """The same of a pipeline, one of ``stages`` behind the other. ``link``: between two of them; None: nothing is sent.
    ``hidden``: bytes of a token's hidden states; ``fetched``: of the layers that each stage fetches in a step."""

    def __init__(
        self, stages: Sequence[StepTime], link: Link | None, hidden: float, fetched: Sequence[float] = ()
    ) -> None:
        self._stages, self._link, self._hidden = stages, link, hidden
        self._fetches = [0.0 if link is None else each / link.bandwidth for each in fetched or [0.0] * len(stages)]
        self.most = stages[0].most

    def of_plan(self, plan: StepPlan) -> StepPrice:
        return self._joined([each.of_plan(plan) for each in self._stages], plan.num_tokens)

    def of_load(self, load: StepLoad, *, rows: int = 1, decode: bool = True) -> StepPrice:
        return self._joined([each.of_load(load, rows=rows, decode=decode) for each in self._stages], load.tokens)

    def shortest(self, groups: int) -> float:
        return sum(each.shortest(groups) for each in self._stages)

    def _joined(self, prices: Sequence[StepPrice], tokens: int) -> StepPrice:
        count, link = len(prices), self._link
        hop = 0.0 if link is None or not tokens else link.latency + tokens * self._hidden / link.bandwidth
        stages = tuple(max(each.seconds, fetch) for each, fetch in zip(prices, self._fetches, strict=True))
        floor, moved, flops = (
            sum(getattr(each, name) for each in prices) / count for name in ("floor_seconds", "bytes", "flops")
        )
        return replace(
            prices[0],
            seconds=sum(stages) + (count - 1) * hop,
            floor_seconds=floor,
            bytes=moved,
            flops=flops,
            stages=stages,
            hop_seconds=hop,
        )


def _floor(work: Work, bandwidth: float, rate: float) -> tuple[float, float, float]:
    """Seconds at the limits, bytes, FLOPs."""
    floor, moved, flops = work.others / bandwidth, work.others, 0.0
    for each_moved, each_flops in (work.products, work.head, work.experts, work.decode, work.prompts):
        by_bytes, by_flops = each_moved / bandwidth, each_flops / rate
        floor += by_bytes if by_bytes > by_flops else by_flops
        moved, flops = moved + each_moved, flops + each_flops
    return floor, moved, flops
