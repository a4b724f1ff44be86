"""The driver's virtual memory management: addresses are reserved, and memory is put behind them and taken away; memory
that a file descriptor stands for can lie behind addresses of several processes.

What lives here: these calls. What may not: whose memory it is (asleep.py, shared_device.py).
"""

from __future__ import annotations

import ctypes
import os
from ctypes import POINTER, Structure, byref, c_int, c_size_t, c_ubyte, c_uint64, c_ushort, c_void_p
from functools import cache

import torch

from headrace.errors import OutOfMemory

GIB = 2**30
_PINNED, _DEVICE, _READ_WRITE, _OUT_OF_MEMORY = 1, 1, 3, 2
_DESCRIPTOR = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


class Location(Structure):
    _fields_ = (("type", c_int), ("id", c_int))


class Kind(Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", c_int),
        ("handles", c_int),
        ("location", Location),
        ("win32", c_void_p),
        ("compression", c_ubyte),
        ("rdma", c_ubyte),
        ("usage", c_ushort),
        ("reserved", c_ubyte * 4),
    )


class Access(Structure):
    _fields_ = (("location", Location), ("flags", c_int))


@cache
def driver() -> ctypes.CDLL:
    library = ctypes.CDLL("libcuda.so.1")
    library.cuCtxSetLimit.argtypes = (c_int, c_size_t)
    library.cuMemAddressReserve.argtypes = (POINTER(c_uint64), c_size_t, c_size_t, c_uint64, c_uint64)
    library.cuMemCreate.argtypes = (POINTER(c_uint64), c_size_t, POINTER(Kind), c_uint64)
    library.cuMemMap.argtypes = (c_uint64, c_size_t, c_size_t, c_uint64, c_uint64)
    library.cuMemSetAccess.argtypes = (c_uint64, c_size_t, POINTER(Access), c_size_t)
    library.cuMemUnmap.argtypes = library.cuMemAddressFree.argtypes = (c_uint64, c_size_t)
    library.cuMemRelease.argtypes = (c_uint64,)
    library.cuMemExportToShareableHandle.argtypes = (POINTER(c_int), c_uint64, c_int, c_uint64)
    library.cuMemImportFromShareableHandle.argtypes = (POINTER(c_uint64), c_void_p, c_int)
    library.cuMemcpyDtoHAsync_v2.argtypes = (c_void_p, c_uint64, c_size_t, c_void_p)
    library.cuMemcpyHtoDAsync_v2.argtypes = (c_uint64, c_void_p, c_size_t, c_void_p)
    return library


def check(status: int, what: str) -> None:
    """Raises OutOfMemory, or RuntimeError for whatever else is no success."""
    if status == _OUT_OF_MEMORY:
        raise OutOfMemory(f"There is no memory for {what}. Free some, and try again.")
    if status:
        raise RuntimeError(f"CUDA answered {status} to {what}")


class VirtualMemory:
    """Of torch's current device. ``shareable``: what is created can be exported."""

    def __init__(self, *, shareable: bool = False) -> None:
        place = Location(_DEVICE, torch.cuda.current_device())
        self._kind = Kind(type=_PINNED, handles=_DESCRIPTOR if shareable else 0, location=place)
        self._access = Access(place, _READ_WRITE)

    def whole(self, size: int) -> int:
        """As many bytes as are mapped at least for so many."""
        grain = c_size_t()
        check(driver().cuMemGetAllocationGranularity(byref(grain), byref(self._kind), 0), "its granularity")
        return -(-size // grain.value) * grain.value

    def reserve(self, size: int) -> int:
        """Their address."""
        address = c_uint64()
        check(driver().cuMemAddressReserve(byref(address), size, 0, 0, 0), f"{size} bytes of addresses")
        return address.value

    def create(self, size: int) -> int:
        """A handle."""
        handle = c_uint64()
        what = f"{size / GIB:.2f} GiB of the device"
        check(driver().cuMemCreate(byref(handle), size, byref(self._kind), 0), what)
        return handle.value

    def map(self, address: int, size: int, handle: int) -> None:
        """Nothing is mapped if it raises."""
        check(driver().cuMemMap(address, size, 0, handle, 0), "memory's addresses")
        try:
            check(driver().cuMemSetAccess(address, size, byref(self._access), 1), "access to memory")
        except Exception:
            driver().cuMemUnmap(address, size)
            raise

    def export(self, handle: int) -> int:
        """A file descriptor: whoever has it keeps the memory."""
        fd = c_int()
        check(driver().cuMemExportToShareableHandle(byref(fd), handle, _DESCRIPTOR, 0), "a handle that others can map")
        os.set_inheritable(fd.value, False)
        return fd.value

    def adopt(self, fd: int) -> int:
        """A handle of what another process has exported."""
        handle = c_uint64()
        check(
            driver().cuMemImportFromShareableHandle(byref(handle), c_void_p(fd), _DESCRIPTOR),
            "another process's handle",
        )
        return handle.value
