"""The scheduler's log of decisions: what is told, that a wait is told once, that it stays small."""

from __future__ import annotations

from array import array
from dataclasses import replace

from headrace.config import CacheConfig, SchedulerConfig
from headrace.engine.core import create_scheduler
from headrace.engine.keyed_hash import KeyedHashExecutor, keyed_hash_info
from headrace.request import Request, SamplingParams
from headrace.scheduler.events import AbortRequest, AddRequest
from headrace.scheduler.roster import CAPACITY, DecisionLog
from headrace.scheduler.scheduler import Scheduler


def create(
    num_blocks: int = 8, max_num_seqs: int = 4, budget: int = 64, **config: bool
) -> tuple[Scheduler, KeyedHashExecutor]:
    info = keyed_hash_info(
        vocab_size=64, max_model_len=64, max_num_seqs=max_num_seqs, num_blocks=num_blocks, block_size=4
    )
    executor = KeyedHashExecutor(info, key=0)
    scheduler = SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, **config)
    return create_scheduler(executor, scheduler, CacheConfig(), frozenset(), b""), executor


def request(number: int, tokens: int, max_tokens: int = 4) -> AddRequest:
    prompt = array("i", [number * 7 % 60 + i % 3 for i in range(tokens)])
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return AddRequest(Request(request_id=number, prompt_token_ids=prompt, params=params, arrival_time=1.0))


def turn(scheduler: Scheduler, executor: KeyedHashExecutor, now: float, *events: AddRequest | AbortRequest) -> None:
    plan = scheduler.schedule(now, events)
    if plan is not None:
        scheduler.update(executor.collect(executor.submit(plan)), now)


def told(scheduler: Scheduler) -> list[tuple[str, int]]:
    return [(entry.kind, entry.request_id) for entry in scheduler.log.after(0)]


def test_admission_tells_the_prompt_what_was_cached_and_the_wait() -> None:
    scheduler, executor = create()
    turn(scheduler, executor, 1.5, request(1, 9))
    (entry,) = scheduler.log.after(0)
    assert (entry.kind, entry.request_id, entry.values, entry.time) == ("admitted", 1, (9, 0, 500_000), 1.5)
    assert not scheduler.log.after(entry.number)


def test_a_wait_for_blocks_is_told_once_and_then_the_admission() -> None:
    scheduler, executor = create(num_blocks=8)
    turn(scheduler, executor, 2.0, request(1, 24, max_tokens=6), request(2, 20))
    for _ in range(2):
        turn(scheduler, executor, 2.0)
    assert told(scheduler) == [("admitted", 1), ("waits_blocks", 2)]
    assert scheduler.log.after(1)[0].values == (20, 6, 8)
    while scheduler.has_work:
        turn(scheduler, executor, 3.0)
    assert told(scheduler)[-1] == ("admitted", 2)


def test_waits_for_rows_and_for_the_budget() -> None:
    scheduler, executor = create(max_num_seqs=1)
    turn(scheduler, executor, 1.0, request(1, 4), request(2, 4))
    assert told(scheduler) == [("admitted", 1), ("waits_rows", 2)]
    scheduler, executor = create(budget=8)
    turn(scheduler, executor, 1.0, request(1, 8), request(2, 4))
    assert told(scheduler) == [("admitted", 1), ("waits_budget", 2)]


def test_a_closed_batch_is_a_wait_too() -> None:
    scheduler, executor = create(continuous_batching=False)
    turn(scheduler, executor, 1.0, request(1, 4))
    turn(scheduler, executor, 1.0, request(2, 4))
    assert told(scheduler) == [("admitted", 1), ("waits_batch", 2)]


def test_preemption_and_return() -> None:
    scheduler, executor = create(num_blocks=6)
    turn(scheduler, executor, 1.0, request(1, 7, max_tokens=12), request(2, 7, max_tokens=12))
    while scheduler.has_work:
        turn(scheduler, executor, 1.0)
    kinds = [kind for kind, _ in told(scheduler)]
    assert "preempted" in kinds and "resumed" in kinds and kinds.index("preempted") < kinds.index("resumed")


def test_aborts_and_refusals() -> None:
    scheduler, executor = create()
    turn(scheduler, executor, 1.0, request(1, 4), request(2, 64))
    turn(scheduler, executor, 1.0, AbortRequest(1), AbortRequest(77))
    assert told(scheduler) == [("refused", 2), ("admitted", 1), ("aborted", 1)]


def test_the_log_is_bounded() -> None:
    log = DecisionLog()
    for number in range(3 * CAPACITY):
        log.add("aborted", number)
    entries = list(log.after(0))
    assert len(entries) == CAPACITY and entries[-1].number == 3 * CAPACITY


def test_an_entry_says_whose_request_it_is() -> None:
    """Also of one that was never let in, and of one that has left."""
    scheduler, executor = create(num_blocks=8)
    runs, refused = (
        replace(request(number, size).request, tenant=f"key{number}") for number, size in ((1, 9), (2, 900))
    )
    turn(scheduler, executor, 1.0, AddRequest(runs), AddRequest(refused))
    turn(scheduler, executor, 2.0, AbortRequest(1))
    assert [(entry.kind, entry.tenant) for entry in scheduler.log.after(0)] == [
        ("refused", "key2"), ("admitted", "key1"), ("aborted", "key1"),
    ]  # fmt: skip
