"""Files that stand beside the repository (larger models, real configs): tests that need them are skipped where they are
not.

What lives here: finding them. What may not: reading them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

_SHARED = Path(__file__).resolve().parents[3] / "shared"


def shared(*parts: str) -> Path:
    """``shared("models", "demo")``: a path beside the repository; skips the test (or the module, at import) when it is
    absent."""
    path = _SHARED.joinpath(*parts)
    if not path.exists():
        pytest.skip(f"{'/'.join(('shared', *parts))} is not beside the repository", allow_module_level=True)
    return path
