"""CUDA C++ into machine code: NVRTC, which comes with torch, and a folder of what it made.

What lives here: finding NVRTC, compiling, keeping. What may not: sources, loading (driver.py).

A build is named by the hash of everything that shapes it: source, options, the compiler's version. It is written beside
its final name and renamed, so that processes that start together each see nothing or all of it. It begins with its own
hash: one that a disk has damaged is made anew.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
from collections.abc import Iterator, Sequence
from ctypes import byref, c_char_p, c_int, c_size_t, c_void_p, create_string_buffer
from functools import cache
from importlib import resources
from importlib.util import find_spec
from pathlib import Path

from headrace.kernels.build.c_compiler import cache_folder, is_ours
from headrace.processes.scratch import Scratch

_log = logging.getLogger(__name__)
_NAMES = ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so")
_HASH_BYTES = 32


class CompileError(RuntimeError):
    """NVRTC is missing or refused the source; the message begins with its first complaint."""


def source(*names: str) -> str:
    """Files below kernels, one behind the other."""
    folder = resources.files("headrace.kernels")
    return "\n".join(folder.joinpath(name).read_text() for name in names)


def build(text: str, options: Sequence[str], folder: Path | None = None) -> bytes:
    """Machine code for ``text``: kept from before, or compiled now. Raises CompileError."""
    folder = folder or cache_folder()
    nvrtc = _nvrtc()
    target = folder / f"cuda-{build_key(text, options, _version(nvrtc))}.cubin"
    if (kept := _kept(target)) is not None:
        return kept
    code = _compile(nvrtc, text, options)
    _keep(target, code)
    return code


def build_key(text: str, options: Sequence[str], version: str) -> str:
    return hashlib.sha256(repr((text, tuple(options), version)).encode()).hexdigest()[:32]


@cache
def _nvrtc() -> ctypes.CDLL:
    for path in (*beside_torch(_NAMES), *_NAMES):
        try:
            if isinstance(path, Path):
                for part in path.parent.glob("libnvrtc-builtins.so.*"):  # NVRTC asks for it by name alone
                    ctypes.CDLL(str(part))
            return ctypes.CDLL(str(path))
        except OSError:
            continue
    raise CompileError("NVRTC was not found; it comes with torch for CUDA (the package nvidia-cuda-nvrtc)")


def beside_torch(names: Sequence[str]) -> Iterator[Path]:
    """A library as torch's own packages bring it."""
    found = find_spec("nvidia")
    for root in (found.submodule_search_locations or ()) if found is not None else ():
        for name in names:
            yield from sorted(Path(root).glob(f"*/lib/{name}"))


def _version(nvrtc: ctypes.CDLL) -> str:
    major, minor = c_int(), c_int()
    nvrtc.nvrtcVersion(byref(major), byref(minor))
    return f"{major.value}.{minor.value}"


def _compile(nvrtc: ctypes.CDLL, text: str, options: Sequence[str]) -> bytes:
    program = c_void_p()
    if nvrtc.nvrtcCreateProgram(byref(program), text.encode(), b"kernel.cu", 0, None, None):
        raise CompileError("NVRTC could not take the source")
    try:
        if nvrtc.nvrtcCompileProgram(
            program, len(options), (c_char_p * len(options))(*(option.encode() for option in options))
        ):
            raise CompileError(_complaint(_text(nvrtc, program, "ProgramLog").decode(errors="replace")))
        return _text(nvrtc, program, "CUBIN")
    finally:
        nvrtc.nvrtcDestroyProgram(byref(program))


def _text(nvrtc: ctypes.CDLL, program: c_void_p, what: str) -> bytes:
    size = c_size_t()
    if getattr(nvrtc, f"nvrtcGet{what}Size")(program, byref(size)):
        raise CompileError(f"NVRTC has no {what} of what it compiled")
    held = create_string_buffer(size.value)
    if getattr(nvrtc, f"nvrtcGet{what}")(program, held):
        raise CompileError(f"NVRTC does not give the {what} of what it compiled")
    return held.raw


def _complaint(log: str) -> str:
    lines = [line.strip() for line in log.splitlines() if line.strip("\0 ")]
    return next((line for line in lines if "error" in line), lines[0] if lines else "NVRTC failed without a word")[:300]


def _hash(code: bytes) -> bytes:
    return hashlib.sha256(code).digest()


def _kept(target: Path) -> bytes | None:
    """An earlier build, if this user wrote it, nobody else can change it, and it is whole."""
    try:
        kept = target.read_bytes() if is_ours(target) else b""
    except OSError:
        return None
    code = kept[_HASH_BYTES:]
    return code if code and kept[:_HASH_BYTES] == _hash(code) else None


def _keep(target: Path, code: bytes) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with Scratch(target.parent) as work:
            (work / target.name).write_bytes(_hash(code) + code)
            os.chmod(work / target.name, 0o600)
            os.replace(work / target.name, target)
    except OSError as error:
        _log.warning(
            "Compiled kernels cannot be kept in %s (%s); they are built anew at each start.", target.parent, error
        )
