"""``headrace simulate --calibrate``: fits prices to measured steps, prints and saves them; and selects a simulation's
prices.

What lives here: those flags, the way from runs to a file, and the report: every fitted parameter with its standard
error, what was kept and why, how far it reaches. What may not: fitting (planner/calibrate.py), simulating.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from headrace.bench.arguments import declare
from headrace.config import EngineConfig
from headrace.cost.calibrated import CalibratedSteps, Parameter, calibrated_path, save_calibrated
from headrace.cost.popularity import read_popularity, zipf
from headrace.engine.resolve import resolve_config
from headrace.errors import ConfigError
from headrace.observe.report import table
from headrace.planner.devices import Device, with_calibration
from headrace.planner.pricing import cost_model_of
from headrace.spec import DecoderSpec


def add_arguments(parser: argparse.ArgumentParser) -> None:
    prices = parser.add_argument_group("prices of steps")
    declare(prices, "simulate_calibrate.arguments")


def popularity(args: argparse.Namespace, spec: DecoderSpec) -> tuple[float, ...]:
    """Raises ConfigError."""
    if args.expert_skew is None:
        return ()
    moe = next((layer.moe for layer in spec.layers if layer.moe), None)
    if moe is None:
        raise ConfigError("--expert-skew is given, but this model has no experts; leave it out.")
    try:
        exponent = float(args.expert_skew)
    except ValueError:
        return read_popularity(Path(args.expert_skew), moe.num_experts, moe.top_k)
    return zipf(moe.num_experts, exponent)


def with_prices(args: argparse.Namespace, device: Device) -> Device:
    """The device with the calibration that was requested."""
    if args.assumed_prices:
        return replace(device, calibrated=())
    return device if args.calibration is None else with_calibration(device, args.calibration)


def run_calibration(args: argparse.Namespace, config: EngineConfig, device: Device, spec: DecoderSpec) -> int:
    from headrace.planner.calibrate import (
        calibrate,  # msgspec
        fit_front,
    )
    from headrace.planner.runs import read_run

    if len(set(args.calibrate)) < len(args.calibrate):
        raise ConfigError("--calibrate names a run twice; name each once.")
    runs = [read_run(path) for path in args.calibrate]
    cost_model, _ = cost_model_of(
        spec, resolve_config(config, device.kind)[0], device, runs[0].facts.dtype, popularity(args, spec)
    )
    found = calibrate(runs, device, cost_model)
    if args.front_of is not None:
        found = fit_front([args.front_of], found, runs[0])
    print("\n".join(report(found)))
    path = args.output_calibration or calibrated_path(found)
    save_calibrated(found, path)
    print(f"saved in {path}; headrace simulate --device {args.simulated} uses it for this model automatically")
    return 0


COLUMNS = ("parameter", "fitted", "±", "of the limit", "steps")


def report(found: CalibratedSteps) -> Iterator[str]:
    """The report as lines."""
    fitted = found.fitted
    yield f"{found}, engine {found.version}"
    yield f"runs: {', '.join(f'{run.name} ({run.steps} steps, sha256 {run.sha256[:12]}…)' for run in found.runs)}"
    yield f"switches: {', '.join(f'{name}={value}' for name, value in found.switches.items()) or 'engine defaults'}"
    yield f"units: {found.bandwidth / 1e12:.4g} TB/s, {found.rate / 1e12:.4g} TFLOP/s {found.dtype}; a slowness is measured over ideal seconds"
    yield ""
    yield f"{len(fitted)} parameters were fitted:"
    yield table(COLUMNS, [_row(each) for each in fitted])
    yield ""
    kept: dict[str, list[str]] = {}
    for each in found.parameters:
        if each.note:
            kept.setdefault(each.note, []).append(each.name)
    yield f"{len(found.parameters) - len(fitted)} were not:"
    for note, names in kept.items():
        yield f"  {note}: {'; '.join(names)}"
    yield ""
    reach = found.covered
    yield f"it covers steps of up to {reach.tokens:,} tokens and {reach.sequences:,} sequences, and sequences of up to {reach.context:,} tokens"
    yield f"half of the fitted steps are within {found.median_error:.1%} of their price, nine of ten within {found.p90_error:.1%}"
    if found.steadiness is not None:
        yield f"they took {found.steadiness}; a simulation draws from that"
    if found.front is not None:
        prices = f"{found.front.request * 1e3:.2f} ms per request and {found.front.token * 1e6:.2f} µs per prompt token"
        yield f"a front end: {prices} (2 fitted parameters)"
        if (work := found.front.work) is not None:
            tokens = {
                "prompt token": work.prompt_token,
                "output token": work.output_token,
                "message": work.message,
                "step": work.step,
            }
            rest = ", ".join(f"{seconds * 1e6:.2f} µs per {name}" for name, seconds in tokens.items())
            yield f"of it its own work: {work.request * 1e3:.2f} ms per request, {rest} (5 fitted parameters)"


def _row(each: Parameter) -> list[str | float]:
    seconds = each.name.endswith("seconds")
    value, error = (f"{number * 1e6:.4g} µs" if seconds else f"{number:.4g}" for number in (each.value, each.error))
    share = f"{1.0 / each.value:.0%}" if each.value and not seconds else ""
    return [each.name.removesuffix(", seconds"), value, error if each.error else "at its minimum", share, each.steps]
