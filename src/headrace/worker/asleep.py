"""What a worker gives up while it sleeps (level 1), and gets back at the same addresses: captured steps, kernels'
arguments and descriptors hold those.

On a CPU the KV cache's pages are handed back to the system; weights are in host memory already. On a GPU weights and KV
lie in memory that is mapped by the driver's virtual memory management: addresses are reserved once, and the memory
behind them comes and goes. Before weights' memory goes, it is copied into pinned host memory, which is kept for the
next time.

What lives here: that memory. What may not: who sleeps and when (engine/core.py), level 2 (engine/assembly.py).
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from ctypes import CFUNCTYPE, c_int, c_size_t, c_ssize_t, c_void_p
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from headrace.errors import OutOfMemory
from headrace.lora.pinned import pinned_zeros
from headrace.worker.host import available_memory
from headrace.worker.virtual_memory import GIB, VirtualMemory, check, driver


class Asleep(Protocol):
    """With nothing under way on the device. Both raise OutOfMemory, and nothing has changed then."""

    def sleep(self) -> None: ...

    def wake(self) -> None: ...

    def close(self) -> None:
        """It neither sleeps nor wakes any more, and holds on to nothing but regions that tensors lie in."""


class HostPages:
    """The pages of these tensors on a CPU, whose contents are not needed; they come back when they are touched."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors

    def sleep(self) -> None:
        libc = ctypes.CDLL(None)
        for tensor in self._tensors:
            storage, page = tensor.untyped_storage(), mmap.PAGESIZE
            first = -(-storage.data_ptr() // page) * page
            last = (storage.data_ptr() + storage.nbytes()) // page * page
            if last > first:  # others may have a part of the outer pages
                libc.madvise(c_void_p(first), c_size_t(last - first), c_int(mmap.MADV_DONTNEED))
        if hasattr(libc, "malloc_trim"):
            libc.malloc_trim(0)

    def wake(self) -> None:
        pass

    def close(self) -> None:
        self._tensors = ()


# --- a GPU's


_THREADS = 8  # that allocate host memory

_ALLOCATE = CFUNCTYPE(c_void_p, c_ssize_t, c_int, c_void_p)  # size, device, stream
_FREE = CFUNCTYPE(None, c_void_p, c_ssize_t, c_int, c_void_p)


@dataclass(slots=True)
class _Region:
    """Addresses, and the memory behind them (0: none)."""

    address: int
    size: int
    kept: bool  # its contents are needed
    handle: int = 0


class DeviceMemory:
    """Tensors that are made within ``keeping`` and ``giving_up`` lie in memory that sleeps; what the former hold is
    copied. ``refill``: makes what the latter hold of these anew; ``restore``: makes torch's allocator whole again."""

    def __init__(self, device: torch.device) -> None:
        self.refill: Callable[[], None] = lambda: None
        self.restore: Callable[[], None] = lambda: None
        self._device = device
        self._memory = VirtualMemory()
        self._regions: dict[int, _Region] = {}  # by address
        self._host: dict[int, Tensor] = {}  # [1, bytes], by a region's address
        self._allocators = [self._create_allocator(kept) for kept in (True, False)]

    @contextmanager
    def keeping(self) -> Iterator[None]:
        with self._pool(0):
            yield

    @contextmanager
    def giving_up(self) -> Iterator[None]:
        with self._pool(1):
            yield

    @contextmanager
    def _pool(self, which: int) -> Iterator[None]:
        """One of torch's, which ends with the block: what was freed within is given back, tensors stay."""
        pool = torch.cuda.MemPool(self._allocators[which])
        with torch.cuda.use_mem_pool(pool):
            yield
        del pool

    def _create_allocator(self, kept: bool) -> Any:
        def allocate(size: int, device: int, stream: int) -> int:
            try:
                return self._allocate(size, kept)
            except Exception:  # torch tells of it
                return 0

        def free(address: int, size: int, device: int, stream: int) -> None:
            self._host.pop(address, None)
            self._free(self._regions.pop(address))

        calls = _ALLOCATE(allocate), _FREE(free)
        for each in calls:  # tensors may outlive whatever holds this
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))
        addresses = [ctypes.cast(each, c_void_p).value or 0 for each in calls]
        return torch._C._cuda_customAllocator(*addresses)

    # --- regions

    def _allocate(self, size: int, kept: bool) -> int:
        size = self._memory.whole(size)
        region = _Region(self._memory.reserve(size), size, kept)
        try:
            self._map(region)
        except Exception:
            driver().cuMemAddressFree(region.address, region.size)
            raise
        self._regions[region.address] = region
        return region.address

    def _map(self, region: _Region) -> None:
        region.handle = self._memory.create(region.size)
        try:
            self._memory.map(region.address, region.size, region.handle)
        except Exception:
            driver().cuMemRelease(region.handle)
            region.handle = 0
            raise

    def _unmap(self, region: _Region) -> None:
        if region.handle:
            driver().cuMemUnmap(region.address, region.size)
            driver().cuMemRelease(region.handle)
            region.handle = 0

    def _free(self, region: _Region) -> None:
        self._unmap(region)
        driver().cuMemAddressFree(region.address, region.size)

    # --- sleep

    def sleep(self) -> None:
        """Nothing happens to one that sleeps."""
        if not any(region.handle for region in self._regions.values()):
            return
        torch.cuda.synchronize(self._device)
        kept = [region for region in self._regions.values() if region.kept]
        self._reserve_host(kept)
        for region in self._regions.values():
            if not region.kept:  # the driver clears it while weights are copied: one that wakes at once would wait
                self._unmap(region)
        for region in kept:
            place = self._host[region.address].data_ptr()
            copied = driver().cuMemcpyDtoHAsync_v2(place, region.address, region.size, self._stream)
            check(copied, "a copy of weights")
        torch.cuda.synchronize(self._device)
        for region in kept:
            self._unmap(region)
        torch.cuda.empty_cache()

    def wake(self) -> None:
        """Weights are on their way while the memory for KV is still being mapped, and torch's own is allocated."""
        regions = sorted((each for each in self._regions.values() if not each.handle), key=lambda each: not each.kept)
        torch.cuda.empty_cache()
        try:
            for region in regions:
                self._map(region)
                if region.kept:
                    place = self._host[region.address].data_ptr()
                    copied = driver().cuMemcpyHtoDAsync_v2(region.address, place, region.size, self._stream)
                    check(copied, "a copy of weights")
            self.refill()
        except OutOfMemory:
            torch.cuda.synchronize(self._device)
            for region in regions:
                self._unmap(region)
            raise
        self.restore()
        torch.cuda.synchronize(self._device)

    @property
    def _stream(self) -> int:
        return torch.cuda.current_stream(self._device).cuda_stream

    def _reserve_host(self, kept: Sequence[_Region]) -> None:
        """Memory for each is touched by a thread, which takes most of the first sleep."""
        lacking = [region for region in kept if region.address not in self._host]
        if (size := sum(region.size for region in lacking)) > (free := available_memory()):
            needed, there = (f"{each / GIB:.2f} GiB" for each in (size, free))
            raise OutOfMemory(f"Weights take {needed} of host memory, and {there} are free. Free some, and try again.")
        with ThreadPoolExecutor(_THREADS, "headrace-sleep") as pool:
            found = pool.map(lambda region: pinned_zeros(1, region.size, torch.uint8), lacking)
            try:
                self._host |= dict(zip((region.address for region in lacking), found, strict=True))
            except (MemoryError, OSError, RuntimeError) as error:  # the system's, the driver's or torch's word for it
                raise OutOfMemory(
                    f"{size / GIB:.2f} GiB of pinned host memory could not be had ({error}). Free some, and try again."
                ) from error

    def close(self) -> None:
        self.refill = self.restore = lambda: None
        self._host.clear()
