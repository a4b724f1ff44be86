"""The register and the config must name the same switches."""

from __future__ import annotations

import json
from argparse import Namespace

import pytest

from headrace import techniques
from headrace.commands import techniques as command
from headrace.errors import ConfigError


def test_every_switch_has_an_entry_and_every_entry_a_switch() -> None:
    registered = [item.switch for item in techniques.TECHNIQUES]
    assert len(set(registered)) == len(registered)
    assert set(registered) == set(techniques.config_switches())


def test_off_is_another_value_than_the_default() -> None:
    for item in techniques.TECHNIQUES:
        assert item.default != item.off, item.name  # reading the default also proves that the path exists


def test_names_are_found_in_either_spelling_and_unknown_ones_refused() -> None:
    assert techniques.find_technique("kv-caching").switch == "cache.kv_caching"
    with pytest.raises(ConfigError, match=r"chunked_prefill, .*overlap"):
        techniques.find_technique("magic")


def test_the_command_prints_every_entry_both_ways(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.run(Namespace(json=True)) == 0
    assert [item["name"] for item in json.loads(capsys.readouterr().out)] == [item.name for item in techniques.TECHNIQUES]
    assert command.run(Namespace(json=False)) == 0
    text = capsys.readouterr().out
    assert all(item.name in text and item.ablate in text for item in techniques.TECHNIQUES)
