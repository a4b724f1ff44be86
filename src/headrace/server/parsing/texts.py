"""Calls whose argument is a text: custom tools', which clients get without the JSON around it.

What lives here: the text in a call's arguments. What may not: tools as clients give them (server/tools.py).
"""

from __future__ import annotations

import json
import re

INPUT = "input"  # the one parameter
_BEGIN = re.compile(r'\{\s*"input"\s*:\s*"')
_MOST_BEGIN = 64  # characters
# Characters of a JSON string whose meaning is certain: no escape that is not there in full, no half of a pair.
_PAIR = r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_CERTAIN = re.compile(rf'(?:[^"\\]|\\["\\/bfnrt]|\\u(?![dD][89abAB])[0-9a-fA-F]{{4}}|{_PAIR})*')
_MAY_PAIR = re.compile(r"\\u[0-9a-fA-F]{0,4}|\\u[0-9a-fA-F]{4}\\(?:u[0-9a-fA-F]{0,3})?")  # more may come of it
_ESCAPE = 6  # characters of one that has a number


class CustomText:
    """The text in arguments that come in pieces. Arguments of another form are given as they are."""

    __slots__ = ("_held", "_state")

    def __init__(self) -> None:
        self._held = ""
        self._state = "before"

    def push(self, piece: str) -> str:
        self._held += piece
        if self._state == "before":
            self._begin()
        if self._state == "text":
            return self._take()
        given = self._held if self._state == "other" else ""
        if self._state != "before":
            self._held = ""
        return given

    def _begin(self) -> None:
        if begun := _BEGIN.match(self._held):
            self._state, self._held = "text", self._held[begun.end() :]
        elif len(self._held) > _MOST_BEGIN or self._held.endswith("}"):
            self._state = "other"

    def _take(self) -> str:
        out = ""
        while True:
            certain = _CERTAIN.match(self._held)
            assert certain is not None, "it matches nothing, too"
            out += str(json.loads(f'"{certain[0]}"', strict=False))
            self._held = self._held[certain.end() :]
            if self._held.startswith('"'):
                self._state, self._held = "after", ""
            elif self._held.startswith("\\u") and not _MAY_PAIR.fullmatch(self._held):
                self._held = "\\ufffd" + self._held[_ESCAPE:]  # half a pair, alone
                continue
            return out.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
