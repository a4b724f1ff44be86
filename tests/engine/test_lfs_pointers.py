"""What a clone without Git LFS leaves in place of large files is recognised wherever it lies, with the remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace import cli
from headrace.config import ModelConfig
from headrace.engine.llm import LLM
from headrace.engine.resolve import create_config
from headrace.errors import ConfigError, ModelError
from headrace.models.loader import open_checkpoint
from headrace.models.source import find_model
from tests.support import tiny

POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 4981258240\n"
SAID = (
    r"is a Git LFS pointer for 4,981,258,240 bytes, not the file itself.*git lfs pull.*or name the model by its hub id"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny.save("llama", tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_a_pointer_in_a_folder(folder: Path, name: str) -> None:
    (folder / "tokenizer.json").unlink(missing_ok=True)
    (folder / name).write_text(POINTER)
    with pytest.raises(ModelError, match=SAID):
        source = find_model(ModelConfig(model=str(folder)))
        source.tokenizer_files()
        open_checkpoint(source)


def test_a_pointer_for_a_shard_and_for_a_gguf(tmp_path: Path, folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-1-of-1.safetensors"}}')
    (folder / "model-1-of-1.safetensors").write_text(POINTER)
    with pytest.raises(ModelError, match=SAID):
        open_checkpoint(find_model(ModelConfig(model=str(folder))))
    (tmp_path / "model-Q8_0.gguf").write_text(POINTER)
    with pytest.raises(ModelError, match=SAID):
        find_model(ModelConfig(model=str(tmp_path / "model-Q8_0.gguf")))


def test_a_pointer_without_a_size_is_one_too(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("version https://git-lfs.github.com/spec/v1\n")
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ModelError, match=r"is a Git LFS pointer, not the file itself"):
        find_model(ModelConfig(model=str(tmp_path)))


def test_a_conversation_without_a_tokenizer_is_refused_before_weights_are_read(folder: Path) -> None:
    for each in folder.glob("tokenizer*"):
        each.unlink()
    (folder / "model.safetensors").write_text("no weights at all")
    with pytest.raises(ConfigError, match=r"has no tokenizer, so it takes and gives token ids only; --tokenizer takes"):
        LLM.from_config(create_config(str(folder)), texts=True)
    assert (
        cli.main(["chat", "--model", str(folder), "hello"]) == cli.main(["generate", str(folder), "-p", "hello"]) == 2
    )
