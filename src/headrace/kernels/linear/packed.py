"""What weights in formats of their own are multiplied by, where no kernel takes them as they are: widened a few rows
at a time.

What lives here: the twins of those products, and what they ask of a weight. What may not: formats (quant/), layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels.candidate import EightBits
from headrace.kernels.linear.epilogue import Fuse
from headrace.kernels.linear.packing import Codes, Coding, Packed
from headrace.kernels.linear.reference import fused_linear
from headrace.kernels.moe.reference import here, route
from headrace.kernels.norm.reference import gated_activation, rms_norm
from headrace.spec import Activation


class Labelled(Protocol):
    @property
    def label(self) -> str: ...

    @property
    def eight(self) -> EightBits | None: ...


class Relaid(Protocol):
    """A matrix as a CPU's kernel has laid it out. ``pointers`` are for that kernel; ``whole``: codes are whole
    numbers."""

    @property
    def outs(self) -> int: ...

    @property
    def tensors(self) -> dict[str, Tensor]: ...

    @property
    def pointers(self) -> Any: ...

    @property
    def whole(self) -> bool: ...

    def dense(self, rows: slice | Tensor) -> Tensor:  # [rows, ins], float32
        ...


class PackedMatrix(Protocol):
    """One matrix [outs, ins], or one of each expert (``copy``). Its tensors are those that its format names.

    A candidate may lay it out for its kernel (``lay``, from which row on), once, and finds it so (``laid``) ever after.
    """

    @property
    def form(self) -> Labelled: ...

    @property
    def coding(self) -> Coding | None: ...

    @property
    def num_copies(self) -> int: ...

    outs: int
    ins: int
    tensors: tuple[dict[str, Tensor], ...]
    laid: tuple[Packed, ...]  # of each copy
    relaid: tuple[Relaid, ...]  # of each copy, on a CPU

    def has_codes(self, copy: int = 0) -> bool: ...

    def in_codes(self, rows: slice, copy: int = 0) -> Codes: ...

    def lay(self, packed: Packed, first: int) -> None: ...

    def relay(self, relaid: tuple[Relaid, ...]) -> None: ...

    def dense(self, rows: slice | Tensor, dtype: torch.dtype, copy: int = 0) -> Tensor: ...

    def activated(self, x: Tensor, copy: int = 0) -> Tensor: ...

    def blocks(self) -> Iterator[slice]: ...


Multiply = Callable[[Tensor, PackedMatrix, int], Tensor]  # x [rows, ins], matrix, copy → [rows, outs]
Normed = Callable[[Tensor, Tensor, float, Tensor | None], tuple[Tensor, Tensor]]  # as rms_norm; [rows, outs] first
Activated = Callable[[Tensor, Activation], Tensor]


def packed_linear(pieces: Sequence[PackedMatrix], bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """y = x · weightᵀ + bias, the weight being all ``pieces`` one below another; maps x [..., in] to [..., out]."""
    return lambda x: torch.cat(list(_products(x, pieces, bias)), -1)


def packed_fused_linear(pieces: Sequence[PackedMatrix], bias: Tensor | None) -> Fuse | None:
    """As ``fused_linear``, the weight being all ``pieces`` one below another. A candidate may give None: these it does
    not multiply by as one matrix."""
    return lambda x, epilogue: fused_linear(
        torch.cat([piece.dense(slice(0, piece.outs), x.dtype) for piece in pieces]), bias
    )(x, epilogue)


def normed_linear(pieces: Sequence[PackedMatrix], bias: Tensor | None) -> Normed | None:
    """``rms_norm``, and ``packed_linear`` of its first result; returns (y, residual'). A candidate may give None, as of
    ``packed_fused_linear``."""
    product = packed_linear(pieces, bias)

    def apply(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        y, total = rms_norm(x, weight, eps, residual)
        return product(y), total

    return apply


def activated_linear(pieces: Sequence[PackedMatrix], bias: Tensor | None) -> Activated | None:
    """``packed_linear`` of ``gated_activation``: ``x`` [T, 2 in]. A candidate may give None, likewise."""
    product = packed_linear(pieces, bias)
    return lambda x, kind: product(gated_activation(x, kind))


def _products(x: Tensor, pieces: Sequence[PackedMatrix], bias: Tensor | None) -> Iterator[Tensor]:
    first = 0
    for piece in pieces:
        yield widened(x, piece, 0, None if bias is None else bias[first : first + piece.outs])
        first += piece.outs


def widened(x: Tensor, piece: PackedMatrix, copy: int, bias: Tensor | None = None) -> Tensor:
    inputs = piece.activated(x, copy)
    parts = [
        F.linear(inputs, piece.dense(rows, x.dtype, copy), None if bias is None else bias[rows])
        for rows in piece.blocks()
    ]
    return torch.cat(parts, -1)


def packed_moe(
    x: Tensor,  # [T, H]
    router_logits: Tensor,  # [T, E]
    gate_up: Iterable[PackedMatrix],  # [E, 2I, H]
    down: Iterable[PackedMatrix],  # [E, H, I]
    top_k: int,
    renormalize: bool,
    kind: Activation,
    places: Tensor | None = None,  # [turns, E], int32
    *,
    multiply: Multiply = widened,
) -> Tensor:
    """As ``moe``: each token's ``top_k`` experts, weighted. Returns [T, H]; other experts are not read."""
    weights, experts = route(router_logits, top_k, renormalize)
    experts = here(experts, places)
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in torch.unique(experts[experts >= 0]).tolist():
        tokens, choice = torch.where(experts == expert)
        both = torch.cat([multiply(x[tokens], piece, expert) for piece in gate_up], -1)
        inner = gated_activation(both.to(x.dtype), kind)
        y = torch.cat([multiply(inner, piece, expert) for piece in down], -1)
        out.index_add_(0, tokens, y.float() * weights[tokens, choice].unsqueeze(1))
    return out.to(x.dtype)
