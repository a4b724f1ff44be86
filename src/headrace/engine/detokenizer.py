"""Token ids to text, a few at a time: text that was given out never changes, and no character is ever split; and stop
strings in it.

What lives here: the bytes or piece behind each id, one incremental decoder a kind of tokenizer, whose concatenated
output is the definition of ``decode``, and the matcher of stop strings. What may not: requests, encoding, chat
templates.

Three kinds, by the decoder in tokenizer.json:
  bytes    ids are byte strings (GPT-2's byte-level BPE and its descendants): a table and UTF-8's own incremental
  decoder.
  pieces   ids are texts with a mark for the space, or single bytes <0xNN> (SentencePiece): runs of bytes wait for their
  end.
  window   anything else: decode a short window twice and give out the difference.

The stop string that is *complete first* wins (of those that complete at the same character the longest), so the answer
does not depend on how the text was cut into pieces. Text is held back only while it is the beginning of a stop string:
the held length is always the longest suffix that is a prefix of one, kept by a Knuth-Morris-Pratt state per string
(Knuth, Morris, Pratt 1977), so the cost a character does not depend on how long the strings are.
"""

from __future__ import annotations

import codecs
import re
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

MAX_BYTE_RUN = 64  # bytes held back before a run of byte tokens is given out up to its last whole character
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE_MARK = "▁"


class IncrementalDecoder(Protocol):
    """``push`` gives the text that is certain by now, ``flush`` what was held back; then the decoder is as new."""

    def push(self, ids: Sequence[int]) -> str: ...

    def flush(self) -> str: ...


def _byte_characters() -> dict[str, int]:
    """GPT-2's printable stand-ins: bytes that print stand for themselves, the others follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    return table | {chr(0x100 + offset): byte for offset, byte in enumerate(others)}


_BYTE_OF = _byte_characters()


def bytes_of_token(token: str) -> bytes:
    """A byte-level token's bytes; a token with any other character (an added one) is its own UTF-8."""
    try:
        return bytes([_BYTE_OF[character] for character in token])
    except KeyError:
        return token.encode("utf-8", "replace")


class ByteDecoder:
    """Byte-level BPE. ``table[id]`` is the id's bytes, empty for a token to be skipped."""

    def __init__(self, table: Mapping[int, bytes]) -> None:
        self._table = table
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Sequence[int]) -> str:
        table = self._table
        if len(ids) == 1:
            return self._utf8.decode(table[ids[0]])
        return self._utf8.decode(b"".join([table[token] for token in ids]))

    def flush(self) -> str:
        text = self._utf8.decode(b"", True)
        self._utf8.reset()
        return text


class PieceDecoder:
    """SentencePiece. ``table[id]`` is a text, or an int for a single byte; None is skipped.

    Bytes wait until their run ends, because the reference decoder replaces every byte of a run that is not valid as a
    whole. A run longer than MAX_BYTE_RUN is given out by whole characters instead of being held for ever.
    """

    def __init__(self, table: Mapping[int, str | int | None], strip_left: int, drop_first_marks: bool) -> None:
        self._table = table
        self._strip_left = strip_left
        self._drop_first_marks = drop_first_marks
        self._restart()

    def _restart(self) -> None:
        self._run = bytearray()
        self._to_strip = self._strip_left
        self._first = self._drop_first_marks

    def push(self, ids: Sequence[int]) -> str:
        parts: list[str] = []
        for token in ids:
            piece = self._table[token]
            if isinstance(piece, int):
                parts.append(self._push_byte(piece))
            elif piece is not None:
                if self._run:
                    parts.append(self._end_run())
                parts.append(self._text(piece))
        return self._strip("".join(parts))

    def _text(self, piece: str) -> str:
        if self._first:
            self._first = False
            return piece.replace(_SPACE_MARK, "")
        return piece.replace(_SPACE_MARK, " ")

    def _push_byte(self, byte: int) -> str:
        self._run.append(byte)
        self._first = False
        if len(self._run) <= MAX_BYTE_RUN:
            return ""
        whole = len(self._run) - _incomplete_tail(self._run)
        text = _run_text(self._run[:whole])
        del self._run[:whole]
        return text

    def _end_run(self) -> str:
        text = _run_text(self._run)
        self._run.clear()
        return text

    def _strip(self, text: str) -> str:
        """Takes up to ``strip_left`` spaces off the front of the whole text, wherever the pieces end."""
        while self._to_strip and text:
            if not text.startswith(" "):
                self._to_strip = 0
                break
            text = text[1:]
            self._to_strip -= 1
        return text

    def flush(self) -> str:
        text = self._strip(self._end_run())
        self._restart()
        return text


def _run_text(run: bytes | bytearray) -> str:
    try:
        return run.decode("utf-8")
    except UnicodeDecodeError:
        return "\ufffd" * len(run)


def _incomplete_tail(run: bytes | bytearray) -> int:
    """How many bytes at the end are the beginning of a character that could still become whole."""
    for back in range(1, min(3, len(run)) + 1):
        byte = run[-back]
        if byte >= 0xC0:
            needed = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return back if back < needed else 0
        if byte < 0x80:
            return 0
    return 0


class WindowDecoder:
    """Any decoder whose text at one place depends on a few ids before it: decodes a window with and without the new
    ids.

    ``table[id]`` is None for an id that says nothing (skipped, or without a token): a window of such ids would have no
    context.
    """

    def __init__(self, decode: Callable[[list[int]], str], table: Mapping[int, object], context: int = 6) -> None:
        self._decode = decode
        self._table = table
        self._context = context
        self._restart()

    def _restart(self) -> None:
        self._ids: list[int] = []
        self._given = 0  # how many of the window's ids have been given out

    def push(self, ids: Sequence[int]) -> str:
        self._ids.extend([token for token in ids if self._table[token] is not None])
        return self._advance(final=False)

    def flush(self) -> str:
        text = self._advance(final=True)
        self._restart()
        return text

    def _advance(self, *, final: bool) -> str:
        before = self._decode(self._ids[: self._given])
        after = self._decode(self._ids)
        held = after.endswith("\ufffd") and len(self._ids) - self._given < MAX_BYTE_RUN
        if not after.startswith(before) or (held and not final):
            return after[len(before) :] if final else ""
        surplus = max(0, len(self._ids) - self._context)
        self._given = len(self._ids) - surplus
        del self._ids[:surplus]
        return after[len(before) :]


@dataclass(frozen=True, slots=True)
class PieceRules:
    """What a SentencePiece-like decoder does besides replacing marks."""

    byte_fallback: bool
    strip_left: int = 0
    drop_first_marks: bool = False


def piece_rules(decoder: dict[str, Any] | None) -> PieceRules | None:
    """The rules of a decoder that PieceDecoder can stand for; None for any other."""
    if decoder is None:
        return None
    if decoder.get("type") == "Metaspace" and decoder.get("replacement") == _SPACE_MARK:
        return PieceRules(False, drop_first_marks=decoder.get("prepend_scheme", "always") != "never")
    steps = decoder.get("decoders", []) if decoder.get("type") == "Sequence" else []
    return _sequence_rules([(step.get("type"), step) for step in steps])


def _sequence_rules(steps: list[tuple[Any, dict[str, Any]]]) -> PieceRules | None:
    """Replace(▁→space), ByteFallback, Fuse, then perhaps Strip: as converted Llama, Mistral, Gemma and Phi tokenizers
    have it."""
    if [kind for kind, _ in steps[:3]] != ["Replace", "ByteFallback", "Fuse"] or len(steps) > 4:
        return None
    replace = steps[0][1]
    if replace.get("pattern") != {"String": _SPACE_MARK} or replace.get("content") != " ":
        return None
    if len(steps) == 3:
        return PieceRules(True)
    kind, strip = steps[3]
    if kind != "Strip" or strip.get("content") != " " or strip.get("stop") != 0:
        return None
    return PieceRules(True, strip_left=int(strip.get("start", 0)))


def is_byte_level(decoder: dict[str, Any] | None) -> bool:
    if decoder is None:
        return False
    steps = decoder.get("decoders", []) if decoder.get("type") == "Sequence" else [decoder]
    return len(steps) == 1 and steps[0].get("type") == "ByteLevel"


def piece_of_token(token: str, rules: PieceRules) -> str | int:
    match = _BYTE_TOKEN.fullmatch(token) if rules.byte_fallback else None
    return int(match[1], 16) if match else token


# --- stop strings


def _failure_links(word: str) -> array[int]:
    """links[i] = length of the longest proper prefix of ``word`` that ends at word[i]."""
    links = array("i", bytes(4 * len(word)))
    matched = 0
    for i in range(1, len(word)):
        while matched and word[i] != word[matched]:
            matched = links[matched - 1]
        matched += word[i] == word[matched]
        links[i] = matched
    return links


class StopMatcher:
    """Feeds on text, gives back what may be shown, and says when a stop string is complete."""

    __slots__ = ("_firsts", "_held", "_include", "_links", "_matched", "_words")

    def __init__(self, words: tuple[str, ...], include: bool) -> None:
        self._words = words
        self._include = include
        self._links: list[array[int]] | None = None  # made when a first character turns up
        self._firsts = frozenset(word[0] for word in words)
        self._matched = [0] * len(words)
        self._held = ""

    def push(self, text: str, armed: bool) -> tuple[str, str | None]:
        """``(text to show, the stop string that is complete or None)``. Not ``armed``: matches that end in ``text`` do
        not count."""
        if not self._held and self._firsts.isdisjoint(text):
            return text, None  # nothing has begun, and nothing begins here
        pending = self._held + text
        shown = len(self._held) if self._include else 0  # with the stop string included, nothing is ever held back
        for position, char in enumerate(text, len(self._held) + 1):
            word = self._advance(char)
            if word is not None and armed:
                return pending[shown : position if self._include else position - len(word)], word
        keep = len(pending) - max(self._matched)
        self._held = pending[keep:]
        return pending[shown : None if self._include else keep], None

    def flush(self) -> str:
        """The text ended without a stop string: what was held back is text after all."""
        return "" if self._include else self._held

    def _advance(self, char: str) -> str | None:
        """One character further in every string; the longest one that is complete now."""
        if self._links is None:
            self._links = [_failure_links(word) for word in self._words]
        complete: str | None = None
        for i, word in enumerate(self._words):
            matched, links = self._matched[i], self._links[i]
            while matched and word[matched] != char:
                matched = links[matched - 1]
            matched += word[matched] == char
            if matched == len(word):
                matched = links[matched - 1]
                if complete is None or len(word) > len(complete):
                    complete = word
            self._matched[i] = matched
        return complete
