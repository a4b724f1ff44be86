"""The first rank's end, as another rank sees it."""

from __future__ import annotations

import fcntl
import resource
import socket

import pytest

from headrace.parallel import follower, frames
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


def test_garbage_is_collected_only_while_there_is_nothing_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    collected = list[int]()
    monkeypatch.setattr(follower, "IDLE_SECONDS", 0.01)
    monkeypatch.setattr(follower, "freeze_start", lambda: (collected.append(1), theirs.sendall(b"x")))
    first = First(ours)
    theirs.sendall(b"order")
    assert first._received() == b"order" and not collected
    assert first._received() == b"x" and collected == [1]


def test_a_process_with_many_open_files_hears_the_first_rank() -> None:
    """select() takes no number above 1,023."""
    least = 1024
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] <= least + 8:
        pytest.skip("so many files cannot be open here")
    ours, theirs = socket.socketpair()
    with ours, theirs, socket.socket(fileno=fcntl.fcntl(ours, fcntl.F_DUPFD, least)) as high:
        theirs.sendall(b"order")
        assert high.fileno() >= least and First(high)._received() == b"order"
