"""Profiles: kept whole, found again by device, refused when they cannot be right."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.cost.profile import (
    DeviceIdentity,
    DeviceProfile,
    check_quiet,
    cpu_identity,
    find_profile,
    load_profile,
    save_profile,
)
from headrace.errors import ConfigError

IDENTITY = DeviceIdentity(kind="cpu", name="Some CPU 26/2/1", threads=2, features=("avx2", "avx512f"))


def profile(**changes: object) -> DeviceProfile:
    fields: dict[str, object] = dict(
        identity=IDENTITY, read_bandwidth=74e9, copy_bandwidth=60e9, gemm_rates={"bfloat16": 1e12, "float32": 2e11}
    )
    return DeviceProfile(**{**fields, **changes})  # type: ignore[arg-type]


def test_a_stored_profile_is_found_by_the_device_it_was_measured_on(tmp_path: Path) -> None:
    stored = profile(source="measured", versions={"torch": "2"}, efficiency=0.8, step_overhead=1e-3)
    save_profile(stored, tmp_path)
    assert find_profile(IDENTITY, tmp_path) == stored
    assert find_profile(replace(IDENTITY, threads=4), tmp_path) is None
    assert find_profile(replace(IDENTITY, features=("avx2",)), tmp_path) is None


def test_a_later_profile_replaces_the_earlier_one_and_leaves_no_scratch_file(tmp_path: Path) -> None:
    save_profile(profile(), tmp_path)
    save_profile(profile(read_bandwidth=80e9), tmp_path)
    assert len(list(tmp_path.iterdir())) == 1
    found = find_profile(IDENTITY, tmp_path)
    assert found is not None and found.read_bandwidth == 80e9


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"version": 1}', '{"version": 1, "identity": 3}', '{"version": 1, "identity": {"features": []}}'],
)
def test_a_damaged_file_is_refused_by_name_with_the_remedy(tmp_path: Path, text: str) -> None:
    path = tmp_path / f"{IDENTITY.slug}.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="doctor --profile"):
        find_profile(IDENTITY, tmp_path)


def test_another_version_and_unknown_or_missing_fields_are_refused(tmp_path: Path) -> None:
    path = save_profile(profile(), tmp_path)
    good = json.loads(path.read_text())
    for change in (
        {"version": 2},
        {"surprise": 1},
        {"read_bandwidth": None},
        {"read_bandwidth": float("nan")},
        {"gemm_rates": {}},
    ):
        path.write_text(json.dumps({**good, **change}))
        with pytest.raises(ConfigError, match="doctor --profile"):
            load_profile(path)
    path.write_text(json.dumps({key: value for key, value in good.items() if key != "copy_bandwidth"}))
    with pytest.raises(ConfigError, match="doctor --profile"):
        load_profile(path)


def test_a_profile_below_nine_tenths_of_a_plain_read_is_refused() -> None:
    check_quiet(0.9e9, 1e9)
    with pytest.raises(ConfigError, match=r"0\.89.*Stop other work"):
        check_quiet(0.89e9, 1e9)


def test_a_dtype_that_was_not_measured_gets_the_slowest_rate() -> None:
    assert profile().gemm_rate("float32") == 2e11
    assert profile().gemm_rate("float16") == 2e11


def test_this_machine_has_a_stable_identity() -> None:
    assert cpu_identity(2) == cpu_identity(2)
    assert cpu_identity(2).slug != cpu_identity(1).slug
    assert cpu_identity(2).name
