"""Config fields: their bounds hold whichever way a value comes, and an error names field, value and remedy."""

from __future__ import annotations

import dataclasses
import string
from operator import attrgetter
from typing import Any

import pytest

from headrace import config
from headrace.config import (
    CONFLICTS,
    OPTIONS,
    CacheConfig,
    DeviceConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
    ServerConfig,
    field_types,
)
from headrace.errors import ConfigError
from headrace.spec import KV_FORMATS

CLASSES = (ModelConfig, CacheConfig, SchedulerConfig, DeviceConfig, ServerConfig)


@pytest.mark.parametrize(
    ("config_class", "name", "value", "words"),
    [
        (ModelConfig, "dtype", "fp8", "give one of auto, bfloat16"),
        (ModelConfig, "max_model_len", 1, "give at least 2"),
        (ModelConfig, "max_model_len", "32k", "give a whole number or None"),
        (ModelConfig, "seed", True, "give a whole number"),
        (ModelConfig, "seed", 2**63, "at most 63 bits"),
        (ModelConfig, "quantization", "int3", "give one of none, fp8, "),
        (ModelConfig, "served_model_name", "one", "give a tuple of strings"),
        (CacheConfig, "block_size", 15, "give one of 8, 16, 32, 64, 128"),
        (CacheConfig, "gpu_memory_utilization", 1.01, "give a share above 0 and up to 1"),
        (CacheConfig, "gpu_memory_utilization", float("nan"), "give a share above 0 and up to 1"),
        (CacheConfig, "enable_prefix_caching", 1, "give true or false"),
        (SchedulerConfig, "max_num_seqs", 0, "give at least 1"),
        (DeviceConfig, "pipeline_parallel_size", 17, "give 1 to 16"),
        (DeviceConfig, "overlap", 3, "give one of 0, 1, 2"),
        (DeviceConfig, "device_time", -0.1, "give at least 0.0"),
        (ServerConfig, "port", 70000, "give 0 to 65535"),
        (ServerConfig, "shutdown_timeout", float("nan"), "give at least 0.0"),
    ],
)
def test_bad_value_is_named_with_its_remedy(config_class: Any, name: str, value: Any, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_class(**{name: value})
    assert str(caught.value).startswith(f"{name} is {value!r}"[: len(name) + 5]) and words in str(caught.value)


def test_every_value_a_field_may_have_is_accepted() -> None:
    """Defaults, every choice, None where optional, and an int for a float."""
    beside: dict[str, Any] = {"ssl_cert_reqs": {"ssl_certfile": "chain.pem", "ssl_ca_certs": "ca.pem"}}
    for config_class in CLASSES:
        for field in dataclasses.fields(config_class):
            kind = field_types(config_class)[field.name]
            for value in [field.default, *field.metadata.get("choices", ()), *([None] if kind.optional else [])]:
                if value or field.name not in beside:
                    config_class(**{field.name: value, **beside.get(field.name, {})})
    assert CacheConfig(gpu_memory_utilization=1).gpu_memory_utilization == 1


def test_what_is_told_of_flags_is_of_fields_and_formats_that_there_are() -> None:
    for config_class in CLASSES:
        assert set(OPTIONS[config_class.__name__]) <= set(field_types(config_class)), config_class
    assert OPTIONS["CacheConfig"]["kv_cache_dtype"]["choices"][4:] == list(KV_FORMATS)


def test_conflicts_are_of_settings_that_there_are() -> None:
    for name, rules in CONFLICTS.items():
        default = getattr(config, name)()
        for rule in rules:
            shown = {each for _, each, _, _ in string.Formatter().parse(rule["say"]) if each and each != "it"}
            for setting in shown.union(*rule["when"]):
                attrgetter(setting)(default)


def test_flags_of_all_classes_have_names_of_their_own() -> None:
    """One flat namespace holds them all: a name twice would silently set two fields."""
    names = [field.name for config_class in CLASSES for field in dataclasses.fields(config_class)]
    assert len(names) == len(set(names))


def test_configs_are_frozen_and_hold_no_state_in_common() -> None:
    first, second = EngineConfig(), EngineConfig(scheduler=SchedulerConfig(max_num_seqs=3))
    with pytest.raises(dataclasses.FrozenInstanceError):
        first.scheduler.max_num_seqs = 3  # type: ignore[misc]
    assert (first.scheduler.max_num_seqs, second.scheduler.max_num_seqs) == (None, 3)


def test_logits_of_each_sequence_fit_unless_they_may_not() -> None:
    assert SchedulerConfig().logits_rows == SchedulerConfig(max_num_seqs=256).logits_rows == 512
    assert (
        SchedulerConfig(max_num_seqs=1024).logits_rows == 1024
        and SchedulerConfig(max_num_seqs=1024, max_logits_rows=3).logits_rows == 3
    )
