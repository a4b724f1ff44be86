"""An EngineConfig from keywords, as ``LLM(...)`` takes them: every config field by its own name, switches in
``technique`` too.

What lives here: names to fields. What may not: checks of values (config.py), command lines (flags.py), defaults of its
own.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable
from typing import Any

from headrace.config import ENGINE_PARTS, EngineConfig, engine_config, field_types, switches
from headrace.errors import ConfigError
from headrace.request import Given, Json


def create_config(
    model: str | os.PathLike[str] | None = None, *, technique: Given | None = None, **keywords: Any
) -> EngineConfig:
    """Raises ConfigError for a name that is no config field (naming the nearest ones) and for a value its field does
    not allow."""
    given = {**keywords, **_switches(technique or {})}
    if model is not None:
        given["model"] = model
    known = [name for part in ENGINE_PARTS.values() for name in field_types(part)]
    for name in given:
        if name not in known:
            raise ConfigError(f"{name!r} is not an option of the engine{_near(name, known)}")
    return engine_config(given)


def _switches(technique: Given) -> Json:
    """Values by field name; hyphens and a missing ``enable_`` are accepted, as on the command line, and so are True and
    False for any switch."""
    known, found = switches(), Json()
    for written, value in technique.items():
        name = written.replace("-", "_")
        if name not in known:
            raise ConfigError(f"{written!r} is not a technique with a switch{_near(written, known)}")
        each = known[name][1]
        found[each.name] = each.metadata.get("on" if value else "off", value) if isinstance(value, bool) else value
    return found


def _near(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name.replace("-", "_"), list(known), n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(near)}?" if near else f"; the known ones are {', '.join(sorted(known))}."
