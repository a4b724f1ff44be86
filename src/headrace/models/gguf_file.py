"""The GGUF container: metadata and a table of tensors, read once, with every size checked against the file's.

What lives here: parsing the headers of a little-endian GGUF file of version 2 or 3 and of its further shards. What may
not: torch, numpy, what keys mean (gguf_config.py), names of models, dequantizing (gguf_checkpoint.py).
"""

from __future__ import annotations

import mmap
import re
import struct
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from headrace.errors import ModelError
from headrace.models.files import reading, refuse_lfs_pointer

MAX_ENTRIES = 1 << 17  # metadata keys or tensors; real files have a few thousand
MAX_NAME = 1 << 10
MAX_HEAD_BYTES = 128 * 2**20  # metadata and tensor table; half a million tokens with merges take a tenth
MAX_ITEMS = 1 << 23  # of all arrays together
MAX_SHARDS = 999
_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_STRING, _ARRAY, _BOOL = 8, 9, 7
# letters of struct, and of array: "i" and "I" have four bytes and "q" and "Q" eight wherever CPython runs
_SCALARS: Mapping[int, str] = dict(zip((*range(8), 10, 11, 12), "BbHhIifBQqd", strict=True))
F32, F16, BF16 = 0, 1, 30  # tensor types that need no dequantising

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """``shape`` in torch's order (rows first); ``start`` is the byte offset in ``file``, the model's own or one of its
    shards."""

    type: int
    shape: tuple[int, ...]
    start: int
    file: Path


@dataclass(frozen=True, slots=True)
class GGUFFile:
    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GGUFTensor]

    def get(self, key: str, kind: type[T] | tuple[type[T], ...], default: T | None = None) -> T | None:
        """A metadata value of the expected type, or ``default``. Raises ModelError for another type."""
        value = self.metadata.get(key)
        if value is None:
            return default
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise self.damaged(f"{key} is a {type(value).__name__}")
        return value

    def require(self, key: str, kind: type[T] | tuple[type[T], ...]) -> T:
        value = self.get(key, kind)
        if value is None:
            raise ModelError(f"{self.path} has no {key} in its metadata; it is not a complete model. Convert it again.")
        return value

    def damaged(self, what: str) -> ModelError:
        return ModelError(f"{self.path} is damaged: {what}. Download or convert it again.")


def read_gguf(path: Path) -> GGUFFile:
    """Includes all shards if ``path`` is the first of several. Raises ModelError for anything that is not a complete
    GGUF header."""
    with reading(path):
        stat = path.stat()
    return _read_cached(path, stat.st_size, stat.st_mtime_ns)


@lru_cache(maxsize=1)
def _read_cached(path: Path, size: int, _modified: int) -> GGUFFile:
    """Keeps the last file read: config, tokenizer and tensors each ask for it during one start."""
    return _with_shards(_read_head(path, size))


def _with_shards(first: GGUFFile) -> GGUFFile:
    count = first.get("split.count", int, 1) or 1
    if count == 1:
        return first
    name = _SHARD.fullmatch(first.path.name)
    if name is None or int(name[3]) != count or not 1 < count <= MAX_SHARDS:
        raise ModelError(
            f"{first.path} is one of {count} shards; give it the name it had, which ends in -00001-of-{count:05}.gguf."
        )
    paths = [first.path.with_name(f"{name[1]}-{number:05}-of-{name[3]}.gguf") for number in range(1, count + 1)]
    if int(name[2]) != 1:
        raise ModelError(f"{first.path} is shard {int(name[2])} of {count}; name the first, {paths[0]}.")
    if missing := [path.name for path in paths if not path.is_file()]:
        raise ModelError(
            f"{first.path.parent} lacks {len(missing)} of {count} shards (first: {', '.join(missing[:3])}); download them."
        )
    parts = [first.tensors, *(_read_head(path, path.stat().st_size).tensors for path in paths[1:])]
    held, said = sum(map(len, parts)), first.get("split.tensors.count", int)
    tensors = {name: tensor for part in parts for name, tensor in part.items()}
    if held != (said or held) or len(tensors) != held:
        raise first.damaged(
            f"its {count} shards hold {held} tensors, {len(tensors)} of them different, but should hold {said}"
        )
    return replace(first, tensors=tensors)


def _read_head(path: Path, size: int) -> GGUFFile:
    if size < 24:
        raise ModelError(f"{path} is not a GGUF file: it has {size} bytes. Download it again.")
    with reading(path):
        with path.open("rb") as stream:
            refuse_lfs_pointer(path, stream.read(1024))
        with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(path, data).file()


class _Reader:
    """A cursor over the file; every read is checked against the remaining size."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path, self._data, self._at, self._size = path, data, 0, len(data)
        self._end = min(self._size, MAX_HEAD_BYTES)
        self._items = MAX_ITEMS

    def file(self) -> GGUFFile:
        magic, version = self._data[:4], self._unpack("I", skip=4)
        if magic != b"GGUF":
            raise ModelError(f"{self._path} is not a GGUF file (it begins with {magic!r}). Check the path.")
        if version not in (2, 3):
            raise ModelError(
                f"{self._path} is GGUF version {version if version < 2**16 else 'big-endian'}; "
                "versions 2 and 3, little-endian, are read. Convert it again."
            )
        num_tensors, num_keys = self._unpack("Q"), self._unpack("Q")
        if max(num_tensors, num_keys) > MAX_ENTRIES:
            raise self._damaged(f"it claims {num_tensors} tensors and {num_keys} keys")
        metadata = {self._string(MAX_NAME): self._value(self._unpack("I")) for _ in range(num_keys)}
        infos = [self._tensor_info() for _ in range(num_tensors)]
        return GGUFFile(self._path, metadata, self._placed(infos, metadata.get("general.alignment", 32)))

    def _placed(self, infos: list[tuple[str, int, tuple[int, ...], int]], alignment: Any) -> dict[str, GGUFTensor]:
        if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 20 or alignment & (alignment - 1):
            raise self._damaged(f"general.alignment is {alignment!r}")
        base = (self._at + alignment - 1) // alignment * alignment
        placed = {name: GGUFTensor(kind, shape, base + offset, self._path) for name, kind, shape, offset in infos}
        if len(placed) != len(infos):
            raise self._damaged(f"{len(infos)} tensors have {len(placed)} names")
        return placed

    def _damaged(self, what: str) -> ModelError:
        return ModelError(f"{self._path} is damaged or truncated: {what}. Download or convert it again.")

    def _take(self, count: int) -> int:
        """Skips ``count`` bytes; returns where they begin."""
        start = self._at
        if count > self._end - start:
            raise self._damaged(f"{count} bytes are needed at byte {start} of {self._end} that a header may have here")
        self._at = start + count
        return start

    def _unpack(self, code: str, skip: int = 0) -> Any:
        self._take(skip)
        return struct.unpack_from("<" + code, self._data, self._take(struct.calcsize("<" + code)))[0]

    def _string(self, limit: int) -> str:
        length = self._unpack("Q")
        if length > limit:
            raise self._damaged(f"a name of {length} bytes")
        start = self._take(length)
        return self._data[start : start + length].decode("utf-8", "replace")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string(self._end)
        if kind == _ARRAY:
            return self._array()
        if kind not in _SCALARS:
            raise self._damaged(f"a value of unknown type {kind}")
        value = self._unpack(_SCALARS[kind])
        return bool(value) if kind == _BOOL else value

    def _array(self) -> list[Any]:
        kind, count = self._unpack("I"), self._unpack("Q")
        self._items -= count
        if self._items < 0:
            raise self._damaged(f"its arrays have more than {MAX_ITEMS} items")
        if kind == _STRING:
            return self._strings(count)
        if kind not in _SCALARS:
            raise self._damaged(f"an array of unknown type {kind}")
        values = array(_SCALARS[kind])
        start = self._take(count * values.itemsize)
        values.frombytes(self._data[start : self._at])
        return values.tolist()

    def _strings(self, count: int) -> list[str]:
        if count > (self._end - self._at) // 8:
            raise self._damaged(f"an array of {count} strings")
        data, size, at, found = self._data, self._end, self._at, []
        for _ in range(count):  # half a million in a large vocabulary: no call a string
            start = at + 8
            at = start + int.from_bytes(data[at:start], "little")
            if at > size:
                raise self._damaged(f"a string ends at byte {at} of {size}")
            found.append(data[start:at].decode("utf-8", "replace"))
        self._at = at
        return found

    def _tensor_info(self) -> tuple[str, int, tuple[int, ...], int]:
        name, dims = self._string(MAX_NAME), self._unpack("I")
        if not 0 <= dims <= 8:
            raise self._damaged(f"tensor {name[:80]!r} has {dims} dimensions")
        shape = tuple(reversed([self._unpack("Q") for _ in range(dims)]))
        kind, offset = self._unpack("I"), self._unpack("Q")
        if offset > self._size or any(size > 2**48 for size in shape):
            raise self._damaged(f"tensor {name[:80]!r} of shape {list(shape)} at {offset}")
        return name, kind, shape, offset
