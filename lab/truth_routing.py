"""How unevenly the tokens of a load choose experts, for ``python -m lab truth`` of a sparse model.

Random weights route the tokens of one prompt, prompts that begin alike, and all that follows them, to the same few
experts; trained weights do not. That is a property of the load, as lengths are: it is counted, not timed, and both the
fit and a simulation are told it.

What lives here: counting, in an engine of its own that launches its kernels one by one. What may not: what experts cost
(cost/).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from headrace.bench.driver import drive
from headrace.config import EngineConfig
from headrace.cost.cost_model import CostModel, Work
from headrace.cost.popularity import touched_experts
from headrace.planner.calibrate import WorkOf
from headrace.planner.runs import RecordedStep
from headrace.spec import MoESpec
from lab.truth_loads import Part

_SALT, _ROUNDS = 104_729, 30
_LEAST = 1e-2  # the next expert's share of the one before: nobody else is chosen


def popularity_of(config: EngineConfig, parts: Sequence[Part]) -> dict[str, list[float]]:
    """By part, how often experts are chosen."""
    from headrace.engine.llm import LLM  # the engine, and torch with it
    from headrace.worker.routing import Routing

    eager = replace(config.device, enforce_eager=True, prompt_graphs=False, last_layer_pruning=False)
    with LLM.from_config(replace(config, device=eager)) as llm:
        executor: Any = llm.engine.core.executor
        moe = next(layer.moe for layer in executor.decoder.spec.layers if layer.moe is not None)
        routing, found = Routing(executor.decoder), {}
        for part in parts:
            drive(llm.engine.core, part.conversations(_SALT, llm.info.vocab_size), max_concurrency=part.room)
            layers = [
                [step.numpy() for step in steps if (len(step) <= part.count) == bool(part.prefix)]
                for _, steps in routing.take_steps()
            ]  # behind a prefix, of decode steps; else of prompts
            found[part.name] = as_touched(moe, layers)
    return found


def routed_work(spans: Mapping[str, range], models: Mapping[str, CostModel], plain: CostModel) -> WorkOf:
    """What a step amounts to by the model of its part, where there is one."""
    routed = [(spans[name], model) for name, model in models.items() if name in spans]

    def work(step: RecordedStep) -> Work:
        return next((model for span, model in routed if step.step_id in span), plain).work(step.load)

    return work


def as_touched(moe: MoESpec, layers: Sequence[Sequence[np.ndarray]]) -> list[float]:
    """Each expert so much less popular than the one before that a decode step touches as many as it did. (What tokens
    of one step choose is more alike than what those of several do, so counts over all would say too many.) ``layers``:
    choices [rows, top_k] by layer and step."""
    steps = [step for layer in layers for step in layer if len(step)]
    touched = float(np.mean([len(np.unique(step)) for step in steps]))
    rows, times = np.unique([len(step) for step in steps], return_counts=True)

    def mean_of(popularity: list[float]) -> float:
        each = [touched_experts(moe.num_experts, moe.top_k, int(count), popularity) for count in rows]
        return float(np.average(each, weights=times))

    low, high = _LEAST, 1.0
    for _ in range(_ROUNDS):
        middle = (low + high) / 2
        low, high = (low, middle) if mean_of(_falling(moe, middle)) > touched else (middle, high)
    return _falling(moe, high)


def _falling(moe: MoESpec, ratio: float) -> list[float]:
    return [ratio**index for index in range(moe.num_experts)]
