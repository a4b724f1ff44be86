"""``headrace bench truth``: how true a simulation is here. Prices are fitted to a run of load A, load B is measured twice and simulated.

What lives here: that order, and what is printed. What may not: loads (truth_loads.py), running them (truth_run.py), fitting and comparing
(planner/).
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from headrace.bench.calibration_report import report
from headrace.bench.jobs import config_for, flags_of, known_shapes
from headrace.bench.report import machine_facts, print_facts, say, table, write_json
from headrace.bench.truth_loads import Part, loads_for
from headrace.bench.truth_run import Ran, run_offline, run_served
from headrace.config import EngineConfig
from headrace.cost.calibrated import CalibratedSteps, save_calibrated
from headrace.cost.cost_model import CostModel
from headrace.cost.profile import DeviceProfile
from headrace.engine.resolve import resolve_config
from headrace.errors import ConfigError
from headrace.models import families
from headrace.models.source import find_model
from headrace.planner.against import COLUMNS, Compared, compare_figures
from headrace.planner.calibrate import calibrate
from headrace.planner.calibrate_front import fit_front
from headrace.planner.devices import Device, device_of, find_device, known_devices
from headrace.planner.placement import ELEMENT_BYTES
from headrace.planner.runs import RecordedRun, read_run
from headrace.planner.simulator import Load, simulate
from headrace.spec import DecoderSpec, kv_groups

ASKED = ("mean_step_ms", "output_throughput", "median_ttft_ms", "median_tpot_ms", "p99_ttft_ms", "p99_tpot_ms")  # figures the verdict is of
OPEN_SHARE = 0.5  # of what a closed loop reached: the rate of the open one
REPEATS = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help=f"folder, hub id, or a shape that comes with it ({', '.join(known_shapes())}); without it the demo model")
    parser.add_argument("--offline", action="store_true", help="an engine in this process instead of a server: no HTTP, and no front end to fit")
    parser.add_argument("--scale", type=float, default=1.0, help="times as many requests (default: 1)")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="leave all files there: traces, what clients saw, the calibration")
    parser.add_argument("--output-json", type=Path, metavar="FILE", help="write every figure, simulated and measured")
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
        """As simulate knows the device that a run was measured on; one that was never measured by the limits that the run knew."""
        from headrace.worker.host import available_memory

        facts, memory = run.facts, available_memory()
        names = [key for key, known in known_devices().items() if known.profile.identity.name == facts.device.name]
        try:
            return find_device("cpu" if facts.device.kind == "cpu" else names[0], threads=facts.device.threads, memory=None, free_memory=memory)
        except (ConfigError, IndexError):
            read = facts.read_bandwidth
            rates = {facts.dtype: facts.gemm_rate}
            profile = DeviceProfile(identity=facts.device, read_bandwidth=read, copy_bandwidth=read, gemm_rates=rates, source="estimated")
            return device_of(profile, memory, memory)


def run(args: argparse.Namespace, config: EngineConfig) -> int:
    """Exit status 1 when a figure that is asked for misses its bound."""
    with ExitStack() as stack:
        folder = args.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headrace-truth-")))
        folder.mkdir(parents=True, exist_ok=True)
        bench = _prepared(args, config, folder)
        print_facts(machine_facts(shape="prices fitted to A, B measured twice and simulated", model=str(args.model or "demo")))
        fitted, held = loads_for(bench.kind, args.scale)
        found, device, measured = _offline(bench, fitted, held) if args.offline else _served(bench, fitted, held)
        print("\n" + "\n".join(report(found)))
        results = {part.name: _compare(bench, device, part, runs) for part, runs in measured}
    return _show(args, found, results)


def _prepared(args: argparse.Namespace, config: EngineConfig, folder: Path) -> _Bench:
    from headrace.worker.settings import device_kind

    own = args.model is not None
    config = config_for(args.model, config) if own else config
    kind = device_kind(config.device.device)
    resolved, _ = resolve_config(config, kind, watched=not args.offline)
    spec = families.spec_from_config(find_model(replace(config.model, load_format="dummy") if own else config.model).config)
    return _Bench(args, resolved, flags_of(config, args.flags) if own else list(args.flags), spec, kind, folder)


Measured = list[tuple[Part, list[dict[str, Any]]]]


def _offline(bench: _Bench, fitted: Sequence[Part], held: Sequence[Part]) -> tuple[CalibratedSteps, Device, Measured]:
    say("A and B on an engine in this process")
    runs = run_offline(bench.config, {"a": fitted, **{f"b{repeat}": held for repeat in range(REPEATS)}}, bench.folder)
    found, device = _calibrate(bench, runs["a"], front=None)
    return found, device, [(part, [runs[f"b{repeat}"].figures(part.name) for repeat in range(REPEATS)]) for part in held]


def _served(bench: _Bench, fitted: Sequence[Part], held: Sequence[Part]) -> tuple[CalibratedSteps, Device, Measured]:
    say("A on a server")
    ran = run_served(bench.flags, fitted, bench.folder, "a")
    found, device = _calibrate(bench, ran, front=fitted[0].name)
    held = _with_rates(bench, device, held)
    runs = []
    for repeat in range(REPEATS):
        say(f"B on a server, {repeat + 1} of {REPEATS}")
        runs.append(run_served(bench.flags, held, bench.folder, f"b{repeat}"))
    return found, device, [(part, [each.figures(part.name) for each in runs]) for part in held]


def _calibrate(bench: _Bench, ran: Ran, *, front: str | None) -> tuple[CalibratedSteps, Device]:
    """``front``: the part whose requests came one by one, where there is a front end."""
    recorded = read_run(ran.trace)
    device = bench.device(recorded)
    assert bench.config.cache.block_size is not None, "resolved"
    size = ELEMENT_BYTES[recorded.facts.dtype]
    groups = kv_groups(bench.spec, bench.config.cache.block_size, size)
    found = calibrate([recorded], device, CostModel(bench.spec, groups, device.profile, weight_bytes=size, dtype=recorded.facts.dtype))
    if front is not None:
        found = fit_front(ran.files[front], found, recorded)
    save_calibrated(found, bench.folder / "calibration.json")
    return found, replace(device, calibrated=(found,))


def _with_rates(bench: _Bench, device: Device, held: Sequence[Part]) -> list[Part]:
    """Open loops at a rate that this device can serve, by the simulation."""
    closed = next(part for part in held if part.rate is None)
    reached = _simulated(bench, device, closed)["request_throughput"]
    return [part if part.rate is None else replace(part, rate=float(f"{OPEN_SHARE * reached:.3g}")) for part in held]


def _simulated(bench: _Bench, device: Device, part: Part) -> dict[str, Any]:
    load = Load(part.asked(), seed=part.seed, max_concurrency=part.room)
    return simulate(bench.spec, bench.config, device, load).figures


def _compare(bench: _Bench, device: Device, part: Part, runs: Sequence[Mapping[str, Any]]) -> list[Compared]:
    for each in runs:
        if each["failed"]:
            raise ConfigError(f"{each['failed']} requests of the part {part.name} failed, so there is nothing to hold a simulation against.")
    return compare_figures(_simulated(bench, device, part), runs)


def _show(args: argparse.Namespace, found: CalibratedSteps, results: Mapping[str, Sequence[Compared]]) -> int:
    missed = 0
    for name, compared in results.items():
        rows = [[*each.row()[:-1], each.row()[-1] if each.figure in ASKED else ""] for each in compared]
        print(f"\nB, {name}:\n{table(COLUMNS, rows)}")
        missed += sum(each.figure in ASKED and not each.holds for each in compared)
    asked = sum(each.figure in ASKED for compared in results.values() for each in compared)
    print(f"\n{asked - missed} of {asked} figures hold" + (f", {missed} MISSED" if missed else ""))
    if args.keep:
        print(f"files in {args.keep}; headrace simulate --calibration {args.keep / 'calibration.json'} takes these prices")
    if args.output_json:
        figures = {name: [_as_dict(each) for each in compared] for name, compared in results.items()}
        write_json(args.output_json, {"calibrated": str(found), "fitted_parameters": len(found.fitted), "figures": figures, "missed": missed})
    return 1 if missed else 0


def _as_dict(each: Compared) -> dict[str, Any]:
    return asdict(each) | {"error": each.error, "bound": each.bound, "asked": each.figure in ASKED, "holds": each.holds}
