"""Keys and values in 8 and 4 bits on the card: attention and the write against their twins, and engines that must agree
to the bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from headrace import LLM
from headrace.kernels.attention import reference
from headrace.spec import KV_FORMATS
from tests.support.card import STRICT, check, chosen, params, require_card
from tests.support.quantized_kv import FORMATS, QuantizedCase, awkward, shared_scales

require_card()

LENGTHS = {
    "decode": [(1, 1000), (1, 1), (1, 0), (1, 4097), (1, 64)],
    "mixed": [(1, 2000), (300, 900), (4, 4), (1, 17), (130, 130), (3, 2500)],
    "many": [(1, 300 + 7 * row) for row in range(40)],
}
HEADS = [(32, 8, 128, 128), (32, 8, 128, 16), (32, 8, 64, 128), (12, 12, 80, 16)]


def on_card(case: QuantizedCase) -> QuantizedCase:
    case.poison(None)
    for name in ("q", "k_cache", "v_cache", "table"):
        setattr(case, name, getattr(case, name).cuda())
    held = case.quantized
    scales = (None if each is None else each.cuda() for each in (held.k_scales, held.v_scales))
    case.quantized = replace(held, k_scales=next(scales), v_scales=next(scales))
    return case


def attend(case: QuantizedCase, kernel: Any) -> torch.Tensor:
    made = case.inputs
    inputs = replace(made, query_start=made.query_start.cuda(), context_len=made.context_len.cuda())
    out: torch.Tensor = kernel(
        case.q, case.k_cache, case.v_cache, inputs, case.q.shape[2] ** -0.5, None, None, case.quantized
    )
    return out


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "block_size"), HEADS, ids=str)
def test_attention(heads: int, kv_heads: int, dim: int, block_size: int, name: str) -> None:
    facts = {"dtype": torch.bfloat16, "head_dim": dim, "num_heads": heads, "num_kv_heads": kv_heads}
    kernels = [chosen("paged_attention", **facts, kv=KV_FORMATS[name], batch_invariant=each) for each in (False, True)]
    for lengths in LENGTHS.values():
        case = on_card(
            QuantizedCase(
                name, lengths, heads=heads, kv_heads=kv_heads, dim=dim, dtype=torch.bfloat16, block_size=block_size
            )
        )
        want = attend(case, reference.paged_attention)
        for kernel in kernels:
            check(attend(case, kernel), want)


@pytest.mark.parametrize("name", FORMATS)
def test_shared_keys_are_read_once(name: str) -> None:
    lengths = [(1, 2060 + 3 * row) for row in range(100)]
    case = on_card(QuantizedCase(name, lengths, heads=32, kv_heads=8, dim=128, dtype=torch.bfloat16, block_size=128))
    case.table[:, :16] = case.table[-1, :16].clone()
    kernel = chosen(
        "paged_attention", dtype=torch.bfloat16, head_dim=128, num_heads=32, num_kv_heads=8, kv=KV_FORMATS[name]
    )
    got = attend(case, kernel)
    check(got, attend(case, reference.paged_attention))
    assert torch.equal(attend(case, kernel), got)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FORMATS)
def test_the_write_leaves_the_twins_bytes(name: str, dtype: torch.dtype) -> None:
    """The twin's on a CPU. Turned keys may round to a neighbour, as another order of products and sums has it."""
    for dim in (128, 64, 80):
        write = chosen("rotary_write", dtype=dtype, head_dim=dim, num_heads=4, num_kv_heads=2, kv=KV_FORMATS[name])
        for rope in (False, True):
            got, want = (written(each, name, dim, dtype, rope, on) for each, on in ((write, "cuda"), (None, "cpu")))
            if rope:
                assert (got != want).float().mean() < 5e-3, dim
            else:
                assert torch.equal(got, want), dim


def written(write: Any, name: str, dim: int, dtype: torch.dtype, rope: bool, device: str) -> torch.Tensor:
    """What the write, or the twin's, leaves in blocks of 8."""
    x, held = awkward(30, 2, dim, dtype).to(device), shared_scales(name, 2)
    scales = [None if each is None else each.to(device) for each in (held.k_scales, held.v_scales)]
    cache = torch.full((6, 2, 2, 8, held.format.token_bytes(dim)), 7, dtype=torch.uint8, device=device)
    angles = torch.linspace(0, 1, 300 * dim, device=device).view(300, dim) if rope else None
    slots = torch.randperm(48, generator=torch.Generator().manual_seed(3))[:30].to(device)
    slots[1] = -1
    run = reference.rotary_write if write is None else write
    positions = torch.arange(5, 35, device=device)
    run(
        x.repeat(1, 2, 1), x.clone(), x.flip(0).contiguous(), positions, angles, cache[:, 0], cache[:, 1], slots,
        replace(held, k_scales=scales[0], v_scales=scales[1]),
    )  # fmt: skip
    return cache.cpu()


@pytest.mark.parametrize("name", ["fp8_e4m3", "int8", "int4"])
def test_the_same_tokens_have_the_same_codes_however_they_are_computed(name: str) -> None:
    """Bits of answers, with --batch-invariant: whole and cut prompts, prefixes found, graphs and none, few and many."""
    prompts = [{"prompt_token_ids": [(7 * i + 3 * j) % 8000 for j in range(5 + 31 * i % 197)]} for i in range(14)]
    asked, ways = params(max_tokens=16, logprobs=1), ({}, {"max_num_batched_tokens": 33, "enforce_eager": True})
    found = []
    for way in (*ways, {"max_num_seqs": 1}):
        with LLM(**{**STRICT, "dtype": "bfloat16", "kv_cache_dtype": name, "batch_invariant": True, **way}) as llm:
            for _ in range(2):
                outputs = llm.generate(prompts, asked, use_tqdm=False)
                scores = [
                    [step[token].logprob for step, token in zip(each.logprobs, each.token_ids, strict=True)]
                    for each in (output.outputs[0] for output in outputs)
                ]
                found.append(([output.outputs[0].token_ids for output in outputs], scores))
    assert all(each == found[0] for each in found)
