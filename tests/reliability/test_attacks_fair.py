"""Attacks by many requests of one client, in sizes for CI; at full size: ``python -m tests.reliability.attacks``."""

from __future__ import annotations

import pytest

from tests.reliability import attacks_fair as fair
from tests.reliability.attacks import HASHED, held

BUSY = 4.0  # times the figure: two cores that do other things too


@pytest.mark.parametrize("fronts", ["1", "2"])
def test_a_key_that_fills_the_queue_locks_nobody_out(fronts: str) -> None:
    flags = (*HASHED, *fair.TWO_KEYS, "--api-server-count", fronts)
    attack = fair.crowd(fair.CHAT, fair.long_answer, 80, 1.5, fair.HOG)
    told = held(attack, flags, slack=BUSY, quiet=0.3, headers=fair.POLITE, asks=fair.TALK)
    assert "× 429" in told, told
