"""Imports of a start: nothing is collected meanwhile, and what dataclasses compile is kept for the next start.

Each method of a dataclass is a text that Python compiles anew in every process: of an engine, ours and torch's, some
2,200, which took 0.3 of 2.0 s of CPU time that all imports took. Python keeps the code of modules, this keeps theirs.

What lives here: that. What may not: what is imported.
"""

from __future__ import annotations

import dataclasses
import marshal
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import blake2b
from importlib.util import MAGIC_NUMBER
from typing import Any

from headrace.cache_home import cache_home
from headrace.processes.garbage import no_collections

_MOST = 1 << 14  # texts: of versions that went, some are of no use any more
_DIGEST = 16  # bytes


@contextmanager
def importing() -> Iterator[None]:
    """For imports, which define dataclasses. One within another changes nothing."""
    names, compiled = vars(dataclasses), _Compiled()
    if "exec" in names:
        yield
        return
    names["exec"] = compiled.run  # what a module calls so goes before what Python does
    try:
        with no_collections():
            yield
    finally:
        del names["exec"]
        compiled.write()


class _Compiled:
    """Code by its text's digest, in one file for each version of Python's compiler; read when the first is wanted."""

    def __init__(self) -> None:
        self._file = cache_home() / "headrace" / "dataclasses" / f"{MAGIC_NUMBER.hex()}-{sys.flags.optimize}"
        self._codes: dict[bytes, bytes] | None = None
        self._new = False

    def run(self, text: str, *names: dict[str, Any]) -> None:
        if self._codes is None:
            self._codes = self._read()
        key = blake2b(text.encode(), digest_size=_DIGEST).digest()
        if key not in self._codes:
            self._codes[key] = marshal.dumps(compile(text, "<string>", "exec", dont_inherit=True))
            self._new = True
        exec(marshal.loads(self._codes[key]), *names)

    def _read(self) -> dict[bytes, bytes]:
        with suppress(OSError):
            held = self._file.read_bytes()
            if held[:_DIGEST] == blake2b(held[_DIGEST:], digest_size=_DIGEST).digest():
                found: dict[bytes, bytes] = marshal.loads(held[_DIGEST:])
                return found if len(found) < _MOST else {}
        return {}

    def write(self) -> None:
        """Whole, or not at all."""
        if not self._new:
            return
        held, part = marshal.dumps(self._codes), self._file.with_suffix(f".{os.getpid()}")
        with suppress(OSError):
            part.parent.mkdir(parents=True, exist_ok=True)
            part.write_bytes(blake2b(held, digest_size=_DIGEST).digest() + held)
            part.replace(self._file)
