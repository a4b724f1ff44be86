"""The table's rows, the definition of their figures on a clock that the test turns, and when a peer's figure may stand
beside one."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.config import EngineConfig, ModelConfig
from headrace.engine.resolve import create_config
from headrace.errors import BenchFailed, ConfigError
from headrace.observe.metrics import StepRecord
from lab import table as bench_table
from lab import table_run, table_start, table_techniques
from lab.jobs import LONGEST, SHAPES, config_for, config_of, flags_of, known_shapes
from lab.table_measure import Measured, TableBench
from lab.table_merge import combine, read_files
from lab.table_peers import Peer, differences, load_peer
from lab.table_rows import ROWS, Row, requests_of, scaled, select_rows
from lab.table_show import lines_of, markdown, refusals, terminal

PREFILL, STEP = 0.5, 0.01  # s


@dataclass
class FakeEngine:
    """Takes PREFILL for all prompts together and STEP for every further token; its limits allow half of these times."""

    clock: float = 0.0
    floor: float = 0.0
    calls: list[tuple[list[list[int]], list[int]]] = field(default_factory=list)
    records: list[StepRecord] = field(default_factory=list)
    stops_after: int | None = None
    power: float | None = 500.0  # watts

    def generate(self, prompts: Sequence[dict[str, list[int]]], params: Sequence[Any], *, use_tqdm: bool) -> list[Any]:
        self.calls.append(([prompt["prompt_token_ids"] for prompt in prompts], [each.max_tokens for each in params]))
        assert all(each.temperature == 0.0 and each.ignore_eos for each in params)
        steps = max(each.max_tokens for each in params) - 1
        self.clock += PREFILL + STEP * steps
        self.floor += (PREFILL + STEP * steps) / 2
        self.records += [self._record(len(prompts)) for _ in range(steps)]
        return [SimpleNamespace(outputs=[self._answer(each.max_tokens)]) for each in params]

    def _record(self, rows: int) -> StepRecord:
        return StepRecord(
            len(self.records),
            rows,
            rows,
            rows,
            rows,
            0.0,
            0.0,
            STEP / 2,
            STEP / 2,
            0.008,
            0.001,
            0.5,
            idle_seconds=0.002,
        )

    def _answer(self, asked: int) -> Any:
        count = asked if self.stops_after is None else min(asked, self.stops_after)
        return SimpleNamespace(token_ids=[0] * count, finish_reason="error", stop_reason="the device is on fire")

    def summary(self) -> dict[str, Any]:
        return {"floor_seconds": self.floor}

    def joules(self) -> float | None:
        return None if self.power is None else self.power * self.clock


def measured(row: Row, engine: FakeEngine, repeats: int = 3) -> Measured:
    return TableBench(engine, 1000, engine, repeats, lambda: engine.clock, engine.joules).measure(row)


def row_of(name: str) -> Row:
    (row,) = select_rows([name])
    return row


def test_a_decode_step_is_the_run_without_its_first_token() -> None:
    engine = FakeEngine()
    found = measured(row_of("decode-8"), engine)
    assert found.values == pytest.approx((1e3 * STEP,) * 3)
    assert found.floor == pytest.approx(1e3 * STEP / 2)
    assert (found.host_ms, found.device_ms, found.idle) == pytest.approx((1.0, 8.0, 0.2))
    assert [set(outputs) for _, outputs in engine.calls] == [{128}, {1}] * 4  # a warm-up of both, then three repeats
    assert {len(prompts) for prompts, _ in engine.calls} == {8}


def test_prefill_is_the_time_to_the_first_token_of_all() -> None:
    found = measured(row_of("prefill-16x2048"), FakeEngine())
    assert (found.median, found.unit, found.requests, found.prompt_tokens) == (
        pytest.approx(1e3 * PREFILL),
        "ms",
        16,
        16 * 2048,
    )
    assert found.host_ms is None and found.idle is None


def test_many_requests_are_timed_to_the_end_of_the_last() -> None:
    engine = FakeEngine()
    found = measured(row_of("mixed"), engine)
    assert (found.median, found.unit, found.floor) == (
        pytest.approx(PREFILL + 255 * STEP),
        "s",
        pytest.approx((PREFILL + 255 * STEP) / 2),
    )
    sizes = [len(prompts) for prompts, _ in engine.calls]
    assert sizes == [128, 512, 512, 512]
    assert len({tuple(map(len, prompts)) for prompts, _ in engine.calls[1:]}) == 1  # the same work in each repeat


@pytest.mark.parametrize("name", ["decode-8", "mixed", "shared-prefix", "prefill-1x2048"])
def test_no_repeat_can_be_answered_from_the_cache(name: str) -> None:
    engine = FakeEngine()
    measured(row_of(name), engine)
    beginnings = [tuple(prompts[0][:32]) for prompts, _ in engine.calls]
    assert len(set(beginnings)) == len(engine.calls)


def test_lengths_cover_their_range_evenly() -> None:
    asked = requests_of(row_of("mixed"), 1000, 7)
    lengths = [len(prompt["prompt_token_ids"]) for prompt in asked.prompts]
    outputs = [each.max_tokens or 0 for each in asked.params]
    assert (min(lengths), max(lengths), min(outputs), max(outputs)) == (128, 2048, 16, 256)
    assert sum(lengths) / 512 == pytest.approx(1088, abs=1) and sum(outputs) / 512 == pytest.approx(136, abs=1)
    assert lengths != sorted(lengths) and asked.output_tokens == sum(outputs)


def test_a_shared_prefix_is_shared_within_a_run_only() -> None:
    first, second = (requests_of(row_of("shared-prefix"), 1000, seed).prompts for seed in (1, 2))
    prefixes = {tuple(prompt["prompt_token_ids"][:2048]) for prompt in first}
    assert len(first) == 256 and len(prefixes) == 1 and len(first[0]["prompt_token_ids"]) == 2112
    assert second[0]["prompt_token_ids"][:2048] != first[0]["prompt_token_ids"][:2048]


def test_power_is_the_mean_over_what_was_timed_where_it_is_counted() -> None:
    assert measured(row_of("decode-8"), FakeEngine()).watts == pytest.approx(500.0)
    assert measured(row_of("decode-8"), FakeEngine(power=None)).watts is None
    assert (
        measured(row_of("prefill-1x2048"), FakeEngine(), repeats=1).watts is None
    )  # half a second: too short for a card's counter


def test_an_answer_that_ended_early_is_no_measurement() -> None:
    with pytest.raises(BenchFailed, match=r"after 5 of 256 tokens \(the device is on fire\)"):
        measured(row_of("decode-1"), FakeEngine(stops_after=5))


def test_rows_are_chosen_by_name_or_kind() -> None:
    assert [row.name for row in select_rows(["start", "prefill"])] == [
        "prefill-1x2048",
        "prefill-1x8192",
        "prefill-16x2048",
        "start",
        "start-warm",
    ]
    assert select_rows([]) == ROWS
    with pytest.raises(ConfigError, match="no row 'decode-2'; choose of decode, prefill, decode-1, "):
        select_rows(["decode-2"])


def test_scaling_keeps_every_row_possible() -> None:
    for row in (row for row in ROWS if row.group != "start"):
        small = scaled(row, 0.001)
        assert small.count >= 1 and small.prompt[0] >= 1 and (small.output == (1, 1)) == (row.output == (1, 1))
    assert scaled(ROWS[0], 1.0) is ROWS[0]


@pytest.fixture(scope="module")
def peer() -> Peer:
    return load_peer()


def model_of(peer: Peer, name: str, **more: Any) -> dict[str, Any]:
    """A run at the peer's own limits in which every row of ours took half of the peer's time."""
    entry = next(model for model in peer.models if model["name"] == name)
    rows = [
        {"row": row, "values": [figures["peer"] / 2], "floor": 0.1, "problem": None}
        for row, figures in entry["rows"].items()
    ]
    facts = {"date": "today", "versions": "some"}
    return {
        "name": name, "command": "python -m lab table", "scale": 1, "repeats": 3, "facts": facts, "dtype": entry["dtype"],
        "config": {**entry["shape"], "rope_theta": 1.0}, "limits": dict(peer.limits), "rows": rows, **more,
    }  # fmt: skip


@pytest.mark.parametrize("name", ["Llama-3.2-1B", "Llama-3.1-8B", "Qwen3-30B-A3B"])
def test_a_model_is_found_by_its_shape_and_compared(peer: Peer, name: str) -> None:
    model = model_of(peer, name)
    assert refusals(model, peer) == []
    lines = lines_of(model, peer)
    assert [line.row for line in lines] == list(ROWS)
    for line in lines:
        assert line.ratio == pytest.approx(2.0) or line.problem == "not asked for"
        assert line.floor is None or line.fraction == pytest.approx(line.floor / line.measured)  # type: ignore[operator]
    assert "not comparable" not in terminal(model, peer)


def test_another_shape_or_precision_has_no_peer(peer: Peer) -> None:
    model = model_of(peer, "Llama-3.1-8B")
    other = {**model["config"], "num_hidden_layers": 31}
    for changed in ({"config": other}, {"dtype": "float32"}):
        assert "no figures of vLLM" in refusals({**model, **changed}, peer)[0]
        assert all(line.peer is None for line in lines_of({**model, **changed}, peer))


@pytest.mark.parametrize(("factor", "refused"), [(0.975, False), (1.025, False), (0.965, True), (1.035, True)])
@pytest.mark.parametrize("limit", ["read_bandwidth", "copy_bandwidth", "gemm_rate"])
def test_no_ratio_where_the_card_is_another(peer: Peer, limit: str, factor: float, refused: bool) -> None:
    limits = {**peer.limits, limit: peer.limits[limit] * factor}
    model = model_of(peer, "Llama-3.2-1B", limits=limits)
    assert bool(differences(limits, peer.limits)) == refused
    for text in (terminal(model, peer), markdown(model, peer)):
        assert ("not comparable" in text) == refused and ("2.00" in text) != refused
        assert (f"{'below' if factor < 1 else 'above'} the peer's" in text) == refused


def test_what_was_not_measured_is_missing_with_its_reason(peer: Peer) -> None:
    model = model_of(peer, "Llama-3.2-1B")
    model["rows"] = [model["rows"][0], {"row": "mixed", "values": [], "problem": "out of memory"}]
    for text in (terminal(model, peer), markdown(model, peer)):
        assert text.count("missing") >= 10 and "mixed (out of memory)" in text and "decode-8, decode-32" in text


def test_rows_above_their_target_are_named(peer: Peer) -> None:
    model = model_of(peer, "Llama-3.1-8B")
    model["rows"] = [row for row in model["rows"] if row["row"].startswith("decode")]
    assert all("above their targets" not in text for text in (terminal(model, peer), markdown(model, peer)))
    above = next(row for row in model["rows"] if row["row"] == "decode-256")
    above["values"] = [8.549]
    for text in (terminal(model, peer), markdown(model, peer)):
        assert "above their targets: decode, batch 256 (ms/step) by 3.0%" in text and "8.300" in text
    other = {**model, "config": {**model["config"], "num_hidden_layers": 31}}
    assert "target:" not in terminal(other, peer) and not any(line.excess for line in lines_of(other, peer))


def test_power_has_a_column_where_it_was_counted(peer: Peer) -> None:
    model = model_of(peer, "Llama-3.2-1B")
    assert all("| W |" not in text and " W\n" not in text for text in (terminal(model, peer), markdown(model, peer)))
    model["rows"][0]["watts"], model["facts"]["power limit"] = 687.6, "700 W"
    assert " 688\n" in terminal(model, peer) and "| 688 |" in markdown(model, peer) and "| W |" in markdown(model, peer)
    assert all("power limit: 700 W" in text for text in (terminal(model, peer), markdown(model, peer)))


def test_power_limits_of_two_runs_are_both_named(peer: Peer) -> None:
    limits = ("500 W", "700 W", "700 W", None)
    runs = [
        model_of(peer, "Llama-3.2-1B", facts={"date": "today", **({"power limit": limit} if limit else {})})
        for limit in limits
    ]
    said = [
        combine(pair)[0]["facts"].get("power limit") for pair in (runs[:2], runs[1:3], runs[2:], [runs[3], runs[3]])
    ]
    assert said == ["500 W and 700 W", "700 W", "700 W", None]


def test_unmeasured_limits_are_no_permission(peer: Peer) -> None:
    assert "were not measured" in refusals(model_of(peer, "Llama-3.2-1B", limits={}), peer)[0]
    partly = {name: value for name, value in peer.limits.items() if name != "gemm_rate"}
    assert len(differences(partly, peer.limits)) == 1


def test_both_starts_come_from_one_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        table_start, "start_seconds", lambda flags, repeats: {"empty caches: ready": [9.0, 7.0, 8.0][:repeats]}
    )
    (cold, warm), stages = table_start.measure_starts(select_rows(["start"]), ["model"], 3)
    assert stages == {"empty caches: ready": 8.0}
    assert (
        (cold.values, cold.problem) == ((9.0, 7.0, 8.0), None)
        and not warm.values
        and "never became steady" in str(warm.problem)
    )

    def fails(flags: Sequence[str], repeats: int) -> dict[str, list[float]]:
        raise BenchFailed("no such model")

    monkeypatch.setattr(table_start, "start_seconds", fails)
    assert [each.problem for each in table_start.measure_starts(select_rows(["start"]), [], 1)[0]] == [
        "no such model"
    ] * 2


def test_measured_keeps_its_median() -> None:
    assert Measured("x", "ms").median is None and replace(Measured("x", "ms"), values=(3.0, 1.0, 2.0)).median == 2.0


def test_a_config_survives_the_way_to_a_child() -> None:
    config = create_config(
        "some/model",
        disabled_kernels=("a", "b"),
        technique={"cuda_graphs": False},
        max_num_seqs=3,
        kv_cache_memory=2**20,
    )
    assert config_of(json.loads(json.dumps(asdict(config)))) == config


def test_the_command_beside_a_table_makes_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the rows, repeats and flags it was made with; weights that were read are not called random."""
    monkeypatch.setattr(bench_table, "run_child", lambda *_, **__: ({"rows": []}, 0))
    rows, flags = select_rows(["decode-1"]), ["--enforce-eager", "--dtype", "float16"]
    measured = bench_table.measure_model("Llama-3.2-1B", EngineConfig(), flags, rows, scale=1.0, repeats=5)
    wanted = "python -m lab table --model Llama-3.2-1B --rows decode-1 --repeats 5 -- --enforce-eager --dtype float16"
    assert measured["command"] == wanted
    plain = bench_table.measure_model("Llama-3.2-1B", EngineConfig(), [], rows, scale=1.0, repeats=3)
    assert plain["command"] == "python -m lab table --model Llama-3.2-1B --rows decode-1"
    said = [table_run._said(EngineConfig(model=ModelConfig(load_format=name))) for name in ("dummy", "safetensors")]
    assert said[0].startswith("random weights") and said[1].startswith("weights of the checkpoint")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("no JSON", "cannot be read"),
        ("[]", "cannot be read"),
        ('{"models": 3}', "cannot be read"),
        ('{"models": [{"name": "a page of python -m lab profile"}]}', "another benchmark.*'command'"),
    ],
)
def test_a_file_that_is_no_table_is_named(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_files([path])


def test_the_engine_of_a_model_has_random_weights_and_strict_kernels() -> None:
    for name, positions in (("Llama-3.1-8B", LONGEST), ("no/such/model", None)):
        made = config_for(name, EngineConfig())
        assert (made.model.load_format, made.device.strict_kernels, made.model.max_model_len) == (
            "dummy",
            True,
            positions,
        )
    given = config_for("Llama-3.1-8B", create_config(load_format="safetensors", max_model_len=512))
    assert (given.model.load_format, given.model.max_model_len) == ("safetensors", 512)
    words = flags_of(given, ["--threads", "2"])
    assert words[0].endswith("shapes/Llama-3.1-8B") and words[1:] == [
        "--load-format", "safetensors", "--max-model-len", "512", "--threads", "2", "--strict-kernels",
    ]  # fmt: skip


def test_every_peer_has_its_shape_in_the_package(peer: Peer) -> None:
    for name in known_shapes():
        shape = json.loads((SHAPES / name / "config.json").read_text())
        found = peer.find(shape, "bfloat16")
        assert found is not None and found.name == name
        assert {row.name for row in ROWS} >= set(found.rows)


# --- several runs, one page


def ablation(technique: str = "cuda_graphs", **more: Any) -> dict[str, Any]:
    points = {
        "off": [{"rows": 1, "ms": 6.4}, {"rows": 8, "ms": 7.0}],
        "on": [{"rows": 1, "ms": 1.6}, {"rows": 8, "ms": 1.4}],
    }
    curves = [{"mode": mode, "points": each} for mode, each in points.items()]
    figures = [{"name": "ms", "higher_is_better": False}]
    return {
        "technique": technique,
        "title": "t",
        "x": "rows",
        "figures": figures,
        "curves": curves,
        "same": 9,
        "compared": 10,
        **more,
    }


def written(path: Path, entry: dict[str, Any]) -> Path:
    path.write_text(json.dumps(entry))
    return path


def test_rows_of_one_model_from_several_runs_are_one_table(peer: Peer, tmp_path: Path) -> None:
    first, second = model_of(peer, "Llama-3.2-1B", command="first"), model_of(peer, "Llama-3.2-1B", command="second")
    second["rows"] = [{**second["rows"][0], "values": [7.0]}, {**second["rows"][1], "values": [], "problem": "lost"}]
    second["facts"], second["limits"] = (
        {"date": "later"},
        {**peer.limits, "read_bandwidth": peer.limits["read_bandwidth"] * 0.9},
    )
    files = [written(tmp_path / f"{name}.json", {"models": [model]}) for name, model in (("a", first), ("b", second))]
    (both,) = read_files(files)
    assert (
        len(both["rows"]) == len(first["rows"])
        and both["rows"][0]["values"] == [7.0]
        and both["rows"][1] == first["rows"][1]
    )
    assert both["command"] == "first ; second" and both["facts"]["date"] == "today and later"
    assert "below the peer's" in refusals(both, peer)[0], "the worse limits decide"
    assert combine([first, {**second, "dtype": "float16"}])[1]["dtype"] == "float16", (
        "another precision is another table"
    )
    for pair in ([first, {**second, "dtype": None}], [{**first, "dtype": None}, second]):
        (alone,) = combine(pair)
        assert alone["dtype"] == first["dtype"], "a start alone does not know its precision"


def test_ablations_stand_below_the_table_of_their_model(peer: Peer, tmp_path: Path) -> None:
    model = written(
        tmp_path / "table.json",
        {"models": [model_of(peer, "Llama-3.2-1B", start_stages={"empty caches: import torch": 2.5})]},
    )
    facts = {"model": "some/where/Llama-3.2-1B, auto", "date": "then"}
    results = written(tmp_path / "ablations.json", {"facts": facts, "ablations": [ablation()]})
    (merged,) = read_files([results, model])
    for text in (terminal(merged, peer), markdown(merged, peer)):
        assert "1: 6.4 → 1.6 · 8: 7 → 1.4" in text and "1: 4.00 · 8: 5.00" in text and "9 of 10" in text
    assert "| import torch | 2.500 |" in markdown(merged, peer)
    other = written(tmp_path / "other.json", {"facts": {**facts, "model": "Llama-3.1-8B, auto"}, "ablations": []})
    with pytest.raises(ConfigError, match=r"ablations of Llama-3\.1-8B, and the tables are of Llama-3\.2-1B"):
        read_files([model, other])


def test_a_technique_that_could_not_be_measured_is_missing_and_the_last_measurement_counts(peer: Peer) -> None:
    failed, old, new = {"technique": "flat_gemm", "problem": "no GPU"}, ablation(same=1), ablation(same=2)
    text = markdown(model_of(peer, "Llama-3.2-1B", techniques=[failed, old, new]), peer)
    assert "flat_gemm (no GPU)" in text and "2 of 10" in text and "1 of 10" not in text


def test_techniques_are_measured_in_processes_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> Any:
        commands.append(command)
        if "overlap" in command:
            return SimpleNamespace(returncode=1, stderr="headrace: the card is on fire\n")
        Path(command[command.index("--output-json") + 1]).write_text(
            json.dumps({"facts": {"date": "now"}, "ablations": [ablation()]})
        )
        return SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr(table_techniques.subprocess, "run", run)
    found = table_techniques.measure_techniques(["cuda_graphs", "overlap"], ["some/model", "--load-format", "dummy"])
    assert [each.get("problem") for each in found] == [None, "headrace: the card is on fire"] and found[0][
        "date"
    ] == "now"
    assert commands[0][-4:] == ["--model", "some/model", "--load-format", "dummy"] and "cuda_graphs" in commands[0]
    assert "cuda_graphs" in table_techniques.chosen_techniques([]) and table_techniques.chosen_techniques(
        ["overlap"]
    ) == ["overlap"]
    with pytest.raises(ConfigError, match="no technique 'nothing'"):
        table_techniques.chosen_techniques(["nothing"])


def test_what_stands_above_the_mark_stays(peer: Peer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, table = tmp_path / "page.md", written(tmp_path / "table.json", {"models": [model_of(peer, "Llama-3.2-1B")]})
    page.write_text(f"# Mine\n\n{bench_table.MARK}\n\nold")
    parser = argparse.ArgumentParser()
    bench_table.add_arguments(parser)
    for _ in range(2):
        assert bench_table.run(parser.parse_args(["--merge", str(table), "--markdown", str(page)]), EngineConfig()) == 0
    text = page.read_text()
    assert (
        text.startswith("# Mine\n\n<!--")
        and text.count("## Llama-3.2-1B") == text.count(bench_table.MARK) == 1
        and "old" not in text
    )
    capsys.readouterr()
