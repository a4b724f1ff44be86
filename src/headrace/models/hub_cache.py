"""What the hub's shared cache holds: a folder a repository, as huggingface_hub lays it out; read and removed without asking anybody.

    models--org--name/ blobs/ (files by their content)  snapshots/COMMIT/ (their names, links into blobs)  refs/ (revisions' commits)

What lives here: looking, measuring, removing. What may not: fetching (hub.py), choosing files, printing.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from headrace.cache_home import cache_home
from headrace.errors import ModelError
from headrace.models.hub import quantisations

_PREFIX = "models--"
_UNFINISHED = (".part", ".incomplete")


@dataclass(frozen=True, slots=True)
class CachedModel:
    """One repository with all its revisions. ``format``: of the weights that are there, or what is missing of them. ``bytes``: on disk."""

    name: str
    format: str
    revisions: list[str]
    bytes: int
    folder: Path


def hub_cache() -> Path:
    """Where the library keeps models."""
    if given := os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(given).expanduser()
    home = os.environ.get("HF_HOME")
    return (Path(home).expanduser() if home else cache_home() / "huggingface") / "hub"


def cached_models() -> list[CachedModel]:
    """By name. Raises ModelError for a cache that cannot be read."""
    try:
        folders = sorted(path for path in hub_cache().glob(f"{_PREFIX}*--*") if path.is_dir() and not path.is_symlink())
        return [_described(folder) for folder in folders]
    except OSError as error:
        raise ModelError(f"{hub_cache()} cannot be read: {error.strerror or error}. Check its permissions, or set HF_HOME.") from error


def remove_cached(model: CachedModel) -> None:
    """All of it. Raises ModelError."""
    try:
        shutil.rmtree(model.folder)
    except OSError as error:
        raise ModelError(f"{model.folder} cannot be removed whole: {error.strerror or error}. Check its permissions.") from error


def _described(folder: Path) -> CachedModel:
    files = [Path(parent) / name for parent, _, names in os.walk(folder) for name in names]
    size = sum(file.lstat().st_size for file in files if not file.is_symlink())
    snapshots = [str(file.relative_to(folder / "snapshots")) for file in files if file.is_relative_to(folder / "snapshots")]
    refs = folder / "refs"
    revisions = sorted(str(file.relative_to(refs)) for file in files if file.is_relative_to(refs)) or sorted({name[:8] for name in snapshots})
    unfinished = any(file.name.endswith(_UNFINISHED) for file in files)
    name = folder.name.removeprefix(_PREFIX).replace("--", "/", 1)
    return CachedModel(name, ", ".join(_formats(snapshots, unfinished)), revisions, size, folder)


def _formats(names: list[str], unfinished: bool) -> Iterator[str]:
    if any(name.endswith(".safetensors") for name in names):
        yield "safetensors"
    if any(name.endswith(".gguf") for name in names):
        yield " ".join(["gguf", *quantisations(names)])
    if unfinished:
        yield "unfinished"
    elif not any(name.endswith((".safetensors", ".gguf")) for name in names):
        yield "no weights"
