"""The tokenizer in GGUF metadata, as the files of a Hugging Face tokenizer.

What lives here: vocabularies of kind ``llama`` (SentencePiece, whose pieces with scores become BPE merges with ranks) and
``gpt2`` (byte-level BPE), the splitting rules that GGUF only names, special tokens, chat templates. What may not: torch,
tokenizing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

from headrace.errors import ModelError
from headrace.models.files import TokenizerFiles
from headrace.models.gguf_file import GGUFFile, read_gguf
from headrace.models.gguf_names import OWN

PREFIX = "tokenizer.ggml."
NAMED = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "sep_token": "seperator_token_id",  # GGUF's own spelling
    "pad_token": "padding_token_id",
    "mask_token": "mask_token_id",
}


class Split(NamedTuple):
    """How text is split before merging. ``patterns``: applied one after another; ``nfc``: text is normalized first;
    ``whole_words``: these skip the merges; ``bos``: by default."""

    patterns: tuple[str, ...]
    nfc: bool = False
    whole_words: bool = False
    bos: bool = False


def _read_splits() -> Iterator[tuple[str, Split]]:
    for row in OWN["splits"]:
        split = Split(tuple(row["patterns"]), *(row.get(name, False) for name in Split._fields[1:]))
        yield from ((name, split) for name in row["names"])


SPLITS: Mapping[str, Split] = dict(_read_splits())


def read_gguf_tokenizer(path: Path) -> TokenizerFiles | None:
    """None if the file has no vocabulary. Raises ModelError for a kind that is not supported."""
    file = read_gguf(path)
    kind = file.get(PREFIX + "model", str)
    templates = _templates(file)
    whole = file.get("tokenizer.huggingface.json", str)
    if whole is not None:
        return TokenizerFiles(str(path), whole, _config(file, None), {}, templates)
    if kind is None or kind == "none":
        return None
    if kind not in _KINDS:
        known = ", ".join(_KINDS)
        raise ModelError(
            f"{path} has a tokenizer of kind {kind[:40]!r}; supported are {known}. Give a tokenizer.json with --tokenizer."
        )
    tokenizer, bos = _KINDS[kind](file)
    return TokenizerFiles(str(path), json.dumps(tokenizer, ensure_ascii=False), _config(file, bos), {}, templates)


def _config(file: GGUFFile, bos_by_default: bool | None) -> dict[str, Any]:
    """The equivalent of tokenizer_config.json, with special tokens named by their ids."""
    tokens = file.get(PREFIX + "tokens", list) or []
    found: dict[str, Any] = {}
    for name, key in NAMED.items():
        token = file.get(PREFIX + key, int)
        if token is not None and 0 <= token < len(tokens):
            found[name] = tokens[token]
    if bos_by_default is not None:
        found["add_bos_token"] = file.get(PREFIX + "add_bos_token", bool, bos_by_default)
        found["add_eos_token"] = file.get(PREFIX + "add_eos_token", bool, False)
    return found


def _templates(file: GGUFFile) -> dict[str, str]:
    names = [name for name in file.get("tokenizer.chat_templates", list) or [] if isinstance(name, str)]
    found = {name: file.get(f"tokenizer.chat_template.{name}", str) for name in names}
    default = file.get("tokenizer.chat_template", str)
    return {name: text for name, text in {"default": default, **found}.items() if text is not None}


def _pieces(file: GGUFFile) -> list[Piece]:
    tokens = _listed(file, "tokens", str)
    scores = _listed(file, "scores", (int, float)) or [0.0] * len(tokens)
    types = _listed(file, "token_type", int) or [int(PieceType.NORMAL)] * len(tokens)
    if not len(tokens) == len(scores) == len(types) or not tokens:
        raise file.damaged(f"its vocabulary has {len(tokens)} tokens, {len(scores)} scores and {len(types)} types")
    return [Piece(*row) for row in zip(tokens, scores, types, strict=True)]


def _listed(file: GGUFFile, key: str, kind: type | tuple[type, ...]) -> list[Any]:
    values = file.get(PREFIX + key, list) or []
    if not all(isinstance(value, kind) for value in values):
        raise file.damaged(f"{PREFIX}{key} holds values of the wrong type")
    return values


def _sentencepiece(file: GGUFFile) -> tuple[dict[str, Any], bool]:
    prefix = file.get(PREFIX + "add_space_prefix", bool, True)
    return bpe_tokenizer(_pieces(file), add_space_prefix=bool(prefix)), True


def _byte_level(file: GGUFFile) -> tuple[dict[str, Any], bool]:
    name = file.get(PREFIX + "pre", str, "default") or "default"
    if name not in SPLITS:
        raise ModelError(
            f"{file.path} uses the text-splitting rule {name[:40]!r}, which is not known; give the model's tokenizer.json with --tokenizer."
        )
    patterns, nfc, whole_words, bos = SPLITS[name]
    pieces = _pieces(file)
    tokenizer = {
        "version": "1.0",
        "added_tokens": added_tokens(pieces, normalized=False),
        "normalizer": {"type": "NFC"} if nfc else None,
        "pre_tokenizer": _pre_tokenizer(patterns),
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": vocabulary(pieces), "merges": _merges(file), "ignore_merges": whole_words},
    }
    return tokenizer, bos


def _pre_tokenizer(patterns: tuple[str, ...]) -> dict[str, Any]:
    splits = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in patterns
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {"type": "Sequence", "pretokenizers": [*splits, byte_level]}


def _merges(file: GGUFFile) -> list[str]:
    """Pairs separated by a space, which tokenizer.json allows, too: byte-level tokens contain no space."""
    pairs: list[str] = _listed(file, "merges", str)
    if not pairs or any(pair.count(" ") != 1 for pair in pairs):
        raise file.damaged(f"{PREFIX}merges holds {len(pairs)} entries, not all of them pairs")
    return pairs


_KINDS: Mapping[str, Callable[[GGUFFile], tuple[dict[str, Any], bool]]] = {"llama": _sentencepiece, "gpt2": _byte_level}


# --- SentencePiece

SPACE = "▁"


class PieceType(IntEnum):
    """Numbered as in SentencePiece and GGUF."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class Piece(NamedTuple):
    """One entry of a vocabulary (a tuple, because there may be a quarter of a million)."""

    text: str
    score: float
    type: int


def added_tokens(pieces: Sequence[Piece], *, normalized: bool) -> list[dict[str, Any]]:
    """Pieces that are matched in a text before anything else: control and unknown ones as special tokens, user-defined
    ones as plain."""
    special = (PieceType.CONTROL, PieceType.UNKNOWN)
    return [
        {
            "id": index,
            "content": piece.text,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": normalized and piece.type not in special,
            "special": piece.type in special,
        }
        for index, piece in enumerate(pieces)
        if piece.text and (piece.type in special or piece.type == PieceType.USER_DEFINED)
    ]


def vocabulary(pieces: Sequence[Piece]) -> dict[str, int]:
    """Of equal texts, the first one's id."""
    vocab: dict[str, int] = {}
    for index, piece in enumerate(pieces):
        vocab.setdefault(piece.text, index)
    return vocab


def bpe_tokenizer(pieces: Sequence[Piece], *, add_space_prefix: bool) -> dict[str, Any]:
    """tokenizer.json of SentencePiece's BPE: the adjacent pair whose union has the highest score is merged first, the
    leftmost of equals."""
    vocab = vocabulary(pieces)
    unknown = next((piece.text for piece in pieces if piece.type == PieceType.UNKNOWN), None)
    prepend = [{"type": "Prepend", "prepend": SPACE}] if add_space_prefix else []
    return {
        "version": "1.0",
        "added_tokens": added_tokens(pieces, normalized=not add_space_prefix),
        "normalizer": {
            "type": "Sequence",
            "normalizers": [*prepend, {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}],
        },
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": _decoder(strip_prefix=add_space_prefix),
        "model": {
            "type": "BPE",
            "unk_token": unknown,
            "fuse_unk": True,
            "byte_fallback": any(piece.type == PieceType.BYTE for piece in pieces),
            "vocab": vocab,
            "merges": merges_by_score(pieces, vocab),
        },
    }


def _decoder(*, strip_prefix: bool) -> dict[str, Any]:
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if strip_prefix else []
    replace = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    return {"type": "Sequence", "decoders": [replace, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]}


def merges_by_score(pieces: Sequence[Piece], vocab: dict[str, int]) -> list[tuple[str, str]]:
    """Every way to build a piece from two others, best piece first.

    To SentencePiece, all ways to build the same piece are equal, and it takes the leftmost in the text; here each has
    its own rank. Where every piece can be built from better ones, as in trained vocabularies, their order makes no
    difference (tests check this).
    """
    mergeable = (PieceType.NORMAL, PieceType.USER_DEFINED, PieceType.UNUSED)
    ranked = sorted(
        (piece for piece in pieces if piece.type in mergeable and len(piece.text) > 1), key=lambda piece: -piece.score
    )
    merges: list[tuple[str, str]] = []
    for piece in ranked:
        text = piece.text
        for cut in range(1, len(text)):
            if text[:cut] in vocab and text[cut:] in vocab:
                merges.append((text[:cut], text[cut:]))
    return merges
