"""Weights in a format of their own, as layers hold them.

What lives here: a matrix's tensors, several matrices that are one weight, which GEMMs begin early. What may not: what formats mean
(quant/), kernels.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from headrace.errors import ModelError
from headrace.kernels.linear.packed import Relaid
from headrace.kernels.linear.packing import Codes, Coding, Packed
from headrace.kernels.linear.ring_forms import MANY_ROWS
from headrace.layers.context import LayerContext
from headrace.quant import Format, FormatError
from headrace.sites import Weight

# widened at a time, on a CPU: what its caches hold; on a GPU launches would cost more than they save
BLOCK_ELEMENTS = 2**20
_WIDE_BLOCK_ELEMENTS = 2**26


class Piece(nn.Module):
    """One matrix [outs, ins], or one of each expert; its parameters are the format's tensors, to be filled until
    ``finish_loading``."""

    def __init__(
        self,
        name: str,
        form: Format,
        outs: int,
        ins: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        stacked: tuple[int, ...] = (),
    ) -> None:
        super().__init__()
        self.name, self.form, self.outs, self.ins = name, form, outs, ins
        self._copies = stacked
        self.tensors: tuple[dict[str, Tensor], ...] = ()  # of each copy, once loading has finished
        self.laid: tuple[Packed, ...] = ()  # of each copy, where a kernel has them in a layout of its own
        self.relaid: tuple[Relaid, ...] = ()  # of each copy, where a CPU's kernel has
        self.apart: dict[str, Tensor] = {}  # what is added to its GEMMs beside, once loading has finished
        self._first = 0  # of the laid rows
        for each in form.tensors(outs, ins):
            held = getattr(torch, each.dtype) if each.dtype else dtype
            shape = (*stacked, *(abs(size) for size in each.shape))
            self.register_parameter(
                each.name, nn.Parameter(torch.empty(shape, dtype=held, device=device), requires_grad=False)
            )

    def make_up(self, seed: int) -> Iterator[nn.Parameter]:
        """Random weights. Yields the parameters."""
        made = [self._loaded(copy) for copy in range(self.num_copies)]
        for copy, tensors in enumerate(made):
            self.form.make_up(tensors, zlib.crc32(f"{seed} {self.name} {copy}".encode()))
        for name, parameter in self.named_parameters():
            if parameter.shape[len(self._copies) :] != made[0][name].shape:  # as long as it is stored
                parameter.data = torch.stack([each[name] for each in made]) if self._copies else made[0][name]
            yield parameter

    @property
    def num_copies(self) -> int:
        return self._copies[0] if self._copies else 1

    def finish_loading(self) -> None:
        """Checks what was loaded. Raises ModelError that names the layer."""
        if self.tensors:
            return
        try:
            self.tensors = tuple(self.form.prepare(self._loaded(copy)) for copy in range(self.num_copies))
        except FormatError as error:
            raise ModelError(
                f"{self.name} ({self.form.label}): {error}. The checkpoint is damaged, download it again."
            ) from error
        for name in list(self._parameters):
            self.register_parameter(name, None)
        split = self.form.apart(self.tensors[0]) if self.num_copies == 1 else None
        if split is not None:
            self.form, own, self.apart = split
            self.tensors = (own,)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for each in (*self.tensors, self.apart) for tensor in each.values())

    @property
    def coding(self) -> Coding | None:
        return self.form.coding

    def has_codes(self, copy: int = 0) -> bool:
        return self.form.has_codes(self.tensors[copy])

    def in_codes(self, rows: slice, copy: int = 0) -> Codes:
        return self.form.codes(self.tensors[copy], rows)

    def lay(self, packed: Packed, first: int) -> None:
        """It is rows of this from ``first`` on; its own tensors go. A stack of experts is laid one after the other."""
        self.laid, self._first = (*self.laid, packed), first
        if len(self.laid) == self.num_copies:
            own = slice(0, 0) if first else slice(None)  # whoever is first answers for the memory
            self.tensors = tuple({"blocks": each.blocks[own], "factor": each.factor[own]} for each in self.laid)

    def relay(self, relaid: tuple[Relaid, ...]) -> None:
        """A kernel's form of every copy replaces the format's tensors, except what belongs to its inputs."""
        kept = [{name: each for name, each in tensors.items() if name == "input_scale"} for tensors in self.tensors]
        self.relaid = relaid
        self.tensors = tuple({**each.tensors, **more} for each, more in zip(relaid, kept, strict=True))

    def dense(self, rows: slice | Tensor, dtype: torch.dtype, copy: int = 0) -> Tensor:
        if self.relaid:
            return self.relaid[copy].dense(rows).to(dtype)
        if self.laid and isinstance(rows, slice):
            begin, end, _ = rows.indices(self.outs)
            return self.laid[copy].dense(slice(self._first + begin, self._first + end), dtype)
        return self.form.dense(self.tensors[copy], rows, dtype)

    def activated(self, x: Tensor, copy: int = 0) -> Tensor:
        return self.form.activated(x, self.tensors[copy])

    def blocks(self) -> Iterator[slice]:
        """Rows to widen at once."""
        some = next(iter(self.tensors[0].values()))
        elements = BLOCK_ELEMENTS if some.device.type == "cpu" else _WIDE_BLOCK_ELEMENTS
        step = max(1, elements // self.ins // 32) * 32
        return (slice(first, min(first + step, self.outs)) for first in range(0, self.outs, step))

    def _loaded(self, copy: int) -> dict[str, Tensor]:
        held = {name: parameter.data for name, parameter in self._parameters.items() if parameter is not None}
        return {name: data[copy] if self._copies else data for name, data in held.items() if data.numel()}


def create_pieces(site: Weight, context: LayerContext) -> nn.ModuleList:
    """One for each part that is stored apart."""
    more: dict[str, Any] = {"dtype": context.dtype, "device": context.device, "stacked": site.stacked}
    return nn.ModuleList(
        Piece(f"{site.name} [{index}]", form, outs, site.ins, **more) for index, (outs, form) in enumerate(site.pieces)
    )


def early_rows(forms: Sequence[Format | None]) -> int:
    """Of up to so many rows, GEMMs of all of these ask for their weights before their inputs are there."""
    plain = all(each is not None and each.multiplies_inputs and each.coding and each.coding.many for each in forms)
    return MANY_ROWS[-1] if forms and plain else 0
