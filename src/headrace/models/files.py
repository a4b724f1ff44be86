"""A model's files: which of a repository's are one, in which form, and which of them to fetch; and the small ones read.

What lives here: choosing files by their names, reading texts and JSON within bounds. What may not: network access
(hub.py), weights (checkpoint.py), what a file means (source.py, families.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.errors import ModelError

# Small files, whatever the weights; config.json decides whether it is a model of this kind at all.
SMALL = frozenset(
    {
        "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
        "tokenizer.model", "chat_template.jinja", "chat_template.json", "modules.json", "1_Pooling/config.json",
        "sentence_bert_config.json", "sentence_roberta_config.json", "sentence_xlm-roberta_config.json",
    }
)  # fmt: skip
_NAMED_TEMPLATE = re.compile(r"additional_chat_templates/[\w.-]+\.jinja")
_SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")
_INDEX = "model.safetensors.index.json"
_GGUF = re.compile(r"(?P<stem>[\w.-]+?)(?:-\d{5}-of-(?P<shards>\d{5}))?\.gguf", re.ASCII)
_QUANTISATION = re.compile(
    r"(?:^|[-._])((?:UD-)?(?:I?Q\d\w*|TQ\d\w*|MXFP4\w*|BF16|F16|F32))$", re.IGNORECASE | re.ASCII
)
_NO_MODEL = ("mmproj", "imatrix")  # GGUF files beside a model: what sees its images, what it was quantised by


def gguf_files(files: Sequence[str]) -> dict[str, list[str]]:
    """GGUF models among a repository's files, by path without the extension; a sharded model has several files."""
    found: dict[str, list[str]] = {}
    for name in sorted(files):
        folder, _, file = name.rpartition("/")
        match = _GGUF.fullmatch(file)
        if (
            match
            and re.fullmatch(r"[\w./-]*", folder, re.ASCII)
            and ".." not in name
            and not any(word in file.lower() for word in _NO_MODEL)
        ):
            found.setdefault(f"{folder}/{match['stem']}".lstrip("/"), []).append(name)
    return found


def quantisations(files: Sequence[str]) -> list[str]:
    """The quantizations of the GGUF files, as their names say."""
    named = (_QUANTISATION.search(stem) for stem in gguf_files(files))
    return sorted({match[1] for match in named if match})


def _quantisation(stem: str) -> str:
    match = _QUANTISATION.search(stem)
    return match[1] if match else re.split("[-./]", stem)[-1]


def select_gguf(files: Sequence[str], hub_id: str, quantisation: str) -> list[str]:
    """The files with that quantization, shards in order. Raises ModelError that lists the available ones."""
    models, wanted = gguf_files(files), quantisation.lower()
    fitting = [
        stem for spelling in (wanted, f"ud-{wanted}") for stem in models if _quantisation(stem).lower() == spelling
    ]
    if not fitting:
        there = quantisations(files)
        remedy = (
            f"there are {', '.join(there)}; name one of them"
            if there
            else "its name states no quantization; name the file"
            if models
            else ""
        )
        raise ModelError(
            f"{hub_id} has no {quantisation} in GGUF: {remedy or 'it has no .gguf file; leave :' + quantisation + ' out'}."
        )
    return models[fitting[0]]


def needed_files(files: Sequence[str], *, with_weights: bool) -> list[str]:
    """What to fetch from a repository: small files and one form of the weights. Nothing that is not named here is ever
    fetched."""
    small = [name for name in files if name in SMALL or _NAMED_TEMPLATE.fullmatch(name)]
    return small + (weight_files(files) if with_weights else [])


def weight_files(files: Sequence[str]) -> list[str]:
    """Shards with their index, otherwise the single file, otherwise a lone GGUF model; other copies of the weights are
    not fetched."""
    if _INDEX in files:
        return [_INDEX, *(name for name in files if _SHARD.fullmatch(name))]
    if "model.safetensors" in files:
        return ["model.safetensors"]
    top = [name for name in files if "/" not in name]
    single = [name for name in top if name.endswith(".safetensors")]
    quantised = list(gguf_files(top).values())
    return single if len(single) == 1 else quantised[0] if len(quantised) == 1 else []


# --- reading the small ones

MAX_JSON_BYTES = 16 * 2**20  # config files; the larger ones are bounded apart
MAX_INDEX_BYTES = 64 * 2**20  # of shards
MAX_TOKENIZER_BYTES = 512 * 2**20
MAX_TEMPLATE_BYTES = 4 * 2**20
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_LFS_SIZE = re.compile(rb"^size (\d+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """What a tokenizer is built from, however it was stored. ``templates`` maps names ("default", "tool_use") to Jinja
    text."""

    origin: str  # for messages: where it was found
    tokenizer_json: str
    config: Mapping[str, Any] = field(default_factory=dict)  # tokenizer_config.json
    special_tokens: Mapping[str, Any] = field(default_factory=dict)  # special_tokens_map.json
    templates: Mapping[str, str] = field(default_factory=dict)


@contextmanager
def reading(file: Path) -> Iterator[None]:
    """Raises ModelError where it cannot be read."""
    try:
        yield
    except OSError as error:
        raise ModelError(
            f"cannot read {file}: {error.strerror or error}. Check the path and its permissions."
        ) from error


def read_bounded(file: Path, limit: int) -> str:
    """A small text file. Raises ModelError when it is missing, unreadable, over ``limit`` bytes or not UTF-8."""
    with reading(file):
        size = file.stat().st_size
        if size > limit:
            raise ModelError(
                f"{file} has {size} bytes, over the limit of {limit}; it is damaged or not what its name says. Download it again."
            )
        content = file.read_bytes()
        refuse_lfs_pointer(file, content[:1024])
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ModelError(
            f"{file} is not UTF-8 text ({error.reason} at byte {error.start}); download it again."
        ) from error


def refuse_lfs_pointer(file: Path, beginning: bytes) -> None:
    """Detects what ``git clone`` leaves in place of a large file if Git LFS is not installed. Raises ModelError."""
    if beginning.startswith(LFS_POINTER):
        size = _LFS_SIZE.search(beginning)
        raise ModelError(
            f"{file} is a Git LFS pointer{f' for {int(size[1]):,} bytes' if size else ''}, not the file itself: the clone left large files out. "
            f"Run `git lfs install && git lfs pull` in {file.parent}, or name the model by its hub id."
        )


def read_json(file: Path, *, missing_ok: bool = False, limit: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """A JSON object, or {} for an optional file that is missing. Raises ModelError otherwise."""
    if missing_ok and not file.exists():
        return {}
    return parse_json(read_bounded(file, limit), str(file))


def parse_any_json(text: str, origin: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ModelError(f"{origin} is not JSON: {error}. Download it again.") from error
    except RecursionError as error:
        raise ModelError(f"{origin} is nested too deeply to be a model's file; download it again.") from error


def parse_json(text: str, origin: str) -> dict[str, Any]:
    value = parse_any_json(text, origin)
    if not isinstance(value, dict):
        raise ModelError(f"{origin} holds a JSON {type(value).__name__}, not an object; download it again.")
    return value
