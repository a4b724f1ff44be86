"""``headrace bench ablate NAME|all``: measures what a technique is worth, with it on and off.

"Off" keeps the same kernels and gets its own best settings; the whole curve is shown, never only the best point.
Engines of both sides, each at its own best settings, answer the same loads.

What lives here: the command, that runner, what each figure is, showing results. What may not: anything about one
technique (techniques/).
"""

from __future__ import annotations

import argparse
import sys
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import mean, median
from typing import TYPE_CHECKING, Any, cast

from headrace.bench.arguments import declare
from headrace.bench.driver import Run, drive, greedy
from headrace.bench.sweep import Sweep
from headrace.config import EngineConfig
from headrace.errors import ConfigError
from headrace.observe.report import load_pyplot, machine_facts, plot_curves, print_facts, say, table, write_json
from headrace.planner.workload.conversations import Conversation, conversations_of, random_conversations
from headrace.planner.workload.load import Lengths, arriving, conversing, drawn
from headrace.planner.workload.statistics import Sample, summarise
from headrace.request import Request, StructuredOutputs
from headrace.techniques import TECHNIQUES, Technique, find_technique
from headrace.techniques.loads import Load, Settings

if TYPE_CHECKING:
    from headrace.engine.assembly import Engine

BESIDE_EACH_OTHER = 16 * 2**30  # bytes of KV for each of two engines on one GPU, unless the user says otherwise


def add_arguments(parser: argparse.ArgumentParser) -> None:
    declare(
        parser, "ablate.arguments", name={"help": f"a technique, or all: {', '.join(item.name for item in TECHNIQUES)}"}
    )


def run(args: argparse.Namespace, config: EngineConfig) -> int:
    device = _device(config)
    names = _possible(device) if args.name == "all" else [find_technique(args.name).name]
    check_device(names, device)
    if args.plot:
        load_pyplot()  # its absence is said before minutes are spent
    facts = _facts(config, quick=args.quick)
    print_facts(facts)

    def measured() -> Iterator[Result]:
        for name in names:
            for number, result in enumerate(measure(name, config, quick=args.quick, say=say)):
                print(f"\n{render(result)}")
                if args.plot:
                    _plot(result, _plot_path(args.plot, name, number, many=len(names) > 1), facts)
                yield result

    sweep = Sweep()
    results = sweep.take(measured())
    if args.output_json:
        write_json(args.output_json, {"facts": facts, "ablations": [asdict(result) for result in results]})
    return sweep.status()


def _device(config: EngineConfig) -> str:
    from headrace.worker.settings import device_kind

    return device_kind(config.device.device)


def _possible(device: str) -> list[str]:
    """All techniques that can be measured on this device; the others are reported by name."""
    for each in TECHNIQUES:
        if needed := each.lacks(device):
            print(f"{each.name}: missing, it needs a {needed}", file=sys.stderr)
    return [each.name for each in TECHNIQUES if not each.lacks(device)]


def check_device(names: Sequence[str], device: str) -> None:
    """Raises ConfigError for a technique whose switch does nothing on this device."""
    for name in names:
        if needed := find_technique(name).lacks(device):
            remedy = "where torch finds a CUDA device, without --device cpu" if needed == "GPU" else "with --device cpu"
            raise ConfigError(
                f"{name} needs a {needed}, and this engine would run on {device}, where its switch does nothing. Run it {remedy}."
            )


def measure(
    name: str, config: EngineConfig, *, quick: bool, say: Callable[[str], None] = lambda line: None
) -> list[Result]:
    """The results of one technique, one for each load."""
    device = _device(config)
    check_device([name], device)
    config = _beside_each_other(config) if device == "cuda" else config
    return Ablation(config, find_technique(name), quick=quick, say=say).measure()


def _beside_each_other(config: EngineConfig) -> EngineConfig:
    """Both sides run in one process at once: neither may take the whole card for its KV blocks."""
    if config.cache.kv_cache_memory is not None or config.cache.num_blocks is not None:
        return config
    return replace(config, cache=replace(config.cache, kv_cache_memory=BESIDE_EACH_OTHER))


def render(result: Result) -> str:
    """A table with both sides at every point, and the settings that each side used."""
    rows = []
    for off, on in result.pairs():
        row: list[Any] = [off[result.x]]
        for figure in result.figures:
            row += [off[figure.name], on[figure.name]]
        first = result.figures[0]
        row.append(gain(off[first.name], on[first.name], higher_is_better=first.higher_is_better))
        rows.append(row)
    columns = [result.x, *(f"{figure.name} {mode}" for figure in result.figures for mode in ("off", "on")), "gain"]
    lines = [f"{result.technique}: {result.title}", table(columns, rows)]
    lines += [f"{curve.mode}: {_settings(curve)}" for curve in result.curves]
    lines.append(f"chosen by the engine: {result.choices}")
    if result.repeats > 1:
        lines.append(f"medians of {result.repeats} repeats, both sides in turn")
    if result.compared:
        lines.append(f"answers with equal tokens on and off: {result.same} of {result.compared}")
    return "\n".join(lines)


def gain(off: float, on: float, *, higher_is_better: bool) -> float | None:
    """How many times better the first figure is with the technique; None if one side has no value."""
    better, worse = (on, off) if higher_is_better else (off, on)
    return better / worse if worse > 0 and better > 0 else None


def _settings(curve: Curve) -> str:
    chosen = ", ".join(f"{name}={value}" for name, value in curve.settings.items()) or "the engine's own choices"
    return f"{chosen} (best of {len(curve.tried)} settings)" if len(curve.tried) > 1 else chosen


def _facts(config: EngineConfig, *, quick: bool) -> dict[str, Any]:
    from headrace.bench.offline import limits_here

    model = config.model.model or "the bundled demo"
    note = "quick form: shows that it runs, not what it is worth" if quick else "full form"
    return machine_facts(str(limits_here(config.device.device)), model=f"{model}, {config.model.dtype}", form=note)


def _plot_path(path: Path, name: str, number: int, *, many: bool) -> Path:
    marks = ([name] if many else []) + ([str(number + 1)] if number else [])
    return path.with_name("-".join([path.stem, *marks]) + path.suffix) if marks else path


def _plot(result: Result, path: Path, facts: dict[str, Any]) -> None:
    panels = [
        {"x": result.x, "y": figure.name, "log": result.log, "curves": _curves(result, figure.name)}
        for figure in result.figures
    ]
    note = "; ".join(facts[name] for name in ("machine", "versions", "limits", "date"))
    plot_curves(path, f"{result.technique}: {result.title}", panels, note=note)


def _curves(result: Result, figure: str) -> dict[str, list[tuple[float, float]]]:
    return {
        f"{result.technique} {curve.mode}": [(point[result.x], point[figure]) for point in curve.points]
        for curve in result.curves
    }


MODES = ("off", "on")
Point = dict[str, float]  # one x and its figures
REPEATS = 3
MIN_SHARE = 0.9  # of the best throughput: no setting is the best that pays with more
OTHERS = 10**6  # seeds of runs that are not timed
TRIAL = 9998  # the seed of trials
THROUGHPUT = "output tokens/s"


@dataclass(frozen=True, slots=True)
class Outcome:
    """One point of one side: the run that counts; if a figure needs them, the seconds of the same requests with one
    token out, and what torch's allocator was asked for."""

    load: Load
    run: Run
    one_token: float | None = None
    allocated: Mapping[str, float] = field(default_factory=dict)

    @property
    def step(self) -> float:
        """Seconds per decode step, as in ``python -m lab table``."""
        return (self.run.seconds - (self.one_token or 0.0)) / (self.load.output - 1)

    @property
    def throughput(self) -> float:
        return self.run.output_tokens / self.run.seconds if self.one_token is None else self.load.count / self.step

    @property
    def idle(self) -> float:
        """The share of the time in which an executor with a fixed time per step had none."""
        return max(0.0, 1 - self.run.steps * float(self.load.engine["device.device_time"]) / self.run.seconds)

    def mean(self, name: str) -> float:
        return float(mean(getattr(sample, name) for sample in self.run.samples))

    def summed(self, name: str) -> int:
        return sum(getattr(sample, name) for sample in self.run.samples)

    def summary(self, name: str) -> float:
        return float(summarise(self.run.samples, self.run.seconds)[name])

    def figures(self) -> Point:
        return {name: float(FIGURES[name][0](self)) for name in self.load.figures}


# By name: how it is found, and whether more of it is better.
FIGURES: Mapping[str, tuple[Callable[[Outcome], float], bool]] = {
    THROUGHPUT: (lambda it: it.throughput, True),
    "prompt tokens/s": (lambda it: it.summed("prompt_tokens") / it.run.seconds, True),
    "requests/s": (lambda it: it.summary("request_throughput"), True),
    "steps/s": (lambda it: it.run.steps / it.run.seconds, True),
    "running at once": (lambda it: it.run.most_scheduled, True),
    "cached share": (lambda it: it.summed("cached_tokens") / it.summed("prompt_tokens"), True),
    "steps": (lambda it: it.run.steps, False),
    "seconds": (lambda it: it.run.seconds, False),
    "s in all": (lambda it: it.run.seconds, False),
    "total s": (lambda it: it.run.seconds, False),
    "ms/prompt": (lambda it: 1e3 * it.run.seconds / it.load.requests, False),
    "ms/step": (lambda it: 1e3 * it.run.seconds / it.run.steps, False),
    "ms/decode step": (lambda it: 1e3 * it.step, False),
    "ms to the first token": (lambda it: 1e3 * it.run.seconds, False),
    "idle share": (lambda it: it.idle, False),
    "last gap ms": (lambda it: 1e3 * it.run.samples[0].gaps[-1], False),
    "mean ttft ms": (lambda it: 1e3 * it.mean("ttft"), False),
    "p99 ttft s": (lambda it: it.summary("p99_ttft_ms") / 1e3, False),
    "mean e2e ms": (lambda it: 1e3 * it.mean("e2e"), False),
    "mean e2e s": (lambda it: it.mean("e2e"), False),
    "median itl ms": (lambda it: it.summary("median_itl_ms"), False),
    "p99 itl ms": (lambda it: it.summary("p99_itl_ms"), False),
    "MiB alive": (lambda it: it.allocated["bytes"] / 2**20, False),
    "requests": (lambda it: it.allocated["requests"], False),
}


@dataclass(frozen=True, slots=True)
class Figure:
    """A column: its name, and whether more is better."""

    name: str
    higher_is_better: bool


@dataclass(slots=True)
class Curve:
    """One side's points, at its own best settings. ``tried`` lists every setting that was compared, with its figures.

    ``points`` are medians over the repeats, ``lowest`` and ``highest`` their spread.
    """

    mode: str
    settings: dict[str, Any]
    tried: list[dict[str, Any]]
    points: list[Point] = field(default_factory=list)
    lowest: list[Point] = field(default_factory=list)
    highest: list[Point] = field(default_factory=list)

    def take(self, x: str, measured: Sequence[Point]) -> None:
        """Merges repeats of the same x into one point: the median of each figure, with the lowest and the highest."""
        by_x: dict[float, list[Point]] = {}
        for point in measured:
            by_x.setdefault(point[x], []).append(point)
        for points in by_x.values():
            for target, pick in ((self.points, median), (self.lowest, min), (self.highest, max)):
                target.append({name: float(pick([point[name] for point in points])) for name in points[0]})


@dataclass(slots=True)
class Result:
    """A technique's whole curve, both sides. ``same``: how many of the ``compared`` answers had equal tokens on both
    sides."""

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


class Ablation:
    """Makes engines from one config with one technique on or off, and remembers the answers of both sides.

    ``quick`` limits runs to seconds (a smoke test); otherwise they may take minutes.
    """

    def __init__(
        self, config: EngineConfig, technique: Technique, *, quick: bool, say: Callable[[str], None] = lambda line: None
    ) -> None:
        self._config = config
        self._technique = technique
        self._quick = quick
        self._repeats = 1 if quick else REPEATS
        self._say = say
        self._choices = ""
        self._answers: dict[str, dict[Any, tuple[int, ...]]] = {}

    def measure(self) -> list[Result]:
        """One result for each load."""
        return [self.under(load.shortened if self._quick else load) for load in self._technique.loads]

    def under(self, load: Load) -> Result:
        self._answers = {mode: {} for mode in MODES}
        load, curves = self._choose(load)
        self._fill(load, curves)
        off, on = self._answers["off"], self._answers["on"]
        shared = off.keys() & on.keys()
        same = sum(off[key] == on[key] for key in shared)
        figures, both = tuple(Figure(name, FIGURES[name][1]) for name in load.figures), list(curves.values())
        counts = self._repeats, self._choices, same, len(shared)
        return Result(self._technique.name, load.said, load.x, figures, both, *counts, load.log)

    def _choose(self, load: Load) -> tuple[Load, dict[str, Curve]]:
        """Each side at its best settings; for arrivals, ``values`` in requests per second."""
        arrivals = load.over == "rate"
        most = self._capacity(load, load.candidates("on")[-1]) if arrivals and load.trial else 1.0
        curves = {mode: self._best(mode, load, load.at(load.trial * most)) for mode in MODES}
        if not arrivals:
            return load, curves
        most = most if load.trial else self._capacity(load, curves["on"].settings)
        return replace(load, values=tuple(float(f"{most * share:.3g}") for share in load.values)), curves

    def _capacity(self, load: Load, settings: Settings) -> float:
        """Requests/s when all are available from the start, with the technique on, once step times are known."""
        with self.engine("on", load, settings) as engine:
            runs = [drive_load(engine, load, seed) for seed in (1, 2)]
            return load.requests / runs[-1].seconds

    def _best(self, mode: str, load: Load, trial: Load) -> Curve:
        """A single candidate needs no trial."""
        candidates = load.candidates(mode)
        if len(candidates) == 1:
            return Curve(mode, candidates[0], [])
        tried = []
        for candidate in candidates:
            with self.engine(mode, load, candidate) as engine:
                drive_load(engine, trial, TRIAL)  # an engine that prices its steps has met some of them
                tried.append({**candidate, **Outcome(trial, drive_load(engine, trial, TRIAL + 1)).figures()})
            self._say(f"{mode}: tried {shown(tried[-1])}")
        return Curve(mode, candidates[best(tried, load.pick)], tried)

    def _fill(self, load: Load, curves: Mapping[str, Curve]) -> None:
        """Both sides at every x, alternating, repeated; seeds differ between repeats and are the same on both sides."""
        measured: dict[str, list[Point]] = {mode: [] for mode in MODES}
        with ExitStack() as stack:
            engines = {mode: stack.enter_context(self.engine(mode, load, curves[mode].settings)) for mode in MODES}
            for number, value in enumerate(load.values):
                for repeat in range(self._repeats):
                    for mode in MODES:
                        untimed, seed = 0 if repeat else load.untimed, 1000 * number + repeat
                        measured[mode] += self._points(mode, engines[mode], load.at(value), seed, untimed)
                self._say("; ".join(f"{mode}: {shown(measured[mode][-1])}" for mode in MODES))
        for mode, curve in curves.items():
            curve.take(load.x, measured[mode])

    def _points(self, mode: str, engine: Engine, load: Load, seed: int, untimed: int) -> list[Point]:
        """Usually one point, at the load's x."""

        def run(seed: int, **change: Any) -> Run:
            asked = replace(load, **change)
            found = drive_load(engine, asked, seed)
            point = getattr(load, load.over), asked.output, seed
            self._answers[mode].update({(*point, *key): tokens for key, tokens in found.answers.items()})
            return found

        steps = "ms/decode step" in load.figures
        for number in range(untimed):  # what is compiled, captured or recorded at first use is not timed
            run(seed + OTHERS * (1 + number), **({"output": min(load.output, 16)} if steps else {}))
        one_token = run(seed + 10 * OTHERS, output=1).seconds if steps else None
        timed = [run(seed + OTHERS // 10 * number) for number in range(load.timed)]
        quickest = min(timed, key=lambda each: each.seconds)
        allocated = asked_for(lambda: run(seed + 11 * OTHERS)) if "MiB alive" in load.figures else {}
        if load.turns > 1:
            turns = enumerate(by_turn(quickest), start=1)
            return [{load.x: number, **Outcome(load, each).figures()} for number, each in turns]
        return [{load.x: getattr(load, load.over), **Outcome(load, quickest, one_token, allocated).figures()}]

    @contextmanager
    def engine(self, mode: str, load: Load, settings: Settings) -> Iterator[Engine]:
        """An engine with the technique ``mode`` and ``settings`` on top of the config; warmed up, and closed
        afterwards."""
        value = self._technique.off if mode == "off" else self._technique.on
        engine = create(with_values(self._config, {**load.engine, self._technique.switch: value, **settings}))
        self._choices = "; ".join(f"{each.name} {each.value}" for each in engine.info.decisions)
        try:
            engine.await_kernels()
            engine.prepare()
            drive(engine.core, random_conversations(2, Lengths(8, 3), vocab_size=engine.info.vocab_size, seed=2**31))
            yield engine
        finally:
            engine.close()


def create(config: EngineConfig) -> Engine:
    """In this process, or replicas in processes of their own."""
    if config.device.data_parallel_size > 1:
        from headrace.engine.replicated import create_replicated

        return cast("Engine", create_replicated(config))
    from headrace.engine.assembly import create_engine  # tokenizers

    return create_engine(config, with_tokenizer=False)


def drive_load(engine: Engine, load: Load, seed: int) -> Run:
    """Answers are stored by the conversations' own numbers, in whatever order they were requested."""
    conversations = draw(load, engine.info.vocab_size, seed)
    order = batch_order(engine, conversations) if load.batch_order else list(range(len(conversations)))
    run = drive(engine.core, [conversations[number] for number in order], max_concurrency=load.at_once)
    run.answers = {(order[place], turn): tokens for (place, turn), tokens in run.answers.items()}
    return run


def draw(load: Load, vocab_size: int, seed: int) -> list[Conversation]:
    lengths = Lengths(load.prompt, load.output, load.spread or load.percent / 100)
    if load.turns > 1:
        asked = conversing(load.count, load.turns, lengths, system=load.prefix, think=0.0, seed=seed)
    else:
        asked = drawn(load.requests, lengths, prefix=load.prefix, seed=seed)
    asked = arriving(asked, load.rate, seed=seed) if load.rate else asked
    conversations = conversations_of(asked, vocab_size=vocab_size, seed=seed)
    structured = StructuredOutputs(**load.structured) if load.structured else None
    own: dict[str, Any] = {"stop_after": load.stop_after, "structured": structured}
    return [replace(each, turns=tuple(replace(turn, **own) for turn in each.turns)) for each in conversations]


def batch_order(engine: Engine, conversations: Sequence[Conversation]) -> list[int]:
    """The order that the engine chooses for the requests of one offline call."""
    requests = [
        Request(request_id=number, prompt_token_ids=array("i", turn.new_ids), params=greedy(turn))
        for number, turn in enumerate(conversation.turns[0] for conversation in conversations)
    ]
    return [request.request_id for request in engine.core.batch_order(requests)]


def by_turn(run: Run) -> list[Run]:
    """At a given turn, every conversation's prompt has the same length."""
    by_length: dict[int, list[Sample]] = {}
    for sample in run.samples:
        by_length.setdefault(sample.prompt_tokens, []).append(sample)
    return [replace(run, samples=by_length[length]) for length in sorted(by_length)]


def asked_for(step: Callable[[], object]) -> dict[str, float]:
    """What torch's allocator is asked for while the block runs."""
    import torch

    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    alive, requests = torch.cuda.memory_allocated(), torch.cuda.memory_stats()["allocation.all.allocated"]
    step()
    torch.cuda.synchronize()
    grown = torch.cuda.max_memory_allocated() - alive
    return {"bytes": grown, "requests": torch.cuda.memory_stats()["allocation.all.allocated"] - requests}


def best(tried: Sequence[Mapping[str, float]], pick: str) -> int:
    """The best by the figure ``pick``, among the settings that do not lose throughput for it."""
    fastest = max(each.get(THROUGHPUT, 0.0) for each in tried)
    allowed = [index for index, each in enumerate(tried) if each.get(THROUGHPUT, 0.0) >= MIN_SHARE * fastest]
    sign = 1 if FIGURES[pick][1] else -1
    return max(allowed, key=lambda index: sign * tried[index][pick])


def shown(point: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in point.items())


def with_values(config: EngineConfig, values: Settings) -> EngineConfig:
    """The config with fields named by path ("scheduler.max_num_seqs") replaced."""
    for path, value in values.items():
        folder, _, name = path.partition(".")
        config = replace(config, **{folder: replace(getattr(config, folder), **{name: value})})
    return config
