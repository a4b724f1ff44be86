"""Cached prefixes are named by all that their keys and values depend on: the model, its revision, precision and
layout."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from headrace.config import Decision, EngineConfig
from headrace.engine.assembly import prefix_namespace
from headrace.engine.executor import ExecutorInfo
from headrace.models.source import ModelSource, WeightFormat
from headrace.spec import KVGroup, KVKind, KVSpec

GROUP = KVGroup(KVSpec((0, 1), KVKind.FULL, 16, 2, 8, 2), 10)
INFO = ExecutorInfo(100, 64, 4, (GROUP,), "cpu")


def test_what_changes_keys_or_their_layout_changes_the_names(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"one")
    config, dtype = EngineConfig(), (Decision("dtype", "bfloat16", "as asked"),)
    source = ModelSource("m", tmp_path, WeightFormat.SAFETENSORS, {"hidden_size": 8}, {}, ())
    drawn, reseeded = replace(source, weights=WeightFormat.DUMMY), replace(config, model=replace(config.model, seed=1))
    wider = replace(INFO, kv_groups=(replace(GROUP, spec=replace(GROUP.spec, block_size=32)),))

    def names() -> list[bytes]:
        return [
            prefix_namespace(config, source, INFO, dtype),
            prefix_namespace(config, replace(source, config={"hidden_size": 9}), INFO, dtype),
            prefix_namespace(config, drawn, INFO, dtype),
            prefix_namespace(reseeded, drawn, INFO, dtype),
            prefix_namespace(config, source, INFO, (Decision("dtype", "float16", "as asked"),)),
            prefix_namespace(config, source, wider, dtype),
        ]

    before = names()
    assert len({*before}) == 6 and before == names()
    more = replace(INFO, kv_groups=(replace(GROUP, num_blocks=99),))
    assert prefix_namespace(config, source, more, dtype) == before[0]  # how many there are changes nothing
    assert prefix_namespace(reseeded, source, INFO, dtype) == before[0]  # nor does a seed that draws no weights
    os.utime(weights, ns=(1, 1))
    assert names()[0] != before[0]
