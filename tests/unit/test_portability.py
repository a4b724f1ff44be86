"""What stands in for Linux's own calls where they are missing. (Whole programs without them:
tests/engine/test_elsewhere.py.)"""

from __future__ import annotations

import os
import resource
import subprocess
import sys

import pytest

from headrace import portability
from headrace.server.exposition import Counters


def test_without_anonymous_memory_front_ends_share_a_file_without_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create", raising=False)
    counters = Counters.create(2)
    status = os.fstat(counters.fd)
    assert (
        status.st_nlink == 0 and status.st_blocks * 512 >= status.st_size > 0
    )  # allocated: a full disk cannot kill whoever counts
    counters.pages[1].live = 3
    assert Counters.open(os.dup(counters.fd), 2).live == 3


def test_a_limit_that_the_system_does_not_take_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(kind: int, limits: tuple[int, int]) -> None:
        raise ValueError("current limit exceeds maximum limit")

    monkeypatch.setattr(resource, "setrlimit", refuse)
    assert not portability.limit(resource.RLIMIT_AS, 2**30)


def test_a_limit_is_never_raised_above_the_hard_one() -> None:
    program = (
        "import resource; from headrace.portability import limit; resource.setrlimit(resource.RLIMIT_NOFILE, (50, 60));"
        "print(limit(resource.RLIMIT_NOFILE, 1000), resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    assert (
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
        == "True (60, 60)\n"
    )


def test_all_cpus_count_where_the_open_ones_are_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert portability.open_cpus() == list(range(os.cpu_count() or 1))
