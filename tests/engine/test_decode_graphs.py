"""Decode graphs without a GPU: captured steps are recorded torch operations (support/recorded_graphs.py). Graph =
eager, in any order of rows.

The decoder's answers hang on every slot, length and row it sees, so what a replay finds stale shows as another token.
"""

from __future__ import annotations

import itertools
import random
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from headrace.clock import VirtualClock
from headrace.config import SchedulerConfig
from headrace.cost.prompt_shapes import AGAIN_SERVED
from headrace.engine.executor import Executor
from headrace.errors import StepFailed
from headrace.kernels import Kernels
from headrace.kernels.inputs import ForwardInputs
from headrace.kernels.operations import OPERATIONS
from headrace.kernels.rows.reference import store_tokens
from headrace.request import NO_SLOT, FinishReason, SamplingParams, StructuredOutputs, TokenMasks
from headrace.spec import Activation
from headrace.worker import device_memory, passes, recorder
from headrace.worker.graphs import DecodeGraphs, Kind
from headrace.worker.memory import buckets_up_to
from headrace.worker.rows import Gather, Rows
from headrace.worker.sampler import Draw
from tests.support import hash_engine
from tests.support.hand_plans import GREEDY, Planned, Planner, decode, generate, run, take
from tests.support.hash_engine import create_core
from tests.support.kernel_cases import called
from tests.support.recorded_graphs import (
    VOCAB,
    RecordableKernels,
    RecordedGraph,
    SlotDecoder,
    failing,
    info_of,
    recorded_executor,
    without_a_gpu,
)

SAMPLED = SamplingParams(temperature=0.9, top_p=0.9, top_k=40)
WARM = SamplingParams(temperature=1.2)
PENALISED = SamplingParams(temperature=0.8, presence_penalty=0.7, frequency_penalty=0.5, repetition_penalty=1.3)


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    without_a_gpu(monkeypatch)


def sequences(count: int, seed: int, params: tuple[SamplingParams, ...] = (GREEDY,)) -> list[Planned]:
    draw = random.Random(seed)
    return [
        Planned(
            row, [draw.randrange(VOCAB) for _ in range(draw.randint(1, 20))], params[row % len(params)], seed=100 + row
        )
        for row in range(count)
    ]


def alone(found: list[Planned]) -> list[list[int]]:
    """What each sequence gets by itself, eagerly."""
    wanted = []
    with recorded_executor(graphed=False) as (executor, _, _):
        for each in found:
            one = Planned(0, list(each.prompt), each.params, each.seed)
            generate(executor, [one], len(each.output), planner=Planner(executor.info.kv_groups))
            wanted.append(one.output)
    return wanted


def prefill(executor: Executor, planner: Planner, started: list[Planned]) -> None:
    for each in started:
        planner.add(each)
        take(run(executor, planner.plan([(each, 0, len(each.prompt))])), [each])


def wander(executor: Executor, params: tuple[SamplingParams, ...] = (GREEDY,), *, turns: int = 25) -> list[Planned]:
    """Any rows in any order, through every bucket, some of them moved to other rows in between."""
    running, planner, draw = sequences(8, 1, params), Planner(executor.info.kv_groups), random.Random(2)
    free = planner._free[0]
    free.append(free.pop(free.index(0)))  # block 0 goes first: what is written there by mistake is read
    prefill(executor, planner, running)
    for turn in range(turns):
        if turn % 3 == 2:
            one, other = draw.sample(running, 2)
            for each in (one, other):
                planner.drop(each)
            one.row, other.row = other.row, one.row
            planner.add(one), planner.add(other)
        decode(executor, planner, draw.sample(running, draw.choice((1, 2, 3, 4, 5, 7, 8))))
    return running


@pytest.mark.parametrize(
    "params",
    [(GREEDY,), (WARM,), (GREEDY, SAMPLED, WARM), (GREEDY, SAMPLED, PENALISED)],
    ids=["greedy", "random", "drawn", "mixed"],
)
def test_graphs_give_what_eager_steps_give(params: tuple[SamplingParams, ...]) -> None:
    with recorded_executor(graphed=True) as (executor, runner, _):
        found = wander(executor, params)
        assert runner.passes.graphs is not None and runner.passes.graphs.captured == (1, 2, 4, 8)
    assert [each.output for each in found] == alone(found)


def noted(calls: list[str], name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        calls.append(name)
        return real(*args)

    return call


def test_decode_steps_are_replayed_and_others_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    replays: list[str] = []
    for name in ("compute", "draw"):
        real = getattr(DecodeGraphs, name)
        monkeypatch.setattr(DecodeGraphs, name, noted(replays, name, real))
    with recorded_executor(graphed=True) as (executor, _, decoder):
        planner, (plain, warm, counted, third) = (
            Planner(executor.info.kv_groups),
            sequences(4, 5, (GREEDY, SAMPLED, PENALISED, GREEDY)),
        )
        prefill(executor, planner, [plain, warm, counted])
        replays.clear()
        decoder.fault = RuntimeError("decoding must not call the decoder")
        decode(executor, planner, [plain])
        assert replays == ["compute", "draw"]
        decode(executor, planner, [plain, warm])
        assert replays[2:] == ["compute", "draw"]
        decode(executor, planner, [counted])
        assert replays[4:] == ["compute"], "a row with penalties is left to the sampler"
        planner.add(third)
        with pytest.raises(StepFailed):  # a mixed step is eager: it meets the fault
            run(executor, planner.plan([plain.next, (third, 0, 2)]))


def test_a_greedy_step_is_one_graph_where_its_forward_pass_is_brief(monkeypatch: pytest.MonkeyPatch) -> None:
    replays: list[RecordedGraph] = []
    real = RecordedGraph.replay
    with recorded_executor(graphed=True) as (executor, _, _):
        planner = Planner(executor.info.kv_groups)
        plain, other, warm, counted, late = sequences(5, 5, (GREEDY, GREEDY, SAMPLED, PENALISED, GREEDY))
        late.prompt.extend([7] * 24)
        for each in (plain, other, warm, counted):
            del each.prompt[3:]
        prefill(executor, planner, [plain, other, warm, counted, late])
        monkeypatch.setattr(RecordedGraph, "replay", lambda self: (replays.append(self), real(self)))
        counts = []
        for some in ([plain], [plain, other], [warm], [plain, warm], [counted], [late], [plain, other, late], [plain]):
            replays.clear()
            decode(executor, planner, some)
            counts.append(len(replays))
    assert counts == [1, 1, 2, 2, 1, 2, 2, 1], (
        "one with penalties is left to the sampler, its forward pass alone is a graph"
    )
    found = [plain, other, warm, counted, late]
    assert [each.output for each in found] == alone(found)


def test_rows_that_share_enough_have_a_graph_that_looks_for_it_from_the_first_such_step_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Which one computes is seen by what the decoder was told when it was captured."""
    told: list[int | None] = []
    real = SlotDecoder.forward

    def forward(self: SlotDecoder, inputs: Any, kv_caches: Any) -> torch.Tensor:
        told.append(inputs.attention[0].shared_tokens)
        return real(self, inputs, kv_caches)

    monkeypatch.setattr(SlotDecoder, "forward", forward)
    with recorded_executor(graphed=True) as (_, runner, _), torch.inference_mode():
        graphs = runner.passes.graphs
        assert graphs is not None and set(told) == {0}, "no capture at the start is made for shared keys"
        told.clear()
        rows = np.arange(8, dtype=np.int32)
        chosen = []
        for count, shared in ((8, 7), (8, 8), (8, None), (8, 0), (2, 1000)):
            bucket = graphs.write(rows[:count], rows[:count] + 3, shared_tokens=shared)
            chosen.append(graphs._graph_of(graphs._captured[bucket]))
            graphs.compute(bucket)
        assert chosen[1] is chosen[2] and chosen[0] is chosen[3] and chosen[0] is not chosen[1]
        assert told == [None], "captured once, and only where the decoder asks for it"


def test_a_batch_that_empties_uses_the_graph_of_a_larger_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until a bucket has been asked for often, or the engine is idle. One of more than twice as many rows is not used:
    its steps would take longer."""
    captured: list[int] = []
    real = DecodeGraphs._capture_kind

    def capture(self: DecodeGraphs, bucket: int, kind: Kind) -> None:
        captured.append(bucket)
        real(self, bucket, kind)

    monkeypatch.setattr(DecodeGraphs, "_capture_kind", capture)
    monkeypatch.setattr(SlotDecoder, "least_shared", lambda self, rows: 8)
    with recorded_executor(graphed=True) as (_, runner, _), torch.inference_mode():
        graphs = runner.passes.graphs
        assert graphs is not None and not graphs.prepare(), "no step of a kind has come yet"
        rows = np.arange(8, dtype=np.int32)

        def step(count: int) -> int:
            bucket = graphs.write(rows[:count], rows[:count] + 3, shared_tokens=8)
            graphs.compute(bucket)
            return bucket

        assert [step(count) for count in (8, 4, 3, 2)] == [8, 8, 8, 2]
        assert captured == [8, 2]
        assert [step(4) for _ in range(AGAIN_SERVED)][-1] == 4 and captured == [8, 2, 4]
        while graphs.prepare():
            pass
        assert captured == [8, 2, 4], "larger ones serve what is left"


def test_where_that_graph_cannot_be_captured_each_row_reads_its_own_keys(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(self: DecodeGraphs, *_: Any, **__: Any) -> RecordedGraph:
        raise RuntimeError("CUDA error: out of memory")

    with recorded_executor(graphed=True) as (executor, _, _):
        monkeypatch.setattr(DecodeGraphs, "_capture_again", broken)
        found = wander(executor, turns=8)
    assert [each.output for each in found] == alone(found)
    assert "no graph for" in caplog.text and "shared keys" in caplog.text


@pytest.mark.parametrize("head_touched", [False, True])
def test_steps_with_adapters_have_graphs_that_hold_for_any_rows(
    head_touched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row's slot is read where the row is. Where adapters change the head, tokens are drawn eagerly."""
    stand_in: Any = SimpleNamespace(slots=SimpleNamespace(head_touched=head_touched), close=lambda: None)
    found, replays = [], []
    for graphed in (True, False):
        with recorded_executor(graphed=graphed, adapters=stand_in) as (executor, runner, _):
            if graphed:
                monkeypatch.setattr(DecodeGraphs, "draw", noted(replays, "draw", DecodeGraphs.draw))
            running, planner, draw = (
                sequences(8, 1, (GREEDY, SAMPLED)),
                Planner(executor.info.kv_groups),
                random.Random(2),
            )
            for each, slot in zip(running, (NO_SLOT, 0, 1, 0, 2, NO_SLOT, 1, 0), strict=True):
                each.adapter_slot = slot
            prefill(executor, planner, running)
            for turn in range(20):
                if turn == 10 and runner.passes.graphs is not None:
                    runner.passes.graphs.forget_adapted()
                decode(executor, planner, draw.sample(running, draw.choice((1, 2, 3, 5, 8))))
            found.append([each.output for each in running])
            if runner.passes.graphs is not None:
                assert any(each.of(Kind.ADAPTED) is not None for each in runner.passes.graphs._captured.values())
                adapted = replays
    assert found[0] == found[1]
    assert (len(adapted) >= 15) != head_touched
    assert found[0] != alone(sequences(8, 1, (GREEDY, SAMPLED)))


def test_slots_as_they_were_at_the_capture_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted defect."""
    real, stand_in = Rows.slots_of, SimpleNamespace(slots=SimpleNamespace(head_touched=False), close=lambda: None)
    found = []
    for frozen in (False, True):
        if frozen:
            monkeypatch.setattr(Rows, "slots_of", lambda self, rows, positions: _frozen(real(self, rows, positions)))
        with recorded_executor(graphed=True, adapters=stand_in) as (executor, _, _):
            running, planner = sequences(4, 1), Planner(executor.info.kv_groups)
            for each in running:
                each.adapter_slot = each.row
            prefill(executor, planner, running)
            for pair in (running[:2], running[2:], running[1:3]):
                decode(executor, planner, pair)
            found.append([each.output for each in running])
    assert found[0] != found[1]


def test_a_chunk_of_one_prompt_token_samples_nothing_where_nothing_is_asked_for() -> None:
    """One token of a longer prompt is a step a graph computes, but no token may be picked for it or written into its
    row."""
    with recorded_executor(graphed=True) as (executor, runner, _):
        planner, one = Planner(executor.info.kv_groups), Planned(3, [5, 6, 7, 8], GREEDY)
        planner.add(one)
        for start in range(3):
            assert list(run(executor, planner.plan([(one, start, 1)], ())).tokens) == []
            assert runner._rows.token_ids[3, :4].tolist() == [5, 6, 7, 8]
        take(run(executor, planner.plan([(one, 3, 1)])), [one])
        decode(executor, planner, [one])
    assert [one.output] == alone([one])


def test_single_tokens_that_nobody_samples_go_beside_others_that_are() -> None:
    """A graph computes all of them, so the sampled ones lie where they lie in the plan."""
    with recorded_executor(graphed=True) as (executor, _, _):
        planner, (decoding, started) = Planner(executor.info.kv_groups), sequences(2, 7, (GREEDY,))
        prefill(executor, planner, [decoding])
        planner.add(started)
        for start in range(len(started.prompt) - 1):
            take(run(executor, planner.plan([(started, start, 1), decoding.next], [(1, decoding)])), [decoding])
        take(run(executor, planner.plan([(started, len(started.prompt) - 1, 1)])), [started])
    assert [decoding.output, started.output] == alone([decoding, started])


def test_several_tokens_from_one_row_are_not_left_to_the_graph() -> None:
    """n > 1 over a prompt of one token: one chunk, several rows sampled from its logits."""
    with recorded_executor(graphed=True) as (executor, _, _):
        planner, forks = Planner(executor.info.kv_groups), [Planned(row, [9], GREEDY) for row in range(3)]
        for fork in forks:
            planner.add(fork)
        take(run(executor, planner.plan([(forks[0], 0, 1)], [(0, fork) for fork in forks])), forks)
        for fork in forks[1:]:
            fork.tables = []
            planner.fork(forks[0], fork, 1)
        for _ in range(4):
            decode(executor, planner, forks)
    assert [fork.output for fork in forks] == alone(forks)


@pytest.mark.parametrize("count", [1, 3, 5, 8])
def test_rows_that_fill_a_batch_up_leave_no_trace(count: int) -> None:
    with recorded_executor(graphed=True) as (executor, runner, _):
        planner, running = Planner(executor.info.kv_groups), sequences(8, 3)
        prefill(executor, planner, running)
        for _ in range(5):  # so that every staging buffer has held numbers of other rows
            decode(executor, planner, running)
        some = running[-count:]
        cache, tokens = runner._kv_caches[0].clone(), runner._rows.token_ids.clone()
        places = {(each.row, len(each.ids)) for each in some}
        decode(executor, planner, some)
        wanted = {(each.tables[0][(len(each.ids) - 2) // 4], (len(each.ids) - 2) % 4) for each in some}
        written = {tuple(place) for place in (runner._kv_caches[0][:-1] != cache[:-1]).nonzero().tolist()}
        changed = {tuple(place) for place in (runner._rows.token_ids != tokens).nonzero().tolist()}
    assert written == wanted and changed <= places


def test_the_last_place_of_a_row_is_reached_and_nothing_beyond_it() -> None:
    with recorded_executor(graphed=True, max_model_len=12) as (executor, runner, _):
        planner, one = Planner(executor.info.kv_groups), Planned(2, [1, 2, 3], GREEDY)
        prefill(executor, planner, [one])
        before = runner._rows.token_ids[3].clone()
        for _ in range(9):
            decode(executor, planner, [one])
        assert len(one.ids) == 13 and torch.equal(runner._rows.token_ids[3], before)


def test_a_failed_step_is_recovered_from_with_the_same_graphs() -> None:
    with recorded_executor(graphed=True) as (executor, runner, _):
        planner, running = Planner(executor.info.kv_groups), sequences(5, 4)
        prefill(executor, planner, running)
        decode(executor, planner, running)
        ticket = failing(executor, runner, planner.plan([each.next for each in running]), MemoryError())
        with pytest.raises(StepFailed):
            executor.collect(ticket)
        executor.recover()
        for each in running:
            planner.add(each)
        for _ in range(5):
            decode(executor, planner, running)
    assert [each.output for each in running] == alone(running)


def test_reading_the_device_during_a_capture_is_refused() -> None:
    """The negative control of the stand-in: a step that looks at a value cannot be a graph."""

    def peek(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(hidden), int(hidden[0, 0].item()) % 5 + 2)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError, match="capturing"):
        patch.setattr(SlotDecoder, "logits", peek)
        with recorded_executor(graphed=True):
            pass


@pytest.mark.parametrize(
    ("most", "largest"), [(1, 1), (3, 4), (4, 4), (5, 8), (64, 64), (65, 72), (256, 256), (257, 288), (1000, 1024)]
)
def test_buckets_reach_what_is_asked_and_pad_by_no_more_than_an_eighth_of_a_large_batch(
    most: int, largest: int
) -> None:
    sizes = buckets_up_to(most)
    assert sizes[-1] == largest and sizes == tuple(sorted(set(sizes))) and sizes[0] == 1
    for count in range(1, most + 1):
        bucket = min(size for size in sizes if size >= count)
        assert bucket - count <= max(7, count // 8)


def masked_run(*, graphed: bool, max_logits_rows: int) -> list[list[int]]:
    """Five rows decode together; rows 1 and 4 may take tokens of certain remainders alone, by masks that come once the
    forward pass is queued."""
    choice = SamplingParams(temperature=0.0, structured_outputs=StructuredOutputs(choice=("any",)))
    with recorded_executor(graphed=graphed, max_logits_rows=max_logits_rows) as (executor, _, _):
        planner, running = Planner(executor.info.kv_groups), sequences(5, 8, (SAMPLED, choice, WARM))
        prefill(executor, planner, running)
        for turn in range(6):
            bits = [int(token % 7 == remainder) for remainder in (turn, 3) for token in range(128)]
            masks = TokenMasks((1, 4), 4, np.packbits(bits, bitorder="little").tobytes())
            ticket = executor.submit(replace(planner.plan([each.next for each in running]), masked=(1, 4)))
            executor.sample(ticket, masks)
            take(executor.collect(ticket), running)
            assert running[1].output[-1] % 7 == turn and running[4].output[-1] % 7 == 3
    return [each.output for each in running]


@pytest.mark.parametrize("max_logits_rows", [100, 2])
def test_masks_hold_in_steps_that_graphs_compute(max_logits_rows: int) -> None:
    assert masked_run(graphed=True, max_logits_rows=max_logits_rows) == masked_run(graphed=False, max_logits_rows=100)


def test_graphs_keep_to_the_budget_of_logits() -> None:
    """More rows than --max-logits-rows are computed by a graph and sampled in pieces; fewer are drawn by graphs as
    ever."""
    with recorded_executor(graphed=True, max_logits_rows=4) as (executor, runner, decoder):
        found = wander(executor, (GREEDY, SAMPLED, WARM))
        assert decoder.most_logits == 4
        assert runner.passes.graphs is not None and [runner.passes.graphs.draws(count) for count in (1, 4, 5, 8)] == [
            True,
            True,
            False,
            False,
        ]
    assert [each.output for each in found] == alone(found)


def test_what_broke_a_capture_is_what_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("CUDA error: operation failed due to a previous error during capture")

    def full(*_: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("Tried to allocate 2 GiB")

    monkeypatch.setattr(RecordedGraph, "made", broken)
    monkeypatch.setattr(DecodeGraphs, "_run_eagerly", lambda self, bucket: None)
    monkeypatch.setattr(SlotDecoder, "forward", full)
    with pytest.raises(torch.OutOfMemoryError, match="2 GiB"), recorded_executor(graphed=True):
        pass


def test_a_kernel_that_gives_way_in_a_capture_costs_the_graphs_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the third bucket, to a twin that looks at the device; an error of any other origin ends the start."""
    real, calls = SlotDecoder.forward, itertools.count()

    def forward(self: SlotDecoder, *args: Any) -> torch.Tensor:
        if next(calls) == 3:
            torch.zeros(1).item()
        return real(self, *args)

    monkeypatch.setattr(SlotDecoder, "forward", forward)
    with pytest.raises(RuntimeError, match="capturing"), recorded_executor(graphed=True):
        pass
    calls = itertools.count()
    monkeypatch.setattr(RecordableKernels, "graphable", False)
    with recorded_executor(graphed=True) as (executor, runner, _):
        assert runner.passes.graphs is not None and runner.passes.graphs.captured == ()
        found = wander(executor, (GREEDY, SAMPLED), turns=6)
    assert [each.output for each in found] == alone(found)


def captured(call: Callable[[], object]) -> None:
    graph = RecordedGraph()
    graph.capture_begin()
    try:
        call()
    finally:
        graph.capture_end()


def test_twins_that_graphs_may_hold_do_not_look_at_the_device() -> None:
    x, weight = torch.ones(2, 3), torch.ones(3)
    whole, heat = torch.zeros(2, dtype=torch.int64), torch.ones(2)
    logits, few = torch.randn(2, 300), torch.zeros(2, dtype=torch.int32)
    filters = (whole + 5, heat * 0.9, heat * 0.0)
    calls: dict[str, Callable[[Any], object]] = {
        "embedding": lambda run: run(whole, logits, 2.0),
        "layer_norm": lambda run: run(x, weight, weight, 1e-5, x),
        "rms_norm": lambda run: run(x, weight, 1e-5, x),
        "activation": lambda run: run(x, Activation.GELU),
        "gated_activation": lambda run: run(logits, Activation.SILU),
        "greedy_tokens": lambda run: run(logits),
        "gather_inputs": lambda run: run(
            torch.zeros(2, 8, dtype=torch.int32), few[:, None], few, few, few, few + 1, 4, 1
        ),
        "store_tokens": lambda run: run(torch.zeros(2, 8, dtype=torch.int32), few, few + 1, whole, heat),
        "pick_tokens": lambda run: run(logits, logits.amax(-1), heat, filters, whole, whole),
    }
    for op, call in calls.items():
        twin = OPERATIONS[op].twin
        kernels = Kernels(torch.device("cpu"), disabled=frozenset({"native", "onednn"}))
        kernels.choose(*called(op, dtype=torch.float32))
        if kernels.graphable:
            captured(lambda call=call, twin=twin: call(twin))
        else:
            with pytest.raises(RuntimeError, match="capturing"):
                captured(lambda call=call, twin=twin: call(twin))


# --- the whole control plane over graphs ------------------------------------------------------------------------------


def serve(
    depth: int, *, graphed: bool, seed: int, fault: float = 0.0
) -> tuple[hash_engine.Answers, set[int], list[Any]]:
    """Forty requests in random order through a cache that is too small for them; some leave. Returns answers, who left,
    the requests."""
    draw, answers = random.Random(seed), hash_engine.Answers()
    asked: list[Any] = []
    gone: set[int] = set()
    with recorded_executor(graphed=graphed, prompts=graphed, num_blocks=20, max_model_len=48) as (executor, runner, _):
        real: Callable[..., Any] = runner._forward
        rng = random.Random(seed + 1)

        def forward(plan: Any) -> Any:
            if rng.random() < fault:
                raise MemoryError("on purpose")
            return real(plan)

        runner._forward = forward  # type: ignore[method-assign]
        config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=16)
        core = create_core(executor, config, VirtualClock(), depth=depth)
        for turn in range(4000):
            if len(asked) < 40 and draw.random() < 0.5:
                asked.append(request_of(draw, len(asked)))
                core.add(asked[-1])
            if asked and draw.random() < 0.04:
                gone.add(leaving := draw.randrange(len(asked)))
                core.abort(leaving)
            answers.take(output for output in core.step() if output.request_id not in gone)
            if turn > 100 and not core.has_work and len(asked) == 40:
                break
        hash_engine.assert_at_rest(core)
    return answers, gone, asked


def request_of(draw: random.Random, number: int) -> Any:
    trunk = [7] * draw.choice((0, 4, 9))
    warm = {"temperature": draw.choice((0.0, 0.0, 0.0, 0.9))}
    prompt = trunk + [draw.randrange(VOCAB) for _ in range(draw.randint(1, 9))]
    return hash_engine.request(
        number, prompt, max_tokens=draw.randint(1, 20), n=draw.choice((1, 1, 1, 2)), seed=number, **warm
    )


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_requests_in_random_order_are_answered_as_without_graphs(depth: int) -> None:
    answers, gone, asked = serve(depth, graphed=True, seed=depth)
    for made in asked:
        with recorded_executor(graphed=False, max_model_len=48) as (executor, _, _):
            for index in range(made.params.n):
                if made.request_id not in gone:
                    seed = (made.seed + index * 0x9E3779B97F4A7C15) & (2**64 - 1)
                    one = Planned(0, list(made.prompt_token_ids), made.params, seed)
                    generate(executor, [one], made.params.max_tokens or 0, planner=Planner(executor.info.kv_groups))
                    assert answers.tokens[made.request_id, index] == one.output, made.request_id


@pytest.mark.parametrize("depth", [0, 2])
def test_steps_that_fail_in_the_queue_leave_nothing_behind(depth: int) -> None:
    answers, gone, asked = serve(depth, graphed=True, seed=9, fault=0.05)
    calm, _, _ = serve(depth, graphed=False, seed=9)
    failed = 0
    for key, finished in answers.finished.items():
        failed += finished.reason is FinishReason.ERROR
        assert key[0] in gone or answers.tokens[key] == calm.tokens.get(key, [])[: len(answers.tokens[key])]
    assert failed and len(answers.finished) >= sum(made.request_id not in gone for made in asked)


# --- planted defects: what the tests above are worth ------------------------------------------------------------------


def _writes_slot_0(self: Gather, *args: Any) -> ForwardInputs:
    """Tokens of no sequence are given slot 0."""
    inputs = _real_gathered(self, *args)
    return replace(inputs, attention=tuple(replace(each, slots=each.slots.clamp(min=0)) for each in inputs.attention))


def _frozen_table(self: Gather, *args: Any) -> ForwardInputs:
    """Block tables as they were at the capture."""
    inputs = _real_gathered(self, *args)
    if args[5] > 1:
        return inputs
    return replace(
        inputs, attention=tuple(replace(each, block_table=_frozen(each.block_table)) for each in inputs.attention)
    )


def _frozen(table: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(table.numpy().copy())  # past what is recorded


def _next_row(token_ids: torch.Tensor, row: torch.Tensor, *rest: Any) -> torch.Tensor:
    """Tokens go into the row beside their own."""
    return store_tokens(token_ids, (row + 1) % len(token_ids), *rest)


def _stale_contexts(self: DecodeGraphs, rows: Any, contexts: Any) -> int:
    """Lengths as they were when the bucket was captured."""
    return _real_write(self, rows, np.minimum(contexts, 3))


def _too_small(self: DecodeGraphs, count: int) -> int | None:
    """The largest bucket that is not larger than the batch."""
    return max(size for size in self._buckets if size <= count)


def _early(self: DecodeGraphs, bucket: int, count: int, how: Any) -> Any:
    """The result of the step before."""
    _real_draw(self, bucket, count, how)
    return self._mailbox._answers[self._mailbox._at - 1][:count]


def _ahead(self: DecodeGraphs, bucket: int, how: Draw | None = None) -> None:
    """The host counts one step more than the device."""
    self._mailbox._at = (self._mailbox._at + 1) % len(self._mailbox.slots)
    _real_compute(self, bucket, how)


def _always_greedy(self: DecodeGraphs, bucket: int, how: Draw | None = None) -> None:
    """The graph that draws, too, whatever is drawn."""
    _real_compute(self, bucket, Draw.GREEDY)


_real_write, _real_compute, _real_draw, _real_gathered = (
    DecodeGraphs.write,
    DecodeGraphs.compute,
    DecodeGraphs.draw,
    Gather.gathered,
)
DEFECTS: dict[str, tuple[Any, str, Any]] = {
    "rows that fill up write KV": (Gather, "gathered", _writes_slot_0),
    "stale block tables": (Gather, "gathered", _frozen_table),
    "tokens of another row": (RecordableKernels, "stored", staticmethod(_next_row)),
    "stale lengths": (DecodeGraphs, "write", _stale_contexts),
    "edits of block tables are lost": (Rows, "edits_of", lambda self, plan: None if plan.rows_added else ((), (), ())),
    "the host is a step ahead": (DecodeGraphs, "compute", _ahead),
    "whole graphs for other draws": (DecodeGraphs, "compute", _always_greedy),
    "a bucket too small": (DecodeGraphs, "_bucket", _too_small),
    "the last step's tokens": (DecodeGraphs, "draw", _early),
    "every row is drawn greedily": (passes, "draw_of", lambda traits: Draw.GREEDY),
    "every row is drawn without its filters": (passes, "draw_of", lambda traits: Draw.RANDOM),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_planted_defect_is_found(defect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, replacement = DEFECTS[defect]
    monkeypatch.setattr(owner, name, replacement)
    with recorded_executor(graphed=True) as (executor, _, _):
        try:
            found = wander(executor, (GREEDY, SAMPLED, GREEDY, WARM))
        except (StepFailed, ValueError):  # found out before a token was wrong
            return
    monkeypatch.undo()
    assert [each.output for each in found] != alone(found)


class Scratch:
    """What cuBLAS keeps, by stream: taken by the first product there, kept until it is told to let go of all."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.kept: dict[str, str] = {}  # stream: whose memory it lies in
        self.stream, self.pool = "steps", "allocator"
        monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", self.kept.clear, raising=False)
        monkeypatch.setattr(device_memory, "take_scratch", lambda device: self.multiply())

    def multiply(self) -> None:
        self.kept.setdefault(self.stream, self.pool)

    def capture(self, *, fails: bool = False) -> None:
        self.stream, self.pool = "capture", "graphs"
        try:
            self.multiply()
            if fails:
                raise RuntimeError("operation not permitted when stream is capturing")
        finally:
            self.stream, self.pool = "steps", "allocator"


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_that_products_keep_lies_in_the_memory_of_graphs(
    monkeypatch: pytest.MonkeyPatch, *, fails: bool
) -> None:
    """It would keep all of that memory when the graphs are gone."""
    scratch = Scratch(monkeypatch)
    scratch.kept["capture"] = "graphs of another engine"
    with suppress(RuntimeError), device_memory.scratch_of_graphs(torch.device("cpu")):
        assert scratch.kept == {}  # another engine's is not captured
        scratch.capture(fails=fails)
    assert scratch.kept == {"steps": "allocator"}


def test_every_capture_is_made_with_scratch_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    inside: list[bool] = []
    begun = RecordedGraph.capture_begin

    @contextmanager
    def scratch(device: torch.device) -> Iterator[None]:
        inside.append(True)
        yield
        inside.append(False)

    def begin(self: RecordedGraph, *arguments: Any, **named: Any) -> None:
        assert inside[-1]
        begun(self, *arguments, **named)

    monkeypatch.setattr(recorder, "scratch_of_graphs", scratch)
    monkeypatch.setattr(RecordedGraph, "capture_begin", begin)
    with recorded_executor(graphed=True):
        assert inside == [True, False]


def test_the_same_rows_are_looked_at_once_and_again_when_one_of_them_is_built_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Plans of a cohort share their arrays; a row that changes hands in between brings other wishes."""
    looks: list[object] = []
    real = passes.draw_of
    monkeypatch.setattr(passes, "draw_of", lambda traits: looks.append(None) or real(traits))
    with recorded_executor(graphed=True) as (executor, _, _):
        planner, (one, other) = Planner(executor.info.kv_groups), sequences(2, 7)
        prefill(executor, planner, [one, other])
        looks.clear()
        first = planner.plan([each.next for each in (one, other)])
        take(run(executor, first), [one, other])
        for _ in range(3):
            again = planner.plan([each.next for each in (one, other)])
            shared = {name: getattr(first, name) for name in ("rows", "counts", "sample_work", "sample_rows")}
            take(run(executor, replace(again, **shared)), [one, other])
        assert len(looks) == 1
        anew = Planned(other.row, other.ids[:4], WARM, 9)
        planner.add(anew)
        take(run(executor, planner.plan([(anew, 0, 4)])), [anew])
        again = planner.plan([each.next for each in (one, anew)])
        take(run(executor, replace(again, **shared)), [one, anew])
        assert len(looks) == 3, "the prompt's sample was drawn, too"
    assert [anew.output] == alone([anew])


def _edited(rows: list[int], indices: list[int], blocks: list[int], count: int) -> Any:
    plan, group = Planner(info_of(8, 9, 4, 64).kv_groups).plan([]), array("i", [0] * len(rows))
    edits = {
        "table_row": array("i", rows),
        "table_group": group,
        "table_index": array("i", indices),
        "table_block": array("i", blocks),
    }
    return replace(plan, rows=array("i", range(count)), **edits)


def test_which_edits_travel_with_a_step() -> None:
    one, two = (Rows(8, 64, VOCAB, sizes, torch.device("cpu")) for sizes in ((4,), (4, 8)))
    plan = _edited([1, 1, 2], [0, 3, 0], [7, 8, 9], 4)
    assert one.edits_of(plan) == (plan.table_row, plan.table_index, plan.table_block)
    assert one.edits_of(replace(plan, rows=array("i", [0, 1]))) is None, "more than rows"
    assert one.edits_of(_edited([1, 1, 1], [0, 3, 0], [7, 8, 9], 4)) is None, "the later one of two of a place holds"
    assert two.edits_of(plan) is None
    assert one.edits_of(_edited([], [], [], 4)) == (array("i"), array("i"), array("i"))


def test_one_token_of_a_prompt_beside_rows_that_are_sampled() -> None:
    """A graph computes every row's hidden state, also of those that nobody reads; an eager step only those that are
    read."""
    with recorded_executor(graphed=True) as (executor, _, _):
        planner, found = Planner(executor.info.kv_groups), sequences(3, 21)
        late = Planned(5, [3, 1, 4, 1, 5], GREEDY, seed=3)
        prefill(executor, planner, found)
        planner.add(late)
        for done in range(len(late.prompt) - 1):
            work = [(late, done, 1), *(each.next for each in found)]
            take(run(executor, planner.plan(work, [(index, each) for index, each in enumerate(found, start=1)])), found)
        take(run(executor, planner.plan([(late, len(late.prompt) - 1, 1)])), [late])
    assert [each.output for each in (*found, late)] == alone([*found, late])
