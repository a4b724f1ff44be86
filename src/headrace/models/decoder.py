"""The decoder: one block, configured by a DecoderSpec, for every family.

What lives here: how layers are put together and in which order they compute. What may not: names of families or of
checkpoint tensors (families.py, weight_rules.py), loading, batching, sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from headrace.errors import ConfigError, ModelError
from headrace.kernels import Kernels
from headrace.kernels.candidate import EightBits, StepFacts
from headrace.kernels.inputs import AdapterRows, ForwardInputs, LayerStep, Wanted
from headrace.kernels.linear.epilogue import LEAST_ADDED, MOST_ROWS
from headrace.kernels.operations import DECODE_STEP, DRAFT_TOKENS
from headrace.kernels.step.reference import DraftTokens, StepWeights, WholeStep
from headrace.layers.basic import Attention, Embedding, FeedForward, LayerNorm, RMSNorm, attention_of, in_order
from headrace.layers.context import LayerContext
from headrace.layers.linear import Linear, Norm, Stream
from headrace.layers.moe import SparseFeedForward
from headrace.layers.packed import early_rows
from headrace.layers.pooling import Pooled, Pooler
from headrace.layers.rotary import rotary_table
from headrace.layers.shared_rows import NONE_SHARED, SharedRows, Sharing
from headrace.models.layer_pool import LayerPool
from headrace.parallel.group import Group, side_by_side
from headrace.quant import Format
from headrace.sites import Role, Weight, head, is_plain, layer_matrices, matrices, weights
from headrace.spec import DecoderSpec, KVFormat, NormKind, attention_groups

Halves = Sequence[Sequence[Tensor]]  # of each KV group, keys and values of its layers in turn


class Block(nn.Module):
    """Norm, attention, norm, feed-forward, with each residual addition fused into the norm that follows it.

    With sandwich norms, each of the two results passes through its own norm before it is added.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        index: int,
        cos_sin: Tensor | None,
        context: LayerContext,
        sites: Mapping[Role, Weight] | None = None,
    ) -> None:
        """``sites``: where its matrices are not as the spec has them."""
        super().__init__()
        layer, sites = spec.layers[index], sites or layer_matrices(spec, index)
        self.attention_norm = _norm(spec, context)
        self.attention = Attention(spec, layer, sites, cos_sin, context)
        self.post_attention_norm = _norm(spec, context) if spec.sandwich_norm else None
        self.feed_forward_norm = _norm(spec, context)
        self.feed_forward: FeedForward | SparseFeedForward
        if layer.moe is not None:
            self.feed_forward = SparseFeedForward(sites, layer.moe, spec.activation, context)
        else:
            self.feed_forward = FeedForward(sites, spec.activation, context)
        self.post_feed_forward_norm = _norm(spec, context) if spec.sandwich_norm else None

    def forward(self, stream: Stream, step: LayerStep, following: Norm) -> None:
        """``following``: the norm of the next block, or the decoder's last."""
        qkv, stream.projected = stream.projected, None
        if qkv is None:
            qkv = self.attention.qkv.normed(stream, self.attention_norm)
        self.forward_projected(stream, qkv, step, following)

    def forward_projected(self, stream: Stream, qkv: Tensor, step: LayerStep, following: Norm) -> None:
        """The same from q, k and v on."""
        between, output = self.feed_forward_norm, self.attention.output
        attended = self.attention.forward(stream, qkv, step)
        if isinstance(self.feed_forward, SparseFeedForward) and self.feed_forward.forward_behind(
            output, attended, stream, between, following
        ):
            return
        output.onto(stream, attended, between)
        stream.renormed(self.post_attention_norm)
        self.feed_forward.forward(stream, between, following)
        stream.renormed(self.post_feed_forward_norm)

    @property
    def products(self) -> tuple[Linear, ...]:
        """In the order of ``StepWeights.layers``; of a block without experts."""
        assert isinstance(self.feed_forward, FeedForward)
        return self.attention.qkv, self.attention.output, self.feed_forward.up, self.feed_forward.down

    @property
    def norms(self) -> tuple[Tensor, ...]:
        found = (self.attention_norm.weight, self.feed_forward_norm.weight)
        return tuple(each.data for each in found if each is not None)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The fields of ``StepWeights.layers``, before loading has finished; for a block without experts and biases."""
        return (*(each.weight.data for each in self.products if each.weight is not None), *self.norms)


@dataclass(frozen=True, slots=True)
class Tap:
    """Hidden states that a draft head goes on from: each step leaves its tokens' in ``out`` [most tokens, width]: the
    inputs of ``layers``, side by side, or (none) what is after the last norm."""

    out: Tensor
    layers: tuple[int, ...]

    def take(self, hidden: Tensor, layer: int | None = None) -> None:
        width = hidden.shape[1]
        at = 0 if layer is None else width * self.layers.index(layer)
        self.out[: len(hidden), at : at + width].copy_(hidden)


class Decoder(nn.Module):
    """A decoder-only transformer over packed tokens and paged KV.

    Created with memory for its parameters but no values: fill ``named_parameters()``, then call ``finish_loading``
    once. Raises ModelError for a spec that cannot be computed, ConfigError for a ``max_model_len`` that the model does
    not allow. ``kv``: how the cache stores keys and values; None: in ``dtype``. ``drafts``: for another model. ``group``,
    ``keys``, ``experts``: ranks, ``sharing``, ``weights_on``: its ``weights``, as LayerContext has them.
    ``pooled``: layers that a LayerPool gives their memory.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        *,
        kernels: Kernels,
        dtype: torch.dtype,
        device: torch.device,
        max_model_len: int,
        kv: KVFormat | None = None,
        group: Group | None = None,
        drafts: bool = False,
        keys: Group | None = None,
        experts: Any = None,
        weights_on: torch.device | None = None,
        sharing: Sharing = NONE_SHARED,
        pooled: Sequence[int] = (),
    ) -> None:
        super().__init__()
        _check(spec, max_model_len)
        context = LayerContext(
            dtype,
            device,
            kernels,
            composes=_composes(spec, whole=group is None and keys is None and experts is None),
            sparse=any(layer.moe is not None for layer in spec.layers[:1]),
            kv=kv,
            group=group,
            keys=keys,
            experts=experts,
            weights=weights_on,
            sharing=sharing,
        )
        self.spec = spec
        self._group, self._keys, self._sharing = group, keys, sharing
        tables = {site.name: site for site in weights(spec) if site.role is Role.EMBEDDING}
        self.embedding = (
            Embedding(tables["embedding"], context, scale=spec.embedding_scale) if "embedding" in tables else None
        )
        self.positions = Embedding(tables["positions"], context) if "positions" in tables else None
        self.token_types = Embedding(tables["token_types"], context) if "token_types" in tables else None
        cos_sin = None if spec.rope is None else rotary_table(spec.rope, max_model_len, device)
        self.register_buffer("cos_sin", cos_sin, persistent=False)
        self.embeds, self.answers = spec.embeds, spec.answers  # of a pipeline's stages, the first and the last
        held = spec.held_layers  # other stages' layers keep their numbers
        elsewhere = replace(context, weights=torch.device("meta"))
        self.layers = nn.ModuleList(
            Block(spec, index, cos_sin, elsewhere if index in pooled else context) if index in held else nn.Identity()
            for index in range(spec.num_layers)
        )
        self.pool = LayerPool({each: self.layers[each] for each in pooled}, device) if pooled else None
        if any(not each.takes_norms for each in self.modules() if isinstance(each, SparseFeedForward)):
            for each in self.layers.modules():
                if isinstance(each, Linear):
                    each.stand_apart()
        self.norm = _norm(spec, context)
        self.head = _head(spec, context, self.embedding) if self.answers else None
        self.pooler = None if spec.pooling is None else Pooler(spec, context)
        self._steps = _steps(spec, self.layers, self.norm)
        self._takes_norms = self._takes_sums = False
        self._most_rows = MOST_ROWS if group is None else min(MOST_ROWS, group.max_onto_rows(spec.hidden_size, dtype))
        self._eight = _rows_in_fp8(spec)
        self._make_step = (
            kernels.offer(DECODE_STEP, StepFacts(dtype, spec, kv, self._eight), reported=True)
            if (is_plain(spec) or self._eight is not None) and group is None and keys is None and spec.held is None
            else None
        )
        self._step: WholeStep | None = None
        self._make_drafts = (
            kernels.offer(DRAFT_TOKENS, StepFacts(dtype, spec, kv), reported=True)
            if drafts and is_plain(spec)
            else None
        )
        self.draft_tokens: DraftTokens | None = None  # runs of greedy tokens in one call, once loading has finished
        self._halves = tuple(2 * len(layers) for _, layers in attention_groups(spec))
        self.tap: Tap | None = None

    def finish_loading(self) -> None:
        """Converts the filled parameters to the form that their kernels need (packed weights, offsets added). Call it
        once."""
        table, head = self._table_and_head() if self._make_step or self._make_drafts else (None, None)
        if self._make_step is not None and self._eight is None:
            self._step = self._make_step(self._step_weights(table, head, tuple(each.tensors for each in self.blocks)))
        if self._make_drafts is not None:
            self.draft_tokens = self._make_drafts(
                self._step_weights(table, head, tuple(each.tensors for each in self.blocks))
            )
        finish_modules(self)
        if self._make_step is not None and self._eight is not None:
            self._step = self._step_in_rows(table, head)
        self._ask_linears()

    def use_copies(self) -> None:
        """Widened copies of matrices (layers/wide_copy.py), which have been filled."""
        for each in self.linears:
            each.use_copy()
        self._ask_linears()

    @property
    def linears(self) -> Iterator[Linear]:
        return (module for module in self.modules() if isinstance(module, Linear))

    def _ask_linears(self) -> None:
        linears = [module for module in self.layers.modules() if isinstance(module, Linear)]
        self._takes_norms = all(each.takes_norms for each in linears)
        self._takes_sums = all(each.takes_sums for each in linears)
        for block, following in pairwise(self.blocks):
            if isinstance(block.feed_forward, SparseFeedForward):
                # a pooled layer's weights come when it is their turn
                follows = self.pool is None and block.feed_forward.takes_output(following.attention.qkv)
                block.feed_forward.later = following.attention.qkv.plain if follows else None

    def forward(self, inputs: ForwardInputs, kv_caches: Sequence[Tensor], hidden: Tensor | None = None) -> Tensor:
        """Computes every token of a step and writes its keys and values. Returns hidden states after the last norm,
        [tokens, hidden]; of a stage of a pipeline that is not the last, what the next goes on from: its ``hidden``.

        If ``inputs.wanted`` names tokens, only theirs are returned: for the others, the last block computes keys and
        values, and without ``inputs.queries`` attention, too. ``kv_caches``: one tensor per KV group, [blocks, layers, 2,
        kv_heads, block_size, head_dim], or bytes in place of the last (KVSpec).
        """
        found = self._whole(inputs, kv_caches)
        if found is None:
            with nullcontext() if self.pool is None else self.pool.step():
                found = self._by_layer(inputs, kv_caches, hidden)
        if self.tap is not None and not self.tap.layers:
            self.tap.take(found)
        return found

    def _whole(self, inputs: ForwardInputs, kv_caches: Sequence[Tensor]) -> Tensor | None:
        """In one launch, where that is possible."""
        tapped = self.tap is not None and self.tap.layers
        if self._step is None or inputs.adapters is not None or inputs.wanted is not None or tapped:
            return None
        if inputs.attention[0].tree is not None:
            return None
        return self._step(inputs, kv_caches)

    def _by_layer(self, inputs: ForwardInputs, kv_caches: Sequence[Tensor], hidden: Tensor | None) -> Tensor:
        halves = [
            cache.view(cache.shape[0], count, *cache.shape[3:]).unbind(1)
            for cache, count in zip(kv_caches, self._halves, strict=True)
        ]
        begun = self.embedded(inputs) if hidden is None else hidden
        takes, shared = self.composed(len(begun)), self._shared(len(begun))
        stream = Stream(begun if shared is None else shared.own(begun), *takes, adapters=inputs.adapters)
        stream.post_norm, stream.shared = self.spec.post_norm, shared
        # few rows are computed to the end, and all that ranks share out; a stage that is not the last passes its own on
        whole = stream.takes_norms or not self.answers or (inputs.order is not None and inputs.queries is None)
        wanted = None if whole else inputs.wanted
        tapped = () if self.tap is None else self.tap.layers
        for index, (block, following, group, place) in enumerate(self._steps):
            if self.tap is not None and index in tapped:
                self.tap.take(stream.whole(), index)
            picked = _wanted(inputs, group) if wanted is not None and following is self.norm else None
            k, v = halves[group][place : place + 2] if self.spec.causal else (kv_caches[0], kv_caches[0])
            step = LayerStep(inputs.positions, inputs.attention[group], k, v, picked)
            block.forward(stream, step, following)
        if not self.answers:
            return stream.whole()
        found = stream.normed(self.norm)
        if wanted is not inputs.wanted:
            found = found[inputs.wanted]
            if inputs.order is not None and self._keys is not None:
                found = in_order(self._keys, found, inputs.order)
        return found

    def embedded(self, inputs: ForwardInputs) -> Tensor:  # [tokens, hidden]
        """The input of the first block."""
        ids, spec = inputs.token_ids, self.spec
        assert self.embedding is not None, "the first stage embeds"
        if self.token_types is None:
            x = self.embedding.forward(ids, inputs.adapters)
        else:
            x = self.embedding.forward(ids % spec.vocab_size, inputs.adapters)
            x = x + self.token_types.forward(ids // spec.vocab_size)
        return x if self.positions is None else x + self.positions.forward(inputs.positions + spec.first_position)

    def composed(self, tokens: int) -> tuple[bool, bool]:
        """Whether GEMMs of this many rows include norms and sums, or sums only; in all blocks, or in none."""
        return self._takes_norms and tokens <= self._most_rows, self._takes_sums and tokens >= LEAST_ADDED

    def _shared(self, tokens: int) -> SharedRows | None:
        """How ranks share the rows of such a step out; None: every rank has all."""
        least = self._sharing.least
        if self._group is None or least is None or tokens < least or self.composed(tokens)[0]:
            return None
        return SharedRows(self._group, tokens)

    def megakernel_context(self, rows: int, block_size: int) -> int:
        """The longest context for which steps of this many rows are computed in one launch; 0: none. ``block_size``: of
        the KV cache."""
        if self._step is None or (self.tap is not None and self.tap.layers):
            return 0
        return self._step.longest(rows, block_size)

    def least_shared(self, rows: int) -> int | None:
        """The number of shared tokens from which steps of this many rows read the keys that sequences share once for
        all; None: never."""
        return min(
            (least for block, *_ in self._steps if (least := block.attention.least_shared(rows)) is not None),
            default=None,
        )

    @property
    def blocks(self) -> tuple[Block, ...]:
        return tuple(block for block, *_ in self._steps)

    def _table_and_head(self) -> tuple[Tensor, Tensor]:
        """Before loading has finished."""
        assert self.embedding is not None and self.embedding.weight is not None and self.head is not None
        table = self.embedding.weight.data
        return table, table if self.head.weight is None else self.head.weight.data

    def _step_weights(
        self,
        table: Tensor | None,
        head: Tensor | None,
        layers: tuple[tuple[Tensor, ...], ...],
        scales: tuple[tuple[Tensor, ...], ...] = (),
    ) -> StepWeights:
        """The weights for computing all layers in one launch."""
        assert isinstance(self.cos_sin, Tensor) and table is not None and head is not None
        norm, spec = self.norm.weight.data, self.spec
        held = [block.attention.quantized for block in self.blocks]
        quantized = tuple(each for each in held if each is not None)
        facts = spec.qkv_heads, spec.norm_eps, spec.attention_scale
        return StepWeights(layers, table, norm, head, self.cos_sin, *facts, scales, quantized)

    def _step_in_rows(self, table: Tensor | None, head: Tensor | None) -> WholeStep | None:
        """Over the same weights in FP8 as the layers'; None: some layer's parts are apart."""
        found = [[product.in_rows() for product in block.products] for block in self.blocks]
        rows = [[each for each in layer if each is not None] for layer in found]
        if self._make_step is None or any(len(layer) < 4 for layer in rows):
            return None
        layers = tuple((*(each[0] for each in own), *block.norms) for own, block in zip(rows, self.blocks, strict=True))
        scales = tuple(tuple(each[1] for each in own) for own in rows)
        step: WholeStep = self._make_step(self._step_weights(table, head, layers, scales))
        return step

    def pooled(self, hidden: Tensor, places: Pooled) -> Tensor:  # [tokens, hidden] → [n, hidden], or [n, 1]; float32
        """What becomes of prompts in place of a next token."""
        assert self.pooler is not None
        found = self.pooler.forward(hidden, places)
        return self.pooler.verdict(self.logits(found.to(hidden.dtype))) if self.pooler.of_tokens else found

    def logits(
        self, hidden: Tensor, adapters: AdapterRows | None = None
    ) -> Tensor:  # [n, hidden] → [n, vocab], float32, or as the head gives them
        """The LM head, for the rows whose logits are needed. Callers that only need the largest need no copy in
        float32."""
        assert self.head is not None, "the last stage has logits"
        logits = self.head.forward(hidden, adapters)
        if self._group is not None:
            logits = side_by_side(self._group, logits, self.spec.vocab_size)
        return self._capped(logits)

    def greedy(self, hidden: Tensor, largest: Callable[[Tensor], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """As ``largest`` (greedy_tokens) of all logits. Ranks look each at its own, and send no more than what they
        found."""
        if self._group is None or self.head is None:
            return largest(self.logits(hidden))
        outs, rest = self.head.site.outs, self.spec.vocab_size - self.head.site.outs * (self._group.size - 1)
        if rest <= 0:  # the last rank has none
            return largest(self.logits(hidden))
        own = self._capped(self.head.forward(hidden))
        peaks, tokens = largest(own[:, :rest] if self._group.rank == self._group.size - 1 else own)
        return self._group.all_reduce_best(peaks.float(), tokens, self._group.rank * outs)

    def _capped(self, logits: Tensor) -> Tensor:
        cap = self.spec.logits_soft_cap
        return logits if cap is None else torch.tanh(logits.float() / cap) * cap


def _rows_in_fp8(spec: DecoderSpec) -> EightBits | None:
    """What all matrices of all layers are in, where that is FP8 with a scale a row and everything else is plain."""
    if spec.formats or is_plain(spec):
        return None
    forms = {form for site in matrices(spec) if site.layer is not None for form in site.formats or (Format(),)}
    eights = {form.eight for form in forms if form.coding is None}
    (first,) = eights if len(eights) == 1 and all(form.coding is None for form in forms) else (None,)
    return first if first is not None and first.kind == "fp8" and not first.group else None


def finish_modules(parent: nn.Module) -> None:
    for module in list(parent.modules()):
        if isinstance(module, (Linear, RMSNorm, LayerNorm, Embedding, SparseFeedForward)):
            module.finish_loading()


def _wanted(inputs: ForwardInputs, group: int) -> Wanted | None:
    """For the last block, whose keys and values are in this KV group."""
    if inputs.wanted is None:
        return None
    queries = None if inputs.queries is None else attention_of(inputs.attention[group], inputs.queries)
    return Wanted(inputs.wanted, queries, inputs.order)


def _norm(spec: DecoderSpec, context: LayerContext) -> RMSNorm | LayerNorm:
    if spec.norm is NormKind.LAYER:
        return LayerNorm(spec.hidden_size, spec.norm_eps, context)
    first = [site for layer in spec.held_layers[:1] for site in matrices(spec, layer)]
    behind = [form for site in first for form in site.formats or (None,)]
    return RMSNorm(spec.hidden_size, spec.norm_eps, context, offset=spec.norm_offset, early=early_rows(behind))


def _head(spec: DecoderSpec, context: LayerContext, embedding: Embedding | None) -> Linear:
    """The LM head; a tied one is created without memory of its own."""
    site = head(spec)
    if not site.tied:
        return Linear(site, context)
    assert embedding is not None, "the last stage holds a tied one, too"
    layer = Linear(site, replace(context, device=torch.device("meta")))
    layer.tie_weight(embedding.weight, embedding.pieces)
    return layer


def _composes(spec: DecoderSpec, *, whole: bool) -> bool:
    """Whether norms, sums and activation can be fused into the adjacent GEMMs, in every block. ``whole``: no ranks share
    the model."""
    sparse = {layer.moe is not None for layer in spec.layers}
    if spec.held is not None or len(sparse) > 1:
        return False
    return (
        not spec.post_norm
        and (whole or sparse == {False})
        and spec.gated_mlp
        and spec.norm is NormKind.RMS
        and not spec.sandwich_norm
    )


def _steps(spec: DecoderSpec, layers: nn.ModuleList, last: Norm) -> tuple[tuple[Block, Norm, int, int], ...]:
    """(block, the norm after it, KV group, index of its keys among that group's halves) in the order of computation."""
    places = {
        layer: (group, 2 * index)
        for group, (_, layers) in enumerate(attention_groups(spec))
        for index, layer in enumerate(layers)
    }
    blocks = [block for block in layers if isinstance(block, Block)]
    norms = [*(block.attention_norm for block in blocks[1:]), last][: len(blocks)]
    follow = zip(spec.held_layers, zip(blocks, norms, strict=True), strict=True)
    return tuple((block, norm, *places.get(index, (0, 0))) for index, (block, norm) in follow)  # an encoder's have none


def _check(spec: DecoderSpec, max_model_len: int) -> None:
    if spec.attention_scale <= 0.0:
        raise ModelError(
            f"The description of family {spec.family!r} leaves attention_scale at {spec.attention_scale}; set it in its row."
        )
    if not 1 <= max_model_len <= spec.max_positions:
        raise ConfigError(
            f"--max-model-len is {max_model_len}, but the model has {spec.max_positions} positions; give a length from 1 to {spec.max_positions}."
        )
