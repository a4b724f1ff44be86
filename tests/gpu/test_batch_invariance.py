"""``--batch-invariant`` on the card: the bits of a row in any company, kernel by kernel and through the whole engine.

The StepPlans say who was in which step (support/crowd.py). Widths of real models matter here: kernels choose tiles by
them.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from headrace import LLM
from headrace.kernels import TWIN, Kernels
from headrace.spec import Activation
from tests.support import crowd, tiny
from tests.support.card import require_card
from tests.support.kernel_cases import called, using

require_card()

from headrace.kernels.linear import triton_linear as linear  # noqa: E402  Triton is there where a GPU is

CUDA = torch.device("cuda")
OTHERS = 64
TRUNK = tuple(range(40, 300))  # blocks of a prompt that many begin with
PLACES = ((0, 1), (7, 8), (0, 16), (3, 20), (100, 164), (37, 102), (0, 300), (299, 300))  # rows first … end - 1
LARGE = linear.LARGE[0]
TILES = (
    *linear.LARGE,
    linear.ONE,
    *(linear.Tile(16, *rest) for rest in ((32, 256, 4, 4), (64, 128, 4, 5), (128, 128, 4, 4), (16, 128, 2, 4))),
)
WIDE = {  # two layers of a model of the 1B class
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
MODELS = (  # tiny ones: windows and caps, plain GELU and layer norms, experts
    ("demo", "bfloat16"),
    ("demo", "float32"),
    ("wide", "bfloat16"),
    ("gemma2", "bfloat16"),
    ("starcoder", "float32"),
    ("mixtral", "bfloat16"),
)


def chosen(op: str, **facts: Any) -> Any:
    kernels = Kernels(CUDA, strict=True, techniques=using(batch_invariant=True))
    kernel = kernels.choose(*called(op, **facts))
    assert kernels.choices[-1].chosen != TWIN
    return kernel


def operands(ins: int, outs: int, dtype: torch.dtype, spread: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """300 rows, a weight and a bias; magnitudes over ``spread`` powers of 2 either way, so that every rounding
    shows."""
    generator = torch.Generator(CUDA).manual_seed(ins)

    def draw(*shape: int) -> torch.Tensor:
        powers = torch.randint(-spread, spread + 1, shape, device=CUDA, generator=generator)
        return torch.randn(shape, device=CUDA, generator=generator) * torch.exp2(powers.float())

    return draw(300, ins).to(dtype), (draw(outs, ins) * ins**-0.5).to(dtype), draw(outs).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("ins", "outs", "spread"), [(4096, 2048, 0), (14336, 640, 3), (2056, 1000, 2), (101, 160, 2)])
def test_a_linear_layer_gives_a_row_the_same_bits_in_any_company(
    dtype: torch.dtype, ins: int, outs: int, spread: int
) -> None:
    x, weight, bias = operands(ins, outs, dtype, spread)
    product = chosen("linear", dtype=dtype, in_features=ins, out_features=outs)(weight, bias)
    together = product(x)
    exact = F.linear(x.double(), weight.double(), bias.double())
    worst = float((together.double() - exact).abs().max() / exact.abs().max())
    assert worst <= {torch.bfloat16: 4e-3, torch.float16: 5e-4, torch.float32: 1e-5}[dtype]
    for first, end in PLACES:
        assert torch.equal(product(x[first:end]), together[first:end])
    assert torch.equal(product(x.repeat(9, 1))[-300:], together)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("ins", "outs", "spread"), [(4096, 2048, 0), (4096, 1024, 8), (14336, 512, 3)])
def test_all_tiles_add_in_one_order(dtype: torch.dtype, ins: int, outs: int, spread: int) -> None:
    """What the choice of tiles by rows rests on: mma.sync and wgmma round alike, and so do loads and the copy
    engine."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("one tile serves all here")
    x, weight, bias = operands(ins, outs, dtype, spread)
    results = []
    for tile in TILES:
        for bulk in (True, False) if tile.rows * tile.columns <= 64 * 64 else (True,):
            results.append(torch.empty(len(x), outs, dtype=dtype, device=CUDA))
            linear.launch(x, weight, bias, results[-1], tile, bulk=bulk)
    assert all(torch.equal(each, results[0]) for each in results)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("width", [72, 128, 1000, 2048, 4096, 8192])
def test_norms_and_activations_give_a_row_the_same_bits_in_any_company(dtype: torch.dtype, width: int) -> None:
    x, residual, weight = (
        torch.randn(shape, device=CUDA).to(dtype) for shape in ((300, width), (300, width), (width,))
    )
    calls = [
        lambda at: chosen("rms_norm", dtype=dtype)(x[at], weight, 1e-5, residual[at])[0],
        lambda at: chosen("rms_norm", dtype=dtype)(x[at], weight, 1e-5, None)[0],
        lambda at: chosen("layer_norm", dtype=dtype)(x[at], weight, weight, 1e-5, residual[at])[0],
        *(lambda at, kind=kind: chosen("activation", dtype=dtype)(x[at], kind) for kind in Activation),
        *(lambda at, kind=kind: chosen("gated_activation", dtype=dtype)(x[at], kind) for kind in Activation),
    ]
    for call in calls:
        together = call(slice(0, 300))
        for first, end in PLACES:
            assert torch.equal(call(slice(first, end)), together[first:end])


def test_scores_give_a_row_the_same_bits_in_any_company() -> None:
    """Logits as a bfloat16 head gives them: many are equal."""
    logits = (torch.randn(300, 32003, device=CUDA) * 3).bfloat16().float()
    targets = torch.randint(32003, (300,), device=CUDA)
    score = chosen("score_tokens", dtype=torch.float32)
    together = score(logits, targets, 20)
    for first, end in PLACES:
        for count in (0, 3, 20):
            for got, want in zip(score(logits[first:end], targets[first:end], count), together, strict=True):
                assert torch.equal(got, want[first:end] if want.dim() == 1 else want[first:end, : 1 + count])


@pytest.fixture(scope="module", params=MODELS, ids=" ".join)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Keywords of LLM."""
    (name, dtype), folder = request.param, tmp_path_factory.mktemp(request.param[0])
    if name == "demo":
        yield {"dtype": dtype}
    elif name == "wide":
        (folder / "config.json").write_text(json.dumps(WIDE))
        yield {"dtype": dtype, "model": str(folder), "load_format": "dummy"}
    else:
        length = {"n_positions" if name == "starcoder" else "max_position_embeddings": 2048}
        yield {"dtype": dtype, "model": str(tiny.save(name, folder, **length))}
    torch.cuda.empty_cache()


def engine(model: dict[str, Any], **keywords: Any) -> LLM:
    common = {
        "device": "cuda",
        "max_model_len": 900,
        "max_num_seqs": 80,
        "num_blocks": 700,
        "block_size": 128,
        "strict_kernels": True,
    }
    return LLM(**{**model, **common, "batch_invariant": True, **keywords})


def test_answers_among_many_have_the_bits_of_those_alone(model: dict[str, Any]) -> None:
    """Alone: whole, eager or as graphs of one row. Among: cut, found in the cache, as graphs of many rows."""
    rng = random.Random(21)
    with engine(model, enable_prefix_caching=False, overlap=0) as llm:
        vocab = llm.info.vocab_size
        others = crowd.draw_crowd(rng, vocab, OTHERS + 6, longest=300, trunk=TRUNK)
        subjects = crowd.draw_subjects(rng, vocab, trunk=TRUNK, long=600)
        alone = crowd.answers_alone(llm, subjects)
    with engine(model, enforce_eager=True) as llm:
        crowd.assert_same_bits(crowd.answers_alone(llm, subjects), alone)
    with engine(model, max_num_batched_tokens=512) as llm:
        among, company = crowd.answers_among(llm, others, subjects)
    crowd.assert_same_bits(among, alone)
    for each in subjects:
        assert min(company[each.prompt].others) >= OTHERS
    assert [count > 1 for count in company[subjects[0].prompt].counts].count(True) >= 2  # its prompt was cut
    assert among[1].num_cached_tokens > 0
    assert len(company[subjects[2].prompt].others) >= 20


def test_answers_that_were_preempted_and_cut_have_the_same_bits(model: dict[str, Any]) -> None:
    rng = random.Random(22)
    with engine(model) as llm:
        vocab = llm.info.vocab_size
        others = crowd.draw_crowd(rng, vocab, OTHERS + 6, longest=40, trunk=TRUNK[:48])
        subjects = crowd.draw_subjects(rng, vocab, trunk=TRUNK[:48], long=160, max_tokens=40)
        alone = crowd.answers_alone(llm, subjects)
    with engine(model, max_num_batched_tokens=160, num_blocks=310, block_size=16) as llm:
        among, company = crowd.answers_among(llm, others, subjects)
        assert llm.engine.core.stats().counters.preemptions > 0
    crowd.assert_same_bits(among, alone)
    assert any(company[each.prompt].starts > 1 for each in subjects)
    for each in subjects:
        assert sum(count >= OTHERS for count in company[each.prompt].others) >= 10
