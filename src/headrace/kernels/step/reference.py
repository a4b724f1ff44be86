"""A whole decode step as one operation, and a run of drafts: what they are made from, and their twins.

What lives here: the nouns, and the twins in plain torch. What may not: kernels, how a decoder is put together
(models/decoder.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels.attention import reference as attention_twins
from headrace.kernels.inputs import AttentionInputs, ForwardInputs, Quantized
from headrace.kernels.norm import reference as norm_twins
from headrace.kernels.sampling import reference as sampling_twins
from headrace.spec import Activation

MOST_ROWS = 8  # of a step that is worth one launch; with 16 it is slower than layer by layer
# rows times longest context: beyond, attention is most of the step, and kernels of its own are quicker
MOST_KEYS = 8192


class WholeStep(Protocol):
    """One decoder's steps, each in one piece."""

    def __call__(
        self, inputs: ForwardInputs, kv_caches: Sequence[Tensor]
    ) -> Tensor | None: ...  # after the last norm; None: not for this step

    def longest(
        self, rows: int, block_size: int
    ) -> int: ...  # up to which context it takes steps of so many rows; 0: it takes none


@dataclass(frozen=True, slots=True)
class StepWeights:
    """A decoder's tensors as they were loaded. ``layers``: of each qkv, output, up, down [out, in], then its two norms'
    weights [hidden]. ``scales``: of weights in FP8, what each row of those four is multiplied by, [out], float32.
    """

    layers: tuple[tuple[Tensor, ...], ...]
    embedding: Tensor  # [vocab, hidden]
    norm: Tensor  # [hidden]
    head: Tensor  # [vocab, hidden]
    cos_sin: Tensor  # [max_model_len, head_dim], float32
    heads: tuple[int, int, int]  # of q, k and v
    eps: float
    scale: float  # of scores
    scales: tuple[tuple[Tensor, ...], ...] = ()
    quantized: tuple[Quantized, ...] = ()  # how layers' keys and values are held, where not in the embedding's type

    def wide(self, layer: int) -> tuple[Tensor, ...]:
        """A layer's as they are multiplied, in the embedding's type."""
        held, dtype = self.layers[layer], self.embedding.dtype
        if not self.scales:
            return held
        products = zip(held[:4], self.scales[layer], strict=True)
        return (*((each.float() * scale.unsqueeze(1)).to(dtype) for each, scale in products), *held[4:])


class DraftRows(NamedTuple):
    """Whose tokens are drawn, each [n], int32 but for the last two: of row ``row[i]``, tokens ``start[i]`` to
    ``length[i] - 1`` are computed (their keys and values, too), and ``most[i]`` more drawn behind them."""

    row: Tensor
    start: Tensor
    length: Tensor
    most: Tensor
    prompt: Tensor  # tokens before the answer, whose places the noise counts
    temperature: Tensor  # float32; 0: the largest logit's token
    seed: Tensor  # int64


class DraftTokens(Protocol):
    """Runs of one decoder, without filters or penalties; what is drawn is written into ``token_ids``."""

    def __call__(
        self,
        token_ids: Tensor,  # [rows, length], int32, written
        table: Tensor,  # [rows, blocks], int32
        rows: DraftRows,
        cache: Tensor,  # [blocks, layers, 2, kv_heads, block_size, head_dim], written
    ) -> None: ...

    def hidden(
        self, inputs: ForwardInputs, cache: Tensor
    ) -> Tensor: ...  # [tokens, hidden]: of one pass of few tokens, all of which are wanted; some may form trees


def longest_context(rows: int) -> int:
    """Of a step of so many rows in one launch; 0: there is none."""
    return MOST_KEYS // rows if 1 <= rows <= MOST_ROWS else 0


@dataclass(frozen=True, slots=True)
class _TwinStep:
    """Layer by layer, in plain torch."""

    weights: StepWeights

    def __call__(self, inputs: ForwardInputs, kv_caches: Sequence[Tensor]) -> Tensor:
        weights, residual = self.weights, None
        x = F.embedding(inputs.token_ids, weights.embedding)
        for index in range(len(weights.layers)):
            held = weights.quantized[index] if weights.quantized else None
            x, residual = _layer(x, residual, weights.wide(index), weights, inputs, kv_caches[0][:, index], held)
        return norm_twins.rms_norm(x, weights.norm, weights.eps, residual)[0]

    def longest(self, rows: int, block_size: int) -> int:
        return longest_context(rows)


def decode_step(weights: StepWeights) -> WholeStep:
    """Norm, attention, norm, gated feed-forward with SiLU, layer by layer; keys and values are written, hidden states
    normed. No input is rounded to 8 bits, whatever weights are in."""
    return _TwinStep(weights)


def _layer(
    x: Tensor,  # [tokens, hidden]: what the layer before adds
    residual: Tensor | None,  # [tokens, hidden]; None in the first layer
    layer: tuple[Tensor, ...],
    weights: StepWeights,
    inputs: ForwardInputs,
    cache: Tensor,  # [blocks, 2, kv_heads, block_size, head_dim]
    held: Quantized | None,
) -> tuple[Tensor, Tensor]:
    qkv, output, up, down, first_norm, second_norm = layer
    x, residual = norm_twins.rms_norm(x, first_norm, weights.eps, residual)
    (k_cache, v_cache), attention = cache.unbind(1), inputs.attention[0]
    q, k, v = F.linear(x, qkv).view(len(x), sum(weights.heads), -1).split_with_sizes(weights.heads, dim=1)
    q = attention_twins.rotary_write(
        q, k, v, inputs.positions, weights.cos_sin, k_cache, v_cache, attention.slots, held
    )
    attended = attention_twins.paged_attention(q, k_cache, v_cache, attention, weights.scale, None, None, held)
    x, residual = norm_twins.rms_norm(
        F.linear(attended.reshape(len(x), -1), output), second_norm, weights.eps, residual
    )
    return F.linear(norm_twins.gated_activation(F.linear(x, up), Activation.SILU), down), residual


@dataclass(frozen=True, slots=True)
class _TwinDrafts:
    """Pass by pass, in plain torch."""

    weights: StepWeights

    def __call__(self, token_ids: Tensor, table: Tensor, rows: DraftRows, cache: Tensor) -> None:
        row, start, length, most, prompt = (each.long() for each in rows[:5])
        for depth in range(int(most.max())):
            live = most > depth
            ends = length[live] + depth
            inputs = _chunks(token_ids, table, row[live], ends - 1 if depth else start[live], ends, cache.shape[4])
            hidden = _TwinStep(self.weights)(inputs, (cache,))[inputs.attention[0].query_start[1:].long() - 1]
            logits = F.linear(hidden, self.weights.head).float()
            drawn = _drawn(logits, rows.temperature[live], rows.seed[live], ends - prompt[live])
            token_ids[row[live], ends] = drawn.int()

    def hidden(self, inputs: ForwardInputs, cache: Tensor) -> Tensor:
        return _TwinStep(self.weights)(inputs, (cache,))


def _drawn(logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    peak, largest = logits.max(-1)
    scores = (logits - peak[:, None]) / temperature.clamp(min=1e-30)[:, None]
    return torch.where(temperature > 0.0, sampling_twins.gumbel_argmax(scores, None, seeds, positions), largest)


def draft_tokens(weights: StepWeights) -> DraftTokens:
    """As ``decode_step``, with the head behind it, several times over."""
    return _TwinDrafts(weights)


def _chunks(
    token_ids: Tensor, table: Tensor, row: Tensor, begins: Tensor, ends: Tensor, block_size: int
) -> ForwardInputs:
    """Tokens ``begins`` to ``ends`` - 1 of each row, one row after another."""
    counts = ends - begins
    start = F.pad(counts.cumsum(0), (1, 0))
    chunk = torch.repeat_interleave(torch.arange(len(row)), counts)
    positions = torch.arange(len(chunk)) - start[chunk] + begins[chunk]
    slots = table[row[chunk], positions // block_size].long() * block_size + positions % block_size
    longest = int(counts.max()), int(ends.max())
    attention = AttentionInputs(table[row], start.int(), ends.int(), slots, block_size, *longest)
    return ForwardInputs(token_ids[row[chunk], positions].long(), positions, (attention,))
