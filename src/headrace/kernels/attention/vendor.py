"""Attention of encoders by torch's own kernels: sequences in a batch of any lengths, each of which sees all of itself.

What lives here: calls of the library. What may not: caches, masks, kernels of ours.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels.candidate import CallSite, Declined, HeadFacts
from headrace.kernels.inputs import AttentionInputs

_MOST_HEAD_DIM = 256  # FlashAttention 2


def create_sequence_attention(site: CallSite[HeadFacts]) -> Any:
    """A call for each sequence, on a CPU: of runs of equal lengths, one for all."""
    return sequence_attention


def sequence_attention(q: Tensor, k: Tensor, v: Tensor, inputs: AttentionInputs, scale: float) -> Tensor:
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    for begin, end, length in _runs(inputs.query_start.tolist()):
        # [sequences, H, length, D]
        heads = [each[begin:end].unflatten(0, (-1, length)).transpose(1, 2) for each in (q, k, v)]
        found = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], scale=scale)
        out[begin:end] = found.transpose(1, 2).flatten(0, 1)
    return out


def _runs(starts: list[int]) -> list[tuple[int, int, int]]:
    """(begin, end, length of each) of neighbours that are equally long; empty ones are left out."""
    runs: list[tuple[int, int, int]] = []
    for begin, end in pairwise(starts):
        if runs and runs[-1][2] == end - begin:
            runs[-1] = runs[-1][0], end, end - begin
        elif end > begin:
            runs.append((begin, end, end - begin))
    return runs


def create_packed_attention(site: CallSite[HeadFacts]) -> Any:
    """One call for all sequences: FlashAttention over packed tokens (Dao 2023), in torch since 2.10."""
    if site.facts.head_dim > _MOST_HEAD_DIM or site.facts.head_dim % 8:
        return Declined(f"head_dim {site.facts.head_dim} is no multiple of 8 up to {_MOST_HEAD_DIM}")
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return Declined(f"torch {torch.__version__} has no varlen_attn")

    def packed_attention(q: Tensor, k: Tensor, v: Tensor, inputs: AttentionInputs, scale: float) -> Tensor:
        starts, longest = inputs.query_start, inputs.max_query_len
        found = varlen_attn(q, k, v, starts, starts, longest, longest, scale=scale)
        assert isinstance(found, Tensor), "nothing beside it was asked for"
        return found

    return packed_attention
