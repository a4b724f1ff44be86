"""Number formats: how a weight is stored and held, and what it means. One file a family.

What lives here: the Format protocol, and the format of weights that have none. What may not: torch at import (the site
table, costs and the planner read formats), kernels, names on disk.

A ``Format`` is a frozen value on a weight's row of the site table (sites.py). Torch-free it says which tensors hold a
matrix, so bytes are known before anything is loaded; with tensors at hand it checks them and gives the matrix back
(``dense``), in plain torch: the oracle of every kernel that computes with the packed form. Whatever a kernel does not
take is multiplied by that (kernels/linear/packed.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from headrace.kernels.candidate import EightBits
    from headrace.kernels.linear.packing import Codes, Coding
    from headrace.quant.codes import Activations

ITEM_BYTES: Mapping[str, int] = {
    "uint8": 1, "int8": 1, "float8_e4m3fn": 1, "float16": 2, "bfloat16": 2, "float32": 4, "int32": 4, "int64": 8,
}  # fmt: skip

Tensors = dict[str, "Tensor"]


class FormatError(ValueError):
    """What is wrong with a matrix's tensors; whoever knows the layer's name makes a ModelError of it."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a matrix. ``suffixes``: how checkpoints call it behind the layer's name, usual one first.

    ``dtype`` empty: the one the model computes in, into which it is cast; ``any_float``: held in whichever float type
    it is stored. A dimension of -1 is as long as it is stored. ``optional``: it may be missing; ``flat``: stored in
    another shape, of as many elements.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = ""
    suffixes: tuple[str, ...] = ()
    any_float: bool = False
    optional: bool = False
    flat: bool = False

    @property
    def on_disk(self) -> tuple[str, ...]:
        return self.suffixes or (self.name,)


@dataclass(frozen=True, slots=True)
class Format:
    """How one matrix [outs, ins] is held; what it means is y = x · denseᵀ. Plain weights are the base."""

    @property
    def label(self) -> str:
        """For people, and a static fact for kernels' candidates."""
        return "unquantised"

    def tensors(self, outs: int, ins: int) -> tuple[StoredTensor, ...]:
        return (StoredTensor("weight", (outs, ins)),)

    def problem(self, outs: int, ins: int) -> str | None:
        """Why a matrix of this shape cannot be held so."""
        return None

    def shares(self, *, by_inputs: bool) -> bool:
        """Whether some outputs of a matrix, or (``by_inputs``) some of its inputs, are a matrix in it, cut out of the
        same tensors."""
        return True

    def num_bytes(self, outs: int, ins: int, element_bytes: float) -> float:
        """``element_bytes``: of the type the model computes in. What may be missing is not held."""
        held = (each for each in self.tensors(outs, ins) if not each.optional)
        return sum(math.prod(map(abs, each.shape)) * ITEM_BYTES.get(each.dtype, element_bytes) for each in held)

    def prepare(self, tensors: Tensors) -> Tensors:
        """Checks what was loaded and returns what is to be held. Raises FormatError."""
        return tensors

    def dense(self, tensors: Tensors, rows: Any, dtype: torch.dtype) -> Tensor:
        """These rows of the matrix, [rows, ins]; ``rows``: a slice (of multiples of 32), or ids where ``by_row``."""
        return tensors["weight"][rows].to(dtype)

    def dequantized(self, tensors: Tensors, dtype: torch.dtype) -> Tensor:
        """The matrix that inputs as they come would be multiplied by, [outs, ins]; whatever ``activated`` rounds,
        not."""
        return self.dense(tensors, slice(None), dtype)

    @property
    def coding(self) -> Coding | None:
        """What its codes mean to kernels, where it is codes in groups of inputs; ``eight``: these are rounded before."""
        return None

    @property
    def rounded_coding(self) -> Coding | None:
        """The same where inputs are rounded row by row first: what grouped products of experts take."""
        return self.coding

    @property
    def activations(self) -> Activations | None:
        """How inputs are rounded; None: they stay as they come."""
        return None

    @property
    def multiplies_inputs(self) -> bool:
        """Whether inputs meet the matrix that ``dense`` gives as they come."""
        return self.activations is None

    @property
    def rounds_inputs(self) -> bool:
        """Whether products are of 8-bit numbers, of which a chip multiplies up to twice as many as of 16-bit ones."""
        return self.activations is not None

    @property
    def eight(self) -> EightBits | None:
        """Where inputs are rounded to 8 bits, row by row: what kernels multiply so. Weights have as many where there is
        no ``coding``."""
        return None

    def has_codes(self, tensors: Tensors) -> bool:
        """Whether there are ``codes``: not without a meaning of theirs, nor where groups are of several sizes, which
        only tensors tell."""
        return self.coding is not None or self.eight is not None

    def codes(self, tensors: Tensors, rows: slice) -> Codes:
        """These rows, as ``coding`` says; from multiples of 32 on. Raises FormatError where groups are of several
        sizes."""
        raise NotImplementedError(f"{self.label} has no codes in groups")

    @property
    def by_row(self) -> bool:
        """Whether single rows can be read, as an embedding's are."""
        return True

    @property
    def merges(self) -> bool:
        """Whether matrices one below another are one matrix in it, their tensors' rows one below another."""
        return False

    def apart(self, tensors: Tensors) -> tuple[Format, Tensors, Tensors] | None:
        """The matrix as a sum: a format and its tensors, and what ``add_sparse`` takes (kernels/linear/sparse.py) by
        name; None: it is none."""
        return None

    def activated(self, x: Tensor, tensors: Tensors) -> Tensor:
        """The inputs as the format computes with them: rounded to few bits and back, where it says so."""
        return x if self.activations is None else self.activations.rounded(x, tensors.get("input_scale"))

    def make_up(self, tensors: Tensors, seed: int) -> None:
        """Fills tensors with random numbers that make a matrix of the usual deviation, about 0.02."""
        import numpy as np
        import torch

        for name, tensor in tensors.items():
            if tensor.is_floating_point() and tensor.element_size() > 1:
                tensor.fill_(self.unit_scale)
                continue
            if tensor.is_cuda:
                own = torch.Generator(tensor.device).manual_seed(seed + len(name))
                made = torch.randint(0, 256, (tensor.nbytes,), dtype=torch.uint8, device=tensor.device, generator=own)
            else:
                random = np.random.Generator(np.random.SFC64([seed, len(name)]))
                made = torch.from_numpy(random.integers(0, 256, tensor.nbytes, dtype=np.uint8))
            small = made & 0xBF if tensor.is_floating_point() else made  # without a large exponent, and never NaN
            tensor.view(-1).view(torch.uint8).copy_(small)

    @property
    def unit_scale(self) -> float:
        """A scale under which random codes are weights of about 0.02."""
        return 0.02


def check_scale(tensors: Tensors, *names: str, zeros: bool = False) -> None:
    """Raises FormatError where a scale is NaN, infinite, of a type that no kernel reads, or zero where that makes no
    weight."""
    for name in names:
        if (scale := tensors.get(name)) is None:
            continue
        if scale.element_size() > 4:
            raise FormatError(f"{name} is stored as {scale.dtype}, which no kernel reads")
        wide = scale.float()
        bad = ~wide.isfinite() if zeros else ~wide.isfinite() | (wide == 0)
        if bool(bad.any()):
            example = wide[bad].flatten()[0].item()
            raise FormatError(f"{int(bad.sum())} of {bad.numel()} values of {name} are no scales (first: {example})")
