"""A Hugging Face tokenizer as GGUF's metadata, which llama.cpp tokenizes by: byte-level BPE, and SentencePiece's.

What lives here: models/gguf_vocab.py, backwards. What may not: tokenizing, writing files.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from headrace.errors import ConfigError
from headrace.models.files import TokenizerFiles
from headrace.models.gguf_vocab import NAMED, PREFIX, SPLITS, PieceType
from headrace.models.source import ModelSource

_GPT2 = SPLITS["gpt-2"][0]  # what ByteLevel splits by where nothing else does


def tokenizer_metadata(source: ModelSource, files: TokenizerFiles, rows: int) -> Iterator[tuple[str, Any]]:
    """(key, value). ``rows``: of the embedding, each of which needs a token. Raises ConfigError for a kind of tokenizer
    that GGUF has no name for."""
    whole = json.loads(files.tokenizer_json)
    model, added = whole.get("model") or {}, whole.get("added_tokens") or []
    if model.get("type") != "BPE":
        raise _unknown(files, f"its model is {str(model.get('type'))[:40]!r}, not BPE")
    vocab: dict[str, int] = {**model["vocab"], **{each["content"]: each["id"] for each in added}}
    merges = [each if isinstance(each, str) else " ".join(each) for each in model["merges"]]
    words = [f"[PAD{index}]" for index in range(max(rows, 1 + max(vocab.values())))]
    types = [int(PieceType.UNUSED)] * len(words)
    for word, index in vocab.items():
        words[index], types[index] = word, int(_type(word, model))
    for each in added:
        if types[each["id"]] != PieceType.UNKNOWN:
            types[each["id"]] = int(PieceType.CONTROL if each.get("special") else PieceType.USER_DEFINED)
    if len(words) > rows:
        raise _unknown(files, f"it has {len(words)} tokens, and the model's embedding {rows} rows")
    found = {"tokens": words, "token_type": types, **_special_ids(source, files, vocab)}
    found["add_bos_token"] = _begins(whole, files, vocab, found.get("bos_token_id"))
    if model.get("byte_fallback"):
        found |= {"model": "llama", "pre": "default", "scores": _scores(words, merges)}
        found["add_space_prefix"] = "repend" in json.dumps([whole.get("normalizer"), whole.get("pre_tokenizer")])
    else:
        found |= {"model": "gpt2", "pre": _split(whole, files), "merges": merges}
    yield from ((PREFIX + key, value) for key, value in found.items())
    for name, text in files.templates.items():
        yield "tokenizer.chat_template" + ("" if name == "default" else f".{name}"), text
    if more := [name for name in files.templates if name != "default"]:
        yield "tokenizer.chat_templates", more


def _type(word: str, model: Mapping[str, Any]) -> PieceType:
    if model.get("byte_fallback") and len(word) == 6 and word.startswith("<0x") and word.endswith(">"):
        return PieceType.BYTE
    return PieceType.UNKNOWN if word == model.get("unk_token") else PieceType.NORMAL


def _scores(words: Sequence[str], merges: Sequence[str]) -> list[float]:
    """A piece's is minus the rank of the first merge that makes it: SentencePiece merges the best first."""
    ranks: dict[str, int] = {}
    for rank, pair in enumerate(merges):
        ranks.setdefault(pair.replace(" ", ""), rank)
    return [-float(ranks.get(word, len(merges))) for word in words]


def _split(whole: Mapping[str, Any], files: TokenizerFiles) -> str:
    """GGUF's name of the rule by which text is split: of those with these patterns, one that normalises alike."""
    before = whole.get("pre_tokenizer") or {}
    parts = before.get("pretokenizers", [before])
    patterns = [each["pattern"].get("Regex") for each in parts if each.get("type") == "Split"]
    if any(each.get("type") == "ByteLevel" and each.get("use_regex", True) for each in parts):
        patterns += _GPT2
    if [each.get("type") for each in parts if each.get("type") not in ("Split", "Digits")] != ["ByteLevel"]:
        patterns = []
    normal = (whole.get("normalizer") or {}).get("type") == "NFC"
    alike = [(nfc == normal, name) for name, (rule, nfc, _, _) in SPLITS.items() if list(rule) == patterns]
    if not alike:
        raise _unknown(files, f"it splits text by {str(patterns or before)[:80]!r}")
    return max(alike, key=lambda each: each[0])[1]


def _special_ids(source: ModelSource, files: TokenizerFiles, vocab: Mapping[str, int]) -> dict[str, int]:
    """The first token that ends a text is its end, a second that of a turn."""
    found: dict[str, int] = {}
    for name, key in NAMED.items():
        token = files.config.get(name) or files.special_tokens.get(name)
        word = token.get("content") if isinstance(token, Mapping) else token
        if isinstance(word, str) and word in vocab:
            found[key] = vocab[word]
    if isinstance(begin := source.config.get("bos_token_id"), int):
        found["bos_token_id"] = begin
    return found | dict(zip(("eos_token_id", "eot_token_id", "eom_token_id"), source.eos_token_ids, strict=False))


def _begins(whole: Mapping[str, Any], files: TokenizerFiles, vocab: Mapping[str, int], begin: object) -> bool:
    """Whether texts begin with the token for it."""
    said = files.config.get("add_bos_token")
    if isinstance(said, bool):
        return said
    first = ((whole.get("post_processor") or {}).get("single") or [{}])[0].get("SpecialToken", {}).get("id")
    return first is not None and vocab.get(first) == begin


def _unknown(files: TokenizerFiles, what: str) -> ConfigError:
    return ConfigError(
        f"the tokenizer of {files.origin} cannot be written as GGUF: {what}; give another --format, or --tokenizer PATH."
    )
