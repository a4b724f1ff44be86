"""Keys and values in 8 and 4 bits in Triton against the twin, in the interpreter: decode, prefill, cascade, the
write."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import tests.support.triton_interpreter  # noqa: F401  before any kernel: it fixes the mode
from headrace.kernels.attention import paged, reference
from headrace.kernels.attention.paged import PagedAttention
from headrace.kernels.attention.triton_rotary import rotary_write
from headrace.kernels.attention.triton_widen import WidePrompts
from headrace.kernels.inputs import AttentionInputs
from headrace.spec import KV_FORMATS
from tests.support.kernel_cases import assert_close
from tests.support.quantized_kv import FORMATS, QuantizedCase, awkward, written

MIXED = [(1, 70), (37, 100), (2, 2), (1, 150), (1, 0)]


def attention(name: str, case: QuantizedCase, *, invariant: bool = False, **how: bool) -> PagedAttention:
    heads, kv_heads, dim = case.q.shape[1], case.k_cache.shape[1], case.q.shape[2]
    return PagedAttention(
        dim, heads // kv_heads, 2, invariant, bulk=True, dtype=case.q.dtype, kv=KV_FORMATS[name], **how
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FORMATS)
def test_attention_is_that_over_what_codes_mean(name: str, dtype: torch.dtype) -> None:
    case = QuantizedCase(name, MIXED, heads=4, kv_heads=2, dim=64, dtype=dtype, block_size=16)
    case.poison(None)
    assert_close(case.run(attention(name, case)), case.meant(), dtype)


@pytest.mark.parametrize(
    ("name", "block_size", "window", "soft_cap"),
    [("int8", 128, 70, None), ("int4", 64, None, 5.0), ("fp8_e4m3", 8, 7, 0.5)],
)
def test_windows_caps_blocks_and_odd_heads(
    name: str, block_size: int, window: int | None, soft_cap: float | None
) -> None:
    case = QuantizedCase(name, MIXED, heads=6, kv_heads=2, dim=34, dtype=torch.bfloat16, block_size=block_size)
    case.poison(window)
    for how in ({}, {"unified": True}, {"invariant": True}):
        assert_close(
            case.run(attention(name, case, **how), window, soft_cap), case.meant(window, soft_cap), torch.bfloat16
        )


@pytest.mark.parametrize("name", FORMATS)
def test_shared_keys_are_read_once(name: str) -> None:
    case = QuantizedCase(
        name,
        [(1, 150 + row) for row in range(paged.FEWEST)],
        heads=4,
        kv_heads=2,
        dim=64,
        dtype=torch.bfloat16,
        block_size=16,
    )
    case.table[:, :8] = case.table[0, :8]  # 128 tokens
    case.poison(None)
    attend = attention(name, case, cascade=True)
    inputs = replace(case.inputs, shared_tokens=4096)
    got = attend(case.q, case.k_cache, case.v_cache, inputs, 0.125, None, None, case.quantized)
    assert attend._plans[None][1].shared is not None and int(attend._plans[None][1].shared[0].min()) == 128
    assert_close(got, case.meant(), torch.bfloat16)


def test_invariant_bits_depend_on_nothing_else() -> None:
    case = QuantizedCase("int8", [(40, 95), (1, 130)], heads=4, kv_heads=2, dim=64, dtype=torch.bfloat16, block_size=16)
    attend = attention("int8", case, invariant=True)
    whole = case.run(attend)
    assert torch.equal(case.part(0, 10, 25).run(attend), whole[10:25])
    assert torch.equal(case.part(1, 0, 1).run(attend), whole[40:41])


class _Prompts:
    """In place of the kernel that reads bfloat16 alone."""

    def attend(self, *arguments: Any) -> bool:
        self.q, self.out, self.k, self.v, self.inputs, self.scale, self.few, _ = arguments
        inputs: AttentionInputs = self.inputs
        found = reference.paged_attention(self.q, self.k, self.v, inputs, self.scale, None, None)
        many = torch.repeat_interleave(inputs.query_start.diff() > self.few, inputs.query_start.diff())
        first = int(inputs.query_start[0])
        self.out[first:] = torch.where(many[:, None, None], found[first:], self.out[first:])
        return True


@pytest.mark.parametrize("name", FORMATS)
def test_prompts_of_many_queries_are_computed_over_what_codes_mean(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Single queries before them, and few beside them, are left to others; so are prompts there is no room for."""
    monkeypatch.setattr("headrace.kernels.attention.triton_widen._BYTES", 2**19)
    lengths = [(1, 70), (1, 20), (300, 310), (2, 9), (0, 0)]
    case = QuantizedCase(name, lengths, heads=2, kv_heads=2, dim=64, dtype=torch.bfloat16, block_size=32)
    case.poison(None)
    wide, out = WidePrompts(_Prompts().attend, 2, 64, "cpu"), torch.full_like(case.q, 7.0)
    inputs = replace(case.inputs, leading=2)
    assert wide.attend(case.q, out, case.k_cache, case.v_cache, inputs, 0.125, 8, None, case.quantized)
    assert_close(out[2:302], case.meant()[2:302], torch.bfloat16)
    assert (out[:2] == 7.0).all() and (out[302:] == 7.0).all()
    longer = replace(inputs, max_context_len=2000)
    assert not wide.attend(case.q, out, case.k_cache, case.v_cache, longer, 0.125, 8, None, case.quantized)
    few = replace(inputs, max_query_len=255)
    assert not wide.attend(case.q, out, case.k_cache, case.v_cache, few, 0.125, 8, None, case.quantized)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FORMATS)
def test_the_write_leaves_the_twins_bytes(name: str, dtype: torch.dtype) -> None:
    for dim in (64, 34):
        x = awkward(12, 2, dim, dtype)
        for rope in (True, False):
            (got, _), (want, _) = written(rotary_write, name, x, rope), written(reference.rotary_write, name, x, rope)
            assert torch.equal(got, want), (dim, rope)
