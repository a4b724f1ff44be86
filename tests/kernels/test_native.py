"""The C kernels against their torch twins, and the equalities that hold to the bit."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.kernels.attention import reference as attention_twins
from headrace.kernels.moe import reference as moe_twins
from headrace.kernels.norm import reference as norm_twins
from headrace.spec import Activation
from tests.support.expert_ranks import COPIED, UNEVEN, parts
from tests.support.kernel_cases import DTYPES, PagedCase, assert_close, native


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def attention(dtype: torch.dtype, heads: int, kv_heads: int, dim: int):  # type: ignore[no-untyped-def]
    return native("paged_attention", dtype=dtype, head_dim=dim, num_heads=heads, num_kv_heads=kv_heads)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 150)), min_size=1, max_size=6),
    shape=st.sampled_from([(4, 4, 8), (8, 2, 64), (5, 1, 40), (6, 3, 33), (2, 1, 128), (48, 1, 16)]),
    block_size=st.sampled_from([8, 16, 32]),
    window=st.sampled_from([None, 1, 7, 70]),
    soft_cap=st.sampled_from([None, 0.5, 30.0]),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 99),
)
def test_attention_equals_its_twin(lengths, shape, block_size, window, soft_cap, dtype, seed) -> None:  # type: ignore[no-untyped-def]
    heads, kv_heads, dim = shape
    case = PagedCase(lengths, heads=heads, kv_heads=kv_heads, dim=dim, dtype=dtype, block_size=block_size, seed=seed)
    sums, wanted = torch.full((2, *case.q.shape[:2]), float("nan"))
    got = case.run(attention(dtype, *shape), window, soft_cap, sums)
    assert_close(got, case.run(attention_twins.paged_attention, window, soft_cap, wanted), dtype)
    torch.testing.assert_close(sums, wanted, rtol=1e-4, atol=1e-3)


def test_attention_over_a_cache_of_another_type() -> None:
    case = PagedCase([(3, 70), (1, 5)], heads=4, kv_heads=2, dim=32, dtype=torch.bfloat16)
    case.k_cache, case.v_cache = case.k_cache.float(), case.v_cache.float()
    assert_close(
        case.run(attention(torch.bfloat16, 4, 2, 32)), case.run(attention_twins.paged_attention), torch.bfloat16
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 90, 1500])
def test_attention_splits_long_contexts(dtype: torch.dtype, window: int | None, threads: int) -> None:
    """One sequence and one KV head: with two threads its splits are computed apart and merged."""
    case = PagedCase([(2, 2500)], heads=4, kv_heads=1, dim=16, dtype=dtype)
    sums, wanted = torch.full((2, *case.q.shape[:2]), float("nan"))
    got = case.run(attention(dtype, 4, 1, 16), window, None, sums)
    assert_close(got, case.run(attention_twins.paged_attention, window, None, wanted), dtype)
    torch.testing.assert_close(sums, wanted, rtol=1e-4, atol=1e-3)


def test_attention_bits_depend_on_nothing_else(threads: int) -> None:
    """Batched = alone, whole = chunked, one thread = two, to the bit."""
    case = PagedCase([(1, 1300), (37, 1200), (20, 20), (1, 64)], heads=8, kv_heads=2, dim=32, dtype=torch.bfloat16)
    run = attention(torch.bfloat16, 8, 2, 32)
    torch.set_num_threads(1)
    whole, start = case.run(run), 0
    torch.set_num_threads(threads)
    for row, (count, _) in enumerate(case.lengths):
        for first, end in ((0, count), (0, (count + 1) // 2), (count - 1, count)):
            assert torch.equal(case.part(row, first, end).run(run), whole[start + first : start + end])
        start += count


def test_tokens_behind_the_last_query_get_zeros() -> None:
    case = PagedCase([(2, 9)], heads=2, kv_heads=2, dim=16, dtype=torch.float32)
    inputs = case.inputs
    q = torch.cat((case.q, torch.ones(3, 2, 16)))
    out = attention(torch.float32, 2, 2, 16)(q, case.k_cache, case.v_cache, inputs, 0.25, None, None)
    assert out[:2].all() and not out[2:].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("dim", "rotary_dim"), [(64, 64), (40, 20), (8, 8), (33, 0)])
def test_rotary_write_equals_its_twin(dtype: torch.dtype, dim: int, rotary_dim: int, threads: int) -> None:
    torch.manual_seed(dim)
    cos_sin = torch.randn(50, rotary_dim) if rotary_dim else None
    slots, positions = torch.randperm(320)[:300], torch.randint(0, 50, (300,))
    slots[::7] = -1
    results = []
    packed = torch.randn(300, 4 + 2 * 2, dim).to(dtype)
    for write in (
        native("rotary_write", dtype=dtype, head_dim=dim, num_heads=4, num_kv_heads=2),
        attention_twins.rotary_write,
    ):
        q, k, v = packed.clone().split((4, 2, 2), dim=1)  # strided, as they come out of the merged product
        caches = torch.zeros(20, 3, 2, 2, 16, dim, dtype=dtype)
        results.append((write(q, k, v, positions, cos_sin, caches[:, 1, 0], caches[:, 1, 1], slots), caches))
    for got, want in zip(*results, strict=True):
        assert_close(got, want, dtype)


def test_rotary_write_refuses_indices_out_of_range() -> None:
    write = native("rotary_write", dtype=torch.float32, head_dim=4, num_heads=1, num_kv_heads=1)
    cache, x = torch.zeros(2, 1, 8, 4), torch.ones(1, 1, 4)
    for position, slot in ((5, 0), (-1, 0), (0, 16)):
        with pytest.raises(IndexError, match=r"0 … 4|beyond 16"):
            write(x, x, x, torch.tensor([position]), torch.ones(5, 4), cache, cache, torch.tensor([slot]))
    assert not cache.any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 72), (600, 64), (2, 3, 40)])
@pytest.mark.parametrize("with_residual", [True, False])
def test_rms_norm_equals_its_twin(dtype: torch.dtype, shape: tuple[int, ...], with_residual: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(*shape[:-1], 2 * shape[-1]).to(dtype)[..., : shape[-1]]  # strided
    residual = torch.randn(shape).to(dtype) if with_residual else None
    for weight_dtype in (dtype, torch.float32):
        weight = torch.randn(shape[-1]).to(weight_dtype)
        for got, want in zip(
            native("rms_norm", dtype=dtype)(x, weight, 1e-5, residual),
            norm_twins.rms_norm(x, weight, 1e-5, residual),
            strict=True,
        ):
            assert_close(got, want, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", list(Activation))
def test_gated_activation_equals_its_twin(dtype: torch.dtype, kind: Activation) -> None:
    x = torch.cat(
        (torch.randn(300, 146) * 3, torch.tensor([[-100.0, 100.0, 0.0, 1e-4, -1e-4, 0.24] + [1.0] * 140]))
    ).to(dtype)
    assert_close(native("gated_activation", dtype=dtype)(x, kind), norm_twins.gated_activation(x, kind), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", list(Activation))
def test_activation_equals_its_twin_and_no_element_knows_its_place(
    dtype: torch.dtype, kind: Activation, threads: int
) -> None:
    """torch's own ends a tensor, and each thread's part of it, with other instructions than it begins with."""
    x = torch.cat((torch.randn(700, 67) * 3, torch.tensor([[-100.0, 100.0, 0.0, 1e-4, -1e-4, 0.24] + [1.0] * 61]))).to(
        dtype
    )
    act = native("activation", batch_invariant=True, dtype=dtype)
    together = act(x, kind)
    assert_close(together, norm_twins.activation(x.float(), kind).to(dtype), dtype)
    assert torch.equal(act(x[3:, 1:], kind), together[3:, 1:])
    for first, end in ((0, 1), (5, 6), (3, 20), (600, 701)):
        assert torch.equal(act(x[first:end], kind), together[first:end])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "hidden", "inner"),
    [(1, 8, 2, 64, 96), (9, 8, 8, 40, 36), (40, 4, 1, 33, 70), (99, 2, 2, 16, 16)],
)
@pytest.mark.parametrize("renormalize", [True, False])
def test_moe_equals_its_twin(
    dtype: torch.dtype, tokens: int, experts: int, top_k: int, hidden: int, inner: int, renormalize: bool
) -> None:
    torch.manual_seed(tokens)
    x, router = torch.randn(tokens, hidden).to(dtype), torch.randn(tokens, experts).to(dtype)
    gate_up, down = (
        (torch.randn(experts, 2 * inner, hidden) * hidden**-0.5).to(dtype),
        (torch.randn(experts, hidden, inner) * inner**-0.5).to(dtype),
    )
    arguments = (x, router, gate_up, down, top_k, renormalize, Activation.SILU)
    assert_close(
        native("moe", dtype=dtype, num_experts=experts, top_k=top_k)(*arguments), moe_twins.moe(*arguments), dtype
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 23])
def test_ranks_of_whole_experts_add_up_to_all_of_them(dtype: torch.dtype, tokens: int) -> None:
    torch.manual_seed(tokens)
    x, router = torch.randn(tokens, 40).to(dtype), torch.randn(tokens, 6).to(dtype)
    gate_up, down = ((torch.randn(shape) * 0.2).to(dtype) for shape in ((6, 72, 40), (6, 40, 36)))
    rest = (2, True, Activation.SILU)
    for layer in (UNEVEN, COPIED):
        total = torch.zeros(x.shape)
        for experts, places in parts(layer, 6):
            arguments = (x, router, gate_up[experts], down[experts], *rest, places)
            got = native("moe", dtype=dtype, num_experts=6, top_k=2, held=len(experts))(*arguments)
            assert_close(got, moe_twins.moe(*arguments), dtype)
            total += got
        assert_close(total.to(dtype), moe_twins.moe(x, router, gate_up, down, *rest), dtype)


def test_moe_reads_only_chosen_experts() -> None:
    x, router = torch.ones(2, 16), torch.tensor([[9.0, 0, 0, 8], [9, 0, 0, 8]])
    gate_up, down = torch.ones(4, 32, 16), torch.ones(4, 16, 16)
    gate_up[1:3], down[1:3] = float("nan"), float("nan")
    for moe in (native("moe", dtype=torch.float32, num_experts=4, top_k=2), moe_twins.moe):
        assert moe(x, router, gate_up, down, 2, True, Activation.SILU).isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_moe_bits_of_a_token_do_not_depend_on_the_others(dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    moe = native("moe", batch_invariant=True, dtype=dtype, num_experts=4, top_k=2)
    x, router, gate_up, down = (torch.randn(shape).to(dtype) for shape in ((30, 40), (30, 4), (4, 48, 40), (4, 40, 24)))
    together = moe(x, router, gate_up, down, 2, True, Activation.SILU)
    alone = torch.cat(
        [moe(x[t : t + 1], router[t : t + 1], gate_up, down, 2, True, Activation.SILU) for t in range(30)]
    )
    assert torch.equal(together, alone)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("target", ["x86-64-v3", "x86-64"])
def test_narrower_vectors_pass_the_same_tests(target: str, tmp_path: Path) -> None:
    """The library as a processor with vectors of 8 and of 4 floats compiles it, by a compiler that takes it for one."""
    real, fake = (
        subprocess.run(["sh", "-c", "command -v cc"], capture_output=True, text=True).stdout.strip(),
        tmp_path / "cc",
    )
    fake.write_text(
        f"""#!/bin/bash
[ "$1" = --version ] && echo {target}
exec {real} "${{@/#-march=native/-march={target}}}"
"""
    )
    fake.chmod(0o755)
    names = ("native", "linear", "lora", "sampling", "sparse", "tree_attention", "quantized_kv", "drafts")
    files = [f"tests/kernels/test_{name}.py" for name in names]
    path, root = f"{tmp_path}{os.pathsep}{os.environ['PATH']}", Path(__file__).parents[2]
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *files], env=os.environ | {"PATH": path}, cwd=root, check=True
    )
