"""A schedule that breaks something, made small: events are left out, requests are made simple, the engine plain, for as
long as the same kind of thing breaks (delta debugging, Zeller and Hildebrandt 2002).

What lives here: the search. What may not: what breaks (life.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

from tests.support.simulation.life import Failure, live
from tests.support.simulation.schedule import Add, Asked, Event, Group, Schedule, Setting

Fails = Callable[[Schedule], Failure | None]


def lived(schedule: Schedule) -> Failure | None:
    """What breaks in a life, if anything."""
    outcome = live(schedule)
    return outcome if isinstance(outcome, Failure) else None


def shrink(schedule: Schedule, failure: Failure, *, most: int = 4000) -> tuple[Schedule, Failure]:
    """The smallest schedule that was found in at most ``most`` lives, and how it fails."""
    search = _Search(schedule, failure, most)
    search.run()
    return replace(search.best, name=f"{schedule.name}, shrunk"), search.failure


class _Search:
    def __init__(self, schedule: Schedule, failure: Failure, most: int) -> None:
        self.best = replace(schedule, events=schedule.events[: failure.at + 1])
        self.failure = failure
        self._left = most

    def run(self) -> None:
        """Until a whole round makes nothing smaller."""
        before = None
        while before != self.best and self._left > 0:
            before = self.best
            self._drop_events()
            self._simplify_requests()
            self._simplify_setting()
            self._drop_events()

    def _try(self, schedule: Schedule) -> bool:
        if self._left <= 0 or schedule == self.best:
            return False
        self._left -= 1
        found = lived(schedule)
        if found is None or found.kind != self.failure.kind:
            return False
        self.best, self.failure = replace(schedule, events=schedule.events[: found.at + 1]), found
        return True

    def _drop_events(self) -> None:
        """Halves, quarters … single events, from the end: later ones seldom matter to earlier ones."""
        size = max(1, len(self.best.events) // 2)
        while True:
            end = len(self.best.events)
            while end > 0:
                events = self.best.events
                start = max(0, end - size)
                self._try(replace(self.best, events=events[:start] + events[end:]))
                end = min(start, len(self.best.events))
            if size == 1 or self._left <= 0:
                return
            size //= 2

    def _simplify_requests(self) -> None:
        at = 0
        while at < len(self.best.events):
            event = self.best.events[at]
            if isinstance(event, Add):
                for simpler in _simpler_requests(event.asked):
                    self._replace_request(at, event, simpler)
            at += 1

    def _replace_request(self, at: int, event: Add, change: dict[str, Any]) -> None:
        """On top of what was already simplified."""
        if (
            at < len(self.best.events)
            and isinstance(current := self.best.events[at], Add)
            and current.number == event.number
        ):
            self._replace(at, replace(current, asked=replace(current.asked, **change)))

    def _replace(self, at: int, simpler: Event) -> bool:
        return self._try(replace(self.best, events=(*self.best.events[:at], simpler, *self.best.events[at + 1 :])))

    def _simplify_setting(self) -> None:
        for change in _simpler_settings(self.best.setting):
            self._try(replace(self.best, setting=replace(self.best.setting, **change)))


def _simpler_requests(asked: Asked) -> Iterator[dict[str, Any]]:
    """Each field as if nobody had said it; a shorter prompt of small numbers, fewer tokens."""
    plain = Asked(prompt=())
    for each in fields(asked):
        if each.name not in ("prompt", "max_tokens") and getattr(asked, each.name) != getattr(plain, each.name):
            yield {each.name: getattr(plain, each.name)}
    for length in (1, 2, 4, 8, 16, len(asked.prompt) - 1):
        if 0 < length < len(asked.prompt):
            yield {"prompt": asked.prompt[:length]}
            yield {"prompt": asked.prompt[-length:]}
    for count in (1, 2, 3, 4, 6, asked.max_tokens - 1):
        if 0 < count < asked.max_tokens:
            yield {"max_tokens": count, "min_tokens": min(asked.min_tokens, count)}
    yield {"prompt": tuple(range(10, 10 + len(asked.prompt)))}


def _simpler_settings(setting: Setting) -> Iterator[dict[str, Any]]:
    plain = Setting(length=setting.length)
    yield {"forecast": False, "max_step_ms": None, "step_seconds": 0.0}
    for each in fields(setting):
        if each.name != "length" and getattr(setting, each.name) != getattr(plain, each.name):
            yield {each.name: getattr(plain, each.name)}
    for depth in range(setting.depth):
        yield {"depth": depth}
    for rows in range(1, setting.rows):
        yield {"rows": rows}
    if len(setting.groups) > 1:
        yield from ({"groups": (group,)} for group in setting.groups)
    for blocks in (4, 6, 8, 12):
        yield {
            "groups": tuple(
                Group(group.block_size, min(blocks, group.num_blocks), group.window) for group in setting.groups
            )
        }
