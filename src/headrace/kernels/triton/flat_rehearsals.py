"""Small calls that between them build every form of the kernels for few rows that a model will launch.

What lives here: their inputs. What may not: kernels, threads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from headrace.kernels.around import Around
from headrace.kernels.candidate import Site, Sizes
from headrace.kernels.triton.flat_forms import Form, Shape
from headrace.kernels.triton.rehearsals import Calls, zeros

_LARGEST = 2048  # what a program reads at once of a row, at most: one vector form does


def flat_linears(site: Site, run: Callable[..., Any], sizes: Sizes) -> Calls:
    """The product alone, in every form of the layer. Of a corner of the weight: what is compiled does not depend on its size."""
    bias = sizes.spec.qkv_bias or sizes.spec.output_bias or sizes.spec.mlp_bias
    for biased in {False, bias}:
        yield from _calls(site, run, sizes, {"alone": lambda outs, form: Around()}, biased=biased)


def fused_linears(site: Site, run: Callable[..., Any], sizes: Sizes) -> Calls:
    """The product with what stands around it where the layer has its place: before attention, behind it, or in the feed-forward."""
    spec, outs = sizes.spec, site.facts["out_features"]
    norm = partial(zeros, site, 1, 1, dtype=torch.float32)
    weight = torch.float32 if spec.norm_offset else site.facts["dtype"]
    if site.facts["gated"]:
        yield from _calls(site, run, sizes, {"gated": lambda outs, form: Around(norm(), 1.0, spec.activation)}, biased=spec.mlp_bias)
        return
    if outs == (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim:
        yield from _calls(site, run, sizes, {"normed": lambda outs, form: Around(norm(), 1.0)}, biased=spec.qkv_bias)
    if outs == spec.hidden_size:
        behind = {"added": lambda outs, form: Around(residual=zeros(site, 1, outs), scale=zeros(site, outs, dtype=weight))}
        for biased in {spec.output_bias, spec.mlp_bias}:
            yield from _calls(site, run, sizes, behind, biased=biased)


def _calls(site: Site, run: Callable[..., Any], sizes: Sizes, places: dict[str, Callable[[int, Form], Around]], *, biased: bool) -> Calls:
    gated = bool(site.facts.get("gated"))
    outs, ins = _corner(site.facts["out_features"] // (2 if gated else 1)), _corner(site.facts["in_features"])
    forms = dict.fromkeys(form for most, form in run(zeros(site, 0, ins), None).product.forms if form is not None)
    for form in forms:
        for place, around in places.items():
            name = f"{place}{', bias' if biased else ''}, {outs % 16}, {form}"
            yield name, partial(_launch, site, run, Shape(outs, ins, gated), form, around, biased)


def _launch(site: Site, run: Callable[..., Any], shape: Shape, form: Form, around: Callable[[int, Form], Around], biased: bool) -> object:
    rows = shape.outs * (2 if shape.gated else 1)
    product = run(zeros(site, rows, shape.ins), zeros(site, rows) if biased else None).product
    return replace(product, shape=shape).launch(form, zeros(site, 1, shape.ins), around(shape.outs, form))


def _corner(size: int) -> int:
    """A smaller size that kernels cannot tell from ``size``."""
    return size if size <= _LARGEST else _LARGEST + size % 16
