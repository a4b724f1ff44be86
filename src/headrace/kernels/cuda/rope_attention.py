"""Rotary embedding, the cache write and decode attention in one launch (csrc/rope_attention.cu): its callable, machine code and launches.

What lives here: what the kernel is given, its scratch memory, which steps it takes. What may not: which layers (rope_candidates.py),
dealing out keys (kernels/triton/plan.py), keys that sequences share (kernels/triton/cascade.py has them, in launches of its own).
"""

from __future__ import annotations

import ctypes
import logging
import threading
from ctypes import c_float, c_int, c_longlong, c_void_p
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from headrace.kernels.around import MOST_ROWS
from headrace.kernels.candidate import Empty, Site, plainly_empty
from headrace.kernels.cuda import compiler
from headrace.kernels.cuda.driver import Function, Module, NotLoadable
from headrace.kernels.triton.attention import Tiles
from headrace.kernels.triton.candidates import can_chain
from headrace.kernels.triton.plan import Plan, make_plan, may_share
from headrace.kernels.triton.prefill import LOG2_E
from headrace.layers.inputs import AttentionInputs

_log = logging.getLogger(__name__)
_NAME = "rope_attention"
_WARPS = 4
_PROGRAMS = 2  # a processor
_RING_BYTES = 16384  # of a warp
_BEGINNING = 1  # units without keys that the source has before each pair's
_WHOLE = 4 + _BEGINNING  # units of a sequence's KV head that one program attends to: parts cost more than they gain
_POINTERS = ("qkv", "out", "keys", "values", "plan", "context", "table", "positions", "slots", "cos_sin", "parts", "peaks", "tickets")


class _Parameters(ctypes.Structure):
    """As ``Params`` of the source."""

    _fields_ = (
        *((name, c_void_p) for name in _POINTERS),
        ("block_stride", c_longlong),
        ("head_stride", c_longlong),
        ("token_stride", c_int),
        ("table_stride", c_int),
        ("rows", c_int),
        ("scale", c_float),
        ("early", c_int),
    )


@dataclass(frozen=True, slots=True)
class Variant:
    """What the source is compiled for. ``keys``: of a unit, a warp's."""

    head_dim: int
    group: int
    kv_heads: int
    block_size: int
    keys: int

    @property
    def stages(self) -> int:
        return _RING_BYTES // (4 * self.keys * self.head_dim)

    def options(self, capability: tuple[int, int]) -> tuple[str, ...]:
        named = {"D": self.head_dim, "G": self.group, "HK": self.kv_heads, "BLOCK": self.block_size, "KEYS": self.keys, "STAGES": self.stages}
        return ("-arch=sm_{}{}".format(*capability), *(f"-D{name}={value}" for name, value in named.items()))


class Builds:
    """The kernel of one device for each variant: built at its first use, in whichever thread comes first; None where that is not possible."""

    def __init__(self, device: torch.device) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        self._capability = torch.cuda.get_device_capability(device)
        self._functions: dict[Variant, Function | None] = {}
        self._lock = threading.Lock()

    def function(self, variant: Variant) -> Function | None:
        with self._lock:
            if variant not in self._functions:
                self._functions[variant] = self._try(variant)
            return self._functions[variant]

    def _try(self, variant: Variant) -> Function | None:
        try:
            module = Module(compiler.build(compiler.source("early.cuh", f"{_NAME}.cu"), variant.options(self._capability)), self.device.index)
            return module.function(_NAME, module.number("shared_bytes"))
        except (compiler.CompileError, NotLoadable) as error:
            _log.warning("attention with rotary embedding inside cannot be built here (%s); both are kernels of their own", error)
            return None


@dataclass(frozen=True, slots=True)
class _Scratch:
    """What programs leave for each other. ``tickets`` are zero between launches."""

    parts: Tensor  # [programs, 2, G, D], float32
    peaks: Tensor  # [programs, 2, G], float32
    tickets: Tensor  # [programs], int32


@dataclass(slots=True, eq=False)
class RopeAttention:
    """As the twin, for steps in which every sequence has one query; None: this step is not for it, and nothing was done.

    ``qkv`` [T, Hq + 2 Hk, D] in bfloat16. ``cascade``: steps in which keys may be shared are left to cascade attention.
    ``programmatic``: of few rows, keys are asked for while the kernel before still runs. Calls of one object must follow each other on the
    device.
    """

    head_dim: int
    group: int
    kv_heads: int
    processors: int
    builds: Builds
    cascade: bool
    programmatic: bool
    empty: Empty = plainly_empty
    _scratch: _Scratch = field(init=False, repr=False)
    _plan: tuple[AttentionInputs, Plan] | None = field(init=False, default=None, repr=False)  # the last

    def __post_init__(self) -> None:
        self._scratch = _make_scratch(_PROGRAMS * self.processors, self.group, self.head_dim, self.builds.device)

    def __call__(
        self,
        qkv: Tensor,
        positions: Tensor,
        cos_sin: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        inputs: AttentionInputs,
        scale: float,
    ) -> Tensor | None:
        rows = qkv.shape[0]
        if inputs.max_query_len != 1 or inputs.context_len.shape[0] != rows or (self.cascade and may_share(inputs, self.group)):
            return None
        if not _lies_well(qkv, k_cache, v_cache, inputs) or (function := self.function(inputs.block_size)) is None:
            return None
        # The first layer's launch waits for all there was before it: so plan, tables and lengths are there for the others, which do not.
        early = self.programmatic and rows <= MOST_ROWS and self._plan is not None and self._plan[0] is inputs
        spans = self._planned(inputs).spans
        out = self.empty((rows, self.group * self.kv_heads, self.head_dim), qkv.dtype, qkv.device)
        tensors = (
            qkv, out, k_cache, v_cache, spans, inputs.context_len, inputs.block_table, positions, inputs.slots, cos_sin,
            self._scratch.parts, self._scratch.peaks, self._scratch.tickets,
        )  # fmt: skip
        strides = k_cache.stride(0), k_cache.stride(1), qkv.stride(0), inputs.block_table.stride(0)
        parameters = _Parameters(*(each.data_ptr() for each in tensors), *strides, rows, scale * LOG2_E.value, early)
        stream = torch.cuda.current_stream(qkv.device).cuda_stream
        function.launch(spans.shape[0], 32 * _WARPS, stream, parameters, programmatic=early)
        return out

    def function(self, block_size: int) -> Function | None:
        """Built, or kept from before; None where that is not possible."""
        return self.builds.function(Variant(self.head_dim, self.group, self.kv_heads, block_size, self.tiles.keys // _WARPS))

    @property
    def tiles(self) -> Tiles:
        """Of the plan: 16 KiB of keys."""
        return Tiles(16, 8192 // self.head_dim, _WARPS, 0, _PROGRAMS)

    def _planned(self, inputs: AttentionInputs) -> Plan:
        """Made by the first layer of a step; the others bring the same inputs."""
        if self._plan is None or self._plan[0] is not inputs:
            programs = _PROGRAMS * self.processors
            dealt = programs, self.group, self.kv_heads, self.tiles, None, _WHOLE, _BEGINNING, _WARPS * programs
            self._plan = inputs, make_plan(inputs, None, 1, *dealt)
        return self._plan[1]

    def rehearse(self, block_size: int) -> object:
        """Builds all it needs: a step of two sequences of one key, in one block, with scratch memory of its own."""
        device, ints = self.builds.device, partial(torch.tensor, dtype=torch.int32, device=self.builds.device)
        qkv = torch.zeros((2, (self.group + 2) * self.kv_heads, self.head_dim), dtype=torch.bfloat16, device=device)
        cache = torch.zeros((2, 1, self.kv_heads, block_size, self.head_dim), dtype=torch.bfloat16, device=device)
        zeros, angles = torch.zeros(2, dtype=torch.int64, device=device), torch.zeros((1, self.head_dim), device=device)
        inputs = AttentionInputs(ints([[0], [0]]), ints([0, 1, 2]), ints([1, 1]), zeros, block_size, 1, 1)
        return replace(self)(qkv, zeros, angles, cache[0], cache[1], inputs, 1.0)


def _lies_well(qkv: Tensor, k_cache: Tensor, v_cache: Tensor, inputs: AttentionInputs) -> bool:
    """In memory as the kernel reads it: 16 bytes at once, and keys and values alike."""
    dim = qkv.shape[2]
    dense = qkv.stride()[1:] == (dim, 1) == k_cache.stride()[2:] and k_cache.stride() == v_cache.stride() and inputs.block_table.stride(1) == 1
    return dense and inputs.block_size % 8 == 0 and not any(each.data_ptr() % 16 for each in (qkv, k_cache, v_cache))


def _make_scratch(programs: int, group: int, head_dim: int, device: torch.device | str) -> _Scratch:
    parts = torch.empty((programs, 2, group, head_dim), dtype=torch.float32, device=device)
    peaks = torch.empty((programs, 2, group), dtype=torch.float32, device=device)
    return _Scratch(parts, peaks, torch.zeros(programs, dtype=torch.int32, device=device))


def create(site: Site, *, cascade: bool) -> RopeAttention:
    head_dim, heads, kv_heads = (int(site.facts[name]) for name in ("head_dim", "num_heads", "num_kv_heads"))
    processors = torch.cuda.get_device_properties(site.device).multi_processor_count
    return RopeAttention(head_dim, heads // kv_heads, kv_heads, processors, Builds(site.device), cascade, can_chain(site), site.empty)
