"""Processes that compile for a start, without a compiler.

What lives here: a stand-in for their program. What may not: tests.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.processes import builders

# As headrace/processes/builder_program.py: an order is a word, "hang" takes a minute, "refuse" is not carried out.
_PROGRAM = r"""
import os, socket, sys, time
from headrace.processes.frames import framed, read_frame
numbers = [int(each) for each in sys.argv[1:]]
for mine in numbers:
    if os.fork() == 0:
        for number in numbers:
            if number != mine:
                os.close(number)
        orders = socket.socket(fileno=mine).makefile("rb")
        while (order := read_frame(orders)) is not None:
            if order == b"die":
                os._exit(9)
            time.sleep({b"sleep": 0.05, b"hang": 60}.get(order, 0))
            os.write(mine, framed(b"not done" if order == b"refuse" else b"done"))
        os._exit(0)
for number in numbers:
    os.close(number)
for _ in numbers:
    os.wait()
"""


def compile_by_a_stand_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "fake_builder.py").write_text(_PROGRAM)
    monkeypatch.setattr(builders, "_PROGRAM", "fake_builder")
    monkeypatch.setenv("PYTHONPATH", str(folder))
