"""Ids as users write them: packed only if each is an int of 32 bits and nothing that merely behaves like one."""

from __future__ import annotations

from array import array
from enum import IntEnum
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.engine.inputs import parse_prompt, try_pack
from headrace.errors import InvalidRequest


class Looks(int):
    """An int, but not only."""


class Named(IntEnum):
    SEVEN = 7


LEAST, MOST = -(2**31), 2**31 - 1
ODD = [
    True, False, None, 1.0, 2**31, LEAST - 1, 2**70, "7", b"i\0\0\0\0", b"\1\0\0\0", [1], (1,), {1: 1}, {1}, 1j, Looks(3), Named.SEVEN, object(),
    np.int32(5), np.int64(5), np.float32(1.0), np.bool_(True), np.array(3), np.array([1, 2]), memoryview(b"iiiii"), array("i", [1]), ..., "\ud800",
]  # fmt: skip


@given(st.lists(st.integers(LEAST, MOST)))
def test_ints_are_packed_as_they_stand(ids: list[int]) -> None:
    assert try_pack(ids) == try_pack(tuple(ids)) == array("i", ids)


@pytest.mark.parametrize("odd", ODD, ids=lambda odd: f"{type(odd).__name__}")
def test_anything_else_is_not_packed_and_is_refused(odd: Any) -> None:
    """Wherever it stands, and however many of them: five of one byte each are as long as one id."""
    for ids in ([odd], [1, odd], [odd, 1], [1, 2, odd, 3], [odd] * 5, [1, *[odd] * 5], [Ellipsis, odd, 105, 105]):
        assert try_pack(ids) is None
        with pytest.raises(InvalidRequest, match="prompt must be a list of token ids, integers of 32 bits"):
            parse_prompt(ids)


@given(
    st.lists(
        st.one_of(
            st.integers(LEAST, MOST), st.sampled_from([each for each in ODD if not isinstance(each, np.ndarray)])
        ),
        min_size=1,
    )
)
def test_packing_is_the_slow_check(ids: list[Any]) -> None:
    plain = all(type(each) is int and LEAST <= each <= MOST for each in ids)
    assert try_pack(ids) == (array("i", ids) if plain else None)


def test_a_list_that_holds_itself_is_refused() -> None:
    ids: list[Any] = [1]
    ids.append(ids)
    with pytest.raises(InvalidRequest):
        parse_prompt(ids)
