"""The register of techniques: where each comes from, how it is switched, what it should improve, how that is measured.

What lives here: one entry a technique (register.toml), and the loads that measure them (loads.toml).
What may not: the techniques themselves, any measuring.
A technique is removed by deleting its room, its config field and its entry here (a test compares the two).
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.config import DeviceConfig, EngineConfig
from headrace.errors import ConfigError
from headrace.techniques.loads import Load, read_loads


@dataclass(frozen=True, slots=True, kw_only=True)
class Technique:
    """``switch`` is the path of a config field; ``off`` is the field's value when the technique is off.

    ``needs_gpu``: without one the switch does nothing, and there is nothing to measure; ``needs_cpu``: with one.
    ``in_prices``: calibrated prices of steps are those of one value of the switch; not where what it saves is counted,
    or where it changes when or on which replica a step is computed.
    """

    name: str
    source: str
    switch: str
    improves: str
    off_means: str
    loads: tuple[Load, ...]  # under which it is measured
    off: Any = None
    needs_gpu: bool = False
    needs_cpu: bool = False
    in_prices: bool = True
    on_value: Any = None  # where neither True nor 1 is meant

    @property
    def ablate(self) -> str:
        return f"headrace bench ablate {self.name}"

    def lacks(self, device: str) -> str | None:
        """The kind of device it needs, where ``device`` ("cpu", "cuda", "cuda:0") is of another."""
        on_card = device.startswith("cuda")
        return "GPU" if self.needs_gpu and not on_card else "CPU" if self.needs_cpu and on_card else None

    @property
    def default(self) -> Any:
        """The field's default; None means that it is chosen by device."""
        folder, _, name = self.switch.partition(".")
        return getattr(getattr(EngineConfig(), folder), name)

    @property
    def on(self) -> Any:
        """The field's value when the technique is on."""
        if self.on_value is not None:
            return self.on_value
        return not self.off if isinstance(self.off, bool) else 1

    @property
    def default_state(self) -> str:
        """``on``, ``off``, ``automatic`` (chosen by device) or another value."""
        words = {self.on: "on", self.off: "off"} if isinstance(self.off, bool) else {}
        if self.default is None:
            return "automatic" if self.off is not None else "off"
        return words.get(self.default, str(self.default))


def _read() -> tuple[Technique, ...]:
    entries = tomllib.loads(Path(__file__).with_name("register.toml").read_text(encoding="utf-8"))
    loads = read_loads()
    for entry in entries.values():
        entry["loads"] = tuple(loads[name] for name in entry["loads"])
    return tuple(Technique(name=name, **entry) for name, entry in entries.items())


TECHNIQUES = _read()
# by the field of DeviceConfig that switches them
OF_DEVICE = {each.switch.removeprefix("device."): each for each in TECHNIQUES if each.switch.startswith("device.")}


def in_use(config: DeviceConfig) -> frozenset[str]:
    """Techniques of the device that are not off: kernels of the others are never chosen."""
    return frozenset(each.name for field, each in OF_DEVICE.items() if getattr(config, field) != each.off)


def find_technique(name: str) -> Technique:
    """By name, with hyphens or underscores. Raises ConfigError with the names there are."""
    for technique in TECHNIQUES:
        if technique.name == name.replace("-", "_"):
            return technique
    known = ", ".join(technique.name for technique in TECHNIQUES)
    raise ConfigError(f"There is no technique {name!r}; choose one of {known}.")


def describe() -> list[dict[str, Any]]:
    """The register as plain data (``headrace techniques --json``)."""
    shown = ("name", "source", "switch", "off", "improves", "off_means", "ablate")
    return [{name: getattr(each, name) for name in shown} | {"default": each.default_state} for each in TECHNIQUES]
