"""The cost of one step: plan + model shape + device profile → bytes, FLOPs, seconds.

Every operator of a step has bytes to move and FLOPs to compute. Its floor is max(bytes / bandwidth, FLOPs / rate). The
step's floor is the sum over its operators; the overlapped floor, max(Σ bytes / bandwidth, Σ FLOPs / rate), is what
operators of different kinds, all at once, could reach. Weights are read once per step, and each sequence's
keys and values once. Activations between operators are not part of the floor (fusing can keep them on the chip).

And how fast recent steps were on this device, and what the scheduler is told of that, along with the time.

    predicted seconds = floor · slope + overhead, by kind of step

The scheduler reads no clock and learns nothing by itself, so that a journal of its inputs replays exactly; StepSpeed is
one of those inputs. The fit is least squares on relative errors, so that a disturbed (and therefore long) step has
little weight; the five sums decay by ``KEEP`` per step. The prediction error is a metric of the running engine:
predicted / measured − 1, decaying, of the fit and, if this device and model were calibrated, of the calibration, which
is what ``headrace simulate`` would predict.

What lives here: arithmetic, the fit, tracking how far steps exceed their prediction. What may not: torch, clocks,
measuring, decisions, records (observe/metrics.py), numpy: the fit is on every step's path.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from headrace.cost.links import Link, key_traffic_of, traffic_of
from headrace.cost.popularity import share_of_rows, touched_experts
from headrace.cost.profile import DeviceProfile
from headrace.request import StepPlan
from headrace.sites import Role, Split, Weight, head, matrices, weights
from headrace.spec import DecoderSpec, Held, KVSpec, MoESpec, PoolHead

EXCEED = 0.01  # the share of steps that may take longer than the tail says
PACE = 0.1  # by which one exceeding step moves the tail, relatively
MOST = 2.0  # half of the time at least is planned, however noisy the machine
SHARE_DOWN, SHARE_UP, SHARE_LEAST = 0.9, 1.003, 0.02
BROKEN = 0.02  # so many steps may break their promises,
MOSTLY = 0.4
MISJUDGED = 1.25  # and take so many times their prediction
WATCHED = 0.02  # by which one step moves what is known of either
KEEP = 0.98  # of what was known: some fifty steps count
STEPS_BEFORE_USE = 8
_SPREAD = 1e-3  # how different floors must be, relatively, to tell a slope from an overhead
ERROR_PACE = 0.02  # of one step in the mean: some fifty steps count
CALIBRATED_EVERY = 8  # steps: pricing one by a calibration takes some ten microseconds
FEW = 16  # tokens of prompts: a step with no more is as quick as one without


@dataclass(frozen=True, slots=True)
class Line:
    """Seconds of a step as a linear function of its floor in seconds."""

    slope: float = 1.0
    overhead: float = 0.0

    def seconds(self, floor: float) -> float:
        return floor * self.slope + self.overhead

    def floor(self, seconds: float) -> float:
        """The floor of a step of this duration; negative where even an empty step takes longer."""
        return (seconds - self.overhead) / self.slope


@dataclass(frozen=True, slots=True)
class StepSpeed:
    """``mixed``: steps that compute parts of prompts together with decode tokens. ``tail``: all but EXCEED of them take
    at most this many times their prediction. ``gap``: seconds between two steps while there is work (scheduling, where
    nothing hides it). ``share``: the share of the estimated room to use; below 1 where promises are broken although the
    estimate says they hold (wrong limits)."""

    decode: Line = Line()
    mixed: Line = Line()
    prefill: Line = Line()
    tail: float = 1.0
    gap: float = 0.0
    share: float = 1.0

    def promised(self, seconds: float) -> float:
        """The floor of a mixed step that stays within this many seconds, including the gap before it, in all but EXCEED
        of cases."""
        return self.mixed.floor((seconds - self.gap) / self.tail)


class Steering:
    """Adapts ``share``. It falls while steps with prompts break their promises and most of them are misjudged, since
    the estimate is then wrong. If steps are judged correctly in the median, smaller chunks do not help: the cause is
    other programs on the machine, or too many decode tokens, and prompts would only progress very slowly."""

    __slots__ = ("_broken", "_misjudged", "share")

    def __init__(self) -> None:
        self.share = 1.0
        self._broken = self._misjudged = 0.0

    def observe(self, tokens: int, *, kept: bool, misjudged: bool) -> None:
        """One more promise, for a step with this many prompt tokens. ``misjudged``: it took over MISJUDGED times its
        prediction."""
        if tokens > FEW:
            self._broken += WATCHED * ((not kept) - self._broken)
            self._misjudged += WATCHED * (misjudged - self._misjudged)
        if tokens > FEW and not kept and self._broken > BROKEN and self._misjudged > MOSTLY:
            self.share = max(SHARE_LEAST, self.share * SHARE_DOWN)
        elif tokens:
            self.share = min(1.0, self.share * SHARE_UP)


class Tail:
    """Tracks a quantile of measured / predicted: each ratio that exceeds it raises it, each other one lowers it a
    little."""

    __slots__ = ("_exceed", "_most", "ratio")

    def __init__(self, exceed: float = EXCEED, most: float = MOST) -> None:
        self.ratio = 1.0
        self._exceed, self._most = exceed, most

    def observe(self, ratio: float) -> None:
        moved = self.ratio * (1.0 + PACE * ((ratio > self.ratio) - self._exceed))
        self.ratio = min(max(moved, 1.0), self._most)


class OnlineFit:
    """The fit of one kind of step on one device. Seconds in, seconds out."""

    __slots__ = ("_count", "_overhead", "_slope", "_x", "_xx", "_xy", "_y", "_yy")

    def __init__(self) -> None:
        self._count = 0
        self._xx = self._xy = self._yy = self._x = self._y = 0.0
        self._slope, self._overhead = 1.0, 0.0

    @property
    def ready(self) -> bool:
        return self._count >= STEPS_BEFORE_USE

    @property
    def line(self) -> Line:
        return Line(self._slope, self._overhead)

    def predict(self, floor: float) -> float:
        return floor * self._slope + self._overhead

    def observe(self, floor: float, measured: float) -> None:
        """Adds one step. Steps without a floor or a time are ignored."""
        if floor <= 0.0 or measured <= 0.0:
            return
        share, inverse = floor / measured, 1.0 / measured
        self._xx = KEEP * self._xx + share * share
        self._xy = KEEP * self._xy + share * inverse
        self._yy = KEEP * self._yy + inverse * inverse
        self._x = KEEP * self._x + share
        self._y = KEEP * self._y + inverse
        self._count += 1
        self._solve()

    def _solve(self) -> None:
        """slope and overhead that minimize Σ (slope · share + overhead · inverse − 1)²; neither is negative."""
        determinant = self._xx * self._yy - self._xy * self._xy
        if determinant > _SPREAD * self._xx * self._yy:
            slope = (self._x * self._yy - self._y * self._xy) / determinant
            overhead = (self._y * self._xx - self._x * self._xy) / determinant
            if slope > 0.0 and overhead >= 0.0:
                self._slope, self._overhead = slope, overhead
                return
        self._slope, self._overhead = self._x / self._xx, 0.0


class FadingError:
    """Decaying mean error; recent steps weigh most. ``signed`` above 0: steps are faster than predicted."""

    __slots__ = ("absolute", "count", "signed")

    def __init__(self) -> None:
        self.count = 0
        self.signed = self.absolute = 0.0

    def observe(self, predicted: float, measured: float) -> None:
        """Steps without a prediction or a time are ignored."""
        if predicted <= 0.0 or measured <= 0.0:
            return
        error = predicted / measured - 1.0
        self.count += 1
        pace = max(ERROR_PACE, 1.0 / self.count)  # a plain mean at first
        self.signed += pace * (error - self.signed)
        self.absolute += pace * (abs(error) - self.absolute)

    def as_dict(self) -> dict[str, float]:
        return {"count": self.count, "signed": self.signed, "absolute": self.absolute}


@dataclass(frozen=True, slots=True)
class StepCost:
    """``seconds`` is the prediction (floor / efficiency + overhead); the floors are lower bounds."""

    bytes: float
    flops: float
    seconds: float
    floor_seconds: float
    overlapped_floor_seconds: float


@dataclass(frozen=True, slots=True)
class StepLoad:
    """What a step computes, without saying for which requests: enough for its cost.

    ``decode_keys``, ``saved`` and ``graph_tokens`` distinguish work that kernels do at different speeds; empty if not
    determined. They are not part of the floor.
    """

    tokens: int
    sampled: int  # logits rows
    pairs: tuple[float, ...]  # per KV group: (query, key) pairs of one layer
    keys: tuple[float, ...]  # per KV group: keys (with values) read by one layer
    decode_keys: tuple[float, ...] = ()  # per KV group: of the keys, those of sequences that compute a single token
    # per KV group: of those, what need not be read because another sequence's reading serves
    saved: tuple[float, ...] = ()
    # tokens that a captured step with prompts was filled up to, of its products; 0: it is launched as it is
    graph_tokens: int = 0

    @property
    def graphed(self) -> bool:
        return self.graph_tokens > 0


@dataclass(frozen=True, slots=True)
class Work:
    """A step's (bytes, FLOPs) by kind. ``decode``: attention of decode tokens, without what sharing saves; ``prompts``:
    of all other tokens. The rest is bytes only: ``others`` (norms, embedding, new keys), ``activations`` (what fusing
    could avoid)."""

    products: tuple[float, float]
    head: tuple[float, float]
    experts: tuple[float, float]
    decode: tuple[float, float]
    prompts: tuple[float, float]
    others: float
    activations: float


@dataclass(frozen=True, slots=True)
class _Experts:
    """The sparse feed-forward of ``num_layers`` layers of one shape."""

    spec: MoESpec
    num_layers: int
    expert_bytes: float
    flops_per_token: float  # of all its layers


def load_of(plan: StepPlan, windows: Sequence[int | None], saved: tuple[float, ...] = ()) -> StepLoad:
    """Sums up a plan, per attention window, in a few vector operations (closed forms; no loop over rows).

    A chunk of c tokens at positions s … s+c-1 has Σ min(p+1, w) pairs and reads min(s+c, w+c-1) keys; for single
    tokens, the two are equal.
    """
    rows = len(plan.counts)
    if plan.counts.count(1) == rows:
        seen = tuple(keys_of_singles(plan.starts, window) for window in windows)
        return StepLoad(rows, len(plan.sample_work), seen, seen, seen, saved)
    import numpy as np  # not before a step is priced: front ends count steps and price none

    start, count = np.array(plan.starts, dtype=np.float64), np.array(plan.counts, dtype=np.float64)
    single = (start + count)[count == 1.0]
    pairs, keys, decode_keys = [], [], []
    for window in windows:
        decode_keys.append(float(single.sum() if window is None else np.minimum(single, window).sum()))
        pairs.append(float(pairs_of(start, count, window, np.minimum).sum()))
        keys.append(float(keys_of(start, count, window, np.minimum).sum()))
    return StepLoad(int(count.sum()), len(plan.sample_work), tuple(pairs), tuple(keys), tuple(decode_keys), saved)


def keys_of_singles(starts: Sequence[int], window: int | None) -> float:
    """Keys that single tokens at these positions see, themselves included."""
    if window is None:
        return float(sum(starts) + len(starts))
    import numpy as np

    return float(np.minimum(np.asarray(starts) + 1, window).sum())


def pairs_of(start: Any, count: Any, window: int | None, least: Callable[..., Any] = min) -> Any:
    """Σ min(p + 1, window) over positions p = start … start + count - 1; ``least``: np.minimum for arrays of chunks."""
    if window is None:
        return count * (start + (count + 1) / 2)
    return _triangle(start + count, window, least) - _triangle(start, window, least)


def keys_of(start: Any, count: Any, window: int | None, least: Callable[..., Any] = min) -> Any:
    """Keys that a chunk reads, each once; ``least`` likewise."""
    return start + count if window is None else least(start + count, window + count - 1)


def _triangle(length: Any, window: int, least: Callable[..., Any]) -> Any:
    inside = least(length, window)
    return inside * (inside + 1) / 2 + (length - inside) * window


class Forecast(Protocol):
    """What the cost model is to the scheduler. ``windows``: how far attention sees, by KV group (None: all).

    Frozen: what is learnt later is the roster's ``speed``."""

    @property
    def windows(self) -> tuple[int | None, ...]: ...

    def floor_seconds(self, tokens: int, sampled: int, pairs: Sequence[float], keys: Sequence[float]) -> float:
        """The least a step takes on this device. ``pairs`` of query and key, and ``keys`` read, of one layer by KV
        group."""
        ...


class CostModel:
    """Computes the cost of steps of one model on one device.

    ``groups`` are the KV groups as the cache has them; ``weight_bytes`` is the bytes per element of a plain weight (2
    for bf16; a format states its own); ``dtype`` selects the GEMM rate. ``popularity``: how often tokens pick each
    expert (popularity.py); empty: evenly. ``link``: between ranks, of whose steps ``spec`` is one's share; None: what
    they send is not counted. ``estimate`` is on the step's path: a few microseconds at any batch size.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        groups: Sequence[KVSpec],
        profile: DeviceProfile,
        *,
        weight_bytes: float,
        dtype: str,
        popularity: Sequence[float] = (),
        link: Link | None = None,
    ) -> None:
        self.spec = spec
        self._link = link
        self._traffic = traffic_of(spec, weight_bytes)
        self._ranks = ranks = groups[0].ranks if groups else 1
        self._key_traffic = key_traffic_of(spec, ranks, weight_bytes)
        self.profile = profile
        self.dtype = dtype
        self._popularity = tuple(popularity)
        self._bandwidth = profile.read_bandwidth
        self._rate = profile.gemm_rate(dtype)
        self.windows = tuple(group.window for group in groups)
        self._kv_token_bytes = tuple(g.token_bytes / g.ranks for g in groups)
        # An encoder's group has no layers: all of them attend, to twice as many pairs.
        layers = [len(g.layers) for g in groups] if spec.causal else [2 * spec.num_layers]
        self._pair_flops = tuple(4.0 * spec.num_heads * spec.head_dim * each / ranks for each in layers)
        self._dense = _dense_operators(spec, weight_bytes)
        self._dense_bytes = sum(held for _, held, _ in self._dense)
        self._dense_flops = sum(flops for _, _, flops in self._dense)
        self._experts = _expert_operators(spec, weight_bytes, self._popularity)
        site = head(spec)
        self._head = site.label, site.num_bytes(weight_bytes), _flops([site])
        if not spec.answers or (spec.pooling is not None and spec.pooling.head is not PoolHead.TOKENS):
            self._head = site.label, 0.0, 0.0
        self._norm_bytes = _norm_elements(spec) * weight_bytes
        # embedding row, learned position row
        self._token_bytes = spec.hidden_size * weight_bytes * (1 if spec.rope else 2)
        self._activation_bytes = _activation_elements(spec) * (2.0 if dtype != "float32" else 4.0)

    def estimate(self, plan: StepPlan) -> StepCost:
        return self.estimate_load(load_of(plan, self.windows))

    def estimate_load(self, load: StepLoad) -> StepCost:
        """An empty load costs only the step's overhead."""
        bandwidth, rate = self._bandwidth, self._rate
        total_bytes = total_flops = floor = 0.0
        for _, moved, flops in self.costs(load):
            total_bytes += moved
            total_flops += flops
            floor += max(moved / bandwidth, flops / rate)
        linked, sent = self.link_seconds(load)
        seconds = floor / self.profile.efficiency + self.profile.step_overhead + linked
        return StepCost(
            total_bytes, total_flops, seconds, floor + sent, max(total_bytes / bandwidth, total_flops / rate, sent)
        )

    def link_seconds(self, load: StepLoad) -> tuple[float, float]:
        """What ranks take to meet: (seconds, at the limit of their link)."""
        if self._link is None:
            return 0.0, 0.0
        tokens = load.graph_tokens or load.tokens
        shared, sent = self._traffic.seconds(self._link, self._rows(load, tokens), load.sampled)
        if self._ranks == 1:
            return shared, sent
        keys, own = self._own(load)
        spread = self._spreads(load)
        passed, more = self._key_traffic.seconds(self._link, tokens, spread=spread, keys=keys, meanwhile=own)
        return shared + passed, sent + more

    def passes_keys(self, plan: StepPlan) -> bool:
        """Of a step whose rows are spread over ranks that share the keys, whose link is known."""
        assert self._link is not None
        load = load_of(plan, self.windows)
        return self._key_traffic.passes_keys(self._link, load.tokens, *self._own(load))

    def _own(self, load: StepLoad) -> tuple[float, float]:
        """Keys of a step, and seconds of attention to a rank's own of them."""
        moved, flops = self._attention(load)[1]
        return max(load.keys, default=0.0), max(moved / self._bandwidth, flops / self._rate) / self._ranks

    def _spreads(self, load: StepLoad) -> bool:
        """Whether ranks that share the keys compute a step's rows between them: where there are prompts."""
        return self._ranks > 1 and load.pairs != load.keys

    def _rows(self, load: StepLoad, tokens: int) -> int:
        """Of products, on one rank."""
        return -(-tokens // self._ranks) if self._spreads(load) else tokens

    def floor_seconds(self, tokens: int, sampled: int, pairs: Sequence[float], keys: Sequence[float]) -> float:
        """The floor of a step that is not planned yet, for the scheduler."""
        return self.estimate_load(StepLoad(tokens, sampled, tuple(pairs), tuple(keys))).floor_seconds

    def load_of(self, plan: StepPlan, saved: tuple[float, ...] = ()) -> StepLoad:
        """``saved``: see StepLoad."""
        return load_of(plan, self.windows, saved)

    def work(self, load: StepLoad) -> Work:
        """The same bytes and FLOPs, by kind of work."""
        written = load.graph_tokens or load.tokens
        tokens = self._rows(load, written)
        dense = self._dense_bytes, tokens * self._dense_flops
        sparse = [(self._expert_bytes(op, tokens), op.flops_per_token * tokens) for op in self._experts]
        head = (self._head[1], self._head[2] * load.sampled) if load.sampled else (0.0, 0.0)
        decode, prompts = self._attention(load)
        others = written * sum(self._kv_token_bytes) + tokens * self._token_bytes + self._norm_bytes
        experts = sum(moved for moved, _ in sparse), sum(flops for _, flops in sparse)
        return Work(dense, head, experts, decode, prompts, others, tokens * self._activation_bytes)

    def _attention(self, load: StepLoad) -> tuple[tuple[float, float], tuple[float, float]]:
        """Attention of decode tokens and of the others. A load that does not distinguish them counts as whole prompts,
        or as decode tokens only."""
        decode_keys = load.decode_keys or (load.keys if load.pairs == load.keys else (0.0,) * len(load.keys))
        saved = load.saved or (0.0,) * len(decode_keys)
        decode, decode_flops, prompts, prompt_flops = 0.0, 0.0, 0.0, 0.0
        groups = zip(self._kv_token_bytes, self._pair_flops, load.keys, load.pairs, decode_keys, saved, strict=True)
        for size, flops, keys, pairs, own, shared in groups:
            decode, decode_flops = decode + (own - shared) * size, decode_flops + own * flops
            prompts, prompt_flops = prompts + (keys - own) * size, prompt_flops + (pairs - own) * flops
        return (decode, decode_flops), (prompts, prompt_flops)

    def _expert_bytes(self, op: _Experts, tokens: int) -> float:
        moe = op.spec
        touched = touched_experts(moe.num_experts, moe.top_k, tokens, self._popularity, moe.held)
        return op.num_layers * op.expert_bytes * touched

    def costs(self, load: StepLoad) -> list[tuple[str, float, float]]:
        """(name, bytes, FLOPs) of every operator in the floor."""
        if not load.tokens:
            return []
        tokens = self._rows(load, load.tokens)
        costs = [(name, held, flops * tokens) for name, held, flops in self._dense]
        for op in self._experts:
            costs.append(("experts", self._expert_bytes(op, tokens), op.flops_per_token * tokens))
        for index, per_token in enumerate(self._kv_token_bytes):
            costs.append(("attention", load.keys[index] * per_token, load.pairs[index] * self._pair_flops[index]))
            costs.append(("kv_write", load.tokens * per_token, 0.0))
        costs.append(("embedding", tokens * self._token_bytes, 0.0))
        costs.append(("norms", self._norm_bytes, 0.0))
        if load.sampled:
            name, held, flops = self._head
            costs.append((name, held, flops * load.sampled))
        return costs


def _dense_operators(spec: DecoderSpec, weight_bytes: float) -> list[tuple[str, float, float]]:
    """(name, bytes, FLOPs per token) of the GEMMs that every token goes through, each summed over the layers that have
    it."""
    found: dict[str, list[Weight]] = {}
    for site in matrices(spec):
        if site.moe is None:
            found.setdefault(site.label, []).append(site)
    return [(name, sum(site.num_bytes(weight_bytes) for site in sites), _flops(sites)) for name, sites in found.items()]


def _expert_operators(
    spec: DecoderSpec, weight_bytes: float, popularity: tuple[float, ...] = ()
) -> tuple[_Experts, ...]:
    """Sparse layers, grouped by shape, and by which experts a rank holds if it matters which."""
    found: dict[MoESpec, list[Weight]] = {}
    for site in matrices(spec):
        if site.moe is not None:
            found.setdefault(site.moe if popularity else _like(site.moe), []).append(site)
    return tuple(
        _Experts(
            moe,
            len(sites) // 2,
            sum(site.num_bytes(weight_bytes) for site in sites) / len(sites) * 2 / len(moe.experts),
            _flops(sites) * share_of_rows(moe.num_experts, moe.top_k, popularity, moe.held) / moe.part,
        )
        for moe, sites in found.items()
    )


def _like(moe: MoESpec) -> MoESpec:
    """With as many experts, and as many copies of them, whichever they are."""
    if moe.held is None:
        return moe
    copies = sorted(each.copies for each in moe.held)
    return replace(moe, held=tuple(Held(index, copies=each) for index, each in enumerate(copies)))


def _flops(sites: Sequence[Weight]) -> float:
    """Per token; of 8-bit numbers a half counts, since their rate is not measured and is at most twice 16-bit ones'."""
    return sum(
        (1.0 if site.formats and all(form.rounds_inputs for form in site.formats) else 2.0) * site.multiplications
        for site in sites
    )


def _norm_elements(spec: DecoderSpec) -> int:
    return sum(site.num_elements for site in weights(spec) if site.role is Role.NORM)


def _activation_elements(spec: DecoderSpec) -> int:
    """Elements per token that pass between unfused operators, written once and read once, over all layers."""
    between = sum(
        int(site.used * site.inner * (1.0 if site.moe is None else site.moe.part))
        for site in matrices(spec)
        if site.split is not Split.NONE
    )
    return 2 * between + 8 * len(spec.held_layers) * spec.hidden_size  # and two norms with their residual sums
