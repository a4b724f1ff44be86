"""The hub's shared cache, with one folder per repository in huggingface_hub's layout: reading, removing and filling it.

    models--org--name/ blobs/ (files by their content)  snapshots/COMMIT/ (their names, links into blobs)  refs/
    (revisions' commits)

huggingface_hub retries within one call, but starts a file again in the next. So files over LARGE_FILE are fetched into
``blobs/<etag>.part`` first and renamed when complete, and a killed download resumes at its last byte; the library then
finds them done. Files in Xet storage are left to its own client, which keeps what it has fetched.

What lives here: looking, measuring, removing, and large files kept as far as they were fetched. What may not: torch,
choosing files (files.py), printing.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from headrace.cache_home import cache_home
from headrace.errors import ModelError
from headrace.models.files import quantisations

_LOGGER = logging.getLogger(__name__)

_PREFIX = "models--"
_UNFINISHED = (".part", ".incomplete")
LARGE_FILE = 16 * 2**20
_SHA256_HEX = 64


@dataclass(frozen=True, slots=True)
class CachedModel:
    """One repository with all its revisions. ``format``: that of the weights present, or what is missing. ``bytes``: on
    disk."""

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
    """Sorted by name. Raises ModelError for a cache that cannot be read."""
    try:
        folders = sorted(path for path in hub_cache().glob(f"{_PREFIX}*--*") if path.is_dir() and not path.is_symlink())
        return [_described(folder) for folder in folders]
    except OSError as error:
        raise ModelError(
            f"{hub_cache()} cannot be read: {error.strerror or error}. Check its permissions, or set HF_HOME."
        ) from error


def remove_cached(model: CachedModel) -> None:
    """Removes all of it. Raises ModelError."""
    try:
        shutil.rmtree(model.folder)
    except OSError as error:
        raise ModelError(
            f"{model.folder} cannot be removed whole: {error.strerror or error}. Check its permissions."
        ) from error


def _described(folder: Path) -> CachedModel:
    files = [Path(parent) / name for parent, _, names in os.walk(folder) for name in names]
    size = sum(file.lstat().st_size for file in files if not file.is_symlink())
    snapshots = [
        str(file.relative_to(folder / "snapshots")) for file in files if file.is_relative_to(folder / "snapshots")
    ]
    refs = folder / "refs"
    revisions = sorted(str(file.relative_to(refs)) for file in files if file.is_relative_to(refs)) or sorted(
        {name[:8] for name in snapshots}
    )
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


# --- filling ------------------------------------------------------------------------------------------------------


def fetch_large_files(hub: Any, repository: str, revision: str | None, names: Sequence[str]) -> None:
    """Fetches those of ``names`` that are large weight files. Errors are the library's own; partial downloads stay on
    disk."""
    try:
        for name in names:
            if name.endswith((".safetensors", ".gguf")):
                _fetch(hub, repository, revision, name)
    except ImportError as error:  # parts of the library that other versions may lack
        _LOGGER.warning(
            "downloads cannot be resumed with this huggingface_hub (%s); its own way of downloading is used instead",
            error,
        )


def _fetch(hub: Any, repository: str, revision: str | None, name: str) -> None:
    from huggingface_hub.constants import HF_HUB_CACHE, HF_HUB_DISABLE_XET
    from huggingface_hub.file_download import repo_folder_name

    url = hub.hf_hub_url(repository, name, revision=revision)
    found = hub.get_hf_file_metadata(url)
    in_xet = found.xet_file_data is not None and not HF_HUB_DISABLE_XET and find_spec("hf_xet") is not None
    if in_xet or not found.etag or not _plain(found.etag) or (found.size or 0) < LARGE_FILE:
        return
    blob = Path(HF_HUB_CACHE) / repo_folder_name(repo_id=repository, repo_type="model") / "blobs" / found.etag
    if not blob.exists():
        blob.parent.mkdir(parents=True, exist_ok=True)
        _download(url, found, blob, name)


def _plain(etag: str) -> bool:
    """An etag becomes a file name, so it may contain only letters and digits."""
    return etag.isascii() and etag.isalnum()


def _download(url: str, found: Any, blob: Path, name: str) -> None:
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined, unused-ignore]

    headers = build_hf_headers(library_name="headrace")
    if urlsplit(found.location).netloc != urlsplit(url).netloc:
        headers.pop("authorization", None)  # the token is for the hub, not for where it sends us
    part = blob.with_name(blob.name + ".part")
    with part.open("ab") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)  # another process may be at it: wait, then find it done
        if blob.exists():
            return
        kept = os.fstat(stream.fileno()).st_size
        http_get(
            found.location, stream, resume_size=kept, headers=headers, expected_size=found.size, displayed_filename=name
        )
    _check(part, found, resumed=kept > 0)
    os.replace(part, blob)


def _check(part: Path, found: Any, *, resumed: bool) -> None:
    """A file assembled from two downloads must match the hub's hash; a mismatch is not kept."""
    if not resumed or len(found.etag) != _SHA256_HEX:
        return
    with part.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if digest != found.etag:
        part.unlink()
        raise ModelError(
            f"a resumed download has the checksum {digest[:12]}…, not {found.etag[:12]}…; run it again to start over."
        )
