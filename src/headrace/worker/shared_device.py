"""Weights in a GPU's memory that all processes of one user share which serve the same model on that card (ServerlessLoRA,
Sui et al. 2025).

    one file in shared memory      its locks: shared by who has the weights, exclusive by who fills them or removes it
    a socket of each that has them gives a descriptor of the memory to processes of the same user

The memory has no owner: the driver keeps it while a process has mapped it or holds its descriptor. So whoever filled
it may end, crash or be replaced by a newer one while others go on, and nothing of it stays when the last one ends.

What lives here: meeting, and who fills. What may not: weights in host memory (models/shared_weights.py), the driver
(virtual_memory.py).
"""

from __future__ import annotations

import fcntl
import math
import os
import secrets
import socket
import struct
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from headrace.errors import ModelError
from headrace.models.shared_weights import leave, meeting_place, open_locked
from headrace.worker.virtual_memory import VirtualMemory, driver

_LINE = 512  # bytes: where tensors begin, as torch's own do
_PATIENCE = 10.0  # seconds that one that has the weights may take to say so


@dataclass(frozen=True, slots=True)
class Span:
    """``bytes`` [size], of memory that ``fd`` stands for."""

    fd: int
    bytes: Tensor


class Spans(Protocol):
    def create(self, size: int) -> Span:
        """Raises OutOfMemory."""

    def adopt(self, fd: int, size: int) -> Span:
        """Takes the descriptor over."""


class DeviceSpans:
    """Of torch's current device."""

    def __init__(self) -> None:
        self._memory = VirtualMemory(shareable=True)

    def create(self, size: int) -> Span:
        handle = self._memory.create(self._memory.whole(size))
        try:
            return Span(self._memory.export(handle), self._map(handle, size))
        finally:
            driver().cuMemRelease(handle)  # what is mapped stays

    def adopt(self, fd: int, size: int) -> Span:
        handle = self._memory.adopt(fd)
        try:
            return Span(fd, self._map(handle, size))
        finally:
            driver().cuMemRelease(handle)

    def _map(self, handle: int, size: int) -> Tensor:
        whole = self._memory.whole(size)
        address = self._memory.reserve(whole)
        try:
            self._memory.map(address, whole, handle)
        except Exception:
            driver().cuMemAddressFree(address, whole)
            raise
        mapped = _Mapped({"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 2})
        weakref.finalize(mapped, _unmap, address, whole).atexit = False  # then the process gives everything back
        return torch.as_tensor(mapped, device="cuda")


class _Mapped:
    """Lives as long as tensors that lie in it."""

    def __init__(self, interface: dict[str, Any]) -> None:
        self.__cuda_array_interface__ = interface


def _unmap(address: int, size: int) -> None:
    torch.cuda.synchronize()
    driver().cuMemUnmap(address, size)
    driver().cuMemAddressFree(address, size)


def share_on_device(module: nn.Module, key: Sequence[object], fill: Callable[[], None], spans: Spans) -> bool:
    """Gives the parameters, which have no memory yet ("meta"), what another process has filled (True), or memory that
    ``fill`` fills. ``key``: all that the values depend on, and the card. They are read-only. Raises ModelError."""
    places, size = _places(module)
    path = meeting_place((*key, [(name, each.dtype, each.shape) for name, each in module.named_parameters()]))
    fd = open_locked(path, fcntl.LOCK_SH)
    try:
        span = _ask(path, size, spans)
    except BaseException:
        os.close(fd)
        raise
    if span is None:
        os.close(fd)
        fd = open_locked(path, fcntl.LOCK_EX)
    try:
        span = span or _ask(path, size, spans)  # another was as quick
        found = span is not None
        span = span or spans.create(size)
        _settle(module, span.bytes, places)
        if not found:
            fill()
        host = Host(path, span.fd)
        fcntl.flock(fd, fcntl.LOCK_SH)
    except BaseException:
        if span is not None:
            os.close(span.fd)
        os.close(fd)
        raise
    weakref.finalize(module, _leave, host, fd, path)
    return found


def _leave(host: Host, fd: int, path: Path) -> None:
    host.close()
    leave(fd, path)


def _places(module: nn.Module) -> tuple[dict[int, int], int]:
    """(where each parameter begins, by id; bytes of all)."""
    places, end = dict[int, int](), 0
    for _, each in module.named_parameters():
        places[id(each)] = end
        end += -(-each.nbytes // _LINE) * _LINE
    return places, max(end, _LINE)


def _settle(module: nn.Module, held: Tensor, places: dict[int, int]) -> None:
    """A parameter that two modules have stays one."""
    made = dict[int, nn.Parameter]()
    for each in module.modules():
        for name, old in each._parameters.items():
            if old is not None and id(old) not in made:
                begin, count = places[id(old)], math.prod(old.shape) * old.itemsize
                data = held[begin : begin + count].view(old.dtype).view(old.shape)
                made[id(old)] = nn.Parameter(data, requires_grad=False)
            if old is not None:
                each._parameters[name] = made[id(old)]


# --- descriptors, from one process of a user to another


class Host:
    """Gives ``fd`` to whoever of this user comes, until it is closed, and closes it then."""

    def __init__(self, path: Path, fd: int) -> None:
        own = f"{os.getpid()}-{secrets.token_hex(4)}"
        self._path, self._fd = f"{path}.{own}", fd
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(f"{path}~{own}")
        os.chmod(f"{path}~{own}", 0o600)
        self._socket.listen(8)
        os.rename(f"{path}~{own}", self._path)  # who finds it is heard
        Thread(target=_serve, args=(self._socket, fd), name="headrace-weights", daemon=True).start()

    def close(self) -> None:
        with suppress(OSError):
            os.unlink(self._path)
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # whoever accepts wakes
        self._socket.close()
        os.close(self._fd)


def _serve(listening: socket.socket, fd: int) -> None:
    while True:
        try:
            other, _ = listening.accept()
        except OSError:  # closed
            return
        with other, suppress(OSError):
            other.settimeout(_PATIENCE)
            if _user_of(other) == os.getuid():
                socket.send_fds(other, [b"weights"], [fd])


def _ask(path: Path, size: int, spans: Spans) -> Span | None:
    """None where no process has them. Raises ModelError where those that have them do not answer."""
    silent = None
    for each in _sockets(path):
        with socket.socket(socket.AF_UNIX) as asking:
            asking.settimeout(_PATIENCE)
            try:
                asking.connect(str(each))
                if _user_of(asking) != os.getuid():
                    continue
                _, fds, _, _ = socket.recv_fds(asking, 16, 1)
            except TimeoutError:
                silent = each
                continue
            except OSError:  # what a crash left
                with suppress(OSError):
                    each.unlink()
                continue
        if fds:
            return spans.adopt(fds[0], size)
    if silent is not None:
        raise ModelError(f"The process behind {silent} has the weights and does not answer. End it, and start again.")
    return None


def _sockets(path: Path) -> Iterator[Path]:
    for each in sorted(path.parent.glob(f"{path.name}.*")):
        with suppress(OSError):
            if each.is_socket() and each.lstat().st_uid == os.getuid():
                yield each


def _user_of(peer: socket.socket) -> int:
    _, user, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return int(user)
