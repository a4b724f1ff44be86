"""The C kernel for sparse feed-forward networks (moe.c) as a torch function.

What lives here: pointers, strides, and which call sites are accepted. What may not: compiling (build/), mathematics.
"""

from __future__ import annotations

from ctypes import c_int
from struct import Struct
from typing import Any

import torch
from torch import Tensor

from headrace.kernels.build.c_compiler import Native
from headrace.kernels.build.native import ACTIVATIONS, TYPES, function_of, rows_of
from headrace.kernels.candidate import CallSite, ExpertFacts
from headrace.kernels.linear.native import FEW_ROWS
from headrace.kernels.moe import reference
from headrace.spec import Activation

_SPARSE = Struct("@2i5q5P2q2i")  # the argument struct of the C file, field for field: i int, q int64, P pointer


def create_moe(native: Native, site: CallSite[ExpertFacts]) -> Any:
    num_experts, top_k = site.facts.num_experts, site.facts.top_k
    function = function_of(native, "headrace_moe", "si", c_int)
    invariant, empty = site.batch_invariant, site.empty
    always = invariant or site.facts.dtype is torch.float16

    def few(
        x: Tensor, router_logits: Tensor, gate_up: Tensor, down: Tensor, renormalize: bool, kind: Activation
    ) -> Tensor:
        x, router_logits, gate_up, down = rows_of(x), rows_of(router_logits), gate_up.contiguous(), down.contiguous()
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

    def moe(
        x: Tensor, router_logits: Tensor, gate_up: Tensor, down: Tensor, top_k: int, renormalize: bool, kind: Activation
    ) -> Tensor:
        if always or x.shape[0] * top_k <= FEW_ROWS * num_experts:
            return few(x, router_logits, gate_up, down, renormalize, kind)
        return reference.moe(
            x, router_logits, gate_up, down, top_k, renormalize, kind
        )  # many tokens an expert: torch's blocked product

    return moe
