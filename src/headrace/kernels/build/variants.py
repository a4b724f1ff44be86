"""Kernels in CUDA C++ in all their variants.

What lives here: building each once. What may not: sources, what variants there are.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

import torch

from headrace.kernels.build.driver import Function, Module, NotLoadable
from headrace.kernels.build.nvrtc import CompileError

_log = logging.getLogger(__name__)
V = TypeVar("V", bound=Hashable)


class Variants(Generic[V]):
    """One kernel's on one device: each is built at its first use, in whichever thread comes first.

    ``code``: its machine code, built or kept from before. ``shared_bytes`` of a program; None: the source says.
    """

    def __init__(
        self,
        device: torch.device,
        name: str,
        code: Callable[[V], bytes],
        shared_bytes: Callable[[V], int] | None = None,
    ) -> None:
        self.device = torch.cuda.current_device() if device.index is None else device.index
        self.processors = torch.cuda.get_device_properties(device).multi_processor_count
        self._name, self._code, self._shared_bytes = name, code, shared_bytes
        self._functions: dict[V, Function] = {}
        self._refused: set[V] = set()
        self._loading, self._finding = threading.Lock(), threading.Lock()

    def function(self, variant: V) -> Function:
        """Raises CompileError, NotLoadable."""
        found = self._functions.get(variant)
        if found is None:
            code = self._code(variant)  # several threads at once, each another one
            with self._loading:
                if variant not in self._functions:
                    module = Module(code, self.device)
                    size = module.number("shared_bytes") if self._shared_bytes is None else self._shared_bytes(variant)
                    self._functions[variant] = module.function(self._name, size)
                found = self._functions[variant]
        return found

    def find(self, variant: V, instead: str) -> Function | None:
        """None where it cannot be built, which is said once, with who runs ``instead``."""
        with self._finding:
            if variant not in self._refused:
                try:
                    return self.function(variant)
                except (CompileError, NotLoadable) as error:
                    self._refused.add(variant)
                    _log.warning("%s (%s)", instead, error)
            return None
