"""Processes that compile for a start, without a compiler.

What lives here: a stand-in for their program. What may not: tests.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace import builders

# As headrace/builder_program.py: an order is a word, "hang" takes a minute, "refuse" is not carried out.
_PROGRAM = r"""
import os, socket, sys, time
numbers = [int(each) for each in sys.argv[1:]]
for mine in numbers:
    if os.fork() == 0:
        for number in numbers:
            if number != mine:
                os.close(number)
        for line in socket.socket(fileno=mine).makefile("rb"):
            if line == b"die\n":
                os._exit(9)
            time.sleep({b"sleep\n": 0.05, b"hang\n": 60}.get(line, 0))
            os.write(mine, b"not done\n" if line == b"refuse\n" else b"done\n")
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
