"""Points of a load curve run side by side in processes: which of them runs where changes no figure."""

from __future__ import annotations

from headrace.config import EngineConfig
from headrace.planner.curve import Trial, run_trials
from headrace.planner.devices import known_devices
from headrace.planner.simulator import Load
from headrace.planner.workload.load import LoadRequest, arriving
from tests.support.specs import SMALL


def test_processes_change_no_figure() -> None:
    asked = [LoadRequest(50 + 7 * index, 20 + index) for index in range(12)]
    loads = [Load(arriving(asked, rate, burstiness=1.0, seed=3)) for rate in (2.0, 20.0, 200.0)]
    trials = [Trial("plain", None, SMALL, EngineConfig(), known_devices()["l40s"], load) for load in loads]
    assert list(run_trials(trials, 1)) == list(run_trials(trials, 2))
