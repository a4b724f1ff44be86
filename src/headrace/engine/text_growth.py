"""How much longer the parts of a tokenizer.json may make a text, judged before any text goes through them.

What lives here: one bound and its checks. What may not: tokenising (tokenizer.py).
"""

from __future__ import annotations

import base64
import json
import re
import struct
from collections.abc import Iterator
from typing import Any

import tokenizers

from headrace.errors import ModelError

MAX_GROWTH = 256  # times, in bytes; normal forms and the usual replacements of a space stay below 100
MAX_ADDED = 1 << 12  # bytes that a part may put around a text

# Only these normalisers can multiply. A name in escapes is looked at as well: ASCII is never written so.
_SUSPECT = re.compile(r'"type"\s*:\s*"(?:Replace|Precompiled|Prepend)"')
_ESCAPED = re.compile(r"\\u00[2-7]")
# the most that one character grows
_FORMS = {"NFKC": 11, "NFKD": 11, "NFC": 3, "NFD": 3, "Lowercase": 3, "BertNormalizer": 9, "ByteLevel": 2}


def check_normalizer(tokenizer_json: str, origin: str) -> None:
    """Before the library reads the file, and sends its added tokens through it. Raises ModelError."""
    if not _SUSPECT.search(tokenizer_json) and not _ESCAPED.search(tokenizer_json):
        return  # it costs a large vocabulary half a second to be looked at in Python
    try:
        value = json.loads(tokenizer_json)
    except (ValueError, RecursionError):
        return  # the library says what is wrong
    _check("normalizer", value.get("normalizer") if isinstance(value, dict) else None, origin)


def check_other_parts(backend: tokenizers.Tokenizer, origin: str) -> None:
    """Those that see a text only later. Raises ModelError."""
    for name in ("pre_tokenizer", "decoder", "post_processor"):
        part = getattr(backend, name)
        if part is not None:
            _check(name, json.loads(part.__getstate__()), origin)


def _check(name: str, value: Any, origin: str) -> None:
    """Raises ModelError where a short text could become one that fills the memory."""
    growth = 1
    for part in _parts(value):
        growth *= _growth(part)
        if growth > MAX_GROWTH:
            raise ModelError(
                f"the {name} of {origin} can make a text more than {MAX_GROWTH} times as long, which no tokenizer needs; use another tokenizer."
            )


def _parts(value: Any) -> Iterator[dict[str, Any]]:
    """Those of a sequence one by one, however deep they are nested (the library reads no deeper than 128 levels)."""
    waiting = [value]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            yield part
            for name in ("normalizers", "pretokenizers", "decoders", "processors"):
                waiting += _list(part.get(name))


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _growth(part: dict[str, Any]) -> int:
    kind = part.get("type")
    if kind == "Replace":
        pattern, content = part.get("pattern"), _size(part.get("content"))
        plain = _size(pattern.get("String")) if isinstance(pattern, dict) else 0
        return max(1, -(-content // plain) if plain else content + 1)
    if kind == "Prepend":
        return 1 if _size(part.get("prepend")) <= MAX_ADDED else MAX_GROWTH + 1
    if kind == "Precompiled":
        return _longest_entry(part.get("precompiled_charsmap"))
    if kind == "TemplateProcessing":
        forms = (_list(part.get(name)) for name in ("single", "pair"))
        return max(1, *(sum("Sequence" in item for item in each if isinstance(item, dict)) for each in forms))
    return _FORMS.get(kind, 1) if isinstance(kind, str) else 1


def _size(text: Any) -> int:
    return len(text.encode("utf-8", "replace")) if isinstance(text, str) else 0


def _longest_entry(charsmap: Any) -> int:
    """SentencePiece's table: a size, a trie of that size, then the texts that characters become, each ended by a
    NUL."""
    try:
        data = base64.b64decode(charsmap or "")
        texts = data[4 + struct.unpack("<I", data[:4])[0] :]
    except (ValueError, TypeError, struct.error):
        return 1  # the library refuses it
    return max(map(len, texts.split(b"\0")), default=1) or 1
