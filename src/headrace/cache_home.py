"""Where this user's caches are.

What lives here: the one folder below which everything that may be made again is kept. What may not: what is kept there.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def cache_home() -> Path:
    """``XDG_CACHE_HOME``, else ``.cache`` at home; one among temporary files where there is no home (a container's
    user without an entry)."""
    if given := os.environ.get("XDG_CACHE_HOME"):
        return Path(given)
    home = os.path.expanduser("~")  # Path.home() raises where it is unknown
    return Path(home) / ".cache" if home != "~" else Path(tempfile.gettempdir()) / f"headrace-of-{os.getuid()}"
