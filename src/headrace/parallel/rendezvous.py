"""How the hosts of one model meet: node 0 waits at a port of one interface, each other node knocks there, once for
itself and once for each of its ranks, and both show that they know the secret.

Each end says its version and a nonce. The connection's key is made of both nonces with the secret as the key, and
everything from then on is sealed with it (processes/seal.py). The knocker's first message says who it is, and is
answered with a welcome or with what is wrong. Its port is closed once all are there.

What lives here: the secret, both ends of that, who has yet to come, and what nodes must have in common. What may not:
ranks' processes (ranks.py, node.py).
"""

from __future__ import annotations

import importlib.metadata
import ipaddress
import logging
import os
import platform
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from hashlib import blake2b
from pathlib import Path
from secrets import token_bytes
from typing import TYPE_CHECKING

from headrace.config import ENGINE_PARTS, DeviceConfig, EngineConfig
from headrace.errors import ConfigError
from headrace.parallel import frames
from headrace.processes.messages import BadFrame, pack, receive
from headrace.processes.seal import Seal

if TYPE_CHECKING:
    from headrace.parallel.on_ray import Actors

log = logging.getLogger(__name__)

SECRET_VARIABLE = "HEADRACE_NODE_SECRET"
NODE = -1  # in place of a rank's number
JOIN_SECONDS = 300.0  # for all nodes to come
LOST_SECONDS = 30  # without an acknowledgement by the other host of what was sent
_GREETING_SECONDS = 10.0
_AGAIN_SECONDS = 0.5
_SAID_SECONDS = 30.0
_LEAST_SECRET = 16  # bytes
_MOST_GREETING = 2**16  # bytes, of what is not authenticated yet
_MOST_JOIN = 2**22  # bytes, with a config; known to be authentic once they are there
_OWN = {"node_rank", "node_secret_file", "trace"}  # fields that may differ from node to node


@dataclass(frozen=True, slots=True)
class Place:
    """Where node 0 waits."""

    address: str
    port: int
    secret: bytes

    def __str__(self) -> str:
        return f"{self.address}:{self.port}"


def called(device: DeviceConfig, node: int, rank: int = NODE) -> str:
    """A node, or one of its ranks, for people. With Ray a node is the actor of a rank."""
    if device.distributed_executor_backend == "ray":
        return f"the actor of rank {node}" if rank == NODE else f"rank {rank}"
    return f"node {node}" if rank == NODE else f"rank {rank} of node {node}"


def read_secret(config: DeviceConfig) -> bytes:
    """What all nodes know, from the file or the environment. Raises ConfigError."""
    path, text = config.node_secret_file, os.environ.get(SECRET_VARIABLE, "")
    if path is not None:
        try:
            text = Path(path).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--node-secret-file {path} cannot be read ({error}); give a file of text.") from error
    secret = text.strip().encode()
    if len(secret) < _LEAST_SECRET:
        found = f"has {len(secret)} bytes" if secret else "is missing"
        raise ConfigError(
            f"--nnodes is {config.nnodes}, but the secret that all nodes share {found}. Give each node the same of at least "
            f"{_LEAST_SECRET} bytes (openssl rand -hex 32) in {SECRET_VARIABLE} or --node-secret-file."
        )
    return secret


def versions() -> dict[str, str]:
    """What must be equal on all nodes beside Headrace itself: who computes, and who connects."""
    return {"torch": importlib.metadata.version("torch"), "Python": ".".join(platform.python_version_tuple()[:2])}


def differences(ours: EngineConfig, theirs: EngineConfig, node: int) -> Iterator[str]:
    for name, part in ENGINE_PARTS.items():
        for each in fields(part):
            here, there = (getattr(getattr(config, name), each.name) for config in (ours, theirs))
            if here != there and each.name not in _OWN:
                yield f"{each.name} is {here!r} on node 0 and {there!r} on node {node}"


def _greet(sock: socket.socket, secret: bytes, *, first: bool) -> bytes:
    """The connection's key. Raises ConfigError for another version, BadFrame for somebody else."""
    from headrace import __version__

    mine = token_bytes(32)
    sock.sendall(pack(frames.Hello(__version__, mine)))
    there = receive(sock, frames.Hello, most=_MOST_GREETING)
    if there.version != __version__:
        raise ConfigError(
            f"Headrace is {there.version} there and {__version__} on this host. Install the same on all nodes."
        )
    nonces = mine + there.nonce if first else there.nonce + mine
    return blake2b(nonces, key=blake2b(secret).digest(), digest_size=32).digest()


def _without_delay(sock: socket.socket) -> socket.socket:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # a host that is gone acknowledges nothing, and says nothing either
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, LOST_SECONDS * 1000)
    return sock


class Listener:
    """Node 0's port. ``come`` is told, from threads, who has come and knows the secret: with a socket and a seal that
    are its own from then on. ``last``: why somebody was turned away, for people."""

    def __init__(self, place: Place, come: Callable[[frames.Join, socket.socket, Seal], None]) -> None:
        """Raises ConfigError where it cannot listen."""
        self._secret, self._come, self.last, self._closed = place.secret, come, "", False
        try:
            family, *_, where = socket.getaddrinfo(place.address, place.port, type=socket.SOCK_STREAM)[0]
            if ipaddress.ip_address(where[0]).is_unspecified:
                raise ConfigError(
                    f"--master-addr is {place.address}, which is every interface; give the address of one."
                )
            self._sock = socket.create_server(where[:2], family=family)
        except OSError as error:
            why = str(error.strerror).partition(" (")[0]
            raise ConfigError(
                f"Node 0 cannot listen at {place} ({why}). Give --master-addr an address of this host that the other "
                "nodes reach, and --master-port a free port."
            ) from error
        self.address, self.port = self._sock.getsockname()[:2]
        self._sock.settimeout(_AGAIN_SECONDS)  # so that it notices that it is closed
        threading.Thread(target=self._wait, name="headrace-listener", daemon=True).start()

    def close(self) -> None:
        self._closed = True
        self._sock.close()

    def _wait(self) -> None:
        while not self._closed:
            with suppress(OSError):
                sock, (address, *_) = self._sock.accept()
                threading.Thread(target=self._receive, args=(sock, address), daemon=True).start()

    def _receive(self, sock: socket.socket, address: str) -> None:
        try:
            sock.settimeout(_GREETING_SECONDS)
            seal = Seal(_greet(sock, self._secret, first=True), first=True)
            join = receive(sock, frames.Join, seal.opened, _MOST_JOIN)
            sock.settimeout(None)
            self._come(join, _without_delay(sock), seal)
        except (ConfigError, BadFrame, OSError) as error:
            why = "it does not know the secret" if isinstance(error, BadFrame) else str(error)
            self.last = f"{address} was turned away: {why}"
            log.warning("%s", self.last)
            sock.close()


Enter = Callable[[frames.Join, str, socket.socket, Seal], Callable[[], None]]


class RemoteRanks:
    """All that node 0's process does not start itself: nodes and their ranks, or with Ray actors. None, on one host.

    ``model``: what nodes must have in common beside their configs. ``changed``: held while ``enter`` takes one that has
    come, by a name for people; what that returns is called behind it, without. ``lose`` ends all, as Ranks._lose.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: str,
        changed: threading.Condition,
        enter: Enter,
        lose: Callable[[str, str], None],
    ) -> None:
        self._config, self._model, self._changed = config, model, changed
        self._enter, self._lose = enter, lose
        device = config.device
        here, size = device.ranks_here, device.num_ranks
        nodes = range(1, size // here)
        self.awaited = {(node, NODE) for node in nodes} | {(rank // here, rank) for rank in range(here, size)}
        self._over = False  # they are waited for no more
        self._listener: Listener | None = None
        self._actors: Actors | None = None

    def open(self) -> None:
        """From now on they can come. Raises ConfigError where they could not."""
        device = self._config.device
        if self.awaited and device.distributed_executor_backend == "ray":
            from headrace.parallel.on_ray import Actors

            self._actors = Actors(self._config)
            place = Place(self._actors.address, 0, token_bytes(32))
            self._listener = Listener(place, self._come)
            self._actors.begin(
                replace(place, port=self._listener.port), self._model, lambda message: self._lose(message, "")
            )
        elif self.awaited:
            self._listener = Listener(Place(device.master_addr, device.master_port, read_secret(device)), self._come)

    @property
    def address(self) -> str:
        """Of the interface over which all meet."""
        return "127.0.0.1" if self._listener is None else str(self._listener.address)

    def _come(self, join: frames.Join, sock: socket.socket, seal: Seal) -> None:
        """From a thread of the door's."""
        host = sock.getpeername()[0]
        name = f"{called(self._config.device, join.node, join.rank)} ({host})"
        with self._changed:
            problem = self._problem(join, name)
            if not problem:
                self.awaited.remove((join.node, join.rank))
                welcome = self._enter(join, name, sock, seal)
        if problem:
            sock.sendall(seal.sealed(pack(frames.Refused(problem))))
            sock.close()
            return
        welcome()
        with self._changed:
            self._changed.notify_all()

    def _problem(self, join: frames.Join, name: str) -> str:
        """Of whoever has come and knows the secret; "" if there is none. What differs is the end of all."""
        if self._over:
            return "Node 0 ends. Start all nodes again."
        if found := self._differences(join, name):
            problem = f"{name} does not fit: {'; '.join(found)}. Start all nodes with the same."
            self._lose(problem, "ConfigError")
            return problem
        if (join.node, join.rank) not in self.awaited:
            return f"{name} is one too many: it has come before. Give each host its own --node-rank."
        return ""

    def _differences(self, join: frames.Join, name: str) -> list[str]:
        if join.config is None:
            return []
        there = join.versions or {}
        found = [
            f"{part} is {mine} on node 0 and {there.get(part)} on node {join.node}"
            for part, mine in versions().items()
            if there.get(part) != mine
        ]
        found += differences(self._config, join.config, join.node)
        if not found and join.model != self._model:
            found = [f"the model's config or weight files on node {join.node} are not those of node 0"]
        return found

    def await_all(self) -> None:
        """Until they are there, or all has ended, as it does where one does not come."""
        if self._listener is None:
            return
        begun = said = time.monotonic()
        while True:
            with self._changed:
                if not self.awaited:
                    break
                nodes = sorted({node for node, _ in self.awaited})
                missing = ", ".join(called(self._config.device, node) for node in nodes)
                now, where = time.monotonic(), f"{self._listener.address}:{self._listener.port}"
                if now - begun > JOIN_SECONDS:
                    last = f" ({self._listener.last})" if self._listener.last else ""
                    self._lose(
                        f"{missing} did not come to {where} within {JOIN_SECONDS:g} s{last}. Start each node with the same "
                        "command and its own --node-rank, and see that it can reach this port.",
                        "ConfigError",
                    )
                    break
                elif now - said > _SAID_SECONDS:
                    said = now
                    log.info("waiting for %s, at %s", missing, where)
                self._changed.wait(1.0)
        self._listener.close()

    def give_up(self) -> None:
        """``changed`` is held."""
        self._over = True
        self.awaited.clear()

    def close(self) -> None:
        """Nobody comes any more."""
        with self._changed:
            self.give_up()
        if self._listener is not None:
            self._listener.close()

    def end(self) -> None:
        """What Ray has started."""
        if self._actors is not None:
            self._actors.close()


def join_master(place: Place, join: Callable[[str], frames.Join], end: float) -> tuple[socket.socket, bytes]:
    """A connection to node 0, which has made whoever knocks welcome, and its key; each way one message was sealed.
    ``join`` is told this end's address; ``end``: until when nobody needs to be there, by time.monotonic().

    Raises ConfigError for what is wrong here or there.
    """
    sock = _connect(place, end)
    try:
        try:
            key = _greet(sock, place.secret, first=False)
        except BadFrame as error:
            raise ConfigError(f"At {place} there is no node 0 that waits. Give all nodes the same port.") from error
        seal = Seal(key, first=False)
        sock.sendall(seal.sealed(pack(join(sock.getsockname()[0]))))
        try:
            reply = receive(sock, frames.Welcome | frames.Refused, seal.opened, most=_MOST_GREETING)  # type: ignore[arg-type]
        except BadFrame as error:
            raise ConfigError(
                f"Node 0 at {place} has another secret. Give all nodes the same in {SECRET_VARIABLE} or --node-secret-file."
            ) from error
        if isinstance(reply, frames.Refused):
            raise ConfigError(reply.message)
        sock.settimeout(None)
        return _without_delay(sock), key
    except OSError as error:
        sock.close()
        raise ConfigError(f"Node 0 at {place} did not answer ({error}). See what it says.") from error
    except BaseException:
        sock.close()
        raise


def _connect(place: Place, end: float) -> socket.socket:
    while True:
        try:
            return socket.create_connection((place.address, place.port), _GREETING_SECONDS)
        except OSError as error:
            if time.monotonic() > end:
                raise ConfigError(
                    f"Node 0 cannot be reached at {place} ({error}). Start it there with --node-rank 0, and see that the port is open."
                ) from error
        time.sleep(_AGAIN_SECONDS)
