"""An EngineConfig from keywords, as ``LLM(...)`` takes them: every config field by its own name, switches in ``technique`` too.

What lives here: names to fields. What may not: checks of values (config.py), command lines (flags.py), defaults of its own.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from headrace.config import CacheConfig, DeviceConfig, EngineConfig, ModelConfig, SchedulerConfig, field_types, technique_spellings
from headrace.errors import ConfigError

_SECTIONS: dict[str, type] = {"model": ModelConfig, "cache": CacheConfig, "scheduler": SchedulerConfig, "device": DeviceConfig}


def create_config(model: str | os.PathLike[str] | None = None, *, technique: Mapping[str, Any] | None = None, **keywords: Any) -> EngineConfig:
    """Raises ConfigError for a name that is no config field (naming the nearest ones) and for a value its field does not allow."""
    given = {**keywords, **_switches(technique or {})}
    if model is not None:
        given["model"] = model
    owner = {each.name: section for section, kind in _SECTIONS.items() for each in fields(kind)}
    values: dict[str, dict[str, Any]] = {section: {} for section in _SECTIONS}
    for name, value in given.items():
        if name not in owner:
            raise ConfigError(f"{name!r} is not an option of the engine{_near(name, owner)}")
        section = owner[name]
        values[section][name] = _as_written(value, many=field_types(_SECTIONS[section])[name].many)
    return EngineConfig(**{section: kind(**values[section]) for section, kind in _SECTIONS.items()})


def _switches(technique: Mapping[str, Any]) -> dict[str, Any]:
    """Values by field name; hyphens and a missing ``enable_`` are accepted, as on the command line, and so are True and False for any switch."""
    switches = [each for kind in _SECTIONS.values() for each in fields(kind) if each.metadata.get("technique")]
    known = {spelling: each for each in switches for spelling in technique_spellings(each)}
    found: dict[str, Any] = {}
    for written, value in technique.items():
        each = known.get(written.replace("-", "_"))
        if each is None:
            raise ConfigError(f"{written!r} is not a technique with a switch{_near(written, known)}")
        found[each.name] = each.metadata.get("on" if value else "off", value) if isinstance(value, bool) else value
    return found


def _as_written(value: Any, *, many: bool) -> Any:
    if many:
        return (value,) if isinstance(value, str) else tuple(value)
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _near(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name.replace("-", "_"), list(known), n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(near)}?" if near else f"; the known ones are {', '.join(sorted(known))}."
