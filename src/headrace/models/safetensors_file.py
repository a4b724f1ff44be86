"""The safetensors container: a length, a JSON header, and the tensors' bytes.

What lives here: reading and checking the header of one file and of a sharded set, with messages for what is wrong;
writing a file. What may not: torch, names that mean something to a model.
"""

from __future__ import annotations

import json
import math
import os
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from headrace.errors import ModelError
from headrace.models.source import MAX_INDEX_BYTES, read_json, reading, refuse_lfs_pointer

# the largest checkpoints' have a hundredth; the format's own limit would take memory and seconds
MAX_HEADER_BYTES = 16 * 2**20
MAX_TENSORS = 1 << 17

TYPES: Mapping[str, str] = {  # and torch's names
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
    "I16": "int16", "U16": "uint16", "F16": "float16", "BF16": "bfloat16", "I32": "int32", "U32": "uint32", "F32": "float32",
    "I64": "int64", "U64": "uint64", "F64": "float64",
}  # fmt: skip
DTYPE_BYTES: Mapping[str, int] = {name: int((re.findall(r"\d+", name) or [8])[0]) // 8 for name in TYPES}

_AGAIN = "Download the file again."
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


_Natural = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class _Stored(msgspec.Struct):
    """A tensor, as a header tells of it."""

    dtype: str
    shape: Annotated[tuple[_Natural, ...], msgspec.Meta(max_length=16)]
    data_offsets: tuple[_Natural, _Natural]


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """The location of one tensor: ``start`` is the byte offset in ``file``."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int


def read_header(file: Path) -> dict[str, TensorEntry]:
    """The tensors of one file. Raises ModelError for anything inconsistent."""
    with reading(file):
        size = file.stat().st_size
        with file.open("rb") as stream:
            beginning = stream.read(1024)
            refuse_lfs_pointer(file, beginning)
            stream.seek(8)
            raw = beginning[:8]
            length = struct.unpack("<Q", raw)[0] if len(raw) == 8 else 0
            if MAX_HEADER_BYTES < length <= size - 8:
                raise ModelError(
                    f"{file} has a header of {length} bytes, over the limit of {MAX_HEADER_BYTES}; split it into shards."
                )
            if not 2 <= length <= size - 8:
                raise ModelError(
                    f"{file} is not a safetensors file or is truncated: {size} bytes, a header of {length}. {_AGAIN}"
                )
            text = stream.read(length)
    return _entries(file, _parse(file, text), length + 8, size)


def write_file(file: Path, tensors: Mapping[str, tuple[str, Sequence[int], memoryview]]) -> None:
    """``tensors``: element type as the format calls it, shape and bytes, by name. On the disk when it returns."""
    entries, start = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, start + data.nbytes]}
        start += data.nbytes
    header = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    header += b" " * (-len(header) % 8)
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", len(header)) + header)
        for _, _, data in tensors.values():
            stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def _parse(file: Path, text: bytes) -> dict[str, msgspec.Raw]:
    if text.count(b"[") > 2 * MAX_TENSORS:  # a shape and a place each
        raise ModelError(f"{file} has more than {MAX_TENSORS} tensors, or an invalid header; split it into shards.")
    try:
        header = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    except _UNREADABLE as error:
        raise ModelError(f"{file} has a damaged header ({error}). {_AGAIN}") from error
    header.pop("__metadata__", None)
    return header


def _entries(file: Path, header: dict[str, msgspec.Raw], base: int, size: int) -> dict[str, TensorEntry]:
    entries = {name: _entry(file, name, value, base) for name, value in header.items()}
    end = max((entry.start + entry.num_bytes for entry in entries.values()), default=base)
    if end > size:
        raise ModelError(f"{file} is truncated: {size} bytes, but its tensors need {end}. {_AGAIN}")
    check_gapless(
        file, ((entry.start, entry.num_bytes, repr(name[:80])) for name, entry in entries.items()), base, size
    )
    return entries


def check_gapless(file: Path, places: Iterable[tuple[int, int, str]], begin: int, end: int, padding: int = 0) -> None:
    """As formats require: tensors (``places``: start, bytes, name) do not overlap, and between ``begin`` and ``end``
    there is nothing else but so much ``padding`` before each."""
    at = begin
    for start, num_bytes, name in (*sorted(places), (end, 0, "the end")):
        if not at <= start <= at + padding:
            what = (
                f"overlaps the tensor before it by {at - start} bytes"
                if start < at
                else f"follows {start - at} stray bytes"
            )
            raise ModelError(f"{file} is damaged: {name} {what}. {_AGAIN}")
        at = start + num_bytes


def _entry(file: Path, name: str, value: msgspec.Raw, base: int) -> TensorEntry:
    try:
        stored = msgspec.json.decode(value, type=_Stored)
    except _UNREADABLE as error:
        raise ModelError(f"{file}: the header's entry for {name[:80]!r} is damaged ({error}). {_AGAIN}") from error
    if stored.dtype not in DTYPE_BYTES:
        raise ModelError(
            f"{file}: tensor {name[:80]!r} has dtype {stored.dtype[:20]!r}, which is not known; known are {', '.join(DTYPE_BYTES)}."
        )
    (begin, end), wanted = stored.data_offsets, math.prod(stored.shape) * DTYPE_BYTES[stored.dtype]
    if end - begin != wanted:
        raise ModelError(
            f"{file}: tensor {name[:80]!r} of shape {stored.shape[:8]} and {stored.dtype} needs {wanted} bytes but has {end - begin}. {_AGAIN}"
        )
    return TensorEntry(file, stored.dtype, stored.shape, base + begin, wanted)


def read_sharded(folder: Path) -> dict[str, TensorEntry]:
    """All tensors of a folder: by its index, otherwise model.safetensors, otherwise the only *.safetensors file."""
    if (folder / "model.safetensors.index.json").is_file():
        return _read_index(folder)
    if (folder / "model.safetensors").is_file():
        return read_header(folder / "model.safetensors")
    files = sorted(folder.glob("*.safetensors"))
    if len(files) != 1:
        names = ", ".join(file.name for file in files[:4])
        raise ModelError(
            f"{folder} holds {len(files)} safetensors files ({names}) but no model.safetensors.index.json; download the index too."
        )
    return read_header(files[0])


def _read_index(folder: Path) -> dict[str, TensorEntry]:
    index = folder / "model.safetensors.index.json"
    weight_map = read_json(index, limit=MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ModelError(f"{index} has no weight_map of tensor names to file names. {_AGAIN}")
    shards = sorted(set(weight_map.values()))
    _check_shards(folder, shards)
    found: dict[str, TensorEntry] = {}
    for shard in shards:
        found.update(read_header(folder / shard))
    lost = sorted(set(weight_map) - set(found))
    if lost:
        raise ModelError(
            f"{index} names {len(lost)} tensors that no shard holds (first: {', '.join(lost[:3])}); index and shards do not belong together. {_AGAIN}"
        )
    return found


def _check_shards(folder: Path, shards: list[str]) -> None:
    """A shard's name must be a plain file name: an index cannot reach outside its folder."""
    strange = [name for name in shards if Path(name).name != name or not name.endswith(".safetensors")]
    if strange:
        raise ModelError(
            f"{folder}/model.safetensors.index.json names {strange[0][:80]!r}, which is not a plain .safetensors file name. {_AGAIN}"
        )
    missing = [name for name in shards if not (folder / name).is_file()]
    if missing:
        raise ModelError(
            f"{folder} lacks {len(missing)} of {len(shards)} shards (first: {', '.join(missing[:3])}); download them."
        )
