"""Where a target and its draft model are best placed, worked out by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from headrace.commands import doctor
from headrace.config import EngineConfig
from headrace.cost.profile import DeviceIdentity, DeviceProfile
from headrace.errors import OutOfMemory
from headrace.models.source import _DEMO
from headrace.planner.devices import Device, Efficiency, Share
from headrace.planner.dovetail import Pair, advice, placements
from headrace.planner.pricing import CARD_BYTES
from headrace.speculative.settings import SpeculativeSettings
from tests.support.command import status_of
from tests.support.specs import SMALL

WHOLE = Share(1.0, 1.0)
LARGE = replace(SMALL, layers=SMALL.layers * 8)
CONTEXT = 100


def _device(kind: str, bandwidth: float, memory: int) -> Device:
    profile = DeviceProfile(
        identity=DeviceIdentity(kind=kind, name=f"tiny {kind}", threads=1),
        read_bandwidth=bandwidth,
        copy_bandwidth=bandwidth,
        gemm_rates={"bfloat16": 1e15, "float32": 1e15},
    )
    return Device(f"tiny {kind}", profile, memory, Efficiency(WHOLE, WHOLE, WHOLE, WHOLE, 0.0, "exact"), 0.0)


def _config() -> EngineConfig:
    config = EngineConfig()
    return replace(
        config,
        model=replace(config.model, max_model_len=256),
        scheduler=replace(config.scheduler, max_num_seqs=2, max_num_batched_tokens=64),
    )


def _pair(**settings: Any) -> Pair:
    return Pair(LARGE, {"cpu": SMALL, "cuda": SMALL}, SpeculativeSettings(method="draft_model", model="-", **settings))


def _card(bytes_beside: int) -> Device:
    return _device("cuda", 1e9, int((CARD_BYTES + bytes_beside) / _config().cache.gpu_memory_utilization))


def test_a_target_that_does_not_fit_is_the_cpu_s_and_its_draft_the_card_s() -> None:
    devices = {"cuda": _card(2_000_000), "cpu": _device("cpu", 1e8, 2**33)}
    found = placements(_pair(num_speculative_tokens=4, acceptance=0.8), _config(), devices, CONTEXT)
    assert (found[0].target, found[0].draft, found[0].drafts) == ("cpu", "cuda", 4)
    assert len(found) == 6
    assert {(each.target, each.draft) for each in found if not each.fits} == {
        ("cuda", None),
        ("cuda", "cpu"),
        ("cuda", "cuda"),
    }
    problems = [each.problem for each in found if not each.fits]
    assert all("GiB" in each for each in problems) and any("does not fit on tiny cuda" in each for each in problems)
    said = advice(found, "cuda")
    assert said.startswith("Chosen: the target does not fit on cuda (") and "--device cpu" in said
    assert '"device": "cuda" in --speculative-config' in said


def test_what_is_predicted_follows_from_the_seconds_of_both() -> None:
    devices = {"cuda": _card(2_000_000), "cpu": _device("cpu", 1e8, 2**33)}
    speeds = {}
    for ahead in (True, False):
        config = _config()
        config = replace(config, device=replace(config.device, drafts_ahead=ahead))
        found = placements(_pair(num_speculative_tokens=4, acceptance=0.8), config, devices, CONTEXT)
        speeds[ahead] = {(each.target, each.draft): each.tokens_a_second for each in found}
    tokens, right, verify = sum(0.8**n for n in range(5)), 0.8**5, 1 / speeds[True]["cpu", None]
    # a verification of five reads what a step of one reads, but for keys, which are few here
    passes = tokens / speeds[False]["cpu", "cuda"] - verify
    ahead = tokens / speeds[True]["cpu", "cuda"] - verify
    each = passes / 4
    assert 0 < passes < 0.1 * verify, "the card is ten times as fast, the draft an eighth"
    assert ahead == pytest.approx((1 - right) * 4.5 * each, rel=0.1)
    assert speeds[True]["cpu", "cpu"] == speeds[False]["cpu", "cpu"] < speeds[False]["cpu", "cuda"]


def test_where_both_fit_on_the_card_they_are_there() -> None:
    devices = {"cuda": _card(2**30), "cpu": _device("cpu", 1e8, 2**33)}
    found = placements(_pair(acceptance=0.9), _config(), devices, CONTEXT)
    assert all(each.fits for each in found)
    assert (found[0].target, found[0].draft) == ("cuda", "cuda") and found[0].drafts > 1
    assert advice(found, "cuda").endswith('--device cuda, and no "device" in --speculative-config.')
    hopeless = placements(_pair(acceptance=0.0), _config(), devices, CONTEXT)
    assert hopeless[0].draft is None and advice(hopeless, "cuda").endswith("the target on cuda, without drafts.")


def test_neither_has_room() -> None:
    devices = {"cuda": _card(1000), "cpu": _device("cpu", 1e8, 1000)}
    found = placements(_pair(), _config(), devices, CONTEXT)
    assert advice(found, "cuda") == "Neither device has room for the target."


def test_doctor_says_where_the_target_would_fit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where the engine does not start for want of memory, too: that is when it is asked."""

    def full(*_: object) -> dict[str, Any]:
        raise OutOfMemory("This model does not fit: nothing is left for KV.")

    monkeypatch.setattr(doctor, "_devices", lambda: {"cuda": _card(1000), "cpu": _device("cpu", 1e8, 2**33)})
    monkeypatch.setattr(doctor, "examine_engine", full)
    drafts = json.dumps({"model": str(_DEMO), "num_speculative_tokens": 3})
    words = ["doctor", "--device", "cpu", "--max-model-len", "256", "--speculative-config", drafts]
    assert status_of(*words) == 1
    shown = capsys.readouterr().out
    assert "target on  draft on  tokens  tokens/s  why not" in shown and "Problem\n  This model does not fit" in shown
    assert "a draft right with probability 0.7" in shown and "Chosen: the target on cpu" in shown
    with pytest.raises(OutOfMemory):
        doctor.run(doctor_args(["--device", "cpu"]))


def doctor_args(words: list[str]) -> Any:
    import argparse

    parser = argparse.ArgumentParser()
    doctor.add_arguments(parser)
    return parser.parse_args(words)
