"""Facts that a run records about itself, so that its steps can be used later: model, device, precision and switches.

A trace contains them (observe/trace.py), together with the load of each step: ``headrace simulate --calibrate`` fits
prices to that.

What lives here: those facts, written and read. What may not: steps, fitting, files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from headrace.config import DeviceConfig
from headrace.cost.profile import DeviceIdentity
from headrace.cost.stored import made_of
from headrace.spec import DecoderSpec
from headrace.techniques import OF_DEVICE

if TYPE_CHECKING:  # a trace need not load numpy
    from headrace.cost.cost_model import CostModel

VERSION = 1
EVENT = "headrace_run"  # the trace's event

# Switches of how steps are computed: only a run with the same ones says what steps take.
MEASURED_SWITCHES = (*(field for field, each in OF_DEVICE.items() if each.in_prices), "disabled_kernels")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What determines how long a model's steps take; two models of the same shape are the same model here."""

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    experts: int = 0
    top_k: int = 0
    expert_intermediate: int = 0

    @property
    def slug(self) -> str:
        sparse = f"-{self.experts}x{self.top_k}x{self.expert_intermediate}" if self.experts else ""
        return re.sub(
            r"[^a-z0-9x]+", "-", f"{self.family}-{self.layers}x{self.hidden}x{self.intermediate}{sparse}".lower()
        )

    def __str__(self) -> str:
        sparse = f", {self.top_k} of {self.experts} experts of {self.expert_intermediate}" if self.experts else ""
        heads = f"{self.heads} heads over {self.kv_heads} of {self.head_dim}"
        return f"{self.family}: {self.layers} layers of {self.hidden}, {self.intermediate} inside, {heads}, vocabulary {self.vocabulary}{sparse}"


def shape_of(spec: DecoderSpec) -> ModelShape:
    moe = next((layer.moe for layer in spec.layers if layer.moe), None)
    sparse = (moe.num_experts, moe.top_k, moe.intermediate_size) if moe else (0, 0, 0)
    heads = spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.intermediate_size, spec.vocab_size
    return ModelShape(spec.family, spec.num_layers, spec.hidden_size, *heads, *sparse)


def switches_of(config: DeviceConfig) -> dict[str, Any]:
    """The switches that differ from the engine's defaults."""
    plain = type(config)()
    found = {name: getattr(config, name) for name in MEASURED_SWITCHES if getattr(config, name) != getattr(plain, name)}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}


@dataclass(frozen=True, slots=True)
class RunFacts:
    """``overlap``: steps in flight beyond the one being collected. ``inline``: steps are computed by the thread that
    submits them. ``read_bandwidth`` and ``gemm_rate``: the limits that the engine knew, in bytes/s and FLOP/s."""

    model: str
    shape: ModelShape
    device: DeviceIdentity
    dtype: str
    overlap: int
    engine: str  # its version
    read_bandwidth: float
    gemm_rate: float
    switches: Mapping[str, Any] = field(default_factory=dict)

    @property
    def inline(self) -> bool:
        return self.device.kind == "cpu" and self.overlap == 0

    def as_dict(self) -> dict[str, Any]:
        return {"version": VERSION, **asdict(self)}


def facts_of(cost_model: CostModel, config: DeviceConfig, *, model: str, engine: str) -> RunFacts:
    """``config`` must be resolved."""
    profile, dtype, shape = cost_model.profile, cost_model.dtype, shape_of(cost_model.spec)
    limits = profile.read_bandwidth, profile.gemm_rate(dtype)
    return RunFacts(model, shape, profile.identity, dtype, config.overlap or 0, engine, *limits, switches_of(config))


def read_facts(stored: Mapping[str, Any]) -> RunFacts:
    """Inverse of ``as_dict``. Raises KeyError, TypeError or ValueError."""
    if stored["version"] != VERSION:
        raise ValueError(f"version {stored['version']!r}, but this program reads version {VERSION}")
    return made_of(RunFacts, {name: value for name, value in stored.items() if name != "version"})
