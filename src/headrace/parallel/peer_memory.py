"""Memory that a stage of a pipeline lends the stage before it, for layers that do not lie there (models/layer_pool.py).

Both map it: of a CPU a file without a name, of a GPU by CUDA IPC. It goes with the ends' PeerMemory, or their processes.

What lives here: that. What may not: what lies in it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Callable
from ctypes import byref, c_size_t, c_uint64
from typing import Any

import torch
from torch import Tensor

from headrace.errors import ConfigError, OutOfMemory

_HANDLE_BYTES, _PEER = 64, 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS


class _Handle(ctypes.Structure):
    """CUipcMemHandle."""

    _fields_ = (("bytes", ctypes.c_byte * _HANDLE_BYTES),)


class PeerMemory:
    """Of rank ``rank``, which lends to ``borrower`` and borrows from whoever lends to it. ``store``: as groups have it."""

    def __init__(self, store: Any, rank: int, borrower: int, *, on_gpu: bool) -> None:
        self._store, self._rank, self._borrower, self._on_gpu = store, rank, borrower, on_gpu
        self.lent = 0  # bytes

    def exchange(self, size: int) -> Tensor | None:  # [size], uint8
        """All ranks at once; None: nothing was asked for. Raises OutOfMemory."""
        self._store.set(f"asked by {self._rank}", b"%d" % size)
        self.lent = int(self._store.expect(f"asked by {self._borrower}"))
        if self.lent:
            self._store.set(f"lent to {self._borrower}", self._lend_gpu() if self._on_gpu else self._lend_host())
        if not size:
            return None
        name = self._store.expect(f"lent to {self._rank}")
        return self._borrow_gpu(name, size) if self._on_gpu else _borrow_host(name, size)

    def _at_end(self, call: Callable[..., object], *given: object) -> None:
        weakref.finalize(self, call, *given).atexit = False

    def _lend_host(self) -> bytes:
        if not hasattr(os, "memfd_create"):
            raise ConfigError("--pooled-layers needs memory without a name, which this system lacks; leave it out.")
        file = os.memfd_create("headrace-layers")
        self._at_end(os.close, file)
        os.ftruncate(file, self.lent)
        return b"/proc/%d/fd/%d" % (os.getpid(), file)

    def _lend_gpu(self) -> bytes:
        driver, own, handle = ctypes.CDLL("libcuda.so.1"), c_uint64(), _Handle()
        if driver.cuMemAlloc_v2(byref(own), c_size_t(self.lent)) or driver.cuIpcGetMemHandle(byref(handle), own):
            raise OutOfMemory(
                f"{self.lent / 2**30:.2f} GiB for layers of the stage before could not be lent. Lower --pooled-layers."
            )
        self._at_end(driver.cuMemFree_v2, own)
        return bytes(handle)

    def _borrow_gpu(self, name: bytes, size: int) -> Tensor:
        """torch takes it for the current device's, which reaches it like that."""
        driver, found = ctypes.CDLL("libcuda.so.1"), c_uint64()
        driver.cuIpcOpenMemHandle_v2.argtypes = [ctypes.POINTER(c_uint64), _Handle, ctypes.c_uint]
        if status := driver.cuIpcOpenMemHandle_v2(byref(found), _Handle.from_buffer_copy(name), _PEER):
            raise ConfigError(
                f"--pooled-layers needs GPUs that reach each other's memory (CUDA error {status}); see `headrace doctor`."
            )
        self._at_end(driver.cuIpcCloseMemHandle, found)
        device = torch.device("cuda", torch.cuda.current_device())
        storage = torch._C._construct_storage_from_data_pointer(found.value, device, size)
        return torch.tensor([], dtype=torch.uint8, device=device).set_(storage)


def _borrow_host(name: bytes, size: int) -> Tensor:
    with open(name, "r+b") as file:
        return torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=torch.uint8)
