"""What the NVIDIA driver says of its cards, without torch and without a CUDA context.

A context takes some hundred megabytes of the card and cannot be made at all where the driver is too old for this torch;
the driver's management library (NVML) answers in both cases.

What lives here: asking it. What may not: torch, judging the answers (card.py).
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_LIBRARY = "libnvidia-ml.so.1"
_NO_PERMISSION = 4
_TEXT = 96  # bytes; the longest string NVML documents


@dataclass(frozen=True, slots=True)
class CardFacts:
    """One card. ``free`` of ``total`` bytes, now, whoever holds the rest; ``uuid`` is the driver's ("GPU-…")."""

    name: str
    uuid: str
    free: int
    total: int


@dataclass(frozen=True, slots=True)
class DriverFacts:
    """The driver and the cards it shows to this process, whatever CUDA_VISIBLE_DEVICES says."""

    version: str
    cuda: tuple[int, int]  # the newest CUDA it can run
    cards: tuple[CardFacts, ...]

    def card(self, uuid: str) -> CardFacts | None:
        """By the driver's uuid or by the number in it, as torch has it."""
        found = [card for card in self.cards if card.uuid.endswith(uuid)]
        return found[0] if len(found) == 1 else None


class CardCounter:
    """The driver's own count of what one card has used, and what it may draw. Its library stays open."""

    def __init__(self, library: ctypes.CDLL, handle: ctypes.c_void_p) -> None:
        self._library = library
        self._handle = handle

    def joules(self) -> float:
        """Since the driver was loaded, whoever used them; the driver moves it some ten times a second. Raises OSError,
        AttributeError."""
        value = ctypes.c_ulonglong()
        _check(self._library.nvmlDeviceGetTotalEnergyConsumption(self._handle, ctypes.byref(value)))
        return value.value / 1e3

    def power_limit(self) -> float:
        """Watts that the driver lets it draw. Raises OSError, AttributeError."""
        value = ctypes.c_uint()
        _check(self._library.nvmlDeviceGetEnforcedPowerLimit(self._handle, ctypes.byref(value)))
        return value.value / 1e3


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def ask_driver() -> DriverFacts | None:
    """None where there is no NVIDIA driver, or it does not answer."""
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError:
        return None
    try:
        with _opened(library):
            number = ctypes.c_int()
            _check(library.nvmlSystemGetCudaDriverVersion_v2(ctypes.byref(number)))
            version = _text(library.nvmlSystemGetDriverVersion)
            return DriverFacts(version, (number.value // 1000, number.value % 1000 // 10), tuple(_cards(library)))
    except (OSError, AttributeError):  # AttributeError: a library too old to have the function
        return None


def find_counter(uuid: str) -> CardCounter | None:
    """Of the card with this uuid, as torch has it. Raises OSError or AttributeError where there is no driver, or it
    does not answer."""
    library = ctypes.CDLL(_LIBRARY)
    _check(library.nvmlInit_v2())
    found = [handle for handle in _handles(library) if _text(library.nvmlDeviceGetUUID, handle).endswith(uuid)]
    return CardCounter(library, found[0]) if len(found) == 1 else None


@contextmanager
def _opened(library: ctypes.CDLL) -> Iterator[None]:
    _check(library.nvmlInit_v2())
    try:
        yield
    finally:
        library.nvmlShutdown()


def _handles(library: ctypes.CDLL) -> Iterator[ctypes.c_void_p]:
    count = ctypes.c_uint()
    _check(library.nvmlDeviceGetCount_v2(ctypes.byref(count)))
    for index in range(count.value):
        handle = ctypes.c_void_p()
        status = library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle))
        if status != _NO_PERMISSION:  # counted, but not shown to this process
            _check(status)
            yield handle


def _cards(library: ctypes.CDLL) -> Iterator[CardFacts]:
    for handle in _handles(library):
        memory = _Memory()
        _check(library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)))
        yield CardFacts(
            _text(library.nvmlDeviceGetName, handle),
            _text(library.nvmlDeviceGetUUID, handle),
            int(memory.free),
            int(memory.total),
        )


def _text(function: ctypes._NamedFuncPointer, *handle: ctypes.c_void_p) -> str:
    buffer = ctypes.create_string_buffer(_TEXT)
    _check(function(*handle, buffer, ctypes.c_uint(_TEXT)))
    return buffer.value.decode()


def _check(status: int) -> None:
    if status != 0:
        raise OSError(f"NVML answered {status}")
