"""Attention over paged keys and values, for any mix of query lengths.

What lives here: which kernel computes which sequences, and how large its tiles are. What may not: the kernels (prefill.py, decode.py).

    query length    1 … FEW              more                      FEW: as many as fit, with a KV head's group, into one 16-row
    kernel          decode, split KV     prefill, whole rows            matrix instruction

Both read lengths on the device alone; sequences of the other kind are passed over. With ``batch_invariant`` every sequence goes through
the prefill kernel in one configuration: its tiles lie at absolute multiples, so a row's bits depend on nothing but its own keys.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.kernels.candidate import Site
from headrace.kernels.triton import decode, prefill
from headrace.layers.inputs import AttentionInputs


@dataclass(frozen=True, slots=True)
class Tiles:
    """Sizes of one kernel, found by measurement. ``rows`` are queries × heads of a group, ``keys`` are read at once."""

    rows: int
    keys: int
    warps: int
    stages: int


def prefill_tiles(dtype: torch.dtype, head_dim: int) -> Tiles:
    if dtype is torch.float32:
        return Tiles(64, 32, 8, 1)
    return Tiles(128, 64, 8, 3) if head_dim <= 128 else Tiles(128, 64, 8, 2)


def decode_tiles(dtype: torch.dtype, head_dim: int, group: int) -> Tiles:
    rows = 16 if group <= 16 else 1 << (group - 1).bit_length()
    if dtype is torch.float32:
        return Tiles(rows, 32, 4, 2)
    return Tiles(rows, 64, 4, 3) if head_dim <= 128 else Tiles(rows, 32, 4, 3)


@dataclass(frozen=True, slots=True)
class PagedAttention:
    """out = softmax(scale · q kᵀ, capped, masked) v (FlashAttention, Dao et al. 2022; PagedAttention, Kwon et al. 2023).

    ``q`` [T, Hq, D]; caches [blocks, Hk, block_size, D] in the type of q, with any strides; returns [T, Hq, D], tokens of no sequence zero.
    Query i of a sequence with Lq queries and context length Lc sits at Lc − Lq + i and sees the keys up to its own, the last ``window``
    of them; scores s become soft_cap · tanh(s / soft_cap). Nothing beyond a sequence's length or behind its window is read.
    ``programs``: how many the decode kernel is launched with.
    """

    head_dim: int
    group: int
    programs: int
    batch_invariant: bool

    def __call__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        inputs: AttentionInputs,
        scale: float,
        window: int | None,
        soft_cap: float | None,
    ) -> Tensor:
        q = q if q.stride(2) == 1 else q.contiguous()
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if q.shape[0] == 0:
            return out
        tiles = decode_tiles(q.dtype, self.head_dim, self.group)
        few = 0 if self.batch_invariant else tiles.rows // self.group
        alone = inputs.max_query_len <= few and q.shape[0] == inputs.context_len.shape[0] * inputs.max_query_len
        if not alone:
            if inputs.context_len.shape[0] == 1:
                few = few if inputs.max_query_len <= few else 0  # one long prompt: no second kernel
            prefill.attend(q, out, k_cache, v_cache, inputs, scale, window, soft_cap, few, prefill_tiles(q.dtype, self.head_dim))
        if few:
            decode.attend(q, out, k_cache, v_cache, inputs, scale, window, soft_cap, min(few, inputs.max_query_len), self.programs, tiles)
        return out


def create_paged_attention(site: Site) -> Callable[..., Tensor]:
    head_dim, heads, kv_heads = (int(site.facts[name]) for name in ("head_dim", "num_heads", "num_kv_heads"))
    processors = torch.cuda.get_device_properties(site.device).multi_processor_count
    return PagedAttention(head_dim, heads // kv_heads, 2 * processors, site.batch_invariant)
