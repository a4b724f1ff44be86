"""Rotary embedding, the cache write and decode attention in one launch (rope_attention.cu): its callables, machine code
and launches.

Beside prompts one launch turns and writes all tokens; then it is attention alone (Singles).

What lives here: what the kernel is given, its scratch memory, which steps it takes. What may not: which layers
(candidates.py), dealing out keys (kernels/attention/triton_plan.py), keys that sequences share
(kernels/attention/triton_cascade.py has them, in launches of its own).
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_longlong, c_void_p
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from headrace.kernels.attention.kv_codes import KINDS
from headrace.kernels.attention.paged import Tiles
from headrace.kernels.attention.reference import HeadNorms
from headrace.kernels.attention.triton_codes import scales_of
from headrace.kernels.attention.triton_plan import Plan, make_plan, may_share
from headrace.kernels.attention.triton_prefill import LOG2_E
from headrace.kernels.build import nvrtc
from headrace.kernels.build.driver import Function
from headrace.kernels.build.variants import Variants
from headrace.kernels.candidate import CallSite, Empty, HeadFacts, RopeFacts, plainly_empty
from headrace.kernels.inputs import AttentionInputs, Quantized
from headrace.kernels.linear.epilogue import MOST_ROWS
from headrace.spec import KVFormat

_NAME = "rope_attention"
_WARPS = 4
_PROGRAMS = 2  # a processor
_RING_BYTES = 16384  # of a warp
LETS_ROWS = 8  # up to so many leave processors to the weights of the next kernel; of more, its programs would crowd
_KEYS_BITS = 8 * 16384  # of a unit
_BEGINNING = 1  # units without keys that the source has before each pair's
_WHOLE = 4 + _BEGINNING  # units of a sequence's KV head that one program attends to: parts cost more than they gain
_UNBUILT = {  # by Variant.fresh: what is said of it
    True: "attention with rotary embedding inside cannot be built here; both are kernels of their own",
    False: "attention of single queries before prompts cannot be built here in CUDA C++; Triton's kernel serves them",
}
_POINTERS = (
    "qkv",
    "out",
    "keys",
    "values",
    "key_scales",
    "value_scales",
    "plan",
    "context",
    "table",
    "positions",
    "slots",
    "cos_sin",
    "q_norm",
    "k_norm",
    "parts",
    "peaks",
    "tickets",
)


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
        ("eps", c_float),
        ("early", c_int),
        ("lets", c_int),
    )


@dataclass(frozen=True, slots=True)
class Variant:
    """What the source is compiled for. ``keys``: of a unit, a warp's. ``fresh``: it turns q and k and writes the newest
    keys, too. ``normed``: it norms heads before it turns them. ``kv``: the cache's codes, as kv_codes.KINDS has
    them; 0: bfloat16."""

    head_dim: int
    group: int
    kv_heads: int
    block_size: int
    keys: int
    fresh: bool = True
    normed: bool = False
    kv: int = 0

    @property
    def stages(self) -> int:
        bits = 16 if self.kv == 0 else 4 if self.kv == KINDS["uint4"] else 8
        return _RING_BYTES // (bits * self.keys * self.head_dim // 4)

    def options(self, capability: tuple[int, int]) -> tuple[str, ...]:
        named = {
            "D": self.head_dim,
            "G": self.group,
            "HK": self.kv_heads,
            "BLOCK": self.block_size,
            "KEYS": self.keys,
            "STAGES": self.stages,
            "FRESH": int(self.fresh),
            "NORMED": int(self.normed),
            "KV": self.kv,
        }
        return ("-arch=sm_{}{}".format(*capability), *(f"-D{name}={value}" for name, value in named.items()))


def builds_of(site: CallSite[Any]) -> Variants[Variant]:
    """The kernel of one device."""
    text = nvrtc.source("build/early.cuh", "attention/kv_codes.cuh", f"attention/{_NAME}.cu")
    capability = site.card.capability
    return Variants(site.device, _NAME, lambda variant: nvrtc.build(text, variant.options(capability)))


@dataclass(frozen=True, slots=True)
class _Scratch:
    """What programs leave for each other. ``tickets`` are zero between launches."""

    parts: Tensor  # [programs, 2, G, D], float32
    peaks: Tensor  # [programs, 2, G], float32
    tickets: Tensor  # [programs], int32


@dataclass(slots=True, eq=False)
class _Kernel:
    """One form of the kernel with its scratch memory and the last plan. Calls of one object must follow each other on
    the device."""

    FRESH: ClassVar[bool]  # it turns q and k and writes the newest keys, too

    head_dim: int
    group: int
    kv_heads: int
    processors: int
    kv: KVFormat | None
    builds: Variants[Variant]
    normed: bool  # it norms heads before that
    _scratch: _Scratch = field(init=False, repr=False)
    _plan: tuple[AttentionInputs, Plan] | None = field(init=False, default=None, repr=False)  # the last

    def __post_init__(self) -> None:
        self._scratch = _make_scratch(_PROGRAMS * self.processors, self.group, self.head_dim, self.device)

    def launch(
        self,
        function: Function,
        qkv: Tensor,
        out: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        inputs: AttentionInputs,
        scale: float,
        quantized: Quantized | None,
        turning: tuple[Tensor, Tensor, Tensor],  # positions, slots and the rotary table
        norms: HeadNorms | None = None,
        *,
        early: bool = False,
    ) -> None:
        spans = self._planned(inputs).spans
        tensors = (
            qkv, out, k_cache, v_cache, *scales_of(k_cache, v_cache, quantized), spans, inputs.context_len, inputs.block_table, *turning,
            *((qkv, qkv) if norms is None else (norms.q, norms.k)),
            self._scratch.parts, self._scratch.peaks, self._scratch.tickets,
        )  # fmt: skip
        strides = k_cache.stride(0), k_cache.stride(1), qkv.stride(0), inputs.block_table.stride(0)
        parameters = _Parameters(
            *(each.data_ptr() for each in tensors),
            *strides,
            qkv.shape[0],
            scale * LOG2_E.value,
            0.0 if norms is None else norms.eps,
            early,
            early and qkv.shape[0] <= LETS_ROWS,
        )
        stream = torch.cuda.current_stream(qkv.device).cuda_stream
        function.launch(spans.shape[0], 32 * _WARPS, stream, parameters, pdl=early)

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.builds.device)

    def function(self, block_size: int) -> Function | None:
        """Built, or kept from before; None where that is not possible."""
        keys, kind = self.tiles.keys // _WARPS, 0 if self.kv is None else KINDS[self.kv.codes]
        variant = Variant(self.head_dim, self.group, self.kv_heads, block_size, keys, self.FRESH, self.normed, kind)
        return self.builds.find(variant, _UNBUILT[self.FRESH])

    @property
    def tiles(self) -> Tiles:
        """Of the plan: 16 KiB of keys, but no more than 64 for a warp."""
        bits = 16 if self.kv is None else self.kv.bits
        return Tiles(16, min(_KEYS_BITS // (bits * self.head_dim), 64 * _WARPS), _WARPS, 0, _PROGRAMS)

    def _planned(self, inputs: AttentionInputs) -> Plan:
        """Made by the first layer of a step; the others bring the same inputs."""
        if self._plan is None or self._plan[0] is not inputs:
            programs = _PROGRAMS * self.processors
            dealt = programs, self.group, self.kv_heads, self.tiles, None, _WHOLE, _BEGINNING, _WARPS * programs
            self._plan = inputs, make_plan(leading_of(inputs) if inputs.leading else inputs, None, 1, *dealt)
        return self._plan[1]


@dataclass(slots=True, eq=False)
class Singles(_Kernel):
    """Attention of sequences with one query each, over keys that lie in the cache, the newest among them."""

    FRESH: ClassVar[bool] = False

    def attend(
        self, q: Tensor, out: Tensor, k_cache: Tensor, v_cache: Tensor, inputs: AttentionInputs, scale: float,
        quantized: Quantized | None = None,
    ) -> bool:  # fmt: skip
        """Fills ``out`` [T, Hq, D] for the first ``inputs.leading`` sequences of a step. False: nothing was done. ``q``
        [T, Hq, D], turned."""
        first = inputs.leading
        if not _lies_well(q, k_cache, v_cache, inputs) or (function := self.function(inputs.block_size)) is None:
            return False
        # which nobody reads
        self.launch(function, q[:first], out, k_cache, v_cache, inputs, scale, quantized, (inputs.slots,) * 3)
        return True

    def warm_up(self, block_size: int) -> object:
        """Builds all it needs: a step of two sequences of one key, in one block, with scratch memory of its own."""
        inputs, qkv, cache, _, quantized = _warmed_up(self, block_size)
        q = qkv[:, : self.group * self.kv_heads]
        return replace(self).attend(
            q, torch.empty_like(q), cache[0], cache[1], replace(inputs, leading=2), 1.0, quantized
        )


@dataclass(slots=True, eq=False)
class RopeAttention(_Kernel):
    """As the twin, for steps in which every sequence has one query; None: this step is not for it, and nothing was
    done.

    ``qkv`` [T, Hq + 2 Hk, D] in bfloat16. ``cascade``: steps in which keys may be shared are left to cascade attention.
    ``early``: of up to so many rows, keys are asked for while the kernel before still runs.
    """

    FRESH: ClassVar[bool] = True

    cascade: bool
    early: int
    empty: Empty = plainly_empty

    def __call__(
        self,
        qkv: Tensor,
        positions: Tensor,
        cos_sin: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        inputs: AttentionInputs,
        scale: float,
        norms: HeadNorms | None = None,
        quantized: Quantized | None = None,
    ) -> Tensor | None:
        rows = qkv.shape[0]
        if (
            inputs.max_query_len != 1
            or inputs.context_len.shape[0] != rows
            or (self.cascade and may_share(inputs, self.group, codes=self.kv is not None))
        ):
            return None
        if inputs.chained:  # a program would read keys that another one is about to write
            return None
        if not _lies_well(qkv, k_cache, v_cache, inputs) or (function := self.function(inputs.block_size)) is None:
            return None
        # The first layer's launch waits for all there was before it: so plan, tables and lengths are there for the
        # others, which do not.
        early = rows <= self.early and self._plan is not None and self._plan[0] is inputs
        out = self.empty((rows, self.group * self.kv_heads, self.head_dim), qkv.dtype, qkv.device)
        turning = positions, inputs.slots, cos_sin
        self.launch(function, qkv, out, k_cache, v_cache, inputs, scale, quantized, turning, norms, early=early)
        return out

    def warm_up(self, block_size: int) -> object:
        inputs, qkv, cache, angles, quantized = _warmed_up(self, block_size)
        return replace(self)(qkv, inputs.slots, angles, cache[0], cache[1], inputs, 1.0, None, quantized)


def leading_of(inputs: AttentionInputs) -> AttentionInputs:
    """The step of the first sequences alone."""
    first = inputs.leading
    table = inputs.block_table[:first]
    starts = inputs.query_start[: first + 1]
    contexts = inputs.context_len[:first]
    slots = inputs.slots[:first]
    return replace(
        inputs, block_table=table, query_start=starts, context_len=contexts, slots=slots, max_query_len=1, leading=0
    )


def _warmed_up(kernel: _Kernel, block_size: int) -> tuple[AttentionInputs, Tensor, Tensor, Tensor, Quantized | None]:
    """Two sequences of one key: the step, q with k and v, both caches, rotary table, and how the caches are held."""
    device, ints = kernel.device, partial(torch.tensor, dtype=torch.int32, device=kernel.device)
    qkv = torch.zeros((2, (kernel.group + 2) * kernel.kv_heads, kernel.head_dim), dtype=torch.bfloat16, device=device)
    row, kind, quantized = kernel.head_dim, torch.bfloat16, None
    if kernel.kv is not None:
        ones = torch.ones(kernel.kv_heads, device=device)
        row, kind, quantized = kernel.kv.token_bytes(row), torch.uint8, Quantized(kernel.kv, ones, ones)
    cache = torch.zeros((2, 1, kernel.kv_heads, block_size, row), dtype=kind, device=device)
    zeros, angles = torch.zeros(2, dtype=torch.int64, device=device), torch.zeros((1, kernel.head_dim), device=device)
    inputs = AttentionInputs(ints([[0], [0]]), ints([0, 1, 2]), ints([1, 1]), zeros, block_size, 1, 1)
    return inputs, qkv, cache, angles, quantized


def _lies_well(qkv: Tensor, k_cache: Tensor, v_cache: Tensor, inputs: AttentionInputs) -> bool:
    """In memory as the kernel reads it: 16 bytes at once, and keys and values alike."""
    dense = (
        qkv.stride()[1:] == (qkv.shape[2], 1)
        and k_cache.stride()[2:] == (k_cache.shape[3], 1)
        and k_cache.stride() == v_cache.stride()
        and inputs.block_table.stride(1) == 1
    )
    least = 16 if k_cache.shape[3] < 64 else 8  # tokens of a block that one copy of a warp brings: 4 bits, heads of 64
    return (
        dense and inputs.block_size % least == 0 and not any(each.data_ptr() % 16 for each in (qkv, k_cache, v_cache))
    )


def _make_scratch(programs: int, group: int, head_dim: int, device: torch.device | str) -> _Scratch:
    parts = torch.empty((programs, 2, group, head_dim), dtype=torch.float32, device=device)
    peaks = torch.empty((programs, 2, group), dtype=torch.float32, device=device)
    return _Scratch(parts, peaks, torch.zeros(programs, dtype=torch.int32, device=device))


def create_plain(site: CallSite[RopeFacts], *, cascade: bool = False) -> RopeAttention:
    normed = site.facts.normed is not None
    early = max(MOST_ROWS, site.facts.early) if site.pdl else 0
    return RopeAttention(*_shape(site), builds_of(site), normed, cascade=cascade, early=early, empty=site.empty)


def create_cascade(site: CallSite[RopeFacts]) -> RopeAttention:
    return create_plain(site, cascade=True)


def create_singles(site: CallSite[HeadFacts]) -> Singles:
    return Singles(*_shape(site), builds_of(site), normed=False)


def _shape(site: CallSite[Any]) -> tuple[int, int, int, int, KVFormat | None]:
    facts, kv_heads = site.facts, site.facts.num_kv_heads
    return facts.head_dim, facts.num_heads // kv_heads, kv_heads, site.card.processors, facts.kv
