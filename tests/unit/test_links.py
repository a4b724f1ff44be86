"""The engine's sockets and the front ends' shared numbers: who is behind, gone or hostile costs nobody else
anything."""

from __future__ import annotations

import asyncio
import os
import re
import resource
import socket
import time
from collections.abc import Iterator

import pytest

from headrace.engine import connection as frames
from headrace.engine import loop
from headrace.engine.loop import Left, Link, Links, ParentGone
from headrace.processes.child import RestartBackoff
from headrace.processes.messages import Unpacker, pack
from headrace.request import SequenceOutput
from headrace.server.connection import Acceptor
from headrace.server.exposition import CounterPage, Counters, ServerMetrics, Watch

GUEST = 3


class Guests:
    """Links to a parent and to one more front end; the other ends are plain sockets."""

    def __init__(self) -> None:
        (self.parent, ours), (door, their_door), (self.guest, guest) = (socket.socketpair() for _ in range(3))
        self.links = Links(Link(ours, frames.Command), their_door)
        with guest, door:
            socket.send_fds(door, [b"."], [guest.fileno()])
            self.links.attach(GUEST, pack(frames.Beat(0, "idle", 0.0, 0.0)))
        assert Unpacker(frames.Event).feed(self.guest.recv(4096)).__next__() == frames.Beat(0, "idle", 0.0, 0.0)


@pytest.fixture
def guests() -> Iterator[Guests]:
    made = Guests()
    yield made
    made.parent.close()
    made.guest.close()


def output(serial: int, number: int, tokens: int = 1) -> SequenceOutput:
    return SequenceOutput((serial << frames.SERIAL_SHIFT) + number, 0, (7,) * tokens)


def received(sock: socket.socket) -> list[SequenceOutput]:
    sock.settimeout(2)
    (frame,) = Unpacker(frames.Event).feed(sock.recv(1 << 20))
    return list(frames.unpack_step(frame))


def test_each_gets_its_own_rows_and_rows_of_the_gone_are_named(guests: Guests) -> None:
    unwanted = guests.links.send_step([output(GUEST, 1), output(0, 1), output(9, 4), output(GUEST, 2)])
    assert received(guests.parent) == [output(0, 1)] and received(guests.guest) == [output(GUEST, 1), output(GUEST, 2)]
    assert set(unwanted) == {output(9, 4).request_id}


def said(guests: Guests, data: bytes) -> list[object]:
    guests.guest.sendall(data)
    return [frame for link, frame in guests.links.wait() if link.serial == GUEST]


@pytest.mark.parametrize(
    "data",
    [
        pack(frames.Shutdown()),  # the parent's word alone
        pack(frames.Attach(5)),
        pack(frames.Abort(1)),  # another's request
        pack(frames.Finish((GUEST + 1) << frames.SERIAL_SHIFT, 0, 1)),
        b"\x03\x00\x00\x00abc",
        b"\xff\xff\xff\xff",
    ],
)
def test_a_front_end_that_says_what_it_may_not_is_cut_off_alone(guests: Guests, data: bytes) -> None:
    assert said(guests, pack(frames.Abort((GUEST << frames.SERIAL_SHIFT) + 1))) == [
        frames.Abort((GUEST << frames.SERIAL_SHIFT) + 1)
    ]
    assert said(guests, data) == [Left()]
    guests.guest.settimeout(2)
    while guests.guest.recv(4096):
        pass
    guests.parent.sendall(pack(frames.AskStats(1)))
    assert [frame for _, frame in guests.links.wait()] == [frames.AskStats(1)]


def test_a_front_end_for_whom_no_descriptor_is_free_costs_the_engine_nothing(guests: Guests) -> None:
    (one, other), (door, their_door) = socket.socketpair(), socket.socketpair()
    guests.links._door = their_door
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with one, other, door, their_door:
        socket.send_fds(door, [b"."], [other.fileno()])
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
        try:
            guests.links.attach(GUEST + 1, b"")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        other.close()
        assert one.recv(1) == b""
    guests.links.send_step([output(GUEST, 1)])
    assert received(guests.guest) == [output(GUEST, 1)]


def test_the_parents_end_is_the_end(guests: Guests) -> None:
    guests.parent.close()
    with pytest.raises(ParentGone):
        guests.links.wait()


def test_a_reader_that_stops_is_waited_for_no_longer_than_a_moment_and_misses_nothing(
    guests: Guests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "STALLED_SECONDS", 0.1)
    begun, steps = time.perf_counter(), 400
    for number in range(steps):
        guests.links.send_step([output(GUEST, number, 1000)])
    assert time.perf_counter() - begun < 2.0
    guests.links.send_step([output(0, 1)])
    assert received(guests.parent) == [output(0, 1)]
    unpacker, rows = Unpacker(frames.Event), list[int]()
    guests.guest.settimeout(0.05)
    while len(rows) < steps:
        for frame in unpacker.feed(guests.guest.recv(1 << 20)):
            rows += [out.request_id & 0xFFFF for out in frames.unpack_step(frame)]
        guests.links._flush()
    assert rows == list(range(steps))


def test_a_reader_that_owes_too_much_has_left(guests: Guests, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "STALLED_SECONDS", 0.01)
    monkeypatch.setattr(loop, "MAX_OWED", 1 << 20)
    for number in range(1000):
        guests.links.send_step([output(GUEST, number, 2000)])
    assert [frame for _, frame in guests.links.poll()] == [Left()]


# --- shared numbers


def test_counters_are_sums_that_outlive_whoever_counted() -> None:
    counters = Counters.create(2)
    one, two = (ServerMetrics(["/a"], page) for page in counters.pages)
    one.count_answer("/a", 200)
    one.observe("inter_token_latency_seconds", 0.02)
    two.observe("inter_token_latency_seconds", 0.5)
    two.totals.add("generation_tokens_total", 7)
    counters.pages[0].live = 3
    counters.pages[0].vacate()
    assert os.readlink(f"/proc/self/fd/{counters.fd}").startswith("/memfd:")  # a full disk would kill whoever counts
    other = Counters.open(os.dup(counters.fd), 2)  # another process's view
    again = ServerMetrics(["/a"], other.pages[0])  # the next at the same place counts on
    again.count_answer("/a", 200)
    total = again.summed(other.pages)
    assert total.answers["/a", "2xx"] == 2 and total.totals["generation_tokens_total"] == 7 and counters.live == 0
    gaps = total.histograms["inter_token_latency_seconds"]
    assert gaps.count == 2 and gaps.total == pytest.approx(0.52)


def test_the_wait_between_lives_doubles_and_has_an_end() -> None:
    lives, waits = RestartBackoff(), []
    for _ in range(1200):
        lives.begin()
        assert re.fullmatch(r"signal 9 \(SIGKILL\) after 0\.\d s", lives.end(-9))
        waits.append(lives.wait)
    assert waits[:5] == [0.25, 0.5, 1.0, 2.0, 2.0] and waits[-1] == 2.0
    lives._began -= 61
    lives.end(0)
    assert (lives.short, lives.wait) == (1, 0.25)


def test_places_are_those_of_all() -> None:
    counters = Counters.create(2)
    one, two = counters.pages
    assert (
        counters.try_hold(one, 3, 4)
        and not counters.try_hold(two, 2, 4)
        and counters.try_hold(two, 1, 4)
        and not counters.try_hold(one, 1, 4)
    )
    assert (one.live, two.live) == (3, 1)


def test_a_loop_that_turns_is_told_from_one_that_does_not() -> None:
    page = CounterPage()
    watch = Watch(page, 3)
    assert [watch.hung() for _ in range(3)] == [False, False, True]
    page.ints[2] += 1
    assert not watch.hung() and not watch.hung()


@pytest.mark.parametrize("late", [0.0, 0.01])
def test_connections_are_dealt_out_evenly(late: float) -> None:
    """``late``: seconds in which the second gets no core, while a burst waits."""

    async def accept() -> list[int]:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen(64)
            clients = [socket.create_connection(listener.getsockname()) for _ in range(24)]
            listener.setblocking(False)
            pages, taken = [CounterPage(), CounterPage()], [0, 0]

            class Taken(asyncio.Protocol):
                def __init__(self, place: int) -> None:
                    taken[place] += 1
                    pages[place].connections += 1

            doors = [listener.dup(), listener.dup()]  # as two processes have them
            acceptors = [
                Acceptor(doors[place], lambda place=place: Taken(place), pages[place], pages) for place in (0, 1)
            ]  # type: ignore[misc]
            pages[1].up = True
            acceptors[0].start()
            asyncio.get_running_loop().call_later(late, acceptors[1].start)
            for _ in range(500):  # hundredths of a second
                await asyncio.sleep(0.01)
                if sum(taken) == len(clients):
                    break
            for acceptor in acceptors:
                acceptor.close()
            for door in doors:
                door.close()
            for client in clients:
                client.close()
            return taken

    first, second = asyncio.run(accept())
    assert first + second == 24 and abs(first - second) <= 4
