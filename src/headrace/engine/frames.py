"""What the engine's process (process.py) and its front ends say to each other.

What lives here: the schema of the messages, and how steps are packed into them.
What may not: the process's loop (loop.py), the front end's side (client.py), text.

Start: the process's standard input is a socket to its parent, whose first message is a Launch; it loads, and answers
Started or StartFailed. From then on commands come one way, one Step a step goes the other. Further front ends join by
an Attach of the parent, which hands over a socket to each; a step's outputs go to whoever asked for them, one Step
each. A request's id says who that is. No socket has a name: nobody else can come in.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec

from headrace.config import EngineConfig
from headrace.engine.info import EngineInfo
from headrace.processes.messages import Frame, Question, Reply, pack
from headrace.request import Request, SequenceOutput, Singles, TokenOutputs, column_of

MAX_ASKED = 64  # requests that one question may be about
SERIAL_SHIFT = 40  # a request's id: which front end's (the parent's is 0), then its own count


class Launch(Frame):
    """``door``: the inherited socket over which the parent hands further ones. ``replica``: which of several."""

    config: EngineConfig
    door: int
    replica: int = 0


class Started(Frame):
    info: EngineInfo


class StartFailed(Frame):
    """``kind`` is the class name of a HeadraceError, or "" for a defect of ours."""

    kind: str
    message: str


class Beat(Frame):
    """The loop's stamps: ``phase`` is "load", "idle", "host", "send" or "device"; how long it has lasted at turn
    ``turn``; and how long is too long (0: no limit)."""

    turn: int
    phase: str
    seconds: float
    limit: float


class Asleep(Frame):
    """Requests that come from now on wait until the engine is awake, or they do so no more: ``level`` 0."""

    level: int


class Died(Frame):
    message: str


class Step(Frame):
    """What a step brought: one token for each of many sequences in columns (int64 request ids, the rest int32, as raw
    bytes), then ``rows``.

    ``indexes`` is empty when all are 0: the usual step is two columns.
    """

    request_ids: bytes = b""
    indexes: bytes = b""
    token_ids: bytes = b""
    rows: tuple[SequenceOutput, ...] = ()


class Abort(Frame):
    request_id: int


class Finish(Frame):
    request_id: int
    index: int
    num_tokens: int


class AskStats(Question):
    """The engine's gauges and counters."""


class AskRecent(Question):
    """The same, and what happened since: steps and decisions with numbers above these."""

    step: int
    decision: int


class AskRequests(Question):
    """Where these requests stand (at most MAX_ASKED); the answer has "requests", None for those that are not there."""

    request_ids: Annotated[list[int], msgspec.Meta(max_length=MAX_ASKED)]


class ForgetPrefixes(Question):
    """Requests that begin later reuse nothing computed so far; the answer comes once that is so."""


class AskAdapters(Question):
    """The answer has "names"."""


class LoadAdapter(Question):
    """The answer comes once it is in host memory; it has "error" where that cannot be."""

    name: str
    folder: str


class UnloadAdapter(Question):
    """Requests that have it go on. The answer has "error" for an unknown one."""

    name: str


class Sleep(Question):
    """The answer comes once those that run have ended and the device sleeps; it has "error" where that cannot be."""

    level: Literal[1, 2]


class Wake(Question):
    """The answer comes once it is awake; it has "error" where that cannot be."""


class Attach(Frame):
    """From the parent: the next socket at the door is another front end's; ``serial``, which none has had before,
    begins its requests' ids."""

    serial: Annotated[int, msgspec.Meta(gt=0, lt=1 << 22)]


class Shutdown(Frame):
    pass


GuestCommand = (  # what any front end may say
    Request
    | Abort
    | Finish
    | AskStats
    | AskRecent
    | AskRequests
    | ForgetPrefixes
    | AskAdapters
    | LoadAdapter
    | UnloadAdapter
    | Sleep
    | Wake
)
Command = GuestCommand | Attach | Shutdown  # ... and what the parent may
Event = Started | StartFailed | Beat | Asleep | Died | Reply | Step


def plain(record: Any) -> dict[str, Any]:
    """A dataclass as a dict, all the way down. (``asdict`` leaves a tuple for the interpreter to keep each time, up to
    2000 of each length.)"""
    found: dict[str, Any] = msgspec.to_builtins(record)
    return found


def pack_step(outputs: Sequence[SequenceOutput]) -> bytes:
    """One frame for everything a step produced."""
    if not isinstance(outputs, TokenOutputs):
        return pack(Step(rows=tuple(outputs)))
    indexes = array("i", outputs.indices).tobytes() if any(outputs.indices) else b""
    return pack(
        Step(array("q", outputs.request_ids).tobytes(), indexes, array("i", column_of(outputs.tokens)).tobytes())
    )


def unpack_step(frame: Step) -> Sequence[SequenceOutput]:
    """The rows of a step, in its order."""
    if not frame.request_ids:
        return frame.rows
    request_ids, tokens = _column("q", frame.request_ids), _column("i", frame.token_ids)
    return TokenOutputs(
        request_ids, _column("i", frame.indexes) if frame.indexes else bytes(len(tokens)), Singles(tokens)
    )


def _column(typecode: Literal["q", "i"], data: bytes) -> list[int]:
    return memoryview(data).cast(typecode).tolist()
