"""Where a model comes from: a folder, a lone .gguf file, a hub id, or the bundled demo.

What lives here: resolving a name to files, and what the small ones next to the weights say of it and its tokenizer.
What may not: torch, reading weights (checkpoint.py), understanding a config (families.py), network access (hub.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from hashlib import sha256
from pathlib import Path
from typing import Any

from headrace.config import ModelConfig
from headrace.errors import ModelError
from headrace.models.files import (
    MAX_JSON_BYTES,
    MAX_TEMPLATE_BYTES,
    MAX_TOKENIZER_BYTES,
    TokenizerFiles,
    gguf_files,
    parse_any_json,
    parse_json,
    read_bounded,
    read_json,
    select_gguf,
)
from headrace.models.hub import HubId, download_model
from headrace.models.pooling import KEY, json_reader, read_pooling
from headrace.quant.config import MADE, USUAL

_DEMO = Path(__file__).resolve().parent.parent / "data" / "demo"
_PICKLES = (
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "consolidated.00.pth",
    "model.ckpt.index",
    "tf_model.h5",
)


class WeightFormat(str, Enum):
    SAFETENSORS = "safetensors"
    GGUF = "gguf"
    DUMMY = "dummy"


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model that was found. ``config`` is in Hugging Face style (synthesized for GGUF); ``path`` is a folder or a
    .gguf file.

    ``dequantize_from``: the quantization of weights that are dequantized while they are read; ``config`` then does not
    mention it. ``makes``: the format, as ``headrace quantize`` calls it, that plain weights are rounded to while they
    are read; ``config`` then has it.
    """

    name: str
    path: Path
    weights: WeightFormat
    config: dict[str, Any]
    generation_defaults: dict[str, Any]  # sampling defaults; empty when the user asked for none
    eos_token_ids: tuple[int, ...]  # from config and generation config together
    dequantize_from: Mapping[str, Any] | None = None
    makes: str | None = None

    @property
    def revision(self) -> str:
        """Identifies the weight files: changes when one of them does. (In a hub's cache, their names are hashes of
        their content.)"""
        return " ".join(f"{file.name} {file.stat().st_size} {file.stat().st_mtime_ns}" for file in self._weight_files())

    @property
    def fingerprint(self) -> str:
        """Equal where another host has the same config, and weight files of the same names and sizes."""
        files = [(file.name, file.stat().st_size) for file in self._weight_files()]
        return sha256(repr((self.config, files)).encode()).hexdigest()[:16]

    def _weight_files(self) -> list[Path]:
        files = [self.path] if self.path.is_file() else sorted(self.path.glob("*.safetensors"))
        return [each.resolve() for each in files]

    @property
    def pooling(self) -> Mapping[str, Any] | None:
        """What its hidden states become; None: next tokens."""
        return self.config.get(KEY)

    def tokenizer_files(self) -> TokenizerFiles | None:
        """None if the model has no tokenizer (prompts must then be token ids). Raises ModelError for a damaged one."""
        return read_tokenizer_files(self.path)


def find_model(config: ModelConfig) -> ModelSource:
    """Resolves ``config.model`` (None: the bundled demo). Raises ModelError that says what was tried."""
    path, name = _locate(config.model, with_weights=config.load_format != "dummy")
    weights = _weight_format(path, config.load_format)
    if path.is_dir() and weights is WeightFormat.GGUF:
        path = only_gguf(path)
    source = _pooled(_describe(path, name, weights, config.generation_config), config.task)
    return quantised_as_asked(source, config.quantization)


def _pooled(source: ModelSource, task: str) -> ModelSource:
    """With what its hidden states become, where that is no next token."""

    def token_ids() -> Any:
        files = source.tokenizer_files()
        return None if files is None else parse_json(files.tokenizer_json, files.origin).get("model", {}).get("vocab")

    def parse(file: Path) -> Any:
        return parse_any_json(read_bounded(file, MAX_JSON_BYTES), str(file))

    plain = {name: value for name, value in source.config.items() if name != KEY}
    pooling = source.pooling if task in ("auto", "embed", "pooling") else None  # as a GGUF file says
    if pooling is None:
        folder = source.path if source.path.is_dir() else source.path.parent / "nowhere"
        pooling = read_pooling(plain, task, json_reader(folder, parse), token_ids)
    return replace(source, config=plain if pooling is None else {**plain, KEY: pooling})


def quantised_as_asked(source: ModelSource, asked: str | None, *, head: bool = False) -> ModelSource:
    """``--quantization none`` dequantizes weights at load, and ``MADE``'s names quantize plain ones, with the ``head``
    (a draft's, whose option the caller names) or without. Else the name of a method must match the checkpoint's, except
    that random weights of a model that is not quantized are generated in the method's usual form."""
    stored = source.config.get("quantization_config")
    if stored is None:
        return source if asked in (None, "none") else _made(source, str(asked), head=head)
    if asked == "none":
        plain = {name: value for name, value in source.config.items() if name != "quantization_config"}
        return replace(source, config=plain, dequantize_from=stored)
    method = stored.get("quant_method") if isinstance(stored, Mapping) else None
    if asked not in (None, method):
        option = "quantization" if head else "--quantization"
        raise ModelError(f"{option} is {asked}, but {source.name} is quantized with {method}; leave it out.")
    return source


def _made(source: ModelSource, asked: str, *, head: bool) -> ModelSource:
    if source.weights is WeightFormat.DUMMY and not head and asked in USUAL:
        form = {"quant_method": asked, **USUAL[asked]}
        return replace(source, config={**source.config, "quantization_config": form})
    if asked not in MADE or source.weights is WeightFormat.GGUF:
        option = "quantization" if head else "--quantization"
        made = "" if source.weights is WeightFormat.GGUF else f", or make one of {', '.join(MADE)}"
        raise ModelError(f"{option} is {asked}, but {source.name} is not quantized; leave it out{made}.")
    form = {"quant_method": "compressed-tensors", **MADE[asked]["config"]}
    config = {**source.config, "quantization_config": form}
    if head:
        config |= {"tie_word_embeddings": False}
        form["ignore"] = [each for each in form["ignore"] if each != "lm_head"]
    return replace(source, config=config, makes=MADE[asked]["form"])


def as_path(text: str) -> Path:
    """A path as typed, with ``~`` expanded. Raises ModelError for what cannot be a path, or is in a folder that this
    user may not enter."""
    try:
        path = Path(text).expanduser()
        path.exists()
    except (OSError, RuntimeError) as error:  # the latter for ~somebody who is not known here
        reason = str(getattr(error, "strerror", None) or error).rstrip(".")
        raise ModelError(f"{text[:80]!r} cannot be looked up: {reason}. Check the spelling.") from error
    return path


def _locate(model: str | None, *, with_weights: bool) -> tuple[Path, str]:
    if model is None:
        return _DEMO, "demo"
    path = as_path(model)
    if path.is_dir():
        return _folder(path), path.resolve().name
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(
                f"{model} is a file but not a .gguf; name the folder that holds config.json, or a .gguf file."
            )
        return path, path.stem
    folder, colon, quantisation = model.rpartition(":")
    if colon and as_path(folder).is_dir():
        return _gguf_in(as_path(folder), quantisation), f"{as_path(folder).resolve().name}:{quantisation}"
    hub_id = _hub_id(model, path)
    found = download_model(hub_id, with_weights=with_weights)
    return found if found.is_file() else _folder(found), hub_id.name


def _gguf_in(folder: Path, quantisation: str) -> Path:
    return folder / select_gguf([file.name for file in folder.glob("*.gguf")], str(folder), quantisation)[0]


def _folder(path: Path) -> Path:
    """A folder without config.json stands for the one .gguf in it."""
    return path if (path / "config.json").is_file() else only_gguf(path)


def only_gguf(folder: Path) -> Path:
    """The model of a folder that holds no other; its first shard, where it has several."""
    found = list(gguf_files([file.name for file in folder.glob("*.gguf")]).values())
    if len(found) == 1:
        return folder / found[0][0]
    if found:
        names = ", ".join(files[0] for files in found[:4])
        raise ModelError(
            f"{folder} holds {len(found)} .gguf files ({names}); name one of them, or a quantization after a colon, like :Q4_K_M."
        )
    raise ModelError(
        f"{folder} holds neither config.json nor a .gguf file; name a model's folder, a .gguf file or a hub id."
    )


def _hub_id(model: str, path: Path) -> HubId:
    hub_id = None if model.startswith((".", "/", "~")) else HubId.parse(model)
    if hub_id is None:
        raise ModelError(
            f"no model at {model!r}: there is no folder or file {path}, and it is not a hub id (org/name[@revision][:quantization]). "
            "Check the spelling."
        )
    return hub_id


def _weight_format(path: Path, load_format: str) -> WeightFormat:
    """``auto``: what is there. A requested format that is not there is an error here, not at the first tensor."""
    if load_format == "dummy":
        return WeightFormat.DUMMY
    if path.is_file() or load_format == "gguf":
        if load_format == "safetensors":
            raise ModelError(f"--load-format is safetensors, but {path} is a GGUF file; leave --load-format at auto.")
        return WeightFormat.GGUF
    if any(path.glob("*.safetensors")) or (path / "model.safetensors.index.json").is_file():
        return WeightFormat.SAFETENSORS
    if load_format == "auto" and any(path.glob("*.gguf")):
        return WeightFormat.GGUF
    pickles = [name for name in _PICKLES if (path / name).exists()]
    if pickles:
        raise ModelError(
            f"{path} holds {pickles[0]} but no safetensors; pickled weights can run code and are never loaded. Convert them to safetensors."
        )
    raise ModelError(
        f"{path} holds no weights (*.safetensors); download them, or use --load-format dummy for random ones."
    )


def _describe(path: Path, name: str, weights: WeightFormat, generation_config: str) -> ModelSource:
    if path.is_file():
        from headrace.models.gguf_config import read_gguf_config

        config, generation = read_gguf_config(path)
    else:
        config = read_json(path / "config.json")
        config.pop(KEY, None)  # ours alone
        if "quantization_config" not in config and (path / "hf_quant_config.json").is_file():  # ModelOpt's own file
            config["quantization_config"] = read_json(path / "hf_quant_config.json").get("quantization")
        generation = read_json(path / "generation_config.json", missing_ok=True)
    defaults = _generation_defaults(generation, generation_config)
    return ModelSource(name, path, weights, config, defaults, _eos_ids(config, generation))


def _generation_defaults(generation: dict[str, Any], choice: str) -> dict[str, Any]:
    if choice == "auto":
        return generation
    if choice == "headrace":
        return {}
    folder = as_path(choice)
    file = folder / "generation_config.json" if folder.is_dir() else folder
    if not file.is_file():
        raise ModelError(
            f"--generation-config is {choice!r}: there is no {file}. Give auto, headrace, or a folder with generation_config.json."
        )
    return read_json(file)


def _eos_ids(*configs: Mapping[str, Any]) -> tuple[int, ...]:
    """Every end-of-sequence id that the configs name, without duplicates, in order."""
    found: dict[int, None] = {}
    for config in configs:
        value = config.get("eos_token_id")
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, int) and not isinstance(item, bool) and item >= 0:
                found[item] = None
    return tuple(found)


def find_tokenizer_files(override: str) -> TokenizerFiles:
    """``--tokenizer``: a folder, a tokenizer.json, a .gguf file or a hub id. Raises ModelError if there is none."""
    path = as_path(override)
    if path.is_file() and path.suffix == ".json":
        path = path.parent if path.name == "tokenizer.json" else path
    elif not path.exists():
        path = download_model(_hub_id(override, path), with_weights=False)
    files = read_tokenizer_files(path)
    if files is None:
        raise ModelError(f"--tokenizer is {override!r}, but there is no tokenizer.json; name a folder that holds one.")
    return files


def read_tokenizer_files(path: Path) -> TokenizerFiles | None:
    """``path``: a folder, a .gguf file, or a lone tokenizer file ending in .json."""
    if path.suffix == ".gguf" and path.is_file():
        from headrace.models.gguf_vocab import read_gguf_tokenizer

        return read_gguf_tokenizer(path)
    if path.is_file():
        return TokenizerFiles(str(path), read_bounded(path, MAX_TOKENIZER_BYTES))
    config = read_json(path / "tokenizer_config.json", missing_ok=True)
    special = read_json(path / "special_tokens_map.json", missing_ok=True)
    text = _tokenizer_json(path)
    if text is None:
        return None
    return TokenizerFiles(str(path), text, config, special, read_templates(path, config))


def _tokenizer_json(path: Path) -> str | None:
    if (path / "tokenizer.json").exists():
        return read_bounded(path / "tokenizer.json", MAX_TOKENIZER_BYTES)
    if (path / "tokenizer.model").exists():
        raise ModelError(
            f"{path} has a tokenizer.model and no tokenizer.json; write one with transformers: AutoTokenizer.from_pretrained(FOLDER)"
            ".save_pretrained(FOLDER), or name another model's with --tokenizer."
        )
    return None


def read_templates(path: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates by name. Files take precedence over tokenizer_config.json, as in transformers."""
    templates = _configured_templates(config.get("chat_template"), f"{path}/tokenizer_config.json")
    single = path / "chat_template.jinja"
    if single.is_file():
        templates = {"default": read_bounded(single, MAX_TEMPLATE_BYTES)}
    for file in sorted((path / "additional_chat_templates").glob("*.jinja")):
        templates[file.stem] = read_bounded(file, MAX_TEMPLATE_BYTES)
    if not templates and (path / "chat_template.json").is_file():
        value = read_json(path / "chat_template.json").get("chat_template")
        templates = _configured_templates(value, f"{path}/chat_template.json")
    return templates


def _configured_templates(value: Any, origin: str) -> dict[str, str]:
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    named = isinstance(value, list) and all(
        isinstance(item, dict) and isinstance(item.get("name"), str) and isinstance(item.get("template"), str)
        for item in value
    )
    if not named:
        raise ModelError(
            f"{origin}: chat_template is neither a string nor a list of named templates; give --chat-template instead."
        )
    return {item["name"]: item["template"] for item in value}
