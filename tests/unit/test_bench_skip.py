"""SKIP's figures from trace events written by hand."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.engine.resolve import create_config
from headrace.errors import ConfigError
from lab.skip import COLUMNS, LaunchFloor, check_skip_profile, show_skip, skip_as_dicts, skip_figures

FLOOR = LaunchFloor(alone=5.0, graph=9.0)


def call(correlation: int, ts: float, name: str = "cudaLaunchKernel", cat: str = "cuda_runtime") -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": 2.0, "args": {"correlation": correlation}}


def ran(correlation: int, ts: float, dur: float, cat: str = "kernel") -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": "k", "ts": ts, "dur": dur, "args": {"correlation": correlation}}


def test_a_device_that_waits_for_launches_is_cpu_bound() -> None:
    events = [event for i in range(4) for event in (call(i + 1, 100.0 * i), ran(i + 1, 100.0 * i + 5, 20.0))]
    found = skip_figures(events, 2, FLOOR, "eager")
    assert (found.kernels_per_step, found.launches_per_step, found.tklqt_ms_per_step) == (2.0, 2.0, 0.01)
    assert (found.launch_and_queue_us, found.kernel_us, found.verdict) == (5.0, 20.0, "CPU-bound")
    assert found.busy_share == pytest.approx(80 / 320) and found.step_ms == pytest.approx(0.16)


def test_launches_that_wait_for_the_device_are_gpu_bound() -> None:
    events = [
        event for i in range(4) for event in (call(i + 1, 3.0 * i, cat="cuda_driver"), ran(i + 1, 5 + 50.0 * i, 50.0))
    ]
    found = skip_figures(events, 4, FLOOR, "eager")
    assert (found.verdict, found.busy_share) == ("GPU-bound", 1.0)
    assert found.tklqt_ms_per_step == pytest.approx(sum(5 + 47.0 * i for i in range(4)) / 4e3)


def test_kernels_of_a_graph_queue_behind_each_other_and_only_their_first_tells_who_waited() -> None:
    events = [call(1, 0.0, "cudaGraphLaunch"), *(ran(1, 10.0 + 20.0 * i, 20.0) for i in range(5))]
    found = skip_figures(events, 1, FLOOR, "graphs")
    assert (found.kernels_per_step, found.launches_per_step, found.wait_us, found.floor_us) == (5.0, 1.0, 10.0, 9.0)
    assert found.tklqt_ms_per_step == pytest.approx((10 + 30 + 50 + 70 + 90) / 1e3) and found.verdict == "CPU-bound"


def test_copies_keep_the_device_busy_but_are_no_kernels_and_overlaps_count_once() -> None:
    events = [
        call(1, 0.0),
        ran(1, 10.0, 10.0),
        call(2, 1.0, "cudaMemcpyAsync"),
        ran(2, 15.0, 10.0, "gpu_memcpy"),
        ran(99, 500.0, 10.0),
    ]
    found = skip_figures(events, 1, FLOOR, "eager")
    assert (found.kernels_per_step, found.step_ms, found.busy_share) == (
        1.0,
        0.015,
        1.0,
    )  # what was launched before the profile is not in it


def test_a_profile_without_kernels_says_what_may_be_wrong() -> None:
    with pytest.raises(ConfigError, match="CUPTI"):
        skip_figures([call(1, 0.0)], 1, FLOOR, "eager")


def test_without_kernel_launches_it_is_refused_before_anything_is_loaded() -> None:
    for config in (create_config(device="cpu"), create_config(executor="keyed-hash")):
        with pytest.raises(ConfigError, match="CUDA"):
            check_skip_profile(config)


def test_the_table_has_a_cell_for_each_column() -> None:
    figures = [skip_figures([call(1, 0.0), ran(1, 10.0, 10.0)], 1, FLOOR, "eager")]
    header, row = show_skip(figures).splitlines()[1:]
    assert all(column in header for column in COLUMNS) and row.split()[0] == "eager"
    assert skip_as_dicts(figures)[0]["verdict"] == "CPU-bound"
