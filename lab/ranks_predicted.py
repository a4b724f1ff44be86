"""What ``headrace simulate`` says of the table's rows, for the layouts of ``python -m lab ranks``.

What lives here: rows as a load of the simulator, and their figures made of its runs. What may not: measuring, prices
(planner/).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import mean

from headrace.config import EngineConfig
from headrace.engine.resolve import resolve_config
from headrace.models import families
from headrace.models.source import find_model
from headrace.observe.report import say
from headrace.planner.devices import Device, known_devices, with_calibrations
from headrace.planner.simulator import Load, simulate
from headrace.planner.workload.load import LoadRequest
from headrace.spec import DecoderSpec
from lab.table_rows import Row, requests_of, scaled, select_rows

LUCKS = 16  # simulations of a row of few steps: one draw of how disturbed a step is would decide it


def predicted(
    config: EngineConfig,
    rows: Sequence[str],
    scale: float,
    device: str,
    popularity: Mapping[str, Sequence[float]] | None = None,
) -> dict[str, float]:
    """By row, in its unit; none for a device that is not known by its name. ``popularity``: of experts, of rows whose
    random weights choose few."""
    from headrace.worker.settings import takes_long_steps

    found = next((each for key, each in known_devices().items() if key in device.lower()), None)
    if found is None:
        return {}
    try:
        source = find_model(config.model)
        long_steps = takes_long_steps(found.kind, source.config, found.memory)
        config = resolve_config(config, found.kind, long_steps=long_steps)[0]
        of = families.spec_from_config(source.config), config, with_calibrations(found)
        known = popularity or {}
        return {
            row.name: _figure(scaled(row, scale), *of, known.get(name, ()))
            for name in rows
            for row in select_rows([name])
        }
    except Exception as error:  # minutes of measuring do not end with it
        say(f"not predicted: {getattr(error, 'message', None) or repr(error)}")
        return {}


def _figure(
    row: Row, spec: DecoderSpec, config: EngineConfig, device: Device, popularity: Sequence[float] = ()
) -> float:
    """As TableBench makes it of two runs, or of one."""

    def seconds(*, one_token: bool = False) -> float:
        asked = requests_of(row, spec.vocab_size, 0, one_token=one_token)
        lengths = (
            (len(prompt["prompt_token_ids"]), params.max_tokens or 1)
            for prompt, params in zip(asked.prompts, asked.params, strict=True)
        )
        pieces = (0,) if row.prefix else ()
        load = [LoadRequest(prompt, output, pieces=pieces, piece=row.prefix) for prompt, output in lengths]
        load = [replace(each, at=0.0) for each in load]
        loads = [
            Load(load, front=False, luck=luck, popularity=popularity)
            for luck in range(LUCKS if row.group == "prefill" else 1)
        ]
        return mean(float(simulate(spec, config, device, each).figures["duration"]) for each in loads)

    if row.group == "decode":
        return 1e3 * (seconds() - seconds(one_token=True)) / (row.output[0] - 1)
    return seconds() * (1e3 if row.unit == "ms" else 1.0)
