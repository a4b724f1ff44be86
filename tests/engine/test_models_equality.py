"""Every family computes what transformers computes, in float32 to 1e-4: whole prompts, chunks and decode steps, packed
together.

The oracle sees each sequence alone and whole; the decoder sees chunks of several, over shuffled blocks of 8 tokens in a
cache that is NaN wherever nothing was written or a window has passed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import headrace.kernels as registry
from headrace.kernels.candidate import Candidate
from headrace.kernels.linear import reference
from headrace.kernels.linear.epilogue import MOST_ROWS
from headrace.kernels.moe.reference import fused_moe
from headrace.models.decoder import Decoder
from headrace.spec import NormKind
from tests.support import tiny
from tests.support.forward import PagedRun, load_decoder
from tests.support.kernel_cases import carried_out

TOLERANCE = 1e-4
LENGTHS = {
    "a": 64,
    "b": 8,
    "c": 17,
    "d": 1,
    "e": 39,
}  # one token, below, on and above block edges, the whole context; up to five windows


@dataclass(frozen=True)
class Case:
    """A tiny model, its sequences, and what transformers says about them."""

    model: Any
    folder: Path
    sequences: dict[str, list[int]]
    expected: dict[str, Tensor]  # name → [tokens, vocab], float32


def oracle(model: Any, ids: list[int]) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([ids])).logits[0]
    return logits


def make_case(name: str, folder: Path, lengths: dict[str, int] = LENGTHS, **fields: Any) -> Case:
    model = tiny.create(name, seed=3, **fields)
    model.save_pretrained(folder)
    source = random.Random(5)
    sequences = {key: source.choices(range(tiny.VOCAB_SIZE), k=length) for key, length in lengths.items()}
    return Case(model, folder, sequences, {key: oracle(model, ids) for key, ids in sequences.items()})


@pytest.fixture(scope="module", params=tiny.MODELS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    yield make_case(request.param, tmp_path_factory.mktemp(request.param))


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for key, logits in found.items():
        assert (logits - expected[key]).abs().max() <= TOLERANCE, key  # NaN fails too


def in_chunks(run: PagedRun, sequences: dict[str, list[int]], size: Callable[[str, int], int]) -> dict[str, Tensor]:
    """Steps until all are computed; ``size(name, done)`` tokens of each sequence that has any left."""
    done = dict.fromkeys(sequences, 0)
    parts: dict[str, list[Tensor]] = {key: [] for key in sequences}
    while left := [key for key, ids in sequences.items() if done[key] < len(ids)]:
        chunks = {key: sequences[key][done[key] :][: size(key, done[key])] for key in left}
        for key, logits in run.step(chunks).items():
            parts[key].append(logits)
            done[key] += len(logits)
    return {key: torch.cat(logits) for key, logits in parts.items()}


def test_whole_prompts(case: Case) -> None:
    decoder = load_decoder(case.folder, max_model_len=64)
    assert_close(PagedRun(decoder).step(case.sequences), case.expected)


def test_chunks_and_decode_steps_mixed(case: Case) -> None:
    """Prompts in uneven chunks beside others that go token by token."""
    decoder = load_decoder(case.folder, max_model_len=64)
    sizes = random.Random(1)
    uneven = in_chunks(
        PagedRun(decoder, seed=2), case.sequences, lambda key, done: 1 if key == "c" else sizes.choice((1, 7, 8, 9))
    )
    assert_close(uneven, case.expected)


def test_few_rows_through_products_that_take_in_what_stands_around_them(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, by the twins: up to 64 tokens one way and more the other, over one cache."""
    rows: list[int] = []

    def counted(weight: Tensor, bias: Tensor | None) -> Callable[..., Any]:
        apply = reference.fused_linear(weight, bias)
        return lambda x, epilogue: (rows.append(len(x)), apply(x, epilogue))[1]

    offered = (Candidate("planted", lambda site: counted, failure=None),)
    experts = Candidate("planted", lambda site: fused_moe, failure=None)
    planted = {**carried_out("fused_linear", *offered), "fused_moe": carried_out("fused_moe", experts)["fused_moe"]}
    monkeypatch.setattr(registry, "OPERATIONS", planted)
    decoder = load_decoder(case.folder, max_model_len=64)
    sizes = random.Random(1)
    uneven = in_chunks(
        PagedRun(decoder, seed=2), case.sequences, lambda key, done: 1 if key == "c" else sizes.choice((1, 9, 30, 40))
    )
    assert_close(uneven, case.expected)
    spec = decoder.spec
    fuses = (
        spec.norm is NormKind.RMS
        and spec.gated_mlp
        and not spec.sandwich_norm
        and len({layer.moe is None for layer in spec.layers}) == 1
    )
    assert bool(rows) == fuses and max(rows, default=0) <= MOST_ROWS
    assert_last_rows(decoder, case)


def test_many_rows_through_products_that_take_in_the_residual(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: the residual is overwritten, so whoever still read it would show."""
    rows: list[int] = []

    def counted(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor, Tensor], Tensor]:
        def apply(x: Tensor, residual: Tensor) -> Tensor:
            rows.append(len(x))
            return residual.add_(torch.nn.functional.linear(x, weight, bias))

        return apply

    offered = (Candidate("planted", lambda site: counted, failure=None),)
    monkeypatch.setattr(registry, "OPERATIONS", carried_out("added_linear", *offered))
    monkeypatch.setattr("headrace.models.decoder.LEAST_ADDED", 20)
    decoder = load_decoder(case.folder, max_model_len=64)
    sizes = random.Random(1)
    uneven = in_chunks(
        PagedRun(decoder, seed=2), case.sequences, lambda key, done: 1 if key == "c" else sizes.choice((1, 9, 30, 40))
    )
    assert_close(uneven, case.expected)
    assert bool(rows) == decoder.composed(20)[1] and min(rows, default=20) >= 20
    assert_last_rows(decoder, case)


def assert_last_rows(decoder: Decoder, case: Case) -> None:
    """Of beginnings in one step, whose other rows nobody reads."""
    found = PagedRun(decoder, seed=3).step({key: ids[:9] for key, ids in case.sequences.items()}, last=True)
    assert_close(found, {key: case.expected[key][:9][-1:] for key in case.sequences})


def test_the_last_block_attends_to_what_is_read_alone(case: Case) -> None:
    """Prompts, chunks of them and single tokens in one step; what is decoded next sees all keys."""
    decoder = load_decoder(case.folder, max_model_len=64)
    attend = Attended(decoder)
    run, sizes, done = PagedRun(decoder, seed=2), random.Random(1), dict.fromkeys(case.sequences, 0)
    while left := {key: ids for key, ids in case.sequences.items() if done[key] < len(ids)}:
        chunks = {
            key: ids[done[key] :][: 1 if key == "c" else sizes.choice((1, 7, 8, 30))] for key, ids in left.items()
        }
        found = run.step(chunks, last=True)
        done.update({key: done[key] + len(ids) for key, ids in chunks.items()})
        assert_close(found, {key: case.expected[key][done[key] - 1 :][:1] for key in chunks})
        assert attend.queries[-1] == len(chunks)


class Attended:
    """Counts the queries that a decoder's last block attends for."""

    def __init__(self, decoder: Decoder) -> None:
        self.queries: list[int] = []
        last = decoder.layers[-1].attention
        self._attend, last._attend = last._attend, self

    def __call__(self, q: Tensor, *rest: Any) -> Tensor:
        self.queries.append(len(q))
        found: Tensor = self._attend(q, *rest)
        return found


def errors(logits: dict[str, Tensor], exact: dict[str, Tensor]) -> tuple[float, float]:
    """Median and root mean square of the error over all logits."""
    differences = torch.cat([(logits[key].double() - exact[key].double()).flatten().abs() for key in exact])
    return float(differences.median()), float(differences.square().mean().sqrt())


def test_bfloat16_errs_no_more_than_transformers(case: Case) -> None:
    """Against float32, our bfloat16 logits err at most 1.1 times as much as transformers' own in the median and 1.5
    times in the root mean square (which one token routed to another expert moves).
    """
    decoder = load_decoder(case.folder, dtype=torch.bfloat16, max_model_len=64)
    median, rms = errors(PagedRun(decoder).step(case.sequences), case.expected)
    model = tiny.create_like(case.model, torch.bfloat16)
    their_median, their_rms = errors({key: oracle(model, ids) for key, ids in case.sequences.items()}, case.expected)
    assert median <= 1.1 * their_median and rms <= 1.5 * their_rms


# --- what one family alone has --------------------------------------------------------------------------------------------


def logits_of(decoder: Decoder, ids: list[int]) -> Tensor:
    return PagedRun(decoder).step({"a": ids})["a"]


def test_longrope_is_decided_by_the_longest_context(tmp_path: Path) -> None:
    """Beyond the trained 64 positions the long factors serve every position, as transformers' do once a sequence is
    that long."""
    case = make_case("phi3-longrope", tmp_path, {"a": 70})
    decoder = load_decoder(case.folder, max_model_len=128)
    assert_close({"a": logits_of(decoder, case.sequences["a"])}, case.expected)
    short = load_decoder(case.folder, max_model_len=64)
    ids = case.sequences["a"][:40]
    assert (logits_of(short, ids) - oracle(case.model, ids)).abs().max() <= TOLERANCE
    assert (logits_of(decoder, ids) - logits_of(short, ids)).abs().max() > 0.1


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("mistral", "sliding_window", tiny.WINDOW + 1),
        ("gemma2", "attn_logit_softcapping", None),
        ("gemma2", "sliding_window", tiny.WINDOW + 1),
        ("llama3", "rope_parameters", None),
        ("gpt2", "scale_attn_by_inverse_layer_idx", False),
    ],
)
def test_the_tiny_models_show_what_they_are_for(name: str, field: str, value: Any) -> None:
    """A model whose window is one longer, or that lacks its cap or scaling, is told apart by a thousand tolerances."""
    ids = random.Random(5).choices(range(tiny.VOCAB_SIZE), k=41)
    difference = oracle(tiny.create(name, seed=3), ids) - oracle(tiny.create(name, seed=3, **{field: value}), ids)
    assert difference.abs().max() > 1000 * TOLERANCE
