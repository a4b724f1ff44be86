"""Sums over GPUs that reach each other's memory (kernels/sums/one_shot.cu): of few bytes in one launch; of two ranks'
many rows in chunks, which copy engines carry while the next chunk is computed; and the largest of what ranks have.

What lives here: the inboxes, their addresses at other ranks, launches, copies, a trial at the start. What may not: the
kernel, other ways to sum (nccl.py).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import byref, c_float, c_int, c_size_t, c_uint64, c_void_p
from typing import Any

import torch
from torch import Tensor

from headrace.kernels.build import nvrtc
from headrace.kernels.build.driver import DriverError, Module
from headrace.kernels.sums.reference import Normed, Onto, best_of, normed, onto

_TYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
_THREADS = 256
_LINES = 2**18  # of 16 bytes each, that a rank sends in one call to all others, in one shot: as many as threads fit
_LINES_A_ROW = 1024  # that is normed, by as many threads
_CHUNK_BYTES, _CHUNKS = 2**24, 4  # of rows that are sent while others are computed
_CHUNK_ROWS = 2048  # at most: products of fewer rows are as fast, and what is sent last is waited for
_HANDLE_BYTES = 64
_PEER = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
_TRIALS = (8, 4096, 40_000, 262_144)  # elements
_ONTO_TRIALS = ((1, 8), (3, 1280), (1, 4096), (17, 5120))  # rows, width
_NORMED_TRIALS = ((1, 8), (3, 1280), (129, 4096), (256, 8192))
_CHUNKED_TRIALS = ((1024, 4096), (9000, 1280), (1023, 8192), (8, 8))
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
        modules = {dtype: _module(text, size, number, device) for dtype, number in _TYPES.items()}
        self._functions = {dtype: module.function("one_shot", 0) for dtype, module in modules.items()}
        self._onto = modules[torch.bfloat16].function("one_shot_onto", 0)  # as products that take in norms are
        self._normed = modules[torch.bfloat16].function("one_shot_normed", 0)
        self._shared_out = modules[torch.bfloat16].function("two_shot_normed", 0) if size > 2 else None
        self._best = modules[torch.bfloat16].function("one_shot_best", 0)
        inbox = 2 * size * _LINES * 16
        driver, num_bytes = _driver(), inbox + (2 * _CHUNKS * _CHUNK_BYTES if size == 2 else 0)
        own, handle = c_uint64(), _Handle()
        _check(driver.cuMemAlloc_v2(byref(own), c_size_t(num_bytes)), "an inbox")
        _check(driver.cuMemsetD8_v2(own, ctypes.c_ubyte(255), c_size_t(num_bytes)), "clearing the inbox")
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
        self._chunks = (places[rank] + inbox, places[1 - rank] + inbox) if size == 2 else (0, 0)  # here, at the other
        self._turn = 0  # of chunks: those sent before may not be read yet
        self._side = torch.cuda.Stream(device, priority=-1) if size == 2 else None
        self._state = torch.zeros(2, dtype=torch.int32, device=f"cuda:{device}")
        self._stop = torch.zeros(1, dtype=torch.int32, pin_memory=True)

    def takes(self, x: Tensor) -> bool:
        """Contiguous, of up to so many bytes, in sixteens."""
        return x.dtype in _TYPES and 0 < x.nbytes <= 16 * self.lines and x.nbytes % 16 == 0 and x.data_ptr() % 16 == 0

    def add(self, x: Tensor, stream: int) -> Tensor:
        """In place. Calls follow each other on the device."""
        lines = x.nbytes // 16
        self._functions[x.dtype].launch(
            -(-lines // _THREADS), _THREADS, stream, self._inboxes, c_void_p(x.data_ptr()), c_void_p(self._state.data_ptr()),
            c_void_p(self._stop.data_ptr()), c_int(lines), c_int(self._rank), pdl=True,
        )  # fmt: skip
        return x

    def add_onto(self, x: Tensor, residual: Tensor, scale: Tensor, stream: int) -> Onto:
        """As the twin says, ``x`` [rows, width], bfloat16, in place, all contiguous; ``scale`` in bfloat16 or float32.
        Squares come in a piece of each program."""
        rows, width = x.shape
        lines = width // 8
        pieces = -(-lines // _THREADS)
        assert x.is_contiguous() and residual.is_contiguous() and 8 * self.lines >= rows * width
        scaled = torch.empty_like(x)
        squares = torch.empty((pieces, rows), dtype=torch.float32, device=x.device)
        at = (x, residual, scale, scaled, squares, self._state, self._stop)
        self._onto.launch(
            rows * pieces, _THREADS, stream, self._inboxes, *(c_void_p(each.data_ptr()) for each in at),
            *map(c_int, (lines, rows, pieces, scale.dtype == torch.float32, self._rank)), pdl=True,
        )  # fmt: skip
        return x, scaled, squares

    def takes_normed(self, x: Tensor, rows: int, width: int) -> bool:
        """Of so many rows, from those of ``x`` [rows, inner]: few in one launch; of two ranks more, in chunks."""
        lines = width // 8
        if x.dtype is not torch.bfloat16 or width % 8 or lines > _LINES_A_ROW or not rows:
            return False
        return rows * lines <= _LINES or self._side is not None

    def add_normed(
        self, product: Callable[[Tensor], Tensor], x: Tensor, residual: Tensor, scale: Tensor, eps: float
    ) -> Normed:
        """As the twin says, of the sum of ``product`` of ``x`` [rows, inner]; ``residual`` [rows, width], contiguous,
        ``scale`` in bfloat16 or float32. Where ``takes_normed``."""
        total, y = torch.empty_like(residual), torch.empty_like(residual)
        rows, width = residual.shape
        if rows * (width // 8) <= _LINES:
            self._add_up(product(x), residual, scale, total, y, eps, 0)
            return total, y
        assert self._side is not None
        main, held, each = torch.cuda.current_stream(x.device), [], chunk_rows(rows, 2 * width)
        for first in range(0, rows, each * _CHUNKS):
            self._turn ^= 1
            starts = range(first, min(rows, first + each * _CHUNKS), each)
            for slot, start in enumerate(starts):
                held.append(part := product(x[start : start + each]))
                self._send(part, self._turn * _CHUNKS + slot, main)
            for slot, start in enumerate(starts):
                own, here = held[start // each], slice(start, start + each)
                source = self._chunks[0] + (self._turn * _CHUNKS + slot) * _CHUNK_BYTES
                self._add_up(own, residual[here], scale, total[here], y[here], eps, source)
        main.wait_stream(self._side)  # before anybody takes the memory of what was sent
        return total, y

    def _send(self, x: Tensor, slot: int, main: torch.cuda.Stream) -> None:
        """To the other rank, while this one goes on."""
        assert self._side is not None and x.is_contiguous()
        self._side.wait_stream(main)
        to = c_uint64(self._chunks[1] + slot * _CHUNK_BYTES)
        how = c_uint64(x.data_ptr()), c_size_t(x.nbytes), c_void_p(self._side.cuda_stream)
        _check(_driver().cuMemcpyDtoDAsync_v2(to, *how), "sending to the other rank")

    def _add_up(
        self, x: Tensor, residual: Tensor, scale: Tensor, total: Tensor, y: Tensor, eps: float, source: int
    ) -> None:  # [rows, width] each
        """``source``: where the other rank's comes; 0: all come into the inbox, from the same kernel."""
        stream = torch.cuda.current_stream(x.device).cuda_stream
        assert x.is_contiguous() and residual.is_contiguous()
        lines = x.shape[1] // 8
        kernel, come = (self._normed, (c_uint64(source),)) if self._shared_out is None else (self._shared_out, ())
        kernel.launch(
            len(x), -(-lines // 32) * 32, stream, self._inboxes, *(c_void_p(each.data_ptr()) for each in (x, residual, scale, total, y)),
            *come, c_void_p(self._state.data_ptr()), c_void_p(self._stop.data_ptr()), c_int(lines),
            c_float(eps), c_int(scale.dtype == torch.float32), c_int(self._rank), pdl=True,
        )  # fmt: skip

    def best(self, peaks: Tensor, places: Tensor, first: int, stream: int) -> tuple[Tensor, Tensor]:
        """As Group has it, in place; of up to ``lines`` rows."""
        assert peaks.dtype is torch.float32 and places.dtype is torch.int64 and len(peaks) <= self.lines
        at = (peaks, places, self._state, self._stop)
        self._best.launch(
            -(-len(peaks) // _THREADS), _THREADS, stream, self._inboxes, *(c_void_p(each.data_ptr()) for each in at),
            *map(c_int, (len(peaks), first, self._rank)), pdl=True,
        )  # fmt: skip
        return peaks, places

    def agrees(self, other: Callable[[Tensor], Tensor], stack: Callable[[Tensor], Tensor], stream: int) -> bool:
        """Whether sums are those of ``other``: of whole numbers, which no order of adding changes; and the largest are
        those of what ``stack`` gathers."""
        good = self._agrees_best(stack, stream)
        for dtype in _TYPES:
            for turn, count in enumerate(2 * _TRIALS):
                seeded = torch.Generator(device=self._state.device).manual_seed(self._rank * 100 + turn)
                x = torch.randint(-8, 8, (count,), generator=seeded, device=self._state.device).to(dtype)
                own = self.add(x.clone(), stream) if self.takes(x) else other(x.clone())
                # all trials are taken, whatever comes of them: others take them, too
                good = torch.equal(own, other(x)) and good
        good = self._agrees_onto(other, stream) and good
        trials = _NORMED_TRIALS if self._side is None else _NORMED_TRIALS + _CHUNKED_TRIALS
        # twice, for places are used again
        return all([self._agrees_normed(other, *at, turn) for turn, at in enumerate(2 * trials)]) and good

    def _drawn(self, *shape: int, seed: int, most: int = 4) -> Tensor:
        device = self._state.device
        seeded = torch.Generator(device=device).manual_seed(seed)
        return torch.randint(-most, most + 1, shape, generator=seeded, device=device).to(torch.bfloat16)

    def _agrees_onto(self, other: Callable[[Tensor], Tensor], stream: int) -> bool:
        good = True
        for turn, (rows, width) in enumerate(_ONTO_TRIALS):
            x, residual = (self._drawn(rows, width, seed=seed + turn) for seed in (100 * self._rank, 1000))
            scale = self._drawn(width, seed=2000 + turn, most=2)
            total, scaled, squares = onto(other(x.clone()), residual, scale)
            found = self.add_onto(x, residual, scale.float() if turn % 2 else scale, stream)
            good = torch.equal(found[0], total) and torch.equal(found[1], scaled) and good
            good = torch.equal(found[2].sum(0), squares.sum(0)) and good
        return good

    def _agrees_normed(self, other: Callable[[Tensor], Tensor], rows: int, width: int, turn: int) -> bool:
        x, residual = (self._drawn(rows, width, seed=seed + turn) for seed in (100 * self._rank, 1000))
        scale = self._drawn(width, seed=2000 + turn, most=2)
        total, y = normed(other(x.clone()), residual, scale, 1e-5)
        found = self.add_normed(torch.clone, x, residual, scale.float() if turn % 2 else scale, 1e-5)
        return torch.equal(found[0], total) and torch.allclose(found[1], y, rtol=2**-6)

    def _agrees_best(self, stack: Callable[[Tensor], Tensor], stream: int) -> bool:
        peaks = self._drawn(300, seed=3000 + self._rank).float()
        places = torch.arange(300, device=peaks.device)
        told = best_of(stack(peaks), stack(places + 500 * self._rank))
        found = self.best(peaks, places, 500 * self._rank, stream)
        return all(torch.equal(*each) for each in zip(found, told, strict=True))

    def stop(self) -> None:
        """From any thread: nobody is waited for any more."""
        self._stop.fill_(1)


def most_rows(size: int, width: int, dtype: torch.dtype) -> int:
    """How many rows ``add_onto`` takes among so many ranks; 0: none."""
    return 8 * (_LINES // (size - 1)) // width if dtype is torch.bfloat16 and width % 8 == 0 else 0


def chunk_rows(rows: int, row_bytes: int) -> int:
    """Of ``rows``, in one piece: in 128s, as products are computed; a quarter at most, where that fills the device."""
    most = min(_CHUNK_ROWS, _CHUNK_BYTES // row_bytes // 128 * 128)
    return min(most, -(-max(-(-rows // _CHUNKS), _CHUNK_ROWS // 2) // 128) * 128)


def _module(text: str, size: int, number: int, device: int) -> Module:
    options = ("-arch=sm_90a", f"-DSIZE={size}", f"-DTYPE={number}", f"-DTHREADS={_THREADS}", f"-DMOST={_LINES}")
    return Module(nvrtc.build(text, options), device)
