"""Step records, histograms and their rendering."""

from __future__ import annotations

import json
from array import array

import pytest

from headrace.cost.cost_model import CostModel
from headrace.cost.profile import DeviceIdentity, DeviceProfile
from headrace.metrics import Histogram, StepRecorder, render_histogram, render_steps
from headrace.request import StepPlan, StepResult
from headrace.spec import DecoderSpec, LayerSpec, RopeSpec, kv_groups

NONE = array("i")


def plan(step_id: int, starts: list[int], counts: list[int]) -> StepPlan:
    rows = array("i", range(len(starts)))
    return StepPlan(step_id, NONE, (), NONE, NONE, NONE, NONE, NONE, NONE, NONE, rows, array("i", starts), array("i", counts), rows, rows)


@pytest.fixture
def cost_model() -> CostModel:
    spec = DecoderSpec(
        family="tiny", vocab_size=10, hidden_size=4, num_heads=2, num_kv_heads=1, head_dim=2, intermediate_size=6, layers=(LayerSpec(),),
        max_positions=64, rope=RopeSpec(theta=1e4, rotary_dim=2), attention_scale=1.0,
    )
    identity = DeviceIdentity(kind="cpu", name="test", threads=1)
    profile = DeviceProfile(identity=identity, read_bandwidth=1e3, copy_bandwidth=1e3, gemm_rates={"bfloat16": 1e6}, efficiency=0.5)
    return CostModel(spec, kv_groups(spec, 16, 2), profile, weight_bytes=2, dtype="bfloat16")


def test_a_step_is_recorded_beside_its_prediction(cost_model: CostModel) -> None:
    recorder = StepRecorder(cost_model)
    step = plan(7, [3, 0], [1, 4])
    cost = cost_model.estimate(step)
    recorder.on_step(step, StepResult(7, ((5,), (6,)), device_seconds=2.0), submitted=10.0, collected=19.0, host_seconds=0.25)
    (record,) = recorder.records
    assert (record.rows, record.tokens, record.sampled, record.failed) == (2, 5, 2, False)
    assert (record.bytes, record.floor_seconds, record.predicted_seconds) == (cost.bytes, cost.floor_seconds, cost.floor_seconds / 0.5)
    assert record.measured_seconds == 2.0  # the device's own time, not the wait for it
    assert record.fraction == pytest.approx(cost.floor_seconds / 2.0)


def test_without_a_device_time_the_way_from_submit_to_collect_counts() -> None:
    recorder = StepRecorder()
    recorder.on_step(plan(0, [0], [3]), StepResult(0, ((1,),)), 10.0, 10.5, 0.1)
    assert recorder.records[0].measured_seconds == 0.5
    assert recorder.records[0].fraction is None


def test_a_failed_step_counts_as_failed_and_says_nothing_about_the_limit(cost_model: CostModel) -> None:
    recorder = StepRecorder(cost_model)
    recorder.on_step(plan(0, [0], [3]), None, 1.0, 2.0, 0.1)
    summary = recorder.summary()
    assert (summary["steps"], summary["failed_steps"], summary["generated_tokens"]) == (1, 1, 0)
    assert recorder.fraction.count == 0


def test_memory_is_bounded_while_sums_go_on(cost_model: CostModel) -> None:
    recorder = StepRecorder(cost_model, capacity=4)
    for step_id in range(10):
        recorder.on_step(plan(step_id, [step_id], [1]), StepResult(step_id, ((1,),), device_seconds=1.0), 0.0, 1.0, 0.1)
    assert [record.step_id for record in recorder.records] == [6, 7, 8, 9]
    summary = recorder.summary()
    assert (summary["steps"], summary["tokens"], summary["generated_tokens"]) == (10, 10, 10)
    assert summary["roofline_fraction"] == pytest.approx(summary["floor_seconds"] / 10.0)
    json.dumps(summary)  # plain data: it crosses a socket


def test_histogram_bounds_are_inclusive_and_the_last_bucket_open() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        histogram.observe(value)
    assert histogram.counts == [2, 1, 1]
    assert (histogram.mean, histogram.quantile(0.5), histogram.quantile(0.75)) == (3.0, 1.0, 2.0)


def test_rendering_is_cumulative_text_of_constant_names() -> None:
    lines = render_histogram("x", {"bounds": [1.0, 2.0], "counts": [2, 1, 1], "sum": 12.0, "count": 4}, "help")
    assert lines[2:] == ['x_bucket{le="1.0"} 2', 'x_bucket{le="2.0"} 3', 'x_bucket{le="+Inf"} 4', "x_sum 12.0", "x_count 4"]


def test_steps_render_before_and_after_the_first_one(cost_model: CostModel) -> None:
    recorder = StepRecorder(cost_model)
    assert "headrace_steps_total 0" in render_steps(recorder.summary())
    recorder.on_step(plan(0, [0], [3]), StepResult(0, ((1,),), device_seconds=1.0), 0.0, 1.0, 0.1)
    text = render_steps(recorder.summary())
    assert "headrace_steps_total 1" in text and "headrace_step_roofline_fraction 0." in text and "headrace_step_predicted_seconds 0." in text
