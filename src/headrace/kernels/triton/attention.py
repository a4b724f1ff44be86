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
    """Sizes of one kernel, found by measurement on an H200. ``rows`` are queries × heads of a group, ``keys`` are read at once."""

    rows: int
    keys: int
    warps: int
    stages: int
    programs: int = 1  # of the decode kernel, a processor


def prefill_tiles(dtype: torch.dtype, head_dim: int, group: int, bulk: int) -> Tiles:
    """``bulk``: how many keys the copy engine may bring at once, 0 if it may not."""
    if dtype is torch.float32:
        return Tiles(_rows(group), 16, 4, 2)
    if head_dim > 128:
        return Tiles(128, 32, 8, 2)
    return Tiles(128, min(bulk, 128), 8, 5) if bulk >= 64 else Tiles(128, 64, 8, 3)


def decode_tiles(dtype: torch.dtype, head_dim: int, group: int, bulk: int) -> Tiles:
    rows = _rows(group)
    if dtype is torch.float32:
        return Tiles(rows, 16, 4, 2, 2)
    if head_dim > 128 or rows > 16:
        return Tiles(rows, 32, 4, 3, 3)
    if bulk >= 128:
        return Tiles(rows, 128, 4, 3, 2)
    return Tiles(rows, 64, 4, 5, 2) if bulk >= 64 else Tiles(rows, 64, 4, 3, 3)


def _rows(group: int) -> int:
    """As few as a matrix instruction takes."""
    return max(16, 1 << (group - 1).bit_length())


@dataclass(frozen=True, slots=True)
class PagedAttention:
    """out = softmax(scale · q kᵀ, capped, masked) v (FlashAttention, Dao et al. 2022; PagedAttention, Kwon et al. 2023).

    ``q`` [T, Hq, D]; caches [blocks, Hk, block_size, D] in the type of q, with any strides; returns [T, Hq, D], tokens of no sequence zero.
    Query i of a sequence with Lq queries and context length Lc sits at Lc − Lq + i and sees the keys up to its own, the last ``window``
    of them; scores s become soft_cap · tanh(s / soft_cap). Nothing beyond a sequence's length or behind its window is read.
    ``processors`` of the device. ``bulk``: it has a copy engine (compute capability 9), which brings keys and values wherever blocks
    are as large as tiles: from 64 tokens, better 128; it may read, but never uses, slots of a sequence's blocks beyond its length.
    """

    head_dim: int
    group: int
    processors: int
    batch_invariant: bool
    bulk: bool = False

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
        room = prefill.bulk_keys(k_cache, v_cache) if self.bulk else 0
        tiles = decode_tiles(q.dtype, self.head_dim, self.group, room)
        few = 0 if self.batch_invariant else tiles.rows // self.group
        alone = inputs.max_query_len <= few and q.shape[0] == inputs.context_len.shape[0] * inputs.max_query_len
        if not alone:
            if inputs.context_len.shape[0] == 1:
                few = few if inputs.max_query_len <= few else 0  # one long prompt: no second kernel
            large = prefill_tiles(q.dtype, self.head_dim, self.group, room)
            prefill.attend(q, out, k_cache, v_cache, inputs, scale, window, soft_cap, few, large, room >= large.keys)
        if few:
            most, programs = min(few, inputs.max_query_len), tiles.programs * self.processors
            decode.attend(q, out, k_cache, v_cache, inputs, scale, window, soft_cap, most, programs, tiles, room >= tiles.keys)
        return out


def create_paged_attention(site: Site) -> Callable[..., Tensor]:
    head_dim, heads, kv_heads = (int(site.facts[name]) for name in ("head_dim", "num_heads", "num_kv_heads"))
    processors = torch.cuda.get_device_properties(site.device).multi_processor_count
    bulk = torch.cuda.get_device_capability(site.device)[0] == 9
    return PagedAttention(head_dim, heads // kv_heads, processors, site.batch_invariant, bulk)
