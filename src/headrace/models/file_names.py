"""What the file names of a repository say: which files are a model, in which form, and which of them to fetch.

What lives here: choosing files. What may not: network access (hub.py), reading files.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

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
