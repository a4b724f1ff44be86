"""The candidates for norms and activations, best first.

What lives here: the ordered lists, and small calls that build each kernel a model will launch. What may not: kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from headrace.kernels.build import gpu
from headrace.kernels.build.native import native
from headrace.kernels.build.rehearsals import TOKENS, heads, token_counts
from headrace.kernels.candidate import Calls, CallSite, Facts, NormFacts, Sizes
from headrace.kernels.linear.around import MOST_ROWS
from headrace.kernels.norm.native import create_activation, create_gated_activation, create_rms_norm
from headrace.sites import Role, matrices


def _norms(site: CallSite[NormFacts], run: Any, sizes: Sizes) -> Calls:
    """Hidden states without and with a residual; heads of q and of k, where they are normed."""
    spec = sizes.spec

    def norm(x: Callable[[], Tensor], width: int, *, residual: bool) -> object:
        weight = site.zeros(width, dtype=site.facts.weight_dtype)
        bias = (weight,) if site.op == "layer_norm" else ()
        value = x()
        return run(value, weight, *bias, spec.norm_eps, value if residual else None)

    yield (
        "hidden and residual",
        partial(norm, partial(site.zeros, TOKENS, spec.hidden_size), spec.hidden_size, residual=True),
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


RMS_NORM = (native(create_rms_norm), gpu.triton("norm.triton_norm:rms_norm", _norms, chained=MOST_ROWS, takes=True))
LAYER_NORM = (gpu.triton("norm.triton_norm:layer_norm", _norms, chained=MOST_ROWS, takes=True),)
ACTIVATION = (native(create_activation), gpu.triton("norm.triton_activation:activation", _activations, takes=True))
GATED_ACTIVATION = (
    native(create_gated_activation),
    gpu.triton("norm.triton_activation:gated_activation", _activations, takes=True),
)
