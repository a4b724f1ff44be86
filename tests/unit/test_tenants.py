"""Tenants of a simulated load: who sends what, what each of them got by hand, what fair is worth, and flags that make
no sense."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from headrace.cli import main
from headrace.config import SchedulerConfig
from headrace.planner.tenants import among, drift, tenant_figures, with_priorities
from headrace.planner.workload.load import Lengths, LoadRequest, conversing
from headrace.planner.workload.statistics import Sample

DEMO = (
    "simulate",
    "--device",
    "l40s",
    "--input-len",
    "40",
    "--output-len",
    "24",
    "--random-range-ratio",
    "0.5",
    "--max-num-seqs",
    "4",
)


def sample(sent: float, *arrivals: float, prompt: int = 10) -> Sample:
    return Sample(
        sent=sent, arrivals=list(arrivals), prompt_tokens=prompt, output_tokens=len(arrivals), ended=arrivals[-1]
    )


def test_requests_are_shared_out_by_a_seed() -> None:
    asked = [LoadRequest(5, 6) for _ in range(4000)]
    alike, hogged = (Counter(each.tenant for each in among(asked, 4, hog, 1)) for hog in (None, 0.7))
    assert sorted(alike) == ["key1", "key2", "key3", "key4"] and all(
        count == pytest.approx(1000, rel=0.1) for count in alike.values()
    )
    assert hogged["key1"] == pytest.approx(2800, rel=0.05) and hogged["key4"] == pytest.approx(400, rel=0.2)
    assert among(asked, 4, 0.7, 1) == among(asked, 4, 0.7, 1) != among(asked, 4, 0.7, 2)


def test_turns_of_a_conversation_are_of_one_tenant() -> None:
    asked = among(conversing(30, 3, Lengths(10, 5), system=4, think=1.0), 3, None, 0)
    assert all(each.follows is None or each.tenant == asked[each.follows].tenant for each in asked)
    assert len({each.tenant for each in asked}) == 3


def test_drift_counts_while_both_wait() -> None:
    """One tenant is served three times in a row while the other waits: three prompts of 10 and three tokens of 2; not
    what came after."""
    light = [sample(0.0, 5.0), sample(0.0, 50.0)]
    heavy = [sample(0.0, float(at)) for at in (1, 2, 3, 60, 61)]
    assert drift(light, heavy) == drift(heavy, light) == 3 * (10 + 2)
    assert drift(light, heavy, (0.0, 1.0)) == 3.0
    assert drift(light, heavy, weights=(1.0, 2.0)) == 3 * (10 + 2) / 2


def test_drift_forgets_what_was_when_nobody_waited() -> None:
    light = [sample(10.0, 10.1), sample(20.0, 21.0)]
    heavy = [sample(0.0, 0.1, 0.2, 0.3, prompt=1000), sample(19.0, 20.5)]
    assert drift(light, heavy) == 0.0


def test_who_is_turned_away_waits_until_then_and_gets_nothing() -> None:
    light = [Sample(sent=0.0, error="late", ended=3.5, prompt_tokens=10), Sample(sent=0.0, error="429")]
    heavy = [sample(0.0, float(at)) for at in (1, 2, 3, 4, 5)]
    assert drift(light, heavy) == 3 * (10 + 2)
    assert drift([], heavy) == drift(light, []) == 0.0


def test_figures_are_each_tenants_own() -> None:
    samples = [sample(0.0, 1.0, 2.0), sample(0.0, 4.0), Sample(sent=0.0, error="429", prompt_tokens=99)]
    config = SchedulerConfig(max_num_seqs=3, tenant_weight=("b=0.5",))
    figures = tenant_figures(samples, ["a", "b", "b"], 10.0, config)
    assert (figures["a_completed"], figures["a_mean_ttft_ms"], figures["a_output_throughput"]) == (1, 1000.0, 0.2)
    assert (figures["b_completed"], figures["b_mean_ttft_ms"], figures["b_output_throughput"]) == (1, 4000.0, 0.1)
    assert figures["service_drift_bound"] == 2.0 * (99 + 2.0 * 3 * 2) / 0.5
    assert tenant_figures(samples, ["", "", ""], 10.0, config) == {}


def simulated(tmp_path: Path, capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    written = tmp_path / "run.json"
    assert main([*DEMO, "--output-json", str(written), *words]) == 0
    capsys.readouterr()
    return dict(json.loads(written.read_text()))


def test_fair_keeps_services_together_where_first_come_first_served_does_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load = ("--num-prompts", "90", "--request-rate", "inf", "--tenants", "2", "--hog", "0.8")
    fcfs, fair, weighted = (
        simulated(tmp_path, capsys, *load, *more)
        for more in ((), ("--scheduling-policy", "fair"), ("--scheduling-policy", "fair", "--tenant-weight", "key1=4"))
    )
    assert fcfs["service_drift"] > 4 * fair["service_drift"] and fair["service_drift"] <= fair["service_drift_bound"]
    assert fair["key2_mean_ttft_ms"] < 0.6 * fcfs["key2_mean_ttft_ms"]
    assert (
        weighted["service_drift"] <= weighted["service_drift_bound"]
        and weighted["key2_mean_ttft_ms"] > 1.5 * fair["key2_mean_ttft_ms"]
    )
    assert "of 2 tenants, 80% of them key1's" in fair["facts"]["shape"]
    alone = simulated(tmp_path, capsys, *load[:4])
    assert alone["duration"] == fcfs["duration"] and "service_drift" not in alone, "who sends what changes nothing else"


def test_the_urgent_go_first_under_priority_and_not_under_fcfs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load = ("--num-prompts", "90", "--request-rate", "inf", "--priorities", "0:.2", "7:0.8")
    fcfs, urgent = (
        simulated(tmp_path, capsys, *load, "--scheduling-policy", policy) for policy in ("fcfs", "priority")
    )
    assert urgent["priority0_mean_ttft_ms"] < 0.5 * fcfs["priority0_mean_ttft_ms"]
    assert urgent["priority7_mean_ttft_ms"] > fcfs["priority7_mean_ttft_ms"]
    assert (
        urgent["priority0_completed"] + urgent["priority7_completed"] == 90 and 8 < urgent["priority0_completed"] < 30
    )
    assert "90 requests, priorities 0:.2 7:0.8" in urgent["facts"]["shape"]
    alike = simulated(tmp_path, capsys, *load[:4])
    assert alike["duration"] == fcfs["duration"] and "priority0_completed" not in alike, (
        "who is urgent changes nothing else"
    )


def test_turns_of_a_conversation_have_one_priority() -> None:
    asked = with_priorities(conversing(30, 3, Lengths(10, 5), system=4, think=1.0), {-1: 1.0, 5: 1.0}, 0)
    assert all(each.follows is None or each.priority == asked[each.follows].priority for each in asked)
    assert {each.priority for each in asked} == {-1, 5}


WRONG = {
    "--priorities 0": "--priorities has '0'; write PRIORITY:SHARE",
    "--priorities 0:0 1:1": "--priorities has '0:0'",
    "--priorities 0:nan": "--priorities has '0:nan'",
    "--priorities 1:1 01:2": "--priorities has 1 twice",
    "--priorities 9999999999:1": "at most 2,147,483,647",
    "--tenants 1": "--tenants is 1; give 2 to 64",
    "--tenants 65": "--tenants is 65",
    "--hog 0.5": "but the load has one tenant",
    "--tenants 3 --hog 1": "--hog is 1; give a share",
    "--tenants 3 --hog nan": "--hog is nan",
}


@pytest.mark.parametrize("words", WRONG)
def test_tenants_that_make_no_sense_are_a_sentence(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*DEMO, *words.split()]) == 2
    assert WRONG[words] in capsys.readouterr().err
