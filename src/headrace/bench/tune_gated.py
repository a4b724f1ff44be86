"""The last part of ``bench kernels --tune``: for which numbers of rows gate and up are better one product with their activation.

What lives here: timing tiles beside the vendor's product and the activation's kernel, the choice. What may not: kernels, other products.

Timed in graphs over weights that no cache holds, for the numbers of rows that decode steps are padded to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.bench.report import table
from headrace.kernels.around import MOST_GATED, MOST_ROWS
from headrace.kernels.candidate import Declined, Site
from headrace.kernels.cuda.gated_measured import COLUMNS, Tiles
from headrace.kernels.tables import Weight
from headrace.kernels.triton.flat_forms import Shape
from headrace.kernels.vendor.tuned import create_linear
from headrace.spec import Activation
from headrace.worker.card import cuda_time
from headrace.worker.graphs import buckets_up_to

SECONDS = 0.005
LEAST_GAIN = 1.02  # times quicker than product and activation
TITLES = ("gate", "rows", "columns of a tile", "µs", "vendor's and activation's µs")


@dataclass(frozen=True, slots=True)
class TunedGate:
    """The best tile for one gate and number of rows; 0 columns: the vendor's product and an activation. Seconds."""

    weight: Weight  # of the gate alone
    rows: int
    columns: int
    seconds: float
    apart: float


def gates_of(shapes: Sequence[Shape]) -> tuple[Weight, ...]:
    return tuple(dict.fromkeys((shape.outs, shape.ins) for shape in shapes if shape.gated and shape.outs % 8 == 0))


def tune_gates(gates: Sequence[Weight], activation: Activation, working_set: int, say: Callable[[str], None]) -> list[TunedGate]:
    """Times every tile for every number of rows on the current card; weights are rotated through ``working_set`` bytes."""
    rows = [count for count in buckets_up_to(MOST_GATED) if count > MOST_ROWS]
    tuned = []
    for outs, ins in gates:
        count = max(2, -(-working_set // (4 * outs * ins)))
        weights = [torch.randn(2 * outs, ins, device="cuda", dtype=torch.bfloat16).mul_(ins**-0.5) for _ in range(count)]
        layers = _layers(weights)
        tuned += [_best((outs, ins), each, layers, activation) for each in rows]
        say(f"{outs} x {ins}, gated: {', '.join(f'up to {most}: {columns}' for most, columns in tiles_of(tuned)[outs, ins])}")
    return tuned


def tiles_of(tuned: Sequence[TunedGate]) -> dict[Weight, Tiles]:
    """As they are kept: neighbours with one tile are one row."""
    found: dict[Weight, Tiles] = {}
    for weight in dict.fromkeys(each.weight for each in tuned):
        own = [each for each in tuned if each.weight == weight]
        found[weight] = tuple((list(group)[-1].rows, columns) for columns, group in groupby(own, key=lambda each: each.columns))
    return found


def render(tuned: Sequence[TunedGate]) -> str:
    return table(TITLES, [_cells(each) for each in tuned])


def _cells(each: TunedGate) -> tuple[Any, ...]:
    return (f"{each.weight[0]} x {each.weight[1]}", each.rows, each.columns, each.seconds * 1e6, each.apart * 1e6)


def _best(weight: Weight, rows: int, layers: Sequence[Any], activation: Activation) -> TunedGate:
    from headrace.kernels.triton.activation import gated_activation

    x, multiply = torch.randn(rows, weight[1], device="cuda", dtype=torch.bfloat16), _vendor(layers[0].weight)
    apart = median(cuda_time([lambda w=each: gated_activation(multiply(x, w.weight), activation) for each in layers], SECONDS))  # type: ignore[misc]
    want, best = gated_activation(F.linear(x, layers[0].weight), activation).float(), TunedGate(weight, rows, 0, apart, apart)
    for columns in COLUMNS:
        calls = [partial(each.compute, x, activation, columns) for each in layers]
        right = (calls[0]().float() - want).norm() < 0.02 * want.norm()
        seconds = median(cuda_time(calls, SECONDS))
        if right and seconds < best.seconds and seconds * LEAST_GAIN < apart:
            best = TunedGate(weight, rows, columns, seconds, apart)
    return best


def _vendor(weight: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """The vendor's product as an engine would compute it now."""
    site = Site(
        "linear", weight.device, {"dtype": weight.dtype, "in_features": weight.shape[1], "out_features": weight.shape[0]}, batch_invariant=False
    )
    make = create_linear(site)
    if isinstance(make, Declined):
        return F.linear
    return lambda x, weight: make(weight, None)(x)


def _layers(weights: Sequence[Tensor]) -> list[Any]:
    from headrace.kernels.cuda.gated import GatedLinear, Kernels

    kernels = Kernels(weights[0].device)
    return [GatedLinear(each, kernels, (), {}) for each in weights]
