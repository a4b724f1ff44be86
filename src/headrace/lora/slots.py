"""The adapters that a device holds: the slots' table, the pool that their factors lie in, and bringing one in.

What lives here: that memory. What may not: who goes in and out, and into which blocks (cache/adapters.py decides, a
plan says so), what lies where in them (layout.py), reading files (reading.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from headrace.kernels.inputs import SlotFactors
from headrace.layers.basic import Embedding
from headrace.layers.context import LayerContext
from headrace.layers.delta import Delta
from headrace.layers.linear import Linear
from headrace.lora.layout import Layout, Site
from headrace.lora.reading import HostAdapter, HostModule
from headrace.models.decoder import Decoder
from headrace.spec import ADDRESS_UNIT

_BLOCK = 256  # inputs of a weight that are looked at together


class AdapterSlots:
    """Made once the decoder is loaded; its layers get what they add from here. Before the first adapter comes, a pool
    is attached, unless the slots have blocks of their own."""

    def __init__(self, decoder: Decoder, layout: Layout, context: LayerContext) -> None:
        self.layout = layout
        self._dtype, device = context.dtype, context.device
        self._table = torch.full((layout.space.slots, layout.columns), -1, dtype=torch.int32, device=device)
        self._pool = torch.zeros(layout.space.blocks * layout.block, dtype=context.dtype, device=device)
        self._deltas: dict[str, tuple[Delta, Linear | Embedding]] = {}
        for name, site in layout.by_name.items():
            layer = decoder.get_submodule(name)
            assert isinstance(layer, Linear | Embedding)
            layer.delta = Delta(site.ins, site.parts, self._factors(site), context, table=site.is_table)
            layer.delta.held = self._table, self._pool
            self._deltas[name] = layer.delta, layer

    def attach(self, pool: Tensor) -> None:
        """``pool``: what holds the blocks, of any type; its memory is looked at as elements of the model's."""
        storage, size = pool.untyped_storage(), pool.untyped_storage().nbytes() // self._dtype.itemsize
        assert size // ADDRESS_UNIT < 2**31, "an address reaches all of it"
        self._pool = torch.empty(0, dtype=self._dtype, device=pool.device).set_(storage, 0, (size,), (1,))
        for delta, _ in self._deltas.values():
            delta.factors = replace(delta.factors, pool=self._pool)

    def _factors(self, site: Site) -> SlotFactors:
        parts, rank, (a, b, gains) = len(site.parts), self.layout.rank, site.chunks

        def columns(first: int, *shape: int) -> Tensor:
            found: Tensor = self._table[:, first : first + math.prod(shape)].unflatten(1, shape)
            return found

        addresses = (
            columns(site.a, parts, rank, a),
            columns(site.b, parts, rank, b),
            columns(site.gains, parts, 2, gains),
        )
        return SlotFactors(self._pool, columns(site.ranks, parts), *addresses, self.layout.chunk)

    def bring(self, slot: int, adapter: HostAdapter, blocks: Sequence[int]) -> bool:
        """In place of what was there, into these blocks. Queued behind the steps that still compute with that. Whether
        captured steps with adapters are not what they were: it changes a weight that none before it did, or in a way
        that none did."""
        before, size = self.changed, self.layout.block
        assert len(blocks) == adapter.num_blocks, f"{len(blocks)} blocks for {adapter.num_blocks}"
        row = torch.from_numpy(adapter.row(self.layout, np.array(blocks, dtype=np.int64)))
        with torch.inference_mode():
            self._table[slot].copy_(row.pin_memory() if self._table.is_cuda else row, non_blocking=True)
            for block, held in zip(blocks, adapter.image, strict=False):
                self._pool[block * size : (block + 1) * size].copy_(held, non_blocking=True)
            for module in adapter.modules:
                delta, layer = self._deltas[module.weight]
                delta.touched = True
                if module.magnitude is not None:
                    assert isinstance(layer, Linear)
                    delta.factors = replace(delta.factors, gained=True)
                    _gain(delta, slot, module, layer, module.magnitude.to(self._pool.device))
        return self.changed != before

    @property
    def head_touched(self) -> bool:
        """Whether some adapter so far changes the head."""
        return "head" in self._deltas and self._deltas["head"][0].touched

    @property
    def changed(self) -> int:
        """How many ways to compute there were so far: it grows with each weight that an adapter is the first to
        change."""
        return sum(delta.touched + (not delta.adds_only) for delta, _ in self._deltas.values())


def _gain(delta: Delta, slot: int, module: HostModule, layer: Linear, magnitude: Tensor) -> None:
    """Scales b, and leaves beside it what results are multiplied by, the magnitude over the lengths of the rows of
    W + ba, and what is added, the bias less what it is multiplied to. W is what the layer makes of unit vectors,
    whatever its format."""
    factors, part, ins = delta.factors, module.part, layer.site.ins
    first = sum(delta.parts[:part])
    outs = slice(first, first + len(magnitude))
    a = factors.rows(factors.a[slot, part, : module.rank], ins)
    places = factors.places(factors.b[slot, part, : module.rank], len(magnitude))
    b = factors.pool[places].float()
    bias = layer.forward(torch.zeros(1, ins, dtype=layer.dtype, device=b.device))[0, outs].float()
    squares = torch.zeros_like(bias)
    for begin in range(0, ins, _BLOCK):
        units = torch.eye(min(_BLOCK, ins - begin), dtype=layer.dtype, device=b.device)
        rows = torch.nn.functional.pad(units, (begin, ins - begin - len(units)))
        columns = layer.forward(rows)[:, outs].float() - bias
        columns += a[:, begin : begin + len(units)].T.float() @ b
        squares += columns.square().sum(0)
    gain = magnitude / squares.sqrt()
    factors.pool[places] = (b * gain).to(factors.pool.dtype)
    floats = factors.floats
    floats.pool[floats.places(factors.gains[slot, part], len(magnitude))] = torch.stack((gain, bias * (1 - gain)))
