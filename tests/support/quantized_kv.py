"""Paged caches in 8 and 4 bits for kernel tests, beside what they mean in float32.

What lives here: cases whose unread slots are poisoned. What may not: tests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from headrace.kernels.attention import kv_codes, reference
from headrace.kernels.inputs import Quantized
from headrace.spec import KV_FORMATS
from tests.support.kernel_cases import PagedCase

FORMATS = tuple(KV_FORMATS)


def shared_scales(name: str, kv_heads: int) -> Quantized:
    """Where tokens share scales, they differ by head."""
    form = KV_FORMATS[name]
    return (
        Quantized(form)
        if form.scales
        else Quantized(form, torch.linspace(0.03, 0.5, kv_heads), torch.linspace(0.2, 0.01, kv_heads))
    )


class QuantizedCase(PagedCase):
    """As PagedCase, in a format; ``wide_k`` and ``wide_v`` are what its caches mean, [blocks, Hk, block_size, D],
    float32."""

    def __init__(
        self,
        name: str,
        lengths: Sequence[tuple[int, int]],
        *,
        heads: int,
        kv_heads: int,
        dim: int,
        dtype: torch.dtype,
        block_size: int = 8,
    ) -> None:
        super().__init__(lengths, heads=heads, kv_heads=kv_heads, dim=dim, dtype=dtype, block_size=block_size)
        self.quantized = shared_scales(name, kv_heads)
        form, blocks = self.quantized.format, len(self.k_cache)
        held = torch.full((blocks, 2, 2, kv_heads, block_size, form.token_bytes(dim)), 255, dtype=torch.uint8)
        places = torch.arange(blocks * block_size)
        at = places // block_size, places % block_size
        real = ~self.k_cache[:, 0].isnan().any(-1).flatten()  # blocks that somebody owns
        wide = []
        for half, (plain, scales) in enumerate(
            ((self.k_cache, self.quantized.k_scales), (self.v_cache, self.quantized.v_scales))
        ):
            kv_codes.write(held[:, 1, half], plain[at[0], :, at[1]][real], places[real], form, scales)
            found = kv_codes.read(held[:, 1, half], *at, dim, form, scales)
            wide.append(found.view(blocks, block_size, kv_heads, dim).transpose(1, 2))
        self.k_cache, self.v_cache, (self.wide_k, self.wide_v) = held[:, 1, 0], held[:, 1, 1], wide

    def poison(self, window: int | None) -> None:
        """Every byte of a slot that no query sees is 255: NaN, or a scale of it."""
        for sequence, (count, context) in enumerate(self.lengths):
            first = 0 if window is None else max(0, context - count + 1 - window)
            unseen = torch.tensor(
                [*range(first), *range(context, -(-context // self.block_size) * self.block_size)], dtype=torch.long
            )
            blocks = self.table[sequence, unseen // self.block_size].long()
            for cache in (self.k_cache, self.v_cache):
                for part in kv_codes.parts(cache, self.quantized.format):
                    part[blocks, :, unseen % self.block_size] = 255

    def run(self, attention: Callable[..., Tensor], window: int | None = None, soft_cap: float | None = None) -> Tensor:
        return attention(
            self.q, self.k_cache, self.v_cache, self.inputs, self.q.shape[2] ** -0.5, window, soft_cap, self.quantized
        )

    def meant(self, window: int | None = None, soft_cap: float | None = None) -> Tensor:
        """Plain attention over what the codes mean."""
        return reference.paged_attention(
            self.q, self.wide_k, self.wide_v, self.inputs, self.q.shape[2] ** -0.5, window, soft_cap
        )

    def part(self, row: int, first: int, end: int) -> QuantizedCase:
        alone: QuantizedCase = object.__new__(QuantizedCase)
        alone.__dict__ |= super().part(row, first, end).__dict__ | {"quantized": self.quantized}
        return alone


def written(write: Callable[..., Tensor], name: str, x: Tensor, rope: bool = True) -> tuple[Tensor, Tensor]:
    """What a cache write leaves of keys and values ``x`` [T, Hk, D] in blocks of 8, and the rotated queries."""
    quantized, (tokens, heads, dim) = shared_scales(name, x.shape[1]), x.shape
    cache = torch.full((tokens // 8 + 2, 2, heads, 8, quantized.format.token_bytes(dim)), 7, dtype=torch.uint8)
    angles = torch.linspace(0, 1, 300 * (dim // 4 * 2)).view(300, -1) if rope else None
    slots = torch.randperm(8 * len(cache), generator=torch.Generator().manual_seed(3))[:tokens]
    slots[1] = -1
    q = x.repeat(1, 2, 1)
    q = write(q, x.clone(), x.flip(0), torch.arange(5, 5 + tokens), angles, cache[:, 0], cache[:, 1], slots, quantized)
    return cache, q


def awkward(tokens: int, heads: int, dim: int, dtype: torch.dtype) -> Tensor:
    """Keys with zeros, outliers, offsets, tiny numbers and none at all."""
    x = torch.randn((tokens, heads, dim), generator=torch.Generator().manual_seed(dim)) * 3
    x[2] = 0.0
    x[3] *= 1e-6
    x[4, :, 1] *= 300
    x[5] += 40
    x[6, 0, 0], x[7, 0, dim - 1], x[8, 0, 2] = torch.nan, torch.inf, -torch.inf
    x[9], x[10] = -7.5, x[10].abs().neg()
    return x.to(dtype)
