"""Testing by simulation (tests/support/simulation): a thousand seeds, every interleaving of a small world, ten planted defects.

The command that does more of it is tests/reliability/simulate.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.simulation.life import Lived, live
from tests.support.simulation.schedule import from_text

SCHEDULES = sorted((Path(__file__).parent / "schedules").glob("*.json"))


@pytest.mark.parametrize("path", SCHEDULES, ids=lambda path: path.stem)
def test_what_once_broke_holds(path: Path) -> None:
    """Shrunk schedules of defects that were found, and mended."""
    outcome = live(from_text(path.read_text()))
    assert isinstance(outcome, Lived), outcome
