"""Attention with rotary embedding inside, without a GPU: who is served, what a layer does with it, the source compiled
where there is a compiler."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.kernels import Kernels
from headrace.kernels.attention import candidates, reference
from headrace.kernels.build import gpu
from headrace.kernels.build import nvrtc as compiler
from headrace.kernels.candidate import Card
from headrace.kernels.inputs import LayerStep
from headrace.kernels.operations import ROPE_ATTENTION
from headrace.layers.basic import Attention
from headrace.layers.context import LayerContext
from headrace.layers.rotary import rotary_table
from headrace.sites import layer_matrices
from headrace.spec import KV_FORMATS
from tests.support.kernel_cases import ADA, BLACKWELL, H200, PagedCase, called, on_card, refusal
from tests.support.specs import LLAMA_8B

GOOD: dict[str, Any] = {
    "dtype": torch.bfloat16, "head_dim": 128, "num_heads": 32, "num_kv_heads": 8,
    "rotary_dim": 128, "normed": None, "window": None, "soft_cap": None,
}  # fmt: skip


def declines(facts: dict[str, Any], card: Card = H200, **techniques: bool) -> str:
    return refusal("rope_attention", "rope", on_card("rope_attention", card, facts=facts, **techniques))


def test_layers_of_the_usual_kind_are_served() -> None:
    assert candidates.why_not(called("rope_attention", **GOOD)[1]) is None
    assert (
        candidates.why_not(called("rope_attention", **GOOD | {"head_dim": 64, "rotary_dim": 64, "num_heads": 8})[1])
        is None
    )


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"dtype": torch.float16}, "bfloat16"),
        ({"head_dim": 96, "rotary_dim": 96}, "head_dim 96"),
        ({"num_heads": 72}, "no group"),
        ({"num_heads": 12}, "no group"),
        ({"rotary_dim": 64}, "64 of 128"),
        ({"normed": torch.float32}, "norms of heads"),
        ({"window": 4096}, "window"),
        ({"soft_cap": 30.0}, "cap"),
    ],
)
def test_who_is_not_served_loses_nothing_but_speed(facts: dict[str, Any], words: str) -> None:
    assert words in declines(GOOD | facts)


def test_other_cards_and_other_softmaxes_are_not_served() -> None:
    assert declines(GOOD) == declines(GOOD, BLACKWELL) == ""
    assert not any(declines(GOOD | {"kv": form}) for form in KV_FORMATS.values())
    assert "8.9 is below 9.0" in declines(GOOD, ADA)
    assert "maximum" in declines(GOOD, unified_maximum=True)
    assert Kernels(torch.device("cpu")).offer(*called("rope_attention", **GOOD)) is None


@pytest.mark.parametrize("off", ["fused_rope_attention", "batch_invariant", "unified_maximum", "dtype", "card", None])
def test_who_attends_to_single_queries_beside_prompts(off: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that turn part of a head or norm heads are served: that has happened before."""
    monkeypatch.setattr(gpu, "load", lambda path: lambda site: "made")
    facts = {
        "dtype": torch.float16 if off == "dtype" else torch.bfloat16,
        "head_dim": 128,
        "num_heads": 32,
        "num_kv_heads": 8,
    }
    flags = {
        "batch_invariant": off == "batch_invariant",
        "unified_maximum": off == "unified_maximum",
        "fused_rope_attention": off != "fused_rope_attention",
    }
    site = on_card("paged_attention", ADA if off == "card" else H200, facts=facts, **flags)
    made = candidates.create_singles(site)
    assert made == (None if off else "made")


def layer(
    monkeypatch: pytest.MonkeyPatch, taken: list[Any], answer: Tensor | None, *, normed: bool = False
) -> tuple[Attention, Tensor]:
    """One of an 8B model's layers, small, with a kernel that answers so; its rotary table."""
    kernels = Kernels(torch.device("cpu"))

    def kernel(*arguments: Any) -> Tensor | None:
        taken.append(arguments)
        return answer

    monkeypatch.setattr(kernels, "offer", lambda op, facts: kernel if op is ROPE_ATTENTION else None)
    assert LLAMA_8B.rope is not None
    cos_sin = rotary_table(LLAMA_8B.rope, 64, torch.device("cpu"))
    context = LayerContext(torch.float32, torch.device("cpu"), kernels)
    spec = replace(LLAMA_8B, qk_norm=normed)
    made = Attention(spec, spec.layers[0], layer_matrices(spec, 0), cos_sin, context)
    if made.q_norm is not None and made.k_norm is not None:
        made.q_norm.scale.uniform_(0.5, 1.5)
        made.k_norm.scale.uniform_(0.5, 1.5)
    return made, cos_sin


@pytest.mark.parametrize("normed", [False, True])
def test_a_layer_takes_what_it_is_given_and_computes_itself_where_it_is_given_nothing(
    monkeypatch: pytest.MonkeyPatch, normed: bool
) -> None:
    case = PagedCase([(1, 20), (1, 1)], heads=32, kv_heads=8, dim=128, dtype=torch.float32, block_size=8)
    slots = torch.stack([case.table[0, 2] * 8 + 3, case.table[1, 0] * 8]).long()
    inputs = case.inputs
    inputs = type(inputs)(inputs.block_table, inputs.query_start, inputs.context_len, slots, 8, 1, 20)
    qkv, positions = torch.randn(2, 48 * 128), torch.tensor([19, 0])
    caches = [case.k_cache.clone(), case.v_cache.clone()], [case.k_cache.clone(), case.v_cache.clone()]
    taken: list[Any] = []
    attention, cos_sin = layer(monkeypatch, taken, None, normed=normed)
    alone = attention._attended(qkv.clone(), LayerStep(positions, inputs, *caches[0]))
    whole = reference.rope_attention(
        qkv.view(2, 48, 128), positions, cos_sin, *caches[1], inputs, 128**-0.5, attention._norms
    )
    torch.testing.assert_close(alone, whole.view(2, -1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(caches[0], caches[1], equal_nan=True)
    (given,) = taken
    assert given[0].shape == (2, 48, 128) and given[6] == 128**-0.5 and (given[7] is not None) == normed
    attention, _ = layer(monkeypatch, taken, whole)
    assert torch.equal(attention._attended(qkv, LayerStep(positions, inputs, *caches[0])), whole.view(2, -1))


def test_a_decoder_without_rotation_is_not_offered_it(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = Kernels(torch.device("cpu"))
    offered: list[str] = []
    monkeypatch.setattr(kernels, "offer", lambda op, facts: offered.append(op.name))
    context = LayerContext(torch.float32, torch.device("cpu"), kernels)
    Attention(LLAMA_8B, LLAMA_8B.layers[0], layer_matrices(LLAMA_8B, 0), None, context)
    assert "rope_attention" not in offered


@pytest.mark.parametrize(
    ("dim", "group", "keys", "block_size", "fresh", "normed", "kv"),
    [
        (128, 4, 16, 128, True, False, 0),
        (64, 4, 32, 128, True, True, 0),
        (128, 4, 16, 128, False, False, 0),
        (128, 8, 32, 8, True, True, 1),
        (128, 4, 32, 128, True, False, 1),
        (64, 4, 64, 16, True, True, 4),
        (128, 4, 64, 128, True, False, 4),
        (128, 4, 32, 128, True, True, 2),
    ],
)
def test_the_source_compiles_without_spilling_and_two_programs_fit(
    dim: int, group: int, keys: int, block_size: int, fresh: bool, normed: bool, kv: int, tmp_path: Path
) -> None:
    pytest.importorskip("triton")
    if (found := shutil.which("nvcc")) is None:
        pytest.skip("nvcc is not installed")
    from headrace.kernels.attention.cuda_rope import Variant

    source = tmp_path / "rope.cu"
    text = compiler.source("build/early.cuh", "attention/kv_codes.cuh", "attention/rope_attention.cu")
    source.write_text(text + "\nstatic_assert(2 * (WARPS * RING + sizeof(Shared) + 1024) <= 233472);\n")
    options = Variant(dim, group, 8, block_size, keys, fresh, normed, kv).options((9, 0))
    made = subprocess.run(
        [found, "-cubin", "-Xptxas", "-v", *options, "-o", str(tmp_path / "rope.cubin"), str(source)],
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert made.returncode == 0, made.stderr
    assert set(re.findall(r"(\d+) bytes spill stores", made.stderr)) == {"0"}, made.stderr
