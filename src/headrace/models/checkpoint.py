"""Weights on disk as named tensors, whatever the container; read one at a time.

What lives here: the Checkpoint protocol, the safetensors implementation, and finding a name whose prefix may be missing.
What may not: names that mean something to a model (families.py), the choice between containers and placing tensors
(loader.py).
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from headrace.errors import ModelError
from headrace.models.safetensors_file import TYPES, TensorEntry, read_sharded
from headrace.models.weight_rules import WRAPPERS
from headrace.portability import read_ahead

DTYPES: Mapping[str, torch.dtype] = {name: getattr(torch, word) for name, word in TYPES.items()}


class Checkpoint(Protocol):
    """Named tensors. ``read`` may return a view of the file: copy it before the checkpoint is closed, and never write
    to it."""

    def keys(self) -> Iterable[str]: ...

    def shape(self, key: str) -> tuple[int, ...]: ...

    def dtype(self, key: str) -> torch.dtype: ...

    def read(self, key: str) -> Tensor: ...

    def close(self) -> None: ...


class MappedFiles:
    """Files mapped into memory: pages are read when touched, cost no private memory, and are released when the next
    tensor is requested."""

    def __init__(self) -> None:
        self._maps: dict[Path, mmap.mmap] = {}
        self._last: tuple[mmap.mmap, int, int] | None = None

    def tensor(self, file: Path, dtype: torch.dtype, start: int, num_bytes: int) -> Tensor:
        """A flat tensor over ``num_bytes`` bytes from ``start``; copied only if it is misaligned in the file."""
        if num_bytes == 0:
            return torch.empty(0, dtype=dtype)
        mapped = self._map(file)
        self._move_on(mapped, start, num_bytes)
        data = torch.frombuffer(mapped, dtype=torch.uint8, count=num_bytes, offset=start)
        return (data if start % dtype.itemsize == 0 else data.clone()).view(dtype)

    def whole(self, file: Path) -> Tensor:
        """Its bytes, which the system reads ahead from now on."""
        if file not in self._maps:
            with suppress(OSError), file.open("rb") as stream:  # mapping says what is wrong
                read_ahead(stream.fileno())
        return torch.frombuffer(self._map(file), dtype=torch.uint8)

    def _map(self, file: Path) -> mmap.mmap:
        if file not in self._maps:
            try:
                with file.open("rb") as stream:
                    # Copy-on-write, because torch wants writable buffers; nothing is written, so nothing is ever copied.
                    self._maps[file] = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
            except (OSError, ValueError) as error:
                raise ModelError(f"cannot map {file}: {error}. Check its permissions.") from error
        return self._maps[file]

    def _move_on(self, mapped: mmap.mmap, start: int, num_bytes: int) -> None:
        """Reads ahead, and releases the previous tensor; if it is used again, it is read again."""
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        if self._last is not None:
            before, begin, length = self._last
            before.madvise(mmap.MADV_DONTNEED, begin, length)
        self._last = (mapped, first, num_bytes + start - first)
        mapped.madvise(mmap.MADV_WILLNEED, first, num_bytes + start - first)

    def close(self) -> None:
        self._maps.clear()  # a map goes with its last view
        self._last = None


class SafetensorsCheckpoint:
    """One safetensors file, or the shards of an index."""

    def __init__(self, folder: Path) -> None:
        self._entries: dict[str, TensorEntry] = read_sharded(folder)
        self._files = MappedFiles()

    def keys(self) -> Iterable[str]:
        return self._entries.keys()

    def shape(self, key: str) -> tuple[int, ...]:
        return self._entries[key].shape

    def dtype(self, key: str) -> torch.dtype:
        return DTYPES[self._entries[key].dtype]

    def read(self, key: str) -> Tensor:
        entry = self._entries[key]
        return self._files.tensor(entry.file, self.dtype(key), entry.start, entry.num_bytes).view(entry.shape)

    def entry(self, key: str) -> TensorEntry:
        """Where the tensor's bytes are."""
        return self._entries[key]

    def close(self) -> None:
        self._files.close()


class KeyNames:
    """Finds a rule's key in a checkpoint in which the wrapper's prefix may be missing or added."""

    def __init__(self, keys: Iterable[str]) -> None:
        self.keys = set(keys)

    def find(self, name: str) -> str | None:
        return next((key for key in spellings(name) if key in self.keys), None)

    def find_any(self, module: str, suffixes: Iterable[str]) -> str | None:
        return next((key for each in suffixes if (key := self.find(f"{module}.{each}")) is not None), None)

    def __getitem__(self, name: str) -> str:
        key = self.find(name)
        assert key is not None, name  # _check_complete has seen to it
        return key


def spellings(name: str) -> Iterator[str]:
    """A key as written, without its wrapper's prefix, and with one."""
    yield name
    for wrapper in WRAPPERS:
        if name.startswith(wrapper):
            yield name.removeprefix(wrapper)
    for wrapper in WRAPPERS:
        yield wrapper + name
