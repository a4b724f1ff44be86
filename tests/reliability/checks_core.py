"""The checks that need no process: scheduler, cache and core under every order of events (rows 23, 24, 25, 27, 31, 32,
34, 35).

What lives here: the checks, each in a size its caller picks; a check raises AssertionError or returns its figure in
words. What may not: pytest, sockets.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import product

from headrace.engine.core import EngineCore
from headrace.engine.executor import Ticket
from headrace.engine.keyed_hash import KeyedHashExecutor, keyed_hash_info
from headrace.engine.output import ByteDecoder, StopMatcher
from headrace.request import SequenceStatus, StepPlan
from tests.support.hash_engine import VOCAB, Answers, assert_at_rest, engine, expected, ids, request
from tests.support.simulation.life import Lived, live
from tests.support.simulation.schedule import TURN, Abort, Add, Asked, Event, Group, Schedule, Setting, Spoil
from tests.support.simulation.sweep import sweep


def simulate(seeds: Iterable[int], events: int = 500, jobs: int = 1) -> str:
    """Row 27: lives drawn from seeds, with a look at everything after each event."""
    done = sweep(seeds, events=events, jobs=jobs)
    assert not done.failures, f"seeds {sorted(done.failures)[:10]}: {next(iter(done.failures.values()))}"
    return f"{done.lives} seeds, {done.events} events, {done.turns} turns of the loop, 0 broken invariants"


def held(setting: Setting, events: Iterable[Event]) -> Lived:
    """A schedule that was made by hand; everything that is looked at after each event must hold."""
    outcome = live(Schedule("by hand", setting, tuple(events)))
    assert isinstance(outcome, Lived), str(outcome)
    return outcome


# --- rows 23, 35


def poisoned_rows(rounds: int) -> str:
    """Row 23: one unusable row of sixteen ends its own request with an error; the others' tokens are exact."""
    setting = Setting(rows=16, groups=(Group(4, 256),), length=200, budget=256)
    asked = [Add(number, Asked(prompt=(*range(1, 9), 20 + number), max_tokens=12)) for number in range(16)]
    for number in range(rounds):
        lived = held(replace(setting, depth=number % 3), (*asked, *[TURN] * (1 + number % 7), Spoil(number % 16)))
        assert (lived.seen["error"], lived.seen["length"]) == (1, 15), lived.seen
    return f"{rounds} rounds, 1 of 16 ends with an error, 15 exact"


def abort_everywhere(depths: Sequence[int] = (0, 1, 2)) -> str:
    """Row 35: each request aborted before each step, again and again, also after its end; nobody else notices."""
    setting = Setting(rows=4, groups=(Group(4, 14),), length=200, budget=7)
    asked = [Add(number, Asked(prompt=(*range(1, 7), 20 + number), max_tokens=6)) for number in range(4)]
    races = 0
    for depth, victim, when in product(depths, range(4), range(24)):
        gone = Abort(victim)
        lived = held(replace(setting, depth=depth), (*asked, *[TURN] * when, gone, TURN, gone, *[TURN] * 4, gone))
        assert lived.seen["length"] >= 3, lived.seen
        races += 1
    return f"{races} races, 0 errors"


def crowd_leaves(count: int, seed: int = 34) -> str:
    """Row 34, without processes: hundreds wait, many leave in any order, between steps; the counts are right all the
    time."""
    rng = random.Random(seed)
    core = engine(depth=1, num_blocks=32, max_num_seqs=4, budget=16)
    live = set(range(count))
    for number in live:
        core.add(request(number, [number % 300 + 8], max_tokens=3))
    while core.has_work:
        for each in core.step():
            live -= {each.request_id} if each.finished is not None else set()
        for number in rng.sample(sorted(live), min(len(live), rng.choice((0, 1, 20)))):
            core.abort(number)
        waiting = sum(sequence.status is SequenceStatus.WAITING for sequence in core.scheduler.roster)
        assert core.scheduler.num_waiting == waiting, f"{core.scheduler.num_waiting} are said to wait, {waiting} do"
    assert_at_rest(core)
    return f"{count} requests, most of which left while they waited"


# --- rows 31, 32


def preemption_storm(count: int) -> str:
    """Row 31: KV for a quarter of what is asked; all end, nobody is pushed out more than ten times, and tokens come in
    every window of steps."""
    core = engine(
        depth=1, num_blocks=64, block_size=4, max_num_seqs=32, budget=128
    )  # 256 tokens; 32 running want 1,024
    asked = [request(number, [1, 2, number % 97 + 8, number % 89 + 8], max_tokens=28) for number in range(count)]
    for each in asked:
        core.add(each)
    answers, quiet, longest = Answers(), 0, 0
    while core.has_work:
        outputs = core.step()
        quiet = 0 if any(each.token_ids for each in outputs) else quiet + 1
        longest = max(longest, quiet)
        answers.take(outputs)
        assert quiet < 50, f"no token in {quiet} steps"
    assert_at_rest(core)
    worst = max(end.num_preemptions for end in answers.finished.values())
    assert len(answers.finished) == count and worst <= 10, f"{len(answers.finished)} ended, {worst} preemptions"
    for each in asked[:: max(1, count // 50)]:
        assert answers.tokens[each.request_id, 0] == expected(each)
    total = core.stats().counters.preemptions
    assert total > count // 20, f"only {total} preemptions: this was no storm"
    return f"{count} requests, {total} preemptions, at most {worst} of one request, at most {longest} steps without a token"


class Priced(KeyedHashExecutor):
    """Takes time as a device does: a constant for reading weights, and a share for every token."""

    BASE, TOKEN = 0.010, 0.00002  # seconds: a decode step of 10 ms, 50,000 prompt tokens a second

    def submit(self, plan: StepPlan) -> Ticket:  # type: ignore[override]
        self._device_time = self.BASE + self.TOKEN * plan.num_tokens
        return super().submit(plan)


def long_prefill(tokens: int, budget: int = 1024) -> str:
    """Row 32: the longest gap between tokens of 32 decoders while a long prompt is computed beside them, on the
    modelled device."""
    info = keyed_hash_info(
        vocab_size=VOCAB, max_model_len=tokens + 600, max_num_seqs=40, num_blocks=tokens // 16 + 2000, block_size=16
    )
    core = engine(info=info, executor=None, max_num_seqs=40, budget=budget)
    core.executor = Priced(info, clock=core.clock)
    for number in range(32):
        core.add(request(number, [number + 8], max_tokens=400))
    for _ in range(20):
        core.step()
    alone = _gap(core, 20)
    core.add(request(99, ids(8 + i % 300 for i in range(tokens)), max_tokens=2))
    beside = _gap(core, tokens // budget + 5)
    assert beside <= 3 * alone, f"{beside * 1000:.1f} ms beside the long prompt, {alone * 1000:.1f} ms without"
    return f"{beside * 1000:.1f} ms a token beside a prompt of {tokens} tokens, {alone * 1000:.1f} ms alone ({beside / alone:.1f}×, modelled device)"


def _gap(core: EngineCore, steps: int) -> float:
    """The longest time between two tokens of any decoder."""
    last = dict.fromkeys(range(32), core.clock.now())
    longest = 0.0
    for _ in range(steps):
        for each in core.step():
            if each.token_ids and each.request_id < 32:
                longest = max(longest, core.clock.now() - last[each.request_id])
                last[each.request_id] = core.clock.now()
    return longest


# --- rows 24, 25

CHARACTERS = [
    "a",
    "é",
    "ß",
    "漢",
    "한",
    "😀",
    "👩‍👩‍👧",
    "🇩🇪",
    "e\u0301",
    "\u200d",
    "\u2028",
    "\x85",
    "\x00",
    "ﬁ",
    "ـ",
    "\U0010ffff",
]
BYTES = {index: bytes([index]) for index in range(256)}


def characters_split(cases: int, seed: int = 0) -> str:
    """Row 24: texts of every class of characters, and broken ones, cut into tokens anywhere: pieces add up, and no half
    character shows."""
    rng = random.Random(seed)
    for _ in range(cases):
        text = "".join(rng.choice(CHARACTERS) for _ in range(rng.randint(1, 12)))
        data, broken = text.encode(), rng.random() < 0.3
        if broken:
            at = rng.randrange(len(data))
            data = data[:at] + bytes([rng.randrange(128, 256)]) + data[at + rng.randint(0, 2) :]
        pieces = decoded(data, rng)
        joined = "".join(pieces)
        assert joined == data.decode("utf-8", "replace"), data
        assert broken or "\ufffd" not in joined
        assert not any("\ud800" <= character <= "\udfff" for piece in pieces for character in piece)
    return f"{cases} texts"


def decoded(data: bytes, rng: random.Random) -> list[str]:
    decoder, pieces, at = ByteDecoder(BYTES), [], 0
    while at < len(data):
        count = rng.randint(1, 3)
        pieces.append(decoder.push(list(data[at : at + count])))
        at += count
    return [*pieces, decoder.flush()]


def stops_cut(cases: int, seed: int = 0) -> str:
    """Row 25: texts over a small alphabet, overlapping stop strings, every segmentation: cut at the earliest end, no
    prefix leaks."""
    rng, found = random.Random(seed), 0
    for _ in range(cases):
        alphabet = rng.choice(("ab", "aé漢", "ab😀 "))
        text = "".join(rng.choice(alphabet) for _ in range(rng.randint(0, 40)))
        stops = tuple(
            {"".join(rng.choice(alphabet) for _ in range(rng.randint(1, 6))) for _ in range(rng.randint(1, 4))}
        )
        include = rng.random() < 0.3
        wanted = earliest(text, stops, include)
        assert matched(text, stops, include, rng) == wanted, (text, stops, include)
        assert matched(text, stops, include, rng) == wanted, (text, stops, include)
        found += wanted[1] is not None
    assert cases // 4 < found < cases
    return f"{cases} texts, {found} with a stop string"


def earliest(text: str, stops: Sequence[str], include: bool) -> tuple[str, str | None]:
    """The definition, by trying every end: the stop that is complete first, of two at one place the longer."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def matched(text: str, stops: tuple[str, ...], include: bool, rng: random.Random) -> tuple[str, str | None]:
    """What a client sees when the text comes in random pieces; nothing that was shown is ever taken back."""
    matcher, shown, at = StopMatcher(stops, include), "", 0
    while at < len(text):
        count = rng.randint(1, 5)
        piece, stop = matcher.push(text[at : at + count], True)
        shown += piece
        if stop is not None:
            return shown, stop
        at += count
    return shown + matcher.flush(), None
