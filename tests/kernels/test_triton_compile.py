"""The Triton kernels compile for an H200 without one: no spills, the matrix instructions and copies that were meant."""

from __future__ import annotations

import importlib.util
from functools import cache

import pytest

from tests.support import offline

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

VARIANTS = {  # variants of the decode kernel, the prefill kernel and the plan that any steps of a model need
    "attention, variants": (3, 1, 2),  # few sequences, many, many that may share keys
    "attention, variants with windows": (5, 2, 3),  # no cascade through a window
    "attention, variants without a cascade": (2, 1, 1),
    "attention, variants to the bit": (0, 1, 0),
}
CASCADES = ("attention bfloat16 128 cascade", "attention bfloat16 64 cascade")
UNIFIED = "attention bfloat16 128 unified"
ATTENTION = ("attention bfloat16 128", "attention bfloat16 128 bulk", *CASCADES, UNIFIED)
OTHERS = ("elementwise", "sampling", "rows", "linear, few", "linear, many")
ADAPTERS = (
    "lora, few",
    "lora, few of rank 256",
    "lora, many",
    "lora, joint",
)
PRODUCTS = ("_expand_kernel", "_contract_kernel")  # of experts
# 128 rows by four warps: measured 3 % (a prompt of 8,192) to 18 % (of 2,048) faster than by eight, which spill nothing
SPILLING = tuple(f"attention bfloat16 128 {kind}: _prefill_kernel" for kind in ("bulk", "cascade"))
EXPERTS = ("moe, one", "moe, few", "moe, many")
KERNELS = (("triton_offline", *ATTENTION), ("triton_offline", *OTHERS, *ADAPTERS, *EXPERTS))
COUNTED = (("triton_offline", *VARIANTS, "attention, later"), ("triton_variants",))
CODES = ("triton_offline", "attention bfloat16 128 int4")
COMPILED = (*KERNELS, *COUNTED, CODES)


@cache
def kernels() -> dict[str, dict[str, int]]:
    """Figures of every kernel, compiled."""
    attention, others = offline.found(*KERNELS)
    return attention | others


@cache
def variants() -> list[dict[str, dict[str, int]]]:
    """How many of each kernel a model's steps need: of attention, and of experts and picks."""
    return offline.found(*COUNTED)


@pytest.mark.timeout(300)
def test_attention_is_compiled_for_the_model_and_never_for_a_batch() -> None:
    """Red: a constant, or an argument that is specialised on, follows the batch, or a warm-up leaves a variant
    out."""
    found, _ = variants()
    for case, counts in VARIANTS.items():
        for kernel, count in zip(("_decode_kernel", "_prefill_kernel", "_plan_kernel"), counts, strict=True):
            assert found[f"{case}: {kernel}"] == {"variants": count, "new": 0}, (case, kernel)


@pytest.mark.timeout(300)
def test_what_comes_later_of_attention_is_what_steps_with_shared_keys_alone_need() -> None:
    found, _ = variants()
    for kernel, count in (("_decode_kernel", 1), ("_plan_kernel", 1), ("_prefill_kernel", 0)):
        assert found[f"attention, later: {kernel}"] == {"later": count, "of others": 0, "otherwise": 0}


@pytest.mark.timeout(300)
def test_experts_and_picks_are_compiled_for_the_model_and_never_for_a_batch() -> None:
    _, found = variants()
    assert {name: row["new"] for name, row in found.items()} == dict.fromkeys(found, 0)
    many = {name: row["variants"] for name, row in found.items() if row["variants"] > 1}
    # by the pairs an expert has; random, filtered
    experts = {f"{case}: {name}": 3 for case in ("experts", "experts of a rank") for name in PRODUCTS}
    assert many == {**experts, "picks: _pick_kernel": 2}


@pytest.mark.timeout(300)
def test_nothing_spills() -> None:
    assert len(kernels()) == 3 * 4 + 1 + 5 + 5 + 3 + 2 + (3 * 2 + 1) + (2 + 2 * 4)
    for name, figures in kernels().items():
        words = 100 if name in SPILLING else 4  # a word or two is no spilled tile
        assert figures["LDL"] + figures["STL"] <= words and figures["local"] == 0, name
        assert figures["shared"] <= 232448, name


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_nothing_spills_of_experts_on_a_rank() -> None:
    (found,) = offline.found(("triton_offline", "moe, one, of a rank", "moe, few, of a rank"))
    assert len(found) == 2 + 4 and all(
        figures["LDL"] + figures["STL"] + figures["local"] == 0 for figures in found.values()
    )


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kv", [pytest.param("fp8_e4m3", marks=pytest.mark.slow), "int4"])
def test_codes_of_keys_and_values_are_compiled_in_every_kernel(kv: str) -> None:
    """With the cascade, and the write. The interpreter takes what the compiler refuses, so this is no formality."""
    (found,) = offline.found(("triton_offline", f"attention bfloat16 128 {kv}"))
    assert len(found) == 4
    for name, figures in found.items():
        words = 32 if "int4: _decode" in name else 4
        assert figures["LDL"] + figures["STL"] <= words and figures["local"] == 0 and figures["shared"] <= 232448, name


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "instruction"),
    [
        ("attention bfloat16 128: _prefill_kernel", "HGMMA"),
        ("attention bfloat16 128: _prefill_kernel", "LDGSTS"),  # asynchronous copies
        ("attention bfloat16 128 bulk: _prefill_kernel", "HGMMA"),
        ("attention bfloat16 128 bulk: _prefill_kernel", "UTMALDG"),  # the copy engine
        ("attention bfloat16 128 bulk: _decode_kernel", "LDGSTS"),
        ("attention bfloat16 128: _decode_kernel", "HMMA"),
        (f"{UNIFIED}: _decode_kernel", "LDGSTS"),
        ("linear, few: _linear_kernel", "HMMA"),
        ("linear, few: _linear_kernel", "UTMALDG"),
        ("linear, many: _linear_kernel", "HGMMA"),
        *((f"{case}: {kernel}", "HMMA") for case in ADAPTERS[:2] for kernel in ("_shrink_kernel", "_expand_kernel")),
        ("lora, few: _shrink_kernel", "LDGSTS"),
        *(("lora, joint: _joint_kernel", what) for what in ("HMMA", "LDGSTS")),
        *((f"{case}: {kernel}", what) for case in EXPERTS[1:] for kernel in PRODUCTS for what in ("HGMMA", "UTMALDG")),
    ],
)
def test_instructions_are_those_meant(name: str, instruction: str) -> None:
    assert kernels()[name][instruction] > 0
