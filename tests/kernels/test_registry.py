"""Who is chosen, why the others are not, and when that is an error."""

from __future__ import annotations

import pytest
import torch

from headrace.errors import ConfigError
from headrace.kernels import CANDIDATES, TWINS, Kernels, StrictKernelError, reference
from headrace.kernels.candidate import Declined
from headrace.kernels.cpu import compiler, native

CPU = torch.device("cpu")
ALL = frozenset({"native", "onednn"})


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler.shutil, "which", lambda name: None)
    monkeypatch.setattr(native, "native_library", compiler.native_library.__wrapped__)


def test_every_operation_has_a_twin() -> None:
    assert set(CANDIDATES) == set(TWINS)


def test_equal_facts_share_one_choice() -> None:
    kernels = Kernels(CPU)
    assert kernels.choose("rms_norm", dtype=torch.float32) is kernels.choose("rms_norm", dtype=torch.float32)
    kernels.choose("rms_norm", dtype=torch.bfloat16)
    assert len(kernels.choices) == 2


def test_disabled_candidates_give_way_to_the_twin_even_when_strict() -> None:
    kernels = Kernels(CPU, strict=True, disabled=ALL)
    assert kernels.choose("gated_activation", dtype=torch.float32) is reference.gated_activation
    assert kernels.choices[0].declined == (("native", "disabled by configuration"),)
    assert kernels.choices[0].chosen == "torch"


def test_without_a_compiler_the_twin_runs_and_says_why(no_compiler: None) -> None:
    kernels = Kernels(CPU)
    assert kernels.choose("rms_norm", dtype=torch.float32) is reference.rms_norm
    assert "no C compiler" in kernels.choices[0].declined[0][1]


def test_strict_refuses_the_twin_where_a_candidate_declined(no_compiler: None) -> None:
    with pytest.raises(StrictKernelError, match=r"paged_attention .*no C compiler.*drop --strict-kernels"):
        Kernels(CPU, strict=True).choose("paged_attention", dtype=torch.float32, head_dim=8, num_heads=2, num_kv_heads=1)
    Kernels(CPU, strict=True).choose("layer_norm", dtype=torch.float32)  # nobody else there: the twin is the kernel


def test_batch_invariance_is_refused_rather_than_broken(no_compiler: None) -> None:
    with pytest.raises(ConfigError, match=r"No batch-invariant kernel for linear .*drop --batch-invariant"):
        Kernels(CPU, batch_invariant=True).choose("linear", dtype=torch.float32, in_features=4, out_features=4)


def test_a_shortcut_that_nobody_takes_says_why_where_asked() -> None:
    kernels = Kernels(torch.device("cuda"))
    assert kernels.offer("decode_step", dtype=torch.bfloat16) is None and kernels.passed == ()
    assert kernels.offer("decode_step", reported=True, dtype=torch.bfloat16) is None
    (passed,) = kernels.passed
    assert passed.chosen == "nobody" and "does not state" in passed.declined[0][1] and kernels.choices == ()


@pytest.mark.parametrize(
    ("op", "facts", "reason"),
    [
        ("paged_attention", {"dtype": torch.float64, "head_dim": 8, "num_heads": 2, "num_kv_heads": 1}, "torch.float64"),
        ("paged_attention", {"dtype": torch.float32, "head_dim": 1024, "num_heads": 2, "num_kv_heads": 1}, "above 512"),
        ("paged_attention", {"dtype": torch.float32, "head_dim": 8, "num_heads": 71, "num_kv_heads": 1}, "71 heads"),
        ("paged_attention", {"dtype": torch.float32}, "does not state"),
        ("linear", {"dtype": torch.float16}, "packs float32 and bfloat16"),
    ],
)
def test_declines_name_their_reason(op: str, facts: dict[str, object], reason: str) -> None:
    if isinstance(compiler.native_library(), Declined):
        pytest.skip("no compiler here: that is the reason they would all give")
    kernels = Kernels(CPU)
    kernels.choose(op, **facts)
    assert reason in kernels.choices[0].declined[0][1]


def test_unknown_candidates_cannot_be_disabled() -> None:
    with pytest.raises(ConfigError, match=r"flash.*known ones are.*native"):
        Kernels(CPU, disabled=frozenset({"flash"}))


def test_oneDNN_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops, "mkldnn", object())
    kernels = Kernels(CPU, disabled=frozenset({"native"}))
    assert kernels.choose("linear", dtype=torch.float32, in_features=4, out_features=4) is reference.linear
    assert "mkldnn._reorder_linear_weight" in kernels.choices[0].declined[0][1]
