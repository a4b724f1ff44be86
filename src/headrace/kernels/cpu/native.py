"""The C kernels as torch functions: each has its twin's signature and lays out what C reads.

What lives here: pointers, strides, thread counts, and which call sites are accepted. What may not: compiling (compiler.py), mathematics (csrc/).

ctypes releases the GIL during a call. Rows may be strided; the last dimension of every tensor must be contiguous, and is made so where
it is an activation.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import c_char_p, c_float, c_int, c_int64, c_void_p
from dataclasses import dataclass
from struct import Struct
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels import reference
from headrace.kernels.candidate import Declined, Empty, Site, plainly_empty
from headrace.kernels.cpu.compiler import Native, native_library
from headrace.layers.inputs import AttentionInputs
from headrace.spec import Activation

TYPES = MappingProxyType({torch.float32: 0, torch.bfloat16: 1, torch.float16: 2})  # as common.h numbers them
ACTIVATIONS = MappingProxyType({Activation.SILU: 0, Activation.GELU: 1, Activation.GELU_TANH: 2})  # elementwise.c
MAX_HEAD_DIM, MAX_GROUP = 512, 64  # attention.c: MAX_DIM, MAX_ROWS
FEW_ROWS = 40  # with more, torch's blocked product is quicker than this one, which reads the weight as it lies

# The argument structs of the C files, field for field: i int, q int64, P pointer, f float.
_ROTARY = Struct("@2i8q3P6q5P6q")
_ATTENTION = Struct("@2i6q2P2q2P6q3P4q2f")
_SPARSE = Struct("@2i5q5P2q2i")


def native_kernel(create: Callable[[Native, Site], Callable[..., Any] | Declined]) -> Callable[[Site], Callable[..., Any] | Declined]:
    """A candidate's ``create`` that first asks whether there is a library at all, and for this element type."""

    def accept(site: Site) -> Callable[..., Any] | Declined:
        if site.facts.get("dtype") not in TYPES:
            return Declined(f"element type {site.facts.get('dtype')} is none of float32, bfloat16, float16")
        native = native_library()
        return native if isinstance(native, Declined) else create(native, site)

    return accept


def _function(native: Native, name: str, arguments: str, result: Any = None) -> Any:
    """A C function. ``arguments``: i int, q int64, P pointer, f float, s struct."""
    kinds: dict[str, Any] = {"i": c_int, "q": c_int64, "P": c_void_p, "f": c_float, "s": c_char_p}
    found = native.library[name]  # by item: an object of its own, so that two call sites share no signature
    found.argtypes = [kinds[letter] for letter in arguments]
    found.restype = result
    return found


def _rows(x: Tensor) -> Tensor:
    """[..., H] as [rows, H] with a contiguous last dimension; a view where possible."""
    flat = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return flat if flat.stride(1) == 1 else flat.contiguous()


# ---- norm, activation ----


def create_rms_norm(native: Native, site: Site) -> Callable[..., Any]:
    function, empty = _function(native, "headrace_rms_norm", "iiqqPqPqPfPPi"), site.empty

    def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        if weight.dtype not in (x.dtype, torch.float32) or (residual is not None and residual.dtype != x.dtype):
            return reference.rms_norm(x, weight, eps, residual)  # mixed types: the twin knows torch's promotion
        rows = _rows(x)
        y = empty(x.shape, x.dtype, x.device)
        if residual is None:
            total, added, added_row, total_at = x, None, 0, None
        else:
            add, total = _rows(residual), empty(x.shape, x.dtype, x.device)
            added, added_row, total_at = add.data_ptr(), add.stride(0), total.data_ptr()
        shape = rows.shape
        function(
            TYPES[x.dtype], TYPES[weight.dtype], shape[0], shape[1], rows.data_ptr(), rows.stride(0), added, added_row,
            weight.data_ptr(), eps, y.data_ptr(), total_at, torch.get_num_threads(),
        )  # fmt: skip
        return y, total

    return rms_norm


def create_gated_activation(native: Native, site: Site) -> Callable[..., Any]:
    return _elementwise(native, "headrace_gated_activation", 2, site.empty)


def create_activation(native: Native, site: Site) -> Callable[..., Any]:
    """torch's own computes the last elements of a tensor another way than those before, so that they show where a batch ends."""
    return _elementwise(native, "headrace_activation", 1, site.empty)


def _elementwise(native: Native, name: str, parts: int, empty: Empty) -> Callable[..., Any]:
    """``parts`` elements of a row make one of the result."""
    function = _function(native, name, "iqqPqiPi")

    def activation(x: Tensor, kind: Activation) -> Tensor:
        rows, width = _rows(x), x.shape[-1] // parts
        y = empty((*x.shape[:-1], width), x.dtype, x.device)
        function(
            TYPES[x.dtype], rows.shape[0], width, rows.data_ptr(), rows.stride(0), ACTIVATIONS[kind], y.data_ptr(), torch.get_num_threads()
        )  # fmt: skip
        return y

    return activation


# ---- rotary embedding and KV write ----


def create_rotary_write(native: Native, site: Site) -> Callable[..., Any]:
    function = _function(native, "headrace_rotary_write", "si", c_int)

    def rotary_write(
        q: Tensor, k: Tensor, v: Tensor, positions: Tensor, cos_sin: Tensor | None, k_cache: Tensor, v_cache: Tensor, slots: Tensor
    ) -> Tensor:
        """In place on q and k, where their last dimension is contiguous."""
        q, k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k, v))
        rotary_dim, max_positions, angles = (0, 0, None) if cos_sin is None else (cos_sin.shape[1], cos_sin.shape[0], cos_sin.data_ptr())
        failed = function(
            _ROTARY.pack(
                TYPES[q.dtype], TYPES[k_cache.dtype],
                q.shape[0], q.shape[1], k.shape[1], q.shape[2], rotary_dim, max_positions, k_cache.shape[2], k_cache.shape[0],
                q.data_ptr(), k.data_ptr(), v.data_ptr(), *q.stride()[:2], *k.stride()[:2], *v.stride()[:2],
                positions.data_ptr(), slots.data_ptr(), angles or 0, k_cache.data_ptr(), v_cache.data_ptr(),
                *k_cache.stride()[:3], *v_cache.stride()[:3],
            ),
            torch.get_num_threads(),
        )  # fmt: skip
        if failed:
            raise IndexError(f"a position is not in 0 … {max_positions - 1} or a slot is beyond {k_cache.shape[0] * k_cache.shape[2]}")
        return q

    return rotary_write


# ---- attention ----


def create_paged_attention(native: Native, site: Site) -> Callable[..., Any] | Declined:
    head_dim, heads, kv_heads = (site.facts.get(name) for name in ("head_dim", "num_heads", "num_kv_heads"))
    if head_dim is None or heads is None or kv_heads is None:
        return Declined("the call site does not state head_dim, num_heads and num_kv_heads")
    if head_dim > MAX_HEAD_DIM:
        return Declined(f"head_dim {head_dim} is above {MAX_HEAD_DIM}")
    if heads % kv_heads or heads // kv_heads > MAX_GROUP:
        return Declined(f"{heads} heads over {kv_heads} KV heads are no group of 1 to {MAX_GROUP}")
    function, empty = _function(native, "headrace_attention", "si", c_int), site.empty

    def paged_attention(
        q: Tensor, k_cache: Tensor, v_cache: Tensor, inputs: AttentionInputs, scale: float, window: int | None, soft_cap: float | None
    ) -> Tensor:
        q = q if q.stride(2) == 1 else q.contiguous()
        out = empty(q.shape, q.dtype, q.device)
        table = inputs.block_table
        failed = function(
            _ATTENTION.pack(
                TYPES[q.dtype], TYPES[k_cache.dtype],
                table.shape[0], q.shape[1], k_cache.shape[1], q.shape[2], inputs.block_size, q.shape[0],
                q.data_ptr(), out.data_ptr(), *q.stride()[:2], k_cache.data_ptr(), v_cache.data_ptr(),
                *k_cache.stride()[:3], *v_cache.stride()[:3],
                table.data_ptr(), inputs.query_start.data_ptr(), inputs.context_len.data_ptr(),
                table.stride(0), inputs.max_query_len, inputs.max_context_len, window or 0, scale, soft_cap or 0.0,
            ),
            torch.get_num_threads(),
        )  # fmt: skip
        if failed:
            raise MemoryError(f"no memory for the partial sums of attention over {inputs.max_context_len} tokens")
        return out

    return paged_attention


# ---- linear ----


@dataclass(frozen=True, slots=True)
class Product:
    """y = x · weightᵀ for few rows, by C; ``weight`` [out, in] is read as it lies."""

    function: Any
    invariant: bool  # the bits of a row must not depend on how many there are
    empty: Empty = plainly_empty

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        rows = _rows(x)
        y = self.empty((*x.shape[:-1], weight.shape[0]), x.dtype, x.device)
        self.function(
            TYPES[x.dtype], rows.shape[0], weight.shape[0], weight.shape[1], rows.data_ptr(), rows.stride(0), weight.data_ptr(), weight.stride(0),
            None if bias is None else bias.data_ptr(), y.data_ptr(), weight.shape[0], self.invariant, torch.get_num_threads(),
        )  # fmt: skip
        return y


def create_product(native: Native, invariant: bool, empty: Empty = plainly_empty) -> Product:
    return Product(_function(native, "headrace_linear", "iqqqPqPqPPqii"), invariant, empty)


def create_linear(native: Native, site: Site) -> Callable[..., Any] | Declined:
    if not native.threads and torch.get_num_threads() > 1:
        return Declined("built without OpenMP (one thread only); torch's own product uses them all")
    product = create_product(native, site.batch_invariant, site.empty)
    always = site.batch_invariant or site.facts["dtype"] is torch.float16  # torch's float16 product is slower still

    def pack(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
        weight = weight if weight.stride(1) == 1 else weight.contiguous()

        def linear(x: Tensor) -> Tensor:
            if not always and x.numel() > FEW_ROWS * x.shape[-1]:
                return F.linear(x, weight, bias)
            return product(x, weight, bias)

        return linear

    return pack


# ---- sparse feed-forward ----


def create_moe(native: Native, site: Site) -> Callable[..., Any] | Declined:
    num_experts, top_k = site.facts.get("num_experts"), site.facts.get("top_k")
    if num_experts is None or top_k is None:
        return Declined("the call site does not state num_experts and top_k")
    function = _function(native, "headrace_moe", "si", c_int)
    invariant, empty = site.batch_invariant, site.empty
    always = invariant or site.facts["dtype"] is torch.float16

    def few(x: Tensor, router_logits: Tensor, gate_up: Tensor, down: Tensor, renormalize: bool, kind: Activation) -> Tensor:
        x, router_logits, gate_up, down = _rows(x), _rows(router_logits), gate_up.contiguous(), down.contiguous()
        out = empty(x.shape, x.dtype, x.device)
        failed = function(
            _SPARSE.pack(
                TYPES[x.dtype], ACTIVATIONS[kind], x.shape[0], x.shape[1], down.shape[2], gate_up.shape[0], top_k,
                x.data_ptr(), router_logits.data_ptr(), gate_up.data_ptr(), down.data_ptr(), out.data_ptr(),
                x.stride(0), router_logits.stride(0), renormalize, invariant,
            ),
            torch.get_num_threads(),
        )  # fmt: skip
        if failed:
            raise MemoryError(f"no memory for {x.shape[0]} tokens of a sparse feed-forward with {top_k} experts each")
        return out

    def moe(x: Tensor, router_logits: Tensor, gate_up: Tensor, down: Tensor, top_k: int, renormalize: bool, kind: Activation) -> Tensor:
        if always or x.shape[0] * top_k <= FEW_ROWS * num_experts:
            return few(x, router_logits, gate_up, down, renormalize, kind)
        return reference.moe(x, router_logits, gate_up, down, top_k, renormalize, kind)  # many tokens an expert: torch's blocked product

    return moe
