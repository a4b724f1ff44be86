"""A card's profile without a card: what is kept, refused, found and estimated once its measurement is given."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace.commands import doctor
from headrace.cost.profile import DeviceIdentity, Limits, find_profile, save_profile
from headrace.errors import ConfigError
from headrace.worker import card, profile
from headrace.worker.card import LaunchCosts

CARD = DeviceIdentity(kind="cuda", name="Some Card", threads=0, features=("sm_90", "132 SMs", "140 GiB"))
LIMITS = Limits(4.5e12, 4.28e12, {"bfloat16": 795e12, "float16": 790e12, "float32": 5e13})


def measure(
    monkeypatch: pytest.MonkeyPatch, reads: tuple[float, ...] = (4.4e12, 4.5e12, 4.6e12), others: int = 0
) -> None:
    """What is found on the card when it is measured."""
    played: dict[str, Callable[..., Any]] = {
        "_emptied": nullcontext,
        "_working_set": lambda wanted: wanted,
        "_taken_by_others": lambda: others,
        "_bandwidths": lambda *_: (list(reads), [LIMITS.copy_bandwidth]),
        "_gemm_rates": lambda dtype, rounds: [LIMITS.gemm_rates[str(dtype).removeprefix("torch.")]],
        "measure_launches": lambda: LaunchCosts(4e-6, 2e-6, 1.3e-6),
        "_sustained_gemm_rate": lambda dtype: 660e12,
    }
    for name, function in played.items():
        monkeypatch.setattr(card, name, function)


@pytest.fixture(autouse=True)
def some_card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(profile, "card_identity", lambda: CARD)
    measure(monkeypatch)
    monkeypatch.setattr(profile, "glance_at_card", lambda: Limits(4e12, 4e12, {"bfloat16": 8e14}))


def test_a_measured_card_is_kept_and_found_again() -> None:
    lines: list[str] = []
    measured = profile.measure_profile(lines.append, "cuda")
    save_profile(measured)
    assert find_profile(CARD) == measured
    found, decision = profile.resolve_profile("cuda")
    assert (
        found == measured and decision.value == "4.50 TB/s, 795.0 TFLOP/s bfloat16" and "threads" not in decision.reason
    )
    assert (measured.launch_overhead, measured.graph_kernel, measured.graph_gap) == (4e-6, 2e-6, 1.3e-6)
    assert (
        measured.spread == pytest.approx(0.2 / 4.6)
        and "4.60 TB/s" in lines[0]
        and "660.0 TFLOP/s" in lines[1]
        and "1.30 µs" in lines[2]
    )


def test_another_size_of_the_same_card_is_another_device(monkeypatch: pytest.MonkeyPatch) -> None:
    save_profile(profile.measure_profile(device="cuda"))
    part = DeviceIdentity(kind="cuda", name="Some Card", threads=0, features=("sm_90", "60 SMs", "70 GiB"))
    assert find_profile(part) is None and part.slug != CARD.slug


def test_a_card_that_was_not_quiet_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    measure(monkeypatch, reads=(4.5e12, 4.5e12, 5.1e12))
    with pytest.raises(ConfigError, match=r"0\.88.*Stop other work"):
        profile.measure_profile(device="cuda")


def test_what_others_hold_of_the_card_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    measure(monkeypatch, others=30 * 2**30)
    profile.measure_profile(lines.append, "cuda")
    assert "30.0 GiB of the card" in lines[-1]


def test_a_card_that_was_never_measured_is_estimated() -> None:
    found, decision = profile.resolve_profile("cuda")
    assert (
        found is not None
        and found.source == "estimated"
        and found.identity == CARD
        and "doctor --profile" in decision.reason
    )


def test_a_shared_card_is_taken_for_one_of_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    one = replace(CARD, name="NVIDIA H200")
    monkeypatch.setattr(profile, "card_identity", lambda: one)
    monkeypatch.setattr(profile, "glance_at_card", lambda: pytest.fail("others compute there"))
    found, decision = profile.resolve_profile("cuda", shared=True)
    assert found is not None and found.identity == one and found.read_bandwidth > 4e12 and "its kind" in decision.reason


def test_a_full_card_does_not_stop_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> Limits:
        raise ConfigError("The card has 0.1 GiB left.")

    monkeypatch.setattr(profile, "glance_at_card", full)
    found, decision = profile.resolve_profile("cuda")
    assert found is None and "0.1 GiB left" in decision.reason


def test_a_full_card_does_not_silence_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> Limits:
        raise ConfigError("The card has 0.1 GiB left.")

    monkeypatch.setattr(profile, "card_limits", full)
    assert doctor.found(1, "cuda")["limits now"] == "not measured: The card has 0.1 GiB left."


def test_doctor_shows_a_cards_profile_in_its_own_words() -> None:
    facts = doctor._profile_facts(profile.measure_profile(device="cuda"))
    assert "Some Card (sm_90, 132 SMs, 140 GiB)" in facts["measured"] and "threads" not in facts["measured"]
    assert (
        facts["matrix product, float32"] == "50.0 TFLOP/s"
        and facts["... bfloat16, held for a second"] == "660.0 TFLOP/s"
    )
    assert facts["small operator"] == "4.0 µs to launch; in a CUDA graph 2.00 µs, of which 1.30 µs between two kernels"
