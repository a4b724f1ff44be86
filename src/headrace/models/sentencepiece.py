"""Converts a SentencePiece vocabulary to a tokenizer.json: pieces with scores become BPE merges with ranks.

What lives here: that conversion, for pieces from GGUF metadata (gguf_vocab.py) or a ``tokenizer.model``, of which the few
fields needed are read. What may not: torch, other uses of protocol buffers.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

from headrace.errors import ModelError
from headrace.models.files import refuse_lfs_pointer

MAX_MODEL_BYTES = 64 * 2**20
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_BPE = 2  # trainer_spec.model_type


def tokenizer_json_from_sentencepiece(file: Path, config: Mapping[str, Any], special: Mapping[str, Any]) -> str:
    """Raises ModelError for a damaged file and for models that are not plain BPE."""
    try:
        if file.stat().st_size > MAX_MODEL_BYTES:
            raise ModelError(
                f"{file} has {file.stat().st_size} bytes, over the limit of {MAX_MODEL_BYTES}; download it again."
            )
        data = file.read_bytes()
        refuse_lfs_pointer(file, data[:1024])
        model = _model(data)
    except OSError as error:
        raise ModelError(f"cannot read {file}: {error.strerror or error}. Check its permissions.") from error
    except (IndexError, struct.error, UnicodeDecodeError, ValueError) as error:
        raise ModelError(
            f"{file} is not a SentencePiece model or is damaged ({error}); download it again, or give a tokenizer.json."
        ) from error
    pieces, kind, charsmap, prefix = model
    if kind != _BPE or charsmap:
        raise ModelError(
            f"{file} is a SentencePiece model of a kind that needs its tokenizer.json (only plain BPE is read); add tokenizer.json."
        )
    return json.dumps(bpe_tokenizer(pieces, add_space_prefix=prefix))


def _model(data: bytes) -> tuple[list[Piece], int, bool, bool]:
    """(pieces, model type, whether text is normalized, whether a space is prepended to the text)."""
    pieces: list[Piece] = []
    kind, charsmap, prefix = 1, False, True
    for field, value in _fields(data):
        if field == 1:
            pieces.append(_piece(value))
        elif field == 2:
            kind = dict(_fields(value)).get(3, 1)
        elif field == 3:
            normalizer = dict(_fields(value))
            charsmap, prefix = bool(normalizer.get(2)), bool(normalizer.get(3, 1))
    if not pieces:
        raise ValueError("it holds no pieces")
    return pieces, kind, charsmap, prefix


def _piece(data: bytes) -> Piece:
    fields = dict(_fields(data))
    score = struct.unpack("<f", fields[2])[0] if 2 in fields else 0.0
    return Piece(fields.get(1, b"").decode("utf-8"), score, int(fields.get(3, PieceType.NORMAL)))


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """(field number, value): an int for a varint, otherwise its bytes."""
    if not isinstance(data, bytes):
        raise ValueError("a message is a number")
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        kind = tag & 7
        if kind == _VARINT:
            value, at = _varint(data, at)
            yield tag >> 3, value
            continue
        if kind == _BYTES:
            size, at = _varint(data, at)
        elif kind in (_FIXED32, _FIXED64):
            size = 4 if kind == _FIXED32 else 8
        else:
            raise ValueError(f"a field of kind {kind}")
        if size > len(data) - at:
            raise ValueError("a field ends beyond its message")
        yield tag >> 3, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise ValueError("a number is too long")


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
