"""``bench kernels``: nothing is timed unchecked, nothing that did not run disappears."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from headrace import cli
from headrace.bench import kernels as bench
from headrace.bench.kernel_cases import DEFAULT_SPEC
from headrace.cost.profile import Limits
from headrace.errors import ConfigError
from headrace.kernels.candidate import Candidate
from headrace.kernels.operations import OPERATIONS
from lab import __main__ as lab
from lab.kernels import EveryCase
from tests.support.kernel_cases import carried_out

LIMITS = Limits(1e10, 1e10, {"bfloat16": 1e11, "float32": 1e11})
TINY = bench.KernelBench(
    spec=replace(
        DEFAULT_SPEC, vocab_size=96, hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=48
    ),
    rows=(1, 70),
    context=40,
    seconds=0.0,
)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "last_level_cache_bytes", lambda: 2**12)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
def test_every_candidate_of_every_operation_has_a_row(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "time_calls", lambda calls, seconds, device: bench._time(calls, seconds, rounds=1))
    rows = bench.measure(replace(TINY, dtype=dtype, maker=EveryCase), LIMITS)
    assert {row.op for row in rows} == set(OPERATIONS)
    for op, one in OPERATIONS.items():
        assert {row.kernel for row in rows if row.op == op} == {candidate.name for candidate in one.candidates} | {
            "torch"
        }
    for row in rows:
        assert not row.wrong, row
        assert (row.seconds is None) == (row.fraction is None)
        assert row.seconds is not None or row.note  # missing, and why


def test_what_batch_invariance_would_choose_is_timed_beside_torch_s_own() -> None:
    rows = bench.measure(replace(TINY, ops=("linear",), rows=(1,), batch_invariant=True), LIMITS)
    timed = {row.kernel for row in rows if row.seconds is not None}
    assert "torch" in timed and "onednn" not in timed
    assert all("sums depend" in row.note for row in rows if row.kernel == "onednn")


def test_a_wrong_candidate_is_not_timed_and_fails_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = Candidate("broken", lambda site: lambda x, weight, eps, residual: (x * 1.5, x + residual))
    patched = carried_out("rms_norm", broken)
    monkeypatch.setattr(bench, "OPERATIONS", patched)
    monkeypatch.setattr("headrace.kernels.OPERATIONS", patched)
    monkeypatch.setattr(bench, "limits_now", lambda device: LIMITS)
    assert lab.main(["kernels", "--ops", "rms_norm", "--rows", "1", "--seconds", "1e-9"]) == 1
    line = next(line for line in capsys.readouterr().out.splitlines() if "broken" in line)
    assert "missing" in line and "wrong: differs" in line


def test_bytes_and_flops_are_those_of_the_mathematics() -> None:
    rows = {
        (row.op, row.case): row
        for row in bench.measure(replace(TINY, ops=("linear", "paged_attention")), LIMITS)
        if row.kernel == "torch"
    }
    qkv = rows["linear", "qkv 1x64x128"]
    assert (qkv.bytes, qkv.flops) == (2 * (64 * 128 + 64 + 128), 2 * 64 * 128)
    decode = rows["paged_attention", "decode 1x1, context 40"]
    assert (decode.bytes, decode.flops) == (2 * (2 * 40 * 2 * 16 + 2 * 4 * 16), 4 * 40 * 4 * 16)
    prefill = rows["paged_attention", "prefill 1x70, context 70"]
    assert prefill.flops == 4 * (70 * 71 // 2) * 4 * 16
    assert qkv.floor == max(qkv.bytes / 1e10, qkv.flops / 1e11)


def test_the_command_writes_what_it_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "limits_now", lambda device: LIMITS)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1}
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "max_position_embeddings": 64}
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-5, **heads, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    file = tmp_path / "rows.json"
    arguments = [
        "--model",
        str(tmp_path),
        "--ops",
        "linear",
        "--rows",
        "2",
        "--seconds",
        "1e-9",
        "--output-json",
        str(file),
    ]
    assert cli.main(["bench", "kernels", *arguments]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert rows[-1]["case"] == "head, tied 2x32x64" and rows[-1]["kernel"] == "torch"
    assert capsys.readouterr().out.count("2x32x") == len(rows)


@pytest.mark.parametrize(
    ("change", "message"), [({"ops": ("flash",)}, "flash"), ({"dtype": "int4"}, "int4"), ({"rows": (0,)}, "at least 1")]
)
def test_what_cannot_be_timed_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        bench.measure(replace(TINY, **change), LIMITS)


def test_threads_are_left_as_they_were(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    before = torch.get_num_threads()
    monkeypatch.setattr(bench, "limits_now", lambda device: LIMITS)
    lab.main(["kernels", "--ops", "activation", "--rows", "1", "--seconds", "1e-9", "--threads", str(before + 1)])
    assert f"threads:   {before + 1}" in capsys.readouterr().out
    assert torch.get_num_threads() == before
