"""``headrace simulate --calibrate``: prices fitted to measured steps, printed and kept; and which prices a simulation takes.

What lives here: those flags, and the way from runs to a file. What may not: fitting (planner/calibrate.py), simulating.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.config import EngineConfig
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from headrace.cost.cost_model import CostModel
    from headrace.planner.devices import Device
    from headrace.spec import DecoderSpec


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from headrace.bench.arguments import output

    prices = parser.add_argument_group("prices of steps")
    prices.add_argument(
        "--calibrate", type=Path, nargs="+", metavar="RUN", help="fit to the steps of a run (--trace FILE of any command), keep that, and end"
    )
    prices.add_argument("--front-of", type=Path, metavar="RUN.json", help="with --calibrate: the same run as bench serve saw it, for the front end")
    prices.add_argument("--output-calibration", type=output, metavar="FILE", help="keep the calibration there instead of beside the device's profile")
    prices.add_argument("--calibration", type=Path, metavar="FILE", help="simulate with this one, instead of the one found for device and model")
    prices.add_argument("--assumed-prices", action="store_true", help="simulate without any calibration")
    prices.add_argument("--no-front-end", action="store_true", help="requests go straight to the engine, as in LLM.generate")
    prices.add_argument(
        "--expert-skew", metavar="EXPONENT|FILE", help="how unevenly tokens pick experts: a Zipf exponent, or a JSON list of counts (default: even)"
    )


def popularity(args: argparse.Namespace, spec: DecoderSpec) -> tuple[float, ...]:
    """Raises ConfigError."""
    from headrace.cost.popularity import read_popularity, zipf

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
    """The device with the calibration that was asked for."""
    from headrace.planner.devices import with_calibration

    if args.assumed_prices:
        return replace(device, calibrated=())
    return device if args.calibration is None else with_calibration(device, args.calibration)


def run_calibration(args: argparse.Namespace, config: EngineConfig, device: Device, spec: DecoderSpec) -> int:
    from headrace.bench.calibration_report import report
    from headrace.cost.calibrated import calibrated_path, save_calibrated
    from headrace.planner.calibrate import calibrate
    from headrace.planner.calibrate_front import fit_front
    from headrace.planner.runs import read_run

    if len(set(args.calibrate)) < len(args.calibrate):
        raise ConfigError("--calibrate names a run twice; name each once.")
    runs = [read_run(path) for path in args.calibrate]
    found = calibrate(runs, device, _cost_model(args, config, device, spec, runs[0].facts.dtype))
    if args.front_of is not None:
        found = fit_front([args.front_of], found, runs[0])
    print("\n".join(report(found)))
    path = args.output_calibration or calibrated_path(found)
    save_calibrated(found, path)
    print(f"kept in {path}; headrace simulate --device {args.simulated} takes it for this model by itself")
    return 0


def _cost_model(args: argparse.Namespace, config: EngineConfig, device: Device, spec: DecoderSpec, dtype: str) -> CostModel:
    from headrace.cost.cost_model import CostModel
    from headrace.engine.resolve import resolve_config
    from headrace.planner.placement import ELEMENT_BYTES
    from headrace.spec import kv_groups

    config, _ = resolve_config(config, device.kind)
    assert config.cache.block_size is not None, "resolved"
    size = ELEMENT_BYTES[dtype]
    groups = kv_groups(spec, config.cache.block_size, size)
    return CostModel(spec, groups, device.profile, weight_bytes=size, dtype=dtype, popularity=popularity(args, spec))
