"""A program that compiles kernels into Triton's cache, for a start elsewhere (builders.py). It needs no device and looks at none.

``python -m headrace.builder_program SOCKET …``: the numbers of inherited sockets. One process is forked for each, once everything is
imported; it reads one order a line, answers it with DONE or anything else, and ends when the other side has closed its socket.

What lives here: orders, written and carried out. What may not: who needs a kernel, launching.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
from ast import literal_eval
from contextlib import suppress
from importlib import import_module
from typing import Any, NamedTuple

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from triton.runtime.cache import triton_key

from headrace.builders import DONE
from headrace.kernels.triton.toolchain import prepare_identities

_REFUSED = b"not done\n"
_ADOPT = 36  # prctl: processes whose parent has ended become this one's (Linux)


class Order(NamedTuple):
    """One kernel, as the compiler wants it."""

    folder: str  # Triton's cache
    target: tuple[str, int, int]
    module: str
    kernel: str
    signature: dict[str, str]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], Any]
    options: dict[str, Any]


def write(order: Order) -> str | None:
    """One line; None where it would be read as something else."""
    text = repr(tuple(order))
    try:
        return text if "\n" not in text and literal_eval(text) == tuple(order) else None
    except (ValueError, SyntaxError):
        return None


def carry_out(text: str) -> None:
    """Raises what the compiler raises."""
    order = Order(*literal_eval(text))
    knobs.cache.dir = order.folder
    kernel = getattr(import_module(order.module), order.kernel)
    source = ASTSource(kernel, order.signature, order.constants, order.attributes)
    compile(source, target=GPUTarget(*order.target), options=order.options)


def _serve(connection: socket.socket) -> None:
    with connection, connection.makefile("rb") as lines:
        for line in lines:
            try:
                carry_out(line.decode())
                answer = DONE
            except Exception:  # whoever needs the kernel tries again and says what is wrong with it
                answer = _REFUSED
            connection.sendall(answer)


def _fork(numbers: list[int], mine: int) -> None:
    """A process that serves one of the sockets, and has no other open: each is closed when its own process ends."""
    if os.fork():
        return
    status = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        for number in numbers:
            if number != mine:
                os.close(number)
        _serve(socket.socket(fileno=mine))
        status = 0
    finally:
        os._exit(status)


def prepare() -> None:
    """What every compilation finds once for its process, but for the hash of the compiler's files."""
    import_module("triton.compiler.code_generator")
    prepare_identities()


def main(numbers: list[int]) -> None:
    triton_key()
    prepare()
    ctypes.CDLL(None).prctl(_ADOPT, 1, 0, 0, 0)
    signal.signal(signal.SIGTERM, _end)
    for mine in numbers:
        _fork(numbers, mine)
    for number in numbers:
        os.close(number)
    _wait_for_all()


def _wait_for_all() -> None:
    with suppress(ChildProcessError):
        while True:
            os.wait()


def _end(*_: object) -> None:
    """What they are at is dropped. This process waits for them, and for programs that they had started: left to the system's first process,
    which in a container may wait for nobody, they would stay in its table for ever."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.killpg(0, signal.SIGTERM)  # the group is this process' own
    _wait_for_all()
    os._exit(0)


if __name__ == "__main__":
    main([int(each) for each in sys.argv[1:]])
