"""Models by hub id: which files of a repository are needed, fetched through huggingface_hub (extra ``[hf]``) into its
shared cache.

What lives here: requesting them, and messages for what goes wrong. What may not: choosing files (files.py), torch,
credentials (the library reads HF_TOKEN itself), anything but data files: code in a repository is never fetched, so it
can never run.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.errors import ModelError
from headrace.models.files import SMALL, needed_files, quantisations, select_gguf, weight_files
from headrace.models.hub_cache import fetch_large_files

_HUB_ID = re.compile(
    r"(?P<repository>[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})(?:@(?P<revision>[\w./-]{1,200}))?(?::(?P<quantisation>[\w.-]{1,40}))?",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class HubId:
    """``org/name[@revision][:quantization]``, the last part for a repository of GGUF files."""

    repository: str
    revision: str | None = None
    quantisation: str | None = None

    @classmethod
    def parse(cls, text: str) -> HubId | None:
        found = _HUB_ID.fullmatch(text)
        return None if found is None else cls(**found.groupdict())

    @property
    def name(self) -> str:
        """The name under which it is served."""
        return self.repository + (f":{self.quantisation}" if self.quantisation else "")

    def __str__(self) -> str:
        return (
            self.repository
            + (f"@{self.revision}" if self.revision else "")
            + (f":{self.quantisation}" if self.quantisation else "")
        )


def download_model(model: HubId, *, with_weights: bool) -> Path:
    """The model's complete folder in the cache, or its .gguf file. Offline (HF_HUB_OFFLINE, or no network), only the
    cache is used. Raises ModelError."""
    hub = _library(str(model))
    try:
        # Not list_repo_files: that one asks a hub that is gone five times, with pauses.
        found = hub.HfApi(library_name="headrace").model_info(model.repository, revision=model.revision, timeout=15)
        files = [sibling.rfilename for sibling in found.siblings or ()]
    except Exception as error:
        return _cached(hub, model, error)
    if model.quantisation is not None:
        wanted = select_gguf(files, f"hub model {model.repository}", model.quantisation)
        return _fetch(hub, model, wanted) / wanted[0]
    wanted = needed_files(files, with_weights=with_weights)
    if with_weights and not weight_files(files):
        raise ModelError(_nothing_single(model, files))
    return _fetch(hub, model, wanted)


def _nothing_single(model: HubId, files: Sequence[str]) -> str:
    if named := quantisations(files):
        choice = next((each for each in ("Q4_K_M", "Q8_0") if each in named), named[0])
        return (
            f"hub model {model} has several .gguf files ({', '.join(named)[:300]}); say which, like {model}:{choice}."
        )
    offers = (
        ", ".join(file for file in files if file.endswith((".gguf", ".bin", ".safetensors"))) or "no weights at all"
    )
    return f"hub model {model} has no safetensors and no single .gguf (it has {offers[:200]}); download what you need and name the file."


def _library(name: str) -> Any:
    try:
        import huggingface_hub
    except ImportError as error:
        raise ModelError(
            f"there is no folder or file {name!r}; to fetch it as a hub model: pip install huggingface-hub. Or give a local path."
        ) from error
    return huggingface_hub


def _fetch(hub: Any, model: HubId, wanted: Sequence[str]) -> Path:
    repository, revision = model.repository, model.revision
    try:
        fetch_large_files(hub, repository, revision, wanted)
        # A name is its own pattern: none of the characters that patterns use is left in one (checked by needed_files'
        # expressions).
        folder = hub.snapshot_download(
            repository,
            revision=revision,
            allow_patterns=list(wanted),
            library_name="headrace",
            tqdm_class=_patient_bars(hub),
        )
    except ModelError:
        raise
    except Exception as error:
        raise _explained(model, error) from error
    return Path(folder)


def _patient_bars(hub: Any) -> type[Any]:
    """The library's progress bars, only on a terminal and only for what takes a second: usually there is nothing to
    fetch."""

    class Bar(hub.utils.tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "disable": kwargs.get("disable") or None, "delay": 1.0})

    return Bar


def _cached(hub: Any, model: HubId, error: Exception) -> Path:
    """The snapshot fetched by an earlier run, for when the hub cannot be reached (not when it refused)."""
    if _refused(error):
        raise _explained(model, error) from error
    try:
        folder = Path(
            hub.snapshot_download(
                model.repository, revision=model.revision, local_files_only=True, allow_patterns=sorted(SMALL)
            )
        )
    except Exception:
        raise _explained(model, error) from error
    if model.quantisation is None:
        return folder
    files = [str(file.relative_to(folder)) for file in folder.rglob("*.gguf")]
    return (
        folder
        / select_gguf(
            files, f"the hub cannot be reached, and the cached copy of {model.repository}", model.quantisation
        )[0]
    )


def _refused(error: Exception) -> bool:
    from huggingface_hub import errors

    return isinstance(
        error,
        (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.GatedRepoError, errors.HFValidationError),
    )


def _explained(name: HubId, error: Exception) -> ModelError:
    from huggingface_hub import errors

    repository, revision = name.repository, name.revision
    if isinstance(error, errors.GatedRepoError):
        return ModelError(f"hub model {repository} is gated: accept its terms on its page and set HF_TOKEN.")
    if isinstance(error, errors.RevisionNotFoundError):
        return ModelError(f"hub model {repository} has no revision {revision!r}; check what follows the @.")
    if isinstance(error, (errors.RepositoryNotFoundError, errors.HFValidationError)):
        return ModelError(
            f"there is no folder {str(name)!r} here and no hub model {repository!r} (or it is private); check the spelling, or set HF_TOKEN."
        )
    if isinstance(error, (errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError)):
        return ModelError(
            f"hub model {name} is not in the cache and HF_HUB_OFFLINE is set or the hub cannot be reached; go online once, or give a local folder."
        )
    detail = " ".join(str(error).split())[:200]
    return ModelError(
        f"hub model {name} cannot be fetched ({type(error).__name__}: {detail}); run it again, and the download goes on where it stopped."
    )
