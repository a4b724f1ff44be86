"""What ``headrace doctor`` says of batches: the batch advisor's short form, for the engine that stands, by the limits measured on its device.

What lives here: from an engine and a profile to those lines. What may not: the arithmetic (planner/advice.py), the words (simulate_reports.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from headrace.commands.simulate_reports import CONTEXT, of_prices, sentences
from headrace.config import EngineConfig
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from headrace.cost.profile import DeviceProfile
    from headrace.engine.executor import ExecutorInfo

UNMEASURED = (
    "Batches are not judged: this device was never measured. headrace doctor --profile does it in under a minute; "
    "headrace simulate --advise judges devices that are not here."
)
NO_MODEL = "Batches are not judged: this executor computes no model. Leave --executor out."


def examine_batch(config: EngineConfig, model: Mapping[str, Any], info: ExecutorInfo, profile: DeviceProfile | None) -> dict[str, Any]:
    """``config`` as it was asked for, ``model``: its config.json, ``info``: of the engine that was made of both. Why nothing can be said is a
    sentence, too."""
    if config.device.executor != "model":
        return {"said": [NO_MODEL]}
    if profile is None:
        return {"said": [UNMEASURED]}
    try:
        return _advice(config, model, info, profile)
    except ConfigError as error:
        return {"said": [f"Batches are not judged: {error.message}"]}


def _advice(config: EngineConfig, model: Mapping[str, Any], info: ExecutorInfo, profile: DeviceProfile) -> dict[str, Any]:
    from headrace.models import families
    from headrace.planner.advice import advise
    from headrace.planner.devices import device_of, with_calibrations
    from headrace.planner.priced import priced

    device = with_calibrations(device_of(profile, sum(info.memory.values()), 0))
    found, context = priced(families.spec_from_config(model), config, device), min(CONTEXT, info.max_model_len)
    advice = advise(found, context, info)
    said = [f"Steps that only decode, {context:,} tokens a sequence:", *sentences(advice), *of_prices(found, context)]
    return {"said": said, **asdict(advice), **found.pricing.facts(context)}
