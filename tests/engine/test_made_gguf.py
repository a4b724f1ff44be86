"""``headrace quantize --format gguf-…``: the file is the model and the tokenizer that it was made from, to Headrace, to
the gguf library and, by the types of its metadata, to llama.cpp."""

from __future__ import annotations

import json
import lzma
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf.quants import dequantize

from headrace import LLM, SamplingParams
from headrace.cli import main
from headrace.config import ModelConfig
from headrace.engine.tokenizer import load_tokenizer
from headrace.errors import ConfigError
from headrace.models.families import spec_from_config
from headrace.models.files import TokenizerFiles
from headrace.models.gguf_file import read_gguf
from headrace.models.gguf_vocab import Piece, PieceType, bpe_tokenizer
from headrace.models.loader import open_checkpoint
from headrace.models.source import ModelSource, WeightFormat, find_model
from headrace.quantize.gguf_recipe import gguf_recipe
from headrace.quantize.gguf_vocab import tokenizer_metadata
from headrace.quantize.names import GGUF_TYPES, Choice
from headrace.spec import DecoderSpec
from tests.support import tiny
from tests.support.gguf_files import write_gguf
from tests.support.outside import shared

TEXTS = ("The mill wheel turns, 1234 times; it's here.\n\n  Räder 水は流れる。", "<|start|>user\nHi<|end|>", " \t x")


def source_of(path: Path) -> ModelSource:
    return find_model(ModelConfig(model=str(path), quantization="none"))


def made(folder: Path, output: Path, kind: str = "q8_0", *more: str) -> Path:
    assert main(["quantize", str(folder), "--format", f"gguf-{kind}", "--output", str(output), *more]) == 0
    (file,) = output.glob("*.gguf")
    return file


@pytest.mark.parametrize(
    "family", ["llama3", "llama-biased-mha-tied", "mistral", "qwen3-yarn", "qwen3-moe", "gemma2", "phi3-longrope"]
)
def test_a_family_in_gguf_is_the_same_model(family: str, tmp_path: Path) -> None:
    """Where each tensor is and how it is turned, by another writer's file; what is left is rounding to 8 bits."""
    folder = tiny.save(family, tmp_path / "tiny", **({"query_pre_attn_scalar": 24} if family == "gemma2" else {}))
    file = made(folder, tmp_path / "out")
    assert sorted(each.name for each in file.parent.iterdir()) == ["README.md", "tiny-Q8_0.gguf"]
    original, found = source_of(folder), source_of(file.parent)
    spec = spec_from_config(original.config)
    assert replace(spec_from_config(found.config), checkpoint_dtype=spec.checkpoint_dtype) == spec
    want, got = open_checkpoint(original), open_checkpoint(found)
    assert set(got.keys()) == set(want.keys())
    for key in want.keys():  # noqa: SIM118 - a protocol, not a mapping
        plain = want.read(key).float()
        assert (got.read(key).float() - plain).abs().max() <= plain.abs().max() / 200, key
    theirs = {each.name: each for each in gguf.GGUFReader(write_gguf(folder, tmp_path / "theirs.gguf")).tensors}
    for tensor in gguf.GGUFReader(file).tensors:
        values = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        other = torch.from_numpy(theirs[tensor.name].data.copy())
        assert values.shape == other.shape and (values - other).abs().max() <= other.abs().max() / 200, tensor.name


def test_metadata_has_the_types_that_llama_cpp_asks_for(tmp_path: Path) -> None:
    fields = gguf.GGUFReader(made(tiny.save("llama", tmp_path / "tiny"), tmp_path / "out", "q4_k_m")).fields
    types, kinds = {name: field.types for name, field in fields.items()}, gguf.GGUFValueType
    for name in (
        "llama.context_length",
        "llama.attention.head_count",
        "tokenizer.ggml.eos_token_id",
        "general.file_type",
    ):
        assert types[name] == [kinds.UINT32], name
    assert types["tokenizer.ggml.tokens"] == [kinds.ARRAY, kinds.STRING]
    assert types["tokenizer.ggml.token_type"] == [kinds.ARRAY, kinds.INT32]
    assert types["llama.attention.layer_norm_rms_epsilon"] == types["llama.rope.freq_base"] == [kinds.FLOAT32]
    assert types["tokenizer.ggml.add_bos_token"] == [kinds.BOOL]
    assert fields["general.file_type"].contents() == gguf.LlamaFileType.MOSTLY_Q4_K_M
    assert len(fields["tokenizer.ggml.tokens"].contents()) == tiny.VOCAB_SIZE  # a token for every row


@cache
def specs() -> tuple[DecoderSpec, DecoderSpec]:
    sizes: tuple[dict[str, int], ...] = ({"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 8}, {})
    wide, narrow = (spec_from_config(tiny.create("llama", 0, **each).config.to_dict()) for each in sizes)
    return wide, narrow


@pytest.mark.parametrize("kind", GGUF_TYPES)
def test_every_type_has_a_type_for_every_matrix(kind: str, tmp_path: Path) -> None:
    """Whose rows are whole blocks; where they are not, one of about as many bits."""
    wide, narrow = specs()
    types = gguf_recipe(Choice(f"gguf-{kind}", "rtn"), wide).types
    base = kind.upper().removesuffix("_S").removesuffix("_M")
    assert len(types) == 8 * 7 + 2 and types["model.layers.1.self_attn.q_proj"] == types["model.embed_tokens"] == base
    assert types["lm_head"] == ("Q8_0" if kind == "q8_0" else "Q6_K")
    finer = [index for index in range(8) if types[f"model.layers.{index}.mlp.down_proj"] != base]
    assert finer == ([0, 3, 6, 7] if kind.endswith("_m") or kind == "q2_k" else [])
    assert all(types[f"model.layers.{index}.self_attn.v_proj"] != base for index in finer)
    assert not any("_K" in each for each in gguf_recipe(Choice(f"gguf-{kind}", "rtn"), narrow).types.values())


def test_it_is_calibrated_judged_and_computed_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tiny.save("llama", tmp_path / "tiny", hidden_size=256, intermediate_size=256, num_hidden_layers=2)
    text = tmp_path / "text.txt"
    text.write_text("the wheel turns while water runs, and the stone turns with it; " * 60)
    more = ("--calibration", str(text), "--calibration-rows", "16", "--calibration-length", "24")
    file = made(folder, tmp_path / "out", "q6_k", *more)
    said = capsys.readouterr().out
    assert "to gguf-q6_k by imatrix on cpu" in said and "perplexity after" in said
    prompts = ["the wheel turns", "water"]
    outputs = [
        [
            each.outputs[0].token_ids
            for each in llm.generate(prompts, [SamplingParams(max_tokens=6, temperature=0.0)] * 2)
        ]
        for llm in (LLM(model=str(folder), dtype="float32"), LLM(model=str(file), dtype="float32"))
    ]
    assert outputs[0][0][:2] == outputs[1][0][:2]


# --- tokenizers


def written(files: TokenizerFiles, path: Path, config: dict[str, Any], rows: int, eos: tuple[int, ...] = (2,)) -> Path:
    """A file of metadata alone."""
    source = ModelSource("x", path, WeightFormat.SAFETENSORS, config, {}, eos)
    writer = gguf.GGUFWriter(str(path), "llama")
    from headrace.quantize.gguf_file import _add

    for key, value in tokenizer_metadata(source, files, rows):
        _add(writer, key, value)
    writer.add_tensor("token_embd.weight", torch.zeros(2, 2).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    "name", ["gpt-2", *(pytest.param(each, marks=pytest.mark.slow) for each in ("llama-bpe", "qwen2"))]
)
def test_published_tokenizers_come_back(name: str, tmp_path: Path) -> None:
    folder = shared("data", "tokenizers", name)
    files = TokenizerFiles(
        "x",
        lzma.decompress((folder / "tokenizer.json.xz").read_bytes()).decode(),
        json.loads((folder / "tokenizer_config.json").read_text()),
    )
    size = len(json.loads(files.tokenizer_json)["model"]["vocab"]) + 2000
    file = written(files, tmp_path / "x.gguf", {}, size)
    assert read_gguf(file).metadata["tokenizer.ggml.pre"] == name
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "tokenizer.json").write_text(files.tokenizer_json)
    (tmp_path / "plain" / "tokenizer_config.json").write_text(json.dumps(dict(files.config)))
    want, got = (load_tokenizer(source_of_tokenizer(each), None) for each in (tmp_path / "plain", file))
    assert want is not None and got is not None
    for text in TEXTS:
        assert got.encode(text) == want.encode(text)


def source_of_tokenizer(path: Path) -> ModelSource:
    return ModelSource("x", path, WeightFormat.DUMMY, {}, {}, ())


def test_sentencepiece_comes_back(tmp_path: Path) -> None:
    pieces = [
        Piece("<unk>", 0.0, PieceType.UNKNOWN),
        Piece("<s>", 0.0, PieceType.CONTROL),
        Piece("</s>", 0.0, PieceType.CONTROL),
    ]
    pieces += [Piece(f"<0x{byte:02X}>", 0.0, PieceType.BYTE) for byte in range(256)]
    pieces += [Piece(text, -float(at), PieceType.NORMAL) for at, text in enumerate(("▁t", "he", "▁the", "in", "▁a"))]
    pieces += [Piece(letter, -100.0, PieceType.NORMAL) for letter in "▁thein a"]
    whole = bpe_tokenizer(pieces, add_space_prefix=True)
    files = TokenizerFiles(
        "x", json.dumps(whole), {"bos_token": "<s>", "add_bos_token": True}, {}, {"default": "{{ x }}"}
    )
    file = written(files, tmp_path / "x.gguf", {"bos_token_id": 1}, 300, (2, 5))
    fields = {name: field.contents() for name, field in gguf.GGUFReader(file).fields.items()}
    assert fields["tokenizer.ggml.model"] == "llama" and fields["tokenizer.ggml.add_space_prefix"] is True
    assert (fields["tokenizer.ggml.eos_token_id"], fields["tokenizer.ggml.eot_token_id"]) == (2, 5)
    assert fields["tokenizer.chat_template"] == "{{ x }}"
    assert fields["tokenizer.ggml.token_type"][:4] == [2, 3, 3, 6] and fields["tokenizer.ggml.token_type"][-1] == 5
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "tokenizer.json").write_text(files.tokenizer_json)
    (tmp_path / "plain" / "tokenizer_config.json").write_text(json.dumps(dict(files.config)))
    want, got = (load_tokenizer(source_of_tokenizer(each), None) for each in (tmp_path / "plain", file))
    assert want is not None and got is not None
    for text in ("the thing in a", "a tin, Zwölf"):
        assert got.encode(text) == want.encode(text)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model": {"type": "WordPiece"}}, "its model is 'WordPiece', not BPE"),
        ({"pre_tokenizer": {"type": "Whitespace"}}, "it splits text by .*Whitespace"),
        ({"added_tokens": [{"id": 900, "content": "<x>", "special": True}]}, "it has 901 tokens, and .* 320 rows"),
    ],
)
def test_what_gguf_has_no_name_for_is_told_before_anything_is_made(
    change: dict[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tiny.save("llama", tmp_path / "tiny")
    (folder / "tokenizer.json").write_text(json.dumps(json.loads(tiny.tokenizer_json()) | change))
    command = ["quantize", str(folder), "--format", "gguf-q4_0", "--output", str(tmp_path / "out")]
    assert main(command) == 2 and not (tmp_path / "out").exists()
    assert re.search(said, capsys.readouterr().err)


def test_models_that_have_no_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = spec_from_config(tiny.create("gpt2", 0).config.to_dict())
    with pytest.raises(ConfigError, match=r"GGUF is written of llama, .* not of gpt2"):
        gguf_recipe(Choice("gguf-q4_0", "rtn"), spec)
    windowed = tiny.save("qwen2", tmp_path / "tiny", use_sliding_window=True, sliding_window=8, max_window_layers=1)
    assert main(["quantize", str(windowed), "--format", "gguf-q4_0", "--output", str(tmp_path / "out")]) == 2
    assert "no word for the attention windows of qwen2" in capsys.readouterr().err
    more = ["--format", "gguf-q4_0", "--output", str(tmp_path / "two"), "--group-size", "64"]
    assert main(["quantize", str(tiny.save("llama", tmp_path / "other")), *more]) == 2
    assert "gguf-q4_0 has its own format" in capsys.readouterr().err
