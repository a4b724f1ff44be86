"""The torch twin of every operation: the fallback, the oracle in tests, the check in benchmarks.

What lives here: plain torch that says what an operation means, correct before quick, in float32 inside.
What may not: a candidate's tricks, choosing among candidates, state.

Shapes: T packed tokens, H hidden, D head_dim, Hq/Hk query/KV heads, E experts, I a feed-forward's inner width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels.around import Around, Fused
from headrace.layers.inputs import AttentionInputs
from headrace.spec import Activation


def linear(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """y = x · weightᵀ + bias. ``weight`` [out, in], ``bias`` [out]; the result maps x [..., in] to [..., out]."""
    return partial(F.linear, weight=weight, bias=bias)


def added_linear(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor, Tensor], Tensor]:
    """residual' = residual + x · weightᵀ + bias: ``x`` [T, in], ``residual`` [T, out], which a candidate may overwrite."""
    return lambda x, residual: residual + F.linear(x, weight, bias)


def gated_linear(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor, Activation], Tensor]:
    """y = act(x · Wᵀ + b) ⊙ (x · Vᵀ + c): ``weight`` [2 out, in], W before V; maps x [T, in] and the activation to [T, out].

    A candidate may give None for a number of rows that product and activation serve as well one after the other.
    """
    return lambda x, kind: gated_activation(F.linear(x, weight, bias), kind)


def fused_linear(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor, Around], Fused]:
    """The product with what stands around it: y = act(s · x Wᵀ + b) ⊙ (s · x Vᵀ + c) + residual, then y · scale and y².

    ``x`` [T, in]; ``weight`` [out, in], with a gate W and V, one behind the other, [2 out, in]; see ``Around``. One rounding, of y.
    """

    def apply(x: Tensor, around: Around) -> Fused:
        y = x.float() @ weight.float().T
        if around.squares is not None:
            y = y * torch.rsqrt(around.squares.sum(0) / x.shape[-1] + around.eps).unsqueeze(1)
        y = y if bias is None else y + bias.float()
        if around.gate is not None:
            y = gated_activation(y, around.gate)
        y = (y if around.residual is None else y + around.residual.float()).to(x.dtype)
        if around.scale is None:
            return y, None, None
        return y, (y.float() * around.scale.float()).to(x.dtype), y.float().square().sum(1).unsqueeze(0)

    return apply


def embedding(ids: Tensor, table: Tensor, scale: float | None) -> Tensor:
    """table[ids] · scale. ``ids`` [T], ``table`` [rows, H] → [T, H]; the product is rounded to the table's type."""
    rows = F.embedding(ids, table)
    return rows if scale is None else rows * scale


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    """Root-mean-square norm (Zhang and Sennrich 2019) after an optional residual sum.

    ``x``, ``residual`` [..., H], ``weight`` [H]. Returns (y, residual'): residual' = x + residual, y = residual' / rms(residual') · weight.
    """
    if residual is not None:
        x = x + residual
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (scaled * weight.float()).to(x.dtype), x


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    """Layer norm (Ba et al. 2016) after an optional residual sum. Shapes and results as ``rms_norm``; ``bias`` [H]."""
    if residual is not None:
        x = x + residual
    wide = F.layer_norm(x.float(), (x.shape[-1],), weight.float(), None if bias is None else bias.float(), eps)
    return wide.to(x.dtype), x


def rotary_write(
    q: Tensor,  # [T, Hq, D]
    k: Tensor,  # [T, Hk, D]
    v: Tensor,  # [T, Hk, D]
    positions: Tensor,  # [T], int64
    cos_sin: Tensor | None,  # [max_positions, rotary_dim], float32: cosines of the pairs, then their sines; None: no rotation
    k_cache: Tensor,  # [blocks, Hk, block_size, D], any strides
    v_cache: Tensor,  # [blocks, Hk, block_size, D], any strides
    slots: Tensor,  # [T], int64: block * block_size + offset; -1 writes nothing
) -> Tensor:
    """Rotates q and k (RoFormer, halves paired) and writes k and v into the cache. Returns the rotated q [T, Hq, D]."""
    if cos_sin is not None:
        cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)  # [T, 1, rotary_dim / 2]
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
    kept = slots >= 0
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
) -> Tensor:
    """Causal attention of packed queries over blocks (PagedAttention, Kwon et al. 2023). Returns [T, Hq, D].

    Query i of a sequence with Lq queries and context length Lc sits at position Lc - Lq + i and sees the positions up to
    its own, the last ``window`` of them. A query that sees nothing (padding: a negative position) yields zeros.
    Scores are capped as soft_cap · tanh(score / soft_cap). Only blocks that hold a visible key are read.
    """
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    starts, contexts = inputs.query_start.tolist(), inputs.context_len.tolist()
    for row, context in enumerate(contexts):
        begin, end = starts[row], starts[row + 1]
        first = max(0, context - (end - begin) + 1 - window) if window is not None else 0
        if end > begin and context > first:
            table = inputs.block_table[row]
            k = _gather(k_cache, table, first, context, inputs.block_size)
            v = _gather(v_cache, table, first, context, inputs.block_size)
            out[begin:end] = _attend(q[begin:end].float(), k, v, first, context, scale, window, soft_cap).to(q.dtype)
    return out


def rope_attention(
    qkv: Tensor,  # [T, Hq + 2 Hk, D]
    positions: Tensor,  # [T], int64
    cos_sin: Tensor,  # [max_positions, rotary_dim], float32
    k_cache: Tensor,  # [blocks, Hk, block_size, D], any strides
    v_cache: Tensor,  # [blocks, Hk, block_size, D], any strides
    inputs: AttentionInputs,
    scale: float,
) -> Tensor:
    """``rotary_write``, then ``paged_attention`` without window and cap. Returns [T, Hq, D].

    A candidate gives None, with nothing done, for a step that it is not for.
    """
    kv_heads = k_cache.shape[1]
    q, k, v = qkv.split_with_sizes((qkv.shape[1] - 2 * kv_heads, kv_heads, kv_heads), dim=1)
    q = rotary_write(q, k, v, positions, cos_sin, k_cache, v_cache, inputs.slots)
    return paged_attention(q, k_cache, v_cache, inputs, scale, None, None)


def _gather(cache: Tensor, table: Tensor, first: int, end: int, block_size: int) -> Tensor:
    """Keys or values at positions first … end - 1, as float32 [Hk, end - first, D]."""
    positions = torch.arange(first, end, device=cache.device)
    blocks = table[torch.div(positions, block_size, rounding_mode="floor")].long()
    return cache[blocks, :, positions % block_size].transpose(0, 1).float()


def _attend(q: Tensor, k: Tensor, v: Tensor, first: int, context: int, scale: float, window: int | None, soft_cap: float | None) -> Tensor:
    """One sequence in float32: q [Lq, Hq, D]; k and v [Hk, L, D] at positions ``first`` … ``context`` - 1. Returns [Lq, Hq, D]."""
    num_queries, num_heads, head_dim = q.shape
    grouped = q.transpose(0, 1).reshape(k.shape[0], -1, head_dim)  # [Hk, Hq / Hk * Lq, D]
    scores = (grouped @ k.transpose(1, 2)).view(num_heads, num_queries, -1) * scale
    if soft_cap is not None:
        scores = torch.tanh(scores / soft_cap) * soft_cap
    at = torch.arange(context - num_queries, context, device=q.device).unsqueeze(1)
    keys = torch.arange(first, context, device=q.device)
    hidden = keys > at if window is None else (keys > at) | (keys <= at - window)
    weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1).nan_to_num(0.0)  # NaN: a row that sees nothing
    return (weights.view(k.shape[0], -1, k.shape[1]) @ v).view(num_heads, num_queries, head_dim).transpose(0, 1)


def activation(x: Tensor, kind: Activation) -> Tensor:
    """SiLU, exact GELU or its tanh form (Hendrycks and Gimpel 2016), elementwise over any shape."""
    if kind is Activation.SILU:
        return F.silu(x)
    return F.gelu(x, approximate="tanh" if kind is Activation.GELU_TANH else "none")


def gated_activation(x: Tensor, kind: Activation) -> Tensor:
    """act(first half) · second half (Shazeer 2020). ``x`` [..., 2I] → [..., I]."""
    gate, up = x.float().chunk(2, dim=-1)
    return (activation(gate, kind) * up).to(x.dtype)


def route(router_logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """The ``top_k`` experts of each token, best first: (weights [T, top_k] float32, ids [T, top_k] int64); softmax over all, then the best.

    Of equals the lower index wins (topk leaves that open, and bf16 logits are often equal).
    """
    probabilities = torch.softmax(router_logits.float(), dim=-1)
    weights, experts = (x[..., :top_k] for x in torch.sort(probabilities, dim=-1, descending=True, stable=True))
    if renormalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights, experts


def moe(
    x: Tensor,  # [T, H]
    router_logits: Tensor,  # [T, E]
    gate_up: Tensor,  # [E, 2I, H]
    down: Tensor,  # [E, H, I]
    top_k: int,
    renormalize: bool,
    kind: Activation,
) -> Tensor:
    """Sparse feed-forward (Shazeer et al. 2017): each token's ``top_k`` experts, weighted. Returns [T, H]; other experts are not read."""
    weights, experts = route(router_logits, top_k, renormalize)
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in torch.unique(experts).tolist():
        tokens, choice = torch.where(experts == expert)
        inner = gated_activation(F.linear(x[tokens], gate_up[expert]), kind)
        out.index_add_(0, tokens, F.linear(inner, down[expert]).float() * weights[tokens, choice].unsqueeze(1))
    return out.to(x.dtype)
