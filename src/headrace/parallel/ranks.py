"""The other ranks' processes, as the first one has them: started, spoken to, watched, ended.

What lives here: that, and what becomes of all when one is lost. What may not: what the messages mean to an executor
(leader.py), devices (device.py), how those of other hosts are started (node.py) and come in (rendezvous.py).

A thread listens to all of them. A rank whose process ends, that fails by itself or falls silent is lost, and with it
all: the others are killed, so that whoever waits for them in a step need not any more, and whoever asks is told why.
"""

from __future__ import annotations

import logging
import os
import selectors
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace import errors
from headrace.config import EngineConfig
from headrace.errors import ConfigError, EngineDead, HeadraceError, StepLost
from headrace.parallel import frames
from headrace.parallel.context import check_context
from headrace.parallel.placement import held_experts
from headrace.parallel.rendezvous import NODE, RemoteRanks
from headrace.parallel.shares import share
from headrace.parallel.stages import staged
from headrace.processes.child import start
from headrace.processes.messages import BadFrame, Unpacker, pack
from headrace.processes.seal import Seal
from headrace.request import StepResult
from headrace.spec import DecoderSpec

if TYPE_CHECKING:
    from headrace.parallel.failover import Survivors

log = logging.getLogger(__name__)

STALL = 120  # seconds of a step in which no rank has met another: they wait for each other
SILENCE = 20  # seconds without a beat, counted in looks: a process that was stopped itself has missed nothing
ALONE_SECONDS = 1.5  # within which a step that failed on one rank has failed on the first, too
AGREE_SECONDS = 4.0  # for all to be where the first is, after a step that failed
AGAIN_SECONDS = 60.0  # where they have met again for that, and captured their steps
LAST_WORDS_SECONDS = 1.5  # for whoever waits to say it himself
END_SECONDS = 5.0
LOOK_SECONDS = 1.0
RENDEZVOUS_SECONDS = 15.0  # all are there already
NODE_WORDS_SECONDS = 2.0  # for a node to say how its rank has ended
KEY_VARIABLE = "HEADRACE_RANK_KEY"  # by which a rank of another host seals what it says
_RECEIVED = 2**16


@dataclass(slots=True)
class _Rank:
    """Or a node's own process, which has no number. ``process``: on this host; on another there is a ``seal``."""

    number: int
    name: str
    sock: socket.socket
    process: subprocess.Popen[bytes] | None = None
    seal: Seal | None = None
    address: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)  # of sending
    reports: Unpacker = field(init=False)
    said: list[frames.Report] = field(default_factory=list)  # and not asked for yet
    seen: dict[str, str] = field(default_factory=dict)  # marks of adapters, where it is elsewhere
    silent: int = 0  # looks
    comm_ops: int = 0

    def __post_init__(self) -> None:
        self.reports = Unpacker(frames.Report, opened=bytes if self.seal is None else self.seal.opened)

    def __str__(self) -> str:
        return self.name

    def tell(self, message: bytes) -> None:
        with self.lock:
            self.sock.sendall(message if self.seal is None else self.seal.sealed(message))

    def end(self, message: bytes) -> None:
        """At once: a process of this host is killed, another host's told why, as far as it listens."""
        if self.process is not None:
            self.process.kill()
            return
        with suppress(OSError):
            if self.number == NODE and self.seal is not None and self.lock.acquire(timeout=0.5):
                self.sock.send(self.seal.sealed(message), socket.MSG_DONTWAIT)
                self.lock.release()
        with suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)


def begin_ranks(
    config: EngineConfig, spec: DecoderSpec, model: str, mark: str, lost: Callable[[str], None] | None
) -> Ranks:
    """The processes of all ranks but this one, which import what they need while this one does. ``model``: by what other
    hosts know that they have the same. Raises ConfigError before anything is started where the model cannot be shared
    out, or other hosts could not come."""
    if config.device.node_rank:
        raise ConfigError(
            f"node_rank is {config.device.node_rank}, but the engine is on node 0; the other nodes run `headrace serve`."
        )
    check_context(spec, config)
    for stage in range(config.device.pipeline_parallel_size):
        part = staged(spec, config, stage)
        experts = held_experts(part, config.device, 0)
        if not config.device.expert_failover:
            share(part, config.device.tensor_parallel_size, experts)
    if config.device.pipeline_parallel_size > 1:  # what is sent queues behind nothing else; read with the context
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    return Ranks(config, model, mark, lost)


def ended(code: int) -> str:
    """How a process did, by what Popen says."""
    if code < 0:
        return f"was ended by signal {-code} ({signal.Signals(-code).name})"
    return f"ended with exit code {code}"


def files_mark(folder: str) -> str:
    """Of what an adapter's files hold, on whatever host; "" where they cannot be read."""
    digest = blake2b(digest_size=16)
    try:
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            with (Path(folder) / name).open("rb") as file:
                while data := file.read(2**20):
                    digest.update(data)
    except OSError:
        return ""
    return digest.hexdigest()


def device_of(number: int) -> dict[str, str]:
    """What a rank sees of this process's GPUs: one. Where there are fewer, leader.py says so."""
    named = [each.strip() for each in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if each.strip()]
    return {"CUDA_VISIBLE_DEVICES": named[number] if number < len(named) else str(number) if not named else ""}


class Ranks:
    """All but the first. ``lost`` is called, once, a moment after one has been: whoever waits in a step has been woken
    then.

    Methods raise what was said of the lost one: while they load, the error that it met; later EngineDead.
    """

    def __init__(self, config: EngineConfig, model: str, mark: str, lost: Callable[[str], None] | None) -> None:
        """Arguments as ``begin_ranks`` has them; ``mark`` as Begin has it."""
        self._config, self._model, self._mark = config, model, mark
        self._changed = threading.Condition()
        self._lost: HeadraceError | None = None
        self._on_loss = lost
        self._closing = False
        self._own_failures: set[int] = set()
        self._step: tuple[str, Callable[[], int]] | None = None  # that the first rank is in
        self._stalled = 0  # looks
        self._met: tuple[int, ...] = ()
        self._store: dict[str, bytes] = {}
        self._results: dict[int, StepResult] = {}  # of steps, from the last stage, and not asked for yet
        self.abort: Callable[[], None] = lambda: None
        self._nodes: list[_Rank] = []
        self._remote = RemoteRanks(config, model, self._changed, self._enter, self._lose)
        self._ranks: list[_Rank] = []  # another list where one is gone
        self._gone: list[_Rank] = []
        self.survivors: Survivors | None = None  # who may go on without one, once they have met
        self._selector = selectors.DefaultSelector()
        self._remote.open()
        for number in range(1, config.device.ranks_here):
            self._ranks.append(rank := self._begin(number))
            self._selector.register(rank.sock, selectors.EVENT_READ, rank)
        self._thread = threading.Thread(target=self._watch, name="headrace-ranks", daemon=True)
        self._thread.start()

    def _begin(self, number: int) -> _Rank:
        ours, theirs = socket.socketpair()
        with theirs:
            at = number // self._config.device.ranks_per_device
            process = start("headrace.parallel.follower", theirs, device_of(at))
        of = " of node 0" if self._config.device.nnodes > 1 else ""
        rank = _Rank(number, f"rank {number}{of} (process {process.pid})", ours, process)
        rank.tell(pack(frames.Begin(self._mark)))
        return rank

    def _enter(self, join: frames.Join, name: str, sock: socket.socket, seal: Seal) -> Callable[[], None]:
        """One of another host is one of all from now on; what welcomes it."""
        rank = _Rank(join.rank, name, sock, seal=seal, address=join.address)
        (self._nodes if join.rank == NODE else self._ranks).append(rank)

        def welcome() -> None:
            rank.tell(pack(frames.Welcome()))
            if join.rank != NODE:
                rank.tell(pack(frames.Begin(self._mark)))
            self._selector.register(sock, selectors.EVENT_READ, rank)  # an epoll takes it while the thread waits there

        return welcome

    # --- speaking

    def launch(self, config: EngineConfig) -> None:
        """``config`` is resolved. All nodes must come first."""
        self._remote.await_all()
        self.check()
        self._ranks.sort(key=lambda rank: rank.number)
        for rank in self._ranks:
            self._send(rank, pack(frames.Launch(config, rank.number)))

    def tell(self, message: bytes) -> None:
        """The same to all of them."""
        for rank in self._ranks:
            self._send(rank, message)

    def _send(self, rank: _Rank, message: bytes) -> None:
        self.check()
        try:
            rank.tell(message)
        except OSError:  # its end is heard, too
            if self.survivors is None:
                self.settle()
            self.check()

    def hear(self, kind: type[frames.Report], seconds: float = float("inf")) -> list[Any]:
        """What each says next, which is of this kind."""
        end = time.monotonic() + seconds
        with self._changed:
            while self._lost is None and not all(rank.said for rank in self._ranks):
                left = end - time.monotonic()
                if left <= 0:
                    late = ", ".join(str(rank) for rank in self._ranks if not rank.said)
                    self._lose(f"{late} did not come back from a failed step within {seconds:g} s")
                else:
                    self._changed.wait(min(left, 1.0))
            self.check()
            found = [rank.said.pop(0) for rank in self._ranks]
        assert all(isinstance(each, kind) for each in found), found
        return found

    def result(self, step_id: int) -> StepResult:
        """What the last stage has sampled, once it has."""
        with self._changed:
            while self._lost is None and step_id not in self._results:
                self._changed.wait(1.0)
            self.check()
            return self._results.pop(step_id)

    @property
    def addresses(self) -> tuple[str, ...]:
        """Of all ranks, on the interface over which they meet."""
        mine = self._remote.address
        return (mine, *(rank.address or mine for rank in self._ranks))

    def put(self, name: str, value: bytes) -> None:
        """In the store by which all find each other."""
        with self._changed:
            self._store[name] = value
            self._changed.notify_all()
        self.tell(pack(frames.Put(name, value)))

    def get(self, name: str, seconds: float | None = RENDEZVOUS_SECONDS) -> bytes:
        """None: however long a rank takes that is there."""
        with self._changed:
            self._changed.wait_for(lambda: self._lost is not None or name in self._store, seconds)
            self.check()
            if name not in self._store:
                raise EngineDead(f"ranks have not met within {RENDEZVOUS_SECONDS:g} s; see `headrace doctor`.")
            return self._store[name]

    @property
    def _elsewhere(self) -> list[_Rank]:
        return [rank for rank in self._ranks if rank.seal is not None]

    def forget_adapter(self, name: str) -> None:
        """It is to be read anew."""
        for rank in self._elsewhere:
            rank.seen.pop(name, None)

    def without_adapter(self, name: str, mark: Callable[[], str], seconds: float) -> str | None:
        """Those on other hosts whose files are not as they are here (``mark``); None: some have not said yet."""
        if not (others := self._elsewhere):
            return ""
        with self._changed:
            if not self._changed.wait_for(lambda: all(name in rank.seen for rank in others), seconds):
                return None
        here = mark()
        return ", ".join(str(rank) for rank in others if rank.seen[name] != here)

    @contextmanager
    def watched(self, step: str, comm_ops: Callable[[], int]) -> Iterator[None]:
        """While the first rank is in a step, ranks that wait for each other are lost. ``comm_ops``: its own."""
        self._step = step, comm_ops
        try:
            yield
        finally:
            self._step = None

    def check(self) -> None:
        if self._lost is not None:
            raise self._lost

    def settle(self, seconds: float = 2.0) -> str | None:
        """After something has gone wrong here: what was wrong with another, if that is heard in time. Raises StepLost
        where the others go on without that one."""
        with self._changed:
            self._changed.wait_for(lambda: self._lost is not None or self.fewer, seconds)
        self.check_step()
        return None if self._lost is None else self._lost.message

    @property
    def fewer(self) -> bool:
        """Whether one is gone, and the others have not met since."""
        return self.survivors is not None and self.survivors.broken

    def check_step(self) -> None:
        """Of what waited for a rank that is gone. Raises StepLost."""
        if self.fewer and self._lost is None:
            raise StepLost("A rank is gone; the others compute the step again.")

    def fail_too(self, step_id: int) -> None:
        """A step failed on the first rank."""
        with self._changed:
            self._own_failures.add(step_id)

    def agree(self, comm_ops: int, *, lost: bool) -> None:
        """Once the first has recovered and told all to: whether they are where it is. ``lost``: a rank was, and what
        failed was not the same on all."""
        found = self.hear(frames.Recovered, AGAIN_SECONDS if lost else AGREE_SECONDS)
        for rank, there in zip(self._ranks, found, strict=True):
            if there.comm_ops != comm_ops or (set(there.failed) != self._own_failures and not lost):
                self._lose(f"{rank} is not where the first is after a failed step")
        self._own_failures.clear()
        self.check()

    def close(self) -> None:
        """None of them is left afterwards."""
        with self._changed:
            self._closing = True
        self._remote.close()
        for rank in (*self._nodes, *self._ranks):
            with suppress(OSError):
                rank.tell(pack(frames.Close()))
        end = time.monotonic() + (0.0 if self._lost is not None else END_SECONDS)
        for rank in (*self._ranks, *self._gone):
            if rank.process is not None:
                with suppress(subprocess.TimeoutExpired):
                    rank.process.wait(max(0.0, end - time.monotonic()))
                rank.process.kill()
                rank.process.wait()
        self._thread.join(max(0.0, end - time.monotonic()))
        for rank in (*self._nodes, *self._ranks):
            rank.end(b"")
        self._thread.join()
        for rank in (*self._nodes, *self._ranks, *self._gone):
            rank.sock.close()
        self._selector.close()
        self._remote.end()

    # --- listening, in a thread of its own

    def _watch(self) -> None:
        looked = time.monotonic()
        while self._selector.get_map() or self._remote.awaited:
            for key, _ in self._selector.select(LOOK_SECONDS):
                if not self._listen(key.data):
                    self._selector.unregister(key.fileobj)
            if time.monotonic() - looked >= LOOK_SECONDS:
                looked = time.monotonic()
                self._look()

    def _listen(self, rank: _Rank) -> bool:
        """Whether there may be more to hear."""
        try:
            data = rank.sock.recv(_RECEIVED)
            if data:
                for report in rank.reports.feed(data):
                    self._take(rank, report)
        except (OSError, BadFrame):
            data = b""
        if not data and not self._closing:
            if rank.process is not None:
                self._lose(f"{rank} {self._end_of(rank.process)}", rank=rank)
            else:  # a node knows more of the end of its rank
                _later(0.0 if rank.number == NODE else NODE_WORDS_SECONDS, self._lose, f"{rank} closed its connection")
        return bool(data)

    def _take(self, rank: _Rank, report: frames.Report) -> None:
        rank.silent = 0
        if isinstance(report, frames.Failed):
            self._lose(report.message if rank.number == NODE else f"{rank}: {report.message}", report.kind, rank)
        elif isinstance(report, frames.Result):
            with self._changed:
                self._results[report.result.step_id] = report.result
                self._changed.notify_all()
        elif isinstance(report, frames.Seen):
            with self._changed:
                rank.seen[report.name] = report.mark
                self._changed.notify_all()
        elif isinstance(report, frames.Put):
            with suppress(HeadraceError):  # of one that is lost; it is heard elsewhere
                self.put(report.name, report.value)
        elif isinstance(report, frames.StepBroke):
            _later(ALONE_SECONDS, self._judge, rank, report)
        elif isinstance(report, frames.Beat):
            rank.comm_ops = report.comm_ops
        else:
            with self._changed:
                rank.said.append(report)
                self._changed.notify_all()

    def _judge(self, rank: _Rank, broke: frames.StepBroke) -> None:
        """A step that fails on all ranks alike can be recovered from; on one alone it has left the others waiting."""
        if broke.step_id not in self._own_failures and not self._closing:
            self._lose(f"{rank} failed in a step: {broke.message}", rank=rank)

    def _look(self) -> None:
        for rank in (*self._nodes, *self._ranks):
            rank.silent += 1
            if rank.silent > SILENCE and not self._closing:
                self._lose(f"{rank} has been silent for {SILENCE} s", rank=rank)
        self._look_at_step()

    def _look_at_step(self) -> None:
        """Ranks that do not compute the same meet at different places, and wait there for ever. (Looks, not seconds: a
        process that was stopped itself has missed nothing.)"""
        if (step := self._step) is None or self._closing:
            self._stalled = 0
            return
        met = (step[1](), *(rank.comm_ops for rank in self._ranks))
        self._stalled, self._met = (self._stalled + 1 if met == self._met else 0), met
        if self._stalled >= STALL:
            where = ", ".join(f"rank {number} {count}" for number, count in enumerate(met))
            self._lose(f"{step[0]} has not moved for {STALL} s; collectives so far: {where}")

    @staticmethod
    def _end_of(process: subprocess.Popen[bytes]) -> str:
        try:
            return ended(process.wait(1.0))
        except subprocess.TimeoutExpired:
            return "closed its connection"

    def _lose(self, message: str, kind: str = "", rank: _Rank | None = None) -> None:
        with self._changed:
            if self._lost is not None or self._closing or rank in self._gone:
                return
            if rank is not None and self.survivors is not None and self.survivors.can_lose(rank.number):
                return self._go_on(self.survivors, rank, message)
            error = getattr(errors, kind, None) if kind else None
            self._lost = (error or EngineDead)(
                message if error else f"{message}; all ranks end with it. Restart, and see `headrace doctor`."
            )
            self._remote.give_up()
            for rank in (*self._nodes, *self._ranks):
                rank.end(pack(frames.Failed("", self._lost.message)))
            self._changed.notify_all()
        log.error("%s", self._lost.message)
        _later(0.0, self.abort)  # which may have to wait itself
        if self._on_loss is not None:
            _later(LAST_WORDS_SECONDS, self._on_loss, self._lost.message)

    def _go_on(self, survivors: Survivors, rank: _Rank, message: str) -> None:
        """Without a rank whose experts others hold, too."""
        rank.end(b"")
        self._gone.append(rank)
        self._ranks = [each for each in self._ranks if each is not rank]
        told = survivors.without(rank.number)
        for each in self._ranks:
            with suppress(OSError):  # its end is heard, too
                each.tell(pack(told))
        survivors.lose(told)
        self._changed.notify_all()
        log.warning("%s; the others hold its experts and go on", message)


def _later(seconds: float, call: Callable[..., object], *arguments: object) -> None:
    timer = threading.Timer(seconds, call, arguments)
    timer.daemon = True
    timer.start()
