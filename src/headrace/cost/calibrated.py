"""Prices of steps that were fitted to a run, as a file: of which device, model and switches, from which runs, and how far they reach.

What lives here: CalibratedSteps, its file, finding the one that fits best. What may not: fitting (step_fit.py), reading runs and simulating
(planner/).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from headrace.cost.cost_model import CostModel, StepLoad
from headrace.cost.prices import FrontPrices, StepPrices, prices_from
from headrace.cost.profile import DeviceIdentity, profile_folder
from headrace.cost.run_facts import ModelShape, shape_of
from headrace.cost.steadiness import SHARES, Steadiness
from headrace.cost.step_fit import Parameter
from headrace.errors import ConfigError
from headrace.spec import DecoderSpec

VERSION = 2  # since graphs of steps with prompts have prices of their own
SUFFIX = ".calibrated.json"
SHIPPED = Path(__file__).parent / "shipped"  # fitted to our own runs


@dataclass(frozen=True, slots=True)
class Covered:
    """The most of each that the fitted steps had: beyond is extrapolation."""

    tokens: int  # a step
    sequences: int  # a step
    context: int  # tokens of one sequence


@dataclass(frozen=True, slots=True)
class FittedRun:
    """A file that was fitted to: by its content, so that no run is held against prices that were made from it."""

    sha256: str
    name: str
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibratedSteps:
    """``bandwidth`` and ``rate``: the limits that slownesses are multiples of, bytes/s and FLOP/s. ``switches``: how the engine stood.
    ``steadiness``: how far steps were from their price; None: as if none ever was."""

    device: DeviceIdentity
    model: str
    shape: ModelShape
    dtype: str
    switches: Mapping[str, Any]
    bandwidth: float
    rate: float
    prices: StepPrices
    front: FrontPrices | None
    parameters: tuple[Parameter, ...]
    covered: Covered
    runs: tuple[FittedRun, ...]
    median_error: float
    p90_error: float
    steps: int
    date: str
    version: str  # of the engine that was measured
    steadiness: Steadiness | None = None

    @property
    def fitted(self) -> tuple[Parameter, ...]:
        return tuple(each for each in self.parameters if not each.note)

    def __str__(self) -> str:
        return f"calibrated from {self.steps} steps of {self.model} ({self.dtype}) on {self.device.name}, {self.date}"


def calibrated_path(found: CalibratedSteps, folder: Path | None = None) -> Path:
    """Next to the device's profile, one a model and switches."""
    off = "-".join(sorted(f"{name}-{value}" for name, value in found.switches.items() if value not in (None, [], ())))
    name = f"{found.device.slug[:100]}--{found.shape.slug}-{found.dtype}"
    return (folder or profile_folder()) / f"{name}{'--' + _hash(off) if off else ''}{SUFFIX}"


def _hash(text: str) -> str:
    import hashlib

    return hashlib.sha256(text.encode()).hexdigest()[:8]


def save_calibrated(found: CalibratedSteps, path: Path) -> None:
    """Whole or not at all."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(f".{os.getpid()}.tmp")
        scratch.write_text(json.dumps({"version_of_file": VERSION, **asdict(found)}, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        scratch.replace(path)
    except OSError as error:
        raise ConfigError(f"The calibration cannot be written to {path} ({error.strerror}); give another file with --output-calibration.") from error


def load_calibrated(path: Path) -> CalibratedSteps:
    """Raises ConfigError when the file is no calibration of this version, or holds what no calibration holds."""
    remedy = "delete it and calibrate again with headrace simulate --calibrate RUN"
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        version = stored.pop("version_of_file")
        if version != VERSION:
            raise ConfigError(f"The calibration {path} has version {version!r}, this program reads {VERSION}; {remedy}.")
        found = _calibrated(stored)
        _check_numbers(path, asdict(found))
    except ConfigError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"The calibration {path} cannot be read ({type(error).__name__}: {error}); {remedy}.") from error
    return found


def _calibrated(stored: dict[str, Any]) -> CalibratedSteps:
    device = stored.pop("device")
    front, steadiness = stored.pop("front"), stored.pop("steadiness", None)
    return CalibratedSteps(
        device=DeviceIdentity(**{**device, "features": tuple(device["features"])}),
        shape=ModelShape(**stored.pop("shape")),
        prices=prices_from(stored.pop("prices")),
        front=FrontPrices(**front) if front is not None else None,
        parameters=tuple(Parameter(**each) for each in stored.pop("parameters")),
        covered=Covered(**stored.pop("covered")),
        runs=tuple(FittedRun(**each) for each in stored.pop("runs")),
        steadiness=None if steadiness is None else _steadiness(steadiness),
        **stored,
    )


def _steadiness(stored: Mapping[str, Any]) -> Steadiness:
    found = Steadiness(**{**stored, "alone": tuple(stored["alone"]), "prompts": tuple(stored["prompts"])})
    for ratios in (found.alone, found.prompts):
        if len(ratios) != len(SHARES) or min(ratios) <= 0.0 or found.seconds <= 0.0 or found.lasting > 1.0:
            raise ValueError(f"a steadiness of {len(ratios)} ratios from {min(ratios, default=0.0):g} on, lasting {found.lasting:g}")
    return found


def _check_numbers(path: Path, stored: Any, name: str = "") -> None:
    """Nothing in such a file is negative, infinite or no number where one is due."""
    parts: Iterator[tuple[str, Any]] = iter(())
    if isinstance(stored, Mapping):
        parts = ((f"{name}.{key}".strip("."), value) for key, value in stored.items())
    elif isinstance(stored, (list, tuple)):
        parts = ((f"{name}[{index}]", value) for index, value in enumerate(stored))
    elif isinstance(stored, (int, float)) and (not math.isfinite(stored) or stored < 0):
        raise ConfigError(f"The calibration {path} has {name} = {stored}, which is no number of at least 0; calibrate again.")
    for key, value in parts:
        _check_numbers(path, value, key)


# --- finding


def same_device(asked: DeviceIdentity, measured: DeviceIdentity) -> bool:
    """A device of a catalogue has a name and no features; a measured one has both."""
    if asked.kind != measured.kind or asked.threads != measured.threads or asked.name != measured.name:
        return False
    return not asked.features or asked.features == measured.features


def find_calibrated(device: DeviceIdentity, folders: Sequence[Path]) -> list[CalibratedSteps]:
    """All that were measured on this device; of two for one model and one setting the first folder's."""
    found: dict[str, CalibratedSteps] = {}
    for folder in folders:
        for path in sorted(folder.glob(f"*{SUFFIX}")):
            each = load_calibrated(path)
            if same_device(device, each.device):
                found.setdefault(path.name, each)
    return list(found.values())


def price_of(found: CalibratedSteps, cost_model: CostModel) -> Callable[[StepLoad, bool], float]:
    """Seconds of a load on that device, and of launching it where the host does that kernel by kernel (the flag: single tokens alone)."""
    prices, bandwidth, rate = found.prices, found.bandwidth, found.rate

    def price(load: StepLoad, alone: bool) -> float:
        work = cost_model.work(load)
        seconds = prices.seconds(work, bandwidth, rate, load, alone=alone)
        return float(max(seconds, 0.0 if (alone or load.filled) and prices.classes.apart else prices.host.launch))

    return price


def best_calibrated(
    found: Sequence[CalibratedSteps], spec: DecoderSpec, dtype: str, switches: Mapping[str, Any]
) -> tuple[CalibratedSteps | None, tuple[str, ...]]:
    """The one of this model, else of the most similar; and in what it is another's. None where no run had these switches, or none of a model
    like this had: dense ones say nothing of experts."""
    shape = shape_of(spec)
    fit = [each for each in found if dict(each.switches) == dict(switches) and bool(each.shape.experts) == bool(shape.experts)]
    if not fit:
        return None, ()
    best = min(fit, key=lambda each: (each.dtype != dtype, _far(each.shape, shape)))
    other = []
    if best.shape != shape:
        other.append(f"another model ({best.model}: {best.shape})")
    if best.dtype != dtype:
        other.append(f"another precision ({best.dtype})")
    return best, tuple(other)


def _far(one: ModelShape, other: ModelShape) -> float:
    """0 for equal shapes; else how far their sizes are apart, in logarithms."""
    sizes = ("layers", "hidden", "intermediate", "vocabulary")
    apart = sum(abs(math.log(max(1, getattr(one, name)) / max(1, getattr(other, name)))) for name in sizes)
    return apart + 0.1 * (one != other)
