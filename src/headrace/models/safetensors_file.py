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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.errors import ModelError
from headrace.models.files import MAX_INDEX_BYTES, read_json, reading, refuse_lfs_pointer

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


def _parse(file: Path, text: bytes) -> dict[str, Any]:
    if text.count(b"[") > 2 * MAX_TENSORS:  # a shape and a place each
        raise ModelError(f"{file} has more than {MAX_TENSORS} tensors, or an invalid header; split it into shards.")
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{file} has a damaged header ({type(error).__name__}). {_AGAIN}") from error
    if not isinstance(header, dict):
        raise ModelError(f"{file} has a header that is not a JSON object. {_AGAIN}")
    header.pop("__metadata__", None)
    return header


def _entries(file: Path, header: dict[str, Any], base: int, size: int) -> dict[str, TensorEntry]:
    entries = {name: _entry(file, name, value, base) for name, value in header.items()}
    end = max((entry.start + entry.num_bytes for entry in entries.values()), default=base)
    if end > size:
        raise ModelError(f"{file} is truncated: {size} bytes, but its tensors need {end}. {_AGAIN}")
    _check_gapless(file, entries, base, size)
    return entries


def _check_gapless(file: Path, entries: Mapping[str, TensorEntry], base: int, size: int) -> None:
    """As the format requires: tensors are contiguous and disjoint, and there is nothing else in the file."""
    at = base
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].num_bytes)):
        if entry.start != at:
            what = "overlaps the tensor before it" if entry.start < at else f"follows {entry.start - at} stray bytes"
            raise ModelError(f"{file} is damaged: {name[:80]!r} {what} (byte {entry.start}, expected {at}). {_AGAIN}")
        at += entry.num_bytes
    if at != size:
        raise ModelError(f"{file} is damaged: {size - at} bytes follow the last tensor. {_AGAIN}")


def _entry(file: Path, name: str, value: Any, base: int) -> TensorEntry:
    fields: dict[str, Any] = value if isinstance(value, dict) else {}
    dtype, shape, offsets = (fields.get(key, ()) for key in ("dtype", "shape", "data_offsets"))
    if (
        not isinstance(dtype, str)
        or not _naturals(shape)
        or not _naturals(offsets)
        or len(offsets) != 2
        or offsets[0] > offsets[1]
    ):
        raise ModelError(f"{file}: the header's entry for {name[:80]!r} is damaged. {_AGAIN}")
    if dtype not in DTYPE_BYTES:
        raise ModelError(
            f"{file}: tensor {name[:80]!r} has dtype {dtype[:20]!r}, which is not known; known are {', '.join(DTYPE_BYTES)}."
        )
    wanted = math.prod(shape) * DTYPE_BYTES[dtype]
    if offsets[1] - offsets[0] != wanted:
        raise ModelError(
            f"{file}: tensor {name[:80]!r} of shape {shape[:8]} and {dtype} needs {wanted} bytes but has {offsets[1] - offsets[0]}. {_AGAIN}"
        )
    return TensorEntry(file, dtype, tuple(shape), base + offsets[0], wanted)


def _naturals(value: Any) -> bool:
    return (
        isinstance(value, list) and len(value) <= 16 and all(type(item) is int and 0 <= item < 2**63 for item in value)
    )


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
