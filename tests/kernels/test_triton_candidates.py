"""When the Triton candidates decline, and that nobody without a GPU notices them."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from headrace.errors import ConfigError
from headrace.kernels import Kernels, StrictKernelError
from headrace.kernels.build import gpu
from headrace.kernels.linear import reference as linear_twins
from headrace.kernels.norm import reference as norm_twins
from tests.support.kernel_cases import H200, called, using

CUDA = torch.device("cuda")
HEADS = {"dtype": torch.bfloat16, "head_dim": 128, "num_heads": 8, "num_kv_heads": 2}


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "missing", lambda device: "torch finds no CUDA device")


@pytest.fixture
def on_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "missing", lambda device: None)


def test_without_a_device_the_twin_runs_and_says_why(no_gpu: None) -> None:
    kernels = Kernels(CUDA)
    assert kernels.choose(*called("rms_norm", dtype=torch.bfloat16)) is norm_twins.rms_norm
    assert kernels.choices[0].declined == (("triton", "torch finds no CUDA device"),)
    with pytest.raises(StrictKernelError, match="no CUDA device"):
        Kernels(CUDA, strict=True).choose(*called("rms_norm", dtype=torch.bfloat16))


def test_a_linear_layer_is_torch_s_by_choice_unless_bits_must_not_vary(no_gpu: None) -> None:
    kernels = Kernels(CUDA, strict=True, card=H200)  # no fault, so not even a strict registry minds
    assert (
        kernels.choose(*called("linear", dtype=torch.bfloat16, in_features=64, out_features=64)) is linear_twins.linear
    )
    declined = dict(kernels.choices[0].declined)
    assert "quicker" in declined["triton"] and "no large weight" in declined["flat"]
    with pytest.raises(ConfigError, match=r"No batch-invariant kernel for linear .*no CUDA device"):
        Kernels(CUDA, techniques=using(batch_invariant=True)).choose(
            *called("linear", dtype=torch.bfloat16, in_features=64, out_features=64)
        )


@pytest.mark.parametrize(
    ("op", "facts", "reason"),
    [
        ("rms_norm", {"dtype": torch.float64}, "torch.float64"),
        ("paged_attention", HEADS | {"head_dim": 512}, "above 256"),
        ("paged_attention", HEADS | {"num_heads": 71, "num_kv_heads": 1}, "71 heads"),
        ("moe", {"dtype": torch.bfloat16, "num_experts": 2048, "top_k": 2}, "2 of 2048"),
    ],
)
def test_declines_name_their_reason(on_card: None, op: str, facts: dict[str, object], reason: str) -> None:
    kernels = Kernels(CUDA, card=H200)
    kernels.choose(*called(op, **facts))
    assert reason in dict(kernels.choices[0].declined)[gpu.TRITON]


def test_the_registry_imports_no_triton() -> None:
    code = "import sys, headrace.kernels; print([name for name in sys.modules if name.split('.')[0] == 'triton'])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONPATH": ":".join(sys.path)}
    )
    assert done.stdout.strip() == "[]"
