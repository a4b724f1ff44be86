"""Products of few rows on the card, compiled, against their twin: at the shapes of real models, in graphs, one behind
the other."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from headrace import LLM
from headrace.kernels import Kernels
from headrace.kernels.linear import reference
from headrace.kernels.linear.candidates import FUSED
from headrace.kernels.linear.epilogue import Epilogue
from headrace.spec import Activation
from tests.support import tiny
from tests.support.card import STRICT, check, params, require_card
from tests.support.kernel_cases import called, using

require_card()

CUDA = torch.device("cuda")
SHAPES = [
    (6144, 4096),
    (4096, 4096),
    (4096, 14336),
    (3072, 2048),
    (2048, 2048),
    (2048, 8192),
    (1000, 2112),
    (4608, 3584),
]
ROWS = (1, 2, 8, 15, 16, 17, 33, 64)


def offered(outs: int, ins: int, *, gated: bool, pdl: bool) -> object:
    kernels = Kernels(CUDA, techniques=using(programmatic_launch=pdl))
    return kernels.offer(*called("fused_linear", dtype=torch.bfloat16, in_features=ins, out_features=outs, gated=gated))


def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, device=CUDA) * scale).bfloat16()


@pytest.mark.parametrize("pdl", [False, True], ids=["", "pdl"])
@pytest.mark.parametrize(("outs", "ins"), SHAPES, ids=str)
def test_products_with_what_stands_around_them(outs: int, ins: int, pdl: bool) -> None:
    torch.manual_seed(outs)
    pack = offered(outs, ins, gated=False, pdl=pdl)
    for bias in (None, random(outs)):
        weight = random(outs, ins, scale=ins**-0.5)
        product, twin = pack(weight, bias), reference.fused_linear(weight, bias)  # type: ignore[operator]
        for tokens in ROWS:
            x, residual, scale = random(tokens, ins), random(tokens, outs), torch.rand(outs, device=CUDA) + 0.5
            squares = torch.rand(300, tokens, device=CUDA) * ins / 150
            for epilogue in (Epilogue(), Epilogue(squares, 1e-5), Epilogue(residual=residual, scale=scale.bfloat16())):
                for _ in range(2):
                    got, want = product(x, epilogue), twin(x, epilogue)
                    check(got[0], want[0])
                    if epilogue.scale is not None:
                        check(got[1], want[1])
                        torch.testing.assert_close(got[2].sum(0), got[0].float().square().sum(1), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(("outs", "ins"), [(14336, 4096), (8192, 2048), (1000, 1088)], ids=str)
def test_gates(outs: int, ins: int) -> None:
    torch.manual_seed(outs)
    pack, weight = offered(2 * outs, ins, gated=True, pdl=True), random(2 * outs, ins, scale=ins**-0.5)
    product, twin = pack(weight, None), reference.fused_linear(weight, None)  # type: ignore[operator]
    for tokens in ROWS:
        for kind in (Activation.SILU, Activation.GELU_TANH):
            epilogue = Epilogue(torch.rand(64, tokens, device=CUDA) * ins / 32, 1e-5, kind)
            x = random(tokens, ins)
            check(product(x, epilogue)[0], twin(x, epilogue)[0])


@pytest.mark.parametrize("tokens", [1, 16, 40, 64])
def test_a_chain_in_a_graph_is_the_chain_launched_one_by_one(tokens: int) -> None:
    """Kernels that begin before the one before has ended, over the same memory again and again: the same bits as when
    each ends first."""
    torch.manual_seed(tokens)
    hidden, inner, layers = 2048, 8192, 12
    ups, downs = random(2 * inner, hidden, scale=hidden**-0.5), random(hidden, inner, scale=0.2 * inner**-0.5)
    scale, start = random(hidden), random(tokens, hidden)
    results = []
    for pdl in (False, True):
        up = offered(2 * inner, hidden, gated=True, pdl=pdl)(ups, None)  # type: ignore[operator]
        down = offered(hidden, inner, gated=False, pdl=pdl)(downs, None)  # type: ignore[operator]

        def chain(up: object = up, down: object = down) -> torch.Tensor:
            residual, x, squares = start, start, start.float().square().sum(1)[None]
            for _ in range(layers):
                middle, _, _ = up(x, Epilogue(squares, 1e-5, Activation.SILU))  # type: ignore[operator]
                residual, x, squares = down(middle, Epilogue(residual=residual, scale=scale))  # type: ignore[operator]
            return residual

        eager = chain()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = chain()
        for _ in range(20):
            captured.fill_(float("nan"))
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(captured, eager)
        results.append(eager.clone())
    assert torch.equal(*results) and bool(results[0].isfinite().all())


WIDE = {
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
SHORT_STEPS = {"max_num_batched_tokens": 64, "max_model_len": 120, "num_blocks": 64}  # so that prompts go this way, too


def scores(folder: str, prompts: list[list[int]], **keywords: Any) -> list[float]:
    """The log-probability of every token after the first of each prompt."""
    with LLM(folder, **{**STRICT, **SHORT_STEPS, **keywords}) as llm:
        found = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            params(max_tokens=2, prompt_logprobs=0),
            use_tqdm=False,
        )
        if keywords.get("dtype") == "bfloat16" and keywords.get("device") != "cpu":
            assert {each.value for each in llm.info.decisions if each.name == "kernel fused_linear"} == {FUSED}
    return [next(iter(entry.values())).logprob for each in found for entry in (each.prompt_logprobs or ())[1:] if entry]


@pytest.mark.parametrize("name", ["llama", "llama-biased-mha-tied", "qwen3"])
def test_a_model_scores_as_near_to_float32_as_on_a_cpu(name: str, tmp_path: Path) -> None:
    draw, folder = Random(4), str(tiny.save(name, tmp_path, seed=3, **WIDE))
    prompts = [draw.choices(range(256), k=length) for length in (1, 2, 16, 17, 40, 64, 100)]
    cpu = {"device": "cpu", "strict_kernels": False}
    exact, near, nearer = (
        scores(folder, prompts, **each) for each in (cpu, {"dtype": "bfloat16"}, {**cpu, "dtype": "bfloat16"})
    )
    errors = [sum(abs(a - b) for a, b in zip(exact, other, strict=True)) / len(exact) for other in (near, nearer)]
    assert errors[0] <= 1.5 * errors[1] + 2e-3, errors


def test_graphs_and_overlapping_launches_change_no_token(tmp_path: Path) -> None:
    draw, folder = Random(5), str(tiny.save("llama", tmp_path, seed=3, **WIDE))
    prompts = [{"prompt_token_ids": draw.choices(range(256), k=12)} for _ in range(16)]
    ways = (
        {},
        {"enforce_eager": True},
        {"programmatic_launch": False},
    )  # without graphs of prompts: those fill steps up to other sizes
    for count in (
        1,
        4,
        16,
    ):  # as many as there are graphs for: torch's own products may round differently for other numbers of rows
        answers = []
        for way in ways:
            with LLM(
                folder, **{**STRICT, **SHORT_STEPS, "dtype": "bfloat16", **way}, technique={"prompt_graphs": False}
            ) as llm:
                answers.append(
                    [
                        each.outputs[0].token_ids
                        for each in llm.generate(prompts[:count], params(max_tokens=40), use_tqdm=False)
                    ]
                )
        assert answers[0] == answers[1] == answers[2], count
