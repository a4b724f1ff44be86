"""The call sites that ``headrace bench kernels`` times: one model's shapes, at the row counts of decode and prefill.

What lives here: inputs, bytes and FLOPs of the operations that read weights or keys, which take nearly all of a step's
time; the others are measured in a checkout (lab/kernels.py). What may not: choosing kernels, timing, printing
(kernels.py).

Bytes are what must cross the memory bus once: weights, inputs, outputs, the visible keys and values. FLOPs count a
multiply-add as two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from headrace.kernels.attention import kv_codes
from headrace.kernels.candidate import (
    ExpertFacts,
    Facts,
    HeadFacts,
    RopeFacts,
    WeightFacts,
)
from headrace.kernels.inputs import AttentionInputs, Quantized
from headrace.kernels.operations import OPERATIONS
from headrace.layers.packed import Piece
from headrace.quant import Format, lossless
from headrace.quant.codes import Activations
from headrace.quant.floats import MXFP4, NVFP4, NormalFloat
from headrace.quant.gguf import GGUFBlocks
from headrace.quant.integers import AWQ, GPTQ, PackedIntegers
from headrace.quant.scaled import WHOLE, ScaledWeight
from headrace.sites import layer_matrices
from headrace.spec import KV_FORMATS, Activation, DecoderSpec, KVFormat, LayerSpec, MoESpec

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

Calls = list[Callable[[], Any]]


@dataclass(frozen=True, slots=True)
class KernelCase:
    """One operation at one call site. ``calls`` builds the calls of a kernel: several, each with its own memory, used
    in turn."""

    op: str
    label: str
    facts: Facts
    bytes: int
    flops: int
    calls: Callable[[Callable[..., Any]], Calls]


def case_of(op: str, label: str, facts: Facts, size: int, flops: int, inputs: Sequence[Sequence[Any]]) -> KernelCase:
    """``inputs``: of each call in turn."""
    return KernelCase(op, label, facts, size, flops, lambda kernel: [partial(kernel, *each) for each in inputs])


class CaseMaker:
    """Makes the cases of one shape. Calls rotate through ``working_set`` bytes, so that no cache holds a weight from
    call to call. ``rows_of``: the least and the most rows that an operation is called with, where not all are."""

    rows_of: Mapping[str, tuple[int, int]] = {"rope_attention": (1, MANY_ROWS)}

    def __init__(
        self, spec: DecoderSpec, dtype: torch.dtype, context: int, working_set: int, device: torch.device
    ) -> None:
        self.spec = spec
        self.dtype = dtype
        self.context = context
        self.working_set = working_set
        self.block_size = BLOCK_SIZES[device.type]
        self._sites = layer_matrices(replace(spec, layers=(LayerSpec(),), gated_mlp=True), 0)
        self._generator = torch.Generator(device).manual_seed(0)

    def cases(self, op: str, rows: int) -> Iterator[KernelCase]:
        """The call sites of ``op`` over ``rows`` tokens: as many sequences of one token, or beyond MANY_ROWS one
        prompt."""
        least, most = self.rows_of.get(op, (1, rows))
        if least <= rows <= most:
            made = getattr(self, f"_{op}")(rows)
            yield from [made] if isinstance(made, KernelCase) else made

    @classmethod
    def ops(cls) -> tuple[str, ...]:
        """The operations that have cases here: each is a method of that name."""
        return tuple(op for op in OPERATIONS if hasattr(cls, f"_{op}"))

    def _linear(self, rows: int) -> Iterator[KernelCase]:
        for site, name in zip(self._sites.values(), ("qkv", "output", "gate+up", "down"), strict=True):
            yield self.linear(name, rows, site.outs, site.ins)
        if rows <= MANY_ROWS:
            yield self.linear("head, tied", rows, self.spec.vocab_size, self.spec.hidden_size, shared=True)

    def linear(self, name: str, rows: int, outs: int, ins: int, *, shared: bool = False) -> KernelCase:
        size, x, weight = self._bytes(outs * ins), self._random(rows, ins), self._weight(outs, ins)

        def calls(pack: Callable[..., Any]) -> Calls:
            weights = [weight.clone() if i else weight for i in range(self._copies(size, least=1))]
            return [partial(pack(each, None), x) for each in weights]

        label, moved = f"{name} {rows}x{ins}x{outs}", size + self._bytes(rows * (ins + outs))
        facts = WeightFacts(self.dtype, ins, outs, shared=shared)
        return KernelCase("linear", label, facts, moved, 2 * rows * outs * ins, calls)

    def _packed_linear(self, rows: int) -> Iterator[KernelCase]:
        """Down, in each format. Bytes are given as a fraction of bfloat16's."""
        outs, ins = self.spec.hidden_size, self.spec.intermediate_size
        for form in self._packed_formats():
            x, size = self._random(rows, ins), int(form.num_bytes(outs, ins, self.dtype.itemsize))

            def calls(pack: Callable[..., Any], x: Tensor = x, form: Format = form, size: int = size) -> Calls:
                # pieces of their own: candidates lay them out
                copies = range(self._copies(size, least=1))
                return [partial(pack([self._piece(form, outs, ins)], None), x) for _ in copies]

            facts = WeightFacts(
                self.dtype, ins, outs, formats=(form.label,), codings=(form.coding,), eights=(form.eight,)
            )
            label = f"down {rows}x{ins}x{outs}, {form.label} ({size / (2 * outs * ins):.0%} of bf16's bytes)"
            moves, flops = size + self._bytes(rows * (ins + outs)), 2 * rows * outs * ins
            yield KernelCase("packed_linear", label, facts, moves, flops, calls)

    def _packed_formats(self) -> Iterator[Format]:
        device = torch.get_default_device()
        if lossless.missing(self.dtype, device) is None:
            yield lossless.Lossless()
        yield ScaledWeight("float8_e4m3fn", (1, WHOLE))
        yield ScaledWeight("int8", (1, WHOLE), activations=Activations("int8"))
        if self.spec.intermediate_size % 128 == 0:
            yield from (PackedIntegers(bits, 128, zero=False, activations=Activations("int8")) for bits in (4, 6))
        if self.spec.intermediate_size % 32 == 0:
            yield from (GGUFBlocks("Q8_0"), GGUFBlocks("Q4_0"))
        yield from self._coded_formats()

    def _coded_formats(self) -> Iterator[Format]:
        """One of each kind that kernels distinguish, if the model's widths are multiples of its groups and blocks."""
        if self.spec.intermediate_size % 128 == 0:
            yield from (PackedIntegers(bits, 128, zero=False) for bits in (2, 3, 4, 6, 8))
            yield from (
                AWQ(4, 128),
                GPTQ(4, 128, act_order=True),
                MXFP4(),
                NVFP4(inverse=True),
                NormalFloat("nf4", nested=False),
            )
        if self.spec.intermediate_size % 256 == 0:
            yield from (GGUFBlocks("Q4_K"), GGUFBlocks("Q6_K"))

    def _piece(self, form: Format, outs: int, ins: int, *stacked: int) -> Piece:
        piece = Piece(form.label, form, outs, ins, dtype=self.dtype, device=torch.get_default_device(), stacked=stacked)
        list(piece.make_up(0))
        piece.finish_loading()
        return piece

    def _random(self, *shape: int, scale: float = 1.0) -> Tensor:
        return torch.empty(shape, dtype=self.dtype).normal_(0.0, scale, generator=self._generator)

    def _weight(self, *shape: int) -> Tensor:
        """Random weights of about unit gain, quickly: the bits of a uniform draw, scaled."""
        flat = torch.randint(-128, 128, shape, dtype=torch.int8, generator=self._generator)
        return flat.to(self.dtype).mul_(shape[-1] ** -0.5 / 74.0)

    def _copies(self, size: int, least: int = 2) -> int:
        return max(least, min(64, -(-self.working_set // max(size, 1))))

    def _bytes(self, elements: int) -> int:
        return elements * self.dtype.itemsize

    @property
    def _heads(self) -> tuple[torch.dtype, int, int, int]:
        return self.dtype, self.spec.head_dim, self.spec.num_heads, self.spec.num_kv_heads

    def _cache(self, tokens: int, form: KVFormat | None = None) -> tuple[Tensor, Tensor]:
        """In a format: the same codes in every block, which is as slow to read as others are."""
        blocks, spec = -(-tokens // self.block_size), self.spec
        cache = self._random(1 if form else blocks, 2, spec.num_kv_heads, self.block_size, spec.head_dim)
        if form is not None:
            places, plain = torch.arange(self.block_size), cache
            cache = torch.empty(*plain.shape[:-1], form.token_bytes(spec.head_dim), dtype=torch.uint8)
            for half in (0, 1):
                kv_codes.write(cache[:, half], plain[0, half].transpose(0, 1), places, form, None)
            cache = cache.repeat(blocks, 1, 1, 1, 1)
        return cache[:, 0], cache[:, 1]

    def _scales(self, form: KVFormat) -> Quantized:
        return Quantized(form) if form.scales else Quantized(form, *torch.ones(2, self.spec.num_kv_heads))

    def _decoding(self, rows: int) -> tuple[AttentionInputs, Tensor]:
        """A token of each of so many sequences, none of which share keys; and its positions."""
        blocks = -(-self.context // self.block_size)
        table, last = self._table(rows, blocks), torch.full((rows,), self.context - 1)
        slots = table[:, -1].long() * self.block_size + last % self.block_size
        every, context = torch.arange(rows + 1).int(), torch.full((rows,), self.context, dtype=torch.int32)
        return AttentionInputs(table, every, context, slots, self.block_size, 1, self.context, shared_tokens=0), last

    def _table(self, rows: int, blocks: int) -> Tensor:
        return torch.randperm(rows * blocks, generator=self._generator).int().view(rows, blocks)

    def _rope_attention(self, rows: int) -> Iterator[KernelCase]:
        """One sequence per row, in each format of the cache."""
        spec, (inputs, last) = self.spec, self._decoding(rows)
        qkv = self._random(rows, sum(spec.qkv_heads), spec.head_dim)
        cos_sin = torch.rand(self.context, spec.head_dim, generator=self._generator) * 0.7
        tokens = inputs.block_table.numel() * self.block_size
        flops = 4 * rows * self.context * spec.num_heads * spec.head_dim
        for form in (None, *KV_FORMATS.values()):
            keys = 2 * rows * self.context * spec.num_kv_heads * self._held(form)
            caches = [self._cache(tokens, form) for _ in range(self._copies(keys))]
            rest = inputs, spec.attention_scale, None, None if form is None else self._scales(form)
            facts = RopeFacts(*self._heads, spec.head_dim, normed=None, window=None, soft_cap=None, kv=form)
            size = keys + self._bytes(2 * qkv.numel())
            label = f"{rows} rows, context {self.context}{'' if form is None else f', {form.name}'}"
            # q is turned in place
            each = [(qkv.clone(), last, cos_sin, *kv, *rest) for kv in caches]
            yield case_of("rope_attention", label, facts, size, flops, each)

    def _held(self, form: KVFormat | None) -> int:
        """Bytes of a token's keys in one head."""
        return self._bytes(self.spec.head_dim) if form is None else form.token_bytes(self.spec.head_dim)

    def _paged_attention(self, rows: int) -> Iterator[KernelCase]:
        """Over keys and values as they come, and in each format of the cache."""
        spec, prompt = self.spec, rows > MANY_ROWS
        sequences, queries, context = (1, rows, max(rows, self.context)) if prompt else (rows, 1, self.context)
        per_row = -(-context // self.block_size)
        inputs = AttentionInputs(
            block_table=self._table(sequences, per_row),
            query_start=torch.arange(0, rows + 1, queries, dtype=torch.int32),
            context_len=torch.full((sequences,), context, dtype=torch.int32),
            slots=torch.full((rows,), -1),
            block_size=self.block_size,
            max_query_len=queries,
            max_context_len=context,
        )
        q = self._random(rows, spec.num_heads, spec.head_dim)
        seen = sequences * sum(context - queries + i + 1 for i in range(queries))
        kind = "prefill" if prompt else "decode"
        flops = 4 * seen * spec.num_heads * spec.head_dim
        for form in (None, *KV_FORMATS.values()):
            keys = 2 * sequences * context * spec.num_kv_heads * self._held(form)
            caches = [self._cache(sequences * per_row * self.block_size, form) for _ in range(self._copies(keys))]
            rest = (spec.attention_scale, None, None, *(() if form is None else (self._scales(form),)))
            label = f"{kind} {sequences}x{queries}, context {context}{'' if form is None else f', {form.name}'}"
            facts, size = HeadFacts(*self._heads, kv=form), keys + self._bytes(2 * q.numel())
            yield case_of("paged_attention", label, facts, size, flops, [(q, *kv, inputs, *rest) for kv in caches])

    def _moe(self, rows: int) -> KernelCase:
        moe, width = SPARSE, self.spec.hidden_size
        gate_up = self._weight(moe.num_experts, 2 * moe.intermediate_size, width)
        rest = gate_up, self._weight(moe.num_experts, width, moe.intermediate_size), moe.top_k, moe.renormalize
        # other experts each time
        inputs = [(self._random(rows, width), self._random(rows, moe.num_experts)) for _ in range(16)]
        pairs, expert = rows * moe.top_k, 3 * moe.intermediate_size * width
        touched = sum(len(torch.topk(router.float(), moe.top_k).indices.unique()) for _, router in inputs) / len(inputs)
        facts = ExpertFacts(self.dtype, moe.num_experts, moe.top_k)
        label = f"{rows} tokens, {moe.top_k} of {moe.num_experts}x{moe.intermediate_size}"
        size, calls = (
            self._bytes(int(touched * expert) + 2 * rows * width),
            [(*x, *rest, Activation.SILU) for x in inputs],
        )
        return case_of("moe", label, facts, size, 2 * pairs * expert, calls)
