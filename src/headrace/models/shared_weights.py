"""Weights in host memory that all processes of one user share which serve the same model on a CPU (ServerlessLoRA, Sui
et al. 2025): whoever comes first reads them from disk, whoever comes later maps what is there. (On a GPU:
worker/shared_device.py.)

    one file in shared memory    length of the header | names, types, shapes | tensors, each on a line of its own
    who has it open              a shared lock; who fills or removes it: an exclusive one

It is removed when the last one ends. After a crash it lies there, whole or not: the next one takes or replaces it.

What lives here: that file. What may not: reading checkpoints (loader.py), what kernels make of weights.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import mmap
import os
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from headrace.errors import ModelError

_LINE = 64  # bytes of a processor's cache line: where tensors begin
_LENGTH = 8  # bytes: of the header, once all else is written; 0 before
_MOST_HEADER = 2**26


@dataclass(frozen=True, slots=True)
class _Entry:
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int  # in bytes, after the header


def share_weights(module: nn.Module, key: Sequence[object], fill: Callable[[], None]) -> bool:
    """Fills the parameters by ``fill``, or with what another process has filled its own with: True then. ``key``: all
    that the values depend on. They are mapped privately: who writes gets a copy. Raises ModelError."""
    path = meeting_place(key)
    fd = open_locked(path, fcntl.LOCK_SH)
    found = (entries := _entries(fd)) is not None
    if not found:
        os.close(fd)
        fd = open_locked(path, fcntl.LOCK_EX)
    try:
        found = (entries := entries or _entries(fd)) is not None
        if entries is None:
            fill()
            entries = _write(fd, path, {name: each.data for name, each in module.named_parameters()})
        _adopt(fd, entries, module)
        fcntl.flock(fd, fcntl.LOCK_SH)
    except BaseException:
        os.close(fd)
        raise
    weakref.finalize(module, leave, fd, path)
    return found


def meeting_place(key: Sequence[object]) -> Path:
    """Of this user's processes."""
    name = hashlib.sha256(repr(tuple(key)).encode()).hexdigest()[:32]
    folder = Path("/dev/shm") if os.path.isdir("/dev/shm") else Path(tempfile.gettempdir())
    return folder / f"headrace-{os.getuid()}-{name}"


def open_locked(path: Path, lock: int) -> int:
    """Locked, with its name: shared, nothing fills it; exclusive, nothing has it. Raises ModelError for what is another
    user's."""
    while True:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ModelError(f"cannot open {path} to share weights: {error}. Start without --share-weights.") from error
        fcntl.flock(fd, lock)  # another may be filling it: wait, then find it done
        status = os.fstat(fd)
        if status.st_uid != os.getuid() or status.st_mode & 0o077:
            os.close(fd)
            raise ModelError(f"{path} is not this user's alone, so its weights are not trusted. Remove it.")
        if status.st_nlink:
            return fd
        os.close(fd)  # the last one removed it meanwhile


def _entries(fd: int) -> list[_Entry] | None:
    """None where it was never filled to the end."""
    length = int.from_bytes(os.pread(fd, _LENGTH, 0), "little")
    if not 0 < length <= _MOST_HEADER:
        return None
    return [
        _Entry(name, dtype, tuple(shape), start)
        for name, dtype, shape, start in json.loads(os.pread(fd, length, _LENGTH))
    ]


def _header(entries: Sequence[_Entry]) -> bytes:
    return json.dumps([astuple(entry) for entry in entries]).encode()


def _begin(entries: Sequence[_Entry]) -> int:
    return _up(_LENGTH + len(_header(entries)), mmap.PAGESIZE)


def _up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def _write(fd: int, path: Path, tensors: Mapping[str, Tensor]) -> list[_Entry]:
    entries, end = list[_Entry](), 0
    for name, tensor in tensors.items():
        entries.append(_Entry(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), end))
        end = _up(end + tensor.nbytes, _LINE)
    header, begin = _header(entries), _begin(entries)
    os.ftruncate(fd, 0)
    try:
        os.posix_fallocate(fd, 0, begin + end)  # a full one would kill whoever maps it
    except OSError as error:
        os.ftruncate(fd, 0)
        raise ModelError(
            f"{path.parent} has no room for {(begin + end) / 2**30:.2f} GiB of weights ({error.strerror}). "
            f"Give it more (docker run --shm-size), or start without --share-weights."
        ) from error
    for entry, tensor in zip(entries, tensors.values(), strict=True):
        _put(fd, tensor.contiguous().view(-1).view(torch.uint8).numpy().data, begin + entry.start)
    _put(fd, memoryview(header), _LENGTH)
    _put(fd, memoryview(len(header).to_bytes(_LENGTH, "little")), 0)
    return entries


def _put(fd: int, data: memoryview, at: int) -> None:
    while data:
        written = os.pwrite(fd, data, at)
        data, at = data[written:], at + written


def _adopt(fd: int, entries: Sequence[_Entry], module: nn.Module) -> None:
    parameters = dict(module.named_parameters())
    assert set(parameters) == {entry.name for entry in entries}, "the key says less than the weights depend on"
    mapped, begin = mmap.mmap(fd, 0, access=mmap.ACCESS_COPY), _begin(entries)
    for entry in entries:
        kind, count = _dtype(entry.dtype), math.prod(entry.shape)
        flat = (
            torch.frombuffer(mapped, dtype=kind, count=count, offset=begin + entry.start) if count else torch.empty(0)
        )
        parameters[entry.name].data = flat.to(kind).view(entry.shape)


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found


def leave(fd: int, path: Path) -> None:
    """The last one removes it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # others go on with it
        pass
    else:
        path.unlink(missing_ok=True)
    os.close(fd)
