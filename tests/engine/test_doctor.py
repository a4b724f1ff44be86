"""The device's limits beside each step, and the account of memory."""

from __future__ import annotations

import json
import mmap
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from headrace.bench.driver import drive
from headrace.bench.steps import summarise_steps
from headrace.bench.workload import Lengths, random_dialogues
from headrace.commands.doctor import _render_memory
from headrace.cost.profile import DeviceProfile, save_profile
from headrace.engine.keywords import create_config
from headrace.engine.llm import create_engine
from headrace.worker.profile import OtherProcesses, identity_here, resolve_profile
from headrace.worker.residency import resident_bytes


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DeviceProfile:
    """A profile of this machine's own identity, as ``doctor --profile`` would have kept it."""
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


def test_a_kept_profile_is_used_and_an_unmeasured_device_is_estimated_and_said(stored: DeviceProfile, tmp_path: Path) -> None:
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
    engine = create_engine(create_config(load_format="dummy", kv_cache_memory=2**24, threads=torch.get_num_threads()), with_tokenizer=False)
    try:
        drive(engine.core, random_dialogues(2, Lengths(20, 4), vocab_size=engine.info.vocab_size))
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
    tensor = torch.frombuffer(mmap.mmap(-1, 8 * 2**20), dtype=torch.uint8)  # fresh pages, where an allocator may reuse touched ones
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
    busy = subprocess.run([sys.executable, "-c", "import time; end = time.process_time() + 0.4\nwhile time.process_time() < end: pass"], check=True)
    assert busy.returncode == 0
    assert others.share() > 0.02


def test_a_card_s_account_names_each_purpose_once() -> None:
    purposes = {"weights": 3 * 2**20, "kv_cache": 5 * 2**20, "context": 2**20}
    facts = {"purposes": purposes, "resident": 10 * 2**20, "residual": 2**20, "share explained": 0.9, "pinned host memory": 2**21}
    text = _render_memory({"announced": purposes, "memory": facts})
    lines = [line.split() for line in text.splitlines()]
    assert [line[-1] for line in lines if line[0] == "kv_cache"] == ["5"]
    assert "set aside" not in text and "accounted for: 90.00%" in text and "pinned host memory: 2.0 MiB" in text
