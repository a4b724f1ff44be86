"""Who has to sleep so that another model fits, as arithmetic."""

from __future__ import annotations

import pytest

from headrace.server.members.manager import Holding, held_asleep, held_awake, to_sleep


def model(name: str, held: int, asleep: int = 0, *, idle: bool = True, used: float = 0.0) -> Holding:
    return Holding(name, held, asleep, idle, used)


@pytest.mark.parametrize(
    ("needed", "budget", "others", "expected"),
    [
        (10, 10, [], []),
        (11, 10, [], None),
        (5, 20, [model("a", 10), model("b", 5)], []),
        (6, 20, [model("a", 10, used=2), model("b", 5, used=1)], ["b"]),
        (6, 20, [model("a", 10, used=1), model("b", 5, used=2)], ["a"]),
        (12, 20, [model("a", 10, used=2), model("b", 5, used=1)], ["a"]),  # b's memory would not be needed
        (12, 20, [model("a", 10, idle=False), model("b", 9, used=9)], ["b", "a"]),
        (9, 20, [model("a", 10, idle=False, used=1), model("b", 10, used=9)], ["b"]),  # one that is idle first
        (16, 20, [model("a", 10, 3), model("b", 5, 2)], None),  # what they hold asleep is not to be had
        (15, 20, [model("a", 10, 3), model("b", 5, 2)], ["a", "b"]),
    ],
)
def test_who_sleeps(needed: int, budget: int, others: list[Holding], expected: list[str] | None) -> None:
    found = to_sleep(needed, budget, others)
    assert found == expected or (found is not None and expected is not None and sorted(found) == sorted(expected))


def test_what_is_held() -> None:
    memory = {"weights": 100, "kv_cache": 50, "rows": 5, "context": 3, "kernels": 2, "in use before": 7}
    assert held_awake(memory) == 160
    assert [held_asleep(memory, level, on_cpu=False) for level in (1, 2)] == [10, 5]
    assert held_asleep({"process": 9, **memory}, 1, on_cpu=True) == 119
