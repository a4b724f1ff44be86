"""Kernels that begin before the one before has ended, on and off: time a decode step over running requests."""

from __future__ import annotations

from headrace.bench.ablations.decode_steps import measure

__all__ = ["measure"]
