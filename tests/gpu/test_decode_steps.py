"""Decode steps by hand on the card: rows that come, go, move and share, through every bucket, queued behind a device
that is late.

Each sequence's tokens are those it gets alone on the CPU; what a step writes is looked at slot by slot.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.engine.executor import Executor
from headrace.errors import StepFailed
from headrace.request import SamplingParams
from headrace.worker import model_runner
from tests.support import tiny
from tests.support.card import exhaust, require_card
from tests.support.hand_plans import GREEDY, Planned, Planner, decode, generate, run, take, worker_for

require_card()

ROWS, BLOCKS, LONGEST = 24, 500, 200
PARAMS = (
    GREEDY,
    GREEDY,
    SamplingParams(temperature=0.9, top_p=0.9, top_k=40),
    SamplingParams(temperature=1.1),
    SamplingParams(temperature=0.8, presence_penalty=0.7, frequency_penalty=0.5, repetition_penalty=1.3),
    SamplingParams(temperature=0.0, logit_bias={3: 2.0, 200: -1.0}),
)
FAMILIES = ("llama", "gemma2")  # one KV group and two
LATE = 40_000_000  # clock cycles, some 20 ms: longer than the host needs for several steps


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(request.param, tmp_path_factory.mktemp(request.param), tokenizer=False)


def worker(folder: Path, **device: Any) -> Executor:
    sizes: dict[str, Any] = {
        "cache": {"num_blocks": BLOCKS, "block_size": 8},
        "scheduler": {"max_num_seqs": ROWS, "max_num_batched_tokens": 256},
    }
    return worker_for(
        folder,
        **sizes,
        device={"device": "cuda", "strict_kernels": True, "overlap": 2, **device},
        max_model_len=LONGEST,
    )


@pytest.fixture(scope="module")
def card(folder: Path) -> Iterator[Executor]:
    made = worker(folder)
    yield made
    made.close()


@pytest.fixture(scope="module")
def cpu(folder: Path) -> Executor:
    return worker_for(folder, cache={"num_blocks": BLOCKS, "block_size": 8}, max_model_len=LONGEST)


def sequences(count: int, seed: int, params: tuple[SamplingParams, ...] = PARAMS, longest: int = 60) -> list[Planned]:
    draw = random.Random(seed)
    prompts = [draw.choices(range(256), k=draw.randint(1, longest)) for _ in range(count)]
    return [Planned(row, prompt, params[row % len(params)], seed=100 + row) for row, prompt in enumerate(prompts)]


def check_alone(cpu: Executor, found: list[Planned]) -> None:
    for each in found:
        alone = Planned(0, list(each.prompt), each.params, each.seed)
        generate(cpu, [alone], len(each.output), planner=Planner(cpu.info.kv_groups))
        assert each.output == alone.output, each.row


def prefill(executor: Executor, planner: Planner, started: list[Planned]) -> None:
    for each in started:
        planner.add(each)
    for first in range(0, len(started), 4):
        some = started[first : first + 4]
        take(run(executor, planner.plan([(each, 0, len(each.ids)) for each in some])), some)


@pytest.mark.parametrize("eager", [False, True])
def test_any_rows_in_any_order_through_every_bucket(folder: Path, cpu: Executor, eager: bool) -> None:
    """Sizes go up and down, so that a graph follows another's rows; each bucket is used often enough to be captured."""
    executor, draw = worker(folder, enforce_eager=eager), random.Random(7)
    running, planner = sequences(ROWS, 1), Planner(executor.info.kv_groups)
    prefill(executor, planner, running)
    for _ in range(60):
        decode(executor, planner, draw.sample(running, draw.choice((1, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 23, 24))))
    executor.close()
    check_alone(cpu, running)


def test_rows_are_given_to_others_and_sequences_to_other_rows(card: Executor, cpu: Executor) -> None:
    """Between replays of one graph: another table, other parameters, another length in the same row."""
    draw, planner = random.Random(8), Planner(card.info.kv_groups)
    running = sequences(12, 2, longest=30)
    prefill(card, planner, running)
    for _ in range(40):
        moved = draw.sample(running, 3)
        places = [each.row for each in moved]
        for each in moved:
            planner.drop(each)
        for each, row in zip(moved, (*places[1:], places[0]), strict=True):
            each.row = row
            planner.add(each)
        decode(card, planner, draw.sample(running, draw.choice((3, 6, 12))))
    check_alone(cpu, running)


def test_graphs_captured_early_serve_long_contexts(card: Executor, cpu: Executor) -> None:
    planner, draw = Planner(card.info.kv_groups), random.Random(3)
    short = sequences(8, 3, longest=3)
    prefill(card, planner, short)
    for _ in range(6):
        decode(card, planner, short)
    long = [Planned(8 + row, draw.choices(range(256), k=170 - row), PARAMS[row % 3], seed=row) for row in range(8)]
    for each in long:
        planner.add(each)
        take(run(card, planner.plan([(each, 0, len(each.prompt))])), [each])
    for _ in range(20):
        decode(card, planner, draw.sample([*short, *long], 8))
    check_alone(cpu, [*short, *long])


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 11, 24])
def test_a_decode_step_writes_its_own_slots_and_tokens_alone(card: Executor, count: int) -> None:
    """Rows that fill a batch up to its graph's size write nothing, and no row beside a sampled one changes."""
    planner, runner = Planner(card.info.kv_groups, seed=count), card._runner  # type: ignore[attr-defined]
    running = sequences(ROWS, 5, (GREEDY, PARAMS[2]), longest=20)
    prefill(card, planner, running)
    some = random.Random(count).sample(running, count)
    for _ in range(3):
        decode(card, planner, some)
    places = [(each.row, len(each.ids)) for each in some]
    for cache in runner._kv_caches:  # what was written by mistake before would be written again, and not be seen
        cache.uniform_(-1.0, 1.0)
    before, tokens = [cache.clone() for cache in runner._kv_caches], runner._rows.token_ids.clone()
    written = [{(each.row, len(each.ids) - 1) for each in some} for _ in before]
    decode(card, planner, some)
    torch.cuda.synchronize()
    for group, (old, new) in enumerate(zip(before, runner._kv_caches, strict=True)):
        size = card.info.kv_groups[group].spec.block_size
        wanted = {(running[row].tables[group][position // size], position % size) for row, position in written[group]}
        differs = (old.view(torch.int32) != new.view(torch.int32)).any(dim=(1, 2, 3, 5)) if old.dim() == 6 else None
        assert differs is not None and {tuple(place) for place in differs.nonzero().tolist()} == wanted
    changed = {tuple(place) for place in (runner._rows.token_ids != tokens).nonzero().tolist()}
    assert changed <= set(places)


@pytest.mark.parametrize("asked", [(GREEDY,), PARAMS], ids=["greedy", "mixed"])
def test_steps_queued_behind_a_late_device(folder: Path, cpu: Executor, asked: tuple[SamplingParams, ...]) -> None:
    """The host is steps ahead: what it prepares for the next step must not change what the device has yet to read."""
    executor, draw = worker(folder), random.Random(9)
    running, planner = sequences(16, 4, asked, longest=30), Planner(executor.info.kv_groups)
    prefill(executor, planner, running)
    for turn in range(12):
        some = draw.sample(running, draw.choice((2, 4, 8, 16)))
        ahead = [draw.sample(some, draw.randint(1, len(some))) for _ in range(3)]
        torch.cuda._sleep(LATE)
        done: dict[int, int] = {each.row: 0 for each in some}
        tickets = []
        for step in ahead:
            tickets.append(
                executor.submit(planner.plan([(each, len(each.ids) - 1 + done[each.row], 1) for each in step]))
            )
            done.update({each.row: done[each.row] + 1 for each in step})
        for ticket, step in zip(tickets, ahead, strict=True):
            take(executor.collect(ticket), step)
        if turn % 4 == 3:
            planner.drop(some[0])
            planner.add(some[0])
    executor.close()
    check_alone(cpu, running)


@pytest.mark.parametrize("asked", [(GREEDY,), PARAMS], ids=["greedy", "mixed"])
def test_results_are_read_when_they_have_come(
    card: Executor, cpu: Executor, asked: tuple[SamplingParams, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device is late between a step's last kernel and the copies to the host."""
    planner, running = Planner(card.info.kv_groups), sequences(5, 11, asked)
    prefill(card, planner, running)
    real = model_runner._to_host

    def late(step: Any) -> None:
        torch.cuda._sleep(LATE)
        real(step)

    monkeypatch.setattr(model_runner, "_to_host", late)
    for _ in range(6):
        decode(card, planner, running)
    check_alone(cpu, running)


def test_short_chunks_are_no_decode_steps(card: Executor, cpu: Executor) -> None:
    """Prompts one, two and three tokens at a time beside rows that decode; nothing is sampled before a prompt's end."""
    draw, planner = random.Random(12), Planner(card.info.kv_groups)
    decoding, started = sequences(4, 12, (GREEDY,)), sequences(10, 13, (GREEDY, PARAMS[2]), longest=25)[4:]
    prefill(card, planner, decoding)
    done = dict.fromkeys(range(4, 10), 0)
    for each in started:
        planner.add(each)
    while any(done[each.row] < len(each.prompt) for each in started):
        going = [each for each in started if done[each.row] < len(each.prompt)]
        chunks = [
            (each, done[each.row], min(draw.randint(1, 3), len(each.prompt) - done[each.row]))
            for each in draw.sample(going, min(2, len(going)))
        ]
        beside = draw.sample(decoding, draw.randint(0, 2))
        work = [*chunks, *(each.next for each in beside)]
        sampled = [(index, each) for index, (each, start, count) in enumerate(work) if start + count == len(each.ids)]
        take(run(card, planner.plan(work, sampled)), [each for _, each in sampled])
        done.update({each.row: start + count for each, start, count in chunks})
    for _ in range(5):
        decode(card, planner, [*decoding, *started])
    check_alone(cpu, [*decoding, *started])


def test_forks_copy_their_blocks_before_the_graph_reads_them(card: Executor, cpu: Executor) -> None:
    asked = PARAMS[2]
    prompt = random.Random(6).choices(range(256), k=21)
    forks, planner = [Planned(row, prompt, asked, seed=row) for row in range(4)], Planner(card.info.kv_groups)
    for fork in forks:
        planner.add(fork)
    take(run(card, planner.plan([(forks[0], 0, 21)], [(0, fork) for fork in forks])), forks)
    for fork in forks[1:]:
        fork.tables = []
        planner.fork(forks[0], fork, 21)
    for _ in range(8):
        decode(card, planner, forks)
    check_alone(cpu, forks)


def test_a_failed_step_takes_those_behind_it_along_and_is_recovered_from(folder: Path, cpu: Executor) -> None:
    """Really out of memory, with steps queued before and behind; rows come back from what is known."""
    executor = worker(folder)
    running, planner = sequences(6, 5, longest=20), Planner(executor.info.kv_groups)
    prefill(executor, planner, running)
    for _ in range(4):
        decode(executor, planner, running)
    runner, real = executor._runner, executor._runner._forward  # type: ignore[attr-defined]

    tickets = [executor.submit(planner.plan([each.next for each in running]))]
    runner._forward = exhaust
    tickets.append(executor.submit(planner.plan([(each, len(each.ids), 1) for each in running])))
    runner._forward = real
    tickets.append(executor.submit(planner.plan([(each, len(each.ids) + 1, 1) for each in running])))
    take(executor.collect(tickets[0]), running)
    with pytest.raises(StepFailed, match="--max-num-batched-tokens"):
        executor.collect(tickets[1])
    with pytest.raises(StepFailed, match="builds on"):
        executor.collect(tickets[2])
    executor.recover()
    for each in running:
        planner.add(each)
    for _ in range(6):
        decode(executor, planner, running)
    executor.close()
    check_alone(cpu, running)


def test_steady_decoding_takes_no_memory_from_the_device(card: Executor) -> None:
    planner = Planner(card.info.kv_groups)
    running = sequences(16, 6, longest=10)
    prefill(card, planner, running)
    counts = []
    for _ in range(60):
        decode(card, planner, running)
        counts.append(torch.cuda.memory_stats()["num_device_alloc"])
    assert counts[-1] == counts[10]
