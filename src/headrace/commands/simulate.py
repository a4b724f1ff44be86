"""``headrace simulate``: the engine's figures for a device that need not be present, on virtual time.

What lives here: flags to a device, which of them go together, and printing. What may not: the load (simulate_load.py),
curves (simulate_curve.py), modelling (planner/).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from headrace.bench.arguments import check_together, declare
from headrace.bench.load_flags import add_figure_flags
from headrace.commands import simulate_calibrate, simulate_curve, simulate_load, simulate_reports
from headrace.config import EngineConfig, ServerConfig
from headrace.cost.cards import MEETING_SECONDS
from headrace.cost.links import Link
from headrace.errors import ConfigError
from headrace.flags import add_config_flags, add_model_argument, engine_config, server_config
from headrace.models import families
from headrace.models.draft_source import find_draft
from headrace.models.source import ModelSource, find_model
from headrace.observe.report import load_pyplot, machine_facts, print_facts, print_figures, table, write_json
from headrace.planner.against import COLUMNS, Compared, check_unseen, compare, read_samples, status_of
from headrace.planner.curve import Trial, check_rates
from headrace.planner.devices import Device, find_device
from headrace.planner.simulator import DraftOn, Load, Report, simulate, who_drafts
from headrace.planner.workload.statistics import failure_reasons
from headrace.spec import DecoderSpec
from headrace.worker.host import available_memory, physical_cores

DEVICES = "h200, h100, b200, a100, l40s, rtx4090, cpu (this machine's, measured) or a profile file (*.json)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    add_config_flags(parser, EngineConfig, ServerConfig)
    parser.conflict_handler = "resolve"  # --device and --trace mean a simulation's here
    where = parser.add_argument_group("device")
    size, device = simulate_reports.SIZE, {"help": f"required: {DEVICES}"}
    declare(where, "simulate.device", device=device, device_memory=size, link_bandwidth=size)
    simulate_calibrate.add_arguments(parser)
    simulate_load.add_arguments(parser)
    shown = parser.add_argument_group("figures")
    add_figure_flags(shown, plotted=", as bench serve does; with --against, of both runs")
    declare(shown, "simulate.figures")
    simulate_curve.add_arguments(parser)
    simulate_reports.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Exit status 1 when every request failed."""
    check_together(args, "simulate")
    simulate_load.check_numbers(args)
    if args.sweep_rate or args.compare:
        return simulate_curve.run_curve(args, _trials)
    if args.plot:
        load_pyplot()
    config, server = engine_config(args), server_config(args)
    source = _source(config)
    spec, device = families.spec_from_config(source.config), _device(args, config)
    if simulate_reports.asked(args):
        return simulate_reports.run_reports(args, config, device, spec)
    if args.calibrate:
        return simulate_calibrate.run_calibration(args, config, device, spec)
    load = _load(args, config, server, spec, device, args.request_rate)
    begin = time.perf_counter()
    report = simulate(spec, config, device, load)
    facts = _facts(args, source, device, report, time.perf_counter() - begin)
    check_unseen(args.against or [], report.pricing.calibrated)
    compared = compare(report.figures, args.against) if args.against else []
    _print(facts, report, compared)
    _write(args, facts, report, compared)
    return status_of(compared) if report.figures["completed"] else 1


def _trials(name: str, args: argparse.Namespace) -> list[Trial]:
    """One configuration at each rate."""
    check_rates(args.sweep_rate or [])
    config, server = engine_config(args), server_config(args)
    spec, device = families.spec_from_config(_source(config).config), _device(args, config)
    rates = sorted(args.sweep_rate) if args.sweep_rate else [args.request_rate]
    return [Trial(name, rate, spec, config, device, _load(args, config, server, spec, device, rate)) for rate in rates]


def _load(
    args: argparse.Namespace,
    config: EngineConfig,
    server: ServerConfig,
    spec: DecoderSpec,
    device: Device,
    rate: float | None,
) -> Load:
    load = simulate_load.load_of(args, config, server, rate)
    return replace(
        load,
        draft=_draft(args, config, device),
        popularity=simulate_calibrate.popularity(args, spec),
        front=not args.no_front_end,
    )


def _print(facts: Mapping[str, Any], report: Report, compared: Sequence[Compared]) -> None:
    print_facts(facts)
    print()
    print_figures(report.figures)
    for reason, count in failure_reasons(report.samples).items():
        print(f"failed: {count} x {reason}")
    if compared:
        print(f"\n{table(COLUMNS, [each.row() for each in compared])}")
    for each in report.facts["extrapolated"]:
        print(f"extrapolated: {each}")


def _write(args: argparse.Namespace, facts: Mapping[str, Any], report: Report, compared: Sequence[Compared]) -> None:
    if args.output_json:
        errors = {f"error_of_{each.figure}": each.error for each in compared}
        requests = [asdict(sample) for sample in report.samples]
        write_json(
            args.output_json, {"facts": facts, "prices": report.facts, **report.figures, **errors, "requests": requests}
        )
    if args.plot:
        measured = {f"measured ({path.stem})": read_samples(path) for path in args.against or ()}
        from headrace.bench.serve import plot_distributions  # and an HTTP client

        plot_distributions(args.plot, facts, {"simulated": report.samples, **measured})


def _source(config: EngineConfig) -> ModelSource:
    """The model's description, without looking for its weights."""
    return find_model(replace(config.model, model=_folder(config.model.model), load_format="dummy"))


def _folder(model: str | None) -> str | None:
    """A config.json may be named directly."""
    return str(Path(model).parent) if model is not None and Path(model).name == "config.json" else model


def _device(args: argparse.Namespace, config: EngineConfig) -> Device:
    threads = config.device.threads or physical_cores()[0]
    found = find_device(args.simulated, threads=threads, memory=args.device_memory, free_memory=available_memory())
    if args.host_link is not None:
        if args.host_link < 1:
            raise ConfigError(f"--host-link is {args.host_link}; give bytes a second, at least 1.")
        found = replace(found, host_link=args.host_link)
    return simulate_calibrate.with_prices(args, _linked(args, config, found))


def _draft(args: argparse.Namespace, config: EngineConfig, device: Device) -> DraftOn | None:
    """``device``: the target's. None: there are no drafts, or of a model that is not named."""
    settings, own = who_drafts(config, apart=args.draft_device is not None), None
    if settings is None:
        return None
    if args.draft_device is not None:
        threads = config.device.threads or physical_cores()[0]
        own = find_device(args.draft_device, threads=threads, memory=None, free_memory=available_memory())
    model, chip = replace(config.model, load_format="dummy"), (own or device).chip
    source = find_draft(model, str(_folder(settings.model)), settings.quantization, chip and chip[0])[0]
    return DraftOn(families.spec_from_config(source.config), own)


def _linked(args: argparse.Namespace, config: EngineConfig, device: Device) -> Device:
    """With the link that ranks have. Raises ConfigError where it is unknown, or there are no ranks."""
    ranks, asked = config.device.num_ranks, args.link_bandwidth is not None or args.link_latency is not None
    if asked and ranks == 1:
        raise ConfigError(
            "--link-bandwidth and --link-latency are of ranks; give --tensor-parallel-size or another number of them, too, or leave them out."
        )
    if ranks == 1:
        return device
    if device.link is None and args.link_bandwidth is None:
        raise ConfigError(
            f"The link between {ranks} times {device.name} is unknown; give it with --link-bandwidth, like 300GB."
        )
    known = device.link or Link(args.link_bandwidth, MEETING_SECONDS)
    latency = known.latency if args.link_latency is None else args.link_latency * 1e-6
    return replace(device, link=Link(args.link_bandwidth or known.bandwidth, latency))


def _facts(
    args: argparse.Namespace, source: ModelSource, device: Device, report: Report, seconds: float
) -> dict[str, Any]:
    blocks = " + ".join(f"{group.num_blocks} blocks of {group.spec.block_size}" for group in report.info.kv_groups)
    chosen = ", ".join(f"{each.name} {each.value}" for each in report.decisions)
    return machine_facts(
        str(device),
        prices=_prices(report),
        shape=simulate_load.shape(args, len(report.samples)),
        server=f"simulated on {device.name}, model {source.name}",
        engine=f"{chosen}; KV {blocks}",
        took=f"{seconds:.1f} s of this machine for {report.figures['duration']:.1f} s",
    )


def _prices(report: Report) -> str:
    facts = report.facts
    fitted = f" ({facts['fitted_parameters']} fitted parameters)" if facts["fitted_parameters"] else ""
    return f"{facts['prices']}{fitted}{'; EXTRAPOLATED, see below' if facts['extrapolated'] else ''}"
