"""Plans of lifetimes are valid and small, and the model of a caching allocator joins what it split."""

from __future__ import annotations

import random

import pytest

from headrace.worker.arena import ALIGNED, Use, plan, rounded
from lab.arena import uses_of
from lab.arena_model import CachingAllocator, between, compare, most_alive, replay


def step(draw: random.Random, count: int = 60) -> list[Use]:
    firsts = sorted(draw.sample(range(10 * count), count))
    return [
        Use(draw.choice((1, 512, 10**6, draw.randint(1, 10**7))), first, first + draw.randint(1, 80))
        for first in firsts
    ]


@pytest.mark.parametrize("seed", range(30))
def test_no_two_tensors_that_live_together_share_a_byte(seed: int) -> None:
    uses = step(random.Random(seed))
    found = plan(uses)
    places = list(zip(uses, found.offsets, strict=True))
    for index, (one, at) in enumerate(places):
        assert at % ALIGNED == 0 and at + one.size <= found.size
        for other, where in places[:index]:
            apart = one.last <= other.first or other.last <= one.first
            assert apart or at + one.size <= where or where + other.size <= at
    assert most_alive(uses) <= found.size <= sum(rounded(use.size) for use in uses)


def test_a_chain_of_layers_is_planned_without_a_gap() -> None:
    """Each layer: a narrow tensor, a wide one, a narrow one; the residual lives through."""
    uses = [Use(4096, 0, 1000)]
    for layer in range(32):
        at = 10 * layer
        uses += [
            Use(4096, at + 1, at + 4),
            Use(28672, at + 2, at + 6),
            Use(14336, at + 5, at + 8),
            Use(4096, at + 7, at + 12),
        ]
    assert plan(uses).size == most_alive(uses)
    assert plan([]).size == most_alive([]) == 0


def test_lengths_between_two_recorded_ones_follow() -> None:
    shorter, longer = [Use(1000, 0, 2), Use(64, 1, 3)], [Use(3000, 0, 2), Use(64, 1, 3)]
    assert between(shorter, longer, (100, 300), 200) == [Use(2000, 0, 2), Use(64, 1, 3)]
    with pytest.raises(ValueError, match="not of one kind"):
        between(shorter, [Use(3000, 0, 3), Use(64, 1, 3)], (100, 300), 200)


def test_the_caching_allocator_joins_what_it_split_and_keeps_what_it_took() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.allocate(size) for size in (600, 300, 3 * 2**20, 5 * 2**20, 30 * 2**20)]
    assert (allocator.reserved, allocator.taken) == (2 * 2**20 + 20 * 2**20 + 30 * 2**20, 3)
    for block in blocks:
        allocator.free(block)
    again = [allocator.allocate(size) for size in (2**20, 2**20 - 600, 20 * 2**20, 30 * 2**20)]
    assert allocator.taken == 3 and len({block[1:3] for block in again}) == 4


@pytest.mark.parametrize("seed", range(5))
def test_a_run_of_changing_lengths_holds_more_than_its_plan(seed: int) -> None:
    draw = random.Random(seed)
    whole = step(draw)
    traces = [
        between([Use(0, use.first, use.last) for use in whole], whole, (0, 100), draw.randint(1, 100))
        for _ in range(40)
    ]
    found = compare(traces)
    assert found.alive <= found.planned and found.alive <= found.cached and found.tensors == 40 * len(whole)
    allocator = CachingAllocator()
    for _ in range(3):
        replay(allocator, whole)
    once = allocator.taken
    replay(allocator, whole)
    assert allocator.taken == once, "the same step again asks the driver for nothing"


def test_a_record_of_requests_becomes_lifetimes() -> None:
    def entry(action: str, addr: int, size: int = 2 * 10**6) -> dict[str, object]:
        return {"action": action, "addr": addr, "size": size}

    record = [
        entry("alloc", 1),
        entry("segment_alloc", 9),
        entry("alloc", 2, 64),
        entry("alloc", 3),
        entry("free_requested", 1),
    ]
    record += [entry("free_completed", 1), entry("alloc", 1, 3 * 10**6), entry("free_requested", 7)]
    assert uses_of(record) == [Use(2 * 10**6, 0, 2), Use(2 * 10**6, 1, 4), Use(3 * 10**6, 3, 4)]
