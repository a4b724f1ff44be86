"""Progress of long operations: a line that is redrawn on a terminal, a few plain lines elsewhere, nothing if it is
quick.

What lives here: drawing, and how often. What may not: what is in progress. Answers go to standard output; all of this
goes to standard error.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, TextIO

from headrace.observe.logs import FORMAT_VARIABLE, printable

QUICK_SECONDS = 0.5  # what ends sooner is not worth a line
LINE_SECONDS = 10.0  # between plain lines
_REDRAW_SECONDS = 0.1
_WIDTH = 14  # characters of the bar: with the longest text the line has 79

log = logging.getLogger(__name__)


def say(line: str) -> None:
    """Prints a line for the user, or logs it in the collector's form if there is one. Programs that use the package get
    nothing."""
    if not log.isEnabledFor(logging.INFO):
        return
    if os.environ.get(FORMAT_VARIABLE) == "json":
        log.info("%s", line)
    else:
        print(printable(line), file=sys.stderr, flush=True)


class TerminalLine:
    """One line that is redrawn in place. ``visible``: it is shown on a terminal."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        quiet = logging.getLogger("headrace").level > logging.INFO or os.environ.get(FORMAT_VARIABLE) == "json"
        self.visible = self._stream.isatty() and not quiet
        self._drawn = 0.0

    def draw(self, text: str, *, force: bool = False) -> None:
        now = time.perf_counter()
        if self.visible and (force or now - self._drawn >= _REDRAW_SECONDS):
            self._drawn = now
            self._write(f"\r{printable(text)[: shutil.get_terminal_size().columns - 1]}\x1b[K")

    def erase(self) -> None:
        if self.visible and self._drawn:
            self._write("\r\x1b[K")

    def end(self) -> None:
        """Keeps what was drawn last."""
        if self.visible:
            self._write("\n")
        self.visible = False

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


class Progress(Protocol):
    """The interface for callers; tqdm's bars satisfy it too."""

    def update(self, n: int = 1) -> object: ...

    def close(self) -> object: ...


class ProgressLine:
    """Requests done of the total (``total`` 0: unknown), and tokens per second so far. On terminals only."""

    def __init__(self, total: int, desc: str, stream: TextIO | None = None) -> None:
        self._line = TerminalLine(stream)
        self._total, self._desc, self._done, self._tokens = total, desc, 0, 0
        self._start = time.perf_counter()

    def update(self, n: int = 1) -> None:
        self._done += n
        self._draw(force=self._done == self._total)

    def add_tokens(self, n: int) -> None:
        self._tokens += n
        self._draw()

    def close(self) -> None:
        self._draw(force=True)
        self._line.end()

    def _draw(self, *, force: bool = False) -> None:
        if self._line.visible:
            rate = self._tokens / max(1e-9, time.perf_counter() - self._start)
            done = (
                f"{_bar(self._done / self._total)} {self._done}/{self._total}" if self._total else f"{self._done} done"
            )
            self._line.draw(f"{self._desc} {done}, {rate:.0f} tokens/s", force=force)


class LoadingLine:
    """Progress of loading weights: bytes of the total, and layers. ``layer_ends``: bytes after which each layer is
    complete, ascending.

    Several threads may report. Loads shorter than QUICK_SECONDS show nothing; without a terminal, there is a line every
    LINE_SECONDS; longer loads are summed up at the end.
    """

    def __init__(
        self,
        total: int,
        layer_ends: Sequence[int] = (),
        stream: TextIO | None = None,
        tell: Callable[[str], None] = say,
    ) -> None:
        self._line, self._tell, self._lock = TerminalLine(stream), tell, threading.Lock()
        self._total, self._layer_ends, self._done = total, layer_ends, 0
        self._start = self._told = time.perf_counter()

    def add(self, num_bytes: int) -> None:
        with self._lock:
            self._done += num_bytes
            now = time.perf_counter()
            if self._line.visible and now - self._start > QUICK_SECONDS:
                self._line.draw(f"Loading weights {_bar(self._done / max(1, self._total))} {self._said(now)}")
            elif not self._line.visible and now - self._told > LINE_SECONDS:
                self._told = now
                self._tell(f"Loading weights: {self._said(now)}")

    def close(self) -> None:
        self._line.erase()
        seconds = time.perf_counter() - self._start
        if seconds > LINE_SECONDS:
            self._tell(f"Loaded {format_bytes(self._done)} of weights in {seconds:.0f} s.")

    def _said(self, now: float) -> str:
        layers = (
            f", {bisect_right(self._layer_ends, self._done)} of {len(self._layer_ends)} layers"
            if self._layer_ends
            else ""
        )
        return f"{format_bytes(self._done)} of {format_bytes(self._total)}{layers}, {format_bytes(int(self._done / max(1e-9, now - self._start)))}/s"


@contextmanager
def waiting(
    doing: str, done: str, *, slow: bool = False, stream: TextIO | None = None, tell: Callable[[str], None] = say
) -> Iterator[None]:
    """While the block runs, shows ``doing`` with the seconds so far, on a terminal. ``slow``: it is known to take long,
    so without a terminal a plain line is printed beforehand. Afterwards shows ``done`` with the seconds, if it took
    noticeably long."""
    line, begin, ended = TerminalLine(stream), time.perf_counter(), threading.Event()
    if slow and not line.visible:
        tell(f"{doing} …")

    def tick() -> None:
        while not ended.wait(QUICK_SECONDS):
            line.draw(f"{doing}: {time.perf_counter() - begin:.0f} s")

    ticking = threading.Thread(target=tick, daemon=True, name="progress") if line.visible else None
    if ticking is not None:
        ticking.start()
    try:
        yield
    finally:
        ended.set()
        if ticking is not None:
            ticking.join()
        line.erase()
    seconds = time.perf_counter() - begin
    if seconds > (QUICK_SECONDS if slow else LINE_SECONDS):
        tell(f"{done} in {seconds:.0f} s.")


def format_bytes(size: int) -> str:
    """In the units of file managers: 1.2 GB, 340 MB, 12 kB."""
    for unit, name in ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if size >= unit:
            return f"{size / unit:.{0 if size >= 100 * unit else 1}f} {name}"
    return f"{size} bytes"


def _bar(share: float) -> str:
    filled = int(_WIDTH * min(1.0, share))
    return f"[{'#' * filled}{'.' * (_WIDTH - filled)}]"
