"""Published traces, known by their columns; what is none, or cannot have happened, is a sentence with its numbers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from headrace.errors import ConfigError
from headrace.planner.workload import traces
from headrace.planner.workload.conversations import conversations_of
from headrace.planner.workload.load import trace_lengths, trace_rows, traced
from headrace.planner.workload.traces import TraceRow, read_trace

AZURE_2023 = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.4799600,30,8\n"
)
AZURE_2024 = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-12 00:00:00.003000+00:00,2162,5\n2024-05-12 02:00:01+02:00,30,8\n"
)
BURST = (
    "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,ChatGPT,472,18,490,Conversation log\n45.5,GPT-4,1087,0,1087,Conversation log\n"
)
MOONCAKE = "".join(
    json.dumps({"timestamp": 500 * index, "input_length": 700 + index, "output_length": 5, "hash_ids": [0, index]})
    + "\n"
    for index in range(2)
)
LAYOUTS = {
    "azure 2023": (AZURE_2023, [TraceRow(0.0, 4808, 10), TraceRow(0.5, 30, 8)]),
    "azure 2024": (AZURE_2024, [TraceRow(0.0, 2162, 5), TraceRow(0.997, 30, 8)]),
    "burst": (BURST, [TraceRow(0.0, 472, 18), TraceRow(40.5, 1087, 0)]),
    "mooncake": (MOONCAKE, [TraceRow(0.0, 700, 5, (0, 0)), TraceRow(0.5, 701, 5, (0, 1))]),
    "other order": ("Response tokens,Extra,Timestamp,Request tokens\n7,x,3,9\n", [TraceRow(0.0, 9, 7)]),
    "lines before, 9 as 9.0": ("\n\nTimestamp,Request tokens,Response tokens\n3,9.0,7.0\n", [TraceRow(0.0, 9, 7)]),
    "other spelling": ("\ufeffTimestamp, request_tokens,RESPONSE TOKENS\r\n3,9,7\r\n", [TraceRow(0.0, 9, 7)]),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_is_known_by_its_columns_whatever_the_file_is_called(name: str, tmp_path: Path) -> None:
    text, rows = LAYOUTS[name]
    for file in ("trace.csv", "trace.jsonl", "trace"):
        (tmp_path / file).write_text(text, encoding="utf-8")
        found = list(read_trace(tmp_path / file))
        assert [(row.prompt, row.output, row.hash_ids) for row in found] == [
            (row.prompt, row.output, row.hash_ids) for row in rows
        ]
        assert [row.at for row in found] == pytest.approx([row.at for row in rows], abs=1e-6)


def test_no_clock_change_lies_within_a_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "America/New_York")  # whose clocks went from 01:59 to 01:00 that night
    path = tmp_path / "t.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-05 00:30:00.0000000,1,1\n2023-11-05 02:30:00.0000000,1,1\n"
    )
    assert [row.at for row in read_trace(path)] == [0.0, 7200.0]


HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
WRONG: dict[str, tuple[bytes, str]] = {
    "other columns": (
        b"time,prompt\n1,2\n",
        r"has the columns 'time', 'prompt'; its columns must be one of: TIMESTAMP, .*Azure.*BurstGPT.*Mooncake",
    ),
    "many columns": (",".join(f"c{i}" for i in range(99)).encode(), r"'c7', …; its columns"),
    "binary": (b"\x89PNG\r\n\x1a\n" + bytes(range(256)), r"is no text \(byte 0x89 at 0\)"),
    "zeros": (bytes(10_000), "its columns must be one of"),
    "zipped": (b"\x1f\x8b\x08\x00" + b"\xff" * 200, "is no text"),
    "one endless line": (b"x" * (traces.MOST_LINE + 10), "a line of more than 4,194,304 characters"),
    "a long line later": (HEAD.encode() + b"x" * (traces.MOST_LINE + 10), "a line of more than 4,194,304"),
    "a list": (b"[1, 2]\n", "Row 1 .* .a line holds a list, no object"),
    "no date": (f"{HEAD}yesterday,1,1\n".encode(), "Row 1 .* .'yesterday' is no date"),
    "no number": (f"{HEAD}2023-11-16 18:17:03,many,1\n".encode(), "Row 1 .*'many'"),
    "half a row": (
        f"{HEAD}2023-11-16 18:17:03,4,1\n2023-11-16 18:17:04\n".encode(),
        "Row 2 .*'ContextTokens' is missing",
    ),
    "half a first row": (b"ContextTokens,GeneratedTokens,TIMESTAMP\n5,5\n", "Row 1 .*'TIMESTAMP' is missing"),
    "part of a token": (MOONCAKE.replace("700", "700.5").encode(), "Row 1 .*700.5 is no whole number"),
    "true tokens": (MOONCAKE.replace("700", "true").encode(), "Row 1 .*True is no whole number"),
    "endless tokens": (MOONCAKE.replace("700", "Infinity").encode(), "Row 1 .*inf"),
    "an endless number": (MOONCAKE.replace("700", "9" * 400).encode(), "Row 1 .*too large"),
    "negative names": (MOONCAKE.replace("[0, 0]", "[0, -1]").encode(), r"Row 1 .*hash ids \[0, -1\]"),
    "names in a text": (MOONCAKE.replace("[0, 0]", '"12"').encode(), "Row 1 .*hash ids 12"),
    "a key less": (
        MOONCAKE.encode() + b'{"timestamp": 900, "input_length": 5}\n',
        "Row 3 .*'output_length' is missing",
    ),
    "negative time": (
        b"Timestamp,Request tokens,Response tokens\n-5,3,1\n",
        "Row 1 .* at -5.000 s; give finite times from 0 on",
    ),
    "back": (
        b"Timestamp,Request tokens,Response tokens\n9,3,1\n4,3,1\n",
        r"Row 2 .* at -5.000 s after the first row, .*above it at 0.000 s; sort",
    ),
    "no time": (b"Timestamp,Request tokens,Response tokens\nnan,3,1\n", "Row 1 .* at nan s"),
    "empty prompt": (b"Timestamp,Request tokens,Response tokens\n1,0,1\n", "Row 1 .* has 0 prompt and 1 output tokens"),
    "negative answer": (
        b"Timestamp,Request tokens,Response tokens\n1,4,-1\n",
        "Row 1 .* has 4 prompt and -1 output tokens",
    ),
    "empty": (b"", "holds no requests"),
    "only a head": (HEAD.encode(), "holds no requests"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_trace_is_a_sentence(name: str, tmp_path: Path) -> None:
    content, said = WRONG[name]
    (tmp_path / "t").write_bytes(content)
    with pytest.raises(ConfigError, match=said) as told:
        trace_rows(tmp_path / "t", None)
    assert len(str(told.value)) < 500
    with pytest.raises(ConfigError, match="Is a directory"):
        trace_rows(tmp_path, None)


def test_a_huge_trace_says_how_to_take_a_part_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "MOST_ROWS", 3)
    path = tmp_path / "t.csv"
    path.write_text("Timestamp,Request tokens,Response tokens\n" + "1,2,3\n" * 9)
    assert len(trace_rows(path, 3)) == 3
    with pytest.raises(ConfigError, match=r"more than 3 requests; take a part of it with --num-prompts"):
        trace_rows(path, None)


def test_a_trace_is_the_same_load_for_a_server_and_for_a_simulation(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(BURST)
    for scale in ({"speed": 4.0}, {"rate": 0.5}):
        asked = traced(path, count=None, max_prompt=1000, max_output=10, **scale)
        sent = conversations_of(asked, vocab_size=50)
        assert [(each.prompt, each.output, each.at) for each in asked] == [
            (len(each.turns[0].new_ids), each.turns[0].max_tokens, each.arrival) for each in sent
        ]
    assert [(each.prompt, each.output, each.at) for each in asked] == [(472, 10, 0.0), (1000, 1, 2.0)]


def test_lengths_from_a_trace_keep_their_pairs(tmp_path: Path) -> None:
    """Short prompts have long answers here, and nothing lies between: what is drawn has both modes, in the trace's
    shares, and their tie."""
    draw = np.random.default_rng(1)
    pairs = [
        (int(draw.integers(10, 20)), 400) if index % 4 else (3000, int(draw.integers(1, 5))) for index in range(200)
    ]
    path = tmp_path / "t.csv"
    path.write_text(
        "Timestamp,Request tokens,Response tokens\n" + "".join(f"{i},{a},{b}\n" for i, (a, b) in enumerate(pairs))
    )
    lengths = trace_lengths(path, max_prompt=None, max_output=300)
    rng = np.random.default_rng(0)
    found = np.array([lengths.draw(rng) for _ in range(4000)])
    assert {tuple(each) for each in found.tolist()} <= {(a, min(b, 300)) for a, b in pairs}
    assert (found[:, 0] == 3000).mean() == pytest.approx(0.25, abs=0.03)
    assert np.corrcoef(found.T)[0, 1] < -0.99
    again = np.random.default_rng(0)
    assert [lengths.draw(again) for _ in range(5)] == [tuple(each) for each in found[:5].tolist()]
