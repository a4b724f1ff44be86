"""The second part of ``bench kernels --tune``: which of cuBLASLt's algorithms computes each product of 65 rows and more best on this card.

What lives here: holding products under load, the choice. What may not: the library's calls (kernels/vendor/), products of few rows (tune.py).

Products of decode steps, the head's too, are timed over weights that no cache holds, for the numbers of rows that steps are padded to. A
long step is bound by the card's power, so its algorithms are compared when the card has been at work for a while, each held for a tenth of a
second, in turn, twice: what came before weighs on all of them alike. Where torch's own choice is nearly the best, it stays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.bench.report import table
from headrace.kernels.around import MOST_ROWS
from headrace.kernels.tables import Weight
from headrace.kernels.triton.flat_forms import Shape
from headrace.kernels.vendor.cublaslt import Algorithm, Operands, Products, Settings
from headrace.kernels.vendor.measured import Choice
from headrace.worker.card import cuda_time
from headrace.worker.graphs import buckets_up_to

MOST_FEW = 512  # rows of a decode step, as far as each number of rows is looked at
CLASSES = ((4096, 8192), (12288, 16384))  # from so many rows on; measured with so many
WIDEST = 65536  # columns: a wider weight is a head, of which long steps compute few rows
SECONDS, WARM_SECONDS, ROUNDS = 0.1, 0.3, 2
FEW_SECONDS = 0.004
LEAST_GAIN, LEAST_FEW_GAIN = 1.01, 1.03  # times quicker than torch's choice
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
    """[outs, ins] of ``shapes``, each once."""
    return tuple(dict.fromkeys((shape.outs * (2 if shape.gated else 1), shape.ins) for shape in shapes))


def tune_products(weights: Sequence[Weight], working_set: int, say: Callable[[str], None]) -> list[TunedProduct]:
    """Weights are rotated through ``working_set`` bytes."""
    tuned = []
    for weight in weights:
        matrices = _matrices(weight, working_set)
        own = [_best(weight, least, rows, matrices, few=True) for least, rows in pairwise((MOST_ROWS, *_buckets()))]
        own.append(TunedProduct(weight, own[-1].rows + 1, own[-1].rows + 1, None, 0.0, 0.0))
        classes = CLASSES if weight[0] < WIDEST else ()
        own += [_best(weight, least, rows, matrices[:2], few=False) for least, rows in classes]
        say(f"{weight[0]} x {weight[1]}: torch's choice for {sum(each.settings is None for each in own)} of {len(own)} numbers of rows")
        tuned += own
    return tuned


def _buckets() -> list[int]:
    return [count for count in buckets_up_to(MOST_FEW) if count > MOST_ROWS]


def _matrices(weight: Weight, working_set: int) -> list[Tensor]:
    outs, ins = weight
    count = max(2, min(12, -(-working_set // (2 * outs * ins))))
    return [torch.randn(outs, ins, device="cuda", dtype=torch.bfloat16).mul_(ins**-0.5) for _ in range(count)]


def choices_of(tuned: Sequence[TunedProduct]) -> dict[Weight, tuple[Choice, ...]]:
    """As they are kept."""
    found: dict[Weight, tuple[Choice, ...]] = {}
    for each in tuned:
        before = found.get(each.weight, ())
        if each.settings or (before and before[-1].settings):  # neighbours that are all torch's are one row
            found[each.weight] = (*before, Choice(each.least, each.rows, each.settings or ()))
    return found


def render(tuned: Sequence[TunedProduct]) -> str:
    return table(COLUMNS, [_cells(each) for each in tuned if each.seconds])


def _cells(each: TunedProduct) -> tuple[Any, ...]:
    outs, ins = each.weight
    rate = 2 * outs * ins * each.rows / each.seconds
    return (f"{outs} x {ins}", each.rows, _name(each.settings), each.seconds * 1e6, rate / 1e12, each.torchs * 1e6)


def _name(settings: Settings | None) -> str:
    return "torch's" if settings is None else " ".join(map(str, settings))


def _best(weight: Weight, least: int, rows: int, matrices: Sequence[Tensor], *, few: bool) -> TunedProduct:
    outs, ins = weight
    products = Products(outs, ins, torch.bfloat16, torch.cuda.current_device())
    x = torch.randn(rows, ins, device="cuda", dtype=torch.bfloat16)
    y, operands = torch.empty(rows, outs, device="cuda", dtype=torch.bfloat16), Operands(rows, outs, ins, torch.bfloat16)
    want = F.linear(x, matrices[0])
    calls: dict[Settings | None, list[Callable[[], Any]]] = {None: [partial(torch.mm, x, each.t(), out=y) for each in matrices]}
    for settings, algorithm in products.offers(rows):
        if products.takes(algorithm, operands) and _right(products, algorithm, operands, x, matrices[0], want):
            calls[settings] = [partial(products.multiply, algorithm, operands, x, each, y, add=False) for each in matrices]
    seconds = _timed(calls) if few else held(calls)
    best = min(seconds, key=lambda settings: seconds[settings])
    chosen = best if seconds[best] * (LEAST_FEW_GAIN if few else LEAST_GAIN) < seconds[None] else None
    return TunedProduct(weight, least + 1 if few else least, rows, chosen, seconds[chosen], seconds[None])


def _right(products: Products, algorithm: Algorithm, operands: Operands, x: Tensor, weight: Tensor, want: Tensor) -> bool:
    y = torch.full_like(want, float("nan"))
    products.multiply(algorithm, operands, x, weight, y, add=False)
    return bool((y.float() - want.float()).norm() < 0.01 * want.float().norm())


def _timed(calls: dict[Settings | None, list[Callable[[], Any]]]) -> dict[Settings | None, float]:
    """Median seconds a call of each, the lower of two turns."""
    turns = [{name: median(cuda_time(each, FEW_SECONDS)) for name, each in calls.items()} for _ in range(ROUNDS)]
    return {name: min(each[name] for each in turns) for name in calls}


def held(calls: dict[Any, list[Callable[[], Any]]]) -> dict[Any, float]:
    """Mean seconds a call of each, over rounds in turn, on a card that has been at work for a while."""
    cuda_time(calls[None], WARM_SECONDS, rounds=1)
    rounds = [{name: cuda_time(each, SECONDS, rounds=1)[0] for name, each in calls.items()} for _ in range(ROUNDS)]
    return {name: sum(each[name] for each in rounds) / ROUNDS for name in calls}
