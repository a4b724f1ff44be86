"""Lanes: one tenant after the other, a bound, and callers that leave."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time

import pytest

from headrace.engine.fair_threads import FairThreads
from headrace.errors import Overloaded
from headrace.server.generate import weight
from headrace.server.limits import _LARGE_BYTES


def test_whoever_asks_for_much_waits_for_itself() -> None:
    done: list[str] = []

    async def main() -> None:
        lane, open_ = FairThreads(1, "test"), threading.Event()
        tasks = [asyncio.create_task(lane.run(open_.wait))]
        for name in ["hog"] * 20 + ["a", "b", "a"]:
            tasks.append(asyncio.create_task(lane.run(lambda name=name: done.append(name), name)))
        await asyncio.sleep(0)
        open_.set()
        await asyncio.gather(*tasks)
        lane.close()

    asyncio.run(main())
    assert done[:5] == ["hog", "a", "b", "hog", "a"] and done[5:] == ["hog"] * 18


def test_a_tenant_that_has_too_many_is_told_and_others_are_not() -> None:
    async def main() -> None:
        lane, open_ = FairThreads(1, "test", most=2), threading.Event()
        first = asyncio.create_task(lane.run(open_.wait))
        await asyncio.sleep(0)
        waiting = [asyncio.create_task(lane.run(lambda: 7, "hog")) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match=r"2 of your requests wait .* try again in 1 s\."):
            await lane.run(lambda: 8, "hog")
        other = asyncio.create_task(lane.run(lambda: 9, "other"))
        open_.set()
        assert await other == 9 and [await each for each in waiting] == [7, 7] and await first
        assert await lane.run(lambda: 1) == 1
        lane.close()

    asyncio.run(main())


@pytest.mark.parametrize("threads", [1, 3])
def test_callers_that_leave_take_no_place_with_them(threads: int) -> None:
    """Before their turn, as it comes, and while they are served: what has begun holds its thread until it ends, all
    else is dropped."""

    async def main() -> None:
        lane, ran = FairThreads(threads, "test"), list[int]()

        def work(number: int) -> None:
            time.sleep(0.001)
            ran.append(number)
            if number % 5 == 0:
                raise ValueError

        for round_ in range(30):
            tasks = [
                asyncio.create_task(lane.run(lambda number=number: work(number), f"t{number % 3}"))
                for number in range(10)
            ]
            await asyncio.sleep(0.0005 * (round_ % 5))
            for task in tasks[round_ % 4 :]:
                task.cancel()
            for task in tasks:
                with contextlib.suppress(asyncio.CancelledError, ValueError):
                    await task
        together = threading.Barrier(threads)  # all of them are free
        await asyncio.gather(*(lane.run(lambda: together.wait(5)) for _ in range(threads)))
        assert not lane._threads._waiting and ran
        lane.close()

    asyncio.run(main())


MANY = 3000
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {}}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"enum": list(range(700))}}}


@pytest.mark.parametrize(
    ("messages", "tools"),
    [
        ([{"role": "user", "content": "a"}] * MANY, None),
        ([{"role": "user", "content": [{"type": "text", "text": "a"}] * MANY}], None),
        ([{"role": "assistant", "content": None, "tool_calls": [CALL] * 100}] * 20, None),
        ([{"role": "user", "content": "a"}], [TOOL] * 128),
        ([{"role": "user", "content": "a" * 300_000}], None),
    ],
    ids=["messages", "parts", "calls", "tools", "text"],
)
def test_whatever_a_conversation_has_much_of_makes_it_large(
    messages: list[dict[str, object]], tools: list[dict[str, object]] | None
) -> None:
    assert weight(messages, tools) > _LARGE_BYTES
    assert weight([{"role": "user", "content": "a"}] * 20, [TOOL]) < _LARGE_BYTES // 16


def test_where_no_thread_starts_nobody_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def all_of_them() -> list[object]:
        lane = FairThreads(1, "lane")
        monkeypatch.setattr(
            lane._threads._pool, "submit", lambda *_: (_ for _ in ()).throw(RuntimeError("can't start new thread"))
        )
        asked = [lane.run(lambda: 1, tenant) for tenant in ("a", "b", "b")]
        return await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 5)

    assert all(isinstance(each, MemoryError) for each in asyncio.run(all_of_them()))
