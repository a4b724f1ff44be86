"""What this process really holds in memory, by purpose, against what was announced.

An allocation costs memory when it is touched; the kernel is asked which of its pages are there (mincore).

What lives here: measuring this process. What may not: deciding sizes (memory.py), printing.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from headrace.portability import process_status
from headrace.worker.device_memory import Peak

LARGE = 2**20  # bytes; smaller tensors are touched as a whole


@dataclass(frozen=True, slots=True)
class Ledger:
    """Bytes resident now, by purpose; ``residual`` is what no purpose explains (negative: announced and not there)."""

    resident: int
    purposes: Mapping[str, int]

    @property
    def residual(self) -> int:
        return self.resident - sum(self.purposes.values())

    @property
    def share_explained(self) -> float:
        """1 - |residual| / resident."""
        return 1.0 - abs(self.residual) / self.resident


def create_ledger(announced: Mapping[str, int], measured: Mapping[str, int]) -> Ledger:
    """``announced`` is ExecutorInfo.memory of the only engine in this process, with no step under way; ``measured`` are
    further purposes, found by what a stage added.

    Weights, KV and rows count as far as they are touched; what was there before the model, and code and libraries, as
    measured.
    """
    anonymous, files = resident_memory()
    touched = touched_memory(announced)
    purposes = {
        "code and libraries": files,
        "interpreter, torch and engine before the model": announced["process"],
        "weights": announced["weights"],
        "KV blocks in use so far": touched["kv_cache"],
        "rows in use so far": touched["rows"],
        "kernels: threads, generated code, scratch": announced["kernels"],
        **measured,
    }
    return Ledger(anonymous + files, purposes)


def touched_memory(announced: Mapping[str, int]) -> dict[str, int]:
    """Bytes of the KV cache and of the rows that are in memory: both are set aside whole, and touched as they are
    used."""
    untouched = {"kv_cache": 0, "rows": 0}
    for tensor in _large_tensors():
        missing = tensor.untyped_storage().nbytes() - resident_bytes(tensor)
        untouched["kv_cache" if tensor.dim() == 6 else "rows"] += missing
    return {name: announced[name] - missing for name, missing in untouched.items()}


def resident_bytes(tensor: Tensor) -> int:
    """Bytes of a CPU tensor's storage that are in memory; all of them where the kernel does not say."""
    storage = tensor.untyped_storage()
    first = storage.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    pages = -(-(storage.data_ptr() + storage.nbytes() - first) // mmap.PAGESIZE)
    flags = (ctypes.c_ubyte * pages)()
    if ctypes.CDLL(None, use_errno=True).mincore(ctypes.c_void_p(first), ctypes.c_size_t(pages * mmap.PAGESIZE), flags):
        return storage.nbytes()
    resident = int((torch.frombuffer(flags, dtype=torch.uint8) & 1).sum())
    return min(storage.nbytes(), resident * mmap.PAGESIZE)


def _large_tensors() -> Iterator[Tensor]:
    """Plain CPU tensors of this process, one for each storage."""
    seen: set[int] = set()
    for candidate in gc.get_objects():
        if type(candidate) is not Tensor or candidate.layout is not torch.strided or candidate.device.type != "cpu":
            continue
        storage = candidate.untyped_storage()
        if storage.nbytes() >= LARGE and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            yield candidate


def resident_memory() -> tuple[int, int]:
    """Bytes of this process in memory: (its own, those of files and shared memory). What was freed is given back first.
    Zeros where the system does not tell."""
    if not process_status():
        return 0, 0
    ctypes.CDLL(None).malloc_trim(0)
    anonymous, files, shared = (_status_bytes(name) for name in ("RssAnon", "RssFile", "RssShmem"))
    return anonymous, files + shared


def _status_bytes(name: str) -> int:
    return int(process_status()[name].split()[0]) * 1024


@contextmanager
def peak_memory() -> Iterator[Peak]:
    """The peak of resident memory within, above what was there before, is in what it yields afterwards; 0 where it
    cannot be reset."""
    peak, before = Peak(), sum(resident_memory())
    try:
        Path("/proc/self/clear_refs").write_text("5")  # 5: forget the peak so far
    except OSError:
        before = 2**62
    yield peak
    if process_status():
        peak.held = max(0, _status_bytes("VmHWM") - before)
