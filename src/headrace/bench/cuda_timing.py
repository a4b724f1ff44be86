"""Timing on a CUDA device, as benchmarks use it: the worker's own (worker/card.py), so that one place measures.

What lives here: names. What may not: measuring.
"""

from headrace.worker.card import card_limits as cuda_limits
from headrace.worker.card import cuda_time

__all__ = ["cuda_limits", "cuda_time"]
