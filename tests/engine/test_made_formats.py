"""What ``headrace quantize`` writes means the same to whoever reads it: to transformers through compressed-tensors, and
to Headrace, packed or widened while it is read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from headrace.config import ModelConfig
from headrace.errors import ModelError
from headrace.models.checkpoint import SafetensorsCheckpoint
from headrace.models.decoder import Decoder
from headrace.models.dequantized import DequantizedCheckpoint
from headrace.models.families import spec_from_config
from headrace.models.files import read_json
from headrace.models.loader import open_checkpoint
from headrace.models.source import find_model
from headrace.quant import Format
from headrace.quant.codes import Activations
from headrace.quant.outliers import OutlierColumns
from headrace.quant.scaled import ScaledWeight
from headrace.quantize.at_load import QuantizedCheckpoint
from headrace.quantize.blocks import BlockRunner, Inputs
from headrace.quantize.folder import finish_folder
from headrace.quantize.layer import Job
from headrace.quantize.makers import SHARE, maker_for
from headrace.quantize.names import chosen
from headrace.quantize.run import ignored_modules, quantize
from headrace.quantize.shards import Shards
from headrace.quantize.slicing import Slicing, sliced_config
from tests.support.forward import CPU, PagedRun, load_decoder
from tests.support.tiny import VOCAB_SIZE, save

PROMPTS = [[1 + (7 * row + at) % 250 for at in range(5 + 9 * row)] for row in range(3)]
FORMS = [
    ("fp8", "rtn"), ("fp8-static", "rtn"), ("fp8-block", "rtn"), ("w8a8", "rtn"), ("w2a16", "rtn"), ("w3a16", "rtn"), ("w5a16", "gptq"),
    ("w6a8", "rtn"), ("w4a8", "gptq"), ("mxfp4", "rtn"), ("nvfp4", "gptq"), ("mxfp4", "mr-gptq"), ("nvfp4", "mr-gptq"),
]  # fmt: skip

# mean and largest: inputs near the middle of two codes fall to either side; theirs rounds int8's to 127.5 steps, and
# NVFP4's weights to bfloat16
_CLOSE = {"nvfp4": (2e-2, 0.2)}


def made(
    model: str,
    output: Path,
    form: str,
    method: str,
    group: int | None,
    stored: torch.dtype = torch.float32,
    **fields: object,
) -> Path:
    """``stored``: of scales."""
    plain = save(model, output.with_name("plain"), **fields)
    tensors = {name: each.bfloat16() for name, each in load_file(plain / "model.safetensors").items()}
    save_file(tensors, plain / "model.safetensors")
    source = find_model(ModelConfig(model=str(plain)))
    spec = spec_from_config(source.config)
    rows = torch.randint(0, VOCAB_SIZE, (6, 40), generator=torch.Generator().manual_seed(0)).tolist()
    scales = stored if form != "dfloat11" else torch.bfloat16
    recipe = maker_for(chosen(form, method, text=True), group_size=group, asymmetric=False, scales=scales)
    shards = Shards(output, spec.num_layers + 1)
    runner = BlockRunner(spec, dtype=torch.float32, device=CPU, length=40)
    quantize(Job(spec, open_checkpoint(source), recipe, rows), runner, shards, lambda done: None)
    shards.write_index()
    config = {**read_json(source.path / "config.json"), "quantization_config": recipe.entry(ignored_modules(spec))}
    finish_folder(output, source, form, config, recipe.form, {})
    return output


def logits(folder: Path, dtype: torch.dtype = torch.float32) -> Tensor:
    return computed(load_decoder(folder, dtype=dtype))


def computed(decoder: Decoder) -> Tensor:
    run = PagedRun(decoder)
    return torch.cat(list(run.step({str(index): prompt for index, prompt in enumerate(PROMPTS)}).values()))


def group_of(form: str) -> int | None:
    return 32 if form.startswith("w") and form != "w8a8" else None


@pytest.mark.parametrize(("form", "method"), FORMS)
def test_others_read_what_is_written(form: str, method: str, tmp_path: Path) -> None:
    """transformers, from the same folder; compressed-tensors' own rotations stand before its matrices where the config
    has some."""
    pytest.importorskip(
        "compressed_tensors", reason="compressed-tensors, which reads this form for transformers, is not installed"
    )
    from compressed_tensors.transform import TransformConfig, apply_transform_config
    from transformers import AutoModelForCausalLM

    folder = made("llama", tmp_path / "made", form, method, group_of(form), hidden_size=128, intermediate_size=128)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    model.hf_quantizer.compressor.decompress_model(model)
    torch.nn.Module.float(model)
    if rotations := json.loads((folder / "config.json").read_text())["quantization_config"].get("transform_config"):
        for scheme in rotations["config_groups"].values():
            scheme["apply"] = [part for part in scheme["apply"] if part["location"] == "input"]  # what is left to do
        apply_transform_config(model, TransformConfig.model_validate(rotations))
    with torch.inference_mode():
        theirs = torch.cat([model(torch.tensor([prompt])).logits[0] for prompt in PROMPTS])
    ours = logits(folder)
    off = (ours - theirs).abs()
    mean, most = _CLOSE.get(
        form, (2e-2, 0.5) if form.startswith("fp8") else (0.1, 1.0) if form.endswith("a8") else (1e-4, 1e-3)
    )
    assert float(off.mean()) < mean and float(off.max()) < most


@pytest.mark.parametrize(
    ("model", "form", "method"),
    [
        ("llama", "mxfp4", "mr-gptq"), ("llama", "spqr", "gptq"), ("llama", "dfloat11", "rtn"), ("llama", "w1a16", "gptq"),
        ("qwen3-moe", "mxfp4", "mr-gptq"), ("qwen3-moe", "spqr", "gptq"), ("qwen3-moe", "w3a16", "gptq"),
        ("qwen3-moe", "qmoe", "gptq"), ("qwen3-moe", "w1a16", "rtn"),
    ],
)  # fmt: skip
def test_packed_is_what_it_means(model: str, form: str, method: str, tmp_path: Path) -> None:
    """Computed with as it is, and widened while it is read (``--quantization none``)."""
    folder = made(model, tmp_path / "made", form, method, 32 if form in ("spqr", "w3a16", "w1a16") else None)
    packed = logits(folder)
    source = find_model(ModelConfig(model=str(folder), quantization="none"))
    wide = DequantizedCheckpoint(SafetensorsCheckpoint(folder), source)
    names = list(wide.keys())
    save_file({key: wide.read(key).contiguous().clone() for key in names}, tmp_path / "plain" / "model.safetensors")
    torch.testing.assert_close(packed, logits(tmp_path / "plain"), rtol=1e-4, atol=1e-4)


def test_lossless_is_lossless_to_the_bit(tmp_path: Path) -> None:
    folder = made("llama", tmp_path / "made", "dfloat11", "rtn", None)
    assert torch.equal(logits(folder, torch.bfloat16), logits(tmp_path / "plain", torch.bfloat16))
    held = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    assert (
        held < 0.95 * (tmp_path / "plain" / "model.safetensors").stat().st_size
    )  # 64 rows a matrix, and an embedding that stays


def test_outlier_columns_are_not_rounded(tmp_path: Path) -> None:
    """A channel a hundred times as large as the others: its inputs and weights stay, and the others are rounded without
    it."""
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(40, 96, generator=generator), torch.randn(24, 96, generator=generator)
    x[:, 17] *= 100
    seen = Inputs()
    seen.add(x)
    choice, form = (
        chosen("int8-outliers", None, text=True),
        OutlierColumns(ScaledWeight("int8", (1, 0), activations=Activations("int8")), SHARE),
    )
    made_up = maker_for(choice, group_size=None, asymmetric=False, scales=torch.float32).made(
        weight, seen, 1.0, Format()
    )
    names = {suffix: each.name for each in form.tensors(24, 96) for suffix in each.on_disk}
    tensors = form.prepare({names[suffix]: each for suffix, each in made_up.items()})
    y = form.activated(x, tensors) @ form.dense(tensors, slice(None), torch.float32).T
    plain = form.inner
    plainly = (
        plain.activated(x, tensors)
        @ plain.dense(tensors, slice(None), torch.float32).index_copy(1, torch.tensor([17]), weight[:, 17:18]).T
    )
    want = x @ weight.T
    assert tensors["outlier_index"].tolist() == [17] and torch.equal(form.activated(x, tensors)[:, 17], x[:, 17])
    assert float((y - want).norm()) < 0.05 * float((plainly - want).norm())


def sliced(model: str, output: Path, keep: float) -> Path:
    plain = save(model, output.with_name("plain"))
    source = find_model(ModelConfig(model=str(plain)))
    spec, config = (
        spec_from_config(source.config),
        sliced_config(read_json(plain / "config.json"), spec_from_config(source.config), keep),
    )
    target, shards = spec_from_config(config), Shards(output, spec.num_layers + 1)
    rows = torch.randint(0, VOCAB_SIZE, (6, 40), generator=torch.Generator().manual_seed(0)).tolist()
    before, after = (BlockRunner(each, dtype=torch.float32, device=CPU, length=40) for each in (spec, target))
    Slicing(spec, target, open_checkpoint(source), rows, []).run(before, after, shards, lambda done: None)
    shards.write_index()
    finish_folder(output, source, "slicegpt", config, "transformers", {})
    return output


@pytest.mark.parametrize("model", ["llama", "llama-biased-mha-tied", "qwen3-moe"])
def test_a_rotated_stream_computes_the_same(model: str, tmp_path: Path) -> None:
    """All dimensions kept: norms' factors have moved into matrices, and everything is rotated."""
    torch.testing.assert_close(
        logits(sliced(model, tmp_path / "made", 1.0)), logits(tmp_path / "plain"), rtol=1e-3, atol=1e-3
    )


def test_a_sliced_model_is_a_plain_one_for_others(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = sliced("llama", tmp_path / "made", 0.5)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        theirs = torch.cat([model(torch.tensor([prompt])).logits[0] for prompt in PROMPTS])
    assert model.config.hidden_size == 32
    torch.testing.assert_close(logits(folder), theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("asked", "form"), [("fp8", "fp8"), ("compressed-tensors", "w4a16")])
@pytest.mark.parametrize("model", ["llama", "qwen3-moe"])
def test_made_while_they_are_read_weights_are_what_would_be_written(
    model: str, asked: str, form: str, tmp_path: Path
) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 128}
    sizes |= {"moe_intermediate_size": 128} if "moe" in model else {}
    folder = made(model, tmp_path / "made", form, "rtn", None, torch.bfloat16, **sizes)
    source = find_model(ModelConfig(model=str(tmp_path / "plain"), quantization=asked))
    assert spec_from_config(source.config) == spec_from_config(read_json(folder / "config.json"))
    found = QuantizedCheckpoint(SafetensorsCheckpoint(source.path), source, CPU)
    written = SafetensorsCheckpoint(folder)
    assert sorted(found.keys()) == sorted(written.keys())
    for key in written.keys():  # noqa: SIM118 - a protocol, not a mapping
        assert (found.dtype(key), found.shape(key)) == (written.dtype(key), written.shape(key)), key
        assert torch.equal(found.read(key).view(torch.uint8), written.read(key).contiguous().view(torch.uint8)), key


def test_a_shape_that_no_group_divides_is_named(tmp_path: Path) -> None:
    save("llama", tmp_path / "plain")
    source = find_model(ModelConfig(model=str(tmp_path / "plain"), quantization="compressed-tensors"))
    with pytest.raises(ModelError, match=r"q_proj cannot be quantized as w4a16 at load: its 64 inputs.*or give fp8"):
        QuantizedCheckpoint(SafetensorsCheckpoint(source.path), source, CPU)
