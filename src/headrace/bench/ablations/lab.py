"""What every ablation shares: engines with a technique on or off, the search for a side's own best settings, curves.

What lives here: Lab, Curve and Result. What may not: anything about one technique.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from headrace.bench.driver import Run, drive
from headrace.bench.workload import Dialogue, Lengths, random_dialogues
from headrace.config import EngineConfig
from headrace.engine.assembly import Engine, create_engine
from headrace.engine.core import EngineCore
from headrace.techniques import Technique

MODES = ("off", "on")
Settings = Mapping[str, Any]  # config paths → values, such as {"scheduler.max_num_seqs": 8}
Point = dict[str, float]  # one x and its figures
Measure = Callable[[str, Engine, Any, int], list[Point]]  # (mode, engine, x, seed) → points; usually one, at that x
REPEATS = 3


@dataclass(frozen=True, slots=True)
class Figure:
    """A column: its name, and whether more of it is better."""

    name: str
    higher_is_better: bool


@dataclass(slots=True)
class Curve:
    """One side's points, at its own best settings. ``tried`` lists every setting that was compared, with its score.

    ``points`` are medians over the repeats, ``lowest`` and ``highest`` their spread.
    """

    mode: str
    settings: dict[str, Any]
    tried: list[dict[str, Any]]
    points: list[Point] = field(default_factory=list)
    lowest: list[Point] = field(default_factory=list)
    highest: list[Point] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Side:
    """What a side runs with, and what it was chosen from."""

    settings: dict[str, Any] = field(default_factory=dict)
    tried: list[dict[str, Any]] = field(default_factory=list)


@dataclass(slots=True)
class Result:
    """A technique's whole curve, both sides. ``same``/``compared``: answers with equal tokens on both sides, of how many."""

    technique: str
    title: str
    x: str
    figures: tuple[Figure, ...]
    curves: list[Curve]
    repeats: int
    choices: str  # what the engine chose by itself, kernels included
    same: int = 0
    compared: int = 0
    log: str = ""  # axes to draw logarithmically

    def pairs(self) -> Iterator[tuple[Point, Point]]:
        """(off, on) points with equal x."""
        off, on = ({point[self.x]: point for point in curve.points} for curve in self.curves)
        return ((off[x], on[x]) for x in off if x in on)


class Lab:
    """Makes engines from one config with one technique on or off, and remembers the answers of both sides.

    ``quick`` asks for a run of seconds (a smoke test), otherwise minutes are allowed.
    """

    def __init__(self, config: EngineConfig, technique: Technique, *, quick: bool, say: Callable[[str], None] = lambda line: None) -> None:
        self.config = config
        self.technique = technique
        self.quick = quick
        self.repeats = 1 if quick else REPEATS
        self.say = say
        self.choices = ""
        self._answers: dict[str, dict[Any, tuple[int, ...]]] = {mode: {} for mode in MODES}

    @contextmanager
    def engine(self, mode: str, settings: Settings | None = None) -> Iterator[Engine]:
        """An engine with the technique ``mode`` and ``settings`` on top of the config; warmed up, closed afterwards."""
        value = self.technique.off if mode == "off" else self.technique.on
        engine = create_engine(with_values(self.config, {self.technique.switch: value, **(settings or {})}), with_tokenizer=False)
        self.choices = "; ".join(f"{each.name} {each.value}" for each in engine.info.decisions)
        try:
            engine.await_kernels()
            engine.prepare()
            drive(engine.core, random_dialogues(2, Lengths(8, 3), vocab_size=engine.info.vocab_size, seed=2**31))
            yield engine
        finally:
            engine.close()

    def best(self, mode: str, candidates: Sequence[Settings], score: Callable[[Engine], float]) -> Side:
        """The candidate with the highest score, and all that were tried. A single candidate needs no trial."""
        if len(candidates) == 1:
            return Side(dict(candidates[0]))
        tried = []
        for candidate in candidates:
            with self.engine(mode, candidate) as engine:
                tried.append({**candidate, "score": score(engine)})
            self.say(f"{mode}: tried {shown(tried[-1])}")
        best = max(range(len(tried)), key=lambda index: tried[index]["score"])
        return Side(dict(candidates[best]), tried)

    def curves(self, x: str, values: Sequence[Any], measure: Measure, sides: Mapping[str, Side] | None = None) -> list[Curve]:
        """Both sides at every x, in turn, repeated; seeds differ from repeat to repeat and are the same on both sides."""
        sides = sides or {mode: Side() for mode in MODES}
        measured: dict[str, list[Point]] = {mode: [] for mode in MODES}
        with ExitStack() as stack:
            engines = {mode: stack.enter_context(self.engine(mode, sides[mode].settings)) for mode in MODES}
            for number, value in enumerate(values):
                for repeat in range(self.repeats):
                    for mode in MODES:
                        measured[mode] += measure(mode, engines[mode], value, 1000 * number + repeat)
                self.say("; ".join(f"{mode}: {shown(measured[mode][-1])}" for mode in MODES))
        return [_curve(mode, sides[mode], x, measured[mode]) for mode in MODES]

    def run(self, mode: str, point: Any, core: EngineCore, dialogues: Sequence[Dialogue], *, max_concurrency: int | None = None) -> Run:
        """Drives the core; answers are kept under (point, dialogue, turn) for the comparison of both sides."""
        done = drive(core, dialogues, max_concurrency=max_concurrency)
        self.keep(mode, point, done.answers)
        return done

    def keep(self, mode: str, point: Any, answers: Mapping[tuple[int, int], tuple[int, ...]]) -> None:
        """Answers of one side for the comparison, by (dialogue, turn)."""
        self._answers[mode].update({(point, *key): tokens for key, tokens in answers.items()})

    def result(self, title: str, x: str, figures: Sequence[Figure], curves: list[Curve], *, log: str = "") -> Result:
        """Curves with the comparison of all answers since the last result."""
        off, on = self._answers["off"], self._answers["on"]
        shared = off.keys() & on.keys()
        same = sum(off[key] == on[key] for key in shared)
        self._answers = {mode: {} for mode in MODES}
        return Result(self.technique.name, title, x, tuple(figures), curves, self.repeats, self.choices, same, len(shared), log)


def shown(point: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in point.items())


def _curve(mode: str, side: Side, x: str, measured: Sequence[Point]) -> Curve:
    """Repeats of the same x become one point: the median of each figure, with lowest and highest beside it."""
    by_x: dict[float, list[Point]] = {}
    for point in measured:
        by_x.setdefault(point[x], []).append(point)
    curve = Curve(mode, side.settings, side.tried)
    for points in by_x.values():
        for target, pick in ((curve.points, median), (curve.lowest, min), (curve.highest, max)):
            target.append({name: float(pick([point[name] for point in points])) for name in points[0]})
    return curve


def with_values(config: EngineConfig, values: Settings) -> EngineConfig:
    """The config with fields named by path ("scheduler.max_num_seqs") replaced."""
    for path, value in values.items():
        folder, _, name = path.partition(".")
        config = replace(config, **{folder: replace(getattr(config, folder), **{name: value})})
    return config
