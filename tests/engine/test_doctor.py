"""The device's limits beside each step, and the account of memory."""

from __future__ import annotations

import json
import mmap
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from headrace.bench import shape_advice
from headrace.bench.driver import drive
from headrace.bench.kernel_cases import DEFAULT_SPEC
from headrace.bench.shape_advice import Finding, ShapeBench, advise
from headrace.bench.steps import summarise_steps
from headrace.commands.doctor import _render_assumed, _render_memory, _render_shape, examine_card, found
from headrace.config import EngineConfig
from headrace.cost.profile import DeviceProfile, Limits, save_profile
from headrace.engine.assembly import create_engine
from headrace.engine.resolve import create_config
from headrace.errors import ConfigError
from headrace.kernels.build.c_compiler import native_library
from headrace.planner.workload.conversations import random_conversations
from headrace.planner.workload.load import Lengths
from headrace.worker.profile import OtherProcesses, identity_here, resolve_profile
from headrace.worker.residency import resident_bytes


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DeviceProfile:
    """A profile of this machine's own identity, as ``doctor --profile`` would have kept it."""
    native_library()  # is kept where others find it
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    profile = DeviceProfile(
        identity=identity_here(),
        read_bandwidth=1e9,
        copy_bandwidth=1e9,
        gemm_rates={"float32": 1e10},
        efficiency=0.5,
        step_overhead=0.25,
        source="measured",
    )
    save_profile(profile)
    return profile


def test_a_kept_profile_is_used_and_an_unmeasured_device_is_estimated_and_said(
    stored: DeviceProfile, tmp_path: Path
) -> None:
    assert resolve_profile()[0] == stored
    next(tmp_path.rglob("*.json")).unlink()
    profile, decision = resolve_profile()
    assert profile is not None and profile.source == "estimated"
    assert "estimated" in decision.reason and "doctor --profile" in decision.reason


def test_a_damaged_profile_is_named_and_does_not_stop_a_start(stored: DeviceProfile, tmp_path: Path) -> None:
    path = next(tmp_path.rglob("*.json"))
    path.write_text("{")
    profile, decision = resolve_profile()
    assert profile is not None and profile.source == "estimated" and str(path) in decision.reason


def test_each_step_of_an_engine_is_held_against_the_profile(stored: DeviceProfile) -> None:
    config = create_config(
        load_format="dummy", dtype="bfloat16", kv_cache_memory=2**24, threads=torch.get_num_threads()
    )
    engine = create_engine(config, with_tokenizer=False)
    try:
        drive(engine.core, random_conversations(2, Lengths(20, 4), vocab_size=engine.info.vocab_size))
        records = engine.recorder.records
    finally:
        engine.close()
    weights = 15_735_168 * 2  # parameters in bfloat16; the tied embedding is the head, read once
    decode = [record for record in records if record.decodes == record.rows == 2]
    assert len(decode) == 3
    for record in decode:
        assert weights < record.bytes < 1.05 * weights
        assert record.predicted_seconds == pytest.approx(record.floor_seconds / 0.5 + 0.25)
        assert record.fraction == pytest.approx(record.floor_seconds / record.measured_seconds)
    assert [step["steps"] for step in summarise_steps(records)] == ["decode", "prefill"]


def test_untouched_memory_is_told_from_touched() -> None:
    tensor = torch.frombuffer(
        mmap.mmap(-1, 8 * 2**20), dtype=torch.uint8
    )  # fresh pages, where an allocator may reuse touched ones
    before = resident_bytes(tensor)
    tensor[: 4 * 2**20].fill_(1)
    assert 4 * 2**20 - before <= resident_bytes(tensor) < 8 * 2**20
    tensor.fill_(1)
    assert resident_bytes(tensor) == 8 * 2**20


def test_memory_is_accounted_for_to_two_percent() -> None:
    command = [sys.executable, "-m", "headrace", "doctor", "--json"]
    report = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert report["memory"]["share explained"] >= 0.98
    assert report["memory"]["purposes"]["weights"] >= 15_735_168 * 2
    assert sum(report["memory"]["purposes"].values()) + report["memory"]["residual"] == report["memory"]["resident"]
    assert {"machine", "versions", "torch", "compiler", "limits now"} <= report["found"].keys()
    assert {"dtype", "threads", "kv_cache", "device profile"} <= {decision["name"] for decision in report["decisions"]}


def test_what_other_processes_take_is_noticed() -> None:
    others = OtherProcesses()
    busy = subprocess.run(
        [sys.executable, "-c", "import time; end = time.process_time() + 0.4\nwhile time.process_time() < end: pass"],
        check=True,
    )
    assert busy.returncode == 0
    assert others.share() > 0.02


def test_a_card_s_account_names_each_purpose_once() -> None:
    purposes = {"weights": 3 * 2**20, "kv_cache": 5 * 2**20, "context": 2**20}
    facts = {
        "purposes": purposes,
        "resident": 10 * 2**20,
        "residual": 2**20,
        "share explained": 0.9,
        "pinned host memory": 2**21,
    }
    text = _render_memory({"announced": purposes, "memory": facts})
    lines = [line.split() for line in text.splitlines()]
    assert [line[-1] for line in lines if line[0] == "kv_cache"] == ["5"]
    assert "reserved for" not in text and "accounted for: 90.00%" in text and "pinned host memory: 2.0 MiB" in text


def shape_report(**changes: int) -> tuple[list[Finding], float, str]:
    spec = replace(
        DEFAULT_SPEC,
        **{"hidden_size": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "intermediate_size": 100, **changes},
    )  # type: ignore[arg-type]
    bench = ShapeBench(spec, torch.float32, torch.device("cpu"), 512)
    findings, unmeasured = advise(bench, Limits(1e10, 1e10, {"float32": 1e11}))
    facts = {"findings": [asdict(each) | {"cost": each.cost} for each in findings], "unmeasured": unmeasured}
    return findings, unmeasured, _render_shape(facts)


def test_what_dimensions_cost_is_measured_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(shape_advice.SECONDS_EACH, "cpu", 0.005)
    findings, unmeasured, text = shape_report(vocab_size=1000)
    assert unmeasured == 0.0 and {each.tokens for each in findings} == {4, 256}
    for each in findings:
        assert each.seconds and each.better_seconds and each.share is not None and each.share < 1
    assert "vocabulary 1000" in text and "feed-forward width 100" in text


def test_a_measurement_that_takes_long_is_left_to_profile() -> None:
    findings, unmeasured, text = shape_report(hidden_size=10001, intermediate_size=99999, vocab_size=200001)
    assert unmeasured > 20 and all(each.cost == "not measured" for each in findings)
    assert "headrace doctor MODEL --profile" in text and "vocabulary 200001" in text


def test_costs_are_told_from_noise() -> None:
    finding = Finding("width 5", "odd", "even", 16, 2e-3, "6", 1.5e-3, 0.25, 0.016)
    assert finding.cost == "25% of 2 ms, 16 ms of a step"
    assert replace(finding, share=-0.1).cost == "nothing" and replace(finding, share=None).cost == "not measured"
    facts = {
        "findings": [asdict(each) | {"cost": each.cost} for each in (replace(finding, share=0.0), finding)],
        "unmeasured": 0.0,
    }
    assert "suspected, but costs nothing measurable here: width 5" in _render_shape(facts)
    assert "no dimension" in _render_shape({"findings": [], "unmeasured": 0.0})


def test_a_broken_compiler_is_a_line_of_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cc").write_text("#!/bin/sh\necho broken >&2\nexit 1\n")
    (tmp_path / "cc").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    said = found(1, "cpu")["compiler"]
    assert f"{tmp_path}/cc ended with status 1: broken" in said and "torch twins run" in said


@pytest.mark.parametrize("card", ["h200", "a100"])
def test_a_card_that_is_assumed_says_who_would_compute_and_how_fast(card: str) -> None:
    report = examine_card(EngineConfig(), card)
    named = {name.removeprefix("kernel ") for name, _, _ in report["kernels"]}
    assert {"paged_attention", "rms_norm", "linear"} <= named
    attention = {value for name, value, _ in report["kernels"] if name == "kernel paged_attention"}
    assert "torch" not in attention, "nothing falls to a twin in silence where Triton serves"
    assert [rows for rows, *_ in report["steps"]] == [1, 8, 32, 128, 256]
    assert all(floor <= took for _, took, floor, _ in report["steps"])
    shown = _render_assumed(report)
    assert "Steps that decode" in shown and "On 2 of these (-tp 2): " in shown


@pytest.mark.parametrize("name", ["cpu", "tpu", "", "h200.json"])
def test_what_is_no_card_is_refused_with_those_there_are(name: str) -> None:
    with pytest.raises(ConfigError, match=r"give one of h200, h100, b200"):
        examine_card(EngineConfig(), name)
