"""A program that compiles kernels into Triton's cache, for a start elsewhere (processes/builders.py). It needs no
device and looks at none.

``python -m headrace.processes.builder_program SOCKET …``: the numbers of inherited sockets. One process is forked for
each, once everything is imported; it reads orders as frames, answers each with DONE or anything else, and ends when the
other side has closed its socket.

What lives here: orders, written and carried out. What may not: who needs a kernel, launching.
"""

from __future__ import annotations

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

from headrace.kernels.build.toolchain import prepare_identities
from headrace.processes.builders import DONE
from headrace.processes.frames import framed, read_frame
from headrace.processes.tree import adopt_orphans

_REFUSED = b"not done"


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
    """None where it would be read as something else."""
    text = repr(tuple(order))
    try:
        return text if literal_eval(text) == tuple(order) else None
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
    with connection, connection.makefile("rb") as orders:
        while (order := read_frame(orders)) is not None:
            try:
                carry_out(order.decode())
                answer = DONE
            except Exception:  # whoever needs the kernel tries again and says what is wrong with it
                answer = _REFUSED
            connection.sendall(framed(answer))


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
    adopt_orphans()
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
    """What they are at is dropped. This process waits for them, and for programs that they had started: left to the
    system's first process, which in a container may wait for nobody, they would stay in its table for ever."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.killpg(0, signal.SIGTERM)  # the group is this process' own
    _wait_for_all()
    os._exit(0)


if __name__ == "__main__":
    main([int(each) for each in sys.argv[1:]])
