"""What adapters add on the card: kernels against their twins, products with what stands around them, engines against
the CPU's answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from headrace import LLM, LoRARequest, SamplingParams
from headrace.kernels import Kernels
from headrace.kernels.candidate import DeltaFacts
from headrace.kernels.inputs import AdapterRows
from headrace.kernels.lora.reference import add_deltas, look_up_deltas
from headrace.kernels.operations import ADD_DELTAS, LOOK_UP_DELTAS
from headrace.layers.basic import RMSNorm
from headrace.layers.context import LayerContext
from headrace.layers.delta import Delta
from headrace.layers.linear import Linear, Stream
from headrace.request import NO_SLOT
from headrace.sites import Role, layer_matrices
from headrace.spec import Activation
from headrace.worker.graphs import Kind
from tests.support import adapters, tiny
from tests.support.adapters import scattered
from tests.support.card import STRICT, check, require_card
from tests.support.kernel_cases import using
from tests.support.specs import LLAMA_1B

require_card()

CUDA = torch.device("cuda")
SLOTS = 6
pytestmark = pytest.mark.timeout(240)


def rows(count: int) -> AdapterRows:
    """Slots in turn, some rows without; of slot 4 no row has."""
    kinds = torch.tensor([NO_SLOT, 2, 2, 0, NO_SLOT, 1, 3, 5], dtype=torch.int32, device=CUDA)
    return AdapterRows(kinds[torch.arange(count, device=CUDA) * 5 // 2 % len(kinds)])


def drawn(
    parts: tuple[int, ...], ins: int, most: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """NaN where no rank reaches."""
    ranks = torch.randint(0, most + 1, (SLOTS, len(parts)), dtype=torch.int32, device=CUDA)
    ranks[0], ranks[3] = most, 0
    a, b = (
        torch.randn(SLOTS, len(parts), most, ins, device=CUDA) * ins**-0.5,
        torch.randn(SLOTS, most, sum(parts), device=CUDA) * most**-0.5,
    )
    for slot in range(SLOTS):
        for part, last in enumerate(torch.tensor(parts).cumsum(0).tolist()):
            rank = int(ranks[slot, part])
            a[slot, part, rank:] = b[slot, rank:, last - parts[part] : last] = float("nan")
    return a.to(dtype), b.to(dtype), ranks


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("parts", "ins", "most"), [((4096, 1024, 1024), 4096, 16), ((4096,), 14336, 64), ((1000, 1000), 1096, 5)], ids=str
)
@pytest.mark.parametrize("chunk", [2**20, 1024])
def test_kernels_are_their_twins(chunk: int, parts: tuple[int, ...], ins: int, most: int, dtype: torch.dtype) -> None:
    torch.manual_seed(most)
    a, b, ranks = drawn(parts, ins, most, dtype)
    add = Kernels(CUDA, strict=True, techniques=using(programmatic_launch=True)).choose(
        ADD_DELTAS, DeltaFacts(dtype, ins, parts, most, chunk)
    )
    plain = scattered(a, b, ranks, parts, chunk=chunk)
    gained = scattered(a, b, ranks, parts, torch.rand(SLOTS, 2, sum(parts), device=CUDA) + 0.5, chunk)
    for count in (1, 3, 16, 64, 65, 700):
        x, y = torch.randn(count, ins, device=CUDA).to(dtype), torch.randn(count, sum(parts), device=CUDA).to(dtype)
        for factors, rest in ((plain, ()), (gained, (torch.rand(3, count, device=CUDA) * ins, 1e-5))):
            got, want = y.clone(), y.clone()
            add(got, x, factors, parts, rows(count), *rest)
            add_deltas(want, x, factors, parts, rows(count), *rest)
            check(got, want, factor=20.0 if dtype == torch.float32 else 2.0)


def test_rows_of_an_embedding() -> None:
    a, b = torch.randn(SLOTS, 90, 8, device=CUDA), torch.randn(SLOTS, 8, 200, device=CUDA)
    ranks = torch.tensor([[8], [3], [1], [0], [8], [8]], dtype=torch.int32, device=CUDA)
    look_up = Kernels(CUDA, strict=True).choose(LOOK_UP_DELTAS, DeltaFacts(torch.float32, 90, (200,), 8, 256))
    y, ids = torch.randn(50, 200, device=CUDA), torch.arange(50, device=CUDA)
    got, want = y.clone(), y.clone()
    factors = scattered(a.transpose(1, 2)[:, None], b, ranks, (200,), chunk=256)
    look_up(got, ids, factors, 2.0, rows(50))
    look_up_deltas(want, ids, factors, 2.0, rows(50))
    check(got, want, factor=20.0)


@pytest.mark.parametrize("gained", [False, True], ids=["", "magnitudes"])
@pytest.mark.parametrize("role", [Role.QKV, Role.OUTPUT, Role.UP, Role.DOWN], ids=str)
def test_norms_and_sums_stay_parts_of_products(role: Role, gained: bool) -> None:
    """Onto the stream and behind the norm, with what products take in and without."""
    torch.manual_seed(1)
    kernels = Kernels(CUDA, techniques=using(programmatic_launch=True))
    context, site = LayerContext(torch.bfloat16, CUDA, kernels, composes=True), layer_matrices(LLAMA_1B, 0)[role]
    linear, norm = (
        Linear(site, context, Activation.SILU if role is Role.UP else None),
        RMSNorm(2048, 1e-5, context, offset=0.0),
    )
    assert linear.weight is not None
    linear.weight.data.normal_(std=site.ins**-0.5)
    norm.weight.data.uniform_(0.5, 1.5)
    norm.finish_loading(), linear.finish_loading()
    assert linear.takes_norms, kernels.choices
    parts = (2048, 512, 512) if role is Role.QKV else (8192, 8192) if role is Role.UP else (site.outs,)
    gains = torch.rand(SLOTS, 2, site.outs, device=CUDA) + 0.5 if gained else None
    held = scattered(*drawn(parts, site.ins, 16, torch.bfloat16), parts, gains)
    linear.delta = Delta(site.ins, parts, held, context)
    linear.delta.touched = True
    for count in (1, 17, 64):
        total = torch.randn(count, 2048, device=CUDA).bfloat16()
        squares = total.float().square().view(count, 4, 512).sum(2).T.contiguous()
        fused = Stream(total.clone(), True, False, scaled=(total * norm.scale), squares=squares, adapters=rows(count))
        plain = Stream(total.clone(), False, False, adapters=rows(count))
        if role in (Role.QKV, Role.UP):
            check(linear.normed(fused, norm), linear.normed(plain, norm), factor=2.0)
            continue
        x = torch.randn(count, site.ins, device=CUDA).bfloat16()
        linear.onto(fused, x, norm), linear.onto(plain, x, norm)
        normed = plain.normed(norm)
        check(fused.sum, plain.sum, factor=2.0)
        assert fused.scaled is not None and fused.squares is not None
        check(
            (fused.scaled.float() * torch.rsqrt(fused.squares.sum(0) / 2048 + 1e-5)[:, None]).bfloat16(),
            normed,
            factor=2.0,
        )


CASES: dict[str, tuple[str, tuple[str, ...], dict[str, Any]]] = {
    "llama": ("llama", adapters.LLAMA, {"rank": 8, "ranks": {"k_proj": 1, "mlp.down_proj": 16}}),
    "magnitudes": ("qwen2", adapters.LLAMA, {"use_dora": True}),
    "embedding and head": ("llama", ("q_proj", "embed_tokens", "lm_head"), {}),
    "experts": ("qwen3-moe", ("q_proj", "k_proj", "v_proj", "o_proj"), {}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_card_answers_as_the_cpu_does(case: str, tmp_path: Path) -> None:
    """Adapters side by side, in float32; decode steps are graphs."""
    family, targets, config = CASES[case]
    model = tiny.create(family, seed=3)
    model.save_pretrained(tmp_path / "base")
    modules = [f"one={adapters.write(tmp_path / 'one', model, targets=targets, seed=1, **config)}"]
    modules += [f"two={adapters.write(tmp_path / 'two', model, targets=targets[:1], rank=2, seed=2)}"]
    prompts = [
        {"prompt_token_ids": list(each)} for each in ([5, 9, 200, 31, 7, 7, 80], range(40, 61), [17], [3, 250, 250, 12])
    ] * 2
    asked = [LoRARequest("one"), LoRARequest("two"), None, LoRARequest("one")] * 2
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, detokenize=False)
    found = []
    for device in ({**STRICT}, {"device": "cpu", "dtype": "float32", "threads": 2}):
        with LLM(tmp_path / "base", lora_modules=modules, **device) as llm:
            found.append(
                [
                    each.outputs[0].token_ids
                    for each in llm.generate(prompts, params, use_tqdm=False, lora_request=asked)
                ]
            )
            if device["device"] == "cuda":
                graphs = llm.engine.core.executor._runner.passes.graphs  # type: ignore[attr-defined]
                assert graphs is not None and any(
                    each.of(Kind.ADAPTED) is not None for each in graphs._captured.values()
                )
    assert found[0] == found[1]
