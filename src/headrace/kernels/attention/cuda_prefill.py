"""Attention of sequences with many queries on Hopper (prefill.cu): its machine code, what it serves, its launches.

What lives here: what the kernel is given, and whether it can be. What may not: sequences of few queries
(triton_decode.py), compiling.
"""

from __future__ import annotations

import math
from ctypes import c_float, c_int, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.kernels.build import nvrtc
from headrace.kernels.build.driver import Function, TensorMap, tensor_map
from headrace.kernels.build.variants import Variants
from headrace.kernels.inputs import AttentionInputs, Quantized

_NAME, _KEYS = "prefill", 128  # as the source has them
_SHORTEST_BLOCK = 16  # keys: the copy engine brings a block at once, or 128 keys of it
_MOST_MAPS = 512  # of caches: one for keys and one for values, a layer


@dataclass(frozen=True, slots=True)
class Form:
    """``groups`` of four warps that multiply, 64 rows each; ``stages`` of keys, and as many of values."""

    groups: int
    stages: int


FORMS = {128: Form(2, 3), 64: Form(3, 3)}  # of head dimensions; by measurement on an H200


def instructions(dim: int, groups: int) -> str:
    """Both products of 64 rows: ``scores`` with 128 keys, and ``weighted`` sums of as many values."""
    rows, half, end = 64 * groups, _KEYS * 128, "\\n"
    # a row is halves of 64 elements; 16 elements are 32 bytes, counted in 16s
    steps = [(i // 4, i % 4 * 2) for i in range(dim // 16)]
    first = ["{", ".reg .pred no, yes;", ".reg .b64 a, b;", "setp.ne.b32 no, 0, 0;", "setp.eq.b32 yes, 0, 0;"]
    for i, (part, at) in enumerate(steps):
        first += [
            f"add.s64 a, %64, {part * rows * 8 + at};",
            f"add.s64 b, %65, {part * half // 16 + at};",
            f"wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {{{_operands(0, 64)}}}, a, b, {'yes' if i else 'no'}, 1, 1, 0, 0;",
        ]
    second = ["{", ".reg .pred yes;", ".reg .b64 b;", "setp.eq.b32 yes, 0, 0;"]
    sums = dim // 2
    for i in range(_KEYS // 16):
        second += [
            f"add.s64 b, %{sums + 32}, {128 * i};",
            f"wgmma.mma_async.sync.aligned.m64n{dim}k16.f32.bf16.bf16 {{{_operands(0, sums)}}}, {{{_operands(sums + 4 * i, 4)}}}, b, yes, 1, 1, 1;",
        ]
    one, two = ("".join(f'    "{line}{end}"\n' for line in (*lines, "}")) for lines in (first, second))
    return (
        "__device__ __forceinline__ void scores(float (&s)[64], unsigned long long q, unsigned long long k) {\n"
        f'  asm volatile(\n{one}    : {_held("+f", "s", 64)} : "l"(q), "l"(k));\n}}\n'
        f"__device__ __forceinline__ void weighted(float (&o)[{sums}], unsigned (&p)[32], unsigned long long v) {{\n"
        f'  asm volatile(\n{two}    : {_held("+f", "o", sums)} : {_held("r", "p", 32)}, "l"(v));\n}}\n'
    )


def _operands(first: int, count: int) -> str:
    return ", ".join(f"%{i}" for i in range(first, first + count))


def _held(constraint: str, name: str, count: int) -> str:
    return ", ".join(f'"{constraint}"({name}[{i}])' for i in range(count))


def machine_code(dim: int, group: int) -> bytes:
    """Built, or kept from before. Raises CompileError."""
    form = FORMS[dim]
    defined = {"DIM": dim, "GROUP": group, "WGS": form.groups, "STAGES": form.stages}
    options = ("-arch=sm_90a", "-default-device", *(f"-D{name}={value}" for name, value in defined.items()))
    return nvrtc.build(
        nvrtc.source("build/matrix.cuh") + instructions(dim, form.groups) + nvrtc.source("attention/prefill.cu"),
        options,
    )


def shared_bytes(dim: int) -> int:
    """Queries, rings, barriers, and what is aligned."""
    form = FORMS[dim]
    return 1024 + 2 * dim * (64 * form.groups + 2 * form.stages * _KEYS) + 256


class Prompts:
    """Attention without window and cap in bfloat16, for heads of 64 or 128; built at its first use, in whichever thread
    comes first.

    Where it cannot be built, the first to ask is told in the log, and ``attend`` serves nobody. Calls of one object
    must follow each other on the device.
    """

    def __init__(self, dim: int, group: int, device: torch.device) -> None:
        self._dim, self._group = dim, group
        self._rows = 64 * FORMS[dim].groups // group
        self._variants: Variants[tuple[int, int]] = Variants(
            device, _NAME, lambda each: machine_code(*each), lambda each: shared_bytes(each[0])
        )
        self._ticket = torch.zeros(1, dtype=torch.int32, device=device)
        self._maps: dict[tuple[int, ...], TensorMap] = {}

    def attend(
        self, q: Tensor, out: Tensor, k_cache: Tensor, v_cache: Tensor, inputs: AttentionInputs, scale: float, few: int,
        lse: Tensor | None = None, quantized: Quantized | None = None,
    ) -> bool:  # fmt: skip
        """Fills ``out`` [T, Hq, D] for the sequences with more than ``few`` queries, and with zeros for tokens of no
        sequence; ``lse`` [T, Hq], float32, likewise with the log of the sum of exponentials, and with -inf.

        False: nothing was done. ``q`` [T, Hq, D], caches [blocks, Hk, block_size, D], in bfloat16; see PagedAttention.
        """
        assert quantized is None, "triton_widen.WidePrompts reads codes"
        if not _readable(q, k_cache, v_cache, inputs.block_size) or (function := self._kernel()) is None:
            return False
        (tokens, _, dim), kv_heads, sequences, size = (
            q.shape,
            k_cache.shape[1],
            inputs.context_len.shape[0],
            inputs.block_size,
        )
        strides = (stride // dim for cache in (k_cache, v_cache) for stride in cache.stride()[:2])
        items = (tokens // self._rows + sequences) * kv_heads
        numbers = (tokens, sequences, few, kv_heads, *strides, inputs.block_table.stride(0), size.bit_length() - 1)
        tensors = (out, inputs.block_table, inputs.query_start, inputs.context_len, self._ticket, lse)
        function.launch(
            min(items, self._variants.processors), 128 * (FORMS[dim].groups + 1), torch.cuda.current_stream(q.device).cuda_stream,
            tensor_map(q, self._rows, self._group, 64), self._map(k_cache), self._map(v_cache),
            *(c_void_p(None if each is None else each.data_ptr()) for each in tensors), *map(c_int, numbers), c_float(scale * math.log2(math.e)),
        )  # fmt: skip
        return True

    def _kernel(self) -> Function | None:
        return self._variants.find(
            (self._dim, self._group), "attention of prompts in CUDA C++ cannot be built here; Triton's runs instead"
        )

    def _map(self, cache: Tensor) -> TensorMap:
        """All rows from the first of ``cache`` to its last; those of other layers and of the other half lie between."""
        key = (cache.data_ptr(), *cache.shape, *cache.stride())
        if key not in self._maps:
            if len(self._maps) >= _MOST_MAPS:
                self._maps.clear()
            rows, size, dim = rows_of(cache), cache.shape[2], cache.shape[3]
            self._maps[key] = tensor_map(torch.as_strided(cache, (rows, dim), (dim, 1)), min(size, _KEYS), 64)
        return self._maps[key]


def rows_of(cache: Tensor) -> int:
    (blocks, heads, size, dim), (block, head, row, _) = cache.shape, cache.stride()
    return ((blocks - 1) * block + (heads - 1) * head + (size - 1) * row) // dim + 1


def _readable(q: Tensor, k_cache: Tensor, v_cache: Tensor, size: int) -> bool:
    """Whether the copy engine can: it wants rows side by side, at multiples of 16 bytes, and counts them in 32 bits."""
    if (
        size < _SHORTEST_BLOCK
        or size & (size - 1)
        or q.stride(2) != 1
        or q.stride(0) % 8
        or q.stride(1) % 8
        or q.data_ptr() % 16
    ):
        return False
    dim = q.shape[2]
    return all(
        cache.stride(2) == dim and cache.stride(3) == 1 and not any(stride % dim for stride in cache.stride()[:2])
        and cache.data_ptr() % 16 == 0 and rows_of(cache) < 2**31
        for cache in (k_cache, v_cache)
    )  # fmt: skip


def why_not(dtype: torch.dtype, dim: int, capability: tuple[int, int]) -> str | None:
    """Why heads like these are not served; None: they are."""
    if dtype is not torch.bfloat16:
        return f"element type {str(dtype).removeprefix('torch.')} is not bfloat16"
    if dim not in FORMS:
        return f"head_dim {dim} is none of {', '.join(map(str, sorted(FORMS)))}"
    if capability != (9, 0):
        return "its matrix instruction is that of compute capability 9.0"
    return None
