"""Attention without a running maximum, on and off: time a decode step over running requests."""

from __future__ import annotations

from headrace.bench.ablations.decode_steps import measure

__all__ = ["measure"]
