"""``python -m lab truth``: how true a simulation is here. Prices are fitted to a run of load A, load B is measured
twice and simulated.

One server (or engine) takes servings of A and runs of B in turn, so that what drifts about the machine meets both.
Prices are fitted to the steps of A alone.

What lives here: that order, and what is printed. What may not: loads (truth_loads.py), running them (truth_run.py), the
verdict (truth_judge.py), fitting (planner/).
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from headrace.bench.arguments import output
from headrace.commands.simulate_calibrate import report
from headrace.config import EngineConfig
from headrace.cost.calibrated import CalibratedSteps, save_calibrated
from headrace.cost.cost_model import CostModel
from headrace.cost.profile import DeviceProfile, Limits
from headrace.engine.resolve import resolve_config
from headrace.errors import ConfigError
from headrace.models import families
from headrace.models.source import find_model
from headrace.observe.report import machine_facts, print_facts, say, write_json
from headrace.planner.against import VOID, status_of
from headrace.planner.calibrate import calibrate, fit_front
from headrace.planner.devices import Device, device_of, find_device, known_devices
from headrace.planner.runs import RecordedRun
from headrace.spec import ELEMENT_BYTES, DecoderSpec, kv_groups
from lab.jobs import config_for, flags_of, known_shapes
from lab.truth_front import front_work
from lab.truth_judge import Judged, judge, simulated
from lab.truth_loads import REPEATS, Loads, Part, loads_for, repeated, sized, suited
from lab.truth_run import Figures, Runner, offline, served

WARM = Part("warm", 4, 40, 4, clients=2, seed=99)


def _folder(text: str) -> Path:
    """A folder to write into; made where there is none. Raises ArgumentTypeError."""
    path = Path(text)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text!r} cannot be a folder ({error.strerror}); give another") from error
    return path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        help=f"folder, hub id, or a shape that comes with it ({', '.join(known_shapes())}); without it the demo model",
    )
    parser.add_argument(
        "--offline",
        action="store_true",
        help="an engine in this process instead of a server: no HTTP, and no front end to fit",
    )
    parser.add_argument("--scale", type=float, default=1.0, help="times as many requests (default: 1)")
    parser.add_argument(
        "--keep",
        type=_folder,
        metavar="DIR",
        help="leave all files there: the trace, what clients saw, the calibration",
    )
    parser.add_argument("--output-json", type=output, metavar="FILE", help="write every figure, simulated and measured")
    parser.add_argument("flags", nargs="*", metavar="-- FLAG", help="flags of the engine, behind --")


@dataclass(frozen=True, slots=True)
class _Bench:
    """What stays the same from run to run."""

    args: argparse.Namespace
    config: EngineConfig
    flags: list[str]
    spec: DecoderSpec
    kind: str
    folder: Path

    def device(self, run: RecordedRun) -> Device:
        """As simulate knows the device that a run was measured on; one that was never measured by the limits that the
        run knew."""
        from headrace.worker.host import available_memory

        facts, memory = run.facts, available_memory()
        names = [key for key, known in known_devices().items() if known.profile.identity.name == facts.device.name]
        try:
            return find_device(
                "cpu" if facts.device.kind == "cpu" else names[0],
                threads=facts.device.threads,
                memory=None,
                free_memory=memory,
            )
        except (ConfigError, IndexError):
            read = facts.read_bandwidth
            rates = {facts.dtype: facts.gemm_rate}
            profile = DeviceProfile(
                identity=facts.device, read_bandwidth=read, copy_bandwidth=read, gemm_rates=rates, source="estimated"
            )
            return device_of(profile, memory, memory)


@dataclass(slots=True)
class _Measured:
    """What was seen so far. ``parts``: of A, by the names of their runs. ``looks``: the machine's limits, each time
    between two loads."""

    held: list[Part] = field(default_factory=list)
    parts: list[str] = field(default_factory=list)
    fronts: list[str] = field(default_factory=list)
    runs: dict[str, list[Figures]] = field(default_factory=dict)
    looks: list[Limits] = field(default_factory=list)


def run(args: argparse.Namespace, config: EngineConfig) -> int:
    """Exit status 1 when a figure that is asked for misses its bound."""
    with ExitStack() as stack:
        kept = args.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headrace-truth-")))
        bench = _prepared(args, config, kept)
        loads = loads_for(bench.kind, args.scale)
        with offline(bench.config, kept) if args.offline else served(bench.flags, kept) as runner:
            seen = _measure(bench, loads, runner)
        found, device = _calibrated(bench, runner, seen)
        save_calibrated(found, kept / "calibration.json")
        judged = [judge(bench.spec, bench.config, device, part, seen.runs[part.name]) for part in seen.held]
    return _show(args, found, judged, seen.looks)


def _prepared(args: argparse.Namespace, config: EngineConfig, folder: Path) -> _Bench:
    from headrace.worker.settings import device_kind, takes_long_steps

    own = args.model is not None
    config = config_for(args.model, config) if own else config
    kind = device_kind(config.device.device)
    model = find_model(replace(config.model, load_format="dummy") if own else config.model).config
    resolved, _ = resolve_config(config, kind, long_steps=args.offline and takes_long_steps(kind, model))
    spec = families.spec_from_config(model)
    return _Bench(args, resolved, flags_of(config, args.flags) if own else list(args.flags), spec, kind, folder)


# --- measuring


def _measure(bench: _Bench, loads: Loads, runner: Runner) -> _Measured:
    seen = _Measured()
    runner.run(WARM, "warm")
    for number, serving in enumerate(loads.servings):
        say(f"A, {number + 1} of {len(loads.servings)}")
        _look(bench, seen)
        _serve(loads, serving, f"a{number}", runner, seen)
        if not number:
            seen.held = _sized(bench, loads, runner, seen)
        if number < REPEATS:
            say(f"B, {number + 1} of {REPEATS}")
            _look(bench, seen)
            for part in repeated(seen.held, number):
                seen.runs.setdefault(part.name, []).append(runner.run(part, f"b{number}.{part.name}"))
    _look(bench, seen)
    return seen


def _serve(loads: Loads, serving: Sequence[Part], name: str, runner: Runner, seen: _Measured) -> None:
    alone: float | None = None
    for part in serving:
        run = f"{name}.{part.name}"
        figures = runner.run(suited(part, alone) if loads.timed and alone else part, run)
        alone = figures["mean_e2el_ms"] / 1e3 if part.clients == 1 else alone
        seen.parts.append(run)
        if part.name in loads.fronts:
            seen.fronts.append(run)


def _look(bench: _Bench, seen: _Measured) -> None:
    """A card's limits do not change from minute to minute, and a look would need its memory."""
    if bench.kind == "cpu":
        from headrace.worker.profile import limits_now

        seen.looks.append(limits_now())


def _sized(bench: _Bench, loads: Loads, runner: Runner, seen: _Measured) -> list[Part]:
    """B by what this device can serve, as simulated with prices of the first serving."""
    _, device = _calibrated(bench, runner, seen)
    closed = next(part for part in loads.held if part.rate is None)
    return sized(loads, simulated(bench.spec, bench.config, device, closed, lucks=1)["request_throughput"])


def _calibrated(bench: _Bench, runner: Runner, seen: _Measured) -> tuple[CalibratedSteps, Device]:
    """Fitted to all of A so far."""
    recorded = runner.recorded(seen.parts)
    device = bench.device(recorded)
    assert bench.config.cache.block_size is not None, "resolved"
    size = ELEMENT_BYTES[recorded.facts.dtype]
    groups = kv_groups(bench.spec, bench.config.cache.block_size, size)
    found = calibrate(
        [recorded], device, CostModel(bench.spec, groups, device.profile, weight_bytes=size, dtype=recorded.facts.dtype)
    )
    if not bench.args.offline:
        fronts, loads = ([runner.path(name) for name in names] for names in (seen.fronts, seen.parts))
        found = fit_front(fronts, found, recorded)
        assert found.front is not None, "just fitted"
        found = replace(found, front=replace(found.front, work=front_work(loads)))
    return found, replace(device, calibrated=(found,))


# --- showing


def _show(args: argparse.Namespace, found: CalibratedSteps, judged: Sequence[Judged], looks: Sequence[Limits]) -> int:
    limits = (
        _said(looks)
        if looks
        else f"read {found.bandwidth / 1e12:.3g} TB/s, {found.rate / 1e12:.4g} TFLOP/s, as the engine knew them"
    )
    print_facts(
        machine_facts(
            limits, shape="prices fitted to A, B measured twice and simulated", model=str(args.model or "demo")
        )
    )
    print("\n" + "\n".join(report(found)))
    for each in judged:
        print(f"\n{each}")
    asked = [figure for each in judged for figure in each.asked]
    holds, missed, void = (
        sum(figure.verdict == verdict for figure in asked) for verdict in ("holds", "MISSED", "void")
    )
    print(
        f"\n{holds} of {len(asked)} figures hold"
        + (f", {missed} MISSED" if missed else "")
        + (f", {void} void" if void else "")
    )
    if void:
        print(f"void: the two runs are more than {VOID:.0%} apart; measure again on a machine where nothing else runs.")
    if args.keep:
        print(
            f"files in {args.keep}; headrace simulate --calibration {args.keep / 'calibration.json'} takes these prices"
        )
    if args.output_json:
        figures = {each.part.name: each.as_dict() for each in judged}
        more = {"limits": limits, "looks": [asdict(look) for look in looks], "steadiness": str(found.steadiness)}
        counts = {"fitted_parameters": len(found.fitted), "missed": missed, "void": void}
        write_json(args.output_json, {"calibrated": str(found), **counts, **more, "figures": figures})
    return status_of(asked)


def _said(looks: Sequence[Limits]) -> str:
    """From the slowest of the looks to the quickest."""
    reads = sorted(each.read_bandwidth / 1e9 for each in looks)
    rates = sorted(each.gemm_rates["bfloat16"] / 1e9 for each in looks)
    found = f"read {reads[0]:.1f} to {reads[-1]:.1f} GB/s, {rates[0]:,.0f} to {rates[-1]:,.0f} GFLOP/s bfloat16"
    return f"{found}, in {len(looks)} looks between the loads"
