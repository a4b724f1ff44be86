"""Why a request waits, told from the scheduler's state: the true reason, and nothing changes by asking."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from headrace.config import CacheConfig
from headrace.engine.core import EngineCore
from headrace.observe.metrics import MAX_KEPT, StepAccounts
from headrace.request import Finished, FinishReason, SequenceOutput, StepAccount
from headrace.scheduler.explain import Pace, RequestsSnapshot, RequestState, pace_of, predicted_start
from headrace.scheduler.step_planner import Wait
from tests.support.hash_engine import check_books, engine, request, run


def state_of(core: EngineCore, request_id: int) -> RequestState:
    before = core.stats()
    found = core.explain(request_id)
    assert core.stats() == before
    check_books(core)
    assert found is not None
    return found


def filled(
    count: int, *, steps: int = 1, prompt: int = 6, params: dict[str, Any] | None = None, **fields: Any
) -> EngineCore:
    core = engine(**fields)
    for number in range(count):
        core.add(request(number, range(1, prompt + 1), max_tokens=30, **(params or {})))
    for _ in range(steps):
        core.step()
    return core


def test_a_request_that_has_just_come_and_one_that_is_gone() -> None:
    core = filled(1, steps=0)
    state = state_of(core, 0)
    assert (state.running, state.position, state.wait and state.wait.kind) == (False, 1, "next_step")
    run(core)
    assert core.explain(0) is None and core.explain(99) is None


def test_a_request_that_has_just_come_waits_for_what_those_wait_for_that_came_before() -> None:
    core = filled(3, max_num_seqs=2)
    core.add(request(7, [1, 2]))
    core.add(request(8, [1, 2]))
    for number, position in ((2, 1), (7, 2), (8, 3)):
        state = state_of(core, number)
        assert state.wait is not None and (state.wait.kind, state.position, state.num_waiting) == ("rows", position, 3)
    full = filled(2, max_num_seqs=2)
    full.add(request(7, [1, 2]))
    wait = state_of(full, 7).wait
    assert wait is not None and (wait.kind, wait.needed, wait.available) == ("rows", 1, 0)


def test_no_later_bound_is_told_of_what_no_step_brings() -> None:
    """An adapter's files, or a prompt that others compute."""
    core, coming = filled(2, max_num_seqs=4), [request(7, [1, 2]), request(8, [1, 2])]
    snapshot = RequestsSnapshot(core.scheduler, coming, {7: Wait("prefill")})
    waits, goes = snapshot.explain(7), snapshot.explain(8)
    assert waits is not None and goes is not None and goes.wait == Wait("next_step") and goes.steps_at_most == 0
    assert waits.wait == Wait("prefill") and (waits.steps_at_least, waits.steps_at_most) == (0, None)


def test_many_questions_between_two_turns_are_answered_from_one_look() -> None:
    core = filled(5, max_num_seqs=2)
    one = core.snapshot()
    assert core.snapshot() is one
    core.add(request(7, [1, 2]))
    assert core.snapshot() is not one and core.snapshot() is core.snapshot()
    before = core.snapshot()
    core.step()
    assert core.snapshot() is not before


def test_who_starts_behind_others_is_told_so_and_who_does_not_is_told_why() -> None:
    core = engine(budget=16, max_num_seqs=8)
    for number in range(4):
        core.add(request(number, range(20 * number, 20 * number + 7), max_tokens=4))
    kinds = [wait.kind for number in range(4) if (wait := state_of(core, number).wait) is not None]
    assert kinds == ["next_step", "next_step", "next_step", "token_budget"], "7 + 7 + 2 of 16 tokens"


def test_tokens_of_a_shared_beginning_are_counted_once() -> None:
    core = engine(budget=16, max_num_seqs=8, num_blocks=200)
    for number in range(3):
        core.add(request(number, [*range(60), 100 + number], max_tokens=4))
    assert [state_of(core, number).tokens_before for number in range(3)] == [0, 61, 62]


def test_running_ones_say_how_far_their_prompt_is() -> None:
    core = engine(budget=8)
    core.add(request(0, range(1, 31), max_tokens=4))
    core.step()
    state = state_of(core, 0)
    assert (state.running, state.position, state.num_prompt, state.num_computed, state.tokens_ahead) == (
        True,
        None,
        30,
        8,
        22,
    )
    for _ in range(4):
        core.step()
    state = state_of(core, 0)
    assert state.num_computed == 30 and state.num_outputs == (2,)


def test_no_free_row_is_the_reason_and_the_place_in_the_queue_counts_from_one() -> None:
    core = filled(5, max_num_seqs=2)
    for number, position in ((2, 1), (3, 2), (4, 3)):
        state = state_of(core, number)
        assert state.wait is not None and (state.wait.kind, state.wait.needed, state.wait.available) == ("rows", 1, 0)
        assert (state.position, state.num_waiting) == (position, 3)
    assert state_of(core, 2).steps_at_most == state_of(core, 3).steps_at_most == 29
    assert state_of(core, 4).steps_at_most == 29 + 30, "those before it must have run, too"


def test_an_answer_of_many_waits_for_all_its_rows() -> None:
    core = filled(1, max_num_seqs=4)
    core.add(request(7, [1, 2], n=4))
    core.step()
    wait = state_of(core, 7).wait
    assert wait is not None and (wait.kind, wait.needed, wait.available) == ("rows", 4, 3)


def test_too_few_blocks_are_the_reason_with_numbers() -> None:
    core = filled(1, num_blocks=8, block_size=4, max_num_seqs=2)  # one row is free, and one is enough
    core.add(request(5, range(100, 128), max_tokens=2))
    core.step()
    wait = state_of(core, 5).wait
    assert wait is not None and wait.kind == "blocks" and wait.needed == 8 and wait.available == 6
    run(core)


def test_a_step_full_of_others_is_the_reason() -> None:
    core = engine(budget=8)
    core.add(request(0, range(1, 60), max_tokens=4))
    core.add(request(1, [9, 9], max_tokens=4))
    core.step()
    state = state_of(core, 1)
    assert state.wait is not None and state.wait.kind == "token_budget"
    assert state.tokens_ahead == 59 - 8 + 2 and state.steps_at_most == 0 and state.tokens_before == 59 - 8


def test_static_batching_waits_for_its_batch() -> None:
    core = filled(1, continuous_batching=False)
    core.add(request(5, [1]))
    core.step()
    wait = state_of(core, 5).wait
    assert wait is not None and wait.kind == "batch"


def test_priority_lets_later_ones_go_first() -> None:
    core = filled(1, max_num_seqs=1, scheduling_policy="priority")
    core.add(request(5, [1], priority=3))
    object.__setattr__(late := request(6, [1], priority=2), "arrival_time", 9.0)
    core.add(late)
    core.step()
    state = state_of(core, 5)
    assert (state.position, state.later_first) == (2, 1)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_asking_at_every_step_changes_no_plan(depth: int) -> None:
    """A pressed engine, once with questions all the time and once without: the same answers in the same steps."""

    def play(ask: bool) -> Any:
        core = engine(depth=depth, num_blocks=16, max_num_seqs=4, budget=16)
        for number in range(12):
            core.add(request(number, range(number, number + 9), max_tokens=20, n=2 if number % 4 == 0 else 1))
        answers = run(core, each_step=(lambda core, _: [core.explain(number) for number in range(12)]) if ask else None)
        return answers.tokens, core.stats()

    assert play(True) == play(False)


def test_pinned_rows_of_a_cache_without_paging() -> None:
    core = filled(1, num_blocks=16, block_size=4, cache=CacheConfig(paged_allocation=False))
    core.add(request(5, [1, 2], max_tokens=38))
    core.step()
    wait = state_of(core, 5).wait
    assert wait is not None and (wait.kind, wait.needed, wait.available) == ("blocks", 10, 7)


# --- seconds


STATE = RequestState(1, False, 3, 5, 0, 10, 0, 0, (0,), 0, None, 100, 90, 0, 20, 40, 30)
PACE = Pace(quick=0.1, slow=0.2, full_quick=0.4, full=0.5, token=0.01, steps=64)


def test_a_start_is_predicted_between_two_bounds() -> None:
    found = predicted_start(STATE, PACE)
    assert found["earliest"] == pytest.approx(2 * 0.4), "steps that tokens of others fill: 90 of 40 each"
    assert found["latest"] == pytest.approx(4 * 0.5 + 21 * 0.2), "prompts get 30 tokens a step"
    assert predicted_start(STATE, None)["earliest"] is None and pace_of([], 40) is None
    assert predicted_start(replace(STATE, steps_at_least=9), PACE)["earliest"] == pytest.approx(0.9)
    assert (
        predicted_start(replace(STATE, steps_at_most=None), PACE)["latest"]
        is predicted_start(replace(STATE, share=0), PACE)["latest"]
        is None
    )
    assert predicted_start(replace(STATE, timed=True), replace(PACE, token=0.1))["latest"] == pytest.approx(
        15.0 + 21 * 0.2
    )


# --- what the steps of a request were


class Step:
    def __init__(self, request_id: int, explain: bool = True) -> None:
        self.request_id, self.index, self.num_preemptions = request_id, 0, 3
        self.request = type("Asked", (), {"explain": explain})


def test_steps_are_counted_for_those_that_asked_alone() -> None:
    accounts = StepAccounts()
    accounts.open(request(1, [1], n=2))
    accounts.count([Step(1), Step(1), Step(2, explain=False)], 0.5)  # type: ignore[list-item]
    accounts.count([Step(1)], None)  # type: ignore[list-item]
    first, second = (SequenceOutput(1, index, (1,), finished=Finished(FinishReason.LENGTH)) for index in (0, 1))
    (out,) = accounts.settle([first])
    assert out.finished is not None and out.finished.account is not None
    assert out.finished.account == StepAccount(2, 0.5, 3) and accounts
    accounts.settle([second])
    found = accounts.find(1)
    assert not accounts and found is not None and found.steps == 2 and accounts.find(2) is None


def test_accounts_are_bounded() -> None:
    accounts = StepAccounts()
    for number in range(3 * MAX_KEPT):
        accounts.open(request(number, [1]))
        accounts.end(number, 0)
    assert not accounts and accounts.find(0) is None and accounts.find(3 * MAX_KEPT - 1) is not None
