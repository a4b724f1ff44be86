"""Steps summed up: medians by kind, and the share of steady decode in which the device had nothing to do."""

from __future__ import annotations

import argparse
from dataclasses import replace

import pytest

from headrace.bench import offline
from headrace.bench.steps import steady_decode, summarise_steps
from headrace.observe.metrics import StepRecord
from headrace.observe.report import void_note


def step(
    step_id: int,
    begin: float,
    end: float,
    *,
    rows: int = 4,
    decodes: int | None = None,
    host: float = 0.001,
    failed: bool = False,
) -> StepRecord:
    return StepRecord(
        step_id,
        rows,
        rows if decodes is None else decodes,
        rows,
        rows,
        8.0,
        8.0,
        0.5,
        0.6,
        end - begin,
        host,
        0.5,
        failed,
        0.25,
        0.0,
        begin,
        end,
    )


def test_idle_is_what_the_device_did_not_work_between_steps_of_the_same_rows() -> None:
    steps = [
        step(0, 0.0, 9.0, decodes=0),
        step(1, 10.0, 11.0),
        step(2, 11.5, 12.5, host=0.003),
        step(3, 13.0, 14.0),
        step(4, 14.0, 15.0, rows=3),
    ]
    found = steady_decode(steps)
    assert found is not None and found.steps == 2  # the first follows a prefill, the last has lost a row
    assert (found.wall_seconds, found.busy_seconds) == (3.0, 2.0)
    assert found.idle_share == pytest.approx(1 / 3) and found.host_seconds == 0.002
    assert "idle 33.3%" in str(found)


def test_pauses_between_runs_and_failed_steps_do_not_count() -> None:
    steps = [
        step(1, 0.0, 1.0),
        step(2, 1.0, 2.0),
        step(7, 50.0, 51.0),
        step(8, 51.0, 52.0),
        step(9, 60.0, 61.0, failed=True),
        step(10, 70.0, 71.0),
    ]
    found = steady_decode(steps)
    assert found is not None and (found.steps, found.wall_seconds, found.idle_share) == (2, 2.0, 0.0)


def test_only_the_last_steps_are_looked_at() -> None:
    steps = [step(number, 2.0 * number, 2.0 * number + (1.0 if number < 50 else 2.0)) for number in range(100)]
    found = steady_decode(steps, most=40)
    assert found is not None and (found.steps, found.idle_share) == (40, 0.0)


def test_without_steady_steps_there_is_nothing_to_say() -> None:
    assert steady_decode([step(0, 0.0, 1.0), step(1, 1.0, 2.0, decodes=0)]) is None


def test_both_floors_stand_in_the_table() -> None:
    (decode,) = summarise_steps([step(0, 0.0, 1.0)])
    assert (decode["floor ms"], decode["overlapped ms"], decode["measured ms"]) == (500.0, 250.0, 1000.0)


def show(capsys: pytest.CaptureFixture[str], fraction: float) -> str:
    records = [replace(step(number, number, number + 1.0), fraction=fraction) for number in range(3)]
    offline._show(argparse.Namespace(output_json=None), {}, {}, records)
    return capsys.readouterr().out


@pytest.mark.parametrize(("fraction", "void"), [(0.9, False), (1.04, False), (1.06, True), (2.08, True)])
def test_a_fraction_above_its_limit_is_void_and_said_so(
    capsys: pytest.CaptureFixture[str], fraction: float, void: bool
) -> None:
    said = show(capsys, fraction)
    assert ("VOID: decode steps at" in said) == (" void " in said) == void
    assert not void or (
        f"{fraction:.0%} of the limit. Nothing is faster than its limit: the machine was too busy" in said
        and f" {fraction:.4g} " not in said
    )


def test_the_worst_of_several_is_named() -> None:
    assert void_note({"a": None, "b": 1.0}) is None
    assert str(void_note({"a": 1.2, "b": 2.08, "c": 0.5})).startswith("VOID: b at 208% of the limit, and 1 more. ")
