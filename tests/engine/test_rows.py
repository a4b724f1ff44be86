"""Rows against a plain record of them: whatever plans bring, in one launch for all of it or in many."""

from __future__ import annotations

import random
import struct
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from headrace.request import NewRow, SamplingParams, StepPlan
from headrace.worker import rows as module
from headrace.worker.rows import Rows, Trait

CPU = torch.device("cpu")
VIEWS = ("slice", "view", "as_strided", "alias", "detach")
ROWS, LONGEST, VOCAB = 7, 61, 50  # nothing is a multiple of anything
PENALISED = SamplingParams(temperature=0.0, presence_penalty=0.5, frequency_penalty=-0.25)
ASKED = (
    PENALISED,
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.7, top_p=0.9, top_k=2**31 - 1, min_p=0.1),
    SamplingParams(temperature=1.0, top_k=-1, logprobs=3),
    SamplingParams(temperature=0.3, min_p=0.2, logprobs=0),
    SamplingParams(temperature=1.0, top_p=0.5),
    SamplingParams(temperature=0.5, presence_penalty=-2.0, repetition_penalty=1e-40, logit_bias={4: 1.5, 2: -100.0}),
    SamplingParams(temperature=0.0, repetition_penalty=1.3, allowed_token_ids=(9, 3, 9), min_tokens=4),
)


class Record:
    """What rows hold, written value by value in the order a plan says."""

    def __init__(self, block_sizes: tuple[int, ...]) -> None:
        self.ids = [[0] * LONGEST for _ in range(ROWS)]
        self.tables = [[[0] * -(-LONGEST // size) for _ in range(ROWS)] for size in block_sizes]
        self.params = [[0] * 11 for _ in range(ROWS)]
        self.counts = [[0] * VOCAB for _ in range(ROWS)]
        self.known: dict[int, NewRow] = {}

    def apply(self, plan: StepPlan) -> None:
        for row in plan.rows_dropped:
            self.known.pop(row, None)
        last = {new.row: new for new in plan.rows_added}
        for new in last.values():
            self.known[new.row] = new
            self.ids[new.row][: len(new.token_ids)] = new.token_ids
            self.params[new.row] = _bits(new)
            if new.params.presence_penalty or new.params.frequency_penalty:
                count = Counter(new.token_ids[new.num_prompt_tokens :])
                self.counts[new.row] = [count[token] for token in range(VOCAB)]
        for row, group, index, block in zip(
            plan.table_row, plan.table_group, plan.table_index, plan.table_block, strict=True
        ):
            self.tables[group][row][index] = block


def _bits(new: NewRow) -> list[int]:
    p = new.params
    floats = (
        p.temperature,
        p.top_p,
        p.min_p,
        p.presence_penalty,
        p.frequency_penalty,
        max(p.repetition_penalty, 1e-30),
    )
    whole = struct.pack("<q" if new.seed < 0 else "<Q", new.seed)
    ends = struct.pack("<2i", new.num_prompt_tokens, new.adapter_slot)
    return list(struct.unpack("<11i", struct.pack("<6fi", *floats, max(p.top_k, 0)) + whole + ends))


def _traits(new: NewRow) -> Iterator[Trait]:
    p = new.params
    penalties = p.presence_penalty, p.frequency_penalty
    if p.temperature:
        yield Trait.RANDOM
    if (p.top_p, p.min_p) != (1.0, 0.0) or p.top_k > 0:
        yield Trait.FILTERED
    if new.bad_word_ids or p.logit_bias or p.allowed_token_ids or p.min_tokens:
        yield Trait.EDITED
    if any(penalties) or p.repetition_penalty != 1.0:
        yield Trait.PENALISED
    if any(penalties):
        yield Trait.COUNTED
    if p.logprobs is not None:
        yield Trait.SCORED


def _assert_same(rows: Rows, record: Record) -> None:
    assert rows.token_ids.tolist() == record.ids
    assert [table.tolist() for table in rows.tables] == record.tables
    assert rows.params.tolist() == record.params
    assert rows.counts.tolist() == record.counts
    assert set(rows.host) == set(record.known)
    for row, new in record.known.items():
        host, p = rows.host[row], new.params
        assert (
            host.params is p
            and rows.traits[row] == host.traits
            and rows.num_prompt_tokens[row] == new.num_prompt_tokens
        )
        assert {trait for trait in Trait if trait & host.traits} == set(_traits(new))
        assert host.stop_ids.tolist() == (
            [token for token in new.stop_token_ids if token < VOCAB] if p.min_tokens else []
        )
        assert dict(zip(host.bias_ids.tolist(), host.bias_values.tolist(), strict=True)) == (p.logit_bias or {})
        assert (None if host.allowed_ids is None else host.allowed_ids.tolist()) == (
            sorted({*p.allowed_token_ids}) if p.allowed_token_ids else None
        )
        assert (host.bad_words is None) == (not any(new.bad_word_ids))
        assert host.bad_words is None or host.bad_words.last.tolist() == [word[-1] for word in new.bad_word_ids if word]


def _new(draw: random.Random, row: int) -> NewRow:
    length = draw.choice((0, 1, 3, 8, LONGEST - 1, LONGEST))
    params, stops = draw.choice(ASKED), draw.choice(((), (VOCAB + 3, 7), (7,)))
    prompt = draw.choice(
        (length, length // 2, min(1, length), length + 1)
    )  # beyond the prompt: a row that begins again; none of it known yet
    words = draw.choice(((), (), ((3,), (), (4, 5, 6))))
    seed = draw.choice((0, 2**64 - 1, -(2**63), 2**31, 12345))
    return NewRow(row, row, array("i", draw.choices(range(VOCAB), k=length)), prompt, params, seed, stops, words)


def _plan(draw: random.Random, block_sizes: tuple[int, ...]) -> StepPlan:
    """Rows given away twice among them, and places edited twice."""
    new = tuple(_new(draw, draw.randrange(ROWS)) for _ in range(draw.choice((0, 1, 1, 4, 9))))
    edits = []
    for _ in range(draw.choice((0, 1, 5, 40))):
        group = draw.randrange(len(block_sizes))
        edits.append(
            (draw.randrange(ROWS), group, draw.randrange(-(-LONGEST // block_sizes[group])), draw.randrange(1, 1000))
        )
    columns = [array("i", column) for column in zip(*edits, strict=True)] or [array("i")] * 4
    return StepPlan(1, array("i", draw.sample(range(ROWS), 2)), new, *columns)


@pytest.mark.parametrize("block_sizes", [(4,), (16, 3), (1, 61, 8)], ids=str)
@pytest.mark.parametrize("seed", range(6))
def test_rows_are_what_plans_made_them(block_sizes: tuple[int, ...], seed: int) -> None:
    draw, rows, record = random.Random(seed), Rows(ROWS, LONGEST, VOCAB, block_sizes, CPU), Record(block_sizes)
    for _ in range(8):
        plan = _plan(draw, block_sizes)
        rows.apply(plan)
        record.apply(plan)
        _assert_same(rows, record)
        places = rows._table_edits(plan)[0].tolist()
        assert len(set(places)) == len(places), "of two writes of one place a device keeps either"


def test_a_row_given_away_twice_in_a_plan_is_the_last_one_s() -> None:
    rows, record = Rows(ROWS, LONGEST, VOCAB, (4,), CPU), Record((4,))
    one, other = (NewRow(3, n, array("i", [n] * 5), 2, PENALISED, n, ()) for n in (1, 2))
    for plan in (StepPlan(1, rows_added=(one, other)), StepPlan(2, rows_added=(replace(other, params=ASKED[-2]), one))):
        rows.apply(plan)
        record.apply(plan)
        _assert_same(rows, record)
    assert rows.counts[3].tolist() == [0, 3] + [0] * (VOCAB - 2)


def test_a_row_longer_than_the_longest_sequence_reaches_no_other() -> None:
    rows = Rows(ROWS, LONGEST, VOCAB, (4,), CPU)
    with pytest.raises(AssertionError, match="longest"):
        rows.apply(StepPlan(1, rows_added=(NewRow(0, 0, array("i", range(LONGEST + 1)), 1, ASKED[0], 0, ()),)))
    assert not rows.token_ids.any() and not rows.host


def test_tables_begin_where_kernels_read_them_whole() -> None:
    rows = Rows(3, 9, VOCAB, (4, 2, 9), CPU)
    assert [table.shape for table in rows.tables] == [(3, 3), (3, 5), (3, 1)]
    assert {(table.data_ptr() - rows.tables[0].data_ptr()) % 16 for table in rows.tables} == {0}


class Counted(TorchDispatchMode):
    """Operations that a device would be launched for or copied to."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **kwargs or {})


def _launched(count: int) -> tuple[int, Counter[str]]:
    """(calls of the operation, everything else) for so many new rows in a plan."""
    writes: list[Any] = []
    new = tuple(NewRow(row, row, array("i", [row] * 9), 9, PENALISED, row, (7,)) for row in range(count))
    edits = [
        array("i", column)
        for column in zip(*((row, group, 0, 5) for row in range(count) for group in range(2)), strict=True)
    ]
    rows = Rows(ROWS, LONGEST, VOCAB, (4, 8), CPU, lambda *given: writes.append(given))
    with Counted() as counted:
        rows.apply(StepPlan(1, array("i"), new, *edits))
    return len(writes), Counter(name for name in counted.names if name not in VIEWS)


def test_many_new_rows_are_as_many_launches_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[None] = []
    real = module._host_row
    monkeypatch.setattr(module, "_host_row", lambda *given: looks.append(None) or real(*given))
    (writes, one), many = _launched(1), _launched(ROWS)
    assert writes == 1 and many == (1, one) and sum(one.values()) < 16
    assert len(looks) == 2, "what rows share is looked at once a plan"
