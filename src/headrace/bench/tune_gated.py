"""The last part of ``bench kernels --tune``: for which numbers of rows gate and up are better one product with their activation.

What lives here: timing tiles beside the vendor's product and the activation's kernel, the choice. What may not: kernels, other products.

Timed in graphs over weights that no cache holds, for the numbers of rows that decode steps are padded to; a prompt's, which are bound by the
card's power, each held for a tenth of a second, in turn, twice (as in tune_vendor.py).
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
from headrace.bench.tune_vendor import MOST_FEW, held
from headrace.kernels.around import MOST_ROWS
from headrace.kernels.candidate import Declined, Site
from headrace.kernels.cuda.gated_measured import BEYOND, IN_TURNS, TALL, TOGETHER, Tile, Tiles
from headrace.kernels.tables import Weight
from headrace.kernels.triton.flat_forms import Shape
from headrace.kernels.vendor.tuned import create_linear
from headrace.spec import Activation
from headrace.worker.card import cuda_time
from headrace.worker.graphs import buckets_up_to

# Rows of prompts: each stands for those above the one before. Tiles in turns are counted in pairs of 128 rows: the fewer, the more it matters.
MANY = (640, 768, 896, 1024, 1152, 1280, 1536, 2048, 3072, 4096, 8192, 16384)
LEAST_TALL = 1152  # rows: with fewer, tall tiles do not fill the device
SECONDS = 0.005
LEAST_GAIN, LEAST_LONG_GAIN = 1.02, 1.0  # times quicker than product and activation; a prompt needs less memory without the latter
TITLES = ("gate", "rows", "tile", "µs", "vendor's and activation's µs")


@dataclass(frozen=True, slots=True)
class TunedGate:
    """The best tile for one gate and number of rows; None: the vendor's product and an activation. Seconds."""

    weight: Weight  # of the gate alone
    rows: int
    tile: Tile | None
    seconds: float
    apart: float


def gates_of(shapes: Sequence[Shape]) -> tuple[Weight, ...]:
    return tuple(dict.fromkeys((shape.outs, shape.ins) for shape in shapes if shape.gated and shape.outs % 8 == 0))


def tune_gates(gates: Sequence[Weight], activation: Activation, working_set: int, say: Callable[[str], None]) -> list[TunedGate]:
    """Times every tile for every number of rows on the current card; weights are rotated through ``working_set`` bytes."""
    rows = [count for count in buckets_up_to(MOST_FEW) if count > MOST_ROWS]
    tuned = []
    for outs, ins in gates:
        count = max(2, -(-working_set // (4 * outs * ins)))
        weights = [torch.randn(2 * outs, ins, device="cuda", dtype=torch.bfloat16).mul_(ins**-0.5) for _ in range(count)]
        layers = _layers(weights)
        tuned += [_best((outs, ins), each, layers, activation, TOGETHER, _short, LEAST_GAIN) for each in rows]
        tuned += [_best((outs, ins), each, layers[:2], activation, tiles_for(each, ins), held, LEAST_LONG_GAIN) for each in MANY]
        say(f"{outs} x {ins}, gated: {', '.join(f'up to {most}: {_name(tile)}' for most, tile in tiles_of(tuned)[outs, ins])}")
    return tuned


def tiles_for(rows: int, ins: int) -> tuple[Tile, ...]:
    """That are worth trying for a prompt's rows."""
    return (*IN_TURNS, *(tile for tile in TALL if rows >= LEAST_TALL and tile.takes(ins)))


def tiles_of(tuned: Sequence[TunedGate]) -> dict[Weight, Tiles]:
    """As they are kept: neighbours with one tile are one row, and what is best for the most rows is for more of them, too."""
    found: dict[Weight, Tiles] = {}
    for weight in dict.fromkeys(each.weight for each in tuned):
        own = [each for each in tuned if each.weight == weight]
        last = [(list(group)[-1].rows, tile) for tile, group in groupby(own, key=lambda each: each.tile)]
        found[weight] = tuple((BEYOND if rows == MANY[-1] else rows, tile) for rows, tile in last)
    return found


def render(tuned: Sequence[TunedGate]) -> str:
    return table(TITLES, [_cells(each) for each in tuned])


def _cells(each: TunedGate) -> tuple[Any, ...]:
    return (f"{each.weight[0]} x {each.weight[1]}", each.rows, _name(each.tile), each.seconds * 1e6, each.apart * 1e6)


def _name(tile: Tile | None) -> str:
    return "none" if tile is None else str(tile)


Calls = dict[Any, list[Callable[[], Any]]]


def _best(
    weight: Weight,
    rows: int,
    layers: Sequence[Any],
    activation: Activation,
    tiles: Sequence[Tile],
    timed: Callable[[Calls], dict[Any, float]],
    least_gain: float,
) -> TunedGate:
    from headrace.kernels.triton.activation import gated_activation

    x, multiply = torch.randn(rows, weight[1], device="cuda", dtype=torch.bfloat16), _vendor(layers[0].weight)
    want = gated_activation(F.linear(x, layers[0].weight), activation).float()
    calls: Calls = {None: [lambda w=each: gated_activation(multiply(x, w.weight), activation) for each in layers]}  # type: ignore[misc]
    for tile in tiles:
        mine: list[Callable[[], Any]] = [partial(each.compute, x, activation, tile) for each in layers]
        if (mine[0]().float() - want).norm() < 0.02 * want.norm():
            calls[tile] = mine
    seconds = timed(calls)
    best = min(seconds, key=lambda tile: seconds[tile])
    chosen = best if seconds[best] * least_gain < seconds[None] else None
    return TunedGate(weight, rows, chosen, seconds[chosen], seconds[None])


def _short(calls: Calls) -> dict[Any, float]:
    return {name: median(cuda_time(each, SECONDS)) for name, each in calls.items()}


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
