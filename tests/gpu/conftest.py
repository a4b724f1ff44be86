"""Fixtures for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.support.card import Judge


@pytest.fixture(scope="module")
def judge() -> Iterator[Judge]:
    """Of the bundled model."""
    from tests.support.card import Judge

    made = Judge()
    yield made
    made.close()
