"""The package's modules and rooms by name.

What lives here: finding them. What may not: rules about them (unit/test_imports.py,
reliability/test_fresh_interpreters.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import headrace.errors

PACKAGE = Path(headrace.errors.__file__).parent


def modules() -> Iterator[tuple[str, Path]]:
    """Every module by its name below ``headrace``."""
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts), path


def below(name: str, room: str) -> bool:
    return name == room or name.startswith(room + ".")
