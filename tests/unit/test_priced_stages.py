"""A pipeline's simulation: what its stages cost between them, what they wait for, and what is refused no more."""

from __future__ import annotations

import json
from array import array
from dataclasses import replace
from typing import Any

import pytest

from headrace.clock import VirtualClock
from headrace.config import DeviceConfig, EngineConfig, ModelConfig
from headrace.cost.links import Link
from headrace.models.families import spec_from_config
from headrace.planner.devices import GPU_HOST_SECONDS, known_devices
from headrace.planner.executor import ModelledExecutor
from headrace.planner.pricing import Priced, decode_load, priced
from headrace.planner.simulator import Load, simulate
from headrace.planner.step_time import StepPrice
from headrace.planner.workload.load import LoadRequest
from headrace.request import StepPlan
from lab.jobs import SHAPES

SPEC = spec_from_config(json.loads((SHAPES / "Llama-3.1-8B" / "config.json").read_text()))
H100 = known_devices()["h100"]


def laid_out(stages: int, ranks: int = 1, link: Link | None = H100.link, pooled: tuple[int, ...] = ()) -> Priced:
    device = DeviceConfig(pipeline_parallel_size=stages, tensor_parallel_size=ranks, pooled_layers=pooled)
    return priced(SPEC, EngineConfig(model=ModelConfig(max_model_len=4096), device=device), replace(H100, link=link))


@pytest.mark.parametrize("stages", [2, 4])
def test_stages_cost_together_what_one_device_does(stages: int) -> None:
    alone, found = laid_out(1), laid_out(stages, link=None)
    one = alone.step_time.of_load(decode_load(alone.groups, 8, 512), rows=8)
    each = [group.layers for _, (group,) in found.stages]
    assert sorted(layer for layers in each for layer in layers) == list(range(SPEC.num_layers))
    price = found.step_time.of_load(decode_load(found.groups, 8, 512), rows=8)
    assert len(price.stages) == stages and price.hop_seconds == 0.0
    assert sum(price.stages) == pytest.approx(price.seconds) == pytest.approx(one.seconds, rel=0.02)
    assert stages * price.bytes == pytest.approx(one.bytes, rel=0.02)
    assert stages * price.floor_seconds == pytest.approx(one.floor_seconds, rel=0.02)


def test_hidden_states_go_over_the_link() -> None:
    found = laid_out(2, link=Link(1e9, 1e-5))
    price = found.step_time.of_load(decode_load(found.groups, 8, 512), rows=8)
    assert price.hop_seconds == pytest.approx(1e-5 + 8 * SPEC.hidden_size * 2 / 1e9)
    assert price.seconds == pytest.approx(sum(price.stages) + price.hop_seconds)


def test_layers_in_another_stages_memory_come_over_the_link_and_make_room() -> None:
    """Four of stage 0's, which share one place there."""
    plain, pooled = laid_out(2), laid_out(2, pooled=(4, 0))
    (first, second), before = (
        each.step_time.of_load(decode_load(each.groups, 8, 512)).stages for each in (pooled, plain)
    )
    layer = 218e6 * 2  # bytes
    assert first == pytest.approx(4 * layer / 315e9, rel=0.01) and second == before[1]
    more, less = (each.placed().memory["weights"] for each in (plain, pooled))
    assert more - less == pytest.approx(3 * layer, rel=0.01)


def test_both_kinds_of_ranks_are_priced_together() -> None:
    apart, both = laid_out(2), laid_out(2, 2)
    seconds = [each.step_time.of_load(decode_load(each.groups, 8, 512), rows=8).seconds for each in (apart, both)]
    assert 0.5 * seconds[0] < seconds[1] < 0.75 * seconds[0]
    assert both.placed().kv_groups[0].num_blocks > apart.placed().kv_groups[0].num_blocks


def run(stages: int, requests: int) -> dict[str, Any]:
    config = EngineConfig(device=DeviceConfig(pipeline_parallel_size=stages))
    asked = [LoadRequest(100, 64, at=0.0)] * requests
    return simulate(SPEC, config, H100, Load(asked, front=False)).figures


def test_one_request_leaves_every_stage_but_one_idle_and_many_none() -> None:
    alone, one, many = run(1, 1), run(4, 1), run(4, 256)
    # its host waits for each token before it plans the next
    assert one["mean_tpot_ms"] == pytest.approx(alone["mean_tpot_ms"] + 1e3 * GPU_HOST_SECONDS, rel=0.02)
    assert one["device_busy_share"] == pytest.approx(0.25, abs=0.02)
    assert many["device_busy_share"] > 0.7
    assert many["duration"] < 0.8 * run(1, 256)["duration"]


def test_the_slowest_stage_is_what_steps_wait_for_and_a_token_for_all_of_them() -> None:
    found = laid_out(2).placed()
    price = StepPrice(2.75, 0.0, 0.0, 0.0, stages=(1.0, 1.25), hop_seconds=0.5)
    executor = ModelledExecutor(found, lambda plan: price, VirtualClock())

    def ends(steps: int, count: int) -> list[float]:
        one = {"rows": array("i", (0,)), "starts": array("i", (0,)), "counts": array("i", (count,))}
        return [executor.submit(StepPlan(step, **one)).ready_at for step in range(steps)]

    # chunks of a prompt follow at once: stage 1 is what they wait for
    assert ends(3, 2) == [2.75, 4.0, 5.25]
    # a token is sampled at 4, back at 4.5, and through both stages at 7.25; the next is back at 5.75
    assert ends(2, 1) == [7.25, 8.5]
