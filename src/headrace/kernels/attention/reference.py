"""The twins of attention over paged keys and values, of the rotary embedding and the cache write before it.

What lives here: formulas in plain torch. What may not: anything that is fast at the cost of being plain.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from headrace.kernels.attention import kv_codes
from headrace.kernels.inputs import AttentionInputs, Quantized, TreeInputs
from headrace.kernels.norm.reference import rms_norm


def rotary_write(
    q: Tensor,  # [T, Hq, D]
    k: Tensor,  # [T, Hk, D]
    v: Tensor,  # [T, Hk, D]
    positions: Tensor,  # [T], int64
    cos_sin: Tensor
    | None,  # [max_positions, rotary_dim], float32: cosines of the pairs, then their sines; None: no rotation
    k_cache: Tensor,  # [blocks, Hk, block_size, D], any strides
    v_cache: Tensor,  # [blocks, Hk, block_size, D], any strides
    slots: Tensor,  # [T], int64: block * block_size + offset; -1 writes nothing
    quantized: Quantized | None = None,
) -> Tensor:
    """Rotates q and k (RoFormer, halves paired) and writes k and v into the cache. Returns the rotated q [T, Hq, D].

    ``quantized``: the cache is uint8, [blocks, Hk, block_size, token bytes], and holds codes (kv_codes.py).
    """
    if cos_sin is not None:
        cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)  # [T, 1, rotary_dim / 2]
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
    kept = slots >= 0
    if quantized is not None:
        kv_codes.write(k_cache, k[kept], slots[kept], quantized.format, quantized.k_scales)
        kv_codes.write(v_cache, v[kept], slots[kept], quantized.format, quantized.v_scales)
        return q
    blocks = torch.div(slots[kept], k_cache.shape[2], rounding_mode="floor")
    offsets = slots[kept] % k_cache.shape[2]
    k_cache[blocks, :, offsets] = k[kept].to(k_cache.dtype)
    v_cache[blocks, :, offsets] = v[kept].to(v_cache.dtype)
    return q


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    wide = x[..., : 2 * half].float()
    first, second = wide[..., :half], wide[..., half:]
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
    return torch.cat((turned, x[..., 2 * half :]), dim=-1)


def paged_attention(
    q: Tensor,  # [T, Hq, D]
    k_cache: Tensor,  # [blocks, Hk, block_size, D], any strides
    v_cache: Tensor,  # [blocks, Hk, block_size, D], any strides
    inputs: AttentionInputs,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    quantized: Quantized | None = None,
    lse: Tensor | None = None,  # [T, Hq], float32, written; not with a tree
) -> Tensor:
    """Causal attention of packed queries over blocks (PagedAttention, Kwon et al. 2023). Returns [T, Hq, D].

    Query i of a sequence with Lq queries and context length Lc sits at position Lc - Lq + i and sees the positions up
    to its own, the last ``window`` of them. A query that sees nothing (padding: a negative position) yields zeros.
    Scores are capped as soft_cap · tanh(score / soft_cap). Only blocks that hold a visible key are read.
    ``quantized``: as for ``rotary_write``; what codes mean is computed with in float32. ``lse`` gets the log of the sum of
    exp(score) over the keys that a query sees, -inf where it sees none: what ``merge_parts`` weighs by. A token of ``inputs.tree`` sees
    what it would see if its ancestors stood in a row before it.
    """
    if inputs.tree is not None:
        return _tree_attention(q, k_cache, v_cache, inputs, inputs.tree, scale, window, soft_cap, quantized)
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    starts, contexts = inputs.query_start.tolist(), inputs.context_len.tolist()
    if lse is not None:
        lse.fill_(float("-inf"))
    for row, context in enumerate(contexts):
        begin, end = starts[row], starts[row + 1]
        first = max(0, context - (end - begin) + 1 - window) if window is not None else 0
        if end > begin and context > first:
            table = inputs.block_table[row]
            k, v = _gather(k_cache, v_cache, table, torch.arange(first, context), q.shape[2], quantized)
            found, sums = _attend(q[begin:end].float(), k, v, first, context, scale, window, soft_cap)
            out[begin:end] = found.to(q.dtype)
            if lse is not None:
                lse[begin:end] = sums
    return out


def merge_parts(*pieces: tuple[Tensor, Tensor]) -> Tensor:
    """Attention to all keys from attention to disjoint sets of them: parts [n, T, Hq, D] weighed by their share of the sum
    of exponentials, whose log [n, T, Hq] stands beside them (as flash decoding merges its splits: Dao et al. 2023).
    Returns [T, Hq, D] in the type of the parts; zeros where there are no keys."""
    parts, sums = (torch.cat(each) for each in zip(*pieces, strict=True))
    weights = torch.softmax(sums, dim=0).nan_to_num(0.0).unsqueeze(-1)
    return (parts.float() * weights).sum(0).to(parts.dtype)


def whole_attention(
    q: Tensor,  # [T, H, D]
    k: Tensor,  # [T, H, D]
    v: Tensor,  # [T, H, D]
    inputs: AttentionInputs,
    scale: float,
) -> Tensor:
    """softmax(scale · q kᵀ) v in float32, of every sequence by itself, in both directions. Returns [T, H, D].

    Nothing is cached: of ``inputs``, only where the sequences lie is read.
    """
    out = torch.empty_like(q)
    for begin, end in pairwise(inputs.query_start.tolist()):
        heads = [each[begin:end].transpose(0, 1).float() for each in (q, k, v)]  # [H, L, D]
        weights = torch.softmax(heads[0] @ heads[1].transpose(1, 2) * scale, dim=-1)
        out[begin:end] = (weights @ heads[2]).transpose(0, 1).to(q.dtype)
    return out


def _tree_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, inputs: AttentionInputs, tree: TreeInputs, scale: float,
    window: int | None, soft_cap: float | None, quantized: Quantized | None,
) -> Tensor:  # fmt: skip
    """Each query alone, over keys at the places that it sees."""
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    starts, contexts, firsts = inputs.query_start.tolist(), inputs.context_len.tolist(), tree.first.tolist()
    tokens = torch.repeat_interleave(torch.arange(len(contexts)), inputs.query_start.diff().cpu()).tolist()
    for token, row in enumerate(tokens):
        bits = int(tree.ancestors[token])
        context = contexts[row] - starts[row + 1] + token + 1 if not bits else firsts[row]
        places = [*range(context), *(firsts[row] + at for at in range(64) if bits >> at & 1)]
        low = max(0, len(places) - window) if window is not None else 0
        if places:
            seen = torch.tensor(places[low:])
            k, v = _gather(k_cache, v_cache, inputs.block_table[row], seen, q.shape[2], quantized)
            one = q[token : token + 1].float()
            out[token] = _attend(one, k, v, low, len(places), scale, window, soft_cap)[0][0].to(q.dtype)
    return out


class HeadNorms(NamedTuple):
    """Of q and k of each head, before they are turned (Qwen3). Weights [D]."""

    q: Tensor
    k: Tensor
    eps: float


def rope_attention(
    qkv: Tensor,  # [T, Hq + 2 Hk, D]
    positions: Tensor,  # [T], int64
    cos_sin: Tensor,  # [max_positions, rotary_dim], float32
    k_cache: Tensor,  # [blocks, Hk, block_size, D], any strides
    v_cache: Tensor,  # [blocks, Hk, block_size, D], any strides
    inputs: AttentionInputs,
    scale: float,
    norms: HeadNorms | None = None,
    quantized: Quantized | None = None,
) -> Tensor:
    """Norms of heads where there are some, ``rotary_write``, then ``paged_attention`` without window and cap. Returns
    [T, Hq, D].

    A candidate gives None, with nothing done, for a step that it is not for.
    """
    kv_heads = k_cache.shape[1]
    q, k, v = qkv.split_with_sizes((qkv.shape[1] - 2 * kv_heads, kv_heads, kv_heads), dim=1)
    if norms is not None:
        q, k = rms_norm(q, norms.q, norms.eps, None)[0], rms_norm(k, norms.k, norms.eps, None)[0]
    q = rotary_write(q, k, v, positions, cos_sin, k_cache, v_cache, inputs.slots, quantized)
    return paged_attention(q, k_cache, v_cache, inputs, scale, None, None, quantized)


def _gather(
    k_cache: Tensor, v_cache: Tensor, table: Tensor, places: Tensor, head_dim: int, quantized: Quantized | None
) -> tuple[Tensor, Tensor]:
    """Keys and values at ``places`` [n] of a sequence, as float32 [Hk, n, D]."""
    positions, size = places.to(table.device), k_cache.shape[2]
    at = table[torch.div(positions, size, rounding_mode="floor")].long(), positions % size
    if quantized is None:
        k, v = (cache[at[0], :, at[1]].float() for cache in (k_cache, v_cache))
    else:
        k = kv_codes.read(k_cache, *at, head_dim, quantized.format, quantized.k_scales)
        v = kv_codes.read(v_cache, *at, head_dim, quantized.format, quantized.v_scales)
    return k.transpose(0, 1), v.transpose(0, 1)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, first: int, context: int, scale: float, window: int | None, soft_cap: float | None
) -> tuple[Tensor, Tensor]:
    """One sequence in float32: q [Lq, Hq, D]; k and v [Hk, L, D] at positions ``first`` … ``context`` - 1. Returns [Lq,
    Hq, D] and, of each, the log of the sum of exponentials [Lq, Hq]."""
    num_queries, num_heads, head_dim = q.shape
    grouped = q.transpose(0, 1).reshape(k.shape[0], -1, head_dim)  # [Hk, Hq / Hk * Lq, D]
    scores = (grouped @ k.transpose(1, 2)).view(num_heads, num_queries, -1) * scale
    if soft_cap is not None:
        scores = torch.tanh(scores / soft_cap) * soft_cap
    at = torch.arange(context - num_queries, context, device=q.device).unsqueeze(1)
    keys = torch.arange(first, context, device=q.device)
    hidden = keys > at if window is None else (keys > at) | (keys <= at - window)
    # NaN: a row that sees nothing
    scores = scores.masked_fill_(hidden, float("-inf"))
    weights = torch.softmax(scores, dim=-1).nan_to_num(0.0)
    found = (weights.view(k.shape[0], -1, k.shape[1]) @ v).view(num_heads, num_queries, head_dim).transpose(0, 1)
    return found, scores.logsumexp(-1).T
