"""Prices of steps from steps that were measured: the slownesses of cost/prices.py, none negative, by the least sum of
|log(predicted / measured)|.

A kind of work takes the larger of two times, so which of the two decides is guessed, the rest is linear, and the guess
is made anew from what came out, until it stays (from several beginnings; the best end counts). Each round is a
least-squares problem in which a step weighs one over what was predicted and over its own error. So disturbed steps
weigh little, and a step that took twice as long as predicted is as wrong as one that took half.

Slownesses may be held to at least ``least``: on a device whose memory is far larger than its caches, nothing is quicker
than the limit, and what takes longer than that is told apart from what a step costs beside.

A parameter is fitted only where the steps tell it apart: its column, less what the columns before it explain, must
leave something. Otherwise it is taken to be that of a parameter beside it, or kept as it was assumed;
``Parameter.note`` says so.

What lives here: the fit. What may not: files of runs (runs.py), the model's arithmetic (cost/prices.py), cost models.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from headrace.cost.calibrated import Parameter
from headrace.cost.cost_model import StepLoad, Work
from headrace.cost.prices import RESTED, SETTLING, Slowness, StepPrices
from headrace.planner.least_squares import nnls

LEAST_STEPS = 20
TOLD_APART = 0.1  # of a column's length that no other column explains
LEAST_WEIGHTED = 0.01  # relative errors below are all alike
MOST_OFF = 10.0  # times: beyond, all are as wrong
_ROUNDS, _FLOPS_BEGINNINGS = 40, (1.0, 0.4, 2.5)


@dataclass(frozen=True, slots=True)
class Observed:
    """One step: its load, the bytes and FLOPs that this comes to, and the seconds it took. ``decode``: single tokens
    alone. ``pause``: so many seconds there was no work before it; ``since``: so many seconds ago a rest ended."""

    load: StepLoad
    work: Work
    decode: bool
    seconds: float
    pause: float = 0.0
    since: float = math.inf


@dataclass(frozen=True, slots=True)
class FittedSteps:
    """``median_error`` and ``p90_error``: of |predicted / measured − 1| over the fitted steps; ``bias``: Σ predicted /
    Σ measured − 1. ``ratios``: measured / predicted of each step."""

    prices: StepPrices
    parameters: tuple[Parameter, ...]
    median_error: float
    p90_error: float
    bias: float
    ratios: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class _Column:
    """One unknown, at least ``least``. ``ideal``: [sources, steps], what one unit of it adds to each step for each of
    the kinds of work. ``rival``: the column that a source must exceed to count. ``tied``: whose value it takes where it
    cannot be told apart."""

    name: str
    ideal: np.ndarray
    assumed: float
    rival: int | None = None
    tied: int | None = None
    least: float = 0.0


def fit_steps(
    observed: Sequence[Observed], assumed: StepPrices, *, bandwidth: float, rate: float, least: float = 0.0
) -> FittedSteps:
    """``assumed`` gives the classes, and what is kept where steps say nothing. The host's prices are left as they
    are."""
    made = _Columns(observed, assumed, bandwidth, rate, least)
    columns, counts = made.all(), made.counts
    measured = np.array([each.seconds for each in observed])
    ends = [_descend(columns, measured, counts, beginning) for beginning in _FLOPS_BEGINNINGS]
    values, parameters = min(ends, key=lambda end: float(_errors(_predicted(columns, end[0]), measured) @ counts))
    predicted = _predicted(columns, values)
    errors = np.abs(predicted / measured - 1.0)
    bias = float(predicted.sum() / measured.sum() - 1.0)
    middle, most = float(np.median(errors)), float(np.percentile(errors, 90))
    return FittedSteps(_prices(values, assumed), parameters, middle, most, bias, tuple((measured / predicted).tolist()))


# --- columns


class _Columns:
    """The unknowns in the order in which ``_prices`` reads them: pairs of (bytes, FLOPs) first, then what is linear
    alone (attention of prompts is: what it reads, it reads for many tokens)."""

    def __init__(
        self, observed: Sequence[Observed], assumed: StepPrices, bandwidth: float, rate: float, least: float
    ) -> None:
        self._observed, self._assumed, self._least = observed, assumed, least
        self._bandwidth, self._rate = bandwidth, rate
        classes = assumed.classes
        self._place = np.array(
            [classes.place(each.load.tokens, decode=each.decode, graphed=each.load.graphed) for each in observed]
        )
        self._gemm_place = np.array([classes.gemm_place(each.load, decode=each.decode) for each in observed])
        self._keys_place = np.array([classes.keys_place(each.load, decode=each.decode) for each in observed])
        self._head_place = np.array([classes.place(each.load.sampled, decode=True) for each in observed])
        self._columns: list[_Column] = []

    @property
    def counts(self) -> np.ndarray:
        """How much each step counts: classes weigh alike, however many steps they have."""
        found = np.bincount(self._place)
        shares: np.ndarray = len(self._place) / (np.count_nonzero(found) * found[self._place])
        return shares

    def all(self) -> list[_Column]:
        assumed, names = self._assumed, self._assumed.classes.names
        products, head, decode = self._amounts("products"), self._amounts("head"), self._amounts("decode")
        for index, name in enumerate(self._assumed.classes.gemm_names):
            sources = np.stack(
                [products * (self._gemm_place == index)[:, None], head * (self._head_place == index)[:, None]]
            )
            self._pair(f"products{name}", sources, assumed.products[index], 2 * (index - 1) if index else None)
        for index, name in enumerate(names):
            before = len(self._columns) - 2 if index else None
            self._pair(
                f"attention of single tokens{name}",
                (decode * (self._keys_place == index)[:, None])[None],
                assumed.decode[index],
                before,
            )
        self._pair("experts", self._amounts("experts")[None], assumed.experts)
        self._columns.append(
            _Column(
                "attention of prompts, FLOPs",
                self._amounts("prompts")[None, :, 1],
                assumed.prompts.flops,
                least=self._least,
            )
        )
        for index, name in enumerate(names):
            self._add(f"a step{name}, seconds", self._place == index, assumed.fixed[index])
        traffic = [each.work.others + each.work.activations for each in self._observed]
        self._add("norms, embedding and activations, bytes", np.array(traffic) / self._bandwidth, assumed.others)
        self._add("a sampled row, seconds", np.array([each.load.sampled for each in self._observed]), assumed.sampled)
        pauses = np.array([each.pause for each in self._observed])
        self._add("a step after a short pause, seconds", (pauses > 0.0) & (pauses <= RESTED), assumed.woken)
        self._add(f"a step after a pause of more than {RESTED * 1e3:g} ms, seconds", pauses > RESTED, assumed.rested)
        since = np.array([each.since for each in self._observed])
        self._add(
            f"one within {SETTLING * 1e3:g} ms after that, seconds",
            (pauses == 0.0) & (since <= SETTLING),
            assumed.settling,
        )
        shared = np.array([any(each.load.saved) for each in self._observed])
        self._add("a step whose sequences share keys, seconds", shared, assumed.shared)
        return self._columns

    def _amounts(self, name: str) -> np.ndarray:
        """[steps, 2]: ideal seconds of bytes and of FLOPs."""
        amounts = np.array([getattr(each.work, name) for each in self._observed], dtype=np.float64)
        scaled: np.ndarray = amounts / np.array([self._bandwidth, self._rate])
        return scaled

    def _pair(self, name: str, sources: np.ndarray, was: Slowness, tied: int | None = None) -> None:
        """``sources``: [sources, steps, 2]."""
        at = len(self._columns)
        self._columns.append(_Column(f"{name}, bytes", sources[:, :, 0], was.bytes, at + 1, tied, self._least))
        self._columns.append(
            _Column(f"{name}, FLOPs", sources[:, :, 1], was.flops, at, None if tied is None else tied + 1, self._least)
        )

    def _add(self, name: str, ideal: np.ndarray, was: float) -> None:
        self._columns.append(_Column(name, ideal.astype(np.float64)[None], was))


def _prices(values: np.ndarray, assumed: StepPrices) -> StepPrices:
    classes = len(assumed.classes.names)
    numbers = [float(each) for each in values]
    pairs = [Slowness(*numbers[index : index + 2]) for index in range(0, 2 * (2 * classes + 1), 2)]
    prompts, *rest = numbers[2 * len(pairs) :]
    return replace(
        assumed, products=tuple(pairs[:classes]), decode=tuple(pairs[classes : 2 * classes]), experts=pairs[-1], prompts=Slowness(0.0, prompts),
        fixed=tuple(rest[:classes]), others=rest[classes], activations=rest[classes], sampled=rest[classes + 1],
        woken=rest[classes + 2], rested=rest[classes + 3], settling=rest[classes + 4], shared=rest[classes + 5],
    )  # fmt: skip


# --- the fit


def _descend(
    columns: Sequence[_Column], measured: np.ndarray, counts: np.ndarray, beginning: float
) -> tuple[np.ndarray, tuple[Parameter, ...]]:
    """``beginning``: by what the assumed prices of FLOPs are multiplied at first."""
    values = np.array([each.assumed * (beginning if each.name.endswith("FLOPs") else 1.0) for each in columns])
    weights = np.sqrt(counts) / measured
    best: tuple[float, np.ndarray, tuple[Parameter, ...]] | None = None
    for _ in range(_ROUNDS):
        before = values
        values, parameters = _solve(columns, _deciding(columns, values), measured, weights)
        predicted = _predicted(columns, values)
        errors = _errors(predicted, measured)
        if best is None or errors @ counts < best[0]:
            best = float(errors @ counts), values, parameters
        unit = np.clip(predicted, measured / MOST_OFF, measured * MOST_OFF)  # the derivative of |log| is ±1 / predicted
        weights = np.sqrt(counts / np.maximum(np.abs(measured / unit - 1.0), LEAST_WEIGHTED)) / unit
        if np.allclose(before, values, rtol=1e-6, atol=0.0):
            break
    assert best is not None
    return best[1], best[2]


def _deciding(columns: Sequence[_Column], values: np.ndarray) -> np.ndarray:
    """[steps, columns]: what each column adds where it decides; nothing where its rival takes longer."""
    decided = []
    for index, each in enumerate(columns):
        counts = each.ideal
        if each.rival is not None:
            mine, other = values[index] * each.ideal, values[each.rival] * columns[each.rival].ideal
            counts = np.where(mine >= other if index < each.rival else mine > other, each.ideal, 0.0)
        decided.append(counts.sum(axis=0))
    return np.stack(decided, axis=1)


def _solve(
    columns: Sequence[_Column], design: np.ndarray, measured: np.ndarray, weights: np.ndarray
) -> tuple[np.ndarray, tuple[Parameter, ...]]:
    weighted = design * weights[:, None]
    fitted, notes = _told_apart(columns, weighted)
    target, joined = measured.copy(), weighted.copy()
    values = np.array([each.assumed for each in columns])
    for index, each in enumerate(columns):
        if index in fitted:
            continue
        if each.tied in fitted:
            assert each.tied is not None
            joined[:, each.tied] += weighted[:, index]
        else:
            target = target - values[index] * design[:, index]
    least = np.array([columns[index].least for index in fitted])
    values[fitted] = least + nnls(joined[:, fitted], target * weights - joined[:, fitted] @ least)
    for index, each in enumerate(columns):
        if index not in fitted and each.tied in fitted:
            values[index] = values[each.tied]
    spread = _standard_errors(joined[:, fitted], values[fitted], least, target * weights)
    errors = dict(zip(fitted, spread, strict=True))
    steps = (design > 0).sum(axis=0)
    named = (
        Parameter(each.name, float(values[index]), errors.get(index, 0.0), int(steps[index]), notes.get(index, ""))
        for index, each in enumerate(columns)
    )
    return values, tuple(named)


def _told_apart(columns: Sequence[_Column], weighted: np.ndarray) -> tuple[list[int], dict[int, str]]:
    """Columns that the ones before leave something of, and of the others why they are not fitted."""
    fitted: list[int] = []
    notes: dict[int, str] = {}
    basis = np.zeros((weighted.shape[0], 0))
    for index in range(len(columns)):
        column = weighted[:, index]
        length = float(np.linalg.norm(column))
        left = column - basis @ (basis.T @ column)
        left = left - basis @ (basis.T @ left)  # twice is enough
        if length > 0 and float(np.linalg.norm(left)) > TOLD_APART * length:
            basis = np.column_stack([basis, left / np.linalg.norm(left)])
            fitted.append(index)
        else:
            notes[index] = "no step was decided by it" if not length else "cannot be told apart by these steps"
    for index, why in notes.items():
        tied = columns[index].tied
        notes[index] = (
            f"{why}; taken to be that of {columns[tied].name}"
            if tied is not None and tied in fitted
            else f"{why}; kept as assumed"
        )
    return fitted, notes


def _standard_errors(design: np.ndarray, values: np.ndarray, least: np.ndarray, target: np.ndarray) -> list[float]:
    """Of the columns that are above their least; a column that was pushed to it has none."""
    used = values > least
    left = target - design @ values
    freedom = max(1, len(target) - int(used.sum()))
    errors = np.zeros(len(values))
    if used.any():
        inverse = np.linalg.pinv(design[:, used].T @ design[:, used])
        errors[used] = np.sqrt(np.maximum(np.diag(inverse), 0.0) * float(left @ left) / freedom)
    return [float(each) for each in errors]


def _predicted(columns: Sequence[_Column], values: np.ndarray) -> np.ndarray:
    total: np.ndarray = (_deciding(columns, values) * values).sum(axis=1)
    return total


def _errors(predicted: np.ndarray, measured: np.ndarray) -> np.ndarray:
    """|log(predicted / measured)|, up to that of MOST_OFF."""
    found: np.ndarray = np.abs(np.log(np.clip(predicted / measured, 1.0 / MOST_OFF, MOST_OFF)))
    return found
