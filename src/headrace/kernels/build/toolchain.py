"""The compiler behind the Triton kernels: which of its errors mean that a kernel cannot be built, where it keeps what
it built.

What lives here: judging errors, preparing the compiler, its cache. What may not: kernels, choosing.

Triton keeps each compiled kernel in a folder named by a hash of its source, what it calls, its types and constants, the
compiler's own files and the device's architecture; nothing here needs to know when a kernel has changed.
"""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import tempfile
import traceback
from importlib import import_module
from pathlib import Path

import torch
import triton
from triton import knobs
from triton.errors import TritonError
from triton.runtime import JITFunction, driver
from triton.runtime.errors import InterpreterError

from headrace.kernels.build.driver import NotLoadable
from headrace.kernels.build.identities import identities, remember
from headrace.kernels.build.nvrtc import CompileError

_log = logging.getLogger(__name__)
_ROOM = 4 * 2**20  # bytes that must fit into the cache's folder: about what the kernels of one model take
_KERNELS = Path(__file__).parents[1]
_TRITON = str(Path(triton.__file__).parent)
# Functions of Triton that only translate: whatever goes wrong below them is about building.
_TRANSLATING = (("compiler/compiler.py", "compile"), ("runtime/build.py", "compile_module_from_src"))
# What the driver says of code that it cannot load or launch on this device. Other errors of the driver may come from
# work queued before.
_REFUSED = (
    "device kernel image is invalid",
    "no kernel image is available",
    "PTX JIT compilation failed",
    "unsupported toolchain",
    "too many resources requested",
    "out of resource",
)


def build_failure(error: Exception) -> str | None:
    """The compiler's first line, if ``error`` means that a kernel cannot be built, loaded or launched here, whatever
    its data."""
    if isinstance(error, (InterpreterError, torch.OutOfMemoryError, torch.AcceleratorError)):
        return None
    if isinstance(error, (CompileError, NotLoadable)):
        return str(error)
    if isinstance(error, TritonError) or _translating(error) or any(words in str(error) for words in _REFUSED):
        return _first_line(error)
    return None


def _translating(error: Exception) -> bool:
    frames = traceback.walk_tb(error.__traceback__)
    places = ((frame.f_code.co_filename, frame.f_code.co_name) for frame, _ in frames)
    return any(
        path.startswith(_TRITON) and path.endswith(file) and function == name
        for path, function in places
        for file, name in _TRANSLATING
    )


def _first_line(error: BaseException) -> str:
    """Of the innermost complaint: Triton quotes the source first and says what is wrong with it last."""
    while isinstance(error.__cause__, Exception):
        error = error.__cause__
    text = getattr(error, "error_message", None) or str(error)
    line = next((line.strip() for line in str(text).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {line}"[:300]


def prepare_compiler() -> str | None:
    """What every compilation needs and what needs no device: the compiler's own identity (its files are hashed), its
    helper library.

    Returns why nothing can be compiled here (there is no C compiler, say): then every kernel gives way, each with that
    reason.
    """
    from triton.runtime.cache import triton_key

    triton_key()
    try:
        assert driver.active.utils is not None  # compiled at first use
    except Exception as error:
        if (said := build_failure(error)) is None:
            raise
        return f"no kernel can be built: {said}"
    return None


def prepare_kernels(device: torch.device) -> None:
    """Once this is done kernels can be compiled in several threads at the same time: each has its identity and its
    table of variants, or gets them when it is first wanted."""
    if identities(knobs.cache.dir):
        return
    with torch.cuda.device(device):
        index = driver.active.get_current_device()
        found = prepare_identities()
        for kernel in found:
            kernel.device_caches[index]  # made at first use, and twice if two threads are first
    remember(knobs.cache.dir, {kernel._fn_name: kernel.cache_key for kernel in found})


def prepare_identities() -> list[JITFunction]:
    """Every kernel, its identity found; without a device.

    Triton finds a kernel's identity with the constants of the functions it calls, as far as theirs has been found
    before: in another order it is another one, and what an earlier start compiled would not be recognised. So it is
    always found in the same order.
    """
    kernels = _kernels()
    for kernel in kernels:
        assert kernel.cache_key
    return kernels


def _kernels() -> list[JITFunction]:
    """Of every operation, whichever a model needs."""
    modules = [
        import_module(f"headrace.kernels.{path.parent.name}.{path.stem}")
        for path in sorted(_KERNELS.glob("*/triton_*.py"))
    ]
    return [value for module in modules for value in vars(module).values() if isinstance(value, JITFunction)]


def cache_folder() -> tuple[str, str | None]:
    """Where compiled kernels are kept, and if that is not where Triton was told to, why not. A folder that cannot be
    written is replaced."""
    folder = knobs.cache.dir
    reason = _unwritable(folder)
    if reason is None:
        return folder, None
    knobs.cache.dir = tempfile.mkdtemp(prefix="headrace-triton-")
    atexit.register(shutil.rmtree, knobs.cache.dir, ignore_errors=True)
    _log.warning("compiled kernels cannot be kept in %s (%s); they are built anew at each start", folder, reason)
    return (
        knobs.cache.dir,
        f"{folder} cannot be written ({reason}): kernels are built anew at each start; set TRITON_CACHE_DIR",
    )


def _unwritable(folder: str) -> str | None:
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(_ROOM))
            return None
    except OSError as error:
        return error.strerror or str(error)
