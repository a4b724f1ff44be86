"""``python -m lab truth``: how true a simulation is here. Prices are fitted to a run of load A, load B is measured
twice and simulated.

One server (or engine) takes servings of A and runs of B in turn, so that what drifts about the machine meets both.
Prices are fitted to the steps of A alone. Prices that exist (``--prices``) are held against B in the same way; and what
was measured once is judged again, here, by any prices (``--again``).

What lives here: that order, and what is printed. What may not: loads (truth_loads.py), running them (truth_run.py), the
verdict (truth_judge.py), what is kept (truth_kept.py), fitting (planner/).
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from headrace.bench.arguments import output
from headrace.commands.simulate_calibrate import report
from headrace.config import EngineConfig
from headrace.cost.calibrated import SHIPPED, CalibratedSteps, find_calibrated, save_calibrated
from headrace.cost.cost_model import CostModel
from headrace.cost.profile import DeviceProfile, Limits
from headrace.engine.resolve import resolve_config
from headrace.errors import ConfigError
from headrace.models import families
from headrace.models.source import find_model
from headrace.observe.report import machine_facts, print_facts, say, write_json
from headrace.planner.against import VOID, status_of
from headrace.planner.calibrate import calibrate, fit_front
from headrace.planner.devices import Device, device_of, find_device, known_devices, with_calibration
from headrace.planner.pricing import priced
from headrace.planner.runs import RecordedRun
from headrace.spec import ELEMENT_BYTES, DecoderSpec, kv_groups
from lab.jobs import config_for, flags_of, known_shapes
from lab.truth_front import front_work
from lab.truth_judge import Judged, judge, simulated
from lab.truth_kept import Kept, Measured, keep, read_kept
from lab.truth_loads import REPEATS, ROWS, SERVINGS, Loads, Part, loads_for, repeated, settling, sized, suited
from lab.truth_routing import popularity_of, routed_work
from lab.truth_run import Runner, offline, served

SHIPPED_PRICES = "shipped"
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
    parser.add_argument(
        "--prices",
        metavar="FILE",
        help=f"hold B against these prices ({SHIPPED_PRICES}: those that come with Headrace), and fit none to A",
    )
    parser.add_argument(
        "--repeats",
        type=int,
        default=REPEATS,
        choices=range(SERVINGS + 1),
        help=f"runs of B (default: {REPEATS}; 0: prices are fitted alone)",
    )
    parser.add_argument("--measure-only", action="store_true", help="keep what was measured, and judge it later")
    parser.add_argument(
        "--again",
        type=Path,
        nargs="+",
        metavar="DIR",
        help="measure nothing: judge what --keep left there, by prices fitted to all of it or by --prices",
    )
    parser.add_argument("--output-json", type=output, metavar="FILE", help="write every figure, simulated and measured")
    parser.add_argument("flags", nargs="*", metavar="-- FLAG", help="flags of the engine, behind --")


@dataclass(frozen=True, slots=True)
class _Bench:
    """What stays the same from run to run. ``offline``: no front end. ``prices``: instead of fitted ones."""

    config: EngineConfig
    flags: list[str]
    spec: DecoderSpec
    kind: str
    folder: Path
    offline: bool
    prices: str | None = None

    @property
    def sparse(self) -> bool:
        return any(layer.moe for layer in self.spec.layers)

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


def run(args: argparse.Namespace, config: EngineConfig) -> int:
    """Exit status 1 when a figure that is asked for misses its bound."""
    if args.measure_only and not args.keep:
        raise ConfigError("--measure-only would leave nothing; give a folder with --keep.")
    with ExitStack() as stack:
        kept = args.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headrace-truth-")))
        taken = [_taken_again(args, config, folder) for folder in args.again or ()] or [_taken(args, config, kept)]
        if args.measure_only:
            return 0
        found, device = _calibrated(taken)
        save_calibrated(found, kept / "calibration.json")
        judged = [_judged(each, device, part) for each in taken for part in each.seen.held]
    return _show(args, found, judged, taken[0].seen.looks)


@dataclass(frozen=True, slots=True)
class _Taken:
    """One measurement of A and B."""

    bench: _Bench
    runner: Runner
    seen: Measured


def _judged(taken: _Taken, device: Device, part: Part) -> Judged:
    bench, seen = taken.bench, taken.seen
    popularity = seen.popularity.get(part.name, ())
    return judge(
        bench.spec, bench.config, device, part, seen.runs[part.name], front=not bench.offline, popularity=popularity
    )


def _taken(args: argparse.Namespace, config: EngineConfig, folder: Path) -> _Taken:
    from headrace.worker.settings import device_kind

    kind = device_kind(config.device.device)
    bench, long_steps = _prepared(args, config, folder, kind)
    loads = loads_for(kind, args.scale)
    if args.prices is not None:  # the first serving warms up
        loads = replace(loads, servings=(loads.servings[0], *((),) * (len(loads.servings) - 1)))
    if args.prices is not None or args.offline:  # of no use
        loads = loads.unstopped
    with offline(bench.config, folder) if args.offline else served(bench.flags, folder) as runner:
        seen = _measure(bench, loads, runner, args.repeats)
    kept = Kept(kind, bench.offline, long_steps, seen.held, seen.parts, seen.fronts, runner.spans, repeats=args.repeats)
    keep(folder, kept)
    if bench.sparse:
        seen.popularity = popularity_of(bench.config, _alike(loads, seen))
        keep(folder, replace(kept, popularity=seen.popularity))
    return _Taken(bench, runner, seen)


def _alike(loads: Loads, seen: Measured) -> list[Part]:
    """What random weights route to few experts, each by the name it is known by."""
    of_a = (replace(part, name=f"a{number}.{part.name}") for number, each in enumerate(loads.servings) for part in each)
    return [part for part in (*of_a, *seen.held, *ROWS) if part.routes_alike or part in ROWS]


def _taken_again(args: argparse.Namespace, config: EngineConfig, folder: Path) -> _Taken:
    kept, runner, seen = read_kept(folder)
    args.offline = kept.offline
    return _Taken(_prepared(args, config, folder, kept.kind, kept.long_steps)[0], runner, seen)


def _prepared(
    args: argparse.Namespace, config: EngineConfig, folder: Path, kind: str, long_steps: bool | None = None
) -> tuple[_Bench, bool]:
    """And whether its steps are long."""
    from headrace.worker.settings import takes_long_steps

    own = args.model is not None
    config = config_for(args.model, config) if own else config
    model = find_model(replace(config.model, load_format="dummy") if own else config.model).config
    if long_steps is None:
        long_steps = args.offline and takes_long_steps(kind, model)
    resolved, _ = resolve_config(config, kind, long_steps=long_steps)
    flags = flags_of(config, args.flags) if own else list(args.flags)
    bench = _Bench(resolved, flags, families.spec_from_config(model), kind, folder, args.offline, args.prices)
    return bench, long_steps


# --- measuring


def _measure(bench: _Bench, loads: Loads, runner: Runner, repeats: int = REPEATS) -> Measured:
    seen = Measured()
    runner.run(WARM, "warm")
    for number, serving in enumerate(loads.servings):
        say(f"A, {number + 1} of {len(loads.servings)}")
        _look(bench, seen)
        _serve(loads, serving, f"a{number}", runner, seen)
        if not number and repeats:
            seen.held = _sized(bench, loads, runner, seen)
            for part in settling(seen.held) if bench.kind == "cuda" else ():
                runner.run(part, f"s.{part.name}")
        if number < repeats:
            say(f"B, {number + 1} of {repeats}")
            _look(bench, seen)
            for part in repeated(seen.held, number):
                runs = [runner.run(each, name) for each, name in zip(part.each_time(), part.names(number), strict=True)]
                seen.runs.setdefault(part.name, []).append(runs)
    _look(bench, seen)
    return seen


def _serve(loads: Loads, serving: Sequence[Part], name: str, runner: Runner, seen: Measured) -> None:
    alone: float | None = None
    for part in serving:
        run = f"{name}.{part.name}"
        figures = runner.run(suited(part, alone) if loads.timed and alone else part, run)
        alone = figures["mean_e2el_ms"] / 1e3 if part.clients == 1 else alone
        seen.parts.append(run)
        if part.name in loads.fronts:
            seen.fronts.append(run)


def _look(bench: _Bench, seen: Measured) -> None:
    """A card's limits do not change from minute to minute, and a look would need its memory."""
    if bench.kind == "cpu":
        from headrace.worker.profile import limits_now

        seen.looks.append(limits_now())


def _sized(bench: _Bench, loads: Loads, runner: Runner, seen: Measured) -> list[Part]:
    """B by what this device can serve, as simulated with prices of the first serving."""
    _, device = _calibrated([_Taken(bench, runner, seen)])
    reached = {
        part.name: simulated(bench.spec, bench.config, device, part, lucks=1)["request_throughput"]
        for part in loads.held
        if part.rate is None
    }
    return sized(loads, reached)


def _calibrated(taken: Sequence[_Taken]) -> tuple[CalibratedSteps, Device]:
    """By given prices, or by those fitted to all of A so far; and the device with them."""
    bench, recorded = taken[0].bench, [each.runner.recorded(each.seen.parts) for each in taken]
    device = bench.device(recorded[0])
    if bench.prices is not None:
        return _given(bench, device, bench.prices)
    facts = recorded[0].facts
    assert bench.config.cache.block_size is not None, "resolved"
    size = ELEMENT_BYTES[facts.dtype]
    groups = kv_groups(bench.spec, bench.config.cache.block_size, size)

    def model_of(popularity: Sequence[float] = ()) -> CostModel:
        return CostModel(
            bench.spec, groups, device.profile, weight_bytes=size, dtype=facts.dtype, popularity=popularity
        )

    plain = model_of()
    works = [
        routed_work(each.runner.spans, {name: model_of(of) for name, of in each.seen.popularity.items()}, plain)
        for each in taken
    ]
    found = calibrate(recorded, device, plain, works)
    for each, run in zip(taken, recorded, strict=True):
        if not each.bench.offline:
            fronts, loads = (
                [each.runner.path(name) for name in names] for names in (each.seen.fronts, each.seen.parts)
            )
            found = fit_front(fronts, found, run)
            assert found.front is not None, "just fitted"
            found = replace(found, front=replace(found.front, work=front_work(loads)))
    return found, replace(device, calibrated=(found,))


def _given(bench: _Bench, device: Device, prices: str) -> tuple[CalibratedSteps, Device]:
    if prices == SHIPPED_PRICES:
        device = replace(device, calibrated=tuple(find_calibrated(device.profile.identity, (SHIPPED,))))
    else:
        device = with_calibration(device, Path(prices))
    found = priced(bench.spec, bench.config, device).pricing.calibrated
    if found is None:
        raise ConfigError(f"--prices {prices}: no prices are shipped for {device.name}; give a file, or leave it out.")
    return found, device


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
