"""The kernels' compiler made ready while torch is imported.

torch takes seconds to import, and what a compilation needs first (Triton itself, a hash of its files, its C helper) needs no torch.

What lives here: that head start. What may not: torch, kernels (kernels/triton/toolchain.py does the same again, and finds it done).
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path

_log = logging.getLogger(__name__)
_DRIVER = Path("/dev/nvidiactl")  # there where an NVIDIA driver is


def begin_compiler() -> threading.Thread | None:
    """Where there is a GPU: a thread that does it. Nobody has to wait for it; what it has not done is done when it is needed."""
    if not _DRIVER.exists():
        return None
    thread = threading.Thread(target=_prepare, name="headrace-compiler", daemon=True)
    thread.start()
    return thread


def _prepare() -> None:
    try:
        from triton.backends.nvidia.driver import CudaUtils
        from triton.runtime.cache import triton_key

        triton_key()  # remembered for the process
        CudaUtils()  # compiled into Triton's cache
    except Exception as error:  # whoever needs it will say so
        _log.debug("the kernels' compiler has no head start: %r", error)
