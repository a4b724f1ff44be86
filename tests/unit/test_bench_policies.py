"""The benchmark of policies: its own arithmetic on cases done by hand, one small run of each comparison, and flags that make no sense."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

import headrace
from headrace.bench import policies
from headrace.bench.statistics import Sample
from headrace.errors import ConfigError

DEMO = str(Path(headrace.__file__).parent / "data" / "demo")


def parsed(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    policies.add_arguments(parser)
    return parser.parse_args(["--model", DEMO, *flags])


def sample(sent: float, *arrivals: float, prompt: int = 10) -> Sample:
    return Sample(sent=sent, arrivals=list(arrivals), prompt_tokens=prompt, output_tokens=len(arrivals))


def test_drift_counts_while_both_wait() -> None:
    """One tenant is served three times in a row while the other waits: three prompts of 10 and three tokens of 2; not what came after."""
    light = [sample(0.0, 5.0), sample(0.0, 50.0)]
    heavy = [sample(0.0, float(at)) for at in (1, 2, 3, 60, 61)]
    assert policies.drift([*light, *heavy], [True] * 2 + [False] * 5) == 3 * (10 + 2)


def test_drift_forgets_what_was_when_nobody_waited() -> None:
    light = [sample(10.0, 10.1), sample(20.0, 21.0)]
    heavy = [sample(0.0, 0.1, 0.2, 0.3, prompt=1000), sample(19.0, 20.5)]
    assert policies.drift([*light, *heavy], [True] * 2 + [False] * 2) == 0.0


def test_the_load_up_to_which_readers_are_content_lies_between_points() -> None:
    points = [{"load": load, "QoE": value} for load, value in ((1.0, 1.0), (2.0, 0.95), (3.0, 0.85))]
    assert policies._reach(points, "QoE") == pytest.approx(2.5)
    assert policies._reach(points[:2], "QoE") == 2.0
    assert policies._reach([{"load": 0.5, "QoE": 0.3}], "QoE") == 0.0


def test_the_same_seed_is_the_same_load() -> None:
    assert policies._of_kinds(50, 3) == policies._of_kinds(50, 3) != policies._of_kinds(50, 4)
    kinds = {each.pieces for each in policies._of_kinds(200, 3)}
    assert len(kinds) == len(policies.KINDS)


def test_every_comparison_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = tmp_path / "found.json"
    sizes = ("--requests", "24", "--max-len", "120", "--input", "20", "40", "--output", "10", "30", "--output-json", str(written))
    for only in ("qoe", "fair"):
        assert policies.run(parsed("--only", only, "--loads", "2", *sizes)) == 0
        assert [point["load"] for point in json.loads(written.read_text())[only]["points"]] == [2.0]
    assert "the bound is" in capsys.readouterr().out


@pytest.mark.parametrize("flags", [("--loads", "0"), ("--loads", "nan"), ("--loads", "1", "inf"), ("--requests", "1"), ("--output", "9", "3")])
def test_flags_that_make_no_sense_are_refused(flags: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError):
        policies.run(parsed(*flags))
