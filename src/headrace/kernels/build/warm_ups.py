"""Small calls that between them compile every specialisation a model will launch.

What lives here: inputs that several operations' warm-ups share. What may not: kernels, threads, the calls (each
operation's candidates.py).

A kernel is compiled for its element types, its constants, and for whether each integer it is given is 1, a multiple of
16 or neither; so inputs have a model's widths but few tokens. Inputs are made when a call is made, in the thread that
makes it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from headrace.kernels.candidate import CallSite, Sizes
from headrace.kernels.linear.epilogue import MOST_ROWS

TOKENS = 2  # not 1, which kernels may be specialised for; of one size all batches are


def token_counts(site: CallSite[Any]) -> tuple[int, ...]:
    """Tokens for which a kernel is built anew: few, whose kernels may begin early, and many."""
    return (TOKENS, MOST_ROWS + 1) if site.pdl else (TOKENS,)


def corner(size: int, largest: int) -> int:
    """A smaller size that kernels cannot tell from ``size``."""
    return size if size <= largest else largest + size % 16


def heads(site: CallSite[Any], sizes: Sizes, tokens: int) -> tuple[Tensor, ...]:
    """q, k and v as they come out of the merged product."""
    spec = sizes.spec
    return site.zeros(tokens, sum(spec.qkv_heads), spec.head_dim).split_with_sizes(spec.qkv_heads, dim=1)
