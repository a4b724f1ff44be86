"""Keys and values in 8 and 4 bits on a CPU: the twin against arithmetic, the C kernels against the twin."""

from __future__ import annotations

import pytest
import torch

from headrace.kernels.attention import kv_codes, reference
from headrace.spec import KV_FORMATS, KVKind, KVSpec
from tests.support.kernel_cases import DTYPES, assert_close, native
from tests.support.quantized_kv import FORMATS, QuantizedCase, awkward, written

LENGTHS = [(1, 130), (37, 100), (1, 1), (2, 2), (1, 0), (1, 200)]


@pytest.mark.parametrize("name", FORMATS)
def test_what_codes_mean_is_as_near_as_they_allow(name: str) -> None:
    x, form = torch.randn(50, 3, 64) * torch.logspace(-3, 2, 50)[:, None, None], KV_FORMATS[name]
    cache = torch.zeros(7, 3, 8, form.token_bytes(64), dtype=torch.uint8)
    slots = torch.randperm(56)[:50]
    kv_codes.write(cache, x, slots, form, None)
    off = (kv_codes.read(cache, slots // 8, slots % 8, 64, form, None) - x).abs()
    if form.scales == 0:
        kind = getattr(torch, form.codes)
        assert (
            off
            <= torch.maximum(x.abs() * torch.finfo(kind).eps / 2, torch.tensor(torch.finfo(kind).smallest_normal / 8))
        ).all()
    else:
        span = (
            x.amax(-1, keepdim=True) - x.amin(-1, keepdim=True) if form.scales == 2 else x.abs().amax(-1, keepdim=True)
        )
        assert (off <= span / (127 if form.scales == 1 else 15) * 0.51).all()


@pytest.mark.parametrize("name", FORMATS)
def test_a_token_without_finite_numbers_alone_is_its_own_affair(name: str) -> None:
    x, form = awkward(20, 2, 16, torch.float32), KV_FORMATS[name]
    codes, scales = kv_codes.encode(x, form, None)
    clean, clean_scales = kv_codes.encode(x.nan_to_num(1.0, 1.0, 1.0), form, None)
    others = torch.ones(20, 2, dtype=torch.bool)
    others[6:9, 0] = False
    assert torch.equal(codes[others], clean[others])
    if scales is not None and clean_scales is not None:
        assert torch.equal(scales[others], clean_scales[others]) and scales[~others][:, 0].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORMATS)
def test_the_write_leaves_the_twins_bytes(name: str, dtype: torch.dtype) -> None:
    for dim in (64, 80, 34, 8):
        write = native("rotary_write", dtype=dtype, head_dim=dim, num_heads=4, num_kv_heads=2, kv=KV_FORMATS[name])
        x = awkward(30, 2, dim, dtype)
        for rope in (True, False):
            (got, q), (want, twin_q) = written(write, name, x, rope), written(reference.rotary_write, name, x, rope)
            if rope:  # another order of multiplication and addition may round a key to its neighbour
                assert (got != want).float().mean() < 2e-3
                assert_close(q.nan_to_num(0, 0, 0), twin_q.nan_to_num(0, 0, 0), dtype)
            else:
                assert torch.equal(got, want), dim


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("dim", "window", "soft_cap"), [(64, None, None), (80, 70, 5.0), (34, 7, None)])
def test_attention_is_that_over_what_codes_mean(
    name: str, dtype: torch.dtype, dim: int, window: int | None, soft_cap: float | None
) -> None:
    case = QuantizedCase(name, LENGTHS, heads=6, kv_heads=2, dim=dim, dtype=dtype)
    case.poison(window)
    want = case.meant(window, soft_cap)
    assert_close(case.run(reference.paged_attention, window, soft_cap), want, dtype)
    attend = native("paged_attention", dtype=dtype, head_dim=dim, num_heads=6, num_kv_heads=2, kv=KV_FORMATS[name])
    assert_close(case.run(attend, window, soft_cap), want, dtype)


@pytest.mark.parametrize("name", FORMATS)
def test_bits_depend_on_nothing_but_a_sequences_own_keys(name: str) -> None:
    case = QuantizedCase(
        name, [(70, 1500), (1, 2100), (3, 40)], heads=4, kv_heads=2, dim=64, dtype=torch.float32, block_size=16
    )
    attend = native(
        "paged_attention",
        head_dim=64,
        num_heads=4,
        num_kv_heads=2,
        dtype=torch.float32,
        kv=KV_FORMATS[name],
        batch_invariant=True,
    )
    whole = case.run(attend)
    assert torch.equal(case.part(0, 20, 33).run(attend), whole[20:33])
    assert torch.equal(case.part(1, 0, 1).run(attend), whole[70:71])


def test_blocks_are_one_span_and_hold_more_tokens() -> None:
    sizes = {None: 4096, "fp8_e4m3": 2048, "fp8_e5m2": 2048, "int8": 2112, "int4": 1152}
    for name, size in sizes.items():
        form = None if name is None else KV_FORMATS[name]
        spec = KVSpec((0,), KVKind.FULL, 16, 1, 64, 2, format=form)
        assert spec.bytes_per_block == size, name
        kinds = {"": 16, "float8_e4m3fn": 8, "float8_e5m2": 8, "int8": 8, "uint4": 4, "bfloat16": 16}
        assert 2 * sum(each.shape[0] * each.shape[1] * kinds[each.dtype] // 8 for each in spec.components) == size
