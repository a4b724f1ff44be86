"""Workloads, arrivals and the figures made from samples."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.errors import ConfigError
from headrace.planner.workload.conversations import Conversation, conversations_of, random_conversations
from headrace.planner.workload.load import Lengths, arriving, conversing, drawn, traced
from headrace.planner.workload.statistics import Sample, failure_reasons, parse_goodput, spread_of, summarise
from tests.support.outside import shared


def test_a_seed_gives_the_same_workload_and_another_seed_another() -> None:
    first, again, other = (
        random_conversations(5, Lengths(20, 10, 0.5), vocab_size=100, seed=seed) for seed in (1, 1, 2)
    )
    assert first == again != other
    lengths = [
        (len(d.turns[0].new_ids), d.turns[0].max_tokens)
        for d in random_conversations(200, Lengths(20, 10, 0.5), vocab_size=100)
    ]
    assert {min(p for p, _ in lengths), max(p for p, _ in lengths)} == {10, 30}
    assert {min(o for _, o in lengths), max(o for _, o in lengths)} == {5, 15}
    assert all(0 <= token < 100 for conversation in first for token in conversation.turns[0].new_ids)


def test_prefixes_are_shared_in_turn_and_suffixes_are_not() -> None:
    conversations = conversations_of(drawn(6, Lengths(8, 4), prefix=32, num_prefixes=2), vocab_size=1000)
    prefixes = [d.turns[0].new_ids[:32] for d in conversations]
    assert prefixes[0] == prefixes[2] == prefixes[4] != prefixes[1] == prefixes[3]
    assert len({d.turns[0].new_ids[32:] for d in conversations}) == 6


def test_conversations_share_the_system_prompt_and_think_between_turns() -> None:
    conversations = conversations_of(conversing(50, 3, Lengths(8, 4), system=16, think=2.0), vocab_size=1000)
    assert len({d.turns[0].new_ids[:16] for d in conversations}) == 1
    assert all(
        len(d.turns) == 3 and d.turns[0].think_seconds == 0 and len(d.turns[1].new_ids) == 8 for d in conversations
    )
    assert np.mean([turn.think_seconds for d in conversations for turn in d.turns[1:]]) == pytest.approx(2.0, rel=0.3)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_arrivals_have_the_rate_and_the_burstiness_asked_for(burstiness: float) -> None:
    asked = arriving(drawn(4000, Lengths(1, 1)), 10.0, burstiness=burstiness, seed=0)
    arrivals = [d.arrival for d in conversations_of(asked, vocab_size=10)]
    gaps = np.diff([0.0, *arrivals])  # type: ignore[list-item]
    assert gaps.mean() == pytest.approx(0.1, rel=0.1)
    assert gaps.std() / gaps.mean() == pytest.approx(1 / math.sqrt(burstiness), rel=0.15)


def test_an_infinite_rate_sends_all_at_once_and_a_rate_of_zero_is_refused() -> None:
    asked = drawn(3, Lengths(1, 1))
    assert [d.arrival for d in conversations_of(arriving(asked, math.inf, seed=0), vocab_size=10)] == [0, 0, 0]
    with pytest.raises(ConfigError, match="above 0"):
        arriving(asked, 0, seed=0)


def traced_conversations(path: Path, *, vocab_size: int, **how: Any) -> list[Conversation]:
    return conversations_of(traced(path, **how), vocab_size=vocab_size)


def test_an_azure_trace_is_read_and_sped_up(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.4799600,30,80000\n"
    )
    first, second = traced_conversations(path, count=None, speed=2.0, max_prompt=100, max_output=50, vocab_size=10)
    assert (first.arrival, len(first.turns[0].new_ids), first.turns[0].max_tokens) == (0.0, 100, 10)
    assert second.arrival == pytest.approx(0.25)
    assert (len(second.turns[0].new_ids), second.turns[0].max_tokens) == (30, 50)


def test_equal_hash_ids_of_a_mooncake_trace_are_equal_tokens(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 1000 * i, "input_length": 1200, "output_length": 5, "hash_ids": [0, 1 + i, 7 + i]}
        for i in range(2)
    ]
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    first, second = traced_conversations(path, count=None, speed=1.0, max_prompt=10_000, max_output=50, vocab_size=1000)
    a, b = first.turns[0].new_ids, second.turns[0].new_ids
    assert len(a) == len(b) == 1200 and a[:512] == b[:512] and a[512:1024] != b[512:1024]
    assert second.arrival == 1.0


@pytest.mark.parametrize(
    ("name", "text"),
    [("t.csv", "A,B\n1,2\n"), ("t.jsonl", '{"timestamp": 1}\n'), ("t.jsonl", "{"), ("t.txt", ""), ("t.csv", "")],
)
def test_a_trace_that_cannot_be_read_is_refused_with_its_columns(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=r"columns must be|Row 1 |no requests"):
        traced_conversations(tmp_path / name, count=None, speed=1.0, max_prompt=10, max_output=10, vocab_size=10)
    with pytest.raises(ConfigError, match="existing file"):
        traced_conversations(
            tmp_path / "absent.csv", count=None, speed=1.0, max_prompt=10, max_output=10, vocab_size=10
        )


@pytest.mark.parametrize("name", ["azure_2023_code.csv", "mooncake_conversation.jsonl"])
def test_published_traces_are_read(name: str) -> None:
    conversations = traced_conversations(
        shared("data", "traces", name), count=20, speed=1.0, max_prompt=600, max_output=10, vocab_size=100
    )
    assert len(conversations) == 20
    assert all(a.arrival <= b.arrival for a, b in pairwise(conversations))  # type: ignore[operator]


def sample(sent: float, arrivals: list[float], **more: object) -> Sample:
    return Sample(sent=sent, arrivals=arrivals, output_tokens=len(arrivals), prompt_tokens=10, **more)  # type: ignore[arg-type]


def test_figures_are_those_defined() -> None:
    samples = [sample(0.0, [0.1, 0.2, 0.5]), sample(1.0, [1.3]), sample(2.0, [], error="refused"), sample(3.0, [])]
    summary = summarise(samples, 4.0, {"ttft": 0.2, "tpot": 0.5})
    assert (summary["completed"], summary["failed"], summary["total_input_tokens"], summary["total_output_tokens"]) == (
        2,
        2,
        20,
        4,
    )
    assert (summary["request_throughput"], summary["output_throughput"], summary["request_goodput"]) == (0.5, 1.0, 0.25)
    assert summary["mean_ttft_ms"] == pytest.approx(200)
    assert summary["mean_tpot_ms"] == pytest.approx(200)  # (0.5 - 0.1) / 2, the one-token answer has none
    assert summary["median_itl_ms"] == pytest.approx(200)
    assert summary["mean_e2el_ms"] == pytest.approx(400)
    assert failure_reasons(samples) == {"refused": 1, "an answer without a token": 1}
    late = [Sample(sent=0.0, error=f"late by {seconds} s, of 3") for seconds in (1.5, 20, 0.25)]
    assert failure_reasons([*late, *samples])["late by 1.5 s, of 3"] == 3, "numbers alone make no other reason"


def test_tokens_that_arrive_together_are_one_gap_but_count_for_tpot() -> None:
    burst = Sample(sent=0.0, arrivals=[1.0, 3.0], output_tokens=5, prompt_tokens=1)
    assert burst.tpot == pytest.approx(0.5)
    assert burst.gaps == [2.0]


def test_percentiles_interpolate() -> None:
    assert spread_of([i / 1e3 for i in range(101)], "x")["p99_x_ms"] == pytest.approx(99)
    assert spread_of([0.001, 0.002], "x")["median_x_ms"] == pytest.approx(1.5)
    assert spread_of([], "x")["mean_x_ms"] == 0


def test_client_lag_is_shown_for_open_loops_alone() -> None:
    assert "mean_client_lag_ms" not in summarise([sample(0.0, [1.0])], 1.0)
    assert summarise([sample(0.5, [1.0], due=0.25)], 1.0)["mean_client_lag_ms"] == pytest.approx(250)


def test_goodput_limits_are_read_in_milliseconds() -> None:
    assert parse_goodput(["ttft:500", "tpot:50"]) == {"ttft": 0.5, "tpot": 0.05}
    for bad in ("itl:5", "ttft", "ttft:x", "ttft:0", "ttft:nan"):
        with pytest.raises(ConfigError, match="--goodput"):
            parse_goodput([bad])
