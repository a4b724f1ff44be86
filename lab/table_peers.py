"""What others were measured at, and whether it may stand beside a run of ours.

The figures are package data (peers/), by the shape of the model. They are compared only with a run whose device shows
the same limits: another card, or the same one throttled, would make the ratio say something about the card.

What lives here: reading and comparing. What may not: measuring, rendering.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TOLERANCE = 0.03
PEER_FILE = "vllm-0.26-h200.json"
LIMITS = {
    "copy_bandwidth": ("copy", "B/s"),
    "read_bandwidth": ("read", "B/s"),
    "gemm_rate": ("bfloat16 GEMM", "FLOP/s"),
}


@dataclass(frozen=True, slots=True)
class PeerModel:
    """One model's figures by row: {"peer": …, "floor": …, "target": …} in the row's unit; None where nothing was
    measured or worked out."""

    name: str
    rows: Mapping[str, Mapping[str, float | None]]

    def figure(self, row: str) -> float | None:
        return self.rows.get(row, {}).get("peer")

    def floor(self, row: str) -> float | None:
        return self.rows.get(row, {}).get("floor")

    def target(self, row: str) -> float | None:
        """What we mean to stay within on a device of the peer's limits."""
        return self.rows.get(row, {}).get("target")


@dataclass(frozen=True, slots=True)
class Peer:
    """An engine that was measured, on what, and how."""

    name: str
    versions: str
    device: str
    limits: Mapping[str, float]  # read_bandwidth and copy_bandwidth in bytes/s, gemm_rate in FLOP/s (bfloat16, 8192³)
    origin: str
    definitions: Mapping[str, str]
    notes: str
    models: tuple[Mapping[str, Any], ...]

    def find(self, model_config: Mapping[str, Any], dtype: str) -> PeerModel | None:
        """The figures of a model of this very shape in this precision."""
        for model in self.models:
            if model["dtype"] == dtype and all(model_config.get(key) == value for key, value in model["shape"].items()):
                return PeerModel(model["name"], model["rows"])
        return None


def load_peer() -> Peer:
    text = (Path(__file__).parent / "peers" / PEER_FILE).read_text(encoding="utf-8")
    entry = json.loads(text)
    return Peer(**{**entry, "models": tuple(entry["models"])})


def differences(limits: Mapping[str, float], peer: Mapping[str, float], tolerance: float = TOLERANCE) -> list[str]:
    """Each limit that differs too much from the peer's, in words; none where the two runs may be compared."""
    return [
        _said(name, limits.get(name, 0.0), value)
        for name, value in peer.items()
        if abs(limits.get(name, 0.0) / value - 1) > tolerance
    ]


def _said(name: str, ours: float, theirs: float) -> str:
    side = "below" if ours < theirs else "above"
    return f"{_limit(name, ours)} is {abs(ours / theirs - 1):.0%} {side} the peer's {_limit(name, theirs)}"


def said_limits(limits: Mapping[str, float]) -> str:
    return ", ".join(_limit(name, limits[name]) for name in LIMITS if name in limits)


def _limit(name: str, value: float) -> str:
    words, unit = LIMITS[name]
    prefix, factor = ("T", 1e12) if value >= 1e12 else ("G", 1e9)
    return f"{words} {value / factor:.4g} {prefix}{unit}"
