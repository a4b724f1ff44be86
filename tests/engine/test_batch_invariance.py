"""``--batch-invariant``: tokens and logprobs have the same bits alone and among 64 others and more, whatever happens to
the batch.

That the others were there is read from the StepPlans; that prompts were cut, found in the cache or computed again, from
those too.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace import LLM
from tests.support import crowd, tiny
from tests.support.kernel_cases import native

OTHERS = 64
VOCAB = tiny.VOCAB_SIZE
TRUNK = tuple(range(40, 88))  # three blocks of a prompt that many begin with
MODELS: dict[str, dict[str, Any]] = {
    "gemma2": {},  # windows, caps, norms around each part
    "gpt2": {"n_inner": 101},  # plain GELU over a width that no vector divides; learned positions; layer norms
    "qwen3-moe": {},  # experts, norms of heads
}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    native(
        "linear", batch_invariant=True, dtype=torch.float32, in_features=64, out_features=64
    )  # skips where it cannot be built
    return str(tiny.save(request.param, tmp_path_factory.mktemp(request.param), **MODELS[request.param]))


def engine(model: str, dtype: str, **keywords: Any) -> LLM:
    common = {
        "device": "cpu",
        "threads": 2,
        "max_model_len": 240,
        "block_size": 16,
        "num_blocks": 1600,
        "max_num_seqs": 80,
        "overlap": 0,
    }
    return LLM(model, dtype=dtype, **{**common, "batch_invariant": True, **keywords})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_answers_among_many_have_the_bits_of_those_alone(model: str, dtype: str) -> None:
    rng = random.Random(11)
    others = crowd.draw_crowd(rng, VOCAB, OTHERS + 6, longest=40, trunk=TRUNK)
    subjects = crowd.draw_subjects(rng, VOCAB, trunk=TRUNK, long=90)
    with engine(model, dtype, max_num_batched_tokens=512, enable_prefix_caching=False) as llm:
        alone = crowd.answers_alone(llm, subjects)
    with engine(model, dtype, max_num_batched_tokens=104, overlap=1) as llm:
        among, company = crowd.answers_among(llm, others, subjects)
    crowd.assert_same_bits(among, alone)
    for each in subjects:
        assert min(company[each.prompt].others) >= OTHERS
    assert [count > 1 for count in company[subjects[0].prompt].counts].count(True) >= 3  # its prompt was cut
    assert among[1].num_cached_tokens > 0  # its prompt's beginning was somebody else's
    assert len(company[subjects[2].prompt].others) >= 20


def test_answers_that_were_preempted_have_the_same_bits(model: str) -> None:
    rng, dtype = random.Random(12), "bfloat16"
    others = crowd.draw_crowd(rng, VOCAB, OTHERS + 6, longest=40, trunk=TRUNK)
    subjects = crowd.draw_subjects(rng, VOCAB, trunk=TRUNK, long=60, max_tokens=60)
    with engine(
        model, dtype, max_num_batched_tokens=512, block_size=32
    ) as llm:  # KV is cut at other places in memory, too
        alone = crowd.answers_alone(llm, subjects)
    with engine(model, dtype, max_num_batched_tokens=160, num_blocks=430, overlap=1) as llm:
        among, company = crowd.answers_among(llm, others, subjects)
        assert llm.engine.core.stats().counters.preemptions > 0
    crowd.assert_same_bits(among, alone)
    assert any(company[each.prompt].starts > 1 for each in subjects)
    for each in subjects:
        assert sum(count >= OTHERS for count in company[each.prompt].others) >= 10


def test_a_product_that_knew_the_batch_would_be_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: one unit in the last place of one layer's sums, in large batches alone."""
    from headrace.layers.linear import Linear

    stock = Linear.finish_loading

    def finish_loading(self: Linear) -> None:
        stock(self)
        apply = self._apply_weight
        if self.site.outs == 64:
            self._apply_weight = lambda x: torch.nextafter(y := apply(x), y + 1) if len(x) > OTHERS else apply(x)

    rng, model = random.Random(13), str(tiny.save("llama", tmp_path))
    others = crowd.draw_crowd(rng, VOCAB, OTHERS + 6, longest=10, trunk=TRUNK)
    subjects = crowd.draw_subjects(rng, VOCAB, trunk=TRUNK, long=60, max_tokens=5)
    with engine(model, "float32") as llm:
        alone = crowd.answers_alone(llm, subjects)
    monkeypatch.setattr(Linear, "finish_loading", finish_loading)
    with engine(model, "float32") as llm, pytest.raises(AssertionError):
        crowd.assert_same_bits(crowd.answers_among(llm, others, subjects)[0], alone)
