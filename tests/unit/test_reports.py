"""``simulate --advise`` and ``--four-costs``: against hand-made sums, against a simulated sweep, against published
figures, and bad input."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace import cli
from headrace.commands.doctor import examine_batch
from headrace.commands.simulate_reports import _show_advice, _simulated, sentences
from headrace.config import DeviceConfig, EngineConfig, SchedulerConfig
from headrace.cost.profile import DeviceIdentity
from headrace.models.families import spec_from_config
from headrace.planner.advice import KNEE, advise, least
from headrace.planner.devices import known_devices
from headrace.planner.four_costs import CONTEXTS, four_costs, peak_profile
from headrace.planner.pricing import Priced, priced
from headrace.spec import DecoderSpec, LayerSpec, RopeSpec


def model(
    layers: int = 60,
    hidden: int = 7168,
    heads: int = 56,
    wide: int = 20480,
    vocab: int = 64000,
    positions: int = 200_000,
) -> DecoderSpec:
    """By default the 34B model of the paper's example."""
    rope = RopeSpec(5e6, 128)
    return DecoderSpec(
        "llama",
        vocab,
        hidden,
        heads,
        8,
        128,
        wide,
        (LayerSpec(),) * layers,
        positions,
        rope,
        checkpoint_dtype="bfloat16",
    )


def on(name: str, spec: DecoderSpec, **config: object) -> Priced:
    return priced(spec, replace(EngineConfig(), scheduler=SchedulerConfig(**config)), known_devices()[name])  # type: ignore[arg-type]


SMALL = model(layers=16, hidden=2048, heads=16, wide=8192, vocab=32_000, positions=131_072)


def test_the_paper_s_example_comes_out_as_published() -> None:
    """Fu 2024, §2: Yi-34B on an A100 of 80 GB, links of 20 GB/s; figures for 4K and 50K (250 tokens are a screen)."""
    rows, notes = four_costs(on("a100", model()), [4000, 50_000, 100_000], host_link=20e9)
    short, long, longer = rows
    assert longer.kv_bytes / 2**30 == pytest.approx(22.8, rel=0.01)
    assert short.peak.prompt == pytest.approx(0.89, rel=0.05)
    assert short.peak.own * 250 == pytest.approx(8.5, rel=0.02) and long.peak.own * 250 == pytest.approx(9.8, rel=0.02)
    assert long.peak.switch == pytest.approx(1.1, rel=0.13) and short.peak.switch == pytest.approx(0.1, rel=0.05)
    # The paper counts two FLOPs for a query, a key and a dimension, we four (a product for scores, one for values):
    # 14.1 s there.
    assert long.peak.prompt == pytest.approx(14.1 + 60 * 7168 * 50_000**2 / 312e12, rel=0.05)
    # 80 GB and 68.8 of weights leave 11.2 for 12.3 of keys and values; the paper's round figures say one user.
    assert long.peak.users == 0 and short.peak.users == 11
    assert short.engine is None and "would not start" in notes[-1]  # nothing is left beside activations and context


def test_costs_by_hand_and_only_up_to_what_the_model_allows() -> None:
    found = on("h200", SMALL)
    rows, notes = four_costs(found, CONTEXTS)
    assert [row.context for row in rows] == [4096, 8192, 16_384, 32_768, 65_536, 131_072] and "131,072" in notes[0]
    for row in rows:
        assert row.engine is not None and row.peak.switch == pytest.approx(2 * row.kv_bytes / 63e9)
        assert row.kv_bytes == row.context * 16 * 2 * 8 * 128 * 2
        assert (
            row.engine.prompt > row.peak.prompt and row.engine.own > row.peak.own and row.engine.users <= row.peak.users
        )
    users = [row.peak.users for row in rows]
    assert all(earlier >= 2 * later for earlier, later in pairwise(users))


def test_published_limits_are_raised_again_and_measured_ones_left() -> None:
    devices = known_devices()
    assert peak_profile(devices["a100"]).gemm_rates["bfloat16"] == pytest.approx(312e12)
    assert peak_profile(devices["a100"]).read_bandwidth == pytest.approx(2.039e12)
    assert peak_profile(devices["h200"]) == devices["h200"].profile


def test_a_sliding_window_bounds_what_a_context_holds() -> None:
    layers = (LayerSpec(), LayerSpec(window=1024)) * 8
    found = on("h200", replace(SMALL, layers=layers))
    token = 2 * 8 * 128 * 2
    assert found.kv_bytes(100_000) == token * 8 * (100_000 + 1024)
    assert found.blocks(100_000) == [-(-100_000 // 128), 1024 // 128 + 1]


def test_the_knee_is_the_least_batch_that_reaches_nine_tenths() -> None:
    found = on("h200", SMALL)
    advice = advise(found, 2048)

    def rate(batch: int) -> float:
        return batch / found.decode_seconds(batch, 2048)

    assert rate(advice.knee) >= KNEE * rate(advice.most) > rate(advice.knee - 1)
    groups = found.placed().kv_groups
    assert advice.most == groups[0].num_blocks // 16 and advice.spare_blocks == groups[0].num_blocks - 16 * advice.knee
    assert advice.spare_bytes == advice.spare_blocks * groups[0].spec.bytes_per_block
    assert 1.0 < advice.replica_ratio < 2.0 and advice.replica_pays


def test_it_is_what_a_simulated_sweep_shows() -> None:
    found = on("h200", SMALL)
    for batch in (1, 8, 40):
        simulated, preempted = _simulated(found, batch, 1024)
        assert (
            simulated is not None
            and not preempted
            and found.decode_seconds(batch, 1024) == pytest.approx(simulated, rel=0.02)
        )


def test_a_comparison_that_preempts_is_none_and_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """As many as memory holds at 1,024 tokens do not all fit while the first go on writing until the last one
    writes."""
    config = EngineConfig(scheduler=SchedulerConfig(max_num_batched_tokens=128))
    found = priced(SMALL, config, replace(known_devices()["h200"], memory=7 * 2**30))
    most = advise(found, 1024).most
    simulated, preempted = _simulated(found, most, 1024)
    assert simulated is None and preempted > 0
    points = _show_advice(found, 1024)["points"]
    assert (
        points[-1] | {"simulated ms": None, "error": None, "apart": preempted} == points[-1]
        and points[0]["simulated ms"]
    )
    assert f"note: {most} sequences were simulated, too" in capsys.readouterr().out


def test_a_comparison_whose_last_begins_when_the_first_have_ended_is_none_and_is_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It waits where nobody is preempted: fewer decode beside it than were asked about (a step +39 % off)."""
    config, card = EngineConfig(scheduler=SchedulerConfig(max_num_batched_tokens=2048)), known_devices()["h200"]
    found = priced(SMALL, config, replace(card, memory=7 * 2**30))
    most = advise(found, 1024).most
    assert _simulated(found, most, 1024)[0] is None
    assert _simulated(found, most * 3 // 4, 1024)[0] == pytest.approx(
        found.decode_seconds(most * 3 // 4, 1024), rel=0.03
    )
    _show_advice(found, 1024)
    assert f"note: {most} sequences were simulated, too" in capsys.readouterr().out


def test_where_memory_ends_first_nothing_is_spare_and_a_second_engine_does_not_fit() -> None:
    small = replace(known_devices()["h200"], memory=9 * 2**30)
    advice = advise(priced(SMALL, EngineConfig(), small), 50_000)
    assert advice.knee == advice.most and not advice.replica_fits and not advice.replica_pays
    knee, spare, replica = sentences(advice)
    assert "Memory ends before the knee" in knee and "No KV memory is spare" in spare and "does not fit" in replica


def test_engines_on_a_cpu_have_no_slack_to_share() -> None:
    """Each computes with all cores. (On a card the same arithmetic gives more than one: the test of the knee.)"""
    card = on("h200", SMALL)
    cpu = replace(
        card.device,
        profile=replace(card.device.profile, identity=DeviceIdentity(kind="cpu", name="Some CPU", threads=2)),
    )
    advice = advise(replace(card, device=cpu), 2048)
    assert (
        advice.replica_ratio == pytest.approx(advice.tokens_a_second / advice.most_tokens_a_second)
        and not advice.replica_pays
    )


def test_what_others_hold_of_a_card_is_no_part_of_a_second_engine() -> None:
    found = on("h200", SMALL)
    info = found.placed()
    shared = advise(found, 2048, replace(info, memory={**info.memory, "in use before": 40 * 2**30}))
    assert shared == advise(found, 2048)


# --- as doctor says it

CARD = replace(
    known_devices()["h200"].profile,
    identity=DeviceIdentity(kind="cuda", name="NVIDIA H200", threads=0, features=("sm_90",)),
)
CONFIG = {
    "model_type": "llama", "vocab_size": 1000, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16",
    "num_hidden_layers": 2, "hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 1024,
}  # fmt: skip


def test_doctor_says_of_an_engine_what_advise_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine has half of the blocks that a simulated one would have: that is what is judged."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    simulated = priced(spec_from_config(CONFIG), EngineConfig(), known_devices()["h200"])
    info = simulated.placed()
    group, *_ = info.kv_groups
    half = replace(info, kv_groups=(replace(group, num_blocks=group.num_blocks // 2),))
    found = examine_batch(EngineConfig(), CONFIG, half, CARD)
    assert found["most"] == group.num_blocks // 2 // 16 and found["prices"] == "assumed, not calibrated"
    title, *said = examine_batch(EngineConfig(), CONFIG, info, CARD)["said"]
    assert "2,048 tokens a sequence" in title and found["said"][1:] != said
    advised = sentences(advise(simulated, 2048))
    prices, *ranks = said[len(advised) :]
    assert said[: len(advised)] == advised and prices == "prices: assumed, not calibrated"
    assert [line.partition(" of these (-tp ")[0] for line in ranks] == ["On 2", "On 4", "On 8"]


def test_doctor_says_why_it_cannot_judge_batches() -> None:
    info = priced(spec_from_config(CONFIG), EngineConfig(), known_devices()["h200"]).placed()
    unknown = EngineConfig(device=DeviceConfig(enforce_eager=True))
    for config, profile, remedy in (
        (EngineConfig(), None, "headrace doctor --profile"),
        (EngineConfig(device=DeviceConfig(executor="keyed-hash")), CARD, "--executor"),
        (unknown, CARD, "--calibrate"),
    ):
        (line,) = examine_batch(config, CONFIG, info, profile)["said"]
        assert line.startswith("No batch advice: ") and remedy in line


@given(st.integers(1, 10_000), st.integers(1, 10_000))
def test_the_search_finds_the_first(first: int, beyond: int) -> None:
    most = first + beyond
    assert least(lambda batch: batch >= first, most) == first


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--four-costs", "0"], "at least 1 each"),
        (["--four-costs", "500000"], "has positions for 131,072 tokens"),
        (["--advise", "0"], "takes 1 to"),
        (["--advise", "300000"], "takes 1 to 131,072"),
        (["--four-costs", "4k", "--host-link", "0"], "at least 1"),
        (["--advise", "nan"], "nan"),
    ],
)
def test_bad_input_is_a_sentence_with_the_numbers(
    flags: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _simulate(tmp_path, *flags) != 0
    assert said in capsys.readouterr().err


def test_both_reports_print_and_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = tmp_path / "report.json"
    assert (
        _simulate(
            tmp_path,
            "--advise",
            "128",
            "--four-costs",
            "4k",
            "64k",
            "--kv-cache-memory",
            "96MiB",
            "--output-json",
            str(written),
        )
        == 0
    )
    shown, kept = capsys.readouterr().out, json.loads(written.read_text())
    assert (
        "prices: calibrated from" in shown
        and "extrapolated: sequences of 64,000 tokens" in shown
        and kept["prices"]["extrapolated"]
    )
    assert "by this engine" in shown and "The knee is at" in shown and "second engine" in shown
    assert [row["context"] for row in kept["four_costs"]] == [4000, 64_000] and kept["advice"]["context"] == 128


def _simulate(folder: Path, *flags: str) -> int:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    try:
        return cli.main(["simulate", "--model", str(folder), "--device", "h200", *flags])
    except SystemExit as ended:
        return int(ended.code or 0)
