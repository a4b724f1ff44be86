"""The process of a rank that is not the first, ``python -m headrace.parallel.follower``: it does what the first one's
executor is told.

What lives here: its start, its orders, its end. What may not: the messages (frames.py), what a step computes (worker/).
"""

from __future__ import annotations

import gc
import itertools
import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.clock import RealClock
from headrace.engine.executor import LoadAdapter, Ticket
from headrace.errors import EngineDead, HeadraceError, ModelError, StepFailed
from headrace.observe.logs import configure_child
from headrace.parallel import frames
from headrace.parallel.ranks import KEY_VARIABLE, RENDEZVOUS_SECONDS, files_mark
from headrace.portability import ignore_terminal
from headrace.processes.frames import parent_socket
from headrace.processes.garbage import collect_now_and_then, freeze_start, no_collections
from headrace.processes.messages import BadFrame, Message, Unpacker, pack, receive, says
from headrace.processes.seal import Seal
from headrace.request import TokenMasks

if TYPE_CHECKING:
    from headrace.parallel.failover import Survivors
    from headrace.parallel.group import Peers
    from headrace.worker.executor import DeviceExecutor

log = logging.getLogger(__name__)

BEAT_SECONDS = 1.0
IDLE_SECONDS = 0.5  # without an order
NEWS_SECONDS = 2.0  # until it is known that a rank is gone without which others go on
_RECEIVED = 2**18  # bytes at once


class FirstGone(Exception):
    """Nobody is left to do anything for."""


class First:
    """The first rank, at the other end of the socket. ``seal``: where a network is in between."""

    def __init__(self, sock: socket.socket, seal: Seal | None = None) -> None:
        self._sock, self._seal = sock, seal
        self.is_elsewhere = seal is not None  # on another host
        self._lock = threading.Lock()
        self._opened = bytes if seal is None else seal.opened
        self._orders = Unpacker(frames.Order, opened=self._opened)
        self._store: dict[str, bytes] = {}
        self._come = threading.Condition()  # in the store, where a thread listens
        self._listens = False
        self.comm_ops: Callable[[], int] = lambda: 0

    def tell(self, report: frames.Report) -> None:
        """From any thread."""
        try:
            with self._lock:
                message = pack(report)
                self._sock.sendall(message if self._seal is None else self._seal.sealed(message))
        except OSError:
            raise FirstGone from None

    def beat_forever(self) -> None:
        """Ends the process where the first one's is gone, whatever this one is waiting for."""
        while True:
            time.sleep(BEAT_SECONDS)
            try:
                self.tell(frames.Beat(self.comm_ops()))
            except FirstGone:
                os._exit(1)

    def hear(self, kind: type[Message]) -> Message:
        """What comes next, which is of this kind."""
        return receive(self._sock, kind, self._opened)

    def put(self, name: str, value: bytes) -> None:
        self._store[name] = value
        self.tell(frames.Put(name, value))

    def get(self, name: str) -> bytes:
        """Once it has come."""
        with self._come:
            if self._listens and not self._come.wait_for(lambda: name in self._store, RENDEZVOUS_SECONDS):
                raise EngineDead(f"ranks have not met within {RENDEZVOUS_SECONDS:g} s.")
        while name not in self._store:
            come = self.hear(frames.Put)
            self._store[come.name] = come.value
        return self._store[name]

    def follow_beside(self, obey: Callable[[Any], None], lose: Callable[[frames.Gone], None]) -> None:
        """As ``follow``; a thread hears meanwhile who is gone, whatever this one waits for."""
        orders: queue.SimpleQueue[Any] = queue.SimpleQueue()

        def listen() -> None:
            try:
                self.follow(heard)
            except (FirstGone, BadFrame):
                orders.put(None)

        def heard(order: Any) -> None:
            if isinstance(order, frames.Gone):
                lose(order)
            elif isinstance(order, frames.Put):
                with self._come:
                    self._store[order.name] = order.value
                    self._come.notify_all()
            else:
                orders.put(order)

        self._listens = True
        threading.Thread(target=listen, daemon=True, name="listener").start()
        while (order := orders.get()) is not None:
            obey(order)
        raise FirstGone

    def follow(self, obey: Callable[[Any], None]) -> None:
        """Until there is nobody to follow, or ``obey`` raises."""
        for turn in itertools.count(1):
            if not (data := self._received()):
                break
            for order in self._orders.feed(data):
                obey(order)
            collect_now_and_then(turn)
        raise FirstGone

    def _received(self) -> bytes:
        """Nothing where the first one is gone: killed before it had read all that was told, it leaves a reset. What is
        garbage is collected while there is nothing to do: the others' devices would wait for it."""
        try:
            if not says(self._sock, IDLE_SECONDS):
                freeze_start()
            return self._sock.recv(_RECEIVED)
        except OSError:
            return b""


class Follower:
    """What each order does to this rank's executor."""

    def __init__(self, first: First, executor: DeviceExecutor, peers: Peers, reporter: Reporter | None) -> None:
        self._first, self._executor, self._peers = first, executor, peers
        self.survivors: Survivors | None = peers.experts
        self._reporter = reporter
        self._plans = frames.PlanUnpacker()
        self._failed: list[int] = []
        self._adapters: set[str] = set()  # that are there
        executor.on_failure = self._tell_failure
        self._does: dict[type, Callable[[Any], object]] = {
            frames.Put: lambda _: None,  # of other groups
            frames.Submit: self._submit,
            frames.Sample: self._sample,
            frames.Collect: self._collect,
            frames.Recover: self._recover,
            frames.Prepare: lambda _: executor.prepare(),
            frames.Control: self._control,
            frames.Close: self._close,
        }

    def obey(self, order: Any) -> None:
        self._does[type(order)](order)

    def _submit(self, order: frames.Submit) -> None:
        plan = self._plans.unpack(order)
        for _, name, _ in plan.adapters:
            self._await_adapter(name)
        ticket = self._executor.submit(plan)
        if self._reporter is not None and not plan.masked:
            self._reporter.expect(ticket)

    def _sample(self, order: frames.Sample) -> None:
        ticket = Ticket(order.step_id)
        self._executor.sample(ticket, TokenMasks(order.samples, order.words_each, order.words))
        if self._reporter is not None:
            self._reporter.expect(ticket)

    def _await_adapter(self, name: str) -> None:
        """The first rank has it; so must this one."""
        while name not in self._adapters:
            for outcome in self._executor.outcomes(1.0):
                if outcome.error is None:
                    self._adapters.add(outcome.name)
                elif outcome.name == name:
                    raise ModelError(outcome.error)

    def _collect(self, order: frames.Collect) -> None:
        with suppress(StepFailed):  # that has been told
            if self._reporter is None:
                self._executor.collect(Ticket(order.step_id))

    def _tell_failure(self, step_id: int, failure: StepFailed) -> None:
        self._failed.append(step_id)
        if self.survivors is not None and self.survivors.breaks(NEWS_SECONDS):
            return  # it is nobody's failure
        self._first.tell(frames.StepBroke(step_id, failure.message))

    def _recover(self, order: frames.Recover) -> None:
        self._executor.recover()
        self._first.tell(frames.Recovered(self._peers.stage_comm_ops, tuple(self._failed)))
        self._failed.clear()

    def _control(self, order: frames.Control) -> None:
        if order.load is not None and self._first.is_elsewhere:
            threading.Thread(target=self._say_mark, args=(order.load,), daemon=True, name="mark").start()
        for each in (order.load, order.drop, order.sleep, order.wake):
            if each is not None:
                self._executor.control(each)
        if order.drop is not None:
            self._adapters.discard(order.drop.name)

    def _say_mark(self, load: LoadAdapter) -> None:
        with suppress(FirstGone):  # which is heard elsewhere
            self._first.tell(frames.Seen(load.name, files_mark(load.folder)))

    def _close(self, order: frames.Close) -> None:
        self._executor.close()
        raise FirstGone


class Reporter:
    """Tells the first rank what the last stage has sampled, as soon as that is there: in a thread, for the next step may
    be computed meanwhile."""

    def __init__(self, first: First, executor: DeviceExecutor) -> None:
        self._first, self._executor = first, executor
        self._tickets: queue.SimpleQueue[Ticket] = queue.SimpleQueue()
        threading.Thread(target=self._report_forever, daemon=True, name="reporter").start()

    def expect(self, ticket: Ticket) -> None:
        self._tickets.put(ticket)

    def _report_forever(self) -> None:
        while True:
            with suppress(StepFailed):  # that has been told
                found = self._executor.collect(self._tickets.get())
                self._first.tell(frames.Result(replace(found, tokens=list(found.tokens), drafted=list(found.drafted))))


def _start(first: First, mark: str) -> Follower:
    from headrace.torch_environment import leave_out_compilers, prepare_for_torch
    from headrace.worker.head_start import Stages, begin_head_start

    prepare_for_torch()
    leave_out_compilers()
    stages = Stages(RealClock())
    with (begin_head_start(Path(mark)) if mark else None) or nullcontext() as head_start:
        with no_collections():
            from headrace.engine.resolve import find_source
            from headrace.models.families import spec_from_config
            from headrace.parallel.device import create_peers, device_here
            from headrace.parallel.group import Store
            from headrace.worker.executor import DeviceExecutor
            from headrace.worker.worker import create_executor

        stages.done("imports")
        launch = first.hear(frames.Launch)
        config, device = launch.config, launch.config.device
        first.tell(frames.Here(device_here(device.device)))
        place = first.hear(frames.Rendezvous)
        source = find_source(config)
        peers = create_peers(place, launch.rank, device, spec_from_config(source.config), Store(first.put, first.get))
        first.comm_ops = lambda: peers.comm_ops
        stages.done("ranks")
        executor, _ = create_executor(config, source, head_start, stages, peers=peers)
        assert isinstance(executor, DeviceExecutor)
        reports = peers.pipe is not None and launch.rank == (peers.pipe.stages - 1) * device.ranks_a_stage
        return Follower(first, executor, peers, Reporter(first, executor) if reports else None)


def main() -> None:
    """The first rank decides when it ends."""
    ignore_terminal()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    configure_child()
    if os.environ.get("HEADRACE_LOG_LEVEL") == "debug":
        logging.getLogger("headrace").setLevel(logging.DEBUG)  # else its own progress would be told once a rank
    key = os.environ.pop(KEY_VARIABLE, "")
    first = First(parent_socket(), Seal(bytes.fromhex(key), first=False, count=1) if key else None)
    try:
        begin = first.hear(frames.Begin)
        threading.Thread(target=first.beat_forever, daemon=True, name="pulse").start()
        try:
            follower = _start(first, begin.mark)
            freeze_start()
            gc.disable()  # from now on, First says when
            first.tell(frames.Ready())
            if follower.survivors is None:
                first.follow(follower.obey)
            else:
                first.follow_beside(follower.obey, follower.survivors.lose)
        except HeadraceError as error:
            first.tell(frames.Failed(type(error).__name__, error.message))
        except (FirstGone, BadFrame):
            raise
        except Exception as error:
            log.exception("this rank failed")
            first.tell(frames.Failed("", f"{type(error).__name__}: {error}"))
    except (FirstGone, BadFrame, OSError):
        pass
    sys.stderr.flush()
    os._exit(0)  # whatever still waits for another rank


if __name__ == "__main__":
    main()
