"""Several front ends of one engine and the parent that started them (household.py): what they tell and ask each other.

What lives here: the frames of the socket between parent and front end, one end of it, and the common answers as a front end gets
them. What may not: processes and their lives, HTTP, the engine's own socket.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, cast

from headrace.config import EngineConfig, ServerConfig
from headrace.engine.process import BadFrame, Frame, Unpacker, pack
from headrace.server.commons import Shown

ENGINE_GONE = 3  # the exit status of a front end that ends because the engine does not go on
ANSWER_SECONDS = 2.5  # that a front end waits for the parent's answer
PASSED_ON_SECONDS = 1.75  # that the parent waits for another front end's, which may wait one for the engine; less than who asks waits


class Launch(Frame):
    """To a front end's stdin: everything that it is. The descriptors are inherited."""

    engine: EngineConfig
    server: ServerConfig
    version: str
    number: int  # from 1: which place it takes; its page is the one before
    serial: int  # of this start: no other front end has it, before or after
    secret: bytes  # that tenants' names are made with
    created: int
    listener: int
    ledger: int
    control: int
    parent: int
    log_level: str


class Listening(Frame):
    """From a front end: the engine may come here."""

    address: str
    secret: bytes


class Ready(Frame):
    """It serves. ``lines`` are for the person who started the server."""

    lines: list[str]


class Warn(Frame):
    """For the person who started the server: from the first front end alone, they all would say the same."""

    line: str


class Failed(Frame):
    """It cannot start. ``kind`` is the class name of a HeadraceError."""

    kind: str
    message: str


class Go(Frame):
    """To a front end: the engine loads, and the model is on this machine."""


class Answer(Frame):
    number: int
    value: Any


class Question(Frame):
    number: int


class AskStats(Question):
    """The engine's newest numbers, from the parent."""


class AskDashboard(Question):
    """What is newer than these, from the parent."""

    sample: int
    step: int
    decision: int


class FindRequest(Question):
    """A request of this tenant: the parent passes it on to the other front ends."""

    name: str
    tenant: str


class ListRequests(Question):
    """The same, of all that run."""

    tenant: str


class FindResponse(Question):
    """A stored response of this tenant: its two texts."""

    name: str
    tenant: str


class DeleteResponse(Question):
    """The same, to be forgotten: whether there was one."""

    name: str
    tenant: str


FromFront = Listening | Ready | Warn | Failed | Answer | AskStats | AskDashboard | FindRequest | ListRequests | FindResponse | DeleteResponse
FromParent = Go | Answer | FindRequest | ListRequests | FindResponse | DeleteResponse

Respond = Callable[[Question], Awaitable[Any]]
Heard = Callable[[Any], None]


class Talk(asyncio.Protocol):
    """One end. ``respond`` answers questions, ``heard`` gets everything else, ``lost`` is told of the other's end."""

    def __init__(self, kinds: Any, respond: Respond, heard: Heard, lost: Callable[[], None]) -> None:
        self._unpacker = Unpacker(kinds)
        self._respond = respond
        self._heard = heard
        self._lost = lost
        self._transport: asyncio.Transport | None = None
        self._numbers = itertools.count()
        self._open: dict[int, asyncio.Future[Any]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports are no subclass of it

    def data_received(self, data: bytes) -> None:
        try:
            for frame in self._unpacker.feed(data):
                self._take(frame)
        except BadFrame:
            self.close()

    def _take(self, frame: Any) -> None:
        if isinstance(frame, Question):
            task = asyncio.get_running_loop().create_task(self._answer(frame))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        elif isinstance(frame, Answer):
            answer = self._open.get(frame.number)
            if answer is not None and not answer.done():
                answer.set_result(frame.value)
        else:
            self._heard(frame)

    async def _answer(self, question: Question) -> None:
        self.send(Answer(question.number, await self._respond(question)))

    def connection_lost(self, exc: Exception | None) -> None:
        for answer in self._open.values():
            answer.cancel()
        self._lost()

    def send(self, frame: Frame) -> None:
        """Dropped where nobody hears it any more."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(pack(frame))

    async def ask(self, question: Callable[[int], Question], seconds: float = ANSWER_SECONDS) -> Any:
        """None where no answer comes in time."""
        number = next(self._numbers)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._open[number] = answer
        try:
            self.send(question(number))
            await asyncio.wait((answer,), timeout=seconds)
            return answer.result() if answer.done() and not answer.cancelled() else None
        finally:
            del self._open[number]

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()


async def ask_all(talks: Iterable[Talk], question: Callable[[int], Question]) -> list[Any]:
    """Everybody's answers, while whoever asked still waits: one that says nothing has nothing to say."""
    return await asyncio.gather(*(talk.ask(question, PASSED_ON_SECONDS) for talk in talks))


class Together:
    """The common answers (commons.Commons) of one front end among several."""

    def __init__(self, parent: Talk) -> None:
        self._parent = parent
        self._last: Mapping[str, Any] = {}

    async def run(self) -> None:
        """The parent does."""

    async def engine_stats(self) -> Mapping[str, Any]:
        self._last = await self._parent.ask(AskStats) or self._last
        return self._last

    async def dashboard(self, sample: int, step: int, decision: int) -> Mapping[str, Any]:
        found: Mapping[str, Any] | None = await self._parent.ask(lambda number: AskDashboard(number, sample, step, decision))
        return found or {"num_blocks": 0, "totals": {}, "samples": [], "steps": [], "decisions": []}

    async def find_request(self, name: str, tenant: str) -> Shown | None:
        found: Shown | None = await self._parent.ask(lambda number: FindRequest(number, name, tenant))
        return found

    async def list_requests(self, tenant: str) -> Sequence[Shown]:
        found: Sequence[Shown] = await self._parent.ask(lambda number: ListRequests(number, tenant)) or ()
        return found

    async def find_response(self, name: str, tenant: str) -> tuple[bytes, bytes] | None:
        found: Sequence[bytes] | None = await self._parent.ask(lambda number: FindResponse(number, name, tenant))
        return None if found is None else (found[0], found[1])

    async def delete_response(self, name: str, tenant: str) -> bool:
        return bool(await self._parent.ask(lambda number: DeleteResponse(number, name, tenant)))
