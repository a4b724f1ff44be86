"""Devices that a simulation knows: limits with where each figure comes from, memory, and how much of the limits kernels
reach.

What lives here: the catalogue, and finding a device by name, by a profile's file, or as this CPU, with what was
calibrated on it. What may not: prices of steps (step_time.py), what fits (pricing.py), measuring (``headrace doctor
--profile``), fitting (calibrate.py).

    known as    limits                                              memory
    h200, h100  measured on a card of this kind (read, bf16)        published
    a100 …      published, and lowered to the share of its own      published
                published figures that the measured h200 reached
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from headrace.cost.calibrated import SHIPPED, CalibratedSteps, find_calibrated, load_calibrated, same_device
from headrace.cost.cards import known_cards
from headrace.cost.links import Link
from headrace.cost.prices import Classes, HostPrices, Slowness, StepPrices
from headrace.cost.profile import (
    DeviceIdentity,
    DeviceProfile,
    cpu_identity,
    find_profile,
    load_profile,
    profile_folder,
)
from headrace.errors import ConfigError

GB, GIB, TERA = 10**9, 2**30, 1e12
HERE = "cpu"
Chip = tuple[tuple[int, int], int]  # compute capability, and streaming multiprocessors
CPU_CLASSES = Classes((40,))  # as many rows the CPU's own product takes (kernels/linear/native.py)
# forms of flat products (kernels/linear/measured.json); steps of single tokens are replayed
GPU_CLASSES = Classes((1, 16, 32, 64), apart=True)
FEW_TOKENS = 256  # whose GEMMs are as quick with prompts as without
FILLED = 1.4e11  # multiplications by a layer's weights, from which on its GEMMs fill a device


@dataclass(frozen=True, slots=True)
class Share:
    """What kernels of one kind reach of the device's bandwidth and of its rate."""

    bandwidth: float
    rate: float


@dataclass(frozen=True, slots=True)
class Efficiency:
    """By kind of operator, for a device that no run was fitted on. ``layer_seconds``: of each layer, whatever the load
    (launches, and tails of kernels). ``origin`` says how the figures came about."""

    products: Share
    experts: Share
    attention: Share
    others: Share  # norms, embedding, writes of keys and values
    layer_seconds: float
    origin: str

    def prices(
        self, layers: int, *, step_seconds: float = 0.0, host_seconds: float = 0.0, classes: Classes | None = None
    ) -> StepPrices:
        """The same as prices, alike in all ``classes``; ``step_seconds`` beside the layers' own."""
        classes = classes or Classes()
        count = len(classes.names)
        return StepPrices(
            products=(_slowness(self.products),) * count,
            experts=_slowness(self.experts),
            decode=(_slowness(self.attention),) * count,
            prompts=_slowness(self.attention),
            others=1.0 / self.others.bandwidth,
            activations=0.0,
            classes=classes,
            fixed=(step_seconds + layers * self.layer_seconds,) * count,
            host=HostPrices(step=host_seconds),
        )


def _slowness(share: Share) -> Slowness:
    return Slowness(1.0 / share.bandwidth, 1.0 / share.rate)


# Chosen by eye, so that steps of three models come near their rows of docs/performance/gpu.md.
GPU_EFFICIENCY = Efficiency(
    Share(0.97, 0.77), Share(0.97, 0.40), Share(0.60, 0.75), Share(0.60, 0.60), 36e-6, "assumed, not calibrated"
)
CPU_EFFICIENCY = Efficiency(
    Share(0.80, 0.80), Share(0.80, 0.50), Share(0.60, 0.50), Share(0.60, 0.60), 0.0, "assumed, not calibrated"
)
GPU_HOST_SECONDS = 3e-4  # of scheduling and handing over one step
CPU_HOST_SECONDS = 2e-4


@dataclass(frozen=True, slots=True)
class Device:
    """One device to simulate. ``profile.source``: "measured", "published" or "stated". ``host_seconds``: of the host, a
    step. ``calibrated``: what was fitted to runs on it, one a model."""

    name: str
    profile: DeviceProfile
    memory: int  # bytes
    efficiency: Efficiency
    host_seconds: float
    calibrated: tuple[CalibratedSteps, ...] = ()
    link: Link | None = None  # to others of its kind; None: nobody knows
    # bytes/s between its memory and the host's, one way, as published; None: they are one, or nobody knows
    host_link: float | None = None
    chip: Chip | None = None  # of a card in the catalogue

    @property
    def kind(self) -> str:
        """As the engine's config has it: cpu or cuda."""
        return self.profile.identity.kind

    @property
    def overlaps(self) -> bool:
        """The host may work while the device computes; a CPU is both."""
        return self.kind != "cpu"

    @property
    def host_bandwidth(self) -> float:
        """Bytes/s of a copy between its memory and the host's. On a CPU it is read and written in the same memory."""
        return self.host_link or self.profile.copy_bandwidth / 2

    def __str__(self) -> str:
        rates = ", ".join(f"{dtype} {rate / TERA:.3g} TFLOP/s" for dtype, rate in self.profile.gemm_rates.items())
        limits = f"read {self.profile.read_bandwidth / TERA:.3g} TB/s, {rates}, {self.memory / GIB:.1f} GiB"
        assumed = "" if self.calibrated else f", efficiency {self.efficiency.origin}"
        return f"{self.name} ({limits}; limits {self.profile.source}{assumed})"


@cache
def known_devices() -> Mapping[str, Device]:
    """The catalogue (cost/cards.py)."""
    return {
        key: Device(
            card.profile.identity.name, card.profile, card.memory, GPU_EFFICIENCY, GPU_HOST_SECONDS,
            link=card.link, host_link=card.host, chip=card.chip,
        )
        for key, card in known_cards().items()
    }  # fmt: skip


def classes_of(kind: str, *, eager: bool = False, products: float | None = None) -> Classes:
    """Steps that different kernels compute. ``eager``: nothing is replayed. ``products``: multiplications by a layer's
    weights, for each token; with them GEMMs have classes of their own."""
    if kind == "cpu":
        return CPU_CLASSES
    middle = None if products is None or eager else (FEW_TOKENS, max(2 * FEW_TOKENS, round(FILLED / products)))
    return replace(GPU_CLASSES, apart=not eager, middle=middle)


def find_device(name: str, *, threads: int, memory: int | None, free_memory: int, folder: Path | None = None) -> Device:
    """A device of the catalogue, ``cpu`` (this one, measured before, with ``threads``), or the file of a profile; with
    what was calibrated on it.

    ``memory``: bytes, instead of what is known. ``free_memory``: of this machine. Raises ConfigError.
    """
    return with_calibrations(_find(name, threads, memory, free_memory, folder), folder)


def with_calibrations(device: Device, folder: Path | None = None) -> Device:
    """With all that was fitted to runs on it, kept here or shipped."""
    return replace(
        device, calibrated=tuple(find_calibrated(device.profile.identity, (folder or profile_folder(), SHIPPED)))
    )


def with_calibration(device: Device, path: Path) -> Device:
    """With that one alone. Raises ConfigError where it is of another device."""
    found, here = load_calibrated(path), device.profile.identity
    if not same_device(here, found.device):
        raise ConfigError(
            f"--calibration {path} is of {_named(found.device)}, and this device is {_named(here)}; give one of this device."
        )
    return replace(device, calibrated=(found,))


def _named(identity: DeviceIdentity) -> str:
    return f"{identity.name} with {identity.threads} threads" if identity.threads else identity.name


def _find(name: str, threads: int, memory: int | None, free_memory: int, folder: Path | None) -> Device:
    known = known_devices()
    if name.endswith(".json"):
        return device_of(load_profile(Path(name)), memory, free_memory)
    key = name.lower().replace(" ", "").replace("-", "").removeprefix("nvidia")
    if key == HERE:
        return _this_cpu(threads, memory, free_memory, folder)
    if key not in known:
        raise ConfigError(
            f"--device is {name!r}; give {', '.join(known)}, {HERE} (this one, measured) or the file of a profile (*.json)."
        )
    found = known[key]
    return found if memory is None else replace(found, memory=memory)


def _this_cpu(threads: int, memory: int | None, free_memory: int, folder: Path | None) -> Device:
    profile = find_profile(cpu_identity(threads), folder)
    if profile is None:
        where = folder or profile_folder()
        raise ConfigError(
            f"This CPU was never measured with {threads} threads (nothing in {where}); measure it with: headrace doctor --profile --no-load"
        )
    return device_of(profile, memory, free_memory)


def device_of(profile: DeviceProfile, memory: int | None, free_memory: int) -> Device:
    """A device by its profile alone. Raises ConfigError for a card without ``memory``."""
    if profile.identity.kind == "cpu":
        return Device(profile.identity.name, profile, memory or free_memory, CPU_EFFICIENCY, CPU_HOST_SECONDS)
    if memory is None:
        raise ConfigError(
            f"The profile of {profile.identity.name} does not say how much memory the card has; give it with --device-memory, like 80GB."
        )
    return Device(profile.identity.name, profile, memory, GPU_EFFICIENCY, GPU_HOST_SECONDS)
