"""The loads of ``python -m lab truth``: A, which prices are fitted to, and B, which they are held against. No part of B
is one of A.

A comes in servings, B is measured between them, so that a machine whose speed drifts is met by both alike:

    A   B   A   B   A

What lives here: the parts, and each as conversations and as a simulation's requests. What may
not: running them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from headrace.errors import ConfigError
from headrace.planner.workload.conversations import Conversation, conversations_of
from headrace.planner.workload.load import Lengths, LoadRequest, arriving, drawn

VOCAB = 1000  # ids of bench serve
_SETTLING_VOCAB = 700
_APART = 23  # ids fewer make other prompts
SERVINGS = 3  # of A
REPEATS = 2  # of B
LASTS, LASTS_CARD = 60.0, 3.0  # s: a part of B on a CPU, on a card
MOST_BURSTS = 8  # of one part in a row
FEWEST, MOST = 24, 800  # requests of such a part
QUICK, MOST_TIMES = (
    0.75,
    8.0,
)  # s that one request of A takes alone: quicker machines get A so many times as long, up to MOST_TIMES
FEWEST_ALONE = 6  # that come to an idle engine: fewer say nothing of a front end
OPEN_SHARE = 0.5  # of what a closed loop reaches: the rate of the open one
RESTING_SHARE = 0.4  # of the rate that one client alone gets: every request comes to an idle engine


@dataclass(frozen=True, slots=True)
class Part:
    """Requests of drawn lengths: ``clients`` at once, or ``rate`` arrivals a second (``even``: all gaps are equal).
    ``prefix``: tokens all of them begin with. Another ``vocabulary`` makes other ids of the same lengths, so that none
    is answered from the cache."""

    name: str
    count: int
    prompt: int
    output: int
    spread: float = 0.0
    clients: int | None = None
    rate: float | None = None
    even: bool = False
    prefix: int = 0
    seed: int = 0
    vocabulary: int = VOCAB
    times: int = 1  # in a row: a burst that is over at once says little
    stopped: bool = False  # the engine, until its front end has handed all on; no steps are of it

    def names(self, repeat: int) -> list[str]:
        """Of its runs."""
        return [f"b{repeat}.{self.name}{f'.{time}' if time else ''}" for time in range(self.times)]

    def each_time(self) -> list[Part]:
        """Other ids each time."""
        return [replace(self, vocabulary=self.vocabulary - _APART * time) for time in range(self.times)]

    @property
    def lengths(self) -> Lengths:
        return Lengths(self.prompt, self.output, self.spread)

    def asked(self) -> list[LoadRequest]:
        made = drawn(self.count, self.lengths, prefix=self.prefix, num_prefixes=1, seed=self.seed)
        burstiness = math.inf if self.even else 1.0
        return made if self.rate is None else arriving(made, self.rate, burstiness=burstiness, seed=self.seed)

    def conversations(self, salt: int, vocab_size: int) -> list[Conversation]:
        """``salt`` makes ids new, too; lengths and arrivals stay."""
        made = conversations_of(self.asked(), vocab_size=self.vocabulary, seed=self.seed)
        return [
            replace(
                each, turns=tuple(replace(turn, new_ids=_salted(turn.new_ids, salt, vocab_size)) for turn in each.turns)
            )
            for each in made
        ]

    @property
    def routes_alike(self) -> bool:
        """Whether random weights send its tokens to few experts: those of one prompt, or behind one."""
        return (self.room == 1 or self.prefix > 0) and not self.stopped

    @property
    def room(self) -> int | None:
        """Of a closed loop."""
        return None if self.rate is not None else self.clients or self.count

    def __str__(self) -> str:
        come = f"{self.rate:g} a second" if self.rate is not None else f"{self.room} at once"
        spread = f" ± {self.spread:.0%}" if self.spread else ""
        behind = f", behind {self.prefix}" if self.prefix else ""
        often = f", {self.times} times" if self.times > 1 else ""
        return f"{self.count} requests, {come}, {self.prompt} tokens in and {self.output} out{spread}{behind}{often}"


def _salted(ids: tuple[int, ...], salt: int, vocab_size: int) -> tuple[int, ...]:
    return tuple((each + salt) % vocab_size for each in ids)


ROWS = (  # of the table, whose prompts are of random ids too
    Part("prefill-1x2048", 1, 2048, 1, vocabulary=30_000),
    Part("prefill-1x8192", 1, 8192, 1, vocabulary=30_000),
    Part("prefill-16x2048", 16, 2048, 1, vocabulary=30_000),
)


@dataclass(frozen=True, slots=True)
class Loads:
    """``servings`` of A, ``held``: B. ``fronts``: parts of each serving whose requests come to an idle engine.
    ``timed``: B is as long as LASTS, not as LASTS_CARD."""

    servings: tuple[tuple[Part, ...], ...]
    held: tuple[Part, ...]
    fronts: tuple[str, ...]
    timed: bool
    scale: float

    @property
    def unstopped(self) -> Loads:
        kept = tuple(tuple(each for each in serving if not each.stopped) for serving in self.servings)
        return replace(self, servings=kept)


def loads_for(kind: str, scale: float) -> Loads:
    """For a device of that kind. ``scale`` multiplies requests. Raises ConfigError."""
    if not 0.0 < scale <= 100.0:
        raise ConfigError(f"--scale is {scale:g}; give a number above 0 and up to 100.")
    loads = _cpu_loads(scale) if kind == "cpu" else _card_loads(scale)
    servings = tuple(tuple(_scaled(each, scale) for each in serving) for serving in loads.servings)
    return replace(loads, servings=servings, held=tuple(_scaled(each, scale) for each in loads.held))


def _scaled(part: Part, scale: float) -> Part:
    clients = part.clients and (part.clients if part.clients < 4 else max(2, round(part.clients * min(1.0, scale))))
    fewest = FEWEST_ALONE if part.clients == 1 or part.even else 2
    return replace(part, count=max(min(part.count, fewest), round(part.count * scale)), clients=clients)


def repeated(held: Sequence[Part], repeat: int) -> list[Part]:
    """B once more: the same load of other ids. Every other time backwards, so that the middle of a part's two runs is
    the middle of all."""
    return [replace(part, vocabulary=VOCAB // (repeat + 1)) for part in (reversed(held) if repeat % 2 else held)]


def settling(held: Sequence[Part]) -> list[Part]:
    """B ahead of both: what a card captures when it comes again has come by then. In a simulation, too."""
    return [replace(part, times=1, vocabulary=_SETTLING_VOCAB) for part in held]


def sized(loads: Loads, reached: Mapping[str, float]) -> list[Part]:
    """B where loads that are not of a rate reach so many requests a second: open loops at a share of what a closed one
    does, and as many requests, or bursts, as last."""
    closed = next(part.name for part in loads.held if part.rate is None)
    rates = {
        part.name: None if part.rate is None else float(f"{OPEN_SHARE * reached[closed]:.3g}") for part in loads.held
    }
    found = [replace(part, rate=rates[part.name]) for part in loads.held]
    if not loads.timed:
        return [_lasting(part, reached.get(part.name, 0.0), loads.scale) for part in found]
    fewest, most = max(2, round(FEWEST * min(1.0, loads.scale))), round(MOST * max(1.0, loads.scale))
    lasting = {part.name: round(LASTS * loads.scale * (part.rate or reached[part.name])) for part in found}
    return [replace(part, count=min(max(lasting[part.name], fewest), most)) for part in found]


def _lasting(part: Part, reached: float, scale: float) -> Part:
    """On a card: at least as many requests as there are."""
    seconds = LASTS_CARD * min(1.0, scale)
    if part.rate is None and part.room == part.count:
        return replace(part, times=min(max(1, round(seconds * reached / part.count)), MOST_BURSTS))
    return replace(part, count=max(part.count, round(seconds * (part.rate or reached))))


def _cpu_loads(scale: float) -> Loads:
    held = (
        Part("closed", 24, 120, 20, 0.5, clients=4, seed=11),
        Part("open", 24, 100, 16, 0.5, rate=1.0, seed=12),
        Part("shared", 24, 30, 16, 0.5, clients=6, prefix=400, seed=13),
    )
    servings = tuple(tuple(_cpu_serving(100 * (number + 1))) for number in range(SERVINGS))
    return Loads(servings, held, ("single", "resting"), timed=True, scale=scale)


def _cpu_serving(seed: int) -> list[Part]:
    """Rests in the middle, where they shift the others least against B."""
    decode = [
        Part(f"decode-{clients}", clients, 12, 16, clients=clients, seed=seed + 2)
        for clients in (2, 3, 4, 6, 8, 12, 16)
    ]
    found = [Part("single", 10, 90, 6, 0.9, clients=1, seed=seed + 1), *decode[:4]]
    found += [Part("resting", 10, 90, 5, 0.9, rate=1.0, even=True, seed=seed + 5), *decode[4:]]
    return [
        *found,
        Part("long", 2, 700, 12, clients=2, seed=seed + 3),
        Part("mixed", 20, 150, 14, 0.9, clients=5, seed=seed + 4),
        *_handed_on(96, 480, seed + 6),
    ]


def _handed_on(count: int, prefix: int, seed: int) -> list[Part]:
    """Prompts that differ in length and hardly in what is computed."""
    short = Part("handed-short", count, 16, 1, seed=seed, stopped=True)
    return [short, replace(short, name="handed-long", prefix=prefix, seed=seed + 1)]


def suited(part: Part, alone_seconds: float) -> Part:
    """A part of A for a machine that one request takes so long: rests before each request where they come evenly, and
    longer answers or more requests on a quick one, whose steps would else be few and all from a part's beginning."""
    times = min(max(QUICK / alone_seconds, 1.0), MOST_TIMES)
    if part.stopped:
        return part
    if part.even:
        return replace(
            part, rate=float(f"{RESTING_SHARE / alone_seconds:.3g}"), count=round(part.count * min(times, 2.0))
        )
    if part.clients == part.count:
        return replace(part, output=round(part.output * times))
    return replace(part, count=round(part.count * min(times, 4.0)))


def _card_loads(scale: float) -> Loads:
    batches = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 72, 80, 96, 112, 128, 160, 192, 224, 256, 320)
    fitted = [Part(f"decode-{batch}", batch, 64, 24, seed=batch) for batch in batches]
    fitted += [
        Part(f"long-{batch}", batch, prompt, 24, seed=batch)
        for batch, prompt in ((1, 12000), (4, 8000), (16, 3000), (48, 1500), (128, 800))
    ]
    prompts = (8, 16, 40, 70, 100, 200, 300, 450, 700, 1100, 1600, 2500, 4000, 6000, 8000)
    fitted += [Part(f"prompt-{prompt}", 2, prompt, 2, clients=1, seed=prompt) for prompt in prompts]
    fitted += [Part("mixed", 150, 350, 80, 0.9, clients=48, seed=1), Part("open", 100, 500, 70, 0.9, rate=30.0, seed=3)]
    # steps so quick that a front end falls behind, and sends tokens of several at once
    fitted += [Part("stream-240", 240, 16, 120, seed=6), Part("shared", 96, 100, 30, prefix=1100, seed=4)]
    held = (
        Part("closed", 128, 1000, 120, 0.3, clients=64, seed=12),
        Part("open", 84, 700, 150, 0.5, rate=12.0, seed=11),
        Part("burst", 200, 256, 200, 0.5, seed=13),
        Part("shared", 160, 64, 64, prefix=2048, seed=14),
    )
    # Last of the first serving: before, an engine that finds itself idle still captures graphs ahead.
    single = (Part("single", 10, 300, 6, 0.9, clients=1, seed=5),)
    return Loads(
        tuple(
            (*fitted[number::SERVINGS], *_handed_on(200, 2032, 50 + 2 * number), *(() if number else single))
            for number in range(SERVINGS)
        ),
        held,
        ("single",),
        timed=False,
        scale=scale,
    )
