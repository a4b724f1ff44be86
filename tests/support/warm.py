"""Child processes of the engine, started from one that has imported torch already: a tenth of a second each, not three.

What lives here: that process, and what sends `python -m …` there in place of an exec. What may not: tests,
anything about what the children do.

A child is a real process of this one with the environment, folder, files and session that it was to have, and its own
memory from the fork on. Only what it imports is imported before. What the environment tells the interpreter or a
library when it loads cannot be changed any more: a child for which that differs is started by exec. So is one whose
test says that it starts cold, and whoever is asked for before that process is ready: the first of a run.
"""

from __future__ import annotations

import ctypes
import inspect
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from headrace.processes import child
from tests.support import warm_process
from tests.support.warm_process import MODULES, exactly

PYTHON = sys.executable
EARLY = ("PYTHON", "LD_", "OMP_", "MKL_")
SUBREAPER = 36  # prctl's: processes below this one that lose their parent become its children


class Nursery:
    """The process, as its parent sees it: started when the first child is asked for, and of use once it says so."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sock: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._ready = False

    def is_ready(self) -> bool:
        with self._lock:
            if self._sock is None:
                self._sock, theirs = socket.socketpair()
                with theirs:
                    self._process = subprocess.Popen(
                        (sys.executable, "-P", warm_process.__file__), stdin=theirs.fileno(), env=child.environment()
                    )
            with suppress(BlockingIOError):
                self._ready = self._ready or self._sock.recv(1, socket.MSG_DONTWAIT) == b"1"
            return self._ready

    def start(self, words: Sequence[str], env: dict[str, str], files: dict[int, int], session: bool) -> int:
        """``words``: after the interpreter's name. ``files``: this process's numbers by the child's. Returns the child's
        id."""
        with self._lock, self._adopting():
            assert self._sock is not None
            said = {"words": words, "env": env, "folder": os.getcwd(), "files": list(files), "session": session}
            data = json.dumps({**said, "parent": os.getpid()}).encode()
            socket.send_fds(self._sock, [len(data).to_bytes(4, "little")], list(files.values()))
            self._sock.sendall(data)
            return int.from_bytes(exactly(self._sock, 4), "little")

    def close(self) -> None:
        if self._sock is not None and self._process is not None:
            self._sock.close()
            self._process.wait(60)

    @staticmethod
    @contextmanager
    def _adopting() -> Iterator[None]:
        prctl = ctypes.CDLL(None).prctl
        prctl(SUBREAPER, 1)
        try:
            yield
        finally:
            prctl(SUBREAPER, 0)


def _early(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name.startswith(EARLY)}


EXECUTE: Callable[..., None] = subprocess.Popen._execute_child  # type: ignore[attr-defined]


def _is_warm(words: list[str]) -> bool:
    """Of the engine, or of the laboratory."""
    own = any(words == [PYTHON, "-P", "-m", module] for module in MODULES)
    return own or (words[:2] == [PYTHON, "-m"] and words[2].startswith("lab."))


def starter(nursery: Nursery) -> Callable[..., None]:
    """In place of ``EXECUTE``, whose arguments it has."""
    early, signature = [_early(env) for env in (child.environment(), os.environ)], inspect.signature(EXECUTE)

    def start(*given: Any) -> None:
        said = signature.bind(*given).arguments
        env, words = said["env"] or dict(os.environ), said["args"] if isinstance(said["args"], list | tuple) else ()
        piped = any(said[name] != -1 for name in ("p2cwrite", "c2pread", "errread"))
        if not _is_warm(list(words)) or _early(env) not in early or piped or not nursery.is_ready():
            return EXECUTE(*given)
        own = dict(enumerate(said[name] for name in ("p2cread", "c2pwrite", "errwrite")))
        files = {number: number if file == -1 else file for number, file in own.items()}
        files |= {number: number for number in said["pass_fds"]}
        self = said["self"]
        self.pid = nursery.start(words[1:], dict(env), files, said["start_new_session"])
        self._child_created = True
        names = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(said[name] for name in names))
        return None

    return start


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    made = Nursery()
    yield made
    made.close()


@pytest.fixture(scope="module", autouse=True)
def warm_starts(nursery: Nursery) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if sys.platform == "linux":
            patch.setattr(subprocess.Popen, "_execute_child", starter(nursery))
        yield


@pytest.fixture
def cold_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess.Popen, "_execute_child", EXECUTE)
