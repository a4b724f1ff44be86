"""Forgetting cached prefixes: what begins later finds nothing, what runs goes on unharmed, and no block is lost."""

from __future__ import annotations

import pytest

from headrace.config import CacheConfig, SchedulerConfig
from headrace.engine.core import create_scheduler
from tests.support.hash_engine import assert_at_rest, engine, expected, plans_of, request, run
from tests.support.journal import Journal, replay

PROMPT = list(range(20, 60))


@pytest.mark.parametrize("window", [None, 12])
def test_an_idle_engine_forgets_everything(window: int | None) -> None:
    core = engine(window=window)
    for number in range(2):
        core.add(request(number, PROMPT, cache_salt="other" if number else ""))
    run(core)
    assert core.stats().num_cached_blocks and list(core.scheduler.cache.tree.nodes())
    core.forget_prefixes()
    assert core.has_work and not core.settled
    core.step()
    assert core.settled and not core.has_work
    cache = core.scheduler.cache
    assert core.stats().num_cached_blocks == 0 and not list(cache.tree.nodes()) and len(cache.tree._roots) == 0
    core.add(request(2, PROMPT))
    assert run(core).cached[2, 0] == 0
    core.add(request(3, PROMPT))
    assert run(core).cached[3, 0] > 0, "and caches again from then on"
    assert_at_rest(core)


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("steps", [1, 3, 9])
def test_those_that_run_go_on_and_hand_nothing_down(depth: int, steps: int) -> None:
    """Nor do their later blocks count as a prefix: they depend on what was to be forgotten."""
    core = engine(depth=depth)
    asked = [request(0, PROMPT, max_tokens=40, n=2, seed=3), request(1, PROMPT[:30], max_tokens=40)]
    for each in asked:
        core.add(each)
    for _ in range(steps):
        core.step()
    core.forget_prefixes()
    core.step()
    while not core.settled:
        core.step()
    assert not list(core.scheduler.cache.tree.nodes())
    core.add(request(2, PROMPT, max_tokens=4))
    answers = run(core)
    assert answers.cached[2, 0] == 0
    for each in asked:
        for index in range(each.params.n):
            got = answers.tokens[each.request_id, index]
            assert got == expected(each, index=index)[-len(got) :] and answers.finished[each.request_id, index]
    names = {len(node.key) for node in core.scheduler.cache.tree.nodes()}
    assert names, "what began afterwards is remembered"
    core.add(request(3, [*PROMPT, *expected(asked[0])], max_tokens=2))
    assert run(core).cached[3, 0] <= len(PROMPT) + 4, "of the answer that was under way nothing is"
    assert_at_rest(core)


def test_one_that_is_pushed_out_and_starts_over_is_remembered_again() -> None:
    core = engine(num_blocks=24, max_num_seqs=4)
    asked = [request(number, PROMPT[: 30 + number], max_tokens=30) for number in range(3)]
    for each in asked:
        core.add(each)
    for _ in range(3):
        core.step()
    core.forget_prefixes()
    answers = run(core)
    assert core.stats().counters.preemptions
    assert all(answers.finished[number, 0] for number in range(3)) and core.stats().num_cached_blocks
    assert_at_rest(core)


def test_a_journal_with_it_replays() -> None:
    core = engine(depth=1)
    journal = Journal.of(core.scheduler)
    plans = plans_of(core)
    for number in range(4):
        core.add(request(number, PROMPT[: 20 + number], max_tokens=20))
        core.step()
        core.forget_prefixes()
    run(core)
    fresh = create_scheduler(
        core.executor, SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64), CacheConfig(), frozenset({7}), b""
    )
    assert [plan for plan in replay(journal, fresh) if plan is not None] == plans
    assert_at_rest(core)
