"""What the engine chooses by device, and that it says why."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from headrace.config import EngineConfig, ModelConfig
from headrace.engine.resolve import resolve_config


def resolved(device: str, *, long_steps: bool = False, **asked: Any) -> tuple[int | None, int | None, dict[str, str]]:
    """(sequences at once, tokens a step, the reasons by name)."""
    config = EngineConfig()
    config, decisions = resolve_config(
        replace(config, scheduler=replace(config.scheduler, **asked)), device, long_steps=long_steps
    )
    return (
        config.scheduler.max_num_seqs,
        config.scheduler.max_num_batched_tokens,
        {each.name: each.reason for each in decisions},
    )


def test_a_gpu_runs_more_at_once_than_a_cpu() -> None:
    assert [resolved(device)[0] for device in ("cuda", "cpu", "none")] == [512, 256, 256]
    assert "reads the weights once" in resolved("cuda")[2]["max_num_seqs"]


def test_steps_are_larger_where_that_gains() -> None:
    seqs, tokens, reasons = resolved("cuda", long_steps=True)
    assert (seqs, tokens) == (512, 16384)
    assert "offline" in reasons["max_num_batched_tokens"]
    assert resolved("cpu", long_steps=True)[1] == resolved("cpu")[1] == 512


def test_steps_are_whole_rounds_of_tiles() -> None:
    """256 rows on 132 processors, whatever the columns: a multiple of 33 such rows of tiles."""
    assert resolved("cuda")[1] == 33 * 256


def test_what_is_asked_for_is_not_chosen() -> None:
    seqs, tokens, reasons = resolved("cuda", max_num_seqs=3, max_num_batched_tokens=64)
    assert (seqs, tokens) == (3, 64)
    assert not {"max_num_seqs", "max_num_batched_tokens"} & set(reasons)


@pytest.mark.parametrize("device", ["cuda", "cpu", "none"])
def test_a_step_has_a_token_for_every_sequence(device: str) -> None:
    assert resolved(device, max_num_seqs=20_000)[1] == 20_000


def test_processes_that_share_weights_take_short_steps() -> None:
    shares = replace(EngineConfig(), model=ModelConfig(share_weights=True))
    for long_steps in (False, True):
        found = resolve_config(shares, "cuda", long_steps=long_steps)[0].scheduler
        assert (found.max_num_seqs, found.max_num_batched_tokens, found.logits_rows) == (128, 1024, 128)
    assert resolve_config(shares, "cpu")[0].scheduler.max_num_batched_tokens == 512
