"""``headrace bench ablate NAME|all``: what a technique is worth, measured with it on and off.

"Off" keeps the same kernels and gets its own best settings; the whole curve is shown, never the best point.

What lives here: running ablations and showing them. What may not: what is measured (ablations/, one file a measurement).
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from headrace.bench.arguments import output, picture
from headrace.bench.report import load_pyplot, machine_facts, plot_curves, print_facts, say, table, write_json
from headrace.bench.sweep import Sweep
from headrace.config import EngineConfig
from headrace.errors import ConfigError
from headrace.techniques import TECHNIQUES, find_technique

BESIDE_EACH_OTHER = 16 * 2**30  # bytes of KV for each of two engines on one GPU, unless the user says otherwise


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help=f"a technique, or all: {', '.join(item.name for item in TECHNIQUES)}")
    parser.add_argument("--quick", action="store_true", help="seconds instead of minutes: shows that it runs, not what it is worth")
    parser.add_argument("--output-json", type=output, metavar="FILE", help="write every curve as JSON")
    parser.add_argument("--plot", type=picture, metavar="FILE.png", help="draw every curve (several techniques: the name is added before the ending)")


def run(args: argparse.Namespace, config: EngineConfig) -> int:
    device = _device(config)
    names = _possible(device) if args.name == "all" else [find_technique(args.name).name]
    check_device(names, device)
    if args.plot:
        load_pyplot()  # its absence is said before minutes are spent
    facts = _facts(config, quick=args.quick)
    print_facts(facts)

    def measured() -> Iterator[Any]:
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
    """All techniques that can be measured on this device; the others are named."""
    for each in TECHNIQUES:
        if needed := each.lacks(device):
            print(f"{each.name}: missing, it needs a {needed}", file=sys.stderr)
    return [each.name for each in TECHNIQUES if not each.lacks(device)]


def check_device(names: Sequence[str], device: str) -> None:
    """Raises ConfigError for a technique whose switch does nothing on this device."""
    for name in names:
        if needed := find_technique(name).lacks(device):
            remedy = "where torch finds a CUDA device, without --device cpu" if needed == "GPU" else "with --device cpu"
            raise ConfigError(f"{name} needs a {needed}, and this engine would run on {device}, where its switch does nothing. Run it {remedy}.")


def measure(name: str, config: EngineConfig, *, quick: bool, say: Callable[[str], None] = lambda line: None) -> list[Any]:
    """The results (``ablations.lab.Result``) of one technique: one, or one for each workload."""
    from headrace.bench.ablations.lab import Lab  # the engine, and torch with it

    device = _device(config)
    check_device([name], device)
    technique = find_technique(name)
    module = importlib.import_module(f"headrace.bench.ablations.{technique.ablation or technique.name}")
    config = _beside_each_other(config) if device == "cuda" else config
    measured = module.measure(Lab(config, technique, quick=quick, say=say))
    return measured if isinstance(measured, list) else [measured]


def _beside_each_other(config: EngineConfig) -> EngineConfig:
    """Both sides stand in one process at once: neither may take the whole card for its KV blocks."""
    if config.cache.kv_cache_memory is not None or config.cache.num_blocks is not None:
        return config
    return replace(config, cache=replace(config.cache, kv_cache_memory=BESIDE_EACH_OTHER))


def render(result: Any) -> str:
    """A table with both sides at every point, and the settings each side was given."""
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
    """How many times better the first figure is with the technique; None where one side shows nothing."""
    better, worse = (on, off) if higher_is_better else (off, on)
    return better / worse if worse > 0 and better > 0 else None


def _settings(curve: Any) -> str:
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


def _plot(result: Any, path: Path, facts: dict[str, Any]) -> None:
    panels = [{"x": result.x, "y": figure.name, "log": result.log, "curves": _curves(result, figure.name)} for figure in result.figures]
    note = "; ".join(facts[name] for name in ("machine", "versions", "limits", "date"))
    plot_curves(path, f"{result.technique}: {result.title}", panels, note=note)


def _curves(result: Any, figure: str) -> dict[str, list[tuple[float, float]]]:
    return {f"{result.technique} {curve.mode}": [(point[result.x], point[figure]) for point in curve.points] for curve in result.curves}
