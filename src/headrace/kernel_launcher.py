"""The function through which Triton kernels are launched: C of our own, compiled once into Triton's cache.

What lives here: compiling and loading it, which takes neither torch nor a device, so that a start can do it early. What
may not: what is launched (kernels/build/launch.py).
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

_SOURCE = Path(__file__).parent / "kernels" / "build" / "launcher.c"


@cache
def kernel_launcher() -> Any:
    """The module of ``_SOURCE``. Raises where there is no C compiler or no CUDA driver."""
    from triton.backends.nvidia import driver
    from triton.runtime.build import compile_module_from_src

    driver.CudaUtils()  # makes the type of maps
    module = compile_module_from_src(_SOURCE.read_text(), "headrace_launcher", include_dirs=driver.include_dirs)
    module.use_maps(driver.PyCUtensorMap)
    return module
