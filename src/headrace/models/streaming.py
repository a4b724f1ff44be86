"""Copies tensors from files straight into parameters on a GPU: several readers, each with pinned buffers and a stream
of its own.

What lives here: reading, copying, casting on the device. What may not: file formats, names, which tensor belongs where
(loader.py).

    reader        | read span 0 | read span 2 | …           A reader fills one buffer while the copy from its other one
    is under way;
    copy engine         | copy span 0 | copy span 2 | …     spans are taken as readers become free, largest files or
    not. Host memory in
    reader        | read span 1       | read span 3 | …     use: readers × 2 × the size of a buffer.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Event

import torch
from torch import Tensor

from headrace.errors import ModelError
from headrace.models.files import reading

READERS = 8
BUFFER_BYTES = 8 * 2**20
_SPAN_BYTES = 64 * 2**20  # a larger tensor is shared by several readers


@dataclass(frozen=True, slots=True)
class Source:
    """One stored tensor and where it goes. ``target``: contiguous; ``transpose``: it is stored as the transpose of
    ``target``."""

    file: Path
    start: int  # byte offset
    dtype: torch.dtype
    shape: tuple[int, ...]
    target: Tensor
    transpose: bool = False
    pitch: int = 0

    @property
    def num_bytes(self) -> int:
        return self.target.numel() * self.dtype.itemsize


def stream(
    sources: Iterable[Source],
    device: torch.device,
    *,
    readers: int = READERS,
    buffer_bytes: int = BUFFER_BYTES,
    filled: Callable[[int], None] = lambda num_bytes: None,
) -> None:
    """Fills every target, cast to its type. Raises ModelError when a file ends early or cannot be read; some targets
    are filled then. ``filled`` is called, by several threads, with the bytes of targets as they are read.

    Nothing is written before the work that the caller has queued so far has ended: a target may reuse memory that it
    still reads.
    """
    spans: SimpleQueue[Source] = SimpleQueue()
    for source in sources:
        for span in _spans(source):
            spans.put(span)
    ended, queued = Event(), torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None
    with ThreadPoolExecutor(readers, "headrace-load") as pool:
        lanes = [pool.submit(_read_all, spans, device, buffer_bytes, ended, queued, filled) for _ in range(readers)]
        try:
            for lane in lanes:
                lane.result()
        finally:
            ended.set()  # whoever interrupts this thread need not wait for the whole model


def _spans(source: Source) -> Iterator[Source]:
    """Pieces of a tensor that several readers can share."""
    if source.transpose or source.pitch or source.num_bytes <= _SPAN_BYTES:
        yield source
        return
    flat, step = source.target.view(-1), _SPAN_BYTES // source.dtype.itemsize
    for first in range(0, len(flat), step):
        piece = flat[first : first + step]
        yield Source(source.file, source.start + first * source.dtype.itemsize, source.dtype, (len(piece),), piece)


def _read_all(
    spans: SimpleQueue[Source],
    device: torch.device,
    buffer_bytes: int,
    ended: Event,
    queued: torch.cuda.Event | None,
    filled: Callable[[int], None],
) -> None:
    """One reader: takes spans until there are none left, another reader has failed, or the caller has given up."""
    try:
        with torch.inference_mode(), _Lane(device, buffer_bytes, queued) as lane:
            while not ended.is_set():
                span = spans.get_nowait()
                lane.fill(span)
                filled(span.target.nbytes)
    except Empty:
        return
    except BaseException:
        ended.set()
        raise


class _Buffer:
    """Host memory, pinned for a GPU, that is not written while a copy from it is under way."""

    def __init__(self, size: int, device: torch.device) -> None:
        cuda = device.type == "cuda"
        self.tensor = torch.empty(size, dtype=torch.uint8, pin_memory=cuda)
        self.view: memoryview = self.tensor.numpy().data
        self._copied = torch.cuda.Event() if cuda else None

    def wait(self) -> None:
        if self._copied is not None:
            self._copied.synchronize()

    def copied(self) -> None:
        if self._copied is not None:
            self._copied.record()


class _Lane:
    """What one reader holds: open files, two buffers, and a stream that starts after ``queued``."""

    def __init__(self, device: torch.device, buffer_bytes: int, queued: torch.cuda.Event | None) -> None:
        self._device = device
        self._buffers: Sequence[_Buffer] = [_Buffer(buffer_bytes, device) for _ in range(2)]
        self._turn = 0
        self._files: dict[Path, int] = {}
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        if self._stream is not None and queued is not None:
            self._stream.wait_event(queued)
        self._closing = ExitStack()

    def __enter__(self) -> _Lane:
        current: AbstractContextManager[object] = (
            nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
        )
        self._closing.enter_context(current)
        return self

    def __exit__(self, *error: object) -> None:
        for descriptor in self._files.values():
            os.close(descriptor)
        if self._stream is not None:
            self._stream.synchronize()
        self._closing.close()

    def fill(self, span: Source) -> None:
        target = span.target
        if target.dtype == span.dtype and not span.transpose:
            self._copy(span, target.view(-1).view(torch.uint8))
            return
        landed = torch.empty(span.num_bytes, dtype=torch.uint8, device=self._device)
        self._copy(span, landed)
        stored = landed.view(span.dtype).view(span.shape)
        target.copy_(stored.t() if span.transpose else stored.view_as(target))

    def _copy(self, span: Source, landing: Tensor) -> None:  # landing: [bytes], uint8
        descriptor, row = self._open(span.file), span.num_bytes // span.shape[0] if span.pitch else 0
        most = len(self._buffers[0].view)
        most = most // row * row if row else most  # whole rows
        for first in range(0, span.num_bytes, most):
            buffer = self._buffers[self._turn]
            self._turn = 1 - self._turn
            count = min(most, span.num_bytes - first)
            buffer.wait()
            for begin in range(0, count, row or count):
                at = (first + begin) // row * span.pitch if row else first
                _read(span.file, descriptor, buffer.view[begin : begin + (row or count)], span.start + at)
            landing[first : first + count].copy_(buffer.tensor[:count], non_blocking=True)
            buffer.copied()

    def _open(self, file: Path) -> int:
        if file not in self._files:
            with reading(file):
                self._files[file] = os.open(file, os.O_RDONLY)
        return self._files[file]


def _read(file: Path, descriptor: int, view: memoryview, offset: int) -> None:
    """Fills ``view`` from ``offset``."""
    done = 0
    while done < len(view):
        try:
            count = os.preadv(descriptor, [view[done:]], offset + done)
        except OSError as error:
            raise ModelError(
                f"cannot read {file}: {error.strerror or error}. Check the disk, or download the file again."
            ) from error
        if count == 0:
            raise ModelError(
                f"{file} ends at byte {offset + done}, within a tensor; it was changed while it was read. Download the file again."
            )
        done += count
