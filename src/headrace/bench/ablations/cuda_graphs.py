"""CUDA graphs on and off, same kernels launched as one graph or one by one: time a decode step over running requests."""

from __future__ import annotations

from headrace.bench.ablations.decode_steps import measure

__all__ = ["measure"]
