"""Models by hub id, against a hub on this machine: only what is needed, once, going on where it stopped, offline afterwards."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.config import ModelConfig
from headrace.errors import ModelError
from headrace.models import hub as hub_module
from headrace.models.hub import needed_files
from headrace.models.source import find_model
from tests.support.fake_hub import FakeHub, etag, fake_hub

FIND = """
import sys
from headrace.config import ModelConfig
from headrace.errors import ModelError
from headrace.models.source import find_model
try:
    source = find_model(ModelConfig(model=sys.argv[1], load_format=sys.argv[2]))
    print(source.name, source.path, source.weights.value)
except ModelError as error:
    print("ModelError:", error)
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    (folder / "original").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    (folder / "model.safetensors").write_bytes(b"0123456789" * 100_000)
    for name in ("modeling_evil.py", "pytorch_model.bin", "README.md", "original/consolidated.00.pth", "training_args.bin"):
        (folder / name).write_text("not wanted")
    return folder


def find(hub: FakeHub, home: Path, name: str, load_format: str = "auto", **environment: str) -> str:
    """find_model in a process of its own: the library reads its environment once, at import."""
    pytest.importorskip("huggingface_hub", reason="the extra [hf] is not installed")
    variables = {
        **os.environ,
        "PYTHONPATH": str(Path(hub_module.__file__).parents[2]),
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(home),
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "NO_PROXY": "*",
        **environment,
    }
    done = subprocess.run([sys.executable, "-c", FIND, name, load_format], env=variables, capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_only_what_is_needed_is_fetched_and_only_once(repository: Path, tmp_path: Path) -> None:
    with fake_hub({"org/model": repository}) as hub:
        said = find(hub, tmp_path / "home", "org/model")
        assert said.startswith("org/model ") and said.endswith(" safetensors")
        assert hub.fetched() == {"config.json", "tokenizer.json", "model.safetensors"}
        hub.served.clear()
        assert find(hub, tmp_path / "home", "org/model@main") == said
        assert hub.served == []
    folder = Path(said.split()[1])
    assert (folder / "model.safetensors").read_bytes() == (repository / "model.safetensors").read_bytes()
    assert not list(folder.rglob("*.py"))
    assert find(hub, tmp_path / "home", "org/model") == said  # the hub is gone
    assert find(hub, tmp_path / "home", "org/model", HF_HUB_OFFLINE="1") == said


def test_weights_are_left_where_they_are_for_dummy_ones(repository: Path, tmp_path: Path) -> None:
    with fake_hub({"org/model": repository}) as hub:
        assert find(hub, tmp_path / "home", "org/model", "dummy").endswith(" dummy")
        assert hub.fetched() == {"config.json", "tokenizer.json"}


def test_an_interrupted_download_goes_on_where_it_stopped(repository: Path, tmp_path: Path) -> None:
    weights = repository / "model.safetensors"
    weights.write_bytes(os.urandom(24 << 20))
    with fake_hub({"org/model": repository}) as hub:
        hub.cut_after["model.safetensors"] = 15 << 20
        said = find(hub, tmp_path / "home", "org/model")
    starts = [start for name, start in hub.served if name == "model.safetensors"]
    assert starts == [0, 10 << 20]  # the library writes 10 MiB at a time
    assert (Path(said.split()[1]) / "model.safetensors").read_bytes() == weights.read_bytes()


def test_a_killed_download_goes_on_where_it_stopped(repository: Path, tmp_path: Path) -> None:
    """What an earlier process left: half a file, under the name of its content."""
    weights = repository / "model.safetensors"
    weights.write_bytes(os.urandom(17 << 20))
    with fake_hub({"org/model": repository}) as hub:
        blobs = tmp_path / "home" / "hub" / "models--org--model" / "blobs"
        blobs.mkdir(parents=True)
        (blobs / f"{etag(weights)}.part").write_bytes(weights.read_bytes()[: 9 << 20])
        said = find(hub, tmp_path / "home", "org/model")
    assert [start for name, start in hub.served if name == "model.safetensors"] == [9 << 20]
    assert (Path(said.split()[1]) / "model.safetensors").read_bytes() == weights.read_bytes()
    assert not list(blobs.glob("*.part"))


def test_a_resumed_download_that_is_not_the_file_is_not_kept(repository: Path, tmp_path: Path) -> None:
    weights = repository / "model.safetensors"
    weights.write_bytes(os.urandom(17 << 20))
    with fake_hub({"org/model": repository}) as hub:
        blobs = tmp_path / "home" / "hub" / "models--org--model" / "blobs"
        blobs.mkdir(parents=True)
        (blobs / f"{etag(weights)}.part").write_bytes(b"x" * 1000)
        assert "a resumed download has the checksum" in find(hub, tmp_path / "home", "org/model")
        said = find(hub, tmp_path / "home", "org/model")
    assert (Path(said.split()[1]) / "model.safetensors").read_bytes() == weights.read_bytes()


def test_what_the_hub_refuses_is_one_sentence(repository: Path, tmp_path: Path) -> None:
    with fake_hub({"org/model": repository, "org/gated": repository}) as hub:
        hub.gated.add("org/gated")
        assert "no folder 'org/other' here and no hub model 'org/other'" in find(hub, tmp_path / "home", "org/other")
        assert "hub model org/gated is gated: accept its terms" in find(hub, tmp_path / "home", "org/gated")
        assert "org/model has no revision 'v9'" in find(hub, tmp_path / "home", "org/model@v9")
        said = find(hub, tmp_path / "home", "org/model", HF_HUB_OFFLINE="1")
        assert said.startswith("ModelError: hub model org/model is not in the cache and HF_HUB_OFFLINE is set")
        (repository / "model.safetensors").rename(repository / "weights.bin")
        assert "has no safetensors and no single .gguf (it has" in find(hub, tmp_path / "home", "org/model")


def test_which_files_are_needed() -> None:
    small = ["config.json", "tokenizer.json", "chat_template.jinja", "additional_chat_templates/tool_use.jinja"]
    shards = ["model.safetensors.index.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    other = ["model.fp16.safetensors", "consolidated.safetensors", "x.gguf", "a.py", "../config.json", "sub/model.safetensors", "tokenizer.py"]
    assert needed_files([*small, *shards, *other], with_weights=True) == [*small, *shards]
    assert needed_files([*small, "model.safetensors", *other], with_weights=True) == [*small, "model.safetensors"]
    assert needed_files(["x.gguf", "a.py"], with_weights=True) == ["x.gguf"]
    assert needed_files([*shards, *small], with_weights=False) == small
    assert needed_files(["x.gguf", "y.gguf"], with_weights=True) == []


def test_without_the_extra_the_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModelError, match=r"no folder or file 'org/model'; .* pip install 'headrace\[hf\]'"):
        find_model(ModelConfig(model="org/model"))


def test_a_code_reference_in_a_config_fetches_nothing(repository: Path, tmp_path: Path) -> None:
    (repository / "config.json").write_text(json.dumps({"auto_map": {"AutoModelForCausalLM": "other/repo--modeling_evil.Model"}}))
    with fake_hub({"org/model": repository}) as hub:
        find(hub, tmp_path / "home", "org/model")
        assert not any(name.endswith(".py") for name in hub.fetched())
