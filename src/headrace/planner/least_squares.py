"""Fits with no negative answer: least squares by the active-set method of Lawson and Hanson (1974), for a few columns,
and least absolute errors by weighting it anew.

What lives here: the solvers. What may not: what columns mean, models of anything.
"""

from __future__ import annotations

import numpy as np

_TOLERANCE = 1e-10
_ROUNDS_A_COLUMN, _ROUNDS = 10, 30


def nnls(design: np.ndarray, target: np.ndarray) -> np.ndarray:
    """The x ≥ 0 that brings |design · x − target| to its least. ``design``: [rows, columns], float64; ``target``:
    [rows].

    Columns are scaled to unit length first, so their units do not matter; a column of zeros gets 0.
    """
    lengths = np.sqrt((design * design).sum(axis=0))
    scale = np.where(lengths > 0, lengths, 1.0)
    return _solve(design / scale, target) / scale


def least_absolute(design: np.ndarray, target: np.ndarray, *, floor: float) -> np.ndarray:
    """The x ≥ 0 that brings Σ |design · x − target| to about its least; errors below ``floor`` are all alike."""
    weights = np.ones(len(target))
    for _ in range(_ROUNDS):
        values = nnls(design * weights[:, None], target * weights)
        weights = 1.0 / np.sqrt(np.maximum(np.abs(design @ values - target), floor))
    return values


def _solve(design: np.ndarray, target: np.ndarray) -> np.ndarray:
    columns = design.shape[1]
    x, free = np.zeros(columns), np.zeros(columns, dtype=bool)
    limit = _TOLERANCE * max(1.0, float(np.linalg.norm(target)))
    for _ in range(_ROUNDS_A_COLUMN * columns + 1):
        gradient = design.T @ (target - design @ x)
        gradient[free] = -np.inf
        best = int(np.argmax(gradient)) if columns else 0
        if not columns or gradient[best] <= limit:
            break
        free[best] = True
        x = _step(design, target, x, free)
    return x


def _step(design: np.ndarray, target: np.ndarray, x: np.ndarray, free: np.ndarray) -> np.ndarray:
    """The best x over the free columns; those that would become negative are bound again, one after another."""
    while free.any():
        wanted = np.zeros_like(x)
        wanted[free] = np.linalg.lstsq(design[:, free], target, rcond=None)[0]
        below = free & (wanted <= 0)
        if not below.any():
            return wanted
        shares = x[below] / (x[below] - wanted[below])
        x = x + float(shares.min()) * (wanted - x) if np.isfinite(shares).all() else x
        free &= x > _TOLERANCE
        x = np.where(free, x, 0.0)
    return np.zeros_like(x)
