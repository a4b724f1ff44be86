"""Trials of grammars: those that take long hold up only their like, and one tenant's only its own."""

from __future__ import annotations

import asyncio
import json
import time

import pytest

from headrace.engine.grammar_check import GrammarCheck, _Verdict
from headrace.errors import InvalidRequest, Overloaded
from headrace.request import StructuredOutputs

SLOW = 0.2


class Scripted(GrammarCheck):
    """A bomb takes all the time it gets, anything else none."""

    asked = 0

    def _ask(self, line: bytes, seconds: float) -> _Verdict | None:
        self.asked += 1
        assert json.loads(line)["seconds"] == seconds
        if b"bomb" not in line:
            return _Verdict("")
        time.sleep(SLOW if seconds == self._seconds else 0.01)
        return _Verdict("it takes too long") if seconds == self._seconds else None


def bomb(number: int) -> StructuredOutputs:
    return StructuredOutputs(choice=(f"bomb {number}",))


@pytest.mark.parametrize("tenant", ["hog", "polite"])
def test_bombs_hold_up_bombs(tenant: str) -> None:
    """Even one's own."""
    check = Scripted([])

    async def main() -> float:
        bombs = [asyncio.create_task(check.require_soon(bomb(number), "hog")) for number in range(12)]
        await asyncio.sleep(0.1)
        longest = 0.0
        for number in range(10):
            begun = time.perf_counter()
            await check.require_soon(StructuredOutputs(choice=(f"fine {number}",)), tenant)
            longest = max(longest, time.perf_counter() - begun)
        assert not all(each.done() for each in bombs)
        for each in bombs:
            with pytest.raises(InvalidRequest, match="it takes too long"):
                await each
        return longest

    longest = asyncio.run(main())
    check.close()
    assert longest < SLOW * 0.75, longest


def test_as_many_as_may_wait() -> None:
    check = Scripted([])

    async def main() -> None:
        bombs = [asyncio.create_task(check.require_soon(bomb(number), "hog")) for number in range(80)]
        await asyncio.sleep(0.05)
        refused = [each for each in bombs if each.done()]
        assert len(refused) == 80 - 64 - 3  # three are being tried out
        for each in refused:
            with pytest.raises(Overloaded, match="64 of your requests wait"):
                await each
        await check.require_soon(StructuredOutputs(choice=("fine",)), "polite")
        for each in bombs:
            each.cancel()

    asyncio.run(main())
    check.close()


def test_the_same_one_is_tried_out_once() -> None:
    check = Scripted([])

    async def main() -> None:
        await asyncio.gather(*(check.require_soon(StructuredOutputs(choice=("same",))) for _ in range(20)))

    asyncio.run(main())
    check.close()
    assert check.asked <= 3  # side by side, before the first verdict
