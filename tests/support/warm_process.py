"""A process that has imported torch and waits for children to be asked of it (warm.py).

What lives here: their fork, and what they find as they would after an exec. What may not: pytest, threads.
"""

from __future__ import annotations

import fcntl
import gc
import importlib
import json
import os
import runpy
import socket
import sys
import time
from contextlib import suppress
from typing import Any

MODULES = ("headrace.parallel.follower", "headrace.engine.process")  # children are what their main does
IMPORTED = ("headrace.engine.resolve", "headrace.engine.assembly", "headrace.parallel.device", "headrace.worker.worker")


def exactly(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = sock.recv(count - len(data))
        if not part:
            raise EOFError
        data += part
    return data


def main() -> None:
    for name in (*MODULES, *IMPORTED):
        importlib.import_module(name)
    assert len(os.listdir("/proc/self/task")) == 1, "a fork has one thread"
    gc.collect()
    gc.freeze()
    sock = socket.socket(fileno=os.dup(0))
    with suppress(ConnectionError):  # of a parent that has not waited
        sock.sendall(b"1")
    while True:
        head, files = b"", list[int]()
        with suppress(ConnectionError):
            head, files, *_ = socket.recv_fds(sock, 4, 16)
        if not head:
            return
        asked = json.loads(exactly(sock, int.from_bytes(head, "little")))
        if (first := os.fork()) == 0:
            if os.fork():
                os._exit(0)
            break
        os.waitpid(first, 0)
        for file in files:
            os.close(file)
    _become(asked, files, sock)


def _become(asked: dict[str, Any], files: list[int], sock: socket.socket) -> None:
    """The child."""
    while os.getppid() != asked["parent"]:  # until the one in between is gone
        time.sleep(0.001)
    sock.sendall(os.getpid().to_bytes(4, "little"))
    sock.close()
    if asked["session"]:
        os.setsid()
    os.chdir(asked["folder"])
    os.environ.clear()
    os.environ.update(asked["env"])
    _place(files, asked["files"])
    _, module, *rest = (word for word in asked["words"] if word != "-P")
    sys.argv = [module, *rest]
    if module in MODULES:
        sys.modules[module].main()
    else:
        sys.path.insert(0, asked["folder"])
        runpy.run_module(module, run_name="__main__", alter_sys=True)


def _place(files: list[int], numbers: list[int]) -> None:
    above = max(*files, *numbers) + 1
    held = [fcntl.fcntl(file, fcntl.F_DUPFD, above) for file in files]
    for file in files:
        os.close(file)
    for file, number in zip(held, numbers, strict=True):
        os.dup2(file, number)
        os.close(file)


if __name__ == "__main__":
    main()
