"""Fields of a request that its route does not know, where they are to be left out (``--unknown-fields ignore``).

What lives here: leaving them out, and telling the operator: a count, and each name once. What may not: fields (fields.py),
those that are known and not supported, which stay errors.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from headrace.server.fields import Field

MAX_NAMES = 64  # that are told by name
_SHOWN = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}", re.ASCII)

log = logging.getLogger("headrace.server")


class IgnoredFields:
    """``count`` is told how many."""

    def __init__(self, count: Callable[[int], None]) -> None:
        self._count = count
        self._told: set[tuple[str, str]] = set()

    def note(self, route: str, names: Iterable[str]) -> None:
        """A client chooses the names: few are shown, and none that is not one word."""
        left_out = list(names)
        self._count(len(left_out))
        for name in left_out:
            shown = name if _SHOWN.fullmatch(name) else "(no plain name)"
            if (route, shown) not in self._told and len(self._told) < MAX_NAMES:
                self._told.add((route, shown))
                log.warning("The field %s is unknown to %s and left out of requests; this is told once.", shown, route)


def split(raw: Mapping[str, Any], fields: Iterable[Field]) -> tuple[dict[str, Any], list[str]]:
    """A body without what none of ``fields`` names, and those names."""
    known = {field.name for field in fields}
    return {name: value for name, value in raw.items() if name in known}, [name for name in raw if name not in known]
