"""The candidates for norms and activations, best first.

What lives here: the ordered lists, small calls that build each kernel a model will launch, and the C kernels
(elementwise.c) as torch functions. What may not: Triton, compiling (build/), mathematics.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from headrace.kernels.build import gpu
from headrace.kernels.build.c_compiler import Native
from headrace.kernels.build.native import ACTIVATIONS, TYPES, function_of, native
from headrace.kernels.build.warm_ups import TOKENS, heads, token_counts
from headrace.kernels.candidate import Calls, CallSite, Empty, Facts, NormFacts, Sizes, rows_of
from headrace.kernels.linear.epilogue import MOST_ROWS
from headrace.kernels.norm import reference
from headrace.sites import Role, matrices
from headrace.spec import Activation


def create_rms_norm(native: Native, site: CallSite[NormFacts]) -> Any:
    function, empty = function_of(native, "headrace_rms_norm", "iiqqPqPqPfPPi"), site.empty

    def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        if weight.dtype not in (x.dtype, torch.float32) or (residual is not None and residual.dtype != x.dtype):
            return reference.rms_norm(x, weight, eps, residual)  # mixed types: the twin knows torch's promotion
        rows = rows_of(x)
        y = empty(x.shape, x.dtype, x.device)
        if residual is None:
            total, added, added_row, total_at = x, None, 0, None
        else:
            add, total = rows_of(residual), empty(x.shape, x.dtype, x.device)
            added, added_row, total_at = add.data_ptr(), add.stride(0), total.data_ptr()
        shape = rows.shape
        function(
            TYPES[x.dtype], TYPES[weight.dtype], shape[0], shape[1], rows.data_ptr(), rows.stride(0), added, added_row,
            weight.data_ptr(), eps, y.data_ptr(), total_at, torch.get_num_threads(),
        )  # fmt: skip
        return y, total

    return rms_norm


def create_gated_activation(native: Native, site: CallSite[Facts]) -> Any:
    return _elementwise(native, "headrace_gated_activation", 2, site.empty)


def create_activation(native: Native, site: CallSite[Facts]) -> Any:
    """torch's own computes the last elements of a tensor another way than those before, so that they show where a batch
    ends."""
    return _elementwise(native, "headrace_activation", 1, site.empty)


def _elementwise(native: Native, name: str, parts: int, empty: Empty) -> Any:
    """``parts`` elements of a row make one of the result."""
    function = function_of(native, name, "iqqPqiPi")

    def activation(x: Tensor, kind: Activation) -> Tensor:
        rows, width = rows_of(x), x.shape[-1] // parts
        y = empty((*x.shape[:-1], width), x.dtype, x.device)
        function(
            TYPES[x.dtype], rows.shape[0], width, rows.data_ptr(), rows.stride(0), ACTIVATIONS[kind], y.data_ptr(), torch.get_num_threads()
        )  # fmt: skip
        return y

    return activation


def _norms(site: CallSite[NormFacts], run: Any, sizes: Sizes) -> Calls:
    """Hidden states without and with a residual; heads of q and of k, where they are normed."""
    spec = sizes.spec

    def norm(x: Callable[[], Tensor], width: int, *, residual: bool) -> object:
        weight = site.zeros(width, dtype=site.facts.weight_dtype)
        bias = (weight,) if site.op == "layer_norm" else ()
        value = x()
        return run(value, weight, *bias, spec.norm_eps, value if residual else None)

    summed = site.facts.early if site.pdl else 0
    for tokens in (TOKENS, summed + 1) if summed else (TOKENS,):
        yield (
            f"hidden and residual, {tokens} tokens",
            partial(norm, partial(site.zeros, tokens, spec.hidden_size), spec.hidden_size, residual=True),
        )
    for tokens in token_counts(site):
        yield (
            f"hidden, {tokens} tokens",
            partial(norm, partial(site.zeros, tokens, spec.hidden_size), spec.hidden_size, residual=False),
        )
    if spec.qk_norm and site.op == "rms_norm":
        yield "heads of q", lambda: norm(lambda: heads(site, sizes, TOKENS)[0], spec.head_dim, residual=False)
        yield "heads of k", lambda: norm(lambda: heads(site, sizes, TOKENS)[1], spec.head_dim, residual=False)


def _activations(site: CallSite[Facts], run: Any, sizes: Sizes) -> Calls:
    spec = sizes.spec
    up = next(each for each in matrices(spec) if each.role is Role.UP and each.moe is None)
    yield "inner", lambda: run(site.zeros(TOKENS, up.outs), spec.activation)


RMS_NORM = (native(create_rms_norm), gpu.triton("norm.triton_norm:create_rms_norm", _norms))
LAYER_NORM = (gpu.triton("norm.triton_norm:layer_norm", _norms, chained=MOST_ROWS, takes=True),)
ACTIVATION = (native(create_activation), gpu.triton("norm.triton_activation:activation", _activations, takes=True))
GATED_ACTIVATION = (
    native(create_gated_activation),
    gpu.triton("norm.triton_activation:gated_activation", _activations, takes=True),
)
