"""Temporary folders that live as long as their process, and the removal of those whose process was killed.

What lives here: a locked folder, and the cleanup before each new one. What may not: what is put into it.

A folder's owner holds flock(2) on the folder itself, and the kernel releases it when the owner ends, however it ends.
So a folder that can be locked has no owner; names and ages prove nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from types import TracebackType

PREFIX = "headrace-run-"


class Scratch:
    """A new folder (0700) in ``parent``; its path is ``path``. Raises OSError if none can be created."""

    def __init__(self, parent: str | os.PathLike[str] | None = None) -> None:
        place = Path(tempfile.gettempdir() if parent is None else parent)
        sweep(place)
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=place))
            lock = _locked(self.path)
            if lock is not None:
                self._lock = lock
                return  # otherwise another process swept it in the moment before it was locked

    def close(self) -> None:
        """May be called again."""
        lock, self._lock = self._lock, -1
        if lock >= 0:
            if _is(lock, self.path):
                shutil.rmtree(self.path, ignore_errors=True)
            os.close(lock)

    def __enter__(self) -> Path:
        return self.path

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def sweep(parent: Path) -> None:
    """Removes the folders of this user's dead processes."""
    for path in parent.glob(f"{PREFIX}*"):
        lock = _locked(path)
        if lock is not None:
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)


def _locked(path: Path) -> int | None:
    """A descriptor that holds the folder's lock; None if the folder belongs to another user, is locked, or is gone."""
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    with contextlib.suppress(OSError):
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(folder).st_uid == os.getuid() and _is(folder, path):
            return folder
    os.close(folder)
    return None


def _is(folder: int, path: Path) -> bool:
    """Whether the path still leads to the open folder."""
    try:
        return os.path.samestat(os.fstat(folder), os.stat(path, follow_symlinks=False))
    except OSError:
        return False
