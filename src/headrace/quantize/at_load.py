"""A plain checkpoint presented as a quantized one: every matrix is rounded to nearest when it is read, as ``headrace
quantize`` would have written it.

What lives here: that. What may not: which format (models/source.py), how codes are chosen and stored (recipe.py).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from headrace.errors import ModelError
from headrace.models.checkpoint import Checkpoint, KeyNames
from headrace.models.families import spec_from_config
from headrace.models.source import ModelSource
from headrace.models.weight_rules import StoredMatrix, names_of, stored_matrices
from headrace.quant import StoredTensor
from headrace.quantize.layer import finite
from headrace.quantize.names import chosen
from headrace.quantize.recipe import Recipe, recipe_for
from headrace.sites import Role


class QuantizedCheckpoint:
    """Presents the tensors of each matrix's format instead of ``<layer>.weight``. Of a tied head that is to be rounded
    alone, those come of the embedding. ``device``: rounds. Raises ModelError where a shape forbids the format."""

    def __init__(self, inner: Checkpoint, source: ModelSource, device: torch.device) -> None:
        assert source.makes is not None
        half = source.config.get("torch_dtype", source.config.get("dtype")) == "float16"
        scales = torch.float16 if half else torch.bfloat16
        self._recipe = recipe_for(
            chosen(source.makes, "rtn", text=False), group_size=None, asymmetric=False, scales=scales
        )
        self._inner, self._device = inner, device
        self._made: dict[str, tuple[StoredMatrix, StoredTensor, str]] = {}  # and the key that it is made of
        self._kept: dict[str, Tensor] = {}  # made beside what was read last
        names, spec, used = KeyNames(inner.keys()), spec_from_config(source.config), set[str]()
        for matrix in stored_matrices(spec):
            _check(matrix, self._recipe)
            key = names.find(f"{matrix.module}.weight")
            if key is None and matrix.weight.role is Role.HEAD:
                key = names[f"{names_of(spec.family).words['embedding'][0]}.weight"]
            elif key is None:
                continue  # the loader says what is missing
            else:
                used.add(key)
            for each in matrix.form.tensors(matrix.outs, matrix.ins):
                self._made[f"{matrix.module}.{each.on_disk[0]}"] = matrix, each, key
        self._keys = [key for key in inner.keys() if key not in used] + list(self._made)  # noqa: SIM118 - a protocol, not a mapping

    def keys(self) -> Iterable[str]:
        return self._keys

    def shape(self, key: str) -> tuple[int, ...]:
        found = self._made.get(key)
        return self._inner.shape(key) if found is None else found[1].shape

    def dtype(self, key: str) -> torch.dtype:
        found = self._made.get(key)
        if found is None:
            return self._inner.dtype(key)
        held = found[1]
        return self._recipe.grid.scales if held.any_float or held.dtype == "float32" else getattr(torch, held.dtype)

    def read(self, key: str) -> Tensor:
        if key not in self._made:
            return self._inner.read(key)
        if key not in self._kept:
            matrix, _, made_of = self._made[key]
            weight = finite(made_of, self._inner.read(made_of).to(self._device).float())
            tensors = self._recipe.made(weight, None, float(weight.abs().max()), matrix.form)
            self._kept = {f"{matrix.module}.{name}": tensor for name, tensor in tensors.items()}
        return self._kept.pop(key)

    def close(self) -> None:
        self._inner.close()


def _check(matrix: StoredMatrix, recipe: Recipe) -> None:
    if (problem := recipe.problem(matrix.outs, matrix.ins)) is not None:
        raise ModelError(
            f"{matrix.module} cannot be quantized as {recipe.name} at load: {problem}. Leave quantization out, or give fp8."
        )
