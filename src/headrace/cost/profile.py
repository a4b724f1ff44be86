"""A device as numbers: the limits that every step is divided by, where they are stored, and how they are found again.

What lives here: DeviceProfile, its file, the identity of a device. What may not: torch and the measuring itself
(worker/profile.py measures, because only a worker may touch the device).
"""

from __future__ import annotations

import math
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from headrace.cache_home import cache_home
from headrace.cost.stored import load, save
from headrace.errors import ConfigError
from headrace.portability import system_text

PROFILE_VERSION = 1
ACCEPTED_SHARE = 0.9  # of a plain read-bandwidth test of the same run: below, the machine was not quiet
CPU_FEATURES = (
    "avx2",
    "avx512f",
    "avx512_bf16",
    "avx512_vnni",
    "avx_vnni",
    "amx_bf16",
    "amx_int8",
    "asimd",
    "bf16",
    "i8mm",
)


@dataclass(frozen=True, slots=True)
class Limits:
    """Bandwidths in bytes/s and GEMM rates in FLOP/s as measured in one run; printed with every benchmark table."""

    read_bandwidth: float
    copy_bandwidth: float
    gemm_rates: dict[str, float]

    def __str__(self) -> str:
        rates = ", ".join(f"{said_rate(rate)} {dtype}" for dtype, rate in self.gemm_rates.items())
        return f"read {said_bandwidth(self.read_bandwidth)}, copy {said_bandwidth(self.copy_bandwidth)}, {rates}"


def said_bandwidth(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e12:.2f} TB/s" if bytes_per_second >= 1e12 else f"{bytes_per_second / 1e9:.1f} GB/s"


def said_rate(flops_per_second: float) -> str:
    return (
        f"{flops_per_second / 1e12:.1f} TFLOP/s"
        if flops_per_second >= 1e13
        else f"{flops_per_second / 1e9:,.0f} GFLOP/s"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceIdentity:
    """What two devices must have in common to share a profile: kind, name, CPU threads used (0 on a GPU) and the
    features of their cores."""

    kind: str  # "cpu" or "cuda"
    name: str
    threads: int
    features: tuple[str, ...] = ()

    @property
    def slug(self) -> str:
        words = re.sub(r"[^a-z0-9]+", "-", f"{self.kind} {self.name} {self.threads}t {' '.join(self.features)}".lower())
        return words.strip("-")[:160]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProfile:
    """The limits of one device. ``source`` is "measured" (in full, stored), "estimated" (a quick measurement at start)
    or "stated" (given by the user).

    ``efficiency`` and the overheads are 1 and 0 unless they were fitted to step records: predicted seconds = floor /
    efficiency + step_overhead.
    """

    identity: DeviceIdentity
    read_bandwidth: float  # bytes/s
    copy_bandwidth: float  # bytes/s, read + written
    gemm_rates: Mapping[str, float]  # FLOP/s by dtype name
    # ... held for a second, where that differs; informative
    sustained_gemm_rates: Mapping[str, float] = field(default_factory=dict)
    launch_overhead: float = 0.0  # s of one small operator call; informative, as are the next two
    graph_kernel: float = 0.0  # s of one small kernel in a chain that is replayed
    graph_gap: float = 0.0  # s of that between two kernels
    step_overhead: float = 0.0  # s a step, beside its operators
    efficiency: float = 1.0  # share of the floor's speed that operators reach
    working_set: int = 0  # bytes the bandwidth tests went through
    spread: float = 0.0  # (max - min) / max of the read-bandwidth rounds
    others_share: float = 0.0  # of the CPUs' time that other processes used meanwhile
    source: str = "stated"
    date: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("read_bandwidth", "copy_bandwidth", "efficiency"):
            _positive(name, getattr(self, name))
        if not self.gemm_rates:
            raise ConfigError("The device profile has no gemm_rates; measure it again with: headrace doctor --profile")
        for dtype, rate in self.gemm_rates.items():
            _positive(f"gemm_rates[{dtype}]", rate)

    def gemm_rate(self, dtype: str) -> float:
        """FLOP/s for ``dtype``; a dtype that was not measured gets the slowest measured rate, never an optimistic
        one."""
        return self.gemm_rates.get(dtype) or min(self.gemm_rates.values())


def _positive(name: str, value: float) -> None:
    if not math.isfinite(value) or value <= 0:
        raise ConfigError(
            f"The device profile has {name} = {value!r}, not a number above 0; measure it again with: headrace doctor --profile"
        )


def check_quiet(sustained: float, plain: float) -> None:
    """Rejects a profile whose sustained bandwidth is below 0.9 of the best plain read of the same run (both
    bytes/s)."""
    if sustained < ACCEPTED_SHARE * plain:
        raise ConfigError(
            f"The profile is rejected: {sustained / 1e9:.1f} GB/s sustained is {sustained / plain:.2f} of the {plain / 1e9:.1f} GB/s "
            f"a plain read reached in the same run (at least {ACCEPTED_SHARE} is needed), so the machine was busy. "
            f"Stop other work and run headrace doctor --profile again."
        )


def cpu_identity(threads: int) -> DeviceIdentity:
    """This machine's CPU, as the operating system describes it."""
    described = _cpuinfo()
    name = described.get("model name") or platform.processor() or platform.machine()
    model = "/".join(described[key] for key in ("cpu family", "model", "stepping") if key in described)
    flags = set((described.get("flags") or described.get("Features") or "").split())
    features = tuple(name for name in CPU_FEATURES if name in flags)
    return DeviceIdentity(kind="cpu", name=f"{name} {model}".strip(), threads=threads, features=features)


def _cpuinfo() -> dict[str, str]:
    """The first processor's entry of /proc/cpuinfo; empty where there is no such file."""
    lines = (line.partition(":") for line in system_text("/proc/cpuinfo").split("\n\n")[0].splitlines())
    return {key.strip(): value.strip() for key, _, value in lines}


def last_level_cache_bytes() -> int:
    """Size of the CPU's largest cache; 32 MiB where it cannot be read."""
    sizes = [_cache_size(path) for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return max(sizes, default=0) or 32 * 2**20


def _cache_size(path: Path) -> int:
    text, units = system_text(path), {"K": 2**10, "M": 2**20, "G": 2**30}
    return int(text[:-1]) * units[text[-1]] if text[-1:] in units else int(text or 0)


def profile_folder() -> Path:
    """Where measured profiles are stored: the user's cache folder."""
    return cache_home() / "headrace" / "profiles"


def save_profile(profile: DeviceProfile, folder: Path | None = None) -> Path:
    """Writes the profile atomically; returns its path."""
    path = (folder or profile_folder()) / f"{profile.identity.slug}.json"
    save(profile, path, version=PROFILE_VERSION)
    return path


def load_profile(path: Path) -> DeviceProfile:
    """Raises ConfigError when the file is not a profile of this version."""
    remedy = "give one that headrace doctor --profile wrote, or delete it and measure again"
    return load(DeviceProfile, path, "The device profile", remedy, version=PROFILE_VERSION)


def find_profile(identity: DeviceIdentity, folder: Path | None = None) -> DeviceProfile | None:
    """The measured profile of exactly this device, or None if it was never measured."""
    path = (folder or profile_folder()) / f"{identity.slug}.json"
    if not path.exists():
        return None
    profile = load_profile(path)
    return profile if profile.identity == identity else None
