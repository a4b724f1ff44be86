"""Fixtures for all tests of this folder."""

from __future__ import annotations

from tests.support.warm import cold_starts, nursery, warm_starts

__all__ = ["cold_starts", "nursery", "warm_starts"]
