"""Converts a SentencePiece vocabulary to a tokenizer.json: pieces with scores become BPE merges with ranks.

What lives here: that conversion, for pieces from GGUF metadata (gguf_vocab.py) or a tokenizer.model (sentencepiece.py).
What may not: reading files, torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple

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
