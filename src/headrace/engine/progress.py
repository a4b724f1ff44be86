"""A progress line on a terminal.

What lives here: drawing it. What may not: knowing what progresses. Nothing is written where stderr is no terminal.
"""

from __future__ import annotations

import sys
import time
from typing import Protocol, TextIO

_REDRAW_SECONDS = 0.1
_WIDTH = 24  # characters of the bar


class Progress(Protocol):
    """What callers see; tqdm's bars fit too."""

    def update(self, n: int = 1) -> object: ...

    def close(self) -> object: ...


class ProgressLine:
    """Requests done of all (``total`` 0: unknown), and tokens a second so far."""

    def __init__(self, total: int, desc: str, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._visible = self._stream.isatty()
        self._total, self._desc, self._done, self._tokens = total, desc, 0, 0
        self._start = time.perf_counter()
        self._drawn = 0.0

    def update(self, n: int = 1) -> None:
        self._done += n
        self._draw(force=self._done == self._total)

    def add_tokens(self, n: int) -> None:
        self._tokens += n
        self._draw(force=False)

    def close(self) -> None:
        if self._visible:
            self._draw(force=True)
            self._stream.write("\n")
            self._stream.flush()
        self._visible = False

    def _draw(self, *, force: bool) -> None:
        now = time.perf_counter()
        if not self._visible or (not force and now - self._drawn < _REDRAW_SECONDS):
            return
        self._drawn = now
        filled = _WIDTH * self._done // max(1, self._total)
        bar = f"[{'#' * filled}{'.' * (_WIDTH - filled)}] {self._done}/{self._total}" if self._total else f"{self._done} done"
        rate = self._tokens / max(1e-9, now - self._start)
        self._stream.write(f"\r{self._desc} {bar}, {rate:.0f} tokens/s ")
        self._stream.flush()
