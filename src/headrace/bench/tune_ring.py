"""The part of ``bench kernels --tune`` about products whose weights are under way early: which form is best, and where the others are.

What lives here: timing forms of kernels/cuda/ring.py beside the measured ones of kernels/triton, the choice. What may not: kernels.

Timed in graphs, one launch behind the other with programmatic launch, over weights that no cache holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from headrace.bench.report import table
from headrace.kernels.around import Around
from headrace.kernels.cuda.ring_forms import ROWS, RingForm, RingForms, candidate_forms
from headrace.kernels.triton.flat_forms import LARGE, Shape, forms_for, without_vendor
from headrace.spec import Activation
from headrace.worker.card import cuda_time

SECONDS = 0.01
LEAST_GAIN = 1.02  # times quicker than the other forms
_BUILDERS = 14  # threads that compile: the compiler lets them
TITLES = ("weight", "rows", "form", "µs", "other forms' µs")


@dataclass(frozen=True, slots=True)
class TunedRing:
    """The best form of one shape and class of rows; None: one of kernels/triton. Seconds."""

    shape: Shape
    rows: int
    form: RingForm | None
    seconds: float
    others: float


def rings_of(shapes: Sequence[Shape]) -> tuple[Shape, ...]:
    """Those inside layers; the head's weight is large enough for any form."""
    return tuple(shape for shape in shapes if shape.outs < LARGE and shape.ins % 64 == 0 and (shape.outs % 8 == 0 or not shape.gated))


def tune_rings(shapes: Sequence[Shape], activation: Activation, working_set: int, say: Callable[[str], None]) -> list[TunedRing]:
    """Times every form for every class of rows on the current card; weights are rotated through ``working_set`` bytes."""
    from headrace.kernels.cuda.ring import machine_code

    processors = torch.cuda.get_device_properties("cuda").multi_processor_count
    needed = {
        (replace(form, late=False), activation if shape.gated else None)
        for shape in shapes for rows in ROWS for form in candidate_forms(shape, rows, processors)
    }  # fmt: skip
    with ThreadPoolExecutor(_BUILDERS) as pool:
        list(pool.map(lambda each: machine_code(*each), sorted(needed, key=str)))
    tuned = []
    for shape in shapes:
        count = max(2, min(24, -(-working_set // (2 * shape.outs * (2 if shape.gated else 1) * shape.ins))))
        rows = shape.outs * (2 if shape.gated else 1)
        weights = [torch.randn(rows, shape.ins, device="cuda", dtype=torch.bfloat16).mul_(shape.ins**-0.5) for _ in range(count)]
        tuned += [_best(shape, each, weights, activation, processors) for each in ROWS]
        say(f"{_name(shape)}: {', '.join(_form_name(each.form) for each in tuned[-len(ROWS) :])}")
    return tuned


def forms_of(tuned: Sequence[TunedRing]) -> dict[Shape, RingForms]:
    """As they are kept. One row is left to the others, which multiply it without matrix instructions."""
    shapes = dict.fromkeys(each.shape for each in tuned)
    return {shape: ((1, None), *((each.rows, each.form) for each in tuned if each.shape == shape)) for shape in shapes}


def render(tuned: Sequence[TunedRing]) -> str:
    return table(TITLES, [(_name(each.shape), each.rows, _form_name(each.form), each.seconds * 1e6, each.others * 1e6) for each in tuned])


def _name(shape: Shape) -> str:
    return f"{shape.outs} x {shape.ins}{', gated' if shape.gated else ''}"


def _form_name(form: RingForm | None) -> str:
    return "others" if form is None else f"{form.rows}x{form.columns}, {form.ways} ways{', late' if form.late else ''}"


def _best(shape: Shape, rows: int, weights: Sequence[Tensor], activation: Activation, processors: int) -> TunedRing:
    x = torch.randn(rows, shape.ins, device="cuda", dtype=torch.bfloat16)
    around = Around(torch.full((1, rows), float(shape.ins), device="cuda"), 0.0, activation) if shape.gated else Around()
    calls = _others(shape, rows, x, around, weights, processors)
    want, others = calls[0]().float(), median(cuda_time(calls, SECONDS))
    best = TunedRing(shape, rows, None, others, others)
    for form in candidate_forms(shape, rows, processors):
        calls = _rings(shape, form, x, around, weights)
        right = (calls[0]().float() - want).norm() < 0.02 * want.norm()
        seconds = median(cuda_time(calls, SECONDS))
        if right and seconds < best.seconds and seconds * LEAST_GAIN < others:
            best = TunedRing(shape, rows, form, seconds, others)
    return best


def _others(shape: Shape, rows: int, x: Tensor, around: Around, weights: Sequence[Tensor], processors: int) -> list[Callable[[], Tensor]]:
    from headrace.kernels.triton.flat_linear import Product, make_scratch
    from headrace.kernels.triton.flat_measured import measured_forms

    forms = without_vendor(forms_for(shape, processors, measured_forms(x.device)), shape, processors)
    scratch = make_scratch(shape, forms, x.device)
    products = [Product(weight, None, shape, forms, scratch, True) for weight in weights]
    form: Any = products[0].form(rows)
    return [partial(_first, product.launch, form, x, around) for product in products]


def _rings(shape: Shape, form: RingForm, x: Tensor, around: Around, weights: Sequence[Tensor]) -> list[Callable[[], Tensor]]:
    from headrace.kernels.cuda.ring import RingLinear, kernels_of

    none: Any = None  # what no form serves is not asked for here
    kernels = kernels_of(torch.cuda.current_device())
    layers = [RingLinear(weight, None, shape, (), kernels, True, none, {}) for weight in weights]
    return [partial(_first, layer.compute, x, around, form) for layer in layers]


def _first(compute: Callable[..., Any], *arguments: Any) -> Tensor:
    y: Tensor = compute(*arguments)[0]
    return y
