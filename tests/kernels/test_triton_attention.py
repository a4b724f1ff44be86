"""Paged attention in Triton against its torch twin, in the interpreter: every split of work between the two kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import tests.support.triton_interpreter  # before any kernel: it fixes the mode
from headrace.kernels.attention import paged as attention
from headrace.kernels.attention import reference
from headrace.kernels.attention import triton_plan as plan
from headrace.kernels.attention import triton_prefill as prefill
from headrace.kernels.attention.paged import PagedAttention
from headrace.kernels.attention.triton_merge import merge_parts
from headrace.kernels.attention.triton_prefill import bulk_keys
from headrace.kernels.inputs import AttentionInputs
from tests.support.kernel_cases import PagedCase, assert_close

DECODE = [(1, 130), (1, 1), (1, 64), (1, 0), (1, 200)]
MIXED = [(1, 70), (37, 100), (2, 2), (1, 150)]


def run(
    case: PagedCase,
    window: int | None = None,
    soft_cap: float | None = None,
    *,
    processors: int = 2,
    invariant: bool = False,
    bulk: bool = False,
) -> torch.Tensor:
    heads, kv_heads, dim = case.q.shape[1], case.k_cache.shape[1], case.q.shape[2]
    return case.run(PagedAttention(dim, heads // kv_heads, processors, invariant, bulk), window, soft_cap)


def check(case: PagedCase, window: int | None = None, soft_cap: float | None = None, **how: int | bool) -> None:
    case.poison(window)
    got = run(case, window, soft_cap, **how)  # type: ignore[arg-type]
    assert_close(got, case.run(reference.paged_attention, window, soft_cap), case.q.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("lengths", [DECODE, MIXED, [(40, 95)]], ids=["decode", "mixed", "one prompt"])
def test_attention_equals_its_twin(lengths: list[tuple[int, int]], dtype: torch.dtype) -> None:
    check(PagedCase(lengths, heads=4, kv_heads=2, dim=64, dtype=dtype, block_size=16))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(3, 3, 80), (7, 1, 96), (20, 1, 64), (2, 1, 256), (4, 2, 8), (2, 2, 33)]
)
def test_attention_of_other_heads(heads: int, kv_heads: int, dim: int) -> None:
    check(
        PagedCase(
            [(1, 75), (9, 40), (3, 3)], heads=heads, kv_heads=kv_heads, dim=dim, dtype=torch.bfloat16, block_size=8
        )
    )


@pytest.mark.parametrize("window", [1, 7, 70, None])
@pytest.mark.parametrize("soft_cap", [0.5, None])
def test_attention_with_a_window_and_a_cap(window: int | None, soft_cap: float | None) -> None:
    check(
        PagedCase(
            [(1, 150), (1, 3), (12, 140), (2, 90)], heads=2, kv_heads=1, dim=64, dtype=torch.float32, block_size=16
        ),
        window,
        soft_cap,
    )


@pytest.mark.parametrize(("dim", "window"), [(64, None), (80, None), (64, 70), (8, 70)])
@pytest.mark.parametrize("lengths", [DECODE, MIXED], ids=["decode", "mixed"])
def test_tiles_brought_by_the_copy_engine(lengths: list[tuple[int, int]], window: int | None, dim: int) -> None:
    check(PagedCase(lengths, heads=4, kv_heads=2, dim=dim, dtype=torch.bfloat16, block_size=128), window, bulk=True)


@pytest.mark.parametrize("how", [{"invariant": True}, {"invariant": False}, {"invariant": False, "unified": True}])
@pytest.mark.parametrize("lengths", [DECODE, MIXED], ids=["decode", "mixed"])
def test_sums_of_exponentials_in_parts(lengths: list[tuple[int, int]], how: dict[str, bool]) -> None:
    """What ranks that share the keys merge by; keys in parts by several programs."""
    case = PagedCase([*lengths[:3], (1, 2100)], heads=4, kv_heads=2, dim=16, dtype=torch.float32, block_size=16)
    found, wanted = torch.full((2, *case.q.shape[:2]), float("nan"))
    got = case.run(PagedAttention(16, 2, 20, **how, lse=True), 7, 0.5, found)
    assert_close(got, case.run(reference.paged_attention, 7, 0.5, wanted), torch.float32)
    assert_close(found, wanted, torch.float32)


@pytest.mark.parametrize("counts", [(3,), (1, 2)])
def test_parts_are_merged_by_their_sums(counts: tuple[int, ...]) -> None:
    """Of rows that see no keys in some parts, or in none."""
    generator = torch.Generator().manual_seed(2)
    parts, sums = torch.randn(3, 5, 6, 24, generator=generator), 9 * torch.randn(3, 5, 6, generator=generator)
    sums[1, :4], sums[:, 1] = float("-inf"), float("-inf")
    parts[1, :4], parts[:, 1] = 0.0, 0.0
    pieces = list(zip(parts.split(counts), sums.split(counts), strict=True))
    assert_close(merge_parts(*pieces), reference.merge_parts((parts, sums)), torch.float32)


def test_more_runs_of_queries_than_a_grid_is_high(monkeypatch: pytest.MonkeyPatch) -> None:
    case = PagedCase(MIXED, heads=4, kv_heads=2, dim=64, dtype=torch.float32, block_size=16)
    want, grids = run(case), []
    launch = prefill._prefill_kernel.__class__.__getitem__
    monkeypatch.setattr(prefill, "_MOST_RUNS", 1)
    monkeypatch.setattr(
        prefill._prefill_kernel.__class__, "__getitem__", lambda self, grid: (grids.append(grid), launch(self, grid))[1]
    )
    assert torch.equal(run(case), want)
    assert any(grid[0] > 1 and grid[1:] == (2, 1) for grid in grids)


def test_the_copy_engine_counts_rows_in_32_bits() -> None:
    def cache(blocks: int) -> torch.Tensor:
        return torch.empty((blocks, 32, 2, 8, 128, 16), dtype=torch.bfloat16, device="meta")[:, 0, 0]

    blocks = 2**31 // (32 * 2 * 8 * 128)
    assert bulk_keys(cache(blocks), cache(blocks)) == 128
    assert bulk_keys(cache(blocks + 1), cache(blocks + 1)) == 0


@pytest.mark.parametrize("processors", [1, 3, 20])
def test_every_cut_of_the_line_gives_the_same(processors: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tests.support.triton_interpreter.shuffle_programs(monkeypatch, processors)
    check(
        PagedCase(
            [(1, 300), (1, 5), (1, 130), (2, 64)], heads=2, kv_heads=2, dim=64, dtype=torch.float32, block_size=16
        ),
        processors=processors,
    )


def test_more_sequences_than_are_looked_at_in_one_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "AT_ONCE", 16)
    lengths = [(1, 1 + row) for row in range(40)]
    lengths[37] = (40, 60)
    check(PagedCase(lengths, heads=2, kv_heads=1, dim=16, dtype=torch.float32, block_size=16), processors=1)


def test_parts_of_one_step_do_not_reach_the_next() -> None:
    """Tickets are zero again, and what lies in the parts' memory from before, NaN for instance, is not looked at."""
    attention = PagedAttention(64, 2, 20, False)
    for lengths in ([(1, 330), (1, 3)], [(1, 400)], [(2, 150), (1, 20), (1, 210)], [(1, 64)]):
        case = PagedCase(lengths, heads=4, kv_heads=2, dim=64, dtype=torch.float32, block_size=16)
        assert_close(case.run(attention), case.run(reference.paged_attention), torch.float32)
        case.q[-1] = float("nan")
        assert case.run(attention)[-1].isnan().all()


def test_a_broken_sequence_leaves_its_neighbours_alone() -> None:
    """One program computes many sequences, one after another in the same registers."""
    case = PagedCase(
        [(1, 70), (1, 90), (1, 20), (20, 40), (1, 5)], heads=2, kv_heads=1, dim=64, dtype=torch.float32, block_size=16
    )
    want = case.run(reference.paged_attention)
    case.q[1] = float("nan")
    got = run(case, processors=1)
    assert got[1].isnan().all()
    got[1] = want[1]
    assert_close(got, want, torch.float32)


def test_invariant_bits_depend_on_nothing_else() -> None:
    """Batched = alone, whole = chunked, prefill = decode, to the bit."""
    case = PagedCase([(1, 130), (37, 100), (2, 2)], heads=4, kv_heads=2, dim=64, dtype=torch.bfloat16, block_size=16)
    whole, start = run(case, invariant=True), 0
    check(case, invariant=True)
    for row, (count, _) in enumerate(case.lengths):
        for first, end in ((0, count), (0, (count + 1) // 2), (count - 1, count)):
            assert torch.equal(run(case.part(row, first, end), invariant=True), whole[start + first : start + end])
        start += count


@pytest.mark.parametrize("window", [None, 100])
def test_invariant_bits_are_the_same_whoever_computes_a_part(
    monkeypatch: pytest.MonkeyPatch, window: int | None
) -> None:
    """Parts of 64 keys: one program takes all of a run's, or each takes some and the last one folds them."""
    stock = attention.invariant_tiles
    monkeypatch.setattr(attention, "invariant_tiles", lambda *facts: replace(stock(*facts), part=64))
    case = PagedCase(
        [(1, 230), (20, 200), (2, 2), (1, 0)], heads=4, kv_heads=2, dim=16, dtype=torch.bfloat16, block_size=16
    )
    check(case, window, processors=1, invariant=True)
    whole, start = run(case, window, processors=1, invariant=True), 0
    tests.support.triton_interpreter.shuffle_programs(monkeypatch, 1)
    assert torch.equal(run(case, window, processors=60, invariant=True), whole)
    for row, (count, _) in enumerate(case.lengths):
        for first, end in {(0, count), (0, (count + 1) // 2), (count - 1, count)}:
            assert torch.equal(
                run(case.part(row, first, end), window, processors=40, invariant=True),
                whole[start + first : start + end],
            )
        start += count


def test_tokens_of_no_sequence_and_queries_that_see_nothing_get_zeros() -> None:
    case = PagedCase([(5, 2), (1, 0), (1, 3)], heads=2, kv_heads=1, dim=64, dtype=torch.float32)
    q = torch.cat((case.q, torch.ones(3, 2, 64)))
    out = PagedAttention(64, 2, 2, False)(q, case.k_cache, case.v_cache, case.inputs, 0.1, None, None)
    assert not out[:3].any() and not out[5].any() and not out[7:].any()
    assert out[3:5].all() and out[6].all()


class TakesFirst:
    """In place of rope_attention.Singles: zeros for those it is asked for."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def attend(self, q: Any, out: torch.Tensor, k: Any, v: Any, inputs: AttentionInputs, *how: Any) -> bool:
        self.asked.append(inputs.leading)
        out[: inputs.leading] = 0.0
        return True


@pytest.mark.parametrize(("window", "soft_cap", "asked"), [(None, None, [2]), (70, None, []), (None, 5.0, [])])
def test_single_queries_before_prompts_may_be_somebody_elses(
    window: int | None, soft_cap: float | None, asked: list[int]
) -> None:
    case = PagedCase([(1, 70), (1, 150), (37, 100)], heads=4, kv_heads=2, dim=64, dtype=torch.bfloat16, block_size=16)
    case.poison(window)
    attention = PagedAttention(64, 2, 2, False, singles=TakesFirst())  # type: ignore[arg-type]
    got = attention(case.q, case.k_cache, case.v_cache, replace(case.inputs, leading=2), 64**-0.5, window, soft_cap)
    want = case.run(reference.paged_attention, window, soft_cap)
    want[: 2 if asked else 0] = 0.0
    assert_close(got, want, case.q.dtype)
    assert attention.singles.asked == asked  # type: ignore[union-attr]


def test_where_parts_are_merged_prompts_go_to_whoever_keeps_sums_and_single_queries_do_not() -> None:
    class Takes:
        def attend(self, q: Any, out: torch.Tensor, *how: Any) -> bool:
            given.append(how[-2])
            out.fill_(2.0)
            return True

    given: list[Any] = []
    attention = PagedAttention(64, 2, 2, False, lse=True, prompts=Takes())  # type: ignore[arg-type]
    for lengths, served in (([(1, 9), (1, 4)], False), ([(9, 12), (1, 4)], True)):
        case = PagedCase(lengths, heads=4, kv_heads=2, dim=64, dtype=torch.float32)
        sums = torch.empty(case.q.shape[:2])
        out = attention(case.q, case.k_cache, case.v_cache, case.inputs, 0.1, None, None, None, sums)
        assert bool((out[:-1] == 2.0).all()) is served
        assert [each is sums for each in given] == [True] * served
