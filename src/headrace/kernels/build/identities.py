"""What Triton calls each kernel in its cache, remembered between starts.

A kernel's identity is a hash of its source and of everything it calls. To find those of all kernels, which must happen
in one order (toolchain.py), every module of kernels is imported, and every function tokenised and parsed: 0.45 s of one
core (two shared ones) in each start, while the interpreter is wanted by all its threads. Read from a file, none of it is needed,
and a start imports the kernels that it uses.

The file lies in Triton's cache. Its name is a hash of all the sources that kernels are made of, so it is never one of
other sources.

What lives here: that file. What may not: finding identities.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from hashlib import sha256
from pathlib import Path

import triton

_PACKAGE = Path(__file__).parents[2]


@cache
def identities(folder: str) -> Mapping[str, str]:
    """By the kernels' full names; nothing where no start has left them in Triton's cache ``folder``."""
    try:
        found = json.loads(_file(folder).read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def remember(folder: str, found: Mapping[str, str]) -> None:
    """For later starts. A folder that cannot be written costs them time."""
    with suppress(OSError), tempfile.TemporaryDirectory(dir=folder) as work:
        (whole := Path(work, "identities")).write_text(json.dumps(dict(found)), "utf-8")
        whole.replace(_file(folder))


def _file(folder: str) -> Path:
    digest = sha256(f"{triton.__version__} {sys.version}".encode())
    for file in (_PACKAGE / "spec.py", *sorted(_PACKAGE.glob("kernels/*/*.py"))):  # of spec.py, constants
        digest.update(file.read_bytes())
    return Path(folder) / f"headrace-identities-{digest.hexdigest()[:24]}.json"
