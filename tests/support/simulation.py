"""One engine's life drawn from a seed: arrivals, aborts, cuts, failed steps and unusable rows, on a virtual clock.

What lives here: the drawing, the run with its invariants after every event, and the trace that a replay must repeat byte by byte.
What may not: how many seeds, planted defects (tests/reliability).
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass, field, replace

from tests.support.hash_engine import VOCAB, Answers, assert_at_rest, check_books, engine, expected, request

from headrace.config import CacheConfig
from headrace.engine.core import EngineCore
from headrace.engine.executor import KeyedHashExecutor, Ticket, keyed_hash_info
from headrace.request import FinishReason, Request, StepPlan, StepResult

LENGTH = 60
TRUNK = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3]
ENDS = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.ERROR)


class FaultyExecutor(KeyedHashExecutor):
    """Fails steps and spoils rows when told to, from the outside and once each."""

    fail_next = False
    spoil_next: int | None = None  # index among the sampled rows of the next step to be collected that has so many

    def submit(self, plan: StepPlan) -> Ticket:  # type: ignore[override]
        self._broken, self.fail_next = self._broken or self.fail_next, False
        return super().submit(plan)

    def collect(self, ticket: Ticket) -> StepResult:
        result = super().collect(ticket)
        if self.spoil_next is None or self.spoil_next >= len(result.tokens):
            return result
        spoilt, self.spoil_next = self.spoil_next, None
        return replace(result, errors={spoilt: "the logits of this row were not finite"})


@dataclass(slots=True)
class Life:
    """One run. ``steps`` are all turns of the loop; ``trace`` is a digest of everything that came out, in order."""

    seed: int
    core: EngineCore
    executor: FaultyExecutor
    rng: random.Random
    limit: int
    requests: dict[int, Request] = field(default_factory=dict)
    answers: Answers = field(default_factory=Answers)
    gone: set[int] = field(default_factory=set)
    cut: dict[tuple[int, int], int] = field(default_factory=dict)
    faults: int = 0
    spoilt: int = 0
    steps: int = 0
    trace: hashlib._Hash = field(default_factory=hashlib.sha256)

    def add(self) -> None:
        rng, number = self.rng, len(self.requests)
        prompt = TRUNK[: rng.randint(0, len(TRUNK))] + [rng.randrange(8, VOCAB) for _ in range(rng.randint(1, 10))]
        made = request(
            number,
            prompt[: self.limit - 1],
            max_tokens=rng.randint(1, 20),
            n=rng.choice((1, 1, 1, 2)),
            priority=rng.randint(0, 2),
            seed=rng.randrange(2**64),
            ignore_eos=rng.random() < 0.5,
            cache_salt=rng.choice(("", "other")),
            stop_token_ids=[rng.randrange(VOCAB) for _ in range(rng.choice((0, 0, 9)))],
        )
        self.requests[number] = made
        self.core.add(made)

    def abort(self) -> None:
        if self.requests:
            number = self.rng.choice(sorted(self.requests))
            for _ in range(self.rng.choice((1, 1, 2))):
                self.core.abort(number)
            self.gone.add(number)

    def stop(self) -> None:
        """A stop string was found somewhere in what has come so far."""
        live = sorted(key for key, tokens in self.answers.tokens.items() if tokens and key not in self.answers.finished and key not in self.cut)
        if live:
            key = self.rng.choice(live)
            self.cut[key] = self.rng.randint(1, len(self.answers.tokens[key]))
            self.core.finish(*key, self.cut[key])

    def fail(self) -> None:
        self.executor.fail_next = True
        self.faults += 1

    def spoil(self) -> None:
        self.executor.spoil_next = self.rng.randrange(3)
        self.spoilt += 1

    def turn(self) -> None:
        self.steps += 1
        outputs = self.core.step()
        for each in outputs:
            self.trace.update(repr((each.request_id, each.index, each.token_ids, each.finished)).encode())
        self.answers.take(each for each in outputs if each.request_id not in self.gone and (each.request_id, each.index) not in self.cut)
        check_books(self.core)


def born(seed: int) -> Life:
    """An engine whose sizes and switches the seed picks."""
    rng = random.Random(seed)
    rows, blocks, size = rng.choice((2, 4, 8)), rng.choice((16, 24, 64)), rng.choice((2, 4))
    info = keyed_hash_info(vocab_size=VOCAB, max_model_len=LENGTH, max_num_seqs=rows, num_blocks=blocks, block_size=size)
    executor = FaultyExecutor(info, check=True)
    core = engine(
        executor=executor,
        depth=rng.choice((0, 1, 2)),
        max_num_seqs=rows,
        budget=rng.choice((3, 8, 64)),
        info=info,
        scheduling_policy=rng.choice(("fcfs", "priority")),
        chunked_prefill=rng.random() < 0.8,
        max_logits_rows=4,
        cache=CacheConfig(enable_prefix_caching=rng.random() < 0.8, paged_allocation=rng.random() < 0.8),
    )
    return Life(seed, core, executor, rng, core.scheduler.max_sequence_tokens)


def live(seed: int, events: int = 100) -> Life:
    """A whole life: ``events`` things happen, then everybody ends. Raises AssertionError naming the seed."""
    life = born(seed)
    happenings = [life.turn] * 8 + [life.add] * 4 + [life.abort, life.stop, life.fail if seed % 3 == 0 else life.turn, life.spoil]
    try:
        for _ in range(events):
            life.rng.choice(happenings)()
        _end(life)
    except Exception as error:
        raise AssertionError(f"seed {seed}, turn {life.steps}: {type(error).__name__}: {error}") from error
    return life


def _end(life: Life) -> None:
    life.executor.fail_next, life.executor.spoil_next = False, None
    for _ in range(5000):
        if not life.core.has_work:
            break
        life.turn()
    assert_at_rest(life.core)
    for made in life.requests.values():
        if made.request_id not in life.gone:
            _check_answers(life, made)


def _check_answers(life: Life, made: Request) -> None:
    """Every choice ended once, and with the tokens that the request gets alone (or a beginning of them, where something ended it)."""
    for index in range(made.params.n):
        key = (made.request_id, index)
        found, ended = life.answers.tokens.get(key, []), life.answers.finished.get(key)
        if made.params.n > life.core.scheduler.limits.max_num_seqs:
            continue
        wanted = expected(made, index=index, max_model_len=life.limit)
        if key in life.cut:
            assert found == wanted[: len(found)], f"{key} is not a beginning of its answer"
            continue
        assert ended is not None, f"{key} never ended"
        assert ended.reason in ENDS
        whole = found == wanted if ended.reason is not FinishReason.ERROR else found == wanted[: len(found)]
        assert whole, f"{key}: {found} is not {wanted}"
        assert ended.reason is not FinishReason.ERROR or life.faults or life.spoilt, f"{key} ended with an error that nobody caused"
