"""The worker over tiny models: what it computes does not depend on how the work was cut, packed, placed or threaded."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from headrace.engine.executor import Executor
from headrace.kernels.inputs import MOST_FEW, ForwardInputs
from headrace.models.decoder import Decoder
from headrace.request import SamplingParams, StepPlan
from headrace.worker import rows as inputs
from headrace.worker.rows import LEAST_LEADING, LEAST_QUERIES, Packing, pack, queries_of
from tests.support import tiny
from tests.support.hand_plans import GREEDY, Planned, Planner, decode, generate, run, take, worker_for

LENGTHS = (1, 7, 8, 9, 23)  # around the block size of 8
SAMPLED = SamplingParams(temperature=0.9, top_p=0.9, top_k=40)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save("llama", tmp_path_factory.mktemp("llama"), tokenizer=False)


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two KV groups: full attention and a window of 12."""
    return tiny.save("gemma2", tmp_path_factory.mktemp("gemma2"), tokenizer=False)


@pytest.fixture(scope="module")
def executor(folder: Path) -> Executor:
    return worker_for(folder)


def _prompts(lengths: Sequence[int] = LENGTHS, params: SamplingParams = GREEDY, seed: int = 0) -> list[Planned]:
    draw = random.Random(seed)
    return [
        Planned(row, [draw.randrange(256) for _ in range(length)], params, seed=100 + row)
        for row, length in enumerate(lengths)
    ]


def _outputs(sequences: Sequence[Planned]) -> list[list[int]]:
    return [sequence.output for sequence in sequences]


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_greedy_tokens_equal_transformers(name: str, request: pytest.FixtureRequest) -> None:
    executor = worker_for(request.getfixturevalue("folder" if name == "llama" else "windowed"))
    sequences = _prompts()
    generate(executor, sequences, 8)
    model = tiny.create(name)
    for sequence in sequences:
        ids = list(sequence.prompt)
        for _ in range(8):
            with torch.no_grad():
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        assert sequence.output == ids[len(sequence.prompt) :]


@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
@pytest.mark.parametrize("name", ["folder", "windowed"])
def test_chunks_padding_and_recomputing_change_no_token(
    name: str, params: SamplingParams, request: pytest.FixtureRequest
) -> None:
    model = request.getfixturevalue(name)
    executor, padded = worker_for(model), worker_for(model, device={"token_concatenation": False})
    unpruned = worker_for(model, device={"last_layer_pruning": False})
    whole, chunked, filled_up, recomputed, to_the_end = (_prompts(params=params) for _ in range(5))
    generate(executor, whole, 10)
    generate(executor, chunked, 10, chunk=5)
    generate(padded, filled_up, 10, chunk=5)
    generate(unpruned, to_the_end, 10, chunk=5)
    _generate_without_cache(executor, recomputed, 10)
    assert _outputs(chunked) == _outputs(whole)
    assert _outputs(filled_up) == _outputs(whole)
    assert _outputs(recomputed) == _outputs(whole)
    assert _outputs(to_the_end) == _outputs(whole)


@pytest.mark.parametrize("device", [{}, {"token_concatenation": False}, {"batch_invariant": True}])
@pytest.mark.parametrize("name", ["folder", "windowed"])
def test_what_nobody_reads_is_not_attended_for(
    name: str, device: dict[str, bool], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks that end nowhere (in some steps nothing is sampled), ends of prompts and single tokens, in one step. Of
    short ones all attend."""
    model, params = request.getfixturevalue(name), SamplingParams(temperature=0.0, logprobs=3)
    monkeypatch.setitem(LEAST_QUERIES, "cpu", 9)
    plain, pruned = worker_for(model, device={**device, "last_layer_pruning": False}), worker_for(model, device=device)
    alone: list[bool] = []
    compute = pruned._runner.decoder.forward  # type: ignore[attr-defined]
    monkeypatch.setattr(
        pruned._runner.decoder,
        "forward",
        lambda inputs, caches: (alone.append(bool(inputs.queries)), compute(inputs, caches))[1],
    )  # type: ignore[attr-defined]
    expected, found = (generate(worker, _prompts((40, 8, 1, 23), params), 6, chunk=8) for worker in (plain, pruned))
    assert [list(each.tokens) for each in found] == [list(each.tokens) for each in expected]
    for one, other in zip(found, expected, strict=True):
        for index, entries in one.logprobs.items():
            assert entries[0].token_ids == other.logprobs[index][0].token_ids
            assert entries[0].logprobs == pytest.approx(
                other.logprobs[index][0].logprobs, rel=0, abs=0 if "batch_invariant" in device else 1e-5
            )
    assert set(alone) == {True, False}, "steps of both kinds came"


def test_what_a_graph_is_told_of_wanted_tokens_is_what_a_step_is() -> None:
    """Of two chunks and a token; with the last one said again for two that are not there."""
    ints = partial(array, "i")
    plan = StepPlan(
        0,
        rows=ints([0, 1, 2]),
        starts=ints([3, 0, 7]),
        counts=ints([5, 4, 1]),
        sample_rows=ints([0, 2]),
        sample_work=ints([0, 2]),
    )
    packing = pack(plan, padded=True, prune=True)
    assert packing.wanted is not None
    chunk, position, wanted = (torch.as_tensor(each) for each in (packing.chunk, packing.position, packing.wanted))
    found = queries_of(torch.cat((wanted, wanted[-1:], wanted[-1:])), chunk, position)
    assert (found.chunk.tolist(), found.context.tolist()) == ([0, 2, 2, 2], [8, 8, 0, 0])
    assert found.query_start.tolist() == [0, 1, 2, 3, 4]
    assert [each.tolist() for each in packing.queries] == [[0, 2], [8, 8], [0, 1, 2]]
    assert {each.dtype for each in (found.chunk, found.context, found.query_start)} == {torch.int32}


def _generate_without_cache(executor: Executor, sequences: Sequence[Planned], num_tokens: int) -> None:
    planner = Planner(executor.info.kv_groups)
    for sequence in sequences:
        planner.add(sequence)
    for _ in range(num_tokens):
        take(run(executor, planner.plan([(s, 0, len(s.ids)) for s in sequences])), sequences)


def test_batched_equals_alone(executor: Executor) -> None:
    together = _prompts(params=SAMPLED)
    generate(executor, together, 8)
    for expected, alone in zip(together, _prompts(params=SAMPLED), strict=True):
        alone.row = 7 - expected.row  # another row as well: it is no part of what is sampled
        generate(executor, [alone], 8, planner=Planner(executor.info.kv_groups, seed=expected.row + 1))
        assert alone.output == expected.output


PENALISED = SamplingParams(
    temperature=0.8, presence_penalty=0.7, frequency_penalty=0.5, repetition_penalty=1.3, min_p=0.02
)


def test_rows_rebuilt_from_ids_equal_rows_kept(executor: Executor) -> None:
    """Every row is dropped and built again between any two steps, at another place; penalty counts come back with
    it."""
    kept, rebuilt = _prompts((5, 17), PENALISED), _prompts((5, 17), PENALISED)
    generate(executor, kept, 12)
    planner = Planner(executor.info.kv_groups)
    for turn in range(12):
        for sequence in rebuilt:
            planner.drop(sequence)
            sequence.row = (sequence.row + 3) % 8
        for sequence in rebuilt:
            planner.add(sequence)
        work = [(s, 0, len(s.ids)) if turn == 0 else s.next for s in rebuilt]
        take(run(executor, planner.plan(work)), rebuilt)
    assert _outputs(rebuilt) == _outputs(kept)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_tokens_the_planner_does_not_know_are_found_in_rows(folder: Path, executor: Executor, depth: int) -> None:
    """Plans are submitted ``depth`` steps ahead of their inputs; a worker thread gives what the inline executor
    gives."""
    expected, ahead = _prompts((3, 12), PENALISED), _prompts((3, 12), PENALISED)
    generate(executor, expected, 9)
    threaded = worker_for(folder, device={"overlap": depth})
    planner = Planner(threaded.info.kv_groups)
    for sequence in ahead:
        planner.add(sequence)
    tickets = [threaded.submit(planner.plan([(s, 0, len(s.prompt)) for s in ahead]))]
    for step in range(8):
        tickets.append(threaded.submit(planner.plan([(s, len(s.prompt) + step, 1) for s in ahead])))
        if len(tickets) > depth:
            take(threaded.collect(tickets.pop(0)), ahead)
    for ticket in tickets:
        take(threaded.collect(ticket), ahead)
    threaded.close()
    assert _outputs(ahead) == _outputs(expected)


@pytest.mark.parametrize("name", ["folder", "windowed"])
def test_several_rows_from_one_chunk_and_copied_blocks(name: str, request: pytest.FixtureRequest) -> None:
    """n = 3: one prompt computed once, three rows sampled from its logits, each going on over copies of its blocks."""
    executor = worker_for(request.getfixturevalue(name))
    prompt = _prompts((13,))[0].prompt
    alone = [Planned(0, prompt, SAMPLED, seed=seed) for seed in (1, 2, 3)]
    for sequence in alone:
        generate(executor, [sequence], 6)
    forks = [Planned(row, prompt, SAMPLED, seed=row + 1) for row in range(3)]
    planner = Planner(executor.info.kv_groups)
    for fork in forks:
        planner.add(fork)
    take(run(executor, planner.plan([(forks[0], 0, 13)], [(0, fork) for fork in forks])), forks)
    for fork in forks[1:]:
        fork.tables = []
        planner.fork(forks[0], fork, 13)
    for _ in range(5):
        decode(executor, planner, forks)
    assert _outputs(forks) == _outputs(alone)
    assert len({tuple(fork.output) for fork in forks}) == 3


def test_few_logits_rows_at_once_give_the_same(folder: Path, executor: Executor) -> None:
    params = SamplingParams(temperature=0.7, logprobs=2, prompt_logprobs=3)
    results = []
    for worker in (executor, worker_for(folder, scheduler={"max_logits_rows": 2})):
        sequences, planner = _prompts((11, 4, 9), params), Planner(worker.info.kv_groups)
        for sequence in sequences:
            planner.add(sequence)
        results.append(run(worker, planner.plan([(s, 0, len(s.ids)) for s in sequences], prompt_logprobs=(0, 1, 2))))
    assert results[0].tokens == results[1].tokens
    for field in ("logprobs", "prompt_logprobs"):
        whole, pieces = getattr(results[0], field), getattr(results[1], field)
        assert whole.keys() == pieces.keys()
        for index, entries in whole.items():
            for one, other in zip(entries, pieces[index], strict=True):
                assert one.token_ids == other.token_ids and one.rank == other.rank
                assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)


def test_logprobs_equal_transformers(executor: Executor) -> None:
    params = SamplingParams(temperature=0.7, logprobs=4, prompt_logprobs=2)
    sequence, planner = _prompts((14,), params)[0], Planner(executor.info.kv_groups)
    planner.add(sequence)
    pieces = [
        run(executor, planner.plan([(sequence, 0, 6)], (), (0,))),
        run(executor, planner.plan([(sequence, 6, 8)], None, (0,))),
    ]
    with torch.no_grad():
        expected = tiny.create("llama")(torch.tensor([sequence.prompt])).logits[0].log_softmax(-1)
    scored = [entry for piece in pieces for entry in piece.prompt_logprobs[0]]
    assert len(scored) == 13
    for position, entry in enumerate(scored):
        _check_entry(entry.token_ids, entry.logprobs, entry.rank, sequence.prompt[position + 1], expected[position], 2)
    (token,), (entry,) = pieces[1].tokens[0], pieces[1].logprobs[0]
    _check_entry(entry.token_ids, entry.logprobs, entry.rank, token, expected[13], 4)


def _check_entry(
    ids: tuple[int, ...], logprobs: tuple[float, ...], rank: int, chosen: int, expected: torch.Tensor, num_best: int
) -> None:
    assert ids == (chosen, *expected.topk(num_best).indices.tolist())
    assert logprobs == pytest.approx([float(expected[token]) for token in ids], abs=1e-4)
    assert rank == int((expected > expected[chosen]).sum()) + 1


def test_of_two_edits_of_one_place_the_later_holds(executor: Executor) -> None:
    expected, edited = _prompts((20,))[0], _prompts((20,))[0]
    generate(executor, [expected], 4)
    planner = Planner(executor.info.kv_groups)
    planner.add(edited)
    planner._edits += [(edited.row, 0, index, 95) for index in (1, 0, 1)]  # the planner's own edits come after these
    take(run(executor, planner.plan([(edited, 0, 20)])), [edited])
    for _ in range(3):
        decode(executor, planner, [edited])
    assert edited.output == expected.output


def test_an_empty_plan_is_legal(executor: Executor) -> None:
    result = run(executor, StepPlan(77))
    assert (result.step_id, list(result.tokens), result.errors) == (77, [], {})


def test_bfloat16_generates(folder: Path) -> None:
    sequences = _prompts()
    generate(worker_for(folder, dtype="bfloat16"), sequences, 4)
    assert all(len(sequence.output) == 4 for sequence in sequences)


@pytest.mark.parametrize(
    ("counts", "leading"),
    [
        ([1] * LEAST_LEADING + [MOST_FEW + 1], LEAST_LEADING),
        ([1] * 40 + [500, 17, 300], 40),
        ([1] * (LEAST_LEADING - 1) + [500], 0),  # too few
        ([1] * 40, 0),  # a decode step
        ([500, *[1] * 40], 0),  # they do not come first
        ([1] * 40 + [500, 1], 0),  # nor all of them
        ([1] * 40 + [500, MOST_FEW], 0),  # for whom the other kernel has to be launched anyway
    ],
)
def test_single_tokens_before_prompts_are_counted_where_they_can_be_taken_by_themselves(
    counts: list[int], leading: int
) -> None:
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    nothing = np.zeros(0, dtype=np.int32)
    assert Packing(starts, nothing, nothing, nothing).leading == leading


def test_steps_say_how_many_sequences_come_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "LEAST_LEADING", 2)
    seen: list[int] = []
    forward = Decoder.forward

    def watched(decoder: Decoder, step: ForwardInputs, caches: Sequence[torch.Tensor]) -> torch.Tensor:
        seen.append(step.attention[0].leading)
        return forward(decoder, step, caches)

    monkeypatch.setattr(Decoder, "forward", watched)
    executor = worker_for(folder)
    planner, (first, second, late) = Planner(executor.info.kv_groups), _prompts([5, 6, MOST_FEW + 3])
    generate(executor, [first, second], 2, planner=planner)
    planner.add(late)
    run(executor, planner.plan([first.next, second.next, (late, 0, MOST_FEW + 3)]))
    assert seen[-3:] == [0, 0, 2]  # a prompt, a decode step, both
