"""The program that builders.py starts: a compiler of kernels that never imports torch.

``python -m headrace.processes.builder_program SOCKET …``: as in kernels/build/builder.py.

Compiling needs no torch; the modules of kernels import it for the code around the kernels. With it, the first order
could be carried out after 2.2 to 4.0 s, without it after 1.0 to 1.7 s (two cores of a Xeon, files in memory, six times
each, alternating), and a start has its first order before that. So a stand-in takes torch's name here: every attribute
of it is a class that can be named, called and inherited from. The compiled kernel does not depend on it: its identity
is the same with either. Modules that cannot be imported with the stand-in are imported with torch.

What lives here: that stand-in, and what can begin before the modules are imported. What may not: orders
(kernels/build/builder.py).
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_ABSENT = "torch"
_BUILDER = "headrace.kernels.build.builder"


class _Anything(type):
    """The class of everything in the stand-in."""

    def __getattr__(cls, name: str) -> Any:
        return _named(name)

    def __or__(cls, _: object) -> Any:  # of types
        return cls

    __ror__ = __or__


def _named(name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Anything(name, (), {"__init__": _ignore, "__call__": _unchanged})


def _ignore(_: object, *arguments: object, **named: object) -> None: ...


def _unchanged(_: object, decorated: Callable[..., Any] | None = None, *arguments: object, **named: object) -> Any:
    """For attributes that are used as decorators."""
    return decorated


class _Standing(ModuleType):
    def __getattr__(self, name: str) -> Any:
        found = _named(name)
        setattr(self, name, found)
        return found


class _StandIn(MetaPathFinder, Loader):
    """Finds the module and everything below it."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] == _ABSENT else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Standing(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


def do_without_torch() -> None:
    """Must be called before anything has imported it."""
    sys.meta_path.insert(0, _StandIn())


def main(numbers: list[str]) -> None:
    do_without_torch()
    try:
        hashing = threading.Thread(target=import_module("triton.runtime.cache").triton_key)  # reads 400 MB
        hashing.start()
        builder = import_module(_BUILDER)
        builder.prepare()
        hashing.join()
    except Exception:
        os.execv(sys.executable, [sys.executable, "-P", "-m", _BUILDER, *numbers])
    builder.main([int(each) for each in numbers])


if __name__ == "__main__":
    main(sys.argv[1:])
