"""The contents of a model's folder other than weights, and the model card that says how it was made.

What lives here: copying files, config.json, README.md. What may not: weights.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.errors import ConfigError
from headrace.models.source import ModelSource

_LEFT = (
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".gguf",
    ".index.json",
    ".md",
)  # weights in any form, and other people's cards
_MADE = "headrace_quantize.json"  # how the folder's layers are made: one that is gone on with must be made alike


def begin_folder(output: Path, source: ModelSource, how: Mapping[str, Any]) -> bool:
    """Returns whether it resumes what another run began. Raises ConfigError for a folder with other contents."""
    said = json.dumps({"model": source.name, "revision": source.revision, **how}, indent=1, sort_keys=True) + "\n"
    mark = output / _MADE
    if mark.exists():
        if mark.read_text() != said:
            raise ConfigError(
                f"--output {output} holds layers that were made differently ({mark.name} says how); give another folder, or remove it."
            )
        return True
    if output.exists() and any(output.iterdir()):
        raise ConfigError(f"--output {output} is not empty; give a new folder.")
    output.mkdir(parents=True, exist_ok=True)
    mark.write_text(said)
    return False


def finish_folder(
    output: Path, source: ModelSource, name: str, config: Mapping[str, Any] | None, form: str, facts: Mapping[str, str]
) -> None:
    """``config``: the contents of config.json, None where a file of weights says all; ``form``: the checkpoint
    convention."""
    if config is not None:
        (output / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        for file in sorted(source.path.iterdir()):
            if file.is_file() and file.name != "config.json" and not file.name.endswith(_LEFT):
                shutil.copyfile(file, output / file.name)
    (output / "README.md").write_text(_card(source, name, form, facts))
    (output / _MADE).unlink(missing_ok=True)


def _card(source: ModelSource, name: str, form: str, facts: Mapping[str, str]) -> str:
    rows = "\n".join(f"| {each} | {value} |" for each, value in facts.items())
    return f"""---
base_model: {source.name}
library_name: transformers
tags: [{form}, {name}]
---
# {source.name}, {name}

Made by `headrace quantize --format {name}`, in the {form} format.

| | |
|---|---|
{rows}
"""
