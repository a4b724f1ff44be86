"""The C kernels as candidates: what those of all operations need to be called as torch functions.

What lives here: element types as C numbers them, signatures. What may not: compiling (c_compiler.py), one operation's
arguments (its native.py).

ctypes releases the GIL during a call. Rows may be strided; the last dimension of every tensor must be contiguous, and
is made so where it is an activation.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import c_char_p, c_float, c_int, c_int64, c_void_p
from types import MappingProxyType
from typing import Any

import torch

from headrace.kernels.build.c_compiler import Native, native_library
from headrace.kernels.candidate import CallSite, Candidate, Declined, F
from headrace.spec import Activation

NATIVE = "native"
TYPES = MappingProxyType({torch.float32: 0, torch.bfloat16: 1, torch.float16: 2})  # as common.h numbers them
ACTIVATIONS = MappingProxyType({Activation.SILU: 0, Activation.GELU: 1, Activation.GELU_TANH: 2})  # elementwise.c


def native(create: Callable[[Native, CallSite[F]], Any], *, name: str = NATIVE, **declared: Any) -> Candidate[F]:
    """A candidate that first asks whether there is a library at all."""

    def accept(site: CallSite[F]) -> Any:
        library = native_library()
        return library if isinstance(library, Declined) else create(library, site)

    return Candidate(name, accept, **declared)


def function_of(native: Native, name: str, arguments: str, result: Any = None) -> Any:
    """A C function. ``arguments``: i int, q int64, P pointer, f float, s struct."""
    kinds: dict[str, Any] = {"i": c_int, "q": c_int64, "P": c_void_p, "f": c_float, "s": c_char_p}
    found = native.library[name]  # by item: an object of its own, so that two call sites share no signature
    found.argtypes = [kinds[letter] for letter in arguments]
    found.restype = result
    return found
