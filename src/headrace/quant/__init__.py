"""How a linear layer holds its weight: one file a family of formats.

What lives here: the QuantMethod protocol. What may not: formats, kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from headrace.kernels import Kernels
from headrace.kernels.around import Around, Fused
from headrace.spec import Activation

Apply = Callable[[Tensor], Tensor]
ApplyFused = Callable[[Tensor, Around], Fused]
ApplyAdded = Callable[[Tensor, Tensor], Tensor]
ApplyGated = Callable[[Tensor, Activation], Tensor | None]


@dataclass(frozen=True, slots=True)
class LinearShape:
    """y [..., out_features] = x [..., in_features] · Wᵀ (+ bias), in ``dtype`` on ``device``.

    ``around``: the layer is used with what stands around it, too. ``gated``: then as a gate and what it gates, one behind the other.
    ``added``: its result is added to the residual stream.
    """

    in_features: int
    out_features: int
    bias: bool
    dtype: torch.dtype
    device: torch.device
    around: bool = False
    gated: bool = False
    added: bool = False


@dataclass(frozen=True, slots=True)
class Applies:
    """What a layer can be asked for. ``fused``: with what stands around it, for few rows. ``gated``: its first half through an activation,
    times its second. ``added``: added to a residual, which it may overwrite. None: not here. ``held``: bytes of the form that the kernel made
    of the parameters, where it is not as large as they were."""

    plain: Apply
    fused: ApplyFused | None = None
    gated: ApplyGated | None = None
    added: ApplyAdded | None = None
    held: int | None = None


class QuantMethod(Protocol):
    """A weight format. ``create`` and ``load`` are called once each; the callables that ``load`` returns apply the layer."""

    name: str

    def create(self, layer: nn.Module, shape: LinearShape) -> None:
        """Registers on ``layer`` the parameters that the loader fills."""
        ...

    def load(self, layer: nn.Module, shape: LinearShape, kernels: Kernels, *, shared: bool) -> Applies:
        """Turns the filled parameters into what the kernel wants; drops them unless the kernel reads them as they are.

        More than the plain one where the shape says so and there is a kernel for it.

        ``shared``: the weight belongs to another layer too (a tied head) and must stay; no second copy may be made.
        """
        ...
