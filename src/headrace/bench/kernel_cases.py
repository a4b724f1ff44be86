"""The call sites that ``headrace bench kernels`` times: one model's shapes, at the row counts of decode and prefill.

What lives here: inputs, bytes and FLOPs of each operation. What may not: choosing kernels, timing, printing (kernels.py).

Bytes are what must cross the memory bus once: weights, inputs, outputs, the visible keys and values. FLOPs count a multiply-add as two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from headrace.kernels import reference
from headrace.kernels.around import MOST_ROWS, Around
from headrace.kernels.whole_step import StepWeights, longest_context
from headrace.layers.inputs import AttentionInputs, ForwardInputs
from headrace.spec import Activation, DecoderSpec, LayerSpec, MoESpec, RopeSpec

BLOCK_SIZES = {"cpu": 16, "cuda": 128}  # tokens, as engines choose them
MANY_ROWS = 64  # more rows are one prompt, not a batch of decoding sequences
SPARSE = MoESpec(num_experts=32, top_k=4, intermediate_size=768, renormalize=True)

# The shape of Llama-3.2-1B: what the figures of the documentation are measured on.
DEFAULT_SPEC = DecoderSpec(
    family="default",
    vocab_size=128256,
    hidden_size=2048,
    num_heads=32,
    num_kv_heads=8,
    head_dim=64,
    intermediate_size=8192,
    layers=(LayerSpec(),),
    max_positions=131072,
    rope=None,
    attention_scale=64**-0.5,
)


@dataclass(frozen=True, slots=True)
class KernelCase:
    """One operation at one call site. ``calls`` makes the calls from a kernel: several, each over memory of its own, taken in turn."""

    op: str
    label: str
    facts: dict[str, Any]
    bytes: int
    flops: int
    calls: Callable[[Callable[..., Any]], list[Callable[[], Any]]]


class CaseMaker:
    """Makes the cases of one shape. ``working_set`` bytes are cycled through, so that no cache holds a weight from call to call."""

    def __init__(self, spec: DecoderSpec, dtype: torch.dtype, context: int, working_set: int, device: torch.device) -> None:
        self.spec = spec
        self.dtype = dtype
        self.context = context
        self.working_set = working_set
        self.block_size = BLOCK_SIZES[device.type]
        self._generator = torch.Generator(device).manual_seed(0)

    def cases(self, op: str, rows: int) -> Iterator[KernelCase]:
        """The call sites of ``op`` over ``rows`` tokens: as many sequences of one token, or beyond MANY_ROWS one prompt."""
        if op == "linear":
            yield from self._linears(rows)
        elif op == "fused_linear":
            if rows <= MOST_ROWS:
                yield from self._fused_linears(rows)
        elif op in ("rms_norm", "layer_norm"):
            yield self._norm(op, rows)
        elif op in ("activation", "gated_activation"):
            yield self._activation(op, rows, 2 if op == "gated_activation" else 1)
        elif op in ("greedy_tokens", "pick_tokens", "gumbel_argmax", "score_tokens"):
            if rows <= MANY_ROWS:  # tokens are picked for a step's last rows only
                yield self._pick(rows) if op == "gumbel_argmax" else self._logits(op, rows)
        elif op == "rope_attention":
            if rows <= MANY_ROWS:
                yield self._rope(rows)
        elif op == "decode_step":
            if self.context <= longest_context(rows):
                yield self._step(rows)
        elif op == "added_linear":
            yield self._added(rows)
        elif op == "gated_linear":
            if rows > MOST_ROWS:
                yield self._gated(rows)
        elif op in ("write_rows", "gather_inputs", "store_tokens", "fetch_step"):
            yield {"write_rows": self._write, "gather_inputs": self._gather, "store_tokens": self._store, "fetch_step": self._fetch}[op](rows)
        else:
            yield {"embedding": self._embedding, "rotary_write": self._rotary, "paged_attention": self._attention, "moe": self._moe}[op](rows)

    def _linears(self, rows: int) -> Iterator[KernelCase]:
        spec, hidden, inner = self.spec, self.spec.hidden_size, self.spec.intermediate_size
        yield self.linear("qkv", rows, (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim, hidden)
        yield self.linear("output", rows, hidden, spec.num_heads * spec.head_dim)
        yield self.linear("gate+up", rows, 2 * inner, hidden)
        yield self.linear("down", rows, hidden, inner)
        if rows <= MANY_ROWS:
            yield self.linear("head, tied", rows, spec.vocab_size, hidden, shared=True)

    def _fused_linears(self, rows: int) -> Iterator[KernelCase]:
        spec, hidden, inner = self.spec, self.spec.hidden_size, self.spec.intermediate_size
        norm = Around(torch.full((64, rows), hidden / 64), spec.norm_eps)
        behind = Around(residual=self._random(rows, hidden), scale=self._random(hidden))
        yield self._fused("norm, qkv", rows, (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim, hidden, norm)
        yield self._fused("output, sum", rows, hidden, spec.num_heads * spec.head_dim, behind)
        yield self._fused("norm, gate+up, act", rows, 2 * inner, hidden, replace(norm, gate=spec.activation))
        yield self._fused("down, sum", rows, hidden, inner, behind)

    def _fused(self, name: str, rows: int, outs: int, ins: int, around: Around) -> KernelCase:
        facts = {"dtype": self.dtype, "in_features": ins, "out_features": outs, "gated": around.gate is not None}
        size, x, weight = self._bytes(outs * ins), self._random(rows, ins), self._weight(outs, ins)

        def calls(pack: Callable[..., Any]) -> list[Callable[[], Any]]:
            products = [pack(weight.clone() if i else weight, None) for i in range(self._copies(size) if size < self.working_set else 1)]
            return [partial(_first, product, x, around) for product in products]

        return KernelCase("fused_linear", f"{name} {rows}x{ins}x{outs}", facts, size + self._bytes(rows * (ins + outs)), 2 * rows * outs * ins, calls)

    def _random(self, *shape: int, scale: float = 1.0) -> Tensor:
        return torch.empty(shape, dtype=self.dtype).normal_(0.0, scale, generator=self._generator)

    def _weight(self, *shape: int) -> Tensor:
        """Quick random weights of about unit gain: the bits of a uniform draw, scaled."""
        flat = torch.randint(-128, 128, shape, dtype=torch.int8, generator=self._generator)
        return flat.to(self.dtype).mul_(shape[-1] ** -0.5 / 74.0)

    def _copies(self, size: int) -> int:
        return max(2, min(64, -(-self.working_set // max(size, 1))))

    def _bytes(self, elements: int) -> int:
        return elements * self.dtype.itemsize

    def linear(self, name: str, rows: int, outs: int, ins: int, *, shared: bool = False) -> KernelCase:
        facts = {"dtype": self.dtype, "in_features": ins, "out_features": outs, "shared_weight": shared}
        size, x = self._bytes(outs * ins), self._random(rows, ins)
        weight = self._weight(outs, ins)

        def calls(pack: Callable[..., Any]) -> list[Callable[[], Any]]:
            copies = self._copies(size) if size < self.working_set else 1
            return [partial(pack(weight.clone() if i else weight, None), x) for i in range(copies)]

        return KernelCase("linear", f"{name} {rows}x{ins}x{outs}", facts, size + self._bytes(rows * (ins + outs)), 2 * rows * outs * ins, calls)

    def _added(self, rows: int) -> KernelCase:
        """Each call gets a residual of its own, since a candidate may overwrite it: a copy is part of every time."""
        outs, ins = self.spec.hidden_size, self.spec.intermediate_size
        size, x, weight, residual = self._bytes(outs * ins), self._random(rows, ins), self._weight(outs, ins), self._random(rows, outs)

        def calls(pack: Callable[..., Any]) -> list[Callable[[], Any]]:
            products = [pack(weight.clone() if i else weight, None) for i in range(self._copies(size) if size < self.working_set else 1)]
            return [partial(_onto_a_copy, product, x, residual) for product in products]

        facts = {"dtype": self.dtype, "in_features": ins, "out_features": outs}
        moved = size + self._bytes(rows * (ins + 2 * outs))
        return KernelCase("added_linear", f"down, sum {rows}x{ins}x{outs}", facts, moved, 2 * rows * outs * ins, calls)

    def _gated(self, rows: int) -> KernelCase:
        outs, ins = self.spec.intermediate_size, self.spec.hidden_size
        size, x, weight = self._bytes(2 * outs * ins), self._random(rows, ins), self._weight(2 * outs, ins)

        def calls(pack: Callable[..., Any]) -> list[Callable[[], Any]]:
            weights = [weight.clone() if i else weight for i in range(self._copies(size) if size < self.working_set else 1)]
            return [partial(_gated_or_plain, pack(each, None), each, x, self.spec.activation) for each in weights]

        facts = {"dtype": self.dtype, "in_features": ins, "out_features": 2 * outs}
        moved = size + self._bytes(rows * (ins + outs))
        return KernelCase("gated_linear", f"gate+up, act {rows}x{ins}x{outs}", facts, moved, 4 * rows * outs * ins, calls)

    def _norm(self, op: str, rows: int) -> KernelCase:
        width = self.spec.hidden_size
        weight, shift = torch.ones(width, dtype=self.dtype), (torch.zeros(width, dtype=self.dtype),)
        pairs = [(self._random(rows, width), self._random(rows, width)) for _ in range(4)]
        more = shift if op == "layer_norm" else ()

        def calls(norm: Callable[..., Any]) -> list[Callable[[], Any]]:
            return [partial(norm, x, weight, *more, 1e-5, residual) for x, residual in pairs]

        return KernelCase(op, f"{rows}x{width}, residual", {"dtype": self.dtype}, self._bytes(4 * rows * width), 6 * rows * width, calls)

    def _activation(self, op: str, rows: int, halves: int) -> KernelCase:
        width = self.spec.intermediate_size
        inputs = [self._random(rows, halves * width) for _ in range(4)]

        def calls(act: Callable[..., Any]) -> list[Callable[[], Any]]:
            return [partial(act, x, Activation.SILU) for x in inputs]

        size = self._bytes(rows * width * (halves + 1))
        return KernelCase(op, f"{rows}x{width}, silu", {"dtype": self.dtype}, size, 6 * rows * width, calls)

    def _attention_facts(self) -> dict[str, Any]:
        spec = self.spec
        return {"dtype": self.dtype, "head_dim": spec.head_dim, "num_heads": spec.num_heads, "num_kv_heads": spec.num_kv_heads}

    def _cache(self, tokens: int) -> tuple[Tensor, Tensor]:
        shape = (-(-tokens // self.block_size), 2, self.spec.num_kv_heads, self.block_size, self.spec.head_dim)
        cache = self._random(*shape)
        return cache[:, 0], cache[:, 1]

    def _rotary(self, rows: int) -> KernelCase:
        spec = self.spec
        heads, kv_heads, dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        cos_sin, (k_cache, v_cache) = torch.rand(4096, dim) * 0.7, self._cache(rows)
        packed = [self._random(rows, heads + 2 * kv_heads, dim) for _ in range(4)]
        positions, slots = torch.arange(rows), torch.arange(rows)

        def calls(write: Callable[..., Any]) -> list[Callable[[], Any]]:
            inputs = [x.clone().split((heads, kv_heads, kv_heads), dim=1) for x in packed]  # written in place
            return [partial(write, *qkv, positions, cos_sin, k_cache, v_cache, slots) for qkv in inputs]

        rotated = rows * (heads + kv_heads) * dim
        size = self._bytes(2 * rotated + 3 * rows * kv_heads * dim) + rows * dim * 4
        return KernelCase("rotary_write", f"{rows} tokens", self._attention_facts(), size, 3 * rotated, calls)

    def _rope(self, rows: int) -> KernelCase:
        """As many sequences as there are rows, none of which share keys."""
        spec, blocks = self.spec, -(-self.context // self.block_size)
        table = torch.randperm(rows * blocks, generator=self._generator).int().view(rows, blocks)
        last = torch.full((rows,), self.context - 1)
        slots = table[:, -1].long() * self.block_size + last % self.block_size
        every, context = torch.arange(rows + 1).int(), torch.full((rows,), self.context, dtype=torch.int32)
        inputs = AttentionInputs(table, every, context, slots, self.block_size, 1, self.context, shared_tokens=0)
        qkv, cos_sin = self._random(rows, spec.num_heads + 2 * spec.num_kv_heads, spec.head_dim), torch.rand(self.context, spec.head_dim) * 0.7
        keys = 2 * rows * self.context * spec.num_kv_heads * spec.head_dim
        caches = [self._cache(rows * blocks * self.block_size) for _ in range(self._copies(self._bytes(keys)))]

        def calls(attend: Callable[..., Any]) -> list[Callable[[], Any]]:
            return [partial(attend, qkv.clone(), last, cos_sin, k, v, inputs, spec.attention_scale) for k, v in caches]  # q is turned in place

        facts = {**self._attention_facts(), "rotary_dim": spec.head_dim, "normed": False, "window": None, "soft_cap": None}
        flops = 4 * rows * self.context * spec.num_heads * spec.head_dim
        return KernelCase("rope_attention", f"{rows} rows, context {self.context}", facts, self._bytes(keys + 2 * qkv.numel()), flops, calls)

    def _attention(self, rows: int) -> KernelCase:
        spec, prompt = self.spec, rows > MANY_ROWS
        sequences, queries, context = (1, rows, max(rows, self.context)) if prompt else (rows, 1, self.context)
        per_row = -(-context // self.block_size)
        inputs = AttentionInputs(
            block_table=torch.randperm(sequences * per_row, generator=self._generator).int().view(sequences, per_row),
            query_start=torch.arange(0, rows + 1, queries, dtype=torch.int32),
            context_len=torch.full((sequences,), context, dtype=torch.int32),
            slots=torch.full((rows,), -1),
            block_size=self.block_size,
            max_query_len=queries,
            max_context_len=context,
        )
        q, keys = self._random(rows, spec.num_heads, spec.head_dim), 2 * sequences * context * spec.num_kv_heads * spec.head_dim
        caches = [self._cache(sequences * per_row * self.block_size) for _ in range(self._copies(self._bytes(keys)))]

        def calls(attend: Callable[..., Any]) -> list[Callable[[], Any]]:
            return [partial(attend, q, k, v, inputs, spec.attention_scale, None, None) for k, v in caches]

        seen = sequences * sum(context - queries + i + 1 for i in range(queries))
        kind = "prefill" if prompt else "decode"
        flops = 4 * seen * spec.num_heads * spec.head_dim
        label = f"{kind} {sequences}x{queries}, context {context}"
        return KernelCase("paged_attention", label, self._attention_facts(), self._bytes(keys + 2 * q.numel()), flops, calls)

    def _step(self, rows: int) -> KernelCase:
        """One layer and the norm behind it, of as many sequences as there are rows."""
        spec, hidden, inner, dim = self.spec, self.spec.hidden_size, self.spec.intermediate_size, self.spec.head_dim
        shapes = (((spec.num_heads + 2 * spec.num_kv_heads) * dim, hidden), (hidden, spec.num_heads * dim), (2 * inner, hidden), (hidden, inner))
        blocks = -(-self.context // self.block_size)
        last = torch.full((rows,), self.context - 1)
        table = torch.randperm(rows * blocks, generator=self._generator).int().view(rows, blocks)
        slots = table[:, -1].long() * self.block_size + (self.context - 1) % self.block_size
        every, context = torch.arange(rows + 1).int(), torch.full((rows,), self.context, dtype=torch.int32)
        attention = AttentionInputs(table, every, context, slots, self.block_size, 1, self.context)
        inputs = ForwardInputs(torch.arange(rows) % 64, last, (attention,))
        cache = self._random(rows * blocks, 1, 2, spec.num_kv_heads, self.block_size, dim)
        size = self._bytes(sum(outs * ins for outs, ins in shapes))

        def weights() -> StepWeights:
            layer = (*(self._weight(*shape) for shape in shapes), torch.ones(hidden, dtype=self.dtype), torch.ones(hidden, dtype=self.dtype))
            angles = torch.arange(self.context).unsqueeze(1) * 500000.0 ** (-torch.arange(dim // 2) / (dim // 2))
            turns, table = torch.cat((angles.cos(), angles.sin()), 1), self._random(64, hidden)
            return StepWeights((layer,), table, layer[-1], turns, spec.num_heads, spec.num_kv_heads, spec.norm_eps, spec.attention_scale)

        made = [weights() for _ in range(min(2, self._copies(size)))]

        def calls(make: Callable[..., Any]) -> list[Callable[[], Any]]:
            return [partial(make(each), inputs, (cache,)) for each in made]

        keys = 2 * rows * self.context * spec.num_kv_heads * dim
        facts = {"dtype": self.dtype, "spec": replace(spec, layers=(LayerSpec(),), rope=RopeSpec(theta=500000.0, rotary_dim=dim))}
        flops = 2 * rows * size // self.dtype.itemsize + 4 * rows * self.context * spec.num_heads * dim
        return KernelCase("decode_step", f"1 layer, {rows} rows, context {self.context}", facts, size + self._bytes(keys), flops, calls)

    def _moe(self, rows: int) -> KernelCase:
        moe, width = SPARSE, self.spec.hidden_size
        gate_up, down = self._weight(moe.num_experts, 2 * moe.intermediate_size, width), self._weight(moe.num_experts, width, moe.intermediate_size)
        inputs = [(self._random(rows, width), self._random(rows, moe.num_experts)) for _ in range(16)]  # other experts each time

        def calls(sparse: Callable[..., Any]) -> list[Callable[[], Any]]:
            return [partial(sparse, x, router, gate_up, down, moe.top_k, moe.renormalize, Activation.SILU) for x, router in inputs]

        pairs, expert = rows * moe.top_k, 3 * moe.intermediate_size * width
        touched = sum(len(torch.topk(router.float(), moe.top_k).indices.unique()) for _, router in inputs) / len(inputs)
        facts = {"dtype": self.dtype, "num_experts": moe.num_experts, "top_k": moe.top_k}
        label = f"{rows} tokens, {moe.top_k} of {moe.num_experts}x{moe.intermediate_size}"
        return KernelCase("moe", label, facts, self._bytes(int(touched * expert) + 2 * rows * width), 2 * pairs * expert, calls)

    def _embedding(self, rows: int) -> KernelCase:
        table, width = self._weight(self.spec.vocab_size, self.spec.hidden_size), self.spec.hidden_size
        ids = [torch.randint(self.spec.vocab_size, (rows,), generator=self._generator) for _ in range(16)]

        def calls(look_up: Callable[..., Any]) -> list[Callable[[], Any]]:
            return [partial(look_up, row_ids, table, None) for row_ids in ids]

        return KernelCase("embedding", f"{rows}x{width}", {"dtype": self.dtype}, self._bytes(2 * rows * width), 0, calls)

    def _write(self, rows: int) -> KernelCase:
        """The ids of new sequences of one length, in any order of rows."""
        ids = torch.randint(self.spec.vocab_size, (rows * self.context,), dtype=torch.int32, generator=self._generator)
        written, row = torch.zeros(rows, self.context, dtype=torch.int32), torch.randperm(rows, generator=self._generator)
        begin = (torch.arange(rows + 1) * self.context).int()

        def calls(write: Callable[..., Any]) -> list[Callable[[], Any]]:
            return [partial(_written, write, written, ids, row, begin, self.context)]

        size = rows * (2 * 4 * self.context + 8 + 4)
        return KernelCase("write_rows", f"{rows} rows of {self.context}", {"dtype": torch.int32}, size, 0, calls)

    def _gather(self, rows: int) -> KernelCase:
        """A step of ``rows`` sequences that decode: their last token, its place, their block tables."""
        blocks = -(-self.context // self.block_size)
        ids, every = torch.randint(self.spec.vocab_size, (rows, self.context), dtype=torch.int32, generator=self._generator), torch.arange(rows).int()
        table = torch.randperm(rows * blocks, generator=self._generator).int().view(rows, blocks)
        context = torch.full((rows,), self.context, dtype=torch.int32)

        def calls(gather: Callable[..., Any]) -> list[Callable[[], Any]]:
            return [partial(gather, ids, table, every, every.clone(), context - 1, context, self.block_size, blocks)]

        size = rows * (4 * 5 + 8 * 3 + 2 * 4 * blocks)
        return KernelCase("gather_inputs", f"{rows} rows, context {self.context}", {"dtype": torch.int32}, size, 0, calls)

    def _store(self, rows: int) -> KernelCase:
        ids, every, tokens = torch.zeros(rows, self.context, dtype=torch.int32), torch.arange(rows).int(), torch.arange(rows)

        def calls(store: Callable[..., Any]) -> list[Callable[[], Any]]:
            return [partial(store, ids, every, torch.full_like(every, self.context - 1), tokens, tokens.float())]

        return KernelCase("store_tokens", f"{rows} rows", {"dtype": torch.int32}, rows * (4 + 4 + 8 + 4 + 4 + 8), 0, calls)

    def _fetch(self, rows: int) -> KernelCase:
        """Of each row its place, and no edits of the block table."""
        ring = torch.randint(self.context, (1, 7, rows), dtype=torch.int32, generator=self._generator)
        ring[:, 3:] = 0
        turn, step, table = torch.zeros(1, dtype=torch.int32), torch.zeros(3, rows, dtype=torch.int32), torch.zeros(rows, 8, dtype=torch.int32)

        def calls(fetch: Callable[..., Any]) -> list[Callable[[], Any]]:
            return [partial(_fetched, fetch, ring, turn, step, table)]

        return KernelCase("fetch_step", f"{rows} rows", {"dtype": torch.int32}, 2 * 3 * 4 * rows, 0, calls)

    def _logits(self, op: str, rows: int) -> KernelCase:
        """Operations over rows of raw logits, each read once: the largest, a random pick with top-k and top-p, logprobs of given tokens."""
        vocab, generator = self.spec.vocab_size, self._generator
        logits = [torch.randn(rows, vocab, generator=generator) * 4 for _ in range(4)]
        peaks = [x.amax(-1) for x in logits]
        filters = (torch.full((rows,), 50), torch.full((rows,), 0.9), torch.zeros(rows))
        heat, seeds, positions, chosen = torch.full((rows,), 0.8), torch.arange(rows), torch.arange(rows), torch.arange(rows) % vocab

        def calls(function: Callable[..., Any]) -> list[Callable[[], Any]]:
            if op == "greedy_tokens":
                return [partial(function, x) for x in logits]
            if op == "score_tokens":
                return [partial(function, x, chosen, min(5, vocab)) for x in logits]
            return [partial(function, x, peak, heat, filters, seeds, positions) for x, peak in zip(logits, peaks, strict=True)]

        return KernelCase(op, f"{rows}x{vocab}", {"dtype": torch.float32}, 4 * rows * vocab, rows * vocab, calls)

    def _pick(self, rows: int) -> KernelCase:
        size = 4 * rows * self.spec.vocab_size
        shape = (min(self._copies(size), 8), rows, self.spec.vocab_size)
        scores = torch.empty(shape).normal_(0.0, 3.0, generator=self._generator)
        seeds, positions = torch.arange(rows) * 977, torch.arange(rows)

        def calls(pick: Callable[..., Any]) -> list[Callable[[], Any]]:
            return [partial(pick, row_scores, None, seeds, positions) for row_scores in scores]

        label = f"{rows}x{self.spec.vocab_size}"
        return KernelCase("gumbel_argmax", label, {"dtype": torch.float32}, size, rows * self.spec.vocab_size, calls)


def _first(call: Callable[..., Any], *arguments: Any) -> Any:
    """The first of its results: others may be in pieces, which candidates cut as they like."""
    return call(*arguments)[0]


def _onto_a_copy(product: Callable[..., Tensor], x: Tensor, residual: Tensor) -> Tensor:
    return product(x, residual.clone())


def _gated_or_plain(product: Callable[..., Tensor | None], weight: Tensor, x: Tensor, kind: Activation) -> Tensor:
    """As a layer does where a candidate has nothing for so many rows."""
    found = product(x, kind)
    return reference.gated_activation(x @ weight.t(), kind) if found is None else found


def _written(write: Callable[..., None], token_ids: Tensor, ids: Tensor, row: Tensor, begin: Tensor, longest: int) -> Tensor:
    write(token_ids, ids, row, begin, longest)
    return token_ids


def _fetched(fetch: Callable[..., None], ring: Tensor, turn: Tensor, step: Tensor, table: Tensor) -> Tensor:
    fetch(ring, turn, step, table)
    return step
