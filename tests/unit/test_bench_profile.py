"""Hardware counters as ncu writes them: read, told apart by step, weighted with time; and the page they go on."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.errors import BenchFailed
from lab.profile_ncu import (
    BANDWIDTH,
    DURATION,
    METRICS,
    SM_ACTIVE,
    TENSOR_ACTIVE,
    by_kernel,
    read_kernels,
    split_steps,
    sum_up,
)
from lab.profile_page import sections, short_name
from lab.profile_run import Span, layer_lines

COLUMNS = ("ID", "Process ID", "Kernel Name", "Grid Size", BANDWIDTH, DURATION, TENSOR_ACTIVE, SM_ACTIVE)
UNITS = ("", "", "", "", "byte/second", "ns", "%", "%")


def line(*cells: object) -> str:
    return ",".join(f'"{cell}"' for cell in cells)


def report(
    *kernels: tuple[str, object, object, object, object],
    units: tuple[str, ...] = UNITS,
    columns: tuple[str, ...] = COLUMNS,
) -> list[str]:
    """As ncu logs it: its own messages, a header, a line of units, one line a launch."""
    rows = [line(number, 4711, name, "(132, 1, 1)", *values) for number, (name, *values) in enumerate(kernels)]
    return ["==PROF== Connected to process 4711 (/usr/bin/python3.12)", line(*columns), line(*units), *rows]


def test_steps_are_told_apart_by_their_markers_and_weighted_with_time() -> None:
    marker = ("at::cuda::<unnamed>::spin_kernel(long)", 0, 2000, 0, 1)
    lines = report(
        ("before any step", 1, 1, 1, 1),
        marker,
        ("gemm", "4,000,000,000,000", "3,000", 60, 90),
        ("norm", 1e12, 1000, 0, 50),
        marker,
        ("gemm", 2e12, 1000, 20, 100),
        ("gemm", 1e12, 3000, 40, 60),
    )
    first, second = split_steps(read_kernels(lines))
    step = sum_up("all", first)
    assert (step.count, step.seconds) == (2, pytest.approx(4e-6))
    assert (step.sm_active, step.tensor_active, step.bandwidth) == pytest.approx((0.8, 0.45, 3.25e12))
    assert [(share.name, share.count) for share in by_kernel(first)] == [("gemm", 1), ("norm", 1)]
    (gemm,) = by_kernel(second)
    assert (gemm.count, gemm.sm_active, gemm.tensor_active) == (2, pytest.approx(0.7), pytest.approx(0.35))


def test_units_are_those_the_report_names() -> None:
    (kernel,) = read_kernels(
        report(("k", "2.5", "7", "10", "20"), units=("", "", "", "", "Tbyte/second", "us", "%", "%"))
    )
    assert (kernel.bandwidth, kernel.seconds, kernel.tensor_active, kernel.sm_active) == pytest.approx(
        (2.5e12, 7e-6, 0.1, 0.2)
    )
    with pytest.raises(BenchFailed, match="in 'fortnight'"):
        read_kernels(report(("k", 1, 1, 1, 1), units=("", "", "", "", "byte/second", "fortnight", "%", "%")))


def test_a_counter_without_a_value_weighs_nothing() -> None:
    known, unknown = read_kernels(report(("a", 1e12, 1000, 30, 40), ("b", "n/a", 9000, "n/a", 40)))
    total = sum_up("all", [known, unknown])
    assert unknown.tensor_active is None and (total.tensor_active, total.bandwidth) == pytest.approx((0.3, 1e12))
    assert sum_up("all", []).sm_active is None


@pytest.mark.parametrize("lines", [[], ["==ERROR== The user does not have permission"], report()])
def test_a_report_without_kernels_is_said(lines: list[str]) -> None:
    with pytest.raises(BenchFailed, match="no kernels"):
        read_kernels(lines)


def test_a_counter_that_the_device_lacks_is_named() -> None:
    columns = tuple(name.replace(TENSOR_ACTIVE, "other") for name in COLUMNS)
    with pytest.raises(BenchFailed, match=TENSOR_ACTIVE):
        read_kernels(report(("k", 1, 1, 1, 1), columns=columns))
    assert len(METRICS) == 4


def model(**more: Any) -> dict[str, Any]:
    share = {
        "name": "all",
        "count": 200,
        "seconds": 0.004,
        "sm_active": 0.9,
        "tensor_active": 0.25,
        "bandwidth": 3.6e12,
    }
    counted = {
        "step": "decode, batch 1",
        "all": share,
        "kernels": [{**share, "name": "void gemm<float, int>(int, x)", "tensor_active": None}],
    }
    return {
        "start": {"empty caches: ready": 5.0, "in one process: ready": 2.5, "import torch": 1.0},
        "start_problem": None,
        "limits": {"read_bandwidth": 4.5e12},
        "timed": [
            {"row": "decode-1", "values": [5.0, 4.0, 6.0], "requests": 1},
            {"row": "decode-256", "values": [10.0], "requests": 256},
            {"row": "prefill-1x2048", "values": [50.0], "requests": 1},
        ],
        "counters": [counted],
        "counters_problem": None,
        "steps": [{"step": "decode, batch 1", "device allocations": 0.0, "kernels": 200.0}],
        "memory": {"weights": 2**30},
        "device_memory": {},
        "host_memory": {"with the engine": 3 * 2**30},
        **more,
    }


def test_a_start_is_held_against_the_tokens_it_costs() -> None:
    pages = {title: rows for title, _, rows, _ in sections(model())}
    assert [row[-2:] for row in pages["Start against token time"]] == [
        ["1,000", "500"],
        ["128,000", "64,000"],
        ["", ""],
    ]
    assert pages["What the device did in a step"] == [
        ["decode, batch 1", "200", "4.000", "90.0%", "25.0%", "3.60 TB/s", "80.0%"]
    ]
    assert pages["The longest kernels of decode, batch 1"][0][0] == "void gemm<float, int>"
    assert pages["The longest kernels of decode, batch 1"][0][4] == "missing"
    assert pages["Footprint"] == [
        ["the engine's account: weights", "1.000"],
        ["host, resident: with the engine", "3.000"],
    ]


def test_what_could_not_be_measured_says_why() -> None:
    found = model(start={}, start_problem="it did not start", counters=[], counters_problem="ncu is not installed")
    remarks = [remark for *_, remark in sections(found)]
    assert "missing: it did not start" in remarks and "missing: ncu is not installed" in remarks
    assert {title: rows for title, _, rows, _ in sections(found)}["Start against token time"][0][-2:] == ["", ""]


def test_long_names_are_cut() -> None:
    assert short_name("kernel_" * 20).endswith("…") and len(short_name("kernel_" * 20)) == 60
    assert short_name("_decode_kernel") == "_decode_kernel"


def test_a_layer_is_found_in_the_middle_of_a_step_kernel_by_kernel() -> None:
    names = ["embed", *["norm", "product", "product", "attend"] * 8, "head"] * 2
    spans = [Span(name, 10.0 * at, 10.0 * at + 7.0) for at, name in enumerate(names)]
    first, *kernels = layer_lines(spans, 2)
    assert "4 launches, 40.00 µs" in first and len(kernels) == 4
    assert all(line.split()[:2] == ["3.00", "7.00"] for line in kernels)
    assert "no layers repeat" in layer_lines(spans[:9], 1)[0]
