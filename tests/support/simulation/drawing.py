"""Schedules drawn from seeds: an engine's sizes and switches, and what happens to it.

Load is drawn relative to what the engine can do, so that queues form and drain again; quiet stretches let steps become
alike; bursts fill the cache; prompts share beginnings and go on from answers.

What lives here: the drawing. What may not: running anything.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice

from headrace.scheduler.policies import POLICIES
from tests.support.simulation.houses import draw_house
from tests.support.simulation.oracle import ADAPTERS, VOCAB, Line, chain
from tests.support.simulation.schedule import (
    TURN,
    Abort,
    Add,
    Asked,
    Damage,
    Delay,
    Disconnect,
    Event,
    Fail,
    Finish,
    Group,
    Jump,
    Load,
    Look,
    Rebuild,
    Schedule,
    Setting,
    Spoil,
    Unload,
)

LENGTH = 48
BY_LENGTH = (
    4  # of so many lives in one most answers end by length alone, so that sequences decode side by side for long
)
TRUNKS = ((3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3), (2, 7, 1, 8, 2, 8, 1, 8, 2, 8, 4, 5, 9, 0, 4, 5))
MEAN_PROMPT, MEAN_ANSWER = 13, 8


def draw(seed: int, events: int = 500, policy: str | None = None) -> Schedule:
    """The schedule of this seed; ``policy``: instead of the one it draws."""
    rng = random.Random(seed)
    setting = draw_setting(rng, policy)
    if setting.replicas:
        return Schedule(f"seed {seed}, {events} events", *draw_house(random.Random(f"house {seed}"), events))
    schedule = Schedule(f"seed {seed}, {events} events", setting, _Story(rng, setting, events).write())
    if setting.adapters:
        rng = random.Random(f"adapters of {schedule.name}")
        adapted = (_with_adapter(rng, event) if isinstance(event, Add) else event for event in schedule.events)
        schedule = replace(schedule, events=tuple(islice(_with_operator(rng, setting, adapted), events)))
    if seed % BY_LENGTH:
        return schedule
    rng = random.Random(schedule.name)
    return replace(
        schedule, events=tuple(_by_length(rng, event) if isinstance(event, Add) else event for event in schedule.events)
    )


def _with_adapter(rng: random.Random, event: Add) -> Add:
    return Add(event.number, _with(event.asked, {"adapter": rng.choice((None, *ADAPTERS))}))


def _with_operator(rng: random.Random, setting: Setting, events: Iterable[Event]) -> Iterator[Event]:
    """Where not all of them are there from the start, somebody loads adapters and unloads them, and disks fail."""
    for event in events:
        yield event
        if not setting.held:
            continue
        drawn, name = rng.random(), rng.choice(ADAPTERS)
        if drawn < 0.03:
            yield Unload(name)
        if drawn < 0.02:
            yield Load(name, fresh=rng.random() < 0.5)
        elif drawn > 0.995:
            yield Damage()
        elif drawn > 0.97:
            yield Load(name, fresh=False)


def _by_length(rng: random.Random, event: Add) -> Add:
    changes: dict[str, object] = {"compiles": None, "refused": False}
    if rng.random() < 0.9:
        changes |= {"ignore_eos": True, "stops": (), "loops": False, "logprobs": None}
    if rng.random() < 0.15:
        changes |= {"max_tokens": 40, "min_tokens": 0}
    return Add(event.number, _with(event.asked, changes))


def draw_setting(rng: random.Random, policy: str | None = None) -> Setting:
    def mostly(chance: float) -> bool:
        return rng.random() < chance

    drawn, step_seconds, chunked = rng.choice(tuple(POLICIES)), rng.choice((0.0, 0.01, 0.15)), mostly(0.8)
    forecast, kv_caching = step_seconds > 0 and mostly(0.7), mostly(0.93)
    bounded = forecast and chunked and kv_caching and mostly(0.3)
    own = random.Random(
        f"drafts of {drawn} {rng.getstate()[1][:4]}"
    )  # what is drawn with ``rng`` stays what it was without drafts
    return Setting(
        depth=rng.choice((0, 1, 2)),
        rows=rng.choice((2, 3, 4, 8)),
        groups=_draw_groups(rng),
        length=LENGTH,
        budget=rng.choice((1, 3, 8, 16, 64)),
        logits_rows=rng.choice((2, 4, 64)),
        policy=policy or drawn,
        forecast=forecast,
        max_step_ms=1e3 * step_seconds * rng.choice((0.6, 1.0, 3.0)) if bounded else None,
        weighted=mostly(0.3),
        chunked_prefill=chunked,
        continuous_batching=mostly(0.85),
        prefix_caching=mostly(0.85),
        paged_allocation=mostly(0.85),
        kv_caching=kv_caching,
        padded=mostly(0.1),
        drafts=own.choice((0, 0, 1, 2, 4, 7)),
        acceptance=own.choice((0.0, 0.4, 0.7, 0.9, 1.0)),
        automatic=own.random() < 0.4,
        adapters=own.choice((0, 0, 1, 2, 3)),
        own_blocks=own.choice((0, 0, 0, 9)),
        held=own.choice((0, 1, 2, 3)),
        reads=own.choice((0, 0, 1, 6)),
        replicas=own.choice((0,) * 19 + (2,)),
        ranks=own.random() < 0.15,
        step_seconds=step_seconds,
        settled=mostly(0.5),
        journalled=mostly(0.1),
    )


def _draw_groups(rng: random.Random) -> tuple[Group, ...]:
    """Caches for less than one long request up to several; windows alone and beside full attention, in blocks of their
    own size."""
    size, share = rng.choice((2, 4, 8)), rng.choice((0.6, 1.0, 1.0, 1.7, 3.0))
    blocks = max(4, int(LENGTH * share) // size)
    window = rng.choice((None, None, None, 6, 9))
    if window is None:
        return (Group(size, blocks),)
    if rng.random() < 0.5:
        return (Group(size, blocks, window),)
    return (Group(size, blocks), Group(4, max(6, int(LENGTH * share) // 4), window))


@dataclass(slots=True)
class _Story:
    rng: random.Random
    setting: Setting
    length: int
    asked: list[Asked] = field(default_factory=list)
    came: list[int] = field(default_factory=list)  # the turns before each
    turns: int = 0
    rate: float = 0.0  # of arrivals for each other event
    calm: float = 0.0  # the rate over all
    left: int = 0  # events of the stretch
    trouble: float = 0.1  # share of events that are neither turns nor arrivals

    def write(self) -> tuple[Event, ...]:
        rng = self.rng
        self.calm, self.trouble = (
            _capacity(self.setting) * rng.choice((0.4, 0.8, 1.0, 1.3)),
            rng.choice((0.02, 0.08, 0.2)),
        )
        events: list[Event] = []
        while len(events) < self.length:
            if self.left <= 0:
                self._begin_stretch()
            self.left -= 1
            drawn = rng.random()
            if drawn < self.rate:
                events.append(self._arrival())
            elif drawn > 1.0 - self.trouble and self.asked:
                events.append(self._trouble())
            else:
                events.append(TURN)
                self.turns += 1
        return tuple(events)

    def _begin_stretch(self) -> None:
        self.left, factor = self.rng.choice(((10, 1.0), (40, 1.0), (25, 0.0), (8, 5.0)))
        self.rate = min(0.8, self.calm * factor)

    def _recent(self) -> int:
        """A number that is likely to be live, sometimes one that is long gone or never came."""
        rng, count = self.rng, len(self.asked)
        return rng.randrange(count + 1) if rng.random() < 0.1 else max(0, count - 1 - int(rng.expovariate(0.25)))

    def _answered(self) -> int:
        """A number that is likely to have got some tokens and to want more."""
        count = len(self.asked)
        likely = [
            n
            for n in range(max(0, count - 16), count)
            if 2 <= self.turns - self.came[n] <= 2 * self.asked[n].max_tokens
        ]
        return self.rng.choice(likely) if likely else self._recent()

    def _trouble(self) -> Event:
        rng, kind = self.rng, self.rng.randrange(20)
        if kind < 4:
            return Abort(rng.choice((self._recent, self._answered))())
        if kind < 10:
            return Finish(self._answered(), rng.choice((0, 0, 0, 0, 1)), rng.randint(1, 12))
        if kind < 11:
            return Fail(rng.random() < 0.5)
        if kind < 12:
            return Spoil(rng.randrange(3))
        if kind < 14:
            return Delay(rng.choice((0.001, 0.1, 5.0)))
        if kind < 16:
            return Jump(rng.choice((0.0, 0.05, 1.0, 60.0, 86_400.0, -0.01, -1.0, -60.0)))
        if kind < 17 and not self.setting.journalled:  # a journal knows nothing of rows
            return Rebuild()
        return Look(self._recent()) if kind < 19 else Disconnect(rng.randrange(4))

    def _arrival(self) -> Event:
        asked = self._ask()
        self.asked.append(asked)
        self.came.append(self.turns)
        return Add(len(self.asked) - 1, asked)

    def _ask(self) -> Asked:
        rng = self.rng
        prompt, odd = self._prompt(), rng.random()
        max_tokens = rng.choice((1, 2, 4, 8, 8, 12, 24))
        plain = Asked(
            prompt=prompt,
            max_tokens=max_tokens,
            priority=rng.randrange(3),
            seed=rng.getrandbits(64),
            ignore_eos=rng.random() < 0.5,
            salt=rng.choice(("", "", "", "other")),
            client=rng.randrange(4),
            tenant=rng.choice(("a", "a", "b", "c")),
            ttft=rng.choice((None, None, 0.05, 1.0)),
            tpot=rng.choice((None, None, 0.02, 0.5)),
            reading_speed=rng.choice((None, None, 4.0, 50.0)),
            stamp=rng.choice((0.0, 0.0, -0.3, 0.2)),
        )
        return plain if odd < 0.5 else _with(plain, _oddity(rng, odd, max_tokens))

    def _prompt(self) -> tuple[int, ...]:
        """A trunk, or what was asked before with the beginning of its answer; and something of its own."""
        rng = self.rng
        own = tuple(rng.randrange(VOCAB) for _ in range(rng.choice((1, 1, 2, 4, 9))))
        if self.asked and rng.random() < 0.15:
            before = self.asked[self._recent() % len(self.asked)]
            return (*before.prompt, *_answer(before, rng.randint(1, 8)), *own)[: LENGTH - 1]
        trunk = rng.choice(TRUNKS)
        return trunk[: rng.randint(0, len(trunk))] + own


def _oddity(rng: random.Random, odd: float, max_tokens: int) -> dict[str, object]:
    """What a few requests have."""
    if odd < 0.62:
        return {"n": rng.choice((2, 2, 3))}
    if odd < 0.74:
        return {"compiles": rng.choice((0, 0, 1, 5)), "refused": rng.random() < 0.1}
    if odd < 0.80:
        return {"scored": True}
    if odd < 0.85:
        return {"logprobs": rng.choice((0, 2))}
    if odd < 0.96:
        return {"stops": tuple(rng.sample(range(VOCAB), 8)), "min_tokens": min(max_tokens, rng.choice((0, 0, 3)))}
    if odd < 0.98:
        return {"only": rng.randrange(VOCAB), "loops": True, "max_tokens": 40, "min_tokens": rng.choice((0, 0, 30))}
    return {"adapter": "one"} if odd < 0.99 else {"prompt": (5,) * rng.choice((0, 60))}


def _with(asked: Asked, changes: dict[str, object]) -> Asked:
    return Asked(**{name: changes.get(name, getattr(asked, name)) for name in Asked.__slots__})  # type: ignore[arg-type]


def _answer(asked: Asked, count: int) -> list[int]:
    """The first tokens of the answer, as the request alone would get it."""
    line = Line(asked, 0, chain(asked.prompt), LENGTH)
    for _ in range(count):
        token, end = line.expect()
        if token < 0:
            break
        line.take(token)
        if end is not None:
            break
    return list(line.tokens)


def _capacity(setting: Setting) -> float:
    """Requests a turn that this engine can serve, about."""
    tokens, room = MEAN_PROMPT + MEAN_ANSWER, min(group.block_size * group.num_blocks for group in setting.groups)
    rows = min(setting.rows, max(1.0, room / tokens))
    rate = min(rows / (MEAN_ANSWER + 2), setting.budget / tokens)
    slow = (
        (1.0 if setting.continuous_batching else 0.6)
        * (1.0 if setting.kv_caching else 0.5)
        * (0.5 if setting.padded else 1.0)
    )
    return rate * slow
