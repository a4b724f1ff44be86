"""Token ids as users write them, checked and packed at C speed: the first step of a batch waits for half a million of them.

What lives here: packing. What may not: errors and their words (inputs.py), numpy (front ends need not load it).
"""

from __future__ import annotations

import marshal
from array import array
from typing import Any

_VERSION = 2  # of marshal's format: later ones refer back to objects that came before
_HEADER = 5  # bytes: a letter for the kind of list, and how many items follow
_EACH = 5  # of an int of 32 bits: the letter i and four bytes, the lowest first
_INT = b"i"


def try_pack(ids: list[Any] | tuple[Any, ...]) -> array[int] | None:
    """The ids, if each of them is an ``int`` of 32 bits and nothing that only behaves like one (a bool, another library's integer, a float).

    ``marshal`` writes the value of each item behind a letter for its exact type, and looks at no item twice. If the letter at every fifth byte
    is that of an int, so is every item: the first begins behind the header, takes five bytes if its letter is that, and the next begins there.
    """
    try:
        written = marshal.dumps(ids, _VERSION)
    except ValueError:  # something that it does not write
        return None
    count = len(ids)
    if len(written) != _HEADER + _EACH * count or written[_HEADER::_EACH] != _INT * count:
        return None
    low_first = bytearray(4 * count)
    for place in range(4):
        low_first[place::4] = written[_HEADER + 1 + place :: _EACH]
    packed = array("i", bytes(low_first))
    if _HIGH_FIRST:
        packed.byteswap()
    return packed


_HIGH_FIRST = array("i", b"\1\0\0\0")[0] != 1
