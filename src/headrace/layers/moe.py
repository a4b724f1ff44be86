"""The sparse feed-forward: a router and its experts.

What lives here: the layer that holds them. What may not: routing and expert GEMMs (kernels), families.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from headrace.kernels.candidate import ExpertFacts
from headrace.kernels.linear.epilogue import Epilogue, Fused
from headrace.kernels.operations import FUSED_MOE, MOE, PACKED_MOE
from headrace.layers.context import LayerContext, empty_parameter
from headrace.layers.linear import Linear, Norm, Stream
from headrace.layers.packed import Piece, create_pieces
from headrace.layers.shared_rows import Dispatch
from headrace.sites import Role, Weight
from headrace.spec import Activation, MoESpec


class SparseFeedForward(nn.Module):
    """The ``top_k`` experts the router prefers for each token, weighted by its softmax (Shazeer et al. 2017)."""

    def __init__(
        self, sites: Mapping[Role, Weight], moe: MoESpec, activation: Activation, context: LayerContext
    ) -> None:
        super().__init__()
        self.router = Linear(sites[Role.ROUTER], context)
        self.later: Tensor | None = None  # the weight that the next layer begins with
        self.up, self.down = (_stacked(sites[role], context) for role in (Role.UP, Role.DOWN))
        self._spec = moe
        self._places = places_of(moe, context.device)
        self._ranks = context.group or context.experts  # whose results are added up
        self._least = context.sharing.dispatched
        self._dispatch: Dispatch | None = None
        if context.group is not None and self._places is not None and self._least is not None:
            self._dispatch = Dispatch(context.group, moe.top_k, (self._places >= 0).any(0))
        self._survivors, self._layer, self._device = context.experts, sites[Role.ROUTER].layer, context.device
        self._among = None if context.experts is None else context.experts.members  # that places are for
        self._activation = activation
        forms = [form for role in (Role.UP, Role.DOWN) for form in sites[role].formats]
        formats = tuple(form.label for form in forms)
        codings, eights = tuple(form.coding for form in forms), tuple(form.eight for form in forms)
        rounded = tuple(form.rounded_coding for form in forms)
        held = None if moe.held is None else len(moe.held)
        facts = ExpertFacts(context.dtype, moe.num_experts, moe.top_k, formats, codings, eights, rounded, held)
        kernels = context.kernels
        self._moe: Callable[..., Tensor] = kernels.choose(PACKED_MOE, facts) if formats else kernels.choose(MOE, facts)
        # of few tokens, with all that stands around
        self._fused: Callable[..., Fused] | None = kernels.offer(FUSED_MOE, facts) if context.composes else None

    def finish_loading(self) -> None:
        """Of experts in a format of their own."""
        for piece in self.modules():
            if isinstance(piece, Piece):
                piece.finish_loading()

    def watch(self, see: Callable[[Tensor, Tensor], None]) -> None:
        """From now on ``see`` is shown all inputs, [tokens, hidden], and what the router says of them, [tokens,
        experts]."""
        apply = self._moe

        def watched(x: Tensor, router_logits: Tensor, *rest: Any) -> Tensor:
            see(x, router_logits)
            return apply(x, router_logits, *rest)

        self._moe, self._fused = watched, None

    @property
    def takes_norms(self) -> bool:
        """As ``Linear`` says it."""
        return self._fused is not None

    @property
    def weight_bytes(self) -> int:
        """Held beyond parameters, once loading has finished."""
        return sum(
            piece.num_bytes for experts in (self.up, self.down) if isinstance(experts, Experts) for piece in experts
        )

    def forward(self, stream: Stream, norm: Norm, following: Norm) -> None:
        """Norm, this, and onto the stream. ``following``: the norm after it."""
        if self._fused is not None and stream.scaled is not None:
            x, epilogue = stream.scaled, Epilogue(stream.squares, norm.eps, None, stream.sum, following.scale)
            chosen, spec = self.router.normed(stream, norm), self._spec
            given = x, chosen, self.up, self.down, spec.top_k, spec.renormalize, self._activation
            stream.sum, stream.scaled, stream.squares = self._fused(*given, epilogue)
            return
        stream.scaled = None
        if self._dispatch is not None and self._dispatches(stream) and self._dispatch.possible():
            x = stream.normed_own(norm)
            stream.pending = self._dispatch.forward(x, self.router.forward(x), self._computed)
            return
        x = stream.normed(norm)
        stream.pending = stream.total(self._computed(x, self.router.forward(x)), self._ranks)

    def _computed(self, x: Tensor, router_logits: Tensor) -> Tensor:
        """By the experts that are here."""
        spec, how = self._spec, (self._activation, self._placed())
        return self._moe(x, router_logits, self.up, self.down, spec.top_k, spec.renormalize, *how)

    def _dispatches(self, stream: Stream) -> bool:
        """Whether rows go to their experts in this step; no graph holds sizes that the host reads."""
        if stream.shared is None or self._least is None or stream.rows < self._least:
            return False
        return not (stream.sum.is_cuda and torch.cuda.is_current_stream_capturing())

    def takes_output(self, output: Linear) -> int:
        """Of how many rows ``forward_behind`` takes that GEMM in, at most."""
        takes = getattr(self._fused, "takes", None)
        return takes(output.plain) if takes is not None and isinstance(self.router.plain, Tensor) else 0

    def forward_behind(self, output: Linear, x: Tensor, stream: Stream, norm: Norm, following: Norm) -> bool:
        """The same with the GEMM before it, ``output`` of ``x`` onto the stream, where all of it is one launch for this
        step, and the GEMM after it, too; else nothing was done."""
        if len(x) > self.takes_output(output) or not stream.takes_norms or stream.adapters is not None:
            return False
        spec, epilogue = self._spec, Epilogue(None, norm.eps, None, stream.sum, following.scale)
        weights = output.plain, self.router.plain, self.up, self.down
        found = cast(Any, self._fused).behind(
            x, *weights, spec.renormalize, self._activation, norm.scale, epilogue, self.later
        )
        if found is None:
            return False
        stream.sum, second, stream.squares = found
        stream.scaled, stream.projected = (second, None) if self.later is None else (None, second)
        return True

    def _placed(self) -> Tensor | None:
        """Where ranks may die, among those who are left."""
        if self._survivors is not None and self._survivors.members != self._among:
            self._among = self._survivors.members
            self._places = places_of(replace(self._spec, held=self._survivors.held(self._layer)), self._device)
        return self._places


def places_of(moe: MoESpec, device: torch.device) -> Tensor | None:
    """Where the experts that a rank holds lie among its weights, for each turn of the rows, [turns, experts] int32; -1:
    on another rank."""
    if moe.held is None:
        return None
    table = torch.full((math.lcm(*(each.copies for each in moe.held)), moe.num_experts), -1, dtype=torch.int32)
    for place, each in enumerate(moe.held):
        table[each.copy :: each.copies, each.expert] = place
    return table.to(device)


class Experts(nn.Module):
    """One weight of all experts, in pieces."""

    def __init__(self, site: Weight, context: LayerContext) -> None:
        super().__init__()
        self.pieces = create_pieces(site, context)

    def __iter__(self) -> Iterator[Piece]:
        return (piece for piece in self.pieces if isinstance(piece, Piece))


def _stacked(site: Weight, context: LayerContext) -> nn.Parameter | Experts:
    """One tensor, [experts, out, in], or the tensors of its format."""
    return Experts(site, context) if site.formats else empty_parameter(context, *site.tensors[site.name])
