"""Models by hub id: which files of a repository are needed, fetched through huggingface_hub (extra ``[hf]``) into its shared cache.

What lives here: choosing files, and sentences for what goes wrong. What may not: torch, credentials (the library reads HF_TOKEN
itself), anything but data files: code in a repository is never fetched, so it can never run.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headrace.errors import ModelError
from headrace.models.hub_resume import fetch_large_files

# Small files, whatever the weights; config.json decides whether it is a model of this kind at all.
_SMALL = frozenset(
    {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "tokenizer.model",
        "chat_template.jinja",
        "chat_template.json",
    }
)
_NAMED_TEMPLATE = re.compile(r"additional_chat_templates/[\w.-]+\.jinja")
_SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")
_INDEX = "model.safetensors.index.json"


def needed_files(files: Sequence[str], *, with_weights: bool) -> list[str]:
    """What to fetch of a repository: small files and one form of the weights. Nothing that is not named here is ever fetched."""
    small = [name for name in files if name in _SMALL or _NAMED_TEMPLATE.fullmatch(name)]
    return small + (_weight_files(files) if with_weights else [])


def _weight_files(files: Sequence[str]) -> list[str]:
    """Shards with their index, else the single file, else a lone GGUF; other copies of the weights are left where they are."""
    if _INDEX in files:
        return [_INDEX, *(name for name in files if _SHARD.fullmatch(name))]
    if "model.safetensors" in files:
        return ["model.safetensors"]
    top = [name for name in files if "/" not in name]
    single = [name for name in top if name.endswith(".safetensors")]
    quantized = [name for name in top if name.endswith(".gguf")]
    return single if len(single) == 1 else quantized if len(quantized) == 1 else []


def download_model(name: str, *, with_weights: bool) -> Path:
    """``org/name[@revision]`` → its folder in the cache, complete. Offline (HF_HUB_OFFLINE, or no network) the cache alone is asked.

    Raises ModelError.
    """
    repository, _, revision = name.partition("@")
    hub = _library(name)
    try:
        # Not list_repo_files: that one asks a hub that is gone five times, with pauses.
        found = hub.HfApi(library_name="headrace").model_info(repository, revision=revision or None, timeout=15)
        files = [sibling.rfilename for sibling in found.siblings or ()]
    except Exception as error:
        return _cached(hub, name, error)
    wanted = needed_files(files, with_weights=with_weights)
    if with_weights and not _weight_files(files):
        offers = ", ".join(file for file in files if file.endswith((".gguf", ".bin", ".safetensors"))) or "no weights at all"
        raise ModelError(
            f"hub model {name} has no safetensors and no single .gguf (it has {offers[:200]}); download what you need and name the file."
        )
    return _fetch(hub, name, wanted)


def _library(name: str) -> Any:
    try:
        import huggingface_hub
    except ImportError as error:
        raise ModelError(
            f"there is no folder or file {name!r}; to fetch it as a hub model, install the extra: pip install 'headrace[hf]'. Or give a local path."
        ) from error
    return huggingface_hub


def _fetch(hub: Any, name: str, wanted: Sequence[str]) -> Path:
    repository, _, revision = name.partition("@")
    try:
        fetch_large_files(hub, repository, revision or None, wanted)
        # A name is its own pattern: none of the characters that patterns use is left in one (checked by needed_files' expressions).
        folder = hub.snapshot_download(repository, revision=revision or None, allow_patterns=list(wanted), library_name="headrace")
    except ModelError:
        raise
    except Exception as error:
        raise _explained(name, error) from error
    return Path(folder)


def _cached(hub: Any, name: str, error: Exception) -> Path:
    """The snapshot that an earlier run has fetched, when the hub cannot be asked (not when it said no)."""
    if _refused(error):
        raise _explained(name, error) from error
    repository, _, revision = name.partition("@")
    try:
        return Path(hub.snapshot_download(repository, revision=revision or None, local_files_only=True, allow_patterns=sorted(_SMALL)))
    except Exception:
        raise _explained(name, error) from error


def _refused(error: Exception) -> bool:
    from huggingface_hub import errors

    return isinstance(error, (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.GatedRepoError, errors.HFValidationError))


def _explained(name: str, error: Exception) -> ModelError:
    from huggingface_hub import errors

    repository, _, revision = name.partition("@")
    if isinstance(error, errors.GatedRepoError):
        return ModelError(f"hub model {repository} is gated: accept its terms on its page and set HF_TOKEN.")
    if isinstance(error, errors.RevisionNotFoundError):
        return ModelError(f"hub model {repository} has no revision {revision!r}; check what follows the @.")
    if isinstance(error, (errors.RepositoryNotFoundError, errors.HFValidationError)):
        return ModelError(
            f"there is no folder {name!r} here and no hub model {repository!r} (or it is private); check the spelling, or set HF_TOKEN."
        )
    if isinstance(error, (errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError)):
        return ModelError(
            f"hub model {name} is not in the cache and HF_HUB_OFFLINE is set or the hub cannot be reached; go online once, or give a local folder."
        )
    detail = " ".join(str(error).split())[:200]
    return ModelError(
        f"hub model {name} cannot be fetched ({type(error).__name__}: {detail}); run it again, and the download goes on where it stopped."
    )
