"""The twin of the sparse feed-forward network.

What lives here: formulas in plain torch. What may not: anything that is fast at the cost of being plain.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels.linear.epilogue import Epilogue, Fused
from headrace.kernels.norm.reference import gated_activation
from headrace.spec import Activation

FEW = 4  # tokens whose experts are read for each of them
MOST = 32  # that one launch takes
MOST_CODED = 8  # the same, where inputs are rounded: of more the grouped products are as quick


def route(router_logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """The ``top_k`` experts of each token, best first: (weights [T, top_k] float32, ids [T, top_k] int64); softmax over
    all, then the best.

    Of equals the lower index wins (topk leaves that open, and bf16 logits are often equal).
    """
    probabilities = torch.softmax(router_logits.float(), dim=-1)
    weights, experts = (x[..., :top_k] for x in torch.sort(probabilities, dim=-1, descending=True, stable=True))
    if renormalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights, experts


def here(experts: Tensor, places: Tensor | None) -> Tensor:
    """Where the experts of each token, [T, top_k], lie on this rank; -1: on another. ``places`` [turns, E] int32 says so
    for rows t with the same t mod turns; None: all are here, in their order."""
    if places is None:
        return experts
    turn = torch.arange(len(experts), device=experts.device) % len(places)
    return places.long()[turn.unsqueeze(1), experts]


def moe(
    x: Tensor,  # [T, H]
    router_logits: Tensor,  # [T, E]
    gate_up: Tensor,  # [E, 2I, H], of experts that are here
    down: Tensor,  # [E, H, I], likewise
    top_k: int,
    renormalize: bool,
    kind: Activation,
    places: Tensor | None = None,  # [turns, E], int32
    linear: Callable[[Tensor, Tensor, Tensor | None], Tensor] = F.linear,
) -> Tensor:
    """Sparse feed-forward (Shazeer et al. 2017): each token's ``top_k`` experts, weighted. Returns [T, H]; other
    experts are not read. With ``places`` (see ``here``), what this rank's experts contribute."""
    weights, experts = route(router_logits, top_k, renormalize)
    experts = here(experts, places)
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in torch.unique(experts[experts >= 0]).tolist():
        tokens, choice = torch.where(experts == expert)
        inner = gated_activation(linear(x[tokens], gate_up[expert], None), kind)
        out.index_add_(0, tokens, linear(inner, down[expert], None).float() * weights[tokens, choice].unsqueeze(1))
    return out.to(x.dtype)


def fused_moe(
    x: Tensor,
    router_logits: Tensor,
    gate_up: Any,
    down: Any,
    top_k: int,
    renormalize: bool,
    kind: Activation,
    epilogue: Epilogue,
    *,
    apply: Callable[..., Tensor] = moe,
) -> Fused:
    """``apply`` (``moe``, or ``packed_moe``) behind a norm that is half done, onto the stream, for few tokens:
    ``x`` [T, H] is divided by the root of the mean of ``epilogue.squares``, and what follows is as of ``fused_linear``."""
    assert epilogue.squares is not None and epilogue.residual is not None and epilogue.scale is not None
    rstd = torch.rsqrt(epilogue.squares.sum(0) / x.shape[1] + epilogue.eps).unsqueeze(1)
    y = apply((x.float() * rstd).to(x.dtype), router_logits, gate_up, down, top_k, renormalize, kind)
    y = (y.float() + epilogue.residual.float()).to(x.dtype)
    return y, (y.float() * epilogue.scale.float()).to(x.dtype), y.float().square().sum(1).unsqueeze(0)
