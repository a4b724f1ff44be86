"""Who is chosen, why the others are not, and when that is an error."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

import headrace.kernels as registry
from headrace.config import DeviceConfig
from headrace.errors import ConfigError
from headrace.kernels import AssumedKernels, Kernels, StrictKernelError, served
from headrace.kernels.build import c_compiler as compiler
from headrace.kernels.build import native
from headrace.kernels.candidate import Candidate, Card, Declined, KernelContext
from headrace.kernels.linear import reference as linear_twins
from headrace.kernels.norm import reference as norm_twins
from headrace.kernels.operations import OPERATIONS, Operation
from headrace.models.decoder import Decoder
from headrace.techniques import TECHNIQUES, in_use
from tests.support.kernel_cases import ADA, AMPERE, BLACKWELL, DTYPES, H200, called, carried_out, on_card, using
from tests.support.kernel_cases import native as native_kernel
from tests.support.specs import LLAMA_8B

CPU = torch.device("cpu")
ALL = frozenset({"native", "onednn"})


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler.shutil, "which", lambda name: None)
    monkeypatch.setattr(native, "native_library", compiler.native_library.__wrapped__)


def test_equal_facts_share_one_choice() -> None:
    kernels = Kernels(CPU)
    assert kernels.choose(*called("rms_norm", dtype=torch.float32)) is kernels.choose(
        *called("rms_norm", dtype=torch.float32)
    )
    kernels.choose(*called("rms_norm", dtype=torch.bfloat16))
    assert len(kernels.choices) == 2


def test_disabled_candidates_give_way_to_the_twin_even_when_strict() -> None:
    kernels = Kernels(CPU, strict=True, disabled=ALL)
    assert kernels.choose(*called("gated_activation", dtype=torch.float32)) is norm_twins.gated_activation
    assert kernels.choices[0].declined == (("native", "disabled by configuration"),)
    assert kernels.choices[0].chosen == "torch"


def test_without_a_compiler_the_twin_runs_and_says_why(no_compiler: None) -> None:
    kernels = Kernels(CPU)
    assert kernels.choose(*called("rms_norm", dtype=torch.float32)) is norm_twins.rms_norm
    assert "no C compiler" in kernels.choices[0].declined[0][1]


def test_strict_refuses_the_twin_where_a_candidate_declined(no_compiler: None) -> None:
    with pytest.raises(StrictKernelError, match=r"paged_attention .*no C compiler.*drop --strict-kernels"):
        Kernels(CPU, strict=True).choose(
            *called("paged_attention", dtype=torch.float32, head_dim=8, num_heads=2, num_kv_heads=1)
        )
    Kernels(CPU, strict=True).choose(
        *called("layer_norm", dtype=torch.float32)
    )  # nobody else there: the twin is the kernel


def test_batch_invariance_is_refused_rather_than_broken(no_compiler: None) -> None:
    with pytest.raises(ConfigError, match=r"No batch-invariant kernel for linear .*drop --batch-invariant"):
        Kernels(CPU, techniques=using(batch_invariant=True)).choose(
            *called("linear", dtype=torch.float32, in_features=4, out_features=4)
        )


def test_a_batch_invariant_engine_gets_no_kernel_that_knows_the_batch() -> None:
    native_kernel("linear", dtype=torch.float32)  # skips where it cannot be built
    kernels = Kernels(CPU, techniques=using(batch_invariant=True))
    kernels.choose(*called("linear", dtype=torch.float32, in_features=64, out_features=64))
    assert kernels.choices[0].chosen == "native"
    assert kernels.choices[0].declined == (("onednn", "its sums depend on what else is in the batch"),)


def test_a_shortcut_that_nobody_takes_says_why_where_asked() -> None:
    kernels = Kernels(torch.device("cuda"))
    assert kernels.offer(*called("decode_step", dtype=torch.float16)) is None and kernels.passed == ()
    assert kernels.offer(*called("decode_step", dtype=torch.float16), reported=True) is None
    (passed,) = kernels.passed
    assert (
        passed.chosen == "nobody" and "float16 is none of bfloat16" in passed.declined[0][1] and kernels.choices == ()
    )


@pytest.mark.parametrize(
    ("op", "facts", "reason"),
    [
        (
            "paged_attention",
            {"dtype": torch.float64, "head_dim": 8, "num_heads": 2, "num_kv_heads": 1},
            "torch.float64",
        ),
        ("paged_attention", {"dtype": torch.float32, "head_dim": 1024, "num_heads": 2, "num_kv_heads": 1}, "above 512"),
        ("paged_attention", {"dtype": torch.float32, "head_dim": 8, "num_heads": 71, "num_kv_heads": 1}, "71 heads"),
        ("linear", {"dtype": torch.float16}, "packs float32 and bfloat16"),
    ],
)
def test_declines_name_their_reason(op: str, facts: dict[str, object], reason: str) -> None:
    if isinstance(compiler.native_library(), Declined):
        pytest.skip("no compiler here: that is the reason they would all give")
    kernels = Kernels(CPU)
    kernels.choose(*called(op, **facts))
    assert reason in kernels.choices[0].declined[0][1]


def test_unknown_candidates_cannot_be_disabled() -> None:
    with pytest.raises(ConfigError, match=r"flash.*known ones are.*native"):
        Kernels(CPU, disabled=frozenset({"flash"}))


def test_oneDNN_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops, "mkldnn", object())
    kernels = Kernels(CPU, disabled=frozenset({"native"}))
    assert kernels.choose(*called("linear", dtype=torch.float32, in_features=4, out_features=4)) is linear_twins.linear
    assert "mkldnn._reorder_linear_weight" in kernels.choices[0].declined[0][1]


def test_techniques_that_candidates_name_exist_and_switch_them_off() -> None:
    known = {each.name: each for each in TECHNIQUES}
    for operation in OPERATIONS.values():
        for candidate in operation.candidates:
            for technique in (known[name] for name in candidate.techniques):
                field = technique.switch.removeprefix("device.")
                assert technique.name not in in_use(replace(DeviceConfig(), **{field: technique.off}))
                assert technique.name in in_use(replace(DeviceConfig(), **{field: technique.on}))
    of = {
        name: {each.name for op in OPERATIONS.values() for each in op.candidates if name in each.techniques}
        for name in known
    }
    assert of["flat_gemm"] == {"flat", "fused", "ring"} and of["early_weights"] == {"ring", "codes_ring", "w8a8_ring"}
    assert of["deep_fusion"] == {
        "fused",
        "ring",
        "codes",
        "experts",
        "coded_experts",
        "w8a8",
        "codes_ring",
        "w8a8_ring",
    }
    assert of["fused_rope_attention"] == {"rope", "rope_cascade"} and of["cascade_attention"] == {
        "cascade",
        "rope_cascade",
    }
    assert of["quantized_gemm"] == {"codes", "coded_experts", "w8a8", "codes_ring", "w8a8_ring"}
    assert (of["tuned_products"], of["gated_products"], of["persistent_decode"]) == (
        {"tuned"},
        {"gated", "grouped"},
        {"persistent", "persistent_fp8"},
    )
    assert of["persistent_fp8"] == {"persistent_fp8"} and of["one_launch_experts"] == {"experts", "coded_experts"}


def test_a_candidate_of_a_technique_that_is_off_gives_way_even_when_strict(monkeypatch: pytest.MonkeyPatch) -> None:
    norm, facts = called("rms_norm", dtype=torch.float32)
    guest = Candidate("guest", lambda site: "made", techniques=frozenset({"one", "other"}))
    monkeypatch.setattr(registry, "OPERATIONS", carried_out("rms_norm", guest))
    assert Kernels(CPU, strict=True, techniques=frozenset({"one", "other"})).choose(norm, facts) == "made"
    kernels = Kernels(CPU, strict=True, techniques=frozenset({"one"}))
    assert kernels.choose(norm, facts) is norm_twins.rms_norm
    assert kernels.choices[0].declined == (("guest", "disabled by configuration"),)


def test_who_would_serve_on_a_card_that_is_not_here() -> None:
    """By facts, card and techniques: kernels of later cards are left out on earlier ones, with the reason."""
    fused = called("fused_linear", dtype=torch.bfloat16, in_features=4096, out_features=6144)
    attention = called("paged_attention", dtype=torch.bfloat16, head_dim=128, num_heads=32, num_kv_heads=8)
    found = {card.name: served(*fused, KernelContext(card, using())) for card in (AMPERE, ADA, H200, BLACKWELL)}
    assert [each.chosen for each in found.values()] == ["torch", "torch", "ring", "torch"]
    assert dict(found[AMPERE.name].declined)["fused"] == "compute capability 8.0 is not 9.0"
    assert served(*attention, KernelContext(AMPERE, using())).chosen == "cascade"
    assert served(*attention, KernelContext(AMPERE, using(cascade_attention=False))).chosen == "triton"
    old = served(*attention, KernelContext(Card("Tesla V100", (7, 0), 80), using()))
    assert old.chosen == "torch" and "7.0 is below 8.0" in dict(old.declined)["triton"]
    assert served(*called("rope_attention", dtype=torch.bfloat16), KernelContext(AMPERE, using())).chosen == "torch"


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=list(OPERATIONS))
def test_every_candidate_says_without_a_card_whether_it_would_serve(operation: Operation[Any, Any]) -> None:
    """Nothing asks the device that is here; the last resort is the twin."""
    dtypes = (
        (torch.int32,) if operation.name in ("write_rows", "gather_inputs", "store_tokens", "fetch_step") else DTYPES
    )
    for dtype, card in product(dtypes, (AMPERE, ADA, H200, BLACKWELL)):
        facts = called(operation.name, dtype=dtype)[1]
        choice = served(operation, facts, KernelContext(card, using(batch_invariant=dtype == torch.float32)))
        names = [each.name for each in operation.candidates if "cuda" in each.devices] + ["torch"]
        assert (
            choice.chosen == names[len(choice.declined)]
            and [name for name, _ in choice.declined] == names[: len(choice.declined)]
        )


def test_kernels_begin_early_where_the_card_can_and_bits_may_vary() -> None:
    for card, invariant, early in (
        (H200, False, True),
        (BLACKWELL, False, True),
        (ADA, False, False),
        (H200, True, False),
    ):
        site = on_card(
            "rms_norm", card, facts={"dtype": torch.bfloat16}, programmatic_launch=True, batch_invariant=invariant
        )
        assert site.pdl is early
    assert not on_card("rms_norm", facts={"dtype": torch.bfloat16}).pdl


def test_a_model_says_who_would_compute_it_on_another_card() -> None:
    """Of a decoder without weights; nobody needs that card, nor any."""
    chosen = {}
    for card in (AMPERE, H200):
        kernels = AssumedKernels(card, techniques=in_use(DeviceConfig()))
        with torch.inference_mode():
            meta = torch.device("meta")
            decoder = Decoder(LLAMA_8B, kernels=kernels, dtype=torch.bfloat16, device=meta, max_model_len=64)
            decoder.finish_loading()
        chosen[card.name] = {(each.op, each.chosen) for each in kernels.choices}
    assert {("paged_attention", "cascade"), ("rms_norm", "triton"), ("linear", "torch")} <= chosen[AMPERE.name]
    assert not {"fused_linear", "rope_attention", "decode_step"} & {op for op, _ in chosen[AMPERE.name]}
    assert {("rope_attention", "rope_cascade"), ("fused_linear", "ring"), ("decode_step", "persistent")} <= chosen[
        H200.name
    ]
