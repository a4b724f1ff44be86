"""The benchmarks of policies: their own arithmetic on cases done by hand, one small run of each comparison, and flags
that make no sense."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import headrace
from headrace.config import DeviceConfig, EngineConfig, SchedulerConfig
from headrace.cost.profile import DeviceProfile, cpu_identity, save_profile
from headrace.errors import ConfigError
from headrace.planner.workload.conversations import conversations_of
from headrace.planner.workload.load import BENCH_VOCAB, arriving
from headrace.planner.workload.statistics import Sample
from lab import policies, policies_served, simulated
from lab.policy_cases import CASES, Case, Run

DEMO = str(Path(headrace.__file__).parent / "data" / "demo")
SIZES = ("--requests", "12", "--max-len", "60", "--input", "20", "40", "--output", "4", "8")


def parsed(*flags: str, of: ModuleType = policies) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    of.add_arguments(parser)
    return parser.parse_args([*(("--model", DEMO) if of is policies else ()), *flags])


def sample(sent: float, *arrivals: float, prompt: int = 10) -> Sample:
    return Sample(sent=sent, arrivals=list(arrivals), prompt_tokens=prompt, output_tokens=len(arrivals))


def test_the_load_up_to_which_readers_are_content_lies_between_points() -> None:
    points = [{"load": load, "QoE": value} for load, value in ((1.0, 1.0), (2.0, 0.95), (3.0, 0.85))]
    assert policies._reach(points, "QoE") == pytest.approx(2.5)
    assert policies._reach(points[:2], "QoE") == 2.0
    assert policies._reach([{"load": 0.5, "QoE": 0.3}], "QoE") == 0.0


def test_the_same_seed_is_the_same_load() -> None:
    assert (
        policies.of_kinds(policies.KINDS, 50, 3)
        == policies.of_kinds(policies.KINDS, 50, 3)
        != policies.of_kinds(policies.KINDS, 50, 4)
    )
    kinds = {each.pieces for each in policies.of_kinds(policies.KINDS, 200, 3)}
    assert len(kinds) == len(policies.KINDS)


def test_every_comparison_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = tmp_path / "found.json"
    sizes = (*SIZES, "--output-json", str(written))
    for only, device in (("qoe", "l40s"), ("fair", "h200")):
        assert policies.run(parsed("--only", only, "--device", device, "--loads", "2", *sizes)) == 0
        assert [point["load"] for point in json.loads(written.read_text())[only]["points"]] == [2.0]
    shown = capsys.readouterr().out
    assert "the bound is" in shown and "prices: assumed" in shown and "prices: calibrated" in shown
    assert "extrapolated: another model" in shown and json.loads(written.read_text())["prices"]["extrapolated"]


def test_preemptions_are_compared_by_the_share_of_readers_who_are_content(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = tmp_path / "found.json"
    sizes = (*SIZES, "--output-json", str(written))
    assert policies.run(parsed("--only", "qoe", "--loads", "2", "--preemptions", "0", "0.3", *sizes)) == 0
    (point,) = json.loads(written.read_text())["preemptions"]["points"]
    assert set(point) == {"load", *(f"{which}{name}" for which in ("", "p10 ") for name in ("fcfs", "0", "0.3"))}
    assert "share of readers with at least 0.9" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="--preemptions is -1"):
        policies.run(parsed("--preemptions", "-1"))


def test_what_is_extrapolated_is_told_of_all_runs() -> None:
    """The largest steps are those of the first run; what is said comes after the second."""
    bench = simulated.create(
        parsed("--requests", "12", "--max-len", "60", "--input", "20", "40", "--output", "4", "8", "--device", "h200")
    )
    most = []
    for rows in (12, 2):
        bench.run(EngineConfig(scheduler=SchedulerConfig(max_num_seqs=rows)), bench.at_rate(math.inf))
        assert bench.seen.pricing is not None
        most.append(bench.seen.pricing.step_time.most.sequences)
    assert most[0] > 2 and most[1] == most[0]


@pytest.mark.parametrize(
    "flags",
    [("--loads", "0"), ("--loads", "nan"), ("--loads", "1", "inf"), ("--requests", "1"), ("--output", "9", "3")],
)
def test_flags_that_make_no_sense_are_refused(flags: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError):
        policies.run(parsed(*flags))


# --- on a server


def test_figures_of_cases_by_hand() -> None:
    quick, slow, lost = (
        sample(0.0, 0.5, 0.55, 0.6),
        sample(0.0, 3.0, 3.1, 3.4),
        Sample(sent=0.0, ended=0.1, error="429"),
    )
    run = Run({"light": [slow], "heavy": [quick, lost]}, 5.0)
    values = {name: case.value(run) for name, case in CASES.items()}
    assert (
        values["fair"] == 3.0
        and values["deadline"] == 1 / 5.0
        and values["shortest-remaining"] == pytest.approx((0.6 + 3.4) / 2)
    )
    assert values["max-step-ms"] == pytest.approx(300.0, rel=0.03) and 0.0 < values["qoe"] < 2 / 3


def test_times_better_go_by_what_is_better_and_nothing_has_no_multiple() -> None:
    good, bad = Run({"light": [sample(0.0, 0.5, 0.6)]}, 1.0), Run({"light": [sample(0.0, 2.0, 9.0)]}, 10.0)
    assert CASES["fair"].times(bad, good) == 4.0 and CASES["fair"].times(good, bad) == 0.25
    assert CASES["deadline"].times(bad, good) is None and policies_served._told([2.0, None]) == "from nothing"
    assert policies_served._told([3.0]) == "3" and policies_served._told([1.0, 3.0]) == "2 (1 – 3)"


def test_a_salt_changes_ids_and_nothing_else() -> None:
    asked = arriving(CASES["shortest-remaining"].asked(40, 3), 5.0, burstiness=1.0, seed=3)
    one, same, other = (conversations_of(asked, vocab_size=BENCH_VOCAB, seed=salt) for salt in (1, 1, 2))
    assert one == same and all(
        mine.turns[0].new_ids != theirs.turns[0].new_ids for mine, theirs in zip(one, other, strict=True)
    )
    for conversation, each in zip(one, asked, strict=True):
        assert (len(conversation.turns[0].new_ids), conversation.turns[0].max_tokens, conversation.arrival) == (
            each.prompt,
            each.output,
            each.at,
        )
    assert len({conversation.turns[0].new_ids[: policies.BEGINNING] for conversation in one}) == 2  # kinds begin alike


def test_servers_and_simulation_are_put_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The simulation stands for the server here, twice as slow as the one beside it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    save_profile(
        DeviceProfile(
            identity=cpu_identity(3),
            read_bandwidth=1e9,
            copy_bandwidth=1e9,
            gemm_rates={"bfloat16": 1e10},
            source="measured",
        )
    )
    salts = []

    def served(
        bench: policies_served._Bench, case: Case, fields: dict[str, Any], asked: Any, folder: Path, salt: int
    ) -> Run:
        salts.append((salt, bool(fields)))
        found, *_ = policies_served._simulated(bench, fields, arriving(asked, 50.0, burstiness=1.0, seed=0), 0)
        return Run(found.by_tenant, 2 * found.seconds)

    monkeypatch.setattr(policies_served, "_served", served)
    written = tmp_path / "found.json"
    flags = ("--only", "deadline", "--seconds", "0.1", "--repeats", "2", "--output-json", str(written))
    assert (
        policies_served.run(
            parsed(*flags, of=policies_served), EngineConfig(device=DeviceConfig(threads=3, device="cpu"))
        )
        == 0
    )
    found = json.loads(written.read_text())["found"]["deadline"]
    assert salts == [(0, False), (1, False), (2, True), (3, False), (4, True)] and len(found["measured"]) == 2
    assert found["simulated"]["policy"] > 0 and "prices of the simulation: assumed" in capsys.readouterr().out


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "1e9"])
def test_seconds_that_make_no_sense_are_refused(seconds: str) -> None:
    with pytest.raises(ConfigError, match="--seconds"):
        policies_served.run(parsed("--seconds", seconds, of=policies_served), EngineConfig())
