"""``headrace quantize``: what it writes is the model it was made from, but for rounding; whatever the family, the
format and the method."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace import LLM, SamplingParams
from headrace.cli import main
from headrace.config import ModelConfig
from headrace.models.decoder import Block
from headrace.models.families import spec_from_config
from headrace.models.loader import open_checkpoint
from headrace.models.source import find_model
from headrace.quantize.blocks import BlockRunner
from headrace.quantize.layer import Job
from headrace.quantize.makers import maker_for
from headrace.quantize.names import chosen
from headrace.quantize.recipe import pack
from headrace.quantize.run import Judged, quantize
from headrace.quantize.shards import Shards
from tests.support.tiny import VOCAB_SIZE, save

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def model(models: Path, family: str) -> Path:
    folder = models / family
    if not folder.exists():
        save(family, folder)
    return folder


def made(
    folder: Path, output: Path, form: str, method: str, group: int | None = None, *, asymmetric: bool = False
) -> Judged:
    source = find_model(ModelConfig(model=str(folder)))
    spec = spec_from_config(source.config)
    torch.manual_seed(0)
    rows = torch.randint(0, VOCAB_SIZE, (10, 40)).tolist()
    runner = BlockRunner(spec, dtype=torch.float32, device=CPU, length=40)
    recipe = maker_for(
        chosen(form, method, text=True), group_size=group, asymmetric=asymmetric, scales=torch.bfloat16, spec=spec
    )
    job = Job(
        spec, open_checkpoint(source), recipe, rows[:8] if method != "rtn" or form == "fp8-static" else [], rows[8:]
    )
    judged = quantize(job, runner, Shards(output, spec.num_layers + 1), lambda done: None)
    assert judged is not None
    return judged


@pytest.mark.parametrize("method", ["rtn", "gptq", "awq"])
@pytest.mark.parametrize("family", ["llama-biased-mha-tied", "gemma2", "qwen3-moe", "phi3"])
def test_only_rounding_changes_what_is_computed(family: str, method: str, models: Path, tmp_path: Path) -> None:
    """Eight bits for each 32 inputs: a factor that one side lacked would show as a divergence of whole nats (these
    models are sure of all)."""
    assert made(model(models, family), tmp_path / "out", "w8a16", method, 32).divergence < 0.1


@pytest.mark.parametrize(("form", "method"), [("fp8", "rtn"), ("w8a8", "smooth"), ("w8a8", "gptq"), ("w4a16", "gptq")])
def test_formats_lose_what_their_bits_lose(form: str, method: str, models: Path, tmp_path: Path) -> None:
    judged = made(model(models, "llama"), tmp_path / "out", form, method, 32 if form == "w4a16" else None)
    assert 0 < judged.divergence < (8.0 if form == "w4a16" else 1.0)


@pytest.mark.parametrize("asymmetric", [False, True])
def test_gptq_is_closer_than_rounding_to_nearest(asymmetric: bool, models: Path, tmp_path: Path) -> None:
    nearest, made_up = (
        made(model(models, "llama"), tmp_path / method, "w4a16", method, 32, asymmetric=asymmetric).divergence
        for method in ("rtn", "gptq")
    )
    assert made_up < nearest


def test_the_command_writes_a_folder_that_engines_load_and_goes_on_where_it_was_broken_off(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 200)
    flags = [
        "--format",
        "w4a16",
        "--group-size",
        "32",
        "--calibration",
        str(text),
        "--calibration-length",
        "32",
        "--device",
        "cpu",
    ]
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    source = str(model(models, "llama"))
    assert main(["quantize", source, *flags, "--output", str(whole)]) == 0
    said = capsys.readouterr().out
    assert "layer 3 of 3" in said and "perplexity after" in said and "gptq" in said

    write = Shards.write

    def interrupted(self: Shards, index: int, tensors: dict[str, torch.Tensor]) -> None:
        if index == 2:
            raise KeyboardInterrupt
        write(self, index, tensors)

    monkeypatch.setattr(Shards, "write", interrupted)
    assert main(["quantize", source, *flags, "--output", str(broken)]) == 130
    monkeypatch.undo()
    assert main(["quantize", source, *flags, "--asymmetric", "--output", str(broken)]) == 2
    assert main(["quantize", source, *flags, "--output", str(broken)]) == 0
    assert "resuming" in capsys.readouterr().out
    files = sorted(file.name for file in whole.iterdir())
    assert files == sorted(file.name for file in broken.iterdir()) and "headrace_quantize.json" not in files
    assert all((whole / name).read_bytes() == (broken / name).read_bytes() for name in files)
    assert json.loads((whole / "config.json").read_text())["quantization_config"]["format"] == "pack-quantized"

    prompt, params = [list(range(3, 40))], SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    answers = []
    for quantization in (None, "none"):
        llm = LLM(model=str(whole), quantization=quantization, dtype="float32", device="cpu")
        answers.append(llm.generate(prompt, params)[0].outputs[0].token_ids)
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--format", "w4a16"], "attn.q_proj cannot be quantized as w4a16: its 64 inputs are not a multiple of 128"),
        (["--format", "w4a16", "--group-size", "48"], "--group-size is 48; give 32, 64 or 128"),
        (["--format", "fp8", "--group-size", "32"], "leave them out"),
        (
            ["--format", "w4a16", "--group-size", "32", "--method", "gptq"],
            "needs a text to calibrate with; give one: --calibration",
        ),
        (
            ["--format", "w4a16", "--group-size", "32", "--method", "smooth", "--calibration", "x"],
            "smooth is not for w4a16: outliers shifted",
        ),
        (["--format", "w9a16"], "--format w9a16 is not known; give one of fp8, fp8-static"),
        (["--format", "fp8-static"], "--format fp8-static by rtn needs a text to calibrate with"),
        (["--format", "mxfp4", "--asymmetric"], "leave them out"),
        (["--format", "dfloat11", "--group-size", "32"], "dfloat11 has its own format; leave them out"),
        (["--format", "qmoe"], "qmoe is for experts, and this model has none"),
        (["--format", "fp8", "--keep", "0.5"], "--keep is for slicegpt, and fp8 keeps all dimensions"),
        (["--format", "slicegpt"], "needs a text to calibrate with; give one"),
        (
            ["--format", "slicegpt", "--keep", "1.5", "--calibration", "x"],
            "--keep 1.5 leaves 96 of 64 dimensions; give a fraction from 0.50 to 1",
        ),
        (["--format", "fp8", "--calibration", "not there"], "cannot be read"),
        (["--format", "fp8", "--calibration-rows", "0"], "give 2 or more"),
    ],
)
def test_mistakes_are_told_before_anything_is_written(
    flags: list[str], words: str, models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    assert main(["quantize", str(model(models, "llama")), *flags, "--output", str(output)]) == 2
    assert words in capsys.readouterr().err and not output.exists()


def test_no_more_than_a_layer_is_in_memory(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there are: the one that is made, as it was and as it is read back, and the one before."""
    folder = save("llama", tmp_path / "deep", num_hidden_layers=7)
    alive: weakref.WeakSet[Block] = weakref.WeakSet()
    counts, load = [], BlockRunner.block

    def counted(self: BlockRunner, *how: Any) -> Block:
        alive.add(block := load(self, *how))
        counts.append(len(alive))
        return block

    monkeypatch.setattr(BlockRunner, "block", counted)
    made(folder, tmp_path / "out", "w8a16", "awq", 32)
    assert len(counts) == 3 * 7 and max(counts) <= 3


@pytest.mark.parametrize(
    "flags", [["--format", "w4a16", "--group-size", "32"], ["--format", "dfloat11"], ["--format", "nvfp4"]]
)
def test_weights_that_are_no_numbers_are_named(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save("llama", tmp_path / "plain")
    tensors = {name: each.bfloat16() for name, each in load_file(folder / "model.safetensors").items()}
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = float("nan")
    save_file(tensors, folder / "model.safetensors")
    assert main(["quantize", str(folder), *flags, "--output", str(tmp_path / "out"), "--device", "cpu"]) == 2
    assert (
        "model.layers.1.mlp.up_proj.weight holds 1 values that are NaN or infinite, of 6144; fetch"
        in capsys.readouterr().err
    )


def test_an_empty_text_is_told(models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.txt").write_text("")
    flags = ["--format", "mxfp4", "--calibration", str(tmp_path / "empty.txt"), "--output", str(tmp_path / "out")]
    assert main(["quantize", str(model(models, "llama")), *flags]) == 2
    assert "0 rows of 256, and at least 16 are needed" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_what_is_quantised_already_and_folders_of_other_things_are_refused(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, source = tmp_path / "first", str(model(models, "llama"))
    assert main(["quantize", source, "--format", "fp8", "--output", str(first), "--device", "cpu"]) == 0
    assert main(["quantize", str(first), "--format", "fp8", "--output", str(tmp_path / "second")]) == 2
    assert main(["quantize", source, "--format", "fp8", "--output", str(first)]) == 2
    said = capsys.readouterr().err
    assert "already quantized" in said and "is not empty" in said


def test_words_are_packed_as_the_form_wants_them() -> None:
    codes = torch.tensor([[-8, -7, 0, 1, 2, 3, 6, 7]])
    assert pack(codes, 4).tolist() == [[int.from_bytes(bytes([0x10, 0x98, 0xBA, 0xFE]), "little", signed=True)]]
    assert pack(torch.tensor([[-128, 0, 1, 127]]), 8).tolist() == [
        [int.from_bytes(bytes([0, 128, 129, 255]), "little", signed=True)]
    ]
