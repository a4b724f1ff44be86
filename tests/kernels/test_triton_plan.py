"""How keys are dealt out to programs, in the interpreter: every unit once, short pairs uncut, each record says where
its program begins."""

from __future__ import annotations

import random

import pytest
import torch

import tests.support.triton_interpreter  # noqa: F401  before any kernel: it fixes the mode
from headrace.kernels.attention.paged import Tiles
from headrace.kernels.attention.triton_plan import (
    ALIKE,
    BEGIN,
    CONTEXT,
    END,
    FIRST_0,
    FIRST_1,
    HEAD,
    LAST_0,
    LAST_1,
    SEQUENCE,
    STEP,
    make_plan,
    may_group,
)
from headrace.kernels.attention.triton_sharing import FEWEST
from headrace.kernels.inputs import AttentionInputs

KEYS, KV_HEADS, PROGRAMS = 64, 2, 12
FIELDS = (BEGIN, END, SEQUENCE, HEAD, STEP, FIRST_0, LAST_0, FIRST_1, LAST_1, CONTEXT)


def dealt_out(contexts: list[int], whole: int, beginning: int = 0, warps: int = 0) -> torch.Tensor:
    ints = torch.tensor(contexts, dtype=torch.int32)
    starts, rows = torch.arange(len(contexts) + 1, dtype=torch.int32), len(contexts)
    inputs = AttentionInputs(
        torch.zeros((rows, 1), dtype=torch.int32), starts, ints, torch.zeros(rows).long(), 16, 1, max(contexts)
    )
    made = make_plan(inputs, None, 1, PROGRAMS, 4, KV_HEADS, Tiles(16, KEYS, 4, 0, 2), None, whole, beginning, warps)
    assert made.shared is None
    return made.spans


def records(contexts: list[int], whole: int, beginning: int = 0) -> list[dict[str, int]]:
    names = ("begin", "end", "sequence", "head", "step", "first_0", "last_0", "first_1", "last_1", "context")
    spans = dealt_out(contexts, whole, beginning)
    return [{name: int(row[field.value]) for name, field in zip(names, FIELDS, strict=True)} for row in spans]


@pytest.mark.parametrize(("whole", "beginning"), [(2, 0), (5, 1)])
@pytest.mark.parametrize("seed", range(4))
def test_units_are_dealt_out_once_and_records_say_where(seed: int, whole: int, beginning: int) -> None:
    drawn = random.Random(seed)
    contexts = [drawn.choice((0, 1, 64, 65, 192, 200, 700)) for _ in range(drawn.randint(1, 9))]
    units = [beginning + max(-(-each // KEYS), 1) for each in contexts]
    line = [(row, head, step) for row, count in enumerate(units) for head in range(KV_HEADS) for step in range(count)]
    covered: list[tuple[int, int, int]] = []
    dealt = records(contexts, whole, beginning)
    for each in (each for each in dealt if each["begin"] < each["end"]):
        assert (each["sequence"], each["head"], each["step"]) == line[each["begin"]]
        assert each["context"] == contexts[each["sequence"]]
        covered += line[each["begin"] : each["end"]]
        for first, last in (("first_0", "last_0"), ("first_1", "last_1")):
            assert each[first] > each[last] or 0 <= each[first] < each[last] < PROGRAMS
        parts = [row for at, row in enumerate(line) if each["begin"] <= at < each["end"]]
        for pair, first, last in (
            (parts[0], each["first_0"], each["last_0"]),
            (parts[-1], each["first_1"], each["last_1"]),
        ):
            if first <= last:  # those programs, and no others, meet that pair
                meets = [
                    at
                    for at, other in enumerate(dealt)
                    if any(unit[:2] == pair[:2] for unit in line[other["begin"] : other["end"]])
                ]
                assert meets == list(range(first, last + 1))
    assert covered == line


def test_short_pairs_stay_whole_where_there_are_programs_to_spare() -> None:
    for whole, programs in ((2, 4), (4, 2)):
        busy = [each for each in records([200], whole) if each["begin"] < each["end"]]  # four units a head
        assert len(busy) == programs
        assert all(
            (each["first_0"] <= each["last_0"] or each["first_1"] <= each["last_1"]) == (whole == 2) for each in busy
        )


def test_few_sequences_and_groups_that_fill_a_tile_alone_are_not_looked_at() -> None:
    assert may_group(FEWEST, 4) and not may_group(FEWEST - 1, 4) and not may_group(100, 64)


@pytest.mark.parametrize(
    ("contexts", "alike"),
    [
        ([170] * 12, True),
        ([170] * 12 + [0] * 20, True),  # of no sequence
        ([170] * 11, False),  # 22 pairs for 48 warps
        ([108, 300] * 6, True),
        ([106, 300] * 6, False),
        ([60] * 30 + [420], False),
        ([1024] * 12, True),
        ([1100] * 12, False),
        ([0] * 40, False),
        ([190] * 300, True),
        ([190] * 300 + [288], False),  # behind those looked at in one go
    ],
)
def test_many_sequences_as_long_as_each_other_are_said_to_be_so(contexts: list[int], alike: bool) -> None:
    assert set(dealt_out(contexts, 5, 1, 4 * PROGRAMS)[:, ALIKE.value].tolist()) == {int(alike)}
