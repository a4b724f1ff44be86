"""The adapters that a device holds: so many slots, each with room for one of the largest rank, at every weight.

What lives here: the slots' memory, bringing an adapter in. What may not: who goes in and out (residency.py decides, a plan
says so), reading files (reading.py).
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
        self._deltas: dict[str, tuple[Delta, Linear | Embedding]] = {}
        for weight, parts, ins in slot_shapes(spec):
            layer = decoder.get_submodule(weight.name)
            assert isinstance(layer, Linear | Embedding)
            layer.delta = Delta(ins, parts, slots, rank, context, table=isinstance(layer, Embedding))
            self._deltas[weight.name] = layer.delta, layer

    @property
    def num_bytes(self) -> int:
        return sum(delta.num_bytes for delta, _ in self._deltas.values())

    def bring(self, slot: int, adapter: HostAdapter) -> None:
        """In place of what was there. Queued behind the steps that still compute with that."""
        with torch.inference_mode():
            for name, (delta, layer) in self._deltas.items():
                factors = adapter.get(name, ())
                delta.ranks[slot] = max((each.rank for each in factors), default=0)
                if factors:
                    delta.a[slot].zero_()
                    delta.b[slot].zero_()
                if delta.gains is not None:
                    delta.gains[slot] = _no_gain(delta, delta.gains.device)
                for each in factors:
                    _place(delta, slot, each, layer)


def _place(delta: Delta, slot: int, factors: HostFactors, layer: Linear | Embedding) -> None:
    rank, part = factors.rank, factors.part or 0
    first = sum(delta.parts[:part])
    outs = slice(first, first + delta.parts[part])
    if isinstance(layer, Embedding):
        delta.a[slot, :, :rank].copy_(factors.a, non_blocking=True)
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
