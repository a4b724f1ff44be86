"""The decoder: one block, shaped by a DecoderSpec, for every family.

What lives here: how layers are put together and in which order they compute. What may not: names of families or of checkpoint
tensors (families.py, weight_rules.py), loading, batching, sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from enum import Enum

import torch
from torch import Tensor, nn

from headrace.errors import ConfigError, ModelError
from headrace.kernels import Kernels
from headrace.kernels.around import LEAST_ADDED, MOST_ROWS
from headrace.kernels.whole_step import StepWeights, WholeStep
from headrace.layers.attention import Attention, attention_alone
from headrace.layers.basic import Embedding, FeedForward, LayerNorm, RMSNorm
from headrace.layers.context import LayerContext
from headrace.layers.inputs import AttentionInputs, ForwardInputs, Wanted
from headrace.layers.linear import Linear
from headrace.layers.moe import SparseFeedForward
from headrace.layers.rotary import rotary_table
from headrace.layers.stream import Stream
from headrace.quant.unquantized import Unquantized
from headrace.spec import DecoderSpec, LayerSpec, NormKind, attention_groups

Halves = Sequence[Sequence[Tensor]]  # of each KV group, keys and values of its layers in turn


class Way(Enum):
    """How blocks are computed."""

    FUSED = "norms, sums and activation are parts of the products"
    ADDED = "sums are parts of the products"
    PLAIN = "sums are parts of the norms"


class Block(nn.Module):
    """norm, attention, norm, feed-forward, each sum with the residual fused into the norm that follows it.

    With sandwich norms each of the two results passes a norm of its own before it is added.
    """

    def __init__(self, spec: DecoderSpec, layer: LayerSpec, cos_sin: Tensor | None, context: LayerContext) -> None:
        super().__init__()
        self.attention_norm = _norm(spec, context)
        self.attention = Attention(spec, layer, cos_sin, context, around=_can_fuse(spec))
        self.post_attention_norm = _norm(spec, context) if spec.sandwich_norm else None
        self.feed_forward_norm = _norm(spec, context)
        self.feed_forward = _feed_forward(spec, layer, context)
        self.post_feed_forward_norm = _norm(spec, context) if spec.sandwich_norm else None

    def forward(
        self,
        x: Tensor,  # [tokens, hidden]: what the block before adds to the residual
        residual: Tensor | None,  # [tokens, hidden]; None in the first block
        positions: Tensor,  # [tokens], int64
        inputs: AttentionInputs,
        k_cache: Tensor,  # [blocks, kv_heads, block_size, head_dim]
        v_cache: Tensor,  # [blocks, kv_heads, block_size, head_dim]
        wanted: Wanted | None = None,  # in the last block, the tokens whose results are read; None: all
    ) -> tuple[Tensor, Tensor]:
        x, residual = self.attention_norm.forward(x, residual)
        x = self.attention.forward(x, positions, inputs, k_cache, v_cache, wanted)
        if wanted is not None:
            residual = residual[wanted.tokens]
        if self.post_attention_norm is not None:
            x, _ = self.post_attention_norm.forward(x)
        x, residual = self.feed_forward_norm.forward(x, residual)
        x = self.feed_forward.forward(x)
        if self.post_feed_forward_norm is not None:
            x, _ = self.post_feed_forward_norm.forward(x)
        return x, residual

    @property
    def adds(self) -> bool:
        """Whether ``forward_added`` can be called, once loading has finished."""
        feed_forward = self.feed_forward
        return isinstance(feed_forward, FeedForward) and None not in (self.attention.output.added, feed_forward.down.added)

    def forward_added(
        self,
        residual: Tensor,  # [tokens, hidden], which may be overwritten
        positions: Tensor,
        inputs: AttentionInputs,
        k_cache: Tensor,
        v_cache: Tensor,
        wanted: Wanted | None,
    ) -> Tensor:
        """As ``forward``, for many rows: sums are parts of the products before them. Returns the residual with both results added."""
        assert isinstance(self.feed_forward, FeedForward)
        x, _ = self.attention_norm.forward(residual)
        residual = self.attention.forward_added(x, residual, positions, inputs, k_cache, v_cache, wanted)
        x, _ = self.feed_forward_norm.forward(residual)
        return self.feed_forward.forward_added(x, residual)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """As ``StepWeights.layers`` has them, before loading has finished; of a block without experts and biases."""
        assert isinstance(self.feed_forward, FeedForward)
        products = (self.attention.qkv, self.attention.output, self.feed_forward.up, self.feed_forward.down)
        weights = (*(product.weight for product in products), self.attention_norm.weight, self.feed_forward_norm.weight)
        return tuple(each.data for each in weights if each is not None)

    @property
    def fuses(self) -> bool:
        """Whether ``forward_fused`` can be called, once loading has finished."""
        return self.attention.fuses and isinstance(self.feed_forward, FeedForward) and self.feed_forward.fuses

    def forward_fused(
        self,
        stream: Stream,  # ready for this block's first norm
        scale: Tensor,  # [hidden]: the weight of the next block's first norm
        positions: Tensor,
        inputs: AttentionInputs,
        k_cache: Tensor,
        v_cache: Tensor,
    ) -> Stream:
        """As ``forward``, for few rows: norms, sums and activation are parts of the products."""
        assert isinstance(self.feed_forward_norm, RMSNorm) and isinstance(self.feed_forward, FeedForward)
        stream = self.attention.forward_fused(stream, self.feed_forward_norm.scale, positions, inputs, k_cache, v_cache)
        return self.feed_forward.forward_fused(stream, scale)


class Decoder(nn.Module):
    """A decoder-only transformer over packed tokens and paged KV.

    Made with memory for its parameters but no values: fill ``named_parameters()``, then call ``finish_loading`` once.
    Raises ModelError for a spec that cannot be computed, ConfigError for a ``max_model_len`` the model does not allow.
    """

    def __init__(self, spec: DecoderSpec, *, kernels: Kernels, dtype: torch.dtype, device: torch.device, max_model_len: int) -> None:
        super().__init__()
        _check(spec, max_model_len)
        context = LayerContext(dtype, device, kernels, Unquantized())
        self.spec = spec
        self.embedding = Embedding(spec.vocab_size, spec.hidden_size, context, scale=spec.embedding_scale)
        self.positions = Embedding(spec.max_positions, spec.hidden_size, context) if spec.rope is None else None
        cos_sin = None if spec.rope is None else rotary_table(spec.rope, max_model_len, device)
        self.register_buffer("cos_sin", cos_sin, persistent=False)
        self.layers = nn.ModuleList(Block(spec, layer, cos_sin, context) for layer in spec.layers)
        self.norm = _norm(spec, context)
        self.head = _head(spec, context, self.embedding)
        self._steps = _cache_places(spec, self.layers)
        self._fuses = self._adds = False
        self._make_step = kernels.offer("decode_step", reported=True, dtype=dtype, spec=spec)
        self._step: WholeStep | None = None
        self._halves = tuple(2 * len(layers) for _, layers in attention_groups(spec))

    def finish_loading(self) -> None:
        """Brings the filled parameters into the form their kernels want (packed weights, offsets added). Once."""
        if self._make_step is not None:
            self._step = self._make_step(self._step_weights())
        for module in list(self.modules()):
            if isinstance(module, (Linear, RMSNorm, LayerNorm)):
                module.finish_loading()
        self._fuses = all(block.fuses for block, _, _ in self._steps)
        self._adds = all(block.adds for block, _, _ in self._steps)

    def forward(self, inputs: ForwardInputs, kv_caches: Sequence[Tensor]) -> Tensor:
        """Computes every token of a step and writes its keys and values. Returns hidden states after the last norm, [tokens, hidden].

        Of ``inputs.wanted`` tokens only, where it names them: of others the last block computes keys and values, and without ``inputs.alone``
        attention, too.
        ``kv_caches``: one tensor a KV group, [blocks, layers, 2, kv_heads, block_size, head_dim].
        """
        if self._step is not None and inputs.wanted is None and (whole := self._step(inputs, kv_caches)) is not None:
            return whole
        positions = inputs.positions
        x = self.embedding.forward(inputs.token_ids)
        if self.positions is not None:
            x = x + self.positions.forward(positions)
        halves = [
            cache.view(cache.shape[0], count, *cache.shape[3:]).unbind(1) for cache, count in zip(kv_caches, self._halves, strict=True)
        ]
        match self.way(len(x)):
            case Way.FUSED:
                x, residual = self._fused_blocks(x, inputs, halves), None
                x = x if inputs.wanted is None else x[inputs.wanted]
            case Way.ADDED:
                x, residual = self._added_blocks(x, inputs, halves), None
            case Way.PLAIN:
                x, residual = self._blocks(x, inputs, halves)
        hidden, _ = self.norm.forward(x, residual)
        return hidden

    def way(self, tokens: int) -> Way:
        """How the blocks compute steps of so many tokens, launch by launch."""
        if self._fuses and tokens <= MOST_ROWS:
            return Way.FUSED
        return Way.ADDED if self._adds and tokens >= LEAST_ADDED else Way.PLAIN

    def brief(self, rows: int, block_size: int) -> int:
        """Up to which context steps of so many rows are computed in one launch; 0: none are. ``block_size``: of the KV cache."""
        return 0 if self._step is None else self._step.longest(rows, block_size)

    def least_shared(self, rows: int) -> int | None:
        """From how many shared tokens on steps of so many rows read keys that sequences share once for all; None: never."""
        return min((least for block, _, _ in self._steps if (least := block.attention.least_shared(rows)) is not None), default=None)

    def _step_weights(self) -> StepWeights:
        """What all layers in one launch are made from."""
        assert isinstance(self.cos_sin, Tensor)
        layers, table, norm = tuple(block.tensors for block, _, _ in self._steps), self.embedding.weight.data, self.norm.weight.data
        heads, kv_heads = self.spec.num_heads, self.spec.num_kv_heads
        return StepWeights(layers, table, norm, self.cos_sin, heads, kv_heads, self.spec.norm_eps, self.spec.attention_scale)

    def _blocks(self, x: Tensor, inputs: ForwardInputs, halves: Halves) -> tuple[Tensor, Tensor | None]:
        """What the last block adds, and to what."""
        residual: Tensor | None = None
        for block, group, place in self._steps:
            k_cache, v_cache = halves[group][place], halves[group][place + 1]
            wanted = _wanted(inputs, group) if block is self._steps[-1][0] else None
            x, residual = block.forward(x, residual, inputs.positions, inputs.attention[group], k_cache, v_cache, wanted)
        return x, residual

    def _added_blocks(self, residual: Tensor, inputs: ForwardInputs, halves: Halves) -> Tensor:
        """The sum after the last block."""
        for block, group, place in self._steps:
            k_cache, v_cache = halves[group][place], halves[group][place + 1]
            wanted = _wanted(inputs, group) if block is self._steps[-1][0] else None
            residual = block.forward_added(residual, inputs.positions, inputs.attention[group], k_cache, v_cache, wanted)
        return residual

    def _fused_blocks(self, x: Tensor, inputs: ForwardInputs, halves: Halves) -> Tensor:
        """The sum after the last block. Each block leaves the stream ready for the norm of the next."""
        norms = [norm for norm in (*(block.attention_norm for block, _, _ in self._steps), self.norm) if isinstance(norm, RMSNorm)]
        normed, residual = norms[0].forward(x)
        stream = Stream(residual, normed, None, self.spec.norm_eps)
        for (block, group, place), following in zip(self._steps, norms[1:], strict=True):
            k_cache, v_cache = halves[group][place], halves[group][place + 1]
            stream = block.forward_fused(stream, following.scale, inputs.positions, inputs.attention[group], k_cache, v_cache)
        return stream.residual

    def logits(self, hidden: Tensor) -> Tensor:  # [n, hidden] → [n, vocab], float32, or as the head gives them
        """The LM head, for the rows whose logits are wanted. Who only wants the largest needs no copy in float32."""
        logits = self.head.forward(hidden)
        cap = self.spec.logits_soft_cap
        return logits if cap is None else torch.tanh(logits.float() / cap) * cap


def _wanted(inputs: ForwardInputs, group: int) -> Wanted | None:
    """For the last block, whose keys and values lie in this KV group."""
    if inputs.wanted is None:
        return None
    return Wanted(inputs.wanted, None if inputs.alone is None else attention_alone(inputs.attention[group], inputs.alone))


def _norm(spec: DecoderSpec, context: LayerContext) -> RMSNorm | LayerNorm:
    if spec.norm is NormKind.LAYER:
        return LayerNorm(spec.hidden_size, spec.norm_eps, context)
    return RMSNorm(spec.hidden_size, spec.norm_eps, context, offset=spec.norm_offset)


def _feed_forward(spec: DecoderSpec, layer: LayerSpec, context: LayerContext) -> FeedForward | SparseFeedForward:
    if layer.moe is not None:
        return SparseFeedForward(spec.hidden_size, layer.moe, spec.activation, context)
    sizes, around = (spec.hidden_size, spec.intermediate_size), _can_fuse(spec)
    return FeedForward(*sizes, spec.activation, context, gated=spec.gated_mlp, bias=spec.mlp_bias, around=around)


def _head(spec: DecoderSpec, context: LayerContext, embedding: Embedding) -> Linear:
    """The LM head; a tied one is made without memory of its own."""
    if not spec.tied_head:
        return Linear(spec.hidden_size, spec.vocab_size, context, bias=False)
    head = Linear(spec.hidden_size, spec.vocab_size, replace(context, device=torch.device("meta")), bias=False)
    head.tie_weight(embedding.weight)
    return head


def _can_fuse(spec: DecoderSpec) -> bool:
    """Whether norms, sums and activation can be parts of the products they stand beside, in every block."""
    dense = all(layer.moe is None for layer in spec.layers)
    return dense and spec.gated_mlp and spec.norm is NormKind.RMS and not spec.sandwich_norm


def _cache_places(spec: DecoderSpec, blocks: nn.ModuleList) -> tuple[tuple[Block, int, int], ...]:
    """(block, KV group, index of its keys among that group's halves) in the order of computation."""
    places = {
        layer: (group, 2 * index) for group, (_, layers) in enumerate(attention_groups(spec)) for index, layer in enumerate(layers)
    }
    return tuple((block, *places[index]) for index, block in enumerate(blocks) if isinstance(block, Block))


def _check(spec: DecoderSpec, max_model_len: int) -> None:
    if spec.attention_scale <= 0.0:
        raise ModelError(f"The description of family {spec.family!r} leaves attention_scale at {spec.attention_scale}; set it in its row.")
    if not 1 <= max_model_len <= spec.max_positions:
        raise ConfigError(
            f"--max-model-len is {max_model_len}, but the model has {spec.max_positions} positions; give a length from 1 to {spec.max_positions}."
        )
