"""One step's price: plan + model shape + device profile → bytes, FLOPs, seconds.

Every operator of a step has bytes it must move and FLOPs it must do. Its floor is max(bytes / bandwidth, FLOPs / rate).
The step's floor is the sum over its operators; the overlapped floor, max(Σ bytes / bandwidth, Σ FLOPs / rate), is what
perfect overlap between operators of different kinds could reach. Weights are read once a step, each sequence's keys and
values once. Activations between operators are no part of the floor (fusing can keep them on the chip); ``operators()``
lists them apart.

What lives here: arithmetic. What may not: torch, clocks, measuring, decisions.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from headrace.cost.popularity import touched_experts
from headrace.cost.profile import DeviceProfile
from headrace.request import StepPlan
from headrace.spec import DecoderSpec, KVSpec, MoESpec, NormKind

Amount = float | np.ndarray  # of one step, or one entry a step


@dataclass(frozen=True, slots=True)
class StepCost:
    """``seconds`` is the prediction (floor / efficiency + overhead); the floors are limits."""

    bytes: float
    flops: float
    seconds: float
    floor_seconds: float
    overlapped_floor_seconds: float


@dataclass(frozen=True, slots=True)
class OperatorCost:
    """One kind of operator over all its layers. ``in_floor`` is False for traffic that fusing could avoid."""

    name: str
    bytes: float
    flops: float
    seconds: float
    in_floor: bool = True


@dataclass(frozen=True, slots=True)
class StepLoad:
    """What a step computes, without saying for whom: enough for its cost.

    ``lone``, ``saved`` and ``filled`` tell apart what kernels do at different speeds; empty where nobody looked. They are no part of the floor.
    """

    tokens: int
    sampled: int  # logits rows
    pairs: tuple[float, ...]  # per KV group: (query, key) pairs of one layer
    keys: tuple[float, ...]  # per KV group: keys (with values) read by one layer
    lone: tuple[float, ...] = ()  # per KV group: of the keys, those of sequences that compute a single token
    saved: tuple[float, ...] = ()  # per KV group: of those, what need not be read because another sequence's reading serves
    filled: int = 0  # tokens that a graph of a step with prompts was filled up to: its products compute so many; 0: it is launched as it is

    @property
    def shares(self) -> bool:
        return any(self.saved)


@dataclass(frozen=True, slots=True)
class Work:
    """A step's (bytes, FLOPs) by what does them. ``decode``: attention of single tokens, without what sharing saves; ``prompts``: of all other
    tokens. The rest is bytes alone: ``others`` (norms, embedding, new keys), ``activations`` (what fusing could avoid)."""

    products: tuple[float, float]
    head: tuple[float, float]
    experts: tuple[float, float]
    decode: tuple[Amount, Amount]
    prompts: tuple[Amount, Amount]
    others: float
    activations: float


@dataclass(frozen=True, slots=True)
class _Dense:
    """A matrix product over all layers: ``fixed`` bytes whatever the batch, FLOPs by the token (or by the sampled row)."""

    name: str
    weight_bytes: float
    flops_per_token: float


@dataclass(frozen=True, slots=True)
class _Experts:
    """The sparse feed-forward of ``num_layers`` layers of one shape."""

    spec: MoESpec
    num_layers: int
    expert_bytes: float
    flops_per_token: float  # of all its layers


def load_of(plan: StepPlan, windows: Sequence[int | None]) -> StepLoad:
    """Sums a plan up, per attention window, in a few vector operations (closed forms; no loop over rows).

    A chunk of c tokens at positions s … s+c-1 has Σ min(p+1, w) pairs and reads min(s+c, w+c-1) keys: as many, where each is one token.
    """
    rows = len(plan.counts)
    if plan.counts.count(1) == rows:
        seen = tuple(_keys_of_tokens(plan.starts, window) for window in windows)
        return StepLoad(rows, len(plan.sample_work), seen, seen, seen)
    count = np.array(plan.counts, dtype=np.float64)
    end = np.array(plan.starts, dtype=np.float64) + count
    single = end[count == 1.0]
    pairs, keys, lone = [], [], []
    for window in windows:
        lone.append(float(single.sum() if window is None else np.minimum(single, window).sum()))
        if window is None:
            pairs.append(float(count @ end) - float(count @ (count - 1.0)) / 2)
            keys.append(float(end.sum()))
        else:
            pairs.append(float((_triangle(end, window) - _triangle(end - count, window)).sum()))
            keys.append(float(np.minimum(end, count + (window - 1)).sum()))
    return StepLoad(int(count.sum()), len(plan.sample_work), tuple(pairs), tuple(keys), tuple(lone))


def _keys_of_tokens(starts: array[int], window: int | None) -> float:
    """Keys that single tokens at these positions see."""
    if window is None:
        return float(sum(starts) + len(starts))
    return float(np.minimum(np.asarray(starts) + 1, window).sum())


def _triangle(positions: np.ndarray, window: int) -> np.ndarray:
    """Σ_{p=1}^{n} min(p, window) for each n."""
    inside = np.minimum(positions, float(window))
    total: np.ndarray = inside * (inside + 1.0) / 2 + (positions - inside) * window
    return total


class CostModel:
    """Prices steps of one model on one device.

    ``groups`` are the KV groups as the cache has them; ``weight_bytes`` is bytes a weight element (2 for bf16; below 1 for
    4-bit formats); ``dtype`` names the GEMM rate. ``popularity``: how often tokens pick each expert (popularity.py); empty: evenly.
    ``estimate`` is on the step's path: a few microseconds at any batch.
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
    ) -> None:
        self.spec = spec
        self.profile = profile
        self.dtype = dtype
        self._popularity = tuple(popularity)
        self._bandwidth = profile.read_bandwidth
        self._rate = profile.gemm_rate(dtype)
        self.windows = tuple(group.window for group in groups)
        self._kv_token_bytes = tuple(float(2 * g.num_kv_heads * g.head_dim * g.dtype_bytes * len(g.layers)) for g in groups)
        self._pair_flops = tuple(4.0 * spec.num_heads * spec.head_dim * len(g.layers) for g in groups)
        self._dense = _dense_operators(spec, weight_bytes)
        self._dense_bytes, self._dense_flops = sum(op.weight_bytes for op in self._dense), sum(op.flops_per_token for op in self._dense)
        self._experts = _expert_operators(spec, weight_bytes)
        self._head = _Dense("lm_head", spec.vocab_size * spec.hidden_size * weight_bytes, 2.0 * spec.vocab_size * spec.hidden_size)
        self._norm_bytes = _norm_elements(spec) * weight_bytes
        self._token_bytes = spec.hidden_size * weight_bytes * (1 if spec.rope else 2)  # embedding row, learned position row
        self._activation_bytes = _activation_elements(spec) * 2.0 if dtype != "float32" else _activation_elements(spec) * 4.0

    def estimate(self, plan: StepPlan) -> StepCost:
        return self.estimate_load(load_of(plan, self.windows))

    def estimate_load(self, load: StepLoad) -> StepCost:
        """An empty load costs nothing but the step's overhead."""
        bandwidth, rate = self._bandwidth, self._rate
        total_bytes = total_flops = floor = 0.0
        for _, moved, flops in self.costs(load):
            total_bytes += moved
            total_flops += flops
            floor += max(moved / bandwidth, flops / rate)
        seconds = floor / self.profile.efficiency + self.profile.step_overhead
        return StepCost(total_bytes, total_flops, seconds, floor, max(total_bytes / bandwidth, total_flops / rate))

    def floor_seconds(self, tokens: int, sampled: int, pairs: Sequence[float], keys: Sequence[float]) -> float:
        """As the scheduler asks it: the floor of a step that is not planned yet."""
        return self.estimate_load(StepLoad(tokens, sampled, tuple(pairs), tuple(keys))).floor_seconds

    def step_seconds(self, rows: int, tokens: int, attended: int) -> float:
        """As a policy asks it: a step of ``rows`` sequences that computes ``tokens``, which see ``attended`` keys in all."""
        seen = (float(attended),) * len(self.windows)
        return self.estimate_load(StepLoad(tokens, rows, seen, seen)).seconds

    def operators(self, load: StepLoad) -> tuple[OperatorCost, ...]:
        """The same sums, operator by operator, and the activations that are no part of the floor."""
        bandwidth, rate = self._bandwidth, self._rate
        counted = [OperatorCost(name, moved, flops, max(moved / bandwidth, flops / rate)) for name, moved, flops in self.costs(load)]
        traffic = load.tokens * self._activation_bytes
        return (*counted, OperatorCost("activations", traffic, 0.0, traffic / bandwidth, in_floor=False))

    def load_of(self, plan: StepPlan, saved: tuple[float, ...] = ()) -> StepLoad:
        """``saved``: see StepLoad."""
        load = load_of(plan, self.windows)
        return replace(load, saved=saved) if saved else load

    def work(self, load: StepLoad) -> Work:
        """The same bytes and FLOPs by what does them; ``pairs``, ``keys``, ``lone`` and ``saved`` of the load may be arrays, one entry a step."""
        tokens = load.filled or load.tokens
        dense = self._dense_bytes, tokens * self._dense_flops
        sparse = [(self._expert_bytes(op, tokens), op.flops_per_token * tokens) for op in self._experts]
        head = (self._head.weight_bytes, self._head.flops_per_token * load.sampled) if load.sampled else (0.0, 0.0)
        decode, prompts = self._attention(load)
        others = tokens * (sum(self._kv_token_bytes) + self._token_bytes) + self._norm_bytes
        experts = sum(moved for moved, _ in sparse), sum(flops for _, flops in sparse)
        return Work(dense, head, experts, decode, prompts, others, tokens * self._activation_bytes)

    def _attention(self, load: StepLoad) -> tuple[tuple[Amount, Amount], tuple[Amount, Amount]]:
        """Of single tokens and of the others; a load that does not tell them apart counts as that of whole prompts, or of single tokens."""
        lone = load.lone or (load.keys if load.pairs == load.keys else (0.0,) * len(load.keys))
        saved = load.saved or (0.0,) * len(lone)
        groups = list(zip(self._kv_token_bytes, self._pair_flops, load.keys, load.pairs, lone, saved, strict=True))
        decode = sum((own - shared) * each for each, _, _, _, own, shared in groups), sum(own * each for _, each, _, _, own, _ in groups)
        prompts = sum((keys - own) * each for each, _, keys, _, own, _ in groups), sum((pairs - own) * each for _, each, _, pairs, own, _ in groups)
        return decode, prompts

    def _expert_bytes(self, op: _Experts, tokens: int) -> float:
        return op.num_layers * op.expert_bytes * touched_experts(op.spec.num_experts, op.spec.top_k, tokens, self._popularity)

    def costs(self, load: StepLoad) -> list[tuple[str, float, float]]:
        """(name, bytes, FLOPs) of every operator in the floor. Keys and pairs that are columns of numbers give columns."""
        tokens = load.tokens
        if not tokens:
            return []
        costs = [(op.name, op.weight_bytes, op.flops_per_token * tokens) for op in self._dense]
        for op in self._experts:
            costs.append(("experts", self._expert_bytes(op, tokens), op.flops_per_token * tokens))
        for index, per_token in enumerate(self._kv_token_bytes):
            costs.append(("attention", load.keys[index] * per_token, load.pairs[index] * self._pair_flops[index]))
            costs.append(("kv_write", tokens * per_token, 0.0))
        costs.append(("embedding", tokens * self._token_bytes, 0.0))
        costs.append(("norms", self._norm_bytes, 0.0))
        if load.sampled:
            costs.append((self._head.name, self._head.weight_bytes, self._head.flops_per_token * load.sampled))
        return costs


def _dense_operators(spec: DecoderSpec, weight_bytes: float) -> tuple[_Dense, ...]:
    """The products every token goes through, each summed over the layers that have it."""
    hidden, heads, kv = spec.hidden_size, spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    dense = sum(layer.moe is None for layer in spec.layers)
    wide = (2 if spec.gated_mlp else 1) * spec.intermediate_size
    routers = sum(layer.moe.num_experts for layer in spec.layers if layer.moe)
    shapes = (
        ("qkv", spec.num_layers, hidden, heads + 2 * kv, spec.qkv_bias),
        ("o", spec.num_layers, heads, hidden, spec.output_bias),
        ("gate_up" if spec.gated_mlp else "up", dense, hidden, wide, spec.mlp_bias),
        ("down", dense, spec.intermediate_size, hidden, spec.mlp_bias),
        ("router", 1, hidden, routers, False),
    )
    return tuple(
        _Dense(name, layers * (rows + bias) * columns * weight_bytes, 2.0 * layers * rows * columns)
        for name, layers, rows, columns, bias in shapes
        if layers * columns
    )


def _expert_operators(spec: DecoderSpec, weight_bytes: float) -> tuple[_Experts, ...]:
    """Sparse layers, grouped by shape."""
    counts: dict[MoESpec, int] = {}
    for layer in spec.layers:
        if layer.moe:
            counts[layer.moe] = counts.get(layer.moe, 0) + 1
    operators = []
    for moe, layers in counts.items():
        elements = 3 * spec.hidden_size * moe.intermediate_size
        operators.append(_Experts(moe, layers, elements * weight_bytes, 2.0 * layers * moe.top_k * elements))
    return tuple(operators)


def _norm_elements(spec: DecoderSpec) -> int:
    per_norm = spec.hidden_size * (2 if spec.norm is NormKind.LAYER else 1)
    norms = spec.num_layers * (4 if spec.sandwich_norm else 2) + 1
    return norms * per_norm + (spec.num_layers * 2 * spec.head_dim if spec.qk_norm else 0)


def _activation_elements(spec: DecoderSpec) -> int:
    """Elements a token carries between unfused operators, written once and read once, over all layers."""
    heads, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    widths = 6 * spec.hidden_size + 2 * (heads + 2 * kv) + 2 * heads  # two residual norms, qkv to attention, attention to o
    total = 0
    for layer in spec.layers:
        inner = layer.moe.top_k * layer.moe.intermediate_size if layer.moe else spec.intermediate_size
        total += widths + 2 * (3 if spec.gated_mlp else 2) * inner + 2 * spec.hidden_size
    return total
