"""The adapters that a device holds: so many slots, each with room for one of the largest rank, at every weight.

What lives here: the slots' memory, bringing an adapter in. What may not: who goes in and out (cache/adapters.py decides, a
plan says so), reading files (reading.py).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from headrace.layers.basic import Embedding
from headrace.layers.context import LayerContext
from headrace.layers.delta import Delta
from headrace.layers.linear import Linear
from headrace.lora.reading import HostAdapter, HostFactors
from headrace.models.decoder import Decoder
from headrace.models.weight_rules import adapted_modules
from headrace.sites import Role, Weight
from headrace.spec import DecoderSpec

_BLOCK = 256  # inputs of a weight that are looked at together


def slot_shapes(spec: DecoderSpec) -> Iterator[tuple[Weight, tuple[int, ...], int]]:
    """(weight, outputs of its parts that have factors of their own, inputs) of all that adapters may add to."""
    seen = set()
    for module in adapted_modules(spec):
        weight = module.weight
        if weight.role is Role.EMBEDDING:
            yield weight, (weight.ins,), weight.outs
        elif weight.name not in seen:
            seen.add(weight.name)
            yield weight, weight.parts if module.part is not None else (weight.outs,), weight.ins


def slots_bytes(spec: DecoderSpec, slots: int, rank: int, element_bytes: int) -> int:
    """Of all slots, before anything is loaded."""
    return sum((ins * len(parts) + sum(parts)) * slots * rank * element_bytes for _, parts, ins in slot_shapes(spec))


class AdapterSlots:
    """Made once the decoder is loaded; its layers get what they add from here."""

    def __init__(self, decoder: Decoder, spec: DecoderSpec, slots: int, rank: int, context: LayerContext) -> None:
        self.count = slots
        self._deltas: dict[str, tuple[Delta, Linear | Embedding]] = {}
        for weight, parts, ins in slot_shapes(spec):
            layer = decoder.get_submodule(weight.name)
            assert isinstance(layer, Linear | Embedding)
            layer.delta = Delta(ins, parts, slots, rank, context, table=isinstance(layer, Embedding))
            self._deltas[weight.name] = layer.delta, layer
        deltas = [delta for delta, _ in self._deltas.values()]
        self._ranks = torch.zeros(
            (slots, sum(len(delta.parts) for delta in deltas)), dtype=torch.int32, device=context.device
        )
        for delta, ranks in zip(deltas, self._ranks.split([len(delta.parts) for delta in deltas], dim=1), strict=True):
            delta.ranks = ranks  # all of a slot's in one copy

    @property
    def num_bytes(self) -> int:
        return sum(delta.num_bytes for delta, _ in self._deltas.values())

    def bring(self, slot: int, adapter: HostAdapter) -> bool:
        """In place of what was there. Queued behind the steps that still compute with that. Whether graphs of steps
        with adapters are not what they were: it changes a weight that none before it did, or in a way that none did."""
        before = self.changed
        with torch.inference_mode():
            self._ranks[slot].copy_(self._ranks_of(adapter), non_blocking=True)
            for name, (delta, layer) in self._deltas.items():
                factors = adapter.get(name, ())
                delta.touched |= bool(factors)
                if delta.gains is not None:
                    delta.gains[slot] = _no_gain(delta, delta.gains.device)
                for each in factors:
                    _place(delta, slot, each, layer)
        return self.changed != before

    @property
    def head_touched(self) -> bool:
        """Whether some adapter so far changes the head."""
        return any(delta.touched for name, (delta, _) in self._deltas.items() if name == "head")

    @property
    def changed(self) -> int:
        """How many ways to compute there were so far: it grows with each weight that an adapter is the first to
        change."""
        return sum(delta.touched + (not delta.adds_only) for delta, _ in self._deltas.values())

    def _ranks_of(self, adapter: HostAdapter) -> Tensor:
        """At each part of each weight, as ``_ranks`` has them; on the host."""
        ranks = []
        for name, (delta, _) in self._deltas.items():
            by_part = {each.part or 0: each.rank for each in adapter.get(name, ())}
            ranks += [by_part.get(part, 0) for part in range(len(delta.parts))]
        made = torch.tensor(ranks, dtype=torch.int32)
        return made.pin_memory() if self._ranks.is_cuda else made


def _place(delta: Delta, slot: int, factors: HostFactors, layer: Linear | Embedding) -> None:
    rank, part = factors.rank, factors.part or 0
    first = sum(delta.parts[:part])
    outs = slice(first, first + factors.b.shape[1])  # of ranks the last may have fewer tokens
    if isinstance(layer, Embedding):
        delta.a[slot, : len(factors.a), :rank].copy_(factors.a, non_blocking=True)
    else:
        delta.a[slot, part, :rank].copy_(factors.a, non_blocking=True)
    b = delta.b[slot, :rank, outs]
    b.copy_(factors.b, non_blocking=True)
    if factors.magnitude is not None:
        assert isinstance(layer, Linear)
        if delta.gains is None:
            delta.gains = _no_gain(delta, b.device).repeat(len(delta.ranks), 1, 1)
        gain, bias = _gain(layer, delta.a[slot, part, :rank], b, outs, factors.magnitude.to(b.device))
        delta.gains[slot, 0, outs], delta.gains[slot, 1, outs] = gain, bias * (1 - gain)
        b.mul_(gain)


def _no_gain(delta: Delta, device: torch.device) -> Tensor:
    return torch.tensor([[1.0], [0.0]], device=device).repeat(1, sum(delta.parts))


def _gain(layer: Linear, a: Tensor, b: Tensor, outs: slice, magnitude: Tensor) -> tuple[Tensor, Tensor]:
    """(magnitude over the lengths of the rows of W + ba, the bias), [outs] each, float32. W is what the layer makes of
    unit vectors, whatever its format."""
    ins = layer.site.ins
    bias = layer.forward(torch.zeros(1, ins, dtype=layer.dtype, device=b.device))[0, outs].float()
    squares = torch.zeros_like(bias)
    for begin in range(0, ins, _BLOCK):
        units = torch.eye(min(_BLOCK, ins - begin), dtype=layer.dtype, device=b.device)
        rows = torch.nn.functional.pad(units, (begin, ins - begin - len(units)))
        columns = layer.forward(rows)[:, outs].float() - bias
        columns += a[:, begin : begin + len(units)].T.float() @ b.float()
        squares += columns.square().sum(0)
    return magnitude / squares.sqrt(), bias
