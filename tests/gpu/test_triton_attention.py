"""Paged attention on the card, compiled, against its torch twin on the same card, at the shapes of real models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from headrace.kernels.attention import reference
from tests.support.card import check, chosen, require_card
from tests.support.kernel_cases import PagedCase

require_card()


@pytest.fixture(autouse=True)
def exact() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


def on_card(case: PagedCase, window: int | None = None) -> PagedCase:
    case.poison(window)
    case.q, case.k_cache, case.v_cache, case.table = (
        x.cuda() for x in (case.q, case.k_cache, case.v_cache, case.table)
    )
    return case


def inputs_of(case: PagedCase) -> Any:
    made = case.inputs
    return replace(
        made, query_start=made.query_start.cuda(), context_len=made.context_len.cuda(), slots=made.slots.cuda()
    )


def attend(case: PagedCase, kernel: Any, window: int | None = None, soft_cap: float | None = None) -> torch.Tensor:
    out: torch.Tensor = kernel(
        case.q, case.k_cache, case.v_cache, inputs_of(case), case.q.shape[2] ** -0.5, window, soft_cap
    )
    return out


HEADS = [(32, 8, 128), (32, 8, 64), (12, 12, 80), (24, 3, 96), (16, 8, 256), (20, 1, 64), (4, 2, 8), (6, 2, 40)]

LENGTHS = {
    "decode": [(1, 1000), (1, 1), (1, 0), (1, 4097), (1, 64)],
    "mixed": [(1, 2000), (300, 900), (4, 4), (1, 17), (130, 130), (3, 2500)],
    "chunk": [(700, 3000)],
}


# Gathered rows (16), and tiles brought by the copy engine (128); shapes are compiled one by one, so not all of them in
# all precisions.
SHAPES = [
    *((block_size, torch.bfloat16, *heads) for block_size in (16, 128) for heads in HEADS),
    *((128, torch.float32, *heads) for heads in HEADS),
    *(
        (block_size, dtype, *HEADS[0])
        for block_size, dtype in ((16, torch.float32), (16, torch.float16), (128, torch.float16))
    ),
]


@pytest.mark.parametrize(("block_size", "dtype", "heads", "kv_heads", "dim"), SHAPES, ids=str)
def test_attention(block_size: int, dtype: torch.dtype, heads: int, kv_heads: int, dim: int) -> None:
    kernel = chosen("paged_attention", dtype=dtype, head_dim=dim, num_heads=heads, num_kv_heads=kv_heads)
    for lengths in LENGTHS.values():
        case = on_card(PagedCase(lengths, heads=heads, kv_heads=kv_heads, dim=dim, dtype=dtype, block_size=block_size))
        check(attend(case, kernel), attend(case, reference.paged_attention))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("window", "soft_cap"), [(1, None), (500, None), (None, 30.0), (4096, 50.0)])
def test_attention_with_a_window_and_a_cap(dtype: torch.dtype, window: int | None, soft_cap: float | None) -> None:
    kernel = chosen("paged_attention", dtype=dtype, head_dim=128, num_heads=8, num_kv_heads=4)
    for lengths in LENGTHS.values():
        case = on_card(PagedCase(lengths, heads=8, kv_heads=4, dim=128, dtype=dtype, block_size=64), window)
        check(attend(case, kernel, window, soft_cap), attend(case, reference.paged_attention, window, soft_cap))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("block_size", [16, 64])
def test_invariant_attention(block_size: int, dtype: torch.dtype) -> None:
    kernel = chosen("paged_attention", dtype=dtype, head_dim=128, num_heads=32, num_kv_heads=8, batch_invariant=True)
    case = on_card(PagedCase(LENGTHS["mixed"], heads=32, kv_heads=8, dim=128, dtype=dtype, block_size=block_size))
    whole, start = attend(case, kernel), 0
    check(whole, attend(case, reference.paged_attention))
    for row, (count, _) in enumerate(case.lengths):
        for first, end in ((0, count), (0, (count + 1) // 2), (count - 1, count)):
            assert torch.equal(attend(case.part(row, first, end), kernel), whole[start + first : start + end])
        start += count


@pytest.mark.parametrize("dim", [64, 128])
def test_invariant_attention_of_long_contexts_is_dealt_out_to_the_bit(dim: int) -> None:
    """Alone, many programs share a sequence's parts; among others, or in a prompt, one computes them all."""
    kernel = chosen(
        "paged_attention", dtype=torch.bfloat16, head_dim=dim, num_heads=32, num_kv_heads=8, batch_invariant=True
    )
    lengths = [(1, 9000), (70, 5000), (1, 1), (3, 2049), *((1, 1000 + 40 * row) for row in range(40))]
    case = on_card(PagedCase(lengths, heads=32, kv_heads=8, dim=dim, dtype=torch.bfloat16, block_size=128))
    whole, start = attend(case, kernel), 0
    check(whole, attend(case, reference.paged_attention))
    for row, (count, _) in enumerate(case.lengths):
        for first, end in {(0, count), (count // 2, count), (count - 1, count)}:
            assert torch.equal(attend(case.part(row, first, end), kernel), whole[start + first : start + end]), (
                row,
                first,
            )
        start += count


@pytest.mark.parametrize("scale", [1.0, 80.0, 1000.0])
@pytest.mark.parametrize(("dtype", "dim"), [(torch.bfloat16, 128), (torch.bfloat16, 64), (torch.float32, 128)], ids=str)
def test_attention_without_a_running_maximum(dtype: torch.dtype, dim: int, scale: float) -> None:
    """Some rows, or none, have scores whose powers no float32 holds: as long as a program's span, shorter, longer."""
    facts = {"dtype": dtype, "head_dim": dim, "num_heads": 32, "num_kv_heads": 8}
    kernel = chosen("paged_attention", unified_maximum=True, **facts)
    # Float32 holds scores of several hundreds to 1e-4 only, whoever computes them: there the same products are asked
    # for, with the maximum.
    twin = chosen("paged_attention", **facts) if dtype is torch.float32 and scale > 1.0 else reference.paged_attention
    lengths = [*LENGTHS["decode"], (1, 9000), *((1, 10 + 30 * row) for row in range(60)), (3, 700)]
    for count in (4, len(lengths)):
        case = on_card(PagedCase(lengths[:count], heads=32, kv_heads=8, dim=dim, dtype=dtype, block_size=128))
        case.q[::3] *= scale
        case.k_cache[case.table[0, 2].long(), ..., 0] += scale  # one block of the first sequence
        check(attend(case, kernel), attend(case, twin))


CASCADES = {
    "one prefix": ([(1, 2060 + 3 * row) for row in range(100)], [(range(100), 16)]),
    "a prefix in a prefix, and strangers": (
        [(1, 1700)] * 40 + [(30, 900), (1, 0), (2, 700)],
        [(range(36), 4), (range(20), 12)],
    ),
    "nothing": ([(1, 300)] * 40, []),
}


def cascade_case(name: str, heads: int, kv_heads: int, dim: int) -> tuple[PagedCase, Any]:
    """The case and the kernel."""
    lengths, groups = CASCADES[name]
    case = on_card(PagedCase(lengths, heads=heads, kv_heads=kv_heads, dim=dim, dtype=torch.bfloat16, block_size=128))
    for rows, blocks in groups:
        case.table[list(rows), :blocks] = case.table[rows[-1], :blocks].clone()
    return case, chosen("paged_attention", dtype=torch.bfloat16, head_dim=dim, num_heads=heads, num_kv_heads=kv_heads)


def broken_rows(got: torch.Tensor) -> list[int]:
    return (~got.flatten(1).isfinite().all(1)).nonzero().flatten().tolist()


@pytest.mark.parametrize("name", CASCADES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(32, 8, 128), (32, 8, 64), (24, 8, 96), (8, 8, 128), (16, 8, 256)]
)
def test_cascade_attention(heads: int, kv_heads: int, dim: int, name: str) -> None:
    """Prefixes shared: equal to reading them for each, and to itself again and again."""
    case, kernel = cascade_case(name, heads, kv_heads, dim)
    want, got = attend(case, reference.paged_attention), attend(case, kernel)
    assert (broken_rows(want), broken_rows(got)) == ([], [])
    check(got, want)
    for _ in range(20):
        assert torch.equal(attend(case, kernel), got)


@pytest.mark.parametrize("name", CASCADES)
def test_a_broken_sequence_leaves_those_it_shares_with_alone(name: str) -> None:
    case, kernel = cascade_case(name, 32, 8, 128)
    case.q[3] = float("nan")
    assert broken_rows(attend(case, kernel)) == [3]


def test_decode_attention_in_a_graph_follows_lengths_on_the_device() -> None:
    kernel = chosen("paged_attention", dtype=torch.bfloat16, head_dim=128, num_heads=32, num_kv_heads=8)
    case = on_card(
        PagedCase([(1, 3000), (1, 40), (1, 900)], heads=32, kv_heads=8, dim=128, dtype=torch.bfloat16, block_size=16)
    )
    inputs = inputs_of(case)

    def call() -> torch.Tensor:
        out: torch.Tensor = kernel(
            case.q, case.k_cache, case.v_cache, replace(inputs), 0.1, None, None
        )  # a step's own: it is planned anew
        return out

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for lengths in ([3000, 40, 900], [17, 1, 800], [2999, 0, 1]):
        inputs.context_len.copy_(torch.tensor(lengths))
        graph.replay()
        check(out, reference.paged_attention(case.q, case.k_cache, case.v_cache, inputs, 0.1, None, None))


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_parts_of_the_keys_are_merged_by_their_sums(lengths: str, dtype: torch.dtype) -> None:
    """Of three ranks with other keys each, by whichever kernels attend to them."""
    facts = {"dtype": dtype, "head_dim": 128, "num_heads": 32, "num_kv_heads": 8, "ranks": 3}
    kernel, found, wanted = chosen("paged_attention", **facts), [], []
    for seed in range(3):
        case = on_card(
            PagedCase(LENGTHS[lengths], heads=32, kv_heads=8, dim=128, dtype=dtype, block_size=128, seed=seed)
        )
        for attended, by in ((found, kernel), (wanted, reference.paged_attention)):
            sums = torch.full(case.q.shape[:2], 7.0, device="cuda")
            how = inputs_of(case), 0.1, None, None, None
            attended.append((by(case.q, case.k_cache, case.v_cache, *how, sums)[None], sums[None]))
    for (_, got), (_, want) in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=3e-3)
    parts, sums = (torch.cat(each) for each in zip(*found, strict=True))
    merge, want = chosen("merge_parts", **facts), reference.merge_parts(*wanted)
    check(merge((parts, sums)), want)
    check(merge((parts[:1], sums[:1]), (parts[1:], sums[1:])), want)
