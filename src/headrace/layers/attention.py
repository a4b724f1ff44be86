"""Attention over a paged KV cache: projections, head norms, rotation, the cache write and the attention itself.

What lives here: the layer, and what tokens that are read see of a step. What may not: block tables themselves (the
cache), rotary tables (rotary.py), kernels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from headrace.kernels.candidate import HeadFacts, RopeFacts
from headrace.kernels.inputs import Alone, AttentionInputs, LayerStep, Quantized, Wanted
from headrace.kernels.operations import PAGED_ATTENTION, ROPE_ATTENTION, ROTARY_WRITE, WHOLE_ATTENTION
from headrace.layers.basic import RMSNorm
from headrace.layers.context import LayerContext
from headrace.layers.linear import Linear, Norm, Stream
from headrace.sites import Role, Weight
from headrace.spec import DecoderSpec, KVFormat, LayerSpec


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
        self._window = layer.window
        self._soft_cap = spec.attention_soft_cap
        heads = (context.dtype, size, spec.num_heads, spec.num_kv_heads)
        self.quantized = None if context.kv is None else _quantized(context.kv, spec.num_kv_heads, context.device)
        self._whole = None  # of an encoder: nothing is rotated, nothing cached
        self._rope_attend = None  # both at once, and the rotation; for steps in which every sequence has one query
        if not spec.causal:
            self._whole = context.kernels.choose(WHOLE_ATTENTION, HeadFacts(*heads))
            return
        self._rotary_write = context.kernels.choose(ROTARY_WRITE, HeadFacts(*heads, kv=context.kv))
        self._attend = context.kernels.choose(PAGED_ATTENTION, HeadFacts(*heads, kv=context.kv))
        if cos_sin is not None:
            facts = RopeFacts(
                *heads, cos_sin.shape[1], spec.qk_norm, layer.window, spec.attention_soft_cap, kv=context.kv
            )
            self._rope_attend = context.kernels.offer(ROPE_ATTENTION, facts)

    def forward(self, stream: Stream, qkv: Tensor, step: LayerStep, following: Norm) -> None:
        """From q, k and v [tokens, sum of their widths] onto the stream, which holds the wanted tokens alone from here
        on. ``following``: the norm behind it."""
        attended = self._attended(qkv, step)
        if step.wanted is not None:
            stream.sum = stream.sum[step.wanted.tokens]
            stream.adapters = None if stream.adapters is None else stream.adapters.wanted
        self.output.onto(stream, attended, following)

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
                whole, positions, self._cos_sin, k_cache, v_cache, inputs, self._scale
            )
            if attended is not None:
                return _picked(attended.view(-1, self._width), wanted)
        q = self.write(whole, step)
        if wanted is not None and wanted.attention is not None:
            q, inputs, wanted = q[wanted.tokens], wanted.attention, None
        out = self._attend(q, k_cache, v_cache, inputs, self._scale, self._window, self._soft_cap, self.quantized)
        return _picked(out.view(-1, self._width), wanted)

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


def attention_alone(inputs: AttentionInputs, alone: Alone) -> AttentionInputs:
    """What the wanted tokens attend to, for a step of ``inputs``, once all keys and values have been written. It reads
    nothing back."""
    table = inputs.block_table.index_select(0, alone.chunk)
    return replace(
        inputs, block_table=table, query_start=alone.query_start, context_len=alone.context, max_query_len=1, leading=0
    )


def _picked(attended: Tensor, wanted: Wanted | None) -> Tensor:
    return attended if wanted is None else attended[wanted.tokens]
