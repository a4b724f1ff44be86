"""What the first rank and the others say to each other.

What lives here: the schema of the messages, and how plans are packed. What may not: sockets, processes, what a message
does.

Start: a rank's standard input is a socket to the first one's process, whose first message is a Begin: it imports what a
rank needs, as the first one does meanwhile. With its Launch it says Here when it has a device, is told where to Meet,
loads together with the others, and says Ready. From then on every call of the first rank's executor comes as a message,
in order. Beats come all the while. No socket of one host has a name: nobody else can come in. How other hosts do is
told in rendezvous.py; a node's own process says Beat and Failed, and is told Close or Failed.
"""

from __future__ import annotations

from array import array
from dataclasses import fields
from operator import attrgetter

from headrace.config import EngineConfig
from headrace.engine.executor import DropAdapter, LoadAdapter, Sleep, Wake
from headrace.processes.messages import Frame, fields_frame, pack
from headrace.request import StepPlan, StepResult

_NAMES = tuple(each.name for each in fields(StepPlan))
_KEPT = tuple(
    map(_NAMES.index, ("rows", "counts", "sample_work", "sample_rows"))
)  # often the arrays of the plan before
_NOTHING = array("i")
_values = attrgetter(*_NAMES)
Fields = fields_frame(StepPlan)


class Hello(Frame):
    """What each end of a connection between hosts says first, and unsealed: never to be changed."""

    version: str
    nonce: bytes


class Join(Frame):
    """Who knocks: a node, with what must be as it is on node 0; or one of its ranks, with its address."""

    node: int
    rank: int = -1
    address: str = ""
    versions: dict[str, str] | None = None
    model: str = ""
    config: EngineConfig | None = None


class Welcome(Frame):
    pass


class Refused(Frame):
    message: str


class Begin(Frame):
    """``mark``: as a head start on a GPU has it; empty on a CPU."""

    mark: str


class Launch(Frame):
    """``config`` is resolved."""

    config: EngineConfig
    rank: int


class Rendezvous(Frame):
    """``ids``: NCCL's of groups (device.py); none for CPUs. ``addresses``: of each rank, on the interface that they meet
    over. ``key``: by which members of a group know each other."""

    ids: tuple[bytes, ...]
    addresses: tuple[str, ...]
    key: bytes


class Put(Frame):
    """What a rank has set in the store by which CPUs find each other; sent on to all."""

    name: str
    value: bytes


class Submit(Frame):
    """``kept``: arrays of the plan that are those of the one before, and not sent again: a bit for each of
    ``_KEPT``."""

    plan: Fields  # type: ignore[valid-type]
    kept: int


class Sample(Frame):
    step_id: int
    samples: tuple[int, ...]
    words_each: int
    words: bytes


class Collect(Frame):
    step_id: int


class Recover(Frame):
    pass


class Prepare(Frame):
    pass


class Control(Frame):
    """One of these."""

    load: LoadAdapter | None = None
    drop: DropAdapter | None = None
    sleep: Sleep | None = None
    wake: Wake | None = None


class Close(Frame):
    pass


class Gone(Frame):
    """A rank that the others go on without. ``members``: who is left, for the so manieth time. ``id``: NCCL's, of their
    group."""

    epoch: int
    members: tuple[int, ...]
    id: bytes = b""


Order = Put | Submit | Sample | Collect | Recover | Prepare | Control | Close | Gone


class Here(Frame):
    """``device``: what it computes on, by name."""

    device: str


class Ready(Frame):
    pass


class Beat(Frame):
    """``comm_ops``: of its groups so far."""

    comm_ops: int = 0


class StepBroke(Frame):
    step_id: int
    message: str


class Result(Frame):
    """Of a step, from the last stage of a pipeline."""

    result: StepResult


class Seen(Frame):
    """``mark``: of the adapter's files on a rank's own host (``files_mark``)."""

    name: str
    mark: str


class Recovered(Frame):
    """``comm_ops``: of the group so far. ``failed``: steps since the last time."""

    comm_ops: int
    failed: tuple[int, ...]


class Failed(Frame):
    """It ends. ``kind`` is the class name of a HeadraceError, or "" for a defect of ours."""

    kind: str
    message: str


Report = Here | Put | Ready | Beat | StepBroke | Result | Seen | Recovered | Failed


class PlanPacker:
    """Plans into messages; those of equal rows have equal arrays, to look at which once is enough."""

    def __init__(self) -> None:
        self._last = _values(StepPlan(-1))

    def pack(self, plan: StepPlan) -> bytes:
        last, self._last = self._last, _values(plan)
        sent, kept = list(self._last), 0
        for bit, at in enumerate(_KEPT):
            if sent[at] is last[at]:
                sent[at], kept = _NOTHING, kept | 1 << bit
        return pack(Submit(Fields(*sent), kept))


class PlanUnpacker:
    def __init__(self) -> None:
        self._last = _values(StepPlan(-1))

    def unpack(self, message: Submit) -> StepPlan:
        found = list(_values(message.plan))
        for bit, at in enumerate(_KEPT):
            if message.kept >> bit & 1:
                found[at] = self._last[at]
        self._last = tuple(found)
        return StepPlan(*found)
