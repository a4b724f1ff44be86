"""What a checkpoint's hidden states become: next tokens, an embedding, or a score.

What lives here: deciding that from --task, the architecture and the files that sentence-transformers writes beside the
weights, and from there the PoolingSpec. What may not: torch, pooling itself (layers/pooling.py).

What was found travels in ``config`` under KEY, where families.py reads it back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from headrace.errors import ModelError
from headrace.models.fields import Fields
from headrace.spec import DecoderSpec, PoolHead, PoolingSpec

KEY = "headrace_pooling"
ENCODERS = ("bert", "roberta", "xlm-roberta", "camembert")
KINDS = {"pooling_mode_cls_token": "cls", "pooling_mode_mean_tokens": "mean", "pooling_mode_lasttoken": "last"}
_MODULES = ("Transformer", "Pooling", "Normalize")
_IDENTITY = ("torch.nn.modules.linear.Identity", "torch.nn.Identity")

ReadJson = Callable[[str], Any]  # of a file in the model's folder; None where there is none


def read_pooling(config: Mapping[str, Any], task: str, read: ReadJson, token_ids: Callable[[], Any]) -> Any:
    """What stands under KEY; None: the model generates. ``token_ids``: of the tokenizer, by token. Raises ModelError
    where ``task`` is none of the checkpoint's."""
    architecture, family = _architecture(config), config.get("model_type")
    generates = architecture.endswith(("ForCausalLM", "LMHeadModel")) or not architecture
    modules = read("modules.json")
    if task == "auto":
        task = _task(architecture, family, embeds=modules is not None)
    if task == "generate":
        return None
    if task == "pooling":
        task = "score" if architecture.endswith("ForSequenceClassification") else "embed"
    if task == "score":
        return _score(config, architecture, token_ids if generates and family not in ENCODERS else None)
    if architecture.endswith("ForSequenceClassification"):
        raise ModelError(f"--task is embed, but {architecture} has a classification head; use --task score.")
    return _embedding(family, modules, read)


def _architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else ""


def _task(architecture: str, family: Any, *, embeds: bool) -> str:
    if architecture.endswith("ForSequenceClassification"):
        return "score"
    bare = architecture.endswith("Model") and not architecture.endswith("LMHeadModel")
    return "embed" if embeds or bare or family in ENCODERS else "generate"


def _embedding(family: Any, modules: Any, read: ReadJson) -> dict[str, Any]:
    """As modules.json says; without one, the first token of an encoder and the last one of a decoder, normalized."""
    if modules is None:
        return {"kind": "cls" if family in ENCODERS else "last", "normalize": True}
    kinds = [str(each.get("type", "")).rpartition(".")[2] for each in modules] if _is_list_of_objects(modules) else []
    unknown = [kind for kind in kinds if kind not in _MODULES]
    if unknown or "Transformer" not in kinds:
        raise ModelError(
            f"modules.json lists {', '.join(kinds)[:200] or 'nothing that is understood'}, but only {', '.join(_MODULES)} are supported; "
            "use a checkpoint without further modules."
        )
    folder = next(
        (str(each.get("path", "")) for each, kind in zip(modules, kinds, strict=True) if kind == "Pooling"), ""
    )
    found: dict[str, Any] = {"kind": "mean", "normalize": "Normalize" in kinds}
    if folder:
        found["kind"] = _kind(read(f"{folder}/config.json") or {}, folder)
    for name in ("sentence_bert_config.json", "sentence_xlm-roberta_config.json", "sentence_roberta_config.json"):
        length = (read(name) or {}).get("max_seq_length")
        if length is not None:
            found.setdefault("max_length", length)
    return found


def _is_list_of_objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, Mapping) for each in value)


def _kind(config: Mapping[str, Any], folder: str) -> str:
    named = config.get("pooling_mode")
    modes = [name for name, value in config.items() if name.startswith("pooling_mode_") and value is True]
    modes += [name for name, kind in KINDS.items() if named in (kind, name.removeprefix("pooling_mode_"))]
    if len(modes) != 1 or modes[0] not in KINDS:
        raise ModelError(
            f"{folder}/config.json asks for pooling by {', '.join(modes) or 'nothing'}, but one of {', '.join(KINDS)} is needed; "
            "use a checkpoint with one of these."
        )
    return KINDS[modes[0]]


def _score(config: Mapping[str, Any], architecture: str, token_ids: Callable[[], Any] | None) -> dict[str, Any]:
    """Of one label; a language model's is the logit of "yes" less that of "no", as Qwen3-Reranker was trained."""
    if token_ids is not None:
        ids = token_ids() or {}
        if not isinstance(ids, Mapping) or "yes" not in ids or "no" not in ids:
            raise ModelError('--task is score, but the tokenizer has no tokens "yes" and "no"; use a reranker.')
        return {"kind": "last", "head": "tokens", "tokens": [ids["yes"], ids["no"]]}
    if not architecture.endswith("ForSequenceClassification"):
        raise ModelError(
            f"--task is score, but {architecture or 'the checkpoint'} has no head for it; use --task embed."
        )
    labels = config.get("id2label")
    count = config.get("num_labels", len(labels) if isinstance(labels, Mapping) else 2)
    if count != 1:
        raise ModelError(f"{architecture} tells {count} classes apart, but only rerankers, of one label, are served.")
    encoder = config.get("model_type") in ENCODERS
    return {"kind": "cls" if encoder else "last", "head": "dense" if encoder else "linear", "sigmoid": _sigmoid(config)}


def _sigmoid(config: Mapping[str, Any]) -> bool:
    """Unless sentence-transformers was told otherwise."""
    own = config.get("sentence_transformers")
    named = own.get("activation_fn") if isinstance(own, Mapping) else None
    return (named or config.get("sbert_ce_default_activation_function")) not in _IDENTITY


def with_pooling(spec: DecoderSpec, fields: Fields | None) -> DecoderSpec:
    """``fields``: of KEY. Raises ModelError for an encoder without."""
    if fields is None:
        if not spec.causal:
            told = "models of this family generate no text; leave --task at auto"
            raise ModelError(f"config.json ({spec.family}): {told}.", param="model_type")
        return spec
    kinds = {kind: kind for kind in KINDS.values()}
    pooling = PoolingSpec(
        kind=fields.choice("kind", kinds),
        normalize=fields.boolean("normalize", False),
        head=fields.choice("head", {each.value: each for each in PoolHead}, ""),
        tokens=fields.integers("tokens", high=spec.vocab_size - 1),
        sigmoid=fields.boolean("sigmoid", True),
    )
    if pooling.head is PoolHead.NONE:
        pooling = replace(pooling, width=spec.hidden_size)
    most = fields.integer("max_length", spec.max_positions)
    headless = pooling.head is not PoolHead.TOKENS
    spec = replace(
        spec, pooling=pooling, position_rows=spec.position_rows or spec.max_positions if spec.rope is None else 0
    )
    return replace(spec, max_positions=min(spec.max_positions, most), tied_head=spec.tied_head or headless)


def json_reader(folder: Path, parse: Callable[[Path], Any]) -> ReadJson:
    """Files inside a folder, whatever a config calls them."""

    def read(name: str) -> Any:
        file = folder / name
        inside = file.resolve().is_relative_to(folder.resolve()) if ".." in name or name.startswith("/") else True
        return parse(file) if inside and file.is_file() else None

    return read
