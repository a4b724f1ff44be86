"""Attention over a paged KV cache: projections, head norms, rotation, the cache write and the attention itself.

What lives here: the layer, and what tokens that are read see of a step. What may not: block tables themselves (the cache), rotary tables
(rotary.py), kernels.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from headrace.kernels.around import Around
from headrace.layers.basic import RMSNorm
from headrace.layers.context import LayerContext
from headrace.layers.inputs import Alone, AttentionInputs, Wanted
from headrace.layers.linear import Linear
from headrace.layers.stream import Stream, added
from headrace.spec import DecoderSpec, LayerSpec


class Attention(nn.Module):
    """One layer's attention: MHA, GQA or MQA, by the numbers of heads. q, k and v come from one merged matrix.

    ``cos_sin`` is the rotary table shared by all layers (None: positions were embedded). ``around``: its products are computed with what
    stands around them, too, where there is a kernel for it.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        layer: LayerSpec,
        cos_sin: Tensor | None,  # [max_model_len, rotary_dim], float32
        context: LayerContext,
        *,
        around: bool,
    ) -> None:
        super().__init__()
        heads, kv_heads, size = spec.num_heads, spec.num_kv_heads, spec.head_dim
        self.qkv = Linear(spec.hidden_size, (heads + 2 * kv_heads) * size, context, bias=spec.qkv_bias, around=around)
        self.output = Linear(heads * size, spec.hidden_size, context, bias=spec.output_bias, around=around, adds=around)
        self.q_norm = self.k_norm = None
        if spec.qk_norm:
            self.q_norm = RMSNorm(size, spec.norm_eps, context, offset=spec.norm_offset)
            self.k_norm = RMSNorm(size, spec.norm_eps, context, offset=spec.norm_offset)
        self._cos_sin = cos_sin
        self._shape = (-1, heads + 2 * kv_heads, size)
        self._split = (heads, kv_heads, kv_heads)
        self._width = heads * size
        self._scale = spec.attention_scale / layer.attention_divisor
        self._window = layer.window
        self._soft_cap = spec.attention_soft_cap
        facts: dict[str, Any] = {"dtype": context.dtype, "head_dim": size, "num_heads": heads, "num_kv_heads": kv_heads}
        self._rotary_write = context.kernels.choose("rotary_write", **facts)
        self._attend = context.kernels.choose("paged_attention", **facts)
        self._rope_attend = None  # both at once, and the rotation; for steps in which every sequence has one query
        if cos_sin is not None:
            facts |= {"rotary_dim": cos_sin.shape[1], "normed": spec.qk_norm, "window": layer.window, "soft_cap": spec.attention_soft_cap}
            self._rope_attend = context.kernels.offer("rope_attention", **facts)

    def forward(
        self,
        x: Tensor,  # [tokens, hidden]
        positions: Tensor,  # [tokens], int64
        inputs: AttentionInputs,
        k_cache: Tensor,  # [blocks, kv_heads, block_size, head_dim]
        v_cache: Tensor,  # [blocks, kv_heads, block_size, head_dim]
        wanted: Wanted | None = None,  # n tokens whose results are read; None: all
    ) -> Tensor:  # [tokens, hidden], or [n, hidden]
        return self.output.forward(self._attended(self.qkv.forward(x), positions, inputs, k_cache, v_cache, wanted))

    def forward_added(
        self,
        x: Tensor,  # [tokens, hidden]
        residual: Tensor,  # [tokens, hidden], which may be overwritten
        positions: Tensor,
        inputs: AttentionInputs,
        k_cache: Tensor,
        v_cache: Tensor,
        wanted: Wanted | None,
    ) -> Tensor:  # [tokens, hidden], or [n, hidden]
        """The residual with this layer's result added; the rest as ``forward``."""
        assert self.output.added is not None
        attended = self._attended(self.qkv.forward(x), positions, inputs, k_cache, v_cache, wanted)
        return self.output.added(attended, residual if wanted is None else residual[wanted.tokens])

    @property
    def fuses(self) -> bool:
        """Whether ``forward_fused`` can be called."""
        return self.qkv.fused is not None and self.output.fused is not None

    def forward_fused(
        self, stream: Stream, scale: Tensor, positions: Tensor, inputs: AttentionInputs, k_cache: Tensor, v_cache: Tensor
    ) -> Stream:
        """The stream with this layer's result added, ready for the norm whose weight is ``scale``; the rest as ``forward``."""
        assert self.qkv.fused is not None and self.output.fused is not None
        if stream.squares is None:  # the first layer: a norm came before it, and one kernel more is not worth building
            qkv = self.qkv.forward(stream.x)
        else:
            qkv, _, _ = self.qkv.fused(stream.x, Around(stream.squares, stream.eps))
        return added(self.output.fused, self._attended(qkv, positions, inputs, k_cache, v_cache), stream, scale)

    def least_shared(self, rows: int) -> int | None:
        """From how many shared tokens on decode steps of so many rows look for keys that sequences share; None: they never do."""
        asked = getattr(self._attend, "least_shared", None)
        least: int | None = None if asked is None or self._window is not None else asked(rows)
        return least

    def _attended(
        self, qkv: Tensor, positions: Tensor, inputs: AttentionInputs, k_cache: Tensor, v_cache: Tensor, wanted: Wanted | None = None
    ) -> Tensor:  # [tokens, heads · head_dim], or [n, heads · head_dim]
        whole = qkv.view(self._shape)
        if self._rope_attend is not None:
            attended: Tensor | None = self._rope_attend(whole, positions, self._cos_sin, k_cache, v_cache, inputs, self._scale)
            if attended is not None:
                return _picked(attended.view(-1, self._width), wanted)
        q, k, v = whole.split_with_sizes(self._split, dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm.forward(q)[0], self.k_norm.forward(k)[0]
        q = self._rotary_write(q, k, v, positions, self._cos_sin, k_cache, v_cache, inputs.slots)
        if wanted is not None and wanted.attention is not None:
            q, inputs, wanted = q[wanted.tokens], wanted.attention, None
        out: Tensor = self._attend(q, k_cache, v_cache, inputs, self._scale, self._window, self._soft_cap)
        return _picked(out.view(-1, self._width), wanted)


def attention_alone(inputs: AttentionInputs, alone: Alone) -> AttentionInputs:
    """What the wanted tokens attend to, for a step of ``inputs``, once all keys and values have been written. It reads nothing back."""
    table = inputs.block_table.index_select(0, alone.chunk)
    return replace(inputs, block_table=table, query_start=alone.query_start, context_len=alone.context, max_query_len=1, leading=0)


def _picked(attended: Tensor, wanted: Wanted | None) -> Tensor:
    return attended if wanted is None else attended[wanted.tokens]
