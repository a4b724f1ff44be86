"""The benchmarks run to their end and their figures agree with each other. Nothing here says how fast anything is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace import cli
from headrace.commands.bench import BENCHMARKS
from support import tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "config.json").write_text(json.dumps(tiny.config_dict("llama")))
    return str(folder)


def figures(tmp_path: Path, *words: str) -> dict[str, Any]:
    path = tmp_path / "out.json"
    assert cli.main(["bench", words[0], "--output-json", str(path), *words[1:]]) == 0
    found: dict[str, Any] = json.loads(path.read_text())
    assert {"date", "machine", "versions", "limits"} <= found["facts"].keys()
    return found


ENGINE = ("--load-format", "dummy", "--dtype", "float32", "--kv-cache-memory", "16MiB", "--threads", "1", "--device", "cpu")


def test_throughput_counts_every_token(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = figures(tmp_path, "throughput", model, *ENGINE, "--num-prompts", "5", "--input-len", "20", "--output-len", "6", "--repeats", "1")
    assert (found["num_requests"], found["total_num_tokens"]) == (5, 5 * 26)
    assert found["tokens_per_second"] == pytest.approx(130 / found["elapsed_time"])
    assert found["output_tokens_per_second"] == pytest.approx(30 / found["elapsed_time"])
    assert "Throughput: " in capsys.readouterr().out


def test_latency_shows_steps_beside_their_floor(model: str, tmp_path: Path) -> None:
    words = ("--batch-size", "3", "--input-len", "20", "--output-len", "6", "--num-iters", "2", "--num-iters-warmup", "1")
    found = figures(tmp_path, "latency", model, *ENGINE, *words)
    assert len(found["latencies"]) == 2 and found["avg_latency"] == pytest.approx(sum(found["latencies"]) / 2)
    decode, prefill = found["steps"]
    assert (decode["steps"], decode["count"], decode["rows"]) == ("decode", 2 * 5, 3)
    assert (prefill["steps"], prefill["count"], prefill["tokens"]) == ("prefill", 2, 60)
    for step in found["steps"]:
        assert step["floor ms"] > 0 and step["fraction"] > 0


def test_the_control_plane_is_measured_without_torch(tmp_path: Path) -> None:
    found = figures(tmp_path, "control-plane", "--rows", "4", "--steps", "5", "--requests", "200")
    assert found["steps"][0]["sum µs"] > 0 and found["memory"]["last_mib"] > 0


def test_a_start_is_taken_apart(tmp_path: Path) -> None:
    found = figures(tmp_path, "startup", "--repeats", "1", "--", "--executor", "keyed-hash")["seconds"]
    parts = [value for name, value in found.items() if name.startswith("in one process") and "whole" not in name]
    assert 0 < sum(parts) <= found["in one process: whole process"]
    assert found["serve: ready"] > 0 and found["headrace --help"] > 0


@pytest.mark.parametrize(
    ("words", "status", "says"),
    [
        (("throughput", "--num-prompts", "0"), 2, "--num-prompts is 0"),
        (("ablate", "magic"), 2, "no technique 'magic'"),
        (("startup", "--", "/no/such/model"), 1, "did not start"),
    ],
)
def test_mistakes_are_one_line(words: tuple[str, ...], status: int, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", *words]) == status
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1


def test_every_benchmark_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    for name in BENCHMARKS:
        with pytest.raises(SystemExit) as ended:
            cli.main(["bench", name, "--help"])
        assert ended.value.code == 0
        assert f"bench {name}" in capsys.readouterr().out
