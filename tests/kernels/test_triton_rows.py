"""Gathering a step's inputs from rows and storing its tokens, in Triton, against their torch twins, in the
interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import tests.support.triton_interpreter  # noqa: F401  before any kernel: it fixes the mode
from headrace.kernels.rows import reference as twins
from headrace.kernels.rows import triton_rows as rows


def _step(counts: list[int], contexts: list[int], dummies: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """(chunk, position, context) of chunks packed one after another, the first padded by ``dummies`` tokens of no
    sequence."""
    chunk = [0] * dummies + [index for index, count in enumerate(counts) for _ in range(count)]
    position = [-1] * dummies + [
        context - count + i for count, context in zip(counts, contexts, strict=True) for i in range(count)
    ]
    return tuple(torch.tensor(values, dtype=torch.int32) for values in (chunk, position, contexts))  # type: ignore[return-value]


@pytest.mark.parametrize("block_size", [8, 16])
@pytest.mark.parametrize("counts", [[1] * 5, [3, 1, 140, 1, 9], [1]])
@pytest.mark.parametrize("dummies", [0, 3])
def test_inputs_equal_those_of_the_twin(block_size: int, counts: list[int], dummies: int) -> None:
    generator = torch.Generator().manual_seed(len(counts))
    contexts = [count + 7 * index for index, count in enumerate(counts)]
    token_ids = torch.randint(0, 1000, (9, 200), generator=generator, dtype=torch.int32)
    table = torch.randint(0, 99, (9, 200 // block_size + 1), generator=generator, dtype=torch.int32)
    row = torch.randperm(9, generator=generator)[: len(counts)].int()
    chunk, position, context = _step(counts, contexts, dummies)
    width = -(-max(contexts) // block_size)
    results = [
        function(token_ids, table, row, chunk, position, context, block_size, width)
        for function in (rows.gather_inputs, twins.gather_inputs)
    ]
    for got, want in zip(results[0][:3], results[1][:3], strict=True):
        assert got.dtype == want.dtype
        assert got.tolist() == want.tolist()
    for index, length in enumerate(contexts):
        needed = -(-length // block_size)
        assert results[0][3][index, :needed].tolist() == results[1][3][index, :needed].tolist()


def test_a_chunk_of_no_sequence_reads_nothing() -> None:
    """A graph's padding: row 0, position -1, context 0."""
    token_ids, table = torch.full((2, 8), 5, dtype=torch.int32), torch.zeros(2, 1, dtype=torch.int32)
    row, chunk, position, context = (
        torch.tensor(values, dtype=torch.int32) for values in ([1, 0, 0], [0, 1, 2], [7, -1, -1], [8, 0, 0])
    )
    ids, positions, slots, _ = rows.gather_inputs(token_ids, table, row, chunk, position, context, 8, 1)
    assert (ids.tolist(), positions.tolist(), slots.tolist()) == ([5, 0, 0], [7, 0, 0], [7, -1, -1])


@pytest.mark.parametrize("write", [rows.write_rows, twins.write_rows])
@pytest.mark.parametrize("lengths", [[1], [0], [0, 0, 5], [7, 0, 1025, 1, 1024, 1023], [2111, 3, 2049]], ids=str)
def test_new_rows_begin_with_their_ids_and_keep_what_lies_behind(write, lengths: list[int]) -> None:  # type: ignore[no-untyped-def]
    generator = torch.Generator().manual_seed(len(lengths))
    token_ids = torch.randint(0, 1000, (9, 2111), generator=generator, dtype=torch.int32)
    ids, row = torch.arange(sum(lengths)).int() + 5000, torch.randperm(9, generator=generator)[: len(lengths)]
    begin, wanted = [sum(lengths[:n]) for n in range(len(lengths) + 1)], token_ids.tolist()
    for each, first, end in zip(row.tolist(), begin, begin[1:], strict=False):
        wanted[each][: end - first] = range(5000 + first, 5000 + end)
    for longest in (max(lengths), 2111):
        written = token_ids.clone()
        write(written, ids, row, torch.tensor(begin, dtype=torch.int32), longest)
        assert written.tolist() == wanted


@pytest.mark.parametrize("store", [rows.store_tokens, twins.store_tokens])
def test_tokens_are_stored_where_they_belong_and_nowhere_else(store) -> None:  # type: ignore[no-untyped-def]
    token_ids = torch.zeros(5, 6, dtype=torch.int32)
    row, place = torch.tensor([4, 0, 2, 0], dtype=torch.int32), torch.tensor([5, 0, 6, 3], dtype=torch.int32)
    picked = store(token_ids, row, place, torch.tensor([11, 12, 13, 14]), torch.tensor([1.5, 0.0, float("nan"), -3e38]))
    assert picked.tolist() == [[11, 1], [12, 1], [13, 0], [14, 1]]
    wanted = torch.zeros(5, 6, dtype=torch.int32)
    wanted[4, 5], wanted[0, 3] = 11, 14  # place 0 (padding) and place 6 (beyond the row) go nowhere
    assert token_ids.tolist() == wanted.tolist()


@pytest.mark.parametrize("count", [1, 5, 300])
@pytest.mark.parametrize("fetch", [rows.fetch_step, twins.fetch_step])
def test_what_the_host_wrote_is_fetched_slot_by_slot(fetch, count: int) -> None:  # type: ignore[no-untyped-def]
    ring = torch.randint(0, 1000, (3, 7, 304), dtype=torch.int32)
    ring[:, 6, 0] = 0
    turn, shipped, table = (
        torch.zeros(1, dtype=torch.int32),
        torch.full((3, 304), 7, dtype=torch.int32),
        torch.zeros(4, 5, dtype=torch.int32),
    )
    for slot in (0, 1, 2, 0):
        fetch(ring, turn, shipped[:, :count], table)
        assert shipped[:, :count].tolist() == ring[slot, :3, :count].tolist() and (shipped[:, count:] == 7).all()
        assert turn.item() == (slot + 1) % 3
    assert not table.any()


@pytest.mark.parametrize("edits", [1, 3, 300])
@pytest.mark.parametrize("fetch", [rows.fetch_step, twins.fetch_step])
def test_block_tables_are_edited_where_the_host_says_and_nowhere_else(fetch, edits: int) -> None:  # type: ignore[no-untyped-def]
    ring = torch.randint(0, 9, (2, 7, 304), dtype=torch.int32)  # what lies behind the edits is of an earlier step
    places = torch.randperm(30 * 40)[:edits]
    ring[1, 3, :edits], ring[1, 4, :edits], ring[1, 5, :edits] = (
        places.int() // 40,
        places.int() % 40,
        torch.arange(edits).int() + 100,
    )
    ring[1, 6, 0] = edits
    table = torch.arange(1200, dtype=torch.int32).view(30, 40)
    wanted = table.clone()
    wanted.view(-1)[places] = torch.arange(edits).int() + 100
    fetch(ring, torch.ones(1, dtype=torch.int32), torch.zeros(3, 2, dtype=torch.int32), table)
    assert table.tolist() == wanted.tolist()


@pytest.mark.parametrize("store", [rows.store_tokens, twins.store_tokens])
@pytest.mark.parametrize("turn", [0, 1, 2])
def test_tokens_are_left_for_the_host_in_the_slot_of_their_step(store, turn: int) -> None:  # type: ignore[no-untyped-def]
    token_ids, ring = torch.zeros(200, 6, dtype=torch.int32), torch.full((3, 304, 2), -7, dtype=torch.int32)
    row, tokens = torch.arange(200, dtype=torch.int32), torch.arange(200) + 3
    store(
        token_ids,
        row,
        row * 0 + 2,
        tokens,
        torch.where(tokens % 2 == 0, 0.0, float("inf")),
        ring,
        torch.tensor([turn], dtype=torch.int32),
    )
    slot = (turn - 1) % 3
    assert ring[slot, :200].tolist() == [[token, int(token % 2 == 0)] for token in range(3, 203)]
    ring[slot, :200] = -7
    assert (ring == -7).all() and token_ids[:, 2].tolist() == list(range(3, 203))
