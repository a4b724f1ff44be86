"""Defects of the control plane, planted one at a time: what the runner must find, and how soon it does.

What lives here: the defects, finding them, the rows of the table in docs/testing.md. What may not: invariants.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from textwrap import shorten
from typing import Any

import pytest

from headrace.cache.adapters import AdapterBlocks
from headrace.cache.block_pool import PrefixNode, PrefixTree
from headrace.cache.manager import CacheManager, SequenceKV, TableEdits
from headrace.engine.core import EngineCore
from headrace.lora.registry import AdapterRegistry, Registered
from headrace.parallel import frames
from headrace.request import StepPlan
from headrace.scheduler import scheduler
from headrace.scheduler import scheduler as results
from headrace.scheduler.plan_builder import Cohort, PlanBuilder
from headrace.scheduler.roster import NEVER, Roster, Sequence, WaitingQueue
from headrace.scheduler.step_planner import StepPlanner
from tests.support.simulation.broken import Broken
from tests.support.simulation.desk import WatchedDesk
from tests.support.simulation.drawing import draw
from tests.support.simulation.exhaust import explore
from tests.support.simulation.life import Failure
from tests.support.simulation.schedule import Add, Event, Schedule, _changed
from tests.support.simulation.shrinking import shrink
from tests.support.simulation.sweep import find

Patch = pytest.MonkeyPatch
Plant = Callable[[Patch], None]


# --- blocks


def a_reference_is_leaked(patch: Patch) -> None:
    """The block that was copied on write is not let go of."""

    def copy_block(
        self: CacheManager, kv: SequenceKV, group: int, index: int, row: int, edits: TableEdits, step_id: int
    ) -> None:
        block, own = kv.tables[group][index], self.pools[group].allocate()
        assert block is not None
        edits.copy(group, block, own)
        edits.set(row, group, index, own)
        kv.tables[group][index] = own

    patch.setattr(CacheManager, "_copy_block", copy_block)


def a_block_is_freed_in_flight(patch: Patch) -> None:
    """Blocks return to their pool at once, though a step in flight still uses them."""
    patch.setattr(CacheManager, "_leave", lambda self, last_step, group, block: self.pools[group].release(block))


def a_prefix_is_registered_too_early(patch: Patch) -> None:
    """A prompt's next block is named with the chunk that only reaches it."""
    link = CacheManager.link

    def early(self: CacheManager, kv: SequenceKV, ids: Any, num_tokens: int, step_id: int | None) -> None:
        covered = min(len(ids), kv.capacity, num_tokens + 1)
        link(self, kv, ids, covered, step_id)

    patch.setattr(CacheManager, "link", early)


def a_row_edit_is_forgotten(patch: Patch) -> None:
    """The worker is not told of the block that a sequence got by copy on write."""
    copy_block = CacheManager._copy_block

    def silent(
        self: CacheManager, kv: SequenceKV, group: int, index: int, row: int, edits: TableEdits, step_id: int
    ) -> None:
        copy_block(self, kv, group, index, row, edits, step_id)
        for column in (edits.row, edits.group, edits.index, edits.block):
            column.pop()

    patch.setattr(CacheManager, "_copy_block", silent)


def what_a_failed_step_was_to_write_can_be_found(patch: Patch) -> None:
    patch.setattr(CacheManager, "fail", lambda self, step_id: None)


def prefixes_are_found_across_salts(patch: Patch) -> None:
    patch.setattr(PrefixTree, "find_root", lambda self, salt, adapter: next(iter(self._roots.values()), None))


def prefixes_are_compared_by_less_than_their_ids(patch: Patch) -> None:
    walk = PrefixTree.walk

    def careless(self: PrefixTree, root: PrefixNode, tokens: bytes, key_bytes: int, max_nodes: int) -> list[PrefixNode]:
        found = walk(self, root, tokens, key_bytes, max_nodes)
        last = found[-1] if found else root
        return [*found, next(iter(last.children.values()))] if len(found) < max_nodes and last.children else found

    patch.setattr(PrefixTree, "walk", careless)


# --- adapters


def an_adapter_is_let_go_in_flight(patch: Patch) -> None:
    """Its blocks may be taken at once, though a step in flight still reads them."""
    release = AdapterBlocks.release
    patch.setattr(AdapterBlocks, "release", lambda self, held, last_step: release(self, held, NEVER))


def an_adapter_is_kept_after_a_failure(patch: Patch) -> None:
    """The device has lost it, and it is not brought again."""
    patch.setattr(AdapterBlocks, "clear", lambda self: None)


# --- tokens


def a_chunk_is_off_by_one(patch: Patch) -> None:
    """The token after a prompt's chunk is taken for computed."""
    try_plan = StepPlanner._try_plan

    def hasty(self: StepPlanner, sequence: Sequence, plan: PlanBuilder, count: int) -> bool:
        planned = try_plan(self, sequence, plan, count)
        if planned and count > 1 and sequence.num_computed_tokens < sequence.num_tokens - 1:
            sequence.num_computed_tokens += 1
        return planned

    patch.setattr(StepPlanner, "_try_plan", hasty)


def a_token_is_appended_twice_after_preemption(patch: Patch) -> None:
    """Who is pushed out forgets the token that a step in flight brings, has it computed again, and gets both."""
    preempt_last = Roster.preempt_last

    def forgetful(self: Roster) -> Sequence:
        sequence = preempt_last(self)
        sequence.num_tokens, sequence.last_step = len(sequence.token_ids), NEVER
        return sequence

    patch.setattr(Roster, "preempt_last", forgetful)


def a_placeholder_is_not_rolled_back(patch: Patch) -> None:
    """After a failed step, tokens that never came still count."""

    def roll_back_all(self: Roster, through: int) -> None:
        for sequence in list(self):
            sequence.ignore_through = through
            if sequence.status.value == "running":
                self.requeue(sequence)
        self.running = []

    patch.setattr(Roster, "roll_back_all", roll_back_all)


def a_cohort_makes_up_for_a_step_too_few(patch: Patch) -> None:
    """Records of steps that were alike lack the oldest token that was kept back."""
    catch_up = Cohort._catch_up

    def lazy(self: Cohort, place: int, tokens: Any) -> None:
        catch_up(self, place, tokens[1:] if len(tokens) > 1 else tokens)

    patch.setattr(Cohort, "_catch_up", lazy)


# --- requests


def a_wake_up_is_lost(patch: Patch) -> None:
    """Whoever waits for its last tokens is not told that they have come, unless a row came back with them."""
    retire = Roster.retire

    def quiet(self: Roster, step_id: int) -> None:
        before, waited = self.retired, bool(self.leaving_rows)
        retire(self, step_id)
        self.retired = step_id if waited or not len(self.waiting) else before

    patch.setattr(Roster, "retire", quiet)


def an_answer_ends_twice(patch: Patch) -> None:
    """What a step in flight brings for an answer that has ended is told."""
    end = Roster.end

    def audible(self: Roster, sequence: Sequence, *, trusted: bool = True) -> None:
        end(self, sequence, trusted=trusted)
        sequence.ignore_through = NEVER

    patch.setattr(Roster, "end", audible)


def order_is_inverted_within_a_class(patch: Patch) -> None:
    """Whoever wants several answers jumps the queue."""
    push = WaitingQueue.push

    def pushy(self: WaitingQueue, sequence: Sequence) -> None:
        if sequence.request.params.n > 1:
            sequence.order = (*sequence.order[:-1], 0)
        push(self, sequence)

    patch.setattr(WaitingQueue, "push", pushy)


def the_first_is_pushed_out_instead_of_the_last(patch: Patch) -> None:
    preempt_last = Roster.preempt_last

    def wrong(self: Roster) -> Sequence:
        self.running.append(self.running.pop(0))
        return preempt_last(self)

    patch.setattr(Roster, "preempt_last", wrong)


def rows_of_aborted_requests_are_lost(patch: Patch) -> None:
    patch.setattr(Roster, "_give_back", lambda self, sequence: self.cache.free(sequence.kv, sequence.last_step))


def an_unusable_row_is_not_noticed(patch: Patch) -> None:
    accept = results._accept

    def deaf(roster: Roster, sequence: Sequence, j: int, result: Any, scores: Any, now: float) -> Any:
        return accept(
            roster, sequence, -1 if result.errors.get(j, "").startswith("the logits") else j, result, scores, now
        )

    patch.setattr(results, "_accept", deaf)


def a_request_is_dropped_when_its_step_fails(patch: Patch) -> None:
    """The step fails, and its requests are told nothing."""
    take_failure = results.take_failure

    def mute(roster: Roster, step: Any, message: str, now: float) -> Any:
        take_failure(roster, step, message, now)
        return []

    patch.setattr(scheduler, "take_failure", mute)


def the_first_in_order_is_passed_over(patch: Patch) -> None:
    """While others run, the first of those who run gets nothing."""
    plan_running = StepPlanner._plan_running

    def unfair(self: StepPlanner, plan: PlanBuilder, *more: Any) -> None:
        first, self.roster.running = self.roster.running[:1], self.roster.running[1:]
        if self.roster.running:
            plan_running(self, plan, *more)
            self.roster.running = [*first, *self.roster.running]
        else:
            self.roster.running = first
            plan_running(self, plan, *more)

    patch.setattr(StepPlanner, "_plan_running", unfair)


# --- adapters


def a_grammar_is_forgotten_while_its_adapter_is_read(patch: Patch) -> None:
    """It was so: a request that waits for its adapter is in no roster yet."""

    def keep_grammars(self: EngineCore) -> None:
        if self._masks is not None and self._masks.seconds and not self._events:
            self._masks.keep(self.scheduler.requests)

    patch.setattr(EngineCore, "_keep_grammars", keep_grammars)


def a_name_keeps_its_key(patch: Patch) -> None:
    """Whatever it stands for: prefixes of replaced files are found, and their weights."""
    patch.setattr(AdapterRegistry, "_key", lambda self, name, folder: f"{name}#0")


def a_busy_adapter_is_evicted(patch: Patch) -> None:
    evict = AdapterRegistry._evict
    patch.setattr(AdapterRegistry, "_evict", lambda self, in_use: evict(self, ()))


def a_closing_adapter_takes_new_requests(patch: Patch) -> None:
    """Who waits for its place waits for ever, while they come."""
    evict = AdapterRegistry._evict

    def open_evict(self: AdapterRegistry, in_use: Any) -> bool:
        found = evict(self, in_use)
        self._closing = None
        return found

    patch.setattr(AdapterRegistry, "_evict", open_evict)


def prefixes_are_found_across_adapters(patch: Patch) -> None:
    """Under one root for all of a salt."""
    for name in ("find_root", "ensure_root"):
        found = getattr(PrefixTree, name)
        patch.setattr(PrefixTree, name, lambda self, salt, adapter, found=found: found(self, salt, None))


def prompts_are_looked_up_by_the_names_of_adapters(patch: Patch) -> None:
    """It was so: who computes a prompt for others does not find it, and enters it again for ever."""
    patch.setattr(EngineCore, "adapter_key", lambda self, request: request.adapter)


def keys_are_numbered_by_each_replica(patch: Patch) -> None:
    """It was so: what is handed over is thrown away, once they differ."""

    enter, numbers = AdapterRegistry._enter, Counter[AdapterRegistry]()

    def count(self: AdapterRegistry, name: str, folder: str) -> Registered:
        numbers[self] += not isinstance(self, WatchedDesk)
        return enter(self, name, f"{folder}/{numbers[self]}" if numbers[self] else folder)

    patch.setattr(AdapterRegistry, "_enter", count)


# --- ranks


def a_rank_keeps_what_has_changed(patch: Patch) -> None:
    """Arrays of a plan are not sent again where there are as many numbers in them as in the last one's."""

    def pack_less(self: frames.PlanPacker, plan: StepPlan) -> bytes:
        last, self._last = self._last, frames._values(plan)
        same = [len(self._last[at]) == len(last[at]) for at in frames._KEPT]
        return frames.pack(
            frames.Submit(frames.Fields(*self._last), sum(is_same << bit for bit, is_same in enumerate(same)))
        )

    patch.setattr(frames.PlanPacker, "pack", pack_less)


DEFECTS: tuple[Plant, ...] = (
    a_rank_keeps_what_has_changed,
    a_reference_is_leaked,
    a_wake_up_is_lost,
    a_chunk_is_off_by_one,
    a_block_is_freed_in_flight,
    a_prefix_is_registered_too_early,
    an_answer_ends_twice,
    a_row_edit_is_forgotten,
    a_token_is_appended_twice_after_preemption,
    order_is_inverted_within_a_class,
    a_placeholder_is_not_rolled_back,
    what_a_failed_step_was_to_write_can_be_found,
    prefixes_are_found_across_salts,
    prefixes_are_compared_by_less_than_their_ids,
    a_cohort_makes_up_for_a_step_too_few,
    the_first_is_pushed_out_instead_of_the_last,
    rows_of_aborted_requests_are_lost,
    an_unusable_row_is_not_noticed,
    a_request_is_dropped_when_its_step_fails,
    the_first_in_order_is_passed_over,
    an_adapter_is_let_go_in_flight,
    an_adapter_is_kept_after_a_failure,
    a_grammar_is_forgotten_while_its_adapter_is_read,
    a_name_keeps_its_key,
    a_busy_adapter_is_evicted,
    a_closing_adapter_takes_new_requests,
    prefixes_are_found_across_adapters,
    prompts_are_looked_up_by_the_names_of_adapters,
    keys_are_numbered_by_each_replica,
)


@dataclass(frozen=True, slots=True)
class Found:
    """``seeds``: how many were lived through until one failed, None: none of them did. ``small``: it breaks the small
    world as well."""

    name: str
    seeds: int | None
    failure: Failure | None
    shrunk: Schedule | None
    small: bool


@contextmanager
def planted(plant: Plant) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        yield


def find_one(plant: Plant, most: int, events: int = 500) -> Found:
    """Seeds from 0 until one fails; its schedule is shrunk while the defect is there."""
    name = plant.__name__.replace("_", " ")
    with planted(plant):
        found = find(range(most), events=events)
        if found is None:
            return Found(name, None, None, None, _breaks_small_world())
        seed, count, failure = found
        shrunk, failure = shrink(draw(seed, events), failure, most=1500)
        return Found(name, count, failure, shrunk, _breaks_small_world())


def _breaks_small_world() -> bool:
    try:
        explore(1)
    except Broken:
        return True
    return False


HEAD = "| planted | seeds | what broke | shrunk to | small world |\n|---|---|---|---|---|"


def row(found: Found) -> str:
    """Of the table under HEAD, as Markdown."""
    if found.failure is None or found.shrunk is None:
        return f"| {found.name} | not found | | | {_yes(found.small)} |"
    broke = shorten(found.failure.message.removeprefix("Broken: "), 110, placeholder=" …")
    left = shorten(_words(found.shrunk), 300, placeholder=" …")
    return f"| {found.name} | {found.seeds} | {broke} | {left} | {_yes(found.small)} |"


def _yes(small: bool) -> str:
    return "breaks" if small else ""


def _words(schedule: Schedule) -> str:
    """A shrunk schedule in a few words: its events, and what its engine has of its own."""
    runs = [(word, len(list(same))) for word, same in groupby(map(_word, schedule.events))]
    words = [f"{word} × {count}" if count > 1 else word for word, count in runs]
    own = [
        f"{name} {value}"
        for name, value in _changed(schedule.setting).items()
        if name not in ("groups", "length", "settled", "journalled")
    ]
    return f"{len(schedule.events)} events: {', '.join(words)}" + (f"; {', '.join(own)}" if own else "")


def _word(event: Event) -> str:
    """Of a request: the length of its prompt, and what it has of its own."""
    if not isinstance(event, Add):
        return type(event).__name__.lower()
    own = [f"{name} {value}" for name, value in _changed(event.asked).items() if name != "prompt"]
    return f"add ({', '.join([f'{len(event.asked.prompt)} tokens', *own])})"
