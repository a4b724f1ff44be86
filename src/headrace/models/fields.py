"""A strict reader of ``config.json``: every field is read, known to be harmless, or rejected by name.

What lives here: typed access to a config's fields with bounds. What is known about fields that no family reads:
known_configs.toml. What may not: torch, file reading, anything about one family (families.py).
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.errors import ModelError

# no width, vocabulary or context of a real model reaches it: a damaged config fails here, not in malloc
MAX_SIZE = 2**24

_KNOWN = tomllib.loads(Path(__file__).with_name("known_configs.toml").read_text(encoding="utf-8"))
_HARMLESS = frozenset(_KNOWN["harmless"])
_NEUTRAL: Mapping[str, Mapping[str, Any]] = _KNOWN["neutral"]  # field → values, reason
MISSING_FAMILIES: Mapping[str, str] = _KNOWN["missing_families"]  # and what each would need

_UNKNOWN = {"values": (), "reason": "Headrace does not know this field, and it may change what the model computes"}
_REQUIRED: Any = object()


class Fields:
    """One family's view of a config (or of a mapping inside it). Reading a field marks it as understood.

    A missing field yields ``default``; without a default it is an error. Every error is a ModelError that names family
    and field.
    """

    def __init__(self, config: Mapping[str, Any], family: str, prefix: str = "") -> None:
        self._config = config
        self._prefix = prefix
        self._read: set[str] = set()
        self.family = family

    def error(self, name: str, problem: str) -> ModelError:
        return ModelError(f"config.json ({self.family}): {self._prefix}{name} {problem}.", param=name)

    def has(self, name: str) -> bool:
        """Whether the field is present and not null."""
        return self._config.get(name) is not None

    def raw(self, name: str, default: Any = None) -> Any:
        """The field unchanged, including null; ``default`` if it is missing."""
        self._read.add(name)
        value = self._config.get(name, default)
        if value is _REQUIRED:
            raise self.error(name, "is missing; the checkpoint's config is incomplete, fetch it again")
        return value

    def integer(self, name: str, default: Any = _REQUIRED, *, low: int = 1, high: int = MAX_SIZE) -> int:
        value = self.raw(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.error(name, f"is {_shown(value)}; an integer from {low} to {high} is needed")
        return value

    def number(self, name: str, default: Any = _REQUIRED, *, low: float = 0.0, high: float = 1e12) -> float:
        """A finite number in (low, high]."""
        value = self.raw(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low < value <= high:
            raise self.error(name, f"is {_shown(value)}; a number above {low} and up to {high:g} is needed")
        return float(value)

    def boolean(self, name: str, default: Any) -> bool:
        value = self.raw(name, default)
        if not isinstance(value, bool):
            raise self.error(name, f"is {_shown(value)}; true or false is needed")
        return value

    def optional_integer(
        self, name: str, default: int | None = None, *, low: int = 1, high: int = 2**31 - 1
    ) -> int | None:
        return None if self.raw(name, default) is None else self.integer(name, default, low=low, high=high)

    def optional_number(self, name: str, default: float | None = None) -> float | None:
        return None if self.raw(name, default) is None else self.number(name, default)

    def integers(self, name: str, *, high: int = MAX_SIZE) -> tuple[int, ...]:
        """A list of non-negative integers; a single one counts as a list, null as an empty one."""
        value = self.raw(name)
        items = value if isinstance(value, list) else [] if value is None else [value]
        if len(items) > 4096 or any(
            isinstance(item, bool) or not isinstance(item, int) or not 0 <= item <= high for item in items
        ):
            raise self.error(name, f"is {_shown(value)}; a list of integers from 0 to {high} is needed")
        return tuple(items)

    def numbers(self, name: str, length: int) -> tuple[float, ...]:
        """A list of exactly ``length`` positive numbers."""
        value = self.raw(name, _REQUIRED)
        if not isinstance(value, list) or len(value) != length:
            found = f"has {len(value)} entries" if isinstance(value, list) else f"is {_shown(value)}"
            raise self.error(name, f"{found}; a list of {length} numbers is needed")
        if any(isinstance(item, bool) or not isinstance(item, (int, float)) or not 0 < item < 1e12 for item in value):
            raise self.error(name, "holds something other than positive numbers; the config is damaged, fetch it again")
        return tuple(float(item) for item in value)

    def choice(self, name: str, choices: Mapping[str, Any], default: Any = _REQUIRED) -> Any:
        """The value that a word stands for."""
        value = self.raw(name, default)
        if not isinstance(value, str) or value not in choices:
            raise self.error(
                name, f"is {_shown(value)}, which is not supported; supported are {', '.join(sorted(choices))}"
            )
        return choices[value]

    def mapping(self, name: str) -> Fields | None:
        """A mapping inside this one, None if it is missing, null or empty."""
        value = self.raw(name)
        if value is None or value == {}:
            return None
        if not isinstance(value, Mapping):
            raise self.error(name, f"is {_shown(value)}; a mapping is needed")
        return Fields(value, self.family, f"{self._prefix}{name}.")

    def finish(self) -> None:
        """Rejects the first field that was neither read nor known to be harmless."""
        for name in sorted(set(self._config) - self._read):
            value = self._config[name]
            if value is None or (not self._prefix and name in _HARMLESS):
                continue
            known = _NEUTRAL.get(name, _UNKNOWN)
            if not any(value == item and isinstance(value, bool) == isinstance(item, bool) for item in known["values"]):
                remedy = "so the model is rejected; remove the field only if you know it changes nothing"
                raise self.error(name, f"is {_shown(value)}: {known['reason']}, {remedy}")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "…"
