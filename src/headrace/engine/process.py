"""The engine in a process of its own, ``python -m headrace.engine.process``: what it says and hears.

What lives here: the frames of the socket (a fixed schema in msgpack) and their packing.
What may not: the process's loop (loop.py), the front end's side (client.py), text, anything pickled.

Start: the parent writes one Launch frame to stdin (config, socket path, secret); the process connects, proves itself with the
secret, loads, answers Started or StartFailed. From then on commands come one way, one Step frame a step goes the other.
Further front ends join by an Attach frame of the parent: the process connects to each as it did to the parent, and a step's
outputs go to whoever asked for them, one frame each. A request's id says who that is.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Iterator
from typing import Annotated, Any

import msgspec

from headrace.config import EngineConfig
from headrace.engine.info import EngineInfo
from headrace.request import Finished, Request, SequenceOutput, TokenLogprobs, TokenOutputs, column_of
from headrace.sampling_params import NO_EXPECTATIONS, Expectations, SamplingParams

HEADER = struct.Struct("<I")  # a frame = its length in bytes, then msgpack
MAX_ASKED = 64  # requests that one question may be about
MAX_FRAME = 256 * 2**20  # bytes; a peer that announces more is cut off
SERIAL_SHIFT = 40  # a request's id: which front end's (the parent's is 0), then its own count


class Frame(msgspec.Struct, array_like=True, tag=True):
    """What goes over the socket: positional, tagged by its class name."""


class Launch(Frame):
    config: EngineConfig
    address: str
    secret: bytes


class Hello(Frame):
    """Engine → front end, the first frame: only who was started by this parent knows the secret."""

    secret: bytes


class Started(Frame):
    info: EngineInfo


class StartFailed(Frame):
    """``kind`` is the class name of a HeadraceError, or "" for a defect of ours."""

    kind: str
    message: str


class Beat(Frame):
    """The loop's stamps: ``phase`` is "load", "idle", "host", "send" or "device"; how long it has lasted at turn ``turn``;
    and how long is too long (0: no limit)."""

    turn: int
    phase: str
    seconds: float
    limit: float


class Died(Frame):
    message: str


class StatsReply(Frame):
    number: int
    stats: dict[str, Any]


class LogprobColumns(Frame):
    """Logprobs of several positions, flat. int32 and float64 as raw bytes."""

    counts: bytes
    ranks: bytes
    token_ids: bytes
    logprobs: bytes


class Extra(Frame):
    """What few rows of a step have, for row ``row`` of the frame."""

    row: int
    finished: Finished | None = None
    num_cached_tokens: int | None = None
    logprobs: LogprobColumns | None = None
    prompt_logprobs: LogprobColumns | None = None
    first_scheduled: float | None = None


class Step(Frame):
    """All rows' new tokens in columns: int64 request ids, the rest int32, as raw bytes.

    ``indexes`` is empty when all are 0, ``counts`` when all are 1: the usual step is two columns.
    """

    request_ids: bytes
    indexes: bytes
    counts: bytes
    token_ids: bytes
    extras: list[Extra]


class Add(Frame):
    request_id: int
    prompt: bytes  # int32 token ids
    params: SamplingParams
    seed: int
    priority: int
    arrival_time: float
    cache_salt: str
    adapter: str | None
    bad_word_ids: tuple[tuple[int, ...], ...]
    explain: bool = False
    tenant: str = ""
    expects: Expectations = NO_EXPECTATIONS


class Abort(Frame):
    request_id: int


class Finish(Frame):
    request_id: int
    index: int
    num_tokens: int


class AskStats(Frame):
    number: int


class AskRecent(Frame):
    """The same, and what happened since: steps and decisions with numbers above these."""

    number: int
    step: int
    decision: int


class AskRequests(Frame):
    """Where these requests stand (at most MAX_ASKED); the answer is a StatsReply with "requests", None for those that are not there."""

    number: int
    request_ids: Annotated[list[int], msgspec.Meta(max_length=MAX_ASKED)]


class ForgetPrefixes(Frame):
    """Requests that begin later reuse nothing computed so far; the answer is an empty StatsReply, once that is so."""

    number: int


class Attach(Frame):
    """From the parent: another front end listens at ``address``; ``serial``, which none has had before, begins its requests' ids."""

    address: str
    secret: bytes
    serial: Annotated[int, msgspec.Meta(gt=0, lt=1 << 22)]


class Shutdown(Frame):
    pass


GuestCommand = Add | Abort | Finish | AskStats | AskRecent | AskRequests | ForgetPrefixes  # what any front end may say
Command = GuestCommand | Attach | Shutdown  # ... and what the parent may
Event = Hello | Started | StartFailed | Beat | Died | StatsReply | Step

_encoder = msgspec.msgpack.Encoder()


def plain(record: Any) -> dict[str, Any]:
    """A dataclass as a dict, all the way down. (``asdict`` leaves a tuple for the interpreter to keep each time, up to 2000 of each length.)"""
    found: dict[str, Any] = msgspec.to_builtins(record)
    return found


def pack(frame: Frame) -> bytes:
    """A frame as it goes over the socket."""
    body = _encoder.encode(frame)
    return HEADER.pack(len(body)) + body


class BadFrame(Exception):
    """The peer sent something outside the schema."""


class Unpacker:
    """Bytes in, frames out. Raises BadFrame."""

    def __init__(self, kinds: Any, max_frame: int = MAX_FRAME) -> None:
        self._decoder = msgspec.msgpack.Decoder(kinds)
        self._buffer = bytearray()
        self.max_frame = max_frame

    def feed(self, data: bytes | memoryview) -> Iterator[Any]:
        buffer = self._buffer
        buffer += data
        start = 0
        try:
            while len(buffer) - start >= HEADER.size:
                (size,) = HEADER.unpack_from(buffer, start)
                if size > self.max_frame:
                    raise BadFrame(f"a frame of {size} bytes is over the limit of {self.max_frame}")
                if len(buffer) - start < HEADER.size + size:
                    break
                start += HEADER.size + size
                yield self._decoded(bytes(buffer[start - size : start]))
        finally:
            del buffer[:start]

    def _decoded(self, body: bytes) -> Any:
        try:
            return self._decoder.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise BadFrame(str(error)) from error


def pack_request(request: Request) -> bytes:
    return pack(
        Add(
            request.request_id,
            request.prompt_token_ids.tobytes(),
            request.params,
            request.seed,
            request.priority,
            request.arrival_time,
            request.cache_salt,
            request.adapter,
            request.bad_word_ids,
            request.explain,
            request.tenant,
            request.expects,
        )
    )


def unpack_request(frame: Add) -> Request:
    return Request(
        request_id=frame.request_id,
        prompt_token_ids=_column("i", frame.prompt),
        params=frame.params,
        seed=frame.seed,
        priority=frame.priority,
        arrival_time=frame.arrival_time,
        cache_salt=frame.cache_salt,
        adapter=frame.adapter,
        bad_word_ids=frame.bad_word_ids,
        explain=frame.explain,
        tenant=frame.tenant,
        expects=frame.expects,
    )


def pack_step(outputs: Iterable[SequenceOutput]) -> bytes:
    """One frame for everything a step produced."""
    if isinstance(outputs, TokenOutputs):
        indices = array("i", outputs.indices).tobytes() if any(outputs.indices) else b""
        token_ids = array("i", column_of(outputs.tokens)).tobytes()
        return pack(Step(array("q", outputs.request_ids).tobytes(), indices, b"", token_ids, []))
    request_ids, indexes, counts, ids_of_all = array("q"), array("i"), array("i"), array("i")
    extras: list[Extra] = []
    for row, (request_id, index, ids, logprobs, prompt_logprobs, num_cached, finished, scheduled) in enumerate(outputs):
        request_ids.append(request_id)
        indexes.append(index)
        counts.append(len(ids))
        ids_of_all.extend(ids)
        if finished is not None or logprobs or prompt_logprobs or num_cached is not None or scheduled is not None:
            extras.append(Extra(row, finished, num_cached, _logprob_columns(logprobs), _logprob_columns(prompt_logprobs), scheduled))
    return pack(
        Step(
            request_ids.tobytes(),
            indexes.tobytes() if any(indexes) else b"",
            b"" if counts.count(1) == len(counts) else counts.tobytes(),
            ids_of_all.tobytes(),
            extras,
        )
    )


def unpack_step(frame: Step) -> Iterator[SequenceOutput]:
    """The rows of a step, in its order."""
    request_ids, token_ids = _column("q", frame.request_ids), _column("i", frame.token_ids)
    rows = len(request_ids)
    indexes = _column("i", frame.indexes) if frame.indexes else array("i", bytes(4 * rows))
    counts = _column("i", frame.counts) if frame.counts else array("i", [1]) * rows
    extras = {extra.row: extra for extra in frame.extras}
    start = 0
    for row, (request_id, index, count) in enumerate(zip(request_ids, indexes, counts, strict=True)):
        ids = tuple(token_ids[start : start + count])
        start += count
        extra = extras.get(row) if extras else None
        if extra is None:
            yield SequenceOutput(request_id, index, ids)
        else:
            scores, prompt_scores = _logprob_entries(extra.logprobs), _logprob_entries(extra.prompt_logprobs)
            yield SequenceOutput(request_id, index, ids, scores, prompt_scores, extra.num_cached_tokens, extra.finished, extra.first_scheduled)


def _column(typecode: str, data: bytes) -> array[int]:
    column: array[int] = array(typecode)
    column.frombytes(data)
    return column


def _logprob_columns(entries: tuple[TokenLogprobs, ...]) -> LogprobColumns | None:
    if not entries:
        return None
    counts = array("i", [len(entry.token_ids) for entry in entries])
    ranks = array("i", [entry.rank for entry in entries])
    token_ids = array("i", [i for entry in entries for i in entry.token_ids])
    logprobs = array("d", [value for entry in entries for value in entry.logprobs])
    return LogprobColumns(counts.tobytes(), ranks.tobytes(), token_ids.tobytes(), logprobs.tobytes())


def _logprob_entries(columns: LogprobColumns | None) -> tuple[TokenLogprobs, ...]:
    if columns is None:
        return ()
    token_ids, values = _column("i", columns.token_ids), array("d")
    values.frombytes(columns.logprobs)
    entries, start = [], 0
    for count, rank in zip(_column("i", columns.counts), _column("i", columns.ranks), strict=True):
        entries.append(TokenLogprobs(tuple(token_ids[start : start + count]), tuple(values[start : start + count]), rank))
        start += count
    return tuple(entries)


if __name__ == "__main__":
    from headrace.engine.loop import main

    main()
