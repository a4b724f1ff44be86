"""A world so small that all that can happen in it does: three requests, four blocks, and every order of arrivals,
submissions, results, aborts and a failing step.

Actions are finer than the loop's turns: a step may be submitted whenever there is room for one, and collected whenever
one is in flight. From every state that is reached, every action is tried on a copy of it; states that differ in the
names of blocks and rows alone are one. That all end is read off the graph: along submissions and results alone there is
no way back, and where there is no way on, nobody is left.

What lives here: the world, its states, the search. What may not: what must hold in a state (books.py, life.py).
"""

from __future__ import annotations

import io
import pickle
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from headrace.config import SchedulerConfig
from headrace.engine.executor import ExecutorInfo
from headrace.request import NewRow, Request, SamplingParams, StepPlan, StepResult
from headrace.scheduler.limits import SchedulerLimits
from headrace.spec import KVGroup, KVSpec
from tests.support.simulation.bounds import Bound
from tests.support.simulation.broken import Broken, hold
from tests.support.simulation.life import Life
from tests.support.simulation.schedule import Abort, Add, Asked, Event, Fail, Group, Setting

ASKED = (Asked(prompt=(1, 2, 3), max_tokens=2), Asked(prompt=(1, 2, 9), max_tokens=2), Asked(prompt=(5,), max_tokens=3))
FROZEN = {
    Asked, Setting, Bound, Request, SamplingParams, StepPlan, NewRow, StepResult, KVSpec, KVGroup, ExecutorInfo, SchedulerLimits, SchedulerConfig,
}  # fmt: skip
SUBMIT, COLLECT = "submit", "collect"
Action = Event | str
State = tuple[Any, ...]


def world(depth: int) -> Setting:
    return Setting(depth=depth, rows=3, groups=(Group(2, 4),), length=8, budget=2)


@dataclass(slots=True)
class Explored:
    """``whole``: every state was reached; else those within ``actions`` actions of the beginning."""

    depth: int
    states: int = 0
    edges: int = 0
    ends: int = 0
    actions: int = 0
    whole: bool = True

    def __str__(self) -> str:
        extent = "all there are" if self.whole else f"all within {self.actions} actions"
        return f"depth {self.depth}: {self.states} states ({extent}), {self.edges} transitions, {self.ends} ends"


@dataclass(slots=True)
class _Node:
    life: bytes
    path: tuple[Action, ...]
    actions: tuple[Action, ...]
    onward: list[State] = field(default_factory=list)  # by submissions and results


def explore(depth: int = 1, *, most_actions: int = 10**6, fails: int = 1) -> Explored:
    """Every state, breadth first, so that what breaks is shown by the shortest way there. Raises Broken with that
    way."""
    first, freezer, done = Life(world(depth)), _Freezer(), Explored(depth)
    known = {_state(first): _Node(freezer.freeze(first), (), tuple(_actions(first, (), fails)))}
    queue = deque(known)
    while queue:
        node = known[state := queue.popleft()]
        if len(node.path) >= most_actions:
            done.whole = False
            continue
        done.actions = max(done.actions, len(node.path) + 1)
        for action in node.actions:
            life, path = freezer.thaw(node.life), (*node.path, action)
            reached = _act(life, path)
            done.edges += 1
            if (
                isinstance(action, str) and reached != state
            ):  # there may be nothing to submit until something comes back
                node.onward.append(reached)
            if reached not in known:
                known[reached] = _Node(freezer.freeze(life), path, tuple(_actions(life, path, fails)))
                queue.append(reached)
        if not node.onward:
            _check_end(freezer.thaw(node.life), node.path)
            done.ends += 1
        node.life = b""  # what is known of it is enough
    done.states = len(known)
    _check_no_way_back(known)
    return done


def _actions(life: Life, path: tuple[Action, ...], fails: int) -> Iterator[Action]:
    core, came = life.core, len(life.answers.standing)
    if came < len(ASKED):
        yield Add(came, ASKED[came])
    for number, standing in life.answers.standing.items():
        if standing.open and not standing.doomed:
            yield Abort(number)
    if life.device.fail_next is None and sum(isinstance(each, Fail) for each in path) < fails:
        yield Fail(written=True)
    if core.has_work and len(core._fifo) <= core.depth and not core._failed:
        yield SUBMIT
    if core._fifo:
        yield COLLECT


def _act(life: Life, path: tuple[Action, ...]) -> State:
    """Does the last of these actions, all others being done."""
    action = path[-1]
    try:
        if isinstance(action, str):
            _move(life, action)
        else:
            life.happen(action)
        return _state(life)
    except Exception as error:
        raise Broken("exhaust", f"{error} after {_way(path)}") from error


def _move(life: Life, action: str) -> None:
    """A half of a turn."""
    core = life.core
    life.device.collected, life.began = None, life.clock.now()
    if action == COLLECT:
        life.take_turn([*core._collect_oldest()])
    else:
        idle = not core._fifo
        core._submit_next()
        rejected = core.scheduler.take_rejected()
        life.take_turn(rejected)
        hold(
            core._fifo or not idle or not core.has_work or rejected,
            "asleep",
            "nothing is in flight, there is work, and nothing is submitted",
        )
    life.check()


def _check_end(life: Life, path: tuple[Action, ...]) -> None:
    """Where neither a submission nor a result leads anywhere, nobody is left."""
    try:
        hold(not life.core.has_work, "exhaust", "there is no way on")
        life.end()
    except Exception as error:
        raise Broken("exhaust", f"{error} after {_way(path)}") from error


def _check_no_way_back(known: dict[State, _Node]) -> None:
    """No circle of submissions and results: depth-first, with the states of the way marked."""
    finished: set[State] = set()
    for start in known:
        way: list[tuple[State, Iterator[State]]] = [(start, iter(known[start].onward))]
        on_way = {start}
        while way and start not in finished:
            state, rest = way[-1]
            follower = next((each for each in rest if each not in finished), None)
            if follower is None:
                finished.add(state)
                on_way.discard(state)
                way.pop()
            else:
                hold(follower not in on_way, "exhaust", f"no end after {_way(known[follower].path)}")
                on_way.add(follower)
                way.append((follower, iter(known[follower].onward)))


def _way(path: tuple[Action, ...]) -> str:
    return " → ".join(
        each if isinstance(each, str) else f"{type(each).__name__.lower()} {getattr(each, 'number', '')}".strip()
        for each in path
    )


# --- states


class _Freezer:
    """Lives as bytes, to be taken up again as often as there are actions. What never changes is shared by all of them;
    a pool's callback is a closure over its manager, and made anew."""

    def __init__(self) -> None:
        self._shared: dict[int, Any] = {}

    def freeze(self, life: Life) -> bytes:
        pools, into = life.core.scheduler.cache.pools, io.BytesIO()
        callbacks = [pool._on_evict for pool in pools]
        for pool in pools:
            pool._on_evict = None  # type: ignore[assignment]
        pickler = pickle.Pickler(into, pickle.HIGHEST_PROTOCOL)
        pickler.persistent_id = self._name  # type: ignore[method-assign]
        pickler.dump(life)
        for pool, callback in zip(pools, callbacks, strict=True):
            pool._on_evict = callback
        return into.getvalue()

    def _name(self, thing: object) -> int | None:
        if type(thing) not in FROZEN:
            return None
        self._shared[id(thing)] = thing
        return id(thing)

    def thaw(self, frozen: bytes) -> Life:
        unpickler = pickle.Unpickler(io.BytesIO(frozen))
        unpickler.persistent_load = self._shared.__getitem__  # type: ignore[method-assign]
        life: Life = unpickler.load()
        cache = life.core.scheduler.cache
        for group, pool in enumerate(cache.pools):
            pool._on_evict = cache._evict_from(group)
        return life


class _Names(dict[int, int]):
    """Numbers in the order in which they are met."""

    def __missing__(self, key: int) -> int:
        self[key] = len(self)
        return self[key]


def _state(life: Life) -> State:
    """All that decides what can follow. Steps count from the oldest in flight; blocks and rows are named in the order
    they are met."""
    core, scheduler = life.core, life.core.scheduler
    cache, pool = scheduler.cache, scheduler.cache.pools[0]
    base = scheduler.in_flight[0].plan.step_id if scheduler.in_flight else scheduler._next_step
    blocks = _Names()
    sequences = tuple(
        (
            s.request_id, s.status, s.token_ids.tobytes(), s.num_tokens, s.num_computed_tokens, max(s.last_step - base, -1),
            min(max(s.ignore_through - base, -1), 9), s.kv.num_linked_blocks, s.kv.num_matched_blocks, s.first_token is None,
            tuple(blocks[block] for block in s.kv.tables[0] if block is not None),
        )
        for s in scheduler.roster
    )  # fmt: skip
    nodes = tuple(
        sorted((node.hash, tuple(blocks[block] for block in node.blocks[0] or ())) for node in cache.tree.nodes())
    )
    leaving = tuple((step - base, blocks[block]) for step, _, block in cache._leaving)
    written = tuple(
        (step - base, tuple(node.hash for _, node in nodes)) for step, nodes in sorted(cache._written.items())
    )
    steps = tuple(
        (each.plan.rows_added == (), [s.request_id for s in each.work], each.plan.starts.tobytes())
        for each in scheduler.in_flight
    )
    tickets = tuple(submitted.ticket.result is None for submitted in core._fifo)  # type: ignore[attr-defined]
    wishes = tuple((number, standing.doomed, bool(standing.open)) for number, standing in life.answers.standing.items())
    rows = (len(scheduler.roster.free_rows), tuple(step - base for step, _ in scheduler.roster.leaving_rows))
    rest = (
        core._failed,
        life.device.broken,
        life.device.fail_next,
        tuple(sorted(map(repr, core._events))),
        tuple(blocks[b] for b in pool._cached),
    )
    return sequences, nodes, leaving, written, repr(steps), tickets, wishes, rows, rest, len(pool._free)
