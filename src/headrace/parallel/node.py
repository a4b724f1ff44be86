"""A host that has only ranks, ``headrace serve … --node-rank 1``: they are started here, and speak to node 0
themselves; this process tells it when one has ended, and ends with it.

What lives here: that. What may not: how hosts meet (rendezvous.py), what a rank does (follower.py).
"""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from headrace.config import EngineConfig, ServerConfig
from headrace.engine.resolve import find_source
from headrace.errors import EngineDead
from headrace.parallel import frames
from headrace.parallel.ranks import END_SECONDS, KEY_VARIABLE, device_of, ended
from headrace.parallel.rendezvous import JOIN_SECONDS, Place, called, join_master, read_secret, versions
from headrace.processes.child import start
from headrace.processes.messages import BadFrame, Unpacker, pack, says
from headrace.processes.seal import Seal

_LOOK_SECONDS, _BEAT_SECONDS = 0.2, 1.0
_OWN_WORDS_SECONDS = 0.4  # for a rank that has failed to be heard before its end is


@dataclass
class Node:
    """``number``: which it is; ``ranks``: those that it has. ``stop``: why it should end, once it should."""

    config: EngineConfig
    place: Place
    number: int
    ranks: Sequence[int]
    model: str
    stop: Callable[[], str] = lambda: ""
    came: bool = False
    _children: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)

    def run(self) -> None:
        """Until node 0 says that all is over. Raises ConfigError where they do not fit together, EngineDead where one
        of them all is lost; no rank is left afterwards."""
        whole = frames.Join(self.number, versions=versions(), model=self.model, config=self.config)
        sock, key = join_master(self.place, lambda _: whole, time.monotonic() + JOIN_SECONDS)
        self.came = True
        try:
            for at, rank in enumerate(self.ranks):
                self._begin(at, rank)
            self._watch(sock, Seal(key, first=False, count=1))
        except (OSError, BadFrame) as error:
            raise EngineDead(f"Node 0 at {self.place} is gone ({error}); this node ends with it.") from error
        finally:
            for child in self._children.values():
                child.kill()
                child.wait()
            sock.close()

    def _begin(self, at: int, rank: int) -> None:
        """Its connection is its standard input."""
        sock, key = join_master(self.place, lambda address: frames.Join(self.number, rank, address), time.monotonic())
        with sock:
            self._children[rank] = start("headrace.parallel.follower", sock, {**device_of(at), KEY_VARIABLE: key.hex()})

    def _watch(self, sock: socket.socket, seal: Seal) -> None:
        def tell(report: frames.Report) -> None:
            sock.sendall(seal.sealed(pack(report)))

        words, beaten, noticed = Unpacker(frames.Close | frames.Failed, opened=seal.opened), 0.0, 0.0
        while True:
            if says(sock, _LOOK_SECONDS):
                if not (data := sock.recv(2**16)):
                    raise EngineDead(f"Node 0 at {self.place} is gone; this node ends with it.")
                for word in words.feed(data):
                    if isinstance(word, frames.Close):
                        return self._wait()
                    raise EngineDead(word.message)
            if (now := time.monotonic()) - beaten >= _BEAT_SECONDS:
                tell(frames.Beat())
                beaten = now
            if why := self.stop():
                tell(frames.Failed("", f"{called(self.config.device, self.number)} {why}"))
                raise EngineDead(f"This node {why}.")
            gone = next((rank for rank, child in self._children.items() if child.poll() is not None), None)
            if gone is not None and not noticed:
                noticed = now
            elif gone is not None and now - noticed > _OWN_WORDS_SECONDS:
                child = self._children[gone]
                how = f"(process {child.pid} on {sock.getsockname()[0]}) {ended(child.returncode)}"
                tell(frames.Failed("", f"{called(self.config.device, self.number, gone)} {how}"))
                noticed = float("inf")

    def _wait(self) -> None:
        end = time.monotonic() + END_SECONDS
        for child in self._children.values():
            with suppress(subprocess.TimeoutExpired):
                child.wait(max(0.0, end - time.monotonic()))


def serve_node(config: EngineConfig, server: ServerConfig) -> int:
    """The process; with --supervise it comes again when it was lost. Returns the exit status. Raises ConfigError."""
    device = config.device
    place = Place(device.master_addr, device.master_port, read_secret(device))
    ranks = range(device.node_rank * device.ranks_here, (device.node_rank + 1) * device.ranks_here)
    source, stop = find_source(config), _Signals(server.shutdown_timeout)
    while True:
        node = Node(config, place, device.node_rank, ranks, source.fingerprint, stop)
        _say(f"node {device.node_rank} of {device.nnodes} has ranks {', '.join(map(str, ranks))} and joins {place}.")
        try:
            node.run()
            return 0
        except EngineDead as error:
            _say(error.message)
            if not server.supervise or stop():
                return 1


def _say(line: str) -> None:
    print(f"headrace: {line}", file=sys.stderr, flush=True)


class _Signals:
    """What a signal means: node 0 gets as long as its requests may, to end this node with itself; then, or with the
    second, this one ends all."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._end, self._name = seconds, float("inf"), ""
        for kind in (signal.SIGTERM, signal.SIGINT):
            signal.signal(kind, self._come)

    def __call__(self) -> str:
        return f"was ended by {self._name}" if time.monotonic() >= self._end else ""

    def _come(self, number: int, frame: Any) -> None:
        first = not self._name
        self._name = signal.Signals(number).name
        self._end = time.monotonic() + self._seconds * first
        if first:
            _say(f"waits up to {self._seconds:g} s for node 0 to end; a second signal ends all nodes now.")
