"""Load curves: every point is the run that its flags alone would be, whatever it is compared with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import ConfigError
from headrace.planner.workload.load import traced
from tests.support.command import status_of

BASE = ("--device", "h200", "--num-prompts", "12", "--input-len", "300", "--processes", "1")


def call(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    status = status_of("simulate", *BASE, *words)
    told = capsys.readouterr()
    return status, told.out, told.err


def written(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_a_point_is_the_run_of_its_flags(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    curve, alone = tmp_path / "curve.json", tmp_path / "alone.json"
    words = (
        "--sweep-rate",
        "50",
        "5",
        "--compare",
        "max_num_seqs=2,64",
        "--compare",
        "chunked_prefill=on,off",
        "--output-json",
        str(curve),
    )
    status, out, err = call(capsys, *words)
    assert status == 0, err
    points = written(curve)["points"]
    names = [f"max_num_seqs={seqs}, chunked_prefill={chunked}" for seqs in (2, 64) for chunked in ("on", "off")]
    assert [(each["offered_rate"], each["configuration"]) for each in points] == [
        (rate, name) for rate in (5.0, 50.0) for name in names
    ]
    assert all(name in out for name in names) and "p99 ttft" in out and "8 points" in out and "prices: " in out
    beyond = {each for point in points for each in point.pop("prices")["extrapolated"]}
    assert all(f"extrapolated: {each} (" in out for each in beyond)
    words = (
        "--request-rate",
        "50",
        "--max-num-seqs",
        "2",
        "--technique",
        "chunked_prefill=off",
        "--output-json",
        str(alone),
    )
    assert call(capsys, *words)[0] == 0
    run = written(alone)
    assert (
        points[5].items()
        >= {name: value for name, value in run.items() if name not in ("facts", "prices", "requests")}.items()
    )
    assert points[5]["p99_ttft_ms"] > points[7]["p99_ttft_ms"], "two sequences at once wait longer"


def test_configurations_are_compared_without_rates_too(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = call(
        capsys, "--compare", "device=h100,l40s", "--compare", "enable_prefix_caching=on,off", "--columns", "steps"
    )
    assert status == 0 and "offered" not in out and "steps" in out
    assert all(
        f"device={device}, enable_prefix_caching={word}" in out for device in ("h100", "l40s") for word in ("on", "off")
    )


def test_a_trace_is_sped_up_to_each_rate(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    trace, curve = tmp_path / "t.jsonl", tmp_path / "c.json"
    rows = [
        {"timestamp": 100 * index**2, "input_length": 100, "output_length": 5, "hash_ids": [index]}
        for index in range(12)
    ]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = ("--trace", str(trace), "--output-json", str(curve), "--plot", str(tmp_path / "c.png"))
    words = ("--input-len", "128", "--workload", "trace", "--sweep-rate", "1", "10", *files)
    status, _, err = call(capsys, *words)
    assert status == 0, err
    slow, quick = written(curve)["points"]
    assert slow["duration"] == pytest.approx(11.0, rel=0.02) and quick["duration"] == pytest.approx(1.1, rel=0.1)
    assert (tmp_path / "c.png").stat().st_size > 5000


def test_scaling_keeps_order_and_shape(tmp_path: Path) -> None:
    times = (0.0, 1.0, 1.0, 7.0, 8.0)
    asked = traced(_trace(tmp_path, times), count=None, max_prompt=None, max_output=None, rate=2.0)
    assert [each.prompt for each in asked] == [10, 11, 12, 13, 14]
    assert [each.at for each in asked] == [0.0, 0.25, 0.25, 1.75, 2.0]
    with pytest.raises(ConfigError, match="All 3 requests come at once"):
        traced(_trace(tmp_path, (4.0,) * 3), count=None, max_prompt=None, max_output=None, rate=2.0)


def _trace(folder: Path, times: tuple[float, ...]) -> Path:
    """Requests at these seconds, each of one prompt token more than the one before."""
    rows = [
        {"timestamp": 1000 * when, "input_length": 10 + index, "output_length": 1, "hash_ids": [0]}
        for index, when in enumerate(times)
    ]
    path = folder / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


WRONG = {
    "--sweep-rate 1 nan": "--sweep-rate has nan",
    "--sweep-rate 0": "--sweep-rate has 0",
    "--sweep-rate 1 1": "has 2 rates and only 1 different",
    "--sweep-rate 9 --columns foo": "--columns has 'foo', which a run has not",
    "--sweep-rate 9 --against run.json": "--against compares one run",
    "--compare x": "--compare has 'x'; write NAME=VALUE,VALUE",
    "--compare =1,2": "--compare has '=1,2'",
    "--compare chunked_prefil=on,off": "did you mean chunked_prefill?",
    "--compare enable_prefix_caching=maybe": "give on or off",
    "--compare chunked_prefill=on,off --plot x.png": "give --sweep-rate",
    "--sweep-rate 9 --processes 0": "argument --processes: '0' is not a whole number of at least 1",
    "--sweep-rate 9 --compare max_model_len=100,4096": "longer than the 100 tokens",
}


@pytest.mark.parametrize("words", WRONG)
def test_what_is_no_curve_is_a_sentence(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = call(capsys, *words.split())
    assert status == 2 and WRONG[words] in err and err.count("\n") == 1


def test_a_value_that_a_flag_does_not_take_is_its_own_error(capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = call(capsys, "--compare", "scheduling_policy=fcfs,foo")
    assert status == 2 and "invalid choice: 'foo'" in err
