"""``headrace bench kernels --tune``: which form computes each product of few rows best on this card, measured and kept.

What lives here: candidates' times, compiling them side by side, the choice. What may not: forms (kernels/triton/flat_forms.py), kernels.

A form is timed in a graph, one launch behind the other with programmatic launch, as in a decode step, over weights that no cache holds;
with what stands around it: a gate after a norm, or the product alone. Beside it the vendor's product, for a gate with its activation.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.bench.report import table
from headrace.errors import ConfigError
from headrace.kernels.around import MOST_ROWS, Around
from headrace.kernels.reference import gated_activation
from headrace.kernels.triton.candidates import SMALL_WEIGHT
from headrace.kernels.triton.flat_forms import Form, Forms, Shape, candidate_forms
from headrace.spec import Activation, DecoderSpec
from headrace.worker.card import cuda_time

ROWS = (1, 16, 32, MOST_ROWS)  # the most rows of each class
SECONDS = 0.02  # of timing one form
COLUMNS = ("weight", "rows", "form", "µs", "GB/s", "of the read limit", "vendor's µs")


@dataclass(frozen=True, slots=True)
class Tuned:
    """The best form of one shape and class of rows; None: the vendor's. Times in seconds."""

    shape: Shape
    rows: int
    form: Form | None
    seconds: float
    vendor: float


def shapes_of(spec: DecoderSpec) -> tuple[Shape, ...]:
    """The weights that a decoder of this shape multiplies few rows with, each once."""
    hidden, inner, heads = spec.hidden_size, spec.intermediate_size, spec.num_heads * spec.head_dim
    dense = any(layer.moe is None for layer in spec.layers)
    found = [Shape((spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim, hidden), Shape(hidden, heads), Shape(spec.vocab_size, hidden)]
    if dense:
        found += [Shape(inner, hidden, True) if spec.gated_mlp else Shape(inner, hidden), Shape(hidden, inner)]
    return tuple(dict.fromkeys(shape for shape in found if shape.outs * shape.ins >= SMALL_WEIGHT and shape.ins % 64 == 0))


def tune(shapes: Sequence[Shape], working_set: int, say: Callable[[str], None]) -> list[Tuned]:
    """Times every candidate of every shape on the current card; weights are rotated through ``working_set`` bytes."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        raise ConfigError("--tune needs a GPU of compute capability 9, for which the forms are made; run it there.")
    everything = {(shape.gated, form) for shape in shapes for rows in ROWS for form in candidate_forms(shape, rows)}
    _compile(sorted(everything, key=str), say)
    tuned = []
    for shape in shapes:
        weights = _weights(shape, working_set)
        tuned += [_best(shape, rows, weights) for rows in ROWS]
        say(f"{shape.outs} x {shape.ins}{', gated' if shape.gated else ''}: {', '.join(_form_name(each.form) for each in tuned[-len(ROWS) :])}")
    return tuned


def forms_of(tuned: Sequence[Tuned]) -> dict[Shape, Forms]:
    """As they are kept."""
    return {shape: tuple((each.rows, each.form) for each in tuned if each.shape == shape) for shape in {each.shape for each in tuned}}


def render(tuned: Sequence[Tuned], read_bandwidth: float) -> str:
    return table(COLUMNS, [_cells(each, read_bandwidth) for each in tuned])


def _cells(each: Tuned, read_bandwidth: float) -> tuple[Any, ...]:
    shape = each.shape
    rate = 2 * shape.outs * shape.ins * (2 if shape.gated else 1) / each.seconds
    name = f"{shape.outs} x {shape.ins}{', gated' if shape.gated else ''}"
    return (name, each.rows, _form_name(each.form), each.seconds * 1e6, rate / 1e9, rate / read_bandwidth, each.vendor * 1e6)


def _form_name(form: Form | None) -> str:
    if form is None:
        return "vendor's"
    return f"{form.kind} {form.rows}x{form.columns}x{form.depth}, {form.ways} ways, {form.stages} stages{', late' if form.late else ''}"


def _weights(shape: Shape, working_set: int) -> list[Tensor]:
    rows = shape.outs * (2 if shape.gated else 1)
    count = max(2, min(24, -(-working_set // (2 * rows * shape.ins))))
    return [torch.randn(rows, shape.ins, device="cuda", dtype=torch.bfloat16).mul_(shape.ins**-0.5) for _ in range(count)]


def _best(shape: Shape, rows: int, weights: Sequence[Tensor]) -> Tuned:
    x = torch.randn(rows, shape.ins, device="cuda", dtype=torch.bfloat16)
    vendor = median(cuda_time([partial(_vendor, x, weight, shape.gated) for weight in weights], SECONDS))
    best = Tuned(shape, rows, None, vendor, vendor)
    want = _vendor(x, weights[0], shape.gated).float()
    for form in candidate_forms(shape, rows):
        seconds = _timed(shape, form, x, weights, want)
        if seconds is not None and (seconds < best.seconds or (shape.gated and best.form is None)):  # no vendor's product takes a gate in
            best = Tuned(shape, rows, form, seconds, vendor)
    return best


def _vendor(x: Tensor, weight: Tensor, gated: bool) -> Tensor:
    y = F.linear(x, weight)
    return gated_activation(y, Activation.SILU) if gated else y


def _timed(shape: Shape, form: Form, x: Tensor, weights: Sequence[Tensor], want: Tensor) -> float | None:
    """None where the form does not run here or is wrong."""
    from headrace.kernels.triton.toolchain import build_failure

    try:
        calls = [_call(shape, form, x, weight) for weight in weights]
        error = (calls[0]().float() - want).norm() / want.norm()
        return median(cuda_time(calls, SECONDS)) if error < 0.02 else None
    except Exception as failure:
        if build_failure(failure) is None:
            raise
        return None


def _call(shape: Shape, form: Form, x: Tensor, weight: Tensor) -> Callable[[], Tensor]:
    from headrace.kernels.triton.flat_linear import Product, make_scratch

    forms = ((MOST_ROWS, form),)
    product = Product(weight, None, shape, forms, make_scratch(shape, forms, x.device), True)
    squares = torch.full((1, len(x)), float(shape.ins), device=x.device)
    around = Around(squares, 0.0, Activation.SILU) if shape.gated else Around()
    return lambda: product.launch(form, x, around)[0]


def _compile(forms: Sequence[tuple[bool, Form]], say: Callable[[str], None]) -> None:
    """In as many processes as there are cores: what they leave in the compiler's cache is found at once here."""
    workers = max(1, min(len(forms), (os.cpu_count() or 2) - 1))
    say(f"{len(forms)} forms are compiled by {workers} processes")
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        list(pool.map(_build, [forms[index::workers] for index in range(workers)]))


def _build(forms: Sequence[tuple[bool, Form]]) -> None:
    for gated, form in forms:
        shape = Shape(1024, 8192 if form.kind == "flat" else 2 * form.depth, gated)
        with suppress(Exception):  # the one that times it says so
            _call(shape, form, *_small(shape))()


def _small(shape: Shape) -> tuple[Tensor, Tensor]:
    weight = torch.zeros(shape.outs * (2 if shape.gated else 1), shape.ins, device="cuda", dtype=torch.bfloat16)
    return weight[:1], weight

