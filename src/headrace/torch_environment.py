"""What torch and its libraries read from the environment once, when they are loaded: how compute threads wait, in which
pages tensors lie; and what Triton keeps.

GNU OpenMP's default is to spin for milliseconds at every barrier. With more runnable threads than cores (a server's
front end beside its engine, a benchmark's client, a busy laptop) the spinning thread burns the very core that the one
it waits for needs, and a step takes many times as long (the bundled model's decode on two busy cores: 5 to 44 tokens/s,
about 200 with threads that sleep).

A decode step reads every weight once. In pages of 4 KiB each thread needs a new translation every 64 cache lines; in
pages of 2 MiB the same step took 2 to 6 % less time (single runs of one thread, Llama-3.2-1B's shape, bf16). torch asks
for them (MADV_HUGEPAGE, for allocations from 2 MiB on) when its variable is set; where the system's answer is no,
nothing changes.

Triton keeps the text of each stage of its compiler beside a kernel's machine code and reads all of it in each start: 60
kernels took 3.3 to 6 ms each, and 0.6 to 1 ms without (two shared cores). So only machine code is kept.

cuBLAS keeps scratch memory of 32 MiB for each stream and thread on Hopper; beside others that share the weights of a card,
8 have to do.

A quarter of importing torch (0.36 of 1.33 s on an H200's host) is what its compilers and "meta" tensors want to know of
operators, written in Python. A process of our own asks for none of it. Torch 2.13 itself does, for its generators.

What lives here: these four settings, and that. What may not: torch itself.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

# iterations, a few microseconds: longer than a balanced barrier takes, far shorter than a time slice
SPIN_COUNT = "1000"
HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"
_COMPILERS, _WITHOUT = "torch._meta_registrations", ("2.11.",)  # and the versions that do without it


def prepare_for_torch(*, little_scratch: bool = False) -> None:
    """Sets what the user has not. Too late, and harmless, once torch is imported. ``little_scratch``: on a GPU, for
    products of libraries."""
    if little_scratch:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:2")
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
    os.environ.setdefault(HUGE_PAGES, "1")
    os.environ.setdefault("TRITON_STORE_BINARY_ONLY", "1")


class _Later(ModuleType):
    """Takes a module's place until an attribute of it is read."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(import_module(self.__name__), name)


def leave_out_compilers() -> None:
    """For a process of ours, which compiles nothing with torch; before that is imported."""
    found = find_spec("torch") if "torch" not in sys.modules else None
    if found is not None and found.origin is not None and _version(Path(found.origin).parent).startswith(_WITHOUT):
        sys.modules[_COMPILERS] = _Later(_COMPILERS)


def _version(package: Path) -> str:
    try:
        return (package / "version.py").read_text("utf-8").partition("__version__ = '")[2]
    except OSError:
        return ""
