"""The sparse feed-forward of few tokens with what stands around it, in one launch (experts.cu): its callable, machine
code and launches.

What lives here: what the kernel is given, which calls it takes. What may not: more tokens, layers that have nothing
around (triton_moe.py, triton_coded.py), laying experts out (triton_coded.py).
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_void_p
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from headrace.kernels.build import nvrtc
from headrace.kernels.build.driver import Function
from headrace.kernels.build.variants import Variants
from headrace.kernels.candidate import CallSite, EightBits, Empty, ExpertFacts, rows_of
from headrace.kernels.linear.epilogue import Epilogue, Fused
from headrace.kernels.linear.packing import Coding, Packed
from headrace.kernels.moe.reference import MOST, MOST_CODED
from headrace.kernels.moe.triton_coded import CodedMoe
from headrace.kernels.norm.triton_activation import KINDS
from headrace.spec import Activation

_FEWEST = 2  # tokens, of which the product behind attention leaves room for more weights on their way
_CLASSES = (MOST_CODED, MOST)  # of tokens, that a variant has room for
_THREADS, _STEP, _COLUMNS, _TOGETHER = 512, 128, 16, 8  # as the source has them
_DEEPEST = 6144  # inputs, which a warp holds in registers
_WIDEST = 4096  # inputs of the product behind attention, whose weights are on their way all at once
_UNBUILT = "experts of few tokens in one launch cannot be built here; Triton's kernels serve them"
_POINTERS = (
    "x", "logits", "up", "down", "up_unit", "down_unit", "squares", "residual", "scale", "y", "scaled", "sums", "inner", "met",
    "done", "attended", "router", "out", "later", "out_unit", "later_unit", "between", "heard", "said", "handed", "projected",
)  # fmt: skip
_NUMBERS = ("tokens", "pieces", "logits_row", "up_tiles", "down_tiles", "scale_bytes", "between_bytes", "later_rows")


class _Parameters(ctypes.Structure):
    """As ``Params`` of the source."""

    _fields_ = (
        *((name, c_void_p) for name in _POINTERS),
        *((name, c_int) for name in _NUMBERS),
        ("eps", c_float),
    )


@dataclass(frozen=True, slots=True)
class Variant:
    """What the source is compiled for."""

    tokens: int
    hidden: int
    inner: int
    experts: int
    top_k: int
    renormalize: bool
    kind: Activation
    coding: Coding | None
    eight: EightBits | None
    attended: int = 0  # inputs of attention's last product, if it is in the launch

    def build(self, programs: int) -> bytes:
        """Built, or kept from before. Raises CompileError."""
        coding, eight = self.coding, self.eight
        sizes = {
            "PROGRAMS": programs, "TOKENS": self.tokens, "HIDDEN": self.hidden, "INNER": self.inner, "EXPERTS": self.experts, "TOP_K": self.top_k,
            "RENORMALIZE": int(self.renormalize), "KIND": KINDS[self.kind], "EIGHT": 0 if eight is None else 1 if eight.kind == "fp8" else 2,
            "EACH": 0 if eight is None else eight.group, "POWERS": int(eight is not None and eight.powers), "ATTENDED": self.attended,
        }  # fmt: skip
        if coding is not None:
            sizes |= {"BITS": coding.bits, "SETS": coding.sets, "ZEROS": int(coding.zeros)}
            sizes["FLOATS"] = int(coding.floats)
        names: tuple[str, ...] = ("build/matrix.cuh", "build/early.cuh", "build/activation.cuh")
        names += () if coding is None else ("linear/packed.cuh",)
        text = nvrtc.source(
            *names,
            *(f"moe/experts{part}" for part in ("_shape.cuh", "_routing.cuh", "_weights.cuh", "_before.cuh", ".cu")),
        )
        return nvrtc.build(text, ("-arch=sm_90a", *(f"-D{name}={value}" for name, value in sizes.items())))


@cache
def _builds_of(device: torch.device) -> Variants[Variant]:
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return Variants(device, "experts", lambda variant: variant.build(processors))


@dataclass(frozen=True, slots=True, eq=False)
class FewExperts:
    """As the twin of ``fused_moe``, in bfloat16, of up to ``most`` tokens; ``others`` serve the rest. The result is not
    rounded between down and the sum. Calls of one object must follow each other on the device."""

    facts: ExpertFacts
    builds: Variants[Variant]
    others: Any
    empty: Empty
    pdl: bool
    coded: CodedMoe | None
    few: int = 0  # tokens of which GEMMs before and behind are in the launch, at most
    met: Tensor = field(init=False)  # how many programs of all launches are through with gate and up
    done: Tensor = field(init=False)  # [2, experts, and more of those with many tokens]: strips
    said: Tensor = field(init=False)  # [experts, few]: logits, behind the number of the launch
    # [2, few, half of the hidden size]: the stream before experts and behind them, likewise
    heard: Tensor = field(init=False)

    def __post_init__(self) -> None:
        device = torch.device("cuda", self.builds.device)
        object.__setattr__(self, "met", torch.zeros(1, dtype=torch.int64, device=device))
        entries = self.facts.num_experts + MOST // _TOGETHER * self.facts.top_k
        object.__setattr__(self, "done", self.met.new_zeros(2, entries, dtype=torch.int32))
        object.__setattr__(self, "said", self.met.new_zeros(self.facts.num_experts, self.few))
        object.__setattr__(self, "heard", self.met.new_zeros(2, self.few, _DEEPEST // 2))

    @classmethod
    def at(cls, site: CallSite[ExpertFacts]) -> FewExperts:
        coded = CodedMoe.at(site) if site.facts.formats else None
        joins = site.uses("joined_experts") and not any(site.facts.eights)
        few = 0 if not joins else _FEWEST if site.facts.formats else MOST_CODED
        return cls(site.facts, _builds_of(site.device), site.behind(), site.empty, site.pdl, coded, few)

    def __call__(
        self, x: Tensor, router_logits: Tensor, gate_up: Any, down: Any, top_k: int, renormalize: bool, kind: Activation, epilogue: Epilogue,
    ) -> Fused:  # fmt: skip
        up, low = (gate_up, down) if self.coded is None else self.coded.laid(gate_up, down)
        found = self.computed(x, router_logits, up, low, renormalize, kind, epilogue)
        return found or self.others(x, router_logits, gate_up, down, top_k, renormalize, kind, epilogue)

    @property
    def most(self) -> int:
        """Tokens."""
        return MOST_CODED if any(self.facts.eights) else MOST

    def takes(self, weight: Any) -> int:
        """Of how many tokens a GEMM by this weight can be in the launch, at most."""
        if self.coded is None:
            return self.few if isinstance(weight, Tensor) else 0
        alike = isinstance(weight, Packed) and not weight.gated and weight.order is None
        return self.few if alike and weight.coding == self.facts.rounded[0] else 0

    def function(
        self, tokens: int, hidden: int, inner: int, renormalize: bool, kind: Activation, attended: int = 0
    ) -> Function | None:
        """Built, or kept from before; None: not for shapes like these, or it cannot be built. ``attended``: inputs of the
        product behind attention, if it is in the launch."""
        if hidden % _STEP or inner % _STEP or hidden > _DEEPEST or tokens > self.most:
            return None
        if attended and not self._fits(tokens, hidden, attended):
            return None
        facts = self.facts
        coding, eight = (None, None) if self.coded is None else (facts.rounded[0], facts.eights[0])
        room = next(each for each in ((_FEWEST,) if attended else ()) + _CLASSES if tokens <= each)
        made = Variant(room, hidden, inner, facts.num_experts, facts.top_k, renormalize, kind, coding, eight, attended)
        return self.builds.find(made, _UNBUILT)

    def _fits(self, tokens: int, hidden: int, attended: int) -> bool:
        """Whether the product behind attention can be in the launch."""
        one_strip = hidden // _COLUMNS <= self.builds.processors
        return tokens <= self.few and one_strip and not attended % _STEP and attended <= _WIDEST

    def computed(
        self, x: Tensor, logits: Tensor, up: Tensor | Packed, down: Tensor | Packed, renormalize: bool, kind: Activation, epilogue: Epilogue,
    ) -> Fused | None:  # fmt: skip
        """``up``, ``down``: of all experts, or the first one's codes, behind which the others' lie. None: nothing was
        done."""
        inner = _ins(down)
        function = self.function(x.shape[0], x.shape[1], inner, renormalize, kind)
        if function is None:
            return None
        assert epilogue.squares is not None
        logits = rows_of(logits)
        given = {"x": x.contiguous(), "logits": logits, "squares": epilogue.squares}
        return self._compute(
            function, given, (len(epilogue.squares), logits.stride(0), 0, 0), up, down, inner, epilogue
        )

    def behind(
        self, attended: Tensor, output: Any, router: Tensor, gate_up: Any, down: Any, renormalize: bool, kind: Activation, between: Tensor,
        epilogue: Epilogue, later: Any = None,
    ) -> Fused | None:  # fmt: skip
        """The same behind attention: ``attended`` [T, A] times ``output`` [hidden, A], the sum with the residual, the norm
        whose weight is ``between``, and what ``router`` [experts, hidden] says. With ``later`` [out, hidden] the second
        result is its product with the next norm, [T, out], and there is no third. None: nothing was done. ``output`` and
        ``later`` are what ``takes`` says."""
        assert epilogue.residual is not None
        up, low = (gate_up, down) if self.coded is None else self.coded.laid(gate_up, down)
        (tokens, width), hidden, inner = attended.shape, epilogue.residual.shape[1], _ins(low)
        function = self.function(tokens, hidden, inner, renormalize, kind, width)
        if function is None:
            return None
        out, out_unit, _ = _laid(output)
        given = {
            "attended": attended.contiguous(), "out": out, "out_unit": out_unit, "router": router, "between": between, "heard": self.heard[0],
            "said": self.said,
        }  # fmt: skip
        rows = 0 if later is None else len(later) if isinstance(later, Tensor) else later.outs
        projected = self.empty((tokens, rows), attended.dtype, attended.device)
        if rows:
            given |= {"handed": self.heard[1], "projected": projected}
            given["later"], given["later_unit"], _ = _laid(later)
        y, scaled, sums = self._compute(function, given, (0, 0, between.element_size(), rows), up, low, inner, epilogue)
        return (y, projected, None) if rows else (y, scaled, sums)

    def _compute(
        self, function: Function, given: dict[str, Tensor], rows: tuple[int, int, int, int], up: Any, down: Any, inner: int, epilogue: Epilogue,
    ) -> Fused:  # fmt: skip
        """``given``: what one of the two has, by its name in the source. ``rows``: pieces of squares, a row of logits; bytes
        of the norm's weight before, rows of the product behind."""
        assert epilogue.residual is not None and epilogue.scale is not None
        (tokens, hidden), dtype, device = epilogue.residual.shape, epilogue.residual.dtype, epilogue.residual.device
        y, scaled = (self.empty((tokens, hidden), dtype, device) for _ in range(2))
        sums = torch.empty((hidden // _COLUMNS, tokens), dtype=torch.float32, device=device)
        weights, units, heights = zip(*(_laid(each) for each in (up, down)), strict=True)
        given |= {
            "up": weights[0], "down": weights[1], "up_unit": units[0], "down_unit": units[1], "residual": epilogue.residual, "scale": epilogue.scale,
            "y": y, "scaled": scaled, "sums": sums, "inner": self.empty((tokens, self.facts.top_k, inner), dtype, device), "met": self.met,
            "done": self.done,
        }  # fmt: skip
        pointers = (None if (each := given.get(name)) is None else each.data_ptr() for name in _POINTERS)
        numbers = tokens, *rows[:2], *heights, epilogue.scale.element_size(), *rows[2:]
        parameters = _Parameters(*pointers, *numbers, epilogue.eps)
        self._launch(function, torch.cuda.current_stream(device).cuda_stream, parameters)
        return y, scaled, sums

    def _launch(self, function: Function, stream: int, parameters: _Parameters) -> None:
        """Programs wait for each other; kernels/step/persistent.py says why they may."""
        if self.pdl:
            function.launch(self.builds.processors, _THREADS, stream, parameters, pdl=True)
        else:
            function.launch_together(self.builds.processors, _THREADS, stream, parameters)


def _laid(weight: Tensor | Packed) -> tuple[Tensor, Tensor, int]:
    """The weights of all experts, their units, and how many rows (of codes: blocks) an expert has."""
    if isinstance(weight, Tensor):
        return weight, weight, weight.shape[1]
    return weight.blocks, weight.factor, len(weight.blocks)


def _ins(weight: Tensor | Packed) -> int:
    return weight.shape[-1] if isinstance(weight, Tensor) else weight.ins


create_few = FewExperts.at
