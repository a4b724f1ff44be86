"""Compiles the package's C sources at first use and keeps the result in the user's cache.

What lives here: finding a compiler, the cache, loading. What may not: what the functions mean (native.py), torch
operations.

A build is named by the hash of everything that shapes it: sources, flags, the compiler's version, the CPU, the OpenMP
runtime. It is written beside its final name and renamed, so that processes that start together each see nothing or all
of it.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import signal
import stat
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeVar

from headrace.cache_home import cache_home
from headrace.kernels.candidate import Declined
from headrace.observe import progress
from headrace.portability import system_text
from headrace.processes.scratch import Scratch

logger = logging.getLogger(__name__)

_KERNELS = Path(__file__).parent.parent
HEADERS, SOURCES = (
    tuple(sorted(str(each.relative_to(_KERNELS)) for each in _KERNELS.glob(pattern) if each.name != "launcher.c"))
    for pattern in ("*/*.h", "*/*.c")  # but for what launches Triton's kernels, which is built there
)
FLAGS = ("-O2", "-std=gnu11", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi")
TARGET_FLAGS = ("-march=native", "-mcpu=native")  # the second for compilers that do not know the first on their CPU
COMPILERS = ("cc", "gcc", "clang")
INSTALL = "install one, e.g. apt-get install gcc libc6-dev"
OPENMP_FLAGS = (
    ("-fopenmp",),
    ("-Xpreprocessor", "-fopenmp"),
)  # the second for Apple's clang, which has the pragmas but no runtime
COMPILE_SECONDS = 300
VERSION_SECONDS = 10

Choice = TypeVar("Choice")


@dataclass(frozen=True, slots=True)
class Native:
    """The loaded library. ``threads``: it was built with OpenMP, on the runtime torch already uses."""

    library: ctypes.CDLL
    path: Path
    threads: bool


@dataclass(frozen=True, slots=True)
class Compiler:
    """One that has answered. ``version``: what it says of itself."""

    path: str
    version: str

    def __str__(self) -> str:
        return f"{self.path}, {(self.version.splitlines() or ['of no version'])[0]}"


class CompileError(Exception):
    """The compiler was there and failed; the message ends with what it said."""


class CompilerHangs(CompileError):
    """It did not end; with other flags it would not either."""


@cache
def native_library() -> Native | Declined:
    """The library for this machine, from the user's cache or compiled now. The answer holds for the process."""
    compiler = find_compiler()
    if isinstance(compiler, Declined):
        progress.say(
            f"Slower than it could be: {compiler.reason}. Until then torch's own operations run instead of our CPU kernels."
        )
        return compiler
    try:
        return build(compiler, cache_folder())
    except (CompileError, OSError) as error:
        logger.warning("The native CPU kernels could not be built, so torch's own operations run instead: %s", error)
        return Declined(f"building with {compiler.path} failed: {str(error)[:300]}")


def find_compiler() -> Compiler | Declined:
    """The first that is there and answers."""
    failures = []
    for path in filter(None, map(shutil.which, COMPILERS)):
        try:
            return Compiler(path, compiler_version(path))
        except CompileError as error:
            failures.append(str(error))
    if failures:
        return Declined(f"no C compiler works here ({'; '.join(failures)[:300]}); mend it or {INSTALL}")
    return Declined(f"no C compiler (cc, gcc or clang) was found; {INSTALL}")


def cache_folder() -> Path:
    return cache_home() / "headrace" / "kernels"


def build(compiler: Compiler, folder: Path) -> Native:
    """Loads the build for these sources and this machine from ``folder``, making it if need be. Raises CompileError,
    OSError."""
    runtime = openmp_runtime()
    sources = {Path(name).name: _source(name) for name in (*HEADERS, *SOURCES)}
    key = build_key(sources, compiler.version, cpu_identity(), str(runtime))
    target = folder / f"native-{key}.so"
    if (kept := _load_kept(target)) is not None:
        return _native(kept, target)
    try:
        _make_folder(folder)
        with progress.waiting(
            "Compiling the CPU kernels, once for this machine", "Compiled the CPU kernels", slow=True
        ):
            _compile(compiler.path, sources, runtime, target)
    except OSError as error:
        reason = error.strerror or error
        logger.warning(
            "Compiled kernels cannot be kept in %s (%s), so each start compiles them anew; set XDG_CACHE_HOME to a folder that can be written.",
            folder, reason,
        )  # fmt: skip
        return _build_unkept(compiler.path, sources, runtime)
    return _native(ctypes.CDLL(str(target)), target)


def _native(library: ctypes.CDLL, path: Path) -> Native:
    threads = hasattr(library, "headrace_openmp")
    if not threads:
        logger.warning(
            "The native CPU kernels are built without OpenMP, so each computes on one thread; install gcc to have it use them all."
        )
    return Native(library, path, threads)


def _load_kept(target: Path) -> ctypes.CDLL | None:
    """An earlier build, or None where there is none or it is damaged."""
    if not is_ours(target):
        return None
    try:
        return ctypes.CDLL(str(target))
    except OSError as error:
        logger.warning("%s cannot be loaded (%s); it is built anew.", target, error)
        return None


def _build_unkept(compiler: str, sources: dict[str, bytes], runtime: Path | None) -> Native:
    with Scratch() as scratch:
        target = scratch / "native.so"
        with progress.waiting("Compiling the CPU kernels", "Compiled the CPU kernels", slow=True):
            _compile(compiler, sources, runtime, target)
        return _native(ctypes.CDLL(str(target)), target)


def build_key(sources: dict[str, bytes], *facts: str) -> str:
    digest = hashlib.sha256(repr((FLAGS, TARGET_FLAGS, facts)).encode())
    for name in sorted(sources):
        digest.update(hashlib.sha256(name.encode() + b"\0" + sources[name]).digest())
    return digest.hexdigest()[:32]


def compiler_version(compiler: str) -> str:
    """What it says of itself. Raises CompileError where it says nothing."""
    return _run([compiler, "--version"], seconds=VERSION_SECONDS)


def cpu_identity() -> str:
    """What -march=native depends on: a cache in a shared home folder must not serve another CPU's build."""
    lines = system_text("/proc/cpuinfo").split("\n\n", 1)[0].splitlines()
    if not lines:
        return f"{platform.machine()} {platform.processor()}"
    kept = ("model name", "flags", "Features", "CPU part", "CPU variant")
    return "\n".join(line for line in lines if line.startswith(kept)) + platform.machine()


def openmp_runtime() -> Path | None:
    """The OpenMP runtime already in this process (torch's). Linking that very one keeps a single pool of threads."""
    columns = (line.split(maxsplit=5) for line in system_text("/proc/self/maps").splitlines())
    loaded = [Path(each[5]) for each in columns if len(each) == 6 and "/" in each[5]]
    paths = loaded or _beside_torch()
    return next((path for path in paths if path.name.startswith(("libgomp", "libiomp5", "libomp."))), None)


def _beside_torch() -> Iterator[Path]:
    """The libraries that torch's package brings along, where the system does not tell what is loaded."""
    import torch

    package = Path(torch.__file__).parent
    return (
        path
        for folder in (package / "lib", package / ".dylibs", package.with_name("torch.libs"))
        for path in sorted(folder.glob("lib*"))
    )


def _source(name: str) -> bytes:
    return (_KERNELS / name).read_bytes()


def _make_folder(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)


def is_ours(path: Path) -> bool:
    """Only code that this user wrote, and nobody else can change, is loaded."""
    try:
        found = path.stat()
    except OSError:
        return False
    return found.st_uid == os.getuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _compile(compiler: str, sources: dict[str, bytes], runtime: Path | None, target: Path) -> None:
    """One process a source file, then the link; ``target`` appears whole or not at all."""
    with Scratch(target.parent) as work:
        for name, text in sources.items():
            (work / name).write_bytes(text)
        with_openmp = [(runtime, flags) for flags in OPENMP_FLAGS] if runtime else []
        _first_working((*with_openmp, (None, ())), lambda openmp: _library(compiler, *openmp, work))
        os.chmod(work / "native.so", 0o600)
        os.replace(work / "native.so", target)


def _library(compiler: str, runtime: Path | None, openmp: Sequence[str], work: Path) -> None:
    """native.so in ``work``, and proof that it loads: a compiler may ask for another runtime than torch's."""
    _first_working(TARGET_FLAGS, lambda flag: _objects(compiler, (flag, *openmp), work))
    # torch's runtime serves the symbols: without -fopenmp here the compiler's own is not linked beside it
    libraries = (str(runtime), "-Xlinker", "-rpath", "-Xlinker", str(runtime.parent)) if runtime else ()
    objects = [str(work / f"{Path(name).stem}.o") for name in SOURCES]
    _run([compiler, "-shared", *objects, *libraries, "-lm", "-o", str(work / "native.so")])
    try:
        ctypes.CDLL(str(work / "native.so"))
    except OSError as error:
        raise CompileError(f"what it made cannot be loaded: {error}") from error


def _first_working(choices: Sequence[Choice], attempt: Callable[[Choice], None]) -> None:
    """Raises what the last one raised."""
    for choice in choices[:-1]:
        try:
            return attempt(choice)
        except CompilerHangs:
            raise
        except CompileError as error:
            logger.debug("%s: %s", choice, error)
    return attempt(choices[-1])


def _objects(compiler: str, flags: Sequence[str], work: Path) -> None:
    _run(
        *(
            [compiler, *FLAGS, *flags, "-c", str(work / Path(name).name), "-o", str(work / f"{Path(name).stem}.o")]
            for name in SOURCES
        )
    )


def _run(*commands: Sequence[str], seconds: float = COMPILE_SECONDS) -> str:
    """Side by side, in groups of their own: whatever they have started ends with this call. Returns what the last one
    prints."""
    try:
        with ExitStack() as stack:
            running = [stack.enter_context(_started(command)) for command in commands]
            said = [process.communicate(timeout=seconds) for process in running]
    except subprocess.TimeoutExpired as error:
        raise CompilerHangs(f"{commands[0][0]} took more than {seconds:g} s") from error
    except OSError as error:  # no program at all, in spite of its mode
        raise CompileError(f"{commands[0][0]} cannot be run: {error.strerror}") from error
    for process, (_, errors) in zip(running, said, strict=True):
        if process.returncode != 0:
            raise CompileError(
                f"{commands[0][0]} ended with status {process.returncode}: {errors.strip()[-300:] or 'it says nothing'}"
            )
    return said[-1][0]


@contextmanager
def _started(command: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True, errors="replace", start_new_session=True
    ) as process:  # fmt: skip
        try:
            yield process
        finally:
            if process.returncode is None:  # nobody has waited for it yet, so the number is still its own
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
