"""The checks of checks_core.py in their fast form, each with a planted defect that turns it red."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from tests.reliability import checks_core
from tests.support import simulation

from headrace.cache.block_pool import BlockPool
from headrace.cache.manager import CacheManager
from headrace.cache.prefix_tree import PrefixNode, PrefixTree
from headrace.engine.detokenizer import ByteDecoder
from headrace.engine.stops import StopMatcher
from headrace.scheduler import results
from headrace.scheduler.planner import Planner
from headrace.scheduler.queue import WaitingQueue
from headrace.scheduler.roster import Roster


def test_lives_from_seeds_keep_every_invariant_and_replay() -> None:
    checks_core.simulate(range(80))


def what_a_failed_step_was_to_write_can_be_found(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CacheManager, "fail", lambda self, step_id: None)


def rows_of_aborted_requests_are_lost(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Roster, "_give_back", lambda self, sequence: self.cache.free(sequence.kv, sequence.last_step))


def a_block_is_never_released(patch: pytest.MonkeyPatch) -> None:
    release = BlockPool.release
    patch.setattr(BlockPool, "release", lambda self, block: None if block == 3 else release(self, block))


def a_failed_step_is_taken_for_a_good_one(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Roster, "roll_back_all", lambda self, through: None)


def a_spoilt_row_is_not_noticed(patch: pytest.MonkeyPatch) -> None:
    accept = results._accept

    def deaf(roster: Any, sequence: Any, j: int, result: Any, scores: Any, now: float) -> Any:
        return accept(roster, sequence, -1 if j in result.errors else j, result, scores, now)

    patch.setattr(results, "_accept", deaf)


DEFECTS = (
    what_a_failed_step_was_to_write_can_be_found,
    rows_of_aborted_requests_are_lost,
    a_block_is_never_released,
    a_failed_step_is_taken_for_a_good_one,
)


@pytest.mark.parametrize("plant", DEFECTS, ids=lambda plant: plant.__name__)
def test_planted_defects_are_found_by_some_seed(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError, match="seed"):
        checks_core.simulate(range(200))


def test_a_run_that_depends_on_more_than_its_seed_does_not_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    moods = random.Random()
    born = simulation.born

    def moody(seed: int) -> simulation.Life:
        life = born(seed)
        life.rng = random.Random(moods.random())
        return life

    monkeypatch.setattr(simulation, "born", moody)
    with pytest.raises(AssertionError, match="does not replay"):
        checks_core.simulate([0, 10, 20])


def test_every_interleaving_of_a_small_world_ends() -> None:
    assert int(checks_core.exhaust().split()[0]) > 2000


def test_a_small_world_in_which_nobody_is_admitted_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Planner, "_plan_waiting", lambda self, plan, now, idle: None)
    with pytest.raises(AssertionError, match="no end after"):
        checks_core.exhaust(50)


def test_an_unusable_row_ends_its_own_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    checks_core.poisoned_rows(16)
    a_spoilt_row_is_not_noticed(monkeypatch)
    with pytest.raises((AssertionError, KeyError)):
        checks_core.poisoned_rows(1)


def test_aborts_at_every_moment_touch_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    checks_core.abort_everywhere((0, 2))
    rows_of_aborted_requests_are_lost(monkeypatch)
    with pytest.raises(AssertionError):
        checks_core.abort_everywhere((2,))


def test_a_crowd_that_leaves_the_queue_is_counted_out(monkeypatch: pytest.MonkeyPatch) -> None:
    checks_core.crowd_leaves(500)

    def discard_too_early(queue: WaitingQueue) -> None:
        queue._gone += 1
        if queue._gone > 64:
            queue._gone = 0

    monkeypatch.setattr(WaitingQueue, "discard", discard_too_early)
    with pytest.raises(AssertionError, match="said to wait"):
        checks_core.crowd_leaves(500)


def test_colliding_names_of_prefixes_change_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row 19: equality is decided by token ids; the hash is only a name, and all names may be equal."""
    monkeypatch.setattr(PrefixNode, "hash", property(lambda self: b"same"))
    checks_core.simulate(range(500, 530))
    checks_core.poisoned_rows(2)


def test_prefixes_compared_by_less_than_their_ids_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    walk = PrefixTree.walk

    def careless(self: PrefixTree, root: PrefixNode, tokens: bytes, key_bytes: int, max_nodes: int) -> list[PrefixNode]:
        found = walk(self, root, tokens, key_bytes, max_nodes)
        last = found[-1] if found else root
        return [*found, next(iter(last.children.values()))] if len(found) < max_nodes and last.children else found

    monkeypatch.setattr(PrefixTree, "walk", careless)
    with pytest.raises(AssertionError):
        checks_core.simulate(range(500, 560))


def test_a_storm_of_preemptions_passes() -> None:
    checks_core.preemption_storm(200)


def test_a_storm_without_progress_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Planner, "_plan_running", lambda self, plan: self.roster.running and self.roster.preempt_last())
    with pytest.raises(AssertionError):
        checks_core.preemption_storm(40)


def test_a_long_prompt_slows_others_by_a_bounded_factor() -> None:
    checks_core.long_prefill(20_000)
    with pytest.raises(AssertionError, match="beside the long prompt"):
        checks_core.long_prefill(20_000, budget=20_000)


def test_characters_are_never_split(monkeypatch: pytest.MonkeyPatch) -> None:
    checks_core.characters_split(3000)
    monkeypatch.setattr(ByteDecoder, "push", lambda self, ids: bytes(ids).decode("utf-8", "replace"))
    with pytest.raises(AssertionError):
        checks_core.characters_split(50)


def test_stop_strings_cut_at_their_earliest_end(monkeypatch: pytest.MonkeyPatch) -> None:
    checks_core.stops_cut(1500)
    flush = StopMatcher.flush
    monkeypatch.setattr(StopMatcher, "flush", lambda self: flush(self)[:-1])
    with pytest.raises(AssertionError):
        checks_core.stops_cut(200)
