"""Why a request is where it is: its state, its place in the queue, and what the next one to be admitted is short of.

What lives here: pure functions over the scheduler's state, called when somebody asks. What may not: changing anything, words, seconds.

They follow the planner's own order of questions (planner.py, ``_plan_waiting``), so that the answer is the reason and not a guess.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from headrace.cache.manager import NO_MATCH
from headrace.request import Request, SequenceStatus
from headrace.scheduler.planner import rows_wanted
from headrace.scheduler.scheduler import Scheduler
from headrace.sequence import Sequence

WaitKind = Literal["next_step", "batch", "result", "rows", "token_budget", "blocks"]


@dataclass(frozen=True, slots=True)
class Wait:
    """What the head of the queue needs and how much of it there is: sequence rows, tokens of a step, or KV blocks.

    "next_step": nothing is missing. "batch": static batching, the batch before must end. "result": its last tokens are still computed.
    """

    kind: WaitKind
    needed: int = 0
    available: int = 0


@dataclass(frozen=True, slots=True)
class RequestState:
    """``position`` counts from 1, None while running; ``later_first`` of those before it came later (priority, or preempted ones).

    ``tokens_ahead`` must be computed before its own first token. ``steps_at_most``: after so many steps enough of those running have
    used up their max_tokens; None where that would not be enough. ``num_computed``, ``num_cached``: of the prompt.
    """

    request_id: int
    running: bool
    position: int | None
    num_waiting: int
    later_first: int
    num_prompt: int
    num_computed: int
    num_cached: int
    num_outputs: tuple[int, ...]
    num_preemptions: int
    wait: Wait | None
    tokens_ahead: int
    steps_at_most: int | None
    budget: int


def explain(scheduler: Scheduler, request_id: int) -> RequestState | None:
    """None for a request that the scheduler does not hold."""
    siblings = scheduler.roster.requests.get(request_id)
    if not siblings:
        return None
    waiting = [sequence for sequence in siblings if sequence.status is SequenceStatus.WAITING]
    return _running(scheduler, siblings) if len(waiting) < len(siblings) else _waiting(scheduler, siblings, waiting[0])


def explain_arriving(scheduler: Scheduler, request: Request) -> RequestState:
    """A request that the scheduler hears of with its next step."""
    num_waiting, prompt = scheduler.num_waiting + 1, len(request.prompt_token_ids)
    ahead = _tokens_of(list(scheduler.roster.waiting)) + _tokens_of(scheduler.roster.running)
    nothing = (0,) * request.params.n
    wait = Wait("next_step")
    return RequestState(
        request.request_id, False, num_waiting, num_waiting, 0, prompt, 0, 0, nothing, 0, wait, ahead + prompt, None, _budget(scheduler)
    )


def _running(scheduler: Scheduler, siblings: list[Sequence]) -> RequestState:
    first = siblings[0]
    left = max(0, first.num_prompt_tokens - first.num_computed_tokens)
    return RequestState(
        first.request_id, True, None, scheduler.num_waiting, 0, first.num_prompt_tokens, min(first.num_computed_tokens, first.num_prompt_tokens),
        first.num_cached_tokens, _outputs(siblings), _preemptions(siblings), None, left, 0, _budget(scheduler),
    )  # fmt: skip


def _waiting(scheduler: Scheduler, siblings: list[Sequence], own: Sequence) -> RequestState:
    roster = scheduler.roster
    ahead = roster.waiting.ahead_of(own)
    later = sum(1 for sequence in ahead if sequence.request.arrival_time > own.request.arrival_time)
    head = roster.waiting.peek()
    wait = _wait_of(scheduler, head) if head is not None else Wait("next_step")
    tokens, steps = _tokens_of([*ahead, own]) + _tokens_of(roster.running), _steps_at_most(scheduler, ahead, own, wait)
    return RequestState(
        own.request_id, False, len(ahead) + 1, scheduler.num_waiting, later, own.num_prompt_tokens, 0,
        own.num_cached_tokens, _outputs(siblings), _preemptions(siblings), wait, tokens, steps, _budget(scheduler),
    )  # fmt: skip


def _wait_of(scheduler: Scheduler, head: Sequence) -> Wait:
    roster, limits = scheduler.roster, scheduler.limits
    if not scheduler.admits:
        return Wait("batch", 0, len(roster.running))
    if head.last_step > roster.retired:
        return Wait("result")
    rows = rows_wanted(head)
    if len(roster.free_rows) < rows:
        return Wait("rows", rows, len(roster.free_rows))
    room = limits.max_num_batched_tokens - sum(max(1, s.num_tokens - s.num_computed_tokens) for s in roster.running)
    if room <= 0:
        return Wait("token_budget", 1, max(0, room))
    return _blocks_of(scheduler, head) or Wait("next_step")


def _blocks_of(scheduler: Scheduler, head: Sequence) -> Wait | None:
    """The pool with the least room to spare, if the head does not fit."""
    cache, limits = scheduler.cache, scheduler.limits
    match = NO_MATCH if not limits.kv_caching or head.wants_scores else cache.lookup(head.kv, head.token_ids)
    tokens, headroom, whole = scheduler.claim_of(head)
    if cache.can_admit(match, tokens, headroom, whole=whole):
        return None
    needs = [-(-tokens // spec.block_size) - match.num_tokens // spec.block_size + headroom for spec in cache.specs]
    needed, available = max(zip(needs, (pool.num_available for pool in cache.pools), strict=True), key=lambda pair: pair[0] - pair[1])
    return Wait("blocks", needed, available)


def _steps_at_most(scheduler: Scheduler, ahead: list[Sequence], own: Sequence, wait: Wait) -> int | None:
    """Steps until rows are certainly free for all of these; blocks, when everybody who runs has ended, for the head alone."""
    roster = scheduler.roster
    if wait.kind in ("next_step", "result", "token_budget") and not ahead:
        return 0
    left = sorted(sequence.max_num_tokens - len(sequence.token_ids) for sequence in roster.running)
    if wait.kind in ("blocks", "batch"):
        return (left[-1] if left else 0) if not ahead else None
    missing = sum(map(rows_wanted, [*ahead, own])) - len(roster.free_rows)
    if missing <= 0:
        return 0
    return left[missing - 1] if missing <= len(left) else None


def _tokens_of(sequences: list[Sequence]) -> int:
    """Known tokens that are still to be computed; what the cache may save is not counted."""
    return sum(max(0, len(sequence.token_ids) - sequence.num_computed_tokens) for sequence in sequences)


def _outputs(siblings: list[Sequence]) -> tuple[int, ...]:
    return tuple(sequence.num_output_tokens for sequence in siblings)


def _preemptions(siblings: list[Sequence]) -> int:
    return sum(sequence.num_preemptions for sequence in siblings)


def _budget(scheduler: Scheduler) -> int:
    return scheduler.limits.max_num_batched_tokens
