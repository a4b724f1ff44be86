"""`headrace models`: what is cached, fetching, removing; against a hub on this machine."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from headrace import cli
from headrace.commands import models
from headrace.models import hub
from headrace.models.hub import HubId
from headrace.models.hub_cache import cached_models, hub_cache

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def put(name: str, files: dict[str, bytes], *, ref: str = "main") -> Path:
    """A repository as huggingface_hub leaves it."""
    folder = hub_cache() / f"models--{name.replace('/', '--')}"
    (folder / "blobs").mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / ref).write_text(COMMIT)
    for number, (path, content) in enumerate(files.items()):
        (folder / "blobs" / f"{number}").write_bytes(content)
        link = folder / "snapshots" / COMMIT / path
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(folder / "blobs" / f"{number}", link.parent))
    return folder


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    return tmp_path / "hub"


@pytest.fixture
def filled(cache: Path) -> Path:
    put("org/model", {"config.json": b"{}", "model.safetensors": b"x" * 2_500_000})
    put("org/some--gguf", {"a-Q4_K_M.gguf": b"x" * 10_000, "Q8_0/a-Q8_0-00001-of-00002.gguf": b"x"}, ref="v2")
    (put("org/begun", {"config.json": b"{}"}) / "blobs" / "abc.part").write_bytes(b"x" * 5_000)
    (cache / "models--stray").mkdir()
    (cache / "version.txt").write_text("1")
    return cache


def run(*words: str) -> int:
    return cli.main(["models", *words])


def test_what_is_cached(filled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run() == run("list") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines[1:4]] == [
        ["org/begun", "unfinished", "main", "5.0", "kB"],
        ["org/model", "safetensors", "main", "2.5", "MB"],
        ["org/some--gguf", "gguf", "Q4_K_M", "Q8_0", "v2", "10.0", "kB"],
    ]
    assert lines[5] == f"2.5 MB in {filled}; headrace models remove NAME frees the space of one."
    assert run("list", "--json") == 0
    assert [each["name"] for each in json.loads(capsys.readouterr().out)] == [
        "org/begun",
        "org/model",
        "org/some--gguf",
    ]


def test_an_empty_cache_says_how_to_fill_it(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run() == 0
    assert capsys.readouterr().out.startswith(f"No model is in {cache}. Fetch one: headrace models pull org/name.")


def test_removing_asks_once_and_then_all_is_gone(
    filled: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []
    monkeypatch.setattr("sys.stdin", type("Terminal", (), {"isatty": lambda self: True})())
    for answer, status in (("n", 1), ("", 1), ("y", 0)):
        monkeypatch.setattr("builtins.input", lambda question, answer=answer: asked.append(question) or answer)
        assert run("remove", "org/model", "org/begun", "org/model") == status
    assert set(asked) == {"Remove org/model, org/begun (2.5 MB)? [y/N] "}
    assert [each.name for each in cached_models()] == ["org/some--gguf"]
    assert (filled / "models--stray").is_dir()
    assert capsys.readouterr().out.splitlines()[-1] == "Removed org/model, org/begun (2.5 MB)."


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("remove", "org/model"), "Remove org/model (2.5 MB)? There is no terminal to confirm on; give --yes."),
        (("remove", "--yes", "org/modle"), "did you mean org/model? `headrace models` lists what is."),
        (("remove", "-y", "org/model@main"), "models are removed whole: headrace models remove org/model."),
        (("remove", "-y", "org/model", "../hub"), "'../hub' is not in "),
        (("pull", "model"), "'model' is not a hub id; write org/name"),
        (("pull", "/etc/passwd"), "is not a hub id"),
    ],
)
def test_a_mistake_changes_nothing(
    filled: Path, words: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*words) in (1, 2)
    assert told in capsys.readouterr().err
    assert len(cached_models()) == 3


def test_pull_says_where_it_lies_and_what_to_do_with_it(
    filled: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[HubId] = []
    snapshot = filled / "models--org--model" / "snapshots" / COMMIT
    monkeypatch.setattr(models, "download_model", lambda hub_id, with_weights: asked.append(hub_id) or snapshot)
    assert run("pull", "org/model@main") == 0
    assert (
        capsys.readouterr().out == f"org/model@main: 2.5 MB in {snapshot}. Try: headrace chat --model org/model@main\n"
    )
    assert asked == [HubId("org/model", "main")]


def test_pull_without_the_library_or_a_network_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    library = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(hub, "_library", lambda name: library)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert run("pull", "org/model") == 1
    assert (
        "hub model org/model is not in the cache and HF_HUB_OFFLINE is set or the hub cannot be reached; go online once"
        in capsys.readouterr().err
    )
