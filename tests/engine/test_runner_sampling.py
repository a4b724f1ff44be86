"""What requests ask of sampling, over a decoder whose logits are a table: the next token's logits depend on the last
token alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace.clock import VirtualClock
from headrace.engine.executor import ExecutorInfo
from headrace.errors import StepFailed
from headrace.kernels import Kernels
from headrace.kernels.inputs import ForwardInputs
from headrace.request import SamplingParams
from headrace.worker import sampler
from headrace.worker.executor import DeviceExecutor
from headrace.worker.model_runner import ModelRunner
from headrace.worker.passes import ForwardPasses
from headrace.worker.rows import Rows, Trait
from headrace.worker.sampler import Draw, SampleBatch, Sampler, draw_of
from tests.support.hand_plans import GREEDY, Planned, Planner, generate, run, take
from tests.support.recorded_graphs import STAND_IN

VOCAB = 50


class TableDecoder:
    """Logits of the token after t are ``table[t]``; ``fault`` is raised by the next forward."""

    def __init__(self, table: Tensor) -> None:
        self.table = table
        self.fault: Exception | None = None
        self.spec, self.pooler = STAND_IN, None
        self.embeds = self.answers = True

    def forward(self, inputs: ForwardInputs, kv_caches: Sequence[Tensor]) -> Tensor:
        if self.fault is not None:
            fault, self.fault = self.fault, None
            raise fault
        return inputs.token_ids[:, None].float()

    def logits(self, hidden: Tensor, adapters: object = None) -> Tensor:
        return self.table[hidden[:, 0].long()].clone()


def _successors() -> Tensor:
    """t is followed by t + 1 most likely, then by t + 2, then by 0."""
    table = torch.zeros(VOCAB, VOCAB)
    for token in range(VOCAB):
        table[token, (token + 1) % VOCAB] = 10.0
        table[token, (token + 2) % VOCAB] = 8.0
        table[token, 0] = 6.0
    return table


def _random_table(seed: int = 0) -> Tensor:
    return torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


def _executor(table: Tensor, overlap: int = 0) -> tuple[DeviceExecutor, TableDecoder]:
    decoder = TableDecoder(table)
    rows = Rows(8, 64, VOCAB, (64,), torch.device("cpu"))
    passes = ForwardPasses(decoder, (), rows, Kernels(torch.device("cpu")))  # type: ignore[arg-type]
    runner = ModelRunner(passes, max_logits_rows=100, clock=VirtualClock())
    return DeviceExecutor(runner, ExecutorInfo(VOCAB, 64, 8, (), "table"), threads=1 if overlap else None), decoder


def _output(
    params: SamplingParams,
    prompt: Sequence[int] = (1, 2),
    *,
    table: Tensor | None = None,
    num_tokens: int = 6,
    **sequence: object,
) -> list[int]:
    """What a request gets in the company of a plain greedy one, which must not notice."""
    executor, _ = _executor(_successors() if table is None else table)
    asked, neighbour = Planned(3, list(prompt), params, **sequence), Planned(0, [20], GREEDY)  # type: ignore[arg-type]
    generate(executor, [neighbour, asked], num_tokens)
    if table is None:
        assert neighbour.output == list(range(21, 21 + num_tokens))
    return asked.output


def test_logit_bias_moves_a_choice() -> None:
    assert _output(SamplingParams(temperature=0.0, logit_bias={4: -3.0, 7: 4.5})) == [3, 5, 7, 8, 9, 10]


def test_only_allowed_ids_are_chosen() -> None:
    allowed = SamplingParams(temperature=0.0, allowed_token_ids=(0, 4, 5, 30))
    assert _output(allowed) == [4, 5, 0, 0, 0, 0]
    assert set(_output(SamplingParams(temperature=5.0, allowed_token_ids=(4, 5, 30)))) <= {4, 5, 30}


def test_bad_words_are_banned_where_they_would_be_completed() -> None:
    assert _output(GREEDY, bad_word_ids=((5,),)) == [3, 4, 6, 7, 8, 9]
    assert _output(GREEDY, bad_word_ids=((4, 5), (6, 7, 8))) == [3, 4, 6, 7, 9, 10]


def test_a_bad_word_that_begins_in_the_prompt_is_not_matched() -> None:
    assert _output(GREEDY, prompt=(1, 2), bad_word_ids=((2, 3),))[0] == 3


def test_stop_ids_are_masked_until_min_tokens_are_out() -> None:
    assert _output(SamplingParams(temperature=0.0, min_tokens=3), stop_token_ids=(4, 5, 6, VOCAB)) == [3, 0, 1, 2, 3, 4]


def test_penalties_equal_counting_by_hand() -> None:
    table = _random_table()
    params = SamplingParams(temperature=0.0, presence_penalty=0.8, frequency_penalty=1.1, repetition_penalty=1.4)
    ids = [7, 7, 9]
    for _ in range(20):
        logits, counts = table[ids[-1]].tolist(), Counter(ids[3:])
        for token in set(ids):
            logits[token] = logits[token] / 1.4 if logits[token] > 0 else logits[token] * 1.4
            logits[token] -= 1.1 * counts[token] + 0.8 * (counts[token] > 0)
        ids.append(max(range(VOCAB), key=logits.__getitem__))
    assert _output(params, (7, 7, 9), table=table, num_tokens=20) == ids[3:]


def test_each_penalty_works_alone() -> None:
    table = torch.zeros(VOCAB, VOCAB)
    table[:, 5], table[:, 6] = 2.0, 1.0
    assert _output(SamplingParams(temperature=0.0, presence_penalty=1.5), table=table, num_tokens=3) == [5, 6, 5]
    assert _output(SamplingParams(temperature=0.0, frequency_penalty=0.6), table=table, num_tokens=4) == [5, 5, 6, 5]
    assert _output(SamplingParams(temperature=0.0, repetition_penalty=3.0), (5,), table=table, num_tokens=2) == [6, 5]


@pytest.mark.parametrize("temperature", [0.0, 1e-30, 1.0])
def test_the_smallest_parameters_leave_a_choice(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, repetition_penalty=5e-324, top_p=5e-324, min_p=5e-324)
    table = torch.zeros(VOCAB, VOCAB)
    table[:, 5], table[:, 6] = 2.0, 1.0
    assert _output(params, (6,), table=table, num_tokens=3) == [6, 6, 6]


def test_only_the_output_is_counted() -> None:
    table = torch.zeros(VOCAB, VOCAB)
    table[:, 5], table[:, 6] = 2.0, 1.0
    assert _output(SamplingParams(temperature=0.0, frequency_penalty=2.0), (5, 5), table=table, num_tokens=2) == [5, 6]


MIXED = (
    GREEDY,
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_p=0.8),
    SamplingParams(temperature=1.5, top_k=5, frequency_penalty=0.5),
    SamplingParams(temperature=0.9, min_p=0.1, logprobs=3),
    SamplingParams(temperature=0.0, logit_bias={3: 2.0}, repetition_penalty=0.7),
)


@pytest.mark.parametrize("ids_at_once", [2**21, 1])
def test_a_mixed_batch_equals_each_row_alone(monkeypatch: pytest.MonkeyPatch, ids_at_once: int) -> None:
    monkeypatch.setattr(sampler, "_PENALISED_AT_ONCE", ids_at_once)
    table = _random_table(1)
    executor, _ = _executor(table)
    together = [Planned(row, [row + 1], params, seed=-row) for row, params in enumerate(MIXED)]
    generate(executor, together, 12)
    for sequence in together:
        alone = Planned(6, sequence.prompt, sequence.params, seed=sequence.seed)
        generate(executor, [alone], 12)
        assert alone.output == sequence.output


def test_the_seed_and_the_position_decide() -> None:
    uniform = torch.zeros(VOCAB, VOCAB)
    draws = {
        seed: tuple(_output(SamplingParams(), table=uniform, seed=seed, num_tokens=20))
        for seed in (0, 1, 2**63, 2**64 - 1)
    }
    assert len(set(draws.values())) == 4
    assert all(len(set(tokens)) > 5 for tokens in draws.values())
    assert draws[1] == tuple(
        _output(SamplingParams(), (9, 9, 9), table=uniform, seed=1, num_tokens=20)
    )  # position in the output, not in the row


UNUSABLE = (
    GREEDY,
    SamplingParams(),
    SamplingParams(top_p=0.5),
    SamplingParams(temperature=0.0, min_tokens=2, logprobs=1),
    SamplingParams(
        temperature=0.0, allowed_token_ids=(31, 32)
    ),  # the bad column is ruled out, yet the row cannot be trusted
)


@pytest.mark.parametrize("params", UNUSABLE)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_unusable_logits_are_that_rows_error_alone(params: SamplingParams, value: float) -> None:
    table = _successors()
    table[30, 4] = value
    executor, _ = _executor(table)
    bad, good = Planned(1, [30], params, stop_token_ids=(4,)), Planned(2, [10], GREEDY)
    planner = Planner(())
    planner.add(bad), planner.add(good)
    result = run(executor, planner.plan([(good, 0, 1), (bad, 0, 1)]))
    assert list(result.tokens) == [(11,), ()]
    assert list(result.errors) == [1] and "unusable" in result.errors[1]
    assert not result.logprobs


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=0.0, logprobs=1)])
def test_samples_find_their_chunk(params: SamplingParams) -> None:
    executor, _ = _executor(_successors())
    rows, planner = [Planned(row, [10 * row], params) for row in range(4)], Planner(())
    for sequence in rows:
        planner.add(sequence)
    work = [(rows[1], 0, 1), (rows[2], 0, 1)]
    assert list(run(executor, planner.plan(work, [(1, rows[0]), (0, rows[1]), (1, rows[2])])).tokens) == [
        (21,),
        (11,),
        (21,),
    ]


def test_ruling_out_every_token_is_that_rows_error() -> None:
    executor, _ = _executor(_successors())
    params = SamplingParams(temperature=0.5, allowed_token_ids=(4, 5), min_tokens=1)
    sequence, planner = Planned(1, [3], params, stop_token_ids=(4, 5)), Planner(())
    planner.add(sequence)
    assert list(run(executor, planner.plan([(sequence, 0, 1)])).errors) == [0]


@pytest.mark.parametrize("overlap", [0, 1])
def test_a_failed_step_is_told_at_collect_and_recovered_from(overlap: int) -> None:
    executor, decoder = _executor(_successors(), overlap)
    first, planner = Planned(0, [1], GREEDY), Planner(())
    planner.add(first)
    take(run(executor, planner.plan([(first, 0, 1)])), [first])
    decoder.fault = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes")
    failing = [executor.submit(planner.plan([(first, 1, 1)])), executor.submit(planner.plan([(first, 2, 1)]))]
    with pytest.raises(StepFailed, match="--max-num-batched-tokens"):
        executor.collect(failing[0])
    with pytest.raises(StepFailed, match="builds on"):
        executor.collect(failing[1])
    executor.recover()
    planner.add(first)
    take(run(executor, planner.plan([(first, 1, 1)])), [first])
    assert first.output == [2, 3]
    executor.close()


def test_other_failures_say_no_more_than_a_client_may_read() -> None:
    executor, decoder = _executor(_successors())
    sequence, planner = Planned(0, [1], GREEDY), Planner(())
    planner.add(sequence)
    decoder.fault = ValueError("secret detail at /usr/lib")
    with pytest.raises(StepFailed, match="ValueError") as caught:
        run(executor, planner.plan([(sequence, 0, 1)]))
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("company", [[], [0.7], [0.7, 0.9]], ids=["greedy", "random", "filtered"])
def test_a_draw_for_all_rows_picks_what_each_would_get_alone(company: list[float]) -> None:
    """What a graph holds, against what the step's own path does: rows of every kind the draw serves, greedy ones among
    them."""
    kinds = [GREEDY] + [
        SamplingParams(temperature=t, top_p=0.8 if t == 0.9 else 1.0, top_k=5 if t == 0.9 else 0, min_p=0.01)
        for t in company
    ]
    kinds = [replace(params, min_p=0.0) if params.top_p == 1.0 else params for params in kinds]
    results = []
    for whole in (True, False):
        rows, planner = Rows(8, 64, VOCAB, (64,), torch.device("cpu")), Planner([])
        for row in range(6):
            planner.add(Planned(row, [row, 2, 3], kinds[row % len(kinds)], seed=17 * row))
        rows.apply(planner.plan([]))
        at, places = np.array([5, 3, 0, 2], dtype=np.int32), np.array([3, 3, 3, 3], dtype=np.int32)
        logits = torch.randn(
            4, VOCAB, generator=torch.Generator().manual_seed(1)
        ).bfloat16()  # a draw takes them as the head gives them
        logits[3, 7] = float("nan")
        sampler, how = Sampler(rows, Kernels(torch.device("cpu"))), draw_of(rows.traits[at])
        assert how is list(Draw)[len(company)]
        if whole:
            ring, turn = torch.zeros(1, 4, 2, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
            head = SimpleNamespace(logits=lambda hidden: hidden, greedy=lambda hidden, largest: largest(hidden))
            sampler.draw(head, logits, torch.from_numpy(at), torch.from_numpy(places), how, ring, turn)
            picked = ring[0]
        else:
            picked = sampler.sample(logits.float(), SampleBatch(at, places, np.arange(4, dtype=np.int32))).picked
        results.append(
            (
                picked[:3].tolist(),
                int(picked[3, 1]),
                rows.token_ids[:, :3].tolist(),
                rows.token_ids[[5, 3, 0], 3].tolist(),
            )
        )
    assert results[0] == results[1]
    assert results[0][1] == 0  # the row of the NaN is not usable


def test_a_draw_serves_nobody_who_wants_more() -> None:
    for more in (Trait.EDITED, Trait.PENALISED, Trait.COUNTED, Trait.SCORED):
        assert draw_of(np.array([Trait.RANDOM, more], dtype=np.int32)) is None
