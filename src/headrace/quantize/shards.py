"""Writes a checkpoint's files: safetensors, one per layer, and their index.

What lives here: writing, and finding what is there already. What may not: what tensors mean.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from headrace.models.checkpoint import DTYPES, Checkpoint, MappedFiles, SafetensorsCheckpoint
from headrace.models.safetensors_file import read_header, write_file

_INDEX = "model.safetensors.index.json"
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Shards:
    """``count`` files in ``folder``. A file under its final name is complete: it was written under another and
    renamed."""

    def __init__(self, folder: Path, count: int) -> None:
        self.folder, self.count = folder, count
        folder.mkdir(parents=True, exist_ok=True)

    def path(self, index: int) -> Path:
        return self.folder / f"model-{index + 1:05d}-of-{self.count:05d}.safetensors"

    def there(self, index: int) -> bool:
        return self.path(index).exists()

    def write(self, index: int, tensors: Mapping[str, Tensor]) -> None:
        unfinished = self.path(index).with_suffix(".unfinished")
        write_file(unfinished, {name: (_NAMES[each.dtype], each.shape, _bytes(each)) for name, each in tensors.items()})
        os.replace(unfinished, self.path(index))

    def opened(self, index: int) -> Checkpoint:
        return _Shard(self.path(index))

    def remove(self) -> None:
        for index in range(self.count):
            self.path(index).unlink(missing_ok=True)
        (self.folder / _INDEX).unlink(missing_ok=True)

    def write_index(self) -> int:
        """Returns the total bytes of all tensors."""
        places, size = {}, 0
        for index in range(self.count):
            for name, entry in read_header(self.path(index)).items():
                places[name] = self.path(index).name
                size += entry.num_bytes
        text = json.dumps({"metadata": {"total_size": size}, "weight_map": dict(sorted(places.items()))}, indent=1)
        (self.folder / _INDEX).write_text(text + "\n")
        return size


class _Shard(SafetensorsCheckpoint):
    """One file, whatever is beside it."""

    def __init__(self, file: Path) -> None:
        self._entries, self._files = read_header(file), MappedFiles()


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
