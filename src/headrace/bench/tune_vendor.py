"""The second half of ``bench kernels --tune``: which of cuBLASLt's algorithms computes each long product best on this card.

What lives here: holding products under load, the choice. What may not: the library's calls (kernels/vendor/), products of few rows (tune.py).

A long step is bound by the card's power, so algorithms are compared when the card has been at work for a while, each held for a tenth of a
second, in turn, twice: what came before weighs on all of them alike. Where torch's own choice is within a hundredth of the best, it stays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.bench.report import table
from headrace.kernels.triton.flat_forms import Shape
from headrace.kernels.vendor.cublaslt import Algorithm, Operands, Products, Settings
from headrace.kernels.vendor.measured import Choice, Weight
from headrace.worker.card import cuda_time

CLASSES = ((4096, 8192), (12288, 16384))  # from so many rows on; measured with so many
LONGEST = 65536  # columns: a wider weight is a head, which computes few rows
SECONDS, WARM_SECONDS, ROUNDS = 0.1, 0.3, 2
LEAST_GAIN = 1.01  # times quicker than torch's choice
COLUMNS = ("weight", "rows", "algorithm", "µs", "TFLOP/s", "torch's µs")


@dataclass(frozen=True, slots=True)
class TunedProduct:
    """The best algorithm for one weight and class of rows; None: torch's choice. Seconds."""

    weight: Weight
    least: int
    rows: int
    settings: Settings | None
    seconds: float
    torchs: float


def weights_of(shapes: Sequence[Shape]) -> tuple[Weight, ...]:
    """[outs, ins] of the layers among ``shapes``, each once."""
    whole = ((shape.outs * (2 if shape.gated else 1), shape.ins) for shape in shapes)
    return tuple(dict.fromkeys(weight for weight in whole if weight[0] < LONGEST))


def tune_products(weights: Sequence[Weight], say: Callable[[str], None]) -> list[TunedProduct]:
    tuned = []
    for weight in weights:
        tuned += [_best(weight, least, rows) for least, rows in CLASSES]
        say(f"{weight[0]} x {weight[1]}: {', '.join(_name(each.settings) for each in tuned[-len(CLASSES) :])}")
    return tuned


def choices_of(tuned: Sequence[TunedProduct]) -> dict[Weight, tuple[Choice, ...]]:
    """As they are kept."""
    found: dict[Weight, tuple[Choice, ...]] = {}
    for each in tuned:
        found[each.weight] = (*found.get(each.weight, ()), Choice(each.least, each.rows, each.settings or ()))
    return found


def render(tuned: Sequence[TunedProduct]) -> str:
    return table(COLUMNS, [_cells(each) for each in tuned])


def _cells(each: TunedProduct) -> tuple[Any, ...]:
    outs, ins = each.weight
    rate = 2 * outs * ins * each.rows / each.seconds
    return (f"{outs} x {ins}", each.rows, _name(each.settings), each.seconds * 1e6, rate / 1e12, each.torchs * 1e6)


def _name(settings: Settings | None) -> str:
    return "torch's" if settings is None else " ".join(map(str, settings))


def _best(weight: Weight, least: int, rows: int) -> TunedProduct:
    outs, ins = weight
    products = Products(outs, ins, torch.bfloat16, torch.cuda.current_device())
    x, *matrices = (torch.randn(count, ins, device="cuda", dtype=torch.bfloat16) for count in (rows, outs, outs))
    matrices = [each.mul_(ins**-0.5) for each in matrices]
    y, operands = torch.empty(rows, outs, device="cuda", dtype=torch.bfloat16), Operands(rows, outs, ins, torch.bfloat16)
    want = F.linear(x, matrices[0])
    calls: dict[Settings | None, list[Callable[[], Any]]] = {None: [partial(torch.mm, x, each.t(), out=y) for each in matrices]}
    for settings, algorithm in products.offers(rows):
        if products.takes(algorithm, operands) and _right(products, algorithm, operands, x, matrices[0], want):
            calls[settings] = [partial(products.multiply, algorithm, operands, x, each, y, add=False) for each in matrices]
    seconds = _held(calls)
    best = min(seconds, key=lambda settings: seconds[settings])
    chosen = best if seconds[best] * LEAST_GAIN < seconds[None] else None
    return TunedProduct(weight, least, rows, chosen, seconds[chosen], seconds[None])


def _right(products: Products, algorithm: Algorithm, operands: Operands, x: Tensor, weight: Tensor, want: Tensor) -> bool:
    y = torch.full_like(want, float("nan"))
    products.multiply(algorithm, operands, x, weight, y, add=False)
    return bool((y.float() - want.float()).norm() < 0.01 * want.float().norm())


def _held(calls: dict[Settings | None, list[Callable[[], Any]]]) -> dict[Settings | None, float]:
    """Mean seconds a call of each, over rounds in turn."""
    cuda_time(calls[None], WARM_SECONDS, rounds=1)
    rounds = [{name: cuda_time(each, SECONDS, rounds=1)[0] for name, each in calls.items()} for _ in range(ROUNDS)]
    return {name: sum(each[name] for each in rounds) / ROUNDS for name in calls}
