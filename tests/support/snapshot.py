"""What a server holds at one moment, to be held against a later one; and the canary, a request whose answer must never
change.

What lives here: measuring from outside (/proc, /metrics, ``ss``-like tables) and comparing. What may not: causing
anything.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from tests.support.serving import Server

MEMORY_SLACK = 4 << 20  # bytes in which allocators may differ


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Integer fields are equal at rest. ``memory``: RssAnon + VmSwap in bytes, of the front end and of each child."""

    running: int
    waiting: int
    used_blocks: float  # share of the KV blocks in use
    series: int  # of /metrics
    fds: int
    threads: int
    children: int
    sockets: int  # that listen
    memory: tuple[int, ...]

    def differences(self, later: Snapshot, slack: int = MEMORY_SLACK) -> dict[str, tuple[Any, Any]]:
        """Fields that are not as they were; memory counts when it has grown by more than ``slack``."""
        pairs = {each.name: (getattr(self, each.name), getattr(later, each.name)) for each in fields(self)}
        before, after = pairs.pop("memory")
        if len(before) != len(after) or any(new > old + slack for old, new in zip(before, after, strict=True)):
            pairs["memory"] = (before, after)
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def take(server: Server, headers: dict[str, str] | None = None) -> Snapshot:
    page = server.ask("GET", "/metrics", headers=headers).body.decode()
    pids = [server.process.pid, *server.children()]
    return Snapshot(
        running=int(metric(page, "vllm:num_requests_running")),
        waiting=int(metric(page, "vllm:num_requests_waiting")),
        used_blocks=metric(page, "vllm:kv_cache_usage_perc"),
        series=sum(not line.startswith("#") for line in page.splitlines()),
        fds=sum(_count(f"/proc/{pid}/fd") for pid in pids),
        threads=sum(_count(f"/proc/{pid}/task") for pid in pids),
        children=len(pids) - 1,
        sockets=len(listening(pids)),
        memory=tuple(private_bytes(pid) for pid in pids),
    )


def metric(page: str, name: str, labels: str = "") -> float:
    """The value of one series; ``labels`` is a part of its label text."""
    for line in page.splitlines():
        if line.startswith(name) and line[len(name) : len(name) + 1] in ("{", " ") and labels in line:
            return float(line.rsplit(" ", 1)[1])
    raise AssertionError(f"no series {name} with {labels!r}")


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one process. ``private``: RssAnon + VmSwap; ``proportional``: Pss, with its share of what others map
    too."""

    private: int
    proportional: int
    dirty: int


def memory_of(pid: int) -> Memory:
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    proportional, dirty = (
        int(found[1]) << 10 if (found := re.search(rf"^{name}:\s+(\d+)", rollup, re.M)) else 0
        for name in ("Pss", "Private_Dirty")
    )
    return Memory(private_bytes(pid), proportional, dirty)


def private_bytes(pid: int) -> int:
    """Memory that is this process's alone, swapped out or not."""
    status = Path(f"/proc/{pid}/status").read_text()
    return sum(
        int(found[1]) << 10 for name in ("RssAnon", "VmSwap") if (found := re.search(rf"{name}:\s+(\d+)", status))
    )


def _count(folder: str) -> int:
    return len(os.listdir(folder))


def listening(pids: list[int]) -> list[str]:
    """Addresses on which these processes listen: ``tcp 0100007F:1F90`` or ``unix /path``."""
    inodes = {inode for pid in pids for inode in _socket_inodes(pid)}
    found = []
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and words[9] in inodes:
                found.append(f"{name} {words[1]}")
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        words = line.split()
        if int(words[3], 16) & 0x10000 and words[6] in inodes:  # __SO_ACCEPTCON
            found.append(f"unix {words[7] if len(words) > 7 else ''}")
    return sorted(found)


def names_of_sockets(pids: list[int]) -> list[str]:
    """Under which somebody else could reach these processes' Unix sockets, listening or not."""
    inodes = {inode for pid in pids for inode in _socket_inodes(pid)}
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return sorted(words[7] for words in lines if len(words) > 7 and words[6] in inodes)


def _socket_inodes(pid: int) -> Iterator[str]:
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            found = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(entry))
            if found:
                yield found[1]


def assert_back(server: Server, before: Snapshot, *, seconds: float = 2.0, slack: int = MEMORY_SLACK) -> float:
    """Waits until everything is as it was; returns how long that took, and fails after ``seconds``."""
    begun = time.monotonic()
    while True:
        changed = before.differences(take(server), slack)
        if not changed:
            return time.monotonic() - begun
        assert time.monotonic() - begun < seconds, f"not as before after {seconds} s: {changed}"
        time.sleep(0.05)


def at_rest(server: Server, seconds: float = 10.0) -> Snapshot:
    """A snapshot that the next one equals."""
    before, end = take(server), time.monotonic() + seconds
    while changed := before.differences(now := take(server)):
        assert time.monotonic() < end, f"it does not come to rest within {seconds} s: {changed}"
        before = now
        time.sleep(0.05)
    return now


CANARY = {
    "prompt": "the canary sings",
    "max_tokens": 12,
    "temperature": 0,
    "ignore_eos": True,
    "return_token_ids": True,
}


@contextlib.contextmanager
def canary(server: Server, *, every: float = 0.5, refusals: bool = False) -> Iterator[threading.Lock]:
    """A fixed greedy request again and again while the block runs: its tokens stay what they were. ``refusals``: 429 is
    no failure.

    Whoever holds the lock has silence: the canary's own connection is in nobody's snapshot.
    """
    golden = server.ask("POST", "/v1/completions", CANARY).json["choices"][0]["token_ids"]
    wrong: list[Any] = []
    over, voice = threading.Event(), threading.Lock()

    def sing() -> None:
        while not over.wait(every):
            try:
                with voice:
                    answer = server.ask("POST", "/v1/completions", CANARY)
            except OSError as error:
                wrong.append(error)
                continue
            if not (refusals and answer.status == 429) and (
                answer.status != 200 or answer.json["choices"][0]["token_ids"] != golden
            ):
                wrong.append(answer)

    thread = threading.Thread(target=sing, daemon=True)
    thread.start()
    try:
        yield voice
    finally:
        over.set()
        thread.join(30)
    assert not wrong, f"the canary's answer changed {len(wrong)} times: {wrong[0]}"
    assert server.ask("POST", "/v1/completions", CANARY).json["choices"][0]["token_ids"] == golden
