"""The benchmarks run to their end and their figures agree with each other. Nothing here says how fast anything is."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from headrace import LLM, SamplingParams
from headrace.bench import offline, startup
from headrace.commands.bench import BENCHMARKS
from lab import __main__ as lab
from lab import startup_child
from tests.support import tiny
from tests.support.command import status_of


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "config.json").write_text(json.dumps(tiny.config_dict("llama")))
    return str(folder)


def run(name: str, *words: str) -> int:
    """Of a benchmark of the package or of the laboratory."""
    return status_of("bench", name, *words) if name in BENCHMARKS else lab.main([name, *words])


def figures(tmp_path: Path, *words: str) -> dict[str, Any]:
    path = tmp_path / "out.json"
    assert run(words[0], "--output-json", str(path), *words[1:]) == 0
    found: dict[str, Any] = json.loads(path.read_text())
    assert {"date", "machine", "versions", "limits"} <= found["facts"].keys()
    return found


ENGINE = (
    "--load-format",
    "dummy",
    "--dtype",
    "float32",
    "--kv-cache-memory",
    "16MiB",
    "--threads",
    "1",
    "--device",
    "cpu",
)


def test_throughput_counts_every_token(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = figures(
        tmp_path,
        "throughput",
        model,
        *ENGINE,
        "--num-prompts",
        "5",
        "--input-len",
        "20",
        "--output-len",
        "6",
        "--repeats",
        "1",
    )
    assert (found["num_requests"], found["total_num_tokens"]) == (5, 5 * 26)
    assert found["tokens_per_second"] == pytest.approx(130 / found["elapsed_time"])
    assert found["output_tokens_per_second"] == pytest.approx(30 / found["elapsed_time"])
    assert "Throughput: " in capsys.readouterr().out


def test_latency_shows_steps_beside_their_floor(model: str, tmp_path: Path) -> None:
    words = (
        "--batch-size",
        "3",
        "--input-len",
        "20",
        "--output-len",
        "6",
        "--num-iters",
        "2",
        "--num-iters-warmup",
        "1",
    )
    found = figures(tmp_path, "latency", model, *ENGINE, *words)
    assert len(found["latencies"]) == 2 and found["avg_latency"] == pytest.approx(sum(found["latencies"]) / 2)
    decode, prefill = found["steps"]
    assert (decode["steps"], decode["count"], decode["rows"]) == ("decode", 2 * 5, 3)
    assert (prefill["steps"], prefill["count"], prefill["tokens"]) == ("prefill", 2, 60)
    for step in found["steps"]:
        assert step["floor ms"] > 0 and step["fraction"] > 0


def test_adapters_are_asked_for_by_popularity_beside_the_base(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ("--num-prompts", "5", "--input-len", "9", "--output-len", "4", "--repeats", "2")
    made = ("--num-adapters", "4", "--ranks", "2", "20", "--targets", "q_proj", "down_proj")
    popularities = ("--popularity", "distinct", "uniform", "skewed", "zipf", "identical", "apart")
    found = figures(tmp_path, "lora", model, *ENGINE, *sizes, *made, *popularities)["popularities"]
    counts = {name: each["adapters"] for name, each in found.items() if name not in ("skewed", "zipf")}
    assert counts == {"base": 0, "distinct": 4, "uniform": 3, "identical": 1, "apart": 4}
    assert (
        all(len(each["runs"]) == 2 and each["of_base"] > 0 for each in found.values()) and found["base"]["of_base"] == 1
    )
    assert all(each["failed"] == 0 and 0 < each["ttft_p50"] <= each["ttft_p99"] for each in found.values())
    assert "of rank 20" in capsys.readouterr().out
    many = ("--num-adapters", "40", "--max-loras", "2", "--max-cpu-loras", "3", "--ranks", "2", "--request-rate", "200")
    (base, zipf) = figures(tmp_path, "lora", model, *ENGINE, *sizes, *many, "--popularity", "zipf")[
        "popularities"
    ].values()
    assert zipf["adapters"] > 2 and zipf["failed"] == 0 and base["adapters"] == 0
    assert run("lora", model, *ENGINE, *sizes, "--targets", "k_proj", "gates") == 2
    assert "gates, which the model does not have" in capsys.readouterr().err


def test_experts_are_recorded_placed_and_held_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What two ranks record, of which each computes half, is what one does; the engine takes either file."""
    folder, text = tiny.save("mixtral", tmp_path), tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog, again and again. " * 60, encoding="utf-8")
    words = [str(folder), "--calibration", str(text), "--calibration-rows", "14", "--calibration-length", "24"]
    words += ["--output-len", "5", "--dtype", "float32", "--device", "cpu", "--threads", "1", "--max-model-len", "64"]
    recorded = []
    for more in (["--ranks", "2", "4"], ["--ranks", "2", "--tensor-parallel-size", "2", "--enable-expert-parallel"]):
        found = figures(tmp_path, "experts", *words, *more, "--output", str(tmp_path / "counts.json"))
        recorded.append(json.loads((tmp_path / "counts.json").read_text())["counts"])
        for each in found["imbalance"].values():
            assert 1 <= each["balanced"] <= each["neighbours together"] + 1e-9
    assert recorded[0] == recorded[1] and set(recorded[0]) == {"0", "1", "2"}
    assert all(sum(each) == 14 * (24 + 5 - 1) * 2 for each in recorded[0].values())  # 2 experts a row
    copies = ["--copies", "1", "--ranks", "2", "--output", str(tmp_path / "placed.json")]
    assert run("experts", *words, *copies) == 0 and "with 1 copies" in capsys.readouterr().out
    placed = json.loads((tmp_path / "placed.json").read_text())["experts"]
    assert all(sorted(map(len, layer)) == [2, 3] for layer in placed.values())
    keywords: dict[str, Any] = {"dtype": "float32", "device": "cpu", "threads": 1, "max_model_len": 64}
    answers = []
    for own in (None, "counts.json", "placed.json"):
        ranks = {
            "tensor_parallel_size": 2,
            "enable_expert_parallel": True,
            "expert_placement": str(tmp_path / str(own)),
        }
        with LLM(str(folder), **keywords, **(ranks if own else {})) as llm:
            asked = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
            answers.append(llm.generate([[1, 2, 3], [7] * 9], asked, use_tqdm=False))
    tokens = [[each.outputs[0].token_ids for each in some] for some in answers]
    assert tokens[0] == tokens[1] == tokens[2]


def test_the_table_runs_each_model_in_its_own_process(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "table.md"
    words = (
        "--model",
        model,
        "--rows",
        "decode-8",
        "prefill-16x2048",
        "mixed",
        "--scale",
        "0.01",
        "--repeats",
        "2",
        "--markdown",
        str(page),
    )
    found = figures(tmp_path, "table", *words, "--", *ENGINE)
    (made,) = found["models"]
    assert [(row["row"], len(row["values"]), row["problem"]) for row in made["rows"]] == [
        (name, 2, None) for name in words[3:6]
    ]
    assert made["rows"][0]["host_ms"] > 0 and made["limits"]["read_bandwidth"] > 0 and made["kernels"]
    text = capsys.readouterr().out
    assert "not comparable with vLLM" in text and "decode-1, decode-32" in text and "strict kernels" in text
    assert page.read_text().count("| missing |") == 9

    merged = tmp_path / "merged.md"
    assert (
        run("table", "--merge", str(tmp_path / "out.json"), str(tmp_path / "out.json"), "--markdown", str(merged)) == 0
    )
    assert merged.read_text() == page.read_text(), "one model, one table"


def test_a_row_that_cannot_run_is_missing_and_fails_the_table(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (
        "--model",
        model,
        "--rows",
        "decode-1",
        "prefill-1x8192",
        "--scale",
        "0.02",
        "--repeats",
        "1",
        "--",
        *ENGINE,
        "--max-model-len",
        "64",
    )
    assert run("table", *words) == 1
    text = capsys.readouterr().out
    assert "missing: prefill-1x8192 (" in text and "maximum context length is 64" in text


def test_the_profile_of_an_engine_is_one_page(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "profile.md"
    words = (
        "--model",
        model,
        "--scale",
        "0.02",
        "--repeats",
        "1",
        "--skip-start",
        "--markdown",
        str(page),
        "--",
        *ENGINE,
    )
    (made,) = figures(tmp_path, "profile", *words)["models"]
    assert [row["row"] for row in made["timed"]] == ["decode-1", "decode-256", "prefill-1x2048"]
    assert [step["step"] for step in made["steps"]] == ["decode, batch 1", "decode, batch 5"]
    assert made["host_memory"]["with the engine"] > 0 and made["memory"]["weights"] > 0
    text = capsys.readouterr().out
    assert "missing: not asked for" in text and "missing: the engine runs on a CPU" in text
    assert "### Footprint" in page.read_text()


def test_the_control_plane_is_measured_without_torch(tmp_path: Path) -> None:
    found = figures(tmp_path, "control-plane", "--rows", "4", "--steps", "5", "--requests", "200", "--batches", "1")
    assert [(each["requests"], each["ids"]) for each in found["admission"]] == [(256, 540672), (512, 557056)]
    assert found["steps"][0]["sum µs"] > 0 and found["memory"]["last_mib"] > 0


@pytest.fixture
def only_headrace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Children find bytecode of what is imported here, where they find any at all; compiling torch's sources takes
    seconds."""
    monkeypatch.setattr(startup, "_IMPORTED", ("headrace.bench.startup_child", "headrace.engine.llm"))


@pytest.mark.usefixtures("only_headrace")
def test_a_start_is_taken_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_API_KEY", "a servers own")
    found = figures(tmp_path, "startup", "--repeats", "1", "--", "--executor", "keyed-hash")["seconds"]
    assert found["serve: ready"] > 0 and found["headrace --help"] > 0
    for kind in ("empty caches", "in one process"):
        parts = [
            found[f"{kind}: {name}"]
            for name in ("interpreter", "import headrace", "import the engine", "load the model")
        ]
        assert all(part > 0 for part in parts) and f"{kind}: import torch" not in found  # this executor has none
        assert found[f"{kind}: first token"] > 0 and found[f"{kind}: a later first token"] > 0


def test_a_start_is_judged_by_the_steps_after_it() -> None:
    found = startup_child.main(time.time(), ["--executor", "keyed-hash"])
    ready = found.get("ready")  # steps of microseconds may never stay within half of their median
    assert ready is None or ready >= found["import the engine"] + found["load the model"] - 1e-6
    assert found["steady step"] <= found["slowest of the first 100 steps"]
    assert found["a later batch of 64"] > 0 and "every kernel there" in found


@pytest.mark.usefixtures("only_headrace")
@pytest.mark.parametrize(
    ("words", "status", "says"),
    [
        (("throughput", "--num-prompts", "0"), 2, "argument --num-prompts: '0'"),
        (("ablate", "magic"), 2, "no technique 'magic'"),
        (("table", "--rows", "magic"), 2, "no row 'magic'"),
        (("table", "--scale", "0"), 2, "--scale 0"),
        (("table", "--merge", "/no/such/file"), 2, "/no/such/file cannot be read"),
        (("startup", "--", "/no/such/model"), 1, "did not start"),
    ],
)
def test_mistakes_are_one_line(
    words: tuple[str, ...], status: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*words) == status
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1


def test_every_benchmark_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    for name in (*BENCHMARKS, *lab.BENCHMARKS):
        try:
            assert run(name, "--help") == 0
        except SystemExit as ended:  # argparse's, in the laboratory
            assert ended.code == 0
        assert f"{'headrace bench' if name in BENCHMARKS else 'python -m lab'} {name}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "kept"),
    [(("throughput", "--num-prompts", "3", "--repeats", "4"), 2), (("latency", "--num-iters", "4"), 2)],
)
def test_ctrl_c_leaves_the_figures_of_what_was_timed(
    words: tuple[str, ...],
    kept: int,
    model: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    timed, calls = offline._timed, iter(range(100))
    before = 0 if words[0] == "throughput" else 1

    def press(*args: Any) -> Any:
        if next(calls) == before + kept:
            raise KeyboardInterrupt
        return timed(*args)

    monkeypatch.setattr(offline, "_timed", press)
    path = tmp_path / "out.json"
    flags = ("--input-len", "20", "--output-len", "4", *(("--num-iters-warmup", "1") if before else ()))
    assert run(words[0], model, *ENGINE, *words[1:], *flags, "--output-json", str(path)) == 130
    found, told = json.loads(path.read_text()), capsys.readouterr()
    assert len(found.get("latencies", range(kept))) == kept and f"interrupted when {kept} measurements" in told.err
