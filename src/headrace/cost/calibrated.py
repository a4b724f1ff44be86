"""Step prices fitted to a run, as a file: for which device, model and switches, from which runs, and which step sizes
they cover.

What lives here: CalibratedSteps, its file, finding the one that fits best. What may not: fitting, reading runs and
simulating (planner/).
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

from headrace.cost.cost_model import CostModel, StepLoad
from headrace.cost.prices import FrontPrices, StepPrices
from headrace.cost.profile import DeviceIdentity, profile_folder
from headrace.cost.run_facts import ModelShape, shape_of
from headrace.cost.stored import load, save
from headrace.errors import ConfigError
from headrace.sites import is_plain
from headrace.spec import DecoderSpec

VERSION = 2  # since captured steps with prompts have prices of their own
SUFFIX = ".calibrated.json"
SHIPPED = Path(__file__).parent / "shipped"  # fitted to our own runs
# of the steps, below each ratio
SHARES = (0.005, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.995, 0.999)
LONG = 2.0  # times its price: a step that something came between
_SCORES = tuple(NormalDist().inv_cdf(share) for share in SHARES)


@dataclass(frozen=True, slots=True)
class Parameter:
    """``error``: one standard error; ``steps``: how many steps decided it. ``note``: empty if fitted, otherwise why it
    was not, and what was used instead."""

    name: str
    value: float
    error: float
    steps: int
    note: str = ""


@dataclass(frozen=True, slots=True)
class Steadiness:
    """``alone`` and ``prompts``: quantiles (at SHARES) of measured time over price, of steps with decode tokens only
    and of others. ``lasting``: the share of a disturbance that persists, for about ``seconds``. ``long_share``: the
    share of fitted steps that took more than LONG times their price."""

    alone: tuple[float, ...]
    prompts: tuple[float, ...]
    lasting: float
    seconds: float
    long_share: float = 0.0

    def __post_init__(self) -> None:
        for ratios in (self.alone, self.prompts):
            if len(ratios) != len(SHARES) or min(ratios) <= 0.0 or self.seconds <= 0.0 or self.lasting > 1.0:
                raise ValueError(
                    f"a steadiness of {len(ratios)} ratios from {min(ratios, default=0.0):g} on, lasting {self.lasting:g}"
                )

    def ratio(self, score: float, *, decode: bool) -> float:
        """The ratio at a standard normal score; beyond the outermost quantiles, theirs."""
        ratios, place = self.alone if decode else self.prompts, bisect_right(_SCORES, score)
        if place == 0 or place == len(_SCORES):
            return ratios[place - (place > 0)]
        low, high = _SCORES[place - 1], _SCORES[place]
        share = (score - low) / (high - low)
        return float(ratios[place - 1] ** (1.0 - share) * ratios[place] ** share)

    def __str__(self) -> str:
        decode, prompts = (
            f"{ratios[SHARES.index(0.05)]:.2f} to {ratios[SHARES.index(0.95)]:.2f}"
            for ratios in (self.alone, self.prompts)
        )
        lasting = (
            f"{self.lasting:.0%} of it lasts about {self.seconds:g} s"
            if self.lasting
            else "independently of each other"
        )
        return f"{decode} times their price (with prompts {prompts}), {lasting}; {self.long_share:.1%} took over {LONG:g} times"


@dataclass(frozen=True, slots=True)
class Covered:
    """The largest values among the fitted steps: anything beyond is extrapolation."""

    tokens: int  # a step
    sequences: int  # a step
    context: int  # tokens of one sequence


@dataclass(frozen=True, slots=True)
class FittedRun:
    """A file that prices were fitted to, identified by its content, so that no run is compared with prices made from
    it."""

    sha256: str
    name: str
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibratedSteps:
    """``bandwidth`` and ``rate``: the limits that slownesses are multiples of, in bytes/s and FLOP/s. ``switches``: the
    engine's settings. ``steadiness``: how far steps deviated from their price; None: not at all."""

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
    """In the folder of the device's profile, one file per model and set of switches."""
    off = "-".join(sorted(f"{name}-{value}" for name, value in found.switches.items() if value not in (None, [], ())))
    name = f"{found.device.slug[:100]}--{found.shape.slug}-{found.dtype}"
    return (
        folder or profile_folder()
    ) / f"{name}{'--' + hashlib.sha256(off.encode()).hexdigest()[:8] if off else ''}{SUFFIX}"


def save_calibrated(found: CalibratedSteps, path: Path) -> None:
    try:
        save(found, path, version_of_file=VERSION)
    except OSError as error:
        raise ConfigError(
            f"The calibration cannot be written to {path} ({error.strerror}); give another file with --output-calibration."
        ) from error


def load_calibrated(path: Path) -> CalibratedSteps:
    """Raises ConfigError when the file is not a calibration of this version, or holds invalid values."""
    remedy = "delete it and calibrate again with headrace simulate --calibrate RUN"
    return load(CalibratedSteps, path, "The calibration", remedy, version_of_file=VERSION)


# --- finding


def same_device(asked: DeviceIdentity, measured: DeviceIdentity) -> bool:
    """A catalogue device has a name and no features; a measured one has both."""
    if asked.kind != measured.kind or asked.threads != measured.threads or asked.name != measured.name:
        return False
    return not asked.features or asked.features == measured.features


def find_calibrated(device: DeviceIdentity, folders: Sequence[Path]) -> list[CalibratedSteps]:
    """All calibrations measured on this device. If two folders have one for the same model and settings, the first
    counts."""
    found: dict[str, CalibratedSteps] = {}
    for folder in folders:
        for path in sorted(folder.glob(f"*{SUFFIX}")):
            each = load_calibrated(path)
            if same_device(device, each.device):
                found.setdefault(path.name, each)
    return list(found.values())


def price_of(found: CalibratedSteps, cost_model: CostModel) -> Callable[[StepLoad, bool], float]:
    """A function that returns the seconds of a load on that device, including the launches where the host makes them
    kernel by kernel. Its second argument: whether the load has only decode tokens."""
    prices, bandwidth, rate = found.prices, found.bandwidth, found.rate

    def price(load: StepLoad, decode: bool) -> float:
        work = cost_model.work(load)
        seconds = prices.seconds(work, bandwidth, rate, load, decode=decode)
        return float(max(seconds, 0.0 if (decode or load.graphed) and prices.classes.apart else prices.host.launch))

    return price


def best_calibrated(
    found: Sequence[CalibratedSteps], spec: DecoderSpec, dtype: str, switches: Mapping[str, Any]
) -> tuple[CalibratedSteps | None, tuple[str, ...]]:
    """The calibration of this model, or that of the most similar one, and how it differs. None if no run had these
    switches, or none of a similar model had: dense models say nothing about experts."""
    shape = shape_of(spec)
    fit = [
        each
        for each in found
        if dict(each.switches) == dict(switches) and bool(each.shape.experts) == bool(shape.experts)
    ]
    if not fit:
        return None, ()
    best = min(fit, key=lambda each: (each.dtype != dtype, _far(each.shape, shape)))
    other = []
    if best.shape != shape:
        other.append(f"another model ({best.model}: {best.shape})")
    if best.dtype != dtype:
        other.append(f"another precision ({best.dtype})")
    if not is_plain(spec):  # products over packed weights take another time than their bytes would say
        other.append("weights that are not quantized")
    return best, tuple(other)


def _far(one: ModelShape, other: ModelShape) -> float:
    """0 for equal shapes, otherwise the distance of their sizes, in logarithms."""
    sizes = ("layers", "hidden", "intermediate", "vocabulary")
    apart = sum(abs(math.log(max(1, getattr(one, name)) / max(1, getattr(other, name)))) for name in sizes)
    return apart + 0.1 * (one != other)
