"""The first rank's end, as another rank sees it."""

from __future__ import annotations

import socket

import pytest

from headrace.parallel import frames
from headrace.parallel.follower import First, FirstGone


@pytest.mark.parametrize("unread", [False, True], ids=["", "with words unread"])
def test_a_first_rank_that_is_gone_is_no_failure_of_this_one(unread: bool) -> None:
    """One that is killed before it has read what was told leaves a reset in place of an end."""
    ours, theirs = socket.socketpair()
    first = First(ours)
    if unread:
        first.tell(frames.Beat())
    theirs.close()
    with ours, pytest.raises(FirstGone):
        first.follow(lambda order: None)
