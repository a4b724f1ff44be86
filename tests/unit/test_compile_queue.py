"""Whose grammar is compiled next."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError, wait

import pytest

from headrace.engine.fair_threads import QUICK_SECONDS, CompileQueue


def order_of(*asked: tuple[str, float, str], seconds: float) -> list[str]:
    """In which order these (name, seconds, tenant) are done once a thread that was busy with something of ``seconds``
    has a hand free."""
    queue, gate, done = CompileQueue[None](), threading.Event(), list[str]()
    begun = threading.Event()
    queue.submit(lambda: (begun.set(), gate.wait(10))[0], seconds, "")
    assert begun.wait(10)
    futures = [queue.submit(lambda name=name: done.append(name), seconds, tenant) for name, seconds, tenant in asked]
    gate.set()
    wait(futures)
    queue.close()
    return done


@pytest.mark.parametrize("seconds", [0.0, 1.0])
def test_tenants_take_turns_and_the_shortest_of_each_goes_first(seconds: float) -> None:
    hog = [(f"hog {index}", seconds + 0.01, "hog") for index in range(3)]
    assert order_of(*hog, ("polite", seconds + 0.01, "polite"), seconds=seconds) == [
        "hog 0",
        "polite",
        "hog 1",
        "hog 2",
    ]
    assert order_of(*hog, ("short", seconds, "hog"), seconds=seconds) == ["short", "hog 0", "hog 1", "hog 2"]


def test_short_ones_do_not_wait_for_long_ones() -> None:
    queue, gate = CompileQueue[bool](), threading.Event()
    long = [queue.submit(lambda: gate.wait(10), 2 * QUICK_SECONDS, "") for _ in range(3)]
    assert queue.submit(lambda: True, QUICK_SECONDS, "").result(5) and not any(each.done() for each in long)
    gate.set()
    assert all(each.result(5) for each in long)
    queue.close()


def test_a_long_one_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorter ones pass it for ten times as long as it takes itself."""
    now = iter((100.0, 100.0, 109.0, 111.0))
    monkeypatch.setattr("headrace.engine.fair_threads.time.monotonic", lambda: next(now))
    assert order_of(("long", 1.0, ""), ("before", 0.05, ""), ("after", 0.05, ""), seconds=1.0) == [
        "before",
        "long",
        "after",
    ]


def test_what_is_not_wanted_any_more_is_left_out_and_errors_are_told() -> None:
    queue, gate = CompileQueue[bool](), threading.Event()
    first = queue.submit(lambda: gate.wait(10), 0.0, "")
    left, wrong = queue.submit(lambda: True, 0.0, "a"), queue.submit(lambda: bool(1 // 0), 0.0, "a")
    assert left.cancel()
    gate.set()
    assert first.result(5) and isinstance(wrong.exception(5), ZeroDivisionError)
    with pytest.raises(CancelledError):
        left.result()
    queue.close()
