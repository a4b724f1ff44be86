"""Keys that sequences share, read once for many: equal to reading them for each, whatever the groups; in the
interpreter."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

import tests.support.triton_interpreter  # before any kernel: it fixes the mode
from headrace.kernels.attention import paged as attention
from headrace.kernels.attention import reference
from headrace.kernels.attention import triton_plan as plan
from headrace.kernels.attention.paged import PagedAttention
from headrace.kernels.attention.triton_sharing import COUNT, OWN, TOKENS, members
from tests.support.kernel_cases import PagedCase, assert_close

SHARING = {
    "all of one prefix": ([(1, 150 + 7 * row) for row in range(9)], [(range(9), 8)]),
    "two prefixes, one of them within the other": ([(1, 300)] * 10, [(range(10), 8), (range(3, 10), 16)]),
    "beside prompts, strangers and rows of no sequence": (
        [(1, 200), (20, 150), (1, 131), (1, 0), (1, 290), (2, 170), (1, 5), (1, 129), (1, 260)],
        [((0, 1, 2, 4, 5, 7), 8)],
    ),
    "nothing shared": ([(1, 140)] * 8, []),
}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few sequences and short prefixes are worth sharing."""
    monkeypatch.setattr(plan, "FEWEST", 4)
    monkeypatch.setattr(plan, "LEAST_SAVED", 128)


def shared_case(
    lengths: Sequence[tuple[int, int]],
    groups: Sequence[tuple[Sequence[int], int]],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 16,
    seed: int = 0,
) -> PagedCase:
    """``groups``: rows that begin with the same so many blocks of 16."""
    case = PagedCase(lengths, heads=heads, kv_heads=kv_heads, dim=dim, dtype=torch.bfloat16, block_size=16, seed=seed)
    case.poison(None)
    for rows, blocks in groups:
        case.table[list(rows), :blocks] = case.table[rows[-1], :blocks]
    return case


def attend(
    case: PagedCase, processors: int = 3, window: int | None = None, soft_cap: float | None = None
) -> tuple[torch.Tensor, PagedAttention]:
    kernel = PagedAttention(case.q.shape[2], case.q.shape[1] // case.k_cache.shape[1], processors, False, cascade=True)
    return case.run(kernel, window, soft_cap), kernel


def found(kernel: PagedAttention) -> torch.Tensor:
    shared = kernel._plans[None][1].shared
    assert shared is not None
    return shared


@pytest.mark.parametrize("name", SHARING)
@pytest.mark.parametrize("processors", [1, 8])
def test_cascade_equals_the_twin(name: str, processors: int) -> None:
    case = shared_case(*SHARING[name])
    got, kernel = attend(case, processors)
    assert_close(got, case.run(reference.paged_attention), torch.bfloat16)
    assert bool(found(kernel)[OWN.value].any()) == bool(SHARING[name][1])
    if processors == 1:
        assert torch.equal(case.run(kernel), got), "what one launch leaves does not reach the next"


def test_cascade_beside_own_scores_that_no_float32_holds_powers_of() -> None:
    case = shared_case(*SHARING["all of one prefix"])
    case.q[::2] *= 100.0
    kernel = PagedAttention(16, 2, 3, False, cascade=True, unified=True)
    assert_close(case.run(kernel), case.run(reference.paged_attention), torch.bfloat16)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(3, 1, 16), (2, 2, 16), (8, 1, 40), (32, 1, 16)])
def test_cascade_of_other_heads_with_a_cap(heads: int, kv_heads: int, dim: int) -> None:
    """33 sequences fill more than one chunk of 16, 8 or 2, and part of one of 64."""
    case = shared_case(
        [(1, 129 + row % 3) for row in range(33)], [(range(33), 8)], heads=heads, kv_heads=kv_heads, dim=dim
    )
    got, kernel = attend(case, 4, soft_cap=5.0)
    assert_close(got, case.run(reference.paged_attention, None, 5.0), torch.bfloat16)
    assert int(found(kernel)[COUNT.value].max()) == min(33, members(heads // kv_heads))


@pytest.mark.parametrize("seed", range(2))
def test_any_grouping(seed: int) -> None:
    draw = random.Random(seed)
    lengths = [(draw.choice((1, 1, 1, 2)), draw.choice((3, 129, 200, 300, 420))) for _ in range(12)]
    long = [row for row, (_, context) in enumerate(lengths) if context > 400]
    medium = [row for row, (_, context) in enumerate(lengths) if context > 150]
    groups = [(medium, 8), (long[: len(long) // 2], 16), (long[len(long) // 2 :], 24)]
    case = shared_case(lengths, [(rows, blocks) for rows, blocks in groups if len(rows) > 1], seed=seed)
    assert_close(attend(case, draw.choice((1, 5, 12)))[0], case.run(reference.paged_attention), torch.bfloat16)


@pytest.mark.parametrize("seed", range(2))
def test_programs_come_in_any_order(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Own keys long enough for programs that hold neither the beginning nor the end of a pair: the middle one may be
    the last to come."""
    tests.support.triton_interpreter.shuffle_programs(monkeypatch, seed)
    lengths = [(1, 420 + 3 * row) for row in range(5)]
    case = shared_case(lengths, [(range(5), 8)])
    kernel = PagedAttention(16, 2, 14, False, cascade=True)
    want = case.run(reference.paged_attention)
    for _ in range(2):
        assert_close(case.run(kernel), want, torch.bfloat16)
        assert kernel._common is not None and not kernel._common.tickets.any() and not kernel._scratch.tickets.any()


@pytest.mark.parametrize(("processors", "dim"), [(3, 16), (9, 16), (9, 128)])
def test_shared_keys_that_many_programs_read_are_added_up_part_by_part(
    processors: int, dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to nine parts of a pair: more than heads of 128 add up at once, and not a multiple of that."""
    monkeypatch.setattr(plan, "_LEAST_SHARED", 64)
    tests.support.triton_interpreter.shuffle_programs(monkeypatch, processors)
    case = shared_case([(1, 580 + row) for row in range(5)], [(range(5), 36)], dim=dim)
    kernel = PagedAttention(dim, 2, processors, False, cascade=True)
    want = case.run(reference.paged_attention)
    for _ in range(2):
        assert_close(case.run(kernel), want, torch.bfloat16)
        assert kernel._common is not None and not kernel._common.tickets.any()


def test_the_deeper_group_is_taken_where_it_saves_more() -> None:
    case = shared_case([(1, 400)] * 7, [(range(7), 8), (range(4), 16)])
    _, kernel = attend(case)
    assert found(kernel)[OWN.value].tolist() == [256] * 4 + [128] * 3


def test_the_last_block_is_read_by_its_owner_and_so_are_those_that_a_query_does_not_see_whole() -> None:
    """A block that is written while others read it is no prefix; a table's entries beyond a sequence are not looked
    at."""
    case = shared_case([(1, 256)] * 3 + [(1, 257)] * 4, [(range(7), 16)])
    got, kernel = attend(case)
    assert found(kernel)[OWN.value].tolist() == [128] * 3 + [256] * 4
    assert_close(got, case.run(reference.paged_attention), torch.bfloat16)


def test_more_groups_than_there_is_memory_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "PAIRS", 4)  # of chunk and KV head: two chunks of two heads
    case = shared_case([(1, 150)] * 12, [(range(start, start + 3), 8) for start in range(0, 12, 3)])
    got, kernel = attend(case)
    assert int((found(kernel)[TOKENS.value] > 0).sum()) == 2 and int((found(kernel)[OWN.value] > 0).sum()) == 6
    assert_close(got, case.run(reference.paged_attention), torch.bfloat16)


def test_heads_that_fill_a_tile_alone_share_nothing() -> None:
    """A chunk of one sequence would read shared keys once for one."""
    case = shared_case([(1, 150)] * 4, [(range(4), 8)], heads=33, kv_heads=1)
    got, kernel = attend(case)
    assert members(33) == 1 and kernel._plans[None][1].shared is None
    assert_close(got, case.run(reference.paged_attention), torch.bfloat16)


def test_a_window_reads_for_itself() -> None:
    case = shared_case([(1, 200)] * 8, [(range(8), 8)])
    got, kernel = attend(case, window=150)
    assert_close(got, case.run(reference.paged_attention, 150), torch.bfloat16)
    assert kernel._plans[150][1].shared is None


def test_a_broken_sequence_leaves_those_it_shares_with_alone() -> None:
    case = shared_case([(1, 150)] * 9, [(range(9), 8)])
    want = case.run(reference.paged_attention)
    case.q[4] = float("nan")
    got, kernel = attend(case)
    assert got[4].isnan().all() and bool(found(kernel)[OWN.value].all())
    got[4] = want[4]
    assert_close(got, want, torch.bfloat16)


def test_a_plan_is_made_once_for_the_layers_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    stock = plan.make_plan
    monkeypatch.setattr(attention.plan, "make_plan", lambda *arguments: made.append(1) or stock(*arguments))  # type: ignore[func-returns-value]
    case = shared_case([(1, 150)] * 8, [(range(8), 8)])
    kernel, inputs = PagedAttention(16, 2, 2, False, cascade=True), case.inputs
    for step, asked in enumerate((inputs, inputs, case.inputs), start=1):
        kernel(case.q, case.k_cache, case.v_cache, asked, 0.25, None, None)
        assert len(made) == (1, 1, 2)[step - 1]
