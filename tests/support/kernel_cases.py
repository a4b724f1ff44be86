"""Inputs for kernel tests: paged caches whose unread blocks are poisoned, and the tolerance of each element type."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import headrace.kernels as registry
from headrace.kernels import DECLARED, Kernels
from headrace.kernels.build.c_compiler import native_library
from headrace.kernels.candidate import CallSite, Candidate, Card, Declined, KernelContext
from headrace.kernels.inputs import AttentionInputs
from headrace.kernels.operations import OPERATIONS, Operation
from tests.support.specs import LLAMA_8B

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TOLERANCE = {
    torch.float32: 2e-6,
    torch.bfloat16: 1.6e-2,
    torch.float16: 2e-3,
}  # of the largest value: one rounding and a little


STATED = {  # what a call site states where a test does not care
    "weight_dtype": torch.float32, "in_features": 64, "out_features": 64, "head_dim": 64, "num_heads": 8, "num_kv_heads": 2,
    "num_experts": 8, "top_k": 2, "parts": (64,), "rank": 8, "chunk": 4096, "rotary_dim": 64, "normed": None, "window": None, "soft_cap": None,
    "spec": LLAMA_8B,
}  # fmt: skip


def called(op: str, **facts: Any) -> tuple[Operation[Any, Any], Any]:
    """An operation, and a call site's facts as it wants them."""
    operation = OPERATIONS[op]
    wanted = {each.name for each in fields(operation.facts)}
    return operation, operation.facts(**{name: value for name, value in STATED.items() if name in wanted} | facts)


def carried_out(op: str, *candidates: Candidate[Any]) -> dict[str, Operation[Any, Any]]:
    """The operations, one of them by these candidates alone."""
    return {**registry.OPERATIONS, op: replace(registry.OPERATIONS[op], candidates=candidates)}


def using(**techniques: bool) -> frozenset[str]:
    """Techniques in use: those that candidates declare, and these or not."""
    off = {name for name, on in techniques.items() if not on}
    return (DECLARED | techniques.keys()) - off


H200 = Card("NVIDIA H200", (9, 0), 132)
AMPERE = Card("NVIDIA A100-SXM4-80GB", (8, 0), 108)
ADA, BLACKWELL = Card("NVIDIA L40S", (8, 9), 142), Card("NVIDIA B200", (10, 0), 148)


def on_card(op: str, card: Card = H200, *, facts: Mapping[str, Any], **techniques: bool) -> CallSite[Any]:
    """A call site of an engine on that card."""
    context = KernelContext(card, using(**techniques))
    return CallSite(op, torch.device("cuda"), called(op, **facts)[1], context)


def refusal(op: str, name: str, site: CallSite[Any]) -> str:
    """Why that candidate does not serve the call site; empty: it may."""
    (candidate,) = (each for each in OPERATIONS[op].candidates if each.name == name)
    return candidate.refusal(site) or ""


def native(op: str, *, batch_invariant: bool = False, **facts: Any) -> Callable[..., Any]:
    """The native candidate, or the test is skipped where the machine cannot build it."""
    found = native_library()
    if isinstance(found, Declined):
        pytest.skip(found.reason)
    techniques = using(batch_invariant=batch_invariant)
    kernels = Kernels(torch.device("cpu"), techniques=techniques, disabled=frozenset({"onednn"}))
    chosen = kernels.choose(*called(op, **facts))
    assert kernels.choices[-1].chosen == "native"
    return chosen


def assert_close(got: Tensor, want: Tensor, dtype: torch.dtype, scores: float = 0.0) -> None:
    """``scores``: the largest magnitude of one, where all of a row are so large: float32 rounds them, in whichever
    order they were summed, and their powers are off by as much. However small they are, results of zero are not close to
    them."""
    assert got.dtype == want.dtype
    worst, largest = (got.float() - want.float()).abs().max().item(), want.float().abs().max().item()
    bound = (TOLERANCE[dtype] + scores * 2**-23) * max(1.0, largest)
    assert worst <= (min(bound, largest / 2) if largest else bound), worst


class PagedCase:
    """Queries and a paged cache for ``lengths``: (query length, context length) of each sequence.

    Blocks lie in random order; those no sequence owns hold NaN, and table entries beyond a sequence are out of range.
    """

    def __init__(
        self,
        lengths: Sequence[tuple[int, int]],
        *,
        heads: int,
        kv_heads: int,
        dim: int,
        dtype: torch.dtype,
        block_size: int = 8,
        seed: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        needed = [-(-context // block_size) for _, context in lengths]
        blocks, self.block_size = sum(needed) + 3, block_size
        cache = torch.full((blocks, 2, 2, kv_heads, block_size, dim), float("nan"), dtype=dtype)
        order = torch.randperm(blocks, generator=generator)[: sum(needed)]
        cache[order] = torch.randn((len(order), *cache.shape[1:]), generator=generator).to(dtype)
        self.k_cache, self.v_cache = cache[:, 1, 0], cache[:, 1, 1]  # one layer of two: strided
        self.table = torch.full((len(lengths), max(needed, default=0) + 1), 2**30, dtype=torch.int32)
        for row, owned in enumerate(order.split(needed)):
            self.table[row, : len(owned)] = owned
        self.lengths = tuple(lengths)
        self.q = torch.randn((sum(count for count, _ in lengths), heads, dim), generator=generator).to(dtype)

    @property
    def inputs(self) -> AttentionInputs:
        counts, contexts = zip(*self.lengths, strict=True)
        starts = torch.tensor([0, *counts]).cumsum(0).int()
        slots = torch.full((sum(counts),), -1)
        return AttentionInputs(
            self.table,
            starts,
            torch.tensor(contexts, dtype=torch.int32),
            slots,
            self.block_size,
            max(counts),
            max(contexts),
        )

    def poison(self, window: int | None) -> None:
        """NaN in every slot of the sequences' own blocks that no query sees: beyond the context, behind the window."""
        for row, (count, context) in enumerate(self.lengths):
            first = 0 if window is None else max(0, context - count + 1 - window)
            unseen = torch.tensor(
                [*range(first), *range(context, -(-context // self.block_size) * self.block_size)], dtype=torch.long
            )
            blocks = self.table[row, unseen // self.block_size].long()
            for cache in (self.k_cache, self.v_cache):
                cache[blocks, :, unseen % self.block_size] = float("nan")

    def run(
        self,
        attention: Callable[..., Tensor],
        window: int | None = None,
        soft_cap: float | None = None,
        lse: Tensor | None = None,
    ) -> Tensor:
        how = self.inputs, self.q.shape[2] ** -0.5, window, soft_cap
        return attention(self.q, self.k_cache, self.v_cache, *how, *(() if lse is None else (None, lse)))

    def part(self, row: int, first: int, end: int) -> PagedCase:
        """Queries first … end - 1 of one sequence as a batch of their own, over the same cache."""
        count, context = self.lengths[row]
        start = sum(length for length, _ in self.lengths[:row])
        alone = object.__new__(PagedCase)
        alone.block_size, alone.k_cache, alone.v_cache = self.block_size, self.k_cache, self.v_cache
        alone.table, alone.lengths = self.table[row : row + 1], ((end - first, context - count + end),)
        alone.q = self.q[start + first : start + end]
        return alone
