"""Sums of few bytes over GPUs that reach each other's memory, in one launch (kernels/sums/one_shot.cu).

What lives here: the inboxes, their addresses at other ranks, launches, a trial at the start. What may not: the kernel,
other ways to sum (nccl.py).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import byref, c_int, c_size_t, c_uint64, c_void_p
from typing import Any

import torch
from torch import Tensor

from headrace.kernels.build import nvrtc
from headrace.kernels.build.driver import DriverError, Module
from headrace.kernels.sums.reference import Onto, onto

_TYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
_THREADS = 256
_LINES = 2**18  # of 8 bytes each, that a rank sends in one call to all others
_HANDLE_BYTES = 64
_PEER = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
_TRIALS = (8, 4096, 40_000, 262_144)  # elements
_ONTO_TRIALS = ((1, 8), (3, 1280), (1, 4096), (17, 5120))  # rows, width
Gather = Callable[[Tensor, int], Tensor]


class _Handle(ctypes.Structure):
    """CUipcMemHandle."""

    _fields_ = (("bytes", ctypes.c_byte * _HANDLE_BYTES),)


def _driver() -> Any:
    library = ctypes.CDLL("libcuda.so.1")
    library.cuIpcOpenMemHandle_v2.argtypes = [ctypes.POINTER(c_uint64), _Handle, ctypes.c_uint]
    return library


def _check(status: int, doing: str) -> None:
    if status:
        raise DriverError(f"{doing}: CUDA error {status}")


class OneShot:
    """Of the current device. Made by all ranks at once; ``gather``: of bytes, side by side. Raises DriverError or
    CompileError."""

    def __init__(self, rank: int, size: int, gather: Gather) -> None:
        self._rank = rank
        self.lines = _LINES // (size - 1)
        device = torch.cuda.current_device()
        text = nvrtc.source("sums/one_shot.cu")
        modules = {dtype: _module(text, size, number, self.lines, device) for dtype, number in _TYPES.items()}
        self._functions = {dtype: module.function("one_shot", 0) for dtype, module in modules.items()}
        self._onto = modules[torch.bfloat16].function("one_shot_onto", 0)  # as products that take in norms are
        driver, num_bytes = _driver(), 2 * size * self.lines * 16
        own, handle = c_uint64(), _Handle()
        _check(driver.cuMemAlloc_v2(byref(own), c_size_t(num_bytes)), "an inbox")
        _check(driver.cuMemsetD8_v2(own, ctypes.c_ubyte(0), c_size_t(num_bytes)), "clearing the inbox")
        _check(driver.cuIpcGetMemHandle(byref(handle), own), "naming the inbox")
        mine = torch.frombuffer(bytearray(handle), dtype=torch.uint8).to(f"cuda:{device}").view(1, -1)
        handles = gather(mine, size * _HANDLE_BYTES).cpu().view(size, _HANDLE_BYTES)  # all have cleared theirs
        places = (c_uint64 * size)()
        for other in range(size):
            found = c_uint64(own.value)
            if other != rank:
                named = _Handle.from_buffer_copy(handles[other].numpy().tobytes())
                _check(driver.cuIpcOpenMemHandle_v2(byref(found), named, _PEER), f"opening rank {other}'s inbox")
            places[other] = found.value

        class Inboxes(ctypes.Structure):
            _fields_ = (("at", c_uint64 * size),)

        self._inboxes = Inboxes(places)
        self._state = torch.zeros(2, dtype=torch.int32, device=f"cuda:{device}")
        self._stop = torch.zeros(1, dtype=torch.int32, pin_memory=True)

    def takes(self, x: Tensor) -> bool:
        """Contiguous, of up to so many bytes, in eights."""
        return x.dtype in _TYPES and 0 < x.nbytes <= 8 * self.lines and x.nbytes % 8 == 0 and x.data_ptr() % 8 == 0

    def add(self, x: Tensor, stream: int) -> Tensor:
        """In place. Calls follow each other on the device."""
        lines = x.nbytes // 8
        self._functions[x.dtype].launch(
            -(-lines // _THREADS), _THREADS, stream, self._inboxes, c_void_p(x.data_ptr()), c_void_p(self._state.data_ptr()),
            c_void_p(self._stop.data_ptr()), c_int(lines), c_int(self._rank), pdl=True,
        )  # fmt: skip
        return x

    def add_onto(self, x: Tensor, residual: Tensor, scale: Tensor, stream: int) -> Onto:
        """As the twin says, ``x`` [rows, width], bfloat16, in place, all contiguous; ``scale`` in bfloat16 or float32.
        Squares come in a piece of each program."""
        rows, width = x.shape
        lines = width // 4
        pieces = -(-lines // _THREADS)
        assert x.is_contiguous() and residual.is_contiguous() and 4 * self.lines >= rows * width
        scaled = torch.empty_like(x)
        squares = torch.empty((pieces, rows), dtype=torch.float32, device=x.device)
        at = (x, residual, scale, scaled, squares, self._state, self._stop)
        self._onto.launch(
            rows * pieces, _THREADS, stream, self._inboxes, *(c_void_p(each.data_ptr()) for each in at),
            *map(c_int, (lines, rows, pieces, scale.dtype == torch.float32, self._rank)), pdl=True,
        )  # fmt: skip
        return x, scaled, squares

    def agrees(self, other: Callable[[Tensor], Tensor], stream: int) -> bool:
        """Whether sums are those of ``other``: of whole numbers, which no order of adding changes."""
        good = True
        for dtype in _TYPES:
            for turn, count in enumerate(2 * _TRIALS):
                seeded = torch.Generator(device=self._state.device).manual_seed(self._rank * 100 + turn)
                x = torch.randint(-8, 8, (count,), generator=seeded, device=self._state.device).to(dtype)
                own = self.add(x.clone(), stream) if self.takes(x) else other(x.clone())
                # all trials are taken, whatever comes of them: others take them, too
                good = torch.equal(own, other(x)) and good
        return self._agrees_onto(other, stream) and good

    def _agrees_onto(self, other: Callable[[Tensor], Tensor], stream: int) -> bool:
        good, device = True, self._state.device
        for turn, (rows, width) in enumerate(_ONTO_TRIALS):

            def drawn(*shape: int, seed: int, most: int = 4, device: torch.device = device) -> Tensor:
                seeded = torch.Generator(device=device).manual_seed(seed)
                return torch.randint(-most, most + 1, shape, generator=seeded, device=device).to(torch.bfloat16)

            x, residual = drawn(rows, width, seed=100 * self._rank + turn), drawn(rows, width, seed=1000 + turn)
            scale = drawn(width, seed=2000 + turn, most=2)
            total, scaled, squares = onto(other(x.clone()), residual, scale)
            found = self.add_onto(x, residual, scale.float() if turn % 2 else scale, stream)
            good = torch.equal(found[0], total) and torch.equal(found[1], scaled) and good
            good = torch.equal(found[2].sum(0), squares.sum(0)) and good
        return good

    def stop(self) -> None:
        """From any thread: nobody is waited for any more."""
        self._stop.fill_(1)


def most_rows(size: int, width: int, dtype: torch.dtype) -> int:
    """How many rows ``add_onto`` takes among so many ranks; 0: none."""
    return 4 * (_LINES // (size - 1)) // width if dtype is torch.bfloat16 and width % 4 == 0 else 0


def _module(text: str, size: int, number: int, lines: int, device: int) -> Module:
    options = ("-arch=sm_90a", f"-DSIZE={size}", f"-DTYPE={number}", f"-DTHREADS={_THREADS}", f"-DMOST={lines}")
    return Module(nvrtc.build(text, options), device)
