"""Fixtures for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.support.warm import cold_starts, nursery, warm_starts

if TYPE_CHECKING:
    from tests.support.modes import Oracle

__all__ = ["cold_starts", "nursery", "oracle", "warm_starts"]


@pytest.fixture(scope="module")
def oracle(model: str) -> Iterator[Oracle]:
    """Of the module's ``model``."""
    from tests.support.modes import Oracle

    made = Oracle(model)
    yield made
    made.close()
