"""The plain layers of a decoder: norms, embeddings, the dense feed-forward, and attention over a paged KV cache
(projections, head norms, rotation, the cache write and the attention itself).

What lives here: layers without a file of their own, and what tokens that are read see of a step. What may not: experts,
block tables themselves (the cache), rotary tables (rotary.py), kernels, families.

Layers choose their kernels when they are made. They compute after ``finish_loading`` has been called on each that has
it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from headrace.kernels.attention.reference import HeadNorms
from headrace.kernels.candidate import Facts, HeadFacts, NormFacts, RopeFacts
from headrace.kernels.inputs import AdapterRows, AttentionInputs, LayerStep, PassedKeys, Quantized, Queries, Wanted
from headrace.kernels.operations import (
    EMBEDDING,
    LAYER_NORM,
    MERGE_PARTS,
    PAGED_ATTENTION,
    RMS_NORM,
    ROPE_ATTENTION,
    ROTARY_WRITE,
    WHOLE_ATTENTION,
)
from headrace.layers.context import LayerContext, empty_parameter
from headrace.layers.delta import Delta
from headrace.layers.linear import Linear, Norm, Stream
from headrace.layers.packed import Piece, create_pieces, early_rows
from headrace.parallel.group import Group
from headrace.sites import Role, Split, Weight
from headrace.spec import Activation, DecoderSpec, KVFormat, LayerSpec


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, after adding the residual. ``offset`` is added to the weight once
    it is loaded.

    With an offset the sum is kept in float32: 1 + w in bfloat16 would round most of w away.
    """

    def __init__(self, size: int, eps: float, context: LayerContext, *, offset: float, early: int = 0) -> None:
        """``early``: as NormFacts has it."""
        super().__init__()
        self.weight = empty_parameter(context, size)
        self.eps = eps
        self._offset = offset
        self.scale: Tensor = self.weight.data  # [size]
        self._norm = context.kernels.choose(
            RMS_NORM, NormFacts(context.dtype, torch.float32 if offset else context.dtype, early)
        )

    def finish_loading(self) -> None:
        if self._offset:
            self.weight = nn.Parameter(self.weight.float() + self._offset, requires_grad=False)
        self.scale = self.weight.data

    def forward(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:  # [..., size] each
        """Returns (norm(x + residual), x + residual)."""
        return self._norm(x, self.scale, self.eps, residual)


class LayerNorm(nn.Module):
    """Layer norm with weight and bias over the last dimension, after adding the residual."""

    def __init__(self, size: int, eps: float, context: LayerContext) -> None:
        super().__init__()
        self.weight = empty_parameter(context, size)
        self.bias = empty_parameter(context, size)
        self.eps = eps
        self.scale: Tensor = self.weight.data  # [size]
        self._shift: Tensor = self.bias.data  # [size]
        self._norm = context.kernels.choose(LAYER_NORM, NormFacts(context.dtype, context.dtype))

    def finish_loading(self) -> None:
        self.scale, self._shift = self.weight.data, self.bias.data

    def forward(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:  # [..., size] each
        """Returns (norm(x + residual), x + residual)."""
        return self._norm(x, self.scale, self._shift, self.eps, residual)


class Embedding(nn.Module):
    """A row of ``weight`` (or of ``pieces``) for each id, times ``scale`` (rounded to the weights' precision, as the
    models were trained). ``delta``: what adapters add. Of ranks each has some rows, and all have all that are found."""

    weight: nn.Parameter | None

    def __init__(self, site: Weight, context: LayerContext, *, scale: float | None = None) -> None:
        super().__init__()
        self.weight = None if site.formats else empty_parameter(context, site.outs, site.ins)
        self.pieces = create_pieces(site, context)
        self.delta: Delta | None = None
        self._dtype = context.dtype
        self._group = context.group if site.split is Split.VOCABULARY else None
        self._rows = site.outs
        self._scale = None if scale is None else float(torch.tensor(scale, dtype=context.dtype))
        self._lookup = context.kernels.choose(EMBEDDING, Facts(context.dtype))

    def finish_loading(self) -> None:
        for piece in self.pieces:
            assert isinstance(piece, Piece)
            piece.finish_loading()

    @property
    def weight_bytes(self) -> int:
        """Held beyond parameters, once loading has finished."""
        return sum(piece.num_bytes for piece in self.pieces if isinstance(piece, Piece))

    def forward(self, ids: Tensor, adapters: AdapterRows | None = None) -> Tensor:  # [tokens], int64 → [tokens, size]
        if self._group is None:
            return self._adapted(ids, adapters)
        own = ids - self._group.rank * self._rows
        others = (own < 0) | (own >= self._rows)
        found = self._adapted(own.masked_fill_(others, 0), adapters)
        return self._group.all_reduce(found.masked_fill_(others.unsqueeze(1), 0))

    def _adapted(self, ids: Tensor, adapters: AdapterRows | None) -> Tensor:
        found = self._looked_up(ids)
        if adapters is not None and self.delta is not None and self.delta.touched:
            self.delta.look_up(found, ids, adapters, self._scale)
        return found

    def _looked_up(self, ids: Tensor) -> Tensor:
        if self.weight is not None:
            return self._lookup(ids, self.weight, self._scale)
        (piece,) = self.pieces
        assert isinstance(piece, Piece)
        rows = piece.dense(ids, self._dtype)
        return rows if self._scale is None else rows * self._scale


class FeedForward(nn.Module):
    """down(act(up(x))), or where up is gated down(act(gate(x)) · up(x)), gate and up merged into one matrix, gate
    first."""

    def __init__(self, sites: Mapping[Role, Weight], activation: Activation, context: LayerContext) -> None:
        super().__init__()
        self.up = Linear(sites[Role.UP], context, activation)
        self.down = Linear(sites[Role.DOWN], context)
        self._activation = activation

    def forward(self, stream: Stream, norm: Norm, following: Norm) -> None:
        """Norm, this, and onto the stream. ``following``: the norm after it."""
        if self.down.takes_activation(stream):
            self.down.activated_onto(stream, self.up.normed(stream, norm, activates=False), self._activation)
        else:
            self.down.onto(stream, self.up.normed(stream, norm), following)


class Attention(nn.Module):
    """One layer's attention: MHA, GQA or MQA, by the numbers of heads. q, k and v come from one merged matrix.

    ``cos_sin`` is the rotary table shared by all layers (None: positions were embedded). ``quantized``: how the cache
    holds what it writes.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        layer: LayerSpec,
        sites: Mapping[Role, Weight],
        cos_sin: Tensor | None,  # [max_model_len, rotary_dim], float32
        context: LayerContext,
    ) -> None:
        super().__init__()
        size = spec.head_dim
        self.qkv = Linear(sites[Role.QKV], context)
        self.output = Linear(sites[Role.OUTPUT], context)
        self.q_norm = self.k_norm = None
        if spec.qk_norm:
            self.q_norm = RMSNorm(size, spec.norm_eps, context, offset=spec.norm_offset)
            self.k_norm = RMSNorm(size, spec.norm_eps, context, offset=spec.norm_offset)
        self._cos_sin = cos_sin
        self._split = spec.qkv_heads
        self._shape = (-1, sum(self._split), size)
        self._width = sites[Role.OUTPUT].ins
        self._scale = spec.attention_scale / layer.attention_divisor
        self._keys = context.keys
        shares = 1 if context.keys is None else context.keys.size
        self._window = None if layer.window is None else layer.window // shares
        self._soft_cap = spec.attention_soft_cap
        heads = (context.dtype, size, spec.num_heads, spec.num_kv_heads)
        self.quantized = None if context.kv is None else _quantized(context.kv, spec.num_kv_heads, context.device)
        self._whole = None  # of an encoder: nothing is rotated, nothing cached
        self._rope_attend = None  # both at once, and the rotation; for steps in which every sequence has one query
        if not spec.causal:
            self._whole = context.kernels.choose(WHOLE_ATTENTION, HeadFacts(*heads))
            return
        self._rotary_write = context.kernels.choose(ROTARY_WRITE, HeadFacts(*heads, kv=context.kv))
        attends = HeadFacts(*heads, kv=context.kv, ranks=shares)
        self._attend = context.kernels.choose(PAGED_ATTENTION, attends)
        if context.keys is not None:
            merge = context.kernels.choose(MERGE_PARTS, attends)
            self._attend = partial(attend_between, context.keys, self._attend, merge)
        if cos_sin is not None and shares == 1:
            normed = (torch.float32 if spec.norm_offset else context.dtype) if spec.qk_norm else None
            early, windows = early_rows(sites[Role.QKV].formats), (layer.window, spec.attention_soft_cap)
            facts = RopeFacts(*heads, cos_sin.shape[1], normed, *windows, early, kv=context.kv)
            self._rope_attend = context.kernels.offer(ROPE_ATTENTION, facts)

    def forward(self, stream: Stream, qkv: Tensor, step: LayerStep) -> Tensor:
        """From q, k and v [tokens, sum of their widths] to what ``output`` multiplies onto the stream, which holds the
        wanted tokens alone from here on."""
        attended = self._attended(qkv, step)
        if step.wanted is not None:
            stream.narrow(step.wanted.tokens)
            if (order := step.wanted.order) is not None and self._keys is not None:
                stream.sum = in_order(self._keys, stream.sum, order)  # as what was attended is already
            stream.adapters = None if stream.adapters is None else stream.adapters.wanted
        return attended

    @property
    def _norms(self) -> HeadNorms | None:
        if self.q_norm is None or self.k_norm is None:
            return None
        return HeadNorms(self.q_norm.scale, self.k_norm.scale, self.q_norm.eps)

    def least_shared(self, rows: int) -> int | None:
        """From how many shared tokens on decode steps of so many rows look for keys that sequences share; None: they
        never do."""
        asked = None if self._whole is not None else getattr(self._attend, "least_shared", None)
        least: int | None = None if asked is None or self._window is not None else asked(rows)
        return least

    def _attended(self, qkv: Tensor, step: LayerStep) -> Tensor:  # [tokens, heads · head_dim], or of wanted ones alone
        whole = qkv.view(self._shape)
        positions, inputs, k_cache, v_cache, wanted = step
        if self._whole is not None:
            q, k, v = whole.split_with_sizes(self._split, dim=1)
            return _picked(self._whole(q, k, v, inputs, self._scale).view(-1, self._width), wanted)
        if self._rope_attend is not None and self._cos_sin is not None and inputs.tree is None:
            attended: Tensor | None = self._rope_attend(
                whole, positions, self._cos_sin, k_cache, v_cache, inputs, self._scale, self._norms, self.quantized
            )
            if attended is not None:
                return _picked(attended.view(-1, self._width), wanted)
        q = self.write(whole, step)
        if wanted is not None and wanted.attention is not None:
            q, inputs = q[wanted.tokens], wanted.attention
            if wanted.order is not None and self._keys is not None:
                q = in_order(self._keys, q, wanted.order)
            wanted = None
        how = (k_cache, v_cache, inputs, self._scale, self._window, self._soft_cap, self.quantized)
        return _picked(self._attend(q, *how).view(-1, self._width), wanted)

    def write(self, qkv: Tensor, step: LayerStep) -> Tensor:  # → q as it attends, [tokens, heads, head_dim]
        """Keys and values into the cache."""
        positions, inputs, k_cache, v_cache, _ = step
        q, k, v = qkv.view(self._shape).split_with_sizes(self._split, dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm.forward(q)[0], self.k_norm.forward(k)[0]
        rotated: Tensor = self._rotary_write(
            q, k, v, positions, self._cos_sin, k_cache, v_cache, inputs.slots, self.quantized
        )
        return rotated


def _quantized(form: KVFormat, kv_heads: int, device: torch.device) -> Quantized:
    """With scales of 1 where all tokens share them, until a checkpoint's are loaded."""
    return Quantized(form) if form.scales else Quantized(form, *torch.ones(2, kv_heads, device=device))


def attention_of(inputs: AttentionInputs, queries: Queries) -> AttentionInputs:
    """What the wanted tokens attend to, for a step of ``inputs``, once all keys and values have been written. It reads
    nothing back."""
    table = inputs.block_table.index_select(0, queries.chunk)
    starts, each = queries.query_start, replace(inputs, max_query_len=1, leading=0, spread=False, passed=None)
    return replace(each, block_table=table, query_start=starts, context_len=queries.context)


def attend_between(
    group: Group, attend: Callable[..., Tensor], merge: Callable[..., Tensor], q: Tensor, *how: Any
) -> Tensor:  # [tokens, heads, head_dim]
    """Of ranks that share the keys (DistAttention: Lin et al. 2024), each attends to its own with all queries (pass-Q: Yang
    et al. 2024), and what they find is merged. ``how``: whatever ``attend`` takes."""
    inputs = how[2]
    if (passed := inputs.passed) is not None:
        return _attend_passed(group, attend, merge, q, how, passed)
    q = group.all_gather_stacked(q).flatten(0, 1) if inputs.spread else q
    found = _found(attend, q, how)
    with group.coalesced():
        if inputs.spread:
            parts, sums = (group.all_to_all(each.unflatten(0, (group.size, -1))) for each in found)
        else:
            parts, sums = map(group.all_gather_stacked, found)
    return merge((parts, sums))


def _found(attend: Callable[..., Tensor], q: Tensor, how: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    """Attention, and the log-sum-exp [tokens, heads]."""
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    return attend(q, *how, lse), lse


def _attend_passed(
    group: Group, attend: Callable[..., Tensor], merge: Callable[..., Tensor], q: Tensor, how: tuple[Any, ...], passed: PassedKeys
) -> Tensor:  # fmt: skip
    """The same where keys and values of all ranks come to the queries (pass-KV), which attend to their own rank's while the
    others' are on their way."""
    k_cache, v_cache, _, *rest = how
    count = len(passed.blocks)
    both = k_cache.new_empty((2, count, *k_cache.shape[1:]))
    for cache, given in zip((k_cache, v_cache), both, strict=True):
        torch.index_select(cache, 0, passed.blocks, out=given)
    coming = group.all_gather_async(both)
    again = q.repeat(group.size - 1, 1, 1)  # here, for attention fills the device: what is sent meanwhile begins first
    mine = _found(attend, q, (k_cache, v_cache, passed.own, *rest))
    every = coming().flatten(0, 2)  # the keys of a rank, its values, the keys of the next …
    theirs = _found(attend, again, (every, every[count:], passed.others, *rest))
    parts, sums = (each.unflatten(0, (group.size - 1, -1)) for each in theirs)
    return merge(tuple(each.unsqueeze(0) for each in mine), (parts, sums))


def in_order(group: Group, x: Tensor, order: Tensor) -> Tensor:
    """Wanted rows, on every rank, from those that each has."""
    return group.all_gather_stacked(x).flatten(0, 1)[order]


def _picked(attended: Tensor, wanted: Wanted | None) -> Tensor:
    return attended if wanted is None else attended[wanted.tokens]
