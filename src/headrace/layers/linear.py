"""The linear layer: a weight, and the operations that it is part of; and the residual stream that it adds to.

What lives here: Linear, alone and with what stands around it; the stream as one half of a block leaves it for the next.
What may not: weight formats (quant/), kernels, reading checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headrace.kernels.candidate import Facts, WeightFacts
from headrace.kernels.inputs import AdapterRows
from headrace.kernels.linear.epilogue import MOST_ROWS, Epilogue, Fuse
from headrace.kernels.linear.packed import Activated, Normed
from headrace.kernels.operations import (
    ACTIVATED_LINEAR,
    ACTIVATION,
    ADD_SPARSE,
    ADDED_LINEAR,
    FUSED_LINEAR,
    GATED_ACTIVATION,
    GATED_LINEAR,
    LINEAR,
    NORMED_LINEAR,
    PACKED_FUSED,
    PACKED_LINEAR,
)
from headrace.layers.context import LayerContext, empty_parameter
from headrace.layers.delta import Delta
from headrace.layers.packed import Piece, create_pieces
from headrace.layers.shared_rows import SharedRows
from headrace.layers.wide_copy import TakingTurns, fill, has_copy, least_rows
from headrace.parallel.group import Group
from headrace.sites import Role, Split, Weight
from headrace.spec import Activation


class Norm(Protocol):
    eps: float
    scale: Tensor  # [hidden]: what normed values are multiplied by, for a kernel that does part of the norm

    def forward(
        self, x: Tensor, residual: Tensor | None = None
    ) -> tuple[Tensor, Tensor]: ...  # norm(x + residual), x + residual


@dataclass(slots=True)
class Stream:
    """What one step has computed so far. Whoever adds a result may leave it ``pending`` for the norm that follows,
    which adds it at no cost; or add it and leave that norm half done: ``scaled`` by its weight, to be divided by the
    root of the mean of ``squares``; or have done it: ``ready``.

    ``projected``: the norm that follows and the GEMM behind it, where whoever came last made them, too.
    ``takes_norms``, ``takes_sums``: GEMMs of this step take in norms and sums, or sums alone, where they have a
    kernel for it. ``post_norm``: what a norm gives is the stream from there on. ``adapters``: rows that adapters add to.
    ``shared``: ``sum`` and ``pending`` are of this rank's rows alone.
    """

    sum: Tensor  # [tokens, hidden]
    takes_norms: bool
    takes_sums: bool
    pending: Tensor | None = None  # [tokens, hidden]
    scaled: Tensor | None = None  # [tokens, hidden]
    projected: Tensor | None = None  # [tokens, out]
    adapters: AdapterRows | None = None
    squares: Tensor | None = None  # [pieces, tokens], float32: partial sums
    ready: Tensor | None = None  # [tokens, hidden]
    post_norm: bool = False
    shared: SharedRows | None = None

    @property
    def rows(self) -> int:
        return len(self.sum) if self.shared is None else self.shared.rows

    def normed(self, norm: Norm) -> Tensor:
        """The norm of all that has been computed, which is added up then."""
        x = self.normed_own(norm)
        return x if self.shared is None else self.shared.gathered(x)

    def normed_own(self, norm: Norm) -> Tensor:
        """The same of the rows that the stream has here."""
        if self.ready is not None:
            x, self.ready = self.ready, None
            return x
        if self.pending is None:
            x, total = norm.forward(self.sum)[0], self.sum
        else:
            x, total = norm.forward(self.pending, self.sum)
        self.sum, self.pending = x if self.post_norm else total, None
        return x

    def through(self, product: Normed, norm: Norm) -> Tensor:
        """As ``normed``, and a GEMM that takes the norm in."""
        x, residual = (self.sum, None) if self.pending is None else (self.pending, self.sum)
        y, self.sum = product(x, norm.scale, norm.eps, residual)
        self.pending = None
        return y

    def total(self, y: Tensor, ranks: Group | None) -> Tensor:
        """Of what each of the ranks has of all rows: the sum, of those rows that the stream has here."""
        if ranks is None:
            return y
        return ranks.all_reduce(y) if self.shared is None else self.shared.total(y)

    def whole(self) -> Tensor:  # [tokens, hidden]
        """All that has been computed, of all rows."""
        x = self.sum if self.pending is None else self.sum + self.pending
        return x if self.shared is None else self.shared.gathered(x)

    def narrow(self, rows: Tensor) -> None:
        """To these alone, which all ranks have. Behind a norm."""
        self.sum, self.shared = (self.sum if self.shared is None else self.whole())[rows], None

    def add(self, y: Tensor, norm: Norm) -> None:
        """A result onto the sum at once. Where GEMMs take in norms, that before the next one is left half done, as
        they leave it."""
        self.sum = self.sum + y
        if self.takes_norms:
            self.scaled = (self.sum * norm.scale).to(y.dtype)
            self.squares = self.sum.float().square().sum(1).unsqueeze(0)

    def renormed(self, norm: Norm | None) -> None:
        """What is pending passes a norm of its own before it is added."""
        if norm is not None and self.pending is not None:
            self.pending = norm.forward(self.pending)[0]


T = TypeVar("T")
W = TypeVar("W")


class Linear(nn.Module):
    """y = x · Wᵀ (+ bias). ``.weight`` [out, in] and ``.bias`` [out] are there to be filled until ``finish_loading``.

    ``normed`` is a norm before it and an ``activation`` after it, ``onto`` adds its result to the residual stream,
    ``activated_onto`` with an activation before it: each in one kernel where there is one for it, else part by part.
    ``tie_weight`` makes the layer read another layer's tensor (a tied head) and hold none of its own. A weight with
    formats is held in ``pieces`` instead of ``weight``.
    ``delta``: what adapters add, in steps that have some.
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None
    pieces: nn.ModuleList

    def __init__(self, site: Weight, context: LayerContext, activation: Activation | None = None) -> None:
        super().__init__()
        self.site = site
        self.dtype = context.dtype
        self.delta: Delta | None = None
        self.weight_bytes = 0  # held by this layer beyond its parameters, once loading has finished
        self.copy_bytes = 0  # in a widened copy, beside these
        self._wide: Tensor | None = None  # [out, in]
        self._packed_facts: WeightFacts | None = None
        self._packed_bias: Tensor | None = None
        self._context = context
        self._activation = activation
        group, row = context.group, site.split is Split.ROW
        hidden = site.outs if row else site.ins
        folds = context.composes and (group is None or group.max_onto_rows(hidden, context.dtype) > 0)
        # of ranks, whose sums come too late for a GEMM, these take in what stands after it
        self._composed = folds and (group is None or not row) and site.layer is not None
        self._onto = group.all_reduce_onto if folds and group is not None and row else None
        self._gates = context.composes and site.gated
        self._shared = False
        self._apply_weight: Callable[[Tensor], Tensor] = self._unfinished
        self._fused: Fuse | None = None
        self._held: Any = None  # the weight, as kernels of few rows have it
        self._gated: Callable[[Tensor, Activation], Tensor | None] | None = None
        self._added: Callable[[Tensor, Tensor], Tensor] | None = None
        self._normed: Normed | None = None
        self._activated: Activated | None = None
        self._act: Callable[[Tensor, Activation], Tensor] | None = None
        # formats that round inputs have a kernel that takes in the norm before them
        takes = self._onto is not None and all(form.multiplies_inputs for form in site.formats)
        self._onto_normed = group.all_reduce_normed if takes and group is not None else None
        self._sum = group.all_reduce if group is not None and row else None
        self._in_chunks = not site.formats  # codes would be widened for each chunk
        self._ranks = group if row else None  # whose results are added up
        if activation is not None:
            self._act = context.kernels.choose(GATED_ACTIVATION if site.gated else ACTIVATION, Facts(context.dtype))
        self.register_parameter("weight", None if site.formats else empty_parameter(context, site.outs, site.ins))
        self.register_parameter("bias", empty_parameter(context, site.outs) if site.bias else None)
        self.pieces = create_pieces(site, context)

    def tie_weight(self, weight: nn.Parameter | None, pieces: nn.ModuleList) -> None:  # [out, in]
        """Reads what stays its owner's (and is named once by ``named_parameters``). Before ``finish_loading``."""
        self.weight, self.pieces = weight, pieces
        self._shared = True

    def finish_loading(self) -> None:
        """Packs the filled parameters for the chosen kernels and drops what these do not need. Once."""
        site, kernels = self.site, self._context.kernels
        formats = tuple(form.label for form in site.formats)
        facts = WeightFacts(
            self._context.dtype,
            site.ins,
            site.outs,
            shared=self._shared,
            routes=site.role is Role.ROUTER,
            formats=formats,
        )
        bias = self._take("bias")
        if site.formats:
            self._finish_packed(bias, facts)
            return
        held = 0 if self._shared else sum(t.nbytes for t in (self.weight, bias) if t is not None)
        weight = self._take("weight")
        assert weight is not None
        operands = weight, bias
        if self._composed or self._gates:
            self._fused = _made(kernels.offer(FUSED_LINEAR, replace(facts, gated=site.gated)), *operands)
            self._held = None if self._fused is None else weight
        if site.gated and not site.bias:
            self._gated = _made(kernels.offer(GATED_LINEAR, facts), *operands)
        if self._composed and site.split is Split.ROW and not self._context.sparse:
            self._added = _made(kernels.offer(ADDED_LINEAR, facts), *operands)
        # ranks' sums leave norms half done for fewer rows than a fused GEMM takes, and what is left comes here
        fused = self._fused is not None and (self._context.group is None or site.gated)
        self._apply_weight = kernels.choose(LINEAR, replace(facts, fused=fused))(*operands)
        self.weight_bytes = getattr(self._apply_weight, "num_bytes", held)

    def _finish_packed(self, bias: Tensor | None, facts: WeightFacts) -> None:
        """Where no kernel takes in what stands around such a GEMM, that is computed part by part."""
        pieces, kernels = [piece for piece in self.pieces if isinstance(piece, Piece)], self._context.kernels
        for piece in pieces:
            piece.finish_loading()
        codings, eights = tuple(piece.form.coding for piece in pieces), tuple(piece.form.eight for piece in pieces)
        formats = tuple(piece.form.label for piece in pieces)
        parts = tuple(piece.outs for piece in pieces) if len(set(codings)) > 1 else ()
        facts = replace(facts, gated=self.site.gated, codings=codings, eights=eights, formats=formats, parts=parts)
        beside = _beside(pieces)
        if beside is not None:
            add, product = kernels.choose(ADD_SPARSE, Facts(facts.dtype)), kernels.choose(PACKED_LINEAR, facts)
            self._apply_weight = _Sum(product(pieces, bias), partial(add, **beside))
        elif self._composed:
            self._fused = _made(kernels.offer(PACKED_FUSED, facts), pieces, bias)
            self._held = getattr(self._fused, "weight", None)
        if (
            beside is None
            and self._context.composes
            and not self._context.sparse
            and self.site.split is Split.COLUMN
            and self.site.layer is not None
        ):
            self._normed = _made(kernels.offer(NORMED_LINEAR, facts), pieces, bias)
        if beside is None and self._context.composes and self.site.role is Role.DOWN:
            self._activated = _made(kernels.offer(ACTIVATED_LINEAR, facts), pieces, bias)
        if beside is None:
            facts = replace(facts, fused=self._fused is not None)
            self._apply_weight = kernels.choose(PACKED_LINEAR, facts)(pieces, bias)
            self._gated = getattr(self._apply_weight, "gated", None) if self.site.gated else None
            self._packed_facts, self._packed_bias = facts, bias
        self.weight_bytes = (0 if self._shared else sum(piece.num_bytes for piece in pieces)) + (
            0 if bias is None else bias.nbytes
        )

    def reserve_copy(self) -> None:
        """Memory for a widened copy (wide_copy.py), by which many rows are multiplied from ``use_copy`` on. After
        ``finish_loading``; weights that have none are left as they are."""
        if self._packed_facts is not None and has_copy(self.site) and not self._shared:
            self._wide = torch.empty(self.site.outs, self.site.ins, dtype=self.dtype, device=self._context.device)
            self.copy_bytes = self._wide.nbytes

    def fill_copy(self) -> None:
        if self._wide is not None:
            fill(self._wide, [piece for piece in self.pieces if isinstance(piece, Piece)])

    def use_copy(self) -> None:
        """Once it is filled."""
        packed, wide, kernels = self._packed_facts, self._wide, self._context.kernels
        if packed is None or wide is None:
            return
        self._in_chunks = True
        # few rows go through fused_linear, or are multiplied by the codes
        facts = WeightFacts(self.dtype, self.site.ins, self.site.outs, fused=True)
        operands = wide, self._packed_bias
        many = kernels.choose(LINEAR, facts)(*operands)
        self._apply_weight = turns = TakingTurns(self._apply_weight, many, least_rows(packed, kernels.context))
        if self.site.gated and not self.site.bias:
            gated = _made(kernels.offer(GATED_LINEAR, facts), *operands)
            self._gated = None if gated is None else turns.gated(gated, self._gated)
        if self._composed and self.site.split is Split.ROW and not self._context.sparse:
            self._added = _made(kernels.offer(ADDED_LINEAR, facts), *operands)
        if (held := getattr(many, "num_bytes", None)) is not None:  # a kernel's own form of it
            self._wide, self.copy_bytes = None, held

    def in_rows(self) -> tuple[Tensor, Tensor] | None:
        """A weight of 8 bits with a scale a row: it, and these, [out], float32. After ``finish_loading``; None: its
        parts do not lie one below another."""
        pieces = [piece for piece in self.pieces if isinstance(piece, Piece)]
        parts = [piece.tensors[0]["weight"] for piece in pieces]
        at = parts[0].data_ptr()
        for part in parts:
            if part.data_ptr() != at:
                return None
            at += part.nbytes
        scales = [piece.tensors[0]["scale"].float().reshape(-1).expand(piece.outs) for piece in pieces]
        return parts[0].as_strided((self.site.outs, self.site.ins), (self.site.ins, 1)), torch.cat(scales)

    def stand_apart(self) -> None:
        """It takes in nothing of what stands around it. Before ``finish_loading``."""
        self._composed = self._gates = False
        self._context = replace(self._context, composes=False)

    def watch(self, see: Callable[[Tensor], None]) -> None:
        """From now on ``see`` is shown all inputs, [..., in], and the GEMM is computed by itself. After
        ``finish_loading``."""
        apply = self._apply_weight

        def watched(x: Tensor) -> Tensor:
            see(x)
            return apply(x)

        self._apply_weight, self._fused, self._gated, self._added = watched, None, None, None
        self._normed = self._activated = None

    def _take(self, name: str) -> Tensor | None:
        """A filled parameter, which the layer drops: a kernel holds what it needs, or its own form of it."""
        taken = getattr(self, name)
        self.register_parameter(name, None)
        return None if taken is None else taken.data

    @property
    def takes_norms(self) -> bool:
        """Whether for few rows a norm, a sum and an activation can be parts of it, or of the sum over ranks after it."""
        return self._fused is not None or self._onto is not None

    @property
    def takes_sums(self) -> bool:
        """Whether for many rows the sum after it can be; of one with no sum after it there is nothing to take."""
        return self._added is not None or self.site.split is not Split.ROW

    @property
    def plain(self) -> Any:
        """The weight [out, in], a tensor or in codes, for who takes all of the GEMM of few rows in."""
        return None if self._fused is None or self.site.bias else self._held

    def forward(self, x: Tensor, adapters: AdapterRows | None = None) -> Tensor:  # [..., in] → [..., out]
        y = self._apply_weight(x)
        if (delta := self._adapted(adapters)) is not None and adapters is not None:
            delta.add(y, x, adapters)
        return y

    def warm(self, x: Tensor) -> None:
        """The GEMM of so many tokens, alone and onto a sum: the library picks a kernel for each and loads it then, for
        which it waits until the device is idle."""
        self.forward(x)
        if self._added is not None:
            self._added(x, x.new_zeros(len(x), self.site.outs))

    def _adapted(self, adapters: AdapterRows | None) -> Delta | None:
        """What has to be added in such a step."""
        return self.delta if adapters is not None and self.delta is not None and self.delta.touched else None

    def normed(self, stream: Stream, norm: Norm, *, activates: bool = True) -> Tensor:
        """→ [tokens, out], or half of it after a gate; ``activates`` off: that is left to who takes it in."""
        delta = self._adapted(stream.adapters)
        if self._fused is not None and stream.scaled is not None and (delta is None or self._activation is None):
            x, stream.scaled = stream.scaled, None
            y = self._fused(x, Epilogue(stream.squares, norm.eps, gate=self._activation))[0]
            if delta is not None and stream.adapters is not None:
                delta.add(y, x, stream.adapters, stream.squares, norm.eps)
            return y
        apart = stream.ready is not None or stream.shared is not None
        if self._normed is not None and delta is None and not apart and self._many(stream):
            y = stream.through(self._normed, norm)
            return (
                y if self._act is None or self._activation is None or not activates else self._act(y, self._activation)
            )
        x, stream.scaled = stream.normed(norm), None
        if self._act is None or not activates:
            return self.forward(x, stream.adapters)
        return self.activated(x, stream.adapters)

    def _many(self, stream: Stream) -> bool:
        """Whether there is no kernel that takes in more than a norm or an activation."""
        few = self._fused is not None or (self._onto is not None and stream.takes_norms)
        return not few or stream.rows > MOST_ROWS

    def takes_activation(self, stream: Stream) -> bool:
        """Whether in this step the gated activation before it can be a part of it."""
        return self._activated is not None and self._many(stream) and self._adapted(stream.adapters) is None

    def activated(self, x: Tensor, adapters: AdapterRows | None = None) -> Tensor:  # [tokens, in]
        assert self._act is not None and self._activation is not None
        alone = self._adapted(adapters) is None
        if self._fused is not None and alone and len(x) <= MOST_ROWS:  # whose norm could not be taken in
            return self._fused(x, Epilogue(gate=self._activation))[0]
        gated = self._gated if alone and len(x) > MOST_ROWS else None
        y = None if gated is None else gated(x, self._activation)
        return self._act(self.forward(x, adapters), self._activation) if y is None else y

    def activated_onto(self, stream: Stream, x: Tensor, kind: Activation) -> None:  # [tokens, 2 in]
        assert self._activated is not None, "asked for where it takes an activation in"
        stream.pending = stream.total(self._activated(x, kind), self._ranks)

    def onto(self, stream: Stream, x: Tensor, following: Norm) -> None:  # [tokens, in]
        """``following``: the norm that the stream goes through next."""
        if self._onto is not None and stream.takes_norms:
            y = self.forward(x, stream.adapters)
            stream.sum, stream.scaled, stream.squares = self._onto(y, stream.sum, following.scale)
            return
        delta, fuses = self._adapted(stream.adapters), self._fused is not None and stream.takes_norms
        if self._sum is not None:
            splits = self._in_chunks and delta is None
            product, x = (self._apply_weight, x) if splits else (_itself, self.forward(x, stream.adapters))
            if stream.shared is not None:
                stream.pending = stream.shared.total(product(x))
                return
            normed = self._onto_normed and self._onto_normed(product, x, stream.sum, following.scale, following.eps)
            if normed is not None:
                stream.sum, stream.ready = normed
            else:
                stream.pending = self._sum(product(x))
            return
        if not fuses and (self._added is None or not stream.takes_sums):
            stream.pending = self.forward(x, stream.adapters)
            return
        if delta is not None and stream.adapters is not None:
            if not delta.adds_only:
                stream.add(self.forward(x, stream.adapters), following)
                return
            delta.add(stream.sum, x, stream.adapters)  # in place: nothing else holds it by now
        if fuses and self._fused is not None:
            stream.sum, stream.scaled, stream.squares = self._fused(
                x, Epilogue(residual=stream.sum, scale=following.scale)
            )
        elif self._added is not None:
            stream.sum = self._added(x, stream.sum)

    def _unfinished(self, x: Tensor) -> Tensor:
        assert self.weight is not None, "a weight with formats is computed with only once loading has finished"
        return F.linear(x, self.weight, self.bias)


def _itself(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True, slots=True)
class _Sum:
    """A GEMM, and what is added to it."""

    product: Callable[[Tensor], Tensor]
    add: Callable[[Tensor, Tensor], None]

    def __call__(self, x: Tensor) -> Tensor:
        y = self.product(x).contiguous()
        self.add(y.view(-1, y.shape[-1]), x.reshape(-1, x.shape[-1]))
        return y


def _beside(pieces: Sequence[Piece]) -> dict[str, Tensor] | None:
    """All that pieces hold apart as one sparse matrix, as ``add_sparse`` takes it; None: nothing."""
    if not any(piece.apart for piece in pieces):
        return None
    counts = [piece.apart["ends"].diff() if piece.apart else None for piece in pieces]
    like = next(each for each in counts if each is not None)
    rows = torch.cat(
        [like.new_zeros(piece.outs) if own is None else own for piece, own in zip(pieces, counts, strict=True)]
    )
    held = {name: torch.cat([piece.apart[name] for piece in pieces if piece.apart]) for name in ("columns", "values")}
    return {"ends": F.pad(rows.cumsum(0), (1, 0)).int(), **held}


def _made(make: Callable[[W, Tensor | None], T | None] | None, weight: W, bias: Tensor | None) -> T | None:
    return None if make is None else make(weight, bias)
