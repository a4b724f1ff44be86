"""A quantized checkpoint presented as a plain one: every matrix is dequantized when it is read.

What lives here: that. What may not: what formats mean (quant/), placing tensors (loader.py).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from headrace.errors import ModelError
from headrace.models.checkpoint import Checkpoint, KeyNames
from headrace.models.families import spec_from_config
from headrace.models.source import ModelSource
from headrace.models.weight_rules import StoredMatrix, stored_matrices
from headrace.quant import FormatError


class DequantizedCheckpoint:
    """Presents ``<layer>.weight`` in float32 instead of the tensors of its format."""

    def __init__(self, inner: Checkpoint, source: ModelSource) -> None:
        self._inner = inner
        self._names = names = KeyNames(inner.keys())
        spec = spec_from_config({**source.config, "quantization_config": source.dequantize_from})
        self._matrices: dict[str, tuple[StoredMatrix, dict[str, str]]] = {}
        for matrix in stored_matrices(spec):
            found = {
                each.name: names.find_any(matrix.module, each.on_disk)
                for each in matrix.form.tensors(matrix.outs, matrix.ins)
            }
            held = {name: key for name, key in found.items() if key is not None}
            self._matrices[f"{matrix.module}.weight"] = matrix, held
        used = {key for _, held in self._matrices.values() for key in held.values()}
        self._keys = [key for key in inner.keys() if key not in used] + list(self._matrices)  # noqa: SIM118 - a protocol, not a mapping

    def keys(self) -> Iterable[str]:
        return self._keys

    def shape(self, key: str) -> tuple[int, ...]:
        found = self._matrices.get(key)
        return self._inner.shape(key) if found is None else (found[0].outs, found[0].ins)

    def dtype(self, key: str) -> torch.dtype:
        return torch.float32 if key in self._matrices else self._inner.dtype(key)

    def read(self, key: str) -> Tensor:
        if key not in self._matrices:
            return self._inner.read(key)
        matrix, held = self._matrices[key]
        tensors = {}
        for each in matrix.form.tensors(matrix.outs, matrix.ins):
            if each.name in held:
                stored = self._inner.read(held[each.name])
                tensors[each.name] = stored.clone() if -1 in each.shape else stored.reshape(each.shape).clone()
            elif not each.optional:
                raise ModelError(
                    f"{matrix.module} ({matrix.form.label}) has no {each.on_disk[0]}; download the checkpoint again."
                )
        try:
            return matrix.form.dequantized(matrix.form.prepare(tensors), torch.float32)
        except FormatError as error:
            raise ModelError(
                f"{matrix.module} ({matrix.form.label}): {error}. The checkpoint is damaged, download it again."
            ) from error

    def close(self) -> None:
        self._inner.close()
