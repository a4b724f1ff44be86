"""The arena learns what steps ask for and how long it lives, hands out places by it, and gives up a step that does
something else."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from headrace.worker import arena as arena_module
from headrace.worker.arena import Arena, sees_lifetimes
from tests.support.poisoned import PoisonedArena

CPU, WIDTH = torch.device("cpu"), 4


def layers(
    arena: Arena, tokens: int, *, wanted: int | None = None, count: int = 3, gated: bool = False
) -> Callable[[], Tensor]:
    """Each layer: a wide result from a narrow one, a narrow one from that, and a sum that lives through the next
    layer."""

    def result(rows: int, width: int) -> Tensor:
        return arena.empty((rows, width), torch.float32, CPU)

    def compute() -> Tensor:
        x = result(tokens, WIDTH).copy_(torch.arange(tokens).unsqueeze(1).expand(-1, WIDTH))
        for layer in range(count):
            wide = result(tokens, 3 * WIDTH)
            wide.copy_(x.repeat(1, 3))
            if gated:
                wide = torch.mul(wide, 1, out=result(tokens, 3 * WIDTH))
            half = wide[:, WIDTH : 2 * WIDTH]  # keeps the storage, not the tensor
            del wide
            narrow = torch.add(half, 1, out=result(tokens, WIDTH))
            del half
            if wanted is not None and layer == count - 1:
                x, narrow = x[:wanted], narrow[:wanted]
            x = torch.add(x, narrow, out=result(len(x), WIDTH))
        return x

    return compute


def step(arena: Arena, tokens: int, wanted: int | None = None, **how: int) -> None:
    expected = layers(Arena(CPU), tokens, wanted=wanted, **how)()
    assert torch.equal(arena.run(layers(arena, tokens, wanted=wanted, **how), tokens, wanted), expected)


def test_this_torch_says_when_memory_is_let_go() -> None:
    assert sees_lifetimes()


@pytest.mark.parametrize("lengths", [(8, 8, 8), (8, 3, 500, 1, 77), (100, 101, 99)])
def test_steps_of_any_length_follow_the_recorded_one(lengths: tuple[int, ...]) -> None:
    arena = PoisonedArena(CPU)
    for tokens in lengths:
        step(arena, tokens)
        step(arena, tokens, max(1, tokens // 2) if tokens > 1 else None)
    assert arena.served.differed == 0 and arena.served.recorded == 2
    assert arena.served.planned == 2 * len(lengths) - 2


def test_the_buffer_holds_what_is_alive_at_once_and_grows_no_more() -> None:
    """Of the largest layer: x, the wide one, the narrow one, and that of the layer before, which is named until then;
    never all layers."""
    arena, tokens = Arena(CPU), 1024
    for count in (tokens // 2, tokens // 2, tokens, tokens // 4, tokens):
        step(arena, count, count=20)
    assert arena.buffer.size == tokens * (1 + 3 + 1 + 1) * WIDTH * 4


def test_the_same_length_again_gets_the_same_views() -> None:
    arena, seen = Arena(CPU), []

    def compute() -> Tensor:
        made = arena.empty((tokens, WIDTH), torch.float32, CPU)
        if arena.served.recorded:  # else it would outlive the step that is recorded
            seen.append(made)
        return torch.zeros(1)

    for tokens in (6, 6, 5, 6):
        arena.run(compute, tokens)
    assert seen[0] is seen[2] and seen[1].shape == (5, WIDTH) and seen[1].data_ptr() == seen[0].data_ptr()


def test_the_result_of_a_step_is_the_callers() -> None:
    arena = PoisonedArena(CPU)
    results = [arena.run(layers(arena, 6), 6) for _ in range(3)]
    assert all(torch.equal(results[0], each) for each in results)
    assert not any(arena.buffer.holds(each) for each in results)


def test_a_result_that_suddenly_outlives_its_step_is_copied() -> None:
    arena, kept = PoisonedArena(CPU), False

    def compute() -> Tensor:
        first = arena.empty((3, WIDTH), torch.float32, CPU).fill_(7.0)
        second = arena.empty((3, WIDTH), torch.float32, CPU).fill_(8.0)
        return first if kept else second

    arena.run(compute, 3)
    kept = True
    assert arena.run(compute, 3).eq(7.0).all()


def test_a_step_that_asks_for_something_else_goes_on_by_itself() -> None:
    """Short steps ask for more; where that begins is found out, and both kinds are planned then."""
    arena = PoisonedArena(CPU)
    lengths = [1000, 900, 10, 12, 500, 20, 600, 300, 250, 280, 100, 120, 400, 450, 64, 15, 999, 258, 254, 256, 255, 257]
    for tokens in lengths:
        step(arena, tokens, gated=tokens <= 256)
    found = arena.served
    assert (
        found.recorded == 2 and found.differed <= 9 and found.planned == len(lengths) - found.differed - found.recorded
    )
    for tokens in (7, 700):
        step(arena, tokens, gated=tokens <= 256)
    assert found.planned == len(lengths) + 2 - found.differed - found.recorded


@pytest.mark.parametrize("counts", [(3, 2), (2, 3)])
def test_a_step_that_asks_for_less_or_more_is_recorded_anew(counts: tuple[int, int]) -> None:
    arena = PoisonedArena(CPU)
    for count in (counts[0], counts[0], counts[1], counts[1], counts[1]):
        step(arena, 9, count=count)
    assert (arena.served.planned, arena.served.recorded, arena.served.differed) == (2, 2, 1)


def test_a_kind_that_never_settles_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_module, "_MOST_LEARNT", 10)
    arena = PoisonedArena(CPU)
    for count in (*range(1, 20), 2):
        step(arena, 9, count=count)
    assert arena.served.recorded == 5 and arena._kinds[None, True].settled


def test_lifetimes_of_equal_requests_are_the_longest_seen() -> None:
    """One step keeps what another lets go at once; the second is recorded because steps near it asked for something
    else."""
    arena = PoisonedArena(CPU)

    def compute(tokens: int, *, keeps: bool, more: bool = False) -> Callable[[], Tensor]:
        def run() -> Tensor:
            first = arena.empty((tokens, WIDTH), torch.float32, CPU).fill_(1.0)
            used = first if keeps else first.clone()
            del first
            second = arena.empty((tokens, WIDTH), torch.float32, CPU).fill_(2.0)
            third = arena.empty((tokens, 2 * WIDTH), torch.float32, CPU).fill_(3.0) if more else second
            return used + second + third[:, :WIDTH]

        return run

    arena.run(compute(10, keeps=False), 10)
    arena.run(compute(20, keeps=False, more=True), 20)
    arena.run(compute(21, keeps=True), 21)
    for tokens in (10, 21, 15, 5):
        assert arena.run(compute(tokens, keeps=True), tokens).eq(5.0).all()
    assert arena.served.planned == 4


def test_a_failed_step_leaves_nothing_behind() -> None:
    arena = PoisonedArena(CPU)

    def fail() -> Tensor:
        kept.append(arena.empty((8, WIDTH), torch.float32, CPU))
        raise ValueError("not today")

    kept: list[Tensor] = []
    for turn in range(4):
        with pytest.raises(ValueError, match="not today"):
            arena.run(fail, 8)
        step(arena, 8)
        assert arena.empty((8, WIDTH), torch.float32, CPU).untyped_storage().nbytes() == 8 * WIDTH * 4, turn
    assert (arena.served.planned, arena.served.recorded, arena.served.differed) == (3, 1, 0)


def test_other_threads_and_results_that_are_no_rows_get_memory_of_their_own() -> None:
    arena, made = PoisonedArena(CPU), []

    def compute() -> Tensor:
        thread = threading.Thread(target=lambda: made.append(arena.empty((5, WIDTH), torch.float32, CPU)))
        thread.start()
        thread.join()
        made.append(arena.empty((17, 5), torch.float32, CPU))
        return layers(arena, 5)()

    expected = layers(Arena(CPU), 5)()
    for _ in range(3):
        assert torch.equal(arena.run(compute, 5), expected)
    assert arena.served.planned == 2 and not any(arena.buffer.holds(each) for each in made)


def test_memory_that_is_given_back_is_found_again_wherever_it_is() -> None:
    """As on a GPU: views follow their storage."""
    arena = PoisonedArena(CPU)
    buffer = arena.buffer

    def give_back() -> None:
        if buffer._storage is not None:
            buffer._storage.resize_(0)

    buffer.give_back = give_back  # type: ignore[method-assign]
    held = []
    for tokens in (7, 7, 9, 7, 9, 7):
        step(arena, tokens)
        assert buffer._storage is None or buffer._storage.nbytes() == 0
        held.append(torch.empty(buffer.size, dtype=torch.uint8))
    assert arena.served.planned == 5


def test_a_step_without_room_in_one_piece_costs_smaller_ones_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each of them would ask for as much again, in vain, and each time torch would give back all that it keeps."""
    arena, room = Arena(CPU), [0]
    borrow = torch.UntypedStorage.resize_

    def resize(storage: torch.UntypedStorage, size: int) -> None:
        if size > room[0]:
            raise torch.OutOfMemoryError
        borrow(storage, size)

    step(arena, 8)
    step(arena, 8)
    room[0] = arena.buffer.size
    with monkeypatch.context() as patch:
        patch.setattr(torch.UntypedStorage, "resize_", resize)
        step(arena, 800)
        assert (arena.served.planned, arena.served.differed) == (1, 1)
        step(arena, 8)
    assert (arena.served.planned, arena.served.differed) == (2, 1)
