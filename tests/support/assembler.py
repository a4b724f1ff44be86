"""What an installed toolkit's compiler says of a kernel in CUDA C++, on a machine without a GPU.

What lives here: finding it, and its words on registers. What may not: judgement (the tests).
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.kernels.build import nvrtc as compiler


def nvcc() -> str | None:
    return shutil.which("nvcc") or next((str(path) for path in sorted(Path("/usr/local").glob("cuda*/bin/nvcc"))), None)


def said_of(build: Callable[[], object], folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """What the assembler says of what ``build`` has compiled: registers, spills, matrix instructions that wait for each
    other."""
    if (found := nvcc()) is None:
        pytest.skip("nvcc is not installed")
    kept: dict[str, Any] = {}
    monkeypatch.setattr(
        compiler, "build", lambda text, options, folder=None: kept.update(text=text, options=options) or b""
    )
    build()
    source = folder / "kernel.cu"
    source.write_text(kept["text"])
    options = [option for option in kept["options"] if option != "-default-device"]  # NVRTC's own
    command = [found, "-cubin", "-std=c++17", "-Xptxas=-v", *options, "-o", str(folder / "kernel.cubin"), str(source)]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=110).stderr
