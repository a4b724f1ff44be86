"""How keys are dealt out to programs, in the interpreter: every unit once, short pairs uncut, each record says where its program begins."""

from __future__ import annotations

import random

import pytest
import torch

import tests.support.triton_interpreter  # noqa: F401  before any kernel: it fixes the mode
from headrace.kernels.triton.attention import Tiles
from headrace.kernels.triton.plan import (
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
from headrace.kernels.triton.sharing import FEWEST
from headrace.layers.inputs import AttentionInputs

KEYS, KV_HEADS, PROGRAMS = 64, 2, 12
FIELDS = (BEGIN, END, SEQUENCE, HEAD, STEP, FIRST_0, LAST_0, FIRST_1, LAST_1, CONTEXT)


def records(contexts: list[int], whole: int, beginning: int = 0) -> list[dict[str, int]]:
    ints = torch.tensor(contexts, dtype=torch.int32)
    starts, rows = torch.arange(len(contexts) + 1, dtype=torch.int32), len(contexts)
    inputs = AttentionInputs(torch.zeros((rows, 1), dtype=torch.int32), starts, ints, torch.zeros(rows).long(), 16, 1, max(contexts))
    made = make_plan(inputs, None, 1, PROGRAMS, 4, KV_HEADS, Tiles(16, KEYS, 4, 0, 2), None, whole, beginning)
    assert made.shared is None
    names = ("begin", "end", "sequence", "head", "step", "first_0", "last_0", "first_1", "last_1", "context")
    return [{name: int(row[field.value]) for name, field in zip(names, FIELDS, strict=True)} for row in made.spans]


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
        for pair, first, last in ((parts[0], each["first_0"], each["last_0"]), (parts[-1], each["first_1"], each["last_1"])):
            if first <= last:  # those programs, and no others, meet that pair
                meets = [at for at, other in enumerate(dealt) if any(unit[:2] == pair[:2] for unit in line[other["begin"] : other["end"]])]
                assert meets == list(range(first, last + 1))
    assert covered == line


def test_short_pairs_stay_whole_where_there_are_programs_to_spare() -> None:
    for whole, programs in ((2, 4), (4, 2)):
        busy = [each for each in records([200], whole) if each["begin"] < each["end"]]  # four units a head
        assert len(busy) == programs
        assert all((each["first_0"] <= each["last_0"] or each["first_1"] <= each["last_1"]) == (whole == 2) for each in busy)


def test_few_sequences_and_groups_that_fill_a_tile_alone_are_not_looked_at() -> None:
    assert may_group(FEWEST, 4) and not may_group(FEWEST - 1, 4) and not may_group(100, 64)
