"""Cards that are known by name: limits, what joins them, where each figure comes from (devices.toml).

What lives here: the catalogue, published limits lowered to what is reached of them. What may not: prices of steps,
which a simulation assumes or fits (planner/devices.py), measuring.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from headrace.cost.links import Link, SmallSums
from headrace.cost.profile import DeviceIdentity, DeviceProfile

REACHED_BANDWIDTH = 4.47 / 4.8  # what the measured H200 reaches of its published figures
REACHED_RATE = 798 / 989
# of NVLink's published bytes/s, one way: what sums of 8 to 64 MiB over two and four H100 reach through NCCL, replayed
REACHED_LINK = 315 / 450
MEETING_SECONDS = 22e-6  # what they take beside their bytes
# by the kernel of kernels/sums, over two H200, of four as much more as there were when it sent flags, too
SMALL_SUMS = SmallSums(361e9, 2.1e-6, 0.55e-6, 4.0 * 2**20)
AROUND = 2e-6  # a step of few rows of an 8B on two H200 takes so much more a sum than half the weights and the sum
TAKEN = 2.1  # prompts of 120,000 tokens on two and four H200 take 0.93 and 1.18 ms a layer and step more than a share
LINKS = {
    name: Link(each * REACHED_LINK, MEETING_SECONDS, small, AROUND if small else 0.0, TAKEN if small else 0.0)
    for name, each, small in (
        ("NVLink 5", 900e9, SMALL_SUMS), ("NVLink 4", 450e9, SMALL_SUMS), ("NVLink 3", 300e9, None), ("PCIe 4", 31.5e9, None),
    )
}  # fmt: skip
_TERA = 1e12


@dataclass(frozen=True, slots=True)
class Card:
    """``chip``: compute capability, and streaming multiprocessors. ``memory``: bytes. ``host``: bytes/s between it and
    the host's memory, one way, as published. ``link``: to others of its kind."""

    profile: DeviceProfile
    chip: tuple[tuple[int, int], int]
    memory: int
    host: float
    link: Link


@cache
def known_cards() -> Mapping[str, Card]:
    """By what users call them."""
    rows = tomllib.loads(Path(__file__).with_name("devices.toml").read_text(encoding="utf-8"))
    return {key: _card(**row) for key, row in rows.items()}


def card_named(name: str) -> Card | None:
    """By the name that its driver gives it."""
    return next((card for card in known_cards().values() if card.profile.identity.name == name), None)


def _card(
    name: str,
    chip: list[int],
    read: float,
    rates: Mapping[str, float],
    memory: int,
    source: str,
    host: float,
    link: str,
) -> Card:
    of_read, of_rate = (REACHED_BANDWIDTH, REACHED_RATE) if source == "published" else (1.0, 1.0)
    bandwidth, (major, minor, processors) = read * of_read * _TERA, chip
    profile = DeviceProfile(
        identity=DeviceIdentity(kind="cuda", name=name, threads=0),
        read_bandwidth=bandwidth,
        copy_bandwidth=bandwidth,
        gemm_rates={dtype: rate * of_rate * _TERA for dtype, rate in rates.items()},
        source=source,
    )
    return Card(profile, ((major, minor), processors), memory, host * 1e9, LINKS[link])
