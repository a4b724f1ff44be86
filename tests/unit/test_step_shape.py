"""Which decoders one kernel computes whole, and what each other one is told."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from headrace.kernels.build import variants
from headrace.kernels.build.nvrtc import CompileError
from headrace.kernels.step import persistent
from headrace.kernels.step.persistent import DecodeStep, DecodeSteps
from headrace.kernels.step.shape import StepShape, why_not
from headrace.spec import Activation, DecoderSpec, LayerSpec, MoESpec, NormKind, RopeSpec
from tests.support.specs import LLAMA_1B, LLAMA_8B

H200 = 132  # multiprocessors
LLAMA_3B = replace(LLAMA_8B, hidden_size=3072, num_heads=24, intermediate_size=8192, layers=(LayerSpec(),) * 28)
EXPERTS = MoESpec(num_experts=8, top_k=2, intermediate_size=768, renormalize=True)


@pytest.mark.parametrize("spec", [LLAMA_8B, LLAMA_1B, LLAMA_3B], ids=["8B", "1B", "3B"])
def test_llamas_are_served(spec: DecoderSpec) -> None:
    assert why_not(spec, H200) is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"layers": (LayerSpec(), LayerSpec(moe=EXPERTS))}, "experts"),
        ({"layers": (LayerSpec(window=128),)}, "windows"),
        ({"layers": (LayerSpec(attention_divisor=2.0),)}, "divided"),
        ({"rope": None}, "positions"),
        ({"rope": RopeSpec(theta=1e4, rotary_dim=32)}, "in part"),
        ({"qk_norm": True}, "norms of heads"),
        ({"sandwich_norm": True}, "each half"),
        ({"norm": NormKind.LAYER}, "layer norms"),
        ({"norm_offset": 1.0}, "offset"),
        ({"qkv_bias": True}, "biases"),
        ({"output_bias": True}, "biases"),
        ({"mlp_bias": True}, "biases"),
        ({"attention_soft_cap": 50.0}, "cap"),
        ({"activation": Activation.GELU_TANH}, "SiLU"),
        ({"gated_mlp": False}, "SiLU"),
        ({"embedding_scale": 64.0}, "scaled embedding"),
        ({"head_dim": 80, "rope": RopeSpec(theta=1e4, rotary_dim=80)}, "head_dim 80"),
        ({"num_kv_heads": 4}, "no group of up to 512"),
        ({"num_heads": 30}, "no group"),
        ({"layers": (LayerSpec(),) * 80}, "80 layers"),
        ({"intermediate_size": 14000}, "inner size 14000"),
        ({"hidden_size": 8192}, "1 to 4 tiles"),
        ({"hidden_size": 1024}, "1 to 4 tiles"),
    ],
)
def test_others_are_told_why(change: dict[str, object], reason: str) -> None:
    assert reason in str(why_not(replace(LLAMA_8B, **change), H200))  # type: ignore[arg-type]


def test_every_fact_shapes_the_code() -> None:
    """Two decoders that differ in what the source is compiled with never share machine code."""
    base, sizes = (
        StepShape(LLAMA_8B, 128, H200),
        ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim"),
    )
    changes = [
        replace(base, block_size=64),
        replace(base, programs=114),
        replace(base, spec=replace(LLAMA_8B, layers=(LayerSpec(),))),
        *(replace(base, spec=replace(LLAMA_8B, **{name: 64})) for name in sizes),
    ]
    assert len({each.options() for each in (base, *changes)}) == len(changes) + 1


def test_a_step_that_cannot_be_built_takes_none_so_that_graphs_are_captured_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where nothing is there to build it with; and for blocks that it cannot read."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=H200))
    monkeypatch.setattr(
        variants,
        "Module",
        lambda code, device: SimpleNamespace(number=len, function=lambda *_: SimpleNamespace(number=len)),
    )
    monkeypatch.setattr(persistent, "_machine_code", lambda shape: b"")
    step = DecodeStep.__new__(DecodeStep)
    step._steps = DecodeSteps(LLAMA_1B, torch.device("cuda"))
    assert (step.longest(4, 16), step.longest(4, 24), step.longest(9, 16)) == (2048, 0, 0)

    def fail(shape: StepShape) -> bytes:
        raise CompileError("no compiler")

    step._steps._variants._code = fail
    assert (step.longest(4, 32), step.longest(4, 16)) == (0, 2048)  # what has been built stays
