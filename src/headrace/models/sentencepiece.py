"""Converts a SentencePiece ``tokenizer.model`` to a tokenizer.json, for checkpoints that have nothing else.

What lives here: reading the few fields needed of that protocol buffer. What may not: torch, other uses of protocol
buffers.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from headrace.errors import ModelError
from headrace.models.source import refuse_lfs_pointer
from headrace.models.spm_vocab import Piece, PieceType, bpe_tokenizer

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
