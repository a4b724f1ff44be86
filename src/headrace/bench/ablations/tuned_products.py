"""Measured algorithms for long products, on and off: prompt tokens/s over the length of the prompts."""

from __future__ import annotations

from headrace.bench.ablations.last_layer_pruning import measure

__all__ = ["measure"]
