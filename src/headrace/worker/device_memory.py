"""A GPU's memory as this process sees it: what the driver counts, what torch's allocator holds of it, and what the
stages of a start add.

What lives here: measuring, and the piece that steps draw from. What may not: deciding sizes (memory.py), the order of a
start (worker.py).

    total | free | other processes | context | code, handles | graphs     | weights | KV | rows | arena of steps |
                 '----- outside: in no tensor of this process ----------' '-- held by this process's allocator --'
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from headrace.worker import virtual_memory
from headrace.worker.driver import ask_driver
from headrace.worker.head_start import HeadStart

_SMALL = 2**20  # the allocator keeps tensors up to this size apart from larger ones
_STACK = 64  # bytes of a thread


def small_bytes(rows: int) -> int:
    """For a step's small tensors (indexes, parameters, scores): they took less than 10 MiB, 8B model, 256 rows."""
    return min(32, max(4, rows // 8)) * _SMALL


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """Bytes of one card, now, with nothing under way on it."""

    total: int
    free: int
    held: int  # by this process's allocator
    live: int  # of that, in tensors

    @property
    def used(self) -> int:
        return self.total - self.free

    @property
    def outside(self) -> int:
        """In use, but not by this process's allocator."""
        return self.used - self.held


def device_use(device: torch.device) -> DeviceUse:
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    return DeviceUse(total, free, torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device))


def used_before_context(device: torch.device, head_start: HeadStart | None = None) -> int | None:
    """Bytes in use on the card, asked without making a context, or before the head start made it; None where the driver
    does not say."""
    properties = torch.cuda.get_device_properties(device)
    free = head_start.free_before(str(properties.uuid)) if head_start is not None else None
    if (
        free is None
        and (driver := ask_driver()) is not None
        and (card := driver.card(str(properties.uuid))) is not None
    ):
        free = card.free
    return max(0, properties.total_memory - free) if free is not None else None


class DeviceMeter:
    """What a start adds to the memory in use, beside tensors. Made before the first of them: it makes the CUDA context,
    where there is none.

    ``others``: bytes in use before, by other processes or by what this one held already. Where the driver does not tell
    them from the context, ``context`` is both.
    """

    def __init__(
        self, device: torch.device, head_start: HeadStart | None = None, *, small_stacks: bool = False
    ) -> None:
        """``small_stacks``: memory that the context keeps for stacks, of all threads that may run at once and 1 KiB each
        (264 MiB of an H200), is given back but for a sixteenth; kernels that need more take it when they are launched."""
        self._device = device
        # what was measured or closed before may wait to be collected
        if torch.cuda.is_initialized() and torch.cuda.memory_reserved(device):
            gc.collect()
            torch.cuda.empty_cache()
        self.others = used_before_context(device, head_start) or 0
        held = torch.cuda.memory_reserved(device)
        torch.zeros(1, device=device)
        if small_stacks:
            virtual_memory.driver().cuCtxSetLimit(0, _STACK)
        self._first = device_use(device)
        self.total = self._first.total
        self.context = max(0, self._first.used - self.others - (self._first.held - held))
        self.graphs = 0  # their pool, and what the driver keeps of them
        self._graphs_outside = 0
        take_scratch(device)

    def code(self, weights: int = 0) -> int:
        """Bytes of kernels' machine code and libraries' handles so far: what is outside the allocator and came after
        the context, but for ``weights`` that lie there."""
        return max(0, device_use(self._device).outside - self._first.outside - self._graphs_outside - weights)

    def kept(self, known: int) -> int:
        """Bytes of tensors that came since the beginning, beside ``known`` ones: what libraries keep for themselves
        (cuBLAS: 32 MiB a stream)."""
        return max(0, device_use(self._device).live - self._first.live - known)

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """What comes into use within belongs to graphs."""
        before = device_use(self._device)
        yield
        after = device_use(self._device)
        self.graphs += after.used - before.used
        self._graphs_outside += after.outside - before.outside


def take_scratch(device: torch.device) -> None:
    """cuBLAS keeps its scratch, 32 MiB a stream, for good. Taken now, it is a segment of its own, and not a piece of
    one that could else be given back."""
    one = torch.zeros(16, 16, device=device)
    torch.mm(one, one)


@contextmanager
def scratch_of_graphs(device: torch.device) -> Iterator[None]:
    """GEMMs that are captured within take scratch from the graphs' own pool, and it goes with the graphs.

    Kept by cuBLAS it would hold on to a pool that has no graphs any more; found from before, it would be another
    engine's.
    """
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()
        take_scratch(device)  # of the stream that steps are queued on, where it was


@dataclass(slots=True)
class Peak:
    """Bytes that were in use at once, above what was there before."""

    held: int = 0  # by the allocator: with its rounding and its gaps
    live: int = 0  # in tensors


@contextmanager
def measured_peak(device: torch.device, *, emptied: bool = True) -> Iterator[Peak]:
    """The peak of what happens within is in what it yields afterwards; begins with an empty cache, unless it may not be
    emptied."""
    peak = Peak()
    torch.cuda.synchronize(device)
    if emptied:
        torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    held, live = torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
    yield peak
    torch.cuda.synchronize(device)
    peak.held, peak.live = torch.cuda.max_memory_reserved(device) - held, torch.cuda.max_memory_allocated(device) - live


def set_aside(size: int, small: int, device: torch.device) -> None:
    """Makes ``size`` bytes the allocator's own, in one piece, and ``small`` ones in small pieces: steps share them out
    and never ask the driver for more."""
    torch.empty(size, dtype=torch.uint8, device=device)
    _ = [torch.empty(_SMALL, dtype=torch.uint8, device=device) for _ in range(small // _SMALL)]
