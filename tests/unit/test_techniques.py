"""The register and the config must name the same switches."""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import fields

import pytest

from headrace import techniques
from headrace.commands import techniques as command
from headrace.config import ENGINE_PARTS
from headrace.engine.resolve import create_config
from headrace.errors import ConfigError
from headrace.flags import technique_values


def test_every_switch_has_an_entry_and_every_entry_a_switch() -> None:
    registered = [item.switch for item in techniques.TECHNIQUES]
    assert len(set(registered)) == len(registered)
    switches = {
        f"{name}.{item.name}"
        for name, part in ENGINE_PARTS.items()
        for item in fields(part)
        if item.metadata.get("technique")
    }
    assert set(registered) == switches


def test_a_switch_has_two_values_and_its_flag_knows_both() -> None:
    """Reading the default also proves that the path exists; a switch whose default is neither is chosen by device."""
    for item in techniques.TECHNIQUES:
        assert item.on != item.off and item.default in (item.on, item.off, None), item.name
        for word, value in (("on", item.on), ("off", item.off)):
            assert list(technique_values([f"{item.name}={word}"]).values()) == [value], item.name


def test_a_switch_may_be_named_after_the_technique_and_mean_the_opposite() -> None:
    """Graphs are on where ``enforce_eager`` is off."""
    off = technique_values(["cuda-graphs=off"])
    assert off == technique_values(["cuda_graphs=false"]) == {"enforce_eager": True}
    assert technique_values(["cuda_graphs=yes"]) == {"enforce_eager": False}
    assert create_config(technique={"cuda_graphs": False}).device.enforce_eager
    assert not create_config(technique={"cuda_graphs": True}).device.enforce_eager
    assert create_config(technique={"overlap": False, "prefix_caching": False}).device.overlap == 0
    with pytest.raises(ConfigError, match="no such switch"):
        technique_values(["enforce_eager=off"])  # which of the two would that be?
    assert techniques.find_technique("cuda_graphs").default_state == "on"


def test_names_are_found_in_either_spelling_and_unknown_ones_refused() -> None:
    assert techniques.find_technique("kv-caching").switch == "cache.kv_caching"
    with pytest.raises(ConfigError, match=r"chunked_prefill, .*overlap"):
        techniques.find_technique("magic")


def test_the_command_prints_every_entry_both_ways(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.run(Namespace(json=True)) == 0
    assert [item["name"] for item in json.loads(capsys.readouterr().out)] == [
        item.name for item in techniques.TECHNIQUES
    ]
    assert command.run(Namespace(json=False)) == 0
    text = capsys.readouterr().out
    assert all(item.name in text and item.ablate in text for item in techniques.TECHNIQUES)
