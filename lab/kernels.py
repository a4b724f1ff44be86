"""``python -m lab kernels``: ``headrace bench kernels`` over every operation, those too that fuse others or that only
an engine's own work has.

What lives here: inputs, bytes and FLOPs of products with what is around them, norms, activations, logits, adapters,
encoders' attention, whole steps, drafts, rows of ids. What may not: the other operations' (bench/kernel_cases.py), timing.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial, partialmethod
from itertools import pairwise, product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.bench import kernels
from headrace.bench.kernel_cases import MANY_ROWS, SPARSE, Calls, CaseMaker, KernelCase, case_of
from headrace.kernels.candidate import (
    DeltaFacts,
    EightBits,
    ExpertFacts,
    Facts,
    HeadFacts,
    NormFacts,
    StepFacts,
    WeightFacts,
)
from headrace.kernels.inputs import AttentionInputs, ForwardInputs, SlotFactors, adapter_rows
from headrace.kernels.linear.epilogue import MOST_ROWS, Epilogue
from headrace.kernels.moe.reference import FEW
from headrace.kernels.norm import reference
from headrace.kernels.step.reference import DraftRows, StepWeights, longest_context
from headrace.quant import Format
from headrace.quant.codes import Activations
from headrace.quant.integers import PackedIntegers
from headrace.quant.scaled import WHOLE, ScaledWeight
from headrace.sites import layer_matrices
from headrace.spec import ADDRESS_UNIT, Activation, DecoderSpec, LayerSpec, RopeSpec

TEXT = 64  # tokens of an encoder's text
ADAPTERS, RANK = 8, 16  # as an engine has them by itself


def run(args: argparse.Namespace) -> int:
    return kernels.run(args, EveryCase)


class EveryCase(CaseMaker):
    """Cases of every operation."""

    rows_of: Mapping[str, tuple[int, int]] = {
        **CaseMaker.rows_of,
        **dict.fromkeys(("fused_linear", "packed_fused_linear"), (1, MOST_ROWS)),
        # of a step's last rows only
        **dict.fromkeys(("greedy_tokens", "pick_tokens", "gumbel_argmax", "score_tokens"), (1, MANY_ROWS)),
        "gated_linear": (MOST_ROWS + 1, 2**31),
        "fused_moe": (1, FEW),
    }

    def _fused_linear(self, rows: int) -> Iterator[KernelCase]:
        """Only the first result is compared: others may be in pieces, which candidates cut differently."""
        spec, hidden = self.spec, self.spec.hidden_size
        norm = Epilogue(torch.full((64, rows), hidden / 64), spec.norm_eps)
        behind = Epilogue(residual=self._random(rows, hidden), scale=self._random(hidden))
        cases = (
            ("norm, qkv", norm),
            ("output, sum", behind),
            ("norm, gate+up, act", replace(norm, gate=spec.activation)),
            ("down, sum", behind),
        )
        for site, (name, epilogue) in zip(self._sites.values(), cases, strict=True):

            def first(product: Callable[..., Any], x: Tensor, weight: Tensor, epilogue: Epilogue = epilogue) -> Any:
                return product(x, epilogue)[0]

            yield self._product("fused_linear", name, rows, site.outs, site.ins, first, gated=epilogue.gate is not None)

    def _added_linear(self, rows: int) -> KernelCase:
        """Each call gets its own residual, since a candidate may overwrite it: every time includes a copy."""
        outs, ins = self.spec.hidden_size, self.spec.intermediate_size
        residual = self._random(rows, outs)
        added = self._product(
            "added_linear", "down, sum", rows, outs, ins, lambda product, x, weight: product(x, residual.clone())
        )
        return replace(added, bytes=added.bytes + self._bytes(rows * outs))

    def _gated_linear(self, rows: int) -> KernelCase:
        """As a layer computes it where a candidate has nothing for this many rows: the GEMM, and an activation."""
        outs, ins, kind = 2 * self.spec.intermediate_size, self.spec.hidden_size, self.spec.activation

        def gated(product: Callable[..., Tensor | None], x: Tensor, weight: Tensor) -> Tensor:
            found = product(x, kind)
            return reference.gated_activation(x @ weight.t(), kind) if found is None else found

        made = self._product("gated_linear", "gate+up, act", rows, outs, ins, gated)
        return replace(made, bytes=made.bytes - self._bytes(rows * outs // 2))

    def _product(
        self, op: str, name: str, rows: int, outs: int, ins: int, run: Callable[..., Any], **more: Any
    ) -> KernelCase:
        """``run``: from a packed weight, x and the original weight to what is compared."""
        facts = WeightFacts(self.dtype, ins, outs, **more)
        size, x, weight = self._bytes(outs * ins), self._random(rows, ins), self._weight(outs, ins)

        def calls(pack: Callable[..., Any]) -> Calls:
            weights = [weight.clone() if i else weight for i in range(self._copies(size, least=1))]
            return [partial(run, pack(each, None), x, each) for each in weights]

        label, moved = f"{name} {rows}x{ins}x{outs}", size + self._bytes(rows * (ins + outs))
        return KernelCase(op, label, facts, moved, 2 * rows * outs * ins, calls)

    def _packed_fused_linear(self, rows: int) -> Iterator[KernelCase]:
        """Gate-up between norm and activation, and down followed by the sum. ``pack`` returns None for what it cannot
        multiply like that."""
        hidden, inner = self.spec.hidden_size, self.spec.intermediate_size
        norm = Epilogue(torch.full((64, rows), hidden / 64), self.spec.norm_eps, self.spec.activation)
        behind = Epilogue(residual=self._random(rows, hidden), scale=self._random(hidden))
        places = (("norm, gate+up, act", 2 * inner, hidden, norm), ("down, sum", hidden, inner, behind))
        for (name, outs, ins, epilogue), form in product(
            places, (PackedIntegers(4, 128, zero=False), ScaledWeight("float8_e4m3fn", (1, WHOLE)))
        ):
            if form.problem(outs, ins) is None:
                yield self._packed_around(
                    form, rows, f"{name} {rows}x{ins}x{outs}", outs, ins, epilogue, op="packed_fused_linear"
                )

    def _composed(self, op: str, rows: int) -> KernelCase:
        """FP8 behind a sum and its norm, or behind a gate."""
        hidden, inner, kind = self.spec.hidden_size, self.spec.intermediate_size, self.spec.activation
        form = ScaledWeight("float8_e4m3fn", (1, WHOLE), activations=Activations("fp8"))
        if op == "activated_linear":
            label, width = f"act, down {rows}x{inner}x{hidden}", 2 * inner
            made = self._packed_around(form, rows, label, hidden, inner, kind, op=op, width=width)
            return replace(made, bytes=made.bytes + self._bytes(rows * inner))
        norm = (torch.ones(hidden, dtype=self.dtype), self.spec.norm_eps, self._random(rows, hidden))
        label = f"sum, norm, gate+up {rows}x{hidden}x{2 * inner}"
        made = self._packed_around(form, rows, label, 2 * inner, hidden, *norm, op=op)
        return replace(made, bytes=made.bytes + self._bytes(2 * rows * hidden))

    _normed_linear = partialmethod(_composed, "normed_linear")

    _activated_linear = partialmethod(_composed, "activated_linear")

    def _packed_around(
        self,
        form: Format,
        rows: int,
        name: str | None = None,
        outs: int | None = None,
        ins: int | None = None,
        *rest: Any,
        op: str = "packed_linear",
        width: int = 0,
    ) -> KernelCase:
        """The GEMM alone, usually down; or with what is around it. Bytes are given as a fraction of bfloat16's.
        ``rest``: what it takes behind x, of this ``width`` if not the GEMM's."""
        outs, ins = outs or self.spec.hidden_size, ins or self.spec.intermediate_size
        x, size = self._random(rows, width or ins), int(form.num_bytes(outs, ins, self.dtype.itemsize))

        def calls(pack: Callable[..., Any]) -> Calls:
            # pieces of their own: candidates lay them out
            layers = [pack([self._piece(form, outs, ins)], None) for _ in range(self._copies(size, least=1))]
            return [partial(_first, each, x, *rest) for each in layers]

        gated = any(isinstance(each, Epilogue) and each.gate is not None for each in rest)
        facts = WeightFacts(
            self.dtype, ins, outs, gated, formats=(form.label,), codings=(form.coding,), eights=(form.eight,)
        )
        label = f"{name or f'down {rows}x{ins}x{outs}'}, {form.label} ({size / (2 * outs * ins):.0%} of bf16's bytes)"
        return KernelCase(op, label, facts, size + self._bytes(rows * (ins + outs)), 2 * rows * outs * ins, calls)

    def _fused_moe(self, rows: int) -> KernelCase:
        """Behind a norm that is half done, onto the stream. Only the first result is compared, as above."""
        plain, hidden = self._moe(rows), self.spec.hidden_size
        residual, scale = self._random(rows, hidden), self._random(hidden)
        epilogue = Epilogue(torch.full((64, rows), hidden / 64), self.spec.norm_eps, None, residual, scale)

        def calls(sparse: Callable[..., Any]) -> Calls:
            return plain.calls(lambda *inputs: _first(sparse, *inputs, epilogue))

        size = plain.bytes + self._bytes(2 * rows * hidden)
        return replace(plain, op="fused_moe", label=f"{plain.label}, norm, sum", bytes=size, calls=calls)

    def _packed_moe(self, rows: int) -> KernelCase:
        plain, form = self._moe(rows), ScaledWeight("float8_e4m3fn", (1, WHOLE))
        moe, width = SPARSE, self.spec.hidden_size
        shapes = (2 * moe.intermediate_size, width), (width, moe.intermediate_size)
        x, router = self._random(rows, width), self._random(rows, moe.num_experts)

        def calls(sparse: Callable[..., Any]) -> Calls:
            up, down = (self._piece(form, *shape, moe.num_experts) for shape in shapes)
            return [partial(sparse, x, router, [up], [down], moe.top_k, moe.renormalize, Activation.SILU)]

        facts = ExpertFacts(self.dtype, moe.num_experts, moe.top_k, (form.label,) * 2)
        return replace(plain, op="packed_moe", label=f"{plain.label}, {form.label}", facts=facts, calls=calls)

    def _factors(self, parts: Sequence[int], ins: int) -> SlotFactors:
        """Of adapters of rank RANK in ADAPTERS slots, one after another in a pool, in random order."""
        lengths = [ins] * len(parts) * RANK + [part for part in parts for _ in range(RANK)]
        firsts = np.cumsum([0, *(-(-length // ADDRESS_UNIT) for length in lengths)])
        order = np.random.default_rng(0).permutation(ADAPTERS)[:, None] * firsts[-1] + firsts[:-1]
        chunk = 1 << (max(lengths) - 1).bit_length()
        gains = -np.ones(
            (ADAPTERS, len(parts) * 2 * -(-4 * max(parts) // (self.dtype.itemsize * chunk))), dtype=np.int64
        )
        table = np.concatenate((np.full((ADAPTERS, len(parts)), RANK), order, gains), axis=1).astype(np.int32)
        columns = torch.from_numpy(table).to(torch.get_default_device())
        ranks, a, b, none = columns.split([len(parts), *[RANK * len(parts)] * 2, gains.shape[1]], dim=1)
        shape = len(parts), RANK, 1
        pool = self._random(ADAPTERS * int(firsts[-1]) * ADDRESS_UNIT, scale=ins**-0.5)
        return SlotFactors(
            pool, ranks, a.unflatten(1, shape), b.unflatten(1, shape), none.unflatten(1, (len(parts), 2, -1)), chunk
        )

    def _add_deltas(self, rows: int) -> KernelCase:
        """For query, key and value, slots in turn."""
        site = next(iter(self._sites.values()))
        slots = np.arange(rows, dtype=np.int32) % ADAPTERS
        held = self._factors(site.parts, site.ins)
        x = self._random(rows, site.ins)
        y = self._random(rows, site.outs)
        inputs = y, x, held, site.parts, adapter_rows(slots, x.device)
        factors = RANK * (len(site.parts) * site.ins + site.outs)
        facts = DeltaFacts(self.dtype, site.ins, site.parts, RANK, held.chunk)
        size = self._bytes(min(rows, ADAPTERS) * factors + rows * (site.ins + 2 * site.outs))
        label = f"qkv {rows}x{site.ins}x{site.outs}, rank {RANK}"
        return _through(_onto, case_of("add_deltas", label, facts, size, 2 * rows * factors, [inputs]))

    def _look_up_deltas(self, rows: int) -> KernelCase:
        """The same beside the embedding; of its rows, 1,024."""
        hidden = self.spec.hidden_size
        held, y = self._factors((hidden,), 1024), self._random(rows, hidden)
        ids, adapters = torch.arange(rows) % 1024, adapter_rows(np.arange(rows, dtype=np.int32) % ADAPTERS, y.device)
        facts = DeltaFacts(self.dtype, 1024, (hidden,), RANK, held.chunk)
        size = self._bytes(min(rows, ADAPTERS) * RANK * hidden + rows * (RANK + 2 * hidden))
        label, inputs = f"{rows}x{hidden}, rank {RANK}", (y, ids, held, None, adapters)
        return _through(_onto, case_of("look_up_deltas", label, facts, size, 2 * rows * RANK * hidden, [inputs]))

    def _merge_parts(self, rows: int) -> KernelCase:
        """Of two ranks that share the keys, a rank's own and the other's."""
        shape = rows, self.spec.num_heads, self.spec.head_dim
        pieces = [(self._random(1, *shape), self._random(1, *shape[:2]).float()) for _ in range(2)]
        size, facts = self._bytes(rows * shape[1] * shape[2]), HeadFacts(*self._heads, ranks=2)
        return case_of("merge_parts", f"2x{rows} tokens", facts, 3 * size, 2 * size, [pieces])

    def _add_sparse(self, rows: int) -> KernelCase:
        """One weight in a hundred of down, beside its product."""
        outs, ins = self.spec.hidden_size, self.spec.intermediate_size
        count = max(1, ins // 100)
        ends, y, x = (
            torch.arange(outs + 1, dtype=torch.int32) * count,
            self._random(rows, outs),
            self._random(rows, ins),
        )
        columns = torch.randint(ins, (outs * count,), generator=self._generator, dtype=torch.int32)
        inputs = y, x, ends, columns, self._random(outs * count).float()
        size = 8 * outs * count + self._bytes(rows * (ins + 2 * outs))
        label, flops = f"down {rows}x{ins}x{outs}, 1 in 100", 2 * rows * outs * count
        return _through(_onto, case_of("add_sparse", label, Facts(self.dtype), size, flops, [inputs]))

    def _whole_attention(self, rows: int) -> KernelCase:
        """Sequences of two lengths in turn, as an encoder's texts are."""
        spec, starts = self.spec, [0]
        while starts[-1] < rows:
            starts.append(min(rows, starts[-1] + (TEXT if len(starts) % 2 else TEXT // 2)))
        lengths = [end - begin for begin, end in pairwise(starts)]
        edges, none = torch.tensor(starts, dtype=torch.int32), torch.zeros(0, dtype=torch.int32)
        inputs = AttentionInputs(none, edges, edges.diff(), none, self.block_size, max(lengths), max(lengths))
        heads, facts = (spec.num_heads, spec.head_dim), HeadFacts(self.dtype, spec.head_dim, *[spec.num_heads] * 2)
        qkv = [self._random(rows, *heads) for _ in range(3)]
        flops = 4 * sum(length**2 for length in lengths) * spec.num_heads * spec.head_dim
        label, call = f"{len(lengths)} texts, {rows} tokens", (*qkv, inputs, spec.attention_scale)
        return case_of("whole_attention", label, facts, self._bytes(4 * qkv[0].numel()), flops, [call])

    def _step_weights(self, spec: DecoderSpec, tokens: int, ids: int, *, fp8: bool = False) -> StepWeights:
        """One layer, for so many positions and ``ids``."""
        assert spec.rope is not None
        sites, half = layer_matrices(spec, 0).values(), spec.head_dim // 2
        ones, made = (
            torch.ones(spec.hidden_size, dtype=self.dtype),
            (self._weight(each.outs, each.ins) for each in sites),
        )
        layer = (*((each * 32).to(torch.float8_e4m3fn) if fp8 else each for each in made), ones, ones.clone())
        angles = torch.arange(tokens).unsqueeze(1) * spec.rope.theta ** (-torch.arange(half) / half)
        turns, table = torch.cat((angles.cos(), angles.sin()), 1), self._random(ids, spec.hidden_size)
        scales = (tuple(torch.full((each.outs,), 1 / 32) for each in sites),) if fp8 else ()
        more = spec.qkv_heads, spec.norm_eps, spec.attention_scale, scales
        return StepWeights((layer,), table, layer[-1], table, turns, *more)

    def _decode_step(self, rows: int) -> Iterator[KernelCase]:
        if self.context <= longest_context(rows):
            yield from (self._one_step(rows, fp8=each) for each in (False, True))

    def _one_step(self, rows: int, *, fp8: bool = False) -> KernelCase:
        """One layer and the norm after it, with one sequence per row."""
        rope = RopeSpec(theta=500000.0, rotary_dim=self.spec.head_dim)
        spec = replace(self.spec, layers=(LayerSpec(),), gated_mlp=True, rope=rope)
        attention, last = self._decoding(rows)
        inputs = ForwardInputs(torch.arange(rows) % 64, last, (attention,))
        cache = self._random(attention.block_table.numel(), 1, 2, spec.num_kv_heads, self.block_size, spec.head_dim)
        elements = sum(site.outs * site.ins for site in self._sites.values())
        size = elements if fp8 else self._bytes(elements)
        made = [self._step_weights(spec, self.context, 64, fp8=fp8) for _ in range(min(2, self._copies(size)))]

        def calls(make: Callable[..., Any]) -> Calls:
            return [partial(make(each), inputs, (cache,)) for each in made]

        keys = rows * self.context * spec.head_dim
        facts = StepFacts(self.dtype, spec, eight=EightBits("fp8") if fp8 else None)
        flops, moved = 2 * rows * elements + 4 * keys * spec.num_heads, size + self._bytes(2 * keys * spec.num_kv_heads)
        label = f"1 layer{', FP8' * fp8}, {rows} rows, context {self.context}"
        return KernelCase("decode_step", label, facts, moved, flops, calls)

    def _draft_tokens(self, rows: int) -> KernelCase:
        """Four tokens behind sequences of which all but the last token is there, by a decoder of one layer and a few
        tokens."""
        width, dim, heads, vocab, drafts = 128, 64, 2, 512, 4
        sizes: dict[str, Any] = {"head_dim": dim, "num_heads": heads, "num_kv_heads": heads, "vocab_size": vocab}
        sizes |= {"hidden_size": width, "intermediate_size": 384, "attention_scale": dim**-0.5, "gated_mlp": True}
        spec = replace(self.spec, layers=(LayerSpec(),), rope=RopeSpec(theta=10000.0, rotary_dim=dim), **sizes)
        most = self.context + drafts
        weights, blocks = self._step_weights(spec, most, vocab), -(-most // self.block_size)
        ids = torch.randint(vocab, (rows, most), dtype=torch.int32, generator=self._generator)
        lie = self._table(rows, blocks)
        cache, row = self._random(rows * blocks, 1, 2, heads, self.block_size, dim), torch.arange(rows).int()
        length = torch.full_like(row, self.context)

        def calls(make: Callable[..., Any]) -> Calls:
            return [partial(_drafted, make(weights), ids, lie, row, length, drafts, cache)]

        products = sum(site.outs * site.ins for site in layer_matrices(spec, 0).values()) + vocab * width
        flops, size = 2 * rows * drafts * products, drafts * self._bytes(products)
        label = f"1 layer of {width}, {rows} rows, {drafts} drafts, context {self.context}"
        return KernelCase("draft_tokens", label, StepFacts(self.dtype, spec), size, flops, calls)

    def _embedding(self, rows: int) -> KernelCase:
        vocab, width = self.spec.vocab_size, self.spec.hidden_size
        table, size = self._weight(vocab, width), self._bytes(2 * rows * width)
        inputs = [(torch.randint(vocab, (rows,), generator=self._generator), table, None) for _ in range(16)]
        return case_of("embedding", f"{rows}x{width}", Facts(self.dtype), size, 0, inputs)

    def _write_rows(self, rows: int) -> KernelCase:
        """The ids of new sequences of the same length, in any order of rows."""
        ids = torch.randint(self.spec.vocab_size, (rows * self.context,), dtype=torch.int32, generator=self._generator)
        row = torch.randperm(rows, generator=self._generator)
        begin = (torch.arange(rows + 1) * self.context).int()
        call = torch.zeros(rows, self.context, dtype=torch.int32), ids, row, begin, self.context
        label, size = f"{rows} rows of {self.context}", rows * (2 * 4 * self.context + 8 + 4)
        return _through(partial(_left, 0), case_of("write_rows", label, Facts(torch.int32), size, 0, [call]))

    def _gather_inputs(self, rows: int) -> KernelCase:
        """A step of ``rows`` decoding sequences: their last token, its position, their block tables."""
        blocks = -(-self.context // self.block_size)
        ids = torch.randint(self.spec.vocab_size, (rows, self.context), dtype=torch.int32, generator=self._generator)
        every, table = torch.arange(rows).int(), self._table(rows, blocks)
        context = torch.full((rows,), self.context, dtype=torch.int32)
        call = ids, table, every, every.clone(), context - 1, context, self.block_size, blocks
        label, size = f"{rows} rows, context {self.context}", rows * (4 * 5 + 8 * 3 + 2 * 4 * blocks)
        return case_of("gather_inputs", label, Facts(torch.int32), size, 0, [call])

    def _store_tokens(self, rows: int) -> KernelCase:
        ids = torch.zeros(rows, self.context, dtype=torch.int32)
        every, tokens = torch.arange(rows).int(), torch.arange(rows)
        call = ids, every, torch.full_like(every, self.context - 1), tokens, tokens.float()
        return case_of("store_tokens", f"{rows} rows", Facts(torch.int32), rows * (4 + 4 + 8 + 4 + 4 + 8), 0, [call])

    def _fetch_step(self, rows: int) -> KernelCase:
        """The position of each row, and no edits of the block table."""
        ring = torch.randint(self.context, (1, 7, rows), dtype=torch.int32, generator=self._generator)
        ring[:, 3:] = 0
        turn, step, table = (torch.zeros(shape, dtype=torch.int32) for shape in ((1,), (3, rows), (rows, 8)))
        call = ring, turn, step, table
        return _through(
            partial(_left, 2), case_of("fetch_step", f"{rows} rows", Facts(torch.int32), 2 * 3 * 4 * rows, 0, [call])
        )

    def _normed(self, op: str, rows: int) -> KernelCase:
        width = self.spec.hidden_size
        weight, shift = torch.ones(width, dtype=self.dtype), (torch.zeros(width, dtype=self.dtype),)
        more = shift if op == "layer_norm" else ()
        inputs = [(self._random(rows, width), weight, *more, 1e-5, self._random(rows, width)) for _ in range(4)]
        facts, count = NormFacts(self.dtype, self.dtype), rows * width
        return case_of(op, f"{rows}x{width}, residual", facts, self._bytes(4 * count), 6 * count, inputs)

    _rms_norm = partialmethod(_normed, "rms_norm")
    _layer_norm = partialmethod(_normed, "layer_norm")

    def _activated(self, op: str, rows: int) -> KernelCase:
        width, halves = self.spec.intermediate_size, 1 + (op == "gated_activation")
        inputs = [(self._random(rows, halves * width), Activation.SILU) for _ in range(4)]
        size = self._bytes(rows * width * (halves + 1))
        return case_of(op, f"{rows}x{width}, silu", Facts(self.dtype), size, 6 * rows * width, inputs)

    _activation = partialmethod(_activated, "activation")
    _gated_activation = partialmethod(_activated, "gated_activation")

    def _rotary_write(self, rows: int) -> KernelCase:
        spec = self.spec
        dim = spec.head_dim
        cos_sin, (k_cache, v_cache) = torch.rand(4096, dim) * 0.7, self._cache(rows)
        packed = [self._random(rows, sum(spec.qkv_heads), dim) for _ in range(4)]
        positions, slots = torch.arange(rows), torch.arange(rows)

        def calls(write: Callable[..., Any]) -> Calls:
            inputs = [x.clone().split(spec.qkv_heads, dim=1) for x in packed]  # written in place
            return [partial(write, *qkv, positions, cos_sin, k_cache, v_cache, slots) for qkv in inputs]

        rotated = rows * sum(spec.qkv_heads[:2]) * dim
        size = self._bytes(2 * rotated + 3 * rows * spec.num_kv_heads * dim) + rows * dim * 4
        return KernelCase("rotary_write", f"{rows} tokens", HeadFacts(*self._heads), size, 3 * rotated, calls)

    def _over_logits(self, op: str, rows: int) -> KernelCase:
        """Operations over rows of raw logits, each read once: the largest, a random pick with top-k and top-p, logprobs
        of given tokens."""
        vocab, every = self.spec.vocab_size, torch.arange(rows)
        filters = (torch.full((rows,), 50), torch.full((rows,), 0.9), torch.zeros(rows))
        inputs: list[tuple[Any, ...]] = []
        for _ in range(4):
            x = torch.randn(rows, vocab, generator=self._generator) * 4
            picked = x.amax(-1), torch.full((rows,), 0.8), filters, every, every
            inputs.append((x, *{"greedy_tokens": (), "score_tokens": (every % vocab, min(5, vocab))}.get(op, picked)))
        return case_of(op, f"{rows}x{vocab}", Facts(torch.float32), 4 * rows * vocab, rows * vocab, inputs)

    _greedy_tokens = partialmethod(_over_logits, "greedy_tokens")
    _pick_tokens = partialmethod(_over_logits, "pick_tokens")
    _score_tokens = partialmethod(_over_logits, "score_tokens")

    def _gumbel_argmax(self, rows: int) -> KernelCase:
        vocab = self.spec.vocab_size
        size = 4 * rows * vocab
        scores = torch.empty(min(self._copies(size), 8), rows, vocab).normal_(0.0, 3.0, generator=self._generator)
        inputs = [(each, None, torch.arange(rows) * 977, torch.arange(rows)) for each in scores]
        return case_of("gumbel_argmax", f"{rows}x{vocab}", Facts(torch.float32), size, rows * vocab, inputs)


def _through(run: Callable[..., Any], case: KernelCase) -> KernelCase:
    """``run``: calls a kernel with its inputs and returns what is compared, which is not the kernel's result."""
    return replace(case, calls=lambda kernel: case.calls(partial(run, kernel)))


def _onto(add: Callable[..., None], y: Tensor, *inputs: Any) -> Tensor:
    """What it makes of a copy."""
    result = y.clone()
    add(result, *inputs)
    return result


def _left(place: int, kernel: Callable[..., None], *inputs: Any) -> Any:
    """The input that it writes to."""
    kernel(*inputs)
    return inputs[place]


def _drafted(
    draft: Callable[..., None], ids: Tensor, table: Tensor, row: Tensor, length: Tensor, drafts: int, cache: Tensor
) -> Tensor:
    """The first one: those behind it hang on the last bits of its logits."""
    greedy, seed = torch.zeros(len(row)), torch.zeros(len(row), dtype=torch.int64)
    draft(ids, table, DraftRows(row, length - 1, length, torch.full_like(row, drafts), length - 1, greedy, seed), cache)
    return ids[:, int(length[0])]


def _first(product: Callable[..., Any], *inputs: Any) -> Any:
    """Other results may be in pieces, which candidates cut differently."""
    found = product(*inputs)
    return found[0] if isinstance(found, tuple) else found
