"""The candidate for products of few rows whose weights are under way early, for the registry.

What lives here: what declines a call site before anything is compiled, and what a start builds. What may not: kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import torch

from headrace.kernels.candidate import Candidate, Declined, Site, Sizes
from headrace.kernels.cuda.ring_forms import RingForms, measured_forms
from headrace.kernels.triton.flat_forms import Shape

RING = "ring"


def _create(site: Site) -> Callable[..., Any] | Declined:
    """Whoever is declined loses nothing but speed: the forms of kernels/triton/flat.py stand behind it."""
    outs, ins, dtype = site.facts.get("out_features"), site.facts.get("in_features"), site.facts.get("dtype")
    if outs is None or ins is None or dtype is not torch.bfloat16:
        return Declined("only weights of bfloat16 whose shape is known are served", by_choice=True)
    if not torch.cuda.is_available() or torch.cuda.get_device_capability(site.device) != (9, 0):
        return Declined("its matrix instruction is that of compute capability 9.0", by_choice=True)
    gated = bool(site.facts.get("gated"))
    forms = measured_forms(torch.cuda.get_device_name(site.device)).get(Shape(outs // (2 if gated else 1), ins, gated), ())
    if not any(form for _, form in forms):
        return Declined("nothing was measured to be better than the other forms for this weight", by_choice=True)
    made: Callable[..., Any] = import_module("headrace.kernels.cuda.ring").create_ring(site)
    return made


def unserved(forms: RingForms, others: tuple[tuple[int, Any], ...]) -> tuple[tuple[int, Any], ...]:
    """Of ``others``, up to so many rows this form, those that some number of rows is left to."""
    kept, before = [], 0
    for most, form in others:
        if any(next((ring for up_to, ring in forms if rows <= up_to), None) is None for rows in range(before + 1, most + 1)):
            kept.append((most, form))
        before = most
    return tuple(kept)


def _rehearse(site: Site, make: Callable[..., Any], sizes: Sizes) -> Iterable[tuple[str, Callable[[], object]]]:
    """Every form of its own, and those of the others that are left to them."""
    layer = make(torch.empty(0, 0), None)
    gate = sizes.spec.activation if layer.shape.gated else None
    for form in dict.fromkeys(replace(form, late=False) for _, form in layer.forms if form is not None):
        yield f"{form}, {gate}", partial(layer.kernels.function, form, gate)
    rehearsals = import_module("headrace.kernels.triton.flat_rehearsals")
    yield from rehearsals.fused_linears(site, lambda weight, bias: _left(make(weight, bias)), sizes)


def _left(layer: Any) -> Any:
    product = layer.others.product
    return replace(layer.others, product=replace(product, forms=unserved(layer.forms, product.forms)))


def _failure(error: Exception) -> str | None:
    reason: str | None = import_module("headrace.kernels.cuda.ring").build_failure(error)
    if reason is None:
        reason = import_module("headrace.kernels.triton.toolchain").build_failure(error)
    return reason


RING_LINEAR = (Candidate(RING, _create, ("cuda",), batch_invariant=False, failure=_failure, rehearse=_rehearse),)
