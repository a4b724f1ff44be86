"""What a start on a GPU needs that needs no torch, begun while torch is imported, which takes seconds.

That is the card's context, by the driver itself (torch finds it made); the kernels' compiler: Triton, a hash of its
files, its C helper and ours; and processes that will compile kernels.

What lives here: that head start, and how long each part of a start took. What may not: torch, kernels
(kernels/build/toolchain.py does the same again, and finds it done).
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from headrace.clock import Clock
from headrace.kernel_launcher import kernel_launcher
from headrace.processes.builders import begin_builders
from headrace.worker.driver import ask_driver

_log = logging.getLogger(__name__)
_DRIVER = Path("/dev/nvidiactl")  # there where an NVIDIA driver is
_LIBRARY = "libcuda.so.1"


def begin_head_start(mark: Path) -> HeadStart | None:
    """Where there is a GPU and torch is still to come. ``mark``: of a start that has built all its kernels
    (processes/builders.py)."""
    return HeadStart(mark) if _DRIVER.exists() and "torch" not in sys.modules else None


class HeadStart:
    """Two threads, and processes that wait for work. Nothing waits for them; what they have not done is done when
    it is needed."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark
        self.builders = begin_builders(mark)
        self._free: dict[str, int] = {}  # by the driver's uuid, before there was a context
        self._context = self._thread("context", self._make_context)
        self._compiler = self._thread("compiler", _prepare_compiler)

    def free_before(self, uuid: str) -> int | None:
        """Bytes that were free on a card before this process had a context there; None if that is not known."""
        self._context.join()
        found = [free for name, free in self._free.items() if name.endswith(uuid)]
        return found[0] if len(found) == 1 else None

    def has_built(self) -> None:
        """Every kernel is in Triton's cache now: the next start needs no processes, and those of this one are gone
        before it is ready."""
        self.hand_over()(True)

    def hand_over(self) -> Callable[[bool], None]:
        """The processes, to whatever has work for them when the start is over: what is to be called once there is
        none, and with whether every kernel is in the cache then."""
        builders, self.builders = self.builders, None

        def end(built: bool) -> None:
            if builders is not None:
                builders.close()
            if built:
                with suppress(OSError):
                    self._mark.touch()

        return end

    def __enter__(self) -> HeadStart:
        return self

    def __exit__(self, *_: object) -> None:
        """The start is over."""
        self.hand_over()(False)

    def join(self) -> None:
        self._context.join()
        self._compiler.join()

    def _thread(self, name: str, work: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=_quietly, args=(work,), name=f"headrace-{name}", daemon=True)
        thread.start()
        return thread

    def _make_context(self) -> None:
        """On the first card that CUDA shows, which is the one torch takes; it stays as long as the process."""
        driver = ask_driver()
        self._free = {card.uuid: card.free for card in driver.cards} if driver is not None else {}
        library, device, context = ctypes.CDLL(_LIBRARY), ctypes.c_int(), ctypes.c_void_p()
        _check(library.cuInit(0))
        _check(library.cuDeviceGet(ctypes.byref(device), 0))
        _check(library.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))


def _check(status: int) -> None:
    if status != 0:
        raise OSError(f"CUDA answered {status}")


def _quietly(work: Callable[[], None]) -> None:
    try:
        work()
    except Exception as error:  # whoever needs it will say so
        _log.debug("a start has no head start: %r", error)


def _prepare_compiler() -> None:
    from triton.backends.nvidia.driver import CudaUtils
    from triton.runtime.cache import triton_key

    triton_key()  # remembered for the process
    CudaUtils()  # compiled into Triton's cache
    kernel_launcher()


class Stages:
    """Seconds by stage, in order. A stage is what happened since the one before was noted; each is a line of the
    debug log, on every rank."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._last = clock.now()
        self.seconds: dict[str, float] = {}

    def done(self, name: str) -> None:
        now = self._clock.now()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        _log.debug("start of process %d: %s, %.2f s", os.getpid(), name, now - self._last)
        self._last = now
