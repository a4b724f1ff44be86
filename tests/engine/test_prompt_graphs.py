"""Graphs of steps with prompts without a GPU (support/recorded_graphs.py): graph = eager, whatever the lengths; which
shapes get one, and when."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from headrace.cost import prompt_shapes
from headrace.cost.prompt_shapes import MOST_TOKENS, PromptShapes, Shape, ShapeBounds
from headrace.cost.shapes import multiplications
from headrace.engine.executor import Executor
from headrace.errors import StepFailed
from headrace.models import families
from headrace.request import NO_SLOT, SamplingParams
from headrace.worker.model_runner import ModelRunner
from headrace.worker.prompt_graphs import PromptGraphs, _fill, _places
from headrace.worker.sampler import Sampler
from tests.support.hand_plans import GREEDY, Planned, Planner, decode, run, take
from tests.support.recorded_graphs import VOCAB, RecordedGraph, SlotDecoder, recorded_executor, without_a_gpu

SAMPLED = SamplingParams(temperature=0.9, top_p=0.9, top_k=40)
FIRST = (Shape(32, 1), Shape(64, 1), Shape(64, 8))  # what a start captures


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    without_a_gpu(monkeypatch)


@contextmanager
def executor(*, graphed: bool = True, **settings: Any) -> Iterator[tuple[Executor, ModelRunner, SlotDecoder, Planner]]:
    with recorded_executor(graphed=graphed, prompts=graphed, **settings) as (made, runner, decoder):
        planner = Planner(made.info.kv_groups)
        free = planner._free[0]
        free.append(free.pop(free.index(0)))  # block 0 goes first: what is written there by mistake is read
        yield made, runner, decoder, planner


def prompt(row: int, length: int, seed: int = 0, params: SamplingParams = GREEDY) -> Planned:
    draw = random.Random(f"{row} {length} {seed}")
    return Planned(row, [draw.randrange(VOCAB) for _ in range(length)], params, seed=seed)


def graphs_of(runner: ModelRunner) -> PromptGraphs:
    assert runner.passes.prompt_graphs is not None
    return runner.passes.prompt_graphs


def answer(made: Executor, planner: Planner, sequences: list[Planned], chunk: int = 1000) -> list[list[int]]:
    """The first token of each, in chunks of so many tokens, all at once; then they leave."""
    for each in sequences:
        planner.add(each)
    longest = max(len(each.prompt) for each in sequences)
    for start in range(0, longest, chunk):
        work = [(each, start, min(chunk, len(each.prompt) - start)) for each in sequences if start < len(each.prompt)]
        last = [(index, each) for index, (each, begin, count) in enumerate(work) if begin + count == len(each.prompt)]
        take(run(made, planner.plan(work, samples=last)), [each for _, each in last])
    for each in sequences:
        planner.drop(each)
        planner._free[0][:0] = each.tables[0]
    return [each.output for each in sequences]


def batches(turns: int) -> Iterator[tuple[list[Planned], int]]:
    draw = random.Random(3)
    for turn in range(turns):
        count = draw.choice((1, 1, 2, 3, 4, 5, 8))
        kinds = (GREEDY, SAMPLED) if turn % 3 == 0 else (GREEDY,)
        yield (
            [prompt(row, draw.randint(1, 62 // count), turn, kinds[row % len(kinds)]) for row in range(count)],
            draw.choice((1000, 3, 7)),
        )


@pytest.mark.parametrize(("served", "least"), [(2, 9), (16, 5)])
def test_graphs_give_what_eager_steps_give(served: int, least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_shapes, "AGAIN_SERVED", served)
    with executor(graphed=False) as (made, _, _, planner):
        expected = [answer(made, planner, *batch) for batch in batches(60)]
    with executor() as (made, runner, _, planner):
        assert [answer(made, planner, *batch) for batch in batches(60)] == expected
        assert len(graphs_of(runner).captured) >= least, "shapes that came again"


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_graphs_of_decode_steps_draw_the_tokens_too(params: SamplingParams, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of prompts that end in the step, beside one that goes on."""

    def never(*_: Any) -> None:
        raise AssertionError("sampled eagerly")

    found = []
    for graphed in (False, True):
        with executor(graphed=graphed) as (made, _, _, planner):
            if graphed:
                monkeypatch.setattr(Sampler, "sample", never)
            each, other, long = (prompt(row, length, params=params) for row, length in enumerate((9, 14, 30)))
            for planned in (each, other, long):
                planner.add(planned)
            work = [(each, 0, 9), (long, 0, 20), (other, 0, 14)]
            take(run(made, planner.plan(work, samples=[(0, each), (2, other)])), [each, other])
            take(run(made, planner.plan([(long, 20, 10), each.next, other.next])), [long, each, other])
            found.append([planned.output for planned in (each, other, long)])
    assert found[0] == found[1]


@pytest.mark.parametrize("kind", ["last", "cls", "mean"])
def test_prompts_that_have_a_vector_are_replayed_too(kind: str) -> None:
    """Without graphs of decode steps, which such models do not take."""

    def vectors(graphed: bool) -> list[dict[int, bytes]]:
        found = []
        with executor(graphed=graphed, pooled=kind) as (made, runner, _, planner):
            for turn in range(8):
                sequences = [prompt(row, 3 + (5 * row + turn) % 14, turn) for row in range(1 + turn % 4)]
                for each in sequences:
                    planner.add(each)
                result = run(made, planner.plan([(each, 0, len(each.prompt)) for each in sequences]))
                assert not result.errors and len(result.pooled) == len(sequences)
                found.append(dict(result.pooled))
                for each in sequences:
                    planner.drop(each)
                    planner._free[0][:0] = each.tables[0]
            assert runner.passes.graphs is None or not graphed
            assert not graphed or result.graph_tokens
        return found

    assert vectors(True) == vectors(False)


def test_mixed_steps_are_replayed_too() -> None:
    def mixed(graphed: bool) -> list[list[int]]:
        with executor(graphed=graphed) as (made, runner, _, planner):
            running = [prompt(row, 5 + row) for row in range(3)]
            for each in running:
                planner.add(each)
            take(run(made, planner.plan([(each, 0, len(each.prompt)) for each in running])), running)
            for turn in range(6):
                late = prompt(3, 20 + turn, turn)
                planner.add(late)
                half = len(late.prompt) // 2
                result = run(
                    made,
                    planner.plan(
                        [running[0].next, (late, 0, half), running[2].next], samples=[(0, running[0]), (2, running[2])]
                    ),
                )
                take(result, [running[0], running[2]])
                take(
                    run(made, planner.plan([(late, half, len(late.prompt) - half), running[1].next])),
                    [late, running[1]],
                )
                decode(made, planner, [late, *running])
                planner.drop(late)
                running[0].output.append(late.output[-1])
            assert not graphed or {Shape(16, 4), Shape(32, 4)} & set(graphs_of(runner).captured)
            return [each.output for each in running]

    assert mixed(True) == mixed(False)


def test_steps_with_adapters_are_replayed_too() -> None:
    """Each token's slot is read on the device: prompts with and without, in any rows, and once more after graphs were
    forgotten."""
    stand_in: Any = SimpleNamespace(slots=SimpleNamespace(head_touched=False, changed=1), close=lambda: None)

    def adapted(graphed: bool, *, bare: bool = False) -> list[list[list[int]]]:
        found = []
        with executor(graphed=graphed, adapters=stand_in) as (made, runner, _, planner):
            for turn, (batch, chunk) in enumerate(batches(40)):
                for each in batch:
                    each.adapter_slot = NO_SLOT if bare else (each.row + turn) % 4 - 1
                if turn == 25 and graphed:
                    assert len(graphs_of(runner)._adapted) >= 3
                    graphs_of(runner).forget_adapted()
                found.append(answer(made, planner, batch, chunk))
            assert not graphed or graphs_of(runner)._adapted
        return found

    assert adapted(True) == adapted(False) != adapted(False, bare=True)


def pair(length: int) -> list[Planned]:
    return [prompt(0, length - 2), prompt(1, 2)]


def noted_calls(decoder: SlotDecoder) -> list[int]:
    """The numbers of tokens it is asked to compute, from now on."""
    calls: list[int] = []
    real = decoder.forward

    def forward(inputs: Any, caches: Any) -> torch.Tensor:
        calls.append(len(inputs.token_ids))
        return real(inputs, caches)

    decoder.forward = forward  # type: ignore[method-assign]
    return calls


def test_a_shape_is_eager_then_recorded_then_replayed() -> None:
    with executor() as (made, runner, decoder, planner):
        calls = noted_calls(decoder)
        for length, expected in ((11, [11]), (13, [16, 16]), (16, []), (5, []), (40, [])):
            calls.clear()
            answer(made, planner, pair(length))
            assert calls == expected, length
        graphs = graphs_of(runner)
        assert graphs.captured == (Shape(16, 4), *FIRST)
        assert graphs.samples == (Shape(64, 8), Shape(64, 1), Shape(48, 8), Shape(16, 1)), (
            "what shows how much memory others take"
        )


def test_a_larger_graph_serves_what_has_none_for_a_while() -> None:
    with executor() as (made, runner, decoder, planner):
        calls = noted_calls(decoder)
        for _ in range(15):
            answer(made, planner, [prompt(0, 40)])
        assert calls == [] and graphs_of(runner).captured == FIRST
        answer(made, planner, [prompt(0, 40)])
        assert calls == [48, 48] and Shape(48, 1) in graphs_of(runner).captured
        answer(made, planner, [prompt(0, 7)])  # of at most twice as many tokens
        assert calls == [48, 48]
        answer(made, planner, [*pair(40), prompt(2, 20)])  # one of more sequences and as many tokens
        assert calls == [48, 48]
        answer(made, planner, pair(7))
        assert calls == [48, 48, 7]


def test_what_it_cannot_hold_stays_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores of prompts, keys that are read once for many."""
    with executor() as (made, runner, _, planner):
        graphs = graphs_of(runner)
        monkeypatch.setattr(graphs, "compute", None)
        scored = prompt(0, 60, params=SamplingParams(temperature=0.0, prompt_logprobs=1))
        planner.add(scored)
        run(made, planner.plan([(scored, 0, 60)], prompt_logprobs=(0,)))
        planner.drop(scored)
        several = [prompt(row, 20) for row in range(3)]
        for each in several:
            planner.add(each)
        planner.plan([(each, 0, 1) for each in several])  # every other plan says that much is shared
        for each in several:
            planner.add(each)
        plan = planner.plan([(each, 0, 20) for each in several])
        assert plan.shared_tokens is not None and plan.shared_tokens >= 8
        run(made, plan)


def test_shared_keys_are_read_once_only_where_that_saves_more_than_launches_take() -> None:
    """As the simulation decides it, too: 64 requests of an 8B behind a prompt of 2,048 tokens, and of 8,192."""
    shapes = PromptShapes(ShapeBounds(64, 8192, 2.2e8, 4096.0))
    assert not shapes.reads_less(63 * 2048) and shapes.reads_less(63 * 8192)


def test_a_step_beyond_the_largest_shape_stays_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SlotDecoder, "least_shared", lambda self, rows: None)
    with executor() as (made, _, decoder, planner):
        calls = noted_calls(decoder)
        for count in (2, 3):  # 44 tokens, which a graph serves, and 66
            answer(made, planner, [prompt(row, 22, seed=count) for row in range(count)])
        assert calls == [66]


def test_a_capture_that_fails_costs_nobody_anything(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with executor(graphed=False) as (made, _, _, planner):
        expected = [answer(made, planner, pair(length)) for length in (10, 11, 12, 13, 40)]
    with executor() as (made, runner, _, planner):
        made_of = RecordedGraph.made
        monkeypatch.setattr(RecordedGraph, "made", _full)
        assert [answer(made, planner, pair(length)) for length in (10, 11, 12, 13, 40)] == expected
        assert graphs_of(runner).captured == FIRST
        monkeypatch.setattr(RecordedGraph, "made", made_of)
        while made.prepare():
            pass
        assert len(graphs_of(runner).captured) > len(FIRST), "who comes later has a pool of its own"
    assert [record.message for record in caplog.records] == [
        "no graph for steps of 16 tokens in 4 sequences (Tried to allocate 2 GiB); they are launched one by one"
    ]


def test_a_step_that_fails_leaves_nothing_to_record() -> None:
    with executor() as (made, runner, decoder, planner):
        answer(made, planner, pair(10))
        decoder.fault = MemoryError("on purpose")
        with pytest.raises(StepFailed):
            answer(made, planner, pair(11))
        made.recover()
        planner.reset()
        assert graphs_of(runner).captured == FIRST
        answer(made, planner, pair(12))
        assert Shape(16, 4) in graphs_of(runner).captured


def test_an_idle_engine_records_what_prompts_may_need() -> None:
    with executor() as (made, runner, decoder, planner):
        graphs = graphs_of(runner)
        assert [made.prepare() for _ in range(5)] == [True, True, True, False, False]
        assert graphs.captured == tuple(sorted((Shape(16, 1), Shape(48, 1), Shape(64, 4), *FIRST)))
        decoder.fault = RuntimeError("a prompt must not call the decoder")
        answer(made, planner, [prompt(0, 20)])
        answer(made, planner, [prompt(0, 20), prompt(1, 14), prompt(2, 3)])


def test_a_result_says_which_graph_computed_it_and_behind_which_step_one_was_recorded() -> None:
    with executor() as (made, _, _, planner):
        found = []
        for turn in range(3):
            pieces = [prompt(0, 8, turn), prompt(1, 6, turn)]
            for each in pieces:
                planner.add(each)
            plan = planner.plan([(each, 0, len(each.prompt)) for each in pieces], samples=list(enumerate(pieces)))
            result = made.collect(made.submit(plan))
            found.append((result.graph_tokens, result.recorded))
            take(result, pieces)
            for each in pieces:
                planner.drop(each)
                planner._free[0][:0] = each.tables[0]
        assert found == [(0, False), (0, True), (16, False)]  # (16, 4): launched, launched and recorded, replayed


def test_what_fails_ahead_is_left_alone_and_gives_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    with executor() as (made, runner, decoder, planner):
        restored: list[str] = []
        monkeypatch.setattr(made, "_restore", lambda: restored.append("set aside"))
        decoder.fault = torch.OutOfMemoryError("Tried to allocate 2 GiB")
        assert not made.prepare() and not made.prepare()
        assert graphs_of(runner).captured == FIRST and restored == ["set aside"]
        assert answer(made, planner, [prompt(0, 20)]) != [[]]


def test_nothing_is_prepared_between_a_failed_step_and_recovery() -> None:
    with executor() as (made, _, decoder, planner):
        decoder.fault = MemoryError("on purpose")
        with pytest.raises(StepFailed):
            answer(made, planner, pair(9))
        assert not made.prepare()
        made.recover()
        assert made.prepare()


def _full(*_: Any) -> None:
    raise torch.OutOfMemoryError("Tried to allocate 2 GiB")


def _reading(_: Shape) -> None:
    torch.zeros(1).item()


@pytest.mark.parametrize(("seqs", "budget"), [(1, 8192), (512, 8192), (3, 100), (8, 5)])
def test_every_step_has_a_shape_and_little_is_padded(seqs: int, budget: int) -> None:
    bounds = ShapeBounds(seqs, budget, 1.0, 1.0)
    assert list(bounds.tokens) == sorted(set(bounds.tokens)) and list(bounds.sequences) == sorted(set(bounds.sequences))
    assert bounds.tokens[-1] == min(budget, MOST_TOKENS) and bounds.sequences[-1] == seqs
    for lower, upper in zip(bounds.tokens, bounds.tokens[1:], strict=False):
        assert upper - lower <= max(16, upper // 3 if upper <= 128 else upper // 5)


def test_steps_that_the_device_bounds_are_padded_by_a_hair() -> None:
    shapes = PromptShapes(ShapeBounds(8, 64, 1.4e11 / 40, 1.0))
    rounded = {tokens: shapes.rounded(tokens, 1) for tokens in (20, 39, 47, 62, 63, 64, 65)}
    expected = {20: 32, 39: None, 47: 48, 62: None, 63: 64, 64: 64, 65: None}
    assert rounded == {tokens: size and Shape(size, 1) for tokens, size in expected.items()}


def test_what_an_idle_engine_records_is_bounded_and_of_shapes_there_are() -> None:
    bounds = ShapeBounds(512, 16384, 6e7, 4096.0)
    shapes = PromptShapes(bounds)
    shapes.add(shapes.first)
    recorded = []
    while (coming := shapes.next_ahead()) is not None:
        shapes.add((coming,))
        recorded.append(coming)
    assert len(shapes.captured) <= shapes.most and len(set(recorded)) == len(recorded)
    assert all(
        each.tokens in bounds.tokens and each.sequences in bounds.sequences and each.tokens > each.sequences
        for each in recorded
    )
    for tokens in range(65, 2049, 31):  # few times each
        served = shapes.shape_of(tokens, 60)
        assert served in shapes.captured and served is not None and served.tokens <= 2 * tokens


def test_products_of_known_models() -> None:
    shape = {
        "vocab_size": 128256,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "model_type": "llama",
        "hidden_act": "silu",
    }
    llama = {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_hidden_layers": 32,
    }
    spec = families.spec_from_config({**shape, **llama, "architectures": ["LlamaForCausalLM"]})
    assert multiplications(spec) == 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336


def test_numbers_lie_apart_and_the_rest_is_of_nobody() -> None:
    shape = Shape(16, 4)
    places = _places(shape)
    numbers = np.full(places[-1].stop, 99, dtype=np.int32)
    parts = ([7, 5], [0, 3, 9], [3, 8], [0] * 3 + [1] * 6, [0, 1, 2, *range(2, 8)], [2, 8])
    _fill(numbers, places, [np.array(part, dtype=np.int32) for part in parts])
    found = [numbers[place].tolist() for place in places]
    assert found == [
        [7, 5, 0, 0],
        [0, 3, 9, 9, 9],
        [3, 8, 0, 0],
        [0] * 3 + [1] * 6 + [0] * 7,
        [0, 1, 2, *range(2, 8), *[-1] * 7],
        [2, 8, 8, 8],
    ]
    assert all(place.start % 4 == 0 for place in places)
