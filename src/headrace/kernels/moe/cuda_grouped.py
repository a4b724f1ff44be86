"""The sparse feed-forward of many tokens in bfloat16, on Hopper (grouped.cu): its callable, machine code, launches.

What lives here: what the kernel is given, which calls it takes, which tile. What may not: fewer tokens, routing and the
weighted sum (triton_moe.py).
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import c_int, c_void_p
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor

from headrace.kernels.build import nvrtc
from headrace.kernels.build.driver import TensorMap, tensor_map
from headrace.kernels.build.variants import Variants
from headrace.kernels.candidate import CallSite, Empty, ExpertFacts, rows_of
from headrace.kernels.linear.cuda_gated import instruction
from headrace.kernels.moe.triton_moe import _combined, _routed
from headrace.kernels.norm.triton_activation import KINDS
from headrace.spec import Activation

LEAST = 48  # pairs an expert, in the mean; of fewer, tiles of 128 are too empty
_DEPTH, _ROWS, _THREADS, _STAGES = 64, 128, 384, 5  # as the source has them; stages of the widest tile fit
_WIDTHS = {192: 1.0, 176: 1.05, 160: 1.07, 128: 1.05}  # rows of weights: what one costs beside those of the widest tile
_UNBUILT = "grouped products of experts cannot be built here; Triton's kernels serve them"


@dataclass(frozen=True, slots=True)
class Variant:
    """What the source is compiled for. ``width``: columns of the result; ``kind``: of a gate, or there is none."""

    ins: int
    width: int
    experts: int
    top_k: int
    kind: Activation | None

    @property
    def columns(self) -> int:
        """Rows of weights of the tile that wastes least."""
        share = 1 if self.kind is None else 2
        return min(_WIDTHS, key=lambda each: -(-self.width * share // each) * each * _WIDTHS[each])

    @property
    def shared_bytes(self) -> int:
        return 1024 + _STAGES * 2 * _DEPTH * (_ROWS + self.columns)

    def build(self) -> bytes:
        """Built, or kept from before. Raises CompileError."""
        sizes = {
            "GATED": int(self.kind is not None), "COLUMNS": self.columns, "STAGES": _STAGES, "EXPERTS": self.experts, "TOP_K": self.top_k,
            "INS": self.ins, "WIDTH": self.width, "KIND": -1 if self.kind is None else KINDS[self.kind],
        }  # fmt: skip
        around = ("build/matrix.cuh", "build/activation.cuh", "linear/gated_end.cuh")
        text = nvrtc.source(*around) + instruction(self.columns) + nvrtc.source("moe/grouped.cu")
        return nvrtc.build(text, ("-arch=sm_90a", *(f"-D{name}={value}" for name, value in sizes.items())))


@cache
def _builds_of(device: torch.device) -> Variants[Variant]:
    return Variants(device, "grouped", Variant.build, lambda variant: variant.shared_bytes)


@dataclass(frozen=True, slots=True, eq=False)
class GroupedExperts:
    """As ``triton_moe.Moe``, of more than ``LEAST`` pairs an expert; ``others`` serve the rest. Gate and what it gates
    are not rounded before they are multiplied."""

    facts: ExpertFacts
    builds: Variants[Variant]
    others: Callable[..., Tensor]
    empty: Empty
    maps: dict[tuple[int, ...], TensorMap] = field(default_factory=dict)  # of weights

    @classmethod
    def at(cls, site: CallSite[ExpertFacts]) -> GroupedExperts:
        return cls(site.facts, _builds_of(site.device), site.behind(), site.empty)

    def variants(self, hidden: int, inner: int, experts: int, kind: Activation) -> tuple[Variant, Variant]:
        """Of the two products."""
        top_k = self.facts.top_k
        return Variant(hidden, inner, experts, top_k, kind), Variant(inner, hidden, experts, top_k, None)

    def __call__(
        self, x: Tensor, router_logits: Tensor, gate_up: Tensor, down: Tensor, top_k: int, renormalize: bool, kind: Activation,
        places: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        given = x, router_logits, gate_up, down, top_k, renormalize, kind, places
        found = self.computed(*given) if len(x) * top_k > LEAST * len(down) else None
        return self.others(*given) if found is None else found

    def computed(
        self, x: Tensor, router_logits: Tensor, gate_up: Tensor, down: Tensor, top_k: int, renormalize: bool, kind: Activation,
        places: Tensor | None,
    ) -> Tensor | None:  # fmt: skip
        """None: nothing was done, since there are no kernels for these shapes."""
        (tokens, hidden), (experts, _, inner), x = x.shape, down.shape, rows_of(x)
        if hidden % _DEPTH or inner % _DEPTH or x.stride(0) % 8 or x.data_ptr() % 16:
            return None
        up, low = self.variants(hidden, inner, experts, kind)
        functions = [self.builds.find(each, _UNBUILT) for each in (up, low)]
        if functions[0] is None or functions[1] is None:
            return None
        weights, counts, listed, _ = _routed(rows_of(router_logits), top_k, renormalize, places, experts)
        expanded = self.empty((tokens * top_k, inner), x.dtype, x.device)
        contracted = self.empty((tokens, top_k, hidden), x.dtype, x.device)
        stream = torch.cuda.current_stream(x.device).cuda_stream
        for variant, function, weight, given, result in (
            (up, functions[0], gate_up, x, expanded), (low, functions[1], down, expanded, contracted),
        ):  # fmt: skip
            map_ = self._map(weight, variant.columns // 2)
            rows = map_ if variant is up else tensor_map(given, _ROWS // 2, _DEPTH)  # a gate's are gathered
            pointers = (c_void_p(each.data_ptr()) for each in (given, result, counts, listed))
            numbers = c_int(given.stride(0)), c_int(tokens)
            programs = self.builds.processors // 2 * 2
            function.launch(programs, _THREADS, stream, rows, map_, *pointers, *numbers, cluster=2)
        return _combined(contracted, weights, self.empty)[0]

    def _map(self, weight: Tensor, rows: int) -> TensorMap:
        key = weight.data_ptr(), *weight.shape, rows
        if key not in self.maps:
            self.maps[key] = tensor_map(weight.view(-1, weight.shape[-1]), rows, _DEPTH)
        return self.maps[key]


create_grouped = GroupedExperts.at
