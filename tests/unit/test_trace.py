"""The trace of a run: valid JSON at any moment, slices that nest, times that rise, nothing of anybody's text."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from array import array
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from headrace.clock import RealClock
from headrace.config import SchedulerConfig
from headrace.engine.keyed_hash import KeyedHashExecutor, keyed_hash_info
from headrace.errors import ConfigError
from headrace.observe.metrics import StepRecorder
from headrace.observe.trace import StepTrace, TraceFile
from headrace.request import Request, SamplingParams
from tests.support.hash_engine import FIXED, create_core

Events = list[dict[str, Any]]


def traced_run(path: Path, depth: int, requests: int = 3, drafts: int = 0) -> tuple[StepTrace, StepRecorder]:
    clock, recorder = RealClock(), StepRecorder()
    core = create_core(
        KeyedHashExecutor(keyed_hash_info(max_drafts=drafts), device_time=0.0005, clock=clock, acceptance=0.7),
        SchedulerConfig(
            max_num_batched_tokens=16, max_num_seqs=2, speculative_config=FIXED % drafts if drafts else None
        ),
        clock,
        depth=depth,
    )
    trace = StepTrace(TraceFile(str(path)), recorder, core.stats, name="test")
    core.observe(trace)
    params = SamplingParams(temperature=0.0, max_tokens=6 + 8 * drafts, ignore_eos=True)
    for number in range(requests):
        core.add(Request(request_id=number, prompt_token_ids=array("i", range(40)), params=params))
    while core.has_work:
        core.step()
    return trace, recorder


def events_of(path: Path) -> Events:
    text = path.read_text()
    events: Events = json.loads(text if text.endswith("]\n") else text + "]")
    return events


def test_a_step_tells_what_was_drafted_and_right(tmp_path: Path) -> None:
    trace, _ = traced_run(tmp_path / "t.json", 1, drafts=3)
    trace.close()
    told = [event["args"] for event in events_of(tmp_path / "t.json") if "drafted" in event.get("args", {})]
    assert (
        told
        and all(0 <= each["accepted"] <= each["drafted"] for each in told)
        and sum(each["accepted"] for each in told) > 0
    )
    plain, _ = traced_run(tmp_path / "plain.json", 1)
    plain.close()
    assert not any("drafted" in event.get("args", {}) for event in events_of(tmp_path / "plain.json"))


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_times_rise_and_slices_of_a_track_do_not_overlap(tmp_path: Path, depth: int) -> None:
    trace, _ = traced_run(tmp_path / "t.json", depth)
    trace.close()
    events = [event for event in events_of(tmp_path / "t.json") if event["ph"] != "M"]
    assert [event["ts"] for event in events] == sorted(event["ts"] for event in events) and events[0]["ts"] >= 0
    for track in (1, 2):
        slices = [event for event in events if event["ph"] == "X" and event["tid"] == track]
        assert slices and all(event["dur"] >= 0 for event in slices)
        for before, after in pairwise(slices):
            assert before["ts"] + before["dur"] <= after["ts"] + 0.002  # µs; each is rounded to a nanosecond


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_every_step_has_its_slices_and_its_figures(tmp_path: Path, depth: int) -> None:
    trace, recorder = traced_run(tmp_path / "t.json", depth)
    trace.close()
    events = events_of(tmp_path / "t.json")
    assert Counter(event["name"] for event in events if event["ph"] == "X" and event["tid"] == 1) == dict.fromkeys(
        ("schedule", "submit", "collect", "update"), len(recorder.records)
    )
    device = [event for event in events if event["ph"] == "X" and event["tid"] == 2]
    assert [event["name"] for event in device] == [record.kind for record in recorder.records]
    assert [event["args"]["tokens"] for event in device] == [record.tokens for record in recorder.records]
    assert {"floor ms", "predicted ms", "fraction", "rows"} <= device[0]["args"].keys()
    waiting = [event["args"]["waiting"] for event in events if event["name"] == "requests"]
    assert max(waiting) > 0 and waiting[-1] == 0
    assert max(event["args"]["used"] for event in events if event["name"] == "KV blocks") > 0


def test_sequences_begin_and_end_once(tmp_path: Path) -> None:
    trace, _ = traced_run(tmp_path / "t.json", 1)
    trace.close()
    slices = [(event["ph"], event["id"]) for event in events_of(tmp_path / "t.json") if event["ph"] in "be"]
    assert (
        sorted(slices) == sorted((phase, each) for phase in "be" for each in {each for _, each in slices})
        and len(slices) == 6
    )


def test_an_unfinished_trace_is_complete_up_to_the_last_step(tmp_path: Path) -> None:
    trace, recorder = traced_run(tmp_path / "t.json", 1)
    assert not (tmp_path / "t.json").read_text().rstrip().endswith("]")
    steps = [
        event["args"]["step"] for event in events_of(tmp_path / "t.json") if event["ph"] == "X" and event["tid"] == 2
    ]
    assert steps == [record.step_id for record in recorder.records]
    trace.close()


def test_a_trace_without_steps_is_valid(tmp_path: Path) -> None:
    StepTrace(
        TraceFile(str(tmp_path / "t.json")), StepRecorder(), lambda: pytest.fail("nothing ran"), name="idle"
    ).close()
    assert {event["ph"] for event in events_of(tmp_path / "t.json")} == {"M"}
    TraceFile(str(tmp_path / "empty.json")).close()
    assert events_of(tmp_path / "empty.json") == []


def test_a_file_that_cannot_be_written_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent/t\.json .*No such file.* folder that exists"):
        TraceFile(str(tmp_path / "absent" / "t.json"))


def test_a_full_disk_ends_the_trace_and_not_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    trace, recorder = traced_run(Path("/dev/full"), 1)
    trace.close()
    assert len(recorder.records) > 6
    assert [record.message for record in caplog.records] == ["the trace /dev/full ends here: No space left on device"]


KILLED = """
import os, signal, sys
from headrace import LLM, SamplingParams
llm = LLM(executor="keyed-hash", trace=sys.argv[1])
llm.generate([{"prompt_token_ids": [7] * 20}] * 4, SamplingParams(max_tokens=9, ignore_eos=True), use_tqdm=False)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_trace_of_a_killed_engine_opens(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    killed = subprocess.run([sys.executable, "-c", KILLED, str(path)], env=dict(os.environ), capture_output=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    decodes = [event for event in events_of(path) if event.get("name") == "decode"]
    assert len(decodes) == 8 and decodes[-1]["args"]["rows"] == 4
