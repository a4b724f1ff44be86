"""Models by hub id, against a hub on this machine: only what is needed, once, going on where it stopped, offline
afterwards."""

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
from headrace.models.files import needed_files, select_gguf
from headrace.models.hub import HubId
from headrace.models.source import find_model
from tests.support import tiny
from tests.support.fake_hub import FakeHub, etag, fake_hub
from tests.support.gguf_files import write_gguf

FIND = """
import sys
from headrace.config import ModelConfig
from headrace.errors import ModelError
from headrace.models.source import find_model
for name in sys.argv[2:]:
    try:
        source = find_model(ModelConfig(model=name, load_format=sys.argv[1]))
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
    for name in (
        "modeling_evil.py",
        "pytorch_model.bin",
        "README.md",
        "original/consolidated.00.pth",
        "training_args.bin",
    ):
        (folder / name).write_text("not wanted")
    return folder


def find(hub: FakeHub, home: Path, *names: str, load_format: str = "auto", **environment: str) -> str:
    """find_model in a process of its own, which says a line of each name: the library reads its environment once, at
    import."""
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
    done = subprocess.run(
        [sys.executable, "-c", FIND, load_format, *names], env=variables, capture_output=True, text=True, timeout=50
    )
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
        assert find(hub, tmp_path / "home", "org/model", load_format="dummy").endswith(" dummy")
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
        names = "org/other", "org/gated", "org/model@v9"
        other, gated, revision = find(hub, tmp_path / "home", *names).splitlines()
        assert "no folder 'org/other' here and no hub model 'org/other'" in other
        assert "hub model org/gated is gated: accept its terms" in gated
        assert "org/model has no revision 'v9'" in revision
        said = find(hub, tmp_path / "home", "org/model", HF_HUB_OFFLINE="1")
        assert said.startswith("ModelError: hub model org/model is not in the cache and HF_HUB_OFFLINE is set")
        (repository / "model.safetensors").rename(repository / "weights.bin")
        assert "has no safetensors and no single .gguf (it has" in find(hub, tmp_path / "home", "org/model")


@pytest.fixture
def quantised(tmp_path: Path) -> Path:
    """A repository of GGUF files, one of them in shards in a folder of its own, beside what is no model."""
    folder = tmp_path / "quantised"
    folder.mkdir()
    model = write_gguf(tiny.save("llama", tmp_path / "tiny"), folder / "Tiny-Q8_0.gguf")
    for name in ("Tiny-Q4_K_M.gguf", "Tiny-UD-Q4_K_XL.gguf", "mmproj-F16.gguf", "imatrix.gguf"):
        (folder / name).write_bytes(model.read_bytes())
    write_gguf(tmp_path / "tiny", folder / "BF16" / "Tiny-BF16.gguf", shards_of=9)
    return folder


def test_a_quantisation_is_chosen_by_name(quantised: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    with fake_hub({"org/q": quantised}) as hub:
        said = find(hub, home, "org/q:q8_0")
        assert (
            said.startswith("org/q:q8_0 ")
            and said.endswith("/Tiny-Q8_0.gguf gguf")
            and hub.fetched() == {"Tiny-Q8_0.gguf"}
        )
        several, none, found = find(hub, home, "org/q", "org/q:Q5_K_M", "org/q@main:BF16").splitlines()
        assert "has several .gguf files (BF16, Q4_K_M, Q8_0, UD-Q4_K_XL); say which, like org/q:Q4_K_M." in several
        assert "org/q has no Q5_K_M in GGUF: there are BF16, Q4_K_M, Q8_0, UD-Q4_K_XL; name one" in none
        assert found.split()[1].rpartition("/")[2].startswith("Tiny-BF16-00001-of-")
        shards = {name for name in hub.fetched() if name.startswith("BF16/")}
        assert len(shards) == len(list((quantised / "BF16").iterdir())) > 1
    kept, none = find(hub, home, "org/q:Q8_0", "org/q:Q4_K_M", HF_HUB_OFFLINE="1").splitlines()
    assert kept.endswith("/Tiny-Q8_0.gguf gguf")
    assert "the cached copy of org/q has no Q4_K_M in GGUF: there are BF16, Q8_0" in none


def test_the_files_of_a_quantisation() -> None:
    shards = ["F16/a-F16-00002-of-00002.gguf", "F16/a-F16-00001-of-00002.gguf"]
    files = [
        "a-Q4_K_M.gguf",
        "a_Q4_K_S.gguf",
        "a-UD-Q4_K_XL.gguf",
        "a-Q4_K_XL.gguf",
        "a-UD-Q2_K.gguf",
        "a-fp16.gguf",
        *shards,
    ]
    assert select_gguf(files, "x", "Q4_K_XL") == ["a-Q4_K_XL.gguf"] and select_gguf(files, "x", "ud-q4_k_xl") == [
        "a-UD-Q4_K_XL.gguf"
    ]
    assert select_gguf(files, "x", "F16") == sorted(shards) and select_gguf(files, "x", "fp16") == ["a-fp16.gguf"]
    assert select_gguf(files, "x", "Q4_K_S") == ["a_Q4_K_S.gguf"] and select_gguf(files, "x", "Q2_K") == [
        "a-UD-Q2_K.gguf"
    ]
    for wrong in ("Q4_K", "K_M", "", "."):
        with pytest.raises(ModelError, match="there are F16, Q4_K_M, Q4_K_S, Q4_K_XL, UD-Q2_K, UD-Q4_K_XL"):
            select_gguf(files, "x", wrong)
    with pytest.raises(ModelError, match=r"it has no \.gguf file; leave :Q8_0 out"):
        select_gguf(["model.safetensors", "../../evil-Q8_0.gguf", "mmproj-Q8_0.gguf"], "x", "Q8_0")


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("org/name", HubId("org/name")),
        ("org/name@v1.0/x:Q8_0", HubId("org/name", "v1.0/x", "Q8_0")),
        ("org/name:UD-Q4_K_XL", HubId("org/name", None, "UD-Q4_K_XL")),
        *(
            (text, None)
            for text in (
                "name",
                "org/name:",
                "org/name@",
                "a/b/c",
                "org/na me",
                "org/name:../x",
                "org/name:Q8_0@main",
                "",
            )
        ),
    ],
)
def test_hub_ids(text: str, parsed: HubId | None) -> None:
    assert HubId.parse(text) == parsed and (parsed is None or str(parsed) == text)


def test_a_local_folder_takes_a_quantisation_too(quantised: Path) -> None:
    assert find_model(ModelConfig(model=f"{quantised}:Q8_0")).path == quantised / "Tiny-Q8_0.gguf"
    with pytest.raises(ModelError, match=r"has no Q2_K in GGUF: there are Q4_K_M, Q8_0, UD-Q4_K_XL"):
        find_model(ModelConfig(model=f"{quantised}:Q2_K"))
    with pytest.raises(ModelError, match=r"holds 3 \.gguf files .*; name one of them, or a quantization after a colon"):
        find_model(ModelConfig(model=str(quantised)))


def test_which_files_are_needed() -> None:
    small = ["config.json", "tokenizer.json", "chat_template.jinja", "additional_chat_templates/tool_use.jinja"]
    shards = ["model.safetensors.index.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    other = [
        "model.fp16.safetensors",
        "consolidated.safetensors",
        "x.gguf",
        "a.py",
        "../config.json",
        "sub/model.safetensors",
        "tokenizer.py",
    ]
    assert needed_files([*small, *shards, *other], with_weights=True) == [*small, *shards]
    assert needed_files([*small, "model.safetensors", *other], with_weights=True) == [*small, "model.safetensors"]
    assert needed_files(["x.gguf", "a.py"], with_weights=True) == ["x.gguf"]
    assert needed_files([*shards, *small], with_weights=False) == small
    assert needed_files(["x.gguf", "y.gguf"], with_weights=True) == []
    assert needed_files(["x.gguf", "mmproj-x.gguf"], with_weights=True) == ["x.gguf"]
    assert needed_files(["x-00001-of-00002.gguf", "x-00002-of-00002.gguf"], with_weights=True) == [
        "x-00001-of-00002.gguf",
        "x-00002-of-00002.gguf",
    ]


def test_without_the_library_the_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModelError, match=r"no folder or file 'org/model'; .*: pip install huggingface-hub\."):
        find_model(ModelConfig(model="org/model"))


def test_a_code_reference_in_a_config_fetches_nothing(repository: Path, tmp_path: Path) -> None:
    (repository / "config.json").write_text(
        json.dumps({"auto_map": {"AutoModelForCausalLM": "other/repo--modeling_evil.Model"}})
    )
    with fake_hub({"org/model": repository}) as hub:
        find(hub, tmp_path / "home", "org/model")
        assert not any(name.endswith(".py") for name in hub.fetched())
