"""Step records, histograms and their rendering."""

from __future__ import annotations

import json
from array import array
from dataclasses import replace

import pytest

from headrace.cost.cost_model import CostModel
from headrace.cost.profile import DeviceIdentity, DeviceProfile
from headrace.observe.metrics import DeviceTimeline, Histogram, StepRecorder, StepTimes
from headrace.request import StepPlan, StepResult
from headrace.server.exposition import Lines, _buckets
from headrace.spec import LayerSpec, kv_groups
from tests.support.board import steps_page
from tests.support.specs import TINY


def plan(step_id: int, starts: list[int], counts: list[int]) -> StepPlan:
    rows = array("i", range(len(starts)))
    return StepPlan(
        step_id, rows=rows, starts=array("i", starts), counts=array("i", counts), sample_work=rows, sample_rows=rows
    )


def times(submitted: float, collected: float, host_seconds: float = 0.1, *, continuous: bool = True) -> StepTimes:
    return StepTimes(
        submitted - 0.01, submitted, submitted, submitted, collected, collected + 0.01, host_seconds, continuous
    )


@pytest.fixture
def cost_model() -> CostModel:
    spec = replace(TINY, layers=(LayerSpec(),))
    identity = DeviceIdentity(kind="cpu", name="test", threads=1)
    profile = DeviceProfile(
        identity=identity, read_bandwidth=1e3, copy_bandwidth=1e3, gemm_rates={"bfloat16": 1e6}, efficiency=0.5
    )
    return CostModel(spec, kv_groups(spec, 16, 2), profile, weight_bytes=2, dtype="bfloat16")


def test_a_step_is_recorded_beside_its_prediction(cost_model: CostModel) -> None:
    recorder = StepRecorder(cost_model)
    step = plan(7, [3, 0], [1, 4])
    cost = cost_model.estimate(step)
    recorder.on_step(step, StepResult(7, ((5,), (6,)), device_seconds=2.0), times(10.0, 19.0, 0.25))
    (record,) = recorder.records
    assert (record.rows, record.tokens, record.sampled, record.failed) == (2, 5, 2, False)
    assert (record.bytes, record.floor_seconds, record.predicted_seconds) == (
        cost.bytes,
        cost.floor_seconds,
        cost.floor_seconds / 0.5,
    )
    assert record.measured_seconds == 2.0  # the device's own time, not the wait for it
    assert record.fraction == pytest.approx(cost.floor_seconds / 2.0)


def test_without_a_device_time_the_way_from_submit_to_collect_counts() -> None:
    recorder = StepRecorder()
    recorder.on_step(plan(0, [0], [3]), StepResult(0, ((1,),)), times(10.0, 10.5))
    assert recorder.records[0].measured_seconds == 0.5
    assert recorder.records[0].fraction is None


def test_both_floors_are_kept(cost_model: CostModel) -> None:
    step = plan(0, [3, 0], [1, 4])
    cost, record = (
        cost_model.estimate(step),
        StepRecorder(cost_model).on_step(step, StepResult(0, ((1,), (2,)), device_seconds=2.0), times(0.0, 2.0)),
    )
    assert (record.floor_seconds, record.overlapped_floor_seconds) == (
        cost.floor_seconds,
        cost.overlapped_floor_seconds,
    )


def test_the_device_is_placed_in_time_by_its_own_clock() -> None:
    """Two steps queued behind each other, and a pause that only the device's clock shows."""
    timeline = DeviceTimeline()
    assert timeline.place(times(10.0, 12.5, continuous=False), 2.0, 0.0) == (10.0, 12.0, 0.0)
    assert timeline.place(times(10.5, 14.5), 2.0, 0.0) == (12.0, 14.0, 0.0)
    assert timeline.place(times(13.0, 17.0), 2.0, 0.25) == (14.25, 16.25, 0.25)


def test_a_device_without_a_clock_starts_when_it_is_told_and_free() -> None:
    timeline = DeviceTimeline()
    timeline.place(times(10.0, 12.0), 2.0, None)
    assert timeline.place(times(11.0, 14.0), 2.0, None) == (12.0, 14.0, 0.0)  # queued
    assert timeline.place(times(15.0, 17.0), 2.0, None) == (15.0, 17.0, 1.0)  # it waited
    assert timeline.place(times(20.0, 22.0, continuous=False), 2.0, None) == (20.0, 22.0, 0.0)  # nobody wanted anything


def test_a_step_ends_before_it_is_collected() -> None:
    timeline = DeviceTimeline()
    timeline.place(times(10.0, 12.0), 1.0, 0.0)
    begin, end, _ = timeline.place(times(11.0, 12.5), 1.0, 0.75)  # the two clocks disagree a little
    assert (begin, end) == (11.5, 12.5)


def test_idle_and_host_time_are_summed(cost_model: CostModel) -> None:
    recorder = StepRecorder(cost_model)
    for step_id, idle in enumerate((0.0, 0.5, 0.5)):
        result = StepResult(step_id, ((1,),), device_seconds=1.5, idle_seconds=idle)
        recorder.on_step(plan(step_id, [3], [1]), result, times(2.0 * step_id, 2.0 * step_id + 2))
    summary = recorder.summary()
    assert summary["idle_seconds"] == 1.0 and summary["idle_share"] == pytest.approx(1.0 / 5.5)
    assert summary["host_seconds"] == pytest.approx(0.3) and recorder.host_seconds.count == 3
    text = steps_page(summary)
    for line in (
        "headrace_step_idle_seconds_total 1.0",
        "headrace_device_idle_share 0.18",
        "headrace_step_host_seconds_count 3",
    ):
        assert line in text


def test_a_failed_step_counts_as_failed_and_says_nothing_about_the_limit(cost_model: CostModel) -> None:
    recorder = StepRecorder(cost_model)
    recorder.on_step(plan(0, [0], [3]), None, times(1.0, 2.0))
    summary = recorder.summary()
    assert (summary["steps"], summary["failed_steps"], summary["generated_tokens"]) == (1, 1, 0)
    assert recorder.fraction.count == 0


def test_memory_is_bounded_while_sums_go_on(cost_model: CostModel) -> None:
    recorder = StepRecorder(cost_model, capacity=4)
    for step_id in range(10):
        recorder.on_step(
            plan(step_id, [step_id], [1]), StepResult(step_id, ((1,),), device_seconds=1.0), times(0.0, 1.0)
        )
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
    assert histogram.mean == 3.0


def test_rendering_is_cumulative_text_of_constant_names() -> None:
    text = Lines()
    text.add("x", "histogram", "help", _buckets({"bounds": [1.0, 2.0], "counts": [2, 1, 1], "sum": 12.0, "count": 4}))
    assert str(text).splitlines()[2:] == [
        'x_bucket{le="1.0"} 2',
        'x_bucket{le="2.0"} 3',
        'x_bucket{le="+Inf"} 4',
        "x_sum 12.0",
        "x_count 4",
    ]


def test_steps_render_before_and_after_the_first_one(cost_model: CostModel) -> None:
    recorder = StepRecorder(cost_model)
    assert "headrace_steps_total 0" in steps_page(recorder.summary())
    recorder.on_step(plan(0, [0], [3]), StepResult(0, ((1,),), device_seconds=1.0), times(0.0, 1.0))
    text = steps_page(recorder.summary())
    assert (
        "headrace_steps_total 1" in text
        and "headrace_step_roofline_fraction 0." in text
        and "headrace_step_predicted_seconds 0." in text
    )
