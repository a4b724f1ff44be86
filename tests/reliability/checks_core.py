"""The checks that need no process: scheduler, cache and core under every order of events (rows 19, 23, 24, 25, 27, 28, 31, 32, 35).

What lives here: the checks, each in a size its caller picks; a check raises AssertionError or returns its figure in words.
What may not: pytest, sockets.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from tests.support import simulation
from tests.support.hash_engine import VOCAB, Answers, assert_at_rest, check_books, engine, expected, ids, request, run

from headrace.engine.core import EngineCore
from headrace.engine.detokenizer import ByteDecoder
from headrace.engine.executor import KeyedHashExecutor, Ticket, keyed_hash_info
from headrace.engine.stops import StopMatcher
from headrace.request import FinishReason, Request, SequenceStatus, StepPlan


def simulate(seeds: Iterable[int], events: int = 100) -> str:
    """Row 27: lives drawn from seeds; every tenth is lived twice and must leave the same trace."""
    count = turns = 0
    for seed in seeds:
        life = simulation.live(seed, events)
        count, turns = count + 1, turns + life.steps
        if seed % 10 == 0:
            again = simulation.live(seed, events)
            assert again.trace.digest() == life.trace.digest(), f"seed {seed} does not replay"
    return f"{count} seeds, {turns} turns of the loop, 0 broken invariants"


# --- row 28


MINI = [request(0, [1, 2, 3], max_tokens=2), request(1, [1, 2, 9], max_tokens=2), request(2, [5], max_tokens=3)]
Path = tuple[str, ...]


def _mini_engine() -> EngineCore:
    return engine(depth=1, num_blocks=4, block_size=2, max_num_seqs=3, budget=2, max_model_len=8)


def _walk(path: Path) -> EngineCore:
    core = _mini_engine()
    for action in path:
        _act(core, action)
    return core


def _act(core: EngineCore, action: str) -> None:
    kind, _, number = action.partition(" ")
    if kind == "add":
        core.add(MINI[int(number)])
    elif kind == "abort":
        core.abort(int(number))
    else:
        core.step()
        check_books(core)


def _state(core: EngineCore, path: Path) -> tuple[Any, ...]:
    """Everything that decides what can follow. Step numbers only count relative to the oldest step in flight."""
    scheduler = core.scheduler
    base = scheduler.in_flight[0].plan.step_id if scheduler.in_flight else scheduler._next_step
    sequences = [
        (s.request_id, s.status, s.num_tokens, s.num_computed_tokens, s.row, *s.token_ids, max(s.last_step - base, -1), *map(tuple, s.kv.tables))
        for s in scheduler.roster
    ]
    cached = tuple(sorted((node.key, tuple(node.blocks)) for node in scheduler.cache.tree.nodes()))
    plans = tuple((tuple(each.plan.rows), tuple(each.plan.starts), tuple(each.plan.counts)) for each in scheduler.in_flight)
    acted = frozenset(action for action in path if action != "step")
    leaving = tuple((step - base, group, block) for step, group, block in scheduler.cache._leaving)
    free = tuple(map(tuple, (pool._free for pool in scheduler.cache.pools)))
    return acted, tuple(sequences), cached, plans, leaving, free, tuple(map(repr, core._events)), tuple(scheduler.roster.free_rows)


def _choices(path: Path) -> list[str]:
    """What can happen next: the next request, a step, and one abort a request."""
    added = sum(action.startswith("add") for action in path)
    more = [f"add {added}"] if added < len(MINI) else []
    aborts = [f"abort {number}" for number in range(added) if f"abort {number}" not in path]
    return ["step", *more, *aborts]


def exhaust(limit: int = 1_000_000) -> str:
    """Row 28: every interleaving of three arrivals, three aborts and steps over four blocks and a budget of two; from each state all end."""
    seen: set[tuple[Any, ...]] = set()
    queue: deque[Path] = deque([()])
    while queue and len(seen) < limit:
        path = queue.popleft()
        for action in _choices(path):
            core = _walk((*path, action))
            state = _state(core, (*path, action))
            if state in seen:
                continue
            seen.add(state)
            _assert_ends(core, (*path, action))
            queue.append((*path, action))
    return f"{len(seen)} states{'' if not queue else ' (not all)'}, each ends"


def _assert_ends(core: EngineCore, path: Path) -> None:
    for _ in range(200):
        if not core.has_work:
            assert_at_rest(core)
            return
        core.step()
    raise AssertionError(f"no end after {' → '.join(path)}: {core.stats()}")


# --- rows 19, 23, 35


def _sixteen() -> list[Request]:
    return [request(number, [*range(1, 9), 20 + number], max_tokens=12) for number in range(16)]


def poisoned_rows(rounds: int) -> str:
    """Row 23: one unusable row of sixteen ends its own request with an error; the others' tokens are exact."""
    for number in range(rounds):
        info = keyed_hash_info(vocab_size=VOCAB, max_model_len=200, max_num_seqs=16, num_blocks=256, block_size=4)
        executor = simulation.FaultyExecutor(info, check=True)
        core = engine(executor=executor, info=info, depth=number % 3, max_num_seqs=16, budget=256)
        asked = _sixteen()
        for each in asked:
            core.add(each)
        answers = Answers()
        for _ in range(1 + number % 7):
            answers.take(core.step())
        executor.spoil_next = number % 16
        run(core, answers=answers)
        assert_at_rest(core)
        failed = [key for key, end in answers.finished.items() if end.reason is FinishReason.ERROR]
        assert len(failed) == 1 and len(answers.finished) == 16, failed
        for each in asked:
            found, wanted = answers.tokens.get((each.request_id, 0), []), expected(each)
            assert found == (wanted[: len(found)] if (each.request_id, 0) in failed else wanted)
    return f"{rounds} rounds, 1 of 16 ends with an error, 15 exact"


def abort_everywhere(depths: Sequence[int] = (0, 1, 2)) -> str:
    """Row 35: each request aborted before each step, twice, and again after its end; nobody else notices."""
    races = 0
    for depth in depths:
        for victim in range(4):
            for when in range(24):
                races += 1
                _race(depth, victim, when)
    return f"{races} races, 0 errors"


def _race(depth: int, victim: int, when: int) -> None:
    core = engine(depth=depth, num_blocks=14, max_num_seqs=4, budget=7)
    asked = [request(number, [*range(1, 7), 20 + number], max_tokens=6) for number in range(4)]
    for each in asked:
        core.add(each)
    answers = Answers()
    for turn in range(200):
        if turn >= when and turn % 5 in (0, 1):
            core.abort(victim)  # again and again, also long after its end
        if not core.has_work:
            break
        answers.take(each for each in core.step() if each.request_id != victim or turn < when)
        check_books(core)
    while core.has_work:
        core.step()
    assert_at_rest(core)
    for each in asked:
        if each.request_id != victim:
            assert answers.tokens[each.request_id, 0] == expected(each)


def crowd_leaves(count: int, seed: int = 34) -> str:
    """Row 34, without processes: hundreds wait, many leave in any order, between steps; the counts are right all the time."""
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
    """Row 31: KV for a quarter of what is asked; all end, nobody is pushed out more than ten times, and tokens come in every window of steps."""
    core = engine(depth=1, num_blocks=64, block_size=4, max_num_seqs=32, budget=128)  # 256 tokens; 32 running want 1,024
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
    """Row 32: the longest gap between tokens of 32 decoders while a long prompt is computed beside them, on the modelled device."""
    info = keyed_hash_info(vocab_size=VOCAB, max_model_len=tokens + 600, max_num_seqs=40, num_blocks=tokens // 16 + 2000, block_size=16)
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

CHARACTERS = ["a", "é", "ß", "漢", "한", "😀", "👩‍👩‍👧", "🇩🇪", "e\u0301", "\u200d", "\u2028", "\x85", "\x00", "ﬁ", "ـ", "\U0010ffff"]
BYTES = {index: bytes([index]) for index in range(256)}


def characters_split(cases: int, seed: int = 0) -> str:
    """Row 24: texts of every class of characters, and broken ones, cut into tokens anywhere: pieces add up, and no half character shows."""
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
    """Row 25: texts over a small alphabet, overlapping stop strings, every segmentation: cut at the earliest end, no prefix leaks."""
    rng, found = random.Random(seed), 0
    for _ in range(cases):
        alphabet = rng.choice(("ab", "aé漢", "ab😀 "))
        text = "".join(rng.choice(alphabet) for _ in range(rng.randint(0, 40)))
        stops = tuple({"".join(rng.choice(alphabet) for _ in range(rng.randint(1, 6))) for _ in range(rng.randint(1, 4))})
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
