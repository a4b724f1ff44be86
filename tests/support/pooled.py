"""Tiny random encoders, embedding models and rerankers, as checkpoints: config, weights, tokenizer and
sentence-transformers' files.

What lives here: making them with transformers (the oracle), and what the oracle makes of token ids. What may not:
tests.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tests.support import tiny

VOCABULARY = (
    "[PAD]",
    "[CLS]",
    "[SEP]",
    "[UNK]",
    *map(chr, range(97, 123)),
    *(f"##{chr(each)}" for each in range(97, 123)),
    ".",
)
SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 130,
    "pad_token_id": 0,
}
# family → (config class, bare model, model with a classification head)
FAMILIES = {
    "bert": ("BertConfig", "BertModel", "BertForSequenceClassification", {"type_vocab_size": 2}),
    "xlm-roberta": (
        "XLMRobertaConfig",
        "XLMRobertaModel",
        "XLMRobertaForSequenceClassification",
        {"type_vocab_size": 1},
    ),
}


def save_encoder(family: str, folder: Path, *, reranks: bool = False, seed: int = 0, **fields: Any) -> Any:
    """Returns the oracle, in float32."""
    import transformers

    config_class, bare, classifies, own = FAMILIES[family]
    config = getattr(transformers, config_class)(**{**SIZES, **own, "num_labels": 1, **fields})
    config._attn_implementation = "eager"
    name = classifies if reranks else bare
    model = getattr(transformers, name)(config)
    return _saved(model, name, folder, seed)


def save_decoder_reranker(folder: Path, seed: int = 0) -> Any:
    """A language model with one label."""
    import transformers

    config = transformers.LlamaConfig(**{**tiny._SIZES, "num_labels": 1})
    config._attn_implementation = "eager"
    oracle = _saved(transformers.LlamaForSequenceClassification(config), "LlamaForSequenceClassification", folder, seed)
    tiny.save_tokenizer(folder)
    return oracle


def _saved(model: Any, architecture: str, folder: Path, seed: int) -> Any:
    tiny._randomise(model, seed, one_plus=False)
    model.config.architectures = [architecture]
    model.float().eval().save_pretrained(folder)
    save_tokenizer(folder)
    return model


def save_modules(folder: Path, *kinds: str, mode: str = "mean_tokens", max_length: int | None = None) -> None:
    """modules.json and what it refers to."""
    entries = [
        {
            "idx": index,
            "name": str(index),
            "path": f"{index}_{kind}" if index else "",
            "type": f"sentence_transformers.models.{kind}",
        }
        for index, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(entries))
    for entry in entries:
        if entry["type"].endswith("Pooling"):
            (folder / entry["path"]).mkdir(exist_ok=True)
            modes = {
                f"pooling_mode_{each}": each == mode for each in ("cls_token", "mean_tokens", "max_tokens", "lasttoken")
            }
            (folder / entry["path"] / "config.json").write_text(json.dumps({"word_embedding_dimension": 64, **modes}))
    if max_length is not None:
        (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": max_length}))


def save_tokenizer(folder: Path) -> None:
    """WordPiece over letters, with BERT's special tokens around a text and a pair."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    backend = Tokenizer(models.WordPiece({word: index for index, word in enumerate(VOCABULARY)}, unk_token="[UNK]"))
    backend.normalizer, backend.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens([AddedToken(word, special=True) for word in VOCABULARY[:4]])
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    backend.enable_truncation(16)  # as some checkpoints leave it
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(str(backend.to_str()))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "cls_token": "[CLS]",
        "sep_token": "[SEP]",
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def hidden_states(oracle: Any, ids: Sequence[int]) -> torch.Tensor:  # [tokens, hidden]
    with torch.no_grad():
        found: torch.Tensor = oracle(torch.tensor([list(ids)])).last_hidden_state[0]
    return found


def unit(vector: torch.Tensor) -> list[float]:
    return [float(value) for value in vector / vector.norm()]
