"""Token ids as users write them, checked and packed at C speed: the first step of a batch waits for half a million of them.

What lives here: packing. What may not: errors and their words (inputs.py), numpy (front ends need not load it).
"""

from __future__ import annotations

import sys
from array import array
from operator import countOf
from typing import Any

_HIGHEST = 3 if sys.byteorder == "little" else 0  # of the four bytes of an id


def try_pack(ids: list[Any] | tuple[Any, ...]) -> array[int] | None:
    """The ids, if each of them is an ``int`` of 32 bits and nothing that only behaves like one (a bool, another library's integer, a float)."""
    if countOf(map(type, ids), int) != len(ids):
        return None
    try:
        packed = array("I", ids).tobytes()  # three times as quick as array("i", ids), which asks for each by a format
    except OverflowError:
        return _try_pack_signed(ids)
    return array("i", packed) if packed[_HIGHEST::4].isascii() else None  # else some id takes the bit that is for the sign


def _try_pack_signed(ids: list[int] | tuple[int, ...]) -> array[int] | None:
    try:
        return array("i", ids)
    except OverflowError:
        return None
