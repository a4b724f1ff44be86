"""Masks hold up a step for so long and no longer: rows whose masks are late come the next, others do not wait, and no
token changes."""

from __future__ import annotations

import pytest

from headrace.engine.grammar_masks import GrammarMasks
from headrace.request import StructuredOutputs
from headrace.scheduler.step_planner import MASK_SECONDS
from tests.support.grammars import create_masks, expected_under_grammar
from tests.support.hash_engine import Answers, assert_at_rest, engine, plans_of, request, run
from tests.support.journal import Journal, replay

WANTED = StructuredOutputs(regex="[ab]+")
LONG = StructuredOutputs(choice=("the only one of all that may come",))  # forced: several tokens are due at once
MASK = MASK_SECONDS / 2.5  # two fit in


def _masks(seconds: float) -> GrammarMasks:
    masks = create_masks((WANTED, LONG))
    masks._note_seconds = lambda request_id, _: masks.seconds.update({request_id: seconds})  # type: ignore[method-assign]
    return masks


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("requests", [1, 6])
def test_masks_of_many_rows_leave_the_steps_of_others_alone(depth: int, requests: int) -> None:
    """Six answers of one request, or one of each of six: either way two masks a step, in turn, while the others get a
    token a step."""
    core = engine(depth=depth, masks=_masks(MASK), max_num_seqs=16)
    journal = Journal.of(core.scheduler)
    plans = plans_of(core)
    hogs = [
        request(number, [1, 2], n=6 // requests, max_tokens=9, structured_outputs=WANTED) for number in range(requests)
    ]
    polite = request(9, [1, 2, 3], max_tokens=34)
    for each in (*hogs, polite):
        core.add(each)
    apart = [0]

    def look(_core: object, answers: Answers) -> None:
        """However far the polite one is: nobody is more than two tokens ahead of another, its first and one of a
        turn."""
        counts = [len(tokens) for (number, _), tokens in answers.tokens.items() if number != 9]
        if len(counts) == 6 and not answers.finished:
            apart.append(max(counts) - min(counts))

    answers = run(core, each_step=look)
    assert max(len(plan.masked) for plan in plans[3:]) == 2 and len(plans) < 40 and max(apart) <= 2
    for index, hog in enumerate(hogs):
        for answer in range(hog.params.n):
            assert answers.tokens[index, answer] == expected_under_grammar(hog, index=answer)
    assert len(answers.tokens[9, 0]) == 34
    assert [plan for plan in replay(journal, engine(max_num_seqs=16).scheduler) if plan is not None] == plans


def test_who_is_alone_waits_for_all_of_its_masks() -> None:
    core = engine(masks=_masks(10 * MASK_SECONDS), max_num_seqs=16)
    plans = plans_of(core)
    core.add(request(0, [1, 2], n=6, max_tokens=8, structured_outputs=WANTED))
    run(core)
    assert [len(plan.masked) for plan in plans if plan.masked] == [6] * 8


def test_a_mask_that_is_longer_than_a_step_may_wait_comes_alone() -> None:
    core = engine(masks=_masks(10 * MASK_SECONDS), max_num_seqs=16)
    plans = plans_of(core)
    core.add(request(0, [1, 2], n=3, max_tokens=4, structured_outputs=WANTED))
    core.add(request(1, [1, 2], max_tokens=30))
    answers = run(core)
    assert max(len(plan.masked) for plan in plans[2:]) == 1
    assert [len(answers.tokens[0, index]) for index in range(3)] == [4, 4, 4] and len(answers.tokens[1, 0]) == 30


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize(("wanted", "num_blocks", "block_size"), [(WANTED, 9, 4), (LONG, 5, 8)])
def test_masks_are_not_left_to_whom_there_is_no_room_for(
    depth: int, wanted: StructuredOutputs, num_blocks: int, block_size: int
) -> None:
    """Whoever has the first masks may find no block for its token (and is pushed out) or for its forced ones (and waits
    for those of the other, which waited for its masks for ever)."""
    core = engine(depth=depth, num_blocks=num_blocks, block_size=block_size, masks=_masks(10 * MASK_SECONDS))
    asked = [request(0, [1, 2, 3, 4], max_tokens=18, structured_outputs=WANTED)]
    asked += [request(1, [5], max_tokens=35, structured_outputs=wanted)]
    for each in asked:
        core.add(each)
    plans, answers = plans_of(core), Answers()
    while core.has_work:
        before, idle = len(plans), not core.scheduler.in_flight
        outputs = core.step()
        answers.take(outputs)
        assert outputs or not idle or len(plans) > before, "there is work, nothing in flight, and nothing is done"
    assert [answers.tokens[each.request_id, 0] for each in asked] == [expected_under_grammar(each) for each in asked]
    assert_at_rest(core)


def test_what_a_mask_takes_is_expected_again_and_fades() -> None:
    masks = create_masks()
    masks.seconds[1] = 0.0
    masks._note_seconds(1, 0.08)
    assert masks.seconds == {1: 0.08}
    masks._note_seconds(1, 0.0)
    assert masks.seconds[1] == pytest.approx(0.06)
    masks.keep(())
